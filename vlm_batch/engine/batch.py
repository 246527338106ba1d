"""The live rows and where their KV lies: join and leave, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.caches import DenseCache, LayerCache, Placement, level
from vlm_batch.engine.row import Row, Status
from vlm_batch.engine.shapes import Shapes

#: Places of slabs are given up once all rows are among the first of so many times fewer: where there are slabs, launches decide
#: what a step takes, and each change of their shape copies what is in them.
FEW = 4


class DecodeBatch:
    """Rows that decode together. ``places[b]`` is the row at place b of every layer's cache, or None.

    With ``Placement.ROWS`` the places stay dense; with ``Placement.SLAB`` a place is kept until another row takes it. How many
    there are, ``shapes`` say; places without a row run and are thrown away. Slabs have at least ``least`` columns. A batch that
    ``is_apart`` is one row's whose last forward failed.
    """

    def __init__(self, shapes: Shapes, max_rows: int, least: int = 0, *, is_apart: bool = False) -> None:
        self.least = least
        self.is_apart = is_apart
        self.max_rows = max_rows
        self._shapes = shapes
        self.places: list[Row | None] = []
        self.layers: list[LayerCache] = []

    @property
    def rows(self) -> list[Row]:
        return [row for row in self.places if row is not None]

    def __len__(self) -> int:
        return len(self.rows)

    def join(self, row: Row, caches: Sequence[Any], others: int = 0) -> None:
        """Give a prefilled row a place; ``others`` will want one at once, too. Only its own KV is touched, unless there are too
        few places; its single-row caches belong to the batch from now on."""
        if not self.layers:
            self.layers = self._shapes.layers(caches, len(self.places), self.least)
        before = len(self.places)
        try:
            if None not in self.places:
                # on a CPU each is copied once, whoever else comes
                more = 0 if self._shapes.layout is Placement.ROWS else others
                self._resize(min(before + 1 + more, self.max_rows))
            place = self.places.index(None)
            for layer, single in zip(self.layers, caches, strict=True):
                layer.put(place, single)
        except BaseException:
            self._restore(before)
            raise
        self.places[place] = row
        row.status = Status.DECODE

    def take(self, row: Row) -> list[Any]:
        """Take a live row's caches back as single-row caches, with all that it has seen; call it when the row leaves."""
        place = self.places.index(row)
        taken = [layer.take(place) for layer in self.layers]
        mx.async_eval([cache.state for cache in taken])  # a slab is written next step: nobody may hold it then
        return taken

    def leave(self, row: Row) -> None:
        """Free a row's place; nobody else moves."""
        place = self.places.index(row)
        if self._shapes.layout is Placement.ROWS:
            del self.places[place]
            for layer in self.layers:
                assert isinstance(layer, DenseCache)
                layer.remove(place)
            self._resize(len(self.places))
        else:
            self.places[place] = None
            for layer in self.layers:
                layer.clear(place)
            last = max((index + 1 for index, other in enumerate(self.places) if other is not None), default=0)
            if FEW * last <= len(self.places):
                self._resize(last)
        if not self.places:
            self.layers = []  # the memory of an idle batch goes back

    def drop(self) -> None:
        """Let go of all rows and layers, whatever state those are in."""
        self.places, self.layers = [], []

    def _resize(self, wanted: int) -> None:
        """Have at least ``wanted`` places."""
        wanted = self._shapes.places(wanted, self.max_rows)
        for layer in self.layers:
            layer.resize(wanted)
        self.places = (self.places + [None] * wanted)[:wanted]

    def _restore(self, num_places: int) -> None:
        """Have every layer hold the rows of the first places and nothing else, all layers alike, after something raised when
        only some of them, or one array of one, had been changed. Nothing is computed for it."""
        del self.places[num_places:]
        if not self.rows:
            self.drop()
        for layer in self.layers:
            layer.resize(num_places)
            for place in [place for place, row in enumerate(self.places) if row is None]:
                layer.clear(place)
        level(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of KV that the live rows' layers hold."""
        return sum(layer.nbytes for layer in self.layers)
