"""The matrix can fail: each break of what must stay true moves log-probabilities far above the tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.harness import (
    TOLERANCE,
    Answer,
    Ask,
    difference,
    every_family,
    inputs_of,
    oracle,
    run,
    run_family,
    shared_adapter,
)
from tests.zoo import Inputs, family
from vlm_batch.caches import (
    IndexedCache,
    Placement,
    RecurrentCache,
    RingSlabCache,
    RowsCache,
    SlabCache,
    kind_of,
)
from vlm_batch.engine import schedule
from vlm_batch.engine.row import Row
from vlm_batch.models.molmo_point import MolmoPoint, general
from vlm_batch.records import Encoded

#: A broken engine is this far off at least.
FAR = 100 * TOLERANCE
IMAGES = ("image:1:0", "image:2:1", "image:3:2")
TEXT = "text:5:26"

#: Families that are given positions; the others count what is in their caches.
POSITIONED = [
    "cohere_compass",
    "ernie4_5_moe_vl",
    "falcon_ocr",
    "florence2",
    "falcon_perception",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "hunyuan_vl",
    "minicpmo",
    "minicpmv4_6",
    "minicpmv4_7",
    "paddleocr_vl",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_indic_ocr",
    "qwen3_5_hadamard",
    "qwen3_5_moe",
    "qwen3_omni_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen4_exp",
]
#: Positioned families whose text counts all tokens, pictures' included.
WITHOUT_DELTAS = ["hunyuan_vl", "minicpmo", "minicpmv4_6"]
#: Families without positions at all: recurrent layers know the order, or what each token has seen of the others.
UNPOSITIONED = ["glm5_next", "kimi_k3", "nemotron_h_nano_omni", "nemotron_parse"]
#: Families with recurrent layers.
RECURRENT = [
    "falcon_h1",
    "glm5_next",
    "inkling",
    "kimi_k3",
    "lfm2_vl",
    "minicpmv4_6",
    "minicpmv4_7",
    "nemotron_h_nano_omni",
    "plamo2vl",
    "qwen3_5",
    "qwen3_5_indic_ocr",
    "qwen3_5_hadamard",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen4_exp",
    "zaya1_vl",
]
COUNTED = [name for name in every_family() if name not in POSITIONED + UNPOSITIONED]


def worst(name: str, answers: Sequence[Answer]) -> float:
    return max(difference(answer, oracle(name, answer.ask.key)) for answer in answers)


@pytest.mark.parametrize(
    "name", [name for name in POSITIONED if name not in WITHOUT_DELTAS]
)
def test_without_rope_deltas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Row,
        "position",
        property(lambda row: row.facts.length + row.answer.num_sampled - 1),
    )
    assert worst(name, run_family(name, [Ask(IMAGES[0]), Ask(IMAGES[2])])) > FAR


@pytest.mark.parametrize("name", POSITIONED)
def test_one_rows_position_shifted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Row.position.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Row, "position", property(lambda row: right(row) + (row.request_id == "1"))
    )
    first, second = run_family(name, [Ask(IMAGES[0]), Ask(TEXT)])
    assert worst(name, [second]) > FAR
    assert worst(name, [first]) <= TOLERANCE  # the neighbour does not notice


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("name", COUNTED)
def test_one_rows_offset_shifted(
    name: str, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (RowsCache, SlabCache):
        monkeypatch.setattr(kind, "offset", property(_shifted_lengths))
    for slab, positions in (
        (SlabCache, _true_lengths),
        (RingSlabCache, _ring_positions),
    ):  # a slab's own writes and masks
        monkeypatch.setattr(slab, "_positions", positions)
    # the second row comes a step later and takes place 1: of rows that wait together, the shorter may be read first
    first, second = run_family(
        name, [Ask(IMAGES[0]), Ask(TEXT, at=1)], placement=placement
    )
    assert worst(name, [second]) > FAR
    assert worst(name, [first]) <= TOLERANCE


def _shifted_lengths(cache: RowsCache | SlabCache) -> mx.array:
    return mx.array(
        [length + (place == 1) for place, length in enumerate(cache.lengths)],
        dtype=mx.int32,
    )


def _true_lengths(slab: SlabCache) -> mx.array:
    return mx.array(slab.lengths, dtype=mx.int32)


def _ring_positions(slab: RingSlabCache) -> mx.array:
    return _true_lengths(slab) % slab.window


@pytest.mark.parametrize("name", every_family())
def test_slabs_without_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths in one slab must not see what lies past their own ends."""
    layers = [
        kind_of(single).batched(Placement.SLAB, 1)
        for single in shared_adapter(name).make_cache()
    ]
    if not any(isinstance(layer, (SlabCache, RingSlabCache)) for layer in layers):
        pytest.skip("none of the family's layers lies in a slab")
    for kind in (SlabCache, RingSlabCache):
        monkeypatch.setattr(kind, "make_mask", lambda self, length, **_: None)
    assert (
        worst(
            name,
            run_family(name, [Ask(IMAGES[0]), Ask(TEXT)], placement=Placement.SLAB),
        )
        > FAR
    )


@pytest.mark.parametrize(
    "name", [name for name in every_family() if not family(name).text_only]
)
def test_swapped_images(name: str) -> None:
    """Two rows' pictures of one size, swapped under their prompts."""
    one, other = inputs_of(name, "image:1:1"), inputs_of(name, "image:9:1")

    def swapped(key: str) -> Inputs:
        mine, theirs = (one, other) if key == "image:1:1" else (other, one)
        return {**theirs, "input_ids": mine["input_ids"]}

    assert np.asarray(one["input_ids"]).shape == np.asarray(other["input_ids"]).shape
    assert (
        worst(
            name,
            run(shared_adapter(name), swapped, [Ask("image:1:1"), Ask("image:9:1")]),
        )
        > FAR
    )


@pytest.mark.parametrize(
    "name",
    ["falcon_ocr", "falcon_perception", "gemma3", "molmo2", "moondream2", "moondream3"],
)
def test_bidirectional_images_made_causal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = shared_adapter(name)
    right = type(adapter).chunk_features

    def causal(self: Any, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        return {
            key: value
            for key, value in right(self, encoded, start, end).items()
            if key != "mask"
        }

    monkeypatch.setattr(type(adapter), "chunk_features", causal)
    assert worst(name, run_family(name, [Ask(IMAGES[2])])) > FAR


@pytest.mark.parametrize(
    "name",
    ["falcon_ocr", "falcon_perception", "gemma3", "molmo2", "moondream2", "moondream3"],
)
def test_a_chunk_inside_a_bidirectional_image(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture that is cut in two cannot look ahead: the scheduler keeps atomic spans whole for a reason."""

    monkeypatch.setattr(
        schedule,
        "chunk_end",
        lambda done, length, room, *spans: min(length, done + room),
    )
    assert (
        worst(name, run_family(name, [Ask(IMAGES[2])], config={"idle_budget": 3})) > FAR
    )


@pytest.mark.parametrize("name", ["qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe"])
def test_deepstack_features_dropped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = shared_adapter(name)
    monkeypatch.setattr(type(adapter), "chunk_features", lambda *_: {})
    assert worst(name, run_family(name, [Ask(IMAGES[0])])) > FAR


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_state_in_a_neighbours_place(
    name: str, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RecurrentCache.put

    def misplaced(self: RecurrentCache, place: int, cache: Any) -> None:
        right(self, place, cache)
        if place == 1:
            self.cache = [states[::-1] for states in self.cache]

    monkeypatch.setattr(RecurrentCache, "put", misplaced)
    assert (
        worst(name, run_family(name, [Ask(IMAGES[0]), Ask(TEXT)], placement=placement))
        > FAR
    )


def test_ngrams_of_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """qwen4_exp: the last tokens, of which the next n-grams are made, lie in the fourth slot of the recurrent layers."""
    right = RecurrentCache.put

    def misplaced(self: RecurrentCache, place: int, cache: Any) -> None:
        right(self, place, cache)
        if place == 1 and len(self.cache) == 4:
            self.cache[3] = self.cache[3][::-1]

    monkeypatch.setattr(RecurrentCache, "put", misplaced)
    assert (
        worst("qwen4_exp", run_family("qwen4_exp", [Ask(IMAGES[0]), Ask(TEXT)])) > FAR
    )


def test_an_index_read_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """qwen4_exp: other blocks of keys are picked, and the answer is another."""
    right = IndexedCache.update_indexer

    def backwards(
        self: IndexedCache, keys: mx.array, positions: mx.array
    ) -> tuple[mx.array, mx.array]:
        held, where = right(self, keys, positions)
        return held[:, ::-1], where

    monkeypatch.setattr(IndexedCache, "update_indexer", backwards)
    assert (
        worst("qwen4_exp", run_family("qwen4_exp", [Ask(IMAGES[0]), Ask(TEXT)])) > FAR
    )


def test_cross_attention_states_dropped_after_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """mllama in mlx-vlm's batch: the picture is lost after the first token."""
    adapter = shared_adapter("mllama")
    right = type(adapter).decode

    def blind(self: Any, step: Any, call: Any) -> mx.array:
        return right(self, replace(step, extras=[{} for _ in step.extras]), call)

    monkeypatch.setattr(type(adapter), "decode", blind)
    assert worst("mllama", run_family("mllama", [Ask(IMAGES[0])])) > FAR


def test_per_layer_inputs_of_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """gemma3n: every token carries inputs of its own for every layer; a neighbour's are not as good."""
    adapter = shared_adapter("gemma3n")
    right = type(adapter).forward

    def reversed_rows(
        self: Any,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Any,
        extra: dict[str, Any],
    ) -> mx.array:
        return right(self, ids[::-1], embeds, cache, extra)

    monkeypatch.setattr(type(adapter), "forward", reversed_rows)
    assert worst("gemma3n", run_family("gemma3n", [Ask(IMAGES[0]), Ask(TEXT)])) > FAR


def test_patches_are_not_embedded_as_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """molmo_point: a chosen patch goes on as the token for patches in general."""
    right = MolmoPoint.embed

    def general_only(
        self: Any, tokens: Sequence[int], places: Sequence[Any]
    ) -> mx.array:
        kinds = [None if row is None else row.pictures.tokens for row in places]
        pairs = zip(tokens, kinds, strict=True)
        spelled = [
            token if kind is None else general(token, kind, self.config)
            for token, kind in pairs
        ]
        return right(self, spelled, places)

    monkeypatch.setattr(MolmoPoint, "embed", general_only)
    assert (
        worst(
            "molmo_point", run_family("molmo_point", [Ask(image) for image in IMAGES])
        )
        > FAR
    )


def test_points_at_a_neighbours_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """molmo_point: two pictures of one size, each row with the other's patches."""
    right = MolmoPoint.with_points
    pointers: list[Any] = []

    def crossed(
        self: Any, logits: mx.array, asked: Any, row: Any, token: int
    ) -> mx.array:
        if not any(row is known for known in pointers):
            pointers.append(row)
            if len(pointers) == 2:
                one, other = pointers
                one.keys, other.keys = other.keys, one.keys
                one.pictures, other.pictures = other.pictures, one.pictures
        return right(self, logits, asked, row, token)

    monkeypatch.setattr(MolmoPoint, "with_points", crossed)
    assert (
        worst(
            "molmo_point",
            run_family("molmo_point", [Ask("image:1:1"), Ask("image:4:1")]),
        )
        > FAR
    )


def test_points_not_fed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = shared_adapter("falcon_perception")
    monkeypatch.setattr(type(adapter), "_take", lambda self, row, token: None)
    assert (
        worst(
            "falcon_perception",
            run_family("falcon_perception", [Ask(image) for image in IMAGES]),
        )
        > FAR
    )
