"""Groups of live rows, each with its own decode forward.

All rows share a group unless shapes limit it. A row suspected of failing a forward is alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vlm_batch.caches import Placement
from vlm_batch.engine.batch import DecodeBatch, GroupKind, next_length
from vlm_batch.engine.row import Row
from vlm_batch.engine.shapes import Shapes


class DecodeGroups:
    def __init__(self, shapes: Shapes, max_rows: int) -> None:
        self._shapes = shapes
        self._most = shapes.group_size(max_rows)
        self.groups: tuple[DecodeBatch, ...] = ()  # none is empty; suspects' are last

    @property
    def rows(self) -> list[Row]:
        found: list[Row] = []
        for group in self.groups:
            found += group.rows
        return found

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def of(self, row: Row) -> DecodeBatch | None:
        """Return a row's group, if it has a place."""
        for group in self.groups:
            if row in group.places:
                return group
        return None

    def take(self, row: Row) -> list[Any]:
        """Take a row out of its group, with its caches. One without a place has them still."""
        group = self.of(row)
        if group is None:
            return row.prompt.cache
        caches = group.take(row)
        self.leave(row)
        return caches

    def keep(self, row: Row, kept: int) -> None:
        """Keep ``kept`` positions of a row with a place in the last forward."""
        group = self.of(row)
        if group is not None:
            group.keep(row, kept)

    def join(self, row: Row, caches: Sequence[Any], others: int = 0) -> None:
        """Give a row a place in the first group that takes it, else in a new one."""
        kind = self._kind(row)
        for group in self._of_kind(kind):
            room = self._most - len(group) - 1
            if room >= 0:
                group.join(row, caches, min(others, room))
                return
        most = self._shapes.group_size(1) if row.is_suspect else self._most
        group = DecodeBatch(self._shapes, most, kind)
        group.join(row, caches, min(others, most - 1))
        self.groups = tuple(sorted((*self.groups, group), key=lambda one: one.is_apart))

    def _kind(self, row: Row) -> GroupKind:
        suspect = row if row.is_suspect else None
        return GroupKind(suspect, self._shapes.least_columns(next_length(row)))

    def _of_kind(self, kind: GroupKind) -> list[DecodeBatch]:
        return [group for group in self.groups if group.kind == kind]

    def misplaced(self) -> list[Row]:
        """Return rows set apart, let back, or beyond their group's columns."""
        found: list[Row] = []
        for group in self.groups:
            found += [row for row in group.rows if self._kind(row) != group.kind]
        return found

    def move(self, row: Row) -> None:
        """Move a row to the group that it belongs to."""
        self.join(row, self.take(row))

    def slabs(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Return the slabs' (places, columns) for these rows' lengths; (1, length) each for caches per row."""
        shapes = self._shapes
        if shapes.placement(lengths) is Placement.ROWS:
            return [(1, length) for length in lengths]
        kinds: dict[int, list[int]] = {}
        for length in lengths:
            kinds.setdefault(shapes.least_columns(length), []).append(length)
        found: list[tuple[int, int]] = []
        for least, of_kind in kinds.items():
            full, rest = divmod(len(of_kind), self._most)
            places = full * self._most + shapes.places(rest, self._most)
            if len(lengths) > 1:
                there = sum(
                    len(group.places) for group in self._of_kind(GroupKind(None, least))
                )
                places = max(places, there)
            columns = shapes.columns(max(of_kind), least)
            found.append((places, columns))
        return found

    def leave(self, row: Row) -> None:
        """Free a row's place, if it has one."""
        group = self.of(row)
        if group is None:
            return
        group.leave(row)
        self.groups = tuple(one for one in self.groups if one.rows)

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
