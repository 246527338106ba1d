"""The parts of an answer, told as they grow: what Responses' items and Messages' blocks have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlm_batch.server.answers import Delta
from vlm_batch.types import TokenLogprobs


class Items(ABC):
    """Thoughts, words and calls: at most one is open, and grows; one of another kind ends it.

    Each method returns the events of what it did, joined.
    """

    def __init__(self) -> None:
        # a kind and, of calls, a number
        self._open: tuple[str, int] | None = None

    def add(self, delta: Delta) -> bytes:
        """Go on with a piece of the answer."""
        events = self.think(delta.reasoning) if delta.reasoning else b""
        is_saying = self._open is not None and self._open[0] == "words"
        if delta.content or (delta.logprobs and is_saying):
            events += self.say(delta.content, delta.logprobs)
        for call in delta.tool_calls:
            events += self.call(call)
        return events

    def close(self) -> bytes:
        """End the open item."""
        if self._open is None:
            return b""
        kind, _ = self._open
        self._open = None
        return self._ended(kind)

    @abstractmethod
    def think(self, words: str) -> bytes:
        """Go on with thoughts."""

    @abstractmethod
    def say(self, words: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        """Go on with words, and with the scores of the tokens that are told beside them."""

    @abstractmethod
    def call(self, call: Mapping[str, Any]) -> bytes:
        """Go on with a call; one that begins has an id and a name."""

    @abstractmethod
    def _ended(self, kind: str) -> bytes:
        """Return the events of an item's end."""

    def _opened(self, kind: str, begin: Callable[[], bytes], index: int = 0) -> bytes:
        """End one item and begin another, if it is another."""
        if self._open == (kind, index):
            return b""
        events = self.close()
        self._open = kind, index
        return events + begin()
