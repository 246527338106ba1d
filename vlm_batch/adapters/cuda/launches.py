"""Kernels of our own: how they are built of the sources beside this file, launched, and compared before they are trusted."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from vlm_batch.arrays import round_up
from vlm_batch.errors import describe, is_out_of_memory

logger = logging.getLogger(__name__)

#: Threads of a warp, and partial sums of a number when spans are merged.
WARP = 32
SIDES = 4


class Kernel(NamedTuple):
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str


@dataclass(frozen=True)
class Launch:
    """A kernel's arguments for ``mx.fast.cuda_kernel``; the grid counts threads."""

    kernel: Kernel
    template: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]


#: Runs one launch on its arrays.
Run = Callable[[Launch, Sequence[mx.array]], list[mx.array]]


def kernel(
    file: str,
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    body: str,
    *,
    uses: Sequence[str] = (),
) -> Kernel:
    """Return a kernel whose functions are in ``file``, beside this module, and those that it ``uses``."""
    header = "\n".join(
        Path(__file__).with_name(f"{one}.cu").read_text(encoding="utf-8")
        for one in (*uses, file)
    )
    # MLX caches kernels by name
    source = hashlib.sha256((header + body).encode()).hexdigest()[:12]
    return Kernel(f"{file}_{name}_{source}", inputs, outputs, header, body)


@lru_cache(maxsize=64)
def merging(dtype: mx.Dtype, rows: int, heads: int, depth: int) -> Launch:
    """Return a launch that makes (rows, heads, 1, depth) of what blocks found of spans of columns (``spans.cu``)."""
    body = "\n  spans::merge<T, DEPTH, SIDES>(sums, stats, stats_shape[2], out);\n"
    block = round_up(depth, WARP) * SIDES
    return Launch(
        kernel("spans", "merge", ("sums", "stats"), ("out",), body),
        (("T", dtype), ("DEPTH", depth), ("SIDES", SIDES)),
        (rows * heads * block, 1, 1),
        (block, 1, 1),
        ((rows, heads, 1, depth),),
        (dtype,),
    )


def on_device(launch: Launch, arrays: Sequence[mx.array]) -> list[mx.array]:
    return _built(launch.kernel)(
        inputs=list(arrays),
        template=list(launch.template),
        grid=launch.grid,
        threadgroup=launch.threads,
        output_shapes=list(launch.shapes),
        output_dtypes=list(launch.dtypes),
    )


def is_right(farthest: Callable[[], float], tolerance: float, kernel: str) -> bool:
    """Whether a kernel builds and its largest error is within ``tolerance``; warns of ``kernel`` if not."""
    try:
        far = farthest()
    except Exception as error:
        # not the kernel's fault: a later call tests it again
        if is_out_of_memory(error):
            raise
        logger.warning("%s cannot be used (%s)", kernel, describe(error))
        return False
    if not far <= tolerance:
        logger.warning("%s is off by %.3g on this device", kernel, far)
        return False
    return True


@lru_cache(maxsize=32)
def _built(kernel: Kernel) -> Callable[..., list[mx.array]]:
    made: Any = mx.fast.cuda_kernel(
        name=kernel.name,
        input_names=kernel.inputs,
        output_names=kernel.outputs,
        source=kernel.body,
        header=kernel.header,
        ensure_row_contiguous=False,
    )
    return made  # type: ignore[no-any-return]
