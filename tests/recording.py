"""What the matrix leaves for docs/models.md: one JSON line for each cell, where a file is named for it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from vlm_batch.caches import Placement

#: The environment variable that names the file.
LOG = "VLM_BATCH_PARITY_LOG"


def record(name: str, scenario: str, placement: Placement, largest: float) -> None:
    """A cell that passed, with the largest difference of log-probabilities."""
    _leave(
        {
            "family": name,
            "scenario": scenario,
            "placement": placement.value,
            "difference": largest,
        }
    )


def record_none(name: str, scenario: str, why: str) -> None:
    """A cell that does not apply to a family, or is refused by name, and why."""
    _leave({"family": name, "scenario": scenario, "why": why})


def _leave(line: dict[str, object]) -> None:
    if path := os.environ.get(LOG):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
