"""What the next step does: integers and ids only, no arrays.

Decode first: every live row gets its token each step. What is left of the step goes to prefill, in chunks that end
where the model allows it. A free place is filled at once. Rows wait by priority, then by age; ageing lifts a waiting
row by one priority for every ``ageing_seconds``, so that nothing starves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlm_batch.types import BatchPlan, Chunk


@dataclass(frozen=True)
class SchedulerConfig:
    """``prefill_budget``: prompt tokens a step beside decoding rows; ``idle_budget``: when nothing decodes."""

    max_rows: int = 8
    prefill_budget: int = 256
    idle_budget: int = 2048
    ageing_seconds: float = 5.0


@dataclass(frozen=True)
class WaitingRow:
    """A row that holds no place yet. ``waited`` is in seconds."""

    request_id: str
    priority: int
    waited: float


@dataclass(frozen=True)
class PrefillRow:
    """A row whose prompt is being prefilled: ``done`` of ``length`` positions are in its cache.

    Chunks hold ``atomic`` spans whole, and end at each of ``stops`` (or before the span that it lies in).
    """

    request_id: str
    length: int
    done: int
    atomic: tuple[tuple[int, int], ...] = ()
    stops: tuple[int, ...] = ()


class Scheduler:
    """Pure policy: the same state gives the same plan."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config

    def admit(self, waiting: Sequence[WaitingRow], num_live: int) -> list[str]:
        """Which waiting rows get a place now, in order."""
        free = max(0, self.config.max_rows - num_live)
        return [
            row.request_id for row in sorted(waiting, key=lambda row: self.urgency(row.priority, row.waited))[:free]
        ]

    def plan(self, prefill: Sequence[PrefillRow], decode: Sequence[str]) -> BatchPlan:
        """The chunks to prefill, oldest row first, within the step's budget; and the rows that decode.

        A chunk may exceed the budget only to hold an atomic span whole.
        """
        budget = self.config.prefill_budget if decode else self.config.idle_budget
        chunks: list[Chunk] = []
        for row in prefill:
            if budget <= 0:
                break
            end = chunk_end(row, budget)
            chunks.append(Chunk(row.request_id, row.done, end))
            budget -= end - row.done
        return BatchPlan(prefill=tuple(chunks), decode=tuple(decode))

    def urgency(self, priority: int, waited: float) -> tuple[float, float]:
        """What waiting rows are sorted by: smaller goes first."""
        return (-(priority + waited // self.config.ageing_seconds), -waited)


def chunk_end(row: PrefillRow, budget: int) -> int:
    """Where a chunk of at most ``budget`` positions that begins at ``row.done`` ends.

    If that would fall inside an atomic span, the chunk ends before the span, or, where it begins with it, after it.
    """
    end = min([row.length, row.done + budget, *(stop for stop in row.stops if stop > row.done)])
    for start, stop in row.atomic:
        if start < end < stop:
            return start if start > row.done else min(stop, row.length)
    return end
