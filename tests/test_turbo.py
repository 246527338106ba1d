"""TurboQuant: mlx-vlm's numbers, in rows and slabs, by every way of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.generate.common import maybe_quantize_kv_cache
from mlx_vlm.models.base import scaled_dot_product_attention
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.turboquant import TurboQuantKVCache

from tests.harness import Ask, inputs_of, run, settings_for, shared_adapter
from tests.kernels import emulated
from tests.test_kv_quant import IMAGE, TEXT, TURBO, alone, check, generator
from tests.zoo import apart
from tests.zoo import family as tiny_family
from tests.zoo._oracle import generate_alone
from vlm_batch.adapters import turning
from vlm_batch.adapters.attention import attention
from vlm_batch.adapters.cuda import coding
from vlm_batch.adapters.cuda import turning as cuda
from vlm_batch.adapters.cuda.launches import Launch, Run
from vlm_batch.adapters.cuda.spans import MaskForm
from vlm_batch.adapters.cuda.turning import TurnedBuild
from vlm_batch.caches import Placement, lookups, turbo
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.caches.turbo import TurboCache
from vlm_batch.engine.compiled import CompiledDecode
from vlm_batch.policy import KERNEL
from vlm_batch.records import DecodeStep
from vlm_batch.runtime.device import Device

needs_compiler = pytest.mark.skipif(
    emulated.COMPILER is None, reason="there is no compiler for C++ here"
)

#: Of keys and of values together, all from 2 to 8.
BITS = (2, 3.5, 5.5, 6.5, 8)


@pytest.fixture(params=["numpy", "operations"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How codes are looked up: a CPU's way, and a GPU's."""
    monkeypatch.setattr(lookups, "FEWEST", 0)
    if request.param == "operations":
        monkeypatch.setattr(lookups, "device", lambda: Device.METAL)
        monkeypatch.setattr(turning, "BLOCK", 2**12)  # several blocks
    return str(request.param)


def filled(
    bits: float, depth: int, value_depth: int, lengths: tuple[int, ...], seed: int = 0
) -> tuple[TurboQuantKVCache, TurboCache]:
    """mlx-vlm's cache and ours, after the same chunks."""
    mx.random.seed(seed)
    theirs, ours = TurboQuantKVCache(bits), TurboCache(bits)
    for length in lengths:
        keys = mx.random.normal((1, 2, length, depth)) * 3
        values = mx.random.normal((1, 2, length, value_depth))
        theirs.update_and_fetch(keys, values)
        ours.update_and_fetch(keys, values)
    return theirs, ours


@pytest.fixture
def on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where arrays are on a GPU."""
    for module in (turning, turbo, lookups):
        monkeypatch.setattr(module, "device", lambda: Device.METAL)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("depth", "value_depth"), [(64, 64), (80, 80), (20, 20), (192, 128)]
)
def test_codes_norms_and_answers_are_mlx_vlms(
    bits: float, depth: int, value_depth: int, way: str
) -> None:
    """Bit for bit what is stored; attention within rounding of mlx-vlm's own for one row, of a step and of a prompt."""
    theirs, ours = filled(bits, depth, value_depth, (250, 9, 1))
    for upstream, own in zip(theirs.state, ours.state, strict=True):
        assert mx.array_equal(upstream.indices, own.codes).item()
        assert mx.array_equal(upstream.norms, own.norms[..., 0]).item()
    for length, mask in ((1, None), (7, "causal")):
        queries = mx.random.normal((1, 6, length, depth))
        right = scaled_dot_product_attention(
            queries, *theirs.state, theirs, scale=depth**-0.5, mask=mask
        )
        found = attention(queries, *ours.state, None, depth**-0.5, mask)
        assert mx.allclose(found, right, rtol=0, atol=2e-5).item()


#: Families with full attention, whose answers alone are those of mlx-vlm's own loop.
FAMILIES = (
    *("aya_vision", "cohere_compass", "dots_ocr", "falcon_h1", "falcon_ocr"),
    *("gemma4_unified", "glm_ocr", "idefics3", "jina_vlm", "lfm2_vl", "llava"),
    *("llava_onevision", "mage_vl", "mimo_v2", "mistral3", "molmo", "muse_glimmer"),
    *("nemotron_h_nano_omni", "pixtral", "smolvlm", "step3p7"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_answers_are_mlx_vlms(name: str) -> None:
    """With mlx-vlm's caches for one row, in its own loop and classes: the same layers, tokens and log-probabilities."""
    kv = KVQuantisation(4, scheme="turboquant")
    model = tiny_family(name).build()
    caches = make_prompt_cache(model.language_model)
    maybe_quantize_kv_cache(
        caches,
        quantized_kv_start=0,
        kv_group_size=64,
        kv_bits=4,
        kv_quant_scheme="turboquant",
    )
    right = generate_alone(model, inputs_of(name, TEXT), 5, prompt_cache=caches)
    tokens, logprobs = alone(name, TEXT, kv, 5)
    assert tokens == right.tokens[: len(tokens)]
    for found, wanted in zip(logprobs, right.logprobs, strict=False):
        assert apart(found, wanted) < 1e-4


def kind(
    heads: int = 4,
    kv_heads: int = 2,
    depth: int = 64,
    bits: float = 4,
    *,
    values: int | None = None,
    dtype: mx.Dtype = mx.float32,
    mask: mx.Dtype | None = mx.bool_,
    is_by_row: bool = True,
) -> TurnedBuild:
    layouts = TurboCache(bits).layouts(depth, values or depth)
    form = MaskForm(mask, is_by_row)
    return TurnedBuild(heads, kv_heads, *layouts, dtype, form)


KINDS = {
    "3.5 bits, 8 heads on 1": kind(16, 2, 128, 3.5),
    "4 bits, 7 heads on 1": kind(14, 2, 64, 4, mask=mx.bfloat16),
    "2.5 bits, 9 heads on 1": kind(9, 1, 64, 2.5),
    "5 bits, 96 numbers": kind(8, 4, 96, 5, is_by_row=False),
    "6.5 bits, no mask": kind(2, 1, 64, 6.5, mask=None),
    "8 bits of 256": kind(2, 1, 256, 8, mask=mx.float16),
    "bfloat16": kind(8, 2, 128, 4, dtype=mx.bfloat16, mask=mx.bfloat16),
    "values whose rotation is a matrix": kind(4, 2, 64, 4, values=96),
    "values of another depth": kind(4, 2, 64, 3, values=32),
}


@needs_compiler
@pytest.mark.parametrize("one", KINDS.values(), ids=KINDS)
def test_the_kernel_is_attention(one: TurnedBuild) -> None:
    """Over rows of one span and of several, with NaN behind each of them."""
    assert cuda.is_served(one)
    off = cuda.farthest(one, emulated.run, lengths=(300, 1, 128), columns=320)
    assert off < (2e-5 if one.dtype == mx.float32 else 2e-2)


CODINGS = {
    "4 bits": (4, 64, mx.float32),
    "3.5 bits, bfloat16": (3.5, 128, mx.bfloat16),
    "2.5 bits": (2.5, 32, mx.float32),
    "6.5 bits, float16": (6.5, 256, mx.float16),
    "8 bits": (8, 64, mx.float32),
}


@needs_compiler
@pytest.mark.parametrize(("bits", "depth", "dtype"), CODINGS.values(), ids=CODINGS)
def test_the_kernels_code_and_restore(bits: float, depth: int, dtype: mx.Dtype) -> None:
    """As operations do, but for numbers that rounding carries over a bound."""
    layouts = TurboCache(bits).layouts(depth, depth)
    build = coding.CodeBuild(*layouts, (3, 3), dtype)
    assert coding.is_served(build)
    assert coding.farthest(build, emulated.run) < coding.TOLERANCE
    off = coding.farthest_restored(*layouts, dtype, emulated.run)
    assert off < coding.TOLERANCE


@needs_compiler
def test_a_norm_that_float16_does_not_hold() -> None:
    """A larger one is the largest, and NaN stays NaN, as by operations."""
    layouts = TurboCache(4).layouts(64, 64)
    keys = mx.array([1e5, mx.nan, 0, 1])[None, None, :, None] * mx.ones((1, 1, 4, 64))
    build = coding.CodeBuild(*layouts, (1, 1), mx.float32)
    norms, _ = coding.code(build, keys, keys, emulated.run)
    right = layouts[0].code(keys).norms
    for head in (0, 1):
        assert mx.array_equal(norms[:, head], right[:, 0], equal_nan=True)
    assert right.flatten().tolist() == pytest.approx(
        [65504.0, math.nan, 0.0, 8.0], nan_ok=True
    )


@needs_compiler
def test_numbers_that_are_none_are_not_right() -> None:
    """Norms, or any of the keys and values, that a kernel does not write."""
    layouts = TurboCache(4).layouts(64, 64)
    build = coding.CodeBuild(*layouts, (2, 2), mx.float32)
    assert math.isnan(coding.farthest(build, emulated.leaving(0)))
    for output in (0, 1):
        run = emulated.leaving(output)
        assert math.isnan(coding.farthest_restored(*layouts, mx.float32, run))


def recorded() -> tuple[list[str], Run]:
    """An emulated device, and the names of the kernels that it has run."""
    launched: list[str] = []

    def run(launch: Launch, arrays: Sequence[mx.array]) -> list[mx.array]:
        launched.append(launch.kernel.name.rpartition("_")[0])
        return emulated.run(launch, [mx.contiguous(array) for array in arrays])

    return launched, run


@needs_compiler
@pytest.mark.parametrize("bits", [4, 3.5])
def test_a_step_by_kernels(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: one launch codes and two attend, and the answer is that of operations."""
    launched, run = recorded()

    def answer(where: Device) -> mx.array:
        monkeypatch.setattr(coding, "device", lambda: where)
        monkeypatch.setattr(cuda, "device", lambda: where)
        mx.random.seed(5)
        slab = TurboCache(bits).slab(2)
        slab.few_bits = KERNEL
        slab.resize(2)
        for place in range(2):
            slab.put(place, filled(bits, 32, 32, (20 + place,), seed=place)[1])
        for _ in range(2):  # the first is tried before
            launched.clear()
            queries = mx.random.normal((2, 4, 1, 32))
            new = [mx.random.normal((2, 2, 1, 32)) for _ in range(2)]
            mask = slab.make_mask(1)
            keys, values = slab.update_and_fetch(*new)
            found = attention(queries, keys, values, slab, 0.2, mask)
        return found

    monkeypatch.setattr(coding, "on_device", run)
    monkeypatch.setattr(cuda, "on_device", run)
    by_kernels = answer(Device.CUDA)
    assert launched == ["turbo_code", "few_bits_turning", "turbo_merge"]
    right = answer(Device.CPU)
    assert not launched
    assert mx.allclose(by_kernels, right, rtol=0, atol=1e-5).item()


@needs_compiler
@pytest.mark.parametrize("bits", [4, 3.5])
def test_a_prompt_whose_kernels_code_and_restore(
    bits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: a launch codes a chunk, one restores all columns, and the answer is that of operations."""
    launched, run = recorded()

    def answer(where: Device) -> mx.array:
        monkeypatch.setattr(coding, "device", lambda: where)
        mx.random.seed(5)
        own = TurboCache(bits)
        for length in (20, 9):
            launched.clear()
            queries = mx.random.normal((1, 4, length, 32))
            new = [mx.random.normal((1, 2, length, 32)) for _ in range(2)]
            states = own.update_and_fetch(*new)
            found = attention(queries, *states, own, 0.2, "causal")
        return found

    monkeypatch.setattr(coding, "on_device", run)
    by_kernels = answer(Device.CUDA)
    assert launched == ["turbo_code", "turbo_restore"]
    right = answer(Device.CPU)
    assert not launched
    assert mx.allclose(by_kernels, right, rtol=0, atol=1e-5).item()


@needs_compiler
def test_a_row_is_the_same_alone_and_in_a_wider_slab(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit; and what is not served is not asked of a kernel."""
    one = kind(8, 1, 64, 3.5)
    queries, keys, values, mask = cuda.example(one, (200, 150, 400), 512, 1)
    assert mask is not None
    together = cuda.attend(queries, keys, values, 0.2, mask, emulated.run)[1]
    alone_keys, alone_values = (
        states.of_row(1).between(0, 256).map(mx.contiguous) for states in (keys, values)
    )
    row = mask[1:2, ..., :256]
    given = (queries[1:2], alone_keys, alone_values, 0.2, row)
    found = cuda.attend(*given, emulated.run)[0]
    assert mx.array_equal(together, found).item()
    assert not cuda.is_served(kind(depth=80))
    monkeypatch.setattr(cuda, "device", lambda: Device.CPU)
    assert cuda.attend_where_right(queries, keys, values, 0.2, mask) is None


@needs_compiler
def test_slabs_are_attended_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with heads of 16 numbers taken for served ones' width."""
    monkeypatch.setattr(cuda, "device", lambda: Device.CUDA)
    monkeypatch.setattr(cuda, "on_device", emulated.run)
    used: list[int] = []
    right = cuda.attend

    def counted(queries: mx.array, *given: Any) -> mx.array:
        used.append(len(queries))
        return right(queries, *given)

    monkeypatch.setattr(cuda, "attend", counted)
    slab = TurboCache(3.5).slab(3)
    slab.few_bits = KERNEL
    slab.resize(3)
    rows = []
    for place, length in ((0, 150), (2, 9)):
        _, own = filled(3.5, 32, 32, (length,), seed=place)
        slab.put(place, own)
        rows.append((place, own))
    keys, values = (mx.random.normal((3, 2, 1, 32)) for _ in range(2))
    queries = mx.random.normal((3, 6, 1, 32))
    mask = slab.make_mask(1)
    all_keys, all_values = slab.update_and_fetch(keys, values)
    found = attention(queries, all_keys, all_values, slab, 0.2, mask)
    assert used[-1] == 3  # after the trial
    for place, own in rows:
        at = slice(place, place + 1)
        own_keys, own_values = own.update_and_fetch(keys[at], values[at])
        alone_found = attention(queries[at], own_keys, own_values, own, 0.2, None)
        assert mx.allclose(found[at], alone_found, atol=1e-5).item()


def test_a_slab_that_asks_for_a_kernel_has_numpy_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``few_bits="kernel"`` is what placement=slab takes; operations would take nine times as long there."""

    def blocks(*given: Any) -> mx.array:
        raise AssertionError("operations look codes up")

    monkeypatch.setattr(turning, "_by_blocks", blocks)
    slab = TurboCache(4).slab(1)
    slab.few_bits = KERNEL
    slab.resize(1)
    slab.put(0, filled(4, 32, 32, (9,))[1])
    one = mx.ones((1, 2, 1, 32))
    mask = slab.make_mask(1)
    keys, values = slab.update_and_fetch(one, one)
    found = attention(one, keys, values, slab, 0.2, mask)
    assert mx.isfinite(found).all().item()


@pytest.mark.usefixtures("on_metal")
def test_one_row_on_metal_goes_to_mlx_vlms_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To its own function, which chooses among them; several rows, masks and sinks do not."""
    theirs, ours = filled(4, 64, 64, (50,))
    calls: list[int] = []
    right = TurboQuantKVCache.decode_attention

    def counted(self: Any, queries: mx.array, *given: Any, **named: Any) -> mx.array:
        calls.append(len(queries))
        found: mx.array = right(self, queries, *given, **named)
        return found

    monkeypatch.setattr(TurboQuantKVCache, "decode_attention", counted)
    queries = mx.random.normal((1, 6, 1, 64))
    found = attention(queries, *ours.state, None, 0.2, None)
    assert calls == [1]
    assert mx.allclose(
        found, right(theirs, queries, *theirs.state, scale=0.2), atol=1e-6
    ).item()
    for mask, sinks in ((mx.arange(50) > 3, None), (None, mx.zeros((6,)))):
        attention(queries, *ours.state, None, 0.2, mask, sinks)
    assert calls == [1]


@pytest.mark.usefixtures("on_metal")
def test_slabs_in_a_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: norms and codes go through one graph."""
    graphs: list[int] = []
    right = CompiledDecode.__call__

    def counted(self: CompiledDecode, step: DecodeStep) -> Any:
        found = right(self, step)
        graphs.append(len(self._graphs))
        return found

    monkeypatch.setattr(CompiledDecode, "USES_BEFORE_GRAPH", 0)
    monkeypatch.setattr(CompiledDecode, "__call__", counted)
    engine = generator(
        "qwen2_vl", TURBO, policy=settings_for(Placement.SLAB), compile_decode=True
    )
    asks = [Ask(IMAGE), Ask(TEXT, at=2, tokens=4)]
    adapter = shared_adapter("qwen2_vl")
    answers = run(
        adapter, lambda key: inputs_of("qwen2_vl", key), asks, generator=engine
    )
    assert graphs[-1]
    monkeypatch.undo()
    check("qwen2_vl", answers, TURBO)


@pytest.mark.parametrize("masked", ["none", "bool", "added", "by head"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_masks_and_sinks(masked: str, has_sinks: bool, way: str) -> None:
    """A step as MLX's attention over what is stored."""
    _, first = filled(3.5, 32, 48, (40,), seed=1)
    _, second = filled(3.5, 32, 48, (40,), seed=2)
    keys, values = (
        one.layout.states(
            [
                mx.concatenate(list(pair))
                for pair in zip(one.parts, other.parts, strict=True)
            ]
        )
        for one, other in zip(first.state, second.state, strict=True)
    )
    seen = mx.random.uniform(shape=(2, 1, 1, 40)) > 0.4
    masks = {
        "none": None,
        "bool": seen,
        "added": mx.where(seen, 0.0, -1e9),
        "by head": mx.random.uniform(shape=(2, 8, 1, 40)) > 0.4,
    }
    sinks = mx.random.normal((8,)) if has_sinks else None
    queries = mx.random.normal((2, 8, 1, 32))
    found = attention(queries, keys, values, None, 0.2, masks[masked], sinks)
    right = mx.fast.scaled_dot_product_attention(
        queries,
        keys.dequantized(),
        values.dequantized(),
        scale=0.2,
        mask=masks[masked],
        sinks=sinks,
    )
    assert mx.allclose(found, right, atol=1e-5).item()


def test_what_float16_has_no_norm_for_stays_finite() -> None:
    """mlx-vlm stores an infinite norm, and its answer is not a number."""
    theirs, ours = TurboQuantKVCache(4), TurboCache(4)
    large = mx.ones((1, 2, 3, 64)) * 1e5
    queries = mx.ones((1, 2, 1, 64)) * 1e-6
    for cache in (theirs, ours):
        cache.update_and_fetch(large, large)
    right = scaled_dot_product_attention(
        queries, *theirs.state, theirs, scale=1.0, mask=None
    )
    found = attention(queries, *ours.state, None, 1.0, None)
    assert not mx.isfinite(right).all().item()
    assert mx.isfinite(found).all().item()
