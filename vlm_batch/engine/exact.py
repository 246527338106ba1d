"""Reproducible answers: a row's last bits depend on its request alone.

A library chooses kernels by shapes, so the last bits depend on the number of rows in a product and on the places where a
prompt is cut. Rows therefore decode in numbers that were shown to agree bit for bit (``proof``); idle places fill a batch
up to such a number. Prompts are cut at places that follow from the prompt alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

from vlm_batch.caches import Placement
from vlm_batch.engine.scheduler import PrefillRow, SchedulerConfig, chunk_end
from vlm_batch.policy import POLICIES
from vlm_batch.records import PromptKey
from vlm_batch.runtime.device import Device
from vlm_batch.store.digest import as_words, digest

#: Numbers of prompts that may share a prefill, and of pictures that may share a tower's call, where that is proven.
JOINT = (2, 4, 8, 16)


class JointProof(Protocol):
    """The proof that prompts which share a prefill, and pictures which share a tower's call, get the bits they get alone."""

    @property
    def found(self) -> Mapping[str, str]:
        """The reasons against what has been asked so far, by it; empty texts where it is proven."""

    def agree(self, rows: int, length: int) -> bool:
        """Whether so many whole prompts of so many tokens may; the engine's thread measures what is not known."""

    def parts(self, calls: Sequence[Any]) -> Sequence[int]:
        """Calls of a tower, of one shape, in parts that may be made as one (``vlm_batch.adapters.joint``)."""


def parts_of(number: int, agree: Callable[[int], bool]) -> tuple[int, ...]:
    """A number in parts of the sizes of ``JOINT`` that agree, the largest first, and ones."""
    parts: list[int] = []
    while number > 1:
        size = next((size for size in reversed(JOINT) if size <= number and agree(size)), 1)
        if size == 1:
            break
        parts.append(size)
        number -= size
    return (*parts, *[1] * number)


@dataclass(frozen=True)
class Exact:
    """Settings by which an engine keeps a row's numbers a function of its request.

    ``counts``: numbers of rows, ascending, in which a decode step gives each row the same bits. ``layout``: how keys and
    values lie, whatever the batch's placement: attention over a row's own columns and over padded ones differ. ``grid``:
    positions between a prompt's cuts: a multiple of 256, so that single-row caches, which grow in steps of that, have the same
    room whether a prompt was run from its beginning or from one of the cuts. ``stops``: further cuts, settings as well (where
    quantised keys begin). ``pad_to``: multiples of positions that chunks are computed in, each by its own length; 0 for none.
    ``joint`` says which prompts of one length may share a prefill, and which pictures a call; without it none do.
    """

    counts: tuple[int, ...] = (1,)
    layout: Placement = Placement.ROWS
    grid: int = POLICIES[Device.CPU].grid
    stops: tuple[int, ...] = ()
    pad_to: int = 0
    joint: JointProof | None = field(default=None, compare=False)

    def places(self, rows: int) -> int:
        """The number of places for so many rows of one group, at most ``counts[-1]``; 0 for none."""
        return next(count for count in self.counts if count >= rows) if rows else 0

    def ends(self, length: int, atomic: tuple[tuple[int, int], ...] = ()) -> tuple[int, ...]:
        """The ends of a prompt's chunks: on the grid, or where ``stops`` and spans that may not be cut allow it.

        No chunk is a single token, but that of a prompt of one: a lone query has kernels of its own, which go by more
        than its shape.
        """
        row = PrefillRow("", length, 0, atomic, self.stops)
        ends: list[int] = []
        while row.done < length:
            end = chunk_end(row, self.grid - row.done % self.grid)
            end = length if length - end == 1 and end not in self.stops else end
            ends.append(end)
            row = replace(row, done=end)
        return tuple(ends)

    def key(self, key: PromptKey) -> PromptKey:
        """A prompt's key in which equal positions have equal bits, not only equal meaning.

        A position is known by the chunk that it was computed in, and an answer's positions, which a decode step computed,
        are no prompt's. A row goes on from a chunk's end, so that what is saved fits where a cold run would stand.
        """
        atomic = key.spans[len(key.pictures) :]
        chunks = tuple(pairwise((0, *self.ends(key.length, atomic))))
        positions = key.positions.copy()
        for start, end in chunks:
            positions[start:end, 1:] ^= as_words(digest(["chunk", start, end]))
        answer = as_words(digest(["decoded", [int(word) for word in key.answer]]))
        return replace(key, positions=positions, spans=(*key.spans, *chunks), answer=answer)

    def config(self, config: SchedulerConfig) -> SchedulerConfig:
        """The scheduler's settings without those that would let neighbours or the clock change a row's shapes."""
        if self.joint is None:
            config = replace(config, encode_together=1, prefill_together=1)
        return replace(config, slack=0, pad_to=self.pad_to)

    def sizes(self, rows: int, length: int) -> tuple[int, ...]:
        """So many prompts of one length in parts that may share a prefill, the largest ones that are proven first."""
        joint, most = self.joint, self.counts[-1]
        return parts_of(rows, lambda size: joint is not None and size <= most and joint.agree(size, length))

    @property
    def settings(self) -> dict[str, str]:
        """The settings that a saved row must share with the engine that continues it, by name."""
        padded = f"; padded to {self.pad_to}" if self.pad_to else ""
        return {"reproducible": f"as {self.counts[0]} rows; {self.layout.value}; grid {self.grid}{padded}"}
