"""Facts about each family: its abilities, the verified scenarios, and the outcome of the same scenarios in mlx-vlm's own batch.

The facts are the registry's, and two files that the package carries: ``data/parity.json``, the outcome of the parity matrix
(written by ``scripts/parity_table``), and ``data/mlx_vlm.json``, what was measured of mlx-vlm's batch generator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from vlm_batch.models import families
from vlm_batch.models._refused import ONE_AT_A_TIME, REFUSED
from vlm_batch.registry import ModelSpec

TWO_IMAGES = "two_images_in_a_row"
#: Scenario -> the ability that it shows.
PREFIX_REUSE, QUANTISED_KV = "prefix_hits", "kv_8_bits"
NOT_RECORDED = "not recorded yet"
TAKES = "it takes"

#: Scenario -> the largest difference of log-probabilities, or why there is none.
Cells = Mapping[str, float | str]


@dataclass(frozen=True)
class FamilyFacts:
    """One family: ``models`` are its tested tiny models, by name, each with its cells; ``scenarios`` are all that there are."""

    spec: ModelSpec
    models: Mapping[str, Cells]
    scenarios: tuple[str, ...]

    def cell(self, *scenarios: str) -> float | str:
        """The largest difference of some scenarios over the family's models; or why there is none."""
        found = [self._cell(model, scenario) for model in self.models.values() for scenario in scenarios]
        numbers = [one for one in found if isinstance(one, float)]
        reasons = [one for one in found if isinstance(one, str)]
        if NOT_RECORDED in reasons or not found:
            return NOT_RECORDED
        return max(numbers) if numbers else reasons[0]

    def _cell(self, model: Cells, scenario: str) -> float | str:
        if scenario in dict(self.spec.known_gaps):
            return f"known gap: {dict(self.spec.known_gaps)[scenario]}"
        if scenario == TWO_IMAGES and not self.spec.multi_image:
            return f"{TAKES} one picture a request" if self.spec.images else f"{TAKES} text only"
        if "video" in scenario and not self.spec.video:
            return f"{TAKES} no video"
        return model.get(scenario, NOT_RECORDED)

    @property
    def verified(self) -> dict[str, float]:
        """The scenarios that are verified, each with its largest difference."""
        return {name: cell for name in self.scenarios if isinstance(cell := self.cell(name), float)}

    @property
    def unverified(self) -> dict[str, str]:
        """The scenarios without a number, with the reason: a known gap, not applicable, or not recorded yet."""
        return {name: cell for name in self.scenarios if isinstance(cell := self.cell(name), str)}

    @property
    def explained(self) -> dict[str, str]:
        """The scenarios without a number that tell something of the family; inputs that it refuses are listed elsewhere."""
        return {scenario: why for scenario, why in self.unverified.items() if not why.startswith(TAKES)}

    @property
    def largest(self) -> float | None:
        """The largest difference of all verified scenarios, None if there are none.

        Keys and values in few bits have a tolerance of their own and do not count.
        """
        return max((cell for name, cell in self.verified.items() if not name.startswith("kv_")), default=None)

    @property
    def pictures(self) -> str:
        """The number of pictures that a request may have, in words."""
        return "none" if not self.spec.images else "several" if self.spec.multi_image else "one"

    @property
    def upstream(self) -> str:
        """The outcome of the same scenarios in mlx-vlm's batch generator, in words."""
        found: str = upstream()["in_words"].get(self.spec.family, "not measured")
        return found

    def as_json(self) -> dict[str, Any]:
        """All of it, for a machine."""
        spec = self.spec
        return {
            "family": spec.family,
            "model_types": spec.model_types,
            "images": spec.images,
            "multi_image": spec.multi_image,
            "video": spec.video,
            "no_video": None if spec.video else spec.no_video,
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
                **{name: upstream()["models"][name] for name in self.models if name in upstream()["models"]},
            },
        }


def all_facts() -> tuple[FamilyFacts, ...]:
    """The facts about every family, by name."""
    return facts_of(recorded(), families())


def facts_of(record: Mapping[str, Any], specs: Sequence[ModelSpec]) -> tuple[FamilyFacts, ...]:
    """The facts about some families, from a record in the form of ``data/parity.json``."""
    models: Mapping[str, Cells] = record["models"]
    scenarios = tuple(sorted({scenario for cells in models.values() for scenario in cells}))
    family_of = {name: record["variants"].get(name, name) for name in models}
    own = {spec.family: {name: models[name] for name in models if family_of[name] == spec.family} for spec in specs}
    return tuple(FamilyFacts(spec, own[spec.family], scenarios) for spec in specs)


@cache
def recorded() -> dict[str, Any]:
    """``data/parity.json``: ``mlx_vlm`` (version), ``tolerance``, ``models``: name -> scenario -> number or reason, and
    ``variants``: name -> family, of models that are not called by their family's name."""
    return _data("parity.json")


@cache
def upstream() -> dict[str, Any]:
    """``data/mlx_vlm.json``: ``scenarios`` (name -> the parity scenarios that it stands for), ``models``, ``in_words``."""
    return _data("mlx_vlm.json")


def _data(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files("vlm_batch") / "data" / name).read_text(encoding="utf-8"))
    return found


def refused() -> dict[str, list[str]]:
    """Reasons for a refusal -> the model types of mlx-vlm that are refused for it."""
    return _by_reason(REFUSED)


def one_at_a_time() -> dict[str, list[str]]:
    """Reasons -> the model types of mlx-vlm that run one row at a time for it."""
    return _by_reason(ONE_AT_A_TIME)


def _by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for model_type, why in sorted(reasons.items()):
        found.setdefault(why, []).append(model_type)
    return dict(sorted(found.items()))
