"""ERNIE 4.5 VL: text and picture tokens go to experts of their own; three-axis positions; a resampler after the tower."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import ernie4_5_moe_vl as upstream

from . import _qwen
from ._build import Rule, asks, enliven, fan_in, spread, text_request
from ._oracle import generate_by_recomputing, to_mx
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily, Trace

MARKS = (_qwen.VISION_START, _qwen.IMAGE, _qwen.VISION_END)


def build() -> nn.Module:
    """Four layers of 64, the first dense, then four text and four picture experts; two vision blocks of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            im_patch_id=_qwen.IMAGE,
            image_token_id=_qwen.IMAGE,
            image_start_token_id=_qwen.VISION_START,
            image_end_token_id=_qwen.VISION_END,
            video_token_id=_qwen.VIDEO,
            vocab_size=VOCABULARY,
            eos_token_id=[END_OF_TEXT],
            pixel_hidden_size=32,
            hidden_size=64,
            text_config=upstream.TextConfig(
                hidden_size=64,
                intermediate_size=96,
                max_position_embeddings=1024,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_hidden_layers=4,
                rms_norm_eps=1e-5,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
                moe_num_experts=[4, 4],
                moe_layer_start_index=[1, 1],
                moe_layer_end_index=[3, 3],
                moe_intermediate_size=[48, 24],
                moe_k=2,
                moe_num_shared_experts=1,
                mrope_section=[3, 3, 2],
            ),
            vision_config=upstream.VisionConfig(
                depth=2,
                embed_dim=32,
                hidden_size=32,
                mlp_ratio=2.0,
                num_heads=2,
                patch_size=_qwen.PATCH,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [Rule(head, fan_in(3.0)), Rule("e_score_correction_bias", spread(0.1))]
    enliven(model, seed=45, rules=rules, quiet=head)
    return model


image, two_images = asks(_qwen.still_request, _qwen.GRIDS, _qwen.PAIR)


def four_images(seed: int) -> Inputs:
    """Four pictures: mlx-vlm's vision attention keeps only the first two apart."""
    return _qwen.still_request(
        seed, [_qwen.GRIDS[0], _qwen.GRIDS[1], _qwen.GRIDS[0], _qwen.GRIDS[1]]
    )


def _features(model: nn.Module, arrays: dict) -> mx.array:
    """(placeholders, 64): each picture through the tower and the resampler on its own."""
    grids = arrays["image_grid_thw"]
    ends = np.cumsum([high * wide for _, high, wide in grids.tolist()])[:-1].tolist()
    parts = mx.split(arrays["pixel_values"], ends)
    alone = [(part, grids[i : i + 1]) for i, part in enumerate(parts)]
    return mx.concatenate(
        [
            model.resampler_model(model.vision_tower(part, grid), grid)
            for part, grid in alone
        ]
    )


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, with its positions and token types."""
    arrays = to_mx(inputs)
    language = model.language_model
    prompt = language.model.embed_tokens(arrays["input_ids"])
    if "pixel_values" in arrays:
        holes = np.flatnonzero(np.array(arrays["input_ids"][0]) == _qwen.IMAGE)
        prompt[:, mx.array(holes)] = _features(model, arrays)[None]

    def logits(generated: list[int]) -> mx.array:
        tail = mx.array([generated], dtype=mx.int32)
        tokens = mx.concatenate([arrays["input_ids"], tail], axis=1)
        hidden = mx.concatenate([prompt, language.model.embed_tokens(tail)], axis=1)
        positions, _ = language.get_rope_index(tokens, arrays.get("image_grid_thw"))
        types = mx.array(np.isin(np.array(tokens), MARKS).astype(np.int32))
        hidden = language.model(
            tokens, hidden, mask="causal", position_ids=positions, token_type_ids=types
        )
        return language.lm_head(hidden[0, -1])

    return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="ernie4_5_moe_vl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    also={"four_images": four_images},
    greedy=greedy,
    oracle_note="The whole sequence at each step over the model's own layers, with positions of the whole prompt, the "
    "pictures' tokens sent to the vision experts (mlx-vlm's loop sends them to the text experts and makes positions of "
    "each chunk without the grids), and each picture encoded alone. transformers agrees (tests/references).",
)
