"""PLaMo 2.1 VL: Mamba and attention in turn, norms that count from one and from fifths, SigLIP tiles."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import plamo2vl as upstream

from ._build import Rule, asks, enliven, ids, pixels, spread, text_request, words
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

SIDE, PATCH = 8, 4
TOKENS = (SIDE // PATCH) ** 2
IMAGE = PLAIN
NUM_TILES = (1, 2, 4)


def build() -> nn.Module:
    """Four layers of 64, Mamba and attention in turn, and two vision layers of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            image_token_index=IMAGE,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                hidden_size=64,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                hidden_size_per_head=16,
                full_attention_idx=[3],
                rope_theta=100.0,
                rope_local_theta=50.0,
                mamba_d_state=8,
                mamba_num_heads=4,
                intermediate_size=96,
                vocab_size=VOCABULARY,
                max_position_embeddings=1024,
            ),
            vision_config=upstream.VisionConfig(
                hidden_size=32,
                num_hidden_layers=2,
                intermediate_size=64,
                num_attention_heads=2,
                patch_size=PATCH,
                image_size=SIDE,
                image_token_id=IMAGE,
                image_feature_size=32,
                image_proj_hidden_size=48,
            ),
        )
    )
    head = "language_model.model.embed_tokens.weight"
    rules = [
        Rule(head, spread(0.4)),
        Rule(r"\.A_log$", spread(0.5, -0.5)),
        Rule(r"\.dt_bias$", spread(0.5, -1.0)),
        Rule(r"mixer\.D$", spread(0.3, 1.0)),
        Rule(r"(dt|B|C)_norm_weight$", spread(0.2, 1.0)),
        Rule(r"mixer\.[qk]_weight$", spread(0.2, 1.0)),
        Rule(r"post_\w+_norm\.weight$", spread(0.2, 0.5)),
        Rule(r"norm\d?\.weight$", spread(0.2)),
        Rule(r"image_proj\.bias\d\.bias$", spread(0.2)),
    ]
    enliven(model, seed=90, rules=rules, quiet=head)
    return model


def request(seed: int, tiles: list[int]) -> Inputs:
    """Pictures of so many tiles, words after each."""
    parts = [words(seed, 3)]
    for index, count in enumerate(tiles):
        parts += [
            [IMAGE] * (TOKENS * count),
            words(seed + 101 * (index + 1), 4 + index),
        ]
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(seed, 1, sum(tiles), 3, SIDE, SIDE),
    }


# One picture of 1, 2 or 4 tiles. A picture of two tiles and one of a single tile.
image, two_images = asks(request, NUM_TILES, (2, 1))


FAMILY = TinyFamily(
    name="plamo2vl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step.",
    no_reference="transformers has no class of this family (PLaMo 2.1 VL is remote code)",
)
