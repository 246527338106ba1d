"""Turns launched tokens into events."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from vlm_batch.engine.choosing import Flight
from vlm_batch.engine.constraints import NoGuide, Untold
from vlm_batch.engine.drafts import NoDrafts
from vlm_batch.engine.options import score
from vlm_batch.engine.paths import Path
from vlm_batch.engine.retry import Retry
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Ending, Row, Stage
from vlm_batch.engine.rows import Rows
from vlm_batch.engine.text import AnswerText
from vlm_batch.engine.work import Failed, Part, attempt
from vlm_batch.errors import InvalidParameters
from vlm_batch.types import Event, TokenLogprobs

#: Most seconds that a step waits for forms. A row whose mask is later misses the step.
FORM_SECONDS = 0.01


class Patience:
    """The seconds that a step may still wait for forms.

    Beside other rows they are at most what a step's own work takes, so that forms slow nobody to more than half the speed.
    """

    def __init__(self) -> None:
        self.left = FORM_SECONDS
        self._given = FORM_SECONDS
        self._work = FORM_SECONDS  # seconds of the last step, without waits

    def begin(self, *, beside_others: bool) -> None:
        """Begin a step. ``beside_others``: some of its rows have no form."""
        self._given = min(FORM_SECONDS, self._work) if beside_others else FORM_SECONDS
        self.left = self._given

    def end(self, seconds: float) -> None:
        """End a step that took ``seconds``."""
        self._work = max(0.0, seconds - (self._given - self.left))

    def spend(self, seconds: float) -> None:
        self.left = max(0.0, self.left - seconds)

    def is_ready(self, guide: NoGuide) -> bool:
        """Wait for a guide as long as may be; return whether ``finish`` would not block."""
        begin = time.perf_counter()
        is_ready = guide.is_ready(self.left)
        self.spend(time.perf_counter() - begin)
        return is_ready


class Telling:
    """Reads launched work."""

    def __init__(
        self,
        rows: Rows,
        retry: Retry,
        reuse: Reuse,
        text: AnswerText,
        drafts: NoDrafts,
    ) -> None:
        self._rows = rows
        self._retry = retry
        self._reuse = reuse
        self._text = text
        self._drafts = drafts
        self.patience = Patience()

    def begin(self) -> None:
        """Begin a step."""
        has_others = not all(row.answer.guide.rules for row in self._rows.batch.rows)
        self.patience.begin(beside_others=has_others)

    def read(self, launched: Sequence[Flight | Part]) -> None:
        """Wait for a step's work in launch order; hand out its tokens."""
        self._reuse.store_ended()
        parts: list[Part] = []
        for one in launched:
            if isinstance(one, Part):
                parts.append(one)
                continue
            self._wait_for(parts)
            parts = []
            self._read_tokens(one)
        self._wait_for(parts)
        if launched:
            self._drafts.was_read()

    def _read_tokens(self, flight: Flight) -> None:
        """Wait for tokens, and hand them out."""
        if not any(flight.waiting()):
            return
        found = attempt(flight.rows, flight.sampled.read, is_shared=True)
        if isinstance(found, Failed):
            lost = dict.fromkeys(row for _, row in flight.waiting())
            self._retry.settle(replace(found, rows=list(lost)))
            return
        self._take(flight, *found)

    def _wait_for(self, parts: Sequence[Part]) -> None:
        """Wait for parts; end rows of which nothing else is asked."""
        self._evaluate([part for part in parts if not part.rows[0].has_ended])
        for part in parts:
            row = part.rows[0]
            ending = row.answer.ending
            if ending is not None and row.is_only_read:
                self._retry.attempt(row, self._end_without_token, row, ending)
            # the next chunk is written into what they are cut out of, if nobody holds them
            part.arrays.clear()

    def _evaluate(self, parts: Sequence[Part]) -> None:
        """Wait for parts in one call, since each call costs on a GPU; if that raises, for each alone."""
        arrays = [part.arrays for part in parts]
        failed = attempt([], mx.eval, arrays)
        if failed is None:
            return
        for part in parts:
            self._retry.attempt(part.rows[0], mx.eval, part.arrays)

    def _end_without_token(self, row: Row, ending: Ending) -> None:
        """End a row that asks for no token. Raises FloatingPointError."""
        scores = row.answer.prompt_scores
        if scores is not None and scores.has_nan():
            raise FloatingPointError(
                "the prompt's logits are not finite (NaN or infinity): the model overflows on it"
            )
        self._rows.finish(row, ending)

    def _take(
        self,
        flight: Flight,
        tokens: Sequence[int],
        highest: Sequence[float],
        logprobs: Mapping[int, TokenLogprobs],
    ) -> None:
        """Append tokens to rows. Complete rows and those with non-finite logits end."""
        drafted: Row | None = None
        for index, row in flight.waiting():
            if row is drafted:  # it has its tokens
                continue
            if row.answer.drafter.ahead:
                self._take_drafted(row, flight, index, tokens, highest, logprobs)
                drafted = row
                continue
            if not math.isfinite(highest[index]):
                self._rows.end(row, "error", _no_token(row, highest[index]))
                continue
            if row.reuse.pending is not None:
                # the first token is finite
                self._reuse.store(row.reuse.pending)
                row.reuse.pending = None
            guide = row.answer.guide
            if flight.is_repeated:
                self._end_repeated(row)
            elif row.answer.path is not None:
                self._note_score(row, row.answer.path, tokens[index], logprobs[index])
            elif guide.rules:
                self._feed(row, guide, tokens[index], logprobs.get(index))
            else:
                self._tell(row, tokens[index], logprobs.get(index))

    def _note_score(
        self, row: Row, path: Path, token: int, logprobs: TokenLogprobs
    ) -> None:
        """Take what a row has read at a position of its path. The last ends it."""
        answer = row.answer
        row.clock.note_token()
        answer.token_ids.append(token)
        answer.logprobs.append(logprobs)
        if len(answer.token_ids) < answer.max_tokens:
            return
        if self._retry.attempt(row, score, row, path, self._text):
            self._end(row, Ending(Event(row.request_id), "length", None))

    def _feed(
        self, row: Row, guide: NoGuide, token: int, logprobs: TokenLogprobs | None
    ) -> None:
        """Give a token to a row's guide, which keeps it until the row's form has taken it."""
        if self._retry.attempt(row, guide.feed, token):
            guide.untold = Untold(token, logprobs)

    def _end_repeated(self, row: Row) -> None:
        """End a row that is recomputed to its end."""
        answer = row.answer
        if answer.ending is not None and answer.known_token is None:
            self._retry.attempt(row, self._rows.finish, row, answer.ending)

    def _take_drafted(
        self,
        row: Row,
        flight: Flight,
        first: int,
        tokens: Sequence[int],
        highest: Sequence[float],
        logprobs: Mapping[int, TokenLogprobs],
    ) -> None:
        """Append a row's tokens from ``first`` up to the first unlike its draft."""
        answer = row.answer
        end: Ending | Failed | None = None
        count = 0
        for index, expected in enumerate((*answer.drafter.ahead, None), first):
            if not math.isfinite(highest[index]):
                end = Failed([row], _no_token(row, highest[index]))
                break
            count += 1
            end = attempt([row], answer.guide.feed, tokens[index])
            if end is not None:
                break
            if not self.patience.is_ready(answer.guide):
                answer.guide.untold = Untold(tokens[index], logprobs.get(index))
                break
            told = attempt(
                [row], row.take, tokens[index], logprobs.get(index), self._text.decode
            )
            if not isinstance(told, Event):
                end = told
                break
            self._rows.events.append(told)
            if tokens[index] != expected:
                break
        answer.drafter.accept(count)
        if count:
            answer.advance(flight.sampled.tokens.astype(mx.int32), first, count)
            answer.num_fed = answer.num_sampled - 1
        self._rows.batch.keep(row, count)
        if end is not None:
            self._end(row, end)

    def _tell(self, row: Row, token: int, logprobs: TokenLogprobs | None) -> None:
        told = attempt([row], row.take, token, logprobs, self._text.decode)
        if isinstance(told, Event):  # as mostly
            self._rows.events.append(told)
        else:
            self._end(row, told)

    def _end(self, row: Row, told: Ending | Failed) -> None:
        if isinstance(told, Failed):
            self._retry.settle(told)
            return
        row.answer.drafter.end()
        self._retry.attempt(row, self._rows.finish, row, told)

    def in_time(self, held: Sequence[Part]) -> list[Part]:
        """Take tokens that forms have checked. Parks rows with late masks; returns the others' parts."""
        self.take_untold()
        found: list[Part] = []
        for part in held:
            row = part.rows[0]
            if not row.is_untold:
                found.append(part)
            elif row.stage is Stage.DECODE:
                self._retry.attempt(row, self._rows.park, row, part.logits)
        return found

    def take_untold(self) -> None:
        """Wait briefly; append tokens that forms have checked."""
        for row in self._rows.untold():
            guide = row.answer.guide
            untold = guide.untold
            if untold is not None and self.patience.is_ready(guide):
                guide.untold = None
                self._tell(row, *untold)


def _no_token(row: Row, highest: float) -> Exception:
    """Return the error of a row without finite logits: contradicting parameters, or overflow."""
    at, params = len(row.answer.token_ids) + 1, row.params
    said = {
        params.form: row.answer.guide.rules,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "no_repeat_ngram_size": bool(params.no_repeat_ngram_size),
        "min_tokens": at <= params.min_tokens,
        "logits_processors": bool(params.logits_processors),
    }
    names = [name for name, is_said in said.items() if name is not None and is_said]
    if highest == -math.inf and names not in ([], ["logits_processors"]):
        return InvalidParameters(
            f"{' and '.join(names)} leave no token to choose for token {at}: they contradict each other"
        )
    return FloatingPointError(
        f"the logits of token {at} are not finite (NaN or infinity): the model overflows on this prompt, or a logits "
        "processor leaves no token to choose"
    )
