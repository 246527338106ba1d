"""Settings that must stand before anything imports MLX, and the record of the parity matrix."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the processes of pytest -n share the cores
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from vlm_batch.blas import preload_openblas  # noqa: E402

preload_openblas()

PARITY = "parity"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--parity-json", type=Path, help="write the outcome of every cell of the parity matrix to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--parity-json") and not hasattr(config, "workerinput"):  # xdist's workers report to one place
        config.pluginmanager.register(ParityRecord(config.getoption("--parity-json")))


@pytest.fixture
def record_parity(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """``record_parity(family, scenario, difference=None)``: name this test's cell; call it again once the number is known."""

    def record(family: str, scenario: str, difference: float | None = None) -> None:
        record_property(PARITY, {"family": family, "scenario": scenario, "difference": difference})

    return record


class ParityRecord:
    """Collects the cells that tests named with ``record_parity``, with the tests' outcomes. The worst of a cell counts."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.cells: dict[tuple[str, str], dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        outcome = "known gap" if "wasxfail" in vars(report) else report.outcome
        for name, value in report.user_properties:
            if name == PARITY and isinstance(value, dict):
                self._add({**value, "outcome": outcome})

    def _add(self, cell: dict[str, Any]) -> None:
        key = (cell["scenario"], cell["family"])
        other = self.cells.get(key, cell)
        if other["outcome"] != "passed":
            cell = other
        numbers = [c["difference"] for c in (cell, other) if c["difference"] is not None]
        self.cells[key] = {**cell, "difference": max(numbers, default=None)}

    def pytest_sessionfinish(self) -> None:
        cells = [self.cells[key] for key in sorted(self.cells)]
        self.target.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
