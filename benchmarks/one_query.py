"""A decode step's attention on CUDA by our kernel (``vlm_batch.adapters.cuda.one_query``) and by MLX, and products of few bits.

    python -m benchmarks.one_query

Microseconds of one call, the least of several. Attention: of rows that see half to all of a slab's columns, by MLX without
and with a mask, and by the kernel; last, the kernel where one row sees all and the others 64. Products of 4 bits: of a
step's rows as they come, (B, 1, D), as one matrix, by weights that are widened, and by our kernel (``qmm``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.cuda import qmm
from vlm_batch.adapters.cuda.launches import on_device
from vlm_batch.adapters.cuda.one_query import attend

CALLS, TURNS = 20, 5
ROWS = (1, 8, 16, 32, 64)
#: Heads of queries and keys, and their width: LLaVA's and Qwen2.5-VL-3B's sizes, and one without shared keys.
HEADS = ((32, 8, 64), (16, 2, 128), (16, 16, 128))
COLUMNS = (256, 768, 2048)
#: Of products: few rows, and prompts.
PRODUCT_ROWS = (1, 2, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
#: Outputs and width.
PRODUCTS = ((8192, 2048), (2048, 8192), (32000, 2048))


def microseconds(call: Callable[[], Any]) -> float:
    mx.eval(call(), call())
    least = float("inf")
    for _ in range(TURNS):
        begin = time.perf_counter()
        mx.eval([call() for _ in range(CALLS)])
        least = min(least, time.perf_counter() - begin)
    return least / CALLS * 1e6


def main() -> None:
    half = mx.bfloat16
    print(
        "| heads | columns | rows | MLX, no mask | MLX | kernel | one long row |\n|---|---|---|---|---|---|---|"
    )
    for heads, kv_heads, width in HEADS:
        for columns in COLUMNS:
            for rows in ROWS:
                queries = mx.random.normal((rows, heads, 1, width)).astype(half)
                keys, values = (
                    mx.random.normal((rows, kv_heads, columns, width)).astype(half)
                    for _ in range(2)
                )
                ends = columns - mx.arange(rows) * (columns // 2) // rows
                short = mx.where(mx.arange(rows) > 0, 64, columns)
                mask, skewed = (
                    mx.arange(columns)[None, None, None] < one[:, None, None, None]
                    for one in (ends, short)
                )
                mx.eval(queries, keys, values, mask, skewed)
                plain = partial(
                    mx.fast.scaled_dot_product_attention,
                    queries,
                    keys,
                    values,
                    scale=width**-0.5,
                )
                ours = [
                    partial(attend, queries, keys, values, width**-0.5, one, on_device)
                    for one in (mask, skewed)
                ]
                figures = [
                    microseconds(one)
                    for one in (plain, partial(plain, mask=mask), *ours)
                ]
                print(
                    f"| {heads}, {kv_heads} of {width} | {columns} | {rows} |",
                    *(f"{one:.0f} |" for one in figures),
                )
    print(
        "\n| outputs, width | rows | (B, 1, D) | (B, D) | widened | kernel |\n|---|---|---|---|---|---|"
    )
    for outputs, width in PRODUCTS:
        layer = nn.QuantizedLinear(width, outputs, bias=False)
        packed = mx.quantize(mx.random.normal((outputs, width)).astype(half), 64, 4)
        layer.weight, layer.scales, layer.biases = packed
        for rows in PRODUCT_ROWS:
            states = mx.random.normal((rows, 1, width)).astype(half)
            mx.eval(packed, states)
            product = partial(
                mx.quantized_matmul, transpose=True, group_size=64, bits=4
            )
            figures = [
                microseconds(partial(product, one, *packed))
                for one in (states, states[:, 0])
            ]
            figures.append(microseconds(partial(widened, states[:, 0], packed)))
            figures.append(
                microseconds(partial(qmm.multiply, layer, states[:, 0], on_device))
            )
            print(
                f"| {outputs}, {width} | {rows} |", *(f"{one:.0f} |" for one in figures)
            )


def widened(rows: mx.array, packed: Any) -> mx.array:
    weight, scales, biases = packed
    return rows @ mx.dequantize(weight, scales, biases, group_size=64, bits=4).T


if __name__ == "__main__":
    main()
