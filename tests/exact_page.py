"""The tables of docs/exactness.md and exactness-inside.md from ``vlm_batch/data/exact.json``: python -m tests.exact_page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.exact_cases import PRECISIONS
from tests.exact_table import DATA

PAGES = tuple(
    Path(__file__).parent.parent / "docs" / name
    for name in ("exactness.md", "exactness-inside.md")
)
TABLE = "<!-- table: written by scripts/exact_table -->", "<!-- end of table -->"
SUMMARY = "<!-- summary: written by scripts/exact_table -->", "<!-- end of summary -->"


def table(record: Mapping[str, Any]) -> str:
    """A line for each device and precision, and what is not the same or cannot be run, by name."""
    head = "| device | precision | models, the same to the last bit | with drafts | cannot be run, alone either | differ |"
    lines = [head, "|---|---|---|---|---|---|"]
    for device, found in sorted(record.items()):
        above: list[str] = []
        for precision in PRECISIONS:
            cells = {
                name: one[precision]
                for name, one in found["cells"].items()
                if precision in one
            }
            if not cells:
                continue
            same = sum(one["same"] for one in cells.values())
            partly = [
                one
                for one in cells.values()
                if one["same"] and {*one.get("left out", ())} - {"drafts"}
            ]
            drafted = [
                one for one in cells.values() if "drafts" not in one.get("left out", ())
            ]
            with_drafts = (
                f"{sum(one['same'] for one in drafted)} of {len(drafted)}"
                if drafted
                else "-"
            )
            some_of = (
                f", {len(partly)} of them in some scenarios only" if partly else ""
            )
            unserved = sorted(
                name
                for name, one in cells.items()
                if "not served" in one.get("said", {})
            )
            differ = sorted(
                name
                for name, one in cells.items()
                if not one["same"] and name not in unserved
            )
            is_above = unserved != [] and unserved == above
            above = unserved
            names = [", ".join(some) or "-" for some in (unserved, differ)]
            if is_above:
                names[0] = "as above"
            lines.append(
                f"| {device} | {precision} | {same} of {len(cells)}{some_of} | {with_drafts} | {' | '.join(names)} |"
            )
        named = ", ".join(
            f"{name} {value}"
            for name, value in {**found["device"], **found["versions"]}.items()
            if value
        )
        lines.append(f"| | | {named} | | | |")
    return "\n".join(lines)


def summary(record: Mapping[str, Any]) -> str:
    """A line for each device: how many models are the same in each precision, of those that can be run."""
    lines = [
        f"| device | {' | '.join(PRECISIONS)} |",
        "|---" * (1 + len(PRECISIONS)) + "|",
    ]
    for device, found in sorted(record.items()):
        columns = [
            [one[name] for one in found["cells"].values() if name in one]
            for name in PRECISIONS
        ]
        run = [
            [one for one in cells if "not served" not in one.get("said", {})]
            for cells in columns
        ]
        shown = [
            f"{sum(one['same'] for one in cells)} of {len(cells)}" if cells else ""
            for cells in run
        ]
        lines.append(f"| {device} | {' | '.join(shown)} |")
    return "\n".join(lines)


def render(page: str, record: Mapping[str, Any]) -> str:
    """The page with whichever of the two tables it has as the record has them now."""
    for (begin, end), make in ((TABLE, table), (SUMMARY, summary)):
        if begin in page:
            before, rest = page.split(begin)
            _, after = rest.split(end)
            page = f"{before}{begin}\n{make(record)}\n{end}{after}"
    return page


def main() -> None:
    """Put the tables in the place of the old ones."""
    record = json.loads(DATA.read_text(encoding="utf-8"))
    for page in PAGES:
        page.write_text(
            render(page.read_text(encoding="utf-8"), record), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
