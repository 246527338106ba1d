"""Products of few bits by a kernel of our own: its source, run as C++, is the exact product."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.kernels import emulated
from vlm_batch.adapters.cuda import qmm
from vlm_batch.adapters.cuda.flat import FlatLinear
from vlm_batch.adapters.cuda.launches import Launch
from vlm_batch.adapters.cuda.qmm import ProductBuild
from vlm_batch.adapters.hooks import running
from vlm_batch.records import Call

needs_compiler = pytest.mark.skipif(
    emulated.COMPILER is None, reason="there is no compiler for C++ here"
)
#: Rounding of an answer to its type, in units of the largest.
ROUNDING = {mx.bfloat16: 2**-8, mx.float16: 2**-11}
VARIANTS = [
    *(
        ProductBuild(mx.bfloat16, bits, group)
        for bits in qmm.BITS
        for group in qmm.GROUPS
    ),
    *(ProductBuild(mx.float16, bits, 64) for bits in qmm.BITS),
]
NAMES = [
    f"{str(one.dtype).removeprefix('mlx.core.')}, {one.bits} bits by {one.group_size}"
    for one in VARIANTS
]


@needs_compiler
@pytest.mark.parametrize("one", VARIANTS, ids=NAMES)
def test_the_kernel_is_the_product(one: ProductBuild) -> None:
    """Of one row, of rows and outputs that fill no tile, and of two blocks of rows; of fewer groups than warps, and more."""
    far = ROUNDING[one.dtype]
    assert qmm.farthest(one, emulated.run) <= far
    assert (
        qmm.farthest(one, emulated.run, count=1, outputs=2, groups=3, has_bias=False)
        <= far
    )
    assert qmm.farthest(one, emulated.run, count=71, outputs=17, groups=35) <= far


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 2, 4, 64])
def test_warps_share_outputs(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of a block do."""
    name, source = qmm._kernel(), f"constexpr int BLOCKS = {qmm.BLOCKS};"
    assert source in name.header
    changed = name._replace(
        header=name.header.replace(source, f"constexpr int BLOCKS = {blocks};")
    )
    monkeypatch.setattr(qmm, "BLOCKS", blocks)
    monkeypatch.setattr(qmm, "_kernel", lambda: changed)
    qmm.launch_of.cache_clear()
    one = ProductBuild(mx.bfloat16, 4, 64)
    assert qmm.farthest(one, emulated.run, outputs=128) <= ROUNDING[one.dtype]
    qmm.launch_of.cache_clear()


@needs_compiler
def test_a_rows_bits_depend_on_no_other_row() -> None:
    layer, rows = qmm.example(
        ProductBuild(mx.bfloat16, 4, 64), 66, 40, 20, 1, has_bias=False
    )
    together = qmm.multiply(layer, rows, emulated.run)
    broken = mx.where(
        mx.arange(66)[:, None] == 10, mx.nan, rows.astype(mx.float32)
    ).astype(rows.dtype)
    beside = qmm.multiply(layer, broken, emulated.run)
    kept = mx.array([row for row in range(66) if row != 10])
    assert mx.array_equal(beside[kept], together[kept]) and mx.all(mx.isnan(beside[10]))
    for row in (0, 9, 63, 65):
        assert mx.array_equal(
            qmm.multiply(layer, rows[row : row + 1], emulated.run),
            together[row : row + 1],
        )


@needs_compiler
@pytest.mark.parametrize("bits", qmm.BITS)
def test_arrays_lie_as_they_do(bits: int) -> None:
    """The kernel reads strides, here of rows that are turned, and of weights and scales beside others."""
    one = ProductBuild(mx.bfloat16, bits, 64)
    layer, rows = qmm.example(one, 5, 16, 2, 1, has_bias=False)
    right, launch = qmm.multiply(layer, rows, emulated.run), qmm.launch_of(one, 5, 16)
    weight, scales, biases = (layer[name] for name in ("weight", "scales", "biases"))
    wider = [
        mx.concatenate([array[:, :1], array], axis=1)
        for array in (weight, scales, biases)
    ]
    body = launch.kernel.body
    for array, name in zip(wider, ("weight", "scales", "biases"), strict=True):
        assert body.count(f"{{{name}, {name}_strides[0]") == 1
        body = body.replace(
            f"{{{name}, {name}_strides[0]", f"{{{name} + 1, {array.shape[1]}"
        )
    for name, value in {
        "rows_strides[0]": 1,
        "rows_strides[1]": 5,
        "rows_shape[0]": 5,
        "rows_shape[1]": 128,
    }.items():
        assert body.count(name) == 1
        body = body.replace(name, str(value))
    other = replace(launch, kernel=launch.kernel._replace(body=body))
    found = emulated.run(
        other, [mx.contiguous(rows.T), *wider, mx.zeros((1,), mx.bfloat16)]
    )[0]
    assert mx.array_equal(found, right)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Layers as on CUDA, with kernels run as C++; what ran."""
    ran: list[Launch] = []

    def on_device(call: Launch, arrays: Sequence[mx.array]) -> list[mx.array]:
        ran.append(call)
        return emulated.run(call, arrays)

    monkeypatch.setattr(qmm, "on_device", on_device)
    qmm._is_right.cache_clear()
    yield ran
    qmm._is_right.cache_clear()


def flat(layer: nn.QuantizedLinear) -> Any:
    layer.__class__ = FlatLinear
    return layer


@needs_compiler
@pytest.mark.parametrize("count", [1, 7, 64, 65])
def test_few_rows_and_all_of_a_step_have_the_kernel(
    count: int, on_cuda: list[Launch]
) -> None:
    plain, rows = qmm.example(
        ProductBuild(mx.bfloat16, 4, 64), count, 24, 3, 1, has_bias=True
    )
    layer, right = flat(plain), qmm.exact(plain, rows)
    layer(rows[:1])  # the kernel is tested
    on_cuda.clear()
    for call, is_ours in (
        (Call(), count <= qmm.ROWS),
        (Call(positions=mx.array([5])), True),
    ):
        with running(call):
            found = layer(rows[:, None])
        assert found.shape == (count, 1, 24) and bool(on_cuda) == is_ours
        assert (
            np.abs(np.array(found[:, 0].astype(mx.float32)) - right).max()
            <= 2**-7 * np.abs(right).max()
        )
        on_cuda.clear()


def test_what_the_kernel_is_not_written_for_is_left_to_mlx() -> None:
    layer, rows = qmm.example(
        ProductBuild(mx.bfloat16, 4, 64), 3, 24, 3, 1, has_bias=False
    )
    assert qmm.is_served(layer, rows)
    others = [
        nn.QuantizedLinear(192, 24, bias=False, group_size=64, bits=bits)
        for bits in (2, 3, 6)
    ]
    others.append(
        nn.QuantizedLinear(192, 24, bias=False, group_size=32, bits=4, mode="mxfp4")
    )
    for other in others:
        other.set_dtype(mx.bfloat16)
        assert not qmm.is_served(other, rows)
    for wrong in (
        rows.astype(mx.float32),
        rows.astype(mx.float16),
        rows[0],
        rows[:0],
        rows[:, None],
    ):
        assert not qmm.is_served(layer, wrong)


@pytest.mark.parametrize(
    ("device", "said"),
    [(emulated.broken, "no such thing"), (emulated.wrong, "is off by")],
    ids=["unbuilt", "wrong"],
)
def test_a_kernel_that_cannot_be_used_is_done_without(
    device: Any,
    said: str,
    on_cuda: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """MLX multiplies then, and it is said once."""
    monkeypatch.setattr(qmm, "on_device", device)
    plain, rows = qmm.example(
        ProductBuild(mx.bfloat16, 4, 64), 3, 24, 3, 1, has_bias=False
    )
    right = plain(rows)
    layer = flat(plain)
    with caplog.at_level(logging.WARNING, "vlm_batch"):
        assert all(mx.array_equal(layer(rows), right) for _ in range(2))
    assert [said in record.message for record in caplog.records] == [True]
