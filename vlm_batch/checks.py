"""Checks of users' values, which return Python's own types or raise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, NoReturn

import numpy as np

from vlm_batch.errors import (
    InvalidImage,
    InvalidParameters,
    shown,
)

#: Largest 32-bit integer of MLX.
MOST = 2**31 - 1
#: Packages whose tables are known.
_TABLES = {"pandas", "polars", "pyarrow", "datasets"}


def is_table(value: Any) -> bool:
    """Return whether a value is another library's table, which may look like a list."""
    kind = type(value)
    is_one = kind.__name__.endswith(
        ("Frame", "Table", "Dataset", "DatasetDict", "Batch", "BatchReader")
    )
    return is_one and kind.__module__.partition(".")[0] in _TABLES


def set_pixel_bounds(holder: Any, least: Any, most: Any) -> None:
    """Check and set both pixel bounds. Raises InvalidImage."""
    low = _pixel_bound("min_pixels", least)
    high = _pixel_bound("max_pixels", most)
    if low is not None and high is not None and low > high:
        raise InvalidImage(f"min_pixels is {least}, above max_pixels, which is {most}")
    object.__setattr__(holder, "min_pixels", low)
    object.__setattr__(holder, "max_pixels", high)


def _pixel_bound(name: str, value: Any) -> int | None:
    if value is None:
        return None
    is_right = is_whole(value) and 1 <= value <= MOST
    demand(is_right, InvalidImage, name, value, "an integer of at least 1, or None")
    return int(value)


def whole_option(name: str, value: Any, *, least: int, or_none: bool = False) -> Any:
    """Return an integer option. Raises ValueError."""
    right = f"an integer of at least {least}"
    if or_none:
        right = f"{right} or None"
        if value is None:
            return None
    is_right = is_whole(value) and value >= least
    demand(is_right, ValueError, name, value, right)
    return int(value)


def seconds_option(name: str, value: Any) -> float:
    """Return a finite option above 0. Raises ValueError."""
    is_right = is_real(value) and value > 0
    demand(is_right, ValueError, name, value, "a finite number of seconds above 0")
    return float(value)


def non_empty_texts(name: str, value: Any) -> tuple[str, ...]:
    """Return one or more texts as a tuple. Raises InvalidParameters."""
    is_one = isinstance(value, str)
    texts = (value,) if is_one else as_tuple(name, value)
    is_right = all(map(is_non_empty, texts))
    demand(is_right, InvalidParameters, name, value, "non-empty texts")
    return texts


def is_non_empty(value: Any) -> bool:
    """Return whether a value is text of at least one character."""
    return isinstance(value, str) and bool(value)


def are_tokens(values: Iterable[Any]) -> bool:
    """Return whether all values can be token ids: integers of at least 0."""
    return all(is_whole(value) and value >= 0 for value in values)


def demand(
    is_right: bool, error: type[Exception], name: str, value: Any, right: str
) -> None:
    """Raise ``error`` with a value and what it must be, unless it is right."""
    if not is_right:
        raise error(f"{name} is {shown(value)}; it must be {right}")


def is_flag(value: Any) -> bool:
    """Return whether a value is True or False, of Python or numpy."""
    return isinstance(value, (bool, np.bool_))


def check_unicode(name: str, texts: Iterable[str]) -> None:
    """Raise InvalidParameters for lone surrogates, which UTF-8 lacks."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            said = f"{name} holds half of a surrogate pair, which is no Unicode text: {shown(text)}"
            raise InvalidParameters(said) from error


def check_within(name: str, ids: Iterable[int], size: int) -> None:
    """Raise InvalidParameters for the first id that is none of the model's ``size`` tokens."""
    for token in ids:
        if token >= size:
            raise InvalidParameters(
                f"{name} holds {token}; this model has {size:,} tokens"
            )


def parse_json(text: str | bytes) -> Any:
    """Parse standard JSON. Raises ValueError, also for NaN, Infinity, 1e400 and what is nested too deeply."""

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is no number of JSON")

    def number(digits: str) -> float:
        found = float(digits)
        if math.isinf(found):
            raise ValueError(
                f"{shown(digits)} is larger than any number that can be held"
            )
        return found

    try:
        return json.loads(text, parse_constant=constant, parse_float=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """Return a sequence as a tuple, empty for None. Raises InvalidParameters."""
    try:
        if isinstance(value, Mapping):
            raise TypeError
        if value is None:
            return ()
        return tuple(value)
    except Exception:  # no sequence, too long a one, an object with a defect
        raise InvalidParameters(
            f"{name} is {shown(value)}; it must be a sequence, or None for none"
        ) from None


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer of Python or numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Return whether a value is a finite number of Python or numpy."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond what a float holds
        return False
