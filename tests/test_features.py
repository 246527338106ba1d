"""A picture is encoded once: for requests that are alive together, for later ones, and beside other pictures."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from tests.harness import every_family, inputs_of, shared_adapter
from tests.reuse_cases import Asker
from tests.zoo import family as tiny_family
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.towers import remember_features, vision_towers
from vlm_batch.arrays import as_mlx, join_rows, split_rows
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.store.budget import ARRAY_BYTES, ByteBudget
from vlm_batch.store.digest import (
    _SOURCES,
    HASHES,
    Sourced,
    digest,
    hash_ahead,
    split_noted,
)
from vlm_batch.store.features import FeatureStore

IMAGE = "image:7:1"


def remembering(
    name: str, budget: int = 2**28
) -> tuple[Adapter, FeatureStore, list[int]]:
    """An adapter of its own that remembers, its store, and a list that grows with every call of a tower."""
    adapter = type(shared_adapter(name))(tiny_family(name).build())
    store = FeatureStore(ByteBudget(budget))
    calls: list[int] = []
    for owner, attribute in vision_towers(adapter.model):
        tower = owner[attribute].tower  # within the wrapper, which is made anew

        class Counted(type(tower)):  # type: ignore[misc]
            def __call__(self, *args: object, **kwargs: object) -> object:
                calls.append(1)
                return super().__call__(*args, **kwargs)

        tower.__class__ = Counted
    remember_features(adapter, store)
    return adapter, store, calls


#: Tiny models whose pictures go through none of the family's towers, or that have no pictures.
WITHOUT_TOWERS = frozenset(
    {
        "deepseek_v4_text",
        "falcon_h1",
        "falcon_ocr",
        "falcon_perception",
        "fastvlm",
        "gemma3n",
        "gemma4_unified",
        "llava_bunny",
        "llmjpvl",
        "minicpmv4_6",
        "minicpmv4_7",
        "phi3_v",
        "qwen3_next",
    }
)
#: Towers that answer with an object of their own, which is not remembered.
NOT_REMEMBERED = ("jina_vlm", "nemotron_h_nano_omni")


@pytest.mark.parametrize("name", every_family())
def test_a_picture_that_is_asked_twice_is_encoded_once(name: str) -> None:
    adapter, store, calls = remembering(name)
    asker = Asker(name, BatchGenerator(adapter))
    asker.ask(IMAGE)
    once = len(calls)
    assert bool(once) == (name not in WITHOUT_TOWERS)
    if not once:
        pytest.skip(f"{name} is in WITHOUT_TOWERS")
    asker.ask(f"{IMAGE}~1")
    if name in NOT_REMEMBERED:
        assert len(calls) == 2 * once
        return
    assert (len(calls), store.num_hits) == (once, once)
    asker.ask("image:3:2")
    assert len(calls) > once


@pytest.mark.parametrize(
    ("name", "size"),
    [("qwen2_vl", 1), ("qwen2_5_vl", 2), ("qwen3_vl", 1), ("glm4v", 1)],
)
def test_pictures_of_one_prompt_are_remembered_one_by_one(name: str, size: int) -> None:
    adapter, store, calls = remembering(name)
    asker = Asker(name, BatchGenerator(adapter))
    first = f"image:7:{size}"  # the first picture of the pair
    asker.ask(first)
    asker.ask("two:7")
    assert (len(calls), store.num_hits, len(store)) == (2, 1, 2)
    asker.ask("two:7~1", first)
    assert (len(calls), store.num_hits) == (2, 4)


def test_other_pictures_are_never_taken_for_one_another() -> None:
    """Other pixels; the same bytes as another grid; the pictures of a pair in the other order."""
    name = "qwen2_vl"
    adapter, store, _ = remembering(name)
    asker = Asker(name, BatchGenerator(adapter))
    asker.ask(IMAGE, "two:7")
    inputs = inputs_of(name, IMAGE)
    turned = {**inputs, "image_grid_thw": inputs["image_grid_thw"][:, [0, 2, 1]]}
    brighter = {**inputs, "pixel_values": inputs["pixel_values"] * np.float32(1.001)}
    hits = store.num_hits
    asker.ask_inputs(turned, brighter)
    assert store.num_hits == hits


def test_the_budget_holds_and_zero_keeps_nothing() -> None:
    name = "qwen2_vl"
    # of the features of IMAGE: an array of 6 placeholders of 64 floats
    size = 6 * 64 * 4 + ARRAY_BYTES
    adapter, store, calls = remembering(name, budget=size)
    asker = Asker(name, BatchGenerator(adapter))
    asker.ask(IMAGE)
    asker.ask("image:8:1")
    assert (len(store), store.budget.nbytes) == (1, size)
    asker.ask(IMAGE)
    assert len(calls) == 3
    asker.ask("image:9:2")  # larger than all there is
    assert (len(store), store.budget.nbytes) == (1, size)


@pytest.mark.parametrize(
    "name",
    [name for name in every_family() if tiny_family(name).two_images is not None],
)
def test_pictures_of_other_prompts_are_not_mixed_up(name: str) -> None:
    """Pairs whose first, second or both pictures were seen before, and pairs that only look like one that was."""
    adapter, _, _ = remembering(name)
    asker = Asker(name, BatchGenerator(adapter))
    asker.ask("two:7", "two:8", IMAGE)
    asker.ask("two:8", "two:9", "two:7")


def test_features_are_split_by_picture_and_joined_again() -> None:
    tree = (mx.arange(20).reshape(10, 2), [mx.arange(5), None])
    parts = split_rows(tree, [4, 6])
    assert parts is not None
    assert [part[0].shape[0] for part in parts] == [4, 6]
    assert [part[1][0].tolist() for part in parts] == [[0, 1], [2, 3, 4]]
    again = join_rows(parts)
    assert mx.array_equal(again[0], tree[0]).item()
    assert again[1][0].tolist() == [0, 1, 2, 3, 4]
    assert split_rows((mx.arange(7),), [1, 2]) is None
    assert split_rows("text", [1]) is None


def test_what_was_hashed_ahead_has_the_same_digest_and_goes_with_its_array() -> None:
    plain = np.random.default_rng(0).standard_normal((300, 100), dtype=np.float32)
    array = mx.array(plain)
    # what other tests' loaders have not let go of yet is none of this
    before, small = set(HASHES._noted), mx.zeros(3)
    hash_ahead({"pixel_values": array, "small": small})
    assert set(HASHES._noted) - before == {id(array)}
    reference, known = HASHES._noted[id(array)]
    assert digest([array]) == digest([plain]) == digest([mx.array(plain)])
    HASHES._noted[id(array)] = (reference, b"another")
    assert digest([array]) != digest([plain])  # it is taken from there
    assert digest([array], in_full=True) == digest([plain], in_full=True)
    HASHES._noted[id(array)] = (reference, known)
    place = id(array)
    del array
    gc.collect()
    assert place not in HASHES._noted


def test_a_converted_array_is_known_by_what_it_was_made_of_alone_and_in_parts() -> None:
    plain = np.random.default_rng(1).standard_normal((600, 100), dtype=np.float32)
    whole = Sourced(mx.array(plain)).astype(mx.bfloat16)
    first, second = split_noted(whole, [400], axis=0)
    for part, own in ((whole, plain), (first, plain[:400]), (second, plain[400:])):
        alone = Sourced(mx.array(own)).astype(mx.bfloat16)
        assert digest([part]) == digest([alone])
        assert mx.array_equal(part, alone).item()
        assert digest([part]) != digest([own])
        assert digest([part], in_full=True) == digest(
            [mx.array(own).astype(mx.bfloat16)], in_full=True
        )
    assert digest([first]) != digest([second])
    assert digest([Sourced(mx.array(plain)).astype(mx.float16)]) != digest([whole])
    same = Sourced(mx.array(plain)).astype(mx.float32)
    assert digest([same]) == digest([plain])  # nothing was converted
    del whole, first, second, part, alone, same
    gc.collect()
    assert not _SOURCES._noted


@pytest.mark.parametrize(
    "name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "dots_ocr"]
)
def test_pixels_in_the_tower_s_type_are_not_read_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them would wait for the device. What is remembered of a picture alone is found beside another, too."""
    from vlm_batch.store import digest as module

    model = tiny_family(name).build()
    model.set_dtype(mx.bfloat16)
    adapter = type(shared_adapter(name))(model)
    store = FeatureStore(ByteBudget(2**28))
    remember_features(adapter, store)
    read: list[mx.Dtype] = []
    whole = module.array_bytes
    monkeypatch.setattr(module, "LARGE", 1)

    def noted(array: mx.array) -> np.ndarray:
        read.append(array.dtype)
        return whole(array)

    monkeypatch.setattr(module, "array_bytes", noted)
    adapter.encode(as_mlx(inputs_of(name, "image:7:1")))
    assert mx.bfloat16 not in read and len(store) == 1
    if tiny_family(name).two_images is not None:
        adapter.encode(as_mlx(inputs_of(name, "two:7")))
        assert mx.bfloat16 not in read
