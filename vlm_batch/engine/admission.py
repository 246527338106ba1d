"""Who enters, and when: the one place that knows how full the engine is.

A request waits in at most two places: the inbox, until its pictures are read and processed, and among the prepared, until
it is given a place in the batch. The most urgent goes first from either.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Hashable, Sequence
from dataclasses import replace

from vlm_batch.arrays import as_mlx
from vlm_batch.engine.constraints import Guide
from vlm_batch.engine.encoding import Encoder
from vlm_batch.engine.memory import RowMemory
from vlm_batch.engine.port import Loading
from vlm_batch.engine.prefill import Guard, Prefill
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Row
from vlm_batch.engine.scheduler import Scheduler
from vlm_batch.types import Status

#: Requests of one lane that are with the loaders at a time, whatever its number of threads: they are served there in the order
#: in which they came, so a few wait while the engine steps, and few are before an urgent one.
WITH_LOADERS = 8
#: Requests with videos that are being prepared or are prepared and wait: a clip's patches can be half a gigabyte.
VIDEOS_AHEAD = 4
#: Prepared requests that wait at most, in times of what is usual: urgent ones may be prepared beside those that wait.
MOST_AHEAD = 4


class Admission:
    """Rows that wait. Belongs to the engine's thread.

    ``encoder`` makes prepared rows ready for ``prefill``, where those go that are given a place. ``guard`` answers for
    what one row's work raises.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        encoder: Encoder,
        prefill: Prefill,
        reuse: Reuse,
        *,
        idle_budget: int,
        guard: Guard,
        memory: RowMemory,
    ) -> None:
        self._scheduler = scheduler
        self._encoder = encoder
        self._prefill = prefill
        self._reuse = reuse
        self._idle_budget = idle_budget
        self._guard = guard
        self._memory = memory
        config = scheduler.config
        self._most_ahead = config.look_ahead + config.max_rows
        self._inbox: dict[tuple[Hashable, bool], list[_Entry]] = {}  # a heap for each lane, with and without videos
        self._arrivals = itertools.count()
        self._unprepared: set[Row] = set()  # in the inbox or with the loaders
        self._preparing: set[Row] = set()  # with the loaders
        self._prepared: dict[str, Row] = {}

    @property
    def num_prepared(self) -> int:
        """Rows that could be given a place."""
        return len(self._prepared)

    @property
    def num_unprepared(self) -> int:
        """Rows that the engine's step can do nothing for yet."""
        return len(self._unprepared)

    def add(self, row: Row) -> None:
        """Take in a row: to be prepared, or with its processor's output."""
        assert row.prompt is not None
        if row.prompt.inputs is not None:
            self._prepared[row.request_id] = row
            return
        self._unprepared.add(row)
        heap = self._inbox.setdefault((row.lane, row.has_videos), [])
        heapq.heappush(heap, (self.urgency(row), next(self._arrivals), row))

    def remove(self, row: Row) -> None:
        """Give up a row at whatever stage it waits. One in the inbox is passed over when its turn comes."""
        if row.prompt is not None and row.prompt.loading is not None:
            row.prompt.loading.cancel()
        self._preparing.discard(row)
        self._unprepared.discard(row)
        self._prepared.pop(row.request_id, None)

    def next_to_prepare(self) -> Row | None:
        """The most urgent row of the inbox that may be prepared now; it counts as being prepared from now on.

        Those of one lane hold up nobody of another.
        """
        heaps = [heap for (lane, has_videos), heap in self._inbox.items() if self._has_room(lane, has_videos, heap)]
        if not heaps:
            return None
        _, _, row = heapq.heappop(min(heaps))
        self._preparing.add(row)
        return row

    def _has_room(self, lane: Hashable, has_videos: bool, heap: list[_Entry]) -> bool:
        """Whether the first row of a lane's heap may be prepared now."""
        while heap and heap[0][2].status is Status.FINISHED:
            heapq.heappop(heap)
        if not heap or len(self._prepared) >= MOST_AHEAD * self._most_ahead:
            return False
        beside = [row for row in self._preparing if row.lane == lane]
        waiting = [*beside, *self._prepared.values()]
        if has_videos and sum(row.has_videos for row in waiting) >= VIDEOS_AHEAD:
            return False
        num_before = sum(self.urgency(row) <= heap[0][0] for row in waiting)
        return len(beside) < WITH_LOADERS and num_before < self._most_ahead

    def take_in(self, row: Row, loading: Loading) -> None:
        """A row's loading is done. Raises what reading or processing raised."""
        assert row.prompt is not None
        self._preparing.remove(row)
        row.prompt.loading = None
        prepared = loading.result()
        row.image_sizes, row.video_sizes = prepared.image_sizes, prepared.video_sizes
        rules = row.answer.rules = replace(row.answer.rules, bad_words=prepared.bad_words)
        row.answer.guide = Guide.of(row.params, prepared.form, prepared.thinking, rules.end_ids)
        row.prompt.inputs = as_mlx(prepared.inputs)
        row.keep_given(prepared.inputs)
        self._unprepared.remove(row)
        self._prepared[row.request_id] = row

    def admit(self, decoding: Sequence[Row], is_decoding: bool) -> float:
        """Give free places to prepared rows, and encode a few rows ahead.

        Beside decoding rows for the config's ``encode_seconds``, so that the scheduler has rows to choose from; else as many
        as fill a step. Returns the seconds that encoding took.
        """
        begin = time.perf_counter()
        if not self._prepared:
            return 0.0
        config = self._scheduler.config
        others = [*self._prefill.rows.values(), *(row for row in self._prepared.values() if _is_encoded(row))]
        waiting = [row for row in self._prepared.values() if not self._reuse.waits_for(row, others)]
        live = [*self._prefill.rows.values(), *decoding]
        num_free = self._scheduler.num_free(len(live))
        near = sorted(waiting, key=self.urgency)[: num_free + config.encode_ahead]
        num_encoded = num_together = 0
        for index, row in enumerate(near):
            has_place = index < num_free
            if not _is_encoded(row):
                if self._reuse.waits_for(row, others):
                    continue  # a row that was encoded just now has its beginning
                if num_encoded >= num_together:
                    if num_encoded and (not has_place or self._has_encoded_enough(is_decoding, begin)):
                        break
                    unencoded = [other for other in near[index:] if not _is_encoded(other)]
                    num_together = num_encoded + self._encoder.encode_together(unencoded, others, is_decoding)
                self._guard(row, self._encoder.encode, row)
                others.append(row)
                num_encoded += 1
            if has_place and _is_encoded(row):
                if not self._memory.fits(row, live):
                    if not live:
                        self._guard(row, self._memory.check, row)
                        continue
                    num_free = 0  # nobody overtakes it: it is the first in line
                    continue
                live.append(row)
                row.clock.started = row.clock.started or begin
                del self._prepared[row.request_id]
                self._prefill.add(row)
        return time.perf_counter() - begin

    def _has_encoded_enough(self, is_decoding: bool, begin: float) -> bool:
        """Whether a step that began to encode at ``begin`` goes on with what else it has to do."""
        if is_decoding:
            return time.perf_counter() - begin >= (self._scheduler.config.encode_seconds or 0.0)
        return self._prefill.num_pending >= self._idle_budget

    def urgency(self, row: Row) -> float:
        """What rows are in line by: the smallest goes first."""
        return self._scheduler.urgency(row.priority, row.clock.submitted)


_Entry = tuple[float, int, Row]  # urgency, order of arrival


def _is_encoded(row: Row) -> bool:
    return row.prompt is not None and row.prompt.encoded is not None
