"""Log-probabilities of options behind one prompt: against transformers, mlx-vlm, the prompt's own, in company, to the bit."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from mlx_vlm.utils import load as load_with_mlx_vlm

from tests.harness import TOLERANCE, inputs_of, settings_for, shared_adapter
from tests.test_several import KINDS
from tests.test_zoo import NO_REFERENCE, REFERENCES
from tests.zoo import Inputs, recorded_requests
from tests.zoo import family as tiny_family
from vlm_batch import (
    InvalidParameters,
    InvalidRequest,
    OptionScore,
    Request,
    RequestFailed,
    Result,
    SamplingParams,
    Template,
    VLMBatcher,
)
from vlm_batch.arrays import as_mlx
from vlm_batch.assets import default_checkpoint, sample_images
from vlm_batch.caches import Placement
from vlm_batch.engine import options as options_of_engine
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.logprobs import POSITIONS_TOGETHER
from vlm_batch.engine.options import Scoring, give_options, params_to_score
from vlm_batch.engine.paths import Options, paths_of
from vlm_batch.engine.row import Prompt, Row, new_row
from vlm_batch.engine.shapes import FixedShapes
from vlm_batch.errors import OutOfMemory
from vlm_batch.inputs.processing import Processing
from vlm_batch.records import OptionTokens
from vlm_batch.types import Event, Option

CIRCLE, PROMPT = str(sample_images()[3]), "describe the image"
RECORDED = [name for name in KINDS if name not in NO_REFERENCE]
OPTIONS = ("a red circle", "a blue square", "a", " red", "two")
PLAIN = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def batcher() -> Iterator[VLMBatcher]:
    with VLMBatcher(default_checkpoint(), max_rows=3) as made:
        yield made


# Every kind of state, against transformers and mlx-vlm
# ---------------------------------------------------------------------------------------------------------------------


def scored(
    name: str,
    asked: Mapping[str, tuple[Inputs, Sequence[tuple[int, ...]]]],
    placement: Placement,
    most: int = 3,
) -> dict[str, Result]:
    """Score options of several prompts at once, beside a row that answers."""
    engine = BatchGenerator(
        shared_adapter(name), policy=settings_for(placement, max_rows=most)
    )
    engine.insert("plain", as_mlx(inputs_of(name, "image:2:1")), PLAIN)
    several: dict[str, Scoring] = {}
    for key, (inputs, options) in asked.items():
        params = params_to_score(Request(token_ids=[1], options=options))
        row = new_row(key, Prompt(inputs=as_mlx(inputs)), params, given=inputs)
        give_options(row, [OptionTokens(option, option) for option in options])
        scoring = request_of(row)
        several |= dict.fromkeys(scoring.row_ids, scoring)
        engine.rows.add(row)
    found: dict[str, Result] = {}
    for event in drained(engine):
        told: Event | None = event
        if event.request_id in several:
            told = several[event.request_id].take(event)
        if told is not None and told.result is not None:
            found[told.request_id] = told.result
    assert found["plain"].token_ids == plain_alone(name, placement)
    return found


@cache
def plain_alone(name: str, placement: Placement) -> tuple[int, ...]:
    """What the row that answers says where nobody is scored."""
    engine = BatchGenerator(shared_adapter(name), policy=settings_for(placement))
    engine.insert("plain", as_mlx(inputs_of(name, "image:2:1")), PLAIN)
    results = [event.result for event in drained(engine)]
    return next(filter(None, results)).token_ids


def drained(engine: BatchGenerator) -> Iterator[Event]:
    while engine.has_work:
        yield from engine.step()


@pytest.mark.parametrize(
    "placement", list(Placement), ids=lambda placement: placement.name.lower()
)
@pytest.mark.parametrize("room", [POSITIONS_TOGETHER, 9])
@pytest.mark.parametrize("name", RECORDED)
def test_they_are_what_transformers_recorded(
    name: str, room: int, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own answer as an option, that answer's beginning, and tokens that it would not choose. With room for nine
    positions a path takes several forwards."""
    monkeypatch.setattr("vlm_batch.engine.runner.POSITIONS_TOGETHER", room)
    tiny = tiny_family(name)
    asked: dict[str, tuple[Inputs, list[tuple[int, ...]]]] = {}
    truth: dict[str, tuple[list[int], np.ndarray]] = {}
    with np.load(REFERENCES / f"{name}.npz") as recorded:
        for key, inputs in recorded_requests(tiny).items():
            if key not in ("text", "image_1"):
                continue
            tokens = recorded[f"{key}/tokens"].tolist()
            truth[key] = tokens, recorded[f"{key}/logprobs"]
            options = [tuple(tokens), tuple(tokens[:3]), (5,), (77,), tuple(tokens[:1])]
            asked[key] = inputs, options
    found = scored(name, asked, placement)
    for key, (tokens, logprobs) in truth.items():
        for score in found[key].options:
            assert score.error is None
            steps = range(len(score.token_ids))
            right = [float(logprobs[step][score.token_ids[step]]) for step in steps]
            np.testing.assert_allclose(score.token_logprobs, right, atol=TOLERANCE)
            assert score.logprob == pytest.approx(sum(right), abs=8 * TOLERANCE)
            is_said = score.token_ids == tuple(tokens[: len(score.token_ids)])
            assert score.is_greedy is is_said


@pytest.mark.parametrize("name", ["qwen2_vl", "falcon_h1", "gemma3n"])
def test_a_token_that_nobody_would_choose_is_followed(name: str) -> None:
    """mlx-vlm's own model, alone, over prompt and option."""
    tiny = tiny_family(name)
    inputs = inputs_of(name, "text:5:26")
    option = (9, 101, 44)
    model = tiny.build()
    right = []
    ids = inputs["input_ids"]
    for token in option:
        trace = tiny.greedy(model, {**inputs, "input_ids": ids}, 1)
        right.append(float(trace.logprobs[0][token]))
        ids = np.concatenate([ids, [[token]]], axis=1)
    found = scored(name, {"a": (inputs, [option, option[:2]])}, Placement.SLAB)
    first, second = found["a"].options
    np.testing.assert_allclose(first.token_logprobs, right, atol=TOLERANCE)
    np.testing.assert_allclose(second.token_logprobs, right[:2], atol=TOLERANCE)
    assert not first.is_greedy


def test_options_of_one_token_make_a_slab_no_larger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They take no place, so rows that join with them ask for none."""
    wanted: list[int] = []
    resize = DecodeBatch._resize

    def noted(self: DecodeBatch, places: int) -> None:
        wanted.append(places)
        resize(self, places)

    monkeypatch.setattr(DecodeBatch, "_resize", noted)
    options = [(5, 9), *((token,) for token in range(20, 28)), (5, 10)]
    asked = {f"{at}": (inputs_of("qwen2_vl", f"text:{at}:9"), options) for at in (1, 2)}
    found = scored("qwen2_vl", asked, Placement.SLAB, most=16)
    assert all(score.error is None for key in asked for score in found[key].options)
    assert max(wanted) == 3


def test_nobody_waits_for_their_next_token() -> None:
    """So prompts beside them come in chunks as large as if nobody decoded."""
    engine = BatchGenerator(
        shared_adapter("qwen2_vl"), policy=settings_for(Placement.SLAB, max_rows=2)
    )
    row, _ = asking("qwen2_vl", [(5,) * 3 * POSITIONS_TOGETHER])
    engine.rows.add(row)
    while not row.has_ended and row not in engine.rows.batch.rows:
        engine.step()
    assert engine.rows.is_decoding
    assert not engine.rows.is_heard
    engine.insert("plain", as_mlx(inputs_of("qwen2_vl", "text:2:9")), PLAIN)
    while not row.has_ended and len(engine.rows.batch) < 2:
        engine.step()
    assert not row.has_ended
    assert engine.rows.is_heard


def test_a_prompt_whose_paths_cannot_begin_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its request ends once, and its client asks for nothing more."""

    def broken(*given: Any) -> None:
        raise ValueError("no copy")

    monkeypatch.setattr(options_of_engine, "fork", broken)
    engine = BatchGenerator(
        shared_adapter("qwen2_vl"), policy=settings_for(Placement.SLAB, max_rows=2)
    )
    row, scoring = asking("qwen2_vl", [(5, 9), (7, 9)])
    engine.rows.add(row)
    told = [scoring.take(event) for event in drained(engine)]
    (end,) = told
    assert end is not None and end.result is not None
    assert end.result.error == "ValueError: no copy"
    assert not engine.rows.ledger.asked


def forwards_of(engine: BatchGenerator, row: Row, scoring: Scoring) -> int:
    """Forwards in which decoding rows take part until every option is scored."""
    engine.rows.add(row)
    forwards, scored = 0, None
    while engine.has_work:
        forwards += len(engine.rows.batch.groups)
        for event in engine.step():
            scored = scoring.take(event)
    assert scored is not None and scored.result is not None
    assert all(one.error is None for one in scored.result.options)
    return forwards


def test_fixed_shapes_have_room_for_some_of_a_path() -> None:
    """Paths take what a forward of so many positions leaves each row, not one token because all do not fit."""
    shapes = FixedShapes(counts=(1, 2, 4, 8))
    engine = BatchGenerator(shared_adapter("qwen2_vl"), shapes=shapes)
    row, scoring = asking("qwen2_vl", [(token,) * 13 for token in (5, 7, 9, 11)])
    forwards = forwards_of(engine, row, scoring)
    # of 48 tokens two of each row at a time
    assert forwards <= 8


@pytest.mark.parametrize("num_options", [1, 3])
def test_fixed_slabs_take_more_than_a_token_of_a_path(num_options: int) -> None:
    """Where a number of positions is not proven, they take the next larger one, and the next smaller one of their room."""
    shapes = FixedShapes(counts=(1, 2, 4, 8, 16), layout=Placement.SLAB)
    policy = settings_for(Placement.SLAB, max_rows=4)
    engine = BatchGenerator(shared_adapter("qwen2_vl"), shapes=shapes, policy=policy)
    options = [(token,) * 14 for token in range(5, 5 + num_options)]
    row, scoring = asking("qwen2_vl", options)
    forwards = forwards_of(engine, row, scoring)
    # one row has 16 positions in a forward, and three have four each: the last 13 tokens in one forward or four
    assert forwards <= (2 if num_options == 1 else 5)


def test_columns_that_end_leave_a_path_what_they_have() -> None:
    """Up to their last column a forward takes several positions, and one by one only beyond."""
    shapes = FixedShapes(counts=(1, 2, 4, 8), layout=Placement.SLAB)
    placement = Placement.SLAB
    assert shapes.room(1, 1, placement, 200) == 8
    assert shapes.room(1, 1, placement, 253) == 4
    assert shapes.room(1, 1, placement, 256) == 1
    assert shapes.room(3, 4, placement, 200) == 2


def test_options_keep_to_max_bytes() -> None:
    """What they will say counts once their prompts are encoded: paths of many tokens do not begin beside each other."""
    adapter = shared_adapter("qwen2_vl")
    free = BatchGenerator(adapter, policy=settings_for(Placement.SLAB, max_rows=4))
    bytes_of_two = at_most(free, 2)
    policy = settings_for(Placement.SLAB, max_rows=4, max_bytes=bytes_of_two - 1)
    assert at_most(BatchGenerator(adapter, policy=policy), 2) < bytes_of_two


def at_most(engine: BatchGenerator, count: int) -> int:
    """The most bytes that rows of so many requests with a long option each take at a time."""
    engine.memory.probe(engine.trial)
    requests: dict[str, Scoring] = {}
    for index in range(count):
        row, scoring = asking("qwen2_vl", [(5 + index,) * 400])
        row.request_id = str(index)
        requests[row.request_id] = Scoring(row.request_id, scoring._options)
        engine.rows.add(row)
    most = 0
    while engine.has_work:
        for event in engine.step():
            told = requests[event.request_id].take(event)
            assert told is not None and told.result is not None
            assert [one.error for one in told.result.options] == [None]
        most = max(most, engine.rows.batch.nbytes)
    return most


def test_an_option_beyond_max_bytes_fails_alone() -> None:
    policy = settings_for(Placement.SLAB, max_rows=4, max_bytes=2_000_000)
    engine = BatchGenerator(shared_adapter("qwen2_vl"), policy=policy)
    engine.memory.probe(engine.trial)
    row, scoring = asking("qwen2_vl", [(5,) * 40_000, (5, 9), (7,)])
    engine.rows.add(row)
    told = [scoring.take(event) for event in drained(engine)][-1]
    assert told is not None and told.result is not None
    long, *others = told.result.options
    assert long.error is not None
    assert "with this option 40,009 tokens" in long.error
    assert [one.error for one in others] == [None, None]


def test_paths_beside_a_row_that_streams_keep_to_the_gap() -> None:
    """Its next tokens wait for as many positions of theirs as for tokens of prompts."""
    policy = settings_for(Placement.SLAB, max_rows=2, smallest_chunk=64)
    engine = BatchGenerator(shared_adapter("qwen2_vl"), policy=policy)
    engine.insert("plain", as_mlx(inputs_of("qwen2_vl", "text:2:9")), PLAIN)
    while not engine.rows.is_heard:
        engine.step()
    # a gap of 0.1 s has room for 16 of them
    engine._pace._decode_seconds = 0.02
    engine._pace._prompt_seconds, engine._pace._prompt_tokens = 1.0, 200.0
    engine._pace.record = lambda *given: None  # type: ignore[method-assign]
    row, _ = asking("qwen2_vl", [(5,) * 60, (7,) * 60])
    engine.rows.add(row)
    beside: list[int] = []
    while engine.has_work:
        was_heard = engine.rows.is_heard
        engine.step()
        for group in engine.rows.batch.groups:
            if was_heard and len(group) > 1:
                beside.append(group.num_positions)
    assert beside
    assert max(beside) <= 3 + 16


def asking(name: str, options: Sequence[tuple[int, ...]]) -> tuple[Row, Scoring]:
    """A row that scores options behind a text, and its request."""
    inputs = inputs_of(name, "text:1:9")
    params = params_to_score(Request(token_ids=[1], options=options))
    row = new_row("asked", Prompt(inputs=as_mlx(inputs)), params, given=inputs)
    give_options(row, [OptionTokens(option, option) for option in options])
    return row, request_of(row)


def request_of(row: Row) -> Scoring:
    assert row.answer.path is not None
    return Scoring(row.request_id, row.answer.path.request)


def test_options_share_paths() -> None:
    """Each option lies on one path, but for its last token, and no path is a part of another."""
    random = np.random.default_rng(7)
    for _ in range(300):
        options: dict[int, tuple[int, ...]] = {}
        for place in range(random.integers(1, 9)):
            length = random.integers(1, 5)
            options[place] = tuple(random.integers(0, 3, length).tolist())
        paths = paths_of(Options(), options)
        found: dict[int, tuple[int, ...]] = {}
        for path in paths:
            for place, option in path.options.items():
                assert place not in found
                assert option[:-1] == path.tokens[: len(option) - 1]
                steps = range(len(option))
                assert all(option[at] in path.asked(at) for at in steps)
            found |= path.options
        assert found == options
        begun = {
            path.tokens[:length] for path in paths for length in range(len(path.tokens))
        }
        assert begun.isdisjoint({path.tokens for path in paths})
        assert len({path.tokens for path in paths}) == len(paths)


# Through the public class
# ---------------------------------------------------------------------------------------------------------------------


def told(result: Result, last: int) -> list[float]:
    """The prompt's own log-probabilities of its last tokens."""
    assert result.prompt_logprobs is not None
    found = [one.logprob for one in result.prompt_logprobs[-last:] if one is not None]
    assert len(found) == last
    return found


def by_hand(batcher: VLMBatcher, option: str, **asked: Any) -> list[float]:
    """The option as a part of the prompt, whose log-probabilities are summed by hand."""
    request = Request(prompt=PROMPT, images=CIRCLE)
    prompt = batcher.rendered(request)
    assert prompt is not None
    params = {"prompt_logprobs": 0, "max_tokens": 0}
    whole = Request(prompt=prompt + option, images=CIRCLE, template=None, params=params)  # type: ignore[arg-type]
    before = Request(prompt=prompt, images=CIRCLE, template=None)
    count = batcher.count_tokens(whole) - batcher.count_tokens(before)
    return told(batcher.submit_request(whole).result(timeout=60), count)


def test_they_are_the_prompt_logprobs_of_prompt_and_option(batcher: VLMBatcher) -> None:
    request = Request(prompt=PROMPT, images=CIRCLE)
    scores = batcher.score(request, OPTIONS)
    assert [score.option for score in scores] == list(OPTIONS)
    for option, score in zip(OPTIONS, scores, strict=True):
        right = by_hand(batcher, option)
        np.testing.assert_allclose(score.token_logprobs, right, atol=TOLERANCE)
        assert score.logprob == pytest.approx(sum(right), abs=5 * TOLERANCE)
        assert score.per_token == pytest.approx(score.logprob / len(right))
        assert score.per_byte == pytest.approx(score.logprob / len(option.encode()))
    assert scores[0].is_greedy
    assert scores[0].logprob > scores[1].logprob
    by_ids = batcher.score(request, [score.token_ids for score in scores])
    assert [one.logprob for one in by_ids] == [one.logprob for one in scores]
    assert [one.num_bytes for one in by_ids] == [len(option) for option in OPTIONS]


def test_the_prompt_is_computed_once(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = batcher._loop.generator.adapter
    calls: list[str] = []

    def counted(name: str) -> Any:
        call = getattr(adapter, name)

        def made(*given: Any) -> Any:
            calls.append(name)
            return call(*given)

        return made

    for name in ("encode", "prefill", "decode"):
        monkeypatch.setattr(adapter, name, counted(name))
    batcher.score({"prompt": "count to 6", "images": CIRCLE}, ["a", "1", "c", "2"])
    # an option of one token needs no forward of its own
    assert calls == ["encode", "prefill"]
    # neither does one that differs from another in its last token, or begins it; and a forward takes a path as a whole
    calls.clear()
    ids = batcher.processing.ids_of("a red circle")
    assert len(ids) > 2
    asked = {"prompt": "count to 7", "images": CIRCLE}
    batcher.score(asked, ["a", "a red", "a red circle", "a red square"])
    assert calls == ["encode", "prefill", "decode"]


def test_a_bad_option_fails_alone(batcher: VLMBatcher) -> None:
    most = batcher.max_context
    assert most is not None
    options: list[Option] = [
        "",
        "a red circle",
        "a" * 4 * most,
        [10**6],
        "<|image_pad|>",
        "x",
    ]
    scores = batcher.score({"prompt": PROMPT, "images": CIRCLE}, options)
    errors = [score.error or "" for score in scores]
    assert [bool(error) for error in errors] == [True, False, True, True, True, False]
    assert errors[0] == "InvalidOption: the option is empty"
    assert "room for" in errors[2]
    assert "token 1000000" in errors[3]
    assert "picture's or video's place" in errors[4]
    alone = batcher.score({"prompt": PROMPT, "images": CIRCLE}, ["a red circle"])
    assert scores[1].logprob == pytest.approx(alone[0].logprob, abs=TOLERANCE)
    assert scores[0].logprob == -math.inf
    with pytest.raises(RequestFailed, match="option is empty"):
        batcher.score(PROMPT, ["", ""])
    with pytest.raises(RequestFailed, match=r"gone\.png"):
        batcher.score({"prompt": PROMPT, "images": "gone.png"}, ["a", "b"])
    assert batcher.stats().decoding == 0


def test_what_is_refused_at_once(batcher: VLMBatcher) -> None:
    for wrong in ("yes", [1.5], [None], [["a"]], 3, ["a"] * 129):
        with pytest.raises(InvalidRequest, match="options"):
            Request(prompt=PROMPT, options=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameters, match="scored, not sampled"):
        Request(prompt=PROMPT, options=["a"], params=SamplingParams(temperature=1))
    with pytest.raises(InvalidRequest, match="return_cache"):
        Request(prompt=PROMPT, options=["a"], return_cache=True)
    with pytest.raises(InvalidRequest, match="options is empty"):
        batcher.score(PROMPT, [])


def test_an_option_that_would_change_the_prompts_last_token(
    batcher: VLMBatcher,
) -> None:
    """The rule of evaluation harnesses needs the space with the option; the option alone would be other tokens."""
    with_space = Request(prompt="count to ", template=None)
    score = batcher.submit_request(
        Request(prompt="count to ", template=None, options=["3", "nine"])
    ).result(timeout=60)
    ids = batcher.processing.ids_of
    for option, one in zip(("3", "nine"), score.options, strict=True):
        whole = ids(f"{with_space.prompt}{option}")
        if whole[: len(ids("count to "))] == ids("count to "):
            assert one.token_ids == whole[len(ids("count to ")) :]
        else:
            assert "begin with it" in (one.error or "")
    assert [bool(one.error) for one in score.options] == [False, True]
    right = batcher.score(Request(prompt="count to", template=None), [" nine"])
    assert right[0].token_ids == ids("count to nine")[len(ids("count to")) :]


def test_an_option_may_say_its_end(batcher: VLMBatcher) -> None:
    """What begins another option scores no less than that, but by its end."""
    ends = batcher.processing.eos_token_ids
    end = batcher.processing.decode_all(ends[:1])
    asked = Request(images=CIRCLE, prompt=PROMPT)
    plain = batcher.score(asked, ["a red", "a red circle"])
    assert plain[0].logprob >= plain[1].logprob
    ended = batcher.score(asked, [f"a red{end}", f"a red circle{end}"])
    assert ended[0].logprob < ended[1].logprob
    for one, other in zip(plain, ended, strict=True):
        assert other.token_ids == (*one.token_ids, ends[0])


def test_tokens_in_context_are_those_of_the_tokenizer() -> None:
    """transformers' own tokenizer of the checkpoint, over rendered prompt and option."""
    processor = load_with_mlx_vlm(str(default_checkpoint()), lazy=True)[1]
    encode = processor.tokenizer.encode
    with VLMBatcher(default_checkpoint(), caches=None) as batcher:
        prompt = batcher.rendered(Request(prompt=PROMPT))
        for score in batcher.score(PROMPT, [*OPTIONS, "\n", "Ünïcode"]):
            whole = encode(f"{prompt}{score.option}", add_special_tokens=False)
            before = encode(prompt, add_special_tokens=False)
            assert list(score.token_ids) == whole[len(before) :]


def test_many_questions_share_a_batch_and_nobody_changes(batcher: VLMBatcher) -> None:
    asked = [
        Request(prompt=PROMPT, images=str(picture), options=OPTIONS[:count])
        for picture in sample_images()[2:6]
        for count in (1, 3, 5)
    ]
    plain = Request(prompt="count to 9")
    together = batcher.generate([plain, *asked, plain], raise_on_error=True)
    assert together[0].text == together[-1].text == "1 2 3 4 5 6 7 8 9"
    for request, result in zip(asked, together[1:-1], strict=True):
        alone = batcher.score(request, request.options)
        assert (result.text, result.token_ids) == ("", ())
        assert result.usage.completion_tokens == 0
        for one, other in zip(result.options, alone, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprob == pytest.approx(other.logprob, abs=5 * TOLERANCE)

    async def several() -> list[Result]:
        return await asyncio.gather(*map(batcher.submit_request, asked))

    for awaited, result in zip(asyncio.run(several()), together[1:-1], strict=True):
        assert [score.token_ids for score in awaited.options] == [
            score.token_ids for score in result.options
        ]


def bits(scores: Sequence[OptionScore]) -> list[tuple[float, ...]]:
    return [score.token_logprobs for score in scores]


def test_reproducible_ones_are_the_same_bits() -> None:
    """Alone and in company, and those of an answer that says the option."""
    with VLMBatcher(default_checkpoint(), reproducible=True, max_rows=4) as batcher:
        request = Request(prompt=PROMPT, images=CIRCLE)
        alone = batcher.score(request, OPTIONS)
        asked = [
            Request(prompt=PROMPT, images=str(picture), options=OPTIONS)
            for picture in sample_images()[2:6]
        ]
        busy = [batcher.submit(prompt="count to 9") for _ in range(3)]
        together = batcher.generate(asked)
        assert all(handle.result(timeout=60).ok for handle in busy)
        assert bits(together[1].options) == bits(alone)
        for option, score in zip(OPTIONS, alone, strict=True):
            assert bits(batcher.score(request, [option])) == bits([score])
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("vlm_batch.engine.runner.POSITIONS_TOGETHER", 1)
            assert bits(batcher.score(request, OPTIONS)) == bits(alone)
        answer = batcher.submit(CIRCLE, PROMPT, params={"logprobs": 0}).result(60)
        said = batcher.score(request, [answer.token_ids])[0]
        assert said.is_greedy
        assert answer.logprobs is not None
        assert said.token_logprobs == tuple(one.logprob for one in answer.logprobs)


def test_the_prompts_own_come_along(batcher: VLMBatcher) -> None:
    params = {"prompt_logprobs": 0, "max_tokens": 0}
    read = batcher.submit(CIRCLE, PROMPT, params=params).result(timeout=60)
    asked = Request(
        images=CIRCLE,
        prompt=PROMPT,
        options=OPTIONS,
        params=SamplingParams(prompt_logprobs=0),
    )
    result = batcher.submit_request(asked).result(timeout=60)
    assert len(result.options) == len(OPTIONS)
    np.testing.assert_allclose(told(result, 5), told(read, 5), atol=TOLERANCE)


def test_of_token_ids_and_of_continued_answers(batcher: VLMBatcher) -> None:
    chat = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": "a red"},
    ]
    asked = Request(
        messages=chat, images=CIRCLE, template=Template(continue_final_message=True)
    )
    continued = batcher.score(asked, [" circle", " square"])
    whole = batcher.score(Request(prompt=PROMPT, images=CIRCLE), ["a red circle"])[0]
    assert continued[0].logprob > continued[1].logprob
    assert continued[0].token_ids == whole.token_ids[-1:]
    assert continued[0].logprob == pytest.approx(
        whole.token_logprobs[-1], abs=TOLERANCE
    )
    text = batcher.rendered(Request(prompt="count to 3"))
    assert text is not None
    ids = batcher.processing.ids_of(text)
    of_ids = batcher.score(Request(token_ids=ids), ["1 2 3", "2"])
    of_text = batcher.score("count to 3", ["1 2 3", "2"])
    assert [one.token_ids for one in of_ids] == [one.token_ids for one in of_text]


def test_a_text_that_ends_otherwise_needs_token_ids(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processing, "decode_all", lambda self, ids: "elsewhere")
    ids = batcher.processing.ids_of("count to 3")
    result = batcher.submit_request(Request(token_ids=ids, options=["1", [16]])).result(
        timeout=60
    )
    assert "lists of token ids" in (result.options[0].error or "")
    assert result.options[1].error is None


def test_cancelling_ends_all(batcher: VLMBatcher) -> None:
    handle = batcher.submit_request(
        Request(images=CIRCLE, prompt=PROMPT, options=["a red circle" * 30, "b"])
    )
    assert handle.cancel()
    assert handle.result(timeout=60).finish_reason == "cancelled"
    assert batcher.score("count to 3", ["1 2 3"])[0].is_greedy


def test_a_want_of_memory_is_made_up_for(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode step of the options fails once: they begin again, and say the same."""
    right = batcher.score({"prompt": PROMPT, "images": CIRCLE}, OPTIONS)
    decoder = batcher._loop.generator._decoder
    failed: list[bool] = []
    logits = decoder.logits

    def once(*given: Any) -> Any:
        if not failed:
            failed.append(True)
            raise OutOfMemory("[malloc] unable to allocate")
        return logits(*given)

    monkeypatch.setattr(decoder, "logits", once)
    found = batcher.score({"prompt": PROMPT, "images": CIRCLE}, OPTIONS)
    assert failed
    assert [one.error for one in found] == [None] * len(OPTIONS)
    for one, other in zip(found, right, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=5 * TOLERANCE)
