"""The zoo itself: models repeat, oracles repeat, and a wrong picture or position would be seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from zoo import FAMILIES, PLAIN, Inputs, TinyFamily, weights_hash

STEPS = 8
SEEN = 1e-2
"""A change that matters moves some log-probability by more than this."""


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys(), scope="module")
def tiny(request: pytest.FixtureRequest) -> TinyFamily:
    return request.param


@pytest.fixture(scope="module")
def model(tiny: TinyFamily) -> Any:
    return tiny.build()


def requests_of(tiny: TinyFamily) -> list[Inputs]:
    """One of every kind."""
    requests = [tiny.text(1, 5), tiny.text(2, 14), *[tiny.image(3 + size, size) for size in range(3)]]
    return [*requests, tiny.two_images(9)] if tiny.two_images else requests


def farthest(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two traces' first log-probabilities (later ones follow other tokens)."""
    return float(np.abs(one[0] - other[0]).max())


def test_name_is_the_model_type(tiny: TinyFamily, model: Any) -> None:
    assert FAMILIES[tiny.name] is tiny
    assert model.config.model_type == tiny.name


def test_weights_repeat(tiny: TinyFamily, model: Any) -> None:
    assert weights_hash(tiny.build()) == weights_hash(model)


def test_answers_repeat_in_any_order(tiny: TinyFamily, model: Any) -> None:
    requests = requests_of(tiny)
    first = [tiny.greedy(model, request, STEPS) for request in requests]
    again = [tiny.greedy(model, request, STEPS) for request in reversed(requests)]
    for one, other in zip(first, reversed(again), strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_lively(tiny: TinyFamily, model: Any) -> None:
    for request in requests_of(tiny):
        trace = tiny.greedy(model, request, STEPS)
        assert len(trace.tokens) == STEPS
        assert trace.logprobs.shape[0] == STEPS
        assert trace.logprobs.dtype == np.float32
        assert np.isfinite(trace.logprobs).all()
        assert 1.8 < trace.logprobs.std(axis=-1).mean() < 4.5
        assert len(set(trace.tokens)) >= 3


def test_markers_are_never_generated(tiny: TinyFamily, model: Any) -> None:
    for request in requests_of(tiny):
        logprobs = tiny.greedy(model, request, STEPS).logprobs
        assert (logprobs[:, :PLAIN].max(axis=-1) > logprobs[:, PLAIN:].max(axis=-1) + 2.0).all()


def test_sizes_give_different_lengths(tiny: TinyFamily) -> None:
    lengths = [tiny.image(1, size)["input_ids"].shape[1] for size in range(3)]
    assert len(set(lengths)) == 3


def test_pixels_matter(tiny: TinyFamily, model: Any) -> None:
    request, other = tiny.image(1, 1), tiny.image(2, 1)
    swapped = {**other, "input_ids": request["input_ids"]}
    assert farthest(tiny.greedy(model, request, 1).logprobs, tiny.greedy(model, swapped, 1).logprobs) > SEEN


def test_order_matters(tiny: TinyFamily, model: Any) -> None:
    request = tiny.text(1, 9)
    turned = {"input_ids": request["input_ids"][:, [1, 0, *range(2, 9)]]}
    assert farthest(tiny.greedy(model, request, 1).logprobs, tiny.greedy(model, turned, 1).logprobs) > SEEN


def test_two_pictures_or_a_reason(tiny: TinyFamily) -> None:
    assert (tiny.two_images is None) == bool(tiny.no_two_images)
