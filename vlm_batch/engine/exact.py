"""Reproducible answers: a row's last bits depend on its request alone.

A library chooses kernels by shapes, so the last bits depend on the number of rows in a product and on the places where a
prompt is cut. Rows therefore decode in numbers that were shown to agree bit for bit (``proof``); idle places fill a batch
up to such a number. Prompts are cut at places that follow from the prompt alone. A prompt of one chunk is prefilled in an
array of as many rows as its length says, beside others of that length or idle ones, and a picture goes through the tower in
the same way: the shape of a call never changes, and its kernels were shown to treat all places alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

from vlm_batch.caches import Placement
from vlm_batch.engine.scheduler import PrefillRow, chunk_end, padded_length
from vlm_batch.policy import POLICIES, Policy
from vlm_batch.records import PromptKey
from vlm_batch.runtime.device import Device
from vlm_batch.store.digest import as_words, digest


class JointProof(Protocol):
    """The proof that in a call of one shape neither a place nor who is beside it changes a bit of what is there.

    The engine's thread measures what is not known yet. Raises where memory does not suffice for that: nothing is known then.
    """

    @property
    def found(self) -> Mapping[str, str]:
        """The reasons against what has been asked so far, by it; empty texts where it is proven."""

    def prompts(self, most: int, length: int) -> int:
        """``most`` whole prompts of ``length`` tokens to a call, or one."""

    def attends_apart(self, rows: int, length: int) -> bool:
        """Whether such prompts attend in calls of their own."""

    def pictures(self, most: int, call: Any) -> int:
        """``most`` pictures of the shape of a tower's call (``vlm_batch.adapters.joint``) to a call, or one."""


def filling(size: int, room: int) -> int:
    """The largest power of two of things of a size that have room together; one at least."""
    return 1 << max(0, (room // max(size, 1)).bit_length() - 1)


@dataclass(frozen=True)
class Exact:
    """Settings by which an engine keeps a row's numbers a function of its request.

    ``counts``: numbers of rows, ascending, in which a decode step gives each row the same bits. ``layout``: how keys and
    values lie, whatever the batch's placement: attention over a row's own columns and over padded ones differ. ``grid``:
    positions between a prompt's cuts: a multiple of 256, so that single-row caches, which grow in steps of that, have the same
    room whether a prompt was run from its beginning or from one of the cuts. ``stops``: further cuts, settings as well (where
    quantised keys begin). ``pad_to``: multiples of positions that chunks are computed in, each by its own length; 0 for none.
    A call holds short prompts of one length, or small pictures of one shape, up to ``call_tokens`` or ``call_patches``, where
    ``joint`` says so; without it each is alone. ``graphs``: compiled decode steps were shown to have the same bits.
    ``products``: kinds of products that are computed in numbers of rows of their own, and those.
    """

    counts: tuple[int, ...] = (1,)
    layout: Placement = Placement.ROWS
    grid: int = POLICIES[Device.CPU].grid
    stops: tuple[int, ...] = ()
    pad_to: int = 0
    call_tokens: int = 0
    call_patches: int = 0
    joint: JointProof | None = field(default=None, compare=False)
    graphs: bool = field(default=False, compare=False)
    products: tuple[tuple[str, tuple[int, ...]], ...] = ()

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

    def rows(self, length: int, atomic: tuple[tuple[int, int], ...] = ()) -> int:
        """The rows, idle ones among them, of every array in which a whole prompt is prefilled; 1 for one of several chunks, and
        where prompts come in any length, of which each would have to be proven. Raises what the proof raises."""
        if self.joint is None or not self.pad_to or self.ends(length, atomic) != (length,):
            return 1
        width = padded_length(length, self.pad_to)
        most = filling(width, self.call_tokens)
        return self.joint.prompts(most, width) if most > 1 else 1

    def attends_apart(self, rows: int, length: int) -> bool:
        """Whether so many prompts of one length attend in calls of their own."""
        return self.joint is not None and self.joint.attends_apart(rows, length)

    def pictures(self, call: Any) -> int:
        """The pictures, idle ones among them, of every call of a tower with one of such a call's shape. Raises what the proof
        raises."""
        most = filling(call.tower.count_patches(call, 0), self.call_patches)
        return self.joint.pictures(most, call) if self.joint is not None and most > 1 else 1

    def key(self, key: PromptKey) -> PromptKey:
        """A prompt's key in which equal positions have equal bits, not only equal meaning.

        A position is known by the chunk that it was computed in, and an answer's positions, which a decode step computed,
        are no prompt's. A row goes on from a chunk's end, so that what is saved fits where a cold run would stand.
        """
        atomic = key.spans[len(key.pictures) :]
        chunks = tuple(pairwise((0, *self.ends(key.length, atomic))))
        rows = self.rows(key.length, atomic)
        beside = [rows] if rows > 1 else []  # a longer prompt's first chunk may end here, and is alone
        positions = key.positions.copy()
        for start, end in chunks:
            positions[start:end, 1:] ^= as_words(digest(["chunk", start, end, *beside]))
        answer = as_words(digest(["decoded", [int(word) for word in key.answer]]))
        return replace(key, positions=positions, spans=(*key.spans, *chunks), answer=answer)

    def config(self, config: Policy) -> Policy:
        """The scheduler's settings without those that would let neighbours or the clock change a row's shapes."""
        if self.joint is None or not self.call_tokens:
            config = replace(config, prefill_together=1)
        if self.joint is None or not self.call_patches:
            config = replace(config, encode_together=1)
        return replace(config, slack=0, pad_to=self.pad_to)

    @property
    def settings(self) -> dict[str, str]:
        """The settings that a saved row must share with the engine that continues it, by name."""
        padded = f"; padded to {self.pad_to}" if self.pad_to else ""
        joint = (
            f"; in calls of {self.call_tokens} tokens, {self.call_patches} patches" if self.joint is not None else ""
        )
        # by the smallest: whoever has more rows may have proven larger numbers, which have the same bits
        apart = "".join(f"; {name} as {counts[0]} rows" for name, counts in self.products)
        return {
            "reproducible": f"as {self.counts[0]} rows{apart}; {self.layout.value}; grid {self.grid}{padded}{joint}"
        }
