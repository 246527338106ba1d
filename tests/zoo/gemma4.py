"""Gemma 4 (E2B's shape): sliding and full layers, of which the last share keys and values; inputs for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import gemma4 as upstream

from ._build import Rule, Shape, constant, enliven, fan_in, pixels, spread, text_request
from ._oracle import generate_alone, generate_by_recomputing, put_pictures, to_mx
from ._pictures import prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace

PATCH, POOL, WINDOW, HIDDEN = 4, 2, 8, 64
IMAGE, AUDIO, START, END, VIDEO = PLAIN, PLAIN + 1, PLAIN + 2, PLAIN + 3, PLAIN + 4
GRIDS = ((4, 4), (4, 6), (6, 4))  # patches; a third of each side's pairs are tokens
ROPE = {
    "full_attention": {
        "partial_rotary_factor": 0.5,
        "rope_theta": 100.0,
        "rope_type": "proportional",
    },
    "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"},
}
LAYER_TYPES = ["sliding_attention", "full_attention"] * 2


def experts(random: np.random.RandomState, shape: Shape) -> np.ndarray:
    """(experts, outputs, inputs): each expert keeps the scale of its input."""
    return 1.3 / np.sqrt(shape[-1]) * random.standard_normal(shape)


EMBEDDING = "language_model.model.embed_tokens.weight"
RULES = [
    # Small, and made up for by the last norm: else the current token's own embedding would win every step.
    Rule(EMBEDDING, spread(0.05)),
    Rule(r"language_model\.model\.norm\.weight", spread(1.2, 6.0)),
    Rule(r"embed_tokens_per_layer\.weight", spread(0.4)),
    Rule(r"[qk]_norm\.weight$", spread(0.1, 0.7)),
    Rule(r"layer_scalar$", spread(0.1, 1.0)),
    Rule(r"(position_embedding_table|pos_embedding)$", spread(0.5)),
    Rule(r"switch_glu\.\w+_proj\.weight$", experts),
    Rule(r"router\.(scale|per_expert_scale)$", spread(0.2, 1.0)),
    Rule(r"router\.proj\.weight$", fan_in(2.0)),
    Rule(r"embedding_projection\.weight$", fan_in(0.6)),
    Rule(r"norm\w*\.weight$", spread(0.2, 1.0)),
    Rule(r"(input|output)_min$", constant(np.array(-2.5))),
    Rule(r"(input|output)_max$", constant(np.array(2.5))),
    Rule(r"per_dim_scale$", spread(0.5)),
    Rule(r"depthwise_conv1d\.weight$", fan_in(1.3)),
]

#: E2B and E4B.
SHARING: dict[str, Any] = {
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "use_double_wide_mlp": True,
}
#: 26B-A4B.
EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "use_bidirectional_attention": "vision",
}


def text_of(**more: Any) -> dict[str, Any]:
    """What the text models of all kinds have in common."""
    return {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "sliding_window": WINDOW,
        "layer_types": LAYER_TYPES,
        "rope_parameters": ROPE,
        **more,
    }


def build_with(seed: int, sound: Any = None, **text: Any) -> nn.Module:
    """Four layers of 64, two vision layers of 32, and an encoder of sound, if there is one."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="gemma4",
            image_token_id=IMAGE,
            audio_token_id=AUDIO,
            video_token_id=VIDEO,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(**text_of(**text)),
            audio_config=sound,
            vision_config=upstream.VisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=16,
                global_head_dim=16,
                patch_size=PATCH,
                position_embedding_size=16,
                pooling_kernel_size=POOL,
            ),
        )
    )
    enliven(model, seed=seed, rules=RULES, quiet=EMBEDDING)
    return model


def build() -> nn.Module:
    """E2B's shape."""
    sound = upstream.AudioConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        # transformers takes the first for the number of bands
        subsampling_conv_channels=(128, 16),
        attention_chunk_size=4,
        attention_context_left=5,
        output_proj_dims=24,
    )
    return build_with(92, sound, **SHARING)


def _request(seed: int, grids: list[tuple[int, int]]) -> Inputs:
    """Pictures of one grid of patches, as mlx-vlm's processor stacks them."""
    ids = prompt(
        seed,
        [
            [START, *[IMAGE] * (rows * columns // POOL**2), END]
            for rows, columns in grids
        ],
    )
    rows, columns = grids[0]
    return {
        "input_ids": ids,
        "pixel_values": pixels(seed, len(grids), 3, rows * PATCH, columns * PATCH),
        "mm_token_type_ids": (ids == IMAGE).astype(np.int32),
    }


def image(seed: int, size: int) -> Inputs:
    """One picture of 4 or 6 placeholders, and words after it."""
    request = _request(seed, [GRIDS[size]])
    return request if size < 2 else {**request, **_longer(request, seed)}


def _longer(request: Inputs, seed: int) -> Inputs:
    """Three words more, so that all sizes differ in length."""
    more = np.random.RandomState(seed).randint(1, PLAIN, size=(1, 3)).astype(np.int32)
    ids = np.concatenate([request["input_ids"], more], axis=1)
    return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).astype(np.int32)}


def two_images(seed: int) -> Inputs:
    """Two pictures."""
    return _request(seed, [GRIDS[1], GRIDS[1]])


def frames(
    seed: int, count: int, pool: int, grid: tuple[int, int] = (4, 4)
) -> tuple[list[int], Inputs]:
    """A video's placeholders, each frame's apart after two words for its time, and its patches, of which the last pads."""
    rows, columns = grid
    tokens = [
        [11 + frame, 7, START, *[VIDEO] * (rows * columns // pool**2), END]
        for frame in range(count)
    ]
    patches = np.zeros(
        (1, count, rows * columns + pool**2, 3 * PATCH * PATCH), dtype=np.float32
    )
    patches[:, :, : rows * columns] = pixels(
        seed + 57, 1, count, rows * columns, 3 * PATCH * PATCH
    )
    places = np.full((1, count, rows * columns + pool**2, 2), -1, dtype=np.int32)
    places[:, :, : rows * columns] = np.stack(
        np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1
    ).reshape(-1, 2)
    more = {
        "pixel_values_videos": patches,
        "video_position_ids": places,
        "num_frames_per_video": [count],
    }
    return [token for frame in tokens for token in frame], more


def with_types(ids: np.ndarray, more: Inputs) -> Inputs:
    types = np.where(ids == VIDEO, 2, ids == IMAGE).astype(np.int32)
    return {"input_ids": ids, **more, "mm_token_type_ids": types}


def video(seed: int, size: int) -> Inputs:
    """A video of 2, 3 or 5 frames."""
    tokens, more = frames(seed, (2, 3, 5)[size], POOL)
    return with_types(prompt(seed, [tokens]), more)


def picture_and_video(seed: int) -> Inputs:
    """A picture, a video, and another picture."""
    pictures = two_images(seed)
    rows, columns = GRIDS[1]
    picture = [START, *[IMAGE] * (rows * columns // POOL**2), END]
    tokens, more = frames(seed, 3, POOL)
    return with_types(
        prompt(seed, [picture, tokens, picture]),
        {"pixel_values": pictures["pixel_values"], **more},
    )


# of a recording's spectrogram; four frames are a placeholder
BANDS, FRAMES = 128, (13, 22, 39)


def heard(
    seed: int, counts: Sequence[int], pieces: Sequence[int], width: int
) -> Inputs:
    """Recordings of so many frames, padded to the longest, with so many placeholders each."""
    random = np.random.RandomState(seed + 104729)
    longest = max(counts)
    values = random.standard_normal(
        (len(counts), longest, width)
    ) + random.standard_normal((len(counts), 1, width))
    mask = np.arange(longest)[None] < np.array(counts)[:, None]
    ids = prompt(seed, [[START, *[AUDIO] * count, END] for count in pieces])
    features = (values * mask[..., None]).astype(np.float32)
    return {"input_ids": ids, "input_features": features, "input_features_mask": mask}


def sounds(seed: int, counts: Sequence[int]) -> Inputs:
    """Spectrograms of so many frames, of which the last of each pair, and of each pair of pairs, may be missing."""
    return heard(seed, counts, [-(-count // 4) for count in counts], BANDS)


def audio(seed: int, size: int) -> Inputs:
    """One recording of 4, 6 or 10 placeholders, the last more than the window."""
    return sounds(seed, [FRAMES[size]])


def two_audios(seed: int) -> Inputs:
    """Two recordings, of which the first is the shorter one."""
    return sounds(seed, [FRAMES[1], FRAMES[2]])


def with_picture(seen: Inputs, heard: Inputs) -> Inputs:
    """A request with the media of two, one after the other."""
    ids = np.concatenate([seen["input_ids"], heard["input_ids"]], axis=1)
    types = (ids == IMAGE).astype(np.int32)
    return {**heard, **seen, "input_ids": ids, "mm_token_type_ids": types}


def picture_and_audio(seed: int) -> Inputs:
    """A picture, and then a recording."""
    return with_picture(image(seed, 1), audio(seed + 1, 1))


def greedy_hearing(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's loop, given recordings' features without those behind an end: it puts all of them in."""
    if "input_features" not in inputs:
        return generate_alone(model, inputs, num_tokens)
    features, mask = inputs["input_features"], inputs["input_features_mask"]
    states, is_behind = model.audio_tower(mx.array(features), ~mx.array(mask))
    embedded = model.embed_audio(states).reshape(-1, HIDDEN)[
        mx.array(np.flatnonzero(~np.array(is_behind)))
    ]
    rest = {
        name: value
        for name, value in inputs.items()
        if not name.startswith("input_features")
    }
    embed, ids = model.get_input_embeddings, to_mx(inputs)["input_ids"]

    def with_sound(input_ids: mx.array, *args: Any, **kwargs: Any) -> Any:
        found = embed(input_ids, *args, **kwargs)
        found.inputs_embeds = put_pictures(found.inputs_embeds, ids, AUDIO, embedded)
        return found

    with mock.patch.object(model, "get_input_embeddings", with_sound):
        return generate_alone(model, rest, num_tokens)


def _masks(tokens: np.ndarray) -> tuple[mx.array, mx.array]:
    """(L, L) bools of a full and of a sliding layer: causal, and in the latter whatever lies in the same picture.

    transformers, modeling_gemma4.py, create_masks_for_vision_model.
    """
    distance = np.arange(len(tokens))[:, None] - np.arange(len(tokens))
    is_image = (tokens == IMAGE) | (tokens == VIDEO)
    number = np.cumsum(is_image & ~np.roll(is_image, 1)) * is_image
    same = (number[:, None] == number) & is_image
    return mx.array(distance >= 0), mx.array(
        ((distance >= 0) | same) & (distance < WINDOW)
    )


def greedy_both_ways(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step through the model's own trunk, with the masks that are right."""
    arrays = to_mx(inputs)
    for name in ("mm_token_type_ids", "num_frames_per_video"):
        arrays.pop(name, None)
    prompt = model.get_input_embeddings(**arrays).inputs_embeds
    trunk = model.language_model.model

    def logits(generated: list[int]) -> mx.array:
        tail = (
            trunk.embed_tokens(mx.array([generated], dtype=mx.int32))
            * trunk.embed_scale
        )
        full, sliding = _masks(
            np.append(inputs["input_ids"][0], np.array(generated, dtype=np.int32))
        )
        right = [full if kind == "full_attention" else sliding for kind in LAYER_TYPES]
        with mock.patch.object(type(trunk), "_make_masks", return_value=right):
            hidden = mx.concatenate([prompt, tail], axis=1)
            return model.language_model(None, inputs_embeds=hidden).logits[0, -1]

    return generate_by_recomputing(logits, num_tokens)


FACTS: dict[str, Any] = {
    "text": text_request,
    "image": image,
    "two_images": two_images,
    "video": video,
    "picture_and_video": picture_and_video,
    "window": WINDOW,
    "greedy": generate_alone,
    "oracle_note": "mlx-vlm's generate_step; transformers agrees (tests/references).",
}
HEARS: dict[str, Any] = {
    "audio": audio,
    "two_audios": two_audios,
    "picture_and_audio": picture_and_audio,
    "greedy": greedy_hearing,
}

BOTH_WAYS: dict[str, Any] = {
    **FACTS,
    "greedy": greedy_both_ways,
    "oracle_note": "The whole sequence at each step under masks made here: mlx-vlm's loop lets pictures attend both ways in "
    "full layers too. transformers agrees with what is here (tests/references).",
}

FAMILY = TinyFamily(name="gemma4", build=build, **{**FACTS, **HEARS})
