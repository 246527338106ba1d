"""Log-probabilities of a prompt's own tokens: of every family, in company, and whatever earlier requests have left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.harness import (
    TOLERANCE,
    every_family,
    inputs_of,
    settings_for,
    shared_adapter,
)
from tests.zoo import family as tiny_family
from vlm_batch import (
    InvalidRequest,
    PromptTooLong,
    Request,
    Result,
    SamplingParams,
    VLMBatcher,
)
from vlm_batch.adapters.base import Adapter
from vlm_batch.arrays import as_mlx
from vlm_batch.assets import default_checkpoint, sample_images
from vlm_batch.engine import logprobs
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.row import Stage
from vlm_batch.errors import InvalidParameters

TEXT, PICTURE = "text:5:26", "image:1:0"
ASKED = SamplingParams(prompt_logprobs=3, max_tokens=2, ignore_eos=True)
#: Families whose prompts are seen as wholes, or have more positions than tokens.
REFUSED = {"florence2", "paligemma", "paligemma2"}


def answers(
    name: str, asked: Mapping[str, SamplingParams], **settings: Any
) -> dict[str, Result]:
    """Results of requests that arrive together, by their keys."""
    engine = BatchGenerator(
        shared_adapter(name), policy=settings_for(max_rows=4, **settings)
    )
    for key, params in asked.items():
        engine.insert(key, as_mlx(inputs_of(name, key)), params)
    found: dict[str, Result] = {}
    while engine.has_work:
        for event in engine.step():
            if event.result is not None:
                found[event.request_id] = event.result
    return found


def values(result: Result) -> list[float | None]:
    assert result.error is None, result.error
    assert result.prompt_logprobs is not None
    return [None if one is None else one.logprob for one in result.prompt_logprobs]


def apart(one: list[float | None], other: list[float | None]) -> float:
    assert [value is None for value in one] == [value is None for value in other]
    return max(
        (
            abs(a - b)
            for a, b in zip(one, other, strict=True)
            if a is not None and b is not None
        ),
        default=0.0,
    )


@pytest.mark.parametrize("name", every_family())
def test_they_are_what_the_model_says_of_each_beginning(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the oracle's first token after some beginnings of the prompt, and against a forward for each token."""
    plain = SamplingParams(max_tokens=2, ignore_eos=True)
    found = answers(
        name,
        {TEXT: ASKED, PICTURE: ASKED, "image:2:1": plain, "text:4:9": plain},
        prefill_budget=8,
    )
    if name in REFUSED:
        assert "prompt_logprobs" in (found[PICTURE].error or "")
        return
    text, picture = values(found[TEXT]), values(found[PICTURE])
    assert found["text:4:9"].prompt_logprobs is None
    ids = np.array(inputs_of(name, TEXT)["input_ids"])
    assert [value is None for value in text] == [at == 0 for at in range(ids.shape[1])]
    tiny = tiny_family(name)
    model = tiny.build()
    for length in (2, 17):
        trace = tiny.greedy(
            model, {**inputs_of(name, TEXT), "input_ids": ids[:, :length]}, 1
        )
        told = found[TEXT].prompt_logprobs
        assert told is not None
        entry = told[length]
        assert entry is not None
        assert abs(entry.logprob - trace.logprobs[0][ids[0, length]]) <= TOLERANCE
        assert abs(entry.top[0][1] - trace.logprobs[0].max()) <= TOLERANCE
        assert [value for _, value in entry.top] == sorted(
            (value for _, value in entry.top), reverse=True
        )

    monkeypatch.setattr(Adapter, "scores_chunks", False)
    singly = answers(name, {TEXT: ASKED, PICTURE: ASKED})
    assert apart(text, values(singly[TEXT])) <= TOLERANCE
    assert apart(picture, values(singly[PICTURE])) <= TOLERANCE
    assert singly[PICTURE].token_ids == found[PICTURE].token_ids
    is_text = ~shared_adapter(name).encode(as_mlx(inputs_of(name, PICTURE))).is_picture
    assert all(
        value is None for value, one in zip(picture, is_text, strict=True) if not one
    )


@pytest.fixture
def batcher() -> Any:
    with VLMBatcher(default_checkpoint()) as made:
        yield made


def test_through_the_door_also_when_the_prompt_is_known(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm_batch.engine.runner.POSITIONS_TOGETHER", 7)
    picture, question = str(sample_images()[3]), "describe the image"
    plain = batcher.submit(picture, question).result(timeout=60)
    assert plain.prompt_logprobs is None
    first = batcher.submit(
        picture, question, params={"prompt_logprobs": 2, "n": 2}
    ).result(timeout=60)
    again = batcher.submit(picture, question, params={"prompt_logprobs": 0}).result(
        timeout=60
    )
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 0)
    assert first.token_ids == again.token_ids == plain.token_ids
    assert first.prompt_logprobs == first.others[0].prompt_logprobs
    assert apart(values(first), values(again)) <= TOLERANCE
    told = first.prompt_logprobs
    assert told is not None
    assert len(told) == first.usage.prompt_tokens
    assert sum(one is None for one in told) == first.usage.image_tokens + 1
    assert all(len(one.top) == 2 for one in told if one is not None)
    text = batcher.processing.tokenizer.decode(
        [one.token_id for one in told if one is not None]
    )
    assert text.rstrip().endswith("assistant")


def test_what_does_not_go_with_them(batcher: VLMBatcher) -> None:
    with pytest.raises(InvalidRequest, match="return_cache"):
        Request(prompt="a", params=ASKED, return_cache=True)
    cache = (
        batcher.submit(prompt="count to 3", return_cache=True).result(timeout=60).cache
    )
    assert cache is not None
    with pytest.raises(InvalidRequest, match="cache"):
        batcher.submit(prompt="count to 3", cache=cache, params=ASKED)


def test_logits_of_no_more_than_so_many_positions_are_held() -> None:
    scores = logprobs.PromptScores(
        [3, 1, 2, 0], np.array([True, True, False, True]), ((0, 2),), 1, None
    )
    assert scores.add(mx.zeros((4, 5)), 4)
    assert [one is not None for one in scores.read()] == [False, False, False, True]
    last = scores.read()[3]
    assert last is not None
    assert math.isclose(last.logprob, -math.log(5), rel_tol=1e-6)


SCORED = SamplingParams(prompt_logprobs=3, max_tokens=0)


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "falcon_h1", "mllama"])
@pytest.mark.parametrize("budget", [8, 512])
def test_a_prompt_is_scored_without_an_answer(name: str, budget: int) -> None:
    """Beside rows that answer, in chunks and whole: the numbers of a request that answers."""
    plain = SamplingParams(max_tokens=9, ignore_eos=True)
    asked = {
        TEXT: SCORED,
        PICTURE: SCORED,
        "text:4:9": plain,
        "image:2:1": plain,
        "text:3:7": plain,
    }
    found = answers(name, asked, prefill_budget=budget)
    right = answers(
        name,
        {TEXT: ASKED, PICTURE: ASKED, "text:4:9": plain, "image:2:1": plain},
        prefill_budget=budget,
    )
    for key in (TEXT, PICTURE):
        result = found[key]
        assert apart(values(result), values(right[key])) <= TOLERANCE
        assert (
            result.text,
            result.token_ids,
            result.finish_reason,
            result.logprobs,
        ) == ("", (), "length", None)
        assert result.usage.completion_tokens == 0
        assert result.usage.prompt_tokens == len(result.prompt_logprobs or ())
        assert result.timings.prefill > 0
        assert result.timings.ttft <= result.timings.total
    for key in ("text:4:9", "image:2:1"):
        assert found[key].token_ids == right[key].token_ids
    assert len(found["text:3:7"].token_ids) == 9


def test_many_are_scored_beside_answers(batcher: VLMBatcher) -> None:
    """A harness sends a beginning with each of its endings; answers go on meanwhile, and each handle ends."""
    prompts = [f"count to {number}" for number in range(2, 10)]
    scored = [batcher.submit(prompt=prompt, params=SCORED) for prompt in prompts * 4]
    spoken = batcher.submit(prompt="count to 9")
    assert spoken.result(timeout=60).text == "1 2 3 4 5 6 7 8 9"
    results = [handle.result(timeout=60) for handle in scored]
    assert list(batcher.submit(prompt="count to 9", params=SCORED)) == []  # no pieces
    for one, other in zip(results[:8], results[8:16], strict=True):
        assert apart(values(one), values(other)) <= TOLERANCE
    stats = batcher.stats()
    assert (stats.prefilling, stats.decoding, stats.waiting) == (0, 0, 0)
    assert batcher.stats().finished == len(results) + 2


def test_what_max_tokens_0_does_not_go_with() -> None:
    with pytest.raises(InvalidParameters, match="max_tokens is 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InvalidParameters, match="n is 2"):
        SamplingParams(max_tokens=0, prompt_logprobs=0, n=2)
    with pytest.raises(InvalidParameters, match="min_tokens is 1"):
        SamplingParams(max_tokens=0, prompt_logprobs=0, min_tokens=1)


def test_a_prompt_may_fill_the_context_if_nothing_is_answered(
    batcher: VLMBatcher,
) -> None:
    context = batcher.max_context
    assert context is not None
    ids = [5 + at % 50 for at in range(context)]
    whole = batcher.submit(token_ids=ids, params=SCORED).result(timeout=120)
    assert whole.error is None
    assert len(whole.prompt_logprobs or ()) == context
    asks_for_a_token = batcher.submit(token_ids=ids, params=ASKED).result(timeout=120)
    assert isinstance(asks_for_a_token.exception, PromptTooLong)


def test_a_model_that_overflows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, logits: mx.array, end: int) -> list[mx.array]:
        return add(self, logits * mx.nan, end)

    add = logprobs.PromptScores.add
    monkeypatch.setattr(logprobs.PromptScores, "add", broken)
    found = answers("qwen2_vl", {TEXT: SCORED})[TEXT]
    assert found.finish_reason == "error"
    assert found.prompt_logprobs is None
    assert "the prompt's logits are not finite" in (found.error or "")


def test_a_scored_prompt_that_is_cancelled_ends(batcher: VLMBatcher) -> None:
    handles = [batcher.submit(prompt="count to 9", params=SCORED) for _ in range(20)]
    for handle in handles[::2]:
        handle.cancel()
    reasons = [handle.result(timeout=60).finish_reason for handle in handles]
    assert set(reasons) <= {"cancelled", "length"}
    assert reasons[1::2] == ["length"] * 10


def test_a_scored_prompt_whose_work_fails_at_its_end_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory may run out when work is waited for: the prompt is read once more, and ends with its last chunk."""
    long = "text:5:160"
    right = answers("qwen2_vl", {long: SCORED})[long]
    engine = BatchGenerator(
        shared_adapter("qwen2_vl"),
        policy=settings_for(max_rows=4, idle_budget=8, slack=0),
    )
    engine.insert(long, as_mlx(inputs_of("qwen2_vl", long)), SCORED)
    evaluate, left = mx.eval, [2]  # the parts together, and then each alone

    def failing(*arrays: Any) -> None:
        row = engine.rows.ledger.get(long)
        if left[0] and row is not None and row.is_only_read:
            left[0] -= 1
            raise MemoryError("a test")
        evaluate(*arrays)

    monkeypatch.setattr("vlm_batch.engine.telling.mx.eval", failing)
    events, prefilled = [], []
    while engine.has_work:
        events += engine.step()
        rows = engine.rows.ledger.at(Stage.PREFILL)
        prefilled += [row.prompt.prefilled for row in rows]
    (result,) = [event.result for event in events if event.result is not None]
    assert left == [0]
    assert prefilled.count(8) == 2
    assert apart(values(result), values(right)) <= TOLERANCE
