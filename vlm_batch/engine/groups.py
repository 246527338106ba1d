"""Live rows in groups, each a batch of its own that decodes in a forward of its own.

One group holds all rows, but for rows that are decoded *apart*, after a forward that failed, until it is known whose fault it
was, and where the engine's shapes say otherwise: how many rows a forward has, and which rows may be in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vlm_batch.caches import LayerCache, Placement
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.row import Row
from vlm_batch.engine.shapes import Shapes


class DecodeGroups:
    """As many ``DecodeBatch``es as the rows need; a step decodes one by one."""

    def __init__(self, shapes: Shapes, max_rows: int) -> None:
        self._shapes = shapes
        self._most = shapes.most(max_rows)
        self._shared: tuple[DecodeBatch, ...] = ()
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

    def join(self, row: Row, caches: Sequence[Any], others: int = 0) -> None:
        """Give a prefilled row a place: in the first group of its kind that has one, or in a group of its own. ``others`` join
        next."""
        least = self._shapes.group(_next_length(row))
        if row.is_suspect:
            group = DecodeBatch(self._shapes, self._shapes.most(1), least)
            group.join(row, caches)
            self._apart = (*self._apart, group)
            return
        with_room = [group for group in self._shared if group.least == least and len(group) < self._most]
        group = with_room[0] if with_room else DecodeBatch(self._shapes, self._most, least)
        group.join(row, caches, min(others, self._most - len(group) - 1))
        if not with_room:
            self._shared = (*self._shared, group)

    def misplaced(self) -> list[Row]:
        """The rows that the next step may not decode where they are: they were set apart, or let back, or have outgrown the
        columns of their group."""
        return [
            row
            for groups, is_apart in ((self._shared, False), (self._apart, True))
            for group in groups
            for row in group.rows
            if row.is_suspect is not is_apart or group.least != self._shapes.group(_next_length(row))
        ]

    def move(self, row: Row) -> None:
        """Take a row with its caches out of its group, into the one that it belongs to."""
        caches = self.take(row)
        self.leave(row)
        self.join(row, caches)

    def slabs(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """(places, columns) that rows of so many tokens would have: at least the places that there are, unless it is a lone
        row's. Where each row keeps caches of its own, one place of its length."""
        if self._shapes.layout is Placement.ROWS:
            return [(1, length) for length in lengths]
        kinds: dict[int, list[int]] = {}
        for length in lengths:
            kinds.setdefault(self._shapes.group(length), []).append(length)
        found = []
        for least, of_kind in kinds.items():
            full, rest = divmod(len(of_kind), self._most)
            wanted = full * self._most + self._shapes.places(rest, self._most)
            there = sum(len(group.places) for group in self._shared if group.least == least)
            places = wanted if len(lengths) == 1 else max(wanted, there)
            found.append((places, self._shapes.columns(max(of_kind), least)))
        return found

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
        self._shared = tuple(group for group in self._shared if len(group))
        self._apart = tuple(group for group in self._apart if len(group))


def _next_length(row: Row) -> int:
    """Tokens that a row's caches hold after the next step."""
    return row.facts.length + max(1, row.answer.num_sampled)
