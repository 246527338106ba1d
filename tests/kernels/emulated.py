"""Kernels for CUDA run as C++: the source that MLX would build, with a block's threads taking turns."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.cuda.launches import Launch, Run

COMPILER = shutil.which("g++") or shutil.which("clang++")
HERE = Path(__file__).parent
TYPES = {
    mx.float32: "float",
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.uint32: "std::uint32_t",
    mx.int32: "std::int32_t",
    mx.bool_: "bool",
}
#: What results hold before a kernel writes them.
UNWRITTEN = float("nan")


def run(call: Launch, arrays: Sequence[mx.array]) -> list[mx.array]:
    """The results of a call on arrays that lie row by row."""
    code = source_of(call, tuple(array.dtype for array in arrays))
    library = _built(code)
    inputs = [_bytes_of(array) for array in arrays]
    outputs = [
        np.array(
            mx.full(shape, UNWRITTEN, dtype).view(mx.uint16)
            if dtype.size == 2
            else mx.full(shape, UNWRITTEN, dtype)
        )
        for shape, dtype in zip(call.shapes, call.dtypes, strict=True)
    ]
    outputs = [np.ascontiguousarray(output) for output in outputs]
    shapes = _of_eight([array.shape for array in arrays], np.int32)
    strides = _of_eight([_strides(array.shape) for array in arrays], np.int64)
    blocks = [
        -(-grid // threads)
        for grid, threads in zip(call.grid, call.threads, strict=True)
    ]
    is_even = library.run(
        _pointers(inputs),
        _pointers(outputs),
        _pointer(shapes),
        _pointer(strides),
        *blocks,
        call.threads[0],
    )
    assert is_even, "some threads of a block ended while others stood at a barrier"
    return [
        mx.array(output).view(dtype)
        for output, dtype in zip(outputs, call.dtypes, strict=True)
    ]


def broken(call: Launch, arrays: Sequence[mx.array]) -> list[mx.array]:
    """A device on which a kernel does not build."""
    raise RuntimeError("Failed to compile kernel: kernel.cu(3): error: no such thing")


def wrong(call: Launch, arrays: Sequence[mx.array]) -> list[mx.array]:
    """A device on which it gives ones."""
    return [
        mx.ones(shape, dtype)
        for shape, dtype in zip(call.shapes, call.dtypes, strict=True)
    ]


def leaving(output: int) -> Run:
    """A device on which a kernel leaves one result unwritten."""

    def found(call: Launch, arrays: Sequence[mx.array]) -> list[mx.array]:
        results = run(call, arrays)
        left = results[output]
        results[output] = mx.full(left.shape, UNWRITTEN, left.dtype)
        return results

    return found


def source_of(call: Launch, dtypes: Sequence[mx.Dtype]) -> str:
    """A call's kernel as C++, with the signature that MLX makes for it."""
    body, parameters, arguments = call.kernel.body, [], []
    for i, (name, dtype) in enumerate(zip(call.kernel.inputs, dtypes, strict=True)):
        parameters.append(f"const {TYPES[dtype]}* {name}")
        arguments.append(f"(const {TYPES[dtype]}*)inputs[{i}]")
        for what, kind in (("shape", "Shape"), ("strides", "Strides")):
            if f"{name}_{what}" in body:
                parameters.append(f"const {kind} {name}_{what}")
                arguments.append(f"{'shapes' if what == 'shape' else 'strides'}[{i}]")
    for i, (name, dtype) in enumerate(
        zip(call.kernel.outputs, call.dtypes, strict=True)
    ):
        parameters.append(f"{TYPES[dtype]}* {name}")
        arguments.append(f"({TYPES[dtype]}*)outputs[{i}]")
    constants = [
        f"using {name} = {TYPES[value]};"
        if isinstance(value, mx.Dtype)
        else f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {str(value).lower()};"
        for name, value in call.template
    ]
    return "\n".join(
        [
            '#include "block.h"',
            call.kernel.header,
            f"void kernel({', '.join(parameters)}) {{",
            *constants,
            body,
            "}",
            'extern "C" int run(void** inputs, void** outputs, Shape* shapes, Strides* strides, int x, int y, int z, int n) {',
            "gridDim = {x, y, z}, blockDim = {n, 1, 1};",
            f"block::work = [=] {{ kernel({', '.join(arguments)}); }};",
            "for (blockIdx.z = 0; blockIdx.z < z; blockIdx.z++)",
            "for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)",
            "for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++)",
            "if (!block::run(n)) return 0;",
            "return 1; }",
        ]
    )


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@lru_cache(maxsize=128)
def _built(code: str) -> ctypes.CDLL:
    assert COMPILER is not None
    path = Path(_folder().name) / hashlib.sha256(code.encode()).hexdigest()
    path.with_suffix(".cpp").write_text(code)
    flags = [
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    allowed = [
        "-Wno-unknown-pragmas",
        "-Wno-unused-parameter",
        "-Wno-unused-function",
        "-Wno-unused-variable",
    ]
    command = [
        COMPILER,
        *flags,
        *allowed,
        f"-I{HERE}",
        str(path.with_suffix(".cpp")),
        "-o",
        str(path.with_suffix(".so")),
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path.with_suffix(".so")))


def _bytes_of(array: mx.array) -> np.ndarray:
    array = mx.contiguous(array)
    return np.ascontiguousarray(
        np.array(array.view(mx.uint16) if array.dtype.size == 2 else array)
    )


def _strides(shape: Sequence[int]) -> list[int]:
    return [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]


def _of_eight(rows: Sequence[Sequence[int]], dtype: type) -> np.ndarray:
    return np.array([[*row, *[0] * (8 - len(row))] for row in rows], dtype=dtype)


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _pointers(arrays: Sequence[np.ndarray]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
