"""Checks of parameters that are texts or lists; those of numbers are in ``vlm_batch.parameters``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlm_batch.checks import (
    MOST,
    are_tokens,
    as_tuple,
    check_unicode,
    demand,
    is_non_empty,
    is_real,
    non_empty_texts,
)
from vlm_batch.errors import InvalidParameters
from vlm_batch.schemas import json_schema_of

#: Most characters of a list's texts together.
MOST_CHARACTERS = 2**20
#: Largest number that is added to a logit, or taken from it.
MOST_BIAS = 100


@dataclass(frozen=True)
class Text:
    """A check: a text of at least one character."""

    def checked(self, name: str, value: Any) -> str:
        is_right = is_non_empty(value)
        demand(is_right, InvalidParameters, name, value, "non-empty text, or None")
        check_unicode(name, (value,))
        return str(value)


@dataclass(frozen=True)
class Texts:
    """A check: ``least`` to ``most`` texts, none empty; one alone may be given as it is."""

    most: int
    least: int = 0

    def checked(self, name: str, value: Any) -> tuple[str, ...]:
        texts = non_empty_texts(name, value)
        if len(texts) < self.least:
            raise InvalidParameters(f"{name} is empty; it must be texts, or None")
        check_unicode(name, texts)
        if len(texts) > self.most or sum(map(len, texts)) > MOST_CHARACTERS:
            raise InvalidParameters(
                f"{name} has {len(texts):,} texts; at most {self.most:,} of {MOST_CHARACTERS:,} characters together are "
                "looked for"
            )
        return texts


@dataclass(frozen=True)
class TokenIds:
    """A check: ``least`` to ``most`` token ids."""

    most: int
    least: int = 0

    def checked(self, name: str, value: Any) -> tuple[int, ...]:
        tokens = as_tuple(name, value)
        _check_count(name, len(tokens), self.most)
        is_right = len(tokens) >= self.least and are_tokens(tokens)
        right = f"token ids in 0..{MOST}, or None"
        demand(is_right, InvalidParameters, name, tokens, right)
        ids = tuple(map(int, tokens))
        demand(max(ids, default=0) <= MOST, InvalidParameters, name, tokens, right)
        return ids


@dataclass(frozen=True)
class Biases:
    """A check: token ids to numbers, of at most ``most`` tokens."""

    most: int

    def checked(self, name: str, value: Any) -> dict[int, float]:
        given = {} if value is None else value
        right = f"a mapping of token ids to numbers in -{MOST_BIAS}..{MOST_BIAS}"
        is_mapping = isinstance(given, Mapping)
        demand(is_mapping, InvalidParameters, name, given, right)
        is_right = are_tokens(given) and all(map(_is_bias, given.values()))
        demand(is_right, InvalidParameters, name, given, right)
        _check_count(name, len(given), self.most)
        return {int(token): float(bias) for token, bias in given.items()}


@dataclass(frozen=True)
class Functions:
    """A check: functions, called as ``right`` says."""

    right: str

    def checked(self, name: str, value: Any) -> tuple[Callable[..., Any], ...]:
        functions = as_tuple(name, value)
        is_right = all(map(callable, functions))
        demand(is_right, InvalidParameters, name, value, self.right)
        return functions


@dataclass(frozen=True)
class JsonSchema:
    """A check: a JSON schema that an answer can follow."""

    def checked(self, name: str, value: Any) -> Any:
        schema = json_schema_of(value)
        check_unicode(name, (json.dumps(schema, ensure_ascii=False),))
        return schema


def _is_bias(value: Any) -> bool:
    return is_real(value) and abs(value) <= MOST_BIAS


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidParameters(f"{name} has {count:,} ids; {most:,} are the most")
