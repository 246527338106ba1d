"""Shapes of all calls: chunks, padding, rows per call, columns that attention reads.

Kernels follow shapes, so last bits do, too. ``FreeShapes`` cost least. ``FixedShapes`` follow from the request, or were
tested to give the same bits (``vlm_batch.proofs``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from vlm_batch.arrays import round_up
from vlm_batch.caches import (
    LayerCache,
    Placement,
    can_fill,
    can_share,
    can_trim,
    kind_of,
    slab,
)
from vlm_batch.caches.drafted import NO_LIMIT
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.lengths import (
    Spans,
    chunk_end,
    filling,
    first_enough,
    padded_count,
    padded_length,
    together,
    widths_of,
)
from vlm_batch.policy import PACKED, POLICIES, Policy
from vlm_batch.records import Call, Encoded, PromptKey
from vlm_batch.runtime.device import Device
from vlm_batch.store.digest import as_words, digest

if TYPE_CHECKING:
    from vlm_batch.adapters.base import Adapter

#: Most padding positions of a prompt on a CPU, to share an array with a longer one: about the cost of reading the weights.
FEW_POSITIONS = 16
#: As many where layers launch each position by itself (recurrent states).
MORE_POSITIONS = 64
#: Most unused columns per row, on average, for short rows to share a slab; twice as many for rows that already do.
SPREAD = 128
#: Columns of short rows' slabs are multiples of this.
SHORT_STEP = 32


class JointProof:
    """Proof that index and neighbours change no bit in a call of one shape; here that of shapes that share no call.

    Methods raise if memory is too small to measure it.
    """

    #: Whether calls are tried.
    tries = False
    #: Reasons against each shape so far; "" if it is proven.
    found: Mapping[str, str] = MappingProxyType({})

    def prompts(self, most: int, length: int) -> int:
        """Return ``most`` if so many whole prompts may share a call, else 1."""
        return 1

    def attends_apart(self, rows: int, length: int) -> bool:
        """Return whether such prompts attend in separate calls."""
        return False

    def pictures(self, most: int, call: Any) -> int:
        """Return ``most`` if so many pictures may share a tower's call, else 1."""
        return 1


NO_PROOF = JointProof()


@dataclass(frozen=True)
class FreeShapes:
    """The shapes that cost least."""

    layout: Placement = Placement.ROWS
    policy: Policy = field(default_factory=Policy)
    padding: int = 0  # chunks have multiples of so many positions; 0: any
    most_prompts: int = 1  # whole prompts that may share an array
    fill: int = 0  # padding positions that saving a forward is worth
    # tokens of rows that may share a slab in ``Placement.ROWS``, too
    short_rows: int = 0

    #: Whether a row may continue from any position, decoded ones included.
    goes_on_anywhere = True
    #: Settings that a saved row must share with the engine that continues it.
    settings: Mapping[str, str] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls, adapter: Adapter, kv: KVQuantisation | None, policy: Policy
    ) -> FreeShapes:
        fresh = adapter.make_cache(kv)
        padding = policy.pad_to if pads(adapter, fresh) else 0
        most_prompts = policy.prefill_together if shares(adapter, fresh) else 1
        short_rows = policy.short_rows if kv is None else 0
        return cls(
            Placement(policy.placement),
            policy,
            padding=padding,
            most_prompts=most_prompts,
            fill=_fill(adapter, fresh, policy, padding),
            short_rows=short_rows,
        )

    def adapter(self, adapter: Adapter) -> Adapter:
        return adapter

    def limited(self, policy: Policy) -> Policy:
        """Return the policy without settings that change rows' shapes."""
        return policy

    def key(self, key: PromptKey) -> PromptKey:
        """Return a prompt's key in which equal positions have equal states."""
        return key

    # Pictures

    def encode_call(self) -> Call:
        return Call(most_patches=self.policy.most_patches)

    # Prompts

    def ends(self, length: int, atomic: Spans = ()) -> tuple[int, ...]:
        """Return the ends of a prompt's chunks; () leaves them to the scheduler."""
        return ()

    def shares(self, prompt: Encoded) -> bool:
        """Return whether a whole prompt shares an array."""
        return self.most_prompts > 1 and prompt.can_share

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Group whole prompts that share an array, as indices of ``lengths``."""
        return together(
            lengths,
            self.most_prompts,
            self.policy.together_tokens,
            self.padding,
            self.fill,
        )

    def prefill_call(
        self,
        begin: int,
        ends: Sequence[int],
        *,
        is_whole: bool = False,
        is_scored: bool = False,
    ) -> tuple[int, int, Call]:
        """Return padded (rows, end, ``Call``) for each row's positions [begin, ends[i]). ``is_scored``: all get logits."""
        rows = padded_count(len(ends), self.padding)
        padding = 0 if is_scored else self.padding
        call = Call(is_scored=is_scored)
        return _prefill_call(begin, ends, rows, padding, call)

    def arrays(self, context: int | None) -> list[tuple[int, int]]:
        """Return (rows, positions) of one-chunk prompts' arrays, single rows first."""
        widths = widths_of(self.policy.max_chunk, context, self.padding)
        found = [(1, width) for width in widths]
        if not self.padding:
            return found
        counts = {
            padded_count(count, self.padding)
            for count in range(2, self.most_prompts + 1)
        }
        for count in sorted(counts):
            widest = self.policy.together_tokens // count
            found += [(count, width) for width in widths if width <= widest]
        return found

    # Decode steps

    def graphs(self, asked: bool | None) -> bool | None:
        """Return whether to compile steps; None: the adapter decides."""
        return asked

    def group_size(self, rows: int) -> int:
        """Return the most rows of a forward."""
        return rows

    def places(self, rows: int, most: int) -> int:
        if self.layout is Placement.ROWS or not rows:
            return rows
        return min(1 << (rows - 1).bit_length(), most)

    def least_columns(self, tokens: int) -> int:
        """Return the fewest columns of a row's slab. Different ones decode apart."""
        return 0

    def columns(self, tokens: int, least: int = 0) -> int:
        if self.layout is Placement.SLAB:
            return max(least, slab.capacity_for(tokens))
        return max(least, round_up(tokens, SHORT_STEP))

    def placement(
        self, lengths: Sequence[int], now: Placement | None = None
    ) -> Placement:
        """Return the layout of rows of these lengths; ``now``: the present one. On a CPU, short rows of similar lengths
        share a slab.
        """
        if self.layout is Placement.SLAB or not self.short_rows:
            return self.layout
        count = len(lengths)
        if count < 2:
            return Placement.ROWS
        most = self.short_rows - SPREAD
        spread = SPREAD
        if now is Placement.SLAB:
            most += SPREAD
            spread *= 2
        longest = max(lengths)
        if longest > most:
            return Placement.ROWS
        unused = longest * count - sum(lengths)
        return Placement.SLAB if unused <= spread * count else Placement.ROWS

    def layers(
        self,
        caches: Sequence[Any],
        places: int,
        least: int = 0,
        placement: Placement | None = None,
    ) -> list[LayerCache]:
        """Return an empty batch's layers for such caches."""
        columns = partial(self.columns, least=least)
        layout = placement or self.layout
        return _batched(caches, layout, places, columns, self.policy.few_bits)

    def decode_call(self) -> Call:
        return Call()

    def room(self, rows: int, places: int, placement: Placement, longest: int) -> int:
        """Return the most positions of each row in a forward of so many; ``longest``: tokens of the longest row."""
        return NO_LIMIT

    def counts_of(
        self, positions: Sequence[int], placement: Placement
    ) -> list[int] | None:
        """Return each place's positions for those that its row needs (0: no row); None if there is no such call."""
        return [max(1, count) for count in positions]

    def has_room(self, longest: int, count: int) -> bool:
        """Return whether ``count`` positions fit into the next token's columns."""
        return True

    def steps(self, rows: int, longest: int) -> list[tuple[int, int]]:
        """Return (rows, columns) of decode steps, fewest columns first."""
        counts = [1 << power for power in range(rows.bit_length())]
        step = slab.CAPACITY_STEP
        widths = range(step, max(longest, step) + 1, step)
        return [(count, columns) for columns, count in product(widths, counts)]


@dataclass(frozen=True)
class FixedShapes:
    """Shapes that make a row's numbers depend on its request alone."""

    #: Numbers of rows, ascending, in which decode steps give equal bits.
    counts: tuple[int, ...] = (1,)
    layout: Placement = Placement.ROWS
    #: Positions between two cuts of a prompt. Single-row caches grow by 256: a multiple of that gives a continued prompt the
    #: same capacity.
    grid: int = POLICIES[Device.CPU].grid
    #: Further cuts, such as the start of quantised keys.
    stops: tuple[int, ...] = ()
    #: Chunks have multiples of so many positions; 0: any.
    pad_to: int = 0
    #: Tokens up to which short prompts of one length share a call, and patches up to which small pictures of one shape do.
    call_tokens: int = 0
    call_patches: int = 0
    #: Proof of shared calls; without it each prompt and picture is alone.
    joint: JointProof = field(default=NO_PROOF, compare=False)
    #: Compiled steps were tested to give equal bits.
    can_graph: bool = field(default=False, compare=False)
    #: Kinds of products with numbers of rows of their own, and those.
    products: tuple[tuple[str, tuple[int, ...]], ...] = ()
    #: Numbers of columns, ascending, with equal bits; longer rows decode apart. () if each row has columns of its own.
    widths: tuple[int, ...] = ()
    few_bits: str = PACKED

    goes_on_anywhere = False

    @property
    def settings(self) -> Mapping[str, str]:
        # named by the smallest number: a larger engine proves larger ones with the same bits
        said = [f"as {self.counts[0]} rows"]
        said += [f"{name} as {counts[0]} rows" for name, counts in self.products]
        said += [self.layout.value, f"grid {self.grid}"]
        if self.pad_to:
            said.append(f"padded to {self.pad_to}")
        if self.joint.tries:
            tokens, patches = self.call_tokens, self.call_patches
            said.append(f"in calls of {tokens} tokens, {patches} patches")
        return {"reproducible": "; ".join(said)}

    def adapter(self, adapter: Adapter) -> Adapter:
        return adapter.with_products(dict(self.products)) if self.products else adapter

    def limited(self, policy: Policy) -> Policy:
        shares_calls = self.joint.tries and self.call_patches
        most = policy.encode_together if shares_calls else 1
        return replace(policy, slack=0, pad_to=self.pad_to, encode_together=most)

    def key(self, key: PromptKey) -> PromptKey:
        """Return a prompt's key in which equal positions have equal bits.

        A position's key includes its chunk. Rows continue only at ends of chunks, and not from decoded positions.
        """
        atomic = key.spans[len(key.pictures) :]
        chunks = tuple(pairwise((0, *self.ends(key.length, atomic))))
        rows = self.prompts(key.length, atomic)
        # a longer prompt's chunk of this length is alone
        beside = [rows] if rows > 1 else []
        positions = key.positions.copy()
        for start, end in chunks:
            name = as_words(digest(["chunk", start, end, *beside]))
            positions[start:end, 1:] ^= name
        decoded = list(map(int, key.answer))
        answer = as_words(digest(["decoded", decoded]))
        return replace(
            key, positions=positions, spans=(*key.spans, *chunks), answer=answer
        )

    # Pictures

    def encode_call(self) -> Call:
        return Call(is_fixed=True, pictures=self.pictures)

    def pictures(self, call: Any) -> int:
        """Return the pictures, idle ones included, of a tower's call."""
        most = filling(call.tower.count_patches(call, 0), self.call_patches)
        return self.joint.pictures(most, call) if most > 1 else 1

    # Prompts

    def ends(self, length: int, atomic: Spans = ()) -> tuple[int, ...]:
        """Return ends of chunks: on the grid, within ``stops`` and spans.

        A single last token joins the chunk before, unless a stop parts them: its kernels depend on more than its shape.
        """
        ends: list[int] = []
        done = 0
        while done < length:
            room = self.grid - done % self.grid
            done = chunk_end(done, length, room, atomic, self.stops)
            if length - done == 1 and done not in self.stops:
                done = length
            ends.append(done)
        return tuple(ends)

    def shares(self, prompt: Encoded) -> bool:
        if prompt.prefill or prompt.atomic:
            return False
        return self.prompts(prompt.length) > 1

    def prompts(self, length: int, atomic: Spans = ()) -> int:
        """Return the rows of a whole prompt's array; 1 with several chunks or no padding."""
        is_one_chunk = self.ends(length, atomic) == (length,)
        return self._prompts(length) if is_one_chunk else 1

    def _prompts(self, length: int) -> int:
        if not self.pad_to:
            return 1
        width = self.positions(length)
        most = filling(width, self.call_tokens)
        return self.joint.prompts(most, width) if most > 1 else 1

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        # by positions, and how many arrays of these are full
        found: dict[tuple[int, int], list[int]] = {}
        sizes: Counter[int] = Counter()
        for index, length in enumerate(lengths):
            width = self.positions(length)
            num_full = sizes[width] // self._prompts(length)
            sizes[width] += 1
            found.setdefault((width, num_full), []).append(index)
        return list(found.values())

    def positions(self, count: int) -> int:
        return padded_length(count, self.pad_to)

    def prefill_call(
        self,
        begin: int,
        ends: Sequence[int],
        *,
        is_whole: bool = False,
        is_scored: bool = False,
    ) -> tuple[int, int, Call]:
        call = Call(is_scored=is_scored, is_fixed=True)
        if is_scored:
            return _prefill_call(begin, ends, 1, 0, call)
        rows = self._prompts(ends[0]) if is_whole else 1
        if rows > 1:
            width = self.positions(ends[0] - begin)
            is_apart = self.joint.attends_apart(rows, width)
            call = replace(call, attends_apart=is_apart)
        return _prefill_call(begin, ends, rows, self.pad_to, call)

    def arrays(self, context: int | None) -> list[tuple[int, int]]:
        # idle rows fill them
        return [(1, width) for width in widths_of(self.grid, context, self.pad_to)]

    # Decode steps

    def graphs(self, asked: bool | None) -> bool | None:
        if asked:
            raise ValueError(
                "compile_decode: graphs are made of steps that come back, and may round otherwise; not exact"
            )
        return None if self.can_graph else False

    def group_size(self, rows: int) -> int:
        return self.places(min(rows, self.counts[-1]), rows)

    def places(self, rows: int, most: int) -> int:
        return first_enough(self.counts, rows) if rows else 0

    def least_columns(self, tokens: int) -> int:
        widest = max(self.widths, default=tokens)
        if self.layout is Placement.ROWS or tokens <= widest:
            return 0
        return self.columns(tokens)

    def columns(self, tokens: int, least: int = 0) -> int:
        """Return the least sufficient of ``widths``, or a power of two."""
        steps = (max(tokens, 1) - 1) // slab.CAPACITY_STEP
        power = slab.CAPACITY_STEP << steps.bit_length()
        return max(least, first_enough(self.widths, tokens, default=power))

    def placement(
        self, lengths: Sequence[int], now: Placement | None = None
    ) -> Placement:
        return self.layout

    def layers(
        self,
        caches: Sequence[Any],
        places: int,
        least: int = 0,
        placement: Placement | None = None,
    ) -> list[LayerCache]:
        columns = partial(self.columns, least=least)
        return _batched(
            caches, self.layout, places, columns, self.few_bits, always_masked=True
        )

    def decode_call(self) -> Call:
        return Call(is_fixed=True)

    def room(self, rows: int, places: int, placement: Placement, longest: int) -> int:
        """As ``FreeShapes``: what a proven number of positions leaves each row, in columns that the next token has.

        A full batch has that number already, and each of its rows takes one. More in a call may round otherwise; as a chunk
        of its prompt a path would be exact, but alone in its forward.
        """
        if placement is Placement.ROWS:
            return self.counts[-1] // rows
        for each in reversed(_equal_counts(self.counts, places)):
            if self.has_room(longest, each):
                return each
        return 1

    def counts_of(
        self, positions: Sequence[int], placement: Placement
    ) -> list[int] | None:
        """As ``FreeShapes``, but the positions add up to one of ``counts``, and in slabs all are equal."""
        if placement is Placement.SLAB:
            places = len(positions)
            each = first_enough(_equal_counts(self.counts, places), max(1, *positions))
            return [each] * places if each else None
        total = first_enough(self.counts, sum(positions))
        if not total:
            return None
        # an idle place takes what is left over
        filler = positions.index(0) if 0 in positions else -1
        counts = list(positions)
        counts[filler] += total - sum(positions)
        return counts

    def has_room(self, longest: int, count: int) -> bool:
        if self.layout is Placement.ROWS:
            return True
        return self.columns(longest) == self.columns(longest + count - 1)

    def steps(self, rows: int, longest: int) -> list[tuple[int, int]]:
        counts = self.counts[: bisect_right(self.counts, self.group_size(rows))]
        tokens = range(1, longest + 1, slab.CAPACITY_STEP)
        widths = sorted(set(map(self.columns, tokens)))
        return [(count, columns) for columns, count in product(widths, counts)]


def _equal_counts(counts: Sequence[int], places: int) -> list[int]:
    """Return the positions that each of so many places may have for one of ``counts`` in all, ascending."""
    return [count // places for count in counts if not count % places]


Shapes: TypeAlias = FreeShapes | FixedShapes


def _batched(
    caches: Sequence[Any],
    layout: Placement,
    places: int,
    columns: Callable[[int], int],
    few_bits: str,
    *,
    always_masked: bool = False,
) -> list[LayerCache]:
    """Return empty layers for rows with such caches."""
    layers = [kind_of(single).batched(layout, places) for single in caches]
    for layer in layers:
        layer.configure(columns, few_bits, always_masked=always_masked)
    return layers


def _fill(adapter: Adapter, fresh: Sequence[Any], policy: Policy, padding: int) -> int:
    """Return the padding positions that saving a forward is worth."""
    can_mask = _hides_what_follows(adapter) and can_fill(fresh)
    if can_mask and policy.placement == "rows":
        return FEW_POSITIONS if can_trim(fresh) else MORE_POSITIONS
    return policy.smallest_chunk // 2 if padding else 0


def shares(adapter: Adapter, fresh: Sequence[Any]) -> bool:
    """Return whether whole prompts may share an array."""
    return adapter.is_causal and can_share(fresh)


def pads(adapter: Adapter, fresh: Sequence[Any]) -> bool:
    """Return whether padding may follow a chunk."""
    return _hides_what_follows(adapter) and can_trim(fresh)


def _hides_what_follows(adapter: Adapter) -> bool:
    """Return whether no position sees later ones, and chunks tell the logits of all of theirs."""
    return adapter.is_causal and adapter.scores_chunks


def _prefill_call(
    begin: int, ends: Sequence[int], rows: int, pad_to: int, call: Call
) -> tuple[int, int, Call]:
    end = begin + padded_length(max(ends) - begin, pad_to)
    filled = (*ends, *[ends[-1]] * (rows - len(ends)))
    is_padded = min(filled) < end
    is_filled = call.is_fixed and rows > 1
    if is_padded or is_filled:
        call = replace(call, ends=filled)
    return rows, end, call
