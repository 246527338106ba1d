"""From tokens to whole characters of text, without parts of stop strings."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

#: ``token ids -> text``
Decode: TypeAlias = Callable[[Sequence[int]], str]

#: The character to which a tokenizer decodes an unfinished UTF-8 sequence.
UNFINISHED = "\ufffd"
#: Most tokens held back inside a character; more are no text. Then DECODED_AGAIN tokens are decoded with each further one,
#: and STILL_HELD characters are held back.
MOST_HELD, DECODED_AGAIN, STILL_HELD = 32, 16, 3


@dataclass(frozen=True)
class AnswerText:
    """A tokenizer's decoders and end tokens.

    Attributes:
        decode: leaves special tokens out.
        decode_all: shows them; None: as ``decode``.
        decode_usual: does with them what the family's answers need; None: as ``decode``.
    """

    decode: Decode = lambda ids: ""
    eos_token_ids: frozenset[int] = frozenset()
    decode_all: Decode | None = None
    decode_usual: Decode | None = None

    def decoder(self, skip_special_tokens: bool | None) -> Decode:
        """Return the decoder of an answer with this parameter."""
        ways = {None: self.decode_usual, True: self.decode, False: self.decode_all}
        return ways[skip_special_tokens] or self.decode


NO_TEXT = AnswerText()


#: A prefix of stop strings: the range [first, end) of the sorted strings that have it, and its length.
_Beginning: TypeAlias = tuple[int, int, int]


class StopStrings:
    """Cuts text before the first stop string; holds back what could become one.

    An automaton of Aho and Corasick (1975): a character's cost does not depend on the strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops))
        self._firsts = frozenset(stop[0] for stop in stops)
        self._root = self._state = (0, len(self._stops), 0)
        #: For each prefix: the longest other prefix and the longest stop string that it ends with.
        self._links: dict[_Beginning, tuple[_Beginning, str]] = {
            self._root: (self._root, "")
        }

    def feed(self, piece: str) -> tuple[str, str | None]:
        """Return the safe text and the matched stop string."""
        before, held = self._state, self._state[2]
        if not held and self._firsts.isdisjoint(piece):
            return piece, None
        # (begin, -length, stop string): the longest first
        found: list[tuple[int, int, str]] = []
        for end, character in enumerate(piece, held + 1):
            self._state = self._next(self._state, character)
            if stop := self._links[self._state][1]:
                found.append((end - len(stop), -len(stop), stop))
        if not found:
            return self._text(before, piece, held + len(piece) - self._state[2]), None
        self._state = self._root
        begin, _, stop = min(found)
        return self._text(before, piece, begin), stop

    def finish(self) -> str:
        """Return the text that was held back."""
        (first, _, length), self._state = self._state, self._root
        return self._stops[first][:length]

    def _text(self, before: _Beginning, piece: str, length: int) -> str:
        """Return the first ``length`` characters of held text and piece."""
        first, _, held = before
        text = self._stops[first][: min(length, held)]
        return text + piece[: max(0, length - held)]

    def _next(self, state: _Beginning, character: str) -> _Beginning:
        made: list[_Beginning] = []  # new states; each ends with the next one
        while (longer := self._longer(state, character)) not in self._links:
            if longer is not None:
                made.append(longer)
            if state == self._root:
                longer = self._root
                break
            state = self._links[state][0]
        assert longer is not None
        for one in reversed(made):
            stop = self._stops[one[0]]
            self._links[one] = (
                longer,
                stop if len(stop) == one[2] else self._links[longer][1],
            )
            longer = one
        return longer

    def _longer(self, state: _Beginning, character: str) -> _Beginning | None:
        """Return the prefix with one more character, or None."""
        first, end, length = state
        key = partial(_character, length)
        first = bisect_left(self._stops, character, first, end, key=key)
        if first == end or _character(length, self._stops[first]) != character:
            return None
        return (
            first,
            bisect_right(self._stops, character, first, end, key=key),
            length + 1,
        )


def _character(at: int, text: str) -> str:
    return text[at : at + 1]


class ShownText:
    """An answer's text in whole characters, up to a stop string.

    The pieces join to ``decode`` of all tokens. Pieces of a character are held back.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self.text = ""
        self._decode = decode
        self._stops = StopStrings(stops) if stops else None
        self._tokens: list[int] = []
        self._context = 0  # tokens from here on are decoded again, for correct spaces
        self._emitted = 0  # tokens before this were returned
        self._given = 0  # characters returned, counted from ``_context``

    def add(
        self, token: int | None, *, is_end: bool, may_stop: bool
    ) -> tuple[str, str | None]:
        """Return a token's text, and the stop string that it completes.

        Args:
            token: None if it shows nothing.
            is_end: it is the last.
            may_stop: stop strings count.
        """
        piece = "" if token is None else self.piece(token)
        if is_end:
            piece += self.rest()
        matched: str | None = None
        if self._stops is not None:
            if may_stop:
                piece, matched = self._stops.feed(piece)
            if is_end:  # behind a match nothing is held back
                piece += self._stops.finish()
        self.text += piece
        return piece, matched

    def piece(self, token: int) -> str:
        """Return the characters that a token completes. It decodes a short tail."""
        self._tokens.append(token)
        text = self._decode(self._tokens[self._context :])
        unfinished = len(text) - len(text.rstrip(UNFINISHED))
        context = self._emitted
        if unfinished or len(text) <= self._given:
            if len(self._tokens) - self._emitted <= MOST_HELD:
                return ""
            if (
                not self._decode([token])
                and self._decode(self._tokens[self._context : -1]) == text
            ):
                del self._tokens[-1]  # a token without text; there may be thousands
                return ""
            context = len(self._tokens) - DECODED_AGAIN
        held = min(unfinished, STILL_HELD)
        piece = text[self._given : len(text) - held]
        self._context, self._emitted = context, len(self._tokens)
        self._given = len(self._decode(self._tokens[context:])) - held
        return piece

    def rest(self) -> str:
        """Return the rest, unfinished characters included."""
        text = self._decode(self._tokens[self._context :])
        rest = text[self._given :]
        self._given = max(self._given, len(text))
        return rest
