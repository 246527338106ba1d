"""Layers whose rows keep single-row caches, with one attention call per row.

Fastest on a CPU; on a GPU launches dominate (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache, cache_nbytes

from vlm_batch.arrays import arrays_of, lengths_array
from vlm_batch.caches.layers import LayerCache, kind_of


@dataclass(frozen=True)
class Run:
    """Keys or values of one row at the places [first, end), and their cache.

    ``state`` is (1, H, L, D), or quantised states, or None for an empty place. At several places lie successive
    positions of the row; the last sees all of ``state``.
    """

    first: int
    end: int
    state: Any | None
    cache: Any | None

    @property
    def count(self) -> int:
        return self.end - self.first

    def apart(self) -> list[Run]:
        """Return a run for each place."""
        if self.count == 1:
            return [self]
        whole: Any = self.state
        seen_by_first = whole.shape[2] - self.count + 1
        return [
            Run(place, place + 1, whole[:, :, : seen_by_first + ahead], self.cache)
            for ahead, place in enumerate(range(self.first, self.end))
        ]


@dataclass(frozen=True)
class RowStates:
    """Keys or values of rows of different lengths, in an array's place."""

    runs: tuple[Run, ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, longest L, D)"""
        shapes = [run.state.shape for run in self.runs if run.state is not None]
        _, heads, _, width = shapes[0]
        longest = max(shape[2] for shape in shapes)
        return (self.runs[-1].end, heads, longest, width)

    def apart(self) -> list[Run]:
        """Return a run for each place."""
        found: list[Run] = []
        for run in self.runs:
            found += run.apart()
        return found


@dataclass(frozen=True)
class RowMasks:
    """Each place's mask; None attends to the whole cache."""

    rows: tuple[mx.array | None, ...]

    @classmethod
    def of(cls, rows: Sequence[mx.array | None]) -> RowMasks | None:
        """Return the masks, or None if no place has one."""
        if all(mask is None for mask in rows):
            return None
        return cls(tuple(rows))


def attend_rows(
    attention: Callable[..., mx.array],
    queries: mx.array,
    keys: RowStates,
    values: RowStates,
    scale: float,
    mask: RowMasks | mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend with queries (B, H, 1, D), one call for each row. Empty places give zeros."""
    settings: dict[str, Any] = {"scale": scale}
    if sinks is not None:
        settings["sinks"] = sinks
    outputs: list[mx.array] = []  # per run
    empty: list[int] = []  # indices of runs
    runs = (keys.runs, values.runs) if mask is None else (keys.apart(), values.apart())
    for run, other in zip(*runs, strict=True):
        of_row, own = queries[run.first : run.end], _mask_of(mask, run)
        if run.state is None:
            empty.append(len(outputs))
            outputs.append(of_row)
            continue
        if run.count > 1:
            # successive positions are one row's queries
            of_row, own = of_row.swapaxes(0, 2), _causal(run)
        found = attention(
            of_row, run.state, other.state, run.cache, mask=own, **settings
        )
        outputs.append(found.swapaxes(0, 2) if run.count > 1 else found)
    _fill(outputs, empty)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)


def _fill(outputs: list[mx.array], empty: Sequence[int]) -> None:
    """Put zeros for empty places; values may have another width than queries."""
    if not empty:
        return
    live = set(range(len(outputs))).difference(empty)
    nothing = mx.zeros_like(outputs[min(live, default=0)][:1])
    for index in empty:
        outputs[index] = nothing


def _mask_of(mask: RowMasks | mx.array | None, run: Run) -> mx.array | None:
    """Return the mask of a run of one place."""
    if mask is None:
        return None
    if isinstance(mask, RowMasks):
        return mask.rows[run.first]
    has_rows = mask.ndim == 4 and mask.shape[0] > 1
    return mask[run.first : run.end] if has_rows else mask


def _causal(run: Run) -> mx.array:
    """Return the mask (count, L) of a run's positions, of which the last sees all."""
    assert run.state is not None
    length = run.state.shape[2]
    last = mx.arange(length - run.count, length)
    return mx.arange(length) <= last[:, None]


class RowsCache(LayerCache):
    """One layer of a batch; ``places[b]``: the cache of place b, or None."""

    def __init__(self) -> None:
        self.places: list[Any | None] = []

    def put(self, place: int, cache: Any) -> None:
        """Adopt a row's cache without a copy."""
        self.places[place] = cache

    def extract(self, place: int) -> Any:
        return self.places[place]

    def clear(self, place: int) -> None:
        self.places[place] = None

    def keep_places(self, places: list[int]) -> None:
        """Keep these places, in their order."""
        self.places = [self.places[place] for place in places]

    def resize(self, num_places: int) -> None:
        del self.places[num_places:]
        self.places.extend([None] * (num_places - len(self.places)))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(0 if cache is None else int(cache.offset) for cache in self.places)

    @property
    def offset(self) -> mx.array:
        """``lengths`` as an array (B,), for RoPE."""
        return lengths_array(self.lengths)

    @property
    def _idx(self) -> int:
        """The longest row, as mlx-vlm names it."""
        return max(self.lengths, default=0)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[RowStates, RowStates]:
        coded = self._coded(keys, values)
        if coded is not None:
            return self._states(
                lambda cache, place: cache.append_coded(
                    *(states.of_row(place) for states in coded)
                )
            )
        return self._states(
            lambda cache, place: cache.update_and_fetch(
                keys[place : place + 1], values[place : place + 1]
            )
        )

    def _coded(self, keys: mx.array, values: mx.array) -> tuple[Any, Any] | None:
        """Code all rows' keys and values together, unless bits must not depend on how many they are."""
        live = self.live
        if self.always_masked or not live:
            return None
        return kind_of(live[0]).code_rows(keys, values)

    @property
    def state(self) -> tuple[RowStates, RowStates]:
        """All keys and values, for layers that share them."""
        return self._states(lambda cache, place: cache.state)

    def _states(
        self, read: Callable[[Any, int], tuple[Any, Any]]
    ) -> tuple[RowStates, RowStates]:
        runs = _Runs()
        for place, cache in enumerate(self.places):
            held = (None, None) if cache is None else read(cache, place)
            runs.add(place, place + 1, held, cache)
        return runs.states()

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> RowMasks | None:
        """Return the rows' masks for one token; None if no row needs one."""
        if length != 1:
            raise ValueError(f"a batch decodes one token a row, not {length}")
        return RowMasks.of([_mask_for(cache, window_size) for cache in self.places])

    @property
    def live(self) -> list[Any]:
        # another thread may ask while rows leave
        return [cache for cache in tuple(self.places) if cache is not None]

    @property
    def nbytes(self) -> int:
        return sum(cache_nbytes(cache) for cache in self.live)

    def arrays(self) -> list[mx.array]:
        return arrays_of([cache.state for cache in self.live])

    @property
    def most_positions(self) -> int:  # type: ignore[override]
        most = [
            kind_of(cache).most_positions(is_fixed=self.always_masked)
            for cache in self.live
        ]
        return min(most, default=1)

    def drafted(self, counts: Sequence[int]) -> DraftedRows:
        return DraftedRows(self, counts)

    def keep(self, place: int, kept: int, of: int) -> None:
        if of > 1:
            kind_of(self.places[place]).keep(kept, of)


class _Runs:
    """Runs of keys and of values, place by place."""

    def __init__(self) -> None:
        self._keys: list[Run] = []
        self._values: list[Run] = []

    def add(self, first: int, end: int, states: tuple[Any, Any], cache: Any) -> None:
        keys, values = states
        self._keys.append(Run(first, end, keys, cache))
        self._values.append(Run(first, end, values, cache))

    def states(self) -> tuple[RowStates, RowStates]:
        return RowStates(tuple(self._keys)), RowStates(tuple(self._values))


def _mask_for(cache: Any | None, window_size: int | None) -> mx.array | None:
    """Return a row's mask for one token."""
    if cache is None:
        return None
    found: mx.array | None = cache.make_mask(
        1, window_size=window_size, return_array=False
    )
    return found


class DraftedRows(RowsCache):
    """A ``RowsCache`` with ``counts[p]`` positions of place p, each attending separately."""

    def __init__(self, layer: RowsCache, counts: Sequence[int]) -> None:
        super().__init__()
        self.always_masked = layer.always_masked
        self._layer, self._counts = layer, tuple(counts)
        self._before: list[int] = []  # tokens that each position sees before its own
        self._appended: tuple[RowStates, RowStates] | None = None
        each = zip(layer.places, layer.lengths, counts, strict=True)
        for cache, length, count in each:
            if count > 1:
                kind_of(cache).draft(count)
            self.places += [cache] * count
            self._before += range(length, length + count)

    @property
    def lengths(self) -> tuple[int, ...]:
        if self._appended is None:
            return tuple(self._before)
        return tuple(
            before if cache is None else before + 1
            for before, cache in zip(self._before, self.places, strict=True)
        )

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[RowStates, RowStates]:
        runs = _Runs()
        ends = accumulate(self._counts)
        for cache, count, end in zip(
            self._layer.places, self._counts, ends, strict=True
        ):
            first = end - count
            if cache is None:
                for place in range(first, end):
                    runs.add(place, place + 1, (None, None), None)
            elif count == 1:
                one = cache.update_and_fetch(keys[first:end], values[first:end])
                runs.add(first, end, one, cache)
            elif count:
                self._append(runs, cache, first, keys[first:end], values[first:end])
        self._appended = runs.states()
        return self._appended

    def _append(
        self, runs: _Runs, cache: Any, first: int, keys: mx.array, values: mx.array
    ) -> None:
        """Append a row's positions (N, H, 1, D) together; each attends to those before it."""
        count = len(keys)
        both = cache.update_and_fetch(keys.swapaxes(0, 2), values.swapaxes(0, 2))
        if type(cache) is KVCache and not self.always_masked:
            runs.add(first, first + count, both, cache)
            return
        seen = zip(*(_seen(part, cache, count) for part in both), strict=True)
        for place, states in enumerate(seen, first):
            runs.add(place, place + 1, states, cache)

    @property
    def state(self) -> tuple[RowStates, RowStates]:
        assert self._appended is not None
        return self._appended

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> RowMasks | None:
        if length != 1:
            raise ValueError(f"a position has one token, not {length}")
        masks: list[mx.array | None] = []
        for cache, count in zip(self._layer.places, self._counts, strict=True):
            for ahead in range(count):
                with _further(cache, ahead):
                    masks.append(_mask_for(cache, window_size))
        return RowMasks.of(masks)


def _seen(states: Any, cache: Any, count: int) -> Iterator[Any]:
    """Yield what each of a row's last ``count`` positions sees."""
    window = kind_of(cache).span
    length = states.shape[2]
    for end in range(length - count + 1, length + 1):
        begin = 0 if window is None else max(0, end - window)
        if isinstance(states, mx.array):
            yield states[:, :, begin:end]
        else:
            yield states.between(begin, end)


@contextmanager
def _further(cache: Any, count: int) -> Iterator[None]:
    """Count a row's first ``count`` drafted tokens as cached."""
    if cache is None or not count:
        yield
        return
    counter = kind_of(cache).counter
    counter.offset += count
    try:
        yield
    finally:
        counter.offset -= count
