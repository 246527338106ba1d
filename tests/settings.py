"""Folders of the zoo's weights whose config.json has settings that are in no other test, and requests to them.

``tests/references/settings.py`` records what transformers answers; ``tests/test_settings.py`` compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoints import layout, write_checkpoint

SETTINGS = Path(__file__).parent / "references" / "settings"
NUM_TOKENS = 12
ORIGINAL_LENGTH = 24
"""Of the case with long factors: of the requests below some begin beyond it, and some pass it while they answer."""


@dataclass(frozen=True)
class Case:
    """A family, what its config.json says otherwise, by parts, and requests by the harness' names."""

    family: str
    change: Mapping[str, Any]
    keys: tuple[str, ...] = ("text:5:40", "image:4:1")


def factors(first: float, count: int) -> list[float]:
    """Factors of a rotation's frequencies."""
    return [first + 0.1 * index for index in range(count)]


def longrope(pairs: int) -> dict[str, Any]:
    """Positions with short and long factors."""
    return {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": factors(1.0, pairs),
        "long_factor": factors(2.0, pairs),
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    }


#: Settings that are served as transformers has them.
APPLIED = {
    "longrope": Case(
        "llava_onevision",
        {"text_config": {"rope_parameters": longrope(8), "max_position_embeddings": 512}},
        ("text:1:5", "text:5:40", "text:2:14", "image:3:0", "text:3:24", "image:4:1"),
    ),
}


def merged(config: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with a change, part by part."""
    found = dict(config)
    for name, value in change.items():
        is_part = name.endswith("_config") and isinstance(value, Mapping)
        found[name] = merged(found.get(name) or {}, value) if is_part else value
    return found


def write_case(folder: Path, case: Case) -> Path:
    """The folder of a case."""
    return write_checkpoint(
        folder, case.family, config=merged(layout(case.family)["files"]["config.json"], case.change)
    )
