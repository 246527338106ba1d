"""docs/models.md and docs/models-details.md from the package's facts: ``python -m tests.models_page [LOG]``.

LOG, if given, is the matrix's new outcome, and goes into ``vlm_batch/data/parity.json`` first: a model's cells are those of
its last run. It holds one JSON line for each cell that passed, as the tests write them where ``VLM_BATCH_PARITY_LOG`` names a
file: {"family", "scenario", "placement", "difference"}, or {"family", "scenario", "why"} where one does not apply.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests import test_drafts, upstream_page
from tests.harness import TOLERANCE
from tests.published_configurations import (
    BY_CLASS,
    BY_DEFAULTS,
    LOADED,
    NEEDS,
    NOT_TRIED,
)
from tests.zoo import FAMILIES
from vlm_batch.cli import facts
from vlm_batch.cli.facts import FamilyFacts
from vlm_batch.models import families
from vlm_batch.registry import ModelSpec

ROOT = Path(__file__).parent.parent
PAGE, DETAILS_PAGE = ROOT / "docs/models.md", ROOT / "docs/models-details.md"
RECORD = ROOT / "vlm_batch/data/parity.json"
EXACT = ROOT / "vlm_batch/data/exact.json"
#: What a GPU said before the present build; for what was not run since.
FIRST_GPU = "gpu, H100, before calls of one shape"
#: As they are called in EXACT, and on the page.
PRECISIONS = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "8 bits": "8-bit",
    "4 bits": "4-bit",
}
#: What ``_reproducible`` says of a family that is so in all precisions on all devices.
EVERYWHERE = "CPU all, GPU all"
#: Precisions that the table shows, and their columns.
SHOWN = {"bfloat16": "exact in bf16", "4 bits": "in 4 bits"}
#: Outcomes of a scenario in mlx-vlm's batch generator.
OUTCOMES = ("right", "wrong", "NaN", "crash")
SECOND = "second picture"
#: Scenario -> what a family lacks that cannot run it.
LIMITS = {
    "prefix_hits": "prefix cache",
    "kv_8_bits": "keys and values in few bits",
    "prefix_from_disk": "prefix cache on disk",
    "prefix_two_images": SECOND,
}
#: Brackets of a note that name files or lines.
PLACES = re.compile(r"\s*\([^()]*(?:\.py\b|:\d+)[^()]*(?:\([^()]*\)[^()]*)*\)")

#: Characters of a line of the table, and of other lines that this module breaks.
LONGEST_ROW, WIDTH = 200, 120

HEAD = """# Models

The {count} families that vlm_batch batches. A family's name leads to its limits and to what differs from mlx-vlm.
`vlm-batch families` lists them, too, and `vlm-batch families NAME` prints all about one (`--json` for programs).

"""

COLUMNS = """- **takes**: media that a request may bring beside text. Others are refused at `submit`, with the reason.
- **exact in bf16, in 4 bits**: devices on which `reproducible=True` was shown to give the request's own bits. An empty
  cell was not shown or does not hold. The [details](models-details.md) have other precisions, and the defects of mlx-vlm
  that are mended.
- **notes**: other values of `model_type`; what the family cannot do. Unless the notes say otherwise, it has drafts (a row
  can check several drafted tokens in one step) and the prefix cache (a request goes on from an earlier one that began
  alike).

"""

VERIFIED = """## How it is verified

A scenario is a set of requests that come and go at given steps. The tests run up to {scenarios} scenarios on a tiny
random model of each family, in float32 on a CPU. They compare each request with the same request alone: every token is
equal, and no log-probability of the whole vocabulary differs by more than {tolerance:g} at any step. Both layouts of keys
and values ([rows and slabs](decode-state.md)) are run. A wrong position, mask or picture moves log-probabilities by
more than 1e-2: `tests/test_mutations.py` breaks each on purpose. Recorded with mlx-vlm {mlx_vlm}. On one H200 (CUDA,
float32 without TF32) 140 cases of nine families and two relatives passed, within 5e-5. On a Mac none was run.

"Alone" is mlx-vlm's own path for one request. Where that path is wrong, the adapter mends it: the
[details](models-details.md) say what, and [each defect](upstream.md) has a reproduction.
"""

UPSTREAM = """## The same scenarios in mlx-vlm

The outcome of {models} tiny models in the batch generator of mlx-vlm {version}, fed as its server feeds it, in float32 on a
Linux CPU: **{clean} are right in every scenario** that was measured. "Right" is at most 1e-3 from mlx-vlm's own answer
alone (the log-probabilities of 12 greedy tokens). The [details](models-details.md) have each family's outcome.

"""

DETAILS = """# Models in detail

A section for each family of [the table](models.md): its limits, and what a user of it must know.

- "Off by" is the largest difference of a log-probability from the same request alone, over all
  [verified scenarios](models.md#how-it-is-verified). "Reproducible" names the precisions in which `reproducible=True`
  was shown to give the request's own bits; where it is missing, all on both devices.
- "Built" names a published folder whose config.json was built, or the class whose own values were: at full size,
  without memory for weights. None was run. "No": mlx-vlm's class has no sizes of its own.
- Where "mlx-vlm's batch" is missing, it was not measured.
- "Mended" are [defects of mlx-vlm](upstream.md), by the names of their reproductions; `vlm-batch families NAME` says
  them in words.

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
            largest = max(
                cell["difference"], before if isinstance(before, float) else 0.0
            )
            cells[cell["scenario"]] = float(f"{largest:.1e}")
    return {"mlx_vlm": version("mlx-vlm"), "tolerance": TOLERANCE, "models": models}


def as_text(record: Mapping[str, Any]) -> str:
    """The record as JSON with a line for each model, so that changes are seen."""
    models = [
        f"{json.dumps(name)}: {json.dumps(dict(sorted(cells.items())))}"
        for name, cells in sorted(record["models"].items())
    ]
    head = [
        f"{json.dumps(key)}: {json.dumps(record[key])},"
        for key in sorted(record.keys() - {"models"})
    ]
    return "\n".join(["{", *head, '"models": {', ",\n".join(models), "}", "}"]) + "\n"


def render(known: Sequence[FamilyFacts], record: Mapping[str, Any]) -> str:
    """Return docs/models.md."""
    there = facts.upstream()
    clean = sum(set(cells.values()) == {"right"} for cells in there["models"].values())
    verified = VERIFIED.format(
        mlx_vlm=record["mlx_vlm"],
        tolerance=record["tolerance"],
        scenarios=len(known[0].scenarios),
    )
    upstream = UPSTREAM.format(
        version=there["version"], models=len(there["models"]), clean=clean
    )
    parts = [
        HEAD.format(count=len(known)) + _abilities(known),
        COLUMNS,
        _not_batched(),
        verified,
        upstream + _outcomes(),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def render_details(known: Sequence[FamilyFacts]) -> str:
    """Return docs/models-details.md."""
    parts = [DETAILS.strip(), *(_section(one) for one in known)]
    return "\n\n".join(parts) + "\n"


def _abilities(known: Sequence[FamilyFacts]) -> str:
    columns = (
        "family",
        "takes",
        *SHOWN.values(),
        "notes",
    )
    exact = _exact()
    rows = []
    for one in known:
        spec = one.spec
        name = f"[{spec.family}](models-details.md#{spec.family})"
        same = [
            [device for device, cells in exact.items() if _is_same(one, cells, kind)]
            for kind in SHOWN
        ]
        bits = [
            "both" if len(devices) == len(exact) else "".join(devices)
            for devices in same
        ]
        rows.append(
            (
                name,
                _media(one),
                *bits,
                _short_notes(one),
            )
        )
    return _table(columns, rows)


def _media(one: FamilyFacts) -> str:
    """Return the media that a family's requests may bring."""
    pictures = {"one": "one picture", "several": "pictures"}
    taken = {
        pictures.get(one.pictures, ""): True,
        "videos": one.spec.video,
        "audio": one.spec.audio,
    }
    named = [kind for kind, is_taken in taken.items() if kind and is_taken]
    return ", ".join(named) or "text"


def _short_notes(one: FamilyFacts) -> str:
    """Return what the table says of a family beside its columns."""
    spec = one.spec
    others = [f"`{name}`" for name in spec.model_types if name != spec.family]
    said = [
        f"also {', '.join(others)}" if others else "",
        "" if spec.chunked_prefill else "prompts in one piece",
        "no drafts" if set(one.models) <= test_drafts.OTHERS else "",
        "no prefix cache" if _lacks(one.cell(facts.PREFIX_REUSE)) else "",
        "no KV in few bits" if _lacks(one.cell(facts.QUANTISED_KV)) else "",
        "not on CUDA"
        if {name for name, _ in spec.not_on_cuda} >= set(spec.model_types)
        else "",
    ]
    return "; ".join(part for part in said if part)


def _exact() -> dict[str, dict[str, dict[str, Any]]]:
    """Return each kind of device's cells of data/exact.json, by model."""
    record = json.loads(EXACT.read_text(encoding="utf-8"))
    return {"CPU": _cells(record, "cpu"), "GPU": _cells(record, FIRST_GPU, "gpu")}


def _cells(record: Mapping[str, Any], *devices: str) -> dict[str, dict[str, Any]]:
    """A model's cells by precision: those of the last device that has them."""
    found: dict[str, dict[str, Any]] = {}
    for device in devices:
        for name, cells in record[device]["cells"].items():
            found.setdefault(name, {}).update(cells)
    return found


def _is_same(one: FamilyFacts, cells: Mapping[str, Any], precision: str) -> bool:
    """Return whether all of a family's models were the same to the last bit."""
    found = [cells.get(name, {}) for name in one.models]
    return all(precision in model and model[precision]["same"] for model in found)


def _outcomes() -> str:
    """Return a row for each scenario that mlx-vlm was measured with: how many models had which outcome."""
    there = facts.upstream()
    rows = []
    for scenario in there["scenarios"]:
        found = Counter(
            cells[scenario] for cells in there["models"].values() if scenario in cells
        )
        rows.append((scenario, *(found[outcome] for outcome in OUTCOMES)))
    return _table(("scenario", *OUTCOMES), rows)


def _section(one: FamilyFacts) -> str:
    """Return a family's section of the details."""
    spec = one.spec
    notes = [note for note in spec.notes if not _is_of_upstream(note)]
    lines = [*_limits(one), *map(_plain, notes), *_mended(one)]
    head = " ".join(_facts(one))
    return "\n".join(
        [f"## {spec.family}", "", head, "", *(f"- {line}" for line in lines)]
    ).strip()


def _facts(one: FamilyFacts) -> list[str]:
    """Return a family's sentences of one fact each, but for those that the page's head says of the rest."""
    spec = one.spec
    off = "" if one.largest is None else f", off by {_number(one.largest)}"
    found = [f"{len(one.verified)} scenarios{off}."]
    if spec.model_types != (spec.family,):
        found.insert(0, f"Model types {_types(spec.model_types)}.")
    reproducible = _reproducible(one)
    if reproducible != EVERYWHERE:
        found.append(f"Reproducible: {reproducible}.")
    found.append(f"Built: {_published(spec.family)}.")
    if one.upstream != facts.NOT_MEASURED:
        found.append(f"mlx-vlm's batch: {one.upstream}.")
    return found


def _published(family: str) -> str:
    """Return which published configuration was tried (``tests/published_configurations.py``)."""
    if family in LOADED:
        return LOADED[family]
    if family in BY_CLASS:
        return "transformers' class"
    if family in BY_DEFAULTS:
        return "mlx-vlm's class"
    why = NOT_TRIED[family]
    return "no" if why == NEEDS else f"no ({why})"


def _reproducible(one: FamilyFacts) -> str:
    """Return the precisions of each kind of device in which a family's bits were shown to be the request's own."""
    same = {
        device: [
            short for name, short in PRECISIONS.items() if _is_same(one, cells, name)
        ]
        for device, cells in _exact().items()
    }
    words = {
        device: "all" if len(found) == len(PRECISIONS) else " ".join(found) or "none"
        for device, found in same.items()
    }
    return ", ".join(f"{device} {said}" for device, said in words.items())


def _limits(one: FamilyFacts) -> list[str]:
    """Return what a family does not do, each with its reason."""
    spec = one.spec
    reasons = {
        LIMITS[name]: _plain(why.removeprefix("refused: "))
        for name, why in one.explained.items()
        if name in LIMITS and why != facts.NOT_RECORDED
    }
    if "prefix cache" in reasons:
        reasons.pop("prefix cache on disk", None)
    second = reasons.pop(SECOND, "")
    found = [f"No {what}: {why[:1].lower()}{why[1:]}" for what, why in reasons.items()]
    if not spec.images:
        found.insert(0, "Text only.")
    elif not spec.multi_image:
        is_told = second and second not in reasons.values()
        found.insert(
            0,
            f"One picture a request: {second[:1].lower()}{second[1:]}"
            if is_told
            else "One picture a request.",
        )
    if not spec.chunked_prefill:
        found.append("A prompt is prefilled in one piece.")
    for word, is_taken, why, usual in (
        ("videos", spec.video, spec.no_video, ModelSpec.no_video),
        ("recordings", spec.audio, spec.no_audio, ModelSpec.no_audio),
    ):
        if not is_taken and why != usual:
            found.append(f"No {word}: {_plain(why)[:1].lower()}{_plain(why)[1:]}")
    found += [f"Refused on CUDA (`{names}`): {why}." for names, why in on_cuda(spec)]
    return found


def _is_of_upstream(note: str) -> bool:
    """Return whether all that a note names of mlx-vlm is shown in docs/upstream.md, which then says it."""
    places = upstream_page.places_of_notes((note,))
    return bool(places) and all(map(upstream_page.is_shown, places))


def _plain(note: str) -> str:
    """Return a note as a sentence, without places in files: those are in the registry and in docs/upstream.md."""
    text = PLACES.sub("", note).strip()
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."


def _mended(one: FamilyFacts) -> list[str]:
    """Return the names of the reproductions that are of a family."""
    names = dict.fromkeys(
        f"`{case.name}`"
        for case in upstream_page.cases()
        if one.spec.family in case.families
    )
    return [f"Mended: {', '.join(names)}."] if names else []


def on_cuda(spec: ModelSpec) -> list[tuple[str, str]]:
    """(model types, why) of those that are refused on CUDA, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in spec.not_on_cuda:
        reasons.setdefault(why, []).append(name)
    return [("`, `".join(names), why) for why, names in reasons.items()]


def _not_batched() -> str:
    lines = ["## Not batched", "", "Refused when they are loaded:", ""]
    lines += [
        _wrapped(f"- {why}: {_types(names)}")
        for why, names in facts.by_reason(facts.REFUSED).items()
    ]
    lines += [
        "",
        "Refused on CUDA, where they were seen to go wrong (`VLM_BATCH_ON_CUDA=NAME` serves one all the same):",
        "",
    ]
    lines += [
        _wrapped(f"- `{names}`: {why}")
        for spec in families()
        for names, why in on_cuda(spec)
    ]
    lines += ["", "One row at a time, through mlx-vlm's own path, with a warning:", ""]
    lines += [
        _wrapped(f"- {why}: {_types(names)}")
        for why, names in facts.by_reason(facts.ONE_AT_A_TIME).items()
    ]
    return "\n".join(lines)


def _wrapped(item: str) -> str:
    """Return an item of a list in lines of ``WIDTH``."""
    return textwrap.fill(
        item,
        WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _types(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _lacks(cell: float | str) -> bool:
    """Return whether a scenario does not apply to a family."""
    return isinstance(cell, str) and cell != facts.NOT_RECORDED


def _number(difference: float) -> str:
    return f"{difference:.0e}".replace("e-0", "e-") if difference else "0"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def main(log: Path | None = None) -> None:
    if log is not None:
        record = summary(log.read_text(encoding="utf-8").splitlines())
        # a run of some models leaves the others' records
        if record["mlx_vlm"] == facts.recorded()["mlx_vlm"]:
            kept = {
                name: cells
                for name, cells in facts.recorded()["models"].items()
                if name in FAMILIES
            }
            record["models"] = {**kept, **record["models"]}
        record["variants"] = {
            name: FAMILIES[name].registered
            for name in sorted(record["models"])
            if FAMILIES[name].registered != name
        }
        RECORD.write_text(as_text(record), encoding="utf-8")
        facts.recorded.cache_clear()
    PAGE.write_text(render(facts.all_facts(), facts.recorded()), encoding="utf-8")
    DETAILS_PAGE.write_text(render_details(facts.all_facts()), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
