"""InternVL 3.5 as transformers publishes it: InternViT tiles, pixels shuffled together by two, Qwen3 text."""

from __future__ import annotations

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import internvl as upstream

from ._build import Rule, asks, enliven, fan_in, pixels, spread, text_request
from ._oracle import generate_alone, with_exact_gelu
from ._pictures import prompt
from ._types import PLAIN, VOCABULARY, Inputs, TinyFamily, Trace

TILE, PATCH = 16, 4
TOKENS_PER_TILE = (TILE // PATCH // 2) ** 2
NUM_TILES = (1, 3, 5)  # a thumbnail alone, or tiles and then the thumbnail
IMAGE, START, END = PLAIN, PLAIN + 1, PLAIN + 2


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32 whose layer scales are not small."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="internvl",
            image_token_id=IMAGE,
            text_config=upstream.TextConfig(
                model_type="qwen3",
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                rms_norm_eps=1e-6,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
                max_position_embeddings=1024,
                tie_word_embeddings=False,
            ),
            vision_config=upstream.VisionConfig(
                model_type="internvl_vision",
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=TILE,
                patch_size=PATCH,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"(cls_token|position_embeddings)$", spread(0.5)),
        Rule(r"lambda_\d$", spread(0.2, 0.8)),
    ]
    enliven(model, seed=34, rules=rules, quiet=head)
    return model


def request(seed: int, tiles: list[int]) -> Inputs:
    """Pictures of the given numbers of tiles, as ``InternVLChatProcessor`` lays them out."""
    return {
        "input_ids": prompt(
            seed,
            [[START, *[IMAGE] * (TOKENS_PER_TILE * number), END] for number in tiles],
        ),
        "pixel_values": np.concatenate(
            [pixels(seed + 31 * i, 1, n, 3, TILE, TILE) for i, n in enumerate(tiles)],
            axis=1,
        ),
    }


# One picture of 1, 3 or 5 tiles. A picture of three tiles and one of a single tile.
image, two_images = asks(request, NUM_TILES, (3, 1))


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's own loop, with the activation that the checkpoint's configuration names."""
    with with_exact_gelu(model):
        return generate_alone(model, inputs, num_tokens)


FAMILY = TinyFamily(
    name="internvl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with the vision side's exact GELU in place of its tanh form; transformers agrees "
    "(tests/references).",
)
