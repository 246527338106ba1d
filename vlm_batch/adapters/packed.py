"""Products of weights in few bits, made the fastest way on a device.

On a CPU, weights are widened a part at a time. MLX's kernels of few bits are slow there, and sum in the rows' precision: a
product of 2,048 numbers in bfloat16 is 3 % off. For 720 rows they take 40 times as long as this in float32, and 280 times in
bfloat16.

On CUDA, all rows are one matrix. MLX 0.32 makes a decode step's rows (B, 1, D) B products of one row, each of which reads all
weights (mlx/backend/cuda/quantized/qmm/qmm_utils.h, ``make_problem_shape``); on Metal it makes one. In half precision, few
rows, and all of a decode step, have a kernel of their own (``qmm``). For the many rows of a prompt, weights are widened, and
the product is a dense one (docs/log.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters import qmm
from vlm_batch.adapters.hooks import current
from vlm_batch.runtime.device import Device, device

#: Weights that are widened at once: 16 MB.
PART = 2**22
#: Fewer float32 rows than this are multiplied by MLX's kernel: widening takes as long as three of them.
FEW_ROWS = 4
#: CUDA: the fewest rows for which weights are widened, and the bytes of wide weights after which the device is waited
#: for, which are assumed.
MANY_ROWS = qmm.ROWS + 1
MOST_WIDE = 2**31


def multiply(rows: mx.array, layer: Any, expert: int | None = None) -> mx.array | None:
    """Return a product, or None where MLX's kernel is to make it.

    Args:
        rows: (..., width).
        layer: has weights (outputs, width) in few bits, or those of several experts, of which ``expert`` names one.

    Returns:
        The product (..., outputs).
    """
    width = rows.shape[-1]
    count = rows.size // width
    if layer.mode != "affine" or (rows.dtype == mx.float32 and count < FEW_ROWS):
        return None
    wide, step = rows.astype(mx.float32).reshape(count, width), max(1, PART // width)
    found: list[mx.array] = []
    arrays = [
        layer[name] if expert is None else layer[name][expert]
        for name in ("weight", "scales", "biases")
    ]
    for first in range(0, arrays[0].shape[0], step):
        packed, scales, biases = (array[first : first + step] for array in arrays)
        # else MLX widens all parts first
        packed = mx.depends([packed], [found[-1] if found else wide])[0]
        by = (scales.astype(mx.float32), biases.astype(mx.float32))
        found.append(
            wide
            @ mx.dequantize(packed, *by, group_size=layer.group_size, bits=layer.bits).T
        )
    product = found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)
    return product.reshape(*rows.shape[:-1], -1).astype(rows.dtype)


class DequantisedLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        product = multiply(x, self)
        if product is None:
            return super().__call__(x)
        return product + self["bias"] if "bias" in self else product


class DequantisedEmbedding(nn.QuantizedEmbedding):
    def as_linear(self, x: mx.array) -> mx.array:
        product = multiply(x, self)
        return super().as_linear(x) if product is None else product


class FlatLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        return _flat(self, super().__call__, x)


class FlatEmbedding(nn.QuantizedEmbedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return _flat(self, super().as_linear, x)


def _flat(
    layer: Any, product: Callable[[mx.array], mx.array], rows: mx.array
) -> mx.array:
    """Return a layer's product of rows (..., width) as of one matrix."""
    flat = rows.flatten(0, -2) if rows.ndim > 2 and rows.size else rows
    found = (
        _widened(layer, flat)
        if gains_from_width(layer, flat)
        else qmm.multiply_where_right(layer, flat)
    )
    found = product(flat) if found is None else found
    return (
        found
        if found.ndim == rows.ndim
        else found.reshape(*rows.shape[:-1], found.shape[-1])
    )


def gains_from_width(layer: Any, rows: mx.array) -> bool:
    """Whether a prompt's or a tower's rows (N, width) take wide weights; a decode step may be a graph, which cannot wait."""
    if current().positions is not None:
        return False
    is_half = (
        rows.dtype in (mx.bfloat16, mx.float16) and rows.dtype == layer["scales"].dtype
    )
    return (
        is_half
        and rows.ndim == 2
        and rows.shape[0] >= MANY_ROWS
        and layer.mode == "affine"
    )


class _Launched(threading.local):
    """Bytes of wide weights that this thread has launched and not waited for."""

    bytes = 0


_launched = _Launched()


def _widened(layer: Any, rows: mx.array) -> mx.array:
    how = {"group_size": layer.group_size, "bits": layer.bits}
    weight = mx.dequantize(layer["weight"], layer["scales"], layer["biases"], **how)
    _launched.bytes += weight.nbytes
    # MLX frees what a launch has read when the device is through with it
    if _launched.bytes > MOST_WIDE:
        mx.eval(rows)
        _launched.bytes = weight.nbytes
    return (
        mx.addmm(layer["bias"], rows, weight.T) if "bias" in layer else rows @ weight.T
    )


#: A device's layers for MLX's ``QuantizedLinear`` and ``QuantizedEmbedding``.
KINDS: dict[Device, tuple[type, type]] = {
    Device.CPU: (DequantisedLinear, DequantisedEmbedding),
    Device.CUDA: (FlatLinear, FlatEmbedding),
}


def replacements() -> dict[type, type]:
    """Return MLX's classes -> this device's, if any."""
    kinds = KINDS.get(device(), ())
    return dict(zip((nn.QuantizedLinear, nn.QuantizedEmbedding), kinds, strict=False))
