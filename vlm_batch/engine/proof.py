"""The proof of shapes that agree: a model's own decode step, at several numbers of rows and columns, compared bit for bit.

A library chooses kernels by shapes, so a row's last bits depend on the number of rows in a step, and on how many columns a
slab has. Two numbers of rows are of one class if they give every row the same bits, whatever its neighbours and its place. A
batch may then change from one to the other, and no row's numbers change. So may a slab from one number of columns to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import mlx.core as mx

from vlm_batch.arrays import arrays_of
from vlm_batch.caches import Placement, SlabCache
from vlm_batch.caches.layers import row_bytes
from vlm_batch.caches.listed import parts_of
from vlm_batch.engine.compiled import Decode
from vlm_batch.engine.trial import Trial, TrialRow
from vlm_batch.records import Call
from vlm_batch.store.digest import array_bytes

#: Numbers of rows that are tried. Where each row costs (CPUs) more of them, so that few idle places run.
COUNTS = {Placement.ROWS: (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), Placement.SLAB: (2, 4, 8, 16, 32)}
#: And those that are tried where a batch may have more rows, since a forward for each 32 of them costs as much as one for all.
LARGER = {Placement.ROWS: (), Placement.SLAB: (64,)}
#: Numbers of columns that are tried, where rows lie in slabs.
WIDTHS = (256, 512, 1024, 2048)
#: Bytes of the slabs in which a number of rows is tried: beyond them the smaller numbers speak for the larger ones.
MOST_BYTES = 2**30
#: Tokens of the prompts; in slabs such that all columns of each width have been read.
LENGTHS = {Placement.ROWS: (5, 9, 14), Placement.SLAB: (5, 250, 500, 1000)}
STEPS = 2
#: Tokens of a made-up prompt that differ; a longer one repeats them.
TOKENS = 64
#: The cost of a forward beside its rows, counted in rows, and the numbers of live rows by which a class is judged.
FORWARD = {Placement.ROWS: 4, Placement.SLAB: 1000}
JUDGED_BY = (1, 8, 32)
#: The kinds of products that may have numbers of rows of their own; where more of them disagree, whole steps are kept apart.
MOST_APART = 2

#: Numbers of rows that agree, each class ascending.
Classes = tuple[tuple[int, ...], ...]
#: The bits by the number of rows: numbers with equal bits are of one class.
Found = Mapping[int, tuple[bytes, ...]]


class Rows(Protocol):
    """A product of rows, and rows by which to try it (``vlm_batch.adapters.products.Product``)."""

    @property
    def call(self) -> Callable[[mx.array], mx.array]: ...
    @property
    def is_head(self) -> bool: ...
    def rows(self, count: int) -> mx.array: ...


def counts_for(layout: Placement, max_rows: int = 1) -> tuple[int, ...]:
    """The numbers of rows that are tried for batches of at most ``max_rows``."""
    return (*COUNTS[layout], *(LARGER[layout] if max_rows > COUNTS[layout][-1] else ()))


def step_bits(trial: Trial, counts: Sequence[int], decode: Decode | None = None) -> dict[int, Found]:
    """The bits that decode steps of a model give, by the number of columns, 0 where nothing has columns, and that of rows.
    ``decode`` runs a step, by default the adapter. Raises what the model raises."""
    context, layout = trial.adapter.max_context, trial.shapes.layout
    rows = [
        trial.row(length, seed)
        for seed, length in enumerate(LENGTHS[layout])
        if context is None or length + STEPS < context
    ]
    layers = trial.shapes.layers(rows[0].restored(), 1)
    if not any(isinstance(part, SlabCache) for layer in layers for part in parts_of(layer)):
        return {0: decode_bits(trial, rows, counts, decode=decode)}
    found: dict[int, Found] = {}
    for width in WIDTHS:
        if context is not None and width >= 2 * context:
            break
        nbytes = row_bytes(rows[0].restored(), width, rows[0].encoded.length)
        some = [count for count in counts if count == counts[0] or count * nbytes <= MOST_BYTES]
        fitting = [row for row in rows if row.encoded.length + STEPS <= width]
        bits = decode_bits(trial, fitting, some, columns=width, decode=decode)
        found[width] = {count: bits[n] for count in counts if (n := min(count, some[-1])) in bits}
    return found


def decode_bits(
    trial: Trial, rows: Sequence[TrialRow], counts: Sequence[int], *, columns: int = 0, decode: Decode | None = None
) -> Found:
    """The bits that decode steps give to some rows, by the number of rows.

    Every row stands at several places, beside others and beside idle places; a number of rows at which that changes anything
    is left out. Raises what the model raises.
    """
    found: dict[int, tuple[bytes, ...]] = {}
    for count in counts:
        seen: list[set[bytes]] = [set() for _ in rows]
        for shift in range(len(rows) if count < len(rows) else 2):
            places = [(place + shift) % len(rows) for place in range(count)]
            live = places[: count - (shift > 0 and count > len(rows))]  # the last place is idle
            steps = []
            for logits in islice(trial.steps([rows[n] for n in live], count, columns=columns, decode=decode), STEPS):
                mx.eval(logits)
                steps.append(logits)
            for place, number in enumerate(live):
                seen[number].add(b"".join(array_bytes(logits[place]).tobytes() for logits in steps))
        if all(len(bits) == 1 for bits in seen):
            found[count] = tuple(next(iter(bits)) for bits in seen)
    return found


def agreeing_widths(found: Mapping[int, Found], count: int) -> tuple[int, ...]:
    """The numbers of columns in which steps of so many rows give every row that fits the same bits: the most that agree, and of
    as many the widest. None where nothing has columns."""
    classes: list[list[int]] = []
    for width in sorted(found, reverse=True):
        for known in classes:
            pairs = [zip(found[width][count], found[other][count], strict=False) for other in known]
            if all(bits == others for pair in pairs for bits, others in pair):
                known.append(width)
                break
        else:
            classes.append([width])
    return tuple(sorted(width for width in max(classes, key=len) if width))


def classes_of(*found: Mapping[int, Any]) -> Classes:
    """Numbers of rows by what they gave: those that gave the same, in everything that was tried, are of one class."""
    grouped: dict[Any, list[int]] = {}
    for count in sorted(set.intersection(*(set(one) for one in found))):
        grouped.setdefault(tuple(one[count] for one in found), []).append(count)
    return tuple(tuple(counts) for counts in grouped.values())


def product_bits(products: Sequence[Rows], counts: Sequence[int]) -> Found:
    """The bits that products give to their first row, by the number of rows; a number at which its place matters is left out.

    Half precision rounds most differences away, so that a decode step of a narrow model shows few of them; these show each.
    """
    found: dict[int, list[bytes]] = {count: [] for count in counts}
    for product in products:
        # as many whatever the counts are: a number's bits are found to be the same whoever tries larger ones, too
        call, rows = product.call, product.rows(max(TOKENS, *counts))
        for count in list(found):
            others = max(1, count - 1)
            out = call(mx.concatenate([rows[:others], rows[: count - others]]))  # the first row stands last, too
            bits = array_bytes(out[0]).tobytes()
            if array_bytes(out[count - 1]).tobytes() == bits:
                found[count].append(bits)
            else:
                del found[count]
    return {count: tuple(bits) for count, bits in found.items()}


def moving_product(products: Sequence[Rows], places: int, length: int, *, is_packed: bool = False) -> str:
    """The first product that, in a call of several prompts or pictures of ``length`` rows, gives one of them other bits at
    another place or beside another, in words; an empty text if there is none. ``is_packed``: rows lie one after another, as
    those of pictures do, and not as those of an array of prompts."""
    for product in products:
        call, rows = product.call, product.rows(TOKENS)[:, 0]
        height = 1 if product.is_head else length  # a head answers for a prompt's last position alone
        two = [mx.tile(part, (-(-height // TOKENS), 1))[:height] for part in (rows, rows[::-1])]
        found = []
        for turn in (0, 1):
            all_rows = mx.stack(by_turns(two, places, turn))
            out = call(all_rows.flatten(0, 1) if is_packed else all_rows)
            found.append([out.reshape(places, height, -1)])
        if not is_still(*found):
            return f"{product} of {places * height} rows go by the place"
    return ""


def prefill_is_still(trial: Trial, places: int, length: int, *, attends_apart: bool = False) -> bool:
    """Whether a model's own prefill of so many prompts of one length leaves the same of a prompt at every place, whoever is
    beside it: logits, and what is in its caches."""
    two = [trial.prompt(length, seed) for seed in (0, 1)]
    call = Call(ends=(length,) * places, is_fixed=True, attends_apart=attends_apart)
    found = []
    for turn in (0, 1):
        caches = trial.adapter.make_cache(trial.kv)
        logits = trial.adapter.prefill(by_turns(two, places, turn), caches, 0, length, call)
        found.append([logits, *arrays_of([cache.state for cache in caches])])
    return is_still(*found)


def by_turns(two: Sequence[Any], places: int, turn: int) -> list[Any]:
    """Two things by turns at so many places, the one at ``turn`` first."""
    return [two[(place + turn) % 2] for place in range(places)]


def is_still(some: Sequence[mx.array], others: Sequence[mx.array]) -> bool:
    """Whether arrays (places, ...) that were made of two things by turns, and others with the turns exchanged, have the same
    bits for the same thing, at every place."""
    agree = [array.shape == other.shape for array, other in zip(some, others, strict=True)]
    same = []
    for array, other in zip(map(_bits, some), map(_bits, others), strict=True):
        one, two = array[:1], other[:1]
        for found, right in ((array[::2], one), (other[1::2], one), (array[1::2], two), (other[::2], two)):
            same.append(mx.all(found == right))
    return all(agree) and bool(mx.all(mx.stack(same)).item())


def _bits(array: mx.array) -> mx.array:
    kinds: Any = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
    return array.view(kinds[array.dtype.size])


def best_class(classes: Classes, layout: Placement) -> tuple[int, ...]:
    """The class that costs least where few and many rows decode; a row at a time if there is none.

    By a rule and not by a clock: the same proof gives the same class in every process. And by ``COUNTS`` alone, so that
    whoever has more rows, and tries larger numbers, is given the same class and what belongs to it.
    """
    last = COUNTS[layout][-1]
    whole = {known: counts for counts in classes if (known := tuple(n for n in counts if n <= last))}
    best = min([*whole, (1,)], key=lambda counts: _cost(counts, FORWARD[layout]))
    return whole.get(best, best)


def numbers_apart(found: Mapping[str, Found], layout: Placement) -> dict[str, tuple[int, ...]]:
    """Numbers of rows of their own for the few kinds of products without which all numbers of rows would agree, by their names.

    Repeats fill up their rows to such a number, or they are computed in several parts: one launch more each, where another
    class would be another step. So only where launches decide (slabs), for ``MOST_APART`` kinds at most, and the class with
    the fewest further launches is taken, judged as ``best_class`` is.
    """
    wanted = COUNTS[layout]
    apart = {}
    for name, one in found.items():
        classes = {tuple(n for n in counts if n in wanted): counts for counts in classes_of(one)}
        known = [counts for counts in classes if counts]
        if wanted not in known:
            best = min(known, key=lambda counts: (_launches(counts, layout), -counts[-1]), default=())
            apart[name] = classes[best] if best else ()
    return apart if layout is Placement.SLAB and len(apart) <= MOST_APART and all(apart.values()) else {}


def _launches(counts: Sequence[int], layout: Placement) -> int:
    """Operations beyond one of a product that is computed in these numbers of rows alone, at all numbers that judge it."""
    total = 0
    for rows in JUDGED_BY:
        places = next(count for count in COUNTS[layout] if count >= rows)
        full, rest = divmod(places, counts[-1])
        parts = full + (rest > 0)
        total += (rest > 0 and rest not in counts) + (2 * parts - 1 if parts > 1 else 0)
    return total


def forwards(counts: Sequence[int], layout: Placement) -> int:
    """The forwards of a step of each number of live rows by which a class is judged, together."""
    most = max(count for count in counts if count <= COUNTS[layout][-1])
    return sum(-(-rows // most) for rows in JUDGED_BY)


def _cost(counts: Sequence[int], forward: int) -> float:
    total = 0.0
    for rows in JUDGED_BY:
        full, rest = divmod(rows, counts[-1])
        groups = [counts[-1]] * full + [next(count for count in counts if count >= rest)] * (rest > 0)
        total += sum(forward + places for places in groups) / rows
    return total
