"""Moondream 3: BOS and a picture attend to each other both ways; attention is scaled by learned tau; experts."""

from __future__ import annotations

import mlx.nn as nn
import numpy as np
from mlx_vlm.models.moondream3 import config as upstream
from mlx_vlm.models.moondream3.moondream3 import Model

from ._build import Rule, Shape, enliven, fan_in, spread
from ._moondream import (
    BOS,
    NUM_FEATURES,
    ONE_PICTURE,
    VISION,
    generate_under_prefix,
    image,
    text,
)
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily, Trace


def _experts(random: np.random.RandomState, shape: Shape) -> np.ndarray:
    """(experts, outputs, inputs): each expert keeps the scale of its input."""
    return 1.3 / np.sqrt(shape[-1]) * random.standard_normal(shape)


def build() -> nn.Module:
    """Four layers of 64, the last two of four experts; tau and positions are not zero."""
    model = Model(
        upstream.ModelConfig(
            eos_token_id=END_OF_TEXT,
            bos_token_id=BOS,
            text_config=upstream.TextConfig(
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=4,
                vocab_size=VOCABULARY,
                num_attention_heads=4,
                num_key_value_heads=4,
                head_dim=16,
                rope_theta=100.0,
                rope_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                moe_start_layer=2,
                prefix_attn=1 + NUM_FEATURES,
            ),
            vision_config=upstream.VisionConfig(**VISION),
        )
    )
    head = "text.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"\.tau\.w[qv]$", fan_in(1.3)),
        Rule(r"\.tau\.alpha$", spread(0.5)),
        Rule(r"\.pos_emb$", spread(0.5)),
        Rule(r"text\.model\.blocks\.[23]\.mlp\.fc", _experts),
    ]
    enliven(model, seed=7, rules=rules, quiet=head)
    return model


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, under the prefix mask when there is a picture."""
    trunk = model.text.model
    return generate_under_prefix(model, inputs, num_tokens, trunk.wte, trunk.blocks)


FAMILY = TinyFamily(
    name="moondream3",
    build=build,
    text=text,
    image=image,
    two_images=None,
    no_two_images=ONE_PICTURE,
    greedy=greedy,
    oracle_note="The whole sequence at each step over the model's own blocks, under the mask that get_input_embeddings "
    "makes and generate_step loses. transformers has no such class. Moondream's own moondream.py says the same: the "
    "first 1 + 27 * 27 positions see each other, and a query without a picture is plainly causal. tests/test_zoo.py "
    "finds the first token's answer in mlx-vlm's own Model.__call__. Crops are put together and averaged as "
    "Moondream's own code does (moondream/torch/image_crops.py, reconstruct_from_crops; vision.py, adaptive_avg_pool2d; "
    "vLLM's moondream3.py and Moondream's engine do the same); mlx-vlm's tower averages over rounded windows.",
    wrong_alone=("image_2",),
)
