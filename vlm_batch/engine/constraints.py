"""Rows whose next token depends on their last: constrained answers and thinking budgets.

A second launch chooses such a token. Other threads compute its mask during the forward; a late mask parks the row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from enum import Enum
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from vlm_batch.records import Thinking
from vlm_batch.types import SamplingParams, TokenLogprobs


class Untold(NamedTuple):
    """A token that its row's form still checks."""

    token: int
    logprobs: TokenLogprobs | None


class AnswerForm(Protocol):
    """A constrained answer (``vlm_batch.inputs.grammar.Form``)."""

    def follow(self, token: int, most_ahead: int = 0) -> Future[None]: ...
    def look_ahead(self, tokens: Sequence[int]) -> Future[None]: ...
    @property
    def ahead(self) -> tuple[int, ...]: ...
    def fill_ahead(self, at: int, bits: np.ndarray) -> None: ...
    def fill(self, bits: np.ndarray) -> None: ...
    def copy(self) -> AnswerForm: ...
    def read(self, text: str) -> Any: ...
    @property
    def is_whole(self) -> bool: ...
    @property
    def may_end(self) -> bool: ...


class Phase(Enum):
    """Phases of an answer. ``BEGINNING``: the first token shows if it thinks."""

    BEGINNING = "beginning"
    THINKING = "thinking"
    ENDING = "ending"  # the tokens that end thinking are forced
    ANSWER = "answer"


NO_THINKING = Thinking((), ())


class NoGuide:
    """Of a row that may say any token, whatever it said last."""

    #: Whether the next token depends on the last one.
    rules = False
    #: The last token, if it is not in the row's answer yet.
    untold: Untold | None = None
    #: The complete answer as parsed JSON or text.
    parsed: Any = None
    #: Tokens that the form looks ahead.
    most_ahead = 0
    #: Tokens that the form forces, or drafted ones that it allows.
    ahead: tuple[int, ...] = ()
    #: Whether drafts can be checked: not during thinking.
    checks_drafts = True
    #: Whether the answer can only end.
    is_whole = False
    #: Whether all further tokens are allowed.
    is_over = True

    def feed(self, token: int) -> None:
        """Start work on the next token; returns at once."""

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Wait up to ``seconds``. Return whether ``finish`` would not block."""
        return True

    def finish(self) -> None:
        """Wait for the last token's work. Raises ValueError if the form excludes it."""

    def read(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Parse an answer that ends, if it is complete."""

    def look_ahead(self, tokens: Sequence[int], seconds: float) -> None:
        """Let the form check drafted tokens, within ``seconds``. A late check loses the draft. Raises what it raises."""

    def allowed(self, size: int) -> np.ndarray | None:
        """Return the allowed tokens as bits (W,) uint32; None for all."""
        return None

    def allowed_ahead(self, at: int, size: int) -> np.ndarray | None:
        """Return the mask (W,) of tokens that may follow ``ahead[at]``; None for all."""
        return None

    def copy(self) -> NoGuide:
        """Return the guide of another answer to the same prompt."""
        return self


NO_GUIDE = NoGuide()


class Guide(NoGuide):
    """Rules for one row's next token. Call ``feed`` with each token, then ``finish``.

    Args:
        form: constraint on the answer after thinking.
        budget: most tokens of thinking.
    """

    rules = True

    def __init__(
        self,
        form: AnswerForm | None,
        thinking: Thinking | None,
        budget: int | None,
        end_ids: Collection[int] = (),
    ) -> None:
        self._form = form
        self._thinking = thinking or NO_THINKING
        self._budget = budget
        self._end_ids = end_ids
        self._thought: list[int] = []
        self._forced: list[int] = []  # tokens left of the mark that ends thinking
        self._answer: list[int] = []  # tokens that the form has seen
        # the form's work on the last of them
        self._following: Future[None] | None = None
        self._checking: Future[None] | None = None  # its work on a draft behind that
        self.phase = Phase.ANSWER
        if self._thinking.is_open:
            self._think()
        elif self._thinking.may_begin:
            self.phase = Phase.BEGINNING

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        form: AnswerForm | None,
        thinking: Thinking | None,
        end_ids: Collection[int],
    ) -> NoGuide:
        """Return a row's guide, or ``NO_GUIDE`` if all tokens are allowed."""
        budget = params.thinking_budget
        if form is None and budget is None:
            return NO_GUIDE
        guide = cls(form, thinking, budget, end_ids)
        return NO_GUIDE if guide.is_over else guide

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        return self.phase is Phase.ANSWER and self._form is None

    @property
    def _ruling(self) -> AnswerForm | None:
        """The form, if it rules the next token: not during thinking."""
        return self._form if self.phase is Phase.ANSWER else None

    @property
    def _free_form(self) -> AnswerForm | None:
        """The form, if it rules the next token and has taken the last one."""
        return self._ruling if self._following is None else None

    @property
    def is_whole(self) -> bool:  # type: ignore[override]
        form = self._ruling
        return form is not None and form.is_whole

    def feed(self, token: int) -> None:
        self._checking = None
        ADDERS[self.phase](self, token)

    def _add_first(self, token: int) -> None:
        if token == self._thinking.start[0]:
            self._think()
            return
        self.phase = Phase.ANSWER
        self._add_to_answer(token)

    def _add_to_answer(self, token: int) -> None:
        if self._form is None or token in self._end_ids:
            return
        self._following = self._form.follow(token, self.most_ahead)
        self._answer.append(token)

    def is_ready(self, seconds: float = 0.0) -> bool:
        return self._following is None or _is_done(self._following, seconds)

    def look_ahead(self, tokens: Sequence[int], seconds: float) -> None:
        form = self._free_form
        if form is None:
            return
        self._checking = form.look_ahead(tokens)
        if _is_done(self._checking, seconds):
            self._checking.result()

    @property
    def ahead(self) -> tuple[int, ...]:  # type: ignore[override]
        form = self._free_form
        if form is None:
            return ()
        if self._checking is not None and not _has_passed(self._checking):
            return ()
        return form.ahead

    @property
    def checks_drafts(self) -> bool:  # type: ignore[override]
        return self._ruling is not None

    def allowed_ahead(self, at: int, size: int) -> np.ndarray | None:
        form = self._form
        if form is None:
            return None
        bits = np.zeros(_words(size), dtype=np.uint32)
        form.fill_ahead(at, bits)
        return bits

    def finish(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            following.result()

    def allowed(self, size: int) -> np.ndarray | None:
        if self.phase is Phase.ENDING:
            return _only(self._forced[:1], size)
        if self._form is None:
            return None
        if self.phase is Phase.THINKING:
            return _all_but(self._end_ids, size)
        bits = np.zeros(_words(size), dtype=np.uint32)
        self._form.fill(bits)
        if self.phase is Phase.BEGINNING:
            bits |= _only(self._thinking.start[:1], size)
        return bits

    def read(self, decode: Callable[[Sequence[int]], str]) -> None:
        form = self._ruling
        if form is None:
            return
        if form.is_whole or form.may_end:
            self.parsed = form.read(decode(self._answer))

    def copy(self) -> Guide:
        form = None if self._form is None else self._form.copy()
        made = Guide(form, self._thinking, self._budget, self._end_ids)
        made.most_ahead = self.most_ahead
        return made

    def _think(self) -> None:
        self.phase = Phase.THINKING
        if self._is_spent():
            self._end_thinking()

    def _add_thought(self, token: int) -> None:
        self._thought.append(token)
        if self._ends_with_mark():
            self.phase = Phase.ANSWER
        elif self._is_spent():
            self._end_thinking()

    def _add_forced(self, token: int) -> None:
        del self._forced[0]
        if not self._forced:
            self.phase = Phase.ANSWER

    def _end_thinking(self) -> None:
        self.phase, self._forced = Phase.ENDING, list(self._thinking.end)

    def _is_spent(self) -> bool:
        return self._budget is not None and len(self._thought) >= self._budget

    def _ends_with_mark(self) -> bool:
        end = self._thinking.end
        return tuple(self._thought[-len(end) :]) == end


#: What takes an answer's next token, by its phase.
ADDERS: dict[Phase, Callable[[Guide, int], None]] = {
    Phase.BEGINNING: Guide._add_first,
    Phase.THINKING: Guide._add_thought,
    Phase.ENDING: Guide._add_forced,
    Phase.ANSWER: Guide._add_to_answer,
}


def _is_done(work: Future[None], seconds: float) -> bool:
    """Wait up to ``seconds``. Return whether work is done."""
    if work.done() or seconds <= 0:
        return work.done()
    return bool(wait((work,), seconds).done)


def _has_passed(check: Future[None]) -> bool:
    return check.done() and not check.exception()


def apply_masks(logits: mx.array, masks: Sequence[np.ndarray | None]) -> mx.array:
    """Set logits (R, V) outside masks to -inf."""
    size = logits.shape[-1]
    free = np.full(_words(size), 0xFFFFFFFF, dtype=np.uint32)
    filled = [free if mask is None else mask for mask in masks]
    if all(mask is free for mask in filled):
        return logits
    words = mx.array(np.stack(filled))  # (R, W)
    bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1  # (R, W, 32)
    return mx.where(bits.reshape(len(masks), -1)[:, :size] > 0, logits, -mx.inf)


def _words(size: int) -> int:
    return -(-size // 32)


def _only(tokens: Sequence[int], size: int) -> np.ndarray:
    bits = np.zeros(_words(size), dtype=np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << (token % 32))
    return bits


def _all_but(tokens: Collection[int], size: int) -> np.ndarray:
    within = [token for token in tokens if token < size]
    return ~_only(within, size)
