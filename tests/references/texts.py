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


def mimo_v2(zoo: nn.Module) -> torch.nn.Module:
    """The text model of MiMo-V2-Flash; its window counts the token itself, as mlx-vlm's does."""
    ours = zoo.config.text_config
    names = ["head_dim", "v_head_dim", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"]
    names += ["n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "attention_value_scale"]
    part = {"partial_rotary_factor": ours.partial_rotary_factor}
    turned = {
        "full_attention": {**rope(ours.rope_theta), **part},
        "sliding_attention": {**rope(ours.swa_rope_theta), **part},
    }
    own = set(NAMES) - {"rms_norm_eps"}
    config = transformers.MiMoV2FlashConfig(
        **same(ours, *own, *names),
        rms_norm_eps=ours.layernorm_epsilon,
        rope_parameters=turned,
        sliding_window=ours.sliding_window_size,
        layer_types=[("full_attention", "sliding_attention")[kind] for kind in ours.hybrid_layer_pattern],
        mlp_layer_types=[("dense", "sparse")[kind] for kind in ours.moe_layer_freq],
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    return transformers.MiMoV2FlashForCausalLM(config)


def phi3(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config
    scaling = {"rope_type": "longrope", "rope_theta": ours.rope_theta, "partial_rotary_factor": 1.0}
    scaling |= {name: ours.rope_scaling[name] for name in ("short_factor", "long_factor")}
    scaling |= {"original_max_position_embeddings": ours.original_max_position_embeddings}
    config = transformers.Phi3Config(
        **same(ours, *NAMES),
        rope_parameters=scaling,
        original_max_position_embeddings=ours.original_max_position_embeddings,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    return transformers.Phi3ForCausalLM(config)


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
    "fastvlm": {"build": qwen2, **ELSE},
    "llmjpvl": {"build": qwen3, **ELSE},
    "locateanything": {"build": qwen2, **ELSE},
    "mage_vl": {"build": qwen3, **ELSE},
    "minicpmo": {"build": qwen3, **ELSE},
    "mimo_v2": {
        "build": mimo_v2,
        "convert": joined_experts,
        **ELSE,
        "rename": (*TRUNK, (r"attention_sink_bias$", "sinks")),
    },
    "phi3_v": {"build": phi3, "rename": (), "unused": r"vision_embed_tokens"},
    "youtu_vl": {"build": youtu, "regroup": youtu_weights, **ELSE},
}
