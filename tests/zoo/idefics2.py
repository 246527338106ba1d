"""Idefics 2: pictures in their own shape, a perceiver that makes as many latents of each, Mistral text."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import idefics2 as upstream
from mlx_vlm.models.idefics2.config import PerceiverConfig

from ._build import Rule, enliven, fan_in, pixels, spread, text_request
from ._oracle import generate_by_recomputing, put_pictures, to_mx
from ._pictures import prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace

PATCH, PER_SIDE, LATENTS, VISION_HEADS = 4, 6, 5, 2
IMAGE, FENCE = PLAIN, PLAIN + 1
#: (high, wide) pixels: as many patches as there are learned positions, fewer, and a part of a patch.
SIZES = ((24, 24), (12, 20), (14, 24))
#: Of two pictures beside each other: parts of a patch that are filled up with padding, in both directions.
BESIDE = ((24, 19), (14, 22))


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32, two layers of perceiver."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="idefics2",
            image_token_id=IMAGE,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                model_type="mistral",
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
            ),
            vision_config=upstream.VisionConfig(
                model_type="idefics2_vision",
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=VISION_HEADS,
                image_size=PATCH * PER_SIDE,
                patch_size=PATCH,
            ),
            perceiver_config=PerceiverConfig(
                model_type="idefics2_perceiver",
                num_key_value_heads=2,
                resampler_depth=2,
                resampler_head_dim=16,
                resampler_n_heads=4,
                resampler_n_latents=LATENTS,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(
        model,
        seed=72,
        rules=[Rule(head, fan_in(3.0)), Rule(r"\.latents$", spread(1.0))],
        quiet=head,
    )
    return model


def _request(seed: int, sizes: Sequence[tuple[int, int]], num_words: int) -> Inputs:
    """Pictures are padded with zeros to the largest of the request."""
    high, wide = (max(size[axis] for size in sizes) for axis in (0, 1))
    padded = np.zeros((1, len(sizes), 3, high, wide), dtype=np.float32)
    mask = np.zeros((1, len(sizes), high, wide), dtype=np.int32)
    for index, (rows, columns) in enumerate(sizes):
        padded[0, index, :, :rows, :columns] = pixels(
            seed + 31 * index, 3, rows, columns
        )
        mask[0, index, :rows, :columns] = 1
    ids = prompt(seed, [[FENCE, *[IMAGE] * LATENTS, FENCE]] * len(sizes), num_words)
    return {"input_ids": ids, "pixel_values": padded, "pixel_attention_mask": mask}


def image(seed: int, size: int) -> Inputs:
    """One picture, always of five latents, and 4, 7 or 10 words after it."""
    return _request(seed, [SIZES[size]], 4 + 3 * size)


def two_images(seed: int) -> Inputs:
    """Two pictures, each padded: whole patches alone are theirs."""
    return _request(seed, BESIDE, 4)


def _states(tower: nn.Module, picture: mx.array) -> mx.array:
    """(3, H, W) of whole patches -> (1, patches, D): the tower written out, with even positions and tanh GELU."""
    patches = tower.embeddings.patch_embedding(picture.transpose(1, 2, 0)[None])
    rows, columns = (
        np.floor(np.arange(n) * (PER_SIDE / n) + 1e-6).astype(int)
        for n in patches.shape[1:3]
    )
    places = mx.array((rows[:, None] * PER_SIDE + columns).reshape(-1))
    hidden = patches.flatten(1, 2) + tower.embeddings.position_embedding(places)
    for layer in tower.encoder.layers:
        hidden = hidden + layer.self_attn(layer.layer_norm1(hidden))
        hidden = hidden + layer.mlp.fc2(
            nn.gelu_approx(layer.mlp.fc1(layer.layer_norm2(hidden)))
        )
    return tower.post_layernorm(hidden)


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, pictures encoded here without any padding."""
    arrays = to_mx(inputs)
    language = model.language_model
    embeds = language.embed_tokens(arrays["input_ids"])
    if "pixel_values" in arrays:
        found = []
        for picture, mask in zip(
            arrays["pixel_values"][0], inputs["pixel_attention_mask"][0], strict=True
        ):
            high, wide = (
                int(mask.any(axis=axis).sum()) // PATCH * PATCH for axis in (1, 0)
            )
            found.append(
                model.connector(_states(model.vision_model, picture[:, :high, :wide]))[
                    0
                ]
            )
        embeds = put_pictures(embeds, arrays["input_ids"], IMAGE, mx.concatenate(found))

    def logits(generated: list[int]) -> mx.array:
        tail = language.embed_tokens(mx.array([generated], dtype=mx.int32))
        return language(
            None, inputs_embeds=mx.concatenate([embeds, tail], axis=1)
        ).logits[0, -1]

    return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="idefics2",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="The whole sequence at each step, the tower written out here. mlx-vlm's has uneven positions that begin at "
    "minus one, another GELU, and attends to padding. transformers agrees with what is here (tests/references).",
)
