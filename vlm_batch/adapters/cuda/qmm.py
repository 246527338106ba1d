"""Products of few rows and weights in 4 or 8 bits on CUDA (``qmm.cu``).

MLX 0.32 reads all weights again for each of 2 to 7 rows, compiles a kernel for a minute for more, and leaves most of the
device idle where outputs are few (docs/log.md). A row's bits depend on no other row.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.cuda.launches import (
    Kernel,
    Launch,
    Run,
    is_right,
    kernel,
    on_device,
)

#: Equal to the constants of ``qmm.cu``.
WARP, WARPS, OUTPUTS, ROWS = 32, 8, 16, 64
#: Blocks of a launch, up to which more warps share outputs.
BLOCKS = 256
BITS = (4, 8)
GROUPS = (32, 64, 128)
TYPES = (mx.bfloat16, mx.float16)
#: The largest allowed error in units of the largest product.
TOLERANCE = 0.01


class ProductBuild(NamedTuple):
    """The facts that a kernel is built for."""

    dtype: mx.Dtype
    bits: int
    group_size: int


@lru_cache(maxsize=1)
def _kernel() -> Kernel:
    inputs = ("rows", "weight", "scales", "biases", "bias")
    matrices = ", ".join(
        f"{{{name}, {name}_strides[0], {name}_strides[1]}}" for name in inputs[:4]
    )
    body = f"""
  qmm::multiply<T, BITS, GROUP>(
      {matrices}, bias_shape[0] == 1 ? nullptr : bias, rows_shape[0], weight_shape[0], rows_shape[1], out);
"""
    return kernel("qmm", "multiply", inputs, ("out",), body)


@lru_cache(maxsize=256)
def launch_of(build: ProductBuild, rows: int, outputs: int) -> Launch:
    parts = WARPS  # that share 16 outputs
    while parts > 1 and -(-outputs * parts // (WARPS * OUTPUTS)) > BLOCKS:
        parts //= 2
    blocks = -(-outputs * parts // (WARPS * OUTPUTS))
    return Launch(
        _kernel(),
        (("T", build.dtype), ("BITS", build.bits), ("GROUP", build.group_size)),
        (WARP * WARPS * blocks, -(-rows // ROWS), 1),
        (WARP * WARPS, 1, 1),
        ((rows, outputs),),
        (build.dtype,),
    )


def multiply_where_right(layer: Any, rows: mx.array) -> mx.array | None:
    """Run ``multiply`` if the kernel supports this layer and these rows accurately here, else return None."""
    if not is_served(layer, rows):
        return None
    if not _is_right(ProductBuild(rows.dtype, layer.bits, layer.group_size)):
        return None
    return multiply(layer, rows, on_device)


def is_served(layer: Any, rows: mx.array) -> bool:
    """Whether the kernel is written for a layer and rows (N, width)."""
    if not suits(layer) or rows.dtype != layer["scales"].dtype:
        return False
    return rows.ndim == 2 and rows.shape[0] > 0


def suits(layer: Any) -> bool:
    """Whether the kernel is written for a layer's weight, with rows of the type of its scales."""
    outputs, dtype = layer["scales"].shape[0], layer["scales"].dtype
    needs = (
        layer.mode == "affine",
        layer.bits in BITS,
        layer.group_size in GROUPS,
        outputs > 1,
        dtype in TYPES,
        layer.get("bias", layer["scales"]).dtype == dtype,
    )
    return all(needs)


def multiply(layer: Any, rows: mx.array, run: Run) -> mx.array:
    """Return the product (N, outputs) of rows (N, width) and a layer's weight (outputs, width), with its bias, if any.

    Args:
        run: Runs a launch.
    """
    bias = layer["bias"] if "bias" in layer else _nothing(rows.dtype)
    parts = [layer["weight"], layer["scales"], layer["biases"], bias]
    build = ProductBuild(rows.dtype, layer.bits, layer.group_size)
    return run(
        launch_of(build, rows.shape[0], layer["scales"].shape[0]), [rows, *parts]
    )[0]


@lru_cache(maxsize=4)
def _nothing(dtype: mx.Dtype) -> mx.array:
    """Return what stands for no bias; shared by threads, so evaluated."""
    found = mx.zeros((1,), dtype)
    mx.eval(found)
    return found


@lru_cache(maxsize=16)
def _is_right(build: ProductBuild) -> bool:
    return is_right(
        lambda: farthest(build, on_device),
        TOLERANCE,
        "few rows are multiplied by MLX: the kernel for weights in few bits",
    )


def farthest(
    build: ProductBuild,
    run: Run,
    count: int = 11,
    outputs: int = 40,
    groups: int = 11,
    seed: int = 0,
    *,
    has_bias: bool = True,
) -> float:
    """Return the largest error against an exact product of random numbers, in units of the largest answer."""
    layer, rows = example(build, count, outputs, groups, seed, has_bias=has_bias)
    found = np.array(multiply(layer, rows, run).astype(mx.float32))
    right = exact(layer, rows)
    return float(np.max(np.abs(found - right)) / np.abs(right).max())


def example(
    build: ProductBuild,
    count: int,
    outputs: int,
    groups: int,
    seed: int,
    *,
    has_bias: bool,
) -> tuple[nn.QuantizedLinear, mx.array]:
    random, width = np.random.RandomState(seed), groups * build.group_size
    layer = nn.QuantizedLinear(
        width, outputs, bias=has_bias, group_size=build.group_size, bits=build.bits
    )
    weight = mx.array(
        random.standard_normal((outputs, width)).astype(np.float32)
    ).astype(build.dtype)
    layer.weight, layer.scales, layer.biases = mx.quantize(
        weight, build.group_size, build.bits
    )
    if has_bias:
        layer.bias = mx.array(10 * random.standard_normal(outputs)).astype(build.dtype)
    return layer, mx.array(
        random.standard_normal((count, width)).astype(np.float32)
    ).astype(build.dtype)


def exact(layer: Any, rows: mx.array) -> np.ndarray:
    """Return the product in float64."""
    scales, biases = (
        np.array(layer[name].astype(mx.float32), np.float64)
        for name in ("scales", "biases")
    )
    words, per_word = np.array(layer["weight"]), 32 // layer.bits
    codes = words[:, :, None] >> (layer.bits * np.arange(per_word, dtype=np.uint32)) & (
        2**layer.bits - 1
    )
    codes = codes.reshape(*scales.shape, layer.group_size)
    weight = (codes * scales[..., None] + biases[..., None]).reshape(len(words), -1)
    found: np.ndarray = np.array(rows.astype(mx.float32), np.float64) @ weight.T
    return (
        found + np.array(layer["bias"].astype(mx.float32)) if "bias" in layer else found
    )
