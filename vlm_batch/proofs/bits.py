"""Runs a model's own decode steps, prefill and products, and compares their bits in several shapes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.products import Product
from vlm_batch.arrays import arrays_of
from vlm_batch.caches import Placement
from vlm_batch.caches.layers import row_bytes
from vlm_batch.caches.listed import parts_of
from vlm_batch.engine.compiled import Decode
from vlm_batch.engine.trial import Trial, TrialRow
from vlm_batch.proofs.classes import BitsByCount
from vlm_batch.records import Call
from vlm_batch.store.digest import array_bytes

#: Numbers of columns to test, of slabs.
WIDTHS = (256, 512, 1024, 2048)
#: Most bytes of slabs in a test; larger numbers of rows get the result of the largest that fits.
MOST_BYTES = 2**30
#: Tokens of the test prompts; for slabs, lengths that reach into each width.
LENGTHS = {Placement.ROWS: (5, 9, 14), Placement.SLAB: (5, 250, 500, 1000)}
STEPS = 2
#: Distinct tokens of a made-up prompt; a longer one repeats them.
TOKENS = 64


class Bits(NamedTuple):
    """A row's bits over some decode steps."""

    logits: bytes
    #: Of what the layers' products got; empty if nobody watched.
    between: bytes


# Decode steps


def step_bits(
    trial: Trial, counts: Sequence[int], decode: Decode | None = None
) -> dict[int, BitsByCount]:
    """Return ``Bits`` of decode steps, by columns (0: none) and rows. With ``decode``, of their logits alone."""
    context = trial.adapter.max_context or sys.maxsize
    rows: list[TrialRow] = []
    for seed, length in enumerate(LENGTHS[trial.shapes.layout]):
        if length + STEPS < context:
            rows.append(trial.row(length, seed))
    if not _has_columns(trial, rows[0]):
        return {0: decode_bits(trial, rows, counts, decode=decode)}
    found: dict[int, BitsByCount] = {}
    for width in WIDTHS:
        if width >= 2 * context:
            break
        fitting = [row for row in rows if row.encoded.length + STEPS <= width]
        tried = _within_bytes(rows[0], width, counts)
        bits = dict(decode_bits(trial, fitting, tried, columns=width, decode=decode))
        largest = bits.get(tried[-1])
        if largest is not None:
            for count in counts:
                if count > tried[-1]:
                    bits[count] = largest
        found[width] = bits
    return found


def _has_columns(trial: Trial, row: TrialRow) -> bool:
    layers = trial.shapes.layers(row.restored(), 1)
    return any(part.has_columns for layer in layers for part in parts_of(layer))


def _within_bytes(row: TrialRow, width: int, counts: Sequence[int]) -> list[int]:
    """Return the numbers of rows whose slabs may be made, at least the first."""
    nbytes = row_bytes(row.restored(), width, row.encoded.length)
    fitting = [count for count in counts[1:] if count * nbytes <= MOST_BYTES]
    return [counts[0], *fitting]


def decode_bits(
    trial: Trial,
    rows: Sequence[TrialRow],
    counts: Sequence[int],
    *,
    columns: int = 0,
    decode: Decode | None = None,
) -> BitsByCount:
    """Return ``Bits`` of decode steps of ``rows``, by number of rows.

    Rows run at several places, beside others. Numbers that change bits are omitted.
    """
    found: dict[int, tuple[Bits, ...]] = {}
    for count in counts:
        seen: list[set[Bits]] = [set() for _ in rows]
        for numbers in _turns(len(rows), count):
            live = [rows[number] for number in numbers]
            bits = _place_bits(trial, live, count, columns, decode)
            for number, own in zip(numbers, bits, strict=True):
                seen[number].add(own)
        if max(map(len, seen)) == 1:
            found[count] = tuple(bits.pop() for bits in seen)
    return found


def _turns(num_rows: int, count: int) -> list[list[int]]:
    """Return which rows stand at ``count`` places, several times: each row at several places."""
    turns: list[list[int]] = []
    for shift in range(num_rows if count < num_rows else 2):
        turns.append([(place + shift) % num_rows for place in range(count)])
    if count > num_rows:
        turns[1].pop()  # the last place is idle
    return turns


def _place_bits(
    trial: Trial,
    rows: Sequence[TrialRow],
    count: int,
    columns: int,
    decode: Decode | None,
) -> list[Bits]:
    """Return the bits of each row in its place."""
    steps = trial.steps(rows, count, columns=columns, decode=decode)
    logits: list[mx.array] = []
    between: list[mx.array] = []
    for _ in range(STEPS):
        if decode is not None:  # a graph's arrays have no numbers
            logits.append(next(steps))
        else:
            with trial.adapter.watched() as given:
                logits.append(next(steps))
            of_rows = [one for one in given if one.size == count * one.shape[-1]]
            between += [_marks(one, count) for one in of_rows]
            given.clear()  # a layer's rows are freed once they are marked
            of_rows.clear()
        mx.eval(logits, between)
    marks = [np.array(one) for one in between]
    found: list[Bits] = []
    for place in range(len(rows)):
        said = b"".join(array_bytes(step[place]).tobytes() for step in logits)
        marked = b"".join(one[place].tobytes() for one in marks)
        found.append(Bits(said, marked))
    return found


def _marks(rows: mx.array, count: int) -> mx.array:
    """Return a number (count,) for each row's bits; other bits in one of its columns make another number."""
    bits = _bits(rows.reshape(count, -1)).astype(mx.uint32)
    odd = 2 * mx.arange(bits.shape[1], dtype=mx.uint32) + 1
    return (bits * odd).sum(axis=1)


def agreeing_widths(found: Mapping[int, BitsByCount], count: int) -> tuple[int, ...]:
    """Return the largest set of columns with equal bits, preferring wide ones; empty without columns."""
    bits = {width: found[width][count] for width in sorted(found, reverse=True)}
    sets: list[list[int]] = []
    for width, own in bits.items():
        for widths in sets:
            if all(_agree(own, bits[other]) for other in widths):
                widths.append(width)
                break
        else:
            sets.append([width])
    largest = max(sets, key=len)
    return tuple(sorted(width for width in largest if width))


def _agree(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether rows have the same bits, as far as both were run."""
    both = min(len(some), len(others))
    return some[:both] == others[:both]


# Products


def product_bits(products: Sequence[Product], counts: Sequence[int]) -> BitsByCount:
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
    products: Sequence[Product], places: int, length: int, *, is_packed: bool = False
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
        times = -(-height // TOKENS)
        two = [mx.tile(part, (times, 1))[:height] for part in (rows, rows[::-1])]
        found = []
        for turn in (0, 1):
            all_rows = mx.stack(by_turns(two, places, turn))
            out = call(all_rows.flatten(0, 1) if is_packed else all_rows)
            found.append([out.reshape(places, height, -1)])
        if not is_still(*found):
            return f"{product} of {places * height} rows go by the place"
    return ""


# Joint prefill


def prefill_is_still(
    trial: Trial, places: int, length: int, *, attends_apart: bool = False
) -> bool:
    """Return whether a joint prefill gives a prompt the same bits at every place: logits, caches, products' rows."""
    two = [trial.prompt(length, seed) for seed in (0, 1)]
    ends = (two[0].length,) * places
    call = Call(ends=ends, is_fixed=True, attends_apart=attends_apart)
    found = []
    for turn in (0, 1):
        caches = trial.adapter.make_cache(trial.kv)
        prompts = by_turns(two, places, turn)
        with trial.adapter.watched() as given:
            logits = trial.adapter.prefill(prompts, caches, 0, length, call)
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
    same: list[mx.array] = []
    for array, other in zip(some, others, strict=True):
        if array.shape != other.shape:
            return False
        array, other = _bits(array), _bits(other)
        one, two = array[:1], other[:1]
        same += [
            mx.all(array[::2] == one),
            mx.all(other[1::2] == one),
            mx.all(array[1::2] == two),
            mx.all(other[::2] == two),
        ]
    return bool(mx.all(mx.stack(same)).item())


def _bits(array: mx.array) -> mx.array:
    kinds: Any = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
    return array.view(kinds[array.dtype.size])
