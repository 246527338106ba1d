"""Attention and activations of prompts and towers on a CPU, where numpy's exponentials are the faster ones.

MLX's functions of large arrays are replaced while an adapter encodes or prefills (``runtime.exponentials`` says where and
why), for all of mlx-vlm's code at once. Decode steps keep MLX's: they may become graphs, and their arrays are small.
mlx-vlm's compiled functions with exponentials run uncompiled then, since nothing in a graph can be evaluated.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, wraps
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers import activations

from vlm_batch.adapters.hooks import current, hook, is_adapting, is_hook
from vlm_batch.runtime import exponentials
from vlm_batch.runtime.exponentials import FEWEST, FLOATS, Kernel

#: Scores of a block of attention: 2 MB.
BLOCK_SCORES = 2**19
#: Scores of attention that count as one exponential: numpy's attention begins to pay at 2**15 of them (docs/log.md).
SCORES_AS_ONE = 8
#: The fewest queries of a block: fewer would have the keys copied too often.
FEWEST_QUERIES = 32
#: Queries of a block that see different keys: of what a larger one scores, more is masked.
CAUSAL_QUERIES = 64

#: MLX's functions of single numbers -> numpy's kernels.
OF_NUMBERS: Mapping[str, Kernel] = {
    "exp": exponentials.exp,
    "sin": exponentials.sin,
    "cos": exponentials.cos,
    "tanh": exponentials.tanh,
    "erf": exponentials.erf,
    "sigmoid": exponentials.sigmoid,
}
#: The same of ``mlx.nn``, which are compiled.
OF_LAYERS: Mapping[str, Kernel] = {
    "sigmoid": exponentials.sigmoid,
    "silu": exponentials.silu,
    "gelu": exponentials.gelu,
    "gelu_approx": exponentials.gelu_by_tanh,
    "gelu_fast_approx": exponentials.gelu_by_sigmoid,
}
#: Names by which a function's code asks for exponentials.
NAMES = frozenset(
    {*OF_NUMBERS, *OF_LAYERS, "softmax", "logsumexp", "softplus", "logaddexp"}
)

SOFTMAX, LOGSUMEXP = exponentials.SOFTMAX, exponentials.LOGSUMEXP
ATTENTION = mx.fast.scaled_dot_product_attention
LOWEST = np.finfo(np.float32).min


def takes(array: Any, size: int | None = None) -> bool:
    """Whether the current call is a prompt's or a tower's, and numpy computes ``size`` exponentials of this array.

    The size of one row (prompt, picture, crop) decides: MLX's and numpy's last bits differ, and how many rows share an array
    must not matter. With fixed shapes every array counts as large.
    """
    if not is_adapting() or not isinstance(array, mx.array):
        return False
    if current().positions is not None:
        return False
    if array.dtype not in FLOATS or not array.size:
        return False
    if not _is_large(array, array.size if size is None else size):
        return False
    return exponentials.is_numpys()


def _is_large(array: mx.array, size: int) -> bool:
    """Whether ``size`` exponentials of an array are many for each of its rows."""
    if current().is_fixed:
        return True
    num_rows = array.shape[0] if array.ndim > 2 else 1
    return size >= num_rows * FEWEST


# Attention ------------------------------------------------------------------------------------------------------------


def takes_attention(queries: mx.array, keys: mx.array) -> bool:
    """Whether numpy computes the exponentials of this attention."""
    num_scores = math.prod(queries.shape[:3]) * keys.shape[2]
    return takes(queries, num_scores // SCORES_AS_ONE)


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any = None
) -> mx.array | None:
    """Attend block by block, in float32; None while MLX traces.

    Args:
        queries: (B, H, L, D).
        keys: (B, H_kv, K, D).
        values: (B, H_kv, K, D_v).
        mask: None, "causal", or an array for (B, H, L, K): truths, or numbers to add.
    """
    batch, heads, length, width = queries.shape
    kv_heads, columns = keys.shape[1:3]
    shared, depth = heads // kv_heads, values.shape[3]
    is_causal = isinstance(mask, str)
    parts = [part.astype(mx.float32) for part in (queries, keys, values)]
    out = mx.zeros((batch, length, heads, depth))  # as layers read it
    masks = [mask] if isinstance(mask, mx.array) else []
    if not exponentials.evaluated(*parts, out, *masks):
        return None
    # (B H_kv, G L or K, D)
    rows, keys, values = (_by_heads(part, kv_heads) for part in parts)
    rows = (rows * scale).reshape(-1, shared, length, width)
    turned = keys.swapaxes(1, 2)
    found = (
        exponentials.view(out)
        .reshape(batch, length, kv_heads, shared, depth)
        .transpose(0, 2, 3, 1, 4)
    )
    hidden = [
        _by_groups(one, (batch, kv_heads, shared, length, columns)) for one in masks
    ]
    most = CAUSAL_QUERIES if is_causal else length
    blocks = _blocks(batch * kv_heads, length, shared * columns, most)
    with np.errstate(all="ignore"):
        for heads_at, queries_at in blocks:
            seen = columns - length + queries_at.stop if is_causal else columns
            # (N, G l, D)
            block = rows[heads_at, :, queries_at].flatten(1, 2)
            scores = block @ turned[heads_at, :, :seen]
            mx.eval(scores)
            weights = exponentials.view(scores)
            apart = weights.reshape(len(weights), shared, -1, seen)  # (N, G, l, K)
            if is_causal:
                later = _later(apart.shape[2])
                np.copyto(apart[..., -len(later) :], LOWEST, where=later)
            for one in hidden:
                _hide(apart, one[..., queries_at, :], heads_at)
            totals = exponentials.turned(weights)  # (N, G l, 1)
            attended = scores @ values[heads_at, :seen]
            mx.eval(attended)
            done = exponentials.view(attended)
            done /= totals
            done = done.reshape(*apart.shape[:3], depth)
            for own, head in zip(
                done, range(heads_at.start, heads_at.stop), strict=True
            ):
                found[divmod(head, kv_heads)][:, queries_at] = own
    return out.swapaxes(1, 2).astype(queries.dtype)


def _by_heads(array: mx.array, kv_heads: int) -> mx.array:
    """Return an evaluated array (B, H, L, D) as (B H_kv, G L, D). MLX copies rows that lie apart number by number."""
    batch, heads, length, width = array.shape
    copy = mx.zeros((batch * kv_heads, heads // kv_heads * length, width))
    mx.eval(copy)
    exponentials.view(copy).reshape(array.shape)[...] = exponentials.view(array)
    return copy


def _by_groups(mask: mx.array, shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask for (B, H, L, K) as a view of its truths or numbers for (B, H_kv, G, L, K)."""
    own: Any = np.array(mask if mask.dtype == mx.bool_ else mask.astype(mx.float32))
    own = own.reshape((1,) * (4 - own.ndim) + own.shape)
    heads = shape[1:3] if own.shape[1] > 1 else (1, 1)
    apart = own.reshape(own.shape[0], *heads, *own.shape[2:])
    return np.broadcast_to(apart, shape)


def _hide(scores: np.ndarray, mask: np.ndarray, heads: slice) -> None:
    """Mask scores (N, G, l, K) of some heads of (B, H_kv, G, l, K) in place."""
    for own, head in zip(scores, range(heads.start, heads.stop), strict=True):
        hidden = mask[divmod(head, mask.shape[1])]
        if hidden.dtype == np.bool_:
            np.copyto(own, LOWEST, where=~hidden)
        else:
            own += hidden


@cache
def _later(length: int) -> np.ndarray:
    return np.triu(np.ones((length, length), np.bool_), 1)


def _blocks(
    heads: int, length: int, columns: int, most: int
) -> Iterator[tuple[slice, slice]]:
    """Cut (heads, queries) into blocks of about ``BLOCK_SCORES`` scores and ``most`` queries, of several heads if possible.

    Queries are cut by the shape of one head alone, so that a row's products do not depend on how many share a call.
    """
    size = min(length, most, max(FEWEST_QUERIES, BLOCK_SCORES // columns))
    together = max(1, BLOCK_SCORES // (size * columns))
    for head in range(0, heads, together):
        for start in range(0, length, size):
            own = slice(start, min(start + size, length))
            yield slice(head, min(head + together, heads)), own


def _attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: Any = None,
    sinks: Any = None,
    **how: Any,
) -> mx.array:
    if sinks is None and takes_attention(q, k):
        found = attend(q, k, v, scale, mask)
        if found is not None:
            return found
    return ATTENTION(q, k, v, scale=scale, mask=mask, sinks=sinks, **how)


# Functions ------------------------------------------------------------------------------------------------------------


def _softmax(a: mx.array, /, axis: Any = None, **how: Any) -> mx.array:
    if _is_last(a, axis) and takes(a):
        found = exponentials.softmax(a)
        if found is not None:
            return found
    return SOFTMAX(a, axis, **how)


def _logsumexp(
    a: mx.array, /, axis: Any = None, keepdims: bool = False, **how: Any
) -> mx.array:
    if _is_last(a, axis) and takes(a):
        found = exponentials.logsumexp(a)
        if found is not None:
            return found[..., None] if keepdims else found
    return LOGSUMEXP(a, axis, keepdims, **how)


def _is_last(array: Any, axis: Any) -> bool:
    """Whether an axis, or the only one of several, is an array's last."""
    if not isinstance(array, mx.array) or not array.ndim:
        return False
    axes = tuple(axis) if isinstance(axis, (list, tuple)) else (axis,)
    return axes in ((-1,), (array.ndim - 1,))


def _of_numbers(theirs: Callable[..., Any], kernel: Kernel) -> Callable[..., Any]:
    def ours(x: mx.array, /, **how: Any) -> mx.array:
        if takes(x):
            found = exponentials.changed(kernel, x)
            if found is not None:
                return found
        return theirs(x, **how)

    return ours


def silu(x: mx.array) -> mx.array | None:
    """Return SiLU by numpy; None where MLX's is to be used."""
    return exponentials.changed(exponentials.silu, x) if takes(x) else None


def _uncompiled(
    theirs: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[..., Any]:
    def ours(*args: Any, **kwargs: Any) -> Any:
        function = plain if any(map(takes, args)) else theirs
        return function(*args, **kwargs)

    return ours


# Hooks ----------------------------------------------------------------------------------------------------------------

_COMPILED = type(nn.silu)


@cache
def _hooks() -> dict[int, tuple[Any, Callable[..., Any]]]:
    """Return MLX's functions and their stand-ins, by the functions' ids."""
    module: Any = mx
    pairs = [
        (theirs, _of_numbers(theirs, kernel))
        for name, kernel in OF_NUMBERS.items()
        if (theirs := vars(module)[name])
    ]
    pairs += [
        (vars(activations)[name], _of_numbers(vars(activations)[name], one))
        for name, one in OF_LAYERS.items()
    ]
    pairs += [(SOFTMAX, _softmax), (LOGSUMEXP, _logsumexp), (ATTENTION, _attention)]
    return {id(theirs): (theirs, hook(theirs, ours).either) for theirs, ours in pairs}


@cache
def _compiled_hook(theirs: Any) -> Callable[..., Any] | None:
    """Return a compiled function's stand-in, if its code asks for exponentials."""
    for plain in gc.get_referents(theirs):
        if isinstance(plain, FunctionType):
            if NAMES.isdisjoint(plain.__code__.co_names):
                return None
            return hook(theirs, _uncompiled(theirs, plain)).either
    return None


def _stand_in(bound: Any) -> Any:
    known = _hooks().get(id(bound))
    if known is not None:
        return known[1]
    if type(bound) is not _COMPILED:
        return bound
    return _compiled_hook(bound) or bound


def hook_exponentials(model: nn.Module, files: Iterable[str]) -> None:
    """Hook MLX's functions, where numpy is faster, and what a private copy and imported files hold of them."""
    if not exponentials.is_numpys():
        return
    for home in (mx, mx.fast, nn, activations):
        _rebind(vars(home))
    for file in files:
        _rebind(vars(sys.modules[file]))
    for module in model.modules():
        _rebind(vars(module))
    _hook_layers()


def _rebind(space: dict[str, Any]) -> None:
    for name, bound in list(space.items()):
        if isinstance(bound, dict):
            if name.isupper():  # a table of activations
                _rebind(bound)
            continue
        if not callable(bound) or is_hook(bound):
            continue
        found = _stand_in(bound)
        if found is not bound:
            space[name] = found


@cache
def _hook_layers() -> None:
    """Hook MLX's layers that hold functions from before."""
    for kind, name in ((nn.SiLU, "silu"), (nn.Sigmoid, "sigmoid")):
        theirs: Any = kind.__call__
        kind.__call__ = hook(theirs, _calling(vars(activations)[name])).either  # type: ignore[method-assign]


def _calling(function: Callable[[mx.array], mx.array]) -> Callable[..., mx.array]:
    return wraps(function)(lambda self, x: function(x))
