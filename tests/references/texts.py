"""Recipes for families of which transformers has the language model alone: texts are recorded, pictures are not."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import torch
import transformers

from tests.references.newer import Weights, join_latent, rope, same
from tests.references.towers import joined_experts

NAMES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
NAMES += ["num_key_value_heads", "rms_norm_eps", "max_position_embeddings"]
LATENT = ["kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"]


def plain(zoo: nn.Module) -> dict[str, Any]:
    """What every decoder's configuration has."""
    ours = zoo.config.text_config
    turned = {"rope_parameters": rope(ours.rope_theta), "tie_word_embeddings": False, "pad_token_id": 0}
    return {**same(ours, *NAMES), **turned}


def qwen2(zoo: nn.Module) -> torch.nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**plain(zoo)))


def qwen3(zoo: nn.Module) -> torch.nn.Module:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**plain(zoo), head_dim=zoo.config.text_config.head_dim)
    )


def deepseek_v2(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    names = [*LATENT, "moe_intermediate_size", "n_shared_experts", "n_routed_experts", "num_experts_per_tok"]
    names += ["n_group", "topk_group", "topk_method", "routed_scaling_factor", "first_k_dense_replace"]
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**plain(zoo), **same(ours, *names)))


def youtu(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    return transformers.YoutuForCausalLM(
        transformers.YoutuConfig(**plain(zoo), **same(ours, *LATENT, "rope_interleave", "attention_bias", "mlp_bias"))
    )


def youtu_weights(weights: Weights) -> Weights:
    weights = dict(weights)
    join_latent(weights)
    return weights


TRUNK = (
    (r"^language_model\.model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)
ELSE = {"rename": TRUNK, "unused": r"^(?!language_model\.)"}

#: What each family's ``Recipe`` is made of.
TEXTS: dict[str, dict[str, Any]] = {
    "deepseek_vl_v2": {"build": deepseek_v2, "convert": joined_experts, **ELSE},
    "dots_ocr": {"build": qwen2, **ELSE},
    "llmjpvl": {"build": qwen3, **ELSE},
    "locateanything": {"build": qwen2, **ELSE},
    "mage_vl": {"build": qwen3, **ELSE},
    "minicpmo": {"build": qwen3, **ELSE},
    "youtu_vl": {"build": youtu, "regroup": youtu_weights, **ELSE},
}
