"""Rows that say options of a prompt, and their request.

Each option is a row: the first prefills the prompt, the others continue its state, as further answers do. A row's tokens
are its option's, whatever the model would choose. An option of one token needs no forward and no place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from vlm_batch.engine.logprobs import Logprobs
from vlm_batch.engine.row import Row
from vlm_batch.engine.sampling import Sampled
from vlm_batch.engine.several import Several
from vlm_batch.errors import InvalidOption
from vlm_batch.records import OptionTokens
from vlm_batch.types import (
    Event,
    Option,
    OptionScore,
    Request,
    Result,
    SamplingParams,
)

#: Tokens that a tokenizer may write beside those of a text's bytes.
BESIDE = 16


def params_to_score(request: Request) -> SamplingParams:
    """Return the parameters of a request's rows."""
    return replace(
        request.params,
        n=len(request.options),
        # a bound, until the options are tokens
        max_tokens=BESIDE + max(map(_most_tokens, request.options)),
        # beside the option's token, the most likely one
        logprobs=1,
        ignore_eos=True,
    )


def give_options(row: Row, options: Sequence[OptionTokens]) -> None:
    """Have a row and its siblings say an option each; none of them, if there are no options."""
    if not options:
        return
    for one, option in zip((row, *row.siblings), options, strict=True):
        one.answer.rules = replace(one.answer.rules, option=option)


def _most_tokens(option: Option) -> int:
    return len(option.encode()) if isinstance(option, str) else len(option)


def error_of(row: Row, option: OptionTokens, size: int) -> Exception | None:
    """Return why a prefilled row cannot say its option among ``size`` tokens, if so."""
    if option.error is not None:
        return option.error
    room = row.answer.max_tokens
    if len(option.tokens) > room:
        return InvalidOption(
            f"the option has {len(option.tokens)} tokens; the model's context has room for {room} behind the prompt"
        )
    strange = max(option.tokens)
    size = row.facts.vocabulary or size
    if strange >= size:
        return InvalidOption(
            f"the option has token {strange}; the model says tokens below {size}"
        )
    return None


def said_by_options(rows: Sequence[Row], logits: mx.array) -> Sampled:
    """Return the rows' next tokens, with their log-probabilities. Lazy.

    Args:
        logits: (R, V).
    """
    said: list[int] = []
    for row in rows:
        option = row.answer.option
        assert option is not None
        said.append(option.tokens[row.answer.num_sampled])
    tokens = mx.array(said, dtype=mx.int32)
    told = Logprobs.of(logits, tokens, [1] * len(rows))
    return Sampled(tokens, mx.max(logits, axis=-1), told, range(len(rows)))


#: How rows end; the first that any has is how their request does. A row that has said its option ends by its length.
_ENDS = ("cancelled", "length", "stop", "error")


class Scoring(Several):
    """A request with options: one result, once every option's row has ended."""

    def __init__(self, row: Row) -> None:
        self._options: list[Any] = []
        for one in (row, *row.siblings):
            assert one.answer.option is not None
            self._options.append(one.answer.option.given)
        super().__init__(row.request_id, len(self._options))

    def take(self, event: Event) -> Event | None:
        taken = super().take(event)
        if taken is None or taken.result is None:
            return None
        return Event(self.request_id, result=self._scored(taken.result))

    def _scored(self, whole: Result) -> Result:
        """Return the request's result from that of several answers."""
        ends = [replace(whole, others=()), *whole.others]
        first = min(ends, key=lambda end: _ENDS.index(end.finish_reason))
        usage = replace(first.usage, completion_tokens=0)
        found = replace(first, text="", token_ids=(), logprobs=None, usage=usage)
        if found.finish_reason == "cancelled":
            return found
        if found.error is None:
            found = replace(found, finish_reason="stop")
        return replace(found, options=tuple(map(_score, self._options, ends)))


def _score(option: Any, end: Result) -> OptionScore:
    if end.error is not None or end.logprobs is None:
        return OptionScore(option, error=end.error)
    logprobs: list[float] = []
    most: list[float] = []
    for one in end.logprobs:
        logprobs.append(one.logprob)
        most.append(one.top[0][1])
    text = option if isinstance(option, str) else end.text
    return OptionScore(
        option,
        logprob=sum(logprobs),
        token_ids=end.token_ids,
        token_logprobs=tuple(logprobs),
        num_bytes=len(text.encode()),
        # of tokens that are as likely, any may be the greedy one
        is_greedy=logprobs == most,
    )
