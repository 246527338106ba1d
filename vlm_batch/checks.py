"""Checks of values that users hand in: they return Python's own types, or raise an error that says what is right."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from vlm_batch.errors import InvalidImage, InvalidParameters, describe, shown

#: The largest number that MLX's 32-bit integers hold.
MOST = 2**31 - 1


def put_pixels(holder: Any, least: Any, most: Any) -> None:
    """Check ``min_pixels`` and ``max_pixels``, and set them on ``holder`` as Python's integers. Raises InvalidImage."""
    for name, value in (("min_pixels", least), ("max_pixels", most)):
        if value is not None and not (is_whole(value) and 1 <= value <= MOST):
            raise InvalidImage(f"{name} is {shown(value)}; it must be an integer of at least 1, or None")
        object.__setattr__(holder, name, None if value is None else int(value))
    if least is not None and most is not None and least > most:
        raise InvalidImage(f"min_pixels is {least}, above max_pixels, which is {most}")


def whole_option(name: str, value: Any, *, least: int, or_none: bool = False) -> Any:
    """An option that is an integer, as Python's. Raises ValueError for another type or a smaller number."""
    if value is None and or_none:
        return None
    if not (is_whole(value) and value >= least):
        raise ValueError(f"{name} is {shown(value)}; it must be an integer of at least {least}{' or None' * or_none}")
    return int(value)


def seconds_option(name: str, value: Any) -> float:
    """An option in seconds. Raises ValueError unless it is a finite number above 0."""
    if not (is_real(value) and value > 0):
        raise ValueError(f"{name} is {shown(value)}; it must be a finite number of seconds above 0")
    return float(value)


def non_empty_texts(name: str, value: Any) -> tuple[str, ...]:
    """A tuple of texts, of several or of one by itself. Raises InvalidParameters for an empty one, or for no text."""
    texts = (value,) if isinstance(value, str) else as_tuple(name, value)
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidParameters(f"{name} is {shown(value)}; it must be non-empty texts")
    return texts


def check_unicode(name: str, texts: Iterable[str]) -> None:
    """Raise InvalidParameters for a text that holds half of a surrogate pair: nothing that reads UTF-8 takes it."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            said = f"{name} holds half of a surrogate pair, which is no Unicode text: {shown(text)}"
            raise InvalidParameters(said) from error


def json_schema_of(given: Any) -> Any:
    """A copy of a JSON schema as a mapping, from a mapping, from JSON text, or from a pydantic model's class. Raises
    InvalidParameters."""
    if isinstance(given, type):
        try:
            given = given.model_json_schema()  # type: ignore[attr-defined]
        except Exception as error:
            said = f"json_schema is {shown(given)}, a class that gives no schema (pydantic's BaseModel does)"
            raise InvalidParameters(f"{said}: {describe(error)}") from error
    try:
        schema = json.loads(given if isinstance(given, str) else json.dumps(given))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameters(f"json_schema is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidParameters(
            f"json_schema is {shown(given)}; it must be a mapping, JSON text of one, or a pydantic model's class"
        )
    return schema


def as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """A sequence as a tuple; None is an empty one. Raises InvalidParameters for anything else, a mapping included."""
    try:
        if isinstance(value, Mapping):
            raise TypeError
        return () if value is None else tuple(value)
    except TypeError:
        raise InvalidParameters(f"{name} is {shown(value)}; it must be a sequence, or None for none") from None


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, of Python or numpy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Whether a value is a finite number, of Python or numpy; True and False are none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond what a float holds
        return False
