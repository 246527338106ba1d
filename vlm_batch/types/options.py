"""Options of a question: what users give, and the log-probability that each gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vlm_batch.checks import are_tokens, as_tuple, check_unicode
from vlm_batch.errors import InvalidRequest, shown

#: A text, or token ids.
Option: TypeAlias = "str | Sequence[int]"
#: Most options of one request: each is an answer, of which a request has no more.
MOST_OPTIONS = 128


@dataclass(frozen=True)
class OptionScore:
    """The log-probability of one option behind the prompt.

    Attributes:
        option: as given.
        logprob: log-probability of the whole option; -inf if it has an error.
        token_ids: the option's tokens, as they follow the prompt's.
        token_logprobs: log-probability of each, given the prompt and the tokens before.
        num_bytes: length of its text in UTF-8.
        is_greedy: whether each token is the most likely one at its place.
        error: why the option has no log-probability, else None.
    """

    option: Option
    logprob: float = -math.inf
    token_ids: tuple[int, ...] = ()
    token_logprobs: tuple[float, ...] = ()
    num_bytes: int = 0
    is_greedy: bool = False
    error: str | None = None

    @property
    def per_token(self) -> float:
        """The mean of its tokens' log-probabilities."""
        return self.logprob / max(1, len(self.token_ids))

    @property
    def per_byte(self) -> float:
        """The log-probability over the bytes of its text."""
        return self.logprob / max(1, self.num_bytes)


def checked_options(given: Any) -> tuple[Option, ...]:
    """Return options as a tuple. What is wrong with one alone, such as its length, is found when it is read.

    Raises:
        InvalidRequest: they are no sequence of texts or token ids, or too many.
    """
    if isinstance(given, (str, bytes)):
        raise InvalidRequest(
            f"options is {shown(given)}; it must be a list of texts or lists of token ids"
        )
    options = tuple(map(_checked, as_tuple("options", given)))
    if len(options) > MOST_OPTIONS:
        raise InvalidRequest(
            f"options has {len(options):,} of them; a request has at most {MOST_OPTIONS}"
        )
    return options


def _checked(option: Any) -> Option:
    if isinstance(option, str):
        check_unicode("options", (option,))
        return option
    try:
        tokens = tuple(option)
    except Exception:  # no sequence, too long a one, an object with a defect
        tokens = (None,)
    if isinstance(option, bytes) or not are_tokens(tokens):
        raise InvalidRequest(
            f"options holds {shown(option)}; an option is a text, or a list of token ids"
        )
    return tuple(map(int, tokens))
