"""Rules of the fields of a record, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlm_batch.checks import demand, is_real, is_whole
from vlm_batch.errors import InvalidRequest


@dataclass(frozen=True)
class FieldRule:
    """A field's rule.

    Attributes:
        is_right: Whether a value is right.
        right: What is right, in words.
        or_none: Whether None is, too.
    """

    is_right: Callable[[Any], bool]
    right: str
    or_none: bool = False


def check_fields(
    record: object, rules: Mapping[str, FieldRule], error: type[InvalidRequest]
) -> None:
    """Raise ``error`` for the first field whose value breaks its rule."""
    for name, rule in rules.items():
        value = getattr(record, name)
        is_right = (rule.or_none and value is None) or rule.is_right(value)
        demand(is_right, error, name, value, rule.right)


def whole_within(least: float, most: float = math.inf) -> Callable[[Any], bool]:
    """Return the check of a whole number in a range."""
    return lambda value: is_whole(value) and least <= value <= most


def real_within(least: float, most: float = math.inf) -> Callable[[Any], bool]:
    """Return the check of a finite number in a range."""
    return lambda value: is_real(value) and least <= value <= most


def at_least(least: int, *, or_none: bool = False) -> FieldRule:
    """Return the rule of a whole number."""
    return FieldRule(whole_within(least), f"an integer of at least {least}", or_none)


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_text(value: Any) -> bool:
    return isinstance(value, str)
