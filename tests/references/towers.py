"""Recipes for families of a picture tower, a projector and a plain decoder: see record.py, which runs them."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import numpy as np
import torch
import transformers

from tests.zoo import Inputs
from tests.zoo._cached import IMAGE as CACHED_IMAGE
from tests.zoo._pictures import expanded
from tests.zoo.gemma3 import IMAGE as GEMMA3_IMAGE
from tests.zoo.gemma4 import PATCH as GEMMA4_PATCH
from tests.zoo.llava_onevision import PINPOINTS
from tests.zoo.multi_modality import IMAGE as MULTI_IMAGE
from tests.zoo.multi_modality import TOKENS as MULTI_TOKENS
from tests.zoo.phi4_siglip import NO_TOKEN
from tests.zoo.phi4_siglip import VOCABULARY as PHI4_VOCABULARY

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LANGUAGE = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)
TOWER = (
    (r"^vision_tower\.vision_model\.", "model.vision_tower."),
    (r"^vision_tower\.", "model.vision_tower."),
)
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
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "image_size",
        "patch_size",
    )
    return {name: getattr(ours, name) for name in names} | more


def without_batch(inputs: Inputs) -> dict[str, Any]:
    """transformers' processor has no axis in front of the tiles."""
    return (
        {"pixel_values": torch.tensor(inputs["pixel_values"][0])}
        if "pixel_values" in inputs
        else {}
    )


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


def granite_vision(zoo: nn.Module) -> torch.nn.Module:
    ours, text = zoo.config, zoo.config.text_config
    names = (
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    )
    config = transformers.LlavaNextConfig(
        text_config={
            "model_type": "granite",
            **text_of(zoo),
            **{name: getattr(text, name) for name in names},
        },
        vision_config={
            "model_type": "siglip_vision_model",
            **vision_of(zoo),
            "vision_use_head": False,
        },
        image_token_index=ours.image_token_index,
        image_grid_pinpoints=ours.image_grid_pinpoints,
        vision_feature_layer=ours.vision_feature_layer,
        vision_feature_select_strategy=ours.vision_feature_select_strategy,
        tie_word_embeddings=False,
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def granite4_vision(zoo: nn.Module) -> torch.nn.Module:
    ours, text = zoo.config, zoo.config.text_config
    names = (
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    )
    config = transformers.Granite4VisionConfig(
        text_config={
            "model_type": "granitemoehybrid",
            **text_of(zoo),
            **{name: getattr(text, name) for name in names},
            "layer_types": ["attention"] * 4,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
        },
        vision_config={
            "model_type": "siglip_vision_model",
            **vision_of(zoo),
            "vision_use_head": False,
        },
        image_token_index=ours.image_token_index,
        image_grid_pinpoints=ours.image_grid_pinpoints,
        downsample_rate=ours.downsample_rate,
        deepstack_layer_map=ours.deepstack_layer_map,
        use_spatial_sampling=True,
        spatial_target_layers=ours.spatial_target_layers,
        spatial_vision_layer=ours.spatial_vision_layer,
        vision_feature_select_strategy=ours.vision_feature_select_strategy,
        tie_word_embeddings=False,
    )
    return transformers.Granite4VisionForConditionalGeneration(config)


def llava_onevision(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config
    config = transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **text_of(zoo)},
        vision_config={
            "model_type": "siglip_vision_model",
            **vision_of(zoo),
            "vision_use_head": False,
        },
        image_token_index=ours.image_token_index,
        video_token_index=ours.video_token_index,
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio=ours.vision_aspect_ratio,
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def paligemma(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    text = text_of(zoo, model_type=ours.model_type, head_dim=ours.head_dim)
    if ours.model_type == "gemma2":
        text |= {"query_pre_attn_scalar": ours.query_pre_attn_scalar}
        text |= {
            name: getattr(ours, name)
            for name in ("attn_logit_softcapping", "final_logit_softcapping")
        }
    config = transformers.PaliGemmaConfig(
        text_config=text,
        vision_config=vision_of(
            zoo, model_type="siglip_vision_model", vision_use_head=False
        ),
        image_token_index=zoo.config.image_token_index,
        projection_dim=64,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def all_prefix(inputs: Inputs) -> dict[str, Any]:
    """No token is an answer's (transformers' processor returns the types)."""
    return {"token_type_ids": torch.zeros(inputs["input_ids"].shape, dtype=torch.long)}


#: Published checkpoints say silu; transformers' default is gelu.
PIXTRAL: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": rope(10000.0),
    "hidden_act": "silu",
}


def pixtral(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config
    config = transformers.LlavaConfig(
        text_config={
            "model_type": "mistral",
            "head_dim": 16,
            "sliding_window": None,
            **text_of(zoo),
        },
        vision_config={"model_type": "pixtral", **vision_of(zoo), **PIXTRAL},
        image_token_index=ours.image_token_index,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return transformers.LlavaForConditionalGeneration(config)


MISTRAL4 = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "rope_interleave",
)
MISTRAL4 += (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
MISTRAL4 += ("first_k_dense_replace",)


def mistral3(zoo: nn.Module) -> torch.nn.Module:
    ours, text = zoo.config, zoo.config.text_config
    more: dict[str, Any] = {"model_type": text.model_type, "tie_word_embeddings": False}
    if text.rope_parameters:
        more["rope_parameters"] = dict(text.rope_parameters)
    if text.model_type == "mistral4":
        more |= {name: getattr(text, name) for name in MISTRAL4} | {
            "num_key_value_heads": 4
        }
    else:
        more["head_dim"] = text.head_dim
    config = transformers.Mistral3Config(
        text_config={**text_of(zoo), **more, "sliding_window": None},
        vision_config={"model_type": "pixtral", **vision_of(zoo), **PIXTRAL},
        image_token_index=ours.image_token_index,
        spatial_merge_size=ours.spatial_merge_size,
        multimodal_projector_bias=ours.multimodal_projector_bias,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def idefics2(zoo: nn.Module) -> torch.nn.Module:
    perceiver = zoo.config.perceiver_config
    names = (
        "num_key_value_heads",
        "resampler_depth",
        "resampler_head_dim",
        "resampler_n_heads",
        "resampler_n_latents",
    )
    config = transformers.Idefics2Config(
        text_config={"model_type": "mistral", "sliding_window": None, **text_of(zoo)},
        vision_config=vision_of(zoo),
        perceiver_config={name: getattr(perceiver, name) for name in names},
        image_token_id=zoo.config.image_token_id,
        tie_word_embeddings=False,
    )
    return transformers.Idefics2ForConditionalGeneration(config)


def idefics3(zoo: nn.Module) -> torch.nn.Module:
    kind = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[zoo.config.model_type]
    config = getattr(transformers, f"{kind}Config")(
        text_config={"model_type": "llama", **text_of(zoo), "pad_token_id": 0},
        vision_config=vision_of(zoo),
        image_token_id=zoo.config.image_token_id,
        scale_factor=zoo.config.scale_factor,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


IDEFICS = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.", "model.text_model."),
    (r"^(vision_model|connector)\.", r"model.\1."),
)


def gemma4_text(zoo: nn.Module) -> dict[str, Any]:
    ours = zoo.config.text_config
    names = (
        "head_dim",
        "global_head_dim",
        "num_key_value_heads",
        "num_global_key_value_heads",
        "num_kv_shared_layers",
    )
    names += (
        "hidden_size_per_layer_input",
        "vocab_size_per_layer_input",
        "use_double_wide_mlp",
        "attention_k_eq_v",
    )
    names += (
        "enable_moe_block",
        "num_experts",
        "top_k_experts",
        "moe_intermediate_size",
        "sliding_window",
    )
    names += ("layer_types", "use_bidirectional_attention", "final_logit_softcapping")
    return text_of(
        zoo,
        rope_parameters=ours.rope_parameters,
        **{name: getattr(ours, name) for name in names},
    )


GEMMA4_SOUND = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "subsampling_conv_channels",
)
GEMMA4_SOUND += (
    "attention_chunk_size",
    "attention_context_left",
    "output_proj_dims",
    "use_clipped_linears",
)


def gemma4(zoo: nn.Module) -> torch.nn.Module:
    heard = vars(zoo.config.audio_config or zoo.config)
    vision = zoo.config.vision_config
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    names += (
        "head_dim",
        "global_head_dim",
        "patch_size",
        "position_embedding_size",
        "pooling_kernel_size",
    )
    config = transformers.Gemma4Config(
        text_config=gemma4_text(zoo),
        vision_config={
            **{name: getattr(vision, name) for name in names},
            "rope_parameters": rope(100.0),
            "use_clipped_linears": False,
        },
        audio_config=None
        if zoo.config.audio_config is None
        else {name: heard[name] for name in GEMMA4_SOUND},
        image_token_id=zoo.config.image_token_id,
        audio_token_id=zoo.config.audio_token_id,
        video_token_id=zoo.config.video_token_id,
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def gemma4_unified(zoo: nn.Module) -> torch.nn.Module:
    names = ("model_patch_size", "mm_embed_dim", "mm_posemb_size", "output_proj_dims")
    vision = {name: getattr(zoo.config.vision_config, name) for name in names}
    config = transformers.Gemma4UnifiedConfig(
        text_config=gemma4_text(zoo),
        vision_config={
            **vision,
            "patch_size": vision["model_patch_size"],
            "pooling_kernel_size": 1,
        },
        audio_config={"audio_embed_dim": zoo.config.audio_config.audio_embed_dim},
        image_token_id=zoo.config.image_token_id,
        audio_token_id=zoo.config.audio_token_id,
        video_token_id=zoo.config.video_token_id,
    )
    return transformers.Gemma4UnifiedForConditionalGeneration(config)


def as_patches(inputs: Inputs) -> dict[str, Any]:
    """transformers' processor cuts the patches, which mlx-vlm's model does, and says where they lie."""
    found: dict[str, Any] = {
        "mm_token_type_ids": torch.tensor(
            inputs.get("mm_token_type_ids", inputs["input_ids"] * 0)
        )
    }
    if "pixel_values" in inputs and "image_position_ids" not in inputs:
        pictures = inputs["pixel_values"]
        number, _, high, wide = pictures.shape
        rows, columns = high // GEMMA4_PATCH, wide // GEMMA4_PATCH
        cut = pictures.reshape(
            number, 3, rows, GEMMA4_PATCH, columns, GEMMA4_PATCH
        ).transpose(0, 2, 4, 3, 5, 1)
        places = np.stack(
            np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1
        ).reshape(1, -1, 2)
        found["pixel_values"] = torch.tensor(cut.reshape(number, rows * columns, -1))
        found["image_position_ids"] = torch.tensor(places.repeat(number, axis=0))
    if "pixel_values_videos" in inputs:  # transformers has all videos' frames in a row
        for name in ("pixel_values_videos", "video_position_ids"):
            found[name] = torch.tensor(
                inputs[name].reshape(-1, *inputs[name].shape[-2:])
            )
        found["num_frames_per_video"] = torch.tensor(inputs["num_frames_per_video"])
    return found


GEMMA4 = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^embed_(vision|audio)\.", r"model.embed_\1."),
    (r"^(vision|audio)_tower\.", r"model.\1_tower."),
)


#: Without a tower, the projection is a part of the embedder.
GEMMA4_UNIFIED = (
    GEMMA4[0],
    (r"^embed_vision\.", "model.embed_vision.multimodal_embedder."),
    (r"^embed_audio\.", "model.embed_audio."),
    (r"^vision_embedder\.", "model.embed_vision."),
)


def times_last(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convolutions over time alone, which have their places last."""
    return {
        name: value.movedim(-1, 1) if "depthwise_conv1d" in name else value
        for name, value in weights.items()
    }


def gemma4_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gate and up projections of the experts are one parameter in transformers."""
    return joined_experts(
        {
            name.replace("experts.switch_glu", "switch_mlp"): value
            for name, value in weights.items()
        }
    )


def internvl(zoo: nn.Module) -> torch.nn.Module:
    config = transformers.InternVLConfig(
        text_config={
            "model_type": "qwen3",
            "head_dim": 16,
            "tie_word_embeddings": False,
            **text_of(zoo),
        },
        vision_config=vision_of(zoo, attention_bias=True, use_mask_token=False),
        image_token_id=zoo.config.image_token_id,
        downsample_ratio=zoo.config.downsample_ratio,
        tie_word_embeddings=False,
    )
    return transformers.InternVLForConditionalGeneration(config)


def internvl_chat(zoo: nn.Module) -> torch.nn.Module:
    """The original format holds the same model under other names."""
    config = transformers.InternVLConfig(
        text_config={
            "model_type": "qwen2",
            "tie_word_embeddings": False,
            **text_of(zoo),
        },
        vision_config=vision_of(zoo, attention_bias=True, use_mask_token=False),
        image_token_id=zoo.config.image_token_index,
        downsample_ratio=zoo.config.downsample_ratio,
        tie_word_embeddings=False,
    )
    return transformers.InternVLForConditionalGeneration(config)


def internvl_chat_weights(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Queries, keys and values under their own names."""
    found = {}
    for path, value in weights.items():
        parts = zip("qkv", np.split(value, 3), strict=True) if ".qkv." in path else ()
        found |= {
            path.replace(".qkv.", f".{name}_proj."): part for name, part in parts
        } or {path: value}
    return found


def unnamed(inputs: Inputs) -> dict[str, Any]:
    """transformers knows the id of pictures from its configuration."""
    return {"image_token_index": None, **without_batch(inputs)}


INTERNVL_CHAT = (
    (
        r"^vision_model\.embeddings\.class_embedding$",
        "vision_model.embeddings.cls_token",
    ),
    (
        r"^vision_model\.embeddings\.position_embedding$",
        "vision_model.embeddings.position_embeddings",
    ),
    (
        r"^vision_model\.embeddings\.patch_embedding\.",
        "vision_model.embeddings.patch_embeddings.projection.",
    ),
    (r"^vision_model\.encoder\.layers\.", "vision_model.encoder.layer."),
    (r"\.attn\.proj\.", ".attention.projection_layer."),
    (r"\.attn\.", ".attention."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.ls([12])$", r".lambda_\1"),
    (r"^vision_model\.", "model.vision_tower."),
    (r"^mlp1\.0\.", "model.multi_modal_projector.layer_norm."),
    (r"^mlp1\.1\.", "model.multi_modal_projector.linear_1."),
    (r"^mlp1\.3\.", "model.multi_modal_projector.linear_2."),
    *LANGUAGE,
)


def llava_bunny(zoo: nn.Module) -> torch.nn.Module:
    """Bunny's class (remote code) is LLaVA's; its features are given."""
    config = transformers.LlavaConfig(
        text_config={"model_type": "qwen2", **text_of(zoo)},
        vision_config=vision_of(
            zoo, model_type="siglip_vision_model", vision_use_head=False
        ),
        image_token_index=zoo.config.image_token_index,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    return transformers.LlavaForConditionalGeneration(config)


def given_features(inputs: Inputs) -> dict[str, Any]:
    """A placeholder for every feature, and features in the pictures' place."""
    pictures = inputs.get("cached_image_features", np.zeros((0, 0, 0)))
    ids = torch.tensor(
        expanded(
            inputs["input_ids"], CACHED_IMAGE, [len(picture) for picture in pictures]
        )
    )
    found: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": None,
    }
    if len(pictures):
        features = [torch.tensor(picture) for picture in pictures]
        output = transformers.modeling_outputs.BaseModelOutputWithPooling(
            pooler_output=features
        )
        found |= {
            "mm_encoder_outputs": {"image": output},
            "cached_image_features": None,
        }
    return found


def multi_modality(zoo: nn.Module) -> torch.nn.Module:
    """DeepSeek-VL; Janus is the same where it reads pictures."""
    config = transformers.DeepseekVLConfig(
        text_config={"model_type": "llama", **text_of(zoo)},
        vision_config=vision_of(
            zoo,
            model_type="siglip_vision_model",
            vision_use_head=False,
            hidden_act="gelu",
            layer_norm_eps=1e-6,
        ),
        image_token_id=zoo.config.image_token_index,
        tie_word_embeddings=False,
    )
    return transformers.DeepseekVLForConditionalGeneration(config)


def multi_modality_weights(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A table of positions without an axis in front, and queries, keys and values under their own names."""
    weights = internvl_chat_weights(weights)
    return {
        path: value[0] if path.endswith("pos_embed") else value
        for path, value in weights.items()
    }


def multi_modality_inputs(inputs: Inputs) -> dict[str, Any]:
    """A placeholder for every feature, where mlx-vlm's processor leaves one for each picture."""
    number = len(inputs.get("pixel_values", ()))
    ids = inputs["input_ids"]
    if number and (ids == MULTI_IMAGE).sum() == number:
        ids = expanded(ids, MULTI_IMAGE, [MULTI_TOKENS] * number)
    return {
        "input_ids": torch.tensor(ids).long(),
        "attention_mask": torch.ones(ids.shape, dtype=torch.long),
    }


MULTI_MODALITY = (
    (
        r"^vision_model\.vision_tower\.patch_embed\.proj\.",
        "model.vision_model.embeddings.patch_embedding.",
    ),
    (
        r"^vision_model\.vision_tower\.pos_embed$",
        "model.vision_model.embeddings.position_embedding.weight",
    ),
    (r"^vision_model\.vision_tower\.blocks\.", "model.vision_model.encoder.layers."),
    (r"^vision_model\.vision_tower\.norm\.", "model.vision_model.post_layernorm."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.proj\.", ".self_attn.out_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"^aligner\.layers\.0\.", "model.aligner.linear1."),
    (r"^aligner\.layers\.2\.", "model.aligner.linear2."),
    *LANGUAGE,
)


class Naflex(torch.nn.Module):
    """SigLIP 2 in LLaVA: pictures of any shape, whose real patches stand side by side afterwards."""

    patch_size = 1
    """LLaVA divides sizes by it; they are in patches here."""

    def __init__(self, tower: torch.nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(
        self, pixel_values: torch.Tensor, image_sizes: torch.Tensor, **more: Any
    ) -> Any:
        is_real = torch.arange(pixel_values.shape[1]) < image_sizes.prod(
            dim=-1, keepdim=True
        )
        output = self.tower(
            pixel_values, is_real.long(), image_sizes, output_hidden_states=True
        )
        output.hidden_states = [state[is_real][None] for state in output.hidden_states]
        return output


def phi4_siglip(zoo: nn.Module) -> torch.nn.Module:
    """The published class (remote code, modeling_phi4_visionr.py) is LLaVA's with Phi-3 and SigLIP 2."""
    ours, vision = zoo.config.text_config, zoo.config.vision_config
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "patch_size",
    )
    config = transformers.LlavaConfig(
        text_config={
            **text_of(zoo),
            "model_type": "phi3",
            "rms_norm_eps": ours.rms_norm_eps,
            "pad_token_id": 0,
        },
        vision_config={
            **{name: getattr(vision, name) for name in names},
            "model_type": "siglip2_vision_model",
            "num_patches": vision.num_patches,
            "vision_use_head": False,
        },
        image_token_index=zoo.config.text_config.vocab_size - 1,
        vision_feature_layer=zoo.config.mm_vision_select_layer,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.vision_tower = Naflex(model.model.vision_tower)
    return model


def phi4_siglip_inputs(inputs: Inputs) -> dict[str, Any]:
    """A placeholder for every patch, and a picture's rows and columns where LLaVA has its size."""
    counts = (
        inputs["spatial_shapes"].prod(axis=1).tolist()
        if "spatial_shapes" in inputs
        else []
    )
    ids = expanded(inputs["input_ids"], NO_TOKEN, counts)
    ids = torch.tensor(np.where(ids == NO_TOKEN, PHI4_VOCABULARY - 1, ids))
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if counts:
        sizes = torch.tensor(inputs["spatial_shapes"]).long()
        found |= {
            "image_sizes": sizes,
            "spatial_shapes": None,
            "pixel_attention_mask": None,
        }
    return found


PHI4_SIGLIP = (
    (r"^vision_tower\.vision_tower\.vision_model\.", "model.vision_tower.tower."),
    (r"^mm_projector\.", "model.multi_modal_projector."),
    *LANGUAGE,
)


def gemma3(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    same = ("head_dim", "query_pre_attn_scalar", "sliding_window")
    rotations = {
        "full_attention": rope(ours.rope_global_base_freq),
        "sliding_attention": rope(ours.rope_local_base_freq),
    }
    config = transformers.Gemma3Config(
        text_config=text_of(
            zoo,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters=rotations,
            tie_word_embeddings=False,
            **{name: getattr(ours, name) for name in same},
        ),
        vision_config=vision_of(zoo, vision_use_head=False),
        mm_tokens_per_image=ours.mm_tokens_per_image,
        image_token_index=zoo.config.image_token_index,
        tie_word_embeddings=False,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def picture_types(inputs: Inputs) -> dict[str, Any]:
    """Which tokens are a picture's, from which transformers makes the mask (its processor returns them)."""
    ids = torch.tensor(inputs["input_ids"])
    return {"token_type_ids": (ids == GEMMA3_IMAGE).long()}


def joined_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gate and up projections of the experts are one parameter in transformers."""
    found = {}
    for name, value in weights.items():
        if "switch_mlp.gate_proj" in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            found[
                name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")
            ] = torch.cat([value, up], dim=1)
        elif "switch_mlp.down_proj" in name:
            found[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = (
                value
            )
        elif "switch_mlp" not in name:
            found[name] = value
    return found


#: What each family's ``Recipe`` is made of.
TOWERS: dict[str, dict[str, Any]] = {
    "llava": {"build": llava, "rename": RENAME},
    "mistral3": {"build": mistral3, "rename": RENAME},
    "mistral3_ministral3": {"build": mistral3, "rename": RENAME},
    "mistral3_mistral4": {
        "build": mistral3,
        "rename": RENAME,
        "convert": joined_experts,
    },
    "paligemma": {"build": paligemma, "rename": RENAME, "inputs": all_prefix},
    "paligemma2": {"build": paligemma, "rename": RENAME, "inputs": all_prefix},
    "pixtral": {"build": pixtral, "rename": RENAME},
    "gemma3": {"build": gemma3, "rename": RENAME, "inputs": picture_types},
    # Granite's logits are divided (modeling_granite.py), LLaVA-NeXT's class forgets it, as it does for Cohere2.
    "granite_vision": {
        "build": granite_vision,
        "rename": RENAME,
        "unused": r"vision_model\.head\.",
        "logit_scale": 0.5,
    },
    "gemma4": {
        "build": gemma4,
        "rename": GEMMA4,
        "inputs": as_patches,
        "convert": times_last,
    },
    "gemma4_experts": {
        "build": gemma4,
        "rename": GEMMA4,
        "inputs": as_patches,
        "convert": gemma4_experts,
    },
    "gemma4_unified": {
        "build": gemma4_unified,
        "rename": GEMMA4_UNIFIED,
        "inputs": as_patches,
    },
    "granite4_vision": {
        "build": granite4_vision,
        "rename": (
            *RENAME,
            (r"^(layerwise|spatial)_projectors", r"model.\1_projectors"),
        ),
        "unused": r"vision_model\.head\.",
    },
    "idefics2": {"build": idefics2, "rename": IDEFICS},
    "idefics3": {"build": idefics3, "rename": IDEFICS},
    "smolvlm": {"build": idefics3, "rename": IDEFICS},
    "internvl": {"build": internvl, "rename": RENAME, "inputs": without_batch},
    "internvl_chat": {
        "build": internvl_chat,
        "rename": INTERNVL_CHAT,
        "regroup": internvl_chat_weights,
        "inputs": unnamed,
    },
    "llava_bunny": {
        "build": llava_bunny,
        "rename": (
            (r"^vision_tower\.vision_tower\.vision_model\.", "model.vision_tower."),
            (r"^mm_projector\.", "model.multi_modal_projector."),
            (r"^language_model\.model\.lm_head\.", "lm_head."),
            *LANGUAGE,
        ),
        "inputs": given_features,
        "unused": r"vision_model\.head\.",
    },
    "multi_modality": {
        "build": multi_modality,
        "rename": MULTI_MODALITY,
        "regroup": multi_modality_weights,
        "inputs": multi_modality_inputs,
        "unused": r"attn_pool",
    },
    "phi4_siglip": {
        "build": phi4_siglip,
        "rename": PHI4_SIGLIP,
        "inputs": phi4_siglip_inputs,
    },
    "llava_next": {"build": llava_next, "rename": RENAME},
    "llava_onevision": {"build": llava_onevision, "rename": RENAME},
}
