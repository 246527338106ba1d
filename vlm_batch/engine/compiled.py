"""The decode step as one compiled graph: where launches decide, Python's share of a step is saved (docs/benchmarks.md, settings
that were measured).

A graph holds while the slabs' places and columns stay what they were: places are powers of two, columns are rounded up to 256.
A shape is compiled only once it has come back ``USES_BEFORE_GRAPH`` times.

What a graph fuses is a kernel to be built, for seconds, where the machine has none of it yet. So masks are made outside, and
graphs are made by default only where a step without one has the same kernels.
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

    def __init__(self, decode: Decode, uses_before_graph: int | None = None) -> None:
        self._decode = decode
        self._uses_before_graph = self.USES_BEFORE_GRAPH if uses_before_graph is None else uses_before_graph
        self._graphs: OrderedDict[tuple[Any, ...], _Graph] = OrderedDict()
        self._uses: Counter[tuple[Any, ...]] = Counter()
        self._layers: Sequence[SlabCache] = ()  # during a call; a graph that is kept holds no slab

    @staticmethod
    def can_compile(
        layers: Sequence[LayerCache], extras: Sequence[Mapping[str, Any]], *, is_plain: bool = False
    ) -> bool:
        """Whether a step is a function of tokens, positions and slabs alone; ``is_plain``: and its graph has no kernels that
        the step has not."""
        slabs = [layer for layer in layers if isinstance(layer, SlabCache)]
        is_fit = all(slab.has_graphs_kernels for slab in slabs) if is_plain else True
        return len(slabs) == len(layers) and is_fit and not any(extras)

    def __call__(self, step: DecodeStep) -> mx.array:
        """Logits (B, V) of a step; the slabs hold its tokens afterwards."""
        layers: Sequence[SlabCache] = step.caches
        kinds = {_kind(layer): layer for layer in layers}
        key = tuple(layer.prepare() for layer in kinds.values())
        self._uses[key] += 1
        if self._uses[key] <= self._uses_before_graph:
            return self._decode(step)
        for layer in layers:
            layer.prepare()
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = mx.compile(self._run)
        self._graphs.move_to_end(key)
        if len(self._graphs) > self.MAX_GRAPHS:
            self._graphs.popitem(last=False)
        made = [layer.step_inputs() for layer in kinds.values()]
        # nobody else may hold the slabs, or they would be copied to be written
        slabs = [layer.give() for layer in layers]
        self._layers = layers
        try:
            logits, written = graph(step.tokens, step.positions, made, slabs)
        finally:  # a step for which there is no memory leaves nothing that is held
            self._layers = ()
        del slabs
        for layer, (keys, values) in zip(layers, written, strict=True):
            layer.receive(keys, values)
        return logits

    def _run(
        self,
        tokens: mx.array,
        positions: mx.array,
        made: list[tuple[mx.array, mx.array]],
        slabs: list[tuple[mx.array, mx.array]],
    ) -> tuple[mx.array, list[tuple[mx.array, mx.array]]]:
        """The function that is compiled: Python runs it once for each graph, on placeholders."""
        kinds = list(dict.fromkeys(_kind(layer) for layer in self._layers))
        for layer, (keys, values) in zip(self._layers, slabs, strict=True):
            layer.trace(keys, values, *made[kinds.index(_kind(layer))])
        logits = self._decode(DecodeStep(tokens, positions, self._layers, [{}] * tokens.shape[0]))
        return logits, [layer.untrace() for layer in self._layers]


def _kind(layer: SlabCache) -> tuple[type, int | None]:
    """The facts that layers have in common which are in step with each other."""
    return type(layer), layer.span
