"""Who enters, and when: the one place that knows how full the engine is.

A request waits in at most two places: the inbox, until its pictures are read and processed, and among the prepared, until
it is given a place in the batch. The most urgent goes first from either.
"""

from __future__ import annotations

import heapq
import itertools
import time

from vlm_batch.arrays import as_mlx
from vlm_batch.engine.encoding import Encoder
from vlm_batch.engine.port import Loading
from vlm_batch.engine.prefill import Guard, Prefill
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Row
from vlm_batch.engine.scheduler import Scheduler
from vlm_batch.types import Status

#: Requests that are with the loaders at a time: as many again as there are loaders wait there in the order in which they came,
#: so that a loader has the next one while the engine steps.
WITH_LOADERS = 4
#: Requests with videos that are being prepared or are prepared and wait: a clip's patches can be half a gigabyte.
VIDEOS_AHEAD = 4
#: Seconds after which a request that is still being prepared holds nobody else up: it waits for a slow source.
SLOW_SECONDS = 0.25
#: Prepared or being prepared, slow sources and the urgent ones that went past the bound included: times the bound.
MOST_AHEAD = 4


class Admission:
    """Rows that wait. Belongs to the engine's thread.

    ``encoder`` makes prepared rows ready for ``prefill``, where those go that are given a place. ``guard`` answers for
    what one row's work raises.
    """

    def __init__(
        self, scheduler: Scheduler, encoder: Encoder, prefill: Prefill, reuse: Reuse, *, idle_budget: int, guard: Guard
    ) -> None:
        self._scheduler = scheduler
        self._encoder = encoder
        self._prefill = prefill
        self._reuse = reuse
        self._idle_budget = idle_budget
        self._guard = guard
        config = scheduler.config
        self._most_ahead = config.look_ahead + config.max_rows
        self._inbox: tuple[list[_Entry], list[_Entry]] = ([], [])  # heaps: without videos, with videos
        self._arrivals = itertools.count()
        self._unprepared: set[Row] = set()  # in the inbox or with the loaders
        self._preparing: dict[Row, float] = {}  # with the loaders, since when
        self._prepared: dict[str, Row] = {}

    @property
    def num_prepared(self) -> int:
        """Rows that could be given a place."""
        return len(self._prepared)

    @property
    def num_unprepared(self) -> int:
        """Rows that the engine's step can do nothing for yet."""
        return len(self._unprepared)

    @property
    def is_preparing(self) -> bool:
        """Whether a row is with the loaders."""
        return bool(self._preparing)

    def add(self, row: Row) -> None:
        """Take in a row: to be prepared, or with its processor's output."""
        assert row.prompt is not None
        if row.prompt.inputs is not None:
            self._prepared[row.request_id] = row
            return
        self._unprepared.add(row)
        heapq.heappush(self._inbox[row.has_videos], (self._urgency(row), next(self._arrivals), row))

    def remove(self, row: Row) -> None:
        """Give up a row at whatever stage it waits. One in the inbox is passed over when its turn comes."""
        if self._preparing.pop(row, None) is not None and row.prompt is not None and row.prompt.loading is not None:
            row.prompt.loading.cancel()
        self._unprepared.discard(row)
        self._prepared.pop(row.request_id, None)

    def next_to_prepare(self) -> Row | None:
        """The most urgent row of the inbox, if it is to be prepared now; it counts as being prepared from now on."""
        now = time.perf_counter()
        num_slow = sum(now - begin >= SLOW_SECONDS for begin in self._preparing.values())
        if len(self._preparing) - num_slow >= WITH_LOADERS:
            return None
        num_videos = sum(row.has_videos for row in (*self._preparing, *self._prepared.values()))
        heaps = [heap for heap in self._inbox[: 1 + (num_videos < VIDEOS_AHEAD)] if _drop_ended(heap)]
        if not heaps:
            return None
        heap = min(heaps)
        urgency, _, row = heap[0]
        more_urgent = sum(self._urgency(other) <= urgency for other in (*self._preparing, *self._prepared.values()))
        num_ahead = len(self._preparing) + len(self._prepared)
        if more_urgent - num_slow >= self._most_ahead or num_ahead >= MOST_AHEAD * self._most_ahead:
            return None
        heapq.heappop(heap)
        self._preparing[row] = now
        return row

    def take_in(self, row: Row, loading: Loading) -> None:
        """A row's loading is done. Raises what reading or processing raised."""
        assert row.prompt is not None
        del self._preparing[row]
        row.prompt.loading = None
        prepared = loading.result()
        row.image_sizes, row.video_sizes = prepared.image_sizes, prepared.video_sizes
        row.prompt.inputs = as_mlx(prepared.inputs)
        self._unprepared.remove(row)
        self._prepared[row.request_id] = row

    def admit(self, num_decoding: int, is_decoding: bool) -> float:
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
        num_free = self._scheduler.num_free(len(self._prefill) + num_decoding)
        near = sorted(waiting, key=self._urgency)[: num_free + config.encode_ahead]
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
                row.clock.started = row.clock.started or begin
                del self._prepared[row.request_id]
                self._prefill.add(row)
        return time.perf_counter() - begin

    def _has_encoded_enough(self, is_decoding: bool, begin: float) -> bool:
        """Whether a step that began to encode at ``begin`` goes on with what else it has to do."""
        if is_decoding:
            return time.perf_counter() - begin >= (self._scheduler.config.encode_seconds or 0.0)
        return self._prefill.num_pending >= self._idle_budget

    def _urgency(self, row: Row) -> float:
        return self._scheduler.urgency(row.priority, row.clock.submitted)


_Entry = tuple[float, int, Row]  # urgency, order of arrival


def _drop_ended(heap: list[_Entry]) -> bool:
    """Whether a heap has a row that is alive, which is then its first."""
    while heap and heap[0][2].status is Status.FINISHED:
        heapq.heappop(heap)
    return bool(heap)


def _is_encoded(row: Row) -> bool:
    return row.prompt is not None and row.prompt.encoded is not None
