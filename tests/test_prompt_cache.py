"""Prompt caches that come back: a continued conversation answers as its whole prompt does alone."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_vlm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)
from mlx_vlm.trainer.peft.lora import LoRaLayer

from tests.harness import NUM_TOKENS, Ask, Inputs, run, settings_for, shared_adapter
from tests.recording import record, record_none
from tests.reuse_cases import (
    TWO_WAY,
    alone,
    answer_to,
    cached,
    checked,
    followed_by,
    in_turns,
    only_resumable,
    request,
)
from tests.zoo import family as tiny_family
from tests.zoo._build import words
from vlm_batch import VLMBatcher
from vlm_batch.adapters.fingerprint import fingerprint
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import (
    Placement,
    RingSlabCache,
    RowsCache,
    SlabCache,
)
from vlm_batch.caches.blocks import BlockCache
from vlm_batch.caches.coded import CodedCache
from vlm_batch.caches.cross import CrossCache
from vlm_batch.caches.layers import CacheKind, kind_of
from vlm_batch.caches.quantisation import KVQuantisation, LateCache
from vlm_batch.caches.quantized import QuantizedCache
from vlm_batch.caches.retained import RetainedPromptCache
from vlm_batch.caches.turbo import TurboCache
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.errors import InvalidCache
from vlm_batch.models.qwen2_vl import Qwen2VL
from vlm_batch.store.files import Identity
from vlm_batch.store.prompt import PromptCache
from vlm_batch.store.saved import save_row
from vlm_batch.types import Result, SamplingParams

CHECKPOINTS = Path(__file__).parent.parent / "fixtures" / "checkpoints"
IMAGE, TEXT = "image:1:0", "text:6:14"

both_placements = pytest.mark.parametrize(
    "placement", list(Placement), ids=lambda placement: placement.value
)


def first_turns(
    name: str, generator: BatchGenerator, *keys: str, num_tokens: int = NUM_TOKENS
) -> list[Result]:
    """Rows that run together, with their caches asked for."""
    for index, key in enumerate(keys):
        params = SamplingParams(max_tokens=num_tokens + index)
        generator.insert(
            str(index), as_mlx(request(name, key)), params, return_cache=True
        )
    results: dict[str, Result] = {}
    while generator.has_work:
        results |= {
            event.request_id: event.result
            for event in generator.step()
            if event.result is not None
        }
    return [results[str(index)] for index in range(len(keys))]


def spoken(name: str, before: Result) -> list[int]:
    """An answer as far as a prompt can hold it: up to its first point at a picture, where it has any."""
    points = tiny_family(name).points
    return list(
        takewhile(lambda token: points is None or token < points, before.token_ids)
    )


def next_turn(name: str, key: str, before: Result, seed: int) -> Inputs:
    """The prompt, its answer and further words."""
    inputs = request(name, key)
    return followed_by(
        inputs, [*spoken(name, before), *words(seed, 5)], len(inputs["input_ids"][0])
    )


@pytest.mark.parametrize(("name", "placement"), in_turns())
def test_continued_beside_a_cold_row(
    name: str, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two conversations go on from their caches, one of them with a picture, while a third begins."""
    only_resumable(name, "continued_cache")
    if name in TWO_WAY:
        why = "refused: the whole prompt attends both ways, so a longer one has other keys from its first position on"
        record_none(name, "continued_cache", why)
        pytest.skip(why)
    generator = BatchGenerator(shared_adapter(name), policy=settings_for(placement))
    first = first_turns(name, generator, IMAGE, TEXT)
    turns = {
        key: next_turn(name, key, result, 50)
        for key, result in zip((IMAGE, TEXT), first, strict=True)
    }
    caches = [result.cache for result in first]
    for cache, result in zip(caches, first, strict=True):
        assert cache is not None
        assert (
            cache.num_tokens == result.usage.prompt_tokens + len(result.token_ids) - 1
        )
    brought = {"0": caches[0], "1": caches[1], "2": None}
    plain = generator.insert
    monkeypatch.setattr(
        generator,
        "insert",
        lambda number, inputs, params: plain(
            number, inputs, params, cache=brought[number]
        ),
    )
    asks = [Ask(IMAGE), Ask(TEXT), Ask("image:3:2", at=2)]
    answers = run(
        shared_adapter(name),
        lambda key: turns.get(key, request(name, key)),
        asks,
        generator=generator,
    )
    traces = [
        answer_to(name, turns[IMAGE]),
        answer_to(name, turns[TEXT]),
        alone(name, "image:3:2"),
    ]
    largest = max(
        checked(name, answer, trace)
        for answer, trace in zip(answers, traces, strict=True)
    )
    record(name, "continued_cache", placement, largest)
    found = [cached(answer) for answer in answers]
    # an answer's tokens push each other out: the conversation goes on from its prompt
    if name == "unlimited_ocr":
        assert found == [result.usage.prompt_tokens for result in first] + [0]
    else:
        kept = [
            min(
                cache.num_tokens,  # type: ignore[union-attr]
                result.usage.prompt_tokens + len(spoken(name, result)),
            )
            for cache, result in zip(caches, first, strict=True)
        ]
        assert found == [*kept, 0]
    assert all(
        cache is not None and cache.is_continued and cache.nbytes == 0
        for cache in caches
    )


# The kinds of caches ------------------------------------------------------------------------------------------------


def filled(cache: Any, *steps: int, seed: int = 0) -> Any:
    """A cache that has seen tokens in steps of these sizes."""
    mx.random.seed(seed)
    for count in steps:
        cache.update_and_fetch(
            mx.random.normal((1, 2, count, 4)), mx.random.normal((1, 2, count, 6))
        )
    return cache


def in_order(cache: KVCache | RotatingKVCache) -> list[np.ndarray]:
    """What the next token can see of a row."""
    parts = cache.state
    if isinstance(cache, RotatingKVCache):
        parts = [
            cache._temporal_order(part)[:, :, -cache.max_size :]
            for part in (cache.keys, cache.values)
        ]
    return [np.array(part) for part in parts]


@pytest.mark.parametrize("lengths", [(5,), (3, 9), (1, 4, 12, 7)], ids=str)
@pytest.mark.parametrize("window", [None, 8])
@both_placements
def test_a_batch_gives_back_what_it_was_given(
    lengths: tuple[int, ...], window: int | None, placement: Placement
) -> None:
    """put, then some tokens, then take: the row as it would be alone; holes and one row, many rows."""
    fresh = KVCache if window is None else lambda: RotatingKVCache(window)
    slab = (
        SlabCache(len(lengths))
        if window is None
        else RingSlabCache(len(lengths), window)
    )
    layer = RowsCache() if placement is Placement.ROWS else slab
    layer.resize(len(lengths))
    twins = []
    for place, count in enumerate(lengths):
        layer.put(place, filled(fresh(), count, seed=place))
        twins.append(filled(fresh(), count, seed=place))
    mx.random.seed(9)
    for step in range(6):
        keys = mx.random.normal((len(lengths), 2, 1, 4))
        values = mx.random.normal((len(lengths), 2, 1, 6))
        layer.update_and_fetch(keys, values)
        for place, twin in enumerate(twins):
            if not (place == 1 and step >= 3 and len(lengths) > 2):
                twin.update_and_fetch(
                    keys[place : place + 1], values[place : place + 1]
                )
        if step == 2 and len(lengths) > 2:
            taken_early = layer.extract(1)
            layer.clear(1)
            for found, right in zip(
                in_order(taken_early), in_order(twins[1]), strict=True
            ):
                assert np.array_equal(found, right)
    for place, twin in enumerate(twins):
        if place == 1 and len(lengths) > 2:
            continue
        taken = layer.extract(place)
        assert type(taken) is type(twin)
        assert taken.offset == twin.offset
        for found, right in zip(in_order(taken), in_order(twin), strict=True):
            assert np.array_equal(found, right)


def recurrent(*slots: int | None) -> ArraysCache:
    cache = ArraysCache(len(slots))
    cache.cache = [
        None if slot is None else mx.full((1, 3, slot), float(slot)) for slot in slots
    ]
    return cache


class Foreign(CacheKind, KVCache):
    """A kind of cache as another package has it, which leaves it to the library how it is saved."""


def crossing() -> CrossCache:
    cache = CrossCache()
    cache.hold(mx.random.normal((1, 2, 6, 4)), mx.random.normal((1, 2, 6, 4)))
    return cache


KINDS = {
    "full": lambda: filled(KVCache(), 12),
    "window": lambda: filled(RotatingKVCache(8), 7, 5),
    "window_decoded": lambda: filled(RotatingKVCache(8), 7, *[1] * 5),
    "window_with_sinks": lambda: filled(RotatingKVCache(8, keep=2), 7, *[1] * 5),
    "recurrent": lambda: recurrent(4, 2),
    "recurrent_with_none": lambda: recurrent(None, 2),
    "recurrent_without_slots": lambda: recurrent(),
    "cross": crossing,
    "cross_empty": CrossCache,
    "list": lambda: CacheList(filled(KVCache(), 12), recurrent(None, 3)),
    "chunked": lambda: filled(ChunkedKVCache(8), 7, 5),
    "block": lambda: filled(BlockCache(8), 7, 5),
    "retained": lambda: filled(RetainedPromptCache(4), 7, 5),
    "of another package, without a state": lambda: filled(Foreign(), 7, 5),
}


IN_FEW_BITS = {
    "uniform": lambda: filled(QuantizedCache(32, 8), 7, 5),
    "turboquant": lambda: filled(TurboCache(4), 7, 5),
    "late": lambda: filled(LateCache(KVQuantisation(8, 32, start=7)), 7, 5),
    "late_and_early": lambda: filled(LateCache(KVQuantisation(8, 32, start=30)), 7, 5),
}


def seen(cache: object) -> list[np.ndarray]:
    if isinstance(cache, LateCache):
        return seen(cache.inner)
    if isinstance(cache, BlockCache):
        cache.maybe_trim_front()  # what no later token can see
    if isinstance(cache, CodedCache):
        return [np.array(part) for states in cache.state for part in states.parts]
    if isinstance(cache, CacheList):
        return [array for part in cache.caches for array in seen(part)]
    if isinstance(cache, (KVCache, RotatingKVCache)):
        return in_order(cache)
    return [np.array(array) for array in cache.state if array is not None]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_cache_is_the_cache_and_shares_nothing_with_it(kind: str) -> None:
    live = KINDS[kind]()
    state = kind_of(live).saved(12)
    mx.eval(state.arrays())
    right = seen(live)
    for _ in range(2):  # a second restoring is not changed by what became of the first
        again = state.restore(12)
        assert type(again) is type(live)
        assert all(
            np.array_equal(found, wanted)
            for found, wanted in zip(seen(again), right, strict=True)
        )
        if isinstance(again, (KVCache, RotatingKVCache)):
            filled(again, 3, 1, 1, seed=5)
    if isinstance(live, (KVCache, RotatingKVCache)):
        filled(live, 1, 1, 1, seed=7)
        assert all(
            np.array_equal(f, w)
            for f, w in zip(seen(state.restore(12)), right, strict=True)
        )


@pytest.mark.parametrize(
    "places",
    [(0,), (0, 1, 2), (0, 2, 3)],
    ids=["one row", "three rows", "a hole between rows"],
)
@pytest.mark.parametrize("kind", [*KINDS, *IN_FEW_BITS])
@both_placements
def test_put_and_take_are_inverses_for_every_kind(
    kind: str, placement: Placement, places: tuple[int, ...]
) -> None:
    """What a batch was given it gives back, None entries and empty lists as they were, and the neighbours', too."""
    make = {**KINDS, **IN_FEW_BITS}[kind]
    layer = kind_of(make()).batched(placement, 4)
    layer.resize(max(places) + 1)
    right = {}
    for place in places:
        given = make()
        right[place] = seen(given), _nones(given)
        layer.put(place, given)
    for place in places[::-1]:
        taken = layer.extract(place)
        assert type(taken) is type(make())
        assert _nones(taken) == right[place][1]
        found = seen(taken)
        assert len(found) == len(right[place][0])
        assert all(
            np.array_equal(a, b) for a, b in zip(found, right[place][0], strict=True)
        )


def _nones(cache: object) -> list[bool]:
    """Which of a recurrent cache's slots are unfilled."""
    if isinstance(cache, CacheList):
        return [is_none for part in cache.caches for is_none in _nones(part)]
    return (
        [slot is None for slot in cache.cache] if isinstance(cache, ArraysCache) else []
    )


def test_a_window_is_cut_back_only_while_it_has_not_rolled() -> None:
    state = kind_of(filled(RotatingKVCache(16), 12)).saved(12)
    assert [state.reaches(length) for length in (1, 11, 12, 13)] == [
        True,
        True,
        True,
        False,
    ]
    assert all(
        np.array_equal(a, b[:, :, :7])
        for a, b in zip(seen(state.restore(7)), state.arrays(), strict=True)
    )
    rolled = kind_of(filled(RotatingKVCache(8), 12)).saved(12)
    assert [rolled.reaches(length) for length in (1, 8, 11, 12)] == [
        False,
        False,
        False,
        True,
    ]


# Refusals, files ------------------------------------------------------------------------------------------------------

HERE = Identity("model", {"kv_bits": "None"})


def small(
    *,
    identity: Identity = HERE,
    layers: tuple[str, ...] = ("full", "window", "recurrent_with_none"),
) -> PromptCache:
    keys = np.zeros((12, 3), dtype=np.int64)
    keys[:, 0] = range(12)
    return PromptCache(
        save_row([KINDS[layer]() for layer in layers], keys, {}, 0), identity
    )


def test_a_cache_is_continued_once() -> None:
    cache = small()
    copied = cache.copy()
    cache.claim(HERE)
    for use in (lambda: cache.claim(HERE), cache.copy, lambda: cache.save("nowhere")):
        with pytest.raises(InvalidCache, match="continued by another request"):
            use()
    cache.release()  # the request ended before it had it
    cache.claim(HERE)
    cache.take()
    cache.release()
    assert cache.is_continued
    assert cache.nbytes == 0
    assert copied.nbytes > 0
    copied.claim(HERE)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (Identity("another", HERE.settings), "another model"),
        (
            Identity("model", {"kv_bits": "8"}),
            "kv_bits=8; this batcher has kv_bits=None",
        ),
        (
            Identity("model", {"kv_bits": "None", "window": "8"}),
            "window=8; this batcher has window=None",
        ),
    ],
)
def test_a_cache_of_something_else_is_refused(there: Identity, said: str) -> None:
    with pytest.raises(InvalidCache, match=said):
        small(identity=there).claim(HERE)


def test_a_fingerprint_tells_models_apart() -> None:
    """The same model has the same; one changed weight, another configuration, a LoRA adapter or fewer bits have others."""
    build = tiny_family("qwen2_vl").build
    plain, again, touched, other, adapted, packed = (build() for _ in range(6))
    embedding = touched.language_model.model.embed_tokens
    embedding.weight[5, 7] += 1e-3
    other.config.text_config.rope_theta *= 2
    layer = adapted.language_model.model.layers[0].self_attn
    layer.q_proj = LoRaLayer(layer.q_proj, rank=4)
    nn.quantize(
        packed,
        class_predicate=lambda path, module: path.endswith("q_proj"),
        group_size=32,
    )
    prints = [
        fingerprint(Qwen2VL(model))
        for model in (plain, again, touched, other, adapted, packed)
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 5


def test_a_prompt_that_does_not_continue_its_cache_is_refused() -> None:
    name = "qwen2_vl"
    generator = BatchGenerator(shared_adapter(name))
    (result,) = first_turns(name, generator, TEXT)
    assert result.cache is not None
    for prompt, said in (
        (
            request(name, "text:4:9"),
            "they differ from position 0 on, and the cache of 21 tokens",
        ),
        (
            {"input_ids": np.full((1, 40), 77, dtype=np.int32)},
            "they differ from position 0 on",
        ),
    ):
        generator.insert(
            "again", as_mlx(prompt), SamplingParams(max_tokens=2), cache=result.cache
        )
        (end,) = [
            event.result for event in generator.step() if event.result is not None
        ]
        assert isinstance(end.exception, InvalidCache)
        assert said in str(end.error)
        # it may still be continued as it should be
        assert not result.cache.is_continued


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "qwen3_5", "lfm2_vl"])
def test_a_cache_longer_than_the_prompt_is_cut(name: str) -> None:
    """A template that drops an answer's thinking makes the next prompt shorter than the last one with its answer."""
    generator = BatchGenerator(shared_adapter(name))
    (result,) = first_turns(name, generator, TEXT, num_tokens=12)
    assert result.cache is not None
    prompt = request(name, TEXT)
    turn = followed_by(
        prompt, [*spoken(name, result)[:3], *words(50, 2)], len(prompt["input_ids"][0])
    )
    assert result.cache.num_tokens > len(turn["input_ids"][0])
    plain, cache = generator.insert, result.cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            generator,
            "insert",
            lambda number, inputs, params: plain(number, inputs, params, cache=cache),
        )
        (answer,) = run(
            shared_adapter(name), lambda key: turn, [Ask(TEXT)], generator=generator
        )
    checked(name, answer, answer_to(name, turn))
    # layers that cannot be cut begin after the prompt
    kept = len(prompt["input_ids"][0])
    assert cached(answer) == (kept + 3 if name == "qwen2_vl" else kept)


def test_submit_says_what_cannot_be_cut() -> None:
    """Recurrent states have no part for what two prompts share; keys and values do."""
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    short = SamplingParams(max_tokens=8)
    with VLMBatcher(CHECKPOINTS / "qwen3_5", dtype="float32") as batcher:
        cache = (
            batcher.submit(prompt="count to 9", params=long, return_cache=True)
            .result(timeout=60)
            .cache
        )
        with pytest.raises(
            InvalidCache,
            match=r"differ from position \d+ on, and the cache of \d+ tokens cannot be cut",
        ):
            batcher.submit(prompt="count to 3", params=short, cache=cache)
        assert cache is not None and not cache.is_continued
    with VLMBatcher(CHECKPOINTS / "qwen2_vl", caches=None) as batcher:
        first = batcher.submit(
            prompt="count to 9", params=long, return_cache=True
        ).result(timeout=60)
        right = batcher.submit(prompt="count to 3", params=short).result(timeout=60)
        assert (
            first.cache is not None
            and first.cache.num_tokens > right.usage.prompt_tokens
        )
        found = batcher.submit(
            prompt="count to 3", params=short, cache=first.cache
        ).result(timeout=60)
        assert (
            found.error is None
            and found.token_ids == right.token_ids
            and found.usage.cached_tokens > 0
        )
        foreign = (
            batcher.submit(token_ids=[5, 6, 7], params=short, return_cache=True)
            .result(timeout=60)
            .cache
        )
        with pytest.raises(InvalidCache, match="differ from position 0 on"):
            batcher.submit(token_ids=[9, 6, 7], params=short, cache=foreign)


@pytest.mark.parametrize(
    "layers",
    [
        ("full", "window"),
        ("recurrent_with_none", "cross", "cross_empty", "list"),
        ("block", "retained", "window_decoded"),
    ],
)
def test_files_give_back_what_was_saved(
    layers: tuple[str, ...], tmp_path: Path
) -> None:
    cache = small(layers=layers)
    path = tmp_path / "conversation.safetensors"
    cache.save(path)
    again = PromptCache.load(path)
    # nothing temporary is left
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert (again.token_ids, again.identity) == (cache.token_ids, cache.identity)
    pairs = zip(cache.peek().restore(12, 0), again.peek().restore(12, 0), strict=True)
    for before, after in pairs:
        assert type(before) is type(after)
        assert all(
            np.array_equal(a, b) for a, b in zip(seen(before), seen(after), strict=True)
        )


GUIDE = Path(__file__).parent.parent / "docs" / "adding-a-family.md"


@pytest.fixture
def guides_cache() -> Any:
    """The class of the guide's cache: a kind that nothing else knows, whose code is all in one block."""
    section = GUIDE.read_text(encoding="utf-8").split("### A cache of its own")[1]
    names: dict[str, Any] = {"__name__": __name__}
    exec(section.split("```python\n")[1].split("```")[0], names)
    return names["SumCache"]


@both_placements
def test_a_new_kind_of_cache_needs_its_own_file_only(
    guides_cache: Any, placement: Placement, tmp_path: Path
) -> None:
    """It is batched, saved and filed, in a list with others, too, and is not cut or quantised."""
    own = guides_cache(mx.zeros((1, 3)))
    own.update_and_fetch(mx.full((1, 12, 3), 0.5))
    single = CacheList(filled(KVCache(), 12), own)
    layer = kind_of(single).batched(placement, 2)
    layer.resize(1)
    layer.put(0, single)
    taken = layer.extract(0)
    assert not kind_of(taken).is_whole
    assert [type(part) for part in KVQuantisation(8, 32).caches([taken])[0].caches] == [
        QuantizedCache,
        guides_cache,
    ]
    PromptCache(save_row([taken], np.zeros((12, 3), dtype=np.int64), {}, 0), HERE).save(
        tmp_path / "a"
    )
    (again,) = PromptCache.load(tmp_path / "a").peek().restore(12, 0)
    assert again.caches[1].total.tolist() == [[6.0] * 3]
    assert [part.offset for part in again.caches] == [12, 12]


def test_files_of_version_1_are_read() -> None:
    """A file as it was first written, with every kind of layer that files know: all arrays in their places."""
    path = Path(__file__).parent / "data" / "row_version_1.safetensors"
    row = PromptCache.load(path).peek()
    assert {
        type(state).__name__
        for state in [*row.whole.values(), *row.snapshots[12].layers.values()]
    } == {
        *(
            "FullState",
            "WindowState",
            "RecurrentState",
            "CrossState",
            "ListState",
            "WholeState",
            "BlockState",
        ),
        *("RetainedState", "QuantizedState", "TurboState", "LateState", "IndexedState"),
    }
    tensors = mx.load(str(path))
    assert isinstance(tensors, dict)
    filed = sorted(
        np.array(tensor).tobytes() for name, tensor in tensors.items() if name != "keys"
    )
    assert sorted(np.array(array).tobytes() for array in row.arrays()) == filed
    caches = row.restore(12, 1)
    assert " ".join(type(cache).__name__ for cache in caches) == (
        "KVCache RotatingKVCache RotatingKVCache ArraysCache CrossCache CrossCache CacheList BlockCache "
        "RetainedPromptCache QuantizedCache TurboCache LateCache LateCache IndexedCache WholeCache"
    )
    again = save_row(caches, row.keys, {}, 1)
    assert sorted(np.array(array).tobytes() for array in again.arrays()) == sorted(
        np.array(array).tobytes()
        for array in row.arrays()
        if array is not row.snapshots[12].logits
    )


def test_half_precision_goes_into_a_file_as_it_is(tmp_path: Path) -> None:
    live = KVCache()
    live.update_and_fetch(
        *(mx.random.normal((1, 2, 5, 4)).astype(mx.bfloat16) for _ in range(2))
    )
    PromptCache(save_row([live], np.zeros((5, 3), dtype=np.int64), {}, 0), HERE).save(
        tmp_path / "a"
    )
    (again,) = PromptCache.load(tmp_path / "a").peek().restore(5, 0)
    assert again.keys.dtype == mx.bfloat16
    assert mx.array_equal(again.keys, live.state[0]).item()


def test_damaged_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "conversation.safetensors"
    small().save(path)
    whole = path.read_bytes()
    damages = {
        "empty": b"",
        "torn": whole[: len(whole) // 2],
        "torn in its header": whole[:40],
        "longer": whole + b"x",
        "a flipped byte": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
        "another model in its header": whole.replace(
            b'\\"model\\": \\"model\\"', b'\\"model\\": \\"other\\"'
        ),
        "something else": b"\x89PNG" * 100,
    }
    for how, contents in damages.items():
        assert contents != whole, how
        path.write_bytes(contents)
        with pytest.raises(InvalidCache):
            PromptCache.load(path)
    mx.save_safetensors(str(path), {"a": mx.zeros((3,))}, {"format": "mlx"})
    with pytest.raises(InvalidCache, match="format is 'mlx'"):
        PromptCache.load(path)
    path.write_bytes(whole.replace(b'"version":"1"', b'"version":"9"'))
    with pytest.raises(InvalidCache, match="version is 9"):
        PromptCache.load(path)
    with pytest.raises(FileNotFoundError):
        PromptCache.load(tmp_path / "missing")


def test_a_row_that_files_do_not_know_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidCache, match="cannot be written"):
        small(layers=("full", "chunked")).save(tmp_path / "a")
