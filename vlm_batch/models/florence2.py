"""Florence-2: an encoder reads picture and prompt, a decoder answers; a row brings its own encoder keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import create_attention_mask
from mlx_vlm.models.cache import KVCache

from vlm_batch.adapters.attention import attention
from vlm_batch.adapters.base import Adapter
from vlm_batch.caches.cross import CrossCache
from vlm_batch.registry import ModelSpec, register
from vlm_batch.types import DecodeStep, Encoded, PositionState


def heads(projected: mx.array, count: int) -> mx.array:
    """(B, L, H * D_head) -> (B, H, L, D_head)"""
    return projected.reshape(*projected.shape[:2], count, -1).swapaxes(1, 2)


@register(
    ModelSpec(
        family="florence2",
        model_types=("florence2",),
        multi_image=False,
        chunked_prefill=False,
        notes=(
            "rows decode together: each keeps the keys and values that the decoder made of its encoder's output; "
            "mlx-vlm's batch has no encoder output after the first token (generate/ar.py)",
            "picture, prompt and answer together are held to the context, which the encoder and the decoder each have",
        ),
    )
)
class Florence2(Adapter):
    """The first half of a row's caches is the decoder's own attention, the second its attention over the encoder."""

    no_prefix_reuse = "its encoder sees the whole prompt"
    #: One row is not padded, and the decoder begins with its start token here.
    ignored_features = frozenset({"attention_mask", "decoder_inputs_embeds"})

    @property
    def token_table(self) -> Any:
        return self.language.model.shared

    def last_position_logits(self) -> None:
        """The decoder runs one token at a time anyway."""

    def atomic_spans(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """The encoder reads everything at once."""
        return ((0, 2**31),)

    def positions(self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]) -> PositionState:
        """The answer's positions begin after the start token's, wherever the prompt ends."""
        return PositionState(delta=1 - int(features["length"]))

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        found = super().features(ids, extra)
        return {**found, "length": found["inputs_embeds"].shape[1]}

    def split(self, features: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return super().split({name: value for name, value in features.items() if name != "length"})

    def count_image_tokens(self, ids: mx.array, extra: Mapping[str, Any]) -> int:
        """Whatever the encoder reads besides the prompt's words is counted with the prompt, not here."""
        return 0

    def make_cache(self) -> list[Any]:
        layers = self.language.model.decoder.layers
        return [KVCache() for _ in layers] + [CrossCache() for _ in layers]

    def prefill(self, encoded: Encoded, cache: list[Any], start: int, end: int) -> mx.array:
        """The encoder over the whole prompt, then the decoder's start token."""
        model = self.language.model
        states = model.encoder(inputs_embeds=encoded.inputs_embeds * model.embed_scale)  # (1, L, D)
        for layer, single in zip(model.decoder.layers, cache[len(cache) // 2 :], strict=True):
            over = layer.encoder_attn
            single.hold(*(heads(project(states), over.num_heads) for project in (over.k_proj, over.v_proj)))
        first = mx.array([[self.config.text_config.decoder_start_token_id]])
        return self.answer(first, mx.zeros((1,), dtype=mx.int32), cache)

    def decode(self, step: DecodeStep) -> mx.array:
        return self.answer(step.tokens, step.positions, step.caches)

    def answer(self, tokens: mx.array, positions: mx.array, caches: Sequence[Any]) -> mx.array:
        """The decoder over one token (B, 1) a row at its position (B,); logits (B, V).

        Upstream counts one position for all rows and wants encoder states at every step (florence2/language.py:318).
        """
        model = self.language.model
        decoder, half = model.decoder, len(caches) // 2
        places = decoder.embed_positions(positions + decoder.offset)[:, None]
        hidden = decoder.layernorm_embedding(model.shared(tokens) + places)  # (B, 1, D)
        for layer, own, cross in zip(decoder.layers, caches[:half], caches[half:], strict=True):
            module = layer.self_attn
            mask = create_attention_mask(hidden, own)
            fetched = own.update_and_fetch(
                *(heads(project(hidden), module.num_heads) for project in (module.k_proj, module.v_proj))
            )
            hidden = layer.self_attn_layer_norm(hidden + attend(module, hidden, fetched, own, mask))
            over = attend(layer.encoder_attn, hidden, cross.state, cross, None)
            hidden = layer.encoder_attn_layer_norm(hidden + over)
            widened = layer.fc2(layer.activation_fn(layer.fc1(hidden)))
            hidden = layer.final_layer_norm(hidden + widened)
        return self.language.lm_head(hidden)[:, -1]


def attend(module: Any, hidden: mx.array, fetched: Any, cache: Any, mask: Any) -> mx.array:
    """Attention of (B, L, D) over fetched keys and values, projected."""
    queries = heads(module.q_proj(hidden), module.num_heads)
    keys, values = fetched
    output = attention(queries, keys, values, cache, module.scaling, mask)
    return module.out_proj(output.swapaxes(1, 2).flatten(-2))
