"""Decode attention by a kernel of our own: its source, run as C++, is exact attention."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from tests.harness import Ask, check, run_family
from tests.kernels import emulated
from vlm_batch.adapters import operations
from vlm_batch.adapters.cuda import one_query
from vlm_batch.adapters.cuda.launches import Launch
from vlm_batch.adapters.cuda.one_query import OneQueryBuild
from vlm_batch.adapters.hooks import running
from vlm_batch.caches import Placement
from vlm_batch.records import Call

needs_compiler = pytest.mark.skipif(
    emulated.COMPILER is None, reason="there is no compiler for C++ here"
)
#: Rounding of an answer to the type that it is given in, or of sums.
ROUNDING = {mx.float32: 1e-5, mx.bfloat16: 2**-7, mx.float16: 2**-10}


def kind(
    heads: int = 4,
    kv_heads: int = 2,
    depth: int = 64,
    *,
    dtype: mx.Dtype = mx.float32,
    mask: mx.Dtype = mx.bool_,
    scale: float | None = None,
) -> OneQueryBuild:
    return OneQueryBuild(scale or depth**-0.5, heads, kv_heads, depth, dtype, mask)


KINDS = {
    "32 on 8": kind(32, 8, 64, dtype=mx.bfloat16),
    "8 heads on 1": kind(16, 2, 128, dtype=mx.bfloat16, mask=mx.bfloat16),
    "7 heads on 1": kind(14, 2, 64, dtype=mx.float16, mask=mx.float16),
    "9 heads on 1": kind(9, 1, 64),
    "each its own": kind(2, 2, 128, mask=mx.float32),
    "80 numbers": kind(4, 4, 80),
    "96 numbers": kind(8, 4, 96, dtype=mx.bfloat16, scale=1.0),
    "256 numbers": kind(4, 1, 256),
    "256 numbers in half precision": kind(8, 4, 256, dtype=mx.bfloat16),
    "8 numbers": kind(2, 1, 8, dtype=mx.float16),
    "16 numbers": kind(4, 2, 16),
    "additive in float32": kind(4, 2, 64, dtype=mx.bfloat16, mask=mx.float32),
}


@needs_compiler
@pytest.mark.parametrize("one", KINDS.values(), ids=KINDS)
def test_the_kernels_are_attention(one: OneQueryBuild) -> None:
    """Over rows of one block and of several, with NaN behind each of them."""
    assert (
        one_query.farthest(one, emulated.run, lengths=(200, 1, 131), columns=256)
        <= ROUNDING[one.dtype]
    )
    assert len(one_query.launches_of(one, 2, 1024)) == 2
    assert (
        one_query.farthest(one, emulated.run, lengths=(700, 130), columns=1024)
        <= ROUNDING[one.dtype]
    )
    assert (
        one_query.farthest(one, emulated.run, lengths=(150, 1), is_shared=True)
        <= ROUNDING[one.dtype]
    )


@needs_compiler
@pytest.mark.parametrize("columns", [256, 640])
def test_columns_that_a_mask_hides_are_not_read(columns: int) -> None:
    """Wherever they are, as behind a window; a row's own NaN reaches its own answer alone."""
    one = kind(4, 2, 64)
    queries, keys, values, _ = one_query.example(one, (columns, columns), columns, 2)
    at = mx.arange(columns)
    seen = ((at >= 135) & (at < 250) & (at != 200))[None, None, None] & mx.ones(
        (2, 1, 1, 1), mx.bool_
    )
    right = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=one.scale, mask=seen
    )
    keys, values = (
        mx.where(seen.swapaxes(2, 3), states, mx.nan) for states in (keys, values)
    )
    found = one_query.attend(queries, keys, values, one.scale, seen, emulated.run)
    assert float(mx.abs(found - right).max()) < 1e-5
    values[0, :, 240] = mx.nan
    answers = one_query.attend(queries, keys, values, one.scale, seen, emulated.run)
    assert mx.isnan(answers[0]).any(axis=-1).all().item()
    assert mx.array_equal(answers[1], found[1]).item()


def test_a_long_row_among_many_short_ones_is_cut() -> None:
    """However many rows there are: those that end early cost nothing."""
    first, _ = one_query.launches_of(kind(32, 8, 64), 64, 16384)
    assert first.grid[0] == 16 * one_query.THREADS


@needs_compiler
@pytest.mark.parametrize("columns", [256, 640])
def test_a_place_without_a_row_gets_zeros(columns: int) -> None:
    one = kind(4, 2, 64)
    queries, keys, values, mask = one_query.example(one, (0, 70), columns, 3)
    found = one_query.attend(queries, keys, values, one.scale, mask, emulated.run)
    assert (
        mx.array_equal(found[0], mx.zeros((4, 1, 64))).item()
        and not mx.isnan(found[1]).any().item()
    )


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """The choice of a way as on CUDA, with kernels run as C++; what ran."""
    ran: list[Launch] = []

    def on_device(call: Launch, arrays: Sequence[mx.array]) -> list[mx.array]:
        ran.append(call)
        return emulated.run(call, arrays)

    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    monkeypatch.setattr(one_query, "on_device", on_device)
    judge = one_query._is_right
    judge.cache_clear()
    yield ran
    judge.cache_clear()


@needs_compiler
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_vl"])
def test_rows_that_come_and_go_are_the_rows_alone(
    name: str, on_cuda: list[Launch]
) -> None:
    asks = [Ask("image:1:0"), Ask("text:2:9", at=2, tokens=4), Ask("text:3:30", at=3)]
    check(name, run_family(name, asks, placement=Placement.SLAB))
    assert any(launch.grid[2] == 4 for launch in on_cuda)  # places


@pytest.mark.parametrize(
    ("device", "said"),
    [(emulated.broken, "no such thing"), (emulated.wrong, "is off by")],
    ids=["unbuilt", "wrong"],
)
def test_a_kernel_that_cannot_be_used_is_done_without(
    on_cuda: None,
    device: Any,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """MLX attends then, and it is said once."""
    monkeypatch.setattr(one_query, "on_device", device)
    one = kind(4, 2, 64)
    queries, keys, values, mask = one_query.example(one, (256, 256), 256, 2)
    right = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=one.scale)
    with caplog.at_level(logging.WARNING, "vlm_batch"), running(Call()):
        for _ in range(2):
            found = operations.attend(queries, keys, values, one.scale, mask)
            assert float(mx.abs(found - right).max()) < 1e-5
    assert [said in record.message for record in caplog.records] == [True]


def test_what_the_kernel_is_not_written_for_is_left_to_mlx(
    on_cuda: list[Launch],
) -> None:
    """Several queries, masks of heads or of none, other widths and types; fixed calls, whose bits depend on no slab."""
    one = kind(4, 2, 64)
    queries, keys, values, mask = one_query.example(one, (40, 40), 40, 2)
    half = keys.astype(mx.bfloat16)
    for asked in (
        (queries[0], keys, values, mask),
        (mx.concatenate([queries] * 3, axis=2), keys, values, mask),
        (queries, keys, values, mx.zeros((2, 4, 1, 40))),
        (queries, keys, values, None),
        (queries, keys, values, mx.zeros((2, 1, 1, 39))),
        (queries, keys, values[..., :32], mask),
        (queries, half, values, mask),
        (queries[..., :6], keys[..., :6], values[..., :6], mask),
        (mx.zeros((2, 4, 1, 288)), *[mx.zeros((2, 2, 40, 288))] * 2, mask),
    ):
        assert not one_query.is_served(*asked)
    with running(Call(is_fixed=True)):
        operations.attend(queries, keys, values, one.scale, mask)
    assert not on_cuda
