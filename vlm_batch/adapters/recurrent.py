"""Recurrent modules run a row's drafted positions in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.cache import ArraysCache, CacheList

from vlm_batch.adapters.base import Adapter
from vlm_batch.caches.drafted import ALL, Square, rows_of
from vlm_batch.caches.listed import ListedCache, parts_of
from vlm_batch.caches.recurrent import DraftedRecurrent, Step


class InOrder:
    """Base of modules that run a row's drafted positions in order."""


def can_draft(adapter: Adapter) -> bool:
    """Whether a forward may have several positions of a row, in order where there are states."""
    if adapter.spec.max_rows is not None:
        return False
    has_states = False
    for cache in adapter.make_cache():
        parts = cache.caches if isinstance(cache, CacheList) else [cache]
        for part in parts:
            has_states |= isinstance(part, ArraysCache)
    if not has_states:
        return True
    return any(isinstance(module, InOrder) for module in adapter.language.modules())


def in_order(
    module_class: type[nn.Module],
    before: Sequence[str] = (),
    after: str = "",
    *,
    has_history: bool = False,
) -> type[nn.Module]:
    """Subclass a module with recurrent states to run drafted positions in order.

    Args:
        before: Submodules of the input, run for all positions at once.
        after: The submodule of the output, run likewise.
        has_history: Its cache calls tell the state after each position of a call.
    """

    class Ordered(InOrder, module_class):  # type: ignore[misc,valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            cache = next(
                (
                    one
                    for value in (*args, *kwargs.values())
                    if (one := _drafted(value)) is not None
                ),
                None,
            )
            if cache is None:
                return super().__call__(*args, **kwargs)
            num_arrays = sum(
                isinstance(value, mx.array) for value in (*args, *kwargs.values())
            )
            if (
                has_history
                and num_arrays == 1
                and (square := cache.square()) is not None
            ):
                return self.at_once(cache, square, args, kwargs)
            return self.each_step(cache, args, kwargs)

        def at_once(
            self,
            cache: DraftedRecurrent,
            square: Square,
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
        ) -> Any:
            """Call the module once, with a place's positions as a row."""
            x = args[0] if args else next(iter(kwargs.values()))
            known = {
                name: KnownOutput(square.padded(self[name](x)[:, 0])) for name in before
            }
            twin = _twin(self, module_class, known, after)
            with cache.history(square.count) as lent:
                given = {id(x): square.padded(x[:, 0]), id(cache): lent}
                cut = [given.get(id(value), value) for value in args]
                found = twin(
                    *cut,
                    **{
                        name: given.get(id(value), value)
                        for name, value in kwargs.items()
                    },
                )
            flat = square.flat(found)[:, None]
            return self[after](flat) if after else flat

        def each_step(
            self,
            cache: DraftedRecurrent,
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
        ) -> Any:
            """Call the module per step, with its rows of arrays (N, ...); join the answers."""
            x = args[0] if args else next(iter(kwargs.values()))
            known = {name: KnownOutput(self[name](x)) for name in before}
            twin = _twin(self, module_class, known, after)
            answers = []
            for number, step in enumerate(cache.steps.each):
                for one in known.values():
                    one.rows = step.rows
                with cache.step(number) as lent:
                    cut = [_of_step(value, cache, step, lent) for value in args]
                    named = {
                        name: _of_step(value, cache, step, lent)
                        for name, value in kwargs.items()
                    }
                    answers.append(twin(*cut, **named))
            order = cache.steps.order
            if isinstance(answers[0], tuple):
                return tuple(
                    rows_of(mx.concatenate(list(parts)), order)
                    for parts in zip(*answers, strict=True)
                )
            joined = rows_of(mx.concatenate(answers), order)
            return self[after](joined) if after else joined

    return Ordered


def _twin(
    module: Any, module_class: type[nn.Module], known: Mapping[str, Any], after: str
) -> Any:
    """Return the module as ``module_class``, with known outputs."""
    twin: Any = dict.__new__(module_class)
    twin.__dict__.update(module.__dict__)
    dict.update(twin, {**module, **known, **({after: _same} if after else {})})
    return twin


class KnownOutput:
    """Stands for a submodule whose output for all positions is known."""

    def __init__(self, output: mx.array) -> None:
        self._output = output
        self.rows: slice | mx.array = ALL  # of the step that asks

    def __call__(self, x: mx.array) -> mx.array:
        return rows_of(self._output, self.rows)


def _same(x: mx.array) -> mx.array:
    return x


def _drafted(value: Any) -> DraftedRecurrent | None:
    for part in parts_of(value):
        if isinstance(part, DraftedRecurrent):
            return part
    return None


def _of_step(value: Any, cache: DraftedRecurrent, step: Step, lent: Any) -> Any:
    """Return what a step sees of an argument: its own rows of an array, ``lent`` for the cache."""
    if value is cache:
        return lent
    if isinstance(value, ListedCache):
        parts = (_of_step(part, cache, step, lent) for part in value.caches)
        return ListedCache(*parts)
    if not isinstance(value, mx.array):
        return value
    has_rows = value.shape[:1] == (cache.steps.num_rows,)
    return rows_of(value, step.rows) if has_rows else value
