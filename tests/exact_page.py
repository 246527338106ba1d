"""The table of docs/exactness.md from ``vlm_batch/data/exact.json``: ``python -m tests.exact_page``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.exact_cases import PRECISIONS
from tests.exact_table import DATA

PAGE = Path(__file__).parent.parent / "docs/exactness.md"
BEGIN, END = "<!-- table: written by scripts/exact_table -->", "<!-- end of table -->"


def table(record: Mapping[str, Any]) -> str:
    """A line for each device and precision, and what is not the same or cannot be run, by name."""
    head = "| device | precision | models, the same to the last bit | cannot be run there, alone either | differ |"
    lines = [head, "|---|---|---|---|---|"]
    for device, found in sorted(record.items()):
        for precision in PRECISIONS:
            cells = {name: one[precision] for name, one in found["cells"].items() if precision in one}
            if not cells:
                continue
            same = sum(one["same"] for one in cells.values())
            partly = [one for one in cells.values() if one["same"] and "left out" in one]
            some_of = f", {len(partly)} of them in some scenarios only" if partly else ""
            unserved = sorted(name for name, one in cells.items() if "not served" in one.get("said", {}))
            differ = sorted(name for name, one in cells.items() if not one["same"] and name not in unserved)
            names = [", ".join(some) or "-" for some in (unserved, differ)]
            lines.append(f"| {device} | {precision} | {same} of {len(cells)}{some_of} | {' | '.join(names)} |")
        named = ", ".join(
            f"{name} {value}" for name, value in {**found["device"], **found["versions"]}.items() if value
        )
        lines.append(f"| | | {named} | | |")
    return "\n".join(lines)


def main() -> None:
    """Put the table in the place of the old one."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    shown = table(json.loads(DATA.read_text(encoding="utf-8")))
    PAGE.write_text(f"{before}{BEGIN}\n{shown}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
