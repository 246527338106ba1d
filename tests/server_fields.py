"""The table of fields in docs/server.md, from the server's own types: ``python -m tests.server_fields`` writes it anew."""

from __future__ import annotations

from pathlib import Path

from vlm_batch.server.openai import REFUSED
from vlm_batch.server.wire import ChatRequest, Common, CompletionRequest

PAGE = Path(__file__).parent.parent / "docs" / "server.md"
HEAD = "| field | `/v1/chat/completions` | `/v1/completions` |\n| --- | --- | --- |\n"


def field_status(model: type[Common]) -> dict[str, str]:
    """Each field of a body, and "honoured", "refused", or "nothing" (refused unless it asks for nothing)."""
    status = dict.fromkeys(model.model_fields, "honoured")
    return status | dict.fromkeys(REFUSED, "refused") | dict.fromkeys(model.nothing, "nothing")


def table() -> str:
    """Every field that is known of, and what becomes of it at each endpoint."""
    chat, text = field_status(ChatRequest), field_status(CompletionRequest)
    rows = [
        f"| `{name}` | {chat.get(name, 'refused')} | {text.get(name, 'refused')} |" for name in sorted({*chat, *text})
    ]
    return HEAD + "\n".join(rows) + "\n"


def write() -> None:
    """Put the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    if "\nFIELDS\n" in page:
        before, after = page.split("FIELDS\n")
    else:
        before, rest = page.split(HEAD)
        after = rest[rest.index("\n\n") + 1 :]
    PAGE.write_text(before + table() + after, encoding="utf-8")


if __name__ == "__main__":
    write()
