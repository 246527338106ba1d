"""Facts about families: abilities, verified scenarios, mlx-vlm's own batch.

Sources: the registry, ``data/parity.json`` (by ``scripts/parity_table``) and ``data/mlx_vlm.json``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, TextIO

from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from vlm_batch.cli.console import open_console
from vlm_batch.models import families
from vlm_batch.models._refused import ONE_AT_A_TIME, REFUSED
from vlm_batch.registry import ModelSpec

TWO_IMAGES = "two_images_in_a_row"
#: Scenario -> the ability that it shows.
PREFIX_REUSE, QUANTISED_KV = "prefix_hits", "kv_8_bits"
NOT_RECORDED = "not recorded yet"
#: Of what mlx-vlm's own batch does with a family.
NOT_MEASURED = "not measured"
UNKNOWN = "?"
TAKES = "it takes"
#: What families take whose requests have fewer than two pictures.
FEWER = {"none": "text only", "one": "one picture a request"}

#: Scenario -> the largest difference of log-probabilities, or why there is none.
Cells = Mapping[str, float | str]


@dataclass(frozen=True)
class FamilyFacts:
    """One family, its tested tiny models, and all scenarios."""

    spec: ModelSpec
    models: Mapping[str, Cells]
    scenarios: tuple[str, ...]

    def cell(self, scenario: str) -> float | str:
        """Return the largest difference, or why there is none."""
        found = [self._cell(model, scenario) for model in self.models.values()]
        numbers = [one for one in found if isinstance(one, float)]
        reasons = [one for one in found if isinstance(one, str)]
        if NOT_RECORDED in reasons or not found:
            return NOT_RECORDED
        return max(numbers) if numbers else reasons[0]

    def _cell(self, model: Cells, scenario: str) -> float | str:
        gaps = dict(self.spec.known_gaps)
        if scenario in gaps:
            return f"known gap: {gaps[scenario]}"
        if scenario == TWO_IMAGES and self.pictures in FEWER:
            return f"{TAKES} {FEWER[self.pictures]}"
        taken = {"video": self.spec.video, "recording": self.spec.audio}
        for word, is_taken in taken.items():
            if word in scenario and not is_taken:
                return f"{TAKES} no {word}"
        return model.get(scenario, NOT_RECORDED)

    @cached_property
    def verified(self) -> dict[str, float]:
        cells = ((name, self.cell(name)) for name in self.scenarios)
        return {name: cell for name, cell in cells if isinstance(cell, float)}

    @cached_property
    def unverified(self) -> dict[str, str]:
        cells = ((name, self.cell(name)) for name in self.scenarios)
        return {name: cell for name, cell in cells if isinstance(cell, str)}

    @property
    def explained(self) -> dict[str, str]:
        """Unverified scenarios, without inputs that the family refuses."""
        return {
            scenario: why
            for scenario, why in self.unverified.items()
            if not why.startswith(TAKES)
        }

    @property
    def largest(self) -> float | None:
        """The largest verified difference, quantised KV caches aside."""
        return max(
            (
                cell
                for name, cell in self.verified.items()
                if not name.startswith("kv_")
            ),
            default=None,
        )

    @property
    def pictures(self) -> str:
        if not self.spec.images:
            return "none"
        return "several" if self.spec.multi_image else "one"

    @property
    def upstream(self) -> str:
        found: str = upstream()["in_words"].get(self.spec.family, NOT_MEASURED)
        return found

    def as_json(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "family": spec.family,
            "model_types": spec.model_types,
            "images": spec.images,
            "multi_image": spec.multi_image,
            "video": spec.video,
            "no_video": None if spec.video else spec.no_video,
            "audio": spec.audio,
            "no_audio": None if spec.audio else spec.no_audio,
            "chunked_prefill": spec.chunked_prefill,
            "prefix_reuse": PREFIX_REUSE in self.verified or self.cell(PREFIX_REUSE),
            "quantised_kv": QUANTISED_KV in self.verified or self.cell(QUANTISED_KV),
            "verified": self.verified,
            "unverified": self.unverified,
            "notes": spec.notes,
            "not_on_cuda": dict(spec.not_on_cuda),
            "known_gaps": dict(spec.known_gaps),
            "mlx_vlm": {
                "in_words": self.upstream,
                **{
                    name: upstream()["models"][name]
                    for name in self.models
                    if name in upstream()["models"]
                },
            },
        }


def all_facts() -> tuple[FamilyFacts, ...]:
    return facts_of(recorded(), families())


def facts_of(
    record: Mapping[str, Any], specs: Sequence[ModelSpec]
) -> tuple[FamilyFacts, ...]:
    models: Mapping[str, Cells] = record["models"]
    scenarios = tuple(sorted(set[str]().union(*models.values())))
    own: dict[str, dict[str, Cells]] = defaultdict(dict)
    for name, cells in models.items():
        own[record["variants"].get(name, name)][name] = cells
    return tuple(FamilyFacts(spec, own[spec.family], scenarios) for spec in specs)


@cache
def recorded() -> dict[str, Any]:
    """Return ``data/parity.json``.

    It has ``mlx_vlm`` (version), ``tolerance``, ``models`` (name -> scenario -> number or reason) and ``variants``
    (name -> family).
    """
    return _data("parity.json")


@cache
def upstream() -> dict[str, Any]:
    """Return ``data/mlx_vlm.json``."""
    return _data("mlx_vlm.json")


def _data(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (files("vlm_batch") / "data" / name).read_text(encoding="utf-8")
    )
    return found


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for model_type, why in sorted(reasons.items()):
        found.setdefault(why, []).append(model_type)
    return dict(sorted(found.items()))


# Pages
# ---------------------------------------------------------------------------------------------------------------------


def print_families(known: Sequence[FamilyFacts], out: TextIO) -> None:
    console = open_console(out)
    columns: dict[str, Callable[[FamilyFacts], str]] = {
        "family": lambda one: "\n  ".join(
            dict.fromkeys((one.spec.family, *one.spec.model_types))
        ),
        "pictures": lambda one: one.pictures,
        "video": lambda one: "yes" if one.spec.video else "no",
        "prefill": lambda one: "chunks" if one.spec.chunked_prefill else "whole",
        "reuse": lambda one: _yes_or_no(one.cell(PREFIX_REUSE)),
        "8 bits": lambda one: _yes_or_no(one.cell(QUANTISED_KV)),
        "verified": lambda one: (
            f"{len(one.verified)}/{len(one.verified) + len(_open(one))}"
        ),
        "off by": lambda one: "-" if one.largest is None else f"{one.largest:.0e}",
    }
    shown = {
        name: show
        for name, show in columns.items()
        if any(show(one) != UNKNOWN for one in known)
    }
    table = Table(
        *(Column(name, no_wrap=True) for name in shown),
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for one in known:
        table.add_row(*(Text(show(one)) for show in shown.values()))
    console.print(table)
    console.print(
        f"\n{len(known)} families, below some the other model types that load as theirs. Verified: scenarios in which every "
        "request of a batch gets the answer that it gets alone; "
        "off by: the largest difference of a log-probability in them. vlm-batch families NAME shows all about one."
    )
    for title, reasons in (
        ("Refused:", REFUSED),
        ("One row at a time:", ONE_AT_A_TIME),
    ):
        console.print(f"\n{title}")
        for why, model_types in by_reason(reasons).items():
            console.print(Padding(f"{why}: {', '.join(model_types)}", (0, 0, 0, 2)))


def _yes_or_no(cell: float | str) -> str:
    return (
        "yes" if isinstance(cell, float) else UNKNOWN if cell == NOT_RECORDED else "no"
    )


def _open(one: FamilyFacts) -> list[str]:
    return [
        name
        for name, why in one.unverified.items()
        if why == NOT_RECORDED or why.startswith("known gap")
    ]


def print_family_details(known: Sequence[FamilyFacts], out: TextIO) -> None:
    console = open_console(out)
    for one in known:
        spec = one.spec
        facts = {
            "model types": ", ".join(spec.model_types),
            "pictures": f"{one.pictures} in a request",
            "video": "yes" if spec.video else f"no: {spec.no_video}",
            "audio": "yes" if spec.audio else f"no: {spec.no_audio}",
            "prefill": "in chunks" if spec.chunked_prefill else "whole prompts",
            "verified": ", ".join(
                f"{name.replace('_', ' ')} {off:.0e}"
                for name, off in one.verified.items()
            ),
            "not verified": "\n".join(
                f"{name.replace('_', ' ')}: {why}"
                for name, why in one.explained.items()
            ),
            "refused on CUDA": "\n".join(
                f"{name}: {why}" for name, why in spec.not_on_cuda
            ),
            "notes": "\n".join(spec.notes),
            "mlx-vlm's batch": one.upstream,
        }
        table = Table(
            Column(no_wrap=True),
            Column(overflow="fold"),
            box=None,
            show_header=False,
            padding=(0, 2, 0, 0),
        )
        for name, value in facts.items():
            if value:
                table.add_row(name, Text(value))
        console.print(Text(spec.family, style="bold"))
        console.print(Padding(table, (0, 0, 1, 2)))
