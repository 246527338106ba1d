"""The tables of docs/pipelines.md, from what was recorded and from the families: ``python -m tests.pipelines_page``."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.test_clients import DATA
from vlm_batch import families

PAGE = Path(__file__).parent.parent / "docs" / "pipelines.md"
CLIENTS_HEAD = "The requests were recorded from "
#: In a client's name: the files of its source from which its requests are written.
SOURCE = re.compile(r" \(from [^)]*\)")
TOKENS_HEAD = "| family | token |\n|---|---|\n"


def clients() -> str:
    files = sorted(DATA.glob("*.json"))
    names = [json.loads(file.read_text(encoding="utf-8"))["client"] for file in files]
    recorded = ", ".join(name for name in names if not SOURCE.search(name))
    written = " and ".join(
        SOURCE.sub("", name) for name in names if SOURCE.search(name)
    )
    return (
        f"{CLIENTS_HEAD}{recorded}. Those of {written} were written from its source.\n"
    )


def tokens() -> str:
    rows = [
        f"| {spec.family} | `{_cell(word)}` |"
        for spec in families()
        for word, _ in spec.special_tokens
    ]
    return TOKENS_HEAD + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def tables(page: str) -> str:
    """Return the page with its tables made anew."""
    for head, table in ((CLIENTS_HEAD, clients()), (TOKENS_HEAD, tokens())):
        before, rest = page.split(head)
        end = rest.find("\n\n")
        page = before + table + (rest[end + 1 :] if end >= 0 else "")
    return page


if __name__ == "__main__":
    PAGE.write_text(tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
