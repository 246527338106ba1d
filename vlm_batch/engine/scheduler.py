"""The plan of the next step: integers and ids only, no arrays.

Decoding goes first: every live row gets its token in each step. The rest of the step's time goes to prefill. Chunks end where
the model allows it, and are as long as fits between two tokens of the rows that decode. A free place is filled at once.

Rows wait for places by priority, then by age. Rows that have a place are prefilled by priority, then by the time that they
have waited for each token that is left of their prompts (highest response ratio next): short prompts do not wait behind long
ones, and long ones do not wait for ever. Age lifts a row by one priority for every ``ageing_seconds``, so nothing starves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlm_batch.engine.limit import RowLimit
from vlm_batch.engine.shapes import chunk_end, padded_length
from vlm_batch.engine.work import Kind, Work
from vlm_batch.policy import Policy


@dataclass(frozen=True)
class PrefillRow:
    """A row whose prompt is being prefilled: ``done`` of ``length`` positions are in its cache.

    Chunks hold ``atomic`` spans whole, and end at each of ``stops`` (or before the span that it lies in), or at ``ends`` and
    nowhere else, whatever the budget, where these are given. ``waited`` is in seconds since the request came.
    """

    request_id: str
    length: int
    done: int
    atomic: tuple[tuple[int, int], ...] = ()
    stops: tuple[int, ...] = ()
    priority: int = 0
    waited: float = 0.0
    ends: tuple[int, ...] = ()


class Scheduler:
    """Pure policy: the same state gives the same plan.

    ``most_live`` rows have places at a time: the config's ``max_rows``, but fewer for a while after memory ran out. Where it
    leaves these open, ``limit`` says how many may live now.
    """

    def __init__(self, config: Policy) -> None:
        self.config = config
        self.most_rows = config.max_rows or config.most_rows
        self.limit = None if config.max_rows else RowLimit(config.first_rows, self.most_rows, gap=config.token_gap)
        self.most_live = self.most_rows
        self._is_plain = False
        self._ended = 0  # rows, since ``most_live`` changed

    @property
    def num_places(self) -> int:
        """Rows that may live now."""
        return self.most_live if self.limit is None else min(self.most_live, self.limit.rows)

    def record(self, rows: int, seconds: float, tokens: int, *, are_waiting: bool) -> None:
        """Take note of a step that decoded so many rows beside so many prompt tokens.

        Steps count that did nothing but decode, and whose predecessor did so too: a device may still be at that one's work.
        """
        was_plain, self._is_plain = self._is_plain, not tokens
        if self.limit is not None and was_plain and self._is_plain:
            self.limit.record(rows, seconds, are_waiting=are_waiting and self.most_live > self.limit.rows)

    def num_free(self, num_live: int) -> int:
        """The number of free places."""
        return max(0, self.num_places - num_live)

    def run_out(self, num_live: int) -> None:
        """So many rows that had places were more than fit into memory."""
        self.most_live, self._ended = max(1, min(self.most_live, num_live) - 1), 0

    def end(self) -> None:
        """A row has ended that had a place: one more is tried once as many have ended as there are places."""
        if self.most_live == self.most_rows:
            return
        self._ended += 1
        if self._ended >= self.most_live:
            self.most_live, self._ended = self.most_live + 1, 0

    def most_encoded(self, is_decoding: bool, seconds: float, pending: int, *, has_begun: bool) -> int:
        """The requests whose pictures may be encoded in the next call; 0 once a step that has begun to has done enough.

        Beside decoding rows it goes on for the config's ``encode_seconds``, so that there are rows to choose from; else until
        ``pending`` prompt tokens, which have places, fill a step.
        """
        config, most = self.config, self.config.encode_together
        if is_decoding:
            is_enough, most = seconds >= config.encode_seconds, -(-most // config.beside_decode)
        else:
            is_enough = pending >= config.idle_budget
        return 0 if has_begun and is_enough else most

    def plan(self, prefill: Sequence[PrefillRow], budget: int) -> tuple[Work, ...]:
        """The chunks to prefill, most urgent row first, within the step's budget; of equals the first.

        A chunk may exceed the budget to hold an atomic span whole, and by ``slack`` to end its prompt. Where chunks are padded,
        what others leave of a budget is not made a part of a prompt unless it is worth a forward.
        """
        chunks: list[Work] = []
        pad_to = self.config.pad_to
        least = self.config.smallest_chunk if pad_to else 0
        for row in sorted(prefill, key=self._prefill_urgency):
            if row.done == row.length:  # found whole: it needs no budget, and waits for none
                chunks.append(Work(Kind.PREFILL, (row.request_id,), row.done, row.done))
            while budget > 0 and row.done < row.length:
                rest = row.length - row.done
                if (
                    budget < least
                    and rest > budget + self.config.slack
                    and any(chunk.end > chunk.begin for chunk in chunks)
                ):
                    break
                room = rest
                if rest > budget + self.config.slack:  # with what would be padding, if it is worth a chunk
                    room = padded_length(budget, pad_to) if budget >= pad_to else budget
                room = min(room, self.config.max_chunk)
                fixed = next((end for end in row.ends if end > row.done), None)
                end = fixed or chunk_end(row.done, row.length, room, row.atomic, row.stops)
                chunks.append(Work(Kind.PREFILL, (row.request_id,), row.done, end))
                budget -= end - row.done
                row = replace(row, done=end)
        return tuple(chunks)

    def urgency(self, priority: int, submitted: float) -> float:
        """The key that sorts waiting rows, the smallest first; it stays the same while a row waits.

        ``submitted`` is in seconds. Of two rows the older goes first, or the one of higher priority unless it came
        ``ageing_seconds`` later for each step between them.
        """
        return submitted - priority * self.config.ageing_seconds

    def _prefill_urgency(self, row: PrefillRow) -> tuple[float, float]:
        level = row.priority + row.waited // self.config.ageing_seconds
        return (-level, -row.waited / max(row.length - row.done, 1))
