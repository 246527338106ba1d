"""Live rows in groups, each a batch of its own that decodes in a forward of its own.

One group holds all rows, but where no number of rows is known to agree with larger ones (``exact``), and for rows that are
decoded *apart*: after a forward that failed, until it is known whose fault it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vlm_batch.caches import LayerCache, Placement
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.exact import Exact
from vlm_batch.engine.row import Row
from vlm_batch.policy import PACKED


class DecodeGroups:
    """As many ``DecodeBatch``es as the rows need; a step decodes one by one.

    Without ``exact`` one of ``max_rows`` rows; with it, of at most ``exact.counts[-1]`` rows each.
    """

    def __init__(
        self,
        placement: Placement,
        max_rows: int,
        exact: Exact | None = None,
        *,
        few_bits: str = PACKED,
    ) -> None:
        self._placement = exact.layout if exact is not None and exact.layout is Placement.SLAB else placement
        self._exact = exact
        self._few_bits = few_bits
        self._most = max_rows if exact is None else exact.places(min(max_rows, exact.counts[-1]))
        self._shared: tuple[DecodeBatch, ...] = (self._empty(),)
        self._apart: tuple[DecodeBatch, ...] = ()

    @property
    def groups(self) -> tuple[DecodeBatch, ...]:
        """Those of several rows first."""
        return (*self._shared, *self._apart)

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

    def __contains__(self, row: Row) -> bool:
        return any(row in group.places for group in self.groups)

    def is_apart(self, row: Row) -> bool:
        """Whether a row decodes in a forward of its own."""
        return any(row in group.places for group in self._apart)

    def join(self, row: Row, caches: Sequence[Any], *, others: int = 0, apart: bool = False) -> None:
        """Give a prefilled row a place: in the first group that has one, or in a group of its own. ``others`` join next."""
        if apart:
            group = self._empty(None if self._exact is not None else 1)
            group.join(row, caches)
            self._apart = (*self._apart, group)
            return
        with_room = [group for group in self._shared if len(group) < self._most]
        if not with_room:
            with_room = [self._empty()]
            self._shared += (with_room[0],)
        with_room[0].join(row, caches, min(others, self._most - len(with_room[0]) - 1))

    def places_for(self, num_rows: int) -> int:
        """Places that there would be with so many rows: at least those that there are, unless it is a lone row's."""
        full, rest = divmod(num_rows, self._most)
        wanted = full * self._most + self._shared[0].places_for(rest)
        return wanted if num_rows <= 1 else max(wanted, sum(len(group.places) for group in self._shared))

    def move(self, row: Row, *, apart: bool) -> None:
        """Take a row with its caches out of its group, into one of its own or back."""
        caches = self.take(row)
        self.leave(row)
        self.join(row, caches, apart=apart)

    def take(self, row: Row) -> list[Any]:
        """Take a live row's caches back as single-row caches, with all that it has seen; call it when the row leaves."""
        return next(group for group in self.groups if row in group.places).take(row)

    def leave(self, row: Row) -> None:
        """Free a row's place, if it has one; a group without rows ends."""
        for group in self.groups:
            group.leave(row)
        self._close_up()

    def drop(self, rows: Iterable[Row]) -> list[Row]:
        """Let go of the groups of some rows with all that they hold, unread and unwritten; all rows that were in them."""
        lost = set(rows)
        broken = [group for group in self.groups if not lost.isdisjoint(group.rows)]
        found = [row for group in broken for row in group.rows]
        for group in broken:
            group.drop()
        self._close_up()
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of KV that the live rows' layers hold."""
        return sum(group.nbytes for group in self.groups)

    def _close_up(self) -> None:
        self._shared = tuple(group for group in self._shared if len(group)) or self._shared[:1]
        self._apart = tuple(group for group in self._apart if len(group))

    def _empty(self, places: int | None = None) -> DecodeBatch:
        return DecodeBatch(self._placement, places or self._most, self._exact, few_bits=self._few_bits)
