"""Layers of weights in few bits whose rows are one matrix.

MLX 0.32 makes a decode step's rows (B, 1, D) B products of one row, each of which reads all weights
(mlx/backend/cuda/quantized/qmm/qmm_utils.h, ``make_problem_shape``); on Metal it makes one. In half precision, few rows, and
all of a decode step, have a kernel of their own (``qmm``). For the many rows of a prompt, weights are widened, and the
product is a dense one (docs/log.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.cuda import qmm
from vlm_batch.adapters.hooks import current

#: The fewest rows for which weights are widened.
MANY_ROWS = qmm.ROWS + 1
#: The bytes of wide weights after which the device is waited for. Both are assumed.
MOST_WIDE = 2**31


class FlatLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        return _flat(self, super().__call__, x)


class FlatEmbedding(nn.QuantizedEmbedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return _flat(self, super().as_linear, x)


def _flat(
    layer: Any, product: Callable[[mx.array], mx.array], rows: mx.array
) -> mx.array:
    """Return a layer's product of rows (..., width) as of one matrix; ``product`` is MLX's own."""
    flat = rows.flatten(0, -2) if rows.ndim > 2 and rows.size else rows
    if gains_from_width(layer, flat):
        found = _widened(layer, flat)
    else:
        ours = qmm.multiply_where_right(layer, flat)
        found = product(flat) if ours is None else ours
    if found.ndim == rows.ndim:
        return found
    return found.reshape(*rows.shape[:-1], found.shape[-1])


def gains_from_width(layer: Any, rows: mx.array) -> bool:
    """Whether a prompt's or a tower's rows (N, width) take wide weights; a decode step may be a graph, which cannot wait."""
    if current().positions is not None:
        return False
    needs = (
        layer.mode == "affine",
        rows.ndim == 2,
        rows.shape[0] >= MANY_ROWS,
        rows.dtype in (mx.bfloat16, mx.float16),
        rows.dtype == layer["scales"].dtype,
    )
    return all(needs)


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
    if "bias" in layer:
        return mx.addmm(layer["bias"], rows, weight.T)
    return rows @ weight.T
