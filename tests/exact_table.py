"""The matrix in served precision: every family, every precision, every scenario, bit for bit. Run by ``scripts/exact_table``.

What came of it goes into ``vlm_batch/data/exact.json``, beside what other kinds of devices gave, after every cell: what
is stopped has not run for nothing.
"""

from __future__ import annotations

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import vlm_batch  # noqa: E402
from tests.exact_cases import (  # noqa: E402
    FURTHER,
    PRECISIONS,
    SCENARIOS,
    NotServed,
    differences,
    exact_of,
)
from tests.zoo import FAMILIES  # noqa: E402
from vlm_batch.caches import Placement  # noqa: E402
from vlm_batch.proofs.device import device_facts, versions  # noqa: E402

DATA = Path(vlm_batch.__file__).parent / "data" / "exact.json"
SAME = "same"
Cell = dict[str, Any]


def cell_of(
    name: str, precision: str, scenarios: Sequence[str], layout: Placement
) -> Cell:
    """What each scenario gives for a family in a precision: ``SAME``, or where it is not."""
    began, found = time.perf_counter(), dict[str, str]()
    counts: tuple[int, ...] = ()
    try:
        counts = exact_of(name, precision, layout).counts
        for scenario in scenarios:
            found[scenario] = (
                "; ".join(differences(name, precision, scenario, layout)) or SAME
            )
    except NotServed as error:
        traceback.print_exc()
        found = {"not served": _line(error, 160)}
    except Exception as error:
        traceback.print_exc()
        found["raised"] = f"{type(error).__name__}: {_line(error, 300)}"
    seconds = round(time.perf_counter() - began, 1)
    return {
        "family": name,
        "precision": precision,
        "counts": counts,
        "found": found,
        "seconds": seconds,
    }


def work(args: argparse.Namespace) -> None:
    """Answer each family named on standard input with a line for each precision named after it."""
    # whatever a library prints must not get between
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    facts = {"device": device_facts(), "versions": versions()}
    print(json.dumps(facts), file=answer, flush=True)
    for line in sys.stdin:
        name, precisions = json.loads(line)
        for precision in precisions:
            print(
                json.dumps(
                    cell_of(name, precision, args.scenarios, Placement.for_device())
                ),
                file=answer,
                flush=True,
            )


class Worker:
    """A process that runs cells. It may end in any of them: a GPU's fault ends the process that met it."""

    def __init__(self, args: argparse.Namespace) -> None:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.exact_table",
            "--work",
            "--scenarios",
            *args.scenarios,
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if args.verbose else subprocess.DEVNULL,
            text=True,
        )
        self.is_sound = True
        self.facts = self._line()

    def cells(self, name: str, precisions: Sequence[str]) -> Iterator[Cell]:
        """A family's cells, up to the one that the process does not outlive, which says so."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, precisions]) + "\n")
        self.process.stdin.flush()
        for precision in precisions:
            cell = self._line()
            if cell is None:
                found = {"raised": f"its process ended with {self.process.wait()}"}
                cell = {
                    "family": name,
                    "precision": precision,
                    "counts": [],
                    "found": found,
                    "seconds": 0.0,
                }
                self.is_sound = False
            elif self.facts["device"]["device"] == "gpu" and {
                "raised",
                "not served",
            } & set(cell["found"]):
                self.end()  # what a fault leaves of a process is not trusted
            yield cell
            if not self.is_sound:
                return

    def end(self) -> None:
        """Stop it, whatever it does."""
        self.is_sound = False
        self.process.kill()
        self.process.wait()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None


class Record:
    """The file of all devices' cells, written anew with each of them."""

    def __init__(
        self, path: Path, scenarios: Sequence[str], device: str | None = None
    ) -> None:
        self.path, self.scenarios, self.device = path, scenarios, device
        self.found: list[Cell] = []
        self._record = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        )
        self._lock = threading.Lock()
        self._is_open = True

    def close(self) -> None:
        """Take in nothing any more."""
        with self._lock:
            self._is_open = False

    def add(self, facts: dict[str, Any], cell: Cell) -> None:
        """Keep a cell. Called from several threads."""
        with self._lock:
            if not self._is_open:
                return
            self.found.append(cell)
            device = self.device or facts["device"]["device"]
            here = self._record[device] = (
                self._record.get(device, {"cells": {}}) | facts
            )
            cells = here["cells"].setdefault(cell["family"], {})
            cells[cell["precision"]] = self._kept(
                cell, cells.get(cell["precision"], {})
            )
            self._write()
            if self._differs(cell):
                print(
                    cell["family"], cell["precision"], self._differs(cell), flush=True
                )

    def merge(self, other: Path) -> None:
        """Take over what another machine has recorded, cell by cell."""
        for device, theirs in json.loads(other.read_text(encoding="utf-8")).items():
            here = self._record.setdefault(device, {"cells": {}})
            here |= {name: value for name, value in theirs.items() if name != "cells"}
            for name, cells in theirs["cells"].items():
                here["cells"].setdefault(name, {}).update(cells)
        self._write()

    def _kept(self, cell: Cell, earlier: Cell) -> Cell:
        """What is recorded of a cell; scenarios that were not run now keep what they gave before."""
        differs = self._differs(cell)
        left_out = [name for name in SCENARIOS if name not in self.scenarios]
        if left_out and earlier.get("rows") == list(cell["counts"]):
            differs = {
                name: said
                for name, said in earlier.get("said", {}).items()
                if name in left_out
            } | differs
            left_out = [
                name for name in left_out if name in earlier.get("left out", ())
            ]
        kept = {"rows": cell["counts"], "same": not differs}
        return (
            kept
            | ({"said": differs} if differs else {})
            | ({"left out": left_out} if left_out else {})
        )

    @staticmethod
    def _differs(cell: Cell) -> dict[str, str]:
        return {
            scenario: said for scenario, said in cell["found"].items() if said != SAME
        }

    def _write(self) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(
            json.dumps(self._record, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
        fresh.replace(self.path)


def run(args: argparse.Namespace, names: Sequence[str], record: Record) -> None:
    """Every cell, a family's one after another in one process, by as many processes as were asked for, until time is up."""
    until = time.monotonic() + args.seconds
    waiting, workers = iter(names), list[Worker]()

    def serve() -> None:
        worker: Worker | None = None
        for name in waiting:
            rest = list(args.precisions)
            while rest and time.monotonic() < until:
                if worker is None or not worker.is_sound:
                    worker = Worker(args)
                    workers.append(worker)
                for cell in worker.cells(name, list(rest)):
                    record.add(worker.facts, cell)
                    rest.remove(cell["precision"])

    threads = [
        threading.Thread(target=serve, daemon=True) for _ in range(args.processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until + args.grace - time.monotonic()))
    record.close()
    for worker in workers:
        worker.end()
    for thread in threads:
        thread.join()  # what they waited for has ended
    for worker in workers:
        worker.process.communicate()  # its pipes are closed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="tiny models' names (default: all)")
    parser.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS)
    )
    parser.add_argument(
        "--scenarios",
        nargs="+",
        choices=[*SCENARIOS, *FURTHER],
        default=list(SCENARIOS),
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="processes beside each other"
    )
    parser.add_argument(
        "--seconds", type=float, default=36000.0, help="begin no family after this"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=600.0,
        help="wait for what has begun so long after that",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show where what could not be run was raised",
    )
    parser.add_argument(
        "--work",
        action="store_true",
        help="be one of the processes: families come by standard input",
    )
    parser.add_argument("--out", type=Path, default=DATA, help="where the record goes")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="what it is called in the record (default: cpu or gpu)",
    )
    parser.add_argument(
        "--merge",
        type=Path,
        metavar="RECORD",
        help="run nothing; take over another machine's record",
    )
    args = parser.parse_args()
    if args.work:
        blas.limit_threads(1)
        work(args)
        return 0
    record = Record(args.out, args.scenarios, args.device)
    if args.merge is not None:
        record.merge(args.merge)
        return 0
    run(args, args.families or sorted(FAMILIES), record)
    outcomes = [set(cell["found"].values()) == {SAME} for cell in record.found]
    bad = sum(
        not same and "not served" not in cell["found"]
        for same, cell in zip(outcomes, record.found, strict=True)
    )
    print(
        f"{sum(outcomes)} of {len(outcomes)} cells the same to the last bit; {bad} differ; "
        "the others cannot be run here by anybody"
    )
    return 1 if bad else 0


def _line(error: Exception, length: int) -> str:
    return " ".join(str(error).split())[:length]


if __name__ == "__main__":
    raise SystemExit(main())
