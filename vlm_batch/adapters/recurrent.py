"""Recurrent modules run a row's drafted positions in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.cache import ArraysCache, CacheList

from vlm_batch.caches.drafted import ALL, Square, rows_of
from vlm_batch.caches.listed import ListedCache, parts_of
from vlm_batch.caches.recurrent import DraftedRecurrent, Step

if TYPE_CHECKING:
    from vlm_batch.adapters.base import Adapter


class InOrder:
    """Base of modules that run a row's drafted positions in order."""


def can_draft(adapter: Adapter) -> bool:
    """Whether a forward may have several positions of a row, in order where there are states."""
    if adapter.spec.max_rows is not None:
        return False
    parts = chain.from_iterable(map(_caches_in, adapter.make_cache()))
    if not any(isinstance(part, ArraysCache) for part in parts):
        return True
    return any(isinstance(module, InOrder) for module in adapter.language.modules())


def _caches_in(cache: Any) -> Sequence[Any]:
    return cache.caches if isinstance(cache, CacheList) else (cache,)


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
            values = (*args, *kwargs.values())
            cache = next(filter(None, map(_drafted, values)), None)
            if cache is None:
                return super().__call__(*args, **kwargs)
            square = None
            if has_history and _num_arrays(values) == 1:
                square = cache.square()
            if square is None:
                return self.each_step(cache, values[0], args, kwargs)
            return self.at_once(cache, square, values[0], args, kwargs)

        def at_once(
            self,
            cache: DraftedRecurrent,
            square: Square,
            x: mx.array,
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
        ) -> Any:
            """Call the module once, with a place's positions as a row."""
            known = {
                name: KnownOutput(square.padded(self[name](x)[:, 0])) for name in before
            }
            twin = _twin(self, module_class, known, after)
            with cache.history(square.count) as lent:
                given = {id(x): square.padded(x[:, 0]), id(cache): lent}
                found = _called(
                    twin, args, kwargs, lambda value: given.get(id(value), value)
                )
            return self.get(after, _same)(square.flat(found)[:, None])

        def each_step(
            self,
            cache: DraftedRecurrent,
            x: mx.array,
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
        ) -> Any:
            """Call the module per step, with its rows of arrays (N, ...); join the answers."""
            known = {name: KnownOutput(self[name](x)) for name in before}
            twin = _twin(self, module_class, known, after)
            answers = []
            for number, step in enumerate(cache.steps.each):
                for one in known.values():
                    one.rows = step.rows
                with cache.step(number) as lent:
                    own = partial(_of_step, cache=cache, step=step, lent=lent)
                    answers.append(_called(twin, args, kwargs, own))
            order = cache.steps.order
            if isinstance(answers[0], tuple):
                return tuple(
                    rows_of(mx.concatenate(list(parts)), order)
                    for parts in zip(*answers, strict=True)
                )
            return self.get(after, _same)(rows_of(mx.concatenate(answers), order))

    return Ordered


def _num_arrays(values: Sequence[Any]) -> int:
    return sum(isinstance(value, mx.array) for value in values)


def _called(
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    change: Callable[[Any], Any],
) -> Any:
    """Call a module with each argument changed."""
    named = {name: change(value) for name, value in kwargs.items()}
    return module(*map(change, args), **named)


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
