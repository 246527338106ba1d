"""What a timed run should not carry: the engine's own share of a step, and the bytes that joins and leaves copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from benchmarks.compare.measure import Trace, drive, forget
from benchmarks.compare.workloads import Workload


class Clock:
    """Adds up the time that a thread computes (not: waits) inside wrapped calls, the outermost only."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            if self._depth:
                return call(*args, **keywords)
            self._depth = 1
            begin = time.thread_time()
            try:
                return call(*args, **keywords)
            finally:
                self.seconds += time.thread_time() - begin
                self._depth = 0

        return timed


@contextmanager
def watched(inner: Any, clock: Clock, methods: tuple[str, ...]) -> Iterator[None]:
    """Have a clock watch some methods of an object for as long as the context lasts, whoever calls them."""
    for name in methods:
        setattr(inner, name, clock.wrap(getattr(inner, name)))
    try:
        yield
    finally:
        for name in methods:
            delattr(inner, name)


class Watched:
    """An object whose call is watched by a clock."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        self._inner = inner
        self._timed = clock.wrap(inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._timed(*args, **keywords)


def own_share(
    make: Any, model: Any, workload: Workload, contexts: Any
) -> dict[str, float]:
    """The engine's own work as a share of its steps: its thread's computing outside of model calls and of MLX's eval.

    Model calls are the adapter's encode, prefill and decode, or mlx-vlm's language model. What MLX does to launch a
    graph counts as the model's. Steps that prefill are left out.
    """
    import mlx.core as mx

    forget(model)
    clock = Clock()
    engine = make(model, workload, contexts)
    generator = engine.generator
    models: AbstractContextManager[None] = nullcontext()
    if hasattr(generator, "adapter"):
        calls = (
            "encode",
            "encode_together",
            "prefill",
            "finish_prefill",
            "decode",
            "make_cache",
        )
        models = watched(generator.adapter, clock, calls)
    else:
        generator.model = Watched(generator.model, clock)
    plain = {name: getattr(mx, name) for name in ("eval", "async_eval", "clear_cache")}
    walls: list[float] = []
    owns: list[float] = []
    step = engine.step

    def timed_step() -> Any:
        before, begin, wall = clock.seconds, time.thread_time(), time.perf_counter()
        tokens = step()
        own = time.thread_time() - begin - (clock.seconds - before)
        if len(tokens) == workload.rows:
            walls.append(time.perf_counter() - wall)
            owns.append(own)
        return tokens

    engine.step = timed_step
    try:
        for name, call in plain.items():
            setattr(mx, name, clock.wrap(call))
        with models:
            drive(engine, workload, Trace())
    finally:
        for name, call in plain.items():
            setattr(mx, name, call)
        engine.close()
    walls, owns = walls[2:], owns[2:]
    share = sum(owns) / sum(walls) if walls else float("nan")
    return {
        "own_share": share,
        "own_ms": 1000 * sum(owns) / max(1, len(owns)),
        "step_ms": 1000 * sum(walls) / max(1, len(walls)),
    }


def copied_bytes(
    make: Any, model: Any, workload: Workload, contexts: Any
) -> dict[str, float]:
    """Megabytes of KV that a join and a leave copy, on average, beside other rows; and those of one row's KV.

    For this library, found from where the arrays lie: a layer whose array moved was copied whole; one that stayed took
    in the row's own bytes, unless the row's own array was adopted. mlx-vlm makes all arrays anew in either case.
    """
    forget(model)
    joins: list[int] = []
    leaves: list[int] = []
    row_bytes: list[int] = []
    engine = make(model, workload, contexts)
    ours = hasattr(engine.generator, "adapter")
    with (
        _watch_ours(joins, leaves, row_bytes)
        if ours
        else _watch_mlx_vlm(joins, leaves, row_bytes)
    ):
        try:
            drive(engine, workload, Trace())
        finally:
            engine.close()
    mean = lambda values: sum(values) / len(values) / 1e6 if values else float("nan")  # noqa: E731
    return {"join_mb": mean(joins), "leave_mb": mean(leaves), "row_mb": mean(row_bytes)}


@contextmanager
def _watch_ours(joins: list[int], leaves: list[int], rows: list[int]) -> Iterator[None]:
    from vlm_batch.engine.batch import DecodeBatch

    join, leave = DecodeBatch.join, DecodeBatch.leave

    def watched_join(batch: DecodeBatch, row: Any, caches: Any, more: int = 0) -> None:
        own = _arrays([cache.state for cache in caches])
        size, others = sum(array.nbytes for array in own), len(batch)
        adopted = {_address(array) for array in own}
        before = [_places(layer) for layer in batch.layers]
        join(batch, row, caches, more)
        after = [_places(layer) for layer in batch.layers]
        if others:
            rows.append(size)
            moved = _moved(before, after, adopted)
            was_adopted = all(adopted & set(layer) for layer in after)
            joins.append(moved + (0 if was_adopted else size))

    def watched_leave(batch: DecodeBatch, row: Any) -> None:
        before = [_places(layer) for layer in batch.layers]
        leave(batch, row)
        if len(batch):
            leaves.append(
                _moved(before, [_places(layer) for layer in batch.layers], set())
            )

    DecodeBatch.join, DecodeBatch.leave = watched_join, watched_leave  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        DecodeBatch.join, DecodeBatch.leave = join, leave  # type: ignore[method-assign]


@contextmanager
def _watch_mlx_vlm(
    joins: list[int], leaves: list[int], rows: list[int]
) -> Iterator[None]:
    from mlx_vlm.generate.ar import GenerationBatch

    extend, keep_only = GenerationBatch.extend, GenerationBatch.filter

    def held(batch: Any) -> int:
        return sum(
            layer.keys.nbytes + layer.values.nbytes for layer in batch.prompt_cache
        )

    def watched_extend(batch: Any, other: Any) -> None:
        others, size = len(batch), held(other)
        extend(batch, other)
        if others:
            rows.append(size)
            joins.append(held(batch))

    def watched_filter(batch: Any, keep: list[int]) -> None:
        keep_only(batch, keep)
        if keep:
            leaves.append(held(batch))

    GenerationBatch.extend, GenerationBatch.filter = watched_extend, watched_filter
    try:
        yield
    finally:
        GenerationBatch.extend, GenerationBatch.filter = extend, keep_only


def _places(layer: Any) -> dict[int, int]:
    """Where each of a layer's arrays lies -> its bytes. Waits for whatever is still being computed."""
    return {_address(array): array.nbytes for array in layer.arrays()}


def _moved(
    before: list[dict[int, int]], after: list[dict[int, int]], adopted: set[int]
) -> int:
    """Bytes of arrays that lie elsewhere than before, adopted ones left out. A first layer list has nothing to move."""
    known = {address for layer in before for address in layer} | adopted
    return sum(
        size
        for layer in after
        for address, size in layer.items()
        if before and address not in known
    )


def _address(array: Any) -> int:
    import mlx.core as mx
    import numpy as np

    same_bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return int(np.asarray(same_bits).__array_interface__["data"][0])


def _arrays(tree: Any) -> list[Any]:
    import mlx.core as mx

    if isinstance(tree, mx.array):
        return [tree]
    return [array for item in tree for array in _arrays(item)]
