"""Florence-2: an encoder reads the request, a decoder answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.crossing import CrossingAdapter, attend_over, attend_own
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.records import DecodeStep, Encoded, PositionState
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="florence2",
        model_types=("florence2",),
        special_tokens=(
            (
                "<loc_0>",
                "boxes are <loc_0> to <loc_999>; the model card and transformers' documentation decode with "
                "skip_special_tokens=False before post_process_generation",
            ),
        ),
        no_prefix_reuse="its encoder sees the whole prompt",
        multi_image=False,
        chunked_prefill=False,
        notes=(
            "rows decode together: each keeps the keys and values that the decoder made of its encoder's output; "
            "mlx-vlm's batch has no encoder output after the first token (generate/ar.py)",
            "picture, prompt and answer together are held to the context, which the encoder and the decoder each have",
        ),
    )
)
class Florence2(CrossingAdapter):
    tower_class = RememberingBatchTower
    #: A row is not padded, and ``run_chunk`` feeds the decoder's start token.
    ignored = frozenset({"attention_mask", "decoder_inputs_embeds"})

    def atomic_spans(
        self, ids: mx.array, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        return ((0, 2**31),)

    def positions(
        self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]
    ) -> PositionState:
        """Begin the answer's positions after the start token."""
        return PositionState(delta=1 - features["inputs_embeds"].shape[1])

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        return frozenset()

    def picture_positions(self, ids: mx.array, extra: Mapping[str, Any]) -> np.ndarray:
        """Return where the marks are, for each of which the encoder reads a feature."""
        return np.array(ids)[0] == self.config.image_token_id

    @property
    def _without_embeddings(self) -> frozenset[int]:
        """The mark that mlx-vlm's processor adds behind the published vocabulary (processing_florence2.py:77)."""
        return frozenset({self.config.image_token_id})

    def run_chunk(
        self, rows: Sequence[Encoded], cache: list[Any], start: int, end: int
    ) -> mx.array:
        (encoded,), model = rows, self.language.model
        # (1, L, D)
        self.hold(
            model.encoder(inputs_embeds=encoded.inputs_embeds * model.embed_scale),
            cache,
        )
        first = mx.array([[self.config.text_config.decoder_start_token_id]])
        return self.answer(first, mx.zeros((1,), dtype=mx.int32), cache)

    def run_step(self, step: DecodeStep) -> mx.array:
        return self.answer(step.tokens, step.positions, step.caches)

    def answer(
        self, tokens: mx.array, positions: mx.array, caches: Sequence[Any]
    ) -> mx.array:
        """Decode tokens (B, 1) at positions (B,): logits (B, V); mlx-vlm has one position (florence2/language.py:318)."""
        model = self.language.model
        decoder, half = model.decoder, len(caches) // 2
        learned = decoder.embed_positions(positions + decoder.offset)[:, None]
        # (B, 1, D)
        hidden = decoder.layernorm_embedding(model.shared(tokens) + learned)
        for layer, own, cross in zip(
            decoder.layers, caches[:half], caches[half:], strict=True
        ):
            hidden = layer.self_attn_layer_norm(
                hidden + attend_own(layer.self_attn, hidden, own)
            )
            hidden = layer.encoder_attn_layer_norm(
                hidden + attend_over(layer.encoder_attn, hidden, cross)
            )
            widened = layer.fc2(layer.activation_fn(layer.fc1(hidden)))
            hidden = layer.final_layer_norm(hidden + widened)
        return self.language.lm_head(hidden)[:, -1]
