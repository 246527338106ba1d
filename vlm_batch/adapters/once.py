"""What is made once while an array lives: factors and masks that all layers of a step share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.hooks import this_thread

#: Results of ``once``, by function, array, thread and settings.
_made: dict[tuple[Any, ...], Any] = {}


def once(array: mx.array, make: Callable[..., Any], *settings: Any) -> Any:
    """Return ``make(array, *settings)``, made once a thread while the array lives.

    Threads share arrays, such as ``lengths_array``, and cannot evaluate each other's results.
    """
    key = (make, id(array), this_thread(), *settings)
    if key not in _made:
        _made[key] = make(array, *settings)
        weakref.finalize(array, _made.pop, key, None).atexit = False
    return _made[key]


def added(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    """Convert a mask to an additive one, once per step."""
    return mask if mask.dtype != mx.bool_ else once(mask, _added, dtype)


def _added(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    return mx.where(mask, mx.array(0, dtype), mx.array(mx.finfo(dtype).min, dtype))
