"""DeepSeek-V4.1: layers that share pooled keys and the choice among them, tables of n-grams, rounded activations."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.deepseek_v41 import deepseek_v41 as upstream
from mlx_vlm.models.deepseek_v41 import fakequant
from mlx_vlm.models.deepseek_v41.config import ModelConfig
from mlx_vlm.models.deepseek_v41.engram import NgramHashState
from mlx_vlm.models.deepseek_v41.processing_deepseek_v41 import (
    ImageInput,
    image_token_types,
)

from ._build import (
    Rule,
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
from ._oracle import generate_alone
from ._types import PLAIN, VOCABULARY, Inputs, TinyFamily

# Activations are rounded to 8 and 4 bits. A sum in another order, a batch's or a chunk's, turns such a code now and then,
# and everything after it is different by far more than rounding errors of float32. So the matrix compares the model
# without these roundings (upstream's own switch); tests/test_deepseek.py compares it with them.
fakequant.DISABLE = True

PATCH, RATIO, IMAGE = 4, 2, PLAIN
# of patches; two by two make a token, and an odd row or column is filled up
GRIDS = ((3, 3), (4, 6), (6, 5))
ENGRAMS = (1, 3)
TABLE = 2 * 2 * 64 + 400  # four primes above 64


def settings() -> ModelConfig:
    """Six layers of 64: a window; pools of two, and the same again; pools of one chosen among blocks, chosen anew, again."""
    return ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=32,
        o_lora_rank=16,
        o_groups=2,
        swiglu_limit=2.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=1024,
        rope_theta=100.0,
        compress_rope_theta=400.0,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        compress_ratios=[0, 2, 2, 1, 1, 1],
        kv_source_layer_ids=[1, 3],
        index_source_layer_ids=[1, 3, 4],
        # of fewer, some pools have no score at all, and which of them are taken is chance
        index_n_heads=16,
        index_head_dim=32,
        index_topk=4,
        candidate_source_layer_id=3,
        candidate_topk_blocks=3,
        candidate_block_size=2,
        hc_mult=2,
        engram_layer_ids=list(ENGRAMS),
        engram_num_embeddings=[TABLE] * 2,
        engram_max_ngram_size=3,
        engram_vocab_size=64,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_pad_token_id=0,
        engram_compressed_vocab_size=40,
        image_token_id=IMAGE,
        vision_num_layers=2,
        vision_hidden_size=32,
        vision_num_heads=2,
        vision_intermediate_size=64,
        vision_patch_size=PATCH,
        vision_downsample_ratio=RATIO,
    )


def token_map() -> list[int]:
    """Four tokens each are one to the n-grams."""
    return [token // 4 for token in range(VOCABULARY)]


def build() -> nn.Module:
    """Text layers of 64 and two vision blocks of 32."""
    config = settings()
    model = upstream.Model(config)
    head = "language_model.head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"\.wo_a\.weight$", per_expert(1.3)),
        Rule(r"gate\.weight$", fan_in(1.3)),
        Rule(r"gate\.bias(_vl)?$", spread(0.2)),
        Rule(r"attn_sink$", spread(0.7)),
        Rule(r"hc_(attn|ffn)_fn$", fan_in(0.5)),
        Rule(r"hc_(attn|ffn)_(base|scale)$", spread(0.3, 0.5)),
        Rule(r"engram\.[qk]_weight$", spread(0.3, 1.0)),
        Rule(r"image_(start|end|newline)$", spread(1.0)),
    ]
    enliven(model, seed=14, rules=rules, quiet=head)
    language = model.language_model
    language.engram_hash = NgramHashState(
        config, language.layout, token_map=token_map()
    )
    return model


def request(seed: int, grids: Sequence[tuple[int, int]]) -> Inputs:
    """Words, then each picture as mlx-vlm's processor lays it out, followed by words."""
    parts, pictures = [words(seed, 3)], []
    for index, (high, wide) in enumerate(grids):
        types = image_token_types(-(-high // RATIO), -(-wide // RATIO))
        patches = mx.array(pixels(seed + 31 * index, high * wide, 3, PATCH, PATCH))
        pictures.append(ImageInput(sum(map(len, parts)), patches, high, wide, types))
        parts += [[IMAGE] * len(types), words(seed + 101 * (index + 1), 4 + index)]
    return {"input_ids": ids(*parts), "pixel_values": [pictures]}


# One picture of 2 x 2, 2 x 3 or 3 x 3 tokens, and what goes with them. Two pictures of different grids.
image, two_images = asks(request, GRIDS, (GRIDS[1], GRIDS[0]))


FAMILY = TinyFamily(
    name="deepseek_v41",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    window=6,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step, without the rounding of activations.",
    no_reference="transformers 5.23 has no such class. Its main branch has one (modeling_deepseek_v41.py): read beside it, it "
    "does the same but for a gate temperature, which no configuration here has, and for picks outside the candidate blocks, "
    "which it drops and DeepSeek's code keeps (none where the blocks hold index_topk positions, as published)",
)
