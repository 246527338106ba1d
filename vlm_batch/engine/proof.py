"""Tests with a model's own decode steps which shapes give the same bits.

Numbers of rows or columns with the same bits for every row at any place form a class. A batch may change within it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from vlm_batch.arrays import arrays_of
from vlm_batch.caches import Placement
from vlm_batch.caches.layers import row_bytes
from vlm_batch.caches.listed import parts_of
from vlm_batch.engine.compiled import Decode
from vlm_batch.engine.trial import Trial, TrialRow
from vlm_batch.records import Call
from vlm_batch.store.digest import array_bytes

#: Numbers of rows to test. CPUs pay for each idle row, so they have more of them.
COUNTS = {
    Placement.ROWS: (1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
    Placement.SLAB: (2, 4, 8, 16, 32),
}
#: Further numbers for larger batches: on a GPU two forwards of 32 rows cost twice as much as one of 64.
LARGER = {Placement.ROWS: (), Placement.SLAB: (64,)}
#: Numbers of columns to test, of slabs.
WIDTHS = (256, 512, 1024, 2048)
#: Most bytes of slabs in a test; larger numbers of rows get the result of the largest that fits.
MOST_BYTES = 2**30
#: Tokens of the test prompts; for slabs, lengths that reach into each width.
LENGTHS = {Placement.ROWS: (5, 9, 14), Placement.SLAB: (5, 250, 500, 1000)}
STEPS = 2
#: Distinct tokens of a made-up prompt; a longer one repeats them.
TOKENS = 64
#: Fixed cost of a forward, in rows, and the numbers of live rows at which the cost of a class is computed.
FORWARD = {Placement.ROWS: 4, Placement.SLAB: 1000}
JUDGED_BY = (1, 8, 32)
#: Most kinds of products that may have classes of their own.
MOST_APART = 2

#: Classes of numbers of rows, each ascending.
Classes = tuple[tuple[int, ...], ...]


class Bits(NamedTuple):
    """A row's bits over some decode steps."""

    logits: bytes
    #: Of what the layers' products got; empty if nobody watched.
    between: bytes


#: Each row's bits, by number of rows.
Found = Mapping[int, tuple[Any, ...]]


class Rows(Protocol):
    """A product and test rows for it (``vlm_batch.adapters.products.Product``)."""

    @property
    def call(self) -> Callable[[mx.array], mx.array]: ...
    @property
    def is_head(self) -> bool: ...
    def rows(self, count: int) -> mx.array: ...


def counts_for(layout: Placement, max_rows: int = 1) -> tuple[int, ...]:
    """Return the numbers of rows to test for ``max_rows``."""
    return (*COUNTS[layout], *(LARGER[layout] if max_rows > COUNTS[layout][-1] else ()))


def step_bits(
    trial: Trial, counts: Sequence[int], decode: Decode | None = None
) -> dict[int, Found]:
    """Return ``Bits`` of decode steps, by columns (0: none) and rows. With ``decode``, of their logits alone."""
    context, layout = trial.adapter.max_context, trial.shapes.layout
    rows = [
        trial.row(length, seed)
        for seed, length in enumerate(LENGTHS[layout])
        if context is None or length + STEPS < context
    ]
    layers = trial.shapes.layers(rows[0].restored(), 1)
    if not any(part.has_columns for layer in layers for part in parts_of(layer)):
        return {0: decode_bits(trial, rows, counts, decode=decode)}
    found: dict[int, Found] = {}
    for width in WIDTHS:
        if context is not None and width >= 2 * context:
            break
        nbytes = row_bytes(rows[0].restored(), width, rows[0].encoded.length)
        some = [
            count
            for count in counts
            if count == counts[0] or count * nbytes <= MOST_BYTES
        ]
        fitting = [row for row in rows if row.encoded.length + STEPS <= width]
        bits = decode_bits(trial, fitting, some, columns=width, decode=decode)
        found[width] = {
            count: bits[n] for count in counts if (n := min(count, some[-1])) in bits
        }
    return found


def decode_bits(
    trial: Trial,
    rows: Sequence[TrialRow],
    counts: Sequence[int],
    *,
    columns: int = 0,
    decode: Decode | None = None,
) -> Found:
    """Return ``Bits`` of decode steps of ``rows``, by number of rows.

    Rows run at several places, beside others. Numbers that change bits are omitted.
    """
    found: dict[int, tuple[Bits, ...]] = {}
    for count in counts:
        seen: list[set[Bits]] = [set() for _ in rows]
        for shift in range(len(rows) if count < len(rows) else 2):
            places = [(place + shift) % len(rows) for place in range(count)]
            # the last place is idle
            live = places[: count - (shift > 0 and count > len(rows))]
            bits = _place_bits(trial, [rows[n] for n in live], count, columns, decode)
            for place, number in enumerate(live):
                seen[number].add(bits[place])
        if all(len(bits) == 1 for bits in seen):
            found[count] = tuple(next(iter(bits)) for bits in seen)
    return found


def _place_bits(
    trial: Trial,
    rows: Sequence[TrialRow],
    count: int,
    columns: int,
    decode: Decode | None,
) -> list[Bits]:
    """Return the bits of each row in its place."""
    steps = trial.steps(rows, count, columns=columns, decode=decode)
    logits, between = [], []
    for _ in range(STEPS):
        if decode is None:
            with trial.adapter.watched() as given:
                logits.append(next(steps))
            between += [
                _marks(one, count) for one in given if one.size == count * one.shape[-1]
            ]
            given.clear()  # a layer's rows are freed once they are marked
        else:  # a graph's arrays have no numbers
            logits.append(next(steps))
        mx.eval(logits, between)
    marks = [np.array(one) for one in between]
    return [
        Bits(
            b"".join(array_bytes(step[place]).tobytes() for step in logits),
            b"".join(one[place].tobytes() for one in marks),
        )
        for place in range(len(rows))
    ]


def _marks(rows: mx.array, count: int) -> mx.array:
    """Return a number (count,) for each row's bits; other bits in one of its columns make another number."""
    bits = _bits(rows.reshape(count, -1)).astype(mx.uint32)
    odd = 2 * mx.arange(bits.shape[1], dtype=mx.uint32) + 1
    return (bits * odd).sum(axis=1)


def agreeing_widths(found: Mapping[int, Found], count: int) -> tuple[int, ...]:
    """Return the largest set of columns with equal bits, preferring wide ones; empty without columns."""
    classes: list[list[int]] = []
    for width in sorted(found, reverse=True):
        for known in classes:
            pairs = [
                zip(found[width][count], found[other][count], strict=False)
                for other in known
            ]
            if all(bits == others for pair in pairs for bits, others in pair):
                known.append(width)
                break
        else:
            classes.append([width])
    return tuple(sorted(width for width in max(classes, key=len) if width))


def classes_of(*found: Mapping[int, Any]) -> Classes:
    """Group numbers of rows by equal bits."""
    grouped: dict[Any, list[int]] = {}
    for count in sorted(set.intersection(*(set(one) for one in found))):
        grouped.setdefault(tuple(one[count] for one in found), []).append(count)
    return tuple(tuple(counts) for counts in grouped.values())


def product_bits(products: Sequence[Rows], counts: Sequence[int]) -> Found:
    """Return bits of products whose place does not matter, by number of rows.

    They show what half precision hides in a step.
    """
    found: dict[int, list[bytes]] = {count: [] for count in counts}
    for product in products:
        # at least TOKENS rows, so that a number's bits do not depend on the other numbers tested
        call, rows = product.call, product.rows(max(TOKENS, *counts))
        for count in list(found):
            others = max(1, count - 1)
            # the first row stands last, too
            out = call(mx.concatenate([rows[:others], rows[: count - others]]))
            bits = array_bytes(out[0]).tobytes()
            if array_bytes(out[count - 1]).tobytes() == bits:
                found[count].append(bits)
            else:
                del found[count]
    return {count: tuple(bits) for count, bits in found.items()}


def moving_product(
    products: Sequence[Rows], places: int, length: int, *, is_packed: bool = False
) -> str:
    """Describe the first product whose bits depend on place or neighbours; "" if none does.

    Args:
        places: prompts or pictures of ``length`` rows each.
        is_packed: rows follow each other without a prompt axis.
    """
    for product in products:
        call, rows = product.call, product.rows(TOKENS)[:, 0]
        # a head answers for a prompt's last position alone
        height = 1 if product.is_head else length
        two = [
            mx.tile(part, (-(-height // TOKENS), 1))[:height]
            for part in (rows, rows[::-1])
        ]
        found = []
        for turn in (0, 1):
            all_rows = mx.stack(by_turns(two, places, turn))
            out = call(all_rows.flatten(0, 1) if is_packed else all_rows)
            found.append([out.reshape(places, height, -1)])
        if not is_still(*found):
            return f"{product} of {places * height} rows go by the place"
    return ""


def prefill_is_still(
    trial: Trial, places: int, length: int, *, attends_apart: bool = False
) -> bool:
    """Return whether a joint prefill gives a prompt the same bits at every place: logits, caches, products' rows."""
    two = [trial.prompt(length, seed) for seed in (0, 1)]
    call = Call(ends=(length,) * places, is_fixed=True, attends_apart=attends_apart)
    found = []
    for turn in (0, 1):
        caches = trial.adapter.make_cache(trial.kv)
        with trial.adapter.watched() as given:
            logits = trial.adapter.prefill(
                by_turns(two, places, turn), caches, 0, length, call
            )
        between = [_marks(rows, places) for rows in given if rows.shape[0] == places]
        given.clear()
        found.append([logits, *arrays_of([cache.state for cache in caches]), *between])
    return is_still(*found)


def by_turns(two: Sequence[Any], places: int, turn: int) -> list[Any]:
    # a, b, a, ... or b, a, b, ...
    return [two[(place + turn) % 2] for place in range(places)]


def is_still(some: Sequence[mx.array], others: Sequence[mx.array]) -> bool:
    """Return whether arrays (places, ...) of two alternating things depend on each alone.

    ``others``: the arrays with the two exchanged.
    """
    agree = [
        array.shape == other.shape for array, other in zip(some, others, strict=True)
    ]
    same = []
    for array, other in zip(map(_bits, some), map(_bits, others), strict=True):
        one, two = array[:1], other[:1]
        for found, right in (
            (array[::2], one),
            (other[1::2], one),
            (array[1::2], two),
            (other[::2], two),
        ):
            same.append(mx.all(found == right))
    return all(agree) and bool(mx.all(mx.stack(same)).item())


def _bits(array: mx.array) -> mx.array:
    kinds: Any = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
    return array.view(kinds[array.dtype.size])


def best_class(classes: Classes, layout: Placement) -> tuple[int, ...]:
    """Return the cheapest class for few and many rows, or (1,); the same in every process."""
    last = COUNTS[layout][-1]
    whole = {
        known: counts
        for counts in classes
        if (known := tuple(n for n in counts if n <= last))
    }
    best = min([*whole, (1,)], key=lambda counts: _cost(counts, FORWARD[layout]))
    return whole.get(best, best)


def numbers_apart(
    found: Mapping[str, Found], layout: Placement
) -> dict[str, tuple[int, ...]]:
    """Return numbers of rows, by product, for the products that alone keep all ``COUNTS`` from agreeing.

    Padding or splitting them costs launches, so it is for few products over slabs.
    """
    wanted = COUNTS[layout]
    apart = {}
    for name, one in found.items():
        classes = {
            tuple(n for n in counts if n in wanted): counts
            for counts in classes_of(one)
        }
        known = [counts for counts in classes if counts]
        if wanted not in known:
            best = min(
                known,
                key=lambda counts: (_launches(counts, layout), -counts[-1]),
                default=(),
            )
            apart[name] = classes[best] if best else ()
    return (
        apart
        if layout is Placement.SLAB and len(apart) <= MOST_APART and all(apart.values())
        else {}
    )


def _launches(counts: Sequence[int], layout: Placement) -> int:
    """Return a product's additional operations."""
    total = 0
    for rows in JUDGED_BY:
        places = next(count for count in COUNTS[layout] if count >= rows)
        full, rest = divmod(places, counts[-1])
        parts = full + (rest > 0)
        total += (rest > 0 and rest not in counts) + (2 * parts - 1 if parts > 1 else 0)
    return total


def forwards(counts: Sequence[int], layout: Placement) -> int:
    """Return the forwards of a step, summed over ``JUDGED_BY``."""
    most = max(count for count in counts if count <= COUNTS[layout][-1])
    return sum(-(-rows // most) for rows in JUDGED_BY)


def _cost(counts: Sequence[int], forward: int) -> float:
    total = 0.0
    for rows in JUDGED_BY:
        full, rest = divmod(rows, counts[-1])
        groups = [counts[-1]] * full + [
            next(count for count in counts if count >= rest)
        ] * (rest > 0)
        total += sum(forward + places for places in groups) / rows
    return total
