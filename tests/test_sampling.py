"""Sampling: parameters checked, distributions right, rows independent of one another."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vlm_batch.arrays import stack_logits
from vlm_batch.engine import sampling
from vlm_batch.engine.sampling import SamplingRow, process, sample
from vlm_batch.errors import InvalidParameters
from vlm_batch.types import SamplingParams

VOCABULARY = 50


def logits_of(seed: int, rows: int = 1) -> mx.array:
    return mx.array(
        np.random.default_rng(seed).normal(0, 2, (rows, VOCABULARY)).astype(np.float32)
    )


def draw(logits: mx.array, params: SamplingParams, count: int) -> np.ndarray:
    """Tokens of ``count`` steps of one row from the same logits."""
    rows = [SamplingRow(params, seed=11, step=step) for step in range(count)]
    return np.array(sample(mx.broadcast_to(logits, (count, VOCABULARY)), rows).tokens)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.0},
        {"repetition_penalty": 0},
        {"repetition_context_size": 0},
        {"seed": -1},
        {"seed": 2**64},
        {"stop": [""]},
        {"stop": [3]},
        {"stop_token_ids": [-1]},
        {"logprobs": 101},
        {"logprobs": True},
        {"logits_processors": ["no function"]},
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameters, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


def test_greedy_takes_the_most_likely() -> None:
    logits = logits_of(0, rows=4)
    rows = [SamplingRow(SamplingParams(), seed=0, step=0)] * 4
    assert sample(logits, rows).tokens.tolist() == mx.argmax(logits, axis=-1).tolist()


def test_temperature_draws_from_the_softmax() -> None:
    logits = logits_of(1)
    for temperature in (0.5, 1.0, 2.0):
        tokens = draw(logits, SamplingParams(temperature=temperature), 4_000)
        found = np.bincount(tokens, minlength=VOCABULARY) / tokens.size
        right = np.array(mx.softmax(logits[0] / temperature))
        # 4,000 draws differ by about 0.07
        assert np.abs(found - right).sum() < 0.12, temperature


def test_top_k_keeps_k_tokens_in_proportion() -> None:
    logits = logits_of(2)
    tokens = draw(logits, SamplingParams(temperature=1.0, top_k=5), 3_000)
    best = np.argsort(-np.array(logits[0]))[:5]
    assert set(tokens.tolist()) == set(best.tolist())
    right = np.exp(np.array(logits[0])[best])
    found = np.array([(tokens == token).mean() for token in best])
    assert np.abs(found - right / right.sum()).sum() < 0.08


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = logits_of(3)
    probabilities = np.array(mx.softmax(logits[0]))
    order = np.argsort(-probabilities)
    for p in (0.3, 0.7, 0.95):
        size = int(np.searchsorted(np.cumsum(probabilities[order]), p)) + 1
        tokens = draw(logits, SamplingParams(temperature=1.0, top_p=p), 3_000)
        assert set(tokens.tolist()) <= set(order[:size].tolist())
        assert {int(t) for t in order[:size] if probabilities[t] > 5e-3} <= set(
            tokens.tolist()
        )


def test_min_p_is_relative_to_the_most_likely() -> None:
    logits = logits_of(4)
    probabilities = np.array(mx.softmax(logits[0]))
    kept = set(np.flatnonzero(probabilities >= 0.2 * probabilities.max()).tolist())
    tokens = draw(logits, SamplingParams(temperature=1.0, min_p=0.2), 2_000)
    assert set(tokens.tolist()) == kept
    assert (
        set(
            draw(
                logits, SamplingParams(temperature=1.0, min_p=0.2, top_p=0.999), 2_000
            ).tolist()
        )
        <= kept
    )


def test_rows_of_all_kinds_draw_the_same_alone_and_together() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_k=7),
        SamplingParams(),
        SamplingParams(temperature=1.5, top_p=0.9, min_p=0.01),
    ]
    logits = logits_of(5, rows=len(params))
    for step in range(20):
        rows = [SamplingRow(p, seed=100 + i, step=step) for i, p in enumerate(params)]
        alone = [
            sample(logits[i : i + 1], [row]).tokens.item() for i, row in enumerate(rows)
        ]
        assert sample(logits, rows).tokens.tolist() == alone
        assert sample(logits[::-1], rows[::-1]).tokens.tolist() == alone[::-1]


def test_neighbouring_seeds_and_steps_are_unrelated() -> None:
    logits = mx.zeros((1, VOCABULARY))
    params = SamplingParams(temperature=1.0)
    draws = {
        (seed, step): sample(logits, [SamplingRow(params, seed, step)]).tokens.item()
        for seed in range(20)
        for step in range(20)
    }
    by_seed = [tuple(draws[seed, step] for step in range(20)) for seed in range(20)]
    assert len(set(by_seed)) == 20
    shifted = sum(
        draws[seed, step + 1] == draws[seed + 1, step]
        for seed in range(19)
        for step in range(19)
    )
    assert shifted < 30  # 361 pairs would agree by chance about 7 times


def test_repetition_penalty_divides_and_multiplies() -> None:
    logits = mx.array([[2.0, -2.0, 1.0, -1.0, 0.5]])
    row = SamplingRow(
        SamplingParams(repetition_penalty=2.0), 0, 0, history=mx.array([0, 1, 1])
    )
    assert process(logits, row).tolist() == [[1.0, -4.0, 1.0, -1.0, 0.5]]
    # the caller's array is untouched
    assert logits.tolist() == [[2.0, -2.0, 1.0, -1.0, 0.5]]


def test_repetition_penalty_passes_over_ids_without_a_logit() -> None:
    logits = mx.array([[2.0, -2.0, 1.0]])
    row = SamplingRow(
        SamplingParams(repetition_penalty=2.0), 0, 0, history=mx.array([-1, 0, 3, 200])
    )
    assert process(logits, row).tolist() == [[1.0, -2.0, 1.0]]


def test_repetition_penalty_looks_at_its_context_only() -> None:
    logits = mx.array([[2.0, 2.0, 2.0]])
    params = SamplingParams(repetition_penalty=2.0, repetition_context_size=1)
    assert process(
        logits, SamplingRow(params, 0, 0, history=mx.array([0, 1]))
    ).tolist() == [[2.0, 1.0, 2.0]]


def test_processors_get_all_tokens_and_one_row() -> None:
    seen: list[tuple[Any, Any]] = []

    def forbid_best(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append((tokens.tolist(), logits.shape))
        return mx.where(
            mx.arange(logits.shape[-1]) == mx.argmax(logits), -mx.inf, logits
        )

    row = SamplingRow(
        SamplingParams(logits_processors=[forbid_best]), 0, 0, history=mx.array([7, 8])
    )
    assert mx.argmax(process(mx.array([[0.0, 3.0, 2.0]]), row)).item() == 2
    assert seen == [([7, 8], (1, 3))]


def test_a_processor_that_changes_the_shape_is_refused() -> None:
    row = SamplingRow(
        SamplingParams(logits_processors=[lambda tokens, logits: logits[0]]),
        0,
        0,
        mx.array([1]),
    )
    with pytest.raises(ValueError, match="shape"):
        process(mx.zeros((1, 4)), row)


def test_logprobs_are_of_the_logits_before_temperature() -> None:
    logits = logits_of(6, rows=2)
    rows = [
        SamplingRow(SamplingParams(temperature=5.0, logprobs=3), 1, 0),
        SamplingRow(SamplingParams(), 2, 0),
    ]
    sampled = sample(logits, rows)
    _, _, entry = sampled.read()
    right = np.array(logits[0] - mx.logsumexp(logits[0]))
    assert list(entry) == [0]
    assert entry[0].logprob == pytest.approx(right[entry[0].token_id], abs=1e-6)
    assert [token for token, _ in entry[0].top] == np.argsort(-right)[:3].tolist()


@pytest.mark.parametrize("more", [2, 16])
@pytest.mark.parametrize("candidates", [1, 4, 12])
def test_candidates_draw_what_the_whole_vocabulary_would(
    candidates: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few candidates, flat and peaked rows: those whose candidates do not hold top_p or top_k are sorted whole."""
    params = [
        SamplingParams(temperature=0.3, top_p=0.5),
        SamplingParams(temperature=3.0, top_p=0.95),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_k=20),
        SamplingParams(temperature=2.0, top_k=10, top_p=0.6, min_p=0.05),
        SamplingParams(temperature=1.0),
    ]
    logits = logits_of(8, rows=len(params))
    for step in range(30):
        rows = [SamplingRow(p, seed=i, step=step) for i, p in enumerate(params)]
        whole = sample(logits, rows).tokens.tolist()
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "NUM_CANDIDATES", candidates)
            patch.setattr(sampling, "MORE_CANDIDATES", more)
            assert sample(logits, rows).tokens.tolist() == whole


WIDE = 20  # tokens that only one row has


def of_two_widths(low: float) -> tuple[mx.array, mx.array]:
    """Logits of a row of the usual width, all of them ``low`` or less, and of a row with more tokens."""
    more = mx.array(np.random.default_rng(5).normal(0, 2, (1, WIDE)).astype(np.float32))
    return low - mx.abs(logits_of(3)), mx.concatenate([logits_of(4), more], axis=1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=1.5, top_p=0.9),
        SamplingParams(temperature=1.5, top_k=7),
        SamplingParams(temperature=1.5, min_p=0.01),
    ],
    ids=str,
)
def test_rows_of_other_widths_draw_what_they_do_alone(params: SamplingParams) -> None:
    """However low a row's logits are, it never takes a token that only its neighbour has; and the noise is its own."""
    short, wide = of_two_widths(low=-100.0)
    together = stack_logits([short, wide])
    assert together.shape == (2, VOCABULARY + WIDE)
    for step in range(20):
        rows = [
            SamplingRow(params, seed=7, step=step, vocabulary=VOCABULARY),
            SamplingRow(params, seed=8, step=step, vocabulary=VOCABULARY + WIDE),
        ]
        alone = [
            sample(logits, [row]).tokens.item()
            for logits, row in zip((short, wide), rows, strict=True)
        ]
        assert sample(together, rows).tokens.tolist() == alone


def test_log_probabilities_name_no_token_of_a_neighbour() -> None:
    params = SamplingParams(logprobs=60)
    rows = [
        SamplingRow(params, seed=1, step=0, vocabulary=VOCABULARY),
        SamplingRow(params, seed=2, step=0),
    ]
    sampled = sample(stack_logits(list(of_two_widths(0.0))), rows)
    short, wide = sampled.read()[2].values()
    assert len(short.top) == VOCABULARY
    assert len(wide.top) == 60
    assert all(
        token < VOCABULARY and math.isfinite(value) for token, value in short.top
    )


def test_processors_see_a_rows_own_tokens_only() -> None:
    seen: list[tuple[int, ...]] = []

    def processor(history: Any, logits: mx.array) -> mx.array:
        seen.append(logits.shape)
        return logits

    params = SamplingParams(logits_processors=[processor])
    together = stack_logits(list(of_two_widths(0.0)))
    for place, vocabulary in enumerate((VOCABULARY, None)):
        row = SamplingRow(
            params, seed=1, step=0, history=mx.array([1]), vocabulary=vocabulary
        )
        process(together[place : place + 1], row)
    assert seen == [(1, VOCABULARY), (1, VOCABULARY + WIDE)]


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=7),
    ],
    ids=str,
)
def test_one_logit_that_is_no_number_is_told_of(
    params: SamplingParams, wrong: float
) -> None:
    """Also where another token is drawn; and nothing is said of a neighbour, or of tokens that may not come."""
    logits = logits_of(9, rows=2)
    logits[0, 30] = wrong
    logits[1, 30] = -mx.inf
    _, highest, _ = sample(
        logits, [SamplingRow(params, 1, 0), SamplingRow(params, 2, 0)]
    ).read()
    assert list(map(math.isfinite, highest)) == [False, True]
