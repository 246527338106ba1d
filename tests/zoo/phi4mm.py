"""Phi-4-multimodal: one id a picture that becomes as many embeddings as it has patches; partial, long RoPE; an adapter for
pictures, and one for recordings."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import phi4mm as upstream
from mlx_vlm.models.base import InputEmbeddingsFeatures
from mlx_vlm.models.phi4mm.config import VisionConfig

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
from ._oracle import generate_alone, put_pictures, to_mx
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily, Trace
from .phi3_v import LONG, ORIGINAL_LENGTH, SHORT

IMAGE, AUDIO = -200, 200_011
PATCH, MOST_PATCHES = 4, 12
BANDS = 80
#: The rank of each adapter, and the scale that its settings make.
RANKS = {"vision": (4, 2.0), "speech": (6, 1.5)}
ADAPTED = (
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
)
GRIDS = ((2, 2), (2, 3), (3, 4))  # patches (high, wide)


def build() -> nn.Module:
    """Four layers of 64, three vision blocks of 32 (the last is not used), two audio blocks of 16.

    As a loaded checkpoint: with its vision adapter merged into the layers, and with what mlx-vlm keeps to exchange it.
    """
    model = upstream.Model(
        upstream.ModelConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=4,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_theta=100.0,
            rope_scaling={
                "type": "longrope",
                "short_factor": SHORT[:6],
                "long_factor": LONG[:6],
            },  # type: ignore[dict-item]
            max_position_embeddings=512,
            original_max_position_embeddings=ORIGINAL_LENGTH,
            mm_hidden_size=32,
            eos_token_id=[END_OF_TEXT],
            tie_word_embeddings=False,
            vision_config=VisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                num_hidden_layers=3,
                patch_size=PATCH,
                image_size=4 * PATCH,
            ),
            audio_processor={
                "config": {
                    "attention_dim": 16,
                    "attention_heads": 2,
                    "num_blocks": 2,
                    "linear_units": 16,
                    "input_size": BANDS,
                    "ext_pw_out_channel": 16,
                    "depthwise_seperable_out_channel": 16,
                    "conv_channels": 8,
                    "t5_bias_max_distance": 8,
                }
            },
        )
    )
    head = "language_model.lm_head.weight"
    sound = r"^audio_encoder.*(b1|b2|global_mean|global_invstd)$"
    enliven(
        model,
        seed=22,
        rules=[Rule(head, fan_in(3.0)), Rule(sound, spread(0.2, 1.0))],
        quiet=head,
    )
    random = np.random.RandomState(24)
    paths = [f"{layer}.{part}" for layer in range(4) for part in ADAPTED]
    for name, (rank, scale) in RANKS.items():
        halves: tuple[dict[str, mx.array], ...] = ({}, {})
        for path in paths:
            key = f"language_model.model.layers.{path}.weight"
            outputs, width = weights_of_layer(model, path).shape
            for half, shape in zip(
                halves, ((rank, width), (outputs, rank)), strict=True
            ):
                drawn = 0.4 * random.standard_normal(shape) / shape[1] ** 0.5
                # products are exact
                half[key] = mx.array((np.round(256 * drawn) / 256).astype(np.float32))
        setattr(model, f"_{name}_lora_a", halves[0])
        setattr(model, f"_{name}_lora_b", halves[1])
        setattr(model, f"_{name}_lora_scale", scale)
    model._base_weights = {
        f"language_model.model.layers.{path}.weight": weights_of_layer(model, path)
        for path in paths
    }
    model._active_lora = None
    model.apply_vision_lora()
    mx.eval(model.parameters())
    return model


def weights_of_layer(model: nn.Module, path: str) -> mx.array:
    """The weight of "LAYER.PATH"."""
    layer, group, name = path.split(".")
    weight: mx.array = model.layers[int(layer)][group][name].weight
    return weight


def _request(seed: int, grids: list[tuple[int, int]]) -> Inputs:
    parts = [words(seed, 3)]
    values = np.zeros((len(grids), MOST_PATCHES, 3 * PATCH * PATCH), dtype=np.float32)
    mask = np.zeros((len(grids), MOST_PATCHES), dtype=bool)
    for index, (high, wide) in enumerate(grids):
        parts += [[IMAGE], words(seed + 101 * (index + 1), high * wide // 2)]
        values[index, : high * wide] = pixels(
            seed + 31 * index, high * wide, 3 * PATCH * PATCH
        )
        mask[index, : high * wide] = True
    return {
        "input_ids": ids(*parts),
        "pixel_values": values,
        "pixel_attention_mask": mask,
        "spatial_shapes": np.array(grids, dtype=np.int32),
    }


# One picture of 4, 6 or 12 patches, padded to the most. Two pictures of different sizes.
image, two_images = asks(_request, GRIDS, (GRIDS[2], GRIDS[0]))


def _heard(seed: int, lengths: Sequence[int]) -> Inputs:
    """Recordings of so many frames, padded to the longest with what nobody is to hear, and words after each."""
    random = np.random.RandomState(seed + 104729)
    parts = [words(seed, 2)]
    for index, length in enumerate(lengths):
        parts += [[AUDIO] * -(-length // 8), words(seed + 103 * (index + 1), 4 + index)]
    shape = (len(lengths), max(lengths), BANDS)
    values = random.standard_normal(shape) + random.standard_normal(
        (len(lengths), 1, BANDS)
    )
    found = {
        "input_ids": ids(*parts),
        "input_audio_embeds": values.astype(np.float32),
        "audio_embed_sizes": np.array(
            [-(-length // 8) for length in lengths], dtype=np.int32
        ),
    }
    mask = np.arange(max(lengths))[None] < np.array(lengths)[:, None]
    return {**found, "audio_attention_mask": mask} if len(lengths) > 1 else found


def audio(seed: int, size: int) -> Inputs:
    """One recording of 3, 5 or 9 features."""
    return _heard(seed, [(24, 37, 70)[size]])


def two_audios(seed: int) -> Inputs:
    """Two recordings, of which the first is the shorter one."""
    return _heard(seed, [24, 37])


def picture_and_audio(seed: int) -> Inputs:
    """A picture, and then a recording."""
    seen, heard = image(seed, 1), audio(seed + 1, 1)
    return {
        **seen,
        **heard,
        "input_ids": np.concatenate([seen["input_ids"], heard["input_ids"]], axis=1),
    }


def _embeddings(model: nn.Module, inputs: Inputs) -> mx.array:
    """(1, L, D) of a request with recordings: each by itself, through the projection that goes with its adapter."""
    arrays = to_mx(inputs)
    table, tokens = model.language_model.model.embed_tokens, inputs["input_ids"][0]
    frames = (
        inputs.get(
            "audio_attention_mask", np.ones(inputs["input_audio_embeds"].shape[:2])
        )
        .sum(axis=1)
        .astype(int)
    )
    spectrograms = zip(arrays["input_audio_embeds"], frames.tolist(), strict=True)
    kind = (
        model.audio_projection.vision
        if "pixel_values" in inputs
        else model.audio_projection.speech
    )
    sounds = [
        model.audio_encoder(one[None, :length])[0][0] for one, length in spectrograms
    ]
    features = mx.concatenate(
        [kind.proj_2(nn.gelu(kind.proj_0(one))) for one in sounds]
    )
    pictures: list[mx.array] = []
    if "pixel_values" in inputs:
        seen = (
            arrays[name]
            for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes")
        )
        pictures = model.apply_mm_projector(model.vision_tower(*seen))
    parts, left = [], iter(pictures)
    for token in tokens.tolist():
        parts.append(
            next(left)
            if token == IMAGE
            else table(mx.array([max(token, 0) if token < VOCABULARY else 0]))
        )
    embeds = mx.concatenate(parts)[None]
    counts = [len(part) for part in parts]
    return put_pictures(
        embeds, mx.array(np.repeat(tokens, counts)[None]), AUDIO, features
    )


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's loop over the weights that go with the request: its own, the vision adapter's or the speech adapter's."""
    switch = {True: model.apply_vision_lora, False: model.apply_base_weights}[
        "pixel_values" in inputs
    ]
    switch = (
        model.apply_speech_lora
        if "input_audio_embeds" in inputs and "pixel_values" not in inputs
        else switch
    )
    switch()
    try:
        if "input_audio_embeds" not in inputs:
            return generate_alone(model, inputs, num_tokens)
        embeds = _embeddings(model, inputs)
        blank = {"input_ids": np.zeros(embeds.shape[:2], np.int32)}
        found = InputEmbeddingsFeatures(inputs_embeds=embeds)
        with mock.patch.object(type(model), "get_input_embeddings", return_value=found):
            return generate_alone(model, blank, num_tokens)
    finally:
        model.apply_vision_lora()


FAMILY = TinyFamily(
    name="phi4mm",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    audio=audio,
    two_audios=two_audios,
    picture_and_audio=picture_and_audio,
    greedy=greedy,
    wrong_alone=("text", "two_audios", "picture_and_audio"),
    oracle_note="mlx-vlm's generate_step, its prompt in one chunk, over the weights of the request's own adapter, where it has "
    "those of the request before; recordings are encoded one by one. transformers agrees about texts and recordings "
    "(tests/references).",
    no_pictures_recorded="transformers cuts a picture into crops and joins them with separators; mlx-vlm drops those weights "
    "(phi4mm.py, sanitize: glb_GN and sub_GN) and feeds plain patches",
)
