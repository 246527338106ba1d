"""Attention for mlx-vlm's modules, over every kind of cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models import base as upstream

from vlm_batch.adapters import operations
from vlm_batch.adapters.hooks import current, hook
from vlm_batch.arrays import map_arrays
from vlm_batch.caches.drafted import DraftedStates, attend_drafted
from vlm_batch.caches.quantized import QuantizedStates, SlabStates, unpacked
from vlm_batch.caches.rows import RowsCache, RowStates, attend_rows
from vlm_batch.caches.turbo import TurboStates

#: mlx-vlm's own function, kept before any hook.
SCALED_DOT_PRODUCT_ATTENTION = upstream.scaled_dot_product_attention
#: Kinds of states that a row's cache returns in an array's place -> attention over them, with (queries, keys, values, scale,
#: mask, sinks).
STATES: dict[type, Callable[..., mx.array]] = {
    QuantizedStates: operations.attend_packed,
    TurboStates: operations.attend_turned,
}


@dataclass(frozen=True)
class SealedMask:
    """A mask that the model's code passes on unread."""

    mask: mx.array


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Compute mlx-vlm's ``scaled_dot_product_attention`` over any cache."""
    if isinstance(mask, SealedMask):
        mask = mask.mask
    if isinstance(keys, RowStates):
        if isinstance(keys.live, TurboStates):
            found = operations.attend_turned_rows(
                queries, keys, values, scale, mask, sinks
            )
            if found is not None:
                return found
        return attend_rows(attention, queries, keys, values, scale, mask, sinks)
    if isinstance(keys, DraftedStates):
        fixed = current().is_fixed
        return attend_drafted(
            attention, queries, keys, values, cache, scale, mask, sinks, is_fixed=fixed
        )
    coded = STATES.get(type(keys))
    if coded is not None:
        return coded(queries, keys, values, scale, mask, sinks)
    if isinstance(keys, SlabStates):
        if sinks is None:
            found = operations.attend_packed_slab(queries, keys, values, scale, mask)
            if found is not None:
                return found
        keys, values = unpacked(keys, values)
    if sinks is None and isinstance(keys, mx.array) and not hasattr(cache, "bits"):
        # not quantised
        return operations.attend(queries, keys, values, scale, mask)
    return SCALED_DOT_PRODUCT_ATTENTION(
        queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks
    )


#: Functions that replace mlx-vlm's in a language model's files. Most models call a module-level
#: ``scaled_dot_product_attention``, so their code runs unmodified.
HOOKS = {
    "scaled_dot_product_attention": hook(SCALED_DOT_PRODUCT_ATTENTION, attention),
    "swiglu": hook(operations.SWIGLU, operations.swiglu),
}


def each_row(
    function: Callable[..., Any], rows: RowsCache, *args: Any, **kwargs: Any
) -> Any:
    """Call a function per live row, at least once; join its arrays or tuples of arrays.

    Arrays are cut from (B, ...) to (1, ...). Empty places get zeros.
    """
    answers: dict[int, Any] = {}
    for place, single in enumerate(rows.places):
        if single is None:
            continue
        own = [_of_row(value, place) for value in args]
        named = {name: _of_row(value, place) for name, value in kwargs.items()}
        answers[place] = function(*own, **named)
    like = next(iter(answers.values()))
    empty = map_arrays(like, mx.zeros_like)
    filled = [answers.get(place, empty) for place in range(len(rows.places))]
    if not isinstance(like, tuple):
        return mx.concatenate(filled)
    parts = zip(*filled, strict=True)
    return tuple(mx.concatenate(list(part)) for part in parts)


def _of_row(value: Any, place: int) -> Any:
    if isinstance(value, RowsCache):
        return value.places[place]
    return value[place : place + 1] if isinstance(value, mx.array) else value


def fused_attention(
    module: Any, project: Any, output: Any, x: mx.array, mask: Any, cache: Any
) -> mx.array:
    """Run attention (B, L, D) with one projection for queries, keys and values.

    ``module`` has ``n_heads``, ``n_kv_heads``, ``head_dim``, ``scale`` and ``rope``.
    """
    batch, length, _ = x.shape
    heads, kv_heads = module.n_heads, module.n_kv_heads
    split = (
        project(x)
        .reshape(batch, length, heads + 2 * kv_heads, module.head_dim)
        .swapaxes(1, 2)
    )
    # (B, H, L, D_head)
    queries, keys, values = mx.split(split, [heads, heads + kv_heads], axis=1)
    queries, keys = (
        module.rope(rotated, offset=cache.offset) for rotated in (queries, keys)
    )
    keys, values = cache.update_and_fetch(keys, values)
    return output(
        attention(queries, keys, values, cache, module.scale, mask)
        .swapaxes(1, 2)
        .flatten(-2)
    )


def fuse_rows(
    attention_class: type[nn.Module], project: str, output: str
) -> type[nn.Module]:
    """Subclass an attention to run ``fused_attention``."""

    class FusedRows(attention_class):  # type: ignore[misc,valid-type]
        def __call__(
            self, x: mx.array, mask: Any = None, cache: Any = None
        ) -> mx.array:
            return fused_attention(self, self[project], self[output], x, mask, cache)

    return FusedRows


def seal_masks(attention_class: type[nn.Module]) -> type[nn.Module]:
    """Subclass an attention to pass its mask on unread.

    Some classes cut it by a length read from the device in every layer.
    """

    class SealedAttention(attention_class):  # type: ignore[misc,valid-type]
        def __call__(
            self, x: mx.array, mask: Any = None, cache: Any = None, **positions: Any
        ) -> mx.array:
            sealed = SealedMask(mask) if isinstance(mask, mx.array) else mask
            return super().__call__(x, mask=sealed, cache=cache, **positions)

    return SealedAttention
