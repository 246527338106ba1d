"""The rows that wait for a place, and which of them is prepared next.

A request waits in at most three places: the inbox, until its pictures may be read; with what was read, until there is room
for what a processor makes of it; and among the prepared, until it is given a place in the batch. The most urgent goes
first from each.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable

from vlm_batch.engine.constraints import Guide
from vlm_batch.engine.memory import RowMemory, Sizes
from vlm_batch.engine.port import Loading
from vlm_batch.engine.row import Row, Status
from vlm_batch.engine.scheduler import Scheduler
from vlm_batch.runtime.threads import num_cores

#: Requests of one lane that are with the loaders at a time: they are served there in the order in which they came, so a few
#: wait while the engine steps, and few are before an urgent one. Loaders have a thread a core, eight at most.
WITH_LOADERS = max(8, 2 * min(8, num_cores()))
#: Requests with videos that are being prepared or are prepared and wait: a clip's patches can be half a gigabyte.
VIDEOS_AHEAD = 4
#: Bytes of a decoded pixel, which are there while a picture is processed.
BYTES_PER_PIXEL = 3
#: Prepared requests that wait at most, in times of what is usual: urgent ones may be prepared beside those that wait.
MOST_AHEAD = 4


class Admission:
    """Rows that wait. Belongs to the engine's thread."""

    def __init__(self, scheduler: Scheduler, memory: RowMemory) -> None:
        self.memory = memory
        self._scheduler = scheduler
        config = scheduler.config
        self._inbox: dict[tuple[Hashable, bool], list[tuple[float, int, Row]]] = {}  # heaps, by lane and having videos
        self._arrivals = itertools.count()
        self.unprepared: set[Row] = set()  # not prepared yet, wherever they are
        self._reading: set[Row] = set()  # with the loaders
        self._read: set[Row] = set()  # wait for room
        self._processing: dict[Row, int] = {}  # with the loaders, and the bytes that they may come to
        self.prepared: dict[str, Row] = {}
        self._look_ahead, self._most_bytes = config.look_ahead, config.look_ahead_bytes
        self._sizes = {False: Sizes(max), True: Sizes(max)}  # without and with videos

    @property
    def nbytes(self) -> int:
        """Bytes of what was read and prepared for rows that wait, and is not encoded yet. From any thread."""
        return sum(
            row.prompt.nbytes
            for rows in (self._reading, self._read, self._processing, self.prepared.values())
            for row in tuple(rows)
        )

    def urgency(self, row: Row) -> float:
        """A row's place in line: the smallest goes first."""
        return self._scheduler.urgency(row.priority, row.clock.submitted)

    def add(self, row: Row) -> None:
        """Take in a row: to be prepared, or with its processor's output."""
        if row.prompt.inputs is not None:
            self.prepared[row.request_id] = row
            return
        self.unprepared.add(row)
        heap = self._inbox.setdefault((row.lane, row.has_videos), [])
        heapq.heappush(heap, (self.urgency(row), next(self._arrivals), row))

    def remove(self, row: Row) -> None:
        """Remove a row at whatever stage it waits. In the inbox it stays until its turn comes, and is then skipped."""
        if row.prompt.loading is not None:
            row.prompt.loading.cancel()
        for rows in (self._reading, self._read, self.unprepared):
            rows.discard(row)
        self._processing.pop(row, None)
        self.prepared.pop(row.request_id, None)

    def next_to_prepare(self) -> Row | None:
        """The most urgent row of the inbox that may be read now; it counts as being read from now on.

        Those of one lane hold up nobody of another.
        """
        heaps = [heap for (lane, has_videos), heap in self._inbox.items() if self._has_room(lane, has_videos, heap)]
        if not heaps:
            return None
        _, _, row = heapq.heappop(min(heaps))
        self._reading.add(row)
        return row

    def _has_room(self, lane: Hashable, has_videos: bool, heap: list[tuple[float, int, Row]]) -> bool:
        """Whether the first row of a lane's heap may be read now: loaders have few of its lane, few rows wait before it, and
        those leave room."""
        while heap and heap[0][2].status is Status.FINISHED:
            heapq.heappop(heap)
        if not heap:
            return False
        most = self._look_ahead + self._scheduler.num_places
        loading = [row for row in (*self._reading, *self._processing) if row.lane == lane]
        waiting = [*loading, *self._read, *self.prepared.values()]
        before = [row for row in waiting if self.urgency(row) <= heap[0][0]]
        holds_files = any(row.prompt.nbytes for row in (*self._reading, *self._read) if row.lane == lane)
        return (
            len(loading) < WITH_LOADERS
            and len(before) < most
            and len(self.prepared) + len(self._read) < MOST_AHEAD * most
            and not (has_videos and sum(row.has_videos for row in waiting) >= VIDEOS_AHEAD)
            and not (holds_files and sum(row.prompt.nbytes for row in before) >= self._most_bytes)
        )

    def note_read(self, row: Row) -> None:
        """A row's pictures are in memory: it waits for room. Nothing happens if it ended meanwhile, or if that is known."""
        if row in self._reading:
            self._reading.remove(row)
            self._read.add(row)

    def next_to_process(self) -> Row | None:
        """The most urgent row that was read and has room for what comes of it; it counts as being processed from now on.

        Nobody goes before one that has no room yet, but for those that need none.
        """
        if not self._read:
            return None
        sizes = {row: self._expected(row) for row in self._read}
        row = min(self._read, key=lambda row: (sizes[row] > 0, self.urgency(row)))
        expected = sizes[row]
        ahead = {**self._processing, **{row: row.prompt.nbytes for row in self.prepared.values()}}
        held = sum(ahead.values())
        is_first = all(self.urgency(other) > self.urgency(row) for other, nbytes in ahead.items() if nbytes)
        if expected and held + expected > self._most_bytes and not (is_first and held <= self._most_bytes):
            return None
        self._read.remove(row)
        self._processing[row] = expected
        return row

    def _expected(self, row: Row) -> int:
        """Bytes that a row that was read may take while it is processed and afterwards: more than there are if nobody knows."""
        loading = row.prompt.loading
        assert loading is not None
        if loading.known_nbytes is not None:
            return loading.known_nbytes
        seen = self._sizes[row.has_videos].expected(loading.num_pixels)
        return self._most_bytes + 1 if seen is None else seen + BYTES_PER_PIXEL * loading.num_pixels

    def take_in(self, row: Row, loading: Loading) -> None:
        """A row's loading is done. Raises what reading or processing raised."""
        self._reading.discard(row)
        self._processing.pop(row, None)
        row.prompt.loading = None
        row.clock.read_seconds, row.clock.process_seconds = loading.read_seconds, loading.process_seconds
        prepared = loading.result()
        row.image_sizes, row.video_sizes = prepared.image_sizes, prepared.video_sizes
        row.answer.bad_words = prepared.bad_words
        if prepared.form is not None or row.params.thinking_budget is not None:
            row.answer.guide = Guide.of(row.params, prepared.form, prepared.thinking, row.answer.end_ids)
        row.prompt.inputs, row.given = prepared.inputs, prepared.kept
        self.memory.check_length(row.prompt.inputs["input_ids"].shape[-1])
        if loading.known_nbytes is None:
            self._sizes[row.has_videos].note(loading.num_pixels, row.prompt.nbytes)
        self.unprepared.remove(row)
        self.prepared[row.request_id] = row
