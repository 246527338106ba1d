"""The parity matrix as a table: ``python -m tests.parity_table LOG`` writes docs/parity.json and the table of docs/parity.md.

LOG holds one JSON line for each cell that passed, as the tests write them where ``VLM_BATCH_PARITY_LOG`` names a file:
{"family", "scenario", "placement", "difference"}, or {"family", "scenario", "why"} where one does not apply.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlm_batch.registry import ModelSpec, families

DOCS = Path(__file__).parent.parent / "docs"
BEGIN = "<!-- parity table: written by scripts/parity_table -->"
END = "<!-- end of parity table -->"
FAILED = "**failed**"
TWO_IMAGES = "two_images_in_a_row"
#: What is kept for later requests, and keys and values in few bits: a table of their own.
CACHES = (
    "continued_cache",
    "prefix_hits",
    "prefix_two_images",
    "prefix_from_disk",
    "kv_8_bits",
    "kv_8_bits_continued",
    "kv_turboquant",
)

Record = dict[str, Any]


def summary(lines: Sequence[str]) -> list[Record]:
    """The largest difference of each family and scenario over all placements, or why there is none, by name."""
    largest: dict[tuple[str, str], float] = {}
    reasons: dict[tuple[str, str], str] = {}
    for line in lines:
        cell = json.loads(line)
        key = (cell["scenario"], cell["family"])
        if "why" in cell:
            reasons[key] = cell["why"]
        else:
            largest[key] = max(cell["difference"], largest.get(key, 0.0))
    found: dict[tuple[str, str], Record] = {key: {"why": why} for key, why in reasons.items()}
    found |= {key: {"difference": float(f"{number:.1e}")} for key, number in largest.items()}
    return [{"scenario": scenario, "family": family, **cell} for (scenario, family), cell in sorted(found.items())]


def read(path: Path) -> list[Record]:
    found: list[Record] = json.loads(path.read_text(encoding="utf-8"))
    return found


def render(records: Sequence[Record], specs: Sequence[ModelSpec]) -> str:
    """Two tables, of answers and of caches, each with families down and numbered scenarios across; then gaps and mends.

    A cell is the largest difference of log-probabilities, or why there is none. A family whose models differ has a row for each
    of them, called by the family's name and more.
    """
    kept = [record for record in records if record["scenario"] in CACHES]
    lines = _table([record for record in records if record["scenario"] not in CACHES], specs)
    if kept:
        lines += ["", "What is kept for later requests, and keys and values in few bits ([caches](caches.md)):", ""]
        lines += _table(kept, specs)
    gaps = [f"- {spec.family}, {scenario}: {why}" for spec in specs for scenario, why in spec.known_gaps]
    notes = [f"- {spec.family}: {note}" for spec in specs for note in spec.notes]
    if gaps:
        lines += ["", "Known gaps, expected to fail until they are closed:", "", *gaps]
    if notes:
        lines += ["", "What the adapters mend in mlx-vlm:", "", *notes]
    return "\n".join(lines)


def _table(records: Sequence[Record], specs: Sequence[ModelSpec]) -> list[str]:
    scenarios = sorted({record["scenario"] for record in records})
    reasons = sorted({record["why"] for record in records if "why" in record})
    letters = {why: f"({_letter(index)})" for index, why in enumerate(reasons)}
    cells = {
        (r["scenario"], r["family"]): letters[r["why"]] if "why" in r else _number(r["difference"]) for r in records
    }
    models = {record["family"] for record in records}
    numbers = [str(number) for number in range(1, len(scenarios) + 1)]
    lines = ["| | " + " | ".join(numbers) + " |", "|---" * (len(scenarios) + 1) + "|"]
    for spec in specs:
        no_cell = dict.fromkeys((scenario for scenario, _ in spec.known_gaps), "gap")
        if not spec.multi_image:
            no_cell[TWO_IMAGES] = "one picture only"
        for model in sorted(_models(spec, models, specs)):
            row = [no_cell.get(scenario) or cells.get((scenario, model), FAILED) for scenario in scenarios]
            lines.append("| " + " | ".join([model, *row]) + " |")
    named = [f"{number}. {scenario.replace('_', ' ')}" for number, scenario in zip(numbers, scenarios, strict=True)]
    lines += ["", "The scenarios:", "", *named]
    if reasons:
        lines += ["", "Where there is no number:", "", *[f"- {letters[why]} {why}" for why in reasons]]
    return lines


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else _letter(index // 26 - 1) + _letter(index % 26)


def _models(spec: ModelSpec, models: set[str], specs: Sequence[ModelSpec]) -> set[str]:
    """The tested models of a family: its own name, or that with something behind it that is no other family's."""
    others = {other.family for other in specs} - {spec.family}
    return {m for m in models if m.startswith(f"{spec.family}_") and m not in others} | {spec.family} & models or {
        spec.family
    }


def _number(difference: float) -> str:
    return f"{difference:.0e}".replace("e-0", "e-") if difference else "0"


def insert(page: str, table: str) -> str:
    """The page with the table between its two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main(log: Path) -> None:
    records = summary(log.read_text(encoding="utf-8").splitlines())
    (DOCS / "parity.json").write_text(
        "[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n", encoding="utf-8"
    )
    page = DOCS / "parity.md"
    page.write_text(insert(page.read_text(encoding="utf-8"), render(records, families())), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
