"""Rows that say options of a prompt, and their request.

The request's row prefills the prompt; the rows of further paths continue its state, as further answers do. What a row
says is known before it is read, so a forward takes as many of its tokens as it has room for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from vlm_batch.engine.logprobs import AskedLogprobs
from vlm_batch.engine.memory import RowMemory
from vlm_batch.engine.paths import Options, Path, paths_of
from vlm_batch.engine.row import Answer, Row, fork, siblings_of
from vlm_batch.engine.sampling import Sampled
from vlm_batch.engine.several import Several
from vlm_batch.engine.text import AnswerText
from vlm_batch.errors import DoesNotFit, InvalidOption, describe
from vlm_batch.records import OptionTokens
from vlm_batch.types import (
    Event,
    Option,
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
        # a bound, until the options are tokens
        max_tokens=BESIDE + max(map(_most_tokens, request.options)),
        ignore_eos=True,
    )


def _most_tokens(option: Option) -> int:
    return len(option.encode()) if isinstance(option, str) else len(option)


def give_options(row: Row, options: Sequence[OptionTokens]) -> None:
    """Have a row score options, if there are any. Their tokens may follow once they are known."""
    if not options:
        return
    if row.answer.path is None:
        row.answer.path = Path(Options())
    row.answer.path.request.tokens = list(options)


def expect_options(row: Row, path: Path, memory: RowMemory) -> None:
    """Note how many tokens an encoded row will say. Options that never fit into memory behind its prompt fail alone."""
    answer = row.answer
    if path.options:  # it is computed again
        answer.max_tokens = path.num_positions
        return
    longest = 1
    for index, option in enumerate(path.request.tokens):
        length = len(option.tokens)
        try:
            memory.check_length(row.facts.length + length, "with this option ")
            longest = max(longest, length)
        except DoesNotFit as error:
            path.request.tokens[index] = replace(option, error=error)
    answer.max_tokens = min(answer.max_tokens, longest)


# Of a prefilled row -----------------------------------------------------------------------------------------------------


def begin_options(row: Row, own: Path, size: int) -> Sequence[Row]:
    """Give a prefilled row its path, and each further path a sibling. Returns the siblings.

    Args:
        own: the row's path, which leads nowhere yet, unless the row was computed before.
        size: tokens that the model says.

    Raises:
        InvalidOption: no option can be scored.
    """
    if own.options:  # it was computed again
        return ()
    request = own.request
    paths = _paths(row, request, size)
    siblings = siblings_of(row, len(paths) - 1)
    fork(row, siblings)
    for one, path in zip((row, *siblings), paths, strict=True):
        one.answer.path = path
        one.answer.max_tokens = path.num_positions
        request.paths[one.request_id] = path
    return siblings


def _paths(row: Row, request: Options, size: int) -> list[Path]:
    """Return the paths to options that can be scored. Raises InvalidOption if there is none."""
    right: dict[int, tuple[int, ...]] = {}
    errors: list[Exception] = []
    for index, option in enumerate(request.tokens):
        error = _error_of(row, option, size)
        if error is None:
            right[index] = option.tokens
        else:
            errors.append(error)
            request.fail(index, describe(error))
    if not right:
        raise errors[0]
    return paths_of(request, right)


def _error_of(row: Row, option: OptionTokens, size: int) -> Exception | None:
    """Return why a prefilled row cannot score an option, if so."""
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


# In a step --------------------------------------------------------------------------------------------------------------


def look_ahead(answers: Sequence[Answer], most: int) -> int:
    """Have answers with paths take up to ``most`` tokens more in their next forward. Returns the number of all these."""
    count = 0
    for answer in answers:
        path, said = answer.path, answer.num_sampled
        assert path is not None
        path.ahead = path.tokens[said : said + most]
        count += len(path.ahead)
    return count


def said_on_paths(rows: Sequence[Row], logits: mx.array) -> Sampled:
    """Return the rows' next tokens, with the log-probabilities that are asked for. Lazy.

    Args:
        rows: one for each position; a row's positions follow each other.
        logits: (R, V).
    """
    before: Counter[str] = Counter()
    said: list[int] = []
    asked: list[list[int]] = []
    for row in rows:
        path = row.answer.path
        assert path is not None
        at = row.answer.num_sampled + before[row.request_id]
        before[row.request_id] += 1
        said.append(path.next(at))
        asked.append(path.asked(at))
    told = AskedLogprobs.of(logits, asked)
    tokens = mx.array(said, dtype=mx.int32)
    return Sampled(tokens, told.highest, told, range(len(rows)))


def score(row: Row, path: Path, text: AnswerText) -> None:
    """Score the options of a row whose path was read to its end."""
    for index in path.options:
        option = path.request.tokens[index]
        shown = option.given
        if not isinstance(shown, str):
            decode = text.decoder(row.params.skip_special_tokens)
            shown = decode(option.tokens)
        path.request.score(index, row.answer.logprobs, len(shown.encode()))


# The request ------------------------------------------------------------------------------------------------------------

#: How rows end; the first that any has is how their request does. A row that has said its path ends by its length.
_ENDS = ("cancelled", "length", "stop", "error")


class Scoring(Several):
    """A request with options: one result, once the row of every path has ended."""

    def __init__(self, request_id: str, options: Options) -> None:
        self._options = options
        self._ends: dict[str, Result] = {}
        # no more paths than options
        super().__init__(request_id, len(options.tokens))

    def take(self, event: Event) -> Event | None:
        if event.result is None:
            return None
        self._ends[event.request_id] = event.result
        # without paths, the prompt's row has ended before
        for row_id in self._options.paths:
            if row_id not in self._ends:
                return None
        return Event(self.request_id, result=self._scored())

    def _scored(self) -> Result:
        """Return the request's result from those of its rows."""
        ends = [self._ends[row_id] for row_id in self.row_ids if row_id in self._ends]
        first = min(ends, key=lambda end: _ENDS.index(end.finish_reason))
        usage = replace(first.usage, completion_tokens=0)
        found = replace(
            first, request_id=self.request_id, text="", token_ids=(), usage=usage
        )
        if found.finish_reason == "cancelled":
            return found
        if found.error is None:
            found = replace(found, finish_reason="stop")
        self._fail_unscored(first)
        scores = self._options.scores
        return replace(found, options=tuple(scores[at] for at in sorted(scores)))

    def _fail_unscored(self, first: Result) -> None:
        """Give each option without a score the error of its row, or of the prompt's."""
        ended = dict.fromkeys(range(len(self._options.tokens)), first)
        for row_id, path in self._options.paths.items():
            ended |= dict.fromkeys(path.options, self._ends[row_id])
        for index, end in ended.items():
            if index not in self._options.scores:
                self._options.fail(index, end.error)
