"""The decode step as one compiled graph: on a GPU the launches decide, and compiling fuses about a fifth of them away.

A graph holds while the number of places and the columns that attention reads stay what they were: places are powers of
two, columns are rounded up to 256. A shape is compiled only once it has come back ``USES_BEFORE_GRAPH`` times.

The first graph of a process builds kernels, which can take longer than graphs save in thousands of steps. So they are off
unless somebody asks for them, as a server does that is warmed up (docs/benchmarks.md, settings that were measured).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.caches import LayerCache, SlabCache
from vlm_batch.records import DecodeStep

Decode = Callable[[DecodeStep], mx.array]
_Graph = Callable[..., tuple[mx.array, list[tuple[mx.array, mx.array]]]]


class CompiledDecode:
    """Decodes like ``decode``, through a graph a shape. Only for steps that ``can_compile`` says yes to."""

    MAX_GRAPHS = 64
    USES_BEFORE_GRAPH = 16

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._graphs: OrderedDict[tuple[Any, ...], _Graph] = OrderedDict()
        self._uses: Counter[tuple[Any, ...]] = Counter()
        self._layers: Sequence[SlabCache] = ()  # during a call; a graph that is kept holds no slab

    @staticmethod
    def can_compile(layers: Sequence[LayerCache], extras: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a step is a function of tokens, positions and slabs alone."""
        return all(isinstance(layer, SlabCache) for layer in layers) and not any(extras)

    def __call__(self, step: DecodeStep) -> mx.array:
        """Logits (B, V) of a step; the slabs hold its tokens afterwards."""
        layers: Sequence[SlabCache] = step.caches
        kinds = {(type(layer), layer.span): layer for layer in layers}  # all layers of a kind are in step
        key = tuple(layer.prepare() for layer in kinds.values())
        self._uses[key] += 1
        if self._uses[key] <= self.USES_BEFORE_GRAPH:
            return self._decode(step)
        self._layers = layers
        for layer in layers:
            layer.prepare()
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = mx.compile(self._run)
        self._graphs.move_to_end(key)
        if len(self._graphs) > self.MAX_GRAPHS:
            self._graphs.popitem(last=False)
        lengths = [layer.offset for layer in self._layers]
        slabs = [
            layer.give() for layer in self._layers
        ]  # nobody else may hold them, or they would be copied to be written
        logits, written = graph(step.tokens, step.positions, lengths, slabs)
        del slabs
        for layer, (keys, values) in zip(self._layers, written, strict=True):
            layer.receive(keys, values)
        self._layers = ()
        return logits

    def _run(
        self, tokens: mx.array, positions: mx.array, lengths: list[mx.array], slabs: list[tuple[mx.array, mx.array]]
    ) -> tuple[mx.array, list[tuple[mx.array, mx.array]]]:
        """The function that is compiled: Python runs it once for each graph, on placeholders."""
        for layer, (keys, values), offset in zip(self._layers, slabs, lengths, strict=True):
            layer.trace(keys, values, offset)
        logits = self._decode(DecodeStep(tokens, positions, self._layers, [{}] * tokens.shape[0]))
        return logits, [layer.untrace() for layer in self._layers]
