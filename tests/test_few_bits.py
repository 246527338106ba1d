"""Attention over slabs in few bits by kernels of our own: their source, run as C++, is exact attention over what is stored."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.harness import Ask, run, settings_for, shared_adapter
from tests.kernels import emulated
from tests.reuse_cases import request
from tests.test_kv_quant import IMAGE, TEXT, UNIFORM, check, generator
from vlm_batch.adapters.attention import attention
from vlm_batch.adapters.cuda import few_bits
from vlm_batch.adapters.cuda.few_bits import FewBitsBuild
from vlm_batch.adapters.cuda.launches import Launch
from vlm_batch.adapters.cuda.spans import MaskForm
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import Placement
from vlm_batch.caches.quantized import PackedLayout, SlabStates, of_slab
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.compiled import CompiledDecode
from vlm_batch.engine.row import Prompt, new_row
from vlm_batch.engine.shapes import FreeShapes
from vlm_batch.policy import Policy
from vlm_batch.records import DecodeStep
from vlm_batch.runtime.device import Device
from vlm_batch.types import SamplingParams

needs_compiler = pytest.mark.skipif(
    emulated.COMPILER is None, reason="there is no compiler for C++ here"
)
#: Rounding of an answer to the type that it is given in, or of sums.
ROUNDING = {mx.float32: 1e-5, mx.bfloat16: 2**-7, mx.float16: 2**-10}


def kind(
    heads: int = 4,
    kv_heads: int = 2,
    depth: int = 64,
    bits: int = 8,
    group: int = 32,
    *,
    values: int | None = None,
    dtype: mx.Dtype = mx.float32,
    scales: mx.Dtype | None = None,
    mask: mx.Dtype | None = mx.bool_,
    is_by_row: bool = True,
) -> FewBitsBuild:
    """A kind of attention; keys and values are heads of one slab, but where values have a depth of their own."""
    keys, own = (
        PackedLayout(group, bits, depth),
        PackedLayout(group, bits, values or depth),
    )
    halves = (keys, 0, kv_heads), (own, 0 if values else kv_heads, kv_heads)
    return FewBitsBuild(
        depth**-0.5,
        heads,
        depth,
        *halves,
        dtype,
        scales or dtype,
        MaskForm(mask, is_by_row),
    )


KINDS = {
    "8 bits, 8 heads on 1": kind(
        16, 2, 128, 8, 64, dtype=mx.bfloat16, mask=mx.bfloat16
    ),
    "4 bits, 7 heads on 1": kind(14, 2, 64, 4, 64, dtype=mx.bfloat16),
    "4 bits, groups of 32": kind(2, 2, 128, 4, 32),
    "groups of 128": kind(4, 1, 256, 8, 128, dtype=mx.float16, mask=mx.float16),
    "9 heads on 1": kind(9, 1, 64),
    "filled": kind(4, 4, 80, 8, 32),
    "96 numbers": kind(8, 4, 96, 4, 32, is_by_row=False),
    "no mask": kind(4, 2, 64, mask=None),
    "values of another depth": kind(4, 2, 64, 8, 32, values=32),
    "scales of another type": kind(4, 2, 64, scales=mx.bfloat16, mask=mx.bfloat16),
    "2 bits": kind(2, 1, 32, 2),
    "3 bits": kind(2, 1, 32, 3),
    "5 bits": kind(2, 1, 64, 5),
    "6 bits": kind(2, 1, 64, 6),
}


@needs_compiler
@pytest.mark.parametrize("one", KINDS.values(), ids=KINDS)
def test_the_kernels_are_attention(one: FewBitsBuild) -> None:
    """Over rows of one span and of several, with NaN behind each of them."""
    assert few_bits.is_served(one)
    assert (
        few_bits.farthest(one, emulated.run, lengths=(300, 1, 128), columns=320)
        <= ROUNDING[one.dtype]
    )


@needs_compiler
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_is_the_same_alone_and_in_a_wider_slab(bits: int) -> None:
    """Bit for bit, with a mask of either kind or without."""
    one = kind(8, 1, 64, bits, mask=mx.float32)
    queries, keys, values, mask = few_bits.example(one, (200, 150, 400), 512, 1)
    assert mask is not None
    together = few_bits.attend(queries, keys, values, one.scale, mask, emulated.run)[1]

    def alone(columns: int, seen: mx.array | None) -> mx.array:
        first, last = (
            of_slab([part[1:2, :, :columns] for part in states.parts], *states[3:])
            for states in (keys, values)
        )
        return few_bits.attend(
            queries[1:2], first, last, one.scale, seen, emulated.run
        )[0]

    row = mask[1:2]
    found = [
        alone(512, row),
        alone(256, row[..., :256]),
        alone(256, row[..., :256] == 0),
        alone(150, None),
    ]
    assert all(mx.array_equal(together, answer).item() for answer in found)


@needs_compiler
def test_columns_that_a_mask_hides_are_not_read() -> None:
    """Wherever they are, as behind a window; a row's own NaN reaches its own answer alone."""
    one = kind(4, 2, 64)
    queries, keys, values, _ = few_bits.example(one, (300, 300), 320, 2)
    columns = mx.arange(320)
    seen = ((columns >= 135) & (columns < 290) & (columns != 200))[
        None, None, None
    ] & mx.ones((2, 1, 1, 1), mx.bool_)
    whole = [few_bits._in_full(states)[:, :, :300] for states in (keys, values)]
    right = mx.fast.scaled_dot_product_attention(
        queries, *whole, scale=one.scale, mask=seen[..., :300]
    )
    holed = [
        SlabStates(
            states.packed,
            mx.where(seen.swapaxes(2, 3), states.scales, mx.nan),
            *states[2:],
        )
        for states in (keys, values)
    ]
    found = few_bits.attend(queries, holed[0], holed[1], one.scale, seen, emulated.run)
    assert float(mx.abs(found - right).max()) < 1e-5
    for broken in (0, 1):  # keys, values
        states = [*holed]
        scales = mx.array(states[broken].scales)
        scales[0, :, 250] = mx.nan
        states[broken] = states[broken]._replace(scales=scales)
        answers = few_bits.attend(
            queries, states[0], states[1], one.scale, seen, emulated.run
        )
        assert mx.isnan(answers[0]).any(axis=-1).all().item()
        assert mx.array_equal(answers[1], found[1]).item()


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The choice of a way as on CUDA, with kernels run as C++."""
    monkeypatch.setattr(few_bits, "device", lambda: Device.CUDA)
    monkeypatch.setattr(
        few_bits, "on_device", lambda call, arrays: emulated.run(call, arrays)
    )
    judge = few_bits._is_right
    judge.cache_clear()
    yield
    judge.cache_clear()


@needs_compiler
def test_the_policy_has_slabs_in_few_bits_attended_by_the_kernel(
    on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that come and go are the rows alone."""
    found: list[mx.array | None] = []
    right = few_bits.attend_where_right

    def attended(*args: Any) -> mx.array | None:
        found.append(right(*args))
        return found[-1]

    monkeypatch.setattr(few_bits, "attend_where_right", attended)
    policy = settings_for(Placement.SLAB, few_bits="kernel")
    engine = generator("qwen2_vl", UNIFORM, policy=policy)
    asks = [Ask(IMAGE), Ask(TEXT, at=2, tokens=4)]
    answers = run(
        shared_adapter("qwen2_vl"),
        lambda key: request("qwen2_vl", key),
        asks,
        generator=engine,
    )
    check("qwen2_vl", answers, UNIFORM)
    assert found
    assert all(answer is not None for answer in found)


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
    """Slabs are unpacked then, and it is said once."""
    monkeypatch.setattr(few_bits, "on_device", device)
    one = kind(4, 2, 64)
    queries, keys, values, mask = few_bits.example(one, (300, 300), 300, 2)
    whole = [few_bits._in_full(states) for states in (keys, values)]
    right = mx.fast.scaled_dot_product_attention(queries, *whole, scale=one.scale)
    with caplog.at_level(logging.WARNING, "vlm_batch"):
        for _ in range(2):
            found = attention(queries, keys, values, None, one.scale, mask)
            assert float(mx.abs(found - right).max()) < 1e-5
    assert [said in record.message for record in caplog.records] == [True]


def test_want_of_memory_says_nothing_of_the_kernel(
    on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails and its rows begin again; the kernel is tried once more then."""
    asked = []

    def wants(call: Launch, arrays: Any) -> list[mx.array]:
        asked.append(call)
        raise RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory")

    monkeypatch.setattr(few_bits, "on_device", wants)
    one = kind(2, 2, 64)
    queries, keys, values, mask = few_bits.example(one, (30, 30), 30, 2)
    for tries in (1, 2):
        with pytest.raises(RuntimeError, match="out of memory"):
            attention(queries, keys, values, None, one.scale, mask)
        assert len(asked) == tries
    others = values._replace(scales=values.scales.astype(mx.bfloat16))
    # its types are another kernel's
    assert few_bits.attend_where_right(queries, keys, others, one.scale, mask) is None


def test_what_the_kernels_are_not_written_for_is_unpacked(
    on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several queries, masks of heads, sinks, wide heads, keys and values of different heads."""
    monkeypatch.setattr(few_bits, "on_device", emulated.broken)
    monkeypatch.setattr(
        few_bits,
        "_is_right",
        lambda kind: pytest.fail("a kernel would have been built"),
    )
    one = kind(4, 2, 64, mask=None)
    queries, keys, values, _ = few_bits.example(one, (40, 40), 40, 2)
    several = mx.concatenate([queries] * 3, axis=2)
    by_head = mx.zeros((2, 4, 1, 40))
    sinks = mx.zeros((4,))
    whole = [few_bits._in_full(states) for states in (keys, values)]
    for asked, mask, extra in (
        (several, None, None),
        (queries, by_head, None),
        (queries, None, sinks),
    ):
        right = mx.fast.scaled_dot_product_attention(
            asked, *whole, scale=one.scale, mask=mask, sinks=extra
        )
        found = attention(asked, keys, values, None, one.scale, mask, extra)
        assert float(mx.abs(found - right).max()) < 1e-5
    assert not few_bits.is_served(kind(4, 2, 288))
    assert not few_bits.is_served(kind(4, 2, 64)._replace(scales=mx.float64))
    assert (
        few_bits.attend_where_right(
            queries, keys, values, one.scale, mx.zeros((2, 1, 1, 39))
        )
        is None
    )


def test_a_graph_has_no_kernels_that_the_step_has_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a graph fuses over slabs in few bits is what it fuses over exact ones, so that it is made by default."""

    def on_device(call: Launch, arrays: Sequence[mx.array]) -> list[mx.array]:
        total = arrays[0].sum()
        return [mx.broadcast_to(total, shape) for shape in call.shapes]

    monkeypatch.setattr(few_bits, "device", lambda: Device.CUDA)
    monkeypatch.setattr(few_bits, "on_device", on_device)
    monkeypatch.setattr(few_bits, "_is_right", lambda kind: True)
    adapter, fused = shared_adapter("qwen2_vl"), []
    for kv in (None, UNIFORM):
        batch = DecodeBatch(FreeShapes(Placement.SLAB, Policy(few_bits="kernel")), 2)
        for name in "ab":
            caches = adapter.make_cache(kv)
            adapter.prefill(
                [adapter.encode(as_mlx(request("qwen2_vl", TEXT)))], caches, 0, 4
            )
            batch.join(new_row(name, Prompt(), SamplingParams()), caches)
        assert CompiledDecode.can_compile(batch.layers, [{}, {}], is_plain=True)
        step = DecodeStep(
            mx.array([[3], [4]]), mx.array([4, 4]), batch.layers, [{}, {}]
        )
        logits = CompiledDecode(adapter.decode, uses_before_graph=0)(step)
        path = tmp_path / "graph.dot"
        mx.export_to_dot(
            str(path),
            logits,
            *(array for layer in batch.layers for array in layer.arrays()),
        )
        fused.append(
            {
                name
                for name in re.findall(r'label ="(\w+)"', path.read_text())
                if name.startswith("Compiled")
            }
        )
    assert fused[1]
    assert fused[1] <= fused[0]
