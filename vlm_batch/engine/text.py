"""From tokens to text, one row at a time: pieces of whole characters, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: The character to which a tokenizer decodes an unfinished UTF-8 sequence.
UNFINISHED = "\ufffd"


class Detokenizer:
    """Text of one growing token sequence, piece by piece; the pieces join to ``decode`` of the whole.

    A piece is held back while it ends inside a multi-byte character. Each step decodes a short tail of the tokens
    only, so that the cost does not grow with the answer.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0  # tokens from here on are decoded again, so that spaces between words come out right
        self._emitted = 0  # tokens before this have been given out

    def add(self, token: int) -> str:
        """The text that a token completes; empty while a character is unfinished."""
        self._tokens.append(token)
        known, text = self._tail()
        if len(text) <= len(known) or text.endswith(UNFINISHED):
            return ""
        self._context, self._emitted = self._emitted, len(self._tokens)
        return text[len(known) :]

    def finish(self) -> str:
        """The rest of the text, unfinished characters included."""
        known, text = self._tail()
        self._context = self._emitted = len(self._tokens)
        return text[len(known) :]

    def _tail(self) -> tuple[str, str]:
        return self._decode(self._tokens[self._context : self._emitted]), self._decode(self._tokens[self._context :])


class StopStrings:
    """Cuts a stream of pieces before the first stop string; what could become one is held back until it is decided."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """(text that is safe to give out, the stop string that matched or None)."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda match: (match[0], -len(match[1])))
            self._held = ""
            return text[:at], stop
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self) -> str:
        """The text that was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
