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
        return next((group for group in self.groups if row in group.places), None)

    def join(self, row: Row, caches: Sequence[Any], others: int = 0) -> None:
        """Give a row a place in the first group that takes it, else in a new one."""
        least, is_apart = self._shapes.least_columns(next_length(row)), row.is_suspect
        for group in self.groups:
            if (
                not (is_apart or group.is_apart)
                and group.least == least
                and len(group) < self._most
            ):
                group.join(row, caches, min(others, self._most - len(group) - 1))
                return
        most = self._shapes.group_size(1) if is_apart else self._most
        group = DecodeBatch(self._shapes, most, least, is_apart=is_apart)
        group.join(row, caches, 0 if is_apart else min(others, most - 1))
        self.groups = tuple(sorted((*self.groups, group), key=lambda one: one.is_apart))

    def misplaced(self) -> list[Row]:
        """Rows set apart, let back, or beyond their group's columns."""
        return [
            row
            for group in self.groups
            for row in group.rows
            if row.is_suspect is not group.is_apart
            or group.least != self._shapes.least_columns(next_length(row))
        ]

    def move(self, row: Row) -> None:
        group = self.of(row)
        assert group is not None
        caches = group.take(row)
        self.leave(row)
        self.join(row, caches)

    def slabs(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Return the slabs' (places, columns) for these rows' lengths; (1, length) each for caches per row."""
        if self._shapes.layout is Placement.ROWS:
            if lengths and self._shapes.placement(lengths) is Placement.SLAB:
                return [(len(lengths), self._shapes.columns(max(lengths)))]
            return [(1, length) for length in lengths]
        kinds: dict[int, list[int]] = {}
        for length in lengths:
            kinds.setdefault(self._shapes.least_columns(length), []).append(length)
        found = []
        for least, of_kind in kinds.items():
            full, rest = divmod(len(of_kind), self._most)
            wanted = full * self._most + self._shapes.places(rest, self._most)
            there = sum(
                len(group.places)
                for group in self.groups
                if group.least == least and not group.is_apart
            )
            places = wanted if len(lengths) == 1 else max(wanted, there)
            found.append((places, self._shapes.columns(max(of_kind), least)))
        return found

    def leave(self, row: Row) -> None:
        if (group := self.of(row)) is not None:
            group.leave(row)
            self.groups = tuple(group for group in self.groups if group.rows)

    def drop(self, rows: Iterable[Row]) -> list[Row]:
        """Drop these rows' groups. Returns all rows in them."""
        lost = set(rows)
        broken = [group for group in self.groups if not lost.isdisjoint(group.rows)]
        found = [row for group in broken for row in group.rows]
        for group in broken:
            group.drop()
        self.groups = tuple(group for group in self.groups if group not in broken)
        return found

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)
