"""The plan of the next step: integers and ids only, no arrays.

Decoding goes first: every live row gets its token in each step. The rest of the step's time goes to prefill. Chunks end where
the model allows it, and are as long as fits between two tokens of the rows that decode. A free place is filled at once.

Clients, which are numbers here, share places evenly: the next one is for the client that has the fewest, and who has more
gives one up to who waits with fewer. A client's rows wait for places by priority, then by age. Rows that have a place are
prefilled by priority, then by the time that they have waited for each token that is left of their prompts (highest response
ratio next): short prompts do not wait behind long ones, and long ones do not wait for ever. Age lifts a row by one priority
for every ``ageing_seconds``, so nothing starves.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    client: int = 0


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
        order = self.share_out(
            [(row.client, self._prefill_urgency(row)) for row in prefill], Counter(row.client for row in prefill)
        )
        for row in [prefill[at] for at in order]:
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

    def share_out(self, rows: Sequence[tuple[int, Any]], placed: Mapping[int, int]) -> list[int]:
        """The order in which rows, each of a client and with an urgency of which the smallest goes first, get places.

        Next is always the client with the fewest, counted from those that it has ``placed``, and of equals the most urgent.
        """
        lines: dict[int, deque[int]] = {}
        for at in sorted(range(len(rows)), key=lambda at: rows[at][1]):
            lines.setdefault(rows[at][0], deque()).append(at)
        heap = [(placed.get(client, 0), rows[line[0]][1], line[0], client) for client, line in lines.items()]
        heapq.heapify(heap)
        order = []
        while heap:
            count, _, at, client = heap[0]
            order.append(lines[client].popleft())
            if lines[client]:
                following = lines[client][0]
                heapq.heapreplace(heap, (count + 1, rows[following][1], following, client))
            else:
                heapq.heappop(heap)
        return order

    def giver(self, placed: Mapping[int, int], client: int) -> int | None:
        """The client who gives a place to a row of another, because it has the most and then still no fewer; None if nobody
        does."""
        most = max(placed, key=lambda one: (placed[one], one), default=client)
        return most if placed.get(most, 0) > placed.get(client, 0) + 1 else None

    def urgency(self, priority: int, submitted: float) -> float:
        """The key that sorts waiting rows, the smallest first; it stays the same while a row waits.

        ``submitted`` is in seconds. Of two rows the older goes first, or the one of higher priority unless it came
        ``ageing_seconds`` later for each step between them.
        """
        return submitted - priority * self.config.ageing_seconds

    def _prefill_urgency(self, row: PrefillRow) -> tuple[float, float]:
        level = row.priority + row.waited // self.config.ageing_seconds
        return (-level, -row.waited / max(row.length - row.done, 1))
