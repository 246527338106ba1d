"""Groups of live rows, each with its own decode forward.

All rows share a group unless shapes limit it. A row suspected of failing a forward is alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vlm_batch.caches import LayerCache, Placement
from vlm_batch.engine.batch import DecodeBatch, next_length
from vlm_batch.engine.row import Row
from vlm_batch.engine.shapes import Shapes


class DecodeGroups:
    def __init__(self, shapes: Shapes, max_rows: int) -> None:
        self._shapes = shapes
        self._most = shapes.group_size(max_rows)
        self.groups: tuple[DecodeBatch, ...] = ()  # none is empty; suspects' are last

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]

    @property
    def places(self) -> list[Row | None]:
        return [place for group in self.groups for place in group.places]

    @property
    def layers(self) -> list[LayerCache]:
        return [layer for group in self.groups for layer in group.layers]

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def of(self, row: Row) -> DecodeBatch | None:
        """Return a row's group."""
        for group in self.groups:
            if row in group.places:
                return group
        return None

    def join(self, row: Row, caches: Sequence[Any], others: int = 0) -> None:
        """Give a row a place in the first group that takes it, else in a new one."""
        group = self._group_for(row)
        if group is not None:
            room = self._most - len(group) - 1
            group.join(row, caches, min(others, room))
            return
        is_apart = row.is_suspect
        most = self._shapes.group_size(1) if is_apart else self._most
        least = self._shapes.least_columns(next_length(row))
        group = DecodeBatch(self._shapes, most, least, is_apart=is_apart)
        group.join(row, caches, 0 if is_apart else min(others, most - 1))
        self.groups = tuple(sorted((*self.groups, group), key=lambda one: one.is_apart))

    def _group_for(self, row: Row) -> DecodeBatch | None:
        if row.is_suspect:
            return None
        least = self._shapes.least_columns(next_length(row))
        for group in self.groups:
            has_room = len(group) < self._most
            if has_room and group.least == least and not group.is_apart:
                return group
        return None

    def misplaced(self) -> list[Row]:
        """Return rows set apart, let back, or beyond their group's columns."""
        found: list[Row] = []
        for group in self.groups:
            for row in group.rows:
                least = self._shapes.least_columns(next_length(row))
                if row.is_suspect is not group.is_apart or least != group.least:
                    found.append(row)
        return found

    def move(self, row: Row) -> None:
        """Move a row to the group that it belongs to."""
        group = self.of(row)
        assert group is not None
        caches = group.take(row)
        self.leave(row)
        self.join(row, caches)

    def slabs(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Return the slabs' (places, columns) for these rows' lengths; (1, length) each for caches per row."""
        if self._shapes.layout is Placement.ROWS:
            is_slab = lengths and self._shapes.placement(lengths) is Placement.SLAB
            if is_slab:
                return [(len(lengths), self._shapes.columns(max(lengths)))]
            return [(1, length) for length in lengths]
        kinds: dict[int, list[int]] = {}
        for length in lengths:
            kinds.setdefault(self._shapes.least_columns(length), []).append(length)
        found: list[tuple[int, int]] = []
        for least, of_kind in kinds.items():
            full, rest = divmod(len(of_kind), self._most)
            places = full * self._most + self._shapes.places(rest, self._most)
            if len(lengths) > 1:
                places = max(places, self._num_places(least))
            found.append((places, self._shapes.columns(max(of_kind), least)))
        return found

    def _num_places(self, least: int) -> int:
        """Return the places that there are in slabs of at least so many columns."""
        count = 0
        for group in self.groups:
            if group.least == least and not group.is_apart:
                count += len(group.places)
        return count

    def leave(self, row: Row) -> None:
        """Free a row's place, if it has one."""
        group = self.of(row)
        if group is not None:
            group.leave(row)
            self.groups = tuple(group for group in self.groups if group.rows)

    def drop(self, rows: Iterable[Row]) -> list[Row]:
        """Drop these rows' groups. Returns all rows in them."""
        lost = set(rows)
        found: list[Row] = []
        kept: list[DecodeBatch] = []
        for group in self.groups:
            if lost.isdisjoint(group.rows):
                kept.append(group)
            else:
                found += group.rows
                group.drop()
        self.groups = tuple(kept)
        return found

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)
