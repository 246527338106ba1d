"""Quantised KV caches.

Full-attention layers stay exact up to ``start`` tokens; then all their tokens are quantised. Other layers stay exact.
Attention reads what is stored, so chunks change no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_batch.arrays import round_up
from vlm_batch.caches.coded import CodedCache
from vlm_batch.caches.full import FullState
from vlm_batch.caches.layers import CacheKind, kind_of
from vlm_batch.caches.quantized import QuantizedCache
from vlm_batch.caches.states import LayerState, filed
from vlm_batch.caches.turbo import TurboCache
from vlm_batch.checks import whole_option
from vlm_batch.errors import shown

#: The bits and groups of ``mx.quantize``.
UNIFORM_BITS = (2, 3, 4, 5, 6, 8)
UNIFORM_GROUPS = (32, 64, 128)
#: TurboQuant's bits (arXiv:2504.19874), in halves; a half gives keys the bits below and values those above.
TURBO_BITS = (2, 8)
#: A ``start`` that no row reaches.
NEVER = 2**53
#: The most that padding to whole groups may lengthen a head.
MAX_FILLED = 1.25


@dataclass(frozen=True)
class KVQuantisation:
    """Settings of a quantised KV cache.

    Args:
        bits: Bits per number: 2, 3, 4, 5, 6 or 8; for ``turboquant`` 2 to 8, in halves.
        group_size: Numbers that share a scale and a bias: 32, 64 or 128.
        scheme: ``uniform`` is ``mx.quantize``; ``turboquant`` uses rotations and a fixed codebook.
        start: Tokens up to which a row stays exact; with the next one all its tokens are quantised.

    Raises:
        ValueError: The scheme does not support the settings.
    """

    bits: float
    group_size: int = 64
    scheme: str = "uniform"
    start: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.scheme, str) or self.scheme not in SCHEMES:
            raise ValueError(
                f"scheme is {shown(self.scheme)}; it must be one of {', '.join(SCHEMES)}"
            )
        if isinstance(self.bits, bool) or not isinstance(self.bits, Real):
            raise ValueError(
                f"kv_bits is {shown(self.bits)}; it must be a number of bits"
            )
        for name, least in (("group_size", 1), ("start", 0)):
            value = whole_option(name, vars(self)[name], least=least)
            object.__setattr__(self, name, value)
        self._coding.check(self)

    @property
    def _coding(self) -> Scheme:
        return SCHEMES[self.scheme]

    def caches(self, fresh: Sequence[Any]) -> list[Any]:
        """Replace the full-attention caches of a row that are to be quantised."""
        quantised = set(self._layers(fresh))
        found: list[Any] = []
        for index, cache in enumerate(fresh):
            instead = self._instead if index in quantised else self._exact
            found.append(kind_of(cache).with_full(instead))
        return found

    def _exact(self, exact: KVCache) -> Any:
        """Return a layer's cache that stays exact, laid out as the others' are, since layers share masks."""
        return LateCache(replace(self, start=NEVER), exact) if self.start else exact

    def _layers(self, fresh: Sequence[Any]) -> list[int]:
        """Return the indices of layers that are quantised.

        With TurboQuant, mlx-vlm leaves the last of several layers exact, alone and in a batch: errors weigh most there.
        """
        found = [
            index for index, cache in enumerate(fresh) if kind_of(cache).full_parts()
        ]
        last = len(fresh) - 1
        if self.leaves_last and last > 1 and len(found) > 1:
            return [index for index in found if index != last]
        return found

    @property
    def leaves_last(self) -> bool:
        """Whether the last of several layers stays exact."""
        return self._coding.leaves_last

    def _instead(self, exact: KVCache) -> Any:
        return LateCache(self) if self.start else self.empty()

    def counts(self, fresh: Sequence[Any]) -> tuple[int, int]:
        """Return (quantised layers, all layers)."""
        return len(self._layers(fresh)), len(fresh)

    def check_shapes(self, fresh: Sequence[Any]) -> None:
        """Raise ValueError if used caches' heads would be padded too much."""
        if not self._coding.fills_groups:
            return
        kinds = map(kind_of, fresh)
        for part in chain.from_iterable(kind.full_parts() for kind in kinds):
            self._check_depth("keys", part.keys)
            self._check_depth("values", part.values)

    def _check_depth(self, what: str, array: mx.array | None) -> None:
        depth = 0 if array is None else int(array.shape[-1])
        filled = round_up(depth, self.group_size)
        if filled > MAX_FILLED * depth:
            raise ValueError(
                f"the model's {what} have {depth} numbers a head: with group_size={self.group_size} "
                f"they would be stored as {filled}; take another of {UNIFORM_GROUPS} that fits, or "
                "scheme='turboquant'"
            )

    def empty(self) -> CodedCache:
        """Return a layer's cache without tokens."""
        return self._coding.empty(self)


class Scheme(NamedTuple):
    """A way to code keys and values."""

    #: Raises ValueError if it does not support the settings.
    check: Callable[[KVQuantisation], None]
    #: Returns a layer's cache without tokens.
    empty: Callable[[KVQuantisation], CodedCache]
    fills_groups: bool  # whether heads are filled to groups
    leaves_last: bool  # whether the last of several layers stays exact


def _check_uniform(kv: KVQuantisation) -> None:
    if kv.bits not in UNIFORM_BITS:
        advice = ""
        if kv.bits != int(kv.bits):
            advice = "; 3.5 and other halves need scheme='turboquant'"
        raise ValueError(
            f"kv_bits is {shown(kv.bits)}; uniform quantisation takes {UNIFORM_BITS}{advice}"
        )
    if kv.group_size not in UNIFORM_GROUPS:
        raise ValueError(
            f"group_size is {shown(kv.group_size)}; it must be one of {UNIFORM_GROUPS}"
        )


def _uniform(kv: KVQuantisation) -> CodedCache:
    return QuantizedCache(kv.group_size, int(kv.bits))


def _check_turboquant(kv: KVQuantisation) -> None:
    low, high = TURBO_BITS
    halves = kv.bits * 2
    if not low <= kv.bits <= high or halves != int(halves):
        raise ValueError(
            f"kv_bits is {shown(kv.bits)}; turboquant takes {low} to {high} bits, in steps of a half"
        )


def _turboquant(kv: KVQuantisation) -> CodedCache:
    return TurboCache(kv.bits)


SCHEMES = {
    "uniform": Scheme(_check_uniform, _uniform, fills_groups=True, leaves_last=False),
    "turboquant": Scheme(
        _check_turboquant, _turboquant, fills_groups=False, leaves_last=True
    ),
}


class LateCache(CacheKind):
    """One row's keys and values, exact up to ``start`` tokens, then all quantised.

    Chunks end at ``start``.
    """

    is_whole = True

    def __init__(self, how: KVQuantisation, inner: Any = None) -> None:
        self.how = how
        self.inner = KVCache() if inner is None else inner

    @property
    def is_exact(self) -> bool:
        return bool(kind_of(self.inner).full_parts())

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if self.is_exact and self.inner.offset >= self.how.start:
            self._quantise()
        return self.inner.update_and_fetch(keys, values)

    def _quantise(self) -> None:
        exact, self.inner = self.inner, self.how.empty()
        if exact.offset:
            self.inner.update_and_fetch(*exact.state)

    @property
    def offset(self) -> int:
        return int(self.inner.offset)

    @property
    def state(self) -> Any:
        return self.inner.state

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> Any:
        return self.inner.make_mask(
            length, window_size=window_size, return_array=return_array
        )

    @property
    def nbytes(self) -> int:
        return int(self.inner.nbytes)

    def saved(self, length: int) -> LateState:
        how = self.how
        return LateState(
            kind_of(self.inner).saved(length),
            (how.bits, how.group_size, how.scheme, how.start),
        )


@filed
@dataclass(frozen=True)
class LateState(LayerState):
    """Full attention quantised beyond ``start`` tokens; then it cannot be cut below that."""

    state: LayerState
    how: tuple[float, int, str, int]
    is_whole = True

    @property
    def floor(self) -> int:
        return 0 if isinstance(self.state, FullState) else self.how[3]

    def reaches(self, length: int) -> bool:
        return self.state.reaches(length) and length >= self.floor

    def restore(self, length: int) -> LateCache:
        return LateCache(KVQuantisation(*self.how), self.state.restore(length))


def settings_of(kv: KVQuantisation | None) -> dict[str, str]:
    """Return settings that a saved row must share with its batcher."""
    names = ("kv_bits", "kv_group_size", "kv_scheme", "kv_start")
    if kv is None:
        return dict.fromkeys(names, "None")
    values = (f"{kv.bits:g}", str(kv.group_size), kv.scheme, str(kv.start))
    return dict(zip(names, values, strict=True))
