"""Attention that mlx-vlm's modules call in an adapter: over rows that keep their own caches, quantised rows, and by the cheaper
kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models import base as upstream

from vlm_batch.adapters import few_bits, kernels
from vlm_batch.adapters.hooks import hook
from vlm_batch.caches.quantized import QuantizedStates, SlabStates, attend_quantized, unpacked
from vlm_batch.caches.rows import RowsCache, RowStates, attend_rows
from vlm_batch.caches.turbo import TurboStates

#: mlx-vlm's, whatever its name is bound to later.
SCALED_DOT_PRODUCT_ATTENTION = upstream.scaled_dot_product_attention


@dataclass(frozen=True)
class SealedMask:
    """A mask that the model's code hands on unread to the hooked attention."""

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
    """mlx-vlm's ``scaled_dot_product_attention``, and the same over rows that keep their own caches."""
    if isinstance(mask, SealedMask):
        mask = mask.mask
    if isinstance(keys, RowStates):
        return attend_rows(attention, queries, keys, values, scale, mask, sinks)
    if isinstance(keys, QuantizedStates):
        if queries.shape[2] > 1 and sinks is None:  # several queries are worth unpacking the numbers once for all
            return kernels.attend(queries, keys.dequantized(), values.dequantized(), scale, mask)
        if sinks is None and kernels.takes_codes(queries, keys, mask):
            return kernels.attend_codes(queries, keys, values, scale)
        return attend_quantized(queries, keys, values, scale, mask, sinks)
    if isinstance(keys, SlabStates):
        found = few_bits.attended(queries, keys, values, scale, mask) if sinks is None else None
        if found is not None:
            return found
        keys, values = unpacked(keys, values)
    if isinstance(keys, TurboStates):
        cache = keys.cache
    elif sinks is None and isinstance(keys, mx.array) and not hasattr(cache, "bits"):  # whole arrays, none of few bits
        return kernels.attend(queries, keys, values, scale, mask)
    return SCALED_DOT_PRODUCT_ATTENTION(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)


#: The functions that a language model's files call within an adapter. Most of mlx-vlm's models call a module-level
#: ``scaled_dot_product_attention``; with that one name replaced, attention runs a row at a time on unmodified model code.
HOOKS = {
    "scaled_dot_product_attention": hook(SCALED_DOT_PRODUCT_ATTENTION, attention),
    "swiglu": hook(kernels.SWIGLU, kernels.swiglu),
}


def row_by_row(attention_class: type[nn.Module]) -> type[nn.Module]:
    """The same attention, called once for each live row of a batch with the row's own cache.

    For classes that do more with a cache than one attention call can hold apart (selected positions, pools). What else a
    layer does, its experts above all, stays one call for all rows. Empty places answer zeros.
    """

    class RowByRow(attention_class):  # type: ignore[misc,valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Any arguments, arrays of which have the rows along their first axis; arrays, or tuples of them."""
            rows = next((value for value in (*args, *kwargs.values()) if isinstance(value, RowsCache)), None)
            if rows is None:
                return super().__call__(*args, **kwargs)
            return each_row(super().__call__, rows, *args, **kwargs)

    return RowByRow


def each_row(function: Callable[..., Any], rows: RowsCache, *args: Any, **kwargs: Any) -> Any:
    """Call a function once for each live row of ``rows``; its arrays, or tuples of them, joined along the first axis.

    Arrays among the arguments are cut to the row, (B, ...) to (1, ...), and of a batch's layer the row's own cache is given.
    Empty places answer zeros; one row at least is live.
    """
    answers = {
        place: function(
            *(_of_row(value, place) for value in args),
            **{name: _of_row(value, place) for name, value in kwargs.items()},
        )
        for place, single in enumerate(rows.places)
        if single is not None
    }
    like = next(iter(answers.values()))
    empty = tuple(map(mx.zeros_like, like)) if isinstance(like, tuple) else mx.zeros_like(like)
    filled = [answers.get(place, empty) for place in range(len(rows.places))]
    if isinstance(like, tuple):
        return tuple(mx.concatenate(list(part)) for part in zip(*filled, strict=True))
    return mx.concatenate(filled)


def _of_row(value: Any, place: int) -> Any:
    if isinstance(value, RowsCache):
        return value.places[place]
    return value[place : place + 1] if isinstance(value, mx.array) else value


def fused_attention(module: Any, project: Any, output: Any, x: mx.array, mask: Any, cache: Any) -> mx.array:
    """The attention of a module with one projection for queries, keys and values: (B, L, D) -> (B, L, D).

    For families that call ``mx.fast`` themselves, past the hook. ``module`` has ``n_heads``, ``n_kv_heads``,
    ``head_dim``, ``scale`` and ``rope``.
    """
    batch, length, _ = x.shape
    heads, kv_heads = module.n_heads, module.n_kv_heads
    split = project(x).reshape(batch, length, heads + 2 * kv_heads, module.head_dim).swapaxes(1, 2)
    queries, keys, values = mx.split(split, [heads, heads + kv_heads], axis=1)  # (B, H, L, D_head)
    queries, keys = (module.rope(rotated, offset=cache.offset) for rotated in (queries, keys))
    keys, values = cache.update_and_fetch(keys, values)
    return output(attention(queries, keys, values, cache, module.scale, mask).swapaxes(1, 2).flatten(-2))


def fuse_rows(attention_class: type[nn.Module], project: str, output: str) -> type[nn.Module]:
    """The same attention by ``fused_attention``, for classes that call ``mx.fast`` past the hook, which knows no rows.

    ``project`` and ``output`` name the module's projections.
    """

    class FusedRows(attention_class):  # type: ignore[misc,valid-type]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            """(B, L, D) -> (B, L, D)"""
            return fused_attention(self, self[project], self[output], x, mask, cache)

    return FusedRows


def seal_masks(attention_class: type[nn.Module]) -> type[nn.Module]:
    """The same attention, which hands its mask on unread.

    For classes that cut a mask to the longest row's length, some of which read that back from the device for every layer: a
    slab's mask is as wide as the slab's keys already, and stays one array for all layers (``kernels.added``).
    """

    class SealedAttention(attention_class):  # type: ignore[misc,valid-type]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, **positions: Any) -> mx.array:
            """(B, L, D) -> (B, L, D)"""
            sealed = SealedMask(mask) if isinstance(mask, mx.array) else mask
            return super().__call__(x, mask=sealed, cache=cache, **positions)

    return SealedAttention
