"""The matrix in served precision: every family, every precision, every scenario, bit for bit. Run by ``scripts/exact_table``.

What came of it goes into ``vlm_batch/data/exact.json``, beside what other kinds of devices gave.
"""

from __future__ import annotations

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import vlm_batch  # noqa: E402
from tests.exact_cases import PRECISIONS, SCENARIOS, NotServed, differences, exact_of  # noqa: E402
from tests.zoo import FAMILIES  # noqa: E402
from vlm_batch.caches import Placement  # noqa: E402
from vlm_batch.exactness import device_facts, versions  # noqa: E402

DATA = Path(vlm_batch.__file__).parent / "data" / "exact.json"
SAME = "same"


def cells(
    names: Sequence[str], precisions: Sequence[str], scenarios: Sequence[str], until: float
) -> Iterator[dict[str, Any]]:
    """What each scenario gives, one precision after another; a cell is begun only before ``until`` (``time.time``)."""
    layout = Placement.for_device()
    for precision, name in ((precision, name) for precision in precisions for name in names):
        if time.time() > until:
            return
        began, found = time.perf_counter(), dict[str, str]()
        counts: tuple[int, ...] = ()
        try:
            counts = exact_of(name, precision, layout).counts
            for scenario in scenarios:
                found[scenario] = "; ".join(differences(name, precision, scenario, layout)) or SAME
        except NotServed as error:
            found = {"not served": " ".join(str(error).split())[:160]}
        except Exception as error:
            found["raised"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield {
            "family": name,
            "precision": precision,
            "counts": counts,
            "found": found,
            "seconds": round(time.perf_counter() - began, 1),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="tiny models' names (default: all)")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--processes", type=int, default=1, help="processes beside each other")
    parser.add_argument(
        "--seconds", type=float, default=36000.0, help="begin no cell after this, and wait for none half as long again"
    )
    parser.add_argument("--shard", help="I/N: the part of this process; it prints its cells and writes nothing")
    parser.add_argument("--out", type=Path, default=DATA, help="where the record goes")
    args = parser.parse_args()
    names = args.families or sorted(FAMILIES)
    until = time.time() + args.seconds
    blas.limit_threads(1)
    if args.shard:
        part, parts = map(int, args.shard.split("/"))
        for cell in cells(names[part::parts], args.precisions, args.scenarios, until):
            print(json.dumps(cell), flush=True)
        return 0
    found = _all(args, names, until)
    record = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    here = record.setdefault(str(device_facts()["device"]), {"cells": {}})
    here |= {"device": device_facts(), "versions": versions(), "scenarios": args.scenarios}
    bad = 0
    for cell in found:
        kept = here["cells"].setdefault(cell["family"], {})
        differs = {scenario: said for scenario, said in cell["found"].items() if said != SAME}
        kept[cell["precision"]] = {
            "rows": cell["counts"],
            "same": not differs,
            **({"said": differs} if differs else {}),
        }
        if differs:
            bad += "not served" not in differs
            print(cell["family"], cell["precision"], differs, flush=True)
    args.out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    same = sum(set(cell["found"].values()) == {SAME} for cell in found)
    print(
        f"{same} of {len(found)} cells the same to the last bit; {bad} differ; the others cannot be run here by anybody"
    )
    return 1 if bad else 0


def _all(args: argparse.Namespace, names: Sequence[str], until: float) -> list[dict[str, Any]]:
    """Every cell, by as many processes as were asked for."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(part)) for part in range(args.processes)]
        running = []
        for part, file in enumerate(files):
            command = [sys.executable, "-m", "tests.exact_table", *names, "--shard", f"{part}/{args.processes}"]
            command += ["--precisions", *args.precisions, "--scenarios", *args.scenarios]
            command += ["--seconds", str(until - time.time())]
            running.append(subprocess.Popen(command, stdout=file.open("w"), stderr=subprocess.DEVNULL, env=os.environ))
        for process in running:
            try:
                process.wait(timeout=max(1.0, until + args.seconds / 2 - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
        return [
            json.loads(line)
            for file in files
            for line in file.read_text(encoding="utf-8").splitlines()
            if line.startswith("{")
        ]


if __name__ == "__main__":
    raise SystemExit(main())
