"""Log-probabilities of chosen tokens, and of a prompt's own tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.runtime import exponentials
from vlm_batch.types import TokenLogprobs

#: Positions whose logits are held at a time: with a large vocabulary each takes half a megabyte.
POSITIONS_TOGETHER = 128


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of R tokens, and of ``counts[r]`` most likely ones beside. Lazy."""

    counts: Sequence[int]
    chosen: mx.array  # (R,)
    top_ids: mx.array  # (R, k)
    top: mx.array  # (R, k)

    @classmethod
    # logits (R, V), tokens (R,)
    def of(cls, logits: mx.array, tokens: mx.array, counts: Sequence[int]) -> Logprobs:
        logits = logits.astype(mx.float32)
        logprobs = logits - exponentials.log_of_sum(logits)
        chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
        return cls(counts, chosen, *likeliest(logprobs, counts))

    def arrays(self) -> list[mx.array]:
        return [self.chosen, self.top_ids, self.top]

    def read(self, tokens: Sequence[int]) -> list[TokenLogprobs]:
        """Wait for these tokens' values. Most likely tokens at -inf are left out."""
        found: list[TokenLogprobs] = []
        held: list[Any] = [array.tolist() for array in self.arrays()]
        values = zip(tokens, self.counts, *held, strict=True)
        for token, count, logprob, ids, top in values:
            pairs = zip(ids, top, strict=True)
            likely = tuple(pair for pair in pairs if pair[1] > -math.inf)
            found.append(TokenLogprobs(token, logprob, likely[:count]))
        return found


@dataclass(frozen=True)
class AskedLogprobs:
    """Log-probabilities of some tokens at each of R positions. Lazy."""

    asked: Sequence[Sequence[int]]
    highest: mx.array  # (R,) logits
    total: mx.array  # (R,) logarithms of the sums
    chosen: mx.array  # (N,) log-probabilities of all that are asked for

    @classmethod
    def of(cls, logits: mx.array, asked: Sequence[Sequence[int]]) -> AskedLogprobs:
        logits = logits.astype(mx.float32)
        total = exponentials.log_of_sum(logits)
        positions: list[int] = []
        tokens: list[int] = []
        for position, those in enumerate(asked):
            positions += [position] * len(those)
            tokens += those
        at = mx.array(positions)
        chosen = logits[at, mx.array(tokens)] - total[at, 0]
        return cls(asked, mx.max(logits, axis=-1), total[:, 0], chosen)

    def arrays(self) -> list[mx.array]:
        return [self.highest, self.total, self.chosen]

    def read(self, tokens: Sequence[int]) -> list[TokenLogprobs]:
        """Wait for the values: at each position the largest, and in ``top`` those of the tokens that were asked for."""
        chosen: Any = self.chosen.tolist()
        most: Any = (self.highest - self.total).tolist()
        rest = iter(chosen)
        found: list[TokenLogprobs] = []
        for token, largest, those in zip(tokens, most, self.asked, strict=True):
            top = tuple(zip(those, rest, strict=False))
            found.append(TokenLogprobs(token, largest, top))
        return found


def likeliest(logprobs: mx.array, counts: Sequence[int]) -> tuple[mx.array, mx.array]:
    """Return ids and values of each row's ``counts[r]`` most likely tokens of (R, V), padded with -inf.

    Each count is sorted apart: it decides the order of equal values.
    """
    if len(set(counts)) > 1:
        all_ids: list[mx.array] = []
        all_values: list[mx.array] = []
        for row, count in enumerate(counts):
            ids, values = likeliest(logprobs[row : row + 1], [count])
            width = [(0, 0), (0, max(counts) - count)]
            all_ids.append(mx.pad(ids, width))
            all_values.append(mx.pad(values, width, constant_values=-mx.inf))
        return mx.concatenate(all_ids), mx.concatenate(all_values)
    k = min(counts[0], logprobs.shape[-1])
    if k == 0:
        return mx.zeros((len(counts), 0), dtype=mx.uint32), mx.zeros((len(counts), 0))
    ids = largest(logprobs, k)
    order = mx.argsort(-mx.take_along_axis(logprobs, ids, axis=-1), axis=-1)
    ids = mx.take_along_axis(ids, order, axis=-1)
    return ids, mx.take_along_axis(logprobs, ids, axis=-1)


def largest(values: mx.array, count: int) -> mx.array:
    """Return ids (R, count) of each row's largest values (R, V), in no order.

    On a CPU partitions are slow and maxima fast: the largest values lie in the parts of the row with the largest maxima.
    """
    size = values.shape[-1]
    width = 128 if count <= 64 else 16
    whole = size // width * width
    if mx.default_device().type == mx.DeviceType.gpu or 4 * count * width > size:
        return mx.argpartition(-values, kth=count - 1, axis=-1)[:, :count]
    maxima = values[:, :whole].reshape(len(values), -1, width).max(axis=-1)
    parts = mx.argpartition(-maxima, kth=count - 1, axis=-1)[
        :, :count, None
    ] * width + mx.arange(width)
    rest = mx.broadcast_to(mx.arange(whole, size), (len(values), size - whole))
    ids = mx.concatenate([parts.reshape(len(values), -1), rest], axis=-1)
    found = mx.argpartition(
        -mx.take_along_axis(values, ids, axis=-1), kth=count - 1, axis=-1
    )[:, :count]
    return mx.take_along_axis(ids, found, axis=-1)


class PromptScores:
    """Log-probabilities of a prompt's tokens, given those before.

    It leaves out the first position, pictures, tokens without a logit, and all but the first of an atomic span.

    Args:
        ids: (L,).
        is_text: (L,), False at pictures.
        vocabulary: number of tokens with a logit.
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
        self._parts: list[tuple[list[int], Logprobs]] = []  # (positions, their values)
        self._read: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def says_any(self) -> bool:
        return bool(self._said.any())

    def add(self, logits: mx.array, end: int) -> list[mx.array]:
        """Add logits (R, V) of positions before ``end``. Returns arrays to evaluate."""
        first = end - logits.shape[0]
        # later ids occur in prompts only
        size = min(logits.shape[1], self._vocabulary or logits.shape[1])
        asked = range(first + 1, min(end + 1, len(self._ids)))
        told: list[int] = []
        own: list[int] = []
        for at in asked:
            token = self._ids[at]
            if self._said[at] and token < size:
                told.append(at)
                own.append(token)
        if not told:
            return []
        rows = mx.array([at - 1 - first for at in told])
        counts = [self._count] * len(told)
        found = Logprobs.of(logits[rows][:, :size], mx.array(own), counts)
        self._parts.append((told, found))
        return found.arrays()

    def has_nan(self) -> bool:
        """Return whether a value is no number."""
        values = [one.logprob for one in self.read() if one is not None]
        return any(map(math.isnan, values))

    def read(self) -> tuple[TokenLogprobs | None, ...]:
        """Return each position's value."""
        if self._read is not None:
            return self._read
        read: list[TokenLogprobs | None] = [None] * len(self._ids)
        for told, found in self._parts:
            own = [self._ids[at] for at in told]
            for at, one in zip(told, found.read(own), strict=True):
                read[at] = one
        self._parts = []
        self._read = tuple(read)
        return self._read
