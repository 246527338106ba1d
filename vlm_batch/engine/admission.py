"""Waiting rows, most urgent first: in the inbox, then for room to be processed, then for a place."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from vlm_batch.engine.constraints import Guide
from vlm_batch.engine.memory import RowMemory, Sizes
from vlm_batch.engine.port import Loading
from vlm_batch.engine.row import Row, Status
from vlm_batch.engine.scheduler import Scheduler
from vlm_batch.runtime.threads import num_cores

#: Requests of one lane that the loaders have at a time. Loaders serve in order of arrival, so a longer queue would delay an
#: urgent request; a shorter one would let them idle during a step. They have a thread a core, eight at most.
WITH_LOADERS = max(8, 2 * min(8, num_cores()))
#: Requests with videos that are in preparation or prepared: a clip's patches can take half a gigabyte.
VIDEOS_AHEAD = 4
#: Bytes of a pixel while its picture is processed: decoded, and in the processor's array.
BYTES_PER_PIXEL = 6
#: Pictures are large if their decoded pixels take more than 1 / LARGE_PART of the room.
LARGE_PART = 8
#: Most prepared requests that may wait, as a multiple of the usual number: urgent ones are prepared beside the others.
MOST_AHEAD = 4
#: Priorities that a due row gains, so that it does not wait for a whole round of other clients.
LIFT = 12


class Admission:
    """Rows that wait. Belongs to the engine's thread."""

    def __init__(self, scheduler: Scheduler, memory: RowMemory) -> None:
        self.memory = memory
        self._scheduler = scheduler
        config = scheduler.config
        #: By (lane, has videos, client).
        self._inbox: dict[tuple[Hashable, bool, int], list[tuple[float, int, Row]]] = {}
        self._arrivals = itertools.count()
        self.unprepared: set[Row] = set()  # not prepared yet, wherever they are
        self._reading: set[Row] = set()  # with the loaders
        self._read: set[Row] = set()  # wait for room
        self._processing: dict[Row, int] = {}  # with the loaders: expected bytes
        self.prepared: dict[str, Row] = {}
        self._look_ahead, self._most_bytes = config.look_ahead, config.look_ahead_bytes
        # rows that have places, by client, as of ``note_placed``
        self.placed: Counter[int] = Counter()
        # answers that each client has asked for, as of then
        self.asked: Counter[int] = Counter()
        self._most_asked = 0
        self.changes = 0  # of who waits, counted
        self._served: dict[int, float] = {}  # when each client last had a place
        self._sizes = {False: Sizes(max), True: Sizes(max)}  # by having videos

    @property
    def nbytes(self) -> int:
        """Bytes read or prepared for rows not encoded yet. Thread-safe."""
        return sum(
            row.prompt.nbytes
            for rows in (
                self._reading,
                self._read,
                self._processing,
                self.prepared.values(),
            )
            for row in tuple(rows)
        )

    def urgency(self, row: Row) -> float:
        """Return a row's sort key among its client's, smallest first."""
        return self._scheduler.urgency(row.priority, row.clock.submitted)

    def line(
        self,
        rows: Iterable[Row],
        first: Collection[Row] = (),
        placed: Mapping[int, int] | None = None,
    ) -> list[Row]:
        """Return rows in the order in which they get places.

        Args:
            first: rows that precede others of their client.
            placed: each client's places; None: the present ones.
        """
        given = list(rows)
        if len({row.client for row in given}) < 2:
            return sorted(given, key=lambda row: (row not in first, self.urgency(row)))
        turn = self._turn if placed is None else self.urgency
        keys = [
            (row.client, (row not in first, self.urgency(row)), turn(row))
            for row in given
        ]
        return [
            given[at]
            for at in self._scheduler.share_out(
                keys, self.placed if placed is None else placed
            )
        ]

    def note_placed(self, placed: Counter[int], rows: Iterable[Row] | None) -> None:
        """Count places by client. ``rows``: all rows that have not ended; None if unchanged."""
        self.placed = placed
        if rows is not None:
            self.asked = Counter()
            for row in rows:
                self.asked[row.client] += 1 + len(row.siblings)
            self._most_asked = max(self.asked.values(), default=0)
        self._served |= dict.fromkeys(placed, time.perf_counter())
        if len(self._served) > 2 * len(self.asked) + MOST_AHEAD:
            self._served = {
                client: when
                for client, when in self._served.items()
                if client in self.asked
            }

    def is_due(self, row: Row) -> bool:
        """Return whether a client has waited ``ageing_seconds`` while another wants two more answers."""
        if self.placed[row.client] or self._most_asked < self.asked[row.client] + 2:
            return False
        since = max(row.clock.submitted, self._served.get(row.client, 0.0))
        return time.perf_counter() - since > self._scheduler.config.ageing_seconds

    def _turn(self, row: Row) -> float:
        """Return a row's sort key among clients with as many places."""
        # If its client has since had a place, the row waits from then, one priority lower.
        served = self._served.get(row.client, 0.0)
        lift = LIFT if self.is_due(row) else 0
        if served < row.clock.submitted:
            return self._scheduler.urgency(row.priority + lift, row.clock.submitted)
        return self._scheduler.urgency(row.priority - 1 + lift, served)

    def add(self, row: Row) -> None:
        """Take in a row, prepared or not."""
        self.changes += 1
        if row.prompt.inputs is not None:
            self.prepared[row.request_id] = row
            return
        self.unprepared.add(row)
        heap = self._inbox.setdefault((row.lane, row.has_videos, row.client), [])
        heapq.heappush(heap, (self.urgency(row), next(self._arrivals), row))

    def remove(self, row: Row) -> None:
        """Remove a row at any stage; the inbox skips it."""
        self.changes += 1
        if row.prompt.loading is not None:
            row.prompt.loading.cancel()
        for rows in (self._reading, self._read, self.unprepared):
            rows.discard(row)
        self._processing.pop(row, None)
        self.prepared.pop(row.request_id, None)

    def next_to_prepare(self) -> Row | None:
        """Mark and return the next row to read."""
        heads: dict[Row, list[tuple[float, int, Row]]] = {}
        for key, heap in tuple(self._inbox.items()):
            while heap and heap[0][2].status is Status.FINISHED:
                heapq.heappop(heap)
            if heap:
                heads[heap[0][2]] = heap
            else:
                del self._inbox[key]
        most = self._look_ahead + self._scheduler.num_places
        if not heads or len(self.prepared) + len(self._read) >= MOST_AHEAD * most:
            return None
        before: list[Row] = []
        for row in self.line(
            [
                *self._reading,
                *self._processing,
                *self._read,
                *self.prepared.values(),
                *heads,
            ]
        ):
            if row not in heads:
                before.append(row)
            elif self._has_room(row, before):
                heapq.heappop(heads[row])
                self._reading.add(row)
                return row
        return None

    def _has_room(self, row: Row, before: Sequence[Row]) -> bool:
        working = [
            one for one in (*self._reading, *self._processing) if one.lane == row.lane
        ]
        waiting = {*working, *self._read, *self.prepared.values()}
        if row.has_videos and sum(one.has_videos for one in waiting) >= VIDEOS_AHEAD:
            return False
        beside = [one for one in before if one in waiting]
        files = any(
            one.prompt.nbytes
            for one in (*self._reading, *self._read)
            if one.lane == row.lane
        )
        has_bytes = (
            not files or sum(one.prompt.nbytes for one in beside) < self._most_bytes
        )
        most = self._look_ahead + self._scheduler.num_places
        return len(working) < WITH_LOADERS and len(beside) < most and has_bytes

    def note_read(self, row: Row) -> None:
        if row in self._reading:
            self._reading.remove(row)
            self._read.add(row)

    def next_to_process(self) -> Row | None:
        """Mark and return the next row to process.

        A row without room blocks all that need room. Large pictures have room of their own.
        """
        least = self._most_bytes // LARGE_PART
        large = {
            row
            for row in (*self._read, *self._processing)
            if self._decoded(row) > least
        }
        row = self._first_with_room(
            self._read - large, [one for one in self._processing if one not in large]
        )
        return row or self._first_with_room(
            self._read & large, [one for one in self._processing if one in large]
        )

    def _first_with_room(
        self, those: Collection[Row], processing: Sequence[Row]
    ) -> Row | None:
        if not those:
            return None
        sizes = {row: self._expected(row) for row in those}
        ahead = {row: self._processing[row] for row in processing}
        ahead |= {row: row.prompt.nbytes for row in self.prepared.values()}
        line = self.line([*ahead, *those])
        row = min((one for one in line if one in those), key=lambda one: sizes[one] > 0)
        expected = sizes[row]
        held = sum(ahead.values())
        decoded = sum(map(self._decoded, processing))
        if decoded and decoded + self._decoded(row) > self._most_bytes:
            return None  # even if it is the first: decoded pixels are freed soon
        is_first = not any(ahead.get(other) for other in line[: line.index(row)])
        if (
            expected
            and held + expected > self._most_bytes
            and not (is_first and held <= self._most_bytes)
        ):
            return None
        self._read.remove(row)
        self._processing[row] = expected
        return row

    def _decoded(self, row: Row) -> int:
        loading = row.prompt.loading
        return 0 if loading is None else BYTES_PER_PIXEL * loading.num_pixels

    def _expected(self, row: Row) -> int:
        """Return the bytes for processing; over the bound if unknown."""
        loading = row.prompt.loading
        assert loading is not None
        if loading.known_nbytes is not None:
            return loading.known_nbytes
        seen = self._sizes[row.has_videos].expected(loading.num_pixels)
        return self._most_bytes + 1 if seen is None else seen + self._decoded(row)

    def take_in(self, row: Row, loading: Loading) -> None:
        """Store the result of a row's loading, or raise its error."""
        self._reading.discard(row)
        self._processing.pop(row, None)
        row.prompt.loading = None
        row.clock.read_seconds = loading.read_seconds
        row.clock.process_seconds = loading.process_seconds
        prepared = loading.result()
        row.image_sizes, row.video_sizes = prepared.image_sizes, prepared.video_sizes
        row.audio_seconds = prepared.audio_seconds
        row.answer.bad_words = prepared.bad_words
        if prepared.form is not None or row.params.thinking_budget is not None:
            row.answer.guide = Guide.of(
                row.params, prepared.form, prepared.thinking, row.answer.end_ids
            )
        row.prompt.inputs, row.given = prepared.inputs, prepared.kept
        self.memory.check_length(row.prompt.inputs["input_ids"].shape[-1])
        if loading.known_nbytes is None:
            self._sizes[row.has_videos].note(loading.num_pixels, row.prompt.nbytes)
        self.unprepared.remove(row)
        self.prepared[row.request_id] = row
        self.changes += 1
