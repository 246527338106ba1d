"""Drafts of one row, found in earlier text."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

#: Tokens that must match for text to be proposed, and bytes of each.
TAIL, WIDTH = 3, 4
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

    def __init__(self, prompt: bytes, spoken: bytearray, rates: Mapping[str, float]) -> None:
        self._prompt = prompt
        self._said = bytearray(prompt)
        self._begin = len(self._said)
        self._spoken = spoken
        self.rates = dict(rates)
        self.forced = 1.0  # smoothed number of tokens that its form forces after a token
        self.source = "text"  # of its last draft: form, text or model
        self._proposed: tuple[int, ...] = ()
        self._rest = 0

    def copy(self) -> Drafter:
        return Drafter(self._prompt, self._spoken, self.rates)

    @property
    def answer(self) -> bytes:
        return bytes(self._said[self._begin :])

    def add(self, token: int) -> None:
        """Append the answer's next token; count whether it was proposed."""
        if self._proposed:
            self.note("text", held=token == self._proposed[0])
        follows = bool(self._proposed) and token == self._proposed[0]
        self._said += token.to_bytes(WIDTH, "little", signed=True)
        self._proposed = self._proposed[1:] if follows else ()
        if not self._proposed:
            self._rest -= 1
        if not self._proposed and self._rest <= 0:
            self._proposed = self.propose(MOST_PROPOSED)
            self._rest = REST if self.rates["text"] < LOW_RATE else 0

    def said(self, begin: int, end: int) -> tuple[int, ...]:
        """Return tokens [begin, end) of prompt and answer."""
        return tuple(array("i", bytes(self._said[begin * WIDTH : end * WIDTH])))

    def propose(self, most: int) -> tuple[int, ...]:
        """Return up to ``most`` tokens that followed the last ones earlier."""
        tail = bytes(self._said[-TAIL * WIDTH :])
        return behind(self._said, tail, most) or behind(self._spoken, tail, most)

    @property
    def proposed(self) -> tuple[int, ...]:
        """Probable next tokens; the first may be launched."""
        return self._proposed

    def note(self, source: str, *, held: bool) -> None:
        self.rates[source] += OWN_WEIGHT * (held - self.rates[source])


def expected(rate: float, count: float) -> float:
    """Return the expected accepted tokens of ``count``, each accepted at ``rate`` after the one before."""
    rate = min(rate, 0.99)
    return float(rate * (1 - rate**count) / (1 - rate))


def behind(text: bytearray, tail: bytes, most: int) -> tuple[int, ...]:
    """Return up to ``most`` tokens after the last earlier ``tail``, repeated if the text ends."""
    at = text.rfind(tail, 0, len(text) - 1)
    while at >= 0 and at % WIDTH:
        at = text.rfind(tail, 0, at + len(tail) - 1)
    if at < 0 or not tail:
        return ()
    found = array("i", bytes(text[at + len(tail) :][: most * WIDTH]))
    if not found:
        return ()
    return tuple((found * -(-most // len(found)))[:most])
