"""Counters of kept bytes equal what is held, after every operation and every failure, in memory and on disk."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from tests.harness import every_family, inputs_of, settings_for, shared_adapter
from tests.zoo import family as tiny_family
from vlm_batch import Caches, SamplingParams, VLMBatcher
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingGridTower
from vlm_batch.adapters.towers import remember_features
from vlm_batch.arrays import arrays_of, as_mlx, own_array
from vlm_batch.assets import default_checkpoint
from vlm_batch.caches import Placement
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.reuse import Reuse
from vlm_batch.errors import InvalidCache
from vlm_batch.models import adapter_for
from vlm_batch.records import PromptKey
from vlm_batch.store import budget as budget_module
from vlm_batch.store.budget import DROPPED, LITTLE, ByteBudget
from vlm_batch.store.directory import RowFiles
from vlm_batch.store.features import FeatureStore
from vlm_batch.store.files import FORMAT, VERSION, Identity, _seal, read_row
from vlm_batch.store.prefix import PrefixCache
from vlm_batch.store.saved import SavedRow, Snapshot
from vlm_batch.types import Result


class Kept:
    """A budget with both of its owners, and a directory as the second tier."""

    def __init__(
        self, directory: Path, max_bytes: int = 60_000, max_file_bytes: int = 60_000
    ) -> None:
        self.budget = ByteBudget(max_bytes)
        self.files = RowFiles(directory, max_file_bytes, Identity("m"))
        self.rows = PrefixCache(self.budget, self.files)
        self.features = FeatureStore(self.budget)

    def check(self) -> None:
        held = sum(row.footprint for row in self.rows.rows) + self.features.nbytes
        assert self.budget.nbytes == held <= self.budget.max_bytes
        assert len(self.budget) == len(self.rows) + len(self.features)
        on_disk = [path.stat().st_size for path in self.files.directory.iterdir()]
        assert (self.files.nbytes, len(self.files)) == (sum(on_disk), len(on_disk))
        assert self.files.nbytes <= self.files.max_bytes
        for row in self.rows.rows:
            assert any(
                self.rows._rows[number] is row
                for number, _ in self.rows._index.candidates(row.keys)
            )


def row_of(ids: list[int], nbytes: int) -> SavedRow:
    keys = np.zeros((len(ids), 3), dtype=np.int64)
    keys[:, 0] = ids
    return SavedRow(
        keys, 0, {}, {len(ids): Snapshot(logits=mx.zeros((1, nbytes // 4)))}
    )


def random_ids(random: np.random.RandomState) -> list[int]:
    """One of a few trunks, cut anywhere, perhaps with words of its own: beginnings of each other, equal ones, forks."""
    trunk = np.random.RandomState(random.randint(3)).randint(0, 9, 60)
    return [
        *trunk[: random.randint(9, 60)],
        *random.randint(0, 9, random.choice([0, 0, 12])).tolist(),
    ]


def operate(kept: Kept, random: np.random.RandomState) -> None:
    """Something that an engine does with what it keeps."""
    what = random.randint(4)
    if what == 0:
        kept.rows.store(
            row_of(random_ids(random), int(random.choice([400, 8_000, 30_000, 90_000])))
        )
    elif what == 1:
        ids = random_ids(random)
        keys = np.zeros((len(ids), 3), dtype=np.int64)
        keys[:, 0] = ids
        kept.rows.find(PromptKey(keys))
    elif what == 2:
        size = int(random.choice([100, 2_000, 20_000]))
        kept.features.put(bytes([random.randint(12)]), [mx.zeros((size,)), None])
    else:
        kept.features.get(bytes([random.randint(12)]))


@pytest.mark.parametrize("seed", range(6))
def test_counters_are_sums_after_every_operation(seed: int, tmp_path: Path) -> None:
    random, kept = np.random.RandomState(seed), Kept(tmp_path)
    for _ in range(150):
        operate(kept, random)
        kept.check()
    kept.rows.clear()
    kept.check()
    kept.budget.clear()
    kept.check()
    assert kept.budget.nbytes == 0


def _fail(*_: Any) -> Any:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (lambda kept: kept.files, "put"),
        (lambda kept: kept.files, "find"),
        (lambda kept: kept.rows._index, "add"),
        (lambda kept: kept.budget, "_drop_oldest"),
        (lambda kept: kept.budget, "add"),
    ],
)
def test_a_failing_store_costs_the_entry_and_nothing_else(
    owner: Callable[[Kept], Any],
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every second operation meets a failure of some part: none is raised, all is said, and what was held still is."""
    random, kept = np.random.RandomState(7), Kept(tmp_path)
    with caplog.at_level(logging.WARNING, "vlm_batch"):
        for step in range(120):
            with monkeypatch.context() as broken:
                if step % 2:
                    broken.setattr(owner(kept), method, _fail)
                operate(kept, random)
            kept.check()
    assert any("broken" in record.getMessage() for record in caplog.records)


# Pictures -------------------------------------------------------------------------------------------------------------


def grid_towers() -> list[str]:
    classes = {
        name: adapter_for(tiny_family(name).registered).tower_class
        for name in every_family()
    }
    return [
        name
        for name, tower in classes.items()
        if issubclass(tower, RememberingGridTower)
    ]


def remembering(name: str) -> tuple[Adapter, FeatureStore]:
    adapter = type(shared_adapter(name))(tiny_family(name).build())
    store = FeatureStore(ByteBudget(2**28))
    remember_features(adapter, store)
    return adapter, store


#: Families whose towers are given more than pixels and grids, or these by name.
OTHER_ARGUMENTS = ("mage_vl", "minicpmv4_6", "minicpmv4_7")


@pytest.mark.parametrize("name", grid_towers())
def test_a_new_picture_twice_in_one_request_is_encoded_and_counted_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the family's own tower, with whatever it is given for one picture given twice."""
    adapter, store = remembering(name)
    found: list[tuple[Any, Any]] = []
    given: list[int] = []  # pictures that went through the tower
    plain = RememberingGridTower.__call__

    def doubled(self: RememberingGridTower, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or not isinstance(args[1], mx.array):
            return plain(self, *args, **kwargs)
        pixels, grids = args
        inner = self.tower

        class Counted(type(inner)):  # type: ignore[misc]
            def __call__(self, pixels: mx.array, grids: mx.array, **kwargs: Any) -> Any:
                given.append(grids.shape[0])
                return super().__call__(pixels, grids, **kwargs)

        inner.__class__ = Counted
        axis = 0 if pixels.shape[0] == int(np.array(grids).prod(axis=1).sum()) else 1
        twice = plain(
            self,
            mx.concatenate([pixels] * 2, axis=axis),
            mx.concatenate([grids] * 2),
            **kwargs,
        )
        once = plain(self, *args, **kwargs)
        found.append((once, twice))
        return once

    monkeypatch.setattr(RememberingGridTower, "__call__", doubled)
    adapter.encode(as_mlx(inputs_of(name, "image:7:1")))
    assert bool(found) == (name not in OTHER_ARGUMENTS)
    if not found:
        pytest.skip(f"{name} is in OTHER_ARGUMENTS")
    assert given == [1] * len(found)
    assert store.budget.nbytes == store.nbytes
    assert len(store) == len(store.budget) == len(found)
    for once, twice in found:
        for one, two in zip(arrays_of(once), arrays_of(twice), strict=True):
            assert two.shape[0] == 2 * one.shape[0]
            assert mx.allclose(two[: one.shape[0]], one, atol=1e-5).item()
            assert mx.allclose(two[one.shape[0] :], one, atol=1e-5).item()


def test_an_engine_that_keeps_pictures_alone_has_their_budget() -> None:
    """It frees them before it refuses a row, and counts them; while empty, too."""
    adapter, store = remembering("qwen2_vl")
    assert Reuse(adapter, budget=store.budget).budget is store.budget


@pytest.mark.parametrize("placement", list(Placement))
def test_one_new_picture_in_two_requests_that_arrive_together(
    placement: Placement,
) -> None:
    name = "qwen2_vl"
    adapter, store = remembering(name)
    reuse = Reuse(adapter, PrefixCache(store.budget), budget=store.budget)
    config = {"max_rows": 4, "encode_together": 4, "prefill_together": 4}
    generator = BatchGenerator(
        adapter, policy=settings_for(placement, **config), reuse=reuse
    )
    results: list[Result] = []
    for turn in range(3):
        for index in range(2):
            inputs = dict(inputs_of(name, f"image:{turn}:1"))
            inputs["input_ids"] = inputs["input_ids"].copy()
            # prompts that differ from their first token on
            inputs["input_ids"][0, 0] = 40 + index
            generator.insert(
                f"{turn} {index}", as_mlx(inputs), SamplingParams(max_tokens=3)
            )
        while generator.has_work:
            results += [
                event.result for event in generator.step() if event.result is not None
            ]
    assert all(result.ok for result in results)
    assert (
        store.budget.nbytes
        == sum(row.footprint for row in generator.reuse.prefix.rows) + store.nbytes
    )
    assert len(store) == 3


def test_a_budget_of_a_few_rows_serves_on() -> None:
    """Pictures that come twice, far more than the budget has room for: every one is answered."""
    random = np.random.RandomState(0)
    with VLMBatcher(default_checkpoint(), caches=Caches(200_000)) as batcher:
        for _ in range(110):
            picture = Image.fromarray(
                random.randint(0, 255, (56, 56, 3), dtype=np.uint8)
            )
            asked = batcher.submit(
                [picture, picture], "describe", params=SamplingParams(max_tokens=2)
            )
            result = asked.result()
            assert result.ok, result.error
        assert 0 < batcher.stats().cache_bytes <= 200_000
        reuse = batcher._loop.generator.reuse
    assert reuse.budget.nbytes == len(reuse.budget) == 0  # closed: rows and features


# Bytes that are really held -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("length", [1, 18, 130, 256])
def test_a_saved_array_holds_its_own_bytes_only(heads: int, length: int) -> None:
    """Of a row with room for 256 columns; one head's first columns lie in one piece, and were shared."""
    gc.collect()
    mx.clear_cache()
    kept = []
    before = mx.get_active_memory()
    for _ in range(20):
        whole = mx.random.normal((1, heads, 256, 8))
        mx.eval(whole)
        kept.append(own_array(whole[:, :, :length]))
        mx.eval(kept[-1])
        assert mx.array_equal(kept[-1], whole[:, :, :length]).item()
        del whole
    held = mx.get_active_memory() - before
    assert held <= sum(array.nbytes for array in kept) + 20 * 64


def test_a_pictures_features_do_not_hold_its_neighbours() -> None:
    store = FeatureStore(ByteBudget(2**24))
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    for index in range(20):
        together = mx.random.normal((16, 100))  # of sixteen pictures
        store.put(bytes([index]), together[3:4])
        del together
    assert mx.get_active_memory() - before <= 20 * 400 + 20 * 64
    assert store.nbytes == store.budget.nbytes >= 20 * 400


@pytest.mark.parametrize(
    "damage", ["identity", "structure", "kind", "tensor", "snapshot"]
)
def test_a_sealed_file_that_says_something_else_is_refused_and_removed(
    damage: str, tmp_path: Path
) -> None:
    """A digest keeps accidents out, not other programs: whatever a header says is InvalidCache, at the start, too."""
    structure: Any = {"num_layers": 1, "num_pictures": 0, "whole": {}, "points": {}}
    identity: Any = '{"model": "m", "settings": {}}'
    if damage == "identity":
        identity = '["m"]'
    elif damage == "structure":
        structure = [1, 2]
    elif damage == "kind":
        structure["whole"] = {"0": {"kind": "NoSuchState"}}
    elif damage == "tensor":
        structure["whole"] = {
            "0": {"kind": "FullState", "keys": {"tensor": "missing"}, "values": 1}
        }
    else:
        structure["points"] = {"x": {}}
    tensors = {"keys": mx.zeros((9, 3), dtype=mx.int64)}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "identity": identity,
        "structure": json.dumps(structure),
    }
    metadata["digest"] = _seal(tensors, metadata)
    path = tmp_path / ("0" * 32 + ".row.safetensors")
    mx.save_safetensors(str(path), tensors, metadata)
    with pytest.raises(InvalidCache):
        read_row(path)
    files = RowFiles(tmp_path, 10**6, Identity("m"))
    assert files.find(np.zeros((9, 3), dtype=np.int64), 0) is None
    assert not path.exists()
    assert files.nbytes == 0


def test_a_key_that_is_added_again_counts_once() -> None:
    budget = ByteBudget(100)
    dropped: list[str] = []
    assert budget.add("a", 60, lambda: dropped.append("first"))
    assert budget.add("a", 70, lambda: dropped.append("second"))
    assert (budget.nbytes, len(budget), dropped) == (70, 1, [])
    assert budget.add("b", 50, lambda: None)
    assert (budget.nbytes, len(budget), dropped) == (50, 1, ["second"])
    budget.clear()
    assert budget.nbytes == 0


def test_what_is_kept_is_given_back_at_close() -> None:
    """To the system: neither the arrays nor MLX's store of free ones stays."""
    with VLMBatcher(default_checkpoint()) as batcher:
        handles = [
            batcher.submit(None, f"count to {index % 9 + 1} {index}")
            for index in range(12)
        ]
        assert all(handle.result(timeout=60).ok for handle in handles)
        kept, held = batcher.stats().cache_bytes, mx.get_active_memory()
        assert kept > 0
    assert batcher.stats().cache_bytes == 0
    assert mx.get_active_memory() <= held - 0.9 * kept
    assert mx.get_cache_memory() == 0


def kept_budget(
    keys: Iterable[int], budget: ByteBudget, nbytes: int = 1 << 20
) -> set[int]:
    """What is held after entries of ``nbytes`` were asked for, in this order, and added where they were not found."""
    held: set[int] = getattr(budget, "test_held", set())
    budget.test_held = held  # type: ignore[attr-defined]
    for key in keys:
        if key in held:
            budget.touch(key)
        else:
            budget.add(key, nbytes, partial(held.discard, key))
            held.add(key)
    return held


def test_memory_in_which_nothing_is_found_is_given_back() -> None:
    """Thousands of different pictures leave little, and no more than the budget was ever held."""
    budget = ByteBudget(2**30)
    for first in range(0, 5000, 100):
        kept_budget(range(first, first + 100), budget)
        assert budget.nbytes <= budget.max_bytes
    assert budget.room == LITTLE and LITTLE - 2**20 <= budget.nbytes <= LITTLE


def test_a_beginning_that_all_share_keeps_no_more_than_itself() -> None:
    """It is found at every request, just after it was used: that needs no room for what is never found."""
    budget = ByteBudget(2**30)
    for number in range(1, 5000):
        held = kept_budget([0, number], budget)
    assert 0 in held and budget.nbytes <= LITTLE


def test_finds_let_it_grow_again() -> None:
    """What comes back after ever more others is found, until the whole budget is used."""
    budget = ByteBudget(2**30)
    kept_budget(range(10_000, 15_000), budget)
    assert budget.room == LITTLE
    for _ in range(3):
        kept_budget(range(100), budget)  # 100 MiB of 128
    assert budget.room > 5 * LITTLE
    for _ in range(3):
        held = kept_budget(range(700), budget)
    assert set(range(700)) <= held and budget.nbytes >= 700 << 20


def test_a_job_that_begins_to_repeat_gets_its_room_back() -> None:
    """500 MiB come again where thousands of others had shown that little is enough."""
    budget = ByteBudget(2**30)
    kept_budget(range(10_000, 15_000), budget)
    assert budget.room == LITTLE
    kept_budget(range(500), budget)
    assert budget.nbytes <= LITTLE, "nothing has come again yet"
    kept_budget(range(500), budget)
    assert set(range(500)) <= kept_budget([], budget), "every second time finds them"
    kept_budget(range(30_000, 35_000), budget)
    assert budget.room == LITTLE, "and what earns nothing is given back again"


def test_what_no_budget_would_have_held_earns_nothing() -> None:
    """A job that goes through twice the budget again and again."""
    budget = ByteBudget(2**30)
    for _ in range(4):
        kept_budget(range(2048), budget)
    assert budget.room == LITTLE


def test_names_of_dropped_entries_are_few() -> None:
    budget = ByteBudget(2**20)
    kept_budget(range(3 * DROPPED), budget, 2**10)
    assert len(budget._dropped) == DROPPED
    budget.clear()
    assert not budget._dropped


def test_a_few_large_rows_are_little() -> None:
    """Three chats of 200 MiB, after thousands of pictures that were not found again."""
    budget = ByteBudget(2**30)
    kept_budget(range(10_000, 15_000), budget)
    for _ in range(3):
        held = kept_budget(range(3), budget, 200 << 20)
    assert {0, 1, 2} <= held


def test_pictures_of_a_job_that_begins_to_repeat_are_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through a batcher: the second time that they come again, whatever came before."""
    monkeypatch.setattr(budget_module, "LITTLE", 2**17)
    monkeypatch.setattr(budget_module, "ENTRIES", 32)
    random = np.random.default_rng(5)
    several = [random.integers(0, 256, (84, 84, 3), dtype=np.uint8) for _ in range(90)]
    with VLMBatcher(default_checkpoint(), caches=Caches(max_bytes=2**23)) as batcher:
        pictures = batcher._preparer._pictures
        assert pictures is not None

        def hits(images: Iterable[np.ndarray]) -> int:
            before = pictures.num_hits
            for image in images:
                asked = batcher.submit(
                    image, "describe the image", params=SamplingParams(max_tokens=1)
                )
                asked.result(timeout=60).raise_for_error()
            return pictures.num_hits - before

        assert hits(several) == 0
        assert batcher._loop.generator.reuse.budget.room <= 2**20, (
            "little, where nothing is found"
        )
        chat = several[:20]
        assert hits(chat) == 0, "they were let go"
        hits(chat)
        assert hits(chat) >= len(chat)


def test_a_small_budget_is_used_whole() -> None:
    budget = ByteBudget(2**20)
    kept_budget(range(5000), budget, 2**10)
    assert budget.nbytes == 2**20
