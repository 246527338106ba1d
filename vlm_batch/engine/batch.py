"""Rows that decode together, with keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from vlm_batch.caches import LayerCache, Placement, equalise_capacity
from vlm_batch.caches.drafted import most_positions
from vlm_batch.engine.row import Row
from vlm_batch.engine.shapes import Shapes

#: Slabs shrink once all rows lie in the first 1 / FEW of their places: shrinking copies, and idle places cost a GPU little.
FEW = 4


class GroupKind(NamedTuple):
    """Rows of one kind may decode together."""

    suspect: Row | None = None  # whose last forward failed: it is alone
    least: int = 0  # fewest columns of slabs


USUAL = GroupKind()


class DecodeBatch:
    """Rows of one decode forward; ``places[b]``: the row at place b, or None."""

    def __init__(self, shapes: Shapes, max_rows: int, kind: GroupKind = USUAL) -> None:
        self.kind = kind
        self.max_rows = max_rows
        self._shapes = shapes
        #: A place is kept until another row takes it, on a CPU until the next forward.
        self.places: list[Row | None] = []
        self.layers: list[LayerCache] = []
        self._placement = shapes.layout
        self.num_positions = 0  # of the last forward
        # positions of rows with drafts in the last forward
        self._drafted: dict[Row, int] = {}

    @property
    def is_apart(self) -> bool:
        """Whether it is of one row, which is suspected of a failure."""
        return self.kind.suspect is not None

    @property
    def rows(self) -> list[Row]:
        return [row for row in self.places if row is not None]

    def __len__(self) -> int:
        return len(self.places) - self.places.count(None)

    def join(self, row: Row, caches: Sequence[Any], others: int = 0) -> None:
        """Give a prefilled row a place. ``others``: rows that join next."""
        if not self.layers:
            self._placement = self._shapes.layout
            self.layers = self._shapes.layers(caches, len(self.places), self.kind.least)
        self._switch(row)
        before = len(self.places)
        try:
            if None not in self.places:
                self._make_room(others)
            place = self.places.index(None)
            put_row(self.layers, place, caches)
        except BaseException:
            self._restore(before)
            raise
        self.places[place] = row

    def _make_room(self, others: int) -> None:
        """Add a place, in slabs also those of ``others``: a cache per row is never copied to make room."""
        wanted = len(self.places) + 1
        if self._placement is Placement.SLAB:
            wanted += others
        self._resize(min(wanted, self.max_rows))

    def lay_out(self) -> None:
        """Prepare a forward: drop needless places and choose the layout, on a CPU."""
        if self._shapes.layout is not Placement.ROWS:
            return
        enough = self._shapes.places(len(self), self.max_rows)
        if len(self.places) > enough:
            kept = self._live_places()
            for layer in self.layers:
                layer.keep_places(kept)
            self.places = [*self.rows]
            self._resize(len(kept))
        self._switch()

    def _switch(self, *joining: Row) -> None:
        """Switch between caches per row and slabs before ``joining`` rows join."""
        if self._drafted:
            return
        rows = self.rows
        lengths = [*map(next_length, rows), *map(next_length, joining)]
        wanted = self._shapes.placement(lengths, self._placement)
        if wanted is self._placement:
            return
        if rows:
            self._lay_out_as(wanted)
        self._placement = wanted

    def _lay_out_as(self, placement: Placement) -> None:
        """Move all rows to layers of another placement, without empty places."""
        taken = [self._extract(place) for place in self._live_places()]
        layers = self._shapes.layers(taken[0], len(taken), self.kind.least, placement)
        for layer in layers:
            layer.resize(len(taken))
        for place, caches in enumerate(taken):
            put_row(layers, place, caches)
        self.layers = layers
        self.places = [*self.rows]

    def _extract(self, place: int) -> list[Any]:
        return [layer.extract(place) for layer in self.layers]

    def _live_places(self) -> list[int]:
        return [place for place, row in enumerate(self.places) if row is not None]

    def take(self, row: Row) -> list[Any]:
        """Return a row's single-row caches. The row must leave next."""
        self.keep(row, 1)
        taken = self._extract(self.places.index(row))
        # the next step writes to the slab, which nobody may hold then
        mx.async_eval([cache.state for cache in taken])
        return taken

    def leave(self, row: Row) -> None:
        """Free a row's place. No other row moves."""
        self._drafted.pop(row, None)
        place = self.places.index(row)
        self.places[place] = None
        if not self.rows:
            self.drop()  # frees an idle batch's memory
            return
        for layer in self.layers:
            layer.clear(place)
        if self._shapes.layout is Placement.ROWS:
            return
        last = self._live_places()[-1] + 1
        if FEW * last <= len(self.places):
            self._resize(last)

    def drop(self) -> None:
        self.places, self.layers = [], []
        self._drafted.clear()

    # Drafts

    @property
    def room(self) -> int:
        """Positions of each row for which a forward has room."""
        longest = max(map(next_length, self.rows))
        places = len(self.places)
        each = self._shapes.room(len(self), places, self._placement, longest)
        return min(each, most_positions(self.layers))

    def counts(self, drafts: Mapping[Row, int]) -> list[int] | None:
        """Return each place's positions for these draft lengths, or None."""
        most = most_positions(self.layers)
        wanted = [0] * len(self.places)
        for place, row in enumerate(self.places):
            if row is not None:
                wanted[place] = 1 + drafts.get(row, 0)
        counts = self._shapes.counts_of(wanted, self._placement)
        if counts is None or max(counts) > most:
            return None
        longest = max(map(next_length, self.rows))
        has_room = self._shapes.has_room(longest, max(counts))
        return counts if has_room else None

    def with_drafts(self, counts: Sequence[int]) -> list[Any]:
        """Return the layers for ``counts[b]`` positions at place b."""
        return [layer.drafted(counts) for layer in self.layers]

    def was_drafted(self, counts: Sequence[int]) -> None:
        """Record a drafted forward. Rows without drafts keep what they have said."""
        self.num_positions = sum(counts)
        for place, (row, count) in enumerate(zip(self.places, counts, strict=True)):
            if row is None:
                continue
            if row.answer.drafter.ahead:
                self._drafted[row] = count
            else:
                self._keep(place, 1 + len(row.answer.ahead), count)

    def keep(self, row: Row, kept: int) -> None:
        """Keep ``kept`` positions of a row in the last forward."""
        if row in self._drafted:
            count = self._drafted.pop(row)
            self._keep(self.places.index(row), kept, count)

    def _keep(self, place: int, kept: int, of: int) -> None:
        for layer in self.layers:
            layer.keep(place, kept, of)

    def _resize(self, wanted: int) -> None:
        wanted = self._shapes.places(wanted, self.max_rows)
        for layer in self.layers:
            layer.resize(wanted)
        self.places = (self.places + [None] * wanted)[:wanted]

    def _restore(self, num_places: int) -> None:
        """Cut all layers back after a failed join."""
        del self.places[num_places:]
        if not self.rows:
            self.drop()
        empty = [place for place, row in enumerate(self.places) if row is None]
        for layer in self.layers:
            layer.resize(num_places)
            for place in empty:
                layer.clear(place)
        equalise_capacity(self.layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


def put_row(layers: Sequence[LayerCache], place: int, caches: Sequence[Any]) -> None:
    """Put one row's caches at an empty place of a batch's layers."""
    for layer, cache in zip(layers, caches, strict=True):
        layer.put(place, cache)


def next_length(row: Row) -> int:
    """Return a row's cached tokens after the next step."""
    return row.facts.length + max(1, row.answer.num_sampled)
