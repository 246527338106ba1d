"""Recipes for readers of documents: Florence-2, GOT and their kin; see record.py, which runs them."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import numpy as np
import torch
import transformers

from tests.references.newer import LANGUAGE, Weights, rope, same
from tests.zoo import Inputs
from tests.zoo import florence2 as florence2_zoo
from tests.zoo._pictures import expanded

# Florence-2 -----------------------------------------------------------------------------------------------------------


def florence2(zoo: nn.Module) -> torch.nn.Module:
    ours, vision = zoo.config.text_config, zoo.config.vision_config
    names = ["d_model", "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"]
    names += ["encoder_layers", "decoder_layers", "max_position_embeddings", "vocab_size", "decoder_start_token_id"]
    seen = ["depths", "num_heads", "num_groups", "window_size", "patch_size", "patch_stride", "patch_padding"]
    config = transformers.Florence2Config(
        text_config={**same(ours, *names), "forced_eos_token_id": None},
        vision_config={
            **same(vision, *seen, "patch_prenorm", "mlp_ratio"),
            "embed_dim": vision.dim_embed,
            "projection_dim": ours.d_model,
        },
        image_token_id=zoo.config.image_token_id,
        tie_word_embeddings=False,
    )
    return transformers.Florence2ForConditionalGeneration(config)


def florence2_weights(weights: Weights) -> Weights:
    """The projection is a linear layer's there, and encoder and decoder look the words up themselves."""
    weights = dict(weights)
    weights["image_projection.weight"] = weights.pop("image_projection").T.copy()
    words = weights["language_model.model.shared.weight"]
    return weights | {f"language_model.model.{side}.embed_tokens.weight": words for side in ("encoder", "decoder")}


def florence2_inputs(inputs: Inputs) -> dict[str, Any]:
    """A placeholder for every feature."""
    count = [florence2_zoo.NUM_FEATURES] if "pixel_values" in inputs else []
    return {"input_ids": torch.tensor(expanded(inputs["input_ids"], florence2_zoo.IMAGE, count)), "attention_mask": None}


FLORENCE2 = (
    (r"^(vision_tower\.convs\.\d+)\.proj\.", r"\1.conv."),
    (r"\.fn\.dw\.", "."),
    (r"\.(window_attn|channel_attn)\.norm\.", ".norm1."),
    (r"\.(window_attn|channel_attn)\.fn\.", r".\1."),
    (r"\.ffn\.norm\.", ".norm2."),
    (r"\.ffn\.fn\.net\.", ".ffn."),
    (r"^vision_tower\.", "model.vision_tower."),
    (r"^image_pos_embed\.", "image_position_embed."),
    (r"^(image_|visual_)", r"model.multi_modal_projector.\1"),
    *LANGUAGE,
)


# GOT ------------------------------------------------------------------------------------------------------------------


def got(zoo: nn.Module) -> torch.nn.Module:
    ours, vision = zoo.config.text_config, zoo.config.vision_config
    names = ["hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
    config = transformers.GotOcr2Config(
        text_config={
            **same(ours, *names, "rms_norm_eps", "vocab_size"),
            "model_type": "qwen2",
            "rope_parameters": rope(ours.rope_theta),
        },
        vision_config={
            "hidden_size": vision.embed_dim,
            "output_channels": vision.out_chans,
            "num_hidden_layers": vision.depth,
            "num_attention_heads": vision.num_heads,
            "image_size": vision.img_size,
            "mlp_dim": int(vision.embed_dim * vision.mlp_ratio),
            **same(vision, "patch_size", "window_size", "global_attn_indexes"),
        },
        image_token_index=zoo.config.im_patch_token,
        tie_word_embeddings=False,
    )
    return transformers.GotOcr2ForConditionalGeneration(config)


def as_convolution(value: np.ndarray) -> np.ndarray:
    """With the axes that the renaming moves back: a table of four axes is no convolution."""
    return np.moveaxis(value, 1, -1)


def got_weights(weights: Weights) -> Weights:
    return {path: as_convolution(value) if path.endswith("pos_embed") else value for path, value in weights.items()}


def got_inputs(inputs: Inputs) -> dict[str, Any]:
    """Channels first."""
    if "pixel_values" not in inputs:
        return {}
    return {"pixel_values": torch.tensor(inputs["pixel_values"].transpose(0, 3, 1, 2).copy())}


GOT = (
    (r"^multi_modal_projector\.", "multi_modal_projector.multimodal_projector."),
    (r"^vision_tower\.net_2\.", "multi_modal_projector.conv_upsampler1."),
    (r"^vision_tower\.net_3\.", "multi_modal_projector.conv_upsampler2."),
    (r"^vision_tower\.norm", "vision_tower.neck.layer_norm"),
    (r"^vision_tower\.conv", "vision_tower.neck.conv"),
    (r"^vision_tower\.patch_embed\.proj\.", "vision_tower.patch_embed.projection."),
    (r"^vision_tower\.blocks\.(\d+)\.norm", r"vision_tower.blocks.\1.layer_norm"),
    (r"^vision_tower\.blocks\.", "vision_tower.layers."),
    (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
    *LANGUAGE,
)


#: What each family's ``Recipe`` is made of.
DOCUMENTS: dict[str, dict[str, Any]] = {
    "florence2": {
        "build": florence2,
        "rename": FLORENCE2,
        "regroup": florence2_weights,
        "inputs": florence2_inputs,
    },
    "got": {"build": got, "rename": GOT, "regroup": got_weights, "inputs": got_inputs},
}
