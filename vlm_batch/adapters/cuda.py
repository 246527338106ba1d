"""Kernels of our own for MLX's CUDA back end, with their sources beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx


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


def kernel(file: str, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], body: str) -> Kernel:
    """Return a kernel whose functions are in ``file``, beside this module."""
    header = Path(__file__).with_name(f"{file}.cu").read_text(encoding="utf-8")
    source = hashlib.sha256((header + body).encode()).hexdigest()[:12]  # MLX caches kernels by name
    return Kernel(f"{file}_{name}_{source}", inputs, outputs, header, body)


def on_device(launch: Launch, arrays: Sequence[mx.array]) -> list[mx.array]:
    return _built(launch.kernel)(
        inputs=list(arrays),
        template=list(launch.template),
        grid=launch.grid,
        threadgroup=launch.threads,
        output_shapes=list(launch.shapes),
        output_dtypes=list(launch.dtypes),
    )


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
