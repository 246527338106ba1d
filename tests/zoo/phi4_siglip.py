"""Phi-4 with SigLIP 2: pictures of any shape as a padded list of patches, one id of -200 for each; Phi-3 text."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import phi4_siglip as upstream

from ._build import Rule, enliven, fan_in, pixels, text_request
from ._oracle import generate_from_embeddings, put_pictures
from ._pictures import expanded, prompt
from ._types import END_OF_TEXT, Inputs, TinyFamily, Trace

PATCH, MOST_PATCHES, NO_TOKEN = 4, 12, -200
GRIDS = ((2, 2), (2, 3), (3, 4))
#: More than the zoo's other families have: mlx-vlm looks -200 up in the embedding before it puts the picture there.
VOCABULARY = 256


def build() -> nn.Module:
    """Four layers of 64, three vision layers of 32 of which two count."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="phi4_siglip",
            mm_hidden_size=32,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
            ),
            vision_config=upstream.VisionConfig(
                num_hidden_layers=3,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                patch_size=PATCH,
                num_patches=9,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(model, seed=82, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


def _request(seed: int, grids: Sequence[tuple[int, int]], num_words: int) -> Inputs:
    patches = np.zeros((len(grids), MOST_PATCHES, 3 * PATCH * PATCH), dtype=np.float32)
    mask = np.zeros((len(grids), MOST_PATCHES), dtype=np.int32)
    for index, (rows, columns) in enumerate(grids):
        patches[index, : rows * columns] = pixels(
            seed + 31 * index, rows * columns, 3 * PATCH * PATCH
        )
        mask[index, : rows * columns] = 1
    return {
        "input_ids": prompt(seed, [[NO_TOKEN]] * len(grids), num_words),
        "pixel_values": patches,
        "pixel_attention_mask": mask,
        "spatial_shapes": np.array(grids, dtype=np.int32),
    }


def image(seed: int, size: int) -> Inputs:
    """One picture of 4, 6 or 12 patches, and 4, 5 or 6 words after it."""
    return _request(seed, [GRIDS[size]], 4 + size)


def two_images(seed: int) -> Inputs:
    """Two pictures of different shapes."""
    return _request(seed, [GRIDS[1], GRIDS[2]], 4)


def _spread(new: int, old: int) -> np.ndarray:
    """(new, old): triangles around each new place, as wide as the step where there are fewer new places than old."""
    width = max(old / new, 1.0)
    far = (
        np.abs(np.arange(old) + 0.5 - (np.arange(new)[:, None] + 0.5) * old / new)
        / width
    )
    weights = np.clip(1 - far, 0, None)
    return weights / weights.sum(axis=1, keepdims=True)


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, pictures encoded one by one, with positions as SigLIP 2 resizes them."""
    tower, projector = model.vision_tower.vision_tower.vision_model, model.mm_projector
    table = np.array(tower.embeddings.position_embedding.weight).reshape(3, 3, -1)
    pictures: list[mx.array] = []
    for rows, columns in inputs.get(
        "spatial_shapes", np.zeros((0, 2), dtype=np.int32)
    ).tolist():
        patches = mx.array(inputs["pixel_values"][len(pictures), : rows * columns])[
            None
        ]
        positions = np.einsum(
            "yY,xX,YXd->yxd", _spread(rows, 3), _spread(columns, 3), table
        )
        hidden = tower.embeddings.patch_embedding(patches) + mx.array(
            positions.reshape(1, rows * columns, -1), mx.float32
        )
        for layer in tower.encoder.layers[:-1]:  # the last but one is taken
            hidden = layer(hidden)
        pictures.append(projector(hidden[0]))
    tokens = mx.array(
        expanded(inputs["input_ids"], NO_TOKEN, [len(picture) for picture in pictures])
    )
    embeds = model.language_model.model.embed_tokens(mx.maximum(tokens, 0))
    if pictures:
        embeds = put_pictures(embeds, tokens, NO_TOKEN, mx.concatenate(pictures))
    return generate_from_embeddings(model, embeds, num_tokens)


FAMILY = TinyFamily(
    name="phi4_siglip",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="The whole sequence at each step, SigLIP 2's positions resized as in transformers and no padding beside a "
    "picture: mlx-vlm resizes bicubically and lets patches attend to padding (phi4_siglip/vision.py:87, :133). transformers "
    "agrees, in whose classes the published model is put together (LLaVA, SigLIP 2, Phi-3).",
    wrong_alone=("image_0", "image_2"),
)
