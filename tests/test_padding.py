"""Chunks of prompts in few lengths: padded behind their ends, cut back again, and every answer as it is alone.

The matrix runs every family that pads with slabs (``tests/test_parity.py``), whose table pads; here is the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.cache import RotatingKVCache

from tests.exact_cases import KEYS, Arrival, Way, alone, engine_of, exact_of, play
from tests.exact_cases import adapter_of as adapter_in
from tests.harness import (
    TOLERANCE,
    Ask,
    check,
    every_family,
    inputs_of,
    run_family,
    settings_for,
    shared_adapter,
)
from tests.zoo import FAMILIES
from vlm_batch.arrays import arrays_of, as_mlx
from vlm_batch.caches import Placement, can_fill, can_trim, take_row, trim
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.lengths import padded_count, padded_length, together
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.runner import Runner
from vlm_batch.engine.schedule import PrefillRow, chunks
from vlm_batch.engine.shapes import pads, shares
from vlm_batch.policy import POLICIES, Policy
from vlm_batch.records import Call
from vlm_batch.runtime.device import Device
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.prefix import PrefixCache

FAMILY = "qwen2_vl"
PADDED = {"max_rows": 4, "pad_to": 16}
MIXED = [
    Ask("image:1:0"),
    Ask("text:4:9"),
    Ask("image:2:1", at=1),
    Ask("text:5:26", at=2),
    Ask("text:6:14", at=2),
]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, positions) of each forward of a prompt, as the model's embeddings come in."""
    adapter, seen = shared_adapter(FAMILY), []
    plain = adapter.forward

    def watched(ids: Any, embeds: Any, cache: Any, extra: Any) -> mx.array:
        if embeds is not None:
            seen.append((embeds.shape[0], embeds.shape[1]))
        return plain(ids, embeds, cache, extra)

    monkeypatch.setattr(adapter, "forward", watched)
    return seen


# ---- shapes ----


def test_lengths_are_few_and_padding_is_at_most_a_quarter() -> None:
    lengths = {padded_length(length, 64) for length in range(1, 2049)}
    assert sorted(lengths) == [
        *range(64, 513, 64),
        640,
        768,
        896,
        1024,
        1280,
        1536,
        1792,
        2048,
    ]
    for length in range(1, 5000):
        width = padded_length(length, 64)
        assert length <= width < max(length + 64, 1.25 * length)
        assert padded_length(width, 64) == width
    assert [padded_length(length, 0) for length in (0, 1, 77)] == [0, 1, 77]
    assert padded_length(0, 64) == 0
    assert [padded_length(chunk, 64) for chunk in (1024, 2048)] == [1024, 2048], (
        "the table's chunks are not padded"
    )


def test_rows_of_one_array_are_few() -> None:
    assert [padded_count(count, 64) for count in range(1, 18)] == [
        1,
        2,
        3,
        4,
        6,
        6,
        8,
        8,
        *[12] * 4,
        *[16] * 4,
        24,
    ]
    assert [padded_count(count, 0) for count in range(1, 8)] == list(range(1, 8))


def test_prompts_whose_padded_lengths_agree_go_together() -> None:
    lengths = {"a": 300, "b": 281, "c": 400, "d": 290, "e": 295, "f": 310}

    def groups(most: int, most_tokens: int, pad_to: int) -> list[str]:
        found = together(list(lengths.values()), most, most_tokens, pad_to, 0)
        return ["".join([*lengths][place] for place in group) for group in found]

    assert groups(8, 4096, 64) == ["abdef", "c"]
    assert groups(8, 4 * 320, 64) == ["abde", "c", "f"]
    assert groups(5, 4096, 64) == ["abde", "c", "f"], "five are computed as six"
    assert groups(8, 4096, 0) == list("abcdef")


def test_shorter_prompts_join_longer_ones_where_a_forward_costs_more_than_the_padding() -> (
    None
):
    lengths = {"a": 300, "b": 40, "c": 1200, "d": 290, "e": 60, "f": 400}

    def groups(most: int, most_tokens: int, fill: int) -> list[str]:
        found = together(list(lengths.values()), most, most_tokens, 64, fill)
        return ["".join([*lengths][place] for place in group) for group in found]

    assert groups(8, 4096, 0) == ["ad", "be", "c", "f"]
    assert groups(8, 4096, 256) == ["ad", "be", "c", "f"], (
        "two of 320 beside one of 448 are 256 further positions"
    )
    assert groups(8, 4096, 257) == ["be", "c", "fad"]
    assert groups(8, 4096, 1024) == ["adbe", "cf"]
    assert groups(3, 4096, 1024) == ["ad", "be", "cf"]
    assert groups(8, 1280, 1024) == ["adbe", "c", "f"]
    assert groups(8, 9000, 9000) == ["cfadbe"]


def test_a_budget_is_rounded_to_a_length_but_not_below_the_least() -> None:
    row = PrefillRow("a", 2000, 0)

    def first(budget: int, pad_to: int) -> int:
        policy = Policy(max_chunk=2048, smallest_chunk=64, pad_to=pad_to)
        return chunks([row], budget, policy)[0].end

    assert [first(700, 64), first(700, 0), first(3, 64)] == [768, 700, 3]
    capped = Policy(smallest_chunk=64, pad_to=64, max_chunk=512)
    assert [chunk.end for chunk in chunks([row], 700, capped)] == [512, 704]


def test_what_others_leave_of_a_budget_is_no_forward_of_its_own() -> None:
    """Where launches decide: a piece costs a forward now, and makes the rest of its prompt a new shape."""
    rows = [
        PrefillRow("a", 300, 0, waited=9.0),
        PrefillRow("b", 2000, 0, waited=1.0),
        PrefillRow("c", 90, 0),
    ]

    def plan(budget: int, pad_to: int, *left: PrefillRow) -> list[tuple[str, int]]:
        config = Policy(
            max_rows=4,
            max_chunk=2048,
            pad_to=pad_to,
            smallest_chunk=1024,
            slack=64,
            ageing_seconds=100.0,
        )
        return [
            (chunk.rows[0], chunk.end) for chunk in chunks(left or rows, budget, config)
        ]

    assert plan(1100, 0) == [("a", 300), ("b", 800)]
    assert plan(1100, 64) == [("a", 300), ("c", 90)]
    assert plan(1400, 64)[:2] == [("a", 300), ("b", 1280)], "worth it"
    assert plan(500, 64, rows[1]) == [("b", 512)], (
        "the first is begun, whatever the budget"
    )
    assert plan(1990, 64, rows[1], rows[2]) == [("b", 2000)], "ended within the slack"


def test_gpus_pad_and_cpus_do_not() -> None:
    assert POLICIES[Device.CPU].pad_to == 0
    assert POLICIES[Device.CUDA].pad_to == POLICIES[Device.METAL].pad_to == 64
    with pytest.raises(ValueError, match="pad_to is -1"):
        Policy(pad_to=-1)


# ---- caches ----


@pytest.mark.parametrize("chunks", [(5,), (3, 6), (9, 4), (12, 7, 2)])
def test_what_is_trimmed_from_a_window_is_as_if_it_had_not_been(
    chunks: tuple[int, ...],
) -> None:
    """Also for the chunks and tokens that come after it."""
    numbers = iter(range(1, 1000))

    def new(count: int) -> mx.array:
        return mx.array([next(numbers) for _ in range(count)], dtype=mx.float32)[
            None, None, :, None
        ]

    plain, padded = RotatingKVCache(8), RotatingKVCache(8)
    for count in chunks:
        keys = new(count)
        plain.update_and_fetch(keys, keys)
        junk = mx.concatenate([keys, mx.full((1, 1, 5, 1), -1.0)], axis=2)
        padded.update_and_fetch(junk, junk)
        trim([padded], 5)
        assert padded.offset == plain.offset
        _same_states(plain, padded)
    for _ in range(12):
        token = new(1)
        one = plain.update_and_fetch(token, token)
        other = padded.update_and_fetch(token, token)
        assert sorted(np.array(one[0]).ravel()) == sorted(np.array(other[0]).ravel())


def _same_states(plain: RotatingKVCache, padded: RotatingKVCache) -> None:
    one, other = plain._temporal_order(plain.keys), padded._temporal_order(padded.keys)
    assert np.array_equal(np.array(one), np.array(other))


def test_the_families_that_most_people_serve_are_padded() -> None:
    names = {
        name
        for name in FAMILIES
        if pads(shared_adapter(name), shared_adapter(name).make_cache())
    }
    assert {
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "gemma3",
        "gemma4",
        "llava",
        "internvl",
        "pixtral",
        "smolvlm",
    } <= names
    assert not names & {"paligemma", "florence2", "mllama"}, (
        "they see a prompt as a whole"
    )


@pytest.mark.parametrize("name", ["lfm2_vl", "qwen3_5", "unlimited_ocr"])
def test_states_that_cannot_be_cut_back_are_not_padded_whatever_a_family_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = shared_adapter(name)
    assert not can_trim(adapter.make_cache())
    check(
        name,
        run_family(
            name,
            [Ask("text:4:9"), Ask("text:5:26")],
            placement=Placement.SLAB,
            config=PADDED,
        ),
    )


# ---- the engine ----


@pytest.mark.parametrize(
    "placement", list(Placement), ids=lambda placement: placement.value
)
def test_prompts_of_all_lengths_come_in_few_shapes(
    placement: Placement, shapes: list[tuple[int, int]]
) -> None:
    check(FAMILY, run_family(FAMILY, MIXED, placement=placement, config=PADDED))
    assert shapes and all(width % 16 == 0 for _, width in shapes)


def test_nothing_is_padded_where_that_is_said(shapes: list[tuple[int, int]]) -> None:
    check(
        FAMILY,
        run_family(
            FAMILY, MIXED, placement=Placement.SLAB, config=PADDED | {"pad_to": 0}
        ),
    )
    assert {9, 26, 14} <= {width for _, width in shapes}


def test_prompts_of_several_lengths_are_one_array(
    shapes: list[tuple[int, int]],
) -> None:
    """Five texts of 9 to 14 tokens: six rows of 16, the last of which nobody reads."""
    asks = [
        Ask(f"text:{seed}:{length}")
        for seed, length in ((4, 9), (6, 14), (7, 12), (8, 11), (9, 13))
    ]
    config = PADDED | {"max_rows": 8, "prefill_together": 8, "idle_budget": 512}
    check(FAMILY, run_family(FAMILY, asks, placement=Placement.SLAB, config=config))
    assert shapes == [(6, 16)]


def rows_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The prompts of each forward of whole prompts from now on."""
    counts: list[int] = []
    launch = Runner._launch

    def watched(self: Runner, rows: Sequence[Any]) -> Any:
        counts.append(len(rows))
        return launch(self, rows)

    monkeypatch.setattr(Runner, "_launch", watched)
    return counts


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_prompts_of_other_lengths_are_one_array(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 9, 26 and 40 tokens, and one with a picture."""
    counts = rows_computed(monkeypatch)
    asks = [Ask("text:4:9"), Ask("text:5:26"), Ask("text:9:40"), Ask("image:3:2")]
    config = PADDED | {
        "max_rows": 8,
        "prefill_together": 8,
        "idle_budget": 512,
        "smallest_chunk": 256,
    }
    check(name, run_family(name, asks, placement=Placement.SLAB, config=config))
    assert max(counts) >= 3


@pytest.mark.parametrize(("smallest", "most"), [(48, 1), (80, 2)])
def test_prompts_are_filled_up_by_half_of_what_a_forward_computes_as_fast(
    smallest: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 9 tokens beside 40: in one array they take 2 x 48 positions, apart 16 and 48."""
    counts = rows_computed(monkeypatch)
    config = PADDED | {
        "max_rows": 8,
        "prefill_together": 8,
        "idle_budget": 512,
        "smallest_chunk": smallest,
    }
    asks = [Ask("text:4:9"), Ask("text:9:40")]
    check(
        "qwen2_vl",
        run_family("qwen2_vl", asks, placement=Placement.SLAB, config=config),
    )
    assert max(counts, default=1) == most


@pytest.mark.parametrize("budget", [5, 20])
def test_chunks_that_end_in_a_prompt_are_cut_back_before_the_next(
    budget: int, shapes: list[tuple[int, int]]
) -> None:
    config = PADDED | {"prefill_budget": budget, "idle_budget": budget}
    asks = [Ask("text:5:26", tokens=12), Ask("image:3:2", at=2), Ask("text:9:40", at=3)]
    check(FAMILY, run_family(FAMILY, asks, placement=Placement.SLAB, config=config))
    assert all(width % 16 == 0 for _, width in shapes)


def test_beginnings_are_kept_without_the_padding(shapes: list[tuple[int, int]]) -> None:
    adapter = shared_adapter(FAMILY)
    reuse = Reuse(adapter, PrefixCache(ByteBudget(2**28)))
    engine = BatchGenerator(
        adapter, policy=settings_for(Placement.SLAB, **PADDED), reuse=reuse
    )
    asks = [Ask("text:5:40")]
    check(FAMILY, run_family(FAMILY, asks, generator=engine))
    shapes.clear()
    again = run_family(
        FAMILY, [Ask("text:5:40"), Ask("text:5:40", at=1)], generator=engine
    )
    check(FAMILY, again)
    assert all(
        answer.result is not None and answer.result.usage.cached_tokens >= 39
        for answer in again
    )


def test_few_bits_are_not_padded(shapes: list[tuple[int, int]]) -> None:
    """Their caches cannot be cut back as if the padding had not been in the chunk."""
    engine = BatchGenerator(
        shared_adapter(FAMILY),
        policy=settings_for(Placement.SLAB, **PADDED),
        kv=KVQuantisation(8, group_size=32),
    )
    run_family(FAMILY, [Ask("text:4:9")], generator=engine)
    assert shapes == [(1, 9)]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_reproducible_answers_are_padded_by_their_own_lengths(name: str) -> None:
    """Alone and in company, in a slab, with kept beginnings: the same bits."""
    exact = replace(exact_of(name, "bfloat16", Placement.SLAB), pad_to=16, grid=32)
    assert exact.settings != replace(exact, pad_to=0).settings, (
        "files of rows that were not padded are others"
    )
    arrivals = [
        Arrival(key, at=index % 3) for index, key in enumerate((*KEYS, "text:5:40"))
    ]
    way = Way(max_rows=5, keeps=True)
    answers = play(name, engine_of(adapter_in(name, "bfloat16"), exact, way), arrivals)
    for arrival, answer in zip(arrivals, answers, strict=True):
        assert answer == replace(
            alone(name, "bfloat16", arrival.key, exact), cached=answer.cached
        ), arrival


# ---- families ----


#: Families whose prompts of several lengths share no array, by their caches or by how a prompt attends.
NOT_FILLED = frozenset(
    {
        "deepseek_v4",
        "deepseek_v41",
        "deepseek_v4_text",
        "falcon_perception",
        "florence2",
        "glm5_next",
        "inkling",
        "llama4",
        "mllama",
        "molmo_point",
        "nemotron_h_nano_omni",
        "nemotron_parse",
        "paligemma",
        "paligemma2",
        "qwen4_exp",
        "unlimited_ocr",
        "zaya1_vl",
    }
)
#: Families whose prompts are not padded: also those whose states, unlike a filled array's, cannot be cut back.
NOT_PADDED = NOT_FILLED | frozenset(
    {
        "falcon_h1",
        "kimi_k3",
        "lfm2_vl",
        "minicpmv4_6",
        "minicpmv4_7",
        "plamo2vl",
        "qwen3_5",
        "qwen3_5_hadamard",
        "qwen3_5_indic_ocr",
        "qwen3_5_moe",
        "qwen3_next",
    }
)


@pytest.mark.parametrize("name", every_family())
def test_a_familys_prompts_are_right_in_few_lengths(name: str) -> None:
    """Alone, several in one array, and in chunks: every causal family whose caches can be cut back."""
    adapter = shared_adapter(name)
    is_padded = pads(adapter, adapter.make_cache())
    assert is_padded == (name not in NOT_PADDED)
    if not is_padded:
        pytest.skip(f"{name} is in NOT_PADDED")
    texts = (Ask(key) for key in ("text:4:14", "text:6:14", "text:7:9", "text:5:26"))
    asks = [*texts, Ask("image:2:1"), Ask("image:1:1", at=2), Ask("image:3:2", at=2)]
    config = PADDED | {
        "max_rows": 6,
        "prefill_together": 8,
        "encode_together": 4,
        "idle_budget": 512,
    }
    for chunk in (256, 16):
        check(
            name,
            run_family(
                name,
                asks,
                placement=Placement.SLAB,
                config=config | {"max_chunk": chunk},
            ),
        )


# ---- filled up, to share an array ----


def test_prompts_of_two_dtypes_are_two_arrays(
    shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one, the narrower would be computed in the wider: another answer than alone."""
    adapter = shared_adapter(FAMILY)
    plain, dtypes = adapter.encode, iter((mx.float32, mx.bfloat16, mx.float32))

    def encode(*given: Any, **named: Any) -> Any:
        encoded = plain(*given, **named)
        return replace(
            encoded, inputs_embeds=encoded.inputs_embeds.astype(next(dtypes))
        )

    monkeypatch.setattr(adapter, "encode", encode)
    engine = BatchGenerator(adapter, policy=settings_for(Placement.ROWS, max_rows=4))
    run_family(
        FAMILY, [Ask("text:4:9"), Ask("text:5:9"), Ask("text:6:9")], generator=engine
    )
    assert sorted(shapes) == [(1, 9), (2, 9)]


def fills(name: str) -> bool:
    adapter = shared_adapter(name)
    fresh = adapter.make_cache()
    return shares(adapter, fresh) and adapter.scores_chunks and can_fill(fresh)


@pytest.mark.parametrize("name", every_family())
def test_what_stands_behind_a_shorter_prompt_leaves_no_trace(name: str) -> None:
    """Prompts of several lengths in one array: logits and states as alone. A neighbour without a finite number touches none."""
    assert fills(name) == (name not in NOT_FILLED)
    if name in NOT_FILLED:
        pytest.skip(f"{name} is in NOT_FILLED")
    adapter = shared_adapter(name)
    keys = ("image:3:0", "image:1:0", "image:2:1", "text:4:9", "text:5:26", "text:6:14")
    every = [adapter.encode(as_mlx(inputs_of(name, key))) for key in keys]
    for kind in {row.kind for row in every}:
        rows = [row for row in every if row.can_share and row.kind == kind]
        if len(rows) < 2:
            continue
        ends = tuple(row.length for row in rows)
        embeds = rows[0].inputs_embeds
        spoilt = replace(
            rows[0], inputs_embeds=mx.full(embeds.shape, mx.nan, embeds.dtype)
        )
        for filled in (rows, [spoilt, *rows[1:]]):
            shared = adapter.make_cache()
            logits = adapter.prefill(filled, shared, 0, max(ends), Call(ends=ends))
            for index, row in enumerate(rows):
                if filled[index] is not row:
                    continue
                alone = adapter.make_cache()
                expected = adapter.prefill([row], alone, 0, row.length)
                taken = take_row(shared, index)
                trim(taken, max(ends) - row.length)
                near(logits[index : index + 1], expected)
                for one, other in zip(taken, alone, strict=True):
                    for ours, theirs in zip(
                        arrays_of(one.state), arrays_of(other.state), strict=True
                    ):
                        near(ours, theirs)


def near(ours: mx.array, theirs: mx.array) -> None:
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(
        np.array(ours.astype(mx.float32)),
        np.array(theirs.astype(mx.float32)),
        atol=TOLERANCE / 4,
        rtol=0,
    )
