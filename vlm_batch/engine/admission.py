"""Reading and processing ahead: the most urgent rows, within bounds on their number and bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from vlm_batch.engine.constraints import Guide
from vlm_batch.engine.ledger import Ledger
from vlm_batch.engine.limit import Capacity
from vlm_batch.engine.memory import RowMemory, Sizes
from vlm_batch.engine.options import give_options
from vlm_batch.engine.row import NO_LOADING, Row, Stage
from vlm_batch.engine.rows import Rows
from vlm_batch.engine.sampling import RowRules
from vlm_batch.policy import Policy
from vlm_batch.records import MediaSizes
from vlm_batch.runtime.threads import num_cores
from vlm_batch.types import Timings

if TYPE_CHECKING:
    from vlm_batch.inputs.loaders import Loading

#: Requests of one lane that the loaders have at a time, before one that comes. A longer queue would delay an urgent request of
#: the same client; a shorter one would let them idle during a step. They have a thread a core, eight at most.
MOST_LOADING = max(8, 2 * min(8, num_cores()))
#: Requests with videos that are in preparation or prepared: a clip's patches can take half a gigabyte.
VIDEOS_AHEAD = 4
#: Bytes of a pixel while its picture is processed: decoded, and in the processor's array.
BYTES_PER_PIXEL = 6
#: Pictures are large if their decoded pixels take more than 1 / LARGE_PART of the room.
LARGE_PART = 8
#: Most prepared requests that may wait, as a multiple of the usual number: urgent ones are prepared beside the others.
MOST_AHEAD = 4

#: Stages of rows that are with the loaders.
LOADING = (Stage.READING, Stage.PROCESSING)
#: Stages of rows that have their inputs and wait for a place.
HAVE_INPUTS = (Stage.PREPARED, Stage.ENCODED)


class Admission:
    """Hands rows to the loaders. Belongs to the engine's thread; ``nbytes`` is safe from any."""

    def __init__(
        self, rows: Rows, policy: Policy, capacity: Capacity, memory: RowMemory
    ) -> None:
        self._rows = rows
        self._ledger: Ledger = rows.ledger
        self._capacity = capacity
        self._memory = memory
        self._look_ahead, self._most_bytes = policy.look_ahead, policy.look_ahead_bytes
        self._sizes = {False: Sizes(max), True: Sizes(max)}  # by having videos

    @property
    def nbytes(self) -> int:
        """Bytes read or prepared for rows not encoded yet. Thread-safe."""
        return _num_bytes(self._ledger.tuple_at(*LOADING, Stage.READ, *HAVE_INPUTS))

    @property
    def _most_rows(self) -> int:
        if self._capacity.is_short:
            return self._capacity.num_places
        return self._look_ahead + self._capacity.num_places

    def next_to_read(self) -> Row | None:
        """Move the next row to READING and return it."""
        heads = self._ledger.heads()
        if not heads:
            return None
        num_ahead = self._ledger.num(Stage.READ, *HAVE_INPUTS)
        if num_ahead >= MOST_AHEAD * self._most_rows:
            return None
        begun = self._ledger.at(*LOADING, Stage.READ, *HAVE_INPUTS)
        line = self._rows.in_line([*begun, *heads])
        for at, row in enumerate(line):
            if row.stage is Stage.INBOX and self._has_room(row, line[:at]):
                self._ledger.move(row, Stage.READING)
                return row
        return None

    def _has_room(self, row: Row, before: Sequence[Row]) -> bool:
        """Return whether a row may be read beside the rows ``before`` it in line."""
        # rows of other lanes do not delay it, nor those of clients behind it
        working = self._in_lane(row, *LOADING)
        if len({*working}.intersection(before)) >= MOST_LOADING:
            return False
        ahead = {*working, *self._ledger.at(Stage.READ, *HAVE_INPUTS)}
        num_videos = sum(one.has_videos for one in ahead)
        if row.has_videos and num_videos >= VIDEOS_AHEAD:
            return False
        beside = ahead.intersection(before)
        if len(beside) >= self._most_rows:
            return False
        # files: of what is read and not processed
        read = self._in_lane(row, Stage.READING, Stage.READ)
        has_files = _num_bytes(read) > 0
        return not has_files or _num_bytes(beside) < self._most_bytes

    def _in_lane(self, row: Row, *stages: Stage) -> list[Row]:
        """Return the rows at these stages in a row's lane. Those of others do not delay it."""
        return [one for one in self._ledger.at(*stages) if one.lane == row.lane]

    def note_read(self, row: Row) -> None:
        """Note that a row's media are read, unless it has ended meanwhile."""
        if row.stage is Stage.READING:
            self._ledger.move(row, Stage.READ)

    def next_to_process(self) -> Row | None:
        """Move the next row to PROCESSING and return it.

        A row without room blocks all that need room. Large pictures have room of their own.
        """
        for is_large in (False, True):
            row = self._first_with_room(
                self._of_size(Stage.READ, is_large=is_large),
                self._of_size(Stage.PROCESSING, is_large=is_large),
            )
            if row is not None:
                self._ledger.move(row, Stage.PROCESSING)
                return row
        return None

    def _of_size(self, stage: Stage, *, is_large: bool) -> list[Row]:
        """Return the rows at a stage whose pictures are large, or are not."""
        least = self._most_bytes // LARGE_PART
        rows = self._ledger.at(stage)
        return [row for row in rows if (self._decoded(row) > least) is is_large]

    def _first_with_room(
        self, those: Sequence[Row], processing: Sequence[Row]
    ) -> Row | None:
        """Return the first row in line, if it has room; one that needs none goes before."""
        if not those:
            return None
        sizes = {row: self._expected(row) for row in those}
        ahead = self._bytes_ahead(processing)
        line = self._rows.in_line([*ahead, *those])
        in_line = filter(sizes.__contains__, line)
        row = min(in_line, key=lambda one: sizes[one] > 0)
        decoded = sum(map(self._decoded, processing))
        if decoded and decoded + self._decoded(row) > self._most_bytes:
            return None  # even if it is the first: decoded pixels are freed soon
        expected = sizes[row]
        if not expected:
            return row
        room = self._most_bytes - sum(ahead.values())
        if room >= expected:
            return row
        before = line[: line.index(row)]
        is_first = not any(map(ahead.get, before))
        return row if is_first and room >= 0 else None

    def _bytes_ahead(self, processing: Sequence[Row]) -> dict[Row, int]:
        """Return the bytes of rows that are processed now, or were and wait."""
        found = {row: self._expected(row) for row in processing}
        for row in self._ledger.at(*HAVE_INPUTS):
            found[row] = row.prompt.nbytes
        return found

    def _decoded(self, row: Row) -> int:
        return BYTES_PER_PIXEL * row.prompt.loading.num_pixels

    def _expected(self, row: Row) -> int:
        """Return the bytes for processing; over the bound if unknown."""
        loading = row.prompt.loading
        if loading.known_nbytes is not None:
            return loading.known_nbytes
        seen = self._sizes[row.has_videos].expected(loading.num_pixels)
        if seen is None:
            return self._most_bytes + 1
        return seen + self._decoded(row)

    def take_in(self, row: Row, loading: Loading) -> None:
        """Store the result of a row's loading, or raise its error."""
        row.prompt.loading = NO_LOADING
        row.clock.spent = Timings(
            read=loading.read_seconds, process=loading.process_seconds
        )
        prepared = loading.result()
        row.media = MediaSizes(
            prepared.image_sizes, prepared.video_sizes, prepared.audio_seconds
        )
        end_ids = row.answer.rules.end_ids
        row.answer.rules = RowRules(end_ids, prepared.bad_words)
        give_options(row, prepared.options)
        is_guided = prepared.form is not None
        if is_guided or row.params.thinking_budget is not None:
            row.answer.guide = Guide.of(
                row.params, prepared.form, prepared.thinking, end_ids
            )
        row.prompt.inputs, row.given = prepared.inputs, prepared.kept or {}
        self._memory.check_length(row.prompt.inputs["input_ids"].shape[-1])
        if loading.known_nbytes is None:
            self._sizes[row.has_videos].note(loading.num_pixels, row.prompt.nbytes)
        self._ledger.move(row, Stage.PREPARED)


def _num_bytes(rows: Collection[Row]) -> int:
    return sum(row.prompt.nbytes for row in rows)
