"""The parity matrix as a Markdown table: ``python tests/parity_table.py docs/parity.json docs/parity.md``.

The JSON is what ``pytest --parity-json FILE`` writes: a list of {"family", "scenario", "outcome", "difference"}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN = "<!-- parity table: written by scripts/parity_table -->"
END = "<!-- end of parity table -->"


def render(records: Sequence[Mapping[str, Any]]) -> str:
    """Scenarios down, families across; each cell the largest difference of log-probabilities, or the outcome."""
    families = sorted({record["family"] for record in records})
    scenarios = list(dict.fromkeys(record["scenario"] for record in records))
    cells = {(record["scenario"], record["family"]): _cell(record) for record in records}
    lines = ["| | " + " | ".join(families) + " |", "|---" * (len(families) + 1) + "|"]
    for scenario in scenarios:
        lines.append("| " + " | ".join([scenario, *(cells.get((scenario, family), "") for family in families)]) + " |")
    return "\n".join(lines)


def insert(page: str, table: str) -> str:
    """The page with the table between its two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _cell(record: Mapping[str, Any]) -> str:
    if record["outcome"] != "passed":
        return f"**{record['outcome']}**"
    difference = record.get("difference")
    return "ok" if difference is None else f"{difference:.0e}"


def main(records: Path, page: Path) -> None:
    table = render(json.loads(records.read_text(encoding="utf-8")))
    page.write_text(insert(page.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
