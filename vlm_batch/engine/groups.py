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
        self._most = shapes.group_size(max_rows)
        self.groups: tuple[DecodeBatch, ...] = ()  # those of rows that are apart at the end; each has a row

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

    def of(self, row: Row) -> DecodeBatch | None:
        """The group that a row is in; None if it has no place."""
        return next((group for group in self.groups if row in group.places), None)

    def join(self, row: Row, caches: Sequence[Any], others: int = 0) -> None:
        """Give a prefilled row a place: in the first group of its kind that has one, or in a group of its own. ``others`` join
        next."""
        least, is_apart = self._shapes.least_columns(_next_length(row)), row.is_suspect
        for group in self.groups:
            if not (is_apart or group.is_apart) and group.least == least and len(group) < self._most:
                group.join(row, caches, min(others, self._most - len(group) - 1))
                return
        most = self._shapes.group_size(1) if is_apart else self._most
        group = DecodeBatch(self._shapes, most, least, is_apart=is_apart)
        group.join(row, caches, 0 if is_apart else min(others, most - 1))
        self.groups = tuple(sorted((*self.groups, group), key=lambda one: one.is_apart))

    def misplaced(self) -> list[Row]:
        """The rows that the next step may not decode where they are: they were set apart, or let back, or have outgrown the
        columns of their group."""
        return [
            row
            for group in self.groups
            for row in group.rows
            if row.is_suspect is not group.is_apart or group.least != self._shapes.least_columns(_next_length(row))
        ]

    def move(self, row: Row) -> None:
        """Take a row with its caches out of its group, into the one that it belongs to."""
        group = self.of(row)
        assert group is not None
        caches = group.take(row)
        self.leave(row)
        self.join(row, caches)

    def slabs(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """(places, columns) that rows of so many tokens would have: at least the places that there are, unless it is a lone
        row's. Where each row keeps caches of its own, one place of its length."""
        if self._shapes.layout is Placement.ROWS:
            return [(1, length) for length in lengths]
        kinds: dict[int, list[int]] = {}
        for length in lengths:
            kinds.setdefault(self._shapes.least_columns(length), []).append(length)
        found = []
        for least, of_kind in kinds.items():
            full, rest = divmod(len(of_kind), self._most)
            wanted = full * self._most + self._shapes.places(rest, self._most)
            there = sum(len(group.places) for group in self.groups if group.least == least and not group.is_apart)
            places = wanted if len(lengths) == 1 else max(wanted, there)
            found.append((places, self._shapes.columns(max(of_kind), least)))
        return found

    def leave(self, row: Row) -> None:
        """Free a row's place, if it has one; a group without rows ends."""
        if (group := self.of(row)) is not None:
            group.leave(row)
            self.groups = tuple(group for group in self.groups if group.rows)

    def drop(self, rows: Iterable[Row]) -> list[Row]:
        """Let go of the groups of some rows with all that they hold, unread and unwritten; all rows that were in them."""
        lost = set(rows)
        broken = [group for group in self.groups if not lost.isdisjoint(group.rows)]
        found = [row for group in broken for row in group.rows]
        for group in broken:
            group.drop()
        self.groups = tuple(group for group in self.groups if group not in broken)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of KV that the live rows' layers hold."""
        return sum(group.nbytes for group in self.groups)


def _next_length(row: Row) -> int:
    """Tokens that a row's caches hold after the next step."""
    return row.facts.length + max(1, row.answer.num_sampled)
