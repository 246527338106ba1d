"""Drafts found in earlier text: what followed the last tokens where they stood before."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from numbers import Integral
from typing import Any

#: Tokens that must match for text to be proposed, and bytes of each.
TAIL, WIDTH = 3, 4
#: Earlier ends that are compared: text is proposed up to where they differ.
ENDS = 2


class EarlierText:
    """The text of one row, and of earlier answers to the same client.

    Args:
        prompt: tokens as bytes, four each.
        spoken: the client's earlier answers, likewise. Rows of a client share it.
    """

    def __init__(self, prompt: bytes, spoken: bytearray) -> None:
        self._prompt = prompt
        self._said = bytearray(prompt)
        self._spoken = spoken

    def copy(self) -> EarlierText:
        """Return the text of another answer to the same prompt."""
        return EarlierText(self._prompt, self._spoken)

    def add(self, token: int) -> None:
        """Append the answer's next token."""
        self._said += token.to_bytes(WIDTH, "little", signed=True)

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
        return common(list(islice(found, ENDS)))

    def end(self, most: int) -> None:
        """Keep the answer for the client's later ones, of all answers the last ``most`` tokens."""
        self._spoken += self._said[len(self._prompt) :]
        del self._spoken[: max(0, len(self._spoken) - most * WIDTH)]


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


def behinds(text: bytearray, tail: bytes, most: int) -> Iterator[tuple[int, ...]]:
    """Yield ``most`` tokens after each earlier ``tail``, last first, repeated if the text ends."""
    if not tail:
        return
    at = text.rfind(tail, 0, len(text) - 1)
    while at >= 0:
        end = at + len(tail)
        if at % WIDTH == 0:  # else it begins within a token
            found = array("i", bytes(text[end : end + most * WIDTH]))
            yield tuple((found * -(-most // len(found)))[:most])
        at = text.rfind(tail, 0, end - 1)


def common(texts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return what all texts begin with; nothing if there are none."""
    together = takewhile(
        lambda tokens: len(set(tokens)) == 1, zip(*texts, strict=False)
    )
    return tuple(tokens[0] for tokens in together)
