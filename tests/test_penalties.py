"""Penalties, biases and tokens that may not come: right numbers, row by row, and the same answer in any company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vlm_batch import Request, SamplingParams, VLMBatcher
from vlm_batch.assets import default_checkpoint, sample_images
from vlm_batch.engine import sampling
from vlm_batch.engine.sampling import RowRules, SamplingRow, process
from vlm_batch.errors import InvalidParameters

VOCABULARY = 20
CIRCLE = str(sample_images()[3])


def logits_of(seed: int = 0) -> mx.array:
    return mx.array(
        np.random.default_rng(seed).normal(0, 2, (1, VOCABULARY)).astype(np.float32)
    )


def processed(
    params: SamplingParams, history: list[int], rules: RowRules, step: int = 3
) -> np.ndarray:
    row = SamplingRow(params, 0, step, mx.array(history), rules=rules)
    return np.array(process(logits_of(), row))[0]


@pytest.fixture(scope="module")
def batcher() -> Iterator[VLMBatcher]:
    with VLMBatcher(default_checkpoint()) as made:
        yield made


def test_penalties_count_the_answer_and_not_the_prompt() -> None:
    """OpenAI's definition: logit - frequency * count - presence * (count > 0)."""
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=1.5)
    found = processed(params, [4, 4, 7, 7, 9, 30], RowRules(), step=4)
    right = np.array(logits_of())[0]
    right[7] -= 2 * 0.5 + 1.5
    right[9] -= 0.5 + 1.5
    np.testing.assert_allclose(found, right, rtol=1e-6)


def test_biases_are_added() -> None:
    found = processed(SamplingParams(logit_bias={3: 5, 0: -100.0}), [1], RowRules())
    right = np.array(logits_of())[0]
    right[3] += 5
    right[0] -= 100
    np.testing.assert_allclose(found, right, rtol=1e-6)


def test_only_what_is_allowed_comes() -> None:
    found = processed(SamplingParams(allowed_token_ids=[2, 5]), [1], RowRules())
    assert set(np.flatnonzero(np.isfinite(found))) == {2, 5}


@pytest.mark.parametrize("name", ["allowed_token_ids", "logit_bias"])
def test_tokens_that_the_model_does_not_have_are_refused(name: str) -> None:
    ids: Any = {2: 1.0, 20: 1.0} if name == "logit_bias" else [2, 20]
    with pytest.raises(
        InvalidParameters, match=f"{name} holds 20; this model has 20 tokens"
    ):
        processed(SamplingParams(**{name: ids}), [1], RowRules())


@pytest.mark.parametrize(
    "name",
    ["stop_token_ids", "allowed_token_ids", "logit_bias", "whitelist_token_ids"],
)
def test_submit_refuses_tokens_that_the_model_does_not_have(
    batcher: VLMBatcher, name: str
) -> None:
    """Before anything is read or computed, and by the id. The last token of the vocabulary is one."""

    def asked(token: int) -> SamplingParams:
        ids: Any = {token: 1.0} if name == "logit_bias" else [5, token]
        ngrams = 3 if name == "whitelist_token_ids" else 0
        return SamplingParams(max_tokens=2, no_repeat_ngram_size=ngrams, **{name: ids})

    with pytest.raises(
        InvalidParameters, match=f"{name} holds 512; this model has 512 tokens"
    ):
        batcher.submit(prompt="count to 5", params=asked(512))
    assert batcher.submit(prompt="count to 5", params=asked(511)).result(60).ok


def test_ends_wait_for_the_fewest_tokens() -> None:
    params, rules = SamplingParams(min_tokens=4), RowRules(end_ids=(6, 8, 999))
    assert set(np.flatnonzero(np.isinf(processed(params, [1], rules, step=3)))) == {
        6,
        8,
    }
    assert np.isfinite(processed(params, [1], rules, step=4)).all()


def test_bad_words_end_nowhere() -> None:
    params = SamplingParams(bad_words=["x"])
    rules = RowRules(bad_words=((3,), (4, 5, 6)))
    assert set(np.flatnonzero(np.isinf(processed(params, [9, 9, 1, 4, 5], rules)))) == {
        3,
        6,
    }
    assert set(np.flatnonzero(np.isinf(processed(params, [9, 9, 4, 5, 1], rules)))) == {
        3
    }
    assert set(np.flatnonzero(np.isinf(processed(params, [4, 5], rules, step=0)))) == {
        3
    }, "the prompt is not the answer"


def test_bad_words_of_all_lengths_at_once() -> None:
    """As one word after the other would be looked for."""
    chance = np.random.default_rng(1)
    words = [
        tuple(map(int, chance.integers(0, 4, chance.integers(1, 6)))) for _ in range(40)
    ]
    for size in range(1, 9):
        history = [int(token) for token in chance.integers(0, 4, size)]
        right = {
            word[-1]
            for word in words
            if tuple(history[size - len(word) + 1 :]) == word[:-1] and len(word) <= size
        }
        right |= {word[0] for word in words if len(word) == 1}
        found = processed(
            SamplingParams(bad_words=["x"]),
            history,
            RowRules(bad_words=tuple(words)),
            step=size,
        )
        assert set(np.flatnonzero(np.isinf(found))) == right


def test_a_step_looks_at_no_list_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of ids become arrays once for a row: with 100,000 of them every step of every row would wait."""
    params = SamplingParams(
        logit_bias={3: 5}, allowed_token_ids=[3, 4], bad_words=["x"]
    )
    rules = RowRules(bad_words=((6,), (3, 4)))
    processed(params, [1, 3], rules)
    monkeypatch.setattr(sampling, "check_within", None)
    processed(params, [1, 3], rules)
    with pytest.raises(TypeError):
        processed(params, [1, 3], RowRules())


@pytest.mark.parametrize(
    "wrong",
    [
        {"presence_penalty": 2.1},
        {"frequency_penalty": "high"},
        {"logit_bias": {-1: 0}},
        {"logit_bias": {1: 101}},
        {"logit_bias": [1]},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"bad_words": [""]},
        {"bad_words": ["x"] * 1025},
        {"bad_words": ["x" * 2**20, "y"]},
        {"allowed_token_ids": [1] * (2**20 + 1)},
        {"logit_bias": dict.fromkeys(range(2**16 + 1), 1)},
        {"bad_words": [3]},
        {"min_tokens": -1},
        {"min_tokens": 300},
        {"n": 0},
        {"n": 129},
        {"thinking_budget": -1},
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameters, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_through_the_door(batcher: VLMBatcher) -> None:
    """What the parameters promise, in words."""

    def said(**params: Any) -> Any:
        return batcher.submit(
            prompt="count to 9", params=SamplingParams(**params)
        ).result(timeout=60)

    plain = said()
    assert plain.text == "1 2 3 4 5 6 7 8 9"
    ids = batcher._preparer.processing.ids_of
    assert "3" not in said(bad_words=["3"]).text
    assert "2 3" not in said(bad_words=["2 3"], max_tokens=40).text
    assert said(min_tokens=40, max_tokens=50).usage.completion_tokens >= 40
    stopped = said(min_tokens=10, stop="5", max_tokens=50)
    assert stopped.usage.completion_tokens >= 10
    assert "5" in stopped.text
    (four,) = ids("4")
    assert said(logit_bias={four: -100}).text.count("4") == 0
    assert set(said(allowed_token_ids=[four], max_tokens=3).token_ids) == {four}
    assert (
        said(presence_penalty=2.0, frequency_penalty=2.0).token_ids != plain.token_ids
    )


def test_in_company_as_alone(batcher: VLMBatcher) -> None:
    rules: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"bad_words": ["red", "2 3"]},
        {"logit_bias": {11: 4.0, 40: -50}},
        {"min_tokens": 25},
        {"allowed_token_ids": list(range(0, 400, 3))},
        {"logprobs": 3, "presence_penalty": -1.0, "repetition_penalty": 1.2},
    ]
    asked = [
        Request(
            prompt=prompt,
            images=images,
            params=SamplingParams(**rule, temperature=heat, seed=index, max_tokens=30),
        )
        for index, rule in enumerate(rules)
        for prompt, images, heat in (
            ("count to 9", (), 0.0),
            ("describe the image", CIRCLE, 1.0),
        )
    ]
    alone = [batcher.submit_request(one).result(timeout=60) for one in asked]
    for expected, found in zip(alone, batcher.generate(asked), strict=True):
        assert (found.error, found.token_ids, found.text) == (
            None,
            expected.token_ids,
            expected.text,
        )


@pytest.mark.parametrize(
    "heat", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str
)
def test_a_processor_that_gives_infinity_is_told(
    batcher: VLMBatcher, heat: dict[str, Any]
) -> None:
    def force(tokens: Any, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(logits.shape[-1]) == 7, mx.inf, logits)

    params = SamplingParams(logits_processors=[force], max_tokens=3, **heat)
    result = batcher.submit(prompt="count to 9", params=params).result(timeout=60)
    assert result.token_ids == ()
    assert "the logits of token 1 are not finite (NaN or infinity)" in str(result.error)
