"""Tables that a process makes once, evaluated before they are kept.

mlx-vlm and mlx-audio keep theirs by ``lru_cache``, unevaluated. Such an array belongs to the thread that made it, and no
other thread can evaluate it: engines, and threads of processors, would fail by each other's tables.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
from mlx_vlm.models import interpolate

from vlm_batch.adapters.hooks import Hook, hook, install_hooks


def made(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the evaluated result of a function with ``lru_cache``, past its cache."""
    found = theirs.__wrapped__(*args, **kwargs)
    mx.eval(found)
    return found


def kept(theirs: Any) -> Hook:
    """Hook a function with ``lru_cache`` that returns arrays."""
    return hook(theirs, lru_cache(**theirs.cache_parameters())(partial(made, theirs)))


#: Indices and weights of resized pictures and positions.
HOOKS = {
    name: kept(bound)
    for name, bound in vars(interpolate).items()
    if hasattr(bound, "cache_parameters")
}


def hook_tables(family: str) -> None:
    """Hook the tables of ``interpolate``, which its own functions call."""
    install_hooks([interpolate.__name__], HOOKS, family=family)
