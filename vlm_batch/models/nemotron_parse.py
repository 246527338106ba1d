"""Nemotron-Parse: every decoder layer reads a picture's encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.crossing import CrossingAdapter, attend_over, attend_own
from vlm_batch.adapters.hooks import current
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import DecodeStep, Encoded
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="nemotron_parse",
        model_types=("nemotron_parse",),
        special_tokens=(
            (
                "<predict_bbox>",
                "regions are <x_...><y_...>text<x_...><y_...><class_...>; docling 2.143 asks vLLM for "
                "skip_special_tokens=False (stage_model_specs.py); elsewhere only <s> and </s> are special",
            ),
        ),
        no_prefix_reuse="its decoder has the whole picture before it from the first token on",
        multi_image=False,
        notes=(
            "reads one picture a request; a text without a picture is refused, since the decoder has nothing to read",
            "its picture takes no positions of the prompt: usage.image_tokens is 0, and prompt_tokens are those of the text",
            "the prompt begins the answer, without the start and end tokens that the tokenizer puts around it, as in mlx-vlm",
            "rows decode together: each keeps the keys and values that the decoder made of its picture; "
            "mlx-vlm's batch has no encoder output after the first token, and ends in an exception (generate/ar.py:1190)",
        ),
    )
)
class NemotronParse(CrossingAdapter):
    tower_class = RememberingBatchTower
    input_keys = Adapter.input_keys | {"encoder_outputs"}
    prefill_axes: ClassVar[Mapping[str, int | None]] = {"encoder_outputs": None}

    def expand_ids(self, ids: mx.array, extra: Mapping[str, Any]) -> mx.array:
        """Return the decoder's first ids (nemotron_parse/language.py, NemotronParseLanguageModel)."""
        text, tokens = self.config.text_config, np.array(ids)[0].tolist()
        if len(tokens) == 1:
            return mx.array([[text.decoder_start_token_id]], dtype=mx.int32)
        if len(tokens) > 2:
            tokens = tokens[:-1] if tokens[-1] == text.eos_token_id else tokens
            tokens = tokens[1:] if tokens[0] == text.bos_token_id else tokens
        return mx.array([tokens], dtype=mx.int32)

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return embeddings (1, L, D) and encoding (1, T, D)."""
        states = extra.get("encoder_outputs")
        if states is None:
            states = self._picture(extra.get("pixel_values"))
        model = self.language.model
        return {
            "inputs_embeds": model.shared(ids) * model.decoder.embed_scale,
            "encoder_outputs": states,
        }

    def model_image_sizes(
        self, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        """Return the size of the canvas on which the processor centres a picture."""
        pixels = extra.get("pixel_values")
        if pixels is None:
            return ()
        high, wide = pixels.shape[-2:]
        return ((wide, high),)

    def _picture(self, pixels: mx.array | None) -> mx.array:
        if pixels is None and current().is_made_up:
            return mx.zeros((1, 1, self.config.text_config.d_model))
        if pixels is None:
            raise InvalidPrompt("nemotron_parse reads a picture: a request needs one")
        if len(pixels) != 1:
            raise InvalidPrompt(
                f"nemotron_parse takes one picture a request; given: {len(pixels)}"
            )
        states: mx.array = self.model.vision_tower(pixels)
        return states

    def run_chunk(
        self, rows: Sequence[Encoded], cache: list[Any], start: int, end: int
    ) -> mx.array:
        (encoded,) = rows
        if start == 0:
            self.hold(encoded.prefill["encoder_outputs"], cache)
        return self.answer(encoded.inputs_embeds[:, start:end], cache)

    def run_step(self, step: DecodeStep) -> mx.array:
        model = self.language.model
        return self.answer(
            model.shared(step.tokens) * model.decoder.embed_scale, step.caches
        )

    def answer(self, embeds: mx.array, caches: Sequence[Any]) -> mx.array:
        """Embeddings (B, L, D) -> logits (B, V)."""
        decoder, half = self.language.model.decoder, len(caches) // 2
        hidden = decoder.layernorm_embedding(embeds)
        for layer, own, cross in zip(
            decoder.layers, caches[:half], caches[half:], strict=True
        ):
            hidden = hidden + attend_own(
                layer.self_attn, layer.self_attn_layer_norm(hidden), own
            )
            hidden = hidden + attend_over(
                layer.encoder_attn, layer.encoder_attn_layer_norm(hidden), cross
            )
            hidden = hidden + layer.fc2(
                layer.activation_fn(layer.fc1(layer.final_layer_norm(hidden)))
            )
        return self.language.lm_head(decoder.layer_norm(hidden[:, -1]))
