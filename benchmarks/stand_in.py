"""Metal's settings and code paths on the CPU's back end: a rehearsal of a Mac on Linux.

    python -m benchmarks.stand_in vlm_batch verify
    python -m pytest -p benchmarks.stand_in tests/test_parity.py

Importing this file is what does it: every file of the package that asks for the kind of device afterwards is told "metal", in
processes that the command starts, too (``in_children``). What Metal alone has (its kernels, its memory) stays untried.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from vlm_batch.runtime import device


def _metal() -> device.Device:
    return device.Device.METAL


loaded = [
    name
    for name, module in sys.modules.items()
    if name.startswith("vlm_batch.")
    and name != device.__name__
    and vars(module).get("device") is device.device
]
if loaded:
    raise ImportError(f"{', '.join(loaded)} asked for the device before the stand-in")
device.device = _metal

_FOLDER = str(Path(__file__).parent / "in_children")
_PATH = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
if _FOLDER not in _PATH:
    os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *_PATH])

if __name__ == "__main__":
    name, *sys.argv[1:] = sys.argv[1:]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
