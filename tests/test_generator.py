"""The engine's own promises: rows fail, stop, are cancelled and are sampled alone; nobody else's tokens change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.harness import (
    NUM_TOKENS,
    Ask,
    check,
    inputs_of,
    oracle,
    run_family,
    settings_for,
    shared_adapter,
)
from vlm_batch.arrays import arrays_of, as_mlx, num_bytes
from vlm_batch.caches import Placement
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Prompt, Row, Stage, new_row
from vlm_batch.engine.runner import Runner
from vlm_batch.engine.text import AnswerText
from vlm_batch.errors import InvalidPrompt, PromptTooLong
from vlm_batch.records import Call, MediaSizes
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.prefix import PrefixCache
from vlm_batch.types import Event, Result, SamplingParams

FAMILY = "qwen2_vl"
TEXT, OTHER, IMAGE = "text:4:9", "text:5:26", "image:2:1"


@pytest.fixture(autouse=True)
def steps_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that a test puts in the place of the adapter's is called in every step."""
    monkeypatch.setattr("vlm_batch.engine.decoding.can_leave_unfused", lambda: False)


def inputs(key: str) -> dict[str, Any]:
    return as_mlx(inputs_of(FAMILY, key))


def engine(**settings: Any) -> BatchGenerator:
    return BatchGenerator(shared_adapter(FAMILY), **settings)


def finish(
    generator: BatchGenerator, before_step: Callable[[int], None] = lambda step: None
) -> dict[str, Result]:
    results: dict[str, Result] = {}
    for step in range(500):
        before_step(step)
        if not generator.has_work:
            return results
        results |= {
            event.request_id: event.result
            for event in generator.step()
            if event.result is not None
        }
    raise AssertionError("the engine does not end")


def right_tokens(key: str, count: int = NUM_TOKENS) -> tuple[int, ...]:
    return tuple(oracle(FAMILY, key, count).tokens[:count])


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in ids)


# Failing alone ----------------------------------------------------------------------------------------------------------


def raises(*_: Any) -> mx.array:
    raise RuntimeError("this processor is broken")


def late(tokens: mx.array, logits: mx.array) -> mx.array:
    return raises() if tokens.size > 12 else logits


BAD: dict[str, tuple[Mapping[str, Any], SamplingParams, str]] = {
    "processor_raises_at_once": (
        inputs(OTHER),
        SamplingParams(logits_processors=[raises]),
        "this processor is broken",
    ),
    "processor_raises_later": (
        inputs(TEXT),
        SamplingParams(logits_processors=[late]),
        "this processor is broken",
    ),
    "processor_changes_shape": (
        inputs(OTHER),
        SamplingParams(logits_processors=[lambda t, x: x[:, :3]]),
        "shape",
    ),
    "unknown_input": (
        {**inputs(TEXT), "spectrogram": mx.zeros((1,))},
        SamplingParams(),
        "spectrogram",
    ),
    "features_do_not_fit": (
        {**inputs(IMAGE), "pixel_values": mx.zeros((4, 3))},
        SamplingParams(),
        "",
    ),
    "too_long": (
        {"input_ids": mx.zeros((1, 101), dtype=mx.int32)},
        SamplingParams(),
        "101 tokens",
    ),
}


def test_a_row_that_raises_while_it_is_encoded_leaves_nothing_on_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = shared_adapter(FAMILY)

    def leaves_positions_and_raises(*_: Any) -> Any:
        adapter.language._rope_deltas = mx.array([7])
        raise RuntimeError("no positions")

    with monkeypatch.context() as patch:
        patch.setattr(adapter, "positions", leaves_positions_and_raises)
        with pytest.raises(RuntimeError, match="no positions"):
            adapter.encode(inputs(IMAGE))
    assert adapter.language._rope_deltas is None


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("how", BAD)
def test_a_bad_row_ends_alone(how: str, placement: Placement) -> None:
    """Its neighbours' tokens are the same as if it had never come, whether they run before, beside or after it."""
    bad_inputs, bad_params, said = BAD[how]
    generator = engine(policy=settings_for(placement, max_prompt_tokens=100))
    generator.insert("before", inputs(TEXT), SamplingParams(max_tokens=NUM_TOKENS))

    def arrive(step: int) -> None:
        if step == 2:
            generator.insert("bad", bad_inputs, bad_params)
            generator.insert(
                "beside", inputs(IMAGE), SamplingParams(max_tokens=NUM_TOKENS)
            )
        if step == 4:
            generator.insert(
                "after", inputs(OTHER), SamplingParams(max_tokens=NUM_TOKENS)
            )

    results = finish(generator, arrive)
    assert results["bad"].finish_reason == "error"
    assert results["bad"].error is not None
    assert said in results["bad"].error
    assert results["bad"].exception is not None
    for name, key in (("before", TEXT), ("beside", IMAGE), ("after", OTHER)):
        assert results[name].token_ids == right_tokens(key), name


def test_too_long_names_both_numbers() -> None:
    generator = engine(policy=settings_for(max_prompt_tokens=20))
    generator.insert("long", inputs(OTHER), SamplingParams())
    generator.insert("short", inputs(TEXT), SamplingParams(max_tokens=3))
    results = finish(generator)
    assert isinstance(results["long"].exception, PromptTooLong)
    length = inputs(OTHER)["input_ids"].shape[1]
    assert f"{length} tokens" in str(results["long"].error)
    assert "20 are taken (Limits.prompt_tokens)" in str(results["long"].error)
    assert results["short"].token_ids == right_tokens(TEXT, 3)


def test_more_pictures_than_placeholders_is_an_error_not_a_wrong_answer() -> None:
    two = inputs_of(FAMILY, "two:7")
    one = inputs_of(FAMILY, IMAGE)
    generator = engine()
    generator.insert(
        "bad",
        as_mlx({**two, "input_ids": one["input_ids"]}),
        SamplingParams(max_tokens=2),
    )
    result = finish(generator)["bad"]
    assert isinstance(result.exception, InvalidPrompt), result.error
    assert "the pictures need 10 placeholder tokens; the prompt has 6" in str(
        result.error
    )


@pytest.mark.fails_steps
def test_a_failing_forward_ends_its_rows_and_the_next_request_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = engine()
    generator.insert("a", inputs(TEXT), SamplingParams(max_tokens=20))
    generator.insert("b", inputs(OTHER), SamplingParams(max_tokens=20))
    for _ in range(3):
        generator.step()
    with monkeypatch.context() as broken:
        broken.setattr(type(generator.adapter), "decode", raises)
        results = finish(generator)
    assert {name: result.finish_reason for name, result in results.items()} == {
        "a": "error",
        "b": "error",
    }
    generator.insert("c", inputs(IMAGE), SamplingParams(max_tokens=NUM_TOKENS))
    assert finish(generator)["c"].token_ids == right_tokens(IMAGE)


def test_an_id_in_use_is_refused() -> None:
    generator = engine()
    generator.insert("a", inputs(TEXT))
    with pytest.raises(ValueError, match="'a' is already in use"):
        generator.insert("a", inputs(TEXT))


# Ends -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5, 9])
def test_cancel_at_every_stage(step: int) -> None:
    """Waiting for a place, in the middle of prefill, and while decoding."""
    generator = engine(policy=settings_for(max_rows=2, prefill_budget=3, idle_budget=3))
    for name, key in (("a", TEXT), ("b", IMAGE), ("c", OTHER)):
        generator.insert(name, inputs(key), SamplingParams(max_tokens=NUM_TOKENS))

    def cancel(now: int) -> None:
        if now == step:
            assert generator.cancel("b")

    results = finish(generator, cancel)
    assert results["b"].finish_reason == "cancelled"
    assert results["b"].token_ids == right_tokens(IMAGE)[: len(results["b"].token_ids)]
    assert results["a"].token_ids == right_tokens(TEXT)
    assert results["c"].token_ids == right_tokens(OTHER)
    assert not generator.cancel("b")
    assert len(generator.rows.batch) == 0


def test_cancelling_again_is_nothing_and_the_only_end_has_what_was_generated() -> None:
    """Also before the first one's end was handed out, and by whoever calls: a row's end is told once."""
    generator = engine()
    generator.insert("a", inputs(TEXT), SamplingParams(max_tokens=NUM_TOKENS))
    tokens: list[int] = []
    while len(tokens) < 3:
        tokens += [event.token for event in generator.step() if event.token is not None]
    assert [generator.cancel("a") for _ in range(3)] == [True, False, False]
    ends = [event.result for event in generator.step() if event.result is not None]
    assert [(end.finish_reason, end.token_ids) for end in ends] == [
        ("cancelled", tuple(tokens))
    ]
    assert not generator.cancel("a")
    assert not generator.has_work


def test_stop_tokens_and_eos() -> None:
    tokens = right_tokens(TEXT)
    first = tokens.index(tokens[4])
    generator = engine(text=AnswerText(eos_token_ids=frozenset([tokens[4]])))
    generator.insert("eos", inputs(TEXT), SamplingParams(max_tokens=NUM_TOKENS))
    generator.insert(
        "ignored", inputs(TEXT), SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    )
    generator.insert(
        "own",
        inputs(OTHER),
        SamplingParams(max_tokens=NUM_TOKENS, stop_token_ids=[right_tokens(OTHER)[1]]),
    )
    results = finish(generator)
    assert results["eos"].token_ids == tokens[: first + 1]
    assert (results["eos"].finish_reason, results["eos"].stop_reason) == (
        "stop",
        tokens[4],
    )
    assert results["ignored"].token_ids == tokens
    assert (results["ignored"].finish_reason, results["ignored"].stop_reason) == (
        "length",
        None,
    )
    assert results["own"].stop_reason == right_tokens(OTHER)[1]


def test_stop_strings_cut_the_text_of_their_row_only() -> None:
    whole = letters(right_tokens(TEXT))
    stop = whole[3:5]
    generator = engine(text=AnswerText(letters))
    generator.insert(
        "stopped", inputs(TEXT), SamplingParams(max_tokens=NUM_TOKENS, stop=[stop])
    )
    generator.insert("whole", inputs(TEXT), SamplingParams(max_tokens=NUM_TOKENS))
    events: list[Event] = []
    while generator.has_work:
        events += generator.step()
    results = {
        event.request_id: event.result for event in events if event.result is not None
    }
    assert results["stopped"].text == whole[: whole.index(stop)]
    assert (results["stopped"].finish_reason, results["stopped"].stop_reason) == (
        "stop",
        stop,
    )
    assert results["whole"].text == whole
    for name in ("stopped", "whole"):
        assert (
            "".join(event.text for event in events if event.request_id == name)
            == results[name].text
        )


def test_the_models_context_ends_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = engine()
    length = inputs(TEXT)["input_ids"].shape[1]
    monkeypatch.setattr(generator.adapter, "max_context", length + 3)
    generator.insert("fits", inputs(TEXT), SamplingParams(max_tokens=50))
    generator.insert("does_not", inputs(OTHER), SamplingParams(max_tokens=50))
    results = finish(generator)
    assert results["fits"].token_ids == right_tokens(TEXT, 3)
    assert results["fits"].finish_reason == "length"
    assert f"the model's context holds {length + 3}" in str(results["does_not"].error)


def test_usage_and_timings() -> None:
    generator = engine()
    generator.insert("a", inputs(IMAGE), SamplingParams(max_tokens=5))
    result = finish(generator)["a"]
    ids = inputs_of(FAMILY, IMAGE)["input_ids"]
    assert result.usage.prompt_tokens == ids.shape[1]
    assert result.usage.completion_tokens == 5
    assert 0 < result.usage.image_tokens < ids.shape[1]
    assert 0 < result.timings.ttft <= result.timings.total
    assert result.timings.encode > 0
    assert result.timings.prefill > 0


def test_what_is_encoded_ahead_of_its_place_is_not_prefilled_meanwhile() -> None:
    generator = engine(policy=settings_for(max_rows=1))
    generator.insert("first", inputs(TEXT), SamplingParams(max_tokens=8))
    generator.insert("next", inputs(IMAGE), SamplingParams(max_tokens=2))
    row, encoded, last = generator.rows.ledger["next"], 0.0, 0.0
    while row.stage in (Stage.PREPARED, Stage.ENCODED):
        last = time.perf_counter()
        generator.step()
        encoded = encoded or (row.prompt.encoded is not None and time.perf_counter())
    timings = finish(generator)["next"].timings
    assert 0 < encoded < last, "it was not encoded ahead"
    assert timings.queue + timings.encode >= last - row.clock.submitted
    assert timings.queue + timings.encode + timings.prefill == pytest.approx(
        timings.ttft, abs=1e-3
    )


@pytest.mark.parametrize("what", ["_encode_row", "prefill"])
@pytest.mark.parametrize("is_ending", [False, True])
def test_a_batcher_that_ends_waits_for_one_row_of_a_step(
    what: str, is_ending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for all pictures and prompts that the step has taken up."""
    generator = engine(policy=settings_for(max_rows=8))
    work = getattr(Runner, what)
    begun = []

    def noted(*arguments: Any) -> Any:
        begun.append(what)
        generator.is_ending = is_ending
        return work(*arguments)

    monkeypatch.setattr(Runner, what, noted)
    monkeypatch.setattr(Runner, "_encode_pictures", lambda *_: 0)
    monkeypatch.setattr(Runner, "group", lambda self, plan: plan)
    for name in "abcd":
        generator.insert(name, inputs(IMAGE), SamplingParams(max_tokens=2))
    generator.step()
    assert len(begun) == (1 if is_ending else 4)
    for name in "abcd":
        generator.cancel(name)
    assert {result.finish_reason for result in finish(generator).values()} == {
        "cancelled"
    }


# Priorities and processors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_mirrored", [False, True])
def test_numpy_arrays_are_kept_as_they_are_to_begin_again_from(
    is_mirrored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirrored view, which mlx does not take, is copied for it."""
    given = {name: np.array(array) for name, array in inputs(IMAGE).items()}
    if is_mirrored:
        given = {
            name: array[..., ::-1].copy()[..., ::-1] for name, array in given.items()
        }
    generator = engine()
    generator.insert("a", given, SamplingParams(max_tokens=NUM_TOKENS))
    kept = generator.rows.ledger["a"].given
    assert kept is not None and all(
        kept[name] is array for name, array in given.items()
    )
    decode, fails = generator.adapter.decode, [True]

    def once(step: Any, call: Any) -> mx.array:
        if fails and len(generator.rows.ledger["a"].answer.token_ids) == 2:
            fails.clear()
            raise RuntimeError("[malloc] Unable to allocate 123456789 bytes.")
        return decode(step, call)

    monkeypatch.setattr(generator.adapter, "decode", once)
    result = finish(generator)["a"]
    assert result.error is None and result.token_ids == right_tokens(IMAGE)
    assert not fails and generator.retry.num_recomputed == 1


def test_priority_goes_first_when_places_are_short() -> None:
    generator = engine(policy=settings_for(max_rows=1))
    order: list[str] = []
    for name, priority in (("low", 0), ("high", 5), ("middle", 3)):
        generator.insert(name, inputs(TEXT), SamplingParams(max_tokens=2), priority)
    while generator.has_work:
        order += [
            event.request_id for event in generator.step() if event.result is not None
        ]
    assert order == ["high", "middle", "low"]


def test_processors_see_prompt_and_answer_and_block_nobody() -> None:
    seen: list[list[int]] = []

    def watch(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())  # type: ignore[arg-type]
        return logits

    asks = [
        Ask(TEXT),
        Ask(OTHER),
        Ask(IMAGE, params=SamplingParams(logits_processors=[watch])),
        Ask("text:6:14", at=2),
    ]
    answers = run_family(FAMILY, asks)
    check(FAMILY, answers)
    prompt = inputs_of(FAMILY, IMAGE)["input_ids"][0].tolist()
    assert seen == [prompt + list(right_tokens(IMAGE)[:n]) for n in range(NUM_TOKENS)]


def test_a_forcing_processor_forces_its_own_row() -> None:
    def always_seven(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(logits.shape[-1]) == 7, 0.0, -mx.inf)[None]

    generator = engine()
    for name, params in (
        ("plain", SamplingParams(max_tokens=4)),
        ("seven", SamplingParams(max_tokens=4, logits_processors=[always_seven])),
    ):
        generator.insert(name, inputs(TEXT), params)
    results = finish(generator)
    assert results["seven"].token_ids == (7, 7, 7, 7)
    assert results["plain"].token_ids == right_tokens(TEXT, 4)


# Together ---------------------------------------------------------------------------------------------------------------

SAME = ("image:1:1", "image:2:1", "image:3:1")


def together_and_apart(
    monkeypatch: pytest.MonkeyPatch,
    prefill: int,
    fails: bool = False,
    name: str = FAMILY,
) -> list[int]:
    """Three prompts of one length through an engine; how many rows each shared prefill had."""
    adapter, shared = shared_adapter(name), []
    whole = adapter.prefill

    def watched(rows: Sequence[Any], *rest: Any) -> mx.array:
        if len(rows) > 1:
            shared.append(len(rows))
            if fails:
                raise RuntimeError("not together")
        return whole(rows, *rest)

    monkeypatch.setattr(adapter, "prefill", watched)
    check(
        name,
        run_family(
            name, [Ask(key) for key in SAME], config={"prefill_together": prefill}
        ),
    )
    return shared


def test_prompts_of_one_length_are_prefilled_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert together_and_apart(monkeypatch, prefill=8) == [3]


@pytest.mark.parametrize(
    "name", ["lfm2_vl", "aya_vision", "llama4", "falcon_h1", "qwen3_5", "step3p7"]
)
def test_prompts_of_one_length_share_windows_blocks_and_recurrent_states(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert together_and_apart(monkeypatch, prefill=8, name=name) == [3]


def test_prefilling_together_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert together_and_apart(monkeypatch, prefill=1) == []


@pytest.mark.fails_steps
def test_what_fails_together_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert together_and_apart(monkeypatch, prefill=8, fails=True) == [3]


@pytest.mark.parametrize("keeps", [False, True], ids=["nothing kept", "prefix cache"])
def test_pictures_are_encoded_in_one_call(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    seen, results = looked_at(monkeypatch, SAME, keeps)
    assert seen == [3]
    assert results == [right_tokens(key) for key in SAME]


def test_a_picture_that_comes_twice_is_not_encoded_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second row waits for what the first leaves; the third is not kept waiting by it."""
    keys = [SAME[0], SAME[0], SAME[1]]
    seen, results = looked_at(monkeypatch, keys, keeps=True)
    assert seen == []
    assert results == [right_tokens(key) for key in keys]


def test_as_many_pictures_are_encoded_in_one_call_as_have_room_there() -> None:
    sides = np.array(inputs(SAME[0])["image_grid_thw"])
    given = [inputs(key) for key in SAME]
    looked = shared_adapter(FAMILY).encode_together(
        given, Call(most_patches=2 * int(sides.prod()))
    )
    assert [new is old for new, old in zip(looked, given, strict=True)] == [
        False,
        False,
        True,
    ]


def test_as_many_pictures_share_a_call_as_the_encoder_has_memory_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is learned of the call is that of all who shared it."""
    seen: list[int] = []
    encode = shared_adapter(FAMILY).encode_together

    def counted(
        requests: Sequence[Mapping[str, Any]], call: Call
    ) -> list[Mapping[str, Any]]:
        seen.append(len(requests))
        return encode(requests, call)

    monkeypatch.setattr(shared_adapter(FAMILY), "encode_together", counted)
    generator = engine(policy=settings_for(encode_together=3, max_rows=3))
    size = num_bytes(inputs(SAME[0]))
    memory = generator.runner.encoding
    begin, begun = memory.begin, list[int]()

    def noted(nbytes: int, before: int | None = None) -> None:
        begun.append(nbytes)
        begin(nbytes, before)

    for row in (rows := [row_with_picture(key) for key in SAME]):
        generator.rows.add(row)
    monkeypatch.setattr(memory, "fits", lambda nbytes: nbytes <= 2 * size)
    monkeypatch.setattr(memory, "begin", noted)
    results = finish(generator)
    assert seen == [2]
    assert begun == [2 * size, size]
    assert [results[row.request_id].token_ids for row in rows] == [
        right_tokens(key) for key in SAME
    ]


def row_with_picture(key: str) -> Row:
    """A prepared row, whose picture has a known size."""
    row = new_row(
        key, Prompt(inputs=inputs(key)), SamplingParams(max_tokens=NUM_TOKENS)
    )
    row.media = MediaSizes(((8, 8),))
    return row


def looked_at(
    monkeypatch: pytest.MonkeyPatch, keys: Sequence[str], keeps: bool
) -> tuple[list[int], list[tuple[int, ...]]]:
    """How many requests' pictures went into each call, and the tokens of all."""
    adapter, seen = shared_adapter(FAMILY), []
    encode = adapter.encode_together

    def counted(
        requests: Sequence[Mapping[str, Any]], call: Call
    ) -> list[Mapping[str, Any]]:
        seen.append(len(requests))
        return encode(requests, call)

    monkeypatch.setattr(adapter, "encode_together", counted)
    reuse = Reuse(adapter, PrefixCache(ByteBudget(2**24))) if keeps else None
    generator = engine(policy=settings_for(encode_together=3), reuse=reuse)
    for number, key in enumerate(keys):
        generator.insert(
            str(number), inputs(key), SamplingParams(max_tokens=NUM_TOKENS)
        )
    results = finish(generator)
    return seen, [results[str(number)].token_ids for number in range(len(keys))]


@pytest.mark.parametrize("placement", Placement)
def test_after_the_last_row_all_places_are_filled_at_once(placement: Placement) -> None:
    """The last tokens are told in the step that launched them, and the next pictures are not rationed as beside rows."""
    generator = engine(
        policy=settings_for(
            placement, max_rows=3, encode_together=1, encode_seconds=0.0
        )
    )
    keys = ["text:1:5", "text:2:9", "text:3:7", *SAME]
    for key in keys:
        generator.insert(key, inputs(key), SamplingParams(max_tokens=3))
    results, steps = dict[str, Result](), 0
    while len(results) < 3:
        results |= {
            event.request_id: event.result
            for event in generator.step()
            if event.result is not None
        }
        steps += 1
    assert set(results) == set(keys[:3])
    assert {row.request_id for row in generator.rows.batch.rows} == set(keys[3:])
    assert steps == 3  # of three tokens, the last is read in the step that launched it
    results |= finish(generator)
    assert [results[key].token_ids for key in keys] == [
        right_tokens(key, 3) for key in keys
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_prompts_without_pictures_are_encoded_together_beside_rows(count: int) -> None:
    generator = engine(
        policy=settings_for(
            Placement.SLAB, max_rows=4, encode_together=4, beside_decode=1
        )
    )
    generator.insert("first", inputs(TEXT), SamplingParams(max_tokens=9))
    generator.step()
    keys = ["text:1:5", "text:2:9", "text:3:7"][:count]
    for key in keys:
        generator.insert(key, inputs(key), SamplingParams(max_tokens=2))
    generator.step()
    assert {row.request_id for row in generator.rows.batch.rows} == {"first", *keys}


def test_of_parts_launched_in_one_call_the_wrong_one_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call for all that raises is followed by a call for each."""
    keys, wrong, calls = ["text:1:5", "text:2:9", "text:3:7"], list[Any](), list[int]()
    generator = engine(
        policy=settings_for(Placement.SLAB, max_rows=3, encode_together=3)
    )
    launch, encode = mx.async_eval, generator.runner._encode_row

    def encodes(row: Row) -> Any:
        made = encode(row)
        if row.request_id == keys[1]:
            wrong.extend(made[1])
        return made

    def launches(*arrays: Any) -> None:
        flat = list(arrays_of(arrays))
        calls.append(len(flat))
        if any(array is one for array in flat for one in wrong):
            raise RuntimeError("no such array")
        launch(*arrays)

    monkeypatch.setattr(generator.runner, "_encode_row", encodes)
    monkeypatch.setattr(mx, "async_eval", launches)
    for key in keys:
        generator.insert(key, inputs(key), SamplingParams(max_tokens=3))
    results = finish(generator)
    assert calls[0] == 3
    assert [results[key].ok for key in keys] == [True, False, True]
    assert "no such array" in str(results[keys[1]].error)
    assert [results[key].token_ids for key in keys[::2]] == [
        right_tokens(key, 3) for key in keys[::2]
    ]


def test_a_prompt_without_pictures_takes_none_along_that_need_calls_of_their_own() -> (
    None
):
    """Of a family whose pictures share no call, one is encoded beside decoding rows, whatever follows it."""
    name = "nemotron_h_nano_omni"
    generator = BatchGenerator(
        shared_adapter(name),
        policy=settings_for(encode_together=16, encode_seconds=0.0),
    )

    def insert(key: str, count: int) -> None:
        generator.insert(
            key,
            as_mlx(inputs_of(name, key)),
            SamplingParams(max_tokens=count, ignore_eos=True),
        )

    insert("text:4:9", 9)
    generator.step()
    keys = ["image:0:1", "image:1:1", "image:2:1", "text:7:9"]
    for key in keys:
        insert(key, 2)
    generator.step()
    rows = [generator.rows.ledger[key] for key in keys]
    begun = [row.stage is not Stage.PREPARED for row in rows]
    assert begun == [True, False, False, False]


def test_a_prompt_cache_outlives_a_launch_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = engine()
    generator.insert(
        "first",
        inputs(TEXT),
        SamplingParams(max_tokens=4, ignore_eos=True),
        return_cache=True,
    )
    first = finish(generator)["first"]
    ids = mx.concatenate(
        [inputs(TEXT)["input_ids"], mx.array([[*first.token_ids, 5, 6, 7]])], axis=1
    )
    launch = mx.async_eval

    def fails(*arrays: Any) -> None:
        raise RuntimeError("no launch")

    generator.insert(
        "second", {"input_ids": ids}, SamplingParams(max_tokens=2), cache=first.cache
    )
    monkeypatch.setattr(mx, "async_eval", fails)
    events = generator.step()
    monkeypatch.setattr(mx, "async_eval", launch)
    assert [
        event.result is not None and event.result.finish_reason for event in events
    ] == ["error"]
    generator.insert(
        "third", {"input_ids": ids}, SamplingParams(max_tokens=2), cache=first.cache
    )
    third = finish(generator)["third"]
    assert third.ok
    assert third.usage.cached_tokens > 0


class LateForm:
    """A form that allows every token; each second mask misses a step."""

    rules = True
    ahead: tuple[int, ...] = ()
    is_whole = is_over = False
    most_ahead = 0
    untold = parsed = None

    def __init__(self) -> None:
        self.fed = self.asked = 0

    def feed(self, token: int) -> None:
        self.fed, self.asked = self.fed + 1, 0

    def is_ready(self, seconds: float = 0) -> bool:
        self.asked += 1
        return self.fed % 2 == 0 or self.asked > 1

    def finish(self) -> None: ...

    def allowed(self, size: int) -> np.ndarray:
        return np.ones(size, dtype=np.bool_)


def test_a_row_with_a_late_mask_is_no_idle_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for its next token, and no step without a forward is timed as one."""
    monkeypatch.setattr(
        "vlm_batch.engine.choosing.apply_masks", lambda logits, masks: logits
    )
    generator, said, timed = engine(), list[bool](), list[int]()
    budget, record = generator._pace.budget, generator.capacity.record

    def noted(is_decoding: bool, *args: Any) -> int:
        said.append(is_decoding)
        return budget(is_decoding, *args)

    def recorded(rows: int, *args: Any, **how: Any) -> None:
        timed.append(rows)
        record(rows, *args, **how)

    generator.insert(
        "form", inputs(TEXT), SamplingParams(max_tokens=9, ignore_eos=True)
    )
    generator.step()
    form: Any = LateForm()
    generator.rows.ledger["form"].answer.guide = form
    monkeypatch.setattr(generator._pace, "budget", noted)
    monkeypatch.setattr(generator.capacity, "record", recorded)
    for _ in range(9):
        generator.step()
    assert generator.has_work
    assert form.fed > 2
    assert all(said)
    assert set(timed) == {1}
