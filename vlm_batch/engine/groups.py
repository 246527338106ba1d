"""Live rows in groups, each a batch of its own: where no number of rows is known to agree with larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlm_batch.caches import LayerCache, Placement
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.exact import Exact
from vlm_batch.engine.row import Row


class DecodeGroups:
    """As many ``DecodeBatch``es as the rows need, of at most ``exact.counts[-1]`` rows each; a step decodes one by one."""

    def __init__(self, placement: Placement, max_rows: int, exact: Exact) -> None:
        self._placement = exact.layout if exact.layout is Placement.SLAB else placement
        self._exact = exact
        self._most = exact.places(min(max_rows, exact.counts[-1]))
        self.groups: tuple[DecodeBatch, ...] = (self._empty(),)

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]

    @property
    def places(self) -> list[Row | None]:
        """The places of all groups, one after another."""
        return [place for group in self.groups for place in group.places]

    @property
    def layers(self) -> list[LayerCache]:
        """The layers of all groups, one after another."""
        return [layer for group in self.groups for layer in group.layers]

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def join(self, row: Row, caches: Sequence[Any]) -> None:
        """Give a prefilled row a place in the first group that has one."""
        group = next((group for group in self.groups if len(group) < self._most), None)
        if group is None:
            group = self._empty()
            self.groups = (*self.groups, group)
        group.join(row, caches)

    def take(self, row: Row) -> list[Any]:
        """Take a live row's caches back as single-row caches, with all that it has seen; call it when the row leaves."""
        return next(group for group in self.groups if row in group.places).take(row)

    def leave(self, row: Row) -> None:
        """Free a row's place, if it has one; a group without rows ends."""
        for group in self.groups:
            group.leave(row)
        self.groups = tuple(group for group in self.groups if len(group)) or self.groups[:1]

    @property
    def nbytes(self) -> int:
        """Bytes of KV that the live rows' layers hold."""
        return sum(group.nbytes for group in self.groups)

    def _empty(self) -> DecodeBatch:
        return DecodeBatch(self._placement, self._most, self._exact)
