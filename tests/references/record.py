"""Record what transformers answers to the zoo's requests with the zoo's weights, one file per family.

    python tests/references/record.py            # all families
    python tests/references/record.py mllama     # these

Needs torch and transformers (recorded with torch 2.13 on a CPU and transformers 5.23); the tests need neither. Each
answer is `generate` of transformers itself, greedy, float32 and eager attention, so its cache, masks and positions are
those of transformers. A file holds, per request: a digest of the inputs, the tokens and the float32 log-probabilities
of every step; and a digest of the weights.

moondream3 and falcon_ocr have no class in transformers, so nothing is recorded for them; published.py records what a
model's own published code answers.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.nn as nn
import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.references.documents import DOCUMENTS
from tests.references.newer import NEWER
from tests.references.texts import TEXTS
from tests.references.towers import TOWERS, times_last
from tests.zoo import (
    FAMILIES,
    Inputs,
    TinyFamily,
    inputs_hash,
    recorded_requests,
    weights_hash,
)
from tests.zoo._build import weights_of
from tests.zoo.aya_vision import LOGIT_SCALE

STEPS = 8
ROUNDING = 5e-5
"""Answers closer than this to the recorded ones are those: between torch 2.13 and 2.15 they differ by up to 1.5e-5."""
HERE = Path(__file__).resolve().parent

TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LANGUAGE = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)


@dataclass(frozen=True)
class Recipe:
    """How transformers builds a family, and what its weights and inputs are called there."""

    build: Callable[[nn.Module], torch.nn.Module]
    rename: tuple[tuple[str, str], ...]
    inputs: Callable[[Inputs], Mapping[str, Any]] = field(default=lambda inputs: {})
    unused: str = "^$"
    """Weights of the zoo that transformers has no place for (a pattern)."""
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = field(
        default=lambda weights: weights
    )
    """What else must be done to the renamed weights."""
    logit_scale: float = 1.0
    """What transformers forgets to multiply logits with."""
    regroup: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = field(
        default=lambda weights: weights
    )
    """Splits or joins the zoo's weights where transformers holds them otherwise, before they are renamed."""
    absent: str = "^$"
    """Parameters of transformers that no request reaches (a pattern)."""
    less_one: str = "^$"
    """Norms whose weight transformers keeps as the distance from one (a pattern)."""


def mrope(section: list[int], **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": 100.0,
        "mrope_section": section,
        **more,
    }


def patches(config: Any) -> dict[str, int]:
    """What the vision configurations of Qwen and GLM have in common."""
    return {
        name: getattr(config.vision_config, name)
        for name in ("patch_size", "spatial_merge_size", "temporal_patch_size")
    }


def marker_ids(config: Any) -> dict[str, int]:
    return {
        name: getattr(config, name)
        for name in ("image_token_id", "video_token_id", "vision_start_token_id")
    }


def token_types(inputs: Inputs) -> dict[str, Any]:
    """transformers counts three-axis positions from the kinds of tokens, which its processors return."""
    if not {"image_grid_thw", "video_grid_thw"} & inputs.keys():
        return {}
    from tests.zoo._qwen import IMAGE, VIDEO

    ids = inputs["input_ids"]
    return {
        "mm_token_type_ids": torch.tensor(
            np.where(ids == VIDEO, 2, ids == IMAGE).astype(np.int64)
        )
    }


def qwen2_vl(zoo: nn.Module) -> torch.nn.Module:
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 64,
        "num_heads": 2,
        "mlp_ratio": 2,
        **patches(zoo.config),
    }
    text = {**TEXT, **HEADS, "vocab_size": zoo.config.vocab_size, "rms_norm_eps": 1e-6}
    text["rope_parameters"] = mrope([2, 3, 3])
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **marker_ids(zoo.config),
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl(zoo: nn.Module) -> torch.nn.Module:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
    }
    vision |= {
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
        **patches(zoo.config),
    }
    text = {**TEXT, **HEADS, "vocab_size": zoo.config.vocab_size, "rms_norm_eps": 1e-6}
    text["rope_parameters"] = mrope([2, 3, 3])
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **marker_ids(zoo.config),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(zoo: nn.Module) -> torch.nn.Module:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
    }
    vision |= {
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 1],
        **patches(zoo.config),
    }
    text = {
        **TEXT,
        **HEADS,
        "head_dim": 16,
        "vocab_size": zoo.config.vocab_size,
        "rms_norm_eps": 1e-6,
    }
    text["rope_parameters"] = mrope([4, 2, 2], mrope_interleaved=True)
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **marker_ids(zoo.config),
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def glm4v(zoo: nn.Module) -> torch.nn.Module:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 96,
        "out_hidden_size": 64,
        "num_heads": 2,
    }
    vision |= {
        "image_size": 16,
        "rms_norm_eps": zoo.config.vision_config.rms_norm_eps,
        **patches(zoo.config),
    }
    text = {
        **TEXT,
        **HEADS,
        "vocab_size": zoo.config.vocab_size,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
    }
    text["rope_parameters"] = mrope([2, 1, 1], partial_rotary_factor=0.5)
    markers = {
        "image_token_id": zoo.config.image_token_id,
        "video_token_id": zoo.config.video_token_id,
    }
    markers["image_start_token_id"] = zoo.config.vision_start_token_id
    markers["image_end_token_id"] = zoo.config.vision_end_token_id
    config = transformers.Glm4vConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **markers
    )
    return transformers.Glm4vForConditionalGeneration(config)


def experts(ours: Any) -> dict[str, Any]:
    """What Qwen's text configurations with experts have in common."""
    names = ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
    return {name: getattr(ours, name) for name in names}


def qwen3_vl_moe(zoo: nn.Module) -> torch.nn.Module:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
    }
    vision |= {
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 1],
        **patches(zoo.config),
    }
    text = {
        **TEXT,
        **HEADS,
        "head_dim": 16,
        "vocab_size": zoo.config.vocab_size,
        "rms_norm_eps": 1e-6,
    }
    text |= {
        **experts(zoo.config.text_config),
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    }
    text["rope_parameters"] = mrope([4, 2, 2], mrope_interleaved=True)
    config = transformers.Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **marker_ids(zoo.config),
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def qwen3_5_parts(zoo: nn.Module) -> dict[str, Any]:
    ours = zoo.config.text_config
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
    }
    vision |= {"num_position_embeddings": 25, **patches(zoo.config)}
    text = {
        **TEXT,
        **HEADS,
        "head_dim": 16,
        "vocab_size": zoo.config.vocab_size,
        "rms_norm_eps": 1e-6,
    }
    names = [
        "linear_num_value_heads",
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    ]
    text |= {name: getattr(ours, name) for name in [*names, "linear_conv_kernel_dim"]}
    text["layer_types"] = ["linear_attention", "full_attention"] * 2
    text["rope_parameters"] = mrope(
        [2, 1, 1], partial_rotary_factor=0.5, mrope_interleaved=True
    )
    return {
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": False,
        **marker_ids(zoo.config),
    }


def qwen3_5(zoo: nn.Module) -> torch.nn.Module:
    return transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(**qwen3_5_parts(zoo))
    )


def qwen3_5_moe(zoo: nn.Module) -> torch.nn.Module:
    parts = qwen3_5_parts(zoo)
    ours = zoo.config.text_config
    parts["text_config"] |= {
        **experts(ours),
        "shared_expert_intermediate_size": ours.shared_expert_intermediate_size,
    }
    return transformers.Qwen3_5MoeForConditionalGeneration(
        transformers.Qwen3_5MoeConfig(**parts)
    )


def qwen4_exp(zoo: nn.Module) -> torch.nn.Module:
    parts, ours = qwen3_5_parts(zoo), zoo.config.text_config
    names = [
        "shared_expert_intermediate_size",
        "norm_topk_prob",
        "hc_count",
        "hc_lowrank",
        "output_gate_type",
        "seed",
    ]
    names += [
        "ple_layer_ids",
        "ple_embed_dim",
        "ple_conv_kernel_size",
        "ngram_size",
        "heads_per_ngram",
        "eos_token_id",
    ]
    names += [
        "ngram_vocab_size_base",
        "make_ngram_vocab_size_divisible_by",
        "split_ngram_parts",
        "indexer_n_heads",
    ]
    names += [
        "indexer_kv_heads",
        "indexer_head_dim",
        "indexer_budget",
        "indexer_compress_ratio",
    ]
    parts["text_config"] |= experts(ours) | {
        name: getattr(ours, name) for name in names
    }
    return transformers.Qwen4ExpForConditionalGeneration(
        transformers.Qwen4ExpConfig(**parts)
    )


def join_ngrams(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One table of n-grams; mlx-vlm keeps the shards of the checkpoint apart."""
    tables: dict[str, list[np.ndarray]] = {}
    for path in sorted(path for path in weights if ".shards." in path):
        tables.setdefault(path.split("shards.")[0], []).append(weights[path])
    others = {path: value for path, value in weights.items() if ".shards." not in path}
    return others | {
        f"{prefix}weight": np.concatenate(parts) for prefix, parts in tables.items()
    }


def glm4v_moe(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 96,
        "out_hidden_size": 64,
        "num_heads": 2,
    }
    vision |= {
        "image_size": 16,
        "rms_norm_eps": zoo.config.vision_config.rms_norm_eps,
        **patches(zoo.config),
    }
    text = {
        **TEXT,
        **HEADS,
        "vocab_size": zoo.config.vocab_size,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
    }
    names = [
        "moe_intermediate_size",
        "num_experts_per_tok",
        "n_routed_experts",
        "n_shared_experts",
    ]
    text |= {
        name: getattr(ours, name)
        for name in [*names, "routed_scaling_factor", "first_k_dense_replace"]
    }
    text["rope_parameters"] = mrope([2, 1, 1], partial_rotary_factor=0.5)
    config = transformers.Glm4vMoeConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **glm_marker_ids(zoo.config),
    )
    return transformers.Glm4vMoeForConditionalGeneration(config)


def glm_marker_ids(config: Any) -> dict[str, int]:
    names = [
        "image_token_id",
        "video_token_id",
        "image_start_token_id",
        "image_end_token_id",
    ]
    return {
        name: getattr(
            config,
            name.replace("image_start", "vision_start").replace(
                "image_end", "vision_end"
            ),
        )
        for name in names
    }


def glm_ocr(zoo: nn.Module) -> torch.nn.Module:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 96,
        "out_hidden_size": 64,
        "num_heads": 2,
    }
    vision |= {"image_size": 16, "rms_norm_eps": 1e-5, **patches(zoo.config)}
    text = {
        **TEXT,
        **HEADS,
        "head_dim": 16,
        "vocab_size": zoo.config.vocab_size,
        "rms_norm_eps": 1e-5,
    }
    text["rope_parameters"] = mrope([2, 3, 3])
    names = [
        "image_token_id",
        "video_token_id",
        "image_start_token_id",
        "image_end_token_id",
    ]
    config = transformers.GlmOcrConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **{name: getattr(zoo.config, name) for name in names},
    )
    return transformers.GlmOcrForConditionalGeneration(config)


def qwen3_omni_moe(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.thinker_config
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
    }
    vision |= {
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 1],
        **patches(ours),
    }
    text = {
        **TEXT,
        **HEADS,
        "head_dim": 16,
        "vocab_size": ours.text_config.vocab_size,
        "rms_norm_eps": 1e-6,
    }
    text |= {
        **experts(ours.text_config),
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    }
    text["rope_parameters"] = mrope([4, 2, 2], mrope_interleaved=True)
    audio = {
        "d_model": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
    }
    audio |= {
        "num_mel_bins": 16,
        "output_dim": 64,
        "downsample_hidden_size": 8,
        "n_window_infer": 100,
    }
    names = [
        "image_token_id",
        "video_token_id",
        "audio_token_id",
        "audio_start_token_id",
        "vision_start_token_id",
    ]
    names += ["position_id_per_seconds"]
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        tie_word_embeddings=False,
        **{name: getattr(ours, name) for name in names},
    )
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)


def heard_lengths(inputs: Inputs) -> dict[str, Any]:
    """transformers counts positions of recordings from their lengths, which its processor gives by their mask."""
    if "feature_attention_mask" not in inputs:
        return {}
    heard_in_video = {"use_audio_in_video": True} if "video_grid_thw" in inputs else {}
    return {
        "audio_feature_lengths": torch.tensor(
            inputs["feature_attention_mask"].sum(axis=1)
        ),
        **heard_in_video,
    }


def paddleocr_vl(zoo: nn.Module) -> torch.nn.Module:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 16, "patch_size": 4}
    text = {
        **TEXT,
        **HEADS,
        "head_dim": 16,
        "vocab_size": zoo.config.text_config.vocab_size,
        "rms_norm_eps": 1e-5,
    }
    text |= {"rope_parameters": mrope([2, 3, 3]), "tie_word_embeddings": False}
    config = transformers.PaddleOCRVLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **marker_ids(zoo.config),
    )
    return transformers.PaddleOCRVLForConditionalGeneration(config)


def unbatched(inputs: Inputs) -> dict[str, Any]:
    """transformers' processor has no batch axis before the patches."""
    pixels = (
        {"pixel_values": torch.tensor(inputs["pixel_values"][0])}
        if "pixel_values" in inputs
        else {}
    )
    return {**token_types(inputs), **pixels}


def ernie4_5_moe_vl(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
    }
    text = {**TEXT, **HEADS, "vocab_size": zoo.config.vocab_size, "rms_norm_eps": 1e-5}
    text |= {
        "moe_intermediate_size": ours.moe_intermediate_size,
        "moe_k": 2,
        "moe_num_experts": 4,
    }
    text |= {"moe_num_shared_experts": 1, "rope_parameters": mrope(ours.mrope_section)}
    names = [
        "image_start_token_id",
        "image_end_token_id",
        "image_token_id",
        "video_token_id",
    ]
    config = transformers.Ernie4_5_VLMoeConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **{name: getattr(zoo.config, name) for name in names},
    )
    return transformers.Ernie4_5_VLMoeForConditionalGeneration(config)


def ernie_token_types(inputs: Inputs) -> dict[str, Any]:
    """Besides, which tokens go to the vision experts."""
    from tests.zoo.ernie4_5_moe_vl import MARKS

    types = torch.tensor(np.isin(inputs["input_ids"], MARKS).astype(np.int64))
    return (
        {**token_types(inputs), "moe_mm_token_type_ids": types}
        if "image_grid_thw" in inputs
        else {}
    )


def lfm2_vl(zoo: nn.Module) -> torch.nn.Module:
    vision = {
        "model_type": "siglip2_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "patch_size": 4,
    }
    vision |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_patches": 16,
        "vision_use_head": False,
    }
    text = {
        **TEXT,
        **HEADS,
        "model_type": "lfm2",
        "vocab_size": zoo.config.text_config.vocab_size,
        "norm_eps": 1e-5,
    }
    text |= {
        "layer_types": zoo.config.text_config.layer_types,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
    }
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    config = transformers.Lfm2VlConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=zoo.config.image_token_id,
        downsample_factor=zoo.config.downsample_factor,
        projector_hidden_size=zoo.config.projector_hidden_size,
    )
    return transformers.Lfm2VlForConditionalGeneration(config)


def falcon_h1(zoo: nn.Module) -> torch.nn.Module:
    """With all multipliers 1: mlx-vlm multiplies them into the weights when it loads a checkpoint."""
    names = [
        name
        for name in vars(zoo.config)
        if name.startswith("mamba_") and name not in ("mamba_expand", "mamba_use_mlp")
    ]
    config = transformers.FalconH1Config(
        **{**TEXT, "num_hidden_layers": 3},
        **HEADS,
        **{name: getattr(zoo.config, name) for name in names},
        vocab_size=zoo.config.vocab_size,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        mlp_multipliers=[1.0] * 2,
        ssm_multipliers=[1.0] * 5,
    )
    return transformers.FalconH1ForCausalLM(config)


def minicpmv_parts(zoo: nn.Module) -> dict[str, Any]:
    ours = zoo.config.text_config
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 32, "patch_size": 4, "insert_layer_id": 0}
    text = {
        **TEXT,
        **HEADS,
        "model_type": ours.model_type,
        "head_dim": 16,
        "vocab_size": ours.vocab_size,
    }
    names = [
        "linear_num_value_heads",
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    ]
    text |= {name: getattr(ours, name) for name in [*names, "linear_conv_kernel_dim"]}
    text["layer_types"] = ["linear_attention", "full_attention"] * 2
    text["rope_parameters"] = mrope(
        [2, 1, 1], partial_rotary_factor=0.5, mrope_interleaved=True
    )
    return {
        "text_config": text,
        "vision_config": vision,
        "insert_layer_id": 0,
        "image_size": 32,
    }


def minicpmv4_6(zoo: nn.Module) -> torch.nn.Module:
    from tests.zoo.minicpmv4_6 import IMAGE, VIDEO

    config = transformers.MiniCPMV4_6Config(
        **minicpmv_parts(zoo), image_token_id=IMAGE, video_token_id=VIDEO
    )
    return transformers.MiniCPMV4_6ForConditionalGeneration(config)


def minicpmv4_7(zoo: nn.Module) -> torch.nn.Module:
    parts, ours = minicpmv_parts(zoo), zoo.config
    shared = ours.text_config.shared_expert_intermediate_size
    parts["text_config"] |= {
        **experts(ours.text_config),
        "shared_expert_intermediate_size": shared,
    }
    names = ["image_token_id", "video_token_id", "image_start_id", "image_end_id"]
    names += ["slice_start_id", "slice_end_id", "newline_id"]
    config = transformers.MiniCPMV4_7Config(
        **parts, **{name: getattr(ours, name) for name in names}
    )
    return transformers.MiniCPMV4_7ForConditionalGeneration(config)


def packed(inputs: Inputs) -> dict[str, Any]:
    """All patches side by side, and the tokens' kinds where positions are made of them."""
    if "tgt_sizes" not in inputs:
        return {}
    from tests.zoo import minicpmv4_6, minicpmv4_7

    image = minicpmv4_6.IMAGE
    video = (minicpmv4_6 if "image_bound" in inputs else minicpmv4_7).VIDEO
    ids = inputs["input_ids"][0]
    begins = np.isin(ids, (image, video)) & (np.roll(ids, 1) != ids)
    found: dict[str, Any] = {"pixel_values": None}
    for marker, ending in ((image, ""), (video, "_videos")):
        mine = np.flatnonzero(ids[begins] == marker)
        if len(mine):
            pixels = np.concatenate(
                [inputs["pixel_values"][0][i] for i in mine], axis=-1
            )[None]
            found[f"pixel_values{ending}"] = torch.tensor(pixels)
            found[f"target_sizes{ending}"] = torch.tensor(inputs["tgt_sizes"][0][mine])
    kinds = np.where(
        inputs["input_ids"] == video, 2, inputs["input_ids"] == image
    ).astype(np.int64)
    types = (
        {} if "image_bound" in inputs else {"mm_token_type_ids": torch.tensor(kinds)}
    )
    return {**found, "tgt_sizes": None, "image_bound": None, **types}


def aya_vision(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "patch_size": 4,
    }
    vision |= {
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "image_size": 16,
        "vision_use_head": False,
    }
    text = {
        **TEXT,
        **HEADS,
        "model_type": "cohere2",
        "head_dim": 16,
        "vocab_size": ours.vocab_size,
    }
    text |= {
        "logit_scale": ours.logit_scale,
        "sliding_window": ours.sliding_window,
        "layer_norm_eps": 1e-5,
    }
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    text |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "pad_token_id": 0,
    }
    config = transformers.AyaVisionConfig(
        text_config=text,
        vision_config=vision,
        vision_feature_layer=-1,
        downsample_factor=2,
        alignment_intermediate_size=96,
        image_token_index=zoo.config.image_token_index,
    )
    return transformers.AyaVisionForConditionalGeneration(config)


def cohere2_vision(zoo: nn.Module) -> torch.nn.Module:
    parts = aya_vision(zoo).config.to_dict()
    config = transformers.Cohere2VisionConfig(
        text_config=parts["text_config"],
        vision_config=parts["vision_config"],
        downsample_factor=2,
        alignment_intermediate_size=96,
        image_token_id=zoo.config.image_token_index,
    )
    return transformers.Cohere2VisionForConditionalGeneration(config)


def mllama(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_global_layers": 1,
    }
    vision |= {
        "attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "max_num_tiles": 4,
    }
    vision |= {"vision_output_dim": 96, "intermediate_layers_indices": [0, 2]}
    text = {
        **TEXT,
        **HEADS,
        "num_hidden_layers": 5,
        "vocab_size": ours.vocab_size,
        "rms_norm_eps": 1e-6,
    }
    text |= {
        "cross_attention_layers": ours.text_config.cross_attention_layers,
        "pad_token_id": 0,
    }
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    config = transformers.MllamaConfig(
        text_config=text, vision_config=vision, image_token_index=ours.image_token_index
    )
    return transformers.MllamaForConditionalGeneration(config)


class NoTower(torch.nn.Module):
    """In the place of a tower that no request calls."""


GEMMA3N_SOUND = [
    "input_feat_size",
    "conf_num_attention_heads",
    "conf_num_hidden_layers",
    "sscp_conv_channel_size",
]
GEMMA3N_SOUND += ["conf_attention_chunk_size", "conf_attention_context_left"]


def gemma3n(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    text = {
        **TEXT,
        **HEADS,
        "num_hidden_layers": 5,
        "intermediate_size": [96] * 5,
        "head_dim": 16,
    }
    same = [
        "vocab_size",
        "vocab_size_per_layer_input",
        "laurel_rank",
        "hidden_size_per_layer_input",
        "sliding_window",
    ]
    same += [
        "activation_sparsity_pattern",
        "num_kv_shared_layers",
        "layer_types",
        "altup_coef_clip",
    ]
    text |= {name: getattr(ours, name) for name in same}
    text["rope_parameters"] = {
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": ours.rope_local_base_freq,
        },
        "full_attention": {"rope_type": "default", "rope_theta": ours.rope_theta},
    }
    sides = {
        name: {
            "hidden_size": side.hidden_size,
            "vocab_size": side.vocab_size,
            "vocab_offset": side.vocab_offset,
        }
        for name, side in [
            ("vision_config", zoo.config.vision_config),
            ("audio_config", zoo.config.audio_config),
        ]
    }
    heard = {name: getattr(zoo.config.audio_config, name) for name in GEMMA3N_SOUND}
    sides["audio_config"] |= heard
    config = transformers.Gemma3nConfig(
        audio_soft_tokens_per_image=zoo.config.audio_soft_tokens_per_image,
        text_config=text,
        image_token_id=zoo.config.image_token_id,
        audio_token_id=zoo.config.audio_token_id,
        vision_soft_tokens_per_image=zoo.config.vision_soft_tokens_per_image,
        **sides,
    )
    from_config = transformers.AutoModel.from_config

    def towerless(part: Any, **more: Any) -> torch.nn.Module:
        return (
            from_config(part, **more)
            if part.model_type in ("gemma3n_text", "gemma3n_audio")
            else NoTower()
        )

    with mock.patch(
        "transformers.models.gemma3n.modeling_gemma3n.AutoModel.from_config", towerless
    ):
        return transformers.Gemma3nForConditionalGeneration(config)


def ready_features(inputs: Inputs) -> dict[str, Any]:
    """Features that are already embedded take the place of pictures, as they do in the zoo."""
    if "cached_image_features" not in inputs:
        return {}
    features = torch.tensor(inputs["cached_image_features"])
    output = transformers.modeling_outputs.BaseModelOutputWithPooling(
        pooler_output=features
    )
    return {"mm_encoder_outputs": {"image": output}, "pixel_values": None}


def molmo2(zoo: nn.Module) -> torch.nn.Module:
    config = zoo.config
    sides = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    text = config.text_config
    vision = config.vision_config.vit_config
    pooling = config.vision_config.adapter_config
    names = (*sides, "num_hidden_layers", "vocab_size", "additional_vocab_size")
    markers = (
        "image_start_token_id",
        "low_res_image_start_token_id",
        "image_end_token_id",
        "image_patch_id",
    )
    markers += ("frame_start_token_id", "frame_end_token_id")
    rope = {"rope_type": "default", "rope_theta": text.rope_theta}
    vision_config = {
        name: getattr(vision, name) for name in (*sides, "num_hidden_layers")
    }
    vision_config |= {
        "image_size": vision.image_default_input_size,
        "patch_size": vision.image_patch_size,
    }
    return transformers.Molmo2ForConditionalGeneration(
        transformers.Molmo2Config(
            text_config={name: getattr(text, name) for name in names}
            | {"rope_parameters": rope},
            vision_config=vision_config,
            adapter_config={name: getattr(pooling, name) for name in sides}
            | {
                "text_hidden_size": text.hidden_size,
                "vision_feature_layer": pooling.vit_layers,
            },
            **{name: getattr(config, name) for name in markers},
        )
    )


def molmo2_weights(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One embedding table, and projections of their own for queries, keys, values, gates and ups."""
    found = {}
    for path, value in weights.items():
        if path.endswith("wte.embedding"):
            found[path] = np.concatenate(
                [value, weights[path.replace("embedding", "new_embedding")]]
            )
        elif path.endswith("att_proj.weight"):
            quarters = np.split(
                value, [value.shape[0] // 2, value.shape[0] * 3 // 4]
            )  # twice as many heads as KV heads
            found |= {
                path.replace("att_proj", f"{n}_proj"): part
                for n, part in zip("qkv", quarters, strict=True)
            }
        elif path.endswith("ff_proj.weight"):
            halves = zip(("up_proj", "gate_proj"), np.split(value, 2), strict=True)
            found |= {path.replace("ff_proj", name): part for name, part in halves}
        elif not path.endswith("new_embedding"):
            found[path] = value
    return found


def molmo2_inputs(inputs: Inputs) -> dict[str, Any]:
    from tests.zoo.molmo2 import is_picture

    if "pixel_values" not in inputs:
        return {}
    # transformers' processor counts patches over all pictures, mlx-vlm's (and the published one) within each.
    pooling, done = inputs["image_token_pooling"].copy(), 0
    tokens = inputs["image_grids"].reshape(-1, 2, 2).prod(axis=2).sum(axis=1)
    patches = (
        np.cumsum([0, *inputs["image_num_crops"]]) * inputs["pixel_values"].shape[1]
    )
    for count, before in zip(tokens, patches, strict=False):
        pooling[done : done + count][pooling[done : done + count] >= 0] += before
        done += count
    return {
        "mm_token_type_ids": torch.tensor(
            is_picture(inputs["input_ids"]).astype(np.int64)
        ),
        "image_token_pooling": torch.tensor(pooling),
    }


MINICPM = (
    (r"^vision_tower\.", "model.vision_tower."),
    (r"^vit_merger\.", "model.vision_tower.vit_merger."),
    (r"^merger\.", "model.merger."),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)
MINICPM_NORMS = r"^language_model.*(_layernorm|[qk]_norm|model\.norm)\.weight$"


def cohere_compass(zoo: nn.Module) -> torch.nn.Module:
    ours, tower = zoo.config.text_config, zoo.config.vision_config
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    same += (
        "num_key_value_heads",
        "head_dim",
        "layer_norm_eps",
        "sliding_window",
        "layer_types",
        "logit_scale",
    )
    text = {name: getattr(ours, name) for name in same} | {
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    }
    text["rope_parameters"] = {
        kind: {"rope_type": "default", "mrope_interleaved": True, **rope}
        for kind, rope in ours.rope_parameters.items()
    }
    vision = {
        "depth": tower.depth,
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.intermediate_size,
    }
    vision |= {
        "num_heads": tower.num_heads,
        "out_hidden_size": tower.out_hidden_size,
        **patches(zoo.config),
    }
    vision |= {
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": tower.deepstack_visual_indexes,
    }
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id")
    config = transformers.CohereCompassConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        **{name: getattr(zoo.config, name) for name in names},
    )
    return transformers.CohereCompassForConditionalGeneration(config)


def same_names(ours: Any, config: type, **more: Any) -> dict[str, Any]:
    """The settings of mlx-vlm's config that transformers' config class also has."""
    known = set(inspect.signature(config.__init__).parameters)
    return {name: value for name, value in vars(ours).items() if name in known} | more


def muse_glimmer(zoo: nn.Module) -> torch.nn.Module:
    return transformers.MuseGlimmerForConditionalGeneration(
        transformers.MuseGlimmerConfig(
            text_config=same_names(
                zoo.config.text_config, transformers.MuseGlimmerTextConfig
            ),
            vision_config=same_names(
                zoo.config.vision_config,
                transformers.MuseGlimmerVisionConfig,
                rope_parameters={"rope_type": "axial", "rope_theta": 10000.0},
            ),
            **{
                name: getattr(zoo.config, name)
                for name in ("image_token_id", "video_token_id", "out_hidden_size")
            },
            projector_hidden_size=zoo.config.projector_hidden_size,
        )
    )


def llama4(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config
    text = same_names(
        ours.text_config,
        transformers.Llama4TextConfig,
        attn_temperature_tuning=True,
        pad_token_id=0,
    )
    text |= {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ours.text_config.rope_theta,
        }
    }
    text.pop("moe_layers", None)
    text.pop("no_rope_layers", None)
    rope = {"rope_type": "default", "rope_theta": ours.vision_config.rope_theta}
    vision = same_names(
        ours.vision_config, transformers.Llama4VisionConfig, rope_parameters=rope
    )
    vision.pop("rope_theta", None)
    config = transformers.Llama4Config(
        text_config=text, vision_config=vision, image_token_index=ours.image_token_id
    )
    return transformers.Llama4ForConditionalGeneration(config)


def llama4_weights(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts as (experts, inputs, outputs), gates and ups in one."""
    found = {}
    for path, value in weights.items():
        if path.endswith("experts.gate_proj.weight"):
            both = np.concatenate(
                [value, weights[path.replace("gate_proj", "up_proj")]], axis=1
            )
            found[path.replace("gate_proj.weight", "gate_up_proj")] = both.swapaxes(
                1, 2
            ).copy()
        elif path.endswith("experts.down_proj.weight"):
            found[path.removesuffix(".weight")] = value.swapaxes(1, 2).copy()
        elif not path.endswith("experts.up_proj.weight"):
            found[path] = value
    return found


VISUAL = ((r"^vision_tower\.", "model.visual."), *LANGUAGE)
RECIPES: dict[str, Recipe] = {
    "qwen2_vl": Recipe(qwen2_vl, VISUAL, token_types),
    "qwen2_5_vl": Recipe(qwen2_5_vl, VISUAL, token_types),
    "qwen3_vl": Recipe(qwen3_vl, VISUAL, token_types),
    "qwen3_vl_moe": Recipe(qwen3_vl_moe, VISUAL, token_types),
    "qwen3_5": Recipe(
        qwen3_5,
        VISUAL,
        token_types,
        less_one=r"(_layernorm|[qk]_norm|model\.norm)\.weight$",
    ),
    "qwen3_5_moe": Recipe(
        qwen3_5_moe,
        VISUAL,
        token_types,
        less_one=r"(_layernorm|[qk]_norm|model\.norm)\.weight$",
    ),
    "qwen4_exp": Recipe(qwen4_exp, VISUAL, token_types, regroup=join_ngrams),
    "glm4v": Recipe(glm4v, VISUAL, token_types),
    "glm4v_moe": Recipe(glm4v_moe, VISUAL, token_types),
    "qwen3_omni_moe": Recipe(
        qwen3_omni_moe,
        (
            (r"^thinker\.", ""),
            (r"^vision_tower\.deepstack_merger_list", "vision_tower.merger_list"),
            (r"(merger[^.]*(?:\.\d)?)\.norm\.", r"\1.ln_q."),
            (r"(merger[^.]*(?:\.\d)?)\.linear_fc1\.", r"\1.mlp.0."),
            (r"(merger[^.]*(?:\.\d)?)\.linear_fc2\.", r"\1.mlp.2."),
            (r"^audio_tower\.", "model.audio_tower."),
            *VISUAL,
        ),
        heard_lengths,
    ),
    "paddleocr_vl": Recipe(
        paddleocr_vl,
        (
            (r"^visual\.projector\.", "model.projector."),
            (r"^visual\.layers\.", "model.visual.vision_model.encoder.layers."),
            (r"^visual\.", "model.visual.vision_model."),
            *LANGUAGE,
        ),
        unbatched,
    ),
    "ernie4_5_moe_vl": Recipe(
        ernie4_5_moe_vl,
        (
            (r"mlp\.switch_mlp\.", "mlp.text_moe.switch_mlp."),
            (r"mlp\.switch_mlp_1\.", "mlp.vision_moe.switch_mlp."),
            (r"mlp\.gate\.", "mlp.text_moe.gate."),
            (r"mlp\.gate_1\.", "mlp.vision_moe.gate."),
            (
                r"mlp\.e_score_correction_bias$",
                "mlp.text_moe.gate.moe_statics.e_score_correction_bias",
            ),
            (
                r"mlp\.e_score_correction_bias_1$",
                "mlp.vision_moe.gate.moe_statics.e_score_correction_bias",
            ),
            (r"_linear\.layers\.0\.", "_linear.fc1."),
            (r"_linear\.layers\.2\.", "_linear.fc2."),
            (r"_linear\.layers\.3\.", "_linear.ln."),
            (r"^(vision_tower|resampler_model)\.", r"model.\1."),
            *LANGUAGE,
        ),
        ernie_token_types,
    ),
    "lfm2_vl": Recipe(
        lfm2_vl, ((r"^(vision_tower|multi_modal_projector)\.", r"model.\1."), *LANGUAGE)
    ),
    "minicpmv4_6": Recipe(minicpmv4_6, MINICPM, packed, less_one=MINICPM_NORMS),
    "minicpmv4_7": Recipe(minicpmv4_7, MINICPM, packed, less_one=MINICPM_NORMS),
    "falcon_h1": Recipe(falcon_h1, ((r"^language_model\.", ""),)),
    "glm_ocr": Recipe(glm_ocr, VISUAL, token_types),
    "aya_vision": Recipe(
        aya_vision,
        (
            (r"^vision_tower\.vision_model\.", "model.vision_tower."),
            (r"^multi_modal_projector\.", "model.multi_modal_projector."),
            *LANGUAGE,
        ),
        # Cohere2's logits are scaled (modeling_cohere2.py), Aya Vision's class forgets it (modeling_aya_vision.py:390).
        logit_scale=LOGIT_SCALE,
    ),
    "aya_vision_cohere2": Recipe(
        cohere2_vision,
        (
            (r"^vision_tower\.vision_model\.", "model.vision_tower."),
            (r"^multi_modal_projector\.", "model.multi_modal_projector."),
            *LANGUAGE,
        ),
        logit_scale=LOGIT_SCALE,  # forgotten there too (modeling_cohere2_vision.py)
    ),
    "mllama": Recipe(
        mllama,
        (
            (r"^vision_tower\.", "model.vision_model."),
            (r"^multi_modal_projector\.", "model.multi_modal_projector."),
            *LANGUAGE,
        ),
    ),
    "gemma3n": Recipe(
        gemma3n,
        (
            (r"^embed_(vision|audio)\.", r"model.embed_\1."),
            (r"^audio_tower\.", "model.audio_tower."),
            *LANGUAGE,
        ),
        ready_features,
        convert=times_last,
        unused=r"layers\.[34]\.self_attn\.(k_proj|v_proj|k_norm)\.",
    ),
    "cohere_compass": Recipe(cohere_compass, VISUAL, token_types),
    "muse_glimmer": Recipe(
        muse_glimmer,
        (
            (r"^(vision_tower|vision_adapter|vision_projection)\.", r"model.\1."),
            *LANGUAGE,
        ),
    ),
    "llama4": Recipe(llama4, (), regroup=llama4_weights),
    "molmo2": Recipe(
        molmo2,
        (
            (r"^language_model\.lm_head", "lm_head"),
            (r"^language_model\.model\.", "model.language_model."),
            (r"wte\.embedding", "embed_tokens.weight"),
            (r"ln_f", "norm"),
            (r"attn_out", "o_proj"),
            (r"ff_out", "down_proj"),
            (r"ff_norm", "post_attention_layernorm"),
            (r"attn_norm", "input_layernorm"),
            (r"^vision_tower\.image_vit\.transformer\.", "model.vision_tower.layers."),
            (r"^vision_tower\.image_vit\.", "model.vision_tower."),
            (r"^vision_tower\.image_p", "model.multi_modal_projector.image_p"),
            (r"attention_norm", "layer_norm1"),
            (r"ffn_norm", "layer_norm2"),
            (r"feed_forward\.w([12])", r"mlp.fc\1"),
            (r"image_projector\.w1", "image_projector.gate_proj"),
            (r"image_projector\.w2", "image_projector.down_proj"),
            (r"image_projector\.w3", "image_projector.up_proj"),
            (r"\.attention\.w", ".self_attn.w"),
            (r"\.w([qkvo])\.", r".\1_proj."),
            (r"layers\.(\d)\.self_attn\.attn_out", r"layers.\1.self_attn.o_proj"),
            (r"language_model\.blocks", "language_model.layers"),
        ),
        molmo2_inputs,
        regroup=molmo2_weights,
    ),
}


RECIPES |= {
    name: Recipe(**facts)
    for name, facts in {**TOWERS, **NEWER, **DOCUMENTS, **TEXTS}.items()
}


def torch_weights(zoo: nn.Module, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The zoo's weights under transformers' names; convolutions have their channels second there."""
    renamed = {}
    for path, value in recipe.regroup(weights_of(zoo)).items():
        if re.search(recipe.unused, path):
            continue
        name = path
        if re.search(recipe.less_one, path):
            value = value - 1
        for pattern, replacement in recipe.rename:
            name = re.sub(pattern, replacement, name)
        is_convolution = value.ndim >= 4 or (value.ndim == 3 and ".conv" in path)
        renamed[name] = torch.tensor(
            np.moveaxis(value, -1, 1).copy() if is_convolution else value
        )
    for name in [
        name for name in renamed if re.search(r"vision_model.*\.self_attn\.qkv\.", name)
    ]:
        for part, value in zip("qkv", renamed.pop(name).chunk(3), strict=True):
            renamed[name.replace(".qkv.", f".{part}_proj.")] = value
    for name in [
        name for name in renamed if name.endswith("moe_statics.e_score_correction_bias")
    ]:
        renamed[name] = renamed[name][None]
    return recipe.convert(join_experts(renamed))


def join_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers keeps all experts' gates and ups in one parameter."""
    joined = {}
    for name, value in weights.items():
        if name.endswith(".switch_mlp.gate_proj.weight"):
            up = weights[name.replace("gate_proj", "up_proj")]
            joined[
                name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")
            ] = torch.cat([value, up], dim=1)
        elif name.endswith(".switch_mlp.down_proj.weight"):
            joined[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = (
                value
            )
        elif ".switch_mlp." not in name:
            joined[name] = value
    return joined


def load(zoo: nn.Module, recipe: Recipe) -> torch.nn.Module:
    """transformers' model with the zoo's weights; every parameter must find its place."""
    model = recipe.build(zoo).eval().float()
    model.set_attn_implementation("eager")
    missing, unexpected = model.load_state_dict(
        torch_weights(zoo, recipe), strict=False
    )
    # a tied head appears once, as the embedding
    parameters = {name for name, _ in model.named_parameters()}
    lacking = sorted(
        name for name in parameters & set(missing) if not re.search(recipe.absent, name)
    )
    if unexpected or lacking:
        raise LookupError(f"no place for {unexpected}, nothing for {lacking}")
    model.tie_weights()
    return model


@torch.no_grad()
def answer(
    model: torch.nn.Module, recipe: Recipe, inputs: Inputs
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (T,) and log-probabilities (T, V) of transformers' own greedy generation."""
    # lists are the recipe's
    given = {
        name: value for name, value in inputs.items() if not isinstance(value, list)
    }
    arrays = {
        name: torch.tensor(value)
        for name, value in given.items()
        if name != "cached_image_features"
    }
    arrays["input_ids"] = arrays["input_ids"].long()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    arrays |= {
        "attention_mask": torch.ones_like(arrays["input_ids"]),
        **recipe.inputs(inputs),
    }
    before = 1 if model.config.is_encoder_decoder else arrays["input_ids"].shape[1]
    output = model.generate(
        **{name: value for name, value in arrays.items() if value is not None},
        max_new_tokens=STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(output.logits).double() * recipe.logit_scale
    tokens = output.sequences[0, before:]
    return tokens.numpy().astype(np.int32), torch.log_softmax(
        logits, dim=-1
    ).float().numpy()


def record(tiny: TinyFamily) -> None:
    """Write tests/references/<family>.npz where the answers are not those recorded, and print how far the oracle is."""
    zoo, recipe = tiny.build(), RECIPES[tiny.name]
    model = load(zoo, recipe)
    stored: dict[str, Any] = {
        "weights": weights_hash(zoo),
        "transformers": transformers.__version__,
    }
    for name, inputs in recorded_requests(tiny).items():
        tokens, logprobs = answer(model, recipe, inputs)
        trace = tiny.greedy(zoo, inputs, STEPS)
        same = int((tokens == np.array(trace.tokens)).cumprod().sum())
        # The step at which tokens part still had equal contexts.
        distance = np.abs(logprobs[: same + 1] - trace.logprobs[: same + 1]).max()
        print(
            f"{tiny.name:12} {name:12} {same}/{STEPS} tokens, largest difference {distance:.1e}"
        )
        stored |= {
            f"{name}/inputs": inputs_hash(inputs),
            f"{name}/tokens": tokens,
            f"{name}/logprobs": logprobs,
        }
    path = HERE / f"{tiny.name}.npz"
    if news := changed(path, stored):
        print(f"{tiny.name:12} {news}: recorded anew")
        np.savez_compressed(path, **stored)


def changed(path: Path, stored: dict[str, Any]) -> str:
    """What an earlier recording has otherwise, beyond rounding, which another build of torch brings; empty if nothing."""
    if not path.exists():
        return "not recorded before"
    with np.load(path) as recorded:
        if recorded.keys() ^ stored.keys():
            return "other requests"
        names = sorted(
            name
            for name in stored
            if not name.endswith(("/logprobs", "transformers"))
            and recorded[name].tolist() != np.asarray(stored[name]).tolist()
        )
        names += [
            n
            for n in stored
            if n.endswith("/logprobs")
            and np.abs(recorded[n] - stored[n]).max() > ROUNDING
        ]
    return f"other {', '.join(names)}" if names else ""


if __name__ == "__main__":
    for family_name in sys.argv[1:] or RECIPES:
        record(FAMILIES[family_name])
