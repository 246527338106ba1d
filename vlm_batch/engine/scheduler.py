"""The plan of the next step: integers and ids only, no arrays.

Decoding goes first: every live row gets its token in each step. The rest of the step's time goes to prefill. Chunks end where
the model allows it, and are as long as fits between two tokens of the rows that decode. A free place is filled at once.

Rows wait for places by priority, then by age. Rows that have a place are prefilled by priority, then by the time that they
have waited for each token that is left of their prompts (highest response ratio next): short prompts do not wait behind long
ones, and long ones do not wait for ever. Age lifts a row by one priority for every ``ageing_seconds``, so nothing starves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vlm_batch.engine.limit import RowLimit
from vlm_batch.policy import Policy

#: Lengths from one power of two to the next: padding is at most a quarter of a chunk, and an eighth of long ones on average.
STEPS = 4


@dataclass(frozen=True)
class Chunk:
    """Prompt positions [start, end) of one row, to be prefilled in this step."""

    request_id: str
    start: int
    end: int


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

    def plan(self, prefill: Sequence[PrefillRow], budget: int) -> tuple[Chunk, ...]:
        """The chunks to prefill, most urgent row first, within the step's budget; of equals the first.

        A chunk may exceed the budget to hold an atomic span whole, and by ``slack`` to end its prompt. Where chunks are padded,
        what others leave of a budget is not made a part of a prompt unless it is worth a forward.
        """
        chunks: list[Chunk] = []
        least = self.config.smallest_chunk if self.config.pad_to else 0
        for row in sorted(prefill, key=self._prefill_urgency):
            if row.done == row.length:  # found whole: it needs no budget, and waits for none
                chunks.append(Chunk(row.request_id, row.done, row.done))
            while budget > 0 and row.done < row.length:
                rest = row.length - row.done
                if (
                    budget < least
                    and rest > budget + self.config.slack
                    and any(chunk.end > chunk.start for chunk in chunks)
                ):
                    break
                room = rest if rest <= budget + self.config.slack else self._rounded(budget)
                end = chunk_end(row, min(room, self.config.max_chunk))
                chunks.append(Chunk(row.request_id, row.done, end))
                budget -= end - row.done
                row = replace(row, done=end)
        return tuple(chunks)

    def _rounded(self, budget: int) -> int:
        """A budget with the positions that would be padding behind it, if it is worth a chunk."""
        pad_to = self.config.pad_to
        return padded_length(budget, pad_to) if budget >= pad_to else budget

    def urgency(self, priority: int, submitted: float) -> float:
        """The key that sorts waiting rows, the smallest first; it stays the same while a row waits.

        ``submitted`` is in seconds. Of two rows the older goes first, or the one of higher priority unless it came
        ``ageing_seconds`` later for each step between them.
        """
        return submitted - priority * self.config.ageing_seconds

    def _prefill_urgency(self, row: PrefillRow) -> tuple[float, float]:
        level = row.priority + row.waited // self.config.ageing_seconds
        return (-level, -row.waited / max(row.length - row.done, 1))


def chunk_end(row: PrefillRow, budget: int) -> int:
    """The end of a chunk of at most ``budget`` positions that begins at ``row.done``.

    If that would fall inside an atomic span, the chunk ends before the span, or, where it begins with it, after it.
    """
    if row.ends:
        return next((end for end in row.ends if end > row.done), row.length)
    end = min([row.length, row.done + budget, *(stop for stop in row.stops if stop > row.done)])
    for start, stop in row.atomic:
        if start < end < stop:
            return start if start > row.done else min(stop, row.length)
    return end


def together(
    plan: Sequence[Chunk],
    lengths: Mapping[str, int],
    most: int,
    most_tokens: int | None = None,
    pad_to: int = 0,
    fill: int = 0,
) -> list[list[Chunk]]:
    """The plan in groups of at most ``most``: whole prompts of one length, padded to multiples of ``pad_to``, share a group.

    ``lengths`` are the rows' prompts. A group has at most ``most_tokens``, or one prompt. Shorter prompts join longer ones
    where that takes less than ``fill`` further positions for each group that is saved.
    """
    groups: list[list[Chunk]] = []
    whole: list[tuple[int, list[Chunk]]] = []  # those of whole prompts, with their widths
    open_groups: dict[int, list[Chunk]] = {}

    def has_room(count: int, width: int) -> bool:
        places = padded_count(count, pad_to)
        return places <= most and (most_tokens is None or places * width <= most_tokens)

    for chunk in plan:
        length = lengths[chunk.request_id]
        if (chunk.start, chunk.end) != (0, length):
            groups.append([chunk])
            continue
        width = padded_length(length, pad_to)
        group = open_groups.get(width)
        if group is None or not has_room(len(group) + 1, width):
            open_groups[width] = group = []
            whole.append((width, group))
            groups.append(group)
        group.append(chunk)
    widest, longer = 0, list[Chunk]()
    for width, group in sorted(whole, key=lambda pair: -pair[0]) if fill else ():
        count = len(longer) + len(group)
        apart = padded_count(len(longer), pad_to) * widest + padded_count(len(group), pad_to) * width
        if longer and has_room(count, widest) and padded_count(count, pad_to) * widest - apart < fill:
            longer.extend(group)
            group.clear()
        else:
            widest, longer = width, group
    return [group for group in groups if group]


def padded_length(length: int, pad_to: int) -> int:
    """Positions that a chunk of ``length`` is computed in: a multiple of ``pad_to``, and of a quarter of the power of two
    below. As many as it has where ``pad_to`` is 0."""
    if not pad_to or not length:
        return length
    step = max(pad_to, (1 << (length - 1).bit_length()) // (2 * STEPS))
    return -(-length // step) * step


def padded_count(count: int, pad_to: int) -> int:
    """Rows that ``count`` prompts are computed in as one array: a power of two, or one and a half times one."""
    if not pad_to or count < 4:
        return count
    power = 1 << (count - 1).bit_length()
    return power - power // 4 if count <= power - power // 4 else power
