"""The stand-in of ``benchmarks.stand_in`` in the processes that it starts: Python reads this file at their beginning.

It waits until the package's file about devices is imported, since importing it here would come before what must be first.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "vlm_batch.runtime.device"


class _Finder(MetaPathFinder):
    """Finds one module, and changes its ``device`` once it is loaded."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            metal = module.Device.METAL
            vars(module)["device"] = lambda: metal

        vars(spec.loader)["exec_module"] = load_and_change
        return spec


sys.meta_path.insert(0, _Finder())
