"""The automatic prefix cache: a hit answers exactly as a cold row does, and nothing is ever taken for something else."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.cache import ArraysCache

from tests.harness import (
    TOLERANCE,
    Ask,
    difference,
    every_family,
    inputs_of,
    run,
    settings_for,
    shared_adapter,
)
from tests.recording import record, record_none
from tests.reuse_cases import (
    TAIL,
    TWO_WAY,
    Asker,
    alone,
    asker,
    cached,
    end_of_pictures,
    in_turns,
    key_of,
    length,
    only_resumable,
    request,
)
from tests.zoo import family
from tests.zoo._build import words
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import Placement
from vlm_batch.caches.recurrent import RecurrentState
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.overlap import Overlap
from vlm_batch.engine.reuse import Caches, Reuse
from vlm_batch.engine.row import Prompt, new_row
from vlm_batch.engine.shapes import chunk_end
from vlm_batch.records import PromptKey
from vlm_batch.store.budget import LITTLE, ByteBudget
from vlm_batch.store.directory import RowFiles
from vlm_batch.store.files import Identity, can_write, read_row
from vlm_batch.store.index import BLOCK, PrefixIndex
from vlm_batch.store.prefix import MAX_SNAPSHOTS, PrefixCache, thin
from vlm_batch.store.saved import SavedRow, Snapshot, common_length
from vlm_batch.types import SamplingParams

IMAGE, TEXT, SHORT = "image:3:2", "text:5:26", "text:4:9"

#: Families with a layer whose kind of cache is copied as it is and goes into no file.
_OF_ITS_OWN = (
    "an indexer's cache is of a kind that files do not know: kept in memory only"
)
NOT_WRITTEN = {
    "molmo_point": "what a row can point at is kept in memory only",
    "deepseek_v41": "one cache for all layers is of a kind that files do not know: kept in memory only",
    "glm5_next": _OF_ITS_OWN,
    "minimax_m3_vl": _OF_ITS_OWN,
}

all_families = pytest.mark.parametrize("name", every_family())


@pytest.mark.parametrize(("name", "placement"), in_turns())
def test_hits(name: str, placement: Placement) -> None:
    """The same prompt again, another question about the same picture, and a longer prompt: all from what is kept."""
    only_resumable(name, "prefix_hits")
    asks = asker(name, policy=settings_for(placement))
    assert asks.ask(IMAGE, SHORT) == [0, 0]
    # Nothing is prefilled, not even the last token: its logits were kept.
    assert asks.ask(SHORT, IMAGE) == [length(name, SHORT), length(name, IMAGE)]
    other, longer = asks.ask(f"{IMAGE}~1", f"{SHORT}+2")
    record(name, "prefix_hits", placement, asks.largest)
    if name in TWO_WAY:
        assert (other, longer) == (0, 0)
        return
    assert end_of_pictures(name, IMAGE) <= other <= length(name, IMAGE) - TAIL
    # the answer may begin as the longer prompt goes on
    assert longer in (length(name, SHORT), length(name, SHORT) + 1)


@pytest.mark.parametrize(("name", "placement"), in_turns())
def test_hits_with_two_pictures(name: str, placement: Placement) -> None:
    """Both pictures from what is kept, neither of them encoded again; and a row beside it that begins otherwise."""
    only_resumable(name, "prefix_two_images")
    if family(name).two_images is None:
        why = family(name).no_two_images
        record_none(name, "prefix_two_images", why)
        pytest.skip(why)
    asks = asker(name, policy=settings_for(placement))
    assert asks.ask("two:7", "two:8")[0] == 0
    # Of exactly 33 positions mlx-vlm's loop turns phi3_v's first 32 by other factors than a whole prompt of 33.
    other = "two:7~2" if name == "phi3_v" else "two:7+2"
    same, longer = asks.ask("two:7", other)
    assert same == length(name, "two:7")
    keys = [key_of(name, request(name, key)).positions for key in ("two:7", other)]
    # not where the whole prompt attends both ways, or turns by a long prompt's factors
    if common_length(*keys):
        assert longer >= end_of_pictures(name, "two:7")
    else:
        assert longer == 0
    record(name, "prefix_two_images", placement, asks.largest)


@pytest.mark.parametrize(
    "name", [name for name in every_family() if family(name).video is not None]
)
def test_hits_with_a_video(name: str) -> None:
    """Another question about the same video is answered from what is kept; the same words about another video are not."""
    asks = asker(name)
    assert asks.ask("video:3:2", "both:6") == [0, 0]
    again, other, both = asks.ask("video:3:2", "video:3:2~1", "both:6~1")
    assert again == length(name, "video:3:2")
    assert (
        end_of_pictures(name, "video:3:2") <= other <= length(name, "video:3:2") - TAIL
    )
    assert end_of_pictures(name, "both:6") <= both <= length(name, "both:6") - TAIL
    mine, theirs = request(name, "video:3:2"), request(name, "video:8:2")
    changed = {**theirs, "input_ids": mine["input_ids"]}
    assert asks.ask_inputs(changed)[0] <= key_of(name, mine).pictures[0][0]
    if "second_per_grid_ts" in mine:
        assert (
            asks.ask_inputs(
                {**mine, "second_per_grid_ts": mine["second_per_grid_ts"] / 2}
            )[0]
            <= 4
        )


WITH_VIDEOS = [name for name in every_family() if family(name).video is not None]


@pytest.mark.parametrize("name", WITH_VIDEOS)
def test_hits_with_videos(name: str) -> None:
    """A video again, another question about it, a longer prompt; and a prompt of pictures around a video."""
    asks = asker(name)
    assert asks.ask("video:3:2", "both:6") == [0, 0]
    same, both = asks.ask("video:3:2", "both:6")
    assert (same, both) == (length(name, "video:3:2"), length(name, "both:6"))
    for key in ("video:3:2", "both:6"):
        other, longer = asks.ask(f"{key}~1", f"{key}+2")
        assert end_of_pictures(name, key) <= other <= length(name, key) - TAIL
        assert longer >= length(name, key)


def brighter(pixels: Any) -> Any:
    return (
        [brighter(part) for part in pixels]
        if isinstance(pixels, list)
        else pixels * np.float32(1.01)
    )


@pytest.mark.parametrize("name", WITH_VIDEOS)
def test_another_video_or_another_pace_is_never_a_hit(name: str) -> None:
    """The same ids with other frames, or with the same frames at other seconds where positions go by them."""
    asks = asker(name)
    inputs = inputs_of(name, "video:3:2")
    asks.ask_inputs(inputs)
    pixels = (
        "pixel_values_videos" if "pixel_values_videos" in inputs else "pixel_values"
    )  # MiniCPM's frames are pictures
    changed = [{**inputs, pixels: brighter(inputs[pixels])}]
    if "second_per_grid_ts" in inputs:
        changed.append(
            {**inputs, "second_per_grid_ts": inputs["second_per_grid_ts"] * 2}
        )
    start = key_of(name, inputs).pictures[0][0]
    for other in changed:
        assert asks.ask_inputs(other)[0] <= start


@pytest.mark.parametrize(("name", "placement"), in_turns())
def test_hits_from_files(name: str, placement: Placement, tmp_path: Path) -> None:
    """Another engine on the same directory, and the same prompts: nothing of them is prefilled."""
    only_resumable(name, "prefix_from_disk")
    first = on_disk(name, tmp_path, placement=placement)
    first.ask(IMAGE, SHORT)
    kept = first.generator.reuse.prefix
    is_writable = all(can_write(row) for row in kept.rows)
    first.generator.reuse.close()
    again = on_disk(name, tmp_path, placement=placement)
    hits = again.ask(SHORT, IMAGE)
    if not is_writable:
        assert name in NOT_WRITTEN
        assert hits == [0, 0]
        record_none(name, "prefix_from_disk", NOT_WRITTEN[name])
        return
    assert hits == [length(name, SHORT), length(name, IMAGE)]
    record(name, "prefix_from_disk", placement, again.largest)


@all_families
def test_another_picture_is_never_a_hit(name: str) -> None:
    """The same ids with other pixels: at most what comes before the picture (which may see it, where attention is not
    causal) is reused."""
    only_resumable(name)
    asks = asker(name)
    key = key_of(name, inputs_of(name, IMAGE))
    if not key.pictures:
        pytest.skip("a text model")
    asks.ask(IMAGE)
    mine, theirs = inputs_of(name, IMAGE), inputs_of(name, "image:9:2")
    (found,) = asks.ask_inputs({**theirs, "input_ids": mine["input_ids"]})
    assert found <= key.pictures[0][0]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in every_family()
        if name in ("aya_vision", "gemma3n", "glm4v", "mllama", "qwen2_vl", "qwen3_vl")
    ],
)
def test_pictures_in_another_order_are_never_a_hit(name: str) -> None:
    """Two pictures, and the same two swapped; then the pair again, all of it cached."""
    asks = asker(name)
    inputs = _pair_of_equal_pictures(name)
    names = [
        name for name in inputs if name not in ("input_ids", "cross_attention_mask")
    ]
    asks.ask_inputs(inputs)
    swapped = {
        **inputs,
        **{
            name: _swapped(inputs[name], 1 if "cross_attention_mask" in inputs else 0)
            for name in names
        },
    }
    key = key_of(name, inputs)
    assert asks.ask_inputs(swapped)[0] <= key.pictures[0][0]
    assert asks.ask_inputs(inputs) == [key.length]


def _pair_of_equal_pictures(name: str) -> dict[str, Any]:
    """A prompt with two different pictures of one size: one picture's request twice, with another's pixels second."""
    first, second = inputs_of(name, "image:1:1"), inputs_of(name, "image:2:1")
    if "cross_attention_mask" in first:
        both = {
            key: np.concatenate([first[key], second[key]], axis=1)
            for key in first
            if key != "cross_attention_mask"
        }
        # (1, L, 1, tiles)
        masks = [one["cross_attention_mask"] for one in (first, second)]
        none = [np.zeros_like(mask) for mask in masks]
        seen = [
            np.concatenate([masks[0], none[0]], axis=2),
            np.concatenate([none[1], masks[1]], axis=2),
        ]
        return {**both, "cross_attention_mask": np.concatenate(seen, axis=1)}
    axes = {key: 1 if key == "input_ids" else 0 for key in first}
    return {
        key: np.concatenate([first[key], second[key]], axis=axis)
        for key, axis in axes.items()
    }


def _swapped(array: np.ndarray, axis: int) -> np.ndarray:
    return np.concatenate(np.split(array, 2, axis=axis)[::-1], axis=axis)


def test_the_same_bytes_in_another_size_are_never_a_hit() -> None:
    asks = asker("qwen2_vl")
    inputs = inputs_of("qwen2_vl", "image:3:1")  # 4 x 6 patches
    asks.ask_inputs(inputs)
    turned = {**inputs, "image_grid_thw": inputs["image_grid_thw"][:, [0, 2, 1]]}
    (found,) = asks.ask_inputs(turned)
    assert found <= 4  # the words before the picture


def test_a_picture_is_skipped_by_the_encoder_on_a_hit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asks = asker("qwen3_vl")
    asks.ask(IMAGE)
    for key in (f"{IMAGE}~1", f"{IMAGE}+2"):
        alone("qwen3_vl", key)  # with a tower
    tower = shared_adapter("qwen3_vl").model.vision_tower
    monkeypatch.setattr(
        type(tower),
        "__call__",
        lambda *_, **__: pytest.fail("the picture was encoded again"),
    )
    assert all(count > 0 for count in asks.ask(f"{IMAGE}~1", f"{IMAGE}+2", IMAGE))


def test_a_second_picture_after_a_cached_one() -> None:
    """The turn with the new picture begins where the conversation was: its first picture's positions are not redone."""
    name = "qwen2_vl"
    asks = asker(name)
    asks.ask("image:7:1")
    shared = 3 + 1 + 6 + 1 + 4  # words, a marker, placeholders, a marker, words
    (found,) = asks.ask("two:7")
    assert found == shared == length(name, "image:7:1")


def test_rows_wait_for_a_neighbour_that_prefills_their_beginning() -> None:
    """Five questions about one picture that arrive together: it is prefilled once."""
    name = "qwen2_vl"
    asks = asker(name, policy=settings_for(max_rows=5))
    found = asks.ask(IMAGE, *(f"{IMAGE}~{seed}" for seed in range(1, 5)))
    assert found == [0] + [length(name, IMAGE) - TAIL] * 4


def test_rows_of_other_beginnings_do_not_wait() -> None:
    asks = asker(
        "qwen2_vl", policy=settings_for(max_rows=2, encode_ahead=1, idle_budget=4)
    )
    assert asks.ask(IMAGE, TEXT, f"{IMAGE}~1", "text:4:9", f"{TEXT}+1")[:2] == [0, 0]


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_vl",
        "qwen3_5",
        "qwen3_next",
        "falcon_h1",
        "aya_vision",
        "gemma3n",
        "llama4",
    ],
)
def test_a_restored_row_is_the_cold_one_bit_for_bit(name: str) -> None:
    """Where chunks end at the same positions, the same numbers come out: full attention, recurrent layers, windows, blocks."""
    at = length(name, TEXT)
    longer = as_mlx(request(name, f"{TEXT}+2"))
    found = []
    for warm in (False, True):
        adapter = shared_adapter(name)
        reuse = Reuse(adapter, PrefixCache(ByteBudget(2**28)) if warm else None)
        config = {"prefill_budget": at, "idle_budget": at}
        generator = BatchGenerator(
            adapter, policy=settings_for(Placement.ROWS, **config), reuse=reuse
        )
        if warm:
            generator.insert(
                "first", as_mlx(request(name, TEXT)), SamplingParams(max_tokens=1)
            )
            while generator.has_work:
                generator.step()
        generator.insert("a", longer, SamplingParams(max_tokens=6, logprobs=5))
        results = []
        while generator.has_work:
            results += [
                event.result for event in generator.step() if event.result is not None
            ]
        assert results[-1].usage.cached_tokens == (at if warm else 0)
        found.append(
            [
                (entry.token_id, entry.logprob, entry.top)
                for entry in results[-1].logprobs or ()
            ]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5",
        "qwen3_next",
        "falcon_h1",
        "kimi_k3",
        "nemotron_h_nano_omni",
        "lfm2_vl",
    ],
)
def test_recurrent_states_set_to_empty_would_answer_otherwise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going back by forgetting the recurrent layers' past, as was once proposed for mlx-lm, is far off; the kept one is not."""
    asks = asker(name)
    asks.ask(TEXT)
    empty = lambda state, length: ArraysCache(len(state.slots))  # noqa: E731
    with monkeypatch.context() as forgetting:
        forgetting.setattr(RecurrentState, "restore", empty)
        answers = run(
            shared_adapter(name),
            lambda key: request(name, key),
            [Ask(f"{TEXT}+1")],
            generator=asks.generator,
        )
    assert cached(answers[0]) >= length(name, TEXT)
    assert difference(answers[0], alone(name, f"{TEXT}+1")) > 100 * TOLERANCE
    second = asker(name)
    second.ask(TEXT)
    assert second.ask(f"{TEXT}+1")[0] >= length(name, TEXT)


def test_windows_are_resumed_where_they_were_kept_and_refused_where_they_have_rolled_past() -> (
    None
):
    """aya_vision's windows hold 8 tokens: a prompt that leaves the kept one in its middle starts from the front."""
    name = "aya_vision"
    asks = asker(name)
    ids = words(3, 40)
    asks.ask_inputs({"input_ids": np.array([ids], dtype=np.int32)})
    forked = {"input_ids": np.array([[*ids[:20], *words(8, 12)]], dtype=np.int32)}
    assert asks.ask_inputs(forked) == [0]
    # The fork has left a snapshot where the prompts part: a third one goes on from there.
    third = {"input_ids": np.array([[*ids[:20], *words(9, 12)]], dtype=np.int32)}
    assert asks.ask_inputs(third) == [20]


def test_kept_rows_share_nothing_with_live_ones_and_live_rows_let_go() -> None:
    name = "qwen2_vl"
    asks = asker(name)
    asks.ask(TEXT)
    prefix = asks.generator.reuse.prefix
    assert isinstance(prefix, PrefixCache)
    (kept,) = prefix.rows
    before = [np.array(array) for array in kept.arrays()]
    asks.ask(f"{TEXT}+1", TEXT, f"{TEXT}~1")
    assert all(np.array_equal(a, b) for a, b in zip(before, kept.arrays(), strict=True))
    assert not asks.generator.rows.batch.groups
    gone = weakref.ref(kept)
    prefix.clear()
    assert prefix.budget.nbytes == 0
    del kept
    gc.collect()
    assert gone() is None


# Bookkeeping ----------------------------------------------------------------------------------------------------------


def saved(ids: list[int], *, nbytes: int = 0) -> SavedRow:
    """A row of one whole layer, or rather of none, which takes ``nbytes`` and its keys' bytes."""
    keys = np.zeros((len(ids), 3), dtype=np.int64)
    keys[:, 0] = ids
    snapshots = (
        {len(ids): Snapshot(logits=mx.zeros((1, nbytes // 4)))} if nbytes else {}
    )
    return SavedRow(keys, 0, {}, snapshots)


def key(ids: list[int], spans: tuple[tuple[int, int], ...] = ()) -> PromptKey:
    rows = np.zeros((len(ids), 3), dtype=np.int64)
    rows[:, 0] = ids
    return PromptKey(rows, spans)


def test_the_longest_beginning_is_found_and_spans_are_not_entered() -> None:
    cache = PrefixCache(ByteBudget(10**6))
    base = list(range(100, 140))
    cache.store(saved(base[:11]))
    cache.store(saved([*base[:20], 9, 9]))
    cache.store(saved([7] * 30))
    found = cache.find(key([*base[:20], 5, 6]))
    assert found is not None
    assert (found.length, found.common) == (20, 20)
    assert len(cache) == 2  # the shortest is the beginning of another
    found = cache.find(key([*base[:20], 5, 6], spans=((19, 21),)))
    assert found is not None
    assert (found.length, found.common) == (19, 20)
    # the last token is left to do: its logits are needed
    found = cache.find(key(base[:11]))
    assert found is not None
    assert found.length == 10
    assert cache.find(key([5, *base])) is None
    # a longer one, of which another's beginning is only a part
    cache.store(saved(base))
    found = cache.find(key([*base[:20], 9, 9, 1]))
    assert found is not None
    assert found.length == 22


def test_the_index_finds_what_a_search_through_all_finds() -> None:
    """Random rows over two ids with common beginnings of every length: no longer beginning is missed."""
    random = np.random.RandomState(0)
    index: PrefixIndex[int] = PrefixIndex()
    rows: dict[int, np.ndarray] = {}
    trunk = random.randint(0, 2, 200)
    for number in range(300):
        ids = np.concatenate(
            [
                trunk[: random.randint(0, 200)],
                random.randint(0, 2, random.randint(1, 60)),
            ]
        )
        rows[number] = np.stack([ids, ids * 0, ids * 0], axis=1)
        index.add(number, rows[number])
        if number % 3 == 2:
            index.remove(number - 1, rows.pop(number - 1))
    for _ in range(200):
        ids = np.concatenate(
            [trunk[: random.randint(0, 200)], random.randint(0, 2, 40)]
        )
        keys = np.stack([ids, ids * 0, ids * 0], axis=1)
        shared = {number: common_length(row, keys) for number, row in rows.items()}
        best = max(shared.values())
        offered = list(index.candidates(keys))
        assert all(least <= shared[number] for number, least in offered)
        assert len({number for number, _ in offered}) == len(offered)
        found = max((shared[number] for number, _ in offered), default=0)
        assert found // BLOCK == best // BLOCK if best >= BLOCK else not offered
    for number, row in rows.items():
        index.remove(number, row)
    assert not list(index.candidates(rows[0]))


def test_what_was_used_longest_ago_goes_first() -> None:
    evicted: list[SavedRow] = []

    class Below(RowFiles):
        def __init__(self) -> None:
            """It writes no files."""

        def put(self, row: SavedRow) -> None:
            evicted.append(row)

        def find(self, keys: np.ndarray, beyond: int) -> None:
            return None

    cache = PrefixCache(ByteBudget(3 * 2000), Below())
    rows = [saved([index] * 9, nbytes=700) for index in range(3)]
    for row in rows:
        cache.store(row)
    assert cache.budget.nbytes == sum(row.footprint for row in rows)
    cache.find(key([0] * 8 + [1, 5]))
    cache.store(saved([3] * 9, nbytes=700))
    assert evicted == [rows[1]]
    # larger than everything: nobody goes for it
    cache.store(saved([4] * 9, nbytes=8000))
    assert len(cache) == 3
    assert len(evicted) == 2


def test_conversations_that_go_on_get_their_room_back() -> None:
    """What was let go is known by whatever continues it, and not by the beginning that all share."""
    budget, beginning = ByteBudget(2**30), list(range(64))
    cache = PrefixCache(budget)

    def turn(number: int, count: int) -> list[int]:
        return [*beginning, *(1000 * number + place for place in range(count))]

    for number in range(100, 5300):
        cache.store(saved(turn(number, 20), nbytes=2**20))
    assert budget.room == LITTLE
    for tokens in (20, 30, 40):
        for number in range(20):
            found = cache.find(key(turn(number, tokens)))
            is_found = found is not None and found.length > len(beginning)
            assert is_found or tokens < 40
            assert not is_found or tokens > 20
            cache.store(saved(turn(number, tokens), nbytes=2**24))


def test_a_budget_is_shared_by_its_owners() -> None:
    budget, dropped = ByteBudget(100), []
    assert budget.add("row", 60, lambda: dropped.append("row"))
    assert budget.add("features", 30, lambda: dropped.append("features"))
    budget.touch("row")
    assert budget.add("another", 30, lambda: dropped.append("another"))
    assert (dropped, budget.nbytes, len(budget)) == (["features"], 90, 2)
    assert not budget.add("huge", 101, lambda: dropped.append("huge"))
    # replaced, and counted once
    assert budget.add("another", 40, lambda: dropped.append("another"))
    assert (dropped, budget.nbytes, len(budget)) == (["features"], 100, 2)
    budget.remove("nothing of that name")
    budget.clear()
    assert (budget.nbytes, dropped) == (0, ["features", "row", "another"])


def test_points_are_thinned_to_the_first_and_the_last() -> None:
    snapshots = {at: Snapshot() for at in range(10, 200, 10)}
    kept = thin(snapshots)
    assert len(kept) == MAX_SNAPSHOTS
    assert sorted(kept) == [10, *range(130, 200, 10)]


def test_chunks_end_at_stops_and_before_the_spans_that_hold_them() -> None:
    ends = [0]
    while ends[-1] < 100:
        ends.append(
            chunk_end(ends[-1], 100, 64, atomic=((30, 50),), stops=(20, 40, 60))
        )
    assert ends[1:] == [20, 30, 50, 60, 100]


def test_nothing_is_kept_of_what_is_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing request leaves nothing behind, nor does a cancelled one that was still in its prompt."""
    name = "qwen2_vl"
    asks = asker(name, policy=settings_for(prefill_budget=4, idle_budget=4))
    generator = asks.generator
    generator.insert("a", as_mlx(inputs_of(name, TEXT)), SamplingParams(max_tokens=4))
    generator.step()
    generator.cancel("a")
    generator.step()
    with monkeypatch.context() as broken:
        broken.setattr(type(generator.adapter), "prefill", lambda *_: 1 / 0)
        generator.insert(
            "b", as_mlx(inputs_of(name, TEXT)), SamplingParams(max_tokens=4)
        )
        generator.step()
    assert generator.reuse.prefix.keeps
    assert not generator.reuse.prefix.rows
    assert Asker(name, generator).ask(TEXT) == [0]


# On disk --------------------------------------------------------------------------------------------------------------


def on_disk(
    name: str,
    directory: Path,
    *,
    budget: int = 2**28,
    max_bytes: int = 2**28,
    model: str = "m",
    placement: Placement | None = None,
) -> Asker:
    adapter = shared_adapter(name)
    prefix = Caches(budget, directory, max_bytes).prefix_cache(
        ByteBudget(budget), Identity(model)
    )
    return Asker(
        name,
        BatchGenerator(
            adapter, reuse=Reuse(adapter, prefix), policy=settings_for(placement)
        ),
    )


@pytest.mark.parametrize("name", ["qwen2_vl", "mllama", "gemma3n", "qwen3_5"])
def test_rows_outlive_the_process(name: str, tmp_path: Path) -> None:
    """Another engine, on the same directory: exact, from where the first one was; not for another model's."""
    first = on_disk(name, tmp_path)
    first.ask(IMAGE, TEXT)
    first.generator.reuse.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert on_disk(name, tmp_path, model="another").ask(IMAGE) == [0]
    second = on_disk(name, tmp_path)
    assert second.ask(IMAGE, TEXT) == [length(name, IMAGE), length(name, TEXT)]
    (found,) = on_disk(name, tmp_path).ask(f"{IMAGE}~1")
    assert found >= end_of_pictures(name, IMAGE)


def test_what_memory_has_no_room_for_is_found_on_disk(tmp_path: Path) -> None:
    name = "qwen2_vl"
    asks = on_disk(name, tmp_path, budget=60_000)  # about one row
    assert asks.ask(TEXT) == [0]
    assert asks.ask("text:6:30") == [0]
    assert asks.ask(f"{TEXT}+1") == [length(name, TEXT)]


def test_damaged_files_are_ignored_and_removed(tmp_path: Path) -> None:
    name = "qwen2_vl"
    first = on_disk(name, tmp_path)
    for key in (IMAGE, TEXT, "text:6:30"):
        first.ask(key)
    first.generator.reuse.close()
    torn, flipped, whole = sorted(tmp_path.iterdir())
    torn.write_bytes(torn.read_bytes()[:-100])
    contents = bytearray(flipped.read_bytes())
    contents[-5] ^= 255
    flipped.write_bytes(bytes(contents))
    (tmp_path / f".{whole.name}.abc.part").write_bytes(b"half")
    theirs = [
        tmp_path / name for name in ("model.safetensors", "download.part", "notes.txt")
    ]
    for path in theirs:
        path.write_text("a user's")
    asks = on_disk(name, tmp_path)
    assert not torn.exists()  # seen at once by its length
    hits = [asks.ask(key)[0] for key in (IMAGE, TEXT, "text:6:30")]
    assert sum(count > 0 for count in hits) == 1
    assert not flipped.exists()  # seen when it was read
    assert all(path.exists() for path in theirs)
    assert not list(tmp_path.glob(".*.part"))


def test_files_are_bounded_in_bytes_and_the_oldest_go_first(tmp_path: Path) -> None:
    rows = [saved([index, *range(1, 400)], nbytes=40_000) for index in range(4)]
    files = RowFiles(tmp_path, 120_000, Identity("m"))
    for row in rows[:2]:
        files.put(row)
    assert files.find(rows[0].keys, 0) is not None  # used: the second one is older now
    files.put(rows[2])
    assert len(files) == 2
    assert (
        files.nbytes
        == sum(path.stat().st_size for path in tmp_path.iterdir())
        <= 120_000
    )
    assert files.find(rows[1].keys, 0) is None
    files.put(saved([9] * 400, nbytes=400_000))  # larger than everything
    assert len(files) == 2
    longer = np.concatenate([rows[2].keys, rows[3].keys])
    files.put(SavedRow(longer, 0, {}, {}))
    assert files.find(rows[2].keys, 0) is not None
    assert len(files) == 2  # the shorter one went into it


def test_the_bound_holds_for_the_folder_whoever_writes_there(tmp_path: Path) -> None:
    """Of two processes and two models: by the times at which files were used, and a file that is gone is written again."""
    one, two, other = (
        RowFiles(tmp_path, 170_000, Identity(model)) for model in ("m", "m", "n")
    )
    rows = [saved([index, *range(1, 400)], nbytes=40_000) for index in range(6)]

    def size() -> int:
        return sum(path.stat().st_size for path in tmp_path.iterdir())

    for row, files in zip(rows[:3], (one, two, other), strict=True):
        files.put(row)
    assert one.find(rows[0].keys, 0) is not None  # used: the second row is older now
    one.put(rows[3])
    assert size() <= 170_000 and two.find(rows[1].keys, 0) is None
    assert (
        one.find(rows[0].keys, 0) is not None
        and other.find(rows[2].keys, 0) is not None
    )
    for row in rows[4:]:
        two.put(row)
        assert size() <= 170_000
    assert one.find(rows[3].keys, 0) is None and other.find(rows[2].keys, 0) is not None
    two.put(rows[3])
    one.put(rows[1])
    for row in rows[2:5]:
        other.put(row)
    one.put(rows[1])
    assert one.find(rows[1].keys, 0) is not None and size() <= 170_000
    (tmp_path / "a user's").write_bytes(bytes(10**6))
    assert one.find(rows[1].keys, 0) is not None
    one.put(rows[1])


def test_a_process_killed_while_it_writes_leaves_whole_files_only(
    tmp_path: Path,
) -> None:
    """Rows of a megabyte, written as fast as can be until the process is killed: the next one can read all that is there."""
    writer = (
        "import sys\nfrom pathlib import Path\nfrom tests.test_prefix_cache import saved\n"
        "from vlm_batch.store.directory import RowFiles\nfrom vlm_batch.store.files import Identity\n"
        "files = RowFiles(Path(sys.argv[1]), 10**9, Identity('m'))\n"
        "for index in range(10**6):\n"
        "    files.put(saved([index] * 9, nbytes=2**20))\n"
        "    print(index, flush=True)\n"
    )
    root = Path(__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", writer, str(tmp_path)], cwd=root, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != b"5\n":
            pass
        process.kill()
    files = RowFiles(tmp_path, 10**9, Identity("m"))
    assert not list(tmp_path.glob(".*.part"))
    names = list(tmp_path.iterdir())
    assert len(files) == len(names) >= 6
    for name in names:
        assert read_row(name)[0].length == 9


def test_a_full_disk_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RowFiles(tmp_path, 10**6, Identity("m"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    files.put(saved([1, 2, 3], nbytes=400))
    assert len(files) == 0
    assert not list(tmp_path.iterdir())


def test_a_row_that_waits_holds_nobody_who_came_and_went() -> None:
    key = key_of("qwen2_vl", inputs_of("qwen2_vl", TEXT))
    overlap = Overlap()
    other = new_row("other", Prompt(), SamplingParams())
    other.reuse.key = key
    assert overlap.shared_with(other, key) == key.length - 1
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
