"""Gemma 3n: alternating updates, per-layer embeddings, sliding and full layers, and layers that share others' keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import gemma3n as upstream

from ._build import Rule, enliven, fan_in, ids, spread, text_request, words
from ._oracle import generate_by_recomputing, to_mx
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace

WINDOW, PER_LAYER = 8, 16
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 16
SLIDING, FULL = "sliding_attention", "full_attention"
LAYER_TYPES = [SLIDING, SLIDING, FULL, SLIDING, FULL]
NUM_SHARED = 2
# declared an int upstream, and indexed as a list
INTERMEDIATE: Any = [96] * len(LAYER_TYPES)
ROPE_SLIDING, ROPE_FULL = 100.0, 1000.0

# As in the real vocabulary: text, then the vision tower's hard tokens, then the audio tower's.
VISION_OFFSET, AUDIO_OFFSET = PLAIN, PLAIN + 16
END_OF_IMAGE, IMAGE, END_OF_AUDIO, AUDIO = PLAIN, PLAIN + 1, PLAIN + 16, PLAIN + 17
FEATURES_PER_IMAGE = 6  # 256 in the real model, for pictures of any size
# 188 for 30 s, and 128 bands, in the real model
FEATURES_PER_RECORDING, FRAMES_PER_FEATURE, BANDS = 6, 16, 16


class _Nothing(nn.Module):
    """In the place of the vision tower: the real one (MobileNet V5) cannot be made tiny."""

    def __init__(self, config: object) -> None:
        super().__init__()


def _config() -> upstream.ModelConfig:
    return upstream.ModelConfig(
        model_type="gemma3n",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        image_token_index=IMAGE,
        image_token_id=IMAGE,
        audio_token_id=AUDIO,
        vision_soft_tokens_per_image=FEATURES_PER_IMAGE,
        audio_soft_tokens_per_image=FEATURES_PER_RECORDING,
        eos_token_id=[END_OF_TEXT],
        text_config=upstream.TextConfig(
            model_type="gemma3n_text",
            hidden_size=HIDDEN,
            num_hidden_layers=len(LAYER_TYPES),
            intermediate_size=INTERMEDIATE,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=VOCABULARY,
            vocab_size_per_layer_input=PLAIN,
            laurel_rank=8,
            altup_coef_clip=120.0,
            hidden_size_per_layer_input=PER_LAYER,
            rope_local_base_freq=ROPE_SLIDING,
            rope_theta=ROPE_FULL,
            sliding_window=WINDOW,
            activation_sparsity_pattern=[0.7, 0.7, 0.0, 0.0, 0.0],
            num_kv_shared_layers=NUM_SHARED,
            layer_types=LAYER_TYPES,
        ),
        vision_config=upstream.VisionConfig(
            hidden_size=32, vocab_size=16, vocab_offset=VISION_OFFSET
        ),
        audio_config=upstream.AudioConfig(
            hidden_size=32,
            # its last id is what fills a short recording up
            vocab_size=VOCABULARY - AUDIO_OFFSET,
            vocab_offset=AUDIO_OFFSET,
            input_feat_size=BANDS,
            conf_num_attention_heads=2,
            conf_num_hidden_layers=2,
            conf_attention_chunk_size=4,
            conf_attention_context_left=5,
            sscp_conv_channel_size=(8, 4),
        ),
    )


def build() -> nn.Module:
    """Five layers of 64; the last two, one of each kind, share the keys and values of the two before them."""
    with mock.patch.multiple("mlx_vlm.models.gemma3n.gemma3n", VisionModel=_Nothing):
        model = upstream.Model(_config())
    embedding = "language_model.model.embed_tokens.weight"
    rules = [
        # Small, and made up for by the last norm: else the current token's own embedding would win every step.
        Rule(embedding, spread(0.06)),
        Rule(r"language_model\.model\.norm\.weight", spread(0.95, 4.4)),
        Rule(r"embed_tokens_per_layer\.weight", spread(0.25)),
        Rule(r"modality_router\.weight", fan_in(0.4 * HIDDEN)),
        Rule(r"[qk]_norm\.weight$", spread(0.1, 0.6)),
        Rule(r"per_layer_input_gate\.weight$", fan_in(0.5)),
        Rule(
            r"post_(attention_layer|feedforward_layer|per_layer_input_|laurel_)norm\.weight$",
            spread(0.1, 0.6),
        ),
        Rule(r"correct_output_scale$", spread(0.3, 1.0)),
        Rule(r"(hard|soft)_embedding_norm\.weight$", spread(0.2, 1.0)),
        Rule(r"audio_tower.*norm\.weight$", spread(0.2, 1.0)),
        Rule(r"per_dim_scale$", spread(0.5)),
    ]
    enliven(model, seed=18, rules=rules, quiet=embedding)
    return model


def _features(seed: int, num_images: int) -> np.ndarray:
    """(images, FEATURES_PER_IMAGE, D): what the vision tower and its embedder, which ends in a norm, would return."""
    random = np.random.RandomState(seed + 7919)
    values = random.standard_normal(
        (num_images, FEATURES_PER_IMAGE, HIDDEN)
    ) + random.standard_normal(HIDDEN)
    return (values / np.sqrt(np.mean(values**2, axis=-1, keepdims=True))).astype(
        np.float32
    )


def _request(seed: int, num_images: int, num_words: int) -> Inputs:
    parts = [words(seed, 3)]
    for index in range(num_images):
        parts += [
            [IMAGE] * FEATURES_PER_IMAGE,
            [END_OF_IMAGE],
            words(seed + 101 * (index + 1), num_words + index),
        ]
    return {
        "input_ids": ids(*parts),
        "pixel_values": np.zeros((num_images, 3, 4, 4), dtype=np.float32),
        "cached_image_features": _features(seed, num_images),
    }


def image(seed: int, size: int) -> Inputs:
    """One picture, always of six features, and 4, 7 or 10 words after it."""
    return _request(seed, 1, 4 + 3 * size)


def two_images(seed: int) -> Inputs:
    """Two pictures."""
    return _request(seed, 2, 4)


def sound(seed: int, frames: Sequence[int]) -> Inputs:
    """Spectrograms (recordings, longest, BANDS) and which frames of each are its own."""
    random = np.random.RandomState(seed + 104729)
    longest = max(frames)
    values = random.standard_normal(
        (len(frames), longest, BANDS)
    ) + random.standard_normal((len(frames), 1, BANDS))
    mask = np.arange(longest)[None] < np.array(frames)[:, None]
    return {"input_features": values.astype(np.float32), "input_features_mask": mask}


def _heard(seed: int, frames: Sequence[int], num_words: int) -> list[list[int]]:
    parts = [words(seed, 2)]
    for index in range(len(frames)):
        parts += [
            [AUDIO] * FEATURES_PER_RECORDING,
            [END_OF_AUDIO],
            words(seed + 103 * (index + 1), num_words + index),
        ]
    return parts


def audio(seed: int, size: int) -> Inputs:
    """One recording of 3 to 6 features' length, always of six, and 4, 7 or 10 words after it."""
    frames = [FRAMES_PER_FEATURE * (3 + size) - 7]
    return {
        "input_ids": ids(*_heard(seed, frames, 4 + 3 * size)),
        **sound(seed, frames),
    }


def two_audios(seed: int) -> Inputs:
    """Two recordings, of which the second is the longer one."""
    frames = [40, 90]
    return {"input_ids": ids(*_heard(seed, frames, 4)), **sound(seed, frames)}


def picture_and_audio(seed: int) -> Inputs:
    """A picture, and then a recording."""
    seen, frames = _request(seed, 1, 4), [70]
    heard = ids(*_heard(seed + 7, frames, 5))
    return {
        **seen,
        "input_ids": np.concatenate([seen["input_ids"], heard], axis=1),
        **sound(seed, frames),
    }


def _embeddings(model: nn.Module, arrays: dict, tokens: mx.array) -> mx.array:
    """(1, L, D): words scaled by the root of the width; hard and soft tokens as the embedders of the towers give them.

    transformers scales inside the embedding (modeling_gemma3n.py, Gemma3nTextScaledWordEmbedding) and puts hard
    and soft tokens in afterwards.
    """
    hidden = model.language_model.model.embed_tokens(tokens) * HIDDEN**0.5
    if not {"pixel_values", "input_features"} & arrays.keys():
        return hidden
    for embedder, first, end in (
        (model.embed_vision, VISION_OFFSET, AUDIO_OFFSET),
        (model.embed_audio, AUDIO_OFFSET, VOCABULARY),
    ):
        hard = (tokens >= first) & (tokens < end)
        hidden = mx.where(
            hard[..., None], _hard(embedder, mx.where(hard, tokens - first, 0)), hidden
        )
    if "pixel_values" in arrays:
        soft = np.flatnonzero(np.array(tokens[0]) == IMAGE)
        hidden[:, mx.array(soft)] = arrays["cached_image_features"].reshape(
            1, -1, HIDDEN
        )
    if "input_features" in arrays:
        soft = np.flatnonzero(np.array(tokens[0]) == AUDIO)
        hidden[:, mx.array(soft)] = _recordings(model, arrays).reshape(1, -1, HIDDEN)
    return hidden


def _hard(embedder: nn.Module, tokens: mx.array) -> mx.array:
    """(1, L, D) of ids that count from the embedder's first."""
    looked_up = _rms(embedder.embedding(tokens)) * embedder.hard_embedding_norm.weight
    return _rms(embedder.embedding_projection(looked_up))


def _recordings(model: nn.Module, arrays: dict) -> mx.array:
    """(recordings, FEATURES_PER_RECORDING, D): what the tower hears, and the last hard token behind a recording's end."""
    states, is_behind = model.audio_tower(
        arrays["input_features"], ~arrays["input_features_mask"]
    )
    embedder = model.embed_audio
    features = _rms(
        embedder.embedding_projection(
            _rms(states) * embedder.soft_embedding_norm.weight
        )
    )
    filler = _hard(embedder, mx.array([[VOCABULARY - AUDIO_OFFSET - 1]]))
    features = mx.where(is_behind[..., None], filler, features)
    missing = FEATURES_PER_RECORDING - features.shape[1]
    return mx.concatenate(
        [
            features,
            mx.repeat(mx.repeat(filler, missing, axis=1), len(features), axis=0),
        ],
        axis=1,
    )


def _rms(x: mx.array) -> mx.array:
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _rotate(x: mx.array, base: float) -> mx.array:
    """Half-split rotation of (1, H, L, D) by positions 0..L-1."""
    half = x.shape[-1] // 2
    angles = mx.arange(x.shape[2])[:, None] * base ** (-mx.arange(half) / half)
    cos, sin, low, high = mx.cos(angles), mx.sin(angles), x[..., :half], x[..., half:]
    return mx.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _heads(x: mx.array, heads: int) -> mx.array:
    """(1, L, H * D) -> (1, H, L, D)"""
    return x.reshape(1, x.shape[1], heads, HEAD_DIM).transpose(0, 2, 1, 3)


def _mask(length: int, kind: str) -> mx.array:
    """(L, L) bool: causal; a sliding layer sees the last `WINDOW` positions, its own included."""
    distance = mx.arange(length)[:, None] - mx.arange(length)[None, :]
    return (distance >= 0) & (distance < (WINDOW if kind == SLIDING else length))


def _attention(
    attention: nn.Module, x: mx.array, kind: str, shared: dict | None
) -> tuple[mx.array, tuple]:
    """The output, and this layer's keys and values; those of `shared` are used if given.

    A sharing layer turns its queries by their own positions, as any layer does (transformers,
    modeling_gemma3n.py, Gemma3nTextAttention.forward).
    """
    base = ROPE_SLIDING if kind == SLIDING else ROPE_FULL
    queries = _rotate(attention.q_norm(_heads(attention.q_proj(x), HEADS)), base)
    if shared is None:
        keys = _rotate(attention.k_norm(_heads(attention.k_proj(x), KV_HEADS)), base)
        values = _rms(_heads(attention.v_proj(x), KV_HEADS))
    else:
        keys, values = shared[kind]
    mixed = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=1.0, mask=_mask(x.shape[1], kind)
    )
    return attention.o_proj(mixed.transpose(0, 2, 1, 3).reshape(1, x.shape[1], -1)), (
        keys,
        values,
    )


def _layer(
    layer: nn.Module,
    streams: mx.array,
    kind: str,
    per_layer: mx.array,
    shared: dict | None,
) -> tuple:
    """One layer over (4, 1, L, D) streams; returns them and the layer's keys and values."""
    predictions = layer.altup.predict(streams)
    active = predictions[0]
    normed = layer.input_layernorm(active)
    attended, state = _attention(layer.self_attn, normed, kind, shared)
    mixed = (
        active + layer.post_attention_layernorm(attended) + layer.laurel(normed)
    ) * 2.0**-0.5
    activated = mixed + layer.post_feedforward_layernorm(
        layer.mlp(layer.pre_feedforward_layernorm(mixed))
    )
    corrected = layer.altup.correct(predictions, activated)
    gate = nn.gelu_approx(
        layer.per_layer_input_gate(corrected[0] * layer.altup.correct_output_scale)
    )
    added = layer.post_per_layer_input_norm(
        layer.per_layer_projection(gate * per_layer)
    )
    return mx.concatenate([corrected[:1], corrected[1:] + added]), state


def _same_magnitude(stream: mx.array, target: mx.array) -> mx.array:
    magnitude = mx.sqrt(mx.maximum(mx.mean(stream**2, axis=-1, keepdims=True), 1e-5))
    return stream * mx.sqrt(mx.mean(target**2, axis=-1, keepdims=True)) / magnitude


def _per_layer_inputs(
    text_model: nn.Module, tokens: mx.array, hidden: mx.array
) -> mx.array:
    """(1, L, layers, PER_LAYER): ids outside the text vocabulary count as id 0."""
    shape = (*tokens.shape, len(LAYER_TYPES), -1)
    looked_up = (
        text_model.embed_tokens_per_layer(mx.where(tokens < PLAIN, tokens, 0)).reshape(
            shape
        )
        * PER_LAYER**0.5
    )
    projected = (text_model.per_layer_model_projection(hidden) * HIDDEN**-0.5).reshape(
        shape
    )
    return (text_model.per_layer_projection_norm(projected) + looked_up) * 2.0**-0.5


def _logits(model: nn.Module, tokens: mx.array, hidden: mx.array) -> mx.array:
    """(V,) after the last of (1, L) tokens whose embeddings are (1, L, D), computed from nothing."""
    text_model = model.language_model.model
    per_layer = _per_layer_inputs(text_model, tokens, hidden)
    streams = mx.stack(
        [
            hidden,
            *[_same_magnitude(p(hidden), hidden) for p in text_model.altup_projections],
        ]
    )
    states: dict[str, tuple] = {}
    for index, (layer, kind) in enumerate(
        zip(text_model.layers, LAYER_TYPES, strict=True)
    ):
        sharing = index >= len(LAYER_TYPES) - NUM_SHARED
        streams, state = _layer(
            layer, streams, kind, per_layer[:, :, index], states if sharing else None
        )
        states[kind] = state
    unembedded = [
        _same_magnitude(projection(stream), streams[0])
        for projection, stream in zip(
            text_model.altup_unembed_projections, streams[1:], strict=True
        )
    ]
    final = text_model.norm(mx.mean(mx.stack([streams[0], *unembedded]), axis=0)[:, -1])
    cap = model.config.text_config.final_logit_softcapping
    return (mx.tanh(text_model.embed_tokens.as_linear(final) / cap) * cap)[0]


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step."""
    arrays = to_mx(inputs)

    def logits(generated: list[int]) -> mx.array:
        tokens = mx.concatenate(
            [arrays["input_ids"], mx.array([generated], dtype=mx.int32)], axis=1
        )
        return _logits(model, tokens, _embeddings(model, arrays, tokens))

    return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="gemma3n",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    audio=audio,
    two_audios=two_audios,
    picture_and_audio=picture_and_audio,
    window=WINDOW,
    greedy=greedy,
    oracle_note="The whole sequence at each step, attention and layers written out here over the model's own weights. "
    "mlx-vlm's loop is wrong twice: prompt embeddings lack the root of the width, and layers that share keys turn "
    "their queries by the length of the chunk too far. transformers agrees with what is here (tests/references).",
)
