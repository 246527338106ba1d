"""Log-probabilities of a prompt's own tokens, chunk by chunk as it is prefilled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from vlm_batch.engine.sampling import likeliest, to_list
from vlm_batch.types import TokenLogprobs

#: Positions whose logits are held at a time: those of a large vocabulary take half a megabyte each.
POSITIONS_TOGETHER = 128


class PromptScores:
    """A model's log-probabilities of a prompt's tokens, given those before them.

    ``ids`` (L,) are the prompt's, ``is_text`` (L,) says which of its positions are text and no picture's, ``atomic`` spans
    [start, end) are seen as wholes, and ``count`` most likely tokens are kept beside each. Nothing is said of the first
    position, of pictures', of tokens that are seen where they would be told of, and of those that have no logit.
    """

    def __init__(
        self,
        ids: Sequence[int],
        is_text: np.ndarray,
        atomic: Sequence[tuple[int, int]],
        count: int,
        vocabulary: int | None,
    ) -> None:
        self._ids = ids
        self._count = count
        self._vocabulary = vocabulary
        self._said = is_text.copy()
        self._said[:1] = False
        for start, end in atomic:
            self._said[start + 1 : end] = False
        self._parts: list[
            tuple[list[int], mx.array, mx.array, mx.array]
        ] = []  # positions; log-probabilities; the likeliest
        self._read: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def says_any(self) -> bool:
        """Whether there is any token that something is said of."""
        return bool(self._said.any())

    def add(self, logits: mx.array, end: int) -> list[mx.array]:
        """Take logits (R, V) of the last positions before ``end``. Returns what is to be evaluated."""
        first = end - logits.shape[0]
        size = min(logits.shape[1], self._vocabulary or logits.shape[1])  # tokens beyond are of prompts only
        asked = range(first + 1, min(end + 1, len(self._ids)))
        told = [at for at in asked if self._said[at] and self._ids[at] < size]
        if not told:
            return []
        picked = logits[mx.array([at - 1 - first for at in told])][:, :size].astype(mx.float32)
        logprobs = picked - mx.logsumexp(picked, axis=-1, keepdims=True)
        own = mx.array([[self._ids[at]] for at in told])
        chosen = mx.take_along_axis(logprobs, own, axis=-1)[:, 0]
        ids, top = mx.zeros((len(told), 0), dtype=mx.uint32), mx.zeros((len(told), 0))
        if self._count:
            ids, top = likeliest(logprobs, [min(self._count, logprobs.shape[-1])] * len(told))
        self._parts.append((told, chosen, ids, top))
        return [chosen, ids, top]

    def read(self) -> tuple[TokenLogprobs | None, ...]:
        """Each position's log-probabilities, None where there are none; waits for them."""
        if self._read is None:
            found: list[TokenLogprobs | None] = [None] * len(self._ids)
            for told, chosen, ids, top in self._parts:
                for at, value, tokens, values in zip(told, to_list(chosen), to_list(ids), to_list(top), strict=True):
                    pairs = zip(tokens, values, strict=True)
                    likely = tuple((token, one) for token, one in pairs if one > -math.inf)
                    found[at] = TokenLogprobs(self._ids[at], value, likely)
            self._read, self._parts = tuple(found), []
        return self._read
