"""MiniCPM-o: Qwen3-VL's language model with plain positions; slices of any shape through a resampler; Whisper's encoder."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import minicpmo as upstream

from ._build import (
    Rule,
    asks,
    enliven,
    fan_in,
    ids,
    pixels,
    spread,
    text_request,
    words,
)
from ._oracle import generate_alone, generate_by_recomputing, nothing_remembered, to_mx
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace

UNKNOWN, START, END, AUDIO_START, AUDIO_END = range(PLAIN, PLAIN + 5)
BANDS, WIDTH, SOUND_HEADS = 80, 16, 2
#: States of the encoder that are one feature, and that see each other: a fifth of a second, as the whole is small.
POOLED, CHUNK = 5, 10
PATCH, QUERIES = 4, 4
# patches (high, wide) of a picture's slices
SLICES = (((2, 3),), ((2, 2), (3, 2)), ((3, 3), (2, 4), (2, 4)))


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32, four queries a slice; two layers of 16 that hear."""
    model = upstream.Model(
        upstream.ModelConfig(
            query_num=QUERIES,
            patch_size=PATCH,
            image_size=8 * PATCH,
            init_tts=False,
            audio_pool_step=POOLED,
            audio_chunk_length=CHUNK / 50,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                model_type="qwen3",
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                rms_norm_eps=1e-6,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
                max_position_embeddings=512,
                rope_scaling={"type": "default", "mrope_section": [4, 2, 2]},
            ),
            vision_config=upstream.VisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=8 * PATCH,
                patch_size=PATCH,
            ),
            audio_config=upstream.AudioConfig(
                d_model=WIDTH,
                encoder_layers=2,
                encoder_attention_heads=SOUND_HEADS,
                encoder_ffn_dim=4 * WIDTH,
                num_mel_bins=BANDS,
                max_source_positions=1500,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [Rule(head, fan_in(3.0)), Rule(r"resampler\.(query|proj)$", spread(0.3))]
    enliven(model, seed=37, rules=rules, quiet=head)
    return model


def _request(seed: int, pictures: list[tuple[tuple[int, int], ...]]) -> Inputs:
    tokens, bounds, slices, sizes = words(seed, 3), [], [], []
    for index, picture in enumerate(pictures):
        for number, (high, wide) in enumerate(picture):
            bounds.append([len(tokens) + 1, len(tokens) + 1 + QUERIES])
            tokens += [START, *[UNKNOWN] * QUERIES, END]
            slices.append(
                pixels(seed + 31 * index + number, 3, PATCH, PATCH * high * wide)
            )
            sizes.append([high, wide])
        tokens += words(seed + 101 * (index + 1), 4)
    return {
        "input_ids": ids(tokens),
        "pixel_values": [slices],
        "tgt_sizes": [np.array(sizes, dtype=np.int32)],
        "image_bound": [np.array(bounds, dtype=np.int32)],
    }


# One picture of 1, 2 or 3 slices. Pictures of two slices and of one.
image, two_images = asks(_request, SLICES, (SLICES[1], SLICES[0]))


def _heard(seed: int, recordings: Sequence[Sequence[int]]) -> Inputs:
    """Recordings in pieces of so many frames, padded to the longest with what nobody is to hear, and words after each."""
    random = np.random.RandomState(seed + 104729)
    tokens, bounds = words(seed, 2), []
    for index, pieces in enumerate(recordings):
        count = sum((frames + 1) // 2 // POOLED for frames in pieces)
        bounds.append([len(tokens) + 1, len(tokens) + 1 + count])
        tokens += [
            AUDIO_START,
            *[UNKNOWN] * count,
            AUDIO_END,
            *words(seed + 103 * (index + 1), 4 + index),
        ]
    lengths = [frames for pieces in recordings for frames in pieces]
    shape = (len(lengths), BANDS, max(lengths))
    values = random.standard_normal(shape) + 2 * random.standard_normal((*shape[:2], 1))
    return {
        "input_ids": ids(tokens),
        "audio_features": values.astype(np.float32),
        "audio_feature_lens": [lengths],
        "audio_bounds": [np.array(bounds, dtype=np.int32)],
    }


def audio(seed: int, size: int) -> Inputs:
    """One recording of 3, 6 or 9 features: of one chunk and a half, of three, and of two pieces."""
    return _heard(seed, [([31], [60], [60, 31])[size]])


def two_audios(seed: int) -> Inputs:
    """Two recordings, of which the first is the shorter one and has an odd number of frames."""
    return _heard(seed, [[31], [60]])


def picture_and_audio(seed: int) -> Inputs:
    """A picture, and then a recording."""
    seen, heard = image(seed, 1), audio(seed + 1, 1)
    (bounds,), length = heard["audio_bounds"], seen["input_ids"].shape[1]
    both = np.concatenate([seen["input_ids"], heard["input_ids"]], axis=1)
    return {**seen, **heard, "input_ids": both, "audio_bounds": [bounds + length]}


def _encoded(model: nn.Module, piece: mx.array) -> mx.array:
    """(features, D) of the spectrogram (1, bands, frames) of a piece, by itself: each state sees its chunk and those before."""
    tower = model.audio_tower
    hidden = nn.gelu(tower.conv2(nn.gelu(tower.conv1(piece.swapaxes(1, 2)))))[0]
    hidden = hidden + tower.embed_positions.weight[: len(hidden)]
    places = np.arange(len(hidden)) // CHUNK
    hidden_from = mx.array(
        np.where(places[None] > places[:, None], -np.inf, 0).astype(np.float32)
    )
    for layer in tower.layers:
        attend, normed = layer.self_attn, layer.self_attn_layer_norm(hidden)
        queries, keys, values = (
            project(normed).reshape(len(hidden), SOUND_HEADS, -1).swapaxes(0, 1)
            for project in (attend.q_proj, attend.k_proj, attend.v_proj)
        )
        scores = queries @ keys.swapaxes(1, 2) * attend.head_dim**-0.5 + hidden_from
        hidden = hidden + attend.out_proj(
            (mx.softmax(scores, axis=-1) @ values).swapaxes(0, 1).flatten(1)
        )
        hidden = hidden + layer.fc2(nn.gelu(layer.fc1(layer.final_layer_norm(hidden))))
    projector = model.audio_projection_layer
    states = projector.linear2(nn.relu(projector.linear1(tower.layer_norm(hidden))))
    count = len(hidden) // POOLED
    return states[: count * POOLED].reshape(count, POOLED, -1).mean(axis=1)


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's loop; with recordings, the whole sequence at each step, and these as they are spelled out here."""
    if "audio_features" not in inputs:
        return generate_alone(model, inputs, num_tokens)
    arrays = to_mx(inputs)
    seen = {
        name: arrays[name]
        for name in ("pixel_values", "tgt_sizes", "image_bound")
        if name in arrays
    }
    embeds = model.get_input_embeddings(arrays["input_ids"], **seen).inputs_embeds
    pieces = zip(arrays["audio_features"], inputs["audio_feature_lens"][0], strict=True)
    features = mx.concatenate(
        [_encoded(model, piece[None, :, :length]) for piece, length in pieces]
    )
    places = np.concatenate(
        [np.arange(first, end) for first, end in inputs["audio_bounds"][0]]
    )
    embeds[:, mx.array(places)] = features[None]
    language = model.language_model

    def logits(generated: list[int]) -> mx.array:
        hidden = mx.concatenate(
            [
                embeds,
                language.model.embed_tokens(mx.array([generated], dtype=mx.int32)),
            ],
            axis=1,
        )
        positions = mx.broadcast_to(mx.arange(hidden.shape[1]), (3, *hidden.shape[:2]))
        blank = mx.zeros(hidden.shape[:2], mx.int32)
        return language(blank, inputs_embeds=hidden, position_ids=positions).logits[
            0, -1
        ]

    with nothing_remembered(model):
        return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="minicpmo",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    audio=audio,
    two_audios=two_audios,
    picture_and_audio=picture_and_audio,
    greedy=greedy,
    wrong_alone=("audio_0", "two_audios"),
    oracle_note="mlx-vlm's generate_step with a clean language model. Its encoder of sound lets every state see all, and its "
    "pieces of a recording are recordings to it: recordings are encoded by what is here, over the model's own weights, and "
    "transformers' layers of Whisper agree (tests/references).",
    no_pictures_recorded="transformers has the language model (Qwen3) and the layers that hear (Whisper), and not the family, "
    "which is remote code",
)
