"""Unverified models, one row at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.attention import HOOKS
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.hooks import files_of, install_hooks, running
from vlm_batch.adapters.tables import hook_tables
from vlm_batch.records import Call, DecodeStep, Encoded, Graphs
from vlm_batch.registry import ModelSpec


class SingleRow(Adapter):
    """Pass all features to the decoder; positions stay on the model."""

    spec = ModelSpec(
        family="(one row at a time)",
        model_types=(),
        chunked_prefill=False,
        no_prefix_reuse="it runs one row at a time, through mlx-vlm's own path",
        max_rows=1,
    )
    is_causal = False
    last_hidden = None  # the trunk is unknown
    #: A graph would keep the lengths of the caches that ``run_step`` takes out and puts back.
    graphs = Graphs.NEVER

    def hook_functions(self) -> None:
        install_hooks(
            files_of(self.language), HOOKS, family=self.spec.family, is_strict=False
        )
        hook_tables(self.spec.family)

    @staticmethod
    def can_run(model: nn.Module) -> bool:
        """Whether the model has a decoder's usual parts."""
        return hasattr(model, "get_input_embeddings") and hasattr(
            getattr(model, "language_model", None), "layers"
        )

    def _known_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in inputs.items()
            if value is not None and name not in ("input_ids", "attention_mask")
        }

    def _for_prefill(self, features: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value for name, value in features.items() if name != "inputs_embeds"
        }

    def encode(
        self, inputs: Mapping[str, Any], call: Call = Call(), cached: int = 0
    ) -> Encoded:
        """Encode a request; the model keeps its positions."""
        self._forget_positions()
        with running(call):
            return self._encoded(inputs, call, cached)

    def atomic_spans(
        self, ids: mx.array, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        return ((0, 2**31),)

    def run_chunk(
        self, rows: Sequence[Encoded], cache: list[Any], start: int, end: int
    ) -> mx.array:
        (encoded,) = rows
        return self.forward(
            encoded.input_ids, encoded.inputs_embeds, cache, encoded.prefill
        )

    def run_step(self, step: DecodeStep) -> mx.array:
        """Decode with the row's own caches, then put them back."""
        own = [layer.extract(0) for layer in step.caches]
        logits = self.forward(step.tokens, None, own, {})
        for layer, cache in zip(step.caches, own, strict=True):
            layer.put(0, cache)
        return logits
