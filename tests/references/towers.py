"""Recipes for families of a picture tower, a projector and a plain decoder: see record.py, which runs them."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import torch
import transformers

from tests.zoo import Inputs
from tests.zoo.llava_onevision import PINPOINTS

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LANGUAGE = (r"^language_model\.model\.", "model.language_model."), (r"^language_model\.lm_head\.", "lm_head.")
TOWER = (r"^vision_tower\.vision_model\.", "model.vision_tower."), (r"^vision_tower\.", "model.vision_tower.")
PROJECTOR = (r"^multi_modal_projector\.", "model.multi_modal_projector.")
RENAME = (*TOWER, PROJECTOR, (r"^image_newline", "model.image_newline"), *LANGUAGE)


def rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def text_of(zoo: nn.Module, **more: Any) -> dict[str, Any]:
    """A text configuration like the zoo's."""
    ours = zoo.config.text_config
    same = {"vocab_size": ours.vocab_size, "rms_norm_eps": ours.rms_norm_eps}
    return {**TEXT, **same, "rope_parameters": rope(100.0), **more}


def vision_of(zoo: nn.Module, **more: Any) -> dict[str, Any]:
    """A vision configuration like the zoo's."""
    ours = zoo.config.vision_config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    return {name: getattr(ours, name) for name in names} | more


def without_batch(inputs: Inputs) -> dict[str, Any]:
    """transformers' processor has no axis in front of the tiles."""
    return {"pixel_values": torch.tensor(inputs["pixel_values"][0])} if "pixel_values" in inputs else {}


def llava(zoo: nn.Module) -> torch.nn.Module:
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **text_of(zoo)},
        vision_config={"model_type": "clip_vision_model", **vision_of(zoo)},
        image_token_index=zoo.config.image_token_index,
    )
    return transformers.LlavaForConditionalGeneration(config)


def llava_next(zoo: nn.Module) -> torch.nn.Module:
    config = transformers.LlavaNextConfig(
        text_config={"model_type": "mistral", "sliding_window": None, **text_of(zoo)},
        vision_config={"model_type": "clip_vision_model", **vision_of(zoo)},
        image_token_index=zoo.config.image_token_index,
        image_grid_pinpoints=PINPOINTS,
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def llava_onevision(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config
    config = transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **text_of(zoo)},
        vision_config={"model_type": "siglip_vision_model", **vision_of(zoo), "vision_use_head": False},
        image_token_index=ours.image_token_index,
        video_token_index=ours.video_token_index,
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio=ours.vision_aspect_ratio,
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def internvl(zoo: nn.Module) -> torch.nn.Module:
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False, **text_of(zoo)},
        vision_config=vision_of(zoo, attention_bias=True, use_mask_token=False),
        image_token_id=zoo.config.image_token_id,
        downsample_ratio=zoo.config.downsample_ratio,
        tie_word_embeddings=False,
    )
    return transformers.InternVLForConditionalGeneration(config)


#: What each family's ``Recipe`` is made of.
TOWERS: dict[str, dict[str, Any]] = {
    "llava": {"build": llava, "rename": RENAME},
    "internvl": {"build": internvl, "rename": RENAME, "inputs": without_batch},
    "llava_next": {"build": llava_next, "rename": RENAME},
    "llava_onevision": {"build": llava_onevision, "rename": RENAME},
}
