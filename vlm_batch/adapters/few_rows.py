"""Float32 products of a decode step's few rows with large matrices, by OpenBLAS.

OpenBLAS copies the matrix at every product, which takes most of a step. Its AVX-512 kernels copy matrices whose rows are a
multiple of 4 KB apart in half the time where the matrix is the left factor, and large matrices faster in blocks. The bits
stay the same in the versions below (tests/test_few_rows.py): later ones have other kernels for small products, such as a
block's. Measured in docs/log.md.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.runtime import blas

#: OpenBLAS's versions whose bits were compared.
VERSIONS = frozenset({"0.3.15"})
#: Float32 numbers in 4 KB: rows that lie a multiple of it apart share their lines of the first cache.
ALIASED = 1024
#: The fewest weights of other matrices that gain from blocks: 32 MB.
LARGE = 2**23
#: Widths of such matrices are multiples of this: with several threads OpenBLAS cuts the sums of others elsewhere.
EVEN = 64
#: Outputs of a block.
BLOCKS = (512, 256, 128)
#: The most rows that gain.
MOST_ROWS = 64
#: The most rows that gain with several threads: of more, each thread takes some and copies the whole matrix.
MOST_ROWS_OF_THREADS = 7


def multiply(
    rows: mx.array, weight: mx.array, bias: mx.array | None = None
) -> mx.array:
    """Return a product (..., outputs) of rows (..., width) and weights (outputs, width)."""
    outputs, width = weight.shape
    count = rows.size // width
    block = next((size for size in BLOCKS if outputs % size == 0), outputs)
    blocks, flat = weight.reshape(-1, block, width), rows.reshape(1, count, width)
    if width % ALIASED == 0:
        found = _product(blocks, flat.swapaxes(1, 2), bias, (-1, block, 1))
        product = found.reshape(outputs, count).T
    else:
        found = _product(flat, blocks.swapaxes(1, 2), bias, (-1, 1, block))
        product = found.swapaxes(0, 1)
    return mx.contiguous(product).reshape(*rows.shape[:-1], outputs)


def _product(
    left: mx.array, right: mx.array, bias: mx.array | None, shape: tuple[int, ...]
) -> mx.array:
    """Multiply matrices; a bias is added in ``shape``."""
    if bias is None:
        return left @ right
    return mx.addmm(bias.reshape(shape), left, right)


class FewRowsLinear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        if _gains(self, x):
            return multiply(x, self["weight"], self.get("bias"))
        return super().__call__(x)


class FewRowsEmbedding(nn.Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return multiply(x, self["weight"]) if _gains(self, x) else super().as_linear(x)


def _gains(layer: nn.Module, rows: mx.array) -> bool:
    most = rows.shape[-1] * layer.__dict__["most_rows"]
    return rows.dtype == mx.float32 and rows.size <= most


#: MLX's classes -> these.
KINDS: dict[type, type] = {nn.Linear: FewRowsLinear, nn.Embedding: FewRowsEmbedding}
#: These -> MLX's.
THEIRS = {ours: theirs for theirs, ours in KINDS.items()}


def suit_few_rows(model: nn.Module) -> None:
    """Let the layers of a private copy that gain make products of few rows so."""
    if mx.default_device().type != mx.DeviceType.cpu:
        return
    facts = blas.facts()
    if facts["core"] != "SkylakeX" or blas.version() not in VERSIONS:
        return
    is_one = facts["threads"] == "1"
    most_rows = MOST_ROWS if is_one else MOST_ROWS_OF_THREADS
    for module in model.modules():
        layer: Any = module
        ours = KINDS.get(type(layer))
        if ours is None or not _has_fitting_weight(layer, is_one):
            continue
        layer.__class__ = ours
        layer.__dict__["most_rows"] = most_rows


def _has_fitting_weight(layer: Any, is_one: bool) -> bool:
    """Whether a layer's products of few rows gain, where one thread makes them or several."""
    weight, bias = layer.get("weight"), layer.get("bias")
    if weight is None or weight.dtype != mx.float32 or weight.ndim != 2:
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    if not _gains_by_blocks(weight, is_one):
        return False
    return bool(memoryview(weight).c_contiguous)


def _gains_by_blocks(weight: mx.array, is_one: bool) -> bool:
    """Whether products with weights (outputs, width) gain from blocks."""
    outputs, width = weight.shape
    if outputs < BLOCKS[-1] or not width:
        return False
    step = EVEN if is_one and weight.size >= LARGE else ALIASED
    return width % step == 0
