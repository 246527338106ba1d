"""Prompts whose KV is recalled instead of computed, so that a run shows decoding, joining and leaving alone.

Both sides copy the same stored keys and values into the same kind of cache, and go on as after a real prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.compare.workloads import Ask


class Contexts:
    """The computed prompts of some asks, by the first id of each (no two may share it)."""

    def __init__(self, model: Any, asks: Sequence[Ask]) -> None:
        import mlx.core as mx
        from mlx_vlm.models.cache import make_prompt_cache

        self.stored: dict[int, tuple[list[Any], Any]] = {}
        language = model.language_model
        for ask in asks:
            ids = mx.array(ask.inputs["input_ids"])
            first = int(ask.inputs["input_ids"][0, 0])
            if first in self.stored:
                continue
            features = model.get_input_embeddings(ids, None)
            cache = make_prompt_cache(language)
            length = ids.shape[1]
            for start in range(0, length, 512):
                end = min(start + 512, length)
                output = language(
                    ids[:, start:end],
                    inputs_embeds=features.inputs_embeds[:, start:end],
                    cache=cache,
                    position_ids=features.position_ids[..., start:end],
                )
                mx.eval([layer.state for layer in cache])
            logits = mx.contiguous(output.logits[:, -1])  # (1, V)
            layers = [
                tuple(mx.contiguous(array) for array in layer.state) for layer in cache
            ]
            mx.eval(logits, layers)
            self.stored[first] = (layers, logits)
            for name in ("_position_ids", "_rope_deltas"):
                setattr(language, name, None)

    def recall(self, first: int, cache: Sequence[Any], start: int, end: int) -> Any:
        """Put positions [start, end) of a context into a cache; the logits (1, V) of its last position."""
        layers, logits = self.stored[first]
        for layer, (keys, values) in zip(cache, layers, strict=True):
            layer.update_and_fetch(keys[:, :, start:end], values[:, :, start:end])
        return logits


class RecallingAdapter:
    """A family's adapter whose prefill recalls."""

    is_causal = False

    def __init__(self, adapter: Any, contexts: Contexts) -> None:
        self._adapter = adapter
        self._contexts = contexts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def prefill(
        self, rows: Any, cache: list[Any], begin: int, end: int, call: Any
    ) -> Any:
        return self._contexts.recall(
            int(rows[0].input_ids[0, 0].item()), cache, begin, end
        )


class RecallingLanguageModel:
    """mlx-vlm's language model for its BatchGenerator, one prompt at a time; a prompt recalls, a decode step computes."""

    def __init__(self, language: Any, contexts: Contexts) -> None:
        self._language = language
        self._contexts = contexts
        self._first = 0
        self._done = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._language, name)

    def __call__(
        self, ids: Any, cache: Sequence[Any], inputs_embeds: Any = None, **keywords: Any
    ) -> Any:
        if inputs_embeds is None:
            return self._language(ids, cache=cache, **keywords)
        length = inputs_embeds.shape[1]
        if cache[0].keys is None:  # a new prompt
            self._first, self._done = int(ids[0, 0].item()), 0
        logits = self._contexts.recall(
            self._first, cache, self._done, self._done + length
        )
        self._done += length
        return SimpleNamespace(logits=logits[:, None])  # (1, 1, V)
