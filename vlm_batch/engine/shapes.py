"""The shape of every call: where chunks end, how far they are filled up, how many rows a call has, how many columns they read.

A library chooses kernels by shapes, so a row's last bits depend on the shapes of the calls that it is in. ``FreeShapes`` are
those that cost least: whoever is there shares a call. In ``FixedShapes`` every shape follows from the row's own request, or is
one of several that were shown to agree bit for bit (``vlm_batch.engine.proof``): answers are then reproducible. Idle rows and
pictures fill a call up to its shape, and are thrown away.

Nobody else asks which of the two an engine has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

from vlm_batch.caches import (
    LayerCache,
    Placement,
    can_share,
    can_trim,
    kind_of,
    set_layer,
    slab,
)
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.port import ModelAdapter
from vlm_batch.policy import PACKED, POLICIES, Policy
from vlm_batch.records import Call, PromptKey
from vlm_batch.runtime.device import Device
from vlm_batch.store.digest import as_words, digest

#: Lengths from one power of two to the next: padding is at most a quarter of a chunk, and an eighth of long ones on average.
STEPS = 4

Spans: TypeAlias = tuple[tuple[int, int], ...]


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


@dataclass(frozen=True)
class FreeShapes:
    """The shapes that cost least, by a policy and what a model can do.

    Chunks are computed in multiples of ``pad_to`` positions, 0 for none. Up to ``most_prompts`` whole prompts of one length
    share an array; shorter prompts join longer ones where that takes fewer further positions than half of what a forward
    computes as fast.
    """

    layout: Placement = Placement.ROWS
    policy: Policy = field(default_factory=Policy)
    pad_to: int = 0
    most_prompts: int = 1

    #: Whether a row may go on from any position, also from one that a decode step computed.
    goes_on_anywhere = True
    #: The settings that a saved row must share with the engine that continues it, by name.
    settings: Mapping[str, str] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, adapter: ModelAdapter, kv: KVQuantisation | None, policy: Policy) -> FreeShapes:
        """Those of a model with a policy."""
        fresh = adapter.make_cache(kv)
        pad_to = policy.pad_to if pads(adapter, fresh) else 0
        return cls(
            Placement(policy.placement), policy, pad_to, policy.prefill_together if shares(adapter, fresh) else 1
        )

    def adapter(self, adapter: ModelAdapter) -> ModelAdapter:
        """The adapter that computes in these shapes."""
        return adapter

    def limited(self, policy: Policy) -> Policy:
        """The scheduler's settings without those that would let neighbours or the clock change a row's shapes."""
        return policy

    def key(self, key: PromptKey) -> PromptKey:
        """A prompt's key in which equal positions have equal states, as far as these shapes say."""
        return key

    # Pictures

    def encode_call(self) -> Call:
        return Call(most_patches=self.policy.most_patches)

    # Prompts

    def ends(self, length: int, atomic: Spans = ()) -> tuple[int, ...]:
        """Where a prompt's chunks end; () where the step's budget decides."""
        return ()

    def shares(self, length: int, atomic: Spans = ()) -> bool:
        """Whether a whole prompt may be in an array with others, or always is beside idle ones."""
        return self.most_prompts > 1

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Whole prompts by the array that they share: places in ``lengths``. All of them are shared."""
        fill = self.policy.smallest_chunk // 2 if self.pad_to else 0
        return together(lengths, self.most_prompts, self.policy.together_tokens, self.pad_to, fill)

    def positions(self, count: int) -> int:
        """Positions that a chunk of so many is computed in: others behind them belong to no prompt."""
        return padded_length(count, self.pad_to)

    def prefill_call(
        self, begin: int, ends: Sequence[int], *, is_whole: bool = False, is_scored: bool = False
    ) -> tuple[int, int, Call]:
        """(rows, end, what the forward must know) of a call with the positions [begin, ends[i]) of each row: idle rows and
        positions of no prompt fill it up. ``is_whole``: these are whole prompts. ``is_scored``: each position has logits."""
        rows = padded_count(len(ends), self.pad_to)
        return _prefill_call(begin, ends, rows, 0 if is_scored else self.pad_to, Call(is_scored=is_scored))

    def arrays(self, context: int | None) -> list[tuple[int, int]]:
        """(rows, positions) of the arrays that whole prompts of one chunk come in, those of one row first; the longest where
        they are of any length. ``context``: positions that the model has."""
        widths, most = _widths(self.policy.max_chunk, context, self.pad_to), self.policy.together_tokens
        if not self.pad_to:
            return [(1, width) for width in widths]
        counts = sorted({padded_count(count, self.pad_to) for count in range(1, self.most_prompts + 1)})
        return [(count, width) for count in counts for width in widths if count == 1 or count * width <= most]

    # Decode steps

    def graphs(self, asked: bool | None) -> bool | None:
        """The choice of compiled steps: as asked for; None leaves it to the adapter."""
        return asked

    def group_size(self, rows: int) -> int:
        """The most rows that decode in one forward, of an engine with so many."""
        return rows

    def places(self, rows: int, most: int) -> int:
        """The places of a forward of so many rows, up to ``most``; 0 for none."""
        return min(1 << (rows - 1).bit_length(), most) if self.layout is Placement.SLAB and rows else rows

    def least_columns(self, tokens: int) -> int:
        """The columns that the slab of a row of so many tokens has at least. Rows decode in one forward with those of the same
        number alone; 0 for all that need no number of their own."""
        return 0

    def columns(self, tokens: int, least: int = 0) -> int:
        """Columns of a slab whose longest row has so many tokens, and that has at least so many."""
        return max(least, slab.capacity_for(tokens))

    def layers(self, caches: Sequence[Any], places: int, least: int = 0) -> list[LayerCache]:
        """The layers of an empty batch, by a row's caches; slabs have at least so many columns."""
        layers = [kind_of(single).batched(self.layout, places) for single in caches]
        for layer in layers:
            set_layer(layer, partial(self.columns, least=least), self.policy.few_bits)
        return layers

    def decode_call(self) -> Call:
        return Call()

    def steps(self, rows: int, longest: int) -> list[tuple[int, int]]:
        """(rows, columns) of decode steps of up to so many rows of up to ``longest`` tokens, the fewest columns first."""
        counts = [1 << power for power in range(rows.bit_length())]
        widths = range(slab.CAPACITY_STEP, max(longest, slab.CAPACITY_STEP) + 1, slab.CAPACITY_STEP)
        return [(count, columns) for columns in widths for count in counts]


@dataclass(frozen=True)
class FixedShapes:
    """Shapes by which a row's numbers are a function of its request.

    ``counts``: numbers of rows, ascending, in which a decode step gives each row the same bits. ``widths``: numbers of columns
    of slabs, ascending, that do so; longer rows decode in one forward with those alone that need as many columns. There are
    none where each row is alone in its slab or has a cache of its own: its columns follow from its length. ``grid``: positions
    between a prompt's cuts: a multiple of 256, so that single-row caches, which grow in steps of that, have the same room
    whether a prompt was run from its beginning or from one of the cuts. ``stops``: further cuts, settings as well (where
    quantised keys begin). ``pad_to``: multiples of positions that chunks are computed in, each by its own length; 0 for none.
    A call holds short prompts of one length, or small pictures of one shape, up to ``call_tokens`` or ``call_patches``, where
    ``joint`` says so; without it each is alone. ``can_graph``: compiled steps were shown to have the same bits. ``products``:
    kinds of products that are computed in numbers of rows of their own, and those.
    """

    counts: tuple[int, ...] = (1,)
    layout: Placement = Placement.ROWS
    grid: int = POLICIES[Device.CPU].grid
    stops: tuple[int, ...] = ()
    pad_to: int = 0
    call_tokens: int = 0
    call_patches: int = 0
    joint: JointProof | None = field(default=None, compare=False)
    can_graph: bool = field(default=False, compare=False)
    products: tuple[tuple[str, tuple[int, ...]], ...] = ()
    widths: tuple[int, ...] = ()
    few_bits: str = PACKED

    goes_on_anywhere = False

    @property
    def settings(self) -> Mapping[str, str]:
        padded = f"; padded to {self.pad_to}" if self.pad_to else ""
        joint = (
            f"; in calls of {self.call_tokens} tokens, {self.call_patches} patches" if self.joint is not None else ""
        )
        # by the smallest: whoever has more rows may have proven larger numbers, which have the same bits
        apart = "".join(f"; {name} as {counts[0]} rows" for name, counts in self.products)
        return {
            "reproducible": f"as {self.counts[0]} rows{apart}; {self.layout.value}; grid {self.grid}{padded}{joint}"
        }

    def adapter(self, adapter: ModelAdapter) -> ModelAdapter:
        return adapter.with_products(dict(self.products)) if self.products else adapter

    def limited(self, policy: Policy) -> Policy:
        if self.joint is None or not self.call_tokens:
            policy = replace(policy, prefill_together=1)
        if self.joint is None or not self.call_patches:
            policy = replace(policy, encode_together=1)
        return replace(policy, slack=0, pad_to=self.pad_to)

    def key(self, key: PromptKey) -> PromptKey:
        """A prompt's key in which equal positions have equal bits, not only equal meaning.

        A position is known by the chunk that it was computed in, and an answer's positions, which a decode step computed,
        are no prompt's. A row goes on from a chunk's end, so that what is saved fits where a cold run would stand.
        """
        atomic = key.spans[len(key.pictures) :]
        chunks = tuple(pairwise((0, *self.ends(key.length, atomic))))
        rows = self.prompts(key.length, atomic)
        beside = [rows] if rows > 1 else []  # a longer prompt's first chunk may end here, and is alone
        positions = key.positions.copy()
        for start, end in chunks:
            positions[start:end, 1:] ^= as_words(digest(["chunk", start, end, *beside]))
        answer = as_words(digest(["decoded", [int(word) for word in key.answer]]))
        return replace(key, positions=positions, spans=(*key.spans, *chunks), answer=answer)

    # Pictures

    def encode_call(self) -> Call:
        return Call(is_fixed=True, pictures=self.pictures)

    def pictures(self, call: Any) -> int:
        """The pictures, idle ones among them, of every call of a tower with one of such a call's shape. Raises what the proof
        raises."""
        most = filling(call.tower.count_patches(call, 0), self.call_patches)
        return self.joint.pictures(most, call) if self.joint is not None and most > 1 else 1

    # Prompts

    def ends(self, length: int, atomic: Spans = ()) -> tuple[int, ...]:
        """On the grid, or where ``stops`` and spans that may not be cut allow it.

        No chunk is a single token, but that of a prompt of one: a lone query has kernels of its own, which go by more
        than its shape.
        """
        ends: list[int] = []
        done = 0
        while done < length:
            end = chunk_end(done, length, self.grid - done % self.grid, atomic, self.stops)
            done = length if length - end == 1 and end not in self.stops else end
            ends.append(done)
        return tuple(ends)

    def shares(self, length: int, atomic: Spans = ()) -> bool:
        return self.prompts(length, atomic) > 1

    def prompts(self, length: int, atomic: Spans = ()) -> int:
        """The rows of every array in which a whole prompt is prefilled: 1 for one of several chunks, and where prompts come in
        any length, of which each would have to be proven. Raises what the proof raises."""
        return self._prompts(length) if self.ends(length, atomic) == (length,) else 1

    def _prompts(self, length: int) -> int:
        """Prompts, of one chunk and of this length, of an array."""
        if self.joint is None or not self.pad_to:
            return 1
        width = self.positions(length)
        most = filling(width, self.call_tokens)
        return self.joint.prompts(most, width) if most > 1 else 1

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        found: dict[tuple[int, int], list[int]] = {}  # by positions, and how many arrays of these are full
        sizes: dict[int, int] = {}
        for place, length in enumerate(lengths):
            width = self.positions(length)
            before = sizes[width] = sizes.get(width, -1) + 1
            found.setdefault((width, before // self._prompts(length)), []).append(place)
        return list(found.values())

    def positions(self, count: int) -> int:
        return padded_length(count, self.pad_to)

    def prefill_call(
        self, begin: int, ends: Sequence[int], *, is_whole: bool = False, is_scored: bool = False
    ) -> tuple[int, int, Call]:
        rows = self._prompts(ends[0]) if is_whole and not is_scored else 1
        is_apart = self.joint is not None and self.joint.attends_apart(rows, self.positions(ends[0] - begin))
        call = Call(is_scored=is_scored, is_fixed=True, attends_apart=rows > 1 and is_apart)
        return _prefill_call(begin, ends, rows, 0 if is_scored else self.pad_to, call)

    def arrays(self, context: int | None) -> list[tuple[int, int]]:
        return [(1, width) for width in _widths(self.grid, context, self.pad_to)]  # beside as many idle ones as always

    # Decode steps

    def graphs(self, asked: bool | None) -> bool | None:
        """Raises ValueError where they are asked for."""
        if asked:
            raise ValueError(
                "compile_decode: graphs are made of steps that come back, and may round otherwise; not exact"
            )
        return None if self.can_graph else False

    def group_size(self, rows: int) -> int:
        return self.places(min(rows, self.counts[-1]), rows)

    def places(self, rows: int, most: int) -> int:
        return next(count for count in self.counts if count >= rows) if rows else 0

    def least_columns(self, tokens: int) -> int:
        has_own = self.layout is Placement.SLAB and self.widths and tokens > self.widths[-1]
        return self.columns(tokens) if has_own else 0

    def columns(self, tokens: int, least: int = 0) -> int:
        """The least of those that agree, and beyond them a power of two."""
        power = slab.CAPACITY_STEP << ((max(tokens, 1) - 1) // slab.CAPACITY_STEP).bit_length()
        return max(least, next((width for width in self.widths if width >= tokens), power))

    def layers(self, caches: Sequence[Any], places: int, least: int = 0) -> list[LayerCache]:
        layers = [kind_of(single).batched(self.layout, places) for single in caches]
        for layer in layers:
            set_layer(layer, partial(self.columns, least=least), self.few_bits, always_masked=True)
        return layers

    def decode_call(self) -> Call:
        return Call(is_fixed=True)

    def steps(self, rows: int, longest: int) -> list[tuple[int, int]]:
        counts = [count for count in self.counts if count <= self.group_size(rows)]
        widths = sorted({self.columns(tokens) for tokens in range(1, longest + 1, slab.CAPACITY_STEP)})
        return [(count, columns) for columns in widths for count in counts]


Shapes: TypeAlias = FreeShapes | FixedShapes


def shares(adapter: ModelAdapter, fresh: Sequence[Any]) -> bool:
    """Whether whole prompts of one length may be prefilled as one array, into such fresh caches."""
    return adapter.is_causal and can_share(fresh)


def pads(adapter: ModelAdapter, fresh: Sequence[Any]) -> bool:
    """Whether positions may stand behind a chunk, in such caches, that belong to no prompt."""
    return adapter.is_causal and adapter.scores_chunks and can_trim(fresh)


def filling(size: int, room: int) -> int:
    """The largest power of two of things of a size that have room together; one at least."""
    return 1 << max(0, (room // max(size, 1)).bit_length() - 1)


def chunk_end(done: int, length: int, room: int, atomic: Spans = (), stops: Sequence[int] = ()) -> int:
    """The end of a chunk of at most ``room`` positions that begins at ``done``, or at the first stop.

    If that would fall inside an atomic span, the chunk ends before the span, or, where it begins with it, after it.
    """
    end = min([length, done + room, *(stop for stop in stops if stop > done)])
    for start, stop in atomic:
        if start < end < stop:
            return start if start > done else min(stop, length)
    return end


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


def together(lengths: Sequence[int], most: int, most_tokens: int | None, pad_to: int, fill: int) -> list[list[int]]:
    """Whole prompts, by their places in ``lengths``, in groups of at most ``most``: those of one length, padded to multiples of
    ``pad_to``, share a group of at most ``most_tokens``, or of one prompt. Shorter prompts join longer ones where that takes
    less than ``fill`` further positions for each group that is saved."""
    groups: list[tuple[int, list[int]]] = []  # with their widths
    open_groups: dict[int, list[int]] = {}

    def has_room(count: int, width: int) -> bool:
        places = padded_count(count, pad_to)
        return places <= most and (most_tokens is None or places * width <= most_tokens)

    for place, length in enumerate(lengths):
        width = padded_length(length, pad_to)
        group = open_groups.get(width)
        if group is None or not has_room(len(group) + 1, width):
            open_groups[width] = group = []
            groups.append((width, group))
        group.append(place)
    widest, longer = 0, list[int]()
    for width, group in sorted(groups, key=lambda pair: -pair[0]) if fill else ():
        count = len(longer) + len(group)
        apart = padded_count(len(longer), pad_to) * widest + padded_count(len(group), pad_to) * width
        if longer and has_room(count, widest) and padded_count(count, pad_to) * widest - apart < fill:
            longer.extend(group)
            group.clear()
        else:
            widest, longer = width, group
    return [group for _, group in groups if group]


def _prefill_call(begin: int, ends: Sequence[int], rows: int, pad_to: int, call: Call) -> tuple[int, int, Call]:
    end = begin + padded_length(max(ends) - begin, pad_to)
    filled = (*ends, *[ends[-1]] * (rows - len(ends)))
    is_asked = any(one < end for one in filled) or (call.is_fixed and rows > 1)
    return rows, end, replace(call, ends=filled) if is_asked else call


def _widths(longest: int, context: int | None, pad_to: int) -> list[int]:
    """Positions that whole prompts of one chunk are computed in; the longest where they are of any length."""
    most = longest if context is None else min(longest, context - 1)
    return sorted({padded_length(length, pad_to) for length in range(1 if pad_to else most, most + 1)})
