"""Recipes for readers of documents: Florence-2, GOT and their kin; see record.py, which runs them."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import numpy as np
import torch
import transformers

from tests.references.newer import LANGUAGE, Weights, rope, same, split
from tests.zoo import Inputs
from tests.zoo import _deepseek as deepseek_zoo
from tests.zoo import florence2 as florence2_zoo
from tests.zoo import hunyuan_vl as hunyuan_zoo
from tests.zoo._pictures import expanded

# Florence-2 -----------------------------------------------------------------------------------------------------------


def florence2(zoo: nn.Module) -> torch.nn.Module:
    ours, vision = zoo.config.text_config, zoo.config.vision_config
    names = [
        "d_model",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
    ]
    names += [
        "encoder_layers",
        "decoder_layers",
        "max_position_embeddings",
        "vocab_size",
        "decoder_start_token_id",
    ]
    seen = [
        "depths",
        "num_heads",
        "num_groups",
        "window_size",
        "patch_size",
        "patch_stride",
        "patch_padding",
    ]
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
    return weights | {
        f"language_model.model.{side}.embed_tokens.weight": words
        for side in ("encoder", "decoder")
    }


def florence2_inputs(inputs: Inputs) -> dict[str, Any]:
    """A placeholder for every feature."""
    count = [florence2_zoo.NUM_FEATURES] if "pixel_values" in inputs else []
    return {
        "input_ids": torch.tensor(
            expanded(inputs["input_ids"], florence2_zoo.IMAGE, count)
        ),
        "attention_mask": None,
    }


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
    names = [
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    ]
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
    return {
        path: as_convolution(value) if path.endswith("pos_embed") else value
        for path, value in weights.items()
    }


def got_inputs(inputs: Inputs) -> dict[str, Any]:
    """Channels first."""
    if "pixel_values" not in inputs:
        return {}
    return {
        "pixel_values": torch.tensor(
            inputs["pixel_values"].transpose(0, 3, 1, 2).copy()
        )
    }


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


# DeepSeek-OCR, DeepSeek-OCR-2, Unlimited-OCR --------------------------------------------------------------------------

UNLIMITED = 1000
"""A window that no answer reaches: DeepSeek-OCR is Unlimited-OCR without one."""


def deepseek_text(zoo: nn.Module) -> dict[str, Any]:
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
        "n_shared_experts",
        "n_routed_experts",
        "topk_method",
    ]
    names += ["num_experts_per_tok", "max_position_embeddings", "rms_norm_eps"]
    dense = ours.first_k_dense_replace
    kinds = ["dense"] * dense + ["sparse"] * (ours.num_hidden_layers - dense)
    return {
        **same(ours, *names),
        "mlp_layer_types": kinds,
        "rope_parameters": rope(ours.rope_theta),
    }


def small_sam(zoo: nn.Module) -> dict[str, Any]:
    tower = zoo.sam_model
    return {
        "hidden_size": 32,
        "num_hidden_layers": len(tower.blocks),
        "num_attention_heads": 2,
        "mlp_dim": 128,
        "image_size": deepseek_zoo.VIEW,
        "patch_size": deepseek_zoo.PATCH,
        "window_size": tower.blocks[0].window_size,
        "global_attn_indexes": [1],
        "output_channels": tower.net_2.weight.shape[-1],
        "downsample_channels": [len(tower.net_2.weight), len(tower.net_3.weight)],
    }


def deepseekocr(zoo: nn.Module) -> torch.nn.Module:
    vision = zoo.config.vision_config
    sizes = same(
        vision, "hidden_size", "intermediate_size", "num_attention_heads", "patch_size"
    )
    window = getattr(zoo.config.text_config, "sliding_window", UNLIMITED)
    config = transformers.UnlimitedOcrConfig(
        text_config={**deepseek_text(zoo), "sliding_window": window},
        vision_config={
            "sam_config": small_sam(zoo),
            "encoder_config": {
                **sizes,
                "num_hidden_layers": vision.layers,
                "image_size": 224,
            },
        },
        image_token_id=zoo.config.image_token_index,
        tie_word_embeddings=False,
    )
    return transformers.UnlimitedOcrForConditionalGeneration(config)


class StandIn(torch.nn.Module):
    """As in the zoo, where SAM is the real one and what stands behind it is a projection."""

    def __init__(self, sam_encoder: torch.nn.Module) -> None:
        super().__init__()
        self.sam_encoder, self.project = sam_encoder, torch.nn.Linear(32, 32)

    def forward(self, pixel_values: torch.Tensor, **more: Any) -> Any:
        features = (
            self.sam_encoder(pixel_values).last_hidden_state.flatten(2).transpose(1, 2)
        )
        return transformers.modeling_outputs.BaseModelOutput(
            last_hidden_state=self.project(features)
        )


def deepseekocr_2(zoo: nn.Module) -> torch.nn.Module:
    encoder = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = transformers.DeepseekOcr2Config(
        text_config=deepseek_text(zoo),
        vision_config={"sam_config": small_sam(zoo), "encoder_config": encoder},
        image_token_id=zoo.config.image_token_index,
        tie_word_embeddings=False,
    )
    model = transformers.DeepseekOcr2ForConditionalGeneration(config)
    model.model.vision_tower = StandIn(model.model.vision_tower.sam_encoder)
    return model


def deepseekocr_weights(weights: Weights) -> Weights:
    weights = {
        path: as_convolution(value) if path.endswith("pos_embed") else value
        for path, value in weights.items()
    }
    for path in [path for path in weights if ".qkv_proj." in path]:
        split(weights, path, "qkv_proj", ["q_proj", "k_proj", "v_proj"], [32, 32, 32])
    return weights


def deepseekocr_inputs(inputs: Inputs) -> dict[str, Any]:
    """Whole views, then the crops of all pictures, and each picture's columns and rows."""
    if "pixel_values" not in inputs:
        return {}
    crops, views = inputs["pixel_values"]
    grids = inputs["images_spatial_crop"].tolist()
    numbers = [wide * high if wide * high > 1 else 0 for wide, high in grids]
    found = {
        "pixel_values": torch.tensor(views),
        "num_local_patches": numbers,
        "patches_grid": grids,
    }
    local = {"pixel_values_local": torch.tensor(crops)} if sum(numbers) else {}
    return {**found, **local, "images_seq_mask": None, "images_spatial_crop": None}


def deepseekocr_2_inputs(inputs: Inputs) -> dict[str, Any]:
    """Crops stand one after another, without rows."""
    return {
        name: value
        for name, value in deepseekocr_inputs(inputs).items()
        if name != "patches_grid"
    }


DEEPSEEKOCR = (
    (r"^sam_model\.patch_embed\.proj\.", "sam_model.patch_embed.projection."),
    (r"^sam_model\.blocks\.(\d+)\.norm", r"sam_model.layers.\1.layer_norm"),
    (r"^sam_model\.blocks\.", "sam_model.layers."),
    (r"^sam_model\.neck\.0\.", "sam_model.neck.conv1."),
    (r"^sam_model\.neck\.1\.", "sam_model.neck.layer_norm1."),
    (r"^sam_model\.neck\.2\.", "sam_model.neck.conv2."),
    (r"^sam_model\.neck\.3\.", "sam_model.neck.layer_norm2."),
    (r"^sam_model\.net_2\.", "sam_model.proj.conv1."),
    (r"^sam_model\.net_3\.", "sam_model.proj.conv2."),
    (r"^sam_model\.", "model.vision_tower.sam_encoder."),
    (r"^vision_model\.project\.", "model.vision_tower.project."),
    (r"^vision_model\.transformer\.", "vision_model.encoder."),
    (r"^vision_model\.", "model.vision_tower.vision_encoder."),
    (r"^projector\.layers\.", "model.multi_modal_projector."),
    (r"^(image_newline|view_separator)$", r"model.\1"),
    *LANGUAGE,
)


# HunyuanOCR -----------------------------------------------------------------------------------------------------------


def hunyuan_vl(zoo: nn.Module) -> torch.nn.Module:
    """With two functions as in the published code and vLLM (hunyuan_vision.py). Both halves of a rotary pair are turned by
    one axis: transformers repeats a head's sections as numbers, not as a list (modeling_hunyuan_vl.py:165). And vision
    positions are resized by a tenth of a patch more: transformers gives the size instead (modeling_hunyuan_vl.py:214)."""
    ours, vision = zoo.config.text_config, zoo.config.vision_config
    names = [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ]
    sections = ours.rope_scaling["xdrope_section"]
    config = transformers.HunYuanVLConfig(
        text_config={
            **same(ours, *names, "intermediate_size", "rms_norm_eps"),
            "rope_parameters": {**rope(ours.rope_theta), "mrope_section": sections},
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        vision_config=same(
            vision,
            *[
                "hidden_size",
                "out_hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "intermediate_size",
            ],
            *["patch_size", "max_image_size"],
        ),
        image_token_id=zoo.config.image_token_id,
        tie_word_embeddings=False,
    )

    def by_one_axis(freqs: torch.Tensor) -> torch.Tensor:
        """(axes, B, L, D / 2) -> (B, L, D)"""
        parts = enumerate(torch.cat([freqs, freqs], dim=-1).split(sections * 2, dim=-1))
        return torch.cat([part[index % len(sections)] for index, part in parts], dim=-1)

    def a_tenth_more(embeddings: torch.Tensor, height: Any, width: Any) -> torch.Tensor:
        """(1, height * width, D)"""
        embed = model.model.vision_tower.embeddings
        side, table = embed.position_edge, embed.position_embedding.weight[1:]
        grid = table.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        factors = (float(height + 0.1) / side, float(width + 0.1) / side)
        resized = torch.nn.functional.interpolate(
            grid, scale_factor=factors, mode="bilinear", align_corners=False
        )
        return resized.flatten(2).transpose(1, 2)

    model = transformers.HunYuanVLForConditionalGeneration(config)
    model.model.vision_tower.embeddings.interpolate_pos_encoding = a_tenth_more
    model.model.language_model.rotary_emb.recomposition_frequencies = by_one_axis
    return model


def hunyuan_vl_inputs(inputs: Inputs) -> dict[str, Any]:
    kinds = torch.tensor((inputs["input_ids"] == hunyuan_zoo.IMAGE).astype(np.int64))
    return {"mm_token_type_ids": kinds}


HUNYUAN_VL = (
    (r"^(vision_tower\.layers\.\d+)\.input_layernorm\.", r"\1.layer_norm1."),
    (r"^(vision_tower\.layers\.\d+)\.post_attention_layernorm\.", r"\1.layer_norm2."),
    (r"\.dense_h_to_4h\.", ".fc1."),
    (r"\.dense_4h_to_h\.", ".fc2."),
    (r"\.perceive\.proj\.0\.", ".patch_merger.proj_conv."),
    (r"\.perceive\.proj\.2\.", ".patch_merger.proj_out."),
    (r"\.perceive\.", ".patch_merger."),
    (r"^vision_tower\.", "model.vision_tower."),
    *LANGUAGE,
)


WITH_CLIP: dict[str, Any] = {
    "build": deepseekocr,
    "rename": DEEPSEEKOCR,
    "regroup": deepseekocr_weights,
    "inputs": deepseekocr_inputs,
    "unused": r"embeddings\.patch_embedding",  # SAM's features take their place
}

#: What each family's ``Recipe`` is made of.
DOCUMENTS: dict[str, dict[str, Any]] = {
    "florence2": {
        "build": florence2,
        "rename": FLORENCE2,
        "regroup": florence2_weights,
        "inputs": florence2_inputs,
    },
    "deepseekocr": WITH_CLIP,
    "unlimited_ocr": WITH_CLIP,
    "deepseekocr_2": {
        "build": deepseekocr_2,
        "rename": DEEPSEEKOCR,
        "regroup": deepseekocr_weights,
        "inputs": deepseekocr_2_inputs,
    },
    "hunyuan_vl": {
        "build": hunyuan_vl,
        "rename": HUNYUAN_VL,
        "inputs": hunyuan_vl_inputs,
    },
    "got": {"build": got, "rename": GOT, "regroup": got_weights, "inputs": got_inputs},
}
