"""Chooses numbers of rows among those that agree in every bit. Integers only.

Numbers of rows with the same bits for every row at any place form a class. A batch may change within it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from vlm_batch.caches import Placement

#: Numbers of rows to test. CPUs pay for each idle row, so they have more of them.
COUNTS = {
    Placement.ROWS: (1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
    Placement.SLAB: (2, 4, 8, 16, 32),
}
#: Further numbers for larger batches: on a GPU two forwards of 32 rows cost twice as much as one of 64.
LARGER = {Placement.ROWS: (), Placement.SLAB: (64,)}
#: Fixed cost of a forward, in rows, and the numbers of live rows at which the cost of a class is computed.
FORWARD = {Placement.ROWS: 4, Placement.SLAB: 1000}
JUDGED_BY = (1, 8, 32)
#: Most kinds of products that may have classes of their own.
MOST_APART = 2

#: Classes of numbers of rows, each ascending.
Classes: TypeAlias = tuple[tuple[int, ...], ...]
#: Each row's bits, by number of rows.
BitsByCount: TypeAlias = Mapping[int, tuple[Any, ...]]


def counts_for(layout: Placement, max_rows: int = 1) -> tuple[int, ...]:
    """Return the numbers of rows to test for ``max_rows``."""
    usual = COUNTS[layout]
    return (*usual, *LARGER[layout]) if max_rows > usual[-1] else usual


def classes_of(*found: Mapping[int, Any]) -> Classes:
    """Group numbers of rows by equal bits."""
    grouped: dict[Any, list[int]] = {}
    everywhere = set.intersection(*(set(one) for one in found))
    for count in sorted(everywhere):
        bits = tuple(one[count] for one in found)
        grouped.setdefault(bits, []).append(count)
    return tuple(tuple(counts) for counts in grouped.values())


def best_class(classes: Classes, layout: Placement) -> tuple[int, ...]:
    """Return the cheapest class for few and many rows, or (1,); the same in every process."""
    whole = _by_usual(classes, layout)
    best = min([*whole, (1,)], key=lambda counts: _cost(counts, FORWARD[layout]))
    return whole.get(best, best)


def numbers_apart(
    found: Mapping[str, BitsByCount], layout: Placement
) -> dict[str, tuple[int, ...]]:
    """Return numbers of rows, by product, for the products that alone keep all ``COUNTS`` from agreeing.

    Padding or splitting them costs launches, so it is for few products over slabs.
    """
    if layout is not Placement.SLAB:
        return {}
    apart: dict[str, tuple[int, ...]] = {}
    for name, bits in found.items():
        whole = _by_usual(classes_of(bits), layout)
        if COUNTS[layout] in whole:
            continue
        if not whole:
            return {}
        best = min(whole, key=lambda one: (_launches(one, layout), -one[-1]))
        apart[name] = whole[best]
    return apart if len(apart) <= MOST_APART else {}


def forwards(counts: Sequence[int], layout: Placement) -> int:
    """Return the forwards of a step, summed over ``JUDGED_BY``."""
    most = max(_usual(counts, layout))
    return sum(-(-rows // most) for rows in JUDGED_BY)


def _by_usual(
    classes: Classes, layout: Placement
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the classes that have usual numbers, by these numbers."""
    by_usual = {_usual(counts, layout): counts for counts in classes}
    by_usual.pop((), None)
    return by_usual


def _usual(counts: Sequence[int], layout: Placement) -> tuple[int, ...]:
    """Return those of ``counts`` that every engine tests."""
    return tuple(count for count in counts if count <= COUNTS[layout][-1])


def _launches(counts: Sequence[int], layout: Placement) -> int:
    """Return a product's additional operations."""
    total = 0
    for rows in JUDGED_BY:
        full, rest = divmod(_enough(COUNTS[layout], rows), counts[-1])
        if rest and rest not in counts:
            total += 1  # to pad it
        parts = full + (rest > 0)
        if parts > 1:
            total += 2 * parts - 1  # to split it and to join the parts
    return total


def _cost(counts: Sequence[int], forward: int) -> float:
    total = 0.0
    for rows in JUDGED_BY:
        full, rest = divmod(rows, counts[-1])
        groups = [counts[-1]] * full
        if rest:
            groups.append(_enough(counts, rest))
        total += sum(forward + places for places in groups) / rows
    return total


def _enough(counts: Sequence[int], rows: int) -> int:
    """Return the least of ``counts`` that hold so many rows."""
    return next(count for count in counts if count >= rows)
