"""Plans the next step, from integers and ids.

Every decoding row gets a token in each step; parked ones wait for a place. The rest of a step goes to prefill. Clients
share places evenly; one with more yields to those with fewer or due. Those with negative numbers get the places that no
other wants. A client's rows go by priority, then age. Rows in prefill go by priority, then by waiting time per token left
(highest response ratio next). Age raises priority.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlm_batch.engine.limit import RowLimit
from vlm_batch.engine.shapes import chunk_end, padded_length
from vlm_batch.engine.work import Work
from vlm_batch.policy import Policy

#: More places than any client has.
LAST = 1 << 32


@dataclass(frozen=True)
class PrefillRow:
    """A row in prefill, ``done`` of ``length`` positions in its cache."""

    request_id: str
    length: int
    done: int
    atomic: tuple[tuple[int, int], ...] = ()  # spans that no chunk cuts
    # a chunk ends at each, or before the span that holds it
    stops: tuple[int, ...] = ()
    priority: int = 0
    waited: float = 0.0  # seconds since submission
    ends: tuple[int, ...] = ()  # if any, the only ends of chunks, whatever the budget
    client: int = 0


class Scheduler:
    """Decides what runs next, deterministically.

    ``most_live`` rows have places, fewer after memory ran out or by ``limit``.
    """

    def __init__(self, config: Policy) -> None:
        self.config = config
        self.most_rows = config.max_rows or config.most_rows
        self.limit = (
            None
            if config.max_rows
            else RowLimit(config.first_rows, self.most_rows, gap=config.token_gap)
        )
        self.most_live = self.most_rows
        self._is_plain = False
        self._ended = 0  # rows that ended since ``most_live`` changed

    @property
    def num_places(self) -> int:
        return (
            self.most_live
            if self.limit is None
            else min(self.most_live, self.limit.rows)
        )

    def record(
        self, rows: int, seconds: float, tokens: int, *, are_waiting: bool
    ) -> None:
        """Record a step. The limit counts decode-only steps that follow another."""
        was_plain, self._is_plain = self._is_plain, not tokens
        if self.limit is not None and was_plain and self._is_plain:
            self.limit.record(
                rows,
                seconds,
                are_waiting=are_waiting and self.most_live > self.limit.rows,
            )

    def run_out(self, num_live: int) -> None:
        """Record that so many rows did not fit."""
        self.most_live, self._ended = max(1, min(self.most_live, num_live) - 1), 0

    def end(self) -> None:
        """Record a live row's end. A lowered ``most_live`` grows by one after that many."""
        if self.most_live == self.most_rows:
            return
        self._ended += 1
        if self._ended >= self.most_live:
            self.most_live, self._ended = self.most_live + 1, 0

    def most_encoded(
        self, is_decoding: bool, seconds: float, pending: int, *, has_begun: bool
    ) -> int:
        """Return the next encoder call's most requests, 0 after ``encode_seconds`` beside decoding rows.

        Without such rows it is 0 once ``pending`` tokens fill a step.
        """
        config, most = self.config, self.config.encode_together
        if is_decoding:
            is_enough = seconds >= config.encode_seconds
            most = -(-most // config.beside_decode)
        else:
            is_enough = pending >= config.idle_budget
        return 0 if has_begun and is_enough else most

    def plan(self, prefill: Sequence[PrefillRow], budget: int) -> tuple[Work, ...]:
        """Return the chunks to prefill within the budget, most urgent row first.

        A chunk may exceed the budget for an atomic span, and by ``slack`` to end its prompt. With padding, a rest too
        small for a forward waits.
        """
        chunks: list[Work] = []
        pad_to = self.config.pad_to
        least = self.config.smallest_chunk if pad_to else 0
        keys = [(row.client, self._prefill_urgency(row)) for row in prefill]
        order = self.share_out(
            [(*key, key[1]) for key in keys], Counter(client for client, _ in keys)
        )
        for row in [prefill[at] for at in order]:
            if row.done == row.length:  # all of it was cached
                chunks.append(Work((row.request_id,), row.done, row.done))
            while budget > 0 and row.done < row.length:
                rest = row.length - row.done
                if (
                    budget < least
                    and rest > budget + self.config.slack
                    and any(chunk.end > chunk.begin for chunk in chunks)
                ):
                    break
                room = rest
                if rest > budget + self.config.slack:  # padding is filled with tokens
                    room = padded_length(budget, pad_to) if budget >= pad_to else budget
                room = min(room, self.config.max_chunk)
                fixed = next((end for end in row.ends if end > row.done), None)
                end = fixed or chunk_end(
                    row.done, row.length, room, row.atomic, row.stops
                )
                chunks.append(Work((row.request_id,), row.done, end))
                budget -= end - row.done
                row = replace(row, done=end)
        return tuple(chunks)

    def share_out(
        self, rows: Sequence[tuple[int, Any, Any]], placed: Mapping[int, int]
    ) -> list[int]:
        """Return the rows' order for places: the client with the fewest is next, then the smallest key.

        Args:
            rows: (client, key among its rows, key among all).
        """
        lines: dict[int, deque[int]] = {}
        for at in sorted(range(len(rows)), key=lambda at: rows[at][1]):
            lines.setdefault(rows[at][0], deque()).append(at)
        heap = [
            (_claim(client, placed.get(client, 0)), rows[line[0]][2], line[0], client)
            for client, line in lines.items()
        ]
        heapq.heapify(heap)
        order = []
        while heap:
            count, _, at, client = heap[0]
            order.append(lines[client].popleft())
            if lines[client]:
                following = lines[client][0]
                heapq.heapreplace(
                    heap, (count + 1, rows[following][2], following, client)
                )
            else:
                heapq.heappop(heap)
        return order

    def giver(self, placed: Mapping[int, int], client: int) -> int | None:
        """Return the client that yields a place to ``client``: the one with the most, if it keeps as many."""
        claims = {one: _claim(one, count) for one, count in placed.items() if count}
        most = max(claims, key=lambda one: (claims[one], one), default=client)
        mine = _claim(client, placed.get(client, 0))
        return most if claims.get(most, 0) > mine + 1 else None

    def urgency(self, priority: int, submitted: float) -> float:
        """Return a waiting row's constant sort key, smallest first. ``submitted``: seconds."""
        return submitted - priority * self.config.ageing_seconds

    def _prefill_urgency(self, row: PrefillRow) -> tuple[float, float]:
        level = row.priority + row.waited // self.config.ageing_seconds
        return (-level, -row.waited / max(row.length - row.done, 1))


def _claim(client: int, placed: int) -> int:
    """Return a client's place in line: clients with negative numbers come behind all others."""
    return placed + LAST if client < 0 else placed
