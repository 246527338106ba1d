"""Molmo 2: features are added to placeholder tokens; all tokens of all pictures see each other."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.molmo2 import config as upstream
from mlx_vlm.models.molmo2.molmo2 import Model

from ._build import Rule, enliven, fan_in, ids, pixels, spread, text_request, words
from ._oracle import generate_by_recomputing, to_mx
from ._types import VOCABULARY, Inputs, TinyFamily, Trace

NEW_IDS = 16
PATCH_TOKEN, COLUMN, START, END, LOW_START, LOW, FRAME, FRAME_END = (VOCABULARY + index for index in range(8))
SIDE, PATCH = 4, 4
LOW_GRID = (2, 2)
GRIDS = ((1, 2), (2, 2), (2, 4))  # pooled tokens (high, wide) of the close view; a crop of it has 2 x 2
VIT_LAYERS = [-1, -3]


def build() -> nn.Module:
    """Four layers of 64, three vision layers of 32 of which two are read; the head knows no picture ids."""
    model = Model(
        upstream.ModelConfig(
            image_start_token_id=START,
            low_res_image_start_token_id=LOW_START,
            image_end_token_id=END,
            image_low_res_id=LOW,
            image_patch_id=PATCH_TOKEN,
            image_col_id=COLUMN,
            frame_start_token_id=FRAME,
            frame_end_token_id=FRAME_END,
            eos_token_id=[VOCABULARY - 1],
            text_config=upstream.TextConfig(
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                vocab_size=VOCABULARY,
                additional_vocab_size=NEW_IDS,
                rope_theta=100.0,
            ),
            vision_config=upstream.VisionConfig(
                vit_config=upstream.VitConfig(
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=3,
                    num_attention_heads=2,
                    num_key_value_heads=2,
                    head_dim=16,
                    image_patch_size=PATCH,
                    image_num_pos=SIDE**2,
                    image_default_input_size=[SIDE * PATCH, SIDE * PATCH],
                ),
                adapter_config=upstream.AdapterConfig(
                    hidden_size=32,
                    intermediate_size=48,
                    text_hidden_size=64,
                    num_attention_heads=2,
                    num_key_value_heads=2,
                    head_dim=16,
                    vit_layers=VIT_LAYERS,
                ),
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [Rule(head, fan_in(3.0)), Rule(r"embedding$", spread(1.0))]
    enliven(model, seed=24, rules=rules, quiet=head)
    return model


def _picture(grid: tuple[int, int]) -> list[int]:
    """The ids of one picture, far view and then close view, as `Molmo2Processor.replace_image_token` orders them."""
    (low_high, low_wide), (high, wide) = LOW_GRID, grid
    far = [LOW_START, *([PATCH_TOKEN] * low_wide + [COLUMN]) * low_high, END]
    return [*far, START, *([PATCH_TOKEN] * wide + [COLUMN]) * high, END]


def _pooling(seed: int, grid: tuple[int, int]) -> np.ndarray:
    """(tokens, 4): which patches of the picture's crops each token pools; -1 is none."""
    num_crops = 1 + -(-grid[0] * grid[1] // 4)
    patches = np.arange(num_crops * SIDE**2).reshape(-1, 4)
    pooled = patches[: LOW_GRID[0] * LOW_GRID[1] + grid[0] * grid[1]].copy()
    pooled[-1, 2:] = -1
    return pooled.astype(np.int32)


def _request(seed: int, grids: list[tuple[int, int]]) -> Inputs:
    parts = [words(seed, 3)]
    for index, grid in enumerate(grids):
        parts += [_picture(grid), words(seed + 101 * (index + 1), 4)]
    crops = [1 + -(-high * wide // 4) for high, wide in grids]
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(seed, sum(crops), SIDE**2, 3 * PATCH**2),
        "image_token_pooling": np.concatenate([_pooling(seed, grid) for grid in grids]),
        "image_grids": np.array([[*LOW_GRID, *grid] for grid in grids], dtype=np.int32),
        "image_num_crops": np.array(crops, dtype=np.int32),
    }


def image(seed: int, size: int) -> Inputs:
    """One picture of 6, 8 or 12 features."""
    return _request(seed, [GRIDS[size]])


def two_images(seed: int) -> Inputs:
    """Two pictures with words between; the first sees the second."""
    return _request(seed, [GRIDS[1], GRIDS[0]])


def is_picture(tokens: np.ndarray) -> np.ndarray:
    """(L,) bool"""
    return tokens >= VOCABULARY


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, under a mask that lets picture tokens see each other."""
    arrays = to_mx(inputs)
    for (
        block
    ) in model.vision_tower.image_vit.transformer:  # upstream: a sigmoid for the tanh form that its config names
        block.feed_forward.act = nn.GELU(approx="precise")
    prompt = model.get_input_embeddings(**arrays).inputs_embeds
    language, tokens = model.language_model, np.asarray(inputs["input_ids"])[0]

    def logits(generated: list[int]) -> mx.array:
        hidden = mx.concatenate([prompt, language.model.wte(mx.array([generated], dtype=mx.int32))], axis=1)
        picture = mx.array(is_picture(np.concatenate([tokens, np.array(generated, dtype=tokens.dtype)])))
        places = mx.arange(hidden.shape[1])
        mask = (places[None] <= places[:, None]) | (picture[None] & picture[:, None])
        for block in language.model.blocks:
            hidden = block(hidden, mask)
        return language.lm_head(language.model.ln_f(hidden[:, -1]))[0]

    return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="molmo2",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="The whole sequence at each step over the model's own layers. mlx-vlm makes no mask for pictures and "
    "takes another GELU in the tower; in transformers all picture tokens see each other, and its answers agree "
    "(tests/references).",
    wrong_alone=("image_1", "two_images"),
)
