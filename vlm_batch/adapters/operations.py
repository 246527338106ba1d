"""Attention, products and activations, each by whoever makes it fastest on this device.

The one door to ``cuda/``, which nobody needs to open who does not work on CUDA. The CPU's own ways are ``powers``,
``by_numpy``, ``packed`` and ``few_rows``. On Metal, MLX's operations are the fastest as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models import activations
from mlx_vlm.models.base import ensure_fused_sdpa

from vlm_batch.adapters import by_numpy, powers, turning
from vlm_batch.adapters.cuda import coding, compiling, delta, few_bits, fused, plans
from vlm_batch.adapters.cuda import turning as cuda_turning
from vlm_batch.adapters.cuda import windows as cuda_windows
from vlm_batch.adapters.cuda.convolution import ShortConvolution, embed_patches
from vlm_batch.adapters.cuda.flat import FlatEmbedding, FlatLinear
from vlm_batch.adapters.few_rows import FewRowsEmbedding, FewRowsLinear
from vlm_batch.adapters.hooks import current, running
from vlm_batch.adapters.masks import attend_groups, is_groupable
from vlm_batch.adapters.packed import DequantisedEmbedding, DequantisedLinear
from vlm_batch.adapters.powers import takes_powers
from vlm_batch.adapters.runs import Run
from vlm_batch.caches import turbo
from vlm_batch.caches.quantized import (
    QuantizedStates,
    SlabStates,
    attend_quantized,
)
from vlm_batch.runtime.device import Device, device

turbo.code_by_kernel = coding.code_where_right
TURBO_KERNELS = turning.Kernels(
    cuda_turning.attend_where_right, coding.restore_where_right
)

#: mlx-vlm's own function, kept before any hook.
SWIGLU = activations.swiglu
#: Each device's layers for MLX's.
LAYERS: Mapping[Device, Mapping[type, type]] = {
    Device.CPU: {
        nn.QuantizedLinear: DequantisedLinear,
        nn.QuantizedEmbedding: DequantisedEmbedding,
    },
    Device.CUDA: {
        nn.QuantizedLinear: FlatLinear,
        nn.QuantizedEmbedding: FlatEmbedding,
        nn.Conv1d: ShortConvolution,
    },
    Device.METAL: {},
}
#: Classes of linear layers, and of embeddings, which can be tied heads: MLX's, and those that stand for them anywhere.
LINEAR = (
    nn.Linear,
    nn.QuantizedLinear,
    DequantisedLinear,
    FlatLinear,
    FewRowsLinear,
)
PRODUCTS = (
    *LINEAR,
    nn.Embedding,
    nn.QuantizedEmbedding,
    DequantisedEmbedding,
    FlatEmbedding,
    FewRowsEmbedding,
)


def counts_launches() -> bool:
    """Whether launches dominate small operations, as on CUDA."""
    return device() is Device.CUDA


# Attention
# ----------------------------------------------------------------------------------------------------------------------


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any = None
) -> mx.array:
    """Compute ``mx.fast.scaled_dot_product_attention``.

    Args:
        queries: (B, H, L, D).
        keys: (B, H_kv, K, D).
        values: (B, H_kv, K, D_v).
        mask: None, "causal", or an array for (B, H, L, K), or for (B, H_kv, 1, K) with one query.
    """
    if current().attends_apart and queries.shape[0] > 1:
        return attend_apart(queries, keys, values, scale, mask)
    if is_groupable(queries, keys, mask) and mask.shape[1] > 1:
        return attend_groups(queries, keys, values, scale, mask)
    if counts_launches():
        return plans.attend(queries, keys, values, scale, mask)
    if takes_powers(queries):
        return powers.attend(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask
    )


def attend_apart(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> mx.array:
    """Run ``attend`` for each row separately."""
    has_rows = isinstance(mask, mx.array) and mask.ndim == 4
    is_each = has_rows and mask.shape[0] == queries.shape[0]
    rows = []
    with running(replace(current(), attends_apart=False)):
        for row in range(queries.shape[0]):
            own = slice(row, row + 1)
            seen = mask[own] if is_each else mask
            rows.append(attend(queries[own], keys[own], values[own], scale, seen))
    return mx.concatenate(rows)


def attend_all(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    """Attend without a mask among a picture's patches (B, H, L, D)."""
    if counts_launches() and plans.takes_plans(queries):
        return plans.attend_all(queries, keys, values, scale)
    if takes_powers(queries):
        return attend(queries, keys, values, scale)
    return ensure_fused_sdpa(queries, keys, values, scale)


def attend_windows(
    both: mx.array, values: mx.array, runs: tuple[Run, ...], size: int, scale: float
) -> mx.array | None:
    """Attend within windows of up to ``size`` patches in calls of few shapes; None where any shape is as good.

    Args:
        both: queries and keys (2, N, H, D).
        values: (N, H, D).
    """
    if counts_launches() and plans.takes_plans(both):
        return cuda_windows.attend(both, values, runs, size, scale)
    return None


def attend_packed(
    queries: mx.array,
    keys: QuantizedStates,
    values: QuantizedStates,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Attend over one row's keys and values in few bits."""
    if sinks is None:
        # several queries share one dequantisation
        if queries.shape[2] > 1:
            wide = keys.dequantized(), values.dequantized()
            return attend(queries, *wide, scale, mask)
        if powers.takes_codes(queries, keys, mask):
            return powers.attend_codes(queries, keys, values, scale)
    return attend_quantized(queries, keys, values, scale, mask, sinks)


def attend_packed_slab(
    queries: mx.array, keys: SlabStates, values: SlabStates, scale: float, mask: Any
) -> mx.array | None:
    """Attend over slabs in few bits as they are stored; None where they are to be unpacked."""
    return few_bits.attend_where_right(queries, keys, values, scale, mask)


def attend_turned(*terms: Any) -> mx.array:
    """Attend over TurboQuant's codes, in the terms of ``TurnedAttention``."""
    asked = turning.TurnedAttention(*terms)
    rows, _, length, _ = asked.queries.shape
    if current().attends_apart and rows > 1:
        return mx.concatenate([attend_turned(*one) for one in asked.rows()])
    if length > 1:
        return turning.attend_prompt(asked, attend, TURBO_KERNELS)
    return turning.attend_step(asked, TURBO_KERNELS)


def attend_turned_rows(*terms: Any) -> mx.array | None:
    """Attend over rows' TurboQuant codes in one call; None where rows are of another kind, or attend one by one."""
    return None if current().is_fixed else turning.attend_rows(*terms)


# Products
# ----------------------------------------------------------------------------------------------------------------------


def layers() -> Mapping[type, type]:
    """Return MLX's classes of layers -> this device's, if any."""
    return LAYERS[device()]


def fast_width(dtype: mx.Dtype) -> int:
    """Return the number of which widths of products in ``dtype`` should be multiples."""
    is_half = dtype in (mx.float16, mx.bfloat16)
    return plans.FAST_WIDTH if is_half and counts_launches() else 1


def embed_by_product(projection: Any, patches: mx.array) -> mx.array | None:
    """Convolve patches (N, values) as one product (N, D); None where MLX's convolution is as good."""
    return embed_patches(projection, patches) if counts_launches() else None


def compile_products(model: nn.Module) -> None:
    """Compile the kernels of a quantised model's products before the first prompt, where MLX would do so later."""
    compiling.compile_products(model)


def hook_rule(files: Iterable[str], family: str) -> None:
    """Hook mlx-vlm's gated delta rule, of which CUDA has a kernel, for the layers in imported files."""
    delta.hook_rule(files, family)


# Activations and positions
# ----------------------------------------------------------------------------------------------------------------------


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Compute mlx-vlm's ``swiglu``: SiLU of the gate, times ``x``."""
    gated = by_numpy.silu(gate)
    if gated is not None:
        return gated * x
    if takes_powers(gate):
        return gate * x / (1 + mx.power(powers.E, -gate))
    if not counts_launches():
        return SWIGLU(gate, x)
    # decode steps have few shapes to trace
    is_step = gate.shape[1:-1] == (1,)
    return fused.swiglu(gate, x) if is_step else SWIGLU(gate, x)


def turn_pairs(
    first: mx.array, second: mx.array, by_first: mx.array, by_second: mx.array
) -> mx.array:
    """Rotate pairs of numbers by broadcast factors."""
    if counts_launches():
        return fused.turn_pairs(first, second, by_first, by_second)
    return (first * by_first + second * by_second).astype(first.dtype)
