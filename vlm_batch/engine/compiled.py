"""Decode steps as compiled graphs, which save Python's share of a step (docs/log.md, settings that were measured).

A graph serves one shape of slabs: places are powers of two, columns multiples of 256. A shape runs eagerly
``USES_BEFORE_GRAPH`` times first, ``USES_BEFORE_UNFUSED`` times where graphs fuse nothing.

Fused kernels take seconds to build. So masks are made outside, and by default graphs fuse only on GPUs, where an eager step
has the same kernels; else nothing (``unfused``).
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from vlm_batch.caches import LayerCache, RecurrentCache, SlabCache
from vlm_batch.caches.listed import parts_of
from vlm_batch.records import DecodeStep
from vlm_batch.runtime.device import Device, device

#: Returns logits (B, V), or these and further arrays.
Decode = Callable[[DecodeStep], Any]
_Graph = Callable[..., tuple[Any, list[tuple[Any, ...]]]]


class CompiledDecode:
    """Runs ``decode`` through one graph per shape, if ``can_compile`` accepts the step. What cannot be traced runs
    eagerly.

    Args:
        is_fused: graphs fuse operations, which needs new kernels.
        adds_masks: every layer adds its mask to scores, so masks are numbers.
    """

    MAX_GRAPHS = 64
    USES_BEFORE_GRAPH = 16
    USES_BEFORE_UNFUSED = 2

    def __init__(
        self,
        decode: Decode,
        uses_before_graph: int | None = None,
        *,
        is_fused: bool = True,
        adds_masks: bool = True,
    ) -> None:
        self._decode = decode
        self._is_fused = is_fused
        self._adds_masks = adds_masks
        self._is_graph = True  # until one could not be made
        usual = self.USES_BEFORE_GRAPH if is_fused else self.USES_BEFORE_UNFUSED
        self._uses_before_graph = (
            usual if uses_before_graph is None else uses_before_graph
        )
        self._graphs: OrderedDict[tuple[Any, ...], _Graph] = OrderedDict()
        self._uses: Counter[tuple[Any, ...]] = Counter()
        # only during a call, so that graphs hold no slab
        self._layers: Sequence[Any] = ()

    @staticmethod
    def can_compile(
        layers: Sequence[LayerCache],
        extras: Sequence[Mapping[str, Any]],
        *,
        is_plain: bool = False,
    ) -> bool:
        """Return whether a step depends only on tokens, positions, slabs and recurrent states. ``is_plain``: and needs
        no new kernels.
        """
        for layer in layers:
            can_trace = layer.can_trace and (layer.has_graphs_kernels or not is_plain)
            if not can_trace:
                return False
        return not any(extras)

    def __call__(self, step: DecodeStep) -> Any:
        """Return what ``decode`` returns."""
        layers = _parts(step.caches)
        kinds = {_kind(layer): layer for layer in layers}
        keys = {layer: layer.graph_key() for layer in layers}
        key = tuple(keys[layer] for layer in kinds.values())
        self._uses[key] += 1
        if self._uses[key] <= self._uses_before_graph or not self._is_graph:
            return self._decode(step)
        graph = self._graphs.get(key)
        made = [
            layer.step_inputs(is_added=self._adds_masks) for layer in kinds.values()
        ]
        # nobody else may hold the slabs, or they would be copied to be written
        slabs = [layer.give() for layer in layers]
        self._layers = step.caches
        try:
            if graph is None:
                graph, (found, written) = self._new(step, made, slabs)
            else:
                found, written = graph(step.tokens, step.positions, made, slabs)
        except (ValueError, IndexError, TypeError):
            if graph is not None:
                raise
            # something in it reads what is computed, or MLX cannot put it together
            self._is_graph = False
            for layer, given in zip(layers, slabs, strict=True):
                layer.give()
                layer.take(given, 0)
            return self._decode(step)
        finally:  # a step for which there is no memory leaves nothing that is held
            self._layers = ()
        del slabs
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        if len(self._graphs) > self.MAX_GRAPHS:
            # it is made again once it has come back as often
            del self._uses[self._graphs.popitem(last=False)[0]]
        for layer, given in zip(layers, written, strict=True):
            layer.take(given, 1)
        return found

    def _new(self, step: DecodeStep, made: Any, slabs: Any) -> tuple[_Graph, Any]:
        # a graph that held its maker would keep the model until garbage is collected
        own = weakref.ref(self)

        def run(*given: Any) -> Any:
            made = own()
            assert made is not None
            return made._run(*given)

        graph = mx.compile(run)
        with nullcontext() if self._is_fused else unfused():
            return graph, graph(step.tokens, step.positions, made, slabs)

    def _run(
        self,
        tokens: mx.array,
        positions: mx.array,
        made: list[tuple[mx.array, ...]],
        slabs: list[tuple[Any, ...]],
    ) -> tuple[Any, list[tuple[Any, ...]]]:
        """Run a step on placeholders."""
        layers = _parts(self._layers)
        kinds = list(dict.fromkeys(map(_kind, layers)))
        for layer, given in zip(layers, slabs, strict=True):
            layer.trace(given, made[kinds.index(_kind(layer))])
        found = self._decode(
            DecodeStep(
                tokens, positions, self._layers, [{}] * tokens.shape[0], is_traced=True
            )
        )
        return found, [layer.give() for layer in layers]


def _parts(layers: Sequence[Any]) -> list[Any]:
    return [part for layer in layers for part in parts_of(layer)]


def _kind(layer: SlabCache | RecurrentCache) -> tuple[type, int | None]:
    """Return the key of layers with equal masks."""
    return type(layer), layer.span


#: MLX's function that says how graphs are made, of which Python knows only "not at all" (mlx/compile.h, ``CompileMode``).
SET_MODE, NO_FUSE, ENABLED = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE", 2, 3


@cache
def _set_mode() -> Any | None:
    """Return MLX's ``SET_MODE`` function, if it has one."""
    for path in sorted((Path(mx.__file__).parent / "lib").glob("libmlx.*")):
        with suppress(OSError, AttributeError):
            function = getattr(ctypes.CDLL(str(path)), SET_MODE)
            function.argtypes, function.restype = [ctypes.c_int], None
            return function
    return None


def can_leave_unfused() -> bool:
    """Whether unfused graphs are possible and pay. Metal has not been measured."""
    return device() is not Device.METAL and _set_mode() is not None


@contextmanager
def unfused() -> Iterator[None]:
    """Let new graphs fuse nothing, those of other threads included."""
    set_mode = _set_mode()
    # who said that MLX is to make none has none
    if set_mode is None or not _is_enabled():
        yield
        return
    set_mode(NO_FUSE)
    try:
        yield
    finally:
        set_mode(ENABLED)


def _is_enabled() -> bool:
    """Whether MLX makes graphs."""
    calls: list[None] = []

    def probe(number: mx.array) -> mx.array:
        calls.append(None)
        return number + 1

    graph, number = mx.compile(probe), mx.zeros(1)
    graph(number)
    graph(number)
    return len(calls) == 1
