"""Quantised keys and values: a batched row is the same row alone under the same settings, and close to the exact one."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.harness import (
    Answer,
    Ask,
    inputs_of,
    oracle,
    run,
    settings_for,
    shared_adapter,
)
from tests.recording import record, record_none
from tests.reuse_cases import followed_by, in_turns, only_resumable, request
from tests.zoo import apart
from tests.zoo._build import words
from vlm_batch import VLMBatcher
from vlm_batch.adapters import powers, turning
from vlm_batch.adapters.attention import attention
from vlm_batch.adapters.quantisation import check_quantisation
from vlm_batch.arrays import as_mlx
from vlm_batch.assets import default_checkpoint
from vlm_batch.caches import Placement, SlabCache, lookups
from vlm_batch.caches.layers import kind_of
from vlm_batch.caches.quantisation import KVQuantisation, LateCache
from vlm_batch.caches.quantized import (
    QuantizedCache,
    QuantizedSlabCache,
    QuantizedStates,
    SlabStates,
    attend_quantized,
    quantize,
)
from vlm_batch.caches.turbo import TurboStates
from vlm_batch.engine.compiled import CompiledDecode
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.reuse import Reuse
from vlm_batch.errors import UnsupportedModel
from vlm_batch.policy import KERNEL, PACKED, UNPACKED
from vlm_batch.records import DecodeStep
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.files import can_write
from vlm_batch.store.prefix import PrefixCache
from vlm_batch.store.prompt import PromptCache
from vlm_batch.store.saved import common_length
from vlm_batch.types import SamplingParams

IMAGE, TEXT, OTHER = "image:3:2", "text:5:26", "image:1:0"

#: How far log-probabilities may move by bits, where the batch sums in another order than a row alone. A key in 8 bits has
#: 256 codes; when one of them changes by one, a tiny model's log-probabilities change by up to 0.02. What is really wrong (a
#: neighbour's keys, a dropped mask) moves them by several units (test_a_dropped_mask_is_far_off).
ROUNDED = {8: 0.05, 4: 0.5, 3: 1.0}

TURBO = KVQuantisation(8, scheme="turboquant")


def generator(name: str, kv: KVQuantisation | None, **how: Any) -> BatchGenerator:
    return BatchGenerator(shared_adapter(name), kv=kv, **how)


@cache
def alone(
    name: str, key: str, kv: KVQuantisation, num_tokens: int = 8
) -> tuple[list[int], np.ndarray]:
    """Tokens and log-probabilities (T, V) of a request that has the engine to itself, under the same settings."""
    (answer,) = run(
        shared_adapter(name),
        lambda key: request(name, key),
        [Ask(key, tokens=num_tokens)],
        generator=generator(
            name, kv, policy=settings_for(Placement.ROWS, idle_budget=2048)
        ),
    )
    assert answer.result is not None
    assert answer.result.error is None, answer.result.error
    return list(answer.result.token_ids), np.stack(answer.logprobs)


def check(name: str, answers: list[Answer], kv: KVQuantisation) -> float:
    """Every answer is the row's alone, up to a code that rounding in the sixth digit has pushed over its edge.

    Returns the largest difference.
    """
    allowed, largest = ROUNDED[int(kv.bits)], 0.0
    for answer in answers:
        assert answer.result is not None
        assert answer.result.error is None, answer.result.error
        tokens, logprobs = alone(name, answer.ask.key, kv)
        for step, token in enumerate(answer.result.token_ids):
            worst = apart(answer.logprobs[step], logprobs[step])
            assert worst <= allowed, (name, answer.ask.key, step, worst)
            largest = max(largest, worst)
            # then they were as good as equal, and what follows is another text
            if token != tokens[step]:
                assert (
                    logprobs[step][tokens[step]] - logprobs[step][token] <= 2 * allowed
                )
                break
    return largest


#: The zoo's heads are of 16 numbers, which are filled to a group of 32: a batcher refuses so much filler.
UNIFORM = KVQuantisation(8, 32)
LATE = KVQuantisation(8, 32, start=20)
#: Families that refuse, by name and with the reason.
REFUSED = {
    **dict.fromkeys(
        ("deepseek_v4", "deepseek_v4_text", "deepseek_v41", "glm5_next"),
        "no layer of full attention",
    ),
    "kimi_k25": "cannot be run with kv_bits=8",
    "kimi_k25_groups": "cannot be run with kv_bits=8",
    "kimi_k3": "cannot be run with kv_bits=8",
    "inkling": "cannot be run with kv_bits=8",
    "mistral_large3": "cannot be run with kv_bits=8",
    "youtu_vl": "cannot be run with kv_bits=8",
    "paligemma2": "cannot be run with kv_bits=8",
    "unlimited_ocr": "no layer of full attention",
}
_LATENT = "attention over the latent cuts the keys up itself"
REASONS = {
    **dict.fromkeys(
        ("deepseek_v4", "deepseek_v4_text", "deepseek_v41", "glm5_next"),
        "no layer of full attention",
    ),
    "kimi_k25": _LATENT,
    "kimi_k25_groups": _LATENT,
    "kimi_k3": _LATENT,
    "inkling": "biases by distance are made for keys as arrays",
    "mistral_large3": _LATENT,
    "youtu_vl": _LATENT,
    "paligemma2": "scores are capped before the softmax",
    "unlimited_ocr": "no layer of full attention",
}


@pytest.mark.parametrize(
    "kv", [UNIFORM, KVQuantisation(4, 32)], ids=["8 bits", "4 bits"]
)
@pytest.mark.parametrize("placement", list(Placement))
def test_equal_prompts_are_prefilled_together(
    kv: KVQuantisation, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one array, whose rows read what is stored as each alone does; nothing of the others stays with a row."""
    name, shared = "qwen2_vl", []
    adapter = shared_adapter(name)
    whole = adapter.prefill

    def watched(rows: Sequence[Any], cache: list[Any], *rest: Any) -> mx.array:
        shared.append((len(rows), {type(layer) for layer in cache}))
        return whole(rows, cache, *rest)

    monkeypatch.setattr(adapter, "prefill", watched)
    asks = [Ask(f"image:{seed}:1") for seed in (1, 2, 3)]
    engine = generator(
        name, kv, policy=settings_for(placement, prefill_together=8, idle_budget=512)
    )
    answers = run(adapter, lambda key: request(name, key), asks, generator=engine)
    assert shared == [(3, {QuantizedCache})]
    check(name, answers, kv)


def test_rows_that_stay_exact_at_first_are_prefilled_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = shared_adapter("qwen2_vl")
    whole = adapter.prefill

    def watched(rows: Sequence[Any], *rest: Any) -> mx.array:
        assert len(rows) == 1, "a chunk has to end where bits begin"
        return whole(rows, *rest)

    monkeypatch.setattr(adapter, "prefill", watched)
    asks = [Ask(f"image:{seed}:1") for seed in (1, 2)]
    engine = generator(
        "qwen2_vl", LATE, policy=settings_for(prefill_together=8, idle_budget=512)
    )
    check(
        "qwen2_vl",
        run(adapter, lambda key: request("qwen2_vl", key), asks, generator=engine),
        LATE,
    )


@pytest.mark.parametrize("mask", [None, "causal"])
def test_several_queries_attend_by_the_devices_own_kernels(mask: str | None) -> None:
    """The same numbers as without them, and the stored ones: what is not representable in 8 bits is gone."""
    random = np.random.RandomState(5)
    queries, keys, values = (
        mx.array(random.standard_normal((1, heads, length, 32)).astype(np.float32))
        for heads, length in ((4, 90), (2, 130), (2, 130))
    )
    stored = quantize(keys, 32, 8), quantize(values, 32, 8)
    found = attention(queries, *stored, None, 0.2, mask)
    plain = mx.fast.scaled_dot_product_attention(
        queries, *(part.dequantized() for part in stored), scale=0.2, mask=mask
    )
    assert float(mx.abs(found - plain).max()) < 1e-5
    exact = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=0.2, mask=mask
    )
    assert float(mx.abs(found - exact).max()) > 1e-4


def test_turboquant_is_served_on_every_device() -> None:
    with pytest.warns(UserWarning, match="3 of 4 layers .* with turboquant the last"):
        batcher = VLMBatcher(default_checkpoint(), kv=TURBO)
    with batcher:
        handles = [
            batcher.submit(prompt=f"count to {count}", params={"max_tokens": 4})
            for count in (5, 9)
        ]
        assert all(handle.result().error is None for handle in handles)


@pytest.mark.parametrize(("name", "placement"), in_turns())
def test_rows_are_what_they_are_alone(name: str, placement: Placement) -> None:
    """Uniform 8 bits: rows together, joining, leaving and cancelled, in chunks; and close to the exact rows."""
    if name in REFUSED:
        refused(name, "kv_8_bits", TURBO)
        return
    quantised, _ = UNIFORM.counts(shared_adapter(name).make_cache())
    assert quantised, (
        f"{name} has no layer that bits would apply to: it is to be refused"
    )
    asks = [
        Ask(IMAGE),
        Ask(TEXT, tokens=3),
        Ask(OTHER, at=2),
        Ask(TEXT, at=3, cancel_at=7),
    ]
    engine = generator(
        name, UNIFORM, policy=settings_for(placement, prefill_budget=5, idle_budget=5)
    )
    answers = run(
        shared_adapter(name), lambda key: request(name, key), asks, generator=engine
    )
    record(name, "kv_8_bits", placement, check(name, answers, UNIFORM))
    exact = oracle(name, IMAGE).logprobs[0]
    assert 0 < apart(answers[0].logprobs[0], exact) < 1.0


@pytest.mark.parametrize(("name", "placement"), in_turns())
def test_turboquant_for_every_family_or_refused_by_name(
    name: str, placement: Placement
) -> None:
    """Two rows, one of which joins late."""
    if name in REFUSED:
        refused(name, "kv_turboquant", TURBO)
        return
    asks = [Ask(IMAGE, tokens=5), Ask(TEXT, at=2, tokens=5)]
    engine = generator(name, TURBO, policy=settings_for(placement))
    answers = run(
        shared_adapter(name), lambda key: request(name, key), asks, generator=engine
    )
    record(name, "kv_turboquant", placement, check(name, answers, TURBO))


@pytest.mark.parametrize(("name", "placement"), in_turns())
def test_quantised_conversations_go_on(
    name: str, placement: Placement, tmp_path: Path
) -> None:
    """A prefix hit and a continued cache, by way of a file where files know its layers: as without them."""
    only_resumable(name, "kv_8_bits_continued")
    if name in REFUSED:
        refused(name, "kv_8_bits_continued", TURBO)
        return
    adapter = shared_adapter(name)
    engine = generator(
        name,
        UNIFORM,
        policy=settings_for(placement),
        reuse=Reuse(adapter, PrefixCache(ByteBudget(2**28))),
    )
    engine.insert(
        "first",
        as_mlx(request(name, TEXT)),
        SamplingParams(max_tokens=4, seed=0),
        return_cache=True,
    )
    (first,) = [
        event.result
        for _ in range(60)
        for event in engine.step()
        if event.result is not None
    ]
    assert first.error is None, first.error
    assert first.cache is not None
    held = first.cache
    if can_write(held.peek()):
        held.save(tmp_path / "a")
        held = PromptCache.load(tmp_path / "a")
    longer = followed_by(
        request(name, TEXT),
        [*first.token_ids, *words(77, 5)],
        len(request(name, TEXT)["input_ids"][0]),
    )
    largest = 0.0
    shared = common_length(
        *(
            adapter.prompt_key(as_mlx(one)).positions
            for one in (longer, request(name, TEXT))
        )
    )
    # continued, unless a longer prompt has other keys; a hit of what it left
    ways = [held, None] if shared else [None]
    for brought in ways:
        reuse = Reuse(adapter) if brought is not None else engine.reuse
        warm = generator(name, UNIFORM, policy=settings_for(placement), reuse=reuse)
        found = quantised_answer(name, longer, warm, brought)
        right = quantised_answer(
            name, longer, generator(name, UNIFORM, policy=settings_for(Placement.ROWS))
        )
        assert found.result is not None
        assert found.result.error is None, found.result.error
        if shared:
            assert found.result.usage.cached_tokens >= first.usage.prompt_tokens
        worst = apart(found.logprobs[0], right.logprobs[0])
        assert worst <= ROUNDED[8], (name, worst)
        largest = max(largest, worst)
    record(name, "kv_8_bits_continued", placement, largest)


def test_quantised_slabs_in_a_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: packed numbers, scales and biases go through one graph."""
    graphs: list[DecodeStep] = []
    right = CompiledDecode.__call__

    def counted(self: CompiledDecode, step: DecodeStep) -> mx.array:
        graphs.append(step)
        return right(self, step)

    monkeypatch.setattr(CompiledDecode, "__call__", counted)
    asks = [Ask(IMAGE), Ask(TEXT, at=2, tokens=4)]
    engine = generator(
        "qwen2_vl", UNIFORM, policy=settings_for(Placement.SLAB), compile_decode=True
    )
    check(
        "qwen2_vl",
        run(
            shared_adapter("qwen2_vl"),
            lambda key: request("qwen2_vl", key),
            asks,
            generator=engine,
        ),
        UNIFORM,
    )
    assert graphs


@pytest.mark.parametrize(
    "placement", list(Placement), ids=lambda placement: placement.value
)
def test_turboquant_decodes_without_unpacking_the_cache(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows of different lengths: one call for all of them, which never turns keys or values back."""
    name = "qwen2_vl"
    calls: Counter[str] = Counter()

    def count(home: Any, method: str) -> None:
        right = getattr(home, method)

        def counted(*args: Any) -> Any:
            calls[method] += 1
            return right(*args)

        monkeypatch.setattr(home, method, counted)

    count(TurboStates, "rotated")
    count(TurboStates, "dequantized")
    count(turning, "attend_step")
    count(turning, "attend_rows")
    engine = generator(name, TURBO, policy=settings_for(placement))
    for index, key in enumerate((IMAGE, TEXT, OTHER)):
        engine.insert(
            str(index), as_mlx(request(name, key)), SamplingParams(max_tokens=9)
        )
    while len(engine.rows.batch) < 3:
        engine.step()
    calls.clear()
    for _ in range(5):
        engine.step()
    quantised, _ = TURBO.counts(shared_adapter(name).make_cache())
    way = "attend_rows" if placement is Placement.ROWS else "attend_step"
    assert quantised
    assert calls["rotated"] == calls["dequantized"] == 0
    assert calls[way] >= 5 * quantised
    if placement is Placement.ROWS and lookups.is_numpys():  # a GPU has slabs for this
        assert not calls["attend_step"]
    engine.reset()


def refused(name: str, scenario: str, kv: KVQuantisation) -> None:
    with pytest.raises(UnsupportedModel, match=REFUSED[name]) as raised:
        check_quantisation(shared_adapter(name), kv)
    record_none(name, scenario, f"refused: {REASONS[name]}")
    assert shared_adapter(name).spec.family in str(raised.value)


def quantised_answer(
    name: str, inputs: Any, engine: BatchGenerator, cache: PromptCache | None = None
) -> Answer:
    """The first tokens of a request that may continue a cache."""
    plain = engine.insert
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine,
            "insert",
            lambda number, given, params: plain(number, given, params, cache=cache),
        )
        (answer,) = run(
            shared_adapter(name),
            lambda key: inputs,
            [Ask("", tokens=3)],
            generator=engine,
        )
    return answer


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3n", "falcon_ocr"])
def test_a_dropped_mask_is_far_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: rows of different lengths in one slab, without the mask between them."""
    monkeypatch.setattr(SlabCache, "make_mask", lambda self, length, **_: None)
    engine = generator(name, UNIFORM, policy=settings_for(Placement.SLAB))
    answers = run(
        shared_adapter(name),
        lambda key: request(name, key),
        [Ask(IMAGE), Ask(OTHER)],
        generator=engine,
    )
    with pytest.raises(AssertionError):
        check(name, answers, UNIFORM)


@pytest.mark.parametrize(
    ("name", "kv", "placement"),
    [
        ("qwen2_vl", TURBO, Placement.SLAB),
        ("qwen2_vl", KVQuantisation(4, 32), Placement.SLAB),
        ("qwen2_vl", LATE, Placement.ROWS),
        ("qwen2_vl", KVQuantisation(8, scheme="turboquant", start=20), Placement.SLAB),
        ("gemma3n", KVQuantisation(3.5, scheme="turboquant"), Placement.ROWS),
        ("gemma3n", LATE, Placement.SLAB),
        ("mllama", KVQuantisation(4, 32), Placement.ROWS),
        ("mllama", LATE, Placement.SLAB),
        ("falcon_ocr", LATE, Placement.ROWS),
        ("qwen3_5", TURBO, Placement.ROWS),
        ("moondream3", KVQuantisation(3.5, scheme="turboquant"), Placement.SLAB),
    ],
    ids=str,
)
def test_other_schemes(name: str, kv: KVQuantisation, placement: Placement) -> None:
    """TurboQuant; late quantisation, whose start lies in the middle of a prompt or of an answer."""
    asks = [Ask(IMAGE), Ask(OTHER, tokens=8), Ask(TEXT, at=2, tokens=4)]
    engine = generator(
        name, kv, policy=settings_for(placement, prefill_budget=7, idle_budget=7)
    )
    check(
        name,
        run(
            shared_adapter(name), lambda key: request(name, key), asks, generator=engine
        ),
        kv,
    )


@pytest.mark.parametrize("kv", [UNIFORM, TURBO, LATE], ids=str)
def test_kept_rows_go_on_quantised_and_exactly(kv: KVQuantisation) -> None:
    name = "qwen2_vl"
    adapter = shared_adapter(name)
    reuse = Reuse(adapter, PrefixCache(ByteBudget(2**28)))
    engine = generator(name, kv, reuse=reuse, policy=settings_for(Placement.SLAB))
    cached = []
    for key in (IMAGE, f"{IMAGE}~1", f"{TEXT}", f"{TEXT}+1"):
        answers = run(
            adapter, lambda key: request(name, key), [Ask(key)], generator=engine
        )
        check(name, answers, kv)
        assert answers[0].result is not None
        cached.append(answers[0].result.usage.cached_tokens)
    assert [count > 8 for count in cached] == [False, kv is not LATE, False, True]


def test_memory_of_the_issue() -> None:
    """B=4, H=32, S=512, D=128 in float32: 67.1 MB exact, 18.9 in 8 bits, 10.5 in 4."""
    keys = mx.random.normal((1, 32, 512, 128))
    exact = SlabCache(4)
    sizes = {}
    for bits in (8, 4):
        row = QuantizedCache(64, bits)
        row.update_and_fetch(keys, keys)
        sizes[bits] = 4 * row.nbytes
    full = 4 * 2 * keys.nbytes
    assert exact.nbytes == 0
    assert [round(size / 1e6, 1) for size in (full, sizes[8], sizes[4])] == [
        67.1,
        18.9,
        10.5,
    ]
    assert full / sizes[8] >= 3.5
    assert full / sizes[4] >= 6


@pytest.mark.parametrize("depth", [64, 80])
@pytest.mark.parametrize("bits", [4, 8])
def test_attention_reads_what_is_stored(bits: int, depth: int) -> None:
    """Grouped queries, one or several; masks of every kind; sinks: as over the unpacked arrays."""
    mx.random.seed(1)
    keys, values = (
        quantize(mx.random.normal((2, 2, 12, depth)), 32, bits) for _ in range(2)
    )
    plain = [states.dequantized() for states in (keys, values)]
    bools = mx.greater(mx.random.uniform(shape=(2, 1, 1, 12)), 0.3)
    cases: list[tuple[int, Any, Any]] = [
        (1, None, None),
        (1, "causal", None),
        (1, bools, None),
        (1, mx.broadcast_to(bools, (2, 8, 1, 12)), None),
        (1, mx.where(bools, 0.0, -1e9), None),
        (1, mx.arange(12) > 3, None),
        (1, bools, mx.random.normal((8,))),
        (5, "causal", None),
        (
            5,
            mx.greater(mx.random.uniform(shape=(1, 1, 5, 12)), 0.2),
            mx.random.normal((8,)),
        ),
    ]
    for length, mask, sinks in cases:
        queries = mx.random.normal((2, 8, length, depth))
        found = attend_quantized(queries, keys, values, 0.3, mask, sinks)
        wanted = None if isinstance(mask, str) and length == 1 else mask
        right = mx.fast.scaled_dot_product_attention(
            queries, *plain, scale=0.3, mask=wanted, sinks=sinks
        )
        assert found.shape == right.shape
        assert mx.allclose(found, right, atol=1e-4).item()


@pytest.mark.parametrize("depth", [64, 80])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_heads_that_share_keys_attend_by_their_codes(
    bits: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where a byte holds whole codes: of one group a head and of several, the last one filled, of a cut slab."""
    calls: list[int] = []
    right = powers.attend_codes

    def counted(queries: mx.array, *given: Any) -> mx.array:
        calls.append(queries.shape[1])
        return right(queries, *given)

    monkeypatch.setattr(powers, "MANY_CODES", 0)
    monkeypatch.setattr(powers, "attend_codes", counted)
    mx.random.seed(bits)
    keys, values = (
        quantize(mx.random.normal((2, 2, 40, depth)), 32, bits) for _ in range(2)
    )
    keys, values = (
        states.map(lambda part: part[:1, :, :37]) for states in (keys, values)
    )
    plain = [states.dequantized() for states in (keys, values)]
    for heads, mask in ((8, None), (14, "causal"), (8, mx.arange(37) > 3), (2, None)):
        queries = mx.random.normal((1, heads, 1, depth))
        found = attention(queries, keys, values, None, 0.3, mask)
        shown = None if isinstance(mask, str) else mask
        wanted = mx.fast.scaled_dot_product_attention(
            queries, *plain, scale=0.3, mask=shown
        )
        assert found.shape == wanted.shape
        assert mx.allclose(found, wanted, atol=1e-5).item()
    assert calls == ([] if bits == 3 else [8, 14])


def test_slabs_and_rows_hold_the_same() -> None:
    """put, tokens, take: packed numbers equal, whatever the place."""
    slab = QuantizedSlabCache(3, 32, 4)
    slab.resize(3)
    singles = []
    for place, count in ((0, 5), (2, 9)):
        mx.random.seed(place)
        new = mx.random.normal((1, 2, count, 48))
        single, twin = QuantizedCache(32, 4), QuantizedCache(32, 4)
        for one in (single, twin):
            one.update_and_fetch(new, 2 * new)
        slab.put(place, single)
        singles.append((place, twin))
    for step in range(4):
        mx.random.seed(50 + step)
        new = mx.random.normal((3, 2, 1, 48))
        slab.update_and_fetch(new, 2 * new)
        for place, twin in singles:
            twin.update_and_fetch(new[place : place + 1], 2 * new[place : place + 1])
    assert slab.lengths == (9, 0, 13)
    for place, twin in singles:
        taken = slab.extract(place)
        assert taken.offset == twin.offset
        for found, right in zip(taken.state, twin.state, strict=True):
            assert found.shape == right.shape
            assert all(
                mx.array_equal(a, b).item()
                for a, b in zip(found.parts, right.parts, strict=True)
            )
        state = kind_of(taken).saved(taken.offset)
        again = state.restore(7)
        assert again.state[0].shape == (1, 2, 7, 48)


@pytest.mark.parametrize(
    ("key_depth", "value_depth"), [(48, 48), (64, 32)], ids=["stacked", "of two depths"]
)
def test_slabs_hand_out_what_they_hold(key_depth: int, value_depth: int) -> None:
    """Packed or unpacked, with keys and values in one slab or in two, and with many columns behind the widest row."""
    ways = (PACKED, UNPACKED, KERNEL)
    singles, slabs = [], [QuantizedSlabCache(3, 32, 8, few_bits=way) for way in ways]
    for place, count in ((0, 700), (2, 9)):
        mx.random.seed(place)
        single = QuantizedCache(32, 8)
        single.update_and_fetch(
            mx.random.normal((1, 2, count, key_depth)),
            mx.random.normal((1, 2, count, value_depth)),
        )
        singles.append((place, single))
    for slab in slabs:
        slab.resize(3)
        for place, single in singles:
            slab.put(place, single)
    for kept in ((0, 2), (2,)):
        for slab in slabs:
            for place in {0, 2} - set(kept):
                slab.clear(place)
        mx.random.seed(5)
        keys = mx.random.normal((3, 2, 1, key_depth))
        values = mx.random.normal((3, 2, 1, value_depth))
        for _, single in singles:
            single.update_and_fetch(keys[_ : _ + 1], values[_ : _ + 1])
        packed, unpacked, whole_slabs = (
            slab.update_and_fetch(keys, values) for slab in slabs
        )
        for place in kept:
            single = dict(singles)[place]
            for found, whole, slab, states in zip(
                packed, unpacked, whole_slabs, single.state, strict=True
            ):
                right, columns = states.dequantized(), single.offset
                assert isinstance(whole, mx.array)
                assert slab.shape == found.shape
                assert mx.array_equal(
                    slab.cut().dequantized()[place : place + 1, :, :columns], right
                ).item()
                assert mx.array_equal(
                    whole[place : place + 1, :, :columns], right
                ).item()
                assert mx.array_equal(
                    found.dequantized()[place : place + 1, :, :columns], right
                ).item()
    assert packed[0].shape[2] == unpacked[0].shape[2] == 256


@pytest.mark.parametrize("few_bits", ["packed", "unpacked", "kernel"])
def test_the_policy_says_how_slabs_in_few_bits_are_read(
    few_bits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By products of packed numbers, by the kernels of exact keys, or by one of their own; all are the row alone."""
    seen: list[type] = []
    right: Any = QuantizedSlabCache.state

    def fetched(self: QuantizedSlabCache) -> Any:
        found = right.fget(self)
        seen.append(type(found[0]))
        return found

    monkeypatch.setattr(QuantizedSlabCache, "state", property(fetched))
    policy = settings_for(Placement.SLAB, few_bits=few_bits)
    engine = generator("qwen2_vl", UNIFORM, policy=policy)
    asks = [Ask(IMAGE), Ask(TEXT, at=2, tokens=4)]
    check(
        "qwen2_vl",
        run(
            shared_adapter("qwen2_vl"),
            lambda key: request("qwen2_vl", key),
            asks,
            generator=engine,
        ),
        UNIFORM,
    )
    assert set(seen) == {
        {"packed": QuantizedStates, "unpacked": mx.array, "kernel": SlabStates}[
            few_bits
        ]
    }


def test_a_late_cache_is_exact_until_its_start() -> None:
    late = LateCache(LATE)
    keys = mx.random.normal((1, 2, 20, 32))
    assert isinstance(late.update_and_fetch(keys, keys)[0], mx.array)
    found, _ = late.update_and_fetch(keys[:, :, :1], keys[:, :, :1])
    assert isinstance(found, QuantizedStates)
    assert found.shape == (1, 2, 21, 32)
    state = kind_of(late).saved(21)
    assert state.floor == 20
    assert [state.reaches(length) for length in (19, 20, 21, 22)] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"bits": 3.5},
            "kv_bits is 3.5; uniform quantisation takes .* need scheme='turboquant'",
        ),
        ({"bits": 7}, "kv_bits is 7; uniform"),
        ({"bits": 16}, "kv_bits is 16"),
        ({"bits": 9, "scheme": "turboquant"}, "turboquant takes 2 to 8 bits"),
        ({"bits": 3.3, "scheme": "turboquant"}, "in steps of a half"),
        ({"bits": 8, "group_size": 48}, "group_size is 48"),
        (
            {"bits": 8, "scheme": "fp8"},
            "scheme is 'fp8'; it must be one of uniform, turboquant",
        ),
        ({"bits": 8, "start": -1}, "start is -1"),
    ],
)
def test_what_a_scheme_cannot_do_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        KVQuantisation(**options)


def test_heads_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        ValueError,
        match="keys have 16 numbers a head: with group_size=64 they would be stored as 64",
    ):
        check_quantisation(shared_adapter("qwen2_vl"), KVQuantisation(8))


def test_what_stays_exact_is_said_once() -> None:
    with pytest.warns(
        UserWarning, match="1 of 4 layers of aya_vision are quantised; .* the last"
    ):
        check_quantisation(shared_adapter("aya_vision"), TURBO)


def test_arrays_do_not_grow_in_number_with_an_answer() -> None:
    engine = generator("qwen2_vl", UNIFORM)
    engine.insert(
        "a", as_mlx(inputs_of("qwen2_vl", "text:4:9")), SamplingParams(max_tokens=300)
    )
    counts = []
    for step in range(250):
        engine.step()
        if step in (60, 150, 240):
            gc.collect()
            counts.append(sum(type(item) is mx.array for item in gc.get_objects()))
    assert counts[0] == counts[1] == counts[2]
