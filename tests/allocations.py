"""Allocations that fail: where caches grow or a step makes arrays, what MLX's allocators say is raised as they raise it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_vlm.models import cache as upstream

from vlm_batch.caches import (
    SlabCache,
    coded,
    full,
    indexed,
    recurrent,
    slab,
    whole,
    window,
)
from vlm_batch.caches.listed import parts_of
from vlm_batch.caches.recurrent import RecurrentCache
from vlm_batch.caches.rows import RowsCache
from vlm_batch.engine import choosing, runner
from vlm_batch.engine.batch import DecodeBatch

WANT = "[malloc] Unable to allocate 123456789 bytes."


class Watched:
    """``mlx.core`` in a module's eyes, of which some functions are announced."""

    def __init__(self, announced: Callable[[Any], Any], names: tuple[str, ...]) -> None:
        self._announced = {name: announced(getattr(mx, name)) for name in names}

    def __getattr__(self, name: str) -> Any:
        return self._announced.get(name) or getattr(mx, name)


@contextmanager
def announced(occur: Callable[[], None]) -> Iterator[None]:
    """Have ``occur`` called before each allocation with which caches grow, of one row's and of a batch's, and of the arrays
    that a choice of tokens is made with."""

    def announce(function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            occur()
            return function(*given, **named)

        return call

    places: list[tuple[Any, str, Any]] = [
        *(
            (module, "grown", announce(module.grown))
            for module in (slab, recurrent, indexed)
        ),  # type: ignore[attr-defined]
        (coded, "_joined", announce(coded._joined)),
        *(
            (module, "row_of", announce(module.row_of))
            for module in (full, indexed, coded, recurrent, whole, window)
        ),
        (runner, "take_row", announce(runner.take_row)),
        (upstream, "mx", Watched(announce, ("zeros", "concatenate"))),
        (choosing, "mx", Watched(announce, ("array",))),
        (choosing, "stack_logits", announce(choosing.stack_logits)),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    try:
        for module, name, function in places:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def check_alike(batch: DecodeBatch) -> None:
    """All layers of a batch have its places, and in each of these a row of the same length or none; slabs of one kind have the
    same columns, in each of their arrays. Layers share their mask."""
    parts = [part for layer in batch.layers for part in parts_of(layer)]
    is_empty = [row is None for row in batch.places]
    lengths: set[tuple[int, ...]] = set()
    columns: dict[Any, set[int]] = {}
    for part in parts:
        if isinstance(part, SlabCache):
            assert [length == 0 for length in part.lengths] == is_empty, (
                "a place that is empty has a length, or none has one"
            )
            lengths.add(part.lengths)
            columns.setdefault((type(part), part.span), set()).update(
                array.shape[2] for array in part.arrays()
            )
            assert all(array.shape[0] == len(is_empty) for array in part.arrays()), (
                "a slab has other places"
            )
        elif isinstance(part, RowsCache):
            assert [held is None for held in part.places] == is_empty, (
                "a place without a row holds something"
            )
        elif isinstance(part, RecurrentCache):
            assert all(states.shape[0] == len(is_empty) for states in part.arrays()), (
                "a state has other places"
            )
    assert len(lengths) <= 1, "rows are of other lengths in other layers"
    assert all(len(found) <= 1 for found in columns.values()), (
        "layers that share a mask have other columns"
    )
