"""Record what transformers answers to the zoo's requests with the zoo's weights, one file per family.

    python tests/references/record.py            # all families
    python tests/references/record.py mllama     # these

Needs torch and transformers (recorded with torch 2.13 on a CPU and transformers 5.23); the tests need neither. Each
answer is `generate` of transformers itself, greedy, float32 and eager attention, so its cache, masks and positions are
those of transformers. A file holds, per request: a digest of the inputs, the tokens and the float32 log-probabilities
of every step; and a digest of the weights.

moondream3 and falcon_ocr have no class in transformers, so nothing is recorded for them.
"""

from __future__ import annotations

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

from tests.references.towers import TOWERS
from tests.zoo import FAMILIES, Inputs, TinyFamily, inputs_hash, requests_of, weights_hash
from tests.zoo._build import weights_of
from tests.zoo.aya_vision import LOGIT_SCALE

STEPS = 8
HERE = Path(__file__).resolve().parent

TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LANGUAGE = (r"^language_model\.model\.", "model.language_model."), (r"^language_model\.lm_head\.", "lm_head.")


@dataclass(frozen=True)
class Recipe:
    """How transformers builds a family, and what its weights and inputs are called there."""

    build: Callable[[nn.Module], torch.nn.Module]
    rename: tuple[tuple[str, str], ...]
    inputs: Callable[[Inputs], Mapping[str, Any]] = field(default=lambda inputs: {})
    unused: str = "^$"
    """Weights of the zoo that transformers has no place for (a pattern)."""
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = field(default=lambda weights: weights)
    """What else must be done to the renamed weights."""
    logit_scale: float = 1.0
    """What transformers forgets to multiply logits with."""


def mrope(section: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 100.0, "mrope_section": section, **more}


def patches(config: Any) -> dict[str, int]:
    """What the vision configurations of Qwen and GLM have in common."""
    return {
        name: getattr(config.vision_config, name)
        for name in ("patch_size", "spatial_merge_size", "temporal_patch_size")
    }


def marker_ids(config: Any) -> dict[str, int]:
    return {name: getattr(config, name) for name in ("image_token_id", "video_token_id", "vision_start_token_id")}


def token_types(inputs: Inputs) -> dict[str, Any]:
    """transformers counts three-axis positions from the kinds of tokens, which its processors return."""
    if "image_grid_thw" not in inputs:
        return {}
    from tests.zoo._qwen import IMAGE

    return {"mm_token_type_ids": torch.tensor((inputs["input_ids"] == IMAGE).astype(np.int64))}


def qwen2_vl(zoo: nn.Module) -> torch.nn.Module:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, **patches(zoo.config)}
    text = {**TEXT, **HEADS, "vocab_size": zoo.config.vocab_size, "rms_norm_eps": 1e-6}
    text["rope_parameters"] = mrope([2, 3, 3])
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **marker_ids(zoo.config)
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl(zoo: nn.Module) -> torch.nn.Module:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 2}
    vision |= {"window_size": 16, "fullatt_block_indexes": [1], **patches(zoo.config)}
    text = {**TEXT, **HEADS, "vocab_size": zoo.config.vocab_size, "rms_norm_eps": 1e-6}
    text["rope_parameters"] = mrope([2, 3, 3])
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **marker_ids(zoo.config)
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(zoo: nn.Module) -> torch.nn.Module:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 2}
    vision |= {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1], **patches(zoo.config)}
    text = {**TEXT, **HEADS, "head_dim": 16, "vocab_size": zoo.config.vocab_size, "rms_norm_eps": 1e-6}
    text["rope_parameters"] = mrope([4, 2, 2], mrope_interleaved=True)
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **marker_ids(zoo.config)
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def glm4v(zoo: nn.Module) -> torch.nn.Module:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 96, "out_hidden_size": 64, "num_heads": 2}
    vision |= {"image_size": 16, "rms_norm_eps": zoo.config.vision_config.rms_norm_eps, **patches(zoo.config)}
    text = {**TEXT, **HEADS, "vocab_size": zoo.config.vocab_size, "rms_norm_eps": 1e-5, "attention_bias": True}
    text["rope_parameters"] = mrope([2, 1, 1], partial_rotary_factor=0.5)
    markers = {"image_token_id": zoo.config.image_token_id, "video_token_id": zoo.config.video_token_id}
    markers["image_start_token_id"] = zoo.config.vision_start_token_id
    markers["image_end_token_id"] = zoo.config.vision_end_token_id
    config = transformers.Glm4vConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **markers)
    return transformers.Glm4vForConditionalGeneration(config)


def aya_vision(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "num_attention_heads": 2, "patch_size": 4}
    vision |= {"num_hidden_layers": 2, "intermediate_size": 64, "image_size": 16, "vision_use_head": False}
    text = {**TEXT, **HEADS, "model_type": "cohere2", "head_dim": 16, "vocab_size": ours.vocab_size}
    text |= {"logit_scale": ours.logit_scale, "sliding_window": ours.sliding_window, "layer_norm_eps": 1e-5}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "pad_token_id": 0}
    config = transformers.AyaVisionConfig(
        text_config=text,
        vision_config=vision,
        vision_feature_layer=-1,
        downsample_factor=2,
        alignment_intermediate_size=96,
        image_token_index=zoo.config.image_token_index,
    )
    return transformers.AyaVisionForConditionalGeneration(config)


def mllama(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_global_layers": 1}
    vision |= {"attention_heads": 2, "image_size": 8, "patch_size": 4, "max_num_tiles": 4}
    vision |= {"vision_output_dim": 96, "intermediate_layers_indices": [0, 2]}
    text = {**TEXT, **HEADS, "num_hidden_layers": 5, "vocab_size": ours.vocab_size, "rms_norm_eps": 1e-6}
    text |= {"cross_attention_layers": ours.text_config.cross_attention_layers, "pad_token_id": 0}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=ours.image_token_index)
    return transformers.MllamaForConditionalGeneration(config)


class NoTower(torch.nn.Module):
    """In the place of a tower that no request calls."""


def gemma3n(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    text = {**TEXT, **HEADS, "num_hidden_layers": 5, "intermediate_size": [96] * 5, "head_dim": 16}
    same = ["vocab_size", "vocab_size_per_layer_input", "laurel_rank", "hidden_size_per_layer_input", "sliding_window"]
    same += ["activation_sparsity_pattern", "num_kv_shared_layers", "layer_types", "altup_coef_clip"]
    text |= {name: getattr(ours, name) for name in same}
    text["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": ours.rope_local_base_freq},
        "full_attention": {"rope_type": "default", "rope_theta": ours.rope_theta},
    }
    sides = {
        name: {"hidden_size": side.hidden_size, "vocab_size": side.vocab_size, "vocab_offset": side.vocab_offset}
        for name, side in [("vision_config", zoo.config.vision_config), ("audio_config", zoo.config.audio_config)]
    }
    config = transformers.Gemma3nConfig(
        text_config=text,
        image_token_id=zoo.config.image_token_id,
        audio_token_id=zoo.config.audio_token_id,
        vision_soft_tokens_per_image=zoo.config.vision_soft_tokens_per_image,
        **sides,
    )
    from_config = transformers.AutoModel.from_config

    def towerless(part: Any, **more: Any) -> torch.nn.Module:
        return from_config(part, **more) if part.model_type == "gemma3n_text" else NoTower()

    with mock.patch("transformers.models.gemma3n.modeling_gemma3n.AutoModel.from_config", towerless):
        return transformers.Gemma3nForConditionalGeneration(config)


def ready_features(inputs: Inputs) -> dict[str, Any]:
    """Features that are already embedded take the place of pictures, as they do in the zoo."""
    if "cached_image_features" not in inputs:
        return {}
    features = torch.tensor(inputs["cached_image_features"])
    output = transformers.modeling_outputs.BaseModelOutputWithPooling(pooler_output=features)
    return {"mm_encoder_outputs": {"image": output}, "pixel_values": None}


VISUAL = ((r"^vision_tower\.", "model.visual."), *LANGUAGE)
RECIPES: dict[str, Recipe] = {
    "qwen2_vl": Recipe(qwen2_vl, VISUAL, token_types),
    "qwen2_5_vl": Recipe(qwen2_5_vl, VISUAL, token_types),
    "qwen3_vl": Recipe(qwen3_vl, VISUAL, token_types),
    "glm4v": Recipe(glm4v, VISUAL, token_types),
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
        ((r"^embed_(vision|audio)\.", r"model.embed_\1."), *LANGUAGE),
        ready_features,
        unused=r"layers\.[34]\.self_attn\.(k_proj|v_proj|k_norm)\.",
    ),
}


RECIPES |= {name: Recipe(**facts) for name, facts in TOWERS.items()}


def torch_weights(zoo: nn.Module, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The zoo's weights under transformers' names; convolutions have their channels second there."""
    renamed = {}
    for path, value in weights_of(zoo).items():
        if re.search(recipe.unused, path):
            continue
        name = path
        for pattern, replacement in recipe.rename:
            name = re.sub(pattern, replacement, name)
        renamed[name] = torch.tensor(np.moveaxis(value, -1, 1).copy() if value.ndim >= 4 else value)
    return recipe.convert(renamed)


def load(zoo: nn.Module, recipe: Recipe) -> torch.nn.Module:
    """transformers' model with the zoo's weights; every parameter must find its place."""
    model = recipe.build(zoo).eval().float()
    model.set_attn_implementation("eager")
    missing, unexpected = model.load_state_dict(torch_weights(zoo, recipe), strict=False)
    parameters = {name for name, _ in model.named_parameters()}  # a tied head appears once, as the embedding
    if unexpected or parameters & set(missing):
        raise LookupError(f"no place for {unexpected}, nothing for {sorted(parameters & set(missing))}")
    model.tie_weights()
    return model


@torch.no_grad()
def answer(model: torch.nn.Module, recipe: Recipe, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (T,) and log-probabilities (T, V) of transformers' own greedy generation."""
    arrays = {name: torch.tensor(value) for name, value in inputs.items() if name != "cached_image_features"}
    arrays["input_ids"] = arrays["input_ids"].long()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    arrays |= {"attention_mask": torch.ones_like(arrays["input_ids"]), **recipe.inputs(inputs)}
    output = model.generate(
        **{name: value for name, value in arrays.items() if value is not None},
        max_new_tokens=STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(output.logits).double() * recipe.logit_scale
    tokens = output.sequences[0, arrays["input_ids"].shape[1] :]
    return tokens.numpy().astype(np.int32), torch.log_softmax(logits, dim=-1).float().numpy()


def record(tiny: TinyFamily) -> None:
    """Write tests/references/<family>.npz, and print how far the oracle is from it."""
    zoo, recipe = tiny.build(), RECIPES[tiny.name]
    model = load(zoo, recipe)
    stored: dict[str, Any] = {"weights": weights_hash(zoo), "transformers": transformers.__version__}
    for name, inputs in requests_of(tiny).items():
        tokens, logprobs = answer(model, recipe, inputs)
        trace = tiny.greedy(zoo, inputs, STEPS)
        same = int((tokens == np.array(trace.tokens)).cumprod().sum())
        # The step at which tokens part still had equal contexts.
        distance = np.abs(logprobs[: same + 1] - trace.logprobs[: same + 1]).max()
        print(f"{tiny.name:12} {name:12} {same}/{STEPS} tokens, largest difference {distance:.1e}")
        stored |= {f"{name}/inputs": inputs_hash(inputs), f"{name}/tokens": tokens, f"{name}/logprobs": logprobs}
    np.savez_compressed(HERE / f"{tiny.name}.npz", **stored)


if __name__ == "__main__":
    for family_name in sys.argv[1:] or RECIPES:
        record(FAMILIES[family_name])
