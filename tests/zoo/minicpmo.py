"""MiniCPM-o: Qwen3-VL's language model with plain positions; slices of any shape through a resampler."""

from __future__ import annotations

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import minicpmo as upstream

from ._build import Rule, asks, enliven, fan_in, ids, pixels, spread, text_request, words
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

UNKNOWN, START, END = PLAIN, PLAIN + 1, PLAIN + 2
PATCH, QUERIES = 4, 4
SLICES = (((2, 3),), ((2, 2), (3, 2)), ((3, 3), (2, 4), (2, 4)))  # patches (high, wide) of a picture's slices


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32, four queries a slice."""
    model = upstream.Model(
        upstream.ModelConfig(
            query_num=QUERIES,
            patch_size=PATCH,
            image_size=8 * PATCH,
            init_audio=False,
            init_tts=False,
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
            slices.append(pixels(seed + 31 * index + number, 3, PATCH, PATCH * high * wide))
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


FAMILY = TinyFamily(
    name="minicpmo",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step with a clean language model.",
    only_texts_recorded="transformers has the language model (Qwen3) and not the family, which is remote code",
)
