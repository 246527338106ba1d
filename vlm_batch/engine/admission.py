"""The choice of the rows that enter the engine next. No other module decides how full the engine is.

A request waits in at most three places: the inbox, until its pictures may be read; with what was read, until there is room
for what a processor makes of it; and among the prepared, until it is given a place in the batch. The most urgent goes
first from each.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Hashable, Sequence

import mlx.core as mx

from vlm_batch.arrays import as_mlx
from vlm_batch.engine.constraints import Guide
from vlm_batch.engine.encoding import Encoder
from vlm_batch.engine.memory import EncoderMemory, RowMemory
from vlm_batch.engine.port import Loading
from vlm_batch.engine.prefill import Guard, Prefill
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Row, Status
from vlm_batch.engine.scheduler import Scheduler
from vlm_batch.runtime.memory import usual_limit
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


class Sizes:
    """Bytes that processors made of pictures, by how many pixels these have: the most that was seen for each power of two."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def note(self, num_pixels: int, nbytes: int) -> None:
        power = num_pixels.bit_length()
        self._seen[power] = max(nbytes, self._seen.get(power, 0))

    def expected(self, num_pixels: int) -> int | None:
        """The bytes that the next larger ones came to, or in proportion to the largest; None if none was seen."""
        power = num_pixels.bit_length()
        not_smaller = [seen for seen in self._seen if seen >= power]
        if not_smaller:
            return self._seen[min(not_smaller)]
        largest = max(self._seen, default=None)
        return None if largest is None else self._seen[largest] << (power - largest)


class Admission:
    """Rows that wait. Belongs to the engine's thread.

    ``encoder`` makes prepared rows ready for ``prefill``, where those go that are given a place. ``guard`` turns
    an exception into the end of its row.
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
        self._encoding = EncoderMemory(usual_limit())
        config = scheduler.config
        self._inbox: dict[tuple[Hashable, bool], list[_Entry]] = {}  # a heap for each lane, with and without videos
        self._arrivals = itertools.count()
        self._unprepared: set[Row] = set()  # not prepared yet, wherever they are
        self._reading: set[Row] = set()  # with the loaders
        self._read: set[Row] = set()  # wait for room
        self._processing: dict[Row, int] = {}  # with the loaders, and the bytes that they may come to
        self._prepared: dict[str, Row] = {}
        self._most_bytes = config.look_ahead_bytes
        self._sizes = {False: Sizes(), True: Sizes()}  # without and with videos

    @property
    def _most_ahead(self) -> int:
        """Requests that are prepared at a time, beside those that have places."""
        return self._scheduler.config.look_ahead + self._scheduler.num_places

    @property
    def num_prepared(self) -> int:
        """Rows that could be given a place."""
        return len(self._prepared)

    @property
    def nbytes(self) -> int:
        """Bytes of what was read and prepared for rows that wait, and is not encoded yet. From any thread."""
        prompts = [row.prompt for rows in (self._reading, self._read, self._processing) for row in tuple(rows)]
        prompts += [row.prompt for row in tuple(self._prepared.values())]
        return sum(prompt.nbytes for prompt in prompts if prompt is not None)

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
        """Remove a row at whatever stage it waits. In the inbox it stays until its turn comes, and is then skipped."""
        if row.prompt is not None and row.prompt.loading is not None:
            row.prompt.loading.cancel()
        for rows in (self._reading, self._read, self._unprepared):
            rows.discard(row)
        self._processing.pop(row, None)
        self._prepared.pop(row.request_id, None)

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
        row = min(self._read, key=lambda row: (self._expected(row) > 0, self.urgency(row)))
        expected = self._expected(row)
        ahead = {**self._processing, **{row: _nbytes(row) for row in self._prepared.values()}}
        held = sum(ahead.values())
        is_first = all(self.urgency(other) > self.urgency(row) for other, nbytes in ahead.items() if nbytes)
        if expected and held + expected > self._most_bytes and not (is_first and held <= self._most_bytes):
            return None
        self._read.remove(row)
        self._processing[row] = expected
        return row

    def _expected(self, row: Row) -> int:
        """Bytes that a row that was read may take while it is processed and afterwards: more than there are if nobody knows."""
        assert row.prompt is not None and row.prompt.loading is not None
        loading = row.prompt.loading
        if loading.known_nbytes is not None:
            return loading.known_nbytes
        seen = self._sizes[row.has_videos].expected(loading.num_pixels)
        return self._most_bytes + 1 if seen is None else seen + BYTES_PER_PIXEL * loading.num_pixels

    def _has_room(self, lane: Hashable, has_videos: bool, heap: list[_Entry]) -> bool:
        """Whether the first row of a lane's heap may be read now."""
        while heap and heap[0][2].status is Status.FINISHED:
            heapq.heappop(heap)
        if not heap or len(self._prepared) + len(self._read) >= MOST_AHEAD * self._most_ahead:
            return False
        beside = [row for row in (*self._reading, *self._processing) if row.lane == lane]
        waiting = [*beside, *self._read, *self._prepared.values()]
        if has_videos and sum(row.has_videos for row in waiting) >= VIDEOS_AHEAD:
            return False
        before = [row for row in waiting if self.urgency(row) <= heap[0][0]]
        files = any(_nbytes(row) for row in (*self._reading, *self._read) if row.lane == lane)
        has_bytes = not files or sum(map(_nbytes, before)) < self._most_bytes
        return len(beside) < WITH_LOADERS and len(before) < self._most_ahead and has_bytes

    def take_in(self, row: Row, loading: Loading) -> None:
        """A row's loading is done. Raises what reading or processing raised."""
        assert row.prompt is not None
        self._reading.discard(row)
        self._processing.pop(row, None)
        row.prompt.loading = None
        row.clock.read_seconds, row.clock.process_seconds = loading.read_seconds, loading.process_seconds
        prepared = loading.result()
        row.image_sizes, row.video_sizes = prepared.image_sizes, prepared.video_sizes
        row.answer.bad_words = prepared.bad_words
        row.answer.guide = Guide.of(row.params, prepared.form, prepared.thinking, row.answer.end_ids)
        row.prompt.inputs = as_mlx(prepared.inputs)
        self._memory.check_length(row.prompt.inputs["input_ids"].shape[-1])
        row.keep_given(row.prompt.inputs, prepared.kept)
        if loading.known_nbytes is None:
            self._sizes[row.has_videos].note(loading.num_pixels, row.prompt.nbytes)
        self._unprepared.remove(row)
        self._prepared[row.request_id] = row

    def admit(self, decoding: Sequence[Row], is_decoding: bool) -> float:
        """Give free places to prepared rows, and encode a few rows ahead.

        Beside decoding rows for the config's ``encode_seconds``, so that the scheduler has rows to choose from; else as many
        as fill a step. Returns the seconds that encoding took.
        """
        begin = time.perf_counter()
        self._encoding.step()
        if not self._prepared:
            return 0.0
        config = self._scheduler.config
        others = [*self._prefill.rows.values(), *(row for row in self._prepared.values() if _is_encoded(row))]
        waiting = [row for row in self._prepared.values() if not self._reuse.waits_for(row, others)]
        live = [*self._prefill.rows.values(), *decoding]
        num_free = self._scheduler.num_free(len(live))
        near = sorted(waiting, key=self.urgency)[: num_free + config.encode_ahead]
        num_encoded = num_together = 0
        together: Sequence[Row] = ()
        for index, row in enumerate(near):
            has_place = index < num_free
            if not _is_encoded(row):
                if self._reuse.waits_for(row, others):
                    continue  # a row that was encoded just now has its beginning
                if live and not self._encoding.fits(_picture_bytes(row)):
                    break  # nobody overtakes it: it is encoded once those beside it have ended
                if num_encoded >= num_together:
                    if num_encoded and (not has_place or self._has_encoded_enough(is_decoding, begin)):
                        break
                    unencoded = [other for other in near[index:] if not _is_encoded(other)]
                    together = self._encode_together(self._encoder.choose(unencoded, others, is_decoding))
                    num_together = num_encoded + max(1, len(together))
                self._guard(row, self._encode, row, row in together)
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
                row.clock.placed = row.clock.placed or time.perf_counter()
                del self._prepared[row.request_id]
                self._prefill.add(row)
        return time.perf_counter() - begin

    def _encode_together(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Encode pictures of rows in one call, of as many of the first as have room together; the rows that were, if any."""
        sizes = list(itertools.accumulate(map(_picture_bytes, rows)))
        count = next((at for at, nbytes in enumerate(sizes) if at and not self._encoding.fits(nbytes)), len(rows))
        if count < 2:
            return ()
        before = mx.get_active_memory()
        count = self._encoder.encode_together(rows[:count])
        if count < 2:
            return ()
        self._encoding.begin(sizes[count - 1], before)
        return rows[:count]

    def _encode(self, row: Row, is_begun: bool) -> None:
        """Encode a row, whose pictures may have been seen to already. Raises what that raises, and DoesNotFit for one that
        would wait for ever."""
        if not is_begun:
            self._encoding.begin(_picture_bytes(row))
        self._encoder.encode(row)
        self._memory.check(row)

    def _has_encoded_enough(self, is_decoding: bool, begin: float) -> bool:
        """Whether a step that began to encode at ``begin`` goes on with what else it has to do."""
        if is_decoding:
            return time.perf_counter() - begin >= self._scheduler.config.encode_seconds
        return self._prefill.num_pending >= self._idle_budget

    def urgency(self, row: Row) -> float:
        """A row's place in line: the smallest goes first."""
        return self._scheduler.urgency(row.priority, row.clock.submitted)


_Entry = tuple[float, int, Row]  # urgency, order of arrival


def _nbytes(row: Row) -> int:
    return 0 if row.prompt is None else row.prompt.nbytes


def _picture_bytes(row: Row) -> int:
    """Bytes of what the encoder gets of a row that has pictures or videos."""
    return _nbytes(row) if row.image_sizes or row.video_sizes else 0


def _is_encoded(row: Row) -> bool:
    return row.prompt is not None and row.prompt.encoded is not None
