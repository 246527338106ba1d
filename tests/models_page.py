"""docs/models.md from the package's facts: ``python -m tests.models_page [LOG]``.

LOG, if given, is the matrix's new outcome, and goes into ``vlm_batch/data/parity.json`` first: a model's cells are those of
its last run. It holds one JSON line for each cell that passed, as the tests write them where ``VLM_BATCH_PARITY_LOG`` names a
file: {"family", "scenario", "placement", "difference"}, or {"family", "scenario", "why"} where one does not apply.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.harness import TOLERANCE
from tests.zoo import FAMILIES
from vlm_batch.cli import facts
from vlm_batch.cli.facts import FamilyFacts
from vlm_batch.models import families
from vlm_batch.registry import ModelSpec

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/models.md"
RECORD = ROOT / "vlm_batch/data/parity.json"
EXACT = ROOT / "vlm_batch/data/exact.json"
#: What a GPU said before the present build; for what was not run since.
FIRST_GPU = "gpu, H100, before calls of one shape"
#: As they are called in EXACT, and on the page.
PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "8 bits": "8", "4 bits": "4"}

HEAD = """# Models

The families that are batched: their abilities, the verified scenarios, and the outcome of the same scenarios in
mlx-vlm's own batch generator. `vlm-batch families` prints a summary of these facts, and `vlm-batch families --json` all
of them. `scripts/parity_table` writes this page.

"""

VERIFIED = """## How it is verified

A scenario is a set of requests, with the step at which each comes and goes. The tests run it on a tiny random model of
the family, made of mlx-vlm's own classes, in float32 on a CPU. They compare every request with the same request alone.
All tokens must be equal, and at every step no log-probability of the whole vocabulary may differ by more than
{tolerance:g}. "Off by" is the largest difference seen, over both layouts of the decode state (own caches and slabs). It
is rounding. A wrong position, mask or picture moves log-probabilities by more than 1e-2; `tests/test_mutations.py`
shows that by breaking each on purpose. Recorded with mlx-vlm {mlx_vlm}.

On one H200 (CUDA, float32 without TF32) 140 cases of the first nine families and two relatives passed, slabs, own
caches and compiled decode steps among them. The largest difference was 5e-5.

"Alone" is mlx-vlm's own path for one request. Where that path is itself wrong, it is patched as [the notes](#notes) say. The
evidence stands beside each oracle in `tests/zoo/`, and [each defect of mlx-vlm](upstream.md) has a reproduction.

The scenarios: {scenarios}.

"Same bits" are the precisions in which a reproducible engine gave every request, to the last bit of all its logits, what it
gives the request alone, on a CPU and on a GPU (an H200, or an H100 with an earlier build where that was not run): f32, bf16
and f16 are types, 8 and 4 are bits of bfloat16 models. What is missing cannot be run there, was not run, or differs:
[exactness](exactness.md) says which.
"""

UPSTREAM = """## The same scenarios in mlx-vlm

Each cell has the outcome in mlx-vlm {version}'s batch generator, and the largest difference in this library. "Wrong,
1e-5" means other tokens or log-probabilities there, and 1e-5 here. "Right" compares with mlx-vlm's own answer alone.
Where that differs from the published model, the adapter patches it. Source: {source}.

"""


def summary(lines: Sequence[str]) -> dict[str, Any]:
    """The record of a run: for each model and scenario the largest difference over all placements, or why there is none."""
    models: dict[str, dict[str, float | str]] = {}
    for line in lines:
        cell = json.loads(line)
        cells = models.setdefault(cell["family"], {})
        before = cells.get(cell["scenario"])
        if "why" in cell:
            cells.setdefault(cell["scenario"], cell["why"])
        else:
            largest = max(cell["difference"], before if isinstance(before, float) else 0.0)
            cells[cell["scenario"]] = float(f"{largest:.1e}")
    return {"mlx_vlm": version("mlx-vlm"), "tolerance": TOLERANCE, "models": models}


def as_text(record: Mapping[str, Any]) -> str:
    """The record as JSON with a line for each model, so that changes are seen."""
    models = [
        f"{json.dumps(name)}: {json.dumps(dict(sorted(cells.items())))}"
        for name, cells in sorted(record["models"].items())
    ]
    head = [f"{json.dumps(key)}: {json.dumps(record[key])}," for key in sorted(record.keys() - {"models"})]
    return "\n".join(["{", *head, '"models": {', ",\n".join(models), "}", "}"]) + "\n"


def render(known: Sequence[FamilyFacts], record: Mapping[str, Any]) -> str:
    """The page."""
    scenarios = ", ".join(name.replace("_", " ") for name in known[0].scenarios)
    said = {"mlx_vlm": record["mlx_vlm"], "tolerance": record["tolerance"], "scenarios": scenarios}
    upstream = UPSTREAM.format(version=facts.upstream()["version"], source=facts.upstream()["source"])
    parts = [
        HEAD + _abilities(known),
        VERIFIED.format(**said),
        upstream + _beside_upstream(known),
        _notes(known),
        _others(),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _abilities(known: Sequence[FamilyFacts]) -> str:
    columns = (
        "family",
        "model types",
        "pictures",
        "video",
        "prefill",
        "prefix reuse",
        "8-bit KV",
        "verified",
        "off by",
        "same bits: CPU",
        "CUDA",
        "mlx-vlm",
    )
    exact = json.loads(EXACT.read_text(encoding="utf-8"))
    rows = []
    for one in known:
        spec = one.spec
        types = [f"`{name}`" for name in spec.model_types]
        kept = (_short(one.cell(name)) for name in (facts.PREFIX_REUSE, facts.QUANTISED_KV))
        video, prefill = "yes" if spec.video else "no", "chunks" if spec.chunked_prefill else "whole"
        off = "" if one.largest is None else _number(one.largest)
        bits = [_same_bits(one, _cells(exact, *devices)) for devices in (("cpu",), (FIRST_GPU, "gpu"))]
        said = (one.pictures, video, prefill, *kept, len(one.verified), off, *bits, one.upstream)
        rows.append((spec.family, ", ".join(types), *said))
    return _table(columns, rows)


def _cells(record: Mapping[str, Any], *devices: str) -> dict[str, dict[str, Any]]:
    """A model's cells by precision: those of the last device that has them."""
    found: dict[str, dict[str, Any]] = {}
    for device in devices:
        for name, cells in record[device]["cells"].items():
            found.setdefault(name, {}).update(cells)
    return found


def _same_bits(one: FamilyFacts, cells: Mapping[str, Any]) -> str:
    """The precisions in which all of a family's models were the same to the last bit."""
    found = [cells.get(name, {}) for name in one.models]
    same = [
        short for name, short in PRECISIONS.items() if all(name in model and model[name]["same"] for model in found)
    ]
    return " ".join(same) or "-"


def _beside_upstream(known: Sequence[FamilyFacts]) -> str:
    """A row for each tested model that mlx-vlm was measured with, or that has a scenario recorded here."""
    there = facts.upstream()
    rows = []
    for one in known:
        for name in one.models or {one.spec.family: {}}:
            measured = there["models"].get(name, {})
            alone = FamilyFacts(one.spec, {name: one.models.get(name, {})}, one.scenarios)
            cells = []
            for scenario, ours in there["scenarios"].items():
                here = alone.cell(*ours)
                cells.append(f"{measured.get(scenario, '-')}, {_number(here) if isinstance(here, float) else '-'}")
            rows.append((name, *cells))
    return _table(("model", *there["scenarios"]), rows)


def _notes(known: Sequence[FamilyFacts]) -> str:
    lines = ["## Notes", "", "What the adapters patch in mlx-vlm, and further facts about each family:", ""]
    for one in known:
        not_verified = (
            [] if one.spec.video or one.spec.no_video == ModelSpec.no_video else [f"no video: {one.spec.no_video}"]
        )
        not_verified += [
            f"{name.replace('_', ' ')}: {why}" for name, why in one.explained.items() if why != facts.NOT_RECORDED
        ]
        said = [
            *one.spec.notes,
            *not_verified,
            *(f"refused on CUDA (`{name}`): {why}" for name, why in on_cuda(one.spec)),
        ]
        if said:
            lines += [f"**{one.spec.family}**", "", *(f"- {note}" for note in said), ""]
    return "\n".join(lines)


def on_cuda(spec: ModelSpec) -> list[tuple[str, str]]:
    """(model types, why) of those that are refused on CUDA, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in spec.not_on_cuda:
        reasons.setdefault(why, []).append(name)
    return [("`, `".join(names), why) for why, names in reasons.items()]


def _others() -> str:
    lines = ["## Not batched", "", "Refused when they are loaded:", ""]
    lines += [f"- {why}: {_types(names)}" for why, names in facts.refused().items()]
    lines += [
        "",
        "Refused on CUDA, where they were seen to go wrong (`VLM_BATCH_ON_CUDA=NAME` serves one all the same):",
        "",
    ]
    lines += [f"- `{names}`: {why}" for spec in families() for names, why in on_cuda(spec)]
    lines += ["", "One row at a time, through mlx-vlm's own path, which is said once:", ""]
    lines += [f"- {why}: {_types(names)}" for why, names in facts.one_at_a_time().items()]
    return "\n".join(lines)


def _types(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _short(cell: float | str) -> str:
    return "yes" if isinstance(cell, float) else "" if cell == facts.NOT_RECORDED else "no"


def _number(difference: float) -> str:
    return f"{difference:.0e}".replace("e-0", "e-") if difference else "0"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def main(log: Path | None = None) -> None:
    if log is not None:
        record = summary(log.read_text(encoding="utf-8").splitlines())
        if record["mlx_vlm"] == facts.recorded()["mlx_vlm"]:  # a run of some models leaves the others' records
            kept = {name: cells for name, cells in facts.recorded()["models"].items() if name in FAMILIES}
            record["models"] = {**kept, **record["models"]}
        record["variants"] = {
            name: FAMILIES[name].registered for name in sorted(record["models"]) if FAMILIES[name].registered != name
        }
        RECORD.write_text(as_text(record), encoding="utf-8")
        facts.recorded.cache_clear()
    PAGE.write_text(render(facts.all_facts(), facts.recorded()), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
