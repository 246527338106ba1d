"""Drafts of one row, found in earlier text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from numbers import Integral
from typing import Any

#: Tokens that must match for text to be proposed, and bytes of each.
TAIL, WIDTH = 3, 4
#: Earlier places that are compared: text is proposed up to where they differ.
PLACES = 2
#: Most proposed tokens: the largest draft, and one that may be launched already.
MOST_PROPOSED = 16
#: Weight of one token in the smoothed acceptance rate of a row.
OWN_WEIGHT = 0.2
#: Below an acceptance rate of LOW_RATE a row is searched every REST tokens only.
LOW_RATE, REST = 0.2, 8


class Drafter:
    """A row's drafts and their acceptance.

    Args:
        prompt: tokens as bytes, four each.
        spoken: the client's earlier answers, likewise.
    """

    def __init__(
        self, prompt: bytes, spoken: bytearray, rates: Mapping[str, float]
    ) -> None:
        self._prompt = prompt
        self._said = bytearray(prompt)
        self._begin = len(self._said)
        self._spoken = spoken
        self.rates = dict(rates)
        # smoothed number of tokens that its form forces after a token
        self.forced = 1.0
        self.source = "text"  # of its last draft: form, text or model
        self.num_sure = 0  # tokens of its last draft, first ones, that its form forces
        self._proposed: tuple[int, ...] = ()
        self._is_searched = True  # for what follows the last token
        self._rest = 0

    def copy(self) -> Drafter:
        return Drafter(self._prompt, self._spoken, self.rates)

    @property
    def answer(self) -> bytes:
        return bytes(self._said[self._begin :])

    def add(self, token: int) -> None:
        """Append the answer's next token; count whether it was proposed."""
        follows = bool(self._proposed) and token == self._proposed[0]
        if self._proposed:
            self.note("text", held=follows)
        self._said += token.to_bytes(WIDTH, "little", signed=True)
        self._proposed = self._proposed[1:] if follows else ()
        self._is_searched = bool(self._proposed)
        self._rest -= not self._proposed

    def said(self, begin: int, end: int) -> tuple[int, ...]:
        """Return tokens [begin, end) of prompt and answer."""
        return tuple(array("i", bytes(self._said[begin * WIDTH : end * WIDTH])))

    def propose(self, most: int, ahead: Sequence[int] = ()) -> Sequence[int]:
        """Return up to ``most`` tokens that followed the last ones, and ``ahead`` behind them, earlier."""
        said = self._said + array("i", ahead).tobytes() if ahead else self._said
        tail = bytes(said[-TAIL * WIDTH :])
        found = (
            behind
            for text in (said, self._spoken)
            for behind in behinds(text, tail, most)
        )
        return common(list(islice(found, PLACES)))

    @property
    def proposed(self) -> tuple[int, ...]:
        """Probable next tokens; the first may be launched. Raises what ``propose`` raises."""
        if not self._is_searched and self._rest <= 0:
            self._proposed = checked(self.propose(MOST_PROPOSED), MOST_PROPOSED)
            self._is_searched = True
            self._rest = REST if self.rates["text"] < LOW_RATE else 0
        return self._proposed

    def note(self, source: str, *, held: bool) -> None:
        self.rates[source] += OWN_WEIGHT * (held - self.rates[source])

    def note_forced(self, count: int) -> None:
        """Record the tokens that its form forces after the last one."""
        self.forced += OWN_WEIGHT * (count - self.forced)


def checked(
    tokens: Iterable[Any], most: int, num_words: int = 2**31
) -> tuple[int, ...]:
    """Return up to ``most`` tokens. Raises ValueError for what is no token."""
    found = tuple(islice(tokens, most))
    for token in found:
        if not isinstance(token, Integral) or not 0 <= int(token) < num_words:
            raise ValueError(
                f"drafted {token!r}, which is none of {num_words:,} tokens"
            )
    return tuple(map(int, found))


def expected(rate: float, count: float) -> float:
    """Return the expected accepted tokens of ``count``, each accepted at ``rate``."""
    rate = min(rate, 0.99)
    return float(rate * (1 - rate**count) / (1 - rate))


def behinds(text: bytearray, tail: bytes, most: int) -> Iterator[tuple[int, ...]]:
    """Yield ``most`` tokens after each earlier ``tail``, last first, repeated if the text ends."""
    at = text.rfind(tail, 0, len(text) - 1) if tail else -1
    while at >= 0:
        found = (
            array("i", bytes(text[at + len(tail) :][: most * WIDTH]))
            if at % WIDTH == 0
            else ()
        )
        if found:
            yield tuple((found * -(-most // len(found)))[:most])
        at = text.rfind(tail, 0, at + len(tail) - 1)


def common(texts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return what all texts begin with."""
    if not texts:
        return ()
    return tuple(
        tokens[0]
        for tokens in takewhile(
            lambda tokens: len(set(tokens)) == 1, zip(*texts, strict=False)
        )
    )
