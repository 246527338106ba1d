"""DeepSeek-V4: windows, pools of four tokens chosen by an indexer, larger pools, experts by score and by token, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.deepseek_v4 import deepseek_v4 as upstream
from mlx_vlm.models.deepseek_v4 import language
from mlx_vlm.models.deepseek_v4.config import ModelConfig
from mlx_vlm.models.deepseek_v4.processing_deepseek_v4 import build_image_block

from ._build import (
    Fill,
    Rule,
    Shape,
    asks,
    enliven,
    fan_in,
    ids,
    per_expert,
    pixels,
    spread,
    text_request,
    words,
)
from ._oracle import generate_by_recomputing, to_mx
from ._types import VOCABULARY, Inputs, TinyFamily, Trace

PATCH, RATIO = 4, 2
EXPERTS, ACTIVE = 4, 2
# of patches; two by two make a token, and an odd row or column is filled up
GRIDS = ((2, 1), (4, 8), (6, 5))
HEAVY = 8


def choices(random: np.random.RandomState, shape: Shape) -> np.ndarray:
    """(tokens, K) different experts for each token."""
    return np.stack([random.permutation(EXPERTS)[: shape[1]] for _ in range(shape[0])])


def settings(ratios: Sequence[int] = (0, 4, 128, 4), **more: Any) -> ModelConfig:
    """Four layers of 64: a window, chosen pools of four, pools of many, chosen pools again."""
    return ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=ACTIVE,
        q_lora_rank=24,
        head_dim=32,
        qk_rope_head_dim=8,
        o_groups=2,
        o_lora_rank=16,
        rope_theta=100.0,
        compress_rope_theta=400.0,
        compress_ratios=list(ratios),
        max_position_embeddings=1024,
        num_hash_layers=1,
        swiglu_limit=2.0,
        sliding_window=16,
        # of fewer, some pools have no score at all, and which of them are taken is chance
        index_n_heads=16,
        index_head_dim=16,
        index_topk=3,
        hc_mult=2,
        **more,
    )


def made(config: ModelConfig, seed: int) -> nn.Module:
    """A model whose layers with pools of 128 tokens pool 8, since no tiny prompt fills more."""
    model = upstream.Model(config)
    for layer in model.language_model.layers:
        if layer.attn.compress_ratio == 128:
            layer.attn.compress_ratio = HEAVY
            layer.attn.compressor = language.Compressor(config, HEAVY, config.head_dim)
    head = "language_model.lm_head.weight"
    heads: Fill = per_expert(1.3)
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"\.wo_a\.weight$", heads),
        Rule(r"gate\.weight$", fan_in(1.3)),
        Rule(r"tid2eid$", choices),
        Rule(r"e_score_correction_bias$|bias_vl$", spread(0.2)),
        Rule(r"\.ape$", spread(0.7)),
        Rule(r"attn_sink$", spread(0.7)),
        Rule(r"(_hc|hc_head)\.fn$", fan_in(0.5)),
        Rule(r"(_hc|hc_head)\.(base|scale)$", spread(0.3, 0.5)),
        Rule(r"image_(start|end|newline|pad)$", spread(1.0)),
    ]
    enliven(model, seed=seed, rules=rules, quiet=head)
    return model


#: Two vision blocks of 32.
VISION: dict[str, Any] = {
    "vision_n_layers": 2,
    "vision_dim": 32,
    "vision_n_heads": 2,
    "vision_inter_dim": 64,
    "vision_patch_size": PATCH,
    "vision_downsample_ratio": RATIO,
    "vision_max_n_token": 64,
}


def build() -> nn.Module:
    """The text model, with a tower."""
    return made(settings(**VISION), seed=12)


def request(seed: int, grids: Sequence[tuple[int, int]]) -> Inputs:
    """Words, then each picture as mlx-vlm's processor lays it out, followed by words."""
    parts, patches, offsets, types, orders = [words(seed, 3)], [], [], [], []
    for index, (high, wide) in enumerate(grids):
        offsets.append(sum(map(len, parts)))
        kinds, order = build_image_block(
            -(-high // RATIO), -(-wide // RATIO), offsets[-1]
        )
        parts += [
            (VOCABULARY + kinds).tolist(),
            words(seed + 101 * (index + 1), 4 + index),
        ]
        patches.append(pixels(seed + 31 * index, high * wide, 3, PATCH, PATCH))
        types.append(kinds)
        orders.append(order)
    return {
        "input_ids": ids(*parts),
        "pixel_values": np.concatenate(patches),
        "image_grid_hw": np.array(grids, dtype=np.int32),
        "image_sample_indices": np.zeros(len(grids), dtype=np.int32),
        "image_offsets": np.array(offsets, dtype=np.int32),
        "image_types": np.concatenate(types),
        "image_type_offsets": np.cumsum([0, *map(len, types)]).astype(np.int32),
        "image_permutations": np.concatenate(orders),
    }


# One picture of 1, 2 x 4 or 3 x 3 tokens, of which the last is longer than the window, and what goes with them. Two
# pictures of different grids.
image, two_images = asks(request, GRIDS, (GRIDS[1], GRIDS[0]))


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's prefill of the whole sequence, at each step anew: whatever it forgets between two chunks is there."""
    arrays = to_mx(inputs)
    prompt, tower = arrays.pop("input_ids"), model
    embeds = tower.get_input_embeddings(
        prompt, arrays.pop("pixel_values", None), **arrays
    ).inputs_embeds
    lm = model.language_model

    def logits(generated: list[int]) -> mx.array:
        tail = mx.array([generated], dtype=mx.int32)
        sequence = mx.concatenate([prompt, tail], axis=1)
        hidden = mx.concatenate([embeds, lm.model.embed_tokens(tail)], axis=1)
        return lm(sequence, inputs_embeds=hidden, cache=lm.make_cache()).logits[0, -1]

    # short sequences are otherwise run token by token
    with mock.patch.object(language, "DECODE_BLOCK_SIZE", 0):
        return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="deepseek_v4",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    window=16,
    wrong_alone=("text", "image_1"),
    oracle_note="mlx-vlm's whole-prompt prefill of prompt and answer, for each token anew.",
    no_reference="transformers has the text model only: deepseek_v4_text is compared with it, which is this one without "
    "pictures; tests/test_deepseek.py holds the pictures' masks and experts to DeepSeek's definitions",
)
