"""Keys pooled over windows of one row's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import mlx.core as mx

from vlm_batch.arrays import num_bytes, own_array
from vlm_batch.caches.layers import CacheKind
from vlm_batch.caches.states import LayerState, filed


class PoolCache(CacheKind):
    """One pooled key for every ``ratio`` tokens, and the open window's tokens.

    A token is a value and a gate (1, L, W). With overlap, a pool also covers the window before.
    """

    def __init__(self, ratio: int, *, overlaps: bool) -> None:
        self.ratio, self.overlaps = ratio, overlaps
        self.pooled: mx.array | None = None  # (1, P, D)
        # values and gates (1, L, W) of the open window
        self.pieces: tuple[tuple[mx.array, ...], ...] = ()
        # value and gate (1, ratio, W) of the last full window, if they overlap
        self.before: tuple[mx.array, ...] = ()

    @property
    def offset(self) -> int:
        """The number of pools."""
        return 0 if self.pooled is None else int(self.pooled.shape[1])

    def fill(self, value: mx.array, gate: mx.array) -> tuple[mx.array, ...]:
        """Add tokens; return values and gates (1, N, ratio, W) of windows now full.

        With overlap, the window before comes first.
        """
        pieces = (*self.pieces, (value, gate))
        length = sum(piece.shape[1] for piece, _ in pieces)
        full = length // self.ratio * self.ratio
        if not full:
            self.pieces = pieces
            nothing = (value[:, :0], gate[:, :0])
            return tuple(mx.unflatten(part, 1, (0, self.ratio)) for part in nothing)
        parts = _joined(pieces)
        self.pieces = ()
        if full < length:
            self.pieces = (tuple(mx.contiguous(part[:, full:]) for part in parts),)
        windows = tuple(part[:, :full] for part in parts)
        if self.overlaps:
            windows = self._behind_last(windows)
        count = windows[0].shape[1] // self.ratio
        return tuple(mx.unflatten(part, 1, (count, self.ratio)) for part in windows)

    def _behind_last(self, windows: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        """Put the last full window before others (1, L, W); remember the last of these."""
        if self.before:
            windows = _joined((self.before, windows))
        self.before = tuple(mx.contiguous(part[:, -self.ratio :]) for part in windows)
        return windows

    @property
    def rest(self) -> tuple[mx.array, ...]:
        """Value and gate (1, < ratio, W) of the open window."""
        return _joined(self.pieces) if self.pieces else ()

    def append(self, pools: mx.array) -> None:
        if self.pooled is not None:
            pools = mx.concatenate([self.pooled, pools], axis=1)
        self.pooled = pools

    def visible(self, length: int, offset: int) -> mx.array | None:
        """Return the mask (length, P) of pools whose windows ended by each token; None if all did."""
        if self.pooled is None or length == 1:
            return None
        ends = mx.arange(offset + 1, offset + length + 1)[:, None] // self.ratio
        return mx.arange(self.offset)[None] < ends

    @property
    def _open(self) -> tuple[mx.array, ...]:
        """Arrays that the next window needs."""
        return (*chain(*self.pieces), *self.before)

    @property
    def state(self) -> tuple[mx.array, ...]:
        if self.pooled is None:
            return self._open
        return (self.pooled, *self._open)

    @property
    def nbytes(self) -> int:
        return num_bytes(self.state)

    def bytes_at(self, tokens: int, seen: int) -> int:
        held = num_bytes(self._open)
        if self.pooled is not None:
            held += self.pooled.nbytes * tokens // max(1, seen)
        return held

    def saved(self, length: int) -> PoolState:
        pooled = None if self.pooled is None else own_array(self.pooled)
        rest, before = (
            tuple(map(own_array, self.rest)),
            tuple(map(own_array, self.before)),
        )
        return PoolState(pooled, rest, before, self.ratio, self.overlaps, length)


@filed
@dataclass(frozen=True)
class PoolState(LayerState):
    """Pools and the next window's tokens, for one length only."""

    pooled: mx.array | None
    rest: tuple[mx.array, ...]
    before: tuple[mx.array, ...]
    ratio: int
    overlaps: bool
    length: int

    def reaches(self, length: int) -> bool:
        return length == self.length

    def restore(self, length: int) -> PoolCache:
        cache = PoolCache(self.ratio, overlaps=self.overlaps)
        cache.pooled, cache.before = self.pooled, self.before
        cache.pieces = (self.rest,) if self.rest else ()
        return cache


def _joined(pieces: Sequence[tuple[mx.array, ...]]) -> tuple[mx.array, ...]:
    """Join values and gates (1, L, W) along L."""
    if len(pieces) == 1:
        return pieces[0]
    return tuple(
        mx.concatenate(list(part), axis=1) for part in zip(*pieces, strict=True)
    )
