"""Recipes for families whose weights mlx-vlm joins or keeps in another layout: see record.py, which runs them."""

from __future__ import annotations

import re
from typing import Any

import mlx.nn as nn
import numpy as np
import torch
import transformers

from tests.references.towers import PIXTRAL, RENAME, joined_experts, text_of, vision_of
from tests.zoo import Inputs
from tests.zoo.muse_spark import PATCH, THETA
from tests.zoo.nemotron_h_nano_omni import BANDS
from tests.zoo.nemotron_h_nano_omni import PATCH as NEMOTRON_PATCH

Weights = dict[str, np.ndarray]

LANGUAGE = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)


def rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def same(ours: Any, *names: str) -> dict[str, Any]:
    """Settings that are called the same here and there."""
    return {name: getattr(ours, name) for name in names}


def split(
    weights: Weights, path: str, joined: str, names: list[str], sizes: list[int]
) -> None:
    """Put the rows of a joined projection under their own names."""
    value, prefix = weights.pop(path), path[: path.index(joined)]
    suffix = path[len(prefix) + len(joined) :]
    for name, part in zip(names, np.split(value, np.cumsum(sizes)[:-1]), strict=True):
        weights[f"{prefix}{name}{suffix}"] = part


# Muse Spark -----------------------------------------------------------------------------------------------------------


def muse_spark(zoo: nn.Module) -> torch.nn.Module:
    ours, vision = zoo.config.text_config, zoo.config.vision_config
    names = [
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
        "vocab_size",
    ]
    names += [
        "rms_norm_eps",
        "post_norm_eps",
        "layer_rope_theta",
        "layer_types",
        "sliding_window",
        "moe_hidden_size",
    ]
    names += [
        "final_logit_softcapping",
        "output_multiplier",
        "num_local_experts",
        "num_experts_per_tok",
    ]
    names += ["moe_intermediate_size", "qk_scale_factor", "routed_scaling_factor"]
    seen = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "patch_size",
        "merge_size",
    ]
    seen += ["pos_emb_height", "pos_emb_width", "layer_types"]
    config = transformers.MuseSparkConfig(
        text_config={**same(ours, *names), "rope_parameters": rope(THETA)},
        vision_config=same(vision, *seen),
        audio_config=same(
            zoo.config.audio_config,
            "patch_sizes",
            "hidden_sizes",
            "depths",
            "out_hidden_size",
        ),
        **same(
            zoo.config,
            "image_token_id",
            "video_token_id",
            "audio_token_id",
            "out_hidden_size",
            "projector_hidden_size",
        ),
        tie_word_embeddings=False,
    )
    return transformers.MuseSparkForConditionalGeneration(config)


def halves(value: np.ndarray, width: int) -> np.ndarray:
    """Rows of heads whose neighbours turn together, as transformers wants them: a half of a head each."""
    return (
        value.reshape(-1, width // 2, 2, *value.shape[1:])
        .swapaxes(1, 2)
        .reshape(value.shape)
    )


def muse_spark_weights(weights: Weights) -> Weights:
    weights = dict(weights)
    for path in [path for path in weights if "qkvg_proj" in path]:
        split(
            weights,
            path,
            "qkvg_proj",
            ["q_proj", "k_proj", "v_proj", "gate_proj"],
            [64, 32, 32, 64],
        )
    for path in [path for path in weights if ".qkv_proj." in path]:
        split(weights, path, "qkv_proj", ["q_proj", "k_proj", "v_proj"], [32, 32, 32])
    found = {}
    for path, value in weights.items():
        if re.search(r"attn\.[qk]_proj\.", path):
            value = halves(value, 16)
        if path.endswith("_beta"):  # the sigmoid of a gate over its temperature
            site = "attention" if "add_attn" in path else "feedforward"
            path = f"{path.rpartition('.')[0]}.post_{site}_residual_gate.gate"
            value = 0.3 * np.log(value / (1 - value))
        if not path.endswith("_alpha"):
            found[
                re.sub(r"experts\.(gate|up|down)_proj", r"switch_mlp.\1_proj", path)
            ] = value
    return found


def muse_spark_inputs(inputs: Inputs) -> dict[str, Any]:
    """Patches in rows, and how many there are of each picture: what transformers' processor makes."""
    if "pixel_values" not in inputs:
        return {}
    packed, grids = [], []
    for picture in inputs["pixel_values"]:
        _, high, wide = (size // PATCH for size in picture.shape)
        cells = np.broadcast_to(picture, (2, *picture.shape)).reshape(
            2, 3, high, PATCH, wide, PATCH
        )
        packed.append(cells.transpose(2, 4, 0, 1, 3, 5).reshape(high * wide, -1))
        grids.append([1, high, wide])
    return {
        "pixel_values": torch.tensor(np.concatenate(packed)),
        "image_grid_thw": torch.tensor(grids),
    }


# Inkling --------------------------------------------------------------------------------------------------------------


def inkling(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    names = [
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "rms_norm_eps",
        "num_attention_heads",
        "num_key_value_heads",
    ]
    names += [
        "head_dim",
        "swa_num_attention_heads",
        "swa_num_key_value_heads",
        "swa_head_dim",
        "sliding_window_size",
    ]
    names += [
        "d_rel",
        "rel_extent",
        "log_scaling_n_floor",
        "log_scaling_alpha",
        "n_routed_experts",
        "num_experts_per_tok",
    ]
    names += ["n_shared_experts", "route_scale", "logits_mup_width_multiplier"]
    text = same(ours, *names)
    text["layer_types"] = [
        name.replace("hybrid_full", "hybrid") for name in ours.layer_types
    ]
    text["mlp_layer_types"] = ["dense", "sparse", "sparse", "sparse"]
    text |= {
        "intermediate_size": ours.dense_intermediate_size,
        "moe_intermediate_size": ours.intermediate_size,
    }
    config = transformers.InklingConfig(
        text_config=text,
        vision_config={
            **same(zoo.config.vision_config, "patch_size"),
            "num_hidden_layers": 2,
            "text_hidden_size": 64,
        },
        audio_config=same(
            zoo.config.audio_config, "n_mel_bins", "mel_vocab_size", "text_hidden_size"
        ),
        **same(zoo.config, "image_token_id", "audio_token_id"),
    )
    return transformers.InklingForConditionalGeneration(config)


def inkling_weights(weights: Weights) -> Weights:
    weights = dict(weights)
    for path in [path for path in weights if path.endswith("qkvr_proj.weight")]:
        split(
            weights,
            path,
            "qkvr_proj",
            ["q_proj", "k_proj", "v_proj", "r_proj"],
            [64, 32, 32, 32],
        )
    # of experts in four bits
    for path in [path for path in weights if path.endswith(".gate_scale")]:
        base = path.rpartition(".")[0]
        weights[f"{base}.gate_proj.weight"] = (
            weights[f"{base}.gate_proj.weight"] * weights.pop(path)[:, None, None]
        )
        down = weights[f"{base}.down_proj.weight"]
        weights[f"{base}.down_proj.weight"] = (
            down * weights.pop(f"{base}.out_scale")[:, None, None]
        )
    for path in [path for path in weights if ".shared_experts." in path]:
        value, is_down = weights.pop(path), "down_proj" in path
        value = (
            value.reshape(64, 2, 32).swapaxes(0, 1)
            if is_down
            else value.reshape(2, 32, 64)
        )
        weights[path.removesuffix(".weight")] = value
    sparse = {
        path.partition(".mlp.")[0] for path in weights if ".mlp.gate_weight" in path
    }
    for path in [
        path
        for path in weights
        if path.endswith("mlp.global_scale") and path.partition(".mlp.")[0] in sparse
    ]:
        weights[path.replace("mlp.global", "mlp.gate.global")] = weights.pop(path)
    return weights


INKLING = (
    (r"^(vision_tower|audio_tower)\.", r"model.\1."),
    (r"embed_audio_tokens\.weight", "embed_audio_tokens.embed_audio_tokens.weight"),
    (r"model\.embed_norm\.", "model.embed_tokens.embed_norm."),
    (r"sconv\.conv\.", "sconv.conv1d."),
    (r"self_attn\.rel_proj$", "self_attn.rel_logits_proj.proj"),
    (r"mlp\.gate_weight$", "mlp.gate.weight"),
    (r"mlp\.e_score", "mlp.gate.e_score"),
    *LANGUAGE,
)


# GLM-5-Next -----------------------------------------------------------------------------------------------------------


def glm5_next(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    names = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "num_hidden_layers",
    ]
    names += [
        "num_attention_heads",
        "num_key_value_heads",
        "n_routed_experts",
        "num_experts_per_tok",
        "kv_lora_rank",
    ]
    names += [
        "routed_scaling_factor",
        "q_lora_rank",
        "v_head_dim",
        "qk_nope_head_dim",
        "indexer_types",
        "index_topk",
    ]
    names += [
        "index_kpool",
        "index_head_dim",
        "index_n_heads",
        "linear_head_dim",
        "linear_num_heads",
        "hc_mult",
    ]
    names += ["layer_types", "mlp_layer_types", "pad_token_id", "rms_norm_eps"]
    seen = [
        "depth",
        "hidden_size",
        "num_heads",
        "patch_size",
        "spatial_merge_size",
        "temporal_patch_size",
    ]
    seen += ["out_hidden_size", "intermediate_size", "projection_intermediate_size"]
    markers = [
        "image_token_id",
        "video_token_id",
        "image_start_token_id",
        "image_end_token_id",
    ]
    config = transformers.Glm5NextConfig(
        text_config=same(ours, *names),
        vision_config=same(zoo.config.vision_config, *seen),
        **same(zoo.config, *markers, "video_start_token_id", "video_end_token_id"),
        tie_word_embeddings=False,
    )
    return transformers.Glm5NextForConditionalGeneration(config)


def glm5_next_weights(weights: Weights) -> Weights:
    weights = dict(weights)
    for path in [
        path for path in weights if ".mlp." in path and "gate_up_proj" in path
    ]:
        half = len(weights[path]) // 2
        split(weights, path, "gate_up_proj", ["gate_proj", "up_proj"], [half, half])
    for path in [
        path for path in weights if path.endswith("self_attn.qkv_proj.weight")
    ]:
        split(weights, path, "qkv_proj", ["q_proj", "k_proj", "v_proj"], [32, 32, 32])
    for path in [path for path in weights if "fbg_a_proj" in path]:
        split(
            weights, path, "fbg_a_proj", ["f_a_proj", "b_proj", "g_a_proj"], [8, 4, 8]
        )
    for path in [path for path in weights if "qkv_a_proj" in path]:
        split(weights, path, "qkv_a_proj", ["q_a_proj", "kv_a_proj_with_mqa"], [24, 16])
    join_latent(weights)
    return weights


def join_latent(weights: Weights) -> None:
    """Put what makes keys and values of a latent under the one name that it has in transformers."""
    for path in [path for path in weights if path.endswith("embed_q.weight")]:
        keys = weights.pop(path).swapaxes(1, 2)
        values = weights.pop(path.replace("embed_q", "unembed_out"))
        joined = np.concatenate([keys, values], axis=1)
        weights[path.replace("embed_q", "kv_b_proj")] = joined.reshape(
            -1, joined.shape[-1]
        )


GLM5_NEXT = (
    (r"^vision_tower\.", "model.visual."),
    (r"self_attn\.qkv_conv\.conv\.", "self_attn.conv1d."),
    (r"self_attn\.(A_log|dt_bias|f_a_proj|f_b_proj)", r"self_attn.forget_gate.\1"),
    *LANGUAGE,
)


# Kimi K2.5 ------------------------------------------------------------------------------------------------------------


def kimi_k25(zoo: nn.Module) -> torch.nn.Module:
    ours, vision = zoo.config.text_config, zoo.config.vision_config
    names = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "num_hidden_layers",
    ]
    names += [
        "num_attention_heads",
        "num_key_value_heads",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
    ]
    names += [
        "first_k_dense_replace",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
    ]
    names += [
        "v_head_dim",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "norm_topk_prob",
        "rms_norm_eps",
    ]
    names += ["max_position_embeddings"]
    config = transformers.Kimi_K25Config(
        text_config={
            **same(ours, *names),
            "model_type": "deepseek_v3",
            "rope_parameters": rope(ours.rope_theta),
        },
        vision_config={
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "patch_size": vision.patch_size,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
        projection_hidden_size=32,
        image_token_id=zoo.config.media_placeholder_token_id,
        tie_word_embeddings=False,
    )
    return transformers.Kimi_K25ForConditionalGeneration(config)


def kimi_k25_weights(weights: Weights) -> Weights:
    weights = dict(weights)
    join_latent(weights)
    for path in [path for path in weights if ".wqkv." in path]:
        split(weights, path, "wqkv", ["q_proj", "k_proj", "v_proj"], [32, 32, 32])
    turned = re.compile(r"vision_tower.*attn\.[qk]_proj\.")
    return {
        path: halves(value, 16) if turned.search(path) else value
        for path, value in weights.items()
    }


def kimi_k25_inputs(inputs: Inputs) -> dict[str, Any]:
    if "pixel_values" not in inputs:
        return {"image_token_id": None}
    grids = torch.tensor([[1, *grid] for grid in inputs["image_grid_hws"].tolist()])
    return {"image_grid_thw": grids, "image_grid_hws": None, "image_token_id": None}


KIMI_K25 = (
    (r"^vision_tower\.blocks\.", "model.vision_tower.layers."),
    (r"^vision_tower\.", "model.vision_tower."),
    (r"layers\.(\d+)\.norm1\.", r"layers.\1.norm2."),
    (r"layers\.(\d+)\.norm0\.", r"layers.\1.norm1."),
    (r"mlp\.fc1\.", "mlp.fc2."),
    (r"mlp\.fc0\.", "mlp.fc1."),
    (r"attn\.wo\.", "attn.proj."),
    (r"pos_emb\.weight$", "pos_emb.position_embeddings"),
    (r"^mm_projector\.(proj\.0|linear_1)\.", "model.mm_projector.in_proj."),
    (r"^mm_projector\.(proj\.2|linear_2)\.", "model.mm_projector.out_proj."),
    (r"^mm_projector\.", "model.mm_projector."),
    *LANGUAGE,
)


def kimi_vl_weights(weights: Weights) -> Weights:
    """Kimi-VL's projector has other names, and its keys and values are made of the latent by one projection."""
    return kimi_k25_weights(
        {
            path.replace("multi_modal_projector.", "mm_projector."): value
            for path, value in weights.items()
        }
    )


# Mistral Large 3 ------------------------------------------------------------------------------------------------------


def mistral_large3(zoo: nn.Module) -> torch.nn.Module:
    """Mistral Small 4 has the same text model, whose queries also grow."""
    ours = zoo.config.text_config
    names = [
        "num_key_value_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
    ]
    names += [
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    ]
    names += ["first_k_dense_replace"]
    # the default turns whole heads
    turned = {"rope_type": "yarn", "factor": 1.0, "rope_theta": ours.rope_theta}
    turned |= {
        "llama_4_scaling_beta": 0.0,
        "original_max_position_embeddings": ours.max_position_embeddings,
    }
    config = transformers.Mistral3Config(
        text_config={
            **text_of(zoo),
            **same(ours, *names),
            "model_type": "mistral4",
            "rope_parameters": turned,
        },
        vision_config={"model_type": "pixtral", **vision_of(zoo), **PIXTRAL},
        image_token_index=zoo.config.image_token_index,
        spatial_merge_size=zoo.config.spatial_merge_size,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def mistral_large3_weights(weights: Weights) -> Weights:
    """Published ones have no bias on the choice of experts (`use_load_balancing_bias`)."""
    weights = {
        path: value
        for path, value in weights.items()
        if not path.endswith("e_score_correction_bias")
    }
    join_latent(weights)
    return weights


# Qwen3-Next -----------------------------------------------------------------------------------------------------------


def qwen3_next(zoo: nn.Module) -> torch.nn.Module:
    names = [
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    ]
    names += [
        "head_dim",
        "linear_num_value_heads",
        "linear_num_key_heads",
        "linear_key_head_dim",
        "vocab_size",
    ]
    names += [
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "num_experts",
        "num_experts_per_tok",
        "norm_topk_prob",
    ]
    names += [
        "decoder_sparse_step",
        "shared_expert_intermediate_size",
        "moe_intermediate_size",
        "rms_norm_eps",
    ]
    config = transformers.Qwen3NextConfig(
        **same(zoo.config, *names),
        layer_types=["linear_attention", "full_attention"] * 2,
        rope_parameters={**rope(zoo.config.rope_theta), "partial_rotary_factor": 0.5},
        tie_word_embeddings=False,
    )
    return transformers.Qwen3NextForCausalLM(config)


# MiniMax M3 -----------------------------------------------------------------------------------------------------------


def minimax_m3_vl(zoo: nn.Module) -> torch.nn.Module:
    ours, vision = zoo.config.text_config, zoo.config.vision_config
    names = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ]
    names += [
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "num_experts_per_tok",
        "num_local_experts",
    ]
    names += [
        "dense_intermediate_size",
        "shared_intermediate_size",
        "routed_scaling_factor",
        "rotary_dim",
    ]
    names += ["swiglu_alpha", "swiglu_limit", "max_position_embeddings"]
    sparse = ours.sparse_attention_config
    text = same(ours, *names)
    text["rope_parameters"] = {
        **rope(ours.rope_theta),
        "partial_rotary_factor": ours.partial_rotary_factor,
    }
    text["mlp_layer_types"] = [
        "sparse" if one else "dense" for one in ours.moe_layer_freq
    ]
    text["layer_types"] = [
        "minimax_m3_sparse" if one else "full_attention"
        for one in sparse["sparse_attention_freq"]
    ]
    text |= {
        "index_n_heads": sparse["sparse_num_index_heads"],
        "index_head_dim": sparse["sparse_index_dim"],
    }
    text |= {
        "index_block_size": sparse["sparse_block_size"],
        "index_topk_blocks": sparse["sparse_topk_blocks"],
    }
    text["index_local_blocks"] = sparse["sparse_local_block"]
    seen = [
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "patch_size",
        "image_size",
    ]
    config = transformers.MiniMaxM3VLConfig(
        text_config=text,
        vision_config={
            **same(vision, *seen),
            "rope_parameters": rope(vision.rope_theta),
        },
        **same(
            zoo.config,
            "image_token_index",
            "video_token_index",
            "projector_hidden_size",
        ),
        tie_word_embeddings=False,
    )
    return transformers.MiniMaxM3SparseForConditionalGeneration(config)


def minimax_m3_vl_weights(weights: Weights) -> Weights:
    found = {}
    for path, value in weights.items():
        if "patch_embedding" in path:
            # where the zoo's other convolutions have their channels
            value = np.moveaxis(value, 1, -1)
        if ".switch_mlp." in path:  # the shared expert is the last one
            found[path.replace("switch_mlp.", "shared_experts.")] = value[-1]
            path = path.replace("switch_mlp.", "experts.").removesuffix(".weight")
            value = value[:-1]
        if re.search(r"layers\.\d\.mlp\.gate_proj", path) and "language" in path:
            up = weights[path.replace("gate_proj", "up_proj")]
            path = path.replace("gate_proj", "gate_up_proj")
            value = np.concatenate([value, up])
        if not (re.search(r"layers\.\d\.mlp\.up_proj", path) and "language" in path):
            found[path] = value
    return found


MINIMAX_M3_VL = (
    (
        r"^vision_tower\.vision_model\.embeddings\.patch_embedding",
        "model.vision_tower.embeddings.proj",
    ),
    (r"^vision_tower\.vision_model\.encoder\.", "model.vision_tower."),
    (r"^vision_tower\.vision_model\.", "model.vision_tower."),
    (r"^patch_merge_mlp\.linear", "model.multi_modal_projector.merge_linear"),
    (r"^multi_modal_projector\.", "model.multi_modal_projector."),
    (r"block_sparse_moe\.e_score", "mlp.gate.e_score"),
    (r"block_sparse_moe\.", "mlp."),
    (r"self_attn\.index_([qk])_", r"self_attn.indexer.\1_"),
    *LANGUAGE,
)


# DeepSeek-V4 ----------------------------------------------------------------------------------------------------------


def deepseek_v4_text(zoo: nn.Module) -> torch.nn.Module:
    """Its third layer's pools are as small as the zoo's."""
    ours = zoo.config
    names = [
        "vocab_size",
        "hidden_size",
        "moe_intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
    ]
    names += [
        "q_lora_rank",
        "num_experts_per_tok",
        "n_routed_experts",
        "routed_scaling_factor",
        "rope_theta",
    ]
    names += [
        "compress_rope_theta",
        "hc_mult",
        "swiglu_limit",
        "sliding_window",
        "o_groups",
        "o_lora_rank",
    ]
    names += [
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "rms_norm_eps",
        "compress_ratios",
        "num_hash_layers",
    ]
    names += ["qk_rope_head_dim", "max_position_embeddings"]
    rates = {"compressed_sparse_attention": 4}
    rates["heavily_compressed_attention"] = zoo.language_model.layers[
        2
    ].attn.compress_ratio
    config = transformers.DeepseekV4Config(
        **same(ours, *names), compress_rates=rates, tie_word_embeddings=False
    )
    return transformers.DeepseekV4ForCausalLM(config)


def deepseek_v4_weights(weights: Weights) -> Weights:
    """Heads' groups of the output side by side."""
    return {
        path: np.concatenate(list(value)) if ".wo_a." in path else value
        for path, value in weights.items()
    }


DEEPSEEK_V4 = (
    (r"^language_model\.", ""),
    (r"\.attn\.indexer\.weights_proj", r".attn.compressor.indexer.scorer.weights_proj"),
    (r"\.attn\.indexer\.wq_b", r".attn.compressor.indexer.q_b_proj"),
    (r"\.attn\.indexer\.compressor\.", r".attn.compressor.indexer."),
    (r"(compressor.*)\.wkv\.", r"\1.kv_proj."),
    (r"(compressor.*)\.wgate\.", r"\1.gate_proj."),
    (r"(compressor.*)\.ape$", r"\1.position_bias"),
    (r"(compressor.*)\.norm\.", r"\1.kv_norm."),
    (r"\.attn\.wq_([ab])\.", r".attn.q_\1_proj."),
    (r"\.attn\.q_norm\.", ".attn.q_a_norm."),
    (r"\.attn\.wkv\.", ".attn.kv_proj."),
    (r"\.attn\.wo_([ab])\.", r".attn.o_\1_proj."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"hc_head\.(fn|base|scale)$", r"hc_head.hc_\1"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
)


# Step 3.7 -------------------------------------------------------------------------------------------------------------


def step3p7(zoo: nn.Module) -> torch.nn.Module:
    ours, vision = zoo.config.text_config, zoo.config.vision_config
    names = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
    ]
    names += [
        "num_attention_groups",
        "moe_num_experts",
        "moe_top_k",
        "moe_intermediate_size",
        "share_expert_dim",
    ]
    names += [
        "layer_types",
        "sliding_window",
        "swiglu_limits",
        "partial_rotary_factors",
        "moe_layers_enum",
    ]
    names += [
        "rope_theta",
        "attention_other_setting",
        "max_position_embeddings",
        "rms_norm_eps",
        "pad_token_id",
    ]
    config = transformers.Step3p7Config(
        text_config=same(ours, *names),
        vision_config=same(
            vision, "width", "layers", "heads", "image_size", "patch_size", "mlp_ratio"
        ),
        image_token_id=zoo.config.image_token_id,
        tie_word_embeddings=False,
    )
    return transformers.Step3p7ForConditionalGeneration(config)


def step3p7_weights(weights: Weights) -> Weights:
    """Queries and keys of the tower turn by halves of a head there, and neighbours here."""
    weights = dict(weights)
    for path in [path for path in weights if ".in_proj." in path]:
        split(weights, path, "in_proj", ["q_proj", "k_proj", "v_proj"], [32, 32, 32])
    turned = re.compile(r"vision_model.*attn\.[qk]_proj\.")
    return {
        path: halves(value, 16) if turned.search(path) else value
        for path, value in weights.items()
    }


def step3p7_inputs(inputs: Inputs) -> dict[str, Any]:
    if "pixel_values" not in inputs:
        return {}
    patches = {
        "num_local_patches": inputs["num_patches"].tolist(),
        "num_patches": None,
        "patch_pixel_values": None,
    }
    if "patch_pixel_values" in inputs:
        patches["pixel_values_local"] = torch.tensor(inputs["patch_pixel_values"])
    return patches


STEP3P7 = (
    (r"^vision_model\.", "model.vision_model."),
    (r"conv1\.", "embeddings.patch_embedding."),
    (r"positional_embedding$", "embeddings.position_embedding.weight"),
    (r"ln_pre\.", "pre_layernorm."),
    (r"\.transformer\.", ".layers."),
    (r"\.ln_1\.", ".layernorm_before."),
    (r"\.ln_2\.", ".layernorm_after."),
    (r"\.attn\.", ".self_attn."),
    (r"\.c_fc\.", ".fc1."),
    (r"\.c_proj\.", ".fc2."),
    (r"\.ls_([12])\.gamma$", r".lambda_\1"),
    (r"\.vit_downsampler", ".downsampler"),
    (r"^vit_large_projector\.", "model.multi_modal_projector."),
    (r"mlp\.gate\.gate\.", "mlp.gate."),
    (r"mlp\.gate\.router_bias$", "mlp.gate.e_score_correction_bias"),
    (r"\.share_expert\.", ".shared_experts."),
    *LANGUAGE,
)


# Nemotron Nano Omni ---------------------------------------------------------------------------------------------------


def nemotron_h_nano_omni(zoo: nn.Module) -> torch.nn.Module:
    ours, vision = zoo.config.text_config, zoo.config.vision_config
    names = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
    ]
    names += [
        "num_key_value_heads",
        "head_dim",
        "mamba_num_heads",
        "mamba_head_dim",
        "ssm_state_size",
        "conv_kernel",
    ]
    names += [
        "n_groups",
        "layer_norm_epsilon",
        "use_conv_bias",
        "moe_intermediate_size",
        "n_group",
        "topk_group",
    ]
    names += [
        "moe_shared_expert_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
    ]
    kinds = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
    seen = [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "patch_size",
        "image_size",
    ]
    heard = [
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "intermediate_size",
        "num_mel_bins",
    ]
    heard += ["subsampling_conv_channels", "projection_hidden_size", "projection_bias"]
    generator = zoo.vision_model.radio_model.model.patch_generator
    config = transformers.NemotronH_Omni_Reasoning_V3_Config(
        text_config={
            **same(ours, *names, "norm_topk_prob", "routed_scaling_factor"),
            "layers_block_type": [kinds[kind] for kind in ours.hybrid_override_pattern],
        },
        vision_config={
            **same(vision, *seen, "video_temporal_patch_size"),
            "mlp_ratio": vision.intermediate_size / vision.hidden_size,
            "max_img_size": vision.max_resolution,
            "num_cls_tokens": generator.num_cls_tokens,
            "num_registers": generator.num_registers,
            "torch_dtype": torch.float32,
        },
        audio_config={
            **same(zoo.config.sound_config, *heard),
            "convolution_bias": False,
        },
        audio_token_id=zoo.config.sound_context_token_id,
        vision_hidden_size=zoo.config.vit_hidden_size,
        **same(zoo.config, "projector_hidden_size", "downsample_ratio"),
        image_token_id=zoo.config.img_context_token_id,
    )
    return transformers.NemotronH_Omni_Reasoning_V3(config)


def nemotron_h_nano_omni_weights(weights: Weights) -> Weights:
    weights = dict(weights)
    for path in [path for path in weights if ".attn.qkv." in path]:
        split(weights, path, "qkv", ["q_proj", "k_proj", "v_proj"], [32, 32, 32])
    return weights


def nemotron_h_nano_omni_inputs(inputs: Inputs) -> dict[str, Any]:
    """Patches of all pictures in rows, and each picture's grid; spectrograms by transformers' own part."""
    found: dict[str, Any] = {}
    if "sound_clips" in inputs:
        part = transformers.ParakeetFeatureExtractor(feature_size=BANDS)
        made = part(inputs["sound_clips"], sampling_rate=16_000, return_tensors="pt")
        found = {
            "input_features": made["input_features"],
            "input_features_mask": made["attention_mask"],
        }
    if "pixel_values" not in inputs:
        return found
    number, channels, high, wide = inputs["pixel_values"].shape
    rows, columns = high // NEMOTRON_PATCH, wide // NEMOTRON_PATCH
    cells = inputs["pixel_values"].reshape(
        number, channels, rows, NEMOTRON_PATCH, columns, NEMOTRON_PATCH
    )
    patches = cells.transpose(0, 2, 4, 1, 3, 5).reshape(number * rows * columns, -1)
    grids = torch.tensor([[rows, columns]] * number)
    return {**found, "pixel_values": torch.tensor(patches), "image_grid_hw": grids}


NEMOTRON_H_NANO_OMNI = (
    (r"^language_model\.backbone\.", "language_model.model."),
    (r"^sound_encoder\.encoder\.", "audio_tower."),
    (r"^sound_projection\.norm\.", "embed_audio.layer_norm."),
    (r"^sound_projection\.linear(\d)\.", r"embed_audio.linear_\1."),
    (r"mixer\.switch_mlp\.fc1\.weight$", "mixer.experts.up_proj"),
    (r"mixer\.switch_mlp\.fc2\.weight$", "mixer.experts.down_proj"),
    (r"^vision_model\.radio_model\.model\.blocks\.", "vision_model.encoder.layer."),
    (r"patch_generator\.cls_token\.token$", "patch_generator.cls_register_token"),
    (r"patch_generator\.embedder\.", "patch_generator.patch_projection."),
    (r"patch_generator\.video_embedder\.", "patch_generator.video_patch_projection."),
    (r"patch_generator\.pos_embed$", "patch_generator.position_embedding"),
    (
        r"^vision_model\.radio_model\.model\.patch_generator\.",
        "vision_model.embeddings.",
    ),
    (r"\.attn\.proj\.", ".attention.o_proj."),
    (r"\.attn\.", ".attention."),
    (r"^mlp1\.layers\.0\.", "multi_modal_projector.layer_norm."),
    (r"^mlp1\.layers\.1\.", "multi_modal_projector.linear_1."),
    (r"^mlp1\.layers\.3\.", "multi_modal_projector.linear_2."),
)


#: What each family's ``Recipe`` is made of.
NEWER: dict[str, dict[str, Any]] = {
    "deepseek_v4_text": {
        "build": deepseek_v4_text,
        "rename": DEEPSEEK_V4,
        "regroup": deepseek_v4_weights,
    },
    "glm5_next": {
        "build": glm5_next,
        "rename": GLM5_NEXT,
        "regroup": glm5_next_weights,
    },
    "kimi_k25": {
        "build": kimi_k25,
        "rename": KIMI_K25,
        "regroup": kimi_k25_weights,
        "inputs": kimi_k25_inputs,
    },
    "kimi_k25_groups": {
        "build": kimi_k25,
        "rename": KIMI_K25,
        "regroup": kimi_k25_weights,
        "inputs": kimi_k25_inputs,
    },
    # The same model but for videos, which Kimi-VL has not: transformers has K2.5 alone.
    "kimi_vl": {
        "build": kimi_k25,
        "rename": KIMI_K25,
        "regroup": kimi_vl_weights,
        "inputs": kimi_k25_inputs,
    },
    "mistral_large3": {
        "build": mistral_large3,
        "rename": RENAME,
        "regroup": mistral_large3_weights,
        "convert": joined_experts,
    },
    "inkling": {"build": inkling, "rename": INKLING, "regroup": inkling_weights},
    "qwen3_next": {
        "build": qwen3_next,
        "rename": ((r"^language_model\.", ""),),
        "less_one": r"layernorm\.weight$|[qk]_norm\.weight$|model\.norm\.weight$",
    },
    "minimax_m3_vl": {
        "build": minimax_m3_vl,
        "rename": MINIMAX_M3_VL,
        "regroup": minimax_m3_vl_weights,
    },
    "nemotron_h_nano_omni": {
        "build": nemotron_h_nano_omni,
        "rename": NEMOTRON_H_NANO_OMNI,
        "regroup": nemotron_h_nano_omni_weights,
        "inputs": nemotron_h_nano_omni_inputs,
        "unused": r"input_conditioner",  # the processor's business, here and there
        "absent": r"layer_scale",  # all ones
    },
    "step3p7": {
        "build": step3p7,
        "rename": STEP3P7,
        "regroup": step3p7_weights,
        "inputs": step3p7_inputs,
        "less_one": r"^language_model.*norm\.weight$",
    },
    "muse_spark": {
        "build": muse_spark,
        "rename": (
            (
                r"^(audio_tower|vision_tower|vision_adapter|vision_projection)\.",
                r"model.\1.",
            ),
            *LANGUAGE,
        ),
        "regroup": muse_spark_weights,
        "inputs": muse_spark_inputs,
        "less_one": r"(input|pre_feedforward|post_feedforward)_layernorm\.weight$|(pre|post)_expert_norm\.weight$",
    },
}
