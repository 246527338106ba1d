"""Where every row is: the one index of an engine's rows, by id and by stage."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable

from vlm_batch.engine.row import Row, Stage
from vlm_batch.engine.schedule import by_client

#: Where a row may come from, by where it goes. New rows begin in the inbox, prepared, or, as further answers, ready.
COMES_FROM: dict[Stage, frozenset[Stage]] = {
    Stage.INBOX: frozenset(),
    Stage.READING: frozenset({Stage.INBOX}),
    Stage.READ: frozenset({Stage.READING}),
    Stage.PROCESSING: frozenset({Stage.READ}),
    Stage.PREPARED: frozenset(
        {
            Stage.PROCESSING,
            # computed again after a failure
            Stage.PREPARED,
            Stage.ENCODED,
            Stage.PREFILL,
            Stage.READY,
            Stage.DECODE,
            Stage.LAST,
        }
    ),
    Stage.ENCODED: frozenset({Stage.PREPARED}),
    Stage.PREFILL: frozenset({Stage.ENCODED}),
    Stage.READY: frozenset({Stage.PREFILL, Stage.DECODE}),
    Stage.DECODE: frozenset({Stage.READY}),
    Stage.LAST: frozenset({Stage.PREFILL, Stage.READY, Stage.DECODE}),
    Stage.ENDED: frozenset(Stage) - {Stage.ENDED},
}
BEGINNINGS = frozenset({Stage.INBOX, Stage.PREPARED, Stage.READY})
#: Stages of rows that are read and processed ahead.
AHEAD = (Stage.INBOX, Stage.READING, Stage.READ, Stage.PROCESSING)
#: Stages of rows that wait for a place.
WAITING = (Stage.READY, Stage.ENCODED, Stage.PREPARED)
#: Stages of rows that have one.
PLACED = (Stage.PREFILL, Stage.DECODE)


class Ledger:
    """All rows that have not ended. ``num`` and ``tuple_at`` are safe from any thread.

    Args:
        urgency: a row's sort key, smallest first; constant while the row lives.
    """

    def __init__(self, urgency: Callable[[Row], float]) -> None:
        self.urgency = urgency
        self._by_id: dict[str, Row] = {}
        self._at: dict[Stage, dict[Row, None]] = {stage: {} for stage in Stage}
        # ``_at`` in order, until it changes
        self._ordered: dict[Stage, tuple[Row, ...]] = {}
        self._lines: dict[int, list[Row]] | None = None
        # rows in the inbox, which may be many; those that have left it are dropped when they come first
        self._heaps: dict[tuple[Hashable, bool, int], list[tuple[float, int, Row]]] = {}
        self._arrivals = itertools.count()
        #: Answers that each client has asked for and not got.
        self.asked: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, request_id: str) -> Row:
        return self._by_id[request_id]

    def get(self, request_id: str) -> Row | None:
        return self._by_id.get(request_id)

    def at(self, *stages: Stage) -> tuple[Row, ...]:
        """Return the rows at these stages, stage by stage, the most urgent first."""
        found: tuple[Row, ...] = ()
        for stage in stages:
            found += self._at_one(stage)
        return found

    def tuple_at(self, *stages: Stage) -> tuple[Row, ...]:
        """Return the rows at these stages in any order. Thread-safe."""
        return tuple(row for stage in stages for row in tuple(self._at[stage]))

    def num(self, *stages: Stage) -> int:
        count = 0
        for stage in stages:
            count += len(self._at[stage])
        return count

    def lines(self) -> dict[int, list[Row]]:
        """Return each client's rows that wait for a place: ready ones first, then the most urgent."""
        if self._lines is None:
            self._lines = self._made_lines()
        return self._lines

    def _made_lines(self) -> dict[int, list[Row]]:
        others = heapq.merge(
            self._at_one(Stage.ENCODED),
            self._at_one(Stage.PREPARED),
            key=self.urgency,
        )
        return by_client(itertools.chain(self._at_one(Stage.READY), others))

    def placed(self) -> Counter[int]:
        """Return each client's rows with places."""
        rows = (*self._at[Stage.DECODE], *self._at[Stage.PREFILL])
        return Counter(row.client for row in rows)

    def heads(self) -> list[Row]:
        """Return the most urgent row in the inbox of each lane, kind of media and client."""
        found: list[Row] = []
        for key, heap in tuple(self._heaps.items()):
            while heap and heap[0][2].stage is not Stage.INBOX:
                heapq.heappop(heap)
            if heap:
                found.append(heap[0][2])
            else:
                del self._heaps[key]
        return found

    def add(self, row: Row, stage: Stage) -> None:
        """Enter a new row. Raises ValueError for an id in use."""
        if row.request_id in self._by_id:
            raise ValueError(f"request id {row.request_id!r} is already in use")
        if stage not in BEGINNINGS:
            raise RuntimeError(f"a new row does not begin at {stage.value}")
        self._by_id[row.request_id] = row
        if stage is not Stage.READY:  # further answers were counted with the first
            self.asked[row.client] += 1 + len(row.siblings)
        if stage is Stage.INBOX:
            heap = self._heaps.setdefault((row.lane, row.has_videos, row.client), [])
            heapq.heappush(heap, (self.urgency(row), next(self._arrivals), row))
        self._enter(row, stage)

    def move(self, row: Row, stage: Stage) -> None:
        """Move a row to a stage. Raises RuntimeError where it cannot come from its present one."""
        if row.stage not in COMES_FROM[stage] or row not in self._at[row.stage]:
            raise RuntimeError(
                f"row {row.request_id!r} cannot go from {row.stage.value} to {stage.value}"
            )
        self._leave(row)
        if stage is not Stage.ENDED:
            self._enter(row, stage)
            return
        row.stage = stage
        del self._by_id[row.request_id]
        self.asked[row.client] -= 1 + len(row.siblings)
        if not self.asked[row.client]:
            del self.asked[row.client]

    def _at_one(self, stage: Stage) -> tuple[Row, ...]:
        found = self._ordered.get(stage)
        if found is None:
            found = tuple(sorted(self._at[stage], key=self.urgency))
            self._ordered[stage] = found
        return found

    def _enter(self, row: Row, stage: Stage) -> None:
        row.stage = stage
        self._at[stage][row] = None
        self._forget_order(stage)

    def _leave(self, row: Row) -> None:
        del self._at[row.stage][row]
        self._forget_order(row.stage)

    def _forget_order(self, stage: Stage) -> None:
        self._ordered.pop(stage, None)
        if stage in WAITING:
            self._lines = None
