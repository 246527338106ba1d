"""How families lie on disk, where mlx-vlm 0.7.10 does not read what transformers 5 writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vlm_batch.errors import UnsupportedModel

Config = dict[str, Any]
Weights = dict[str, mx.array]


@dataclass(frozen=True)
class Layout:
    """What is done to one family's ``config.json`` and tensors before mlx-vlm's classes read them."""

    config: Callable[[Config], Config] = lambda config: config
    weights: Callable[[Weights, Config], Weights] = lambda weights, config: weights


def layout_of(model_type: str) -> Layout:
    """The rules of a model type; for most there are none beyond those of ``checkpoints``."""
    return LAYOUTS.get(model_type, Layout())


# Configurations
# ---------------------------------------------------------------------------------------------------------------------


def in_order(*steps: Callable[[Config], Config]) -> Callable[[Config], Config]:
    """Several rules, one after the other."""

    def run(config: Config) -> Config:
        for step in steps:
            config = step(config)
        return config

    return run


def part(name: str, change: Callable[[Config], Config]) -> Callable[[Config], Config]:
    """A rule for a part of the configuration, "text" or "vision"; nothing where there is no such part."""
    key = f"{name}_config"
    return lambda config: config | {key: change(dict(config[key]))} if isinstance(config.get(key), Mapping) else config


def renamed(**names: str) -> Callable[[Config], Config]:
    """Entries known under other names: old name -> the one that mlx-vlm reads, where that is not there yet."""
    return lambda config: (
        config | {new: config[old] for old, new in names.items() if old in config and config.get(new) is None}
    )


def filled(**values: Any) -> Callable[[Config], Config]:
    """Entries that transformers' class has as constants and mlx-vlm's asks for."""
    return lambda config: config | {name: value for name, value in values.items() if config.get(name) is None}


def without(*names: str) -> Callable[[Config], Config]:
    """Entries left out, because mlx-vlm's class takes no other than its own."""
    return lambda config: {name: value for name, value in config.items() if name not in names}


def own_vision_type(config: Config) -> Config:
    """A tower's type without transformers' suffix, which mlx-vlm's tower refuses: qwen2_vl for qwen2_vl_vision."""
    own = str(config["model_type"])
    strip: Callable[[Config], Config] = lambda tower: (
        tower | {"model_type": own} if tower.get("model_type") == f"{own}_vision" else tower
    )
    return part("vision", strip)(config)


def text_at_the_root(config: Config) -> Config:
    """The decoder's settings beside the model's, where mlx-vlm takes them from: its class overwrites ``text_config``."""
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, Mapping) else config


def full_attention_interval(name: str = "full_attention_interval") -> Callable[[Config], Config]:
    """``layer_types`` as mlx-vlm counts them: every n-th layer has full attention.

    Raises UnsupportedModel for layers that lie otherwise, which mlx-vlm has no way to be told.
    """

    def change(config: Config) -> Config:
        types = config.get("layer_types")
        return config | {name: _interval(types)} if isinstance(types, Sequence) and types else config

    return change


def _interval(types: Sequence[str]) -> int:
    full = [kind == "full_attention" for kind in types]
    interval = full.index(True) + 1 if any(full) else len(full) + 1
    if full != [(layer + 1) % interval == 0 for layer in range(len(full))]:
        raise UnsupportedModel(f"layer_types {list(types)} have full attention at no regular distance")
    return interval


# Weights
# ---------------------------------------------------------------------------------------------------------------------


def names(*rules: tuple[str, str]) -> Callable[[Weights, Config], Weights]:
    """Tensors renamed by patterns, in order."""

    def rename(weights: Weights, config: Config) -> Weights:
        return {_renamed(name, rules): value for name, value in weights.items()}

    return rename


def _renamed(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def scaled(factor: Callable[[Config], float], pattern: str) -> Callable[[Weights, Config], Weights]:
    """Tensors multiplied by a number of the configuration."""

    def scale(weights: Weights, config: Config) -> Weights:
        return {
            name: value * factor(config) if re.search(pattern, name) else value for name, value in weights.items()
        }

    return scale


# Families
# ---------------------------------------------------------------------------------------------------------------------


def gemma3_text(config: Config) -> Config:
    """Layers by pattern, the base of full layers by its older name, and how many tokens a picture takes."""
    text = in_order(
        full_attention_interval("sliding_window_pattern"),
        renamed(rope_theta="rope_global_base_freq"),
        filled(mm_tokens_per_image=config.get("mm_tokens_per_image")),
    )
    return part("text", text)(config)


def gemma3_head(weights: Weights, config: Config) -> Weights:
    """A head of its own under the name by which mlx-vlm looks for one; by any other it is overwritten with the table."""
    head = "language_model.lm_head.weight"
    if config.get("tie_word_embeddings", True) or head not in weights:
        return weights
    return {"lm_head.weight" if name == head else name: value for name, value in weights.items()}


def gemma4_text(text: Config) -> Config:
    """What ``per_layer_config`` says of the full layers, in the words for all of them.

    Raises UnsupportedModel where it says different things of them, or something of a sliding layer.
    """
    layers: Mapping[str, Mapping[str, Any]] = text.get("per_layer_config") or {}
    full = [str(layer) for layer, kind in enumerate(text.get("layer_types") or ()) if kind == "full_attention"]
    if not layers:
        return text
    said = [dict(layers.get(layer, {})) for layer in full]
    if set(layers) - set(full) or any(one != said[0] for one in said) or said[0].keys() - GEMMA4_FULL.keys():
        raise UnsupportedModel(f"per_layer_config {dict(layers)} does not set all layers of full attention alike")
    return text | {GEMMA4_FULL[name]: value for name, value in said[0].items()}


GEMMA4_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def lfm2_text(text: Config) -> Config:
    """Widths that follow from ``hidden_size``; mlx-vlm's class has those of one checkpoint as constants."""
    width = text.get("hidden_size")
    return filled(block_dim=width, conv_dim=width, conv_dim_out=width, num_heads=text.get("num_attention_heads"))(text)


def llava(config: Config) -> Config:
    """Pixtral, which transformers saves as a LLaVA with another tower."""
    tower = config.get("vision_config")
    is_pixtral = isinstance(tower, Mapping) and tower.get("model_type") == "pixtral"
    return config | {"model_type": "pixtral"} if is_pixtral else config


def llava_next(config: Config) -> Config:
    """Granite Vision, which transformers saves as a LLaVA-NeXT with another tower and decoder."""
    text = config.get("text_config")
    is_granite = isinstance(text, Mapping) and text.get("model_type") == "granite"
    return config | {"model_type": "granite_vision"} if is_granite else config


def indexed_attention(text: Config) -> Config:
    """Qwen4-Exp's sparse layers by mlx-vlm's word."""
    kinds = text.get("layer_types") or []
    return text | {"layer_types": ["qwen_sparse_attention" if kind == "indexed_attention" else kind for kind in kinds]}


def unused_head(weights: Weights, config: Config) -> Weights:
    """SigLIP's pooling head, which mlx-vlm's tower has and no answer reads: zeros where a checkpoint leaves it out."""
    tower = config.get("vision_config") or {}
    prefix = "vision_tower.vision_model.head."
    if tower.get("vision_use_head", True) or any(prefix in name for name in weights):
        return weights
    width, inner = tower["hidden_size"], tower["intermediate_size"]
    shapes = {"probe": (1, 1, width), "attention.in_proj.weight": (3 * width, width), "attention.in_proj.bias": (3 * width,)}
    shapes |= {"attention.out_proj.weight": (width, width), "attention.out_proj.bias": (width,)}
    shapes |= {"layernorm.weight": (width,), "layernorm.bias": (width,)}
    shapes |= {"mlp.fc1.weight": (inner, width), "mlp.fc1.bias": (inner,)}
    shapes |= {"mlp.fc2.weight": (width, inner), "mlp.fc2.bias": (width,)}
    return weights | {prefix + name: mx.zeros(shape) for name, shape in shapes.items()}


INTERVAL = part("text", full_attention_interval())
GLM_MARKERS = renamed(image_start_token_id="vision_start_token_id", image_end_token_id="vision_end_token_id")

LAYOUTS: dict[str, Layout] = {
    "aya_vision": Layout(part("text", full_attention_interval("sliding_window_pattern"))),
    "gemma3": Layout(gemma3_text, gemma3_head),
    "gemma4": Layout(part("text", gemma4_text)),
    "gemma4_unified": Layout(part("text", gemma4_text)),
    "glm4v": Layout(
        lambda config: in_order(GLM_MARKERS, part("text", lambda text: {"eos_token_id": None, **text}))(config)
    ),
    "glm4v_moe": Layout(in_order(GLM_MARKERS, part("text", filled(use_qk_norm=False)))),
    "glm_ocr": Layout(
        in_order(
            GLM_MARKERS,
            part("text", without("rope_theta", "partial_rotary_factor", "rope_scaling")),
            part("vision", without("rope_theta", "rope_parameters")),
        )
    ),
    "granite4_vision": Layout(weights=unused_head),
    "hunyuan_vl": Layout(own_vision_type, names((r"^lm_head\.", "language_model.lm_head."))),
    "kimi_k25": Layout(
        part("vision", lambda tower: tower | {"model_type": "moonvit"}),
        names((r"^language_model\.model\.blocks\.", "language_model.model.layers.")),
    ),
    "lfm2_vl": Layout(part("text", lfm2_text)),
    "llama4": Layout(part("vision", filled(vision_feature_layer=-1))),
    "llava": Layout(llava),
    "llava_next": Layout(llava_next),
    "minicpmv4_6": Layout(INTERVAL),
    "minicpmv4_7": Layout(INTERVAL),
    "mllama": Layout(part("vision", renamed(attention_heads="num_attention_heads"))),
    "paddleocr_vl": Layout(in_order(text_at_the_root, own_vision_type)),
    "qwen2_5_vl": Layout(in_order(text_at_the_root, own_vision_type)),
    "qwen2_vl": Layout(in_order(text_at_the_root, own_vision_type)),
    "qwen3_5": Layout(INTERVAL),
    "qwen3_5_moe": Layout(INTERVAL),
    "qwen3_next": Layout(full_attention_interval()),
    "qwen3_vl": Layout(own_vision_type),
    "qwen3_vl_moe": Layout(own_vision_type),
    "qwen4_exp": Layout(part("text", indexed_attention)),
}
