"""Integers that stay known on the host answer as MLX does."""

from __future__ import annotations

import operator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.test_waiting import waits
from vlm_batch.adapters.known import MOST, HostIntegers, concatenated, know

TYPES = [mx.bool_, mx.int8, mx.uint8, mx.int16, mx.int32, mx.uint32, mx.int64]


def numbers(dtype: mx.Dtype) -> mx.array:
    found = mx.array(np.random.RandomState(0).randint(0, 5, (3, 4))).astype(dtype)
    mx.eval(found)
    return found


def same(found: Any, right: mx.array) -> bool:
    return (
        isinstance(found, HostIntegers)
        and found.dtype == right.dtype
        and mx.array_equal(found, right).item() is True
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "at",
    [
        0,
        -1,
        slice(1, None),
        (..., None),
        (slice(None), 1),
        (None, 2, slice(0, 2)),
        (1, 1),
    ],
    ids=str,
)
def test_parts_are_mlxs(dtype: mx.Dtype, at: Any) -> None:
    given = numbers(dtype)
    with waits() as found:
        part = know(given)[at]
        part.tolist()
    assert not found
    assert same(part, given[at])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "any", "all"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"axis": 0},
        {"axis": -1, "keepdims": True},
        {"axis": (0, 1)},
        {"axis": [0, 1]},
    ],
    ids=str,
)
def test_sums_are_mlxs(dtype: mx.Dtype, name: str, how: dict[str, Any]) -> None:
    given = numbers(dtype)
    with waits() as found:
        total = getattr(know(given), name)(**how)
        total.tolist()
    assert not found
    assert same(total, getattr(given, name)(**how))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "compare",
    [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge],
)
def test_comparisons_are_mlxs(dtype: mx.Dtype, compare: Any) -> None:
    given, other = numbers(dtype), numbers(dtype)[:1]
    mx.eval(other)
    with waits() as found:
        by_number, by_array = compare(know(given), 2), compare(know(given), know(other))
        bool(by_number.any()), bool(by_array.any())
    assert not found
    assert same(by_number, compare(given, 2))
    assert same(by_array, compare(given, other))
    assert mx.array_equal(
        compare(know(given), other), compare(given, other)
    )  # of an array that is not known: MLX's own


def test_truths_are_joined_as_mlx_joins_them() -> None:
    given, other = numbers(mx.int32) > 2, numbers(mx.int32) == 1
    mx.eval(given, other)
    assert same(know(given) | know(other), given | other)
    assert same(know(given) & know(other), given & other)


def test_what_is_written_is_seen() -> None:
    given = know(numbers(mx.int32))
    assert given.max().item() < 9
    given[0, 0] = 9
    assert given.max().item() == 9
    changed = given
    changed += 10
    assert changed is given
    assert given.max().item() == 19
    given |= 64
    assert given.min().item() >= 64


def test_iteration_and_concatenation_stay_known() -> None:
    given = know(numbers(mx.int32))
    with waits() as found:
        rows = [[int(number) for number in row] for row in given]
        joined = concatenated([given, given])
        joined.tolist()
    assert not found
    assert rows == given.tolist()
    assert same(joined, mx.concatenate([given, given]))
    assert not isinstance(concatenated([given, numbers(mx.int32)]), HostIntegers)


def test_one_picture_is_turned_round() -> None:
    given = know(mx.array([[1, 20, 30]]))
    assert given[::-1].tolist() == [[1, 20, 30]]


def test_only_few_integers_are_known() -> None:
    assert not isinstance(know(mx.zeros((4,))), HostIntegers)
    assert not isinstance(know(mx.zeros((MOST + 1,), dtype=mx.int32)), HostIntegers)
    assert know("a word") == "a word"
