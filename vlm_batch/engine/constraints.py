"""Rows whose next token depends on their last one: answers held to a form, and thinking that is to end.

The engine must read such a row's token before it can choose the next one. The row's forward runs with the others'. Its token
is chosen in a second, small launch, once the last token is known. Other threads work out the mask for that while the device
runs the forward; a row whose mask is late leaves the batch until it is there, and nobody else waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from enum import Enum
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from vlm_batch.records import Thinking
from vlm_batch.types import SamplingParams


class Form(Protocol):
    """A form that an answer is held to (``vlm_batch.inputs.grammar.Form`` says what each call does)."""

    def follow(self, token: int) -> Future[None]: ...
    def fill(self, bits: np.ndarray) -> None: ...
    def copy(self) -> Form: ...
    def read(self, text: str) -> Any: ...
    @property
    def is_whole(self) -> bool: ...
    @property
    def may_end(self) -> bool: ...


class Phase(Enum):
    """The phases of an answer. ``BEGINNING``: its first token says whether it thinks."""

    BEGINNING = "beginning"
    THINKING = "thinking"
    ENDING = "ending"  # what ends thinking is being written, whatever the model says
    ANSWER = "answer"


class Guide:
    """The rule for one row's next token. ``feed`` takes each token and returns at once; after ``settle`` the other members tell
    what that changed, and ``allowed`` gives the tokens that may follow.

    ``form`` holds the answer, from the end of thinking on; ``budget`` is how many tokens thinking may take.
    """

    def __init__(
        self, form: Form | None, thinking: Thinking | None, budget: int | None, end_ids: Collection[int] = ()
    ) -> None:
        self._form = form
        self._thinking = thinking
        self._budget = budget
        self._end_ids = end_ids
        self._thought: list[int] = []
        self._forced: list[int] = []  # what is left of the words that end thinking
        self._answer: list[int] = []  # the tokens that the form has seen
        self._following: Future[None] | None = None  # what its form makes of the last of them
        self.phase = Phase.ANSWER
        if thinking is not None and thinking.is_open:
            self._think()
        elif thinking is not None and thinking.may_begin:
            self.phase = Phase.BEGINNING

    @classmethod
    def of(
        cls, params: SamplingParams, form: Form | None, thinking: Thinking | None, end_ids: Collection[int]
    ) -> Guide | None:
        """A row's guide; None if nothing about it depends on its tokens."""
        if form is None and params.thinking_budget is None:
            return None
        guide = cls(form, thinking, params.thinking_budget, end_ids)
        return None if guide.is_over else guide

    @property
    def is_over(self) -> bool:
        """Whether any token may follow from now on."""
        return self.phase is Phase.ANSWER and self._form is None

    @property
    def is_whole(self) -> bool:
        """Whether the answer has its form and can only end."""
        return self.phase is Phase.ANSWER and self._form is not None and self._form.is_whole

    def feed(self, token: int) -> None:
        """Take the row's next token."""
        if self.phase is Phase.BEGINNING:
            assert self._thinking is not None
            if token == self._thinking.start[0]:
                self._think()
                return
            self.phase = Phase.ANSWER
        if self.phase is Phase.THINKING:
            self._thought.append(token)
            if self._ends_with_mark():
                self.phase = Phase.ANSWER
            elif self._is_spent():
                self._end_thinking()
        elif self.phase is Phase.ENDING:
            del self._forced[0]
            if not self._forced:
                self.phase = Phase.ANSWER
        elif self._form is not None and token not in self._end_ids:
            self._following = self._form.follow(token)
            self._answer.append(token)

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Whether ``settle`` returns at once, or will within so many seconds, which are waited for."""
        following = self._following
        return following is None or following.done() or (seconds > 0 and bool(wait((following,), seconds).done))

    def settle(self) -> None:
        """Take in what came of the last token. Raises ValueError for one that the form does not have."""
        following, self._following = self._following, None
        if following is not None:
            following.result()

    def allowed(self, size: int) -> np.ndarray | None:
        """Bits of the tokens that may come next, (W,) uint32 for ``size`` tokens; None if all may."""
        if self.phase is Phase.ENDING:
            return _only(self._forced[:1], size)
        if self.phase is Phase.THINKING:
            return None if self._form is None else _all_but(self._end_ids, size)
        if self._form is None:
            return None
        bits = np.zeros(_words(size), dtype=np.uint32)
        self._form.fill(bits)
        if self.phase is Phase.BEGINNING:
            assert self._thinking is not None
            bits |= _only(self._thinking.start[:1], size)
        return bits

    def parsed(self, decode: Callable[[Sequence[int]], str]) -> Any:
        """The answer's value: parsed JSON, or the text that has the form. None if it is not whole, or has no form."""
        if self._form is None or self.phase is not Phase.ANSWER or not (self._form.is_whole or self._form.may_end):
            return None
        return self._form.read(decode(self._answer))

    def copy(self) -> Guide:
        """The same for another answer to the same prompt, from its beginning."""
        form = None if self._form is None else self._form.copy()
        return Guide(form, self._thinking, self._budget, self._end_ids)

    def _think(self) -> None:
        self.phase = Phase.THINKING
        if self._is_spent():
            self._end_thinking()

    def _end_thinking(self) -> None:
        assert self._thinking is not None
        self.phase, self._forced = Phase.ENDING, list(self._thinking.end)

    def _is_spent(self) -> bool:
        return self._budget is not None and len(self._thought) >= self._budget

    def _ends_with_mark(self) -> bool:
        assert self._thinking is not None
        end = self._thinking.end
        return tuple(self._thought[-len(end) :]) == end


def apply_masks(logits: mx.array, masks: Sequence[np.ndarray | None]) -> mx.array:
    """Logits (R, V) with those of tokens that may not come at minus infinity, by each row's bits."""
    if all(mask is None for mask in masks):
        return logits
    size = logits.shape[-1]
    free = np.full(_words(size), 0xFFFFFFFF, dtype=np.uint32)
    words = mx.array(np.stack([free if mask is None else mask for mask in masks]))  # (R, W)
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
