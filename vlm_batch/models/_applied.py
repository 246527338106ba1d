"""Applies settings that mlx-vlm's classes do not read to a built model."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_vlm.models.rope_utils import (
    Llama3RoPE,
    SuScaledRoPE,
    YarnRoPE,
    initialize_rope,
)

from vlm_batch.adapters.towers import vision_towers
from vlm_batch.errors import UnsupportedModel

logger = logging.getLogger(__name__)

#: Kinds of scaled positions, and the settings that each needs. "dynamic" is plain up to ``max_position_embeddings``,
#: which no row exceeds.
NEEDED = {
    "linear": ("rope_theta", "factor"),
    "yarn": ("rope_theta", "factor"),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("rope_theta", "short_factor", "long_factor"),
}
SCALED = frozenset(NEEDED)
ROTATIONS = (nn.RoPE, Llama3RoPE, YarnRoPE, SuScaledRoPE)
ACTIVATIONS = {
    "gelu": nn.gelu,
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), nn.gelu_approx),
    "quick_gelu": nn.gelu_fast_approx,
    "relu": nn.relu,
    **dict.fromkeys(("silu", "swish"), nn.silu),
}


def apply_setting(model: Any, path: tuple[str, ...], value: Any) -> bool:
    """Apply a setting by path; False if unknown here."""
    if is_activation(path[-1]):
        return apply_activation(model, path, value)
    # the whole of a Qwen3-Omni
    inner = path[1:] if path[0] == "thinker_config" else path
    return (
        inner[0] == "vision_config"
        and inner[-1] == "rope_theta"
        and apply_tower_base(model, value)
    )


# Positions
# ---------------------------------------------------------------------------------------------------------------------


def rope_scaling_of(text: Any) -> dict[str, Any] | None:
    """Return a decoder's scaled positions; None if plain, or varying by layer."""
    found: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    return dict(found) if found.get("rope_type") in SCALED else None


def with_plain_rope(part: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a configuration's part with plain positions."""
    found = dict(part)
    plain = {"type": "default", "rope_type": "default"}
    for name, needed in (
        ("rope_parameters", "rope_theta"),
        ("rope_scaling", "mrope_section"),
    ):
        if isinstance(found.get(name), Mapping):
            kept = {
                key: found[name][key]
                for key in ("mrope_section", "rope_theta")
                if key in found[name]
            }
            found[name] = {**kept, **plain} if needed in kept else None
    return found


def scale_rope(language: nn.Module, scaling: dict[str, Any], longest: int) -> bool:
    """Scale a decoder's rotations; False if none is known. Raises UnsupportedModel."""
    scaling = {"original_max_position_embeddings": longest, **scaling}
    if not scaling.get("truncate", True):
        raise UnsupportedModel(
            "rope_parameters say truncate: false, and mlx-vlm's YaRN rounds its range of frequencies"
        )
    for name in ("mscale", "mscale_all_dim"):  # transformers reads both or none
        if not (scaling.get("mscale") and scaling.get("mscale_all_dim")):
            scaling.pop(name, None)
    scaling = {name: value for name, value in scaling.items() if value is not None}
    if scaling["rope_type"] == "yarn":  # as in transformers: only YaRN has a default
        scaling.setdefault(
            "factor", longest / scaling["original_max_position_embeddings"]
        )
    if missing := [
        name for name in NEEDED[scaling["rope_type"]] if name not in scaling
    ]:
        raise UnsupportedModel(
            f"rope_parameters say {scaling['rope_type']} positions, and have no {' and no '.join(missing)}"
        )
    found = False
    for owner, name, child in _children(language):
        if isinstance(child, ROTATIONS):
            dims, traditional = _dims_of(child)
            owner[name] = _rotation(dims, traditional, scaling, longest)
        elif "_inv_freq" in child and "attention_scaling" in vars(child):  # M-RoPE
            _scale_frequencies(child, scaling, longest)
        else:
            continue
        found = True
    return found


def _children(
    module: nn.Module, without: str = "\n"
) -> Iterator[tuple[Any, str, nn.Module]]:
    """Yield (owner, name, module) of submodules, except below names with ``without``."""
    for path, owner in module.named_modules():
        for name, child in list(owner.items()):
            if isinstance(child, nn.Module) and without not in path:
                yield owner, name, child


def _dims_of(rotation: Any) -> tuple[int, bool]:
    """Return a rotation's dimensions, and whether it turns neighbours."""
    if isinstance(rotation, SuScaledRoPE):
        return rotation.dim, False
    return rotation.dims, bool(rotation.traditional)


def _rotation(
    dims: int, traditional: bool, scaling: dict[str, Any], longest: int
) -> nn.Module:
    """Return mlx-vlm's rotation with transformers' factor."""
    rotation: Any = initialize_rope(
        dims,
        scaling["rope_theta"],
        traditional,
        {**scaling, "type": scaling["rope_type"]},
        longest,
    )
    factor = attention_factor(scaling, longest)
    if isinstance(rotation, YarnRoPE):
        rotation.mscale = factor
    elif isinstance(rotation, SuScaledRoPE):
        rotation._short_scale = rotation._long_scale = mx.array(factor, mx.float32)
    return rotation


def attention_factor(scaling: Mapping[str, Any], longest: int) -> float:
    """Return queries' and keys' factor (transformers, modeling_rope_utils.py)."""
    if (said := scaling.get("attention_factor")) is not None:
        return float(said)
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or longest / original
    if scaling["rope_type"] == "longrope":
        return (
            math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        )
    if scaling["rope_type"] != "yarn" or factor <= 1:
        return 1.0
    over, under = (
        0.1 * scaling.get(name, 0) * math.log(factor) + 1
        for name in ("mscale", "mscale_all_dim")
    )
    return over / under if "mscale" in scaling else 0.1 * math.log(factor) + 1


def _scale_frequencies(embedding: Any, scaling: dict[str, Any], longest: int) -> None:
    if scaling["rope_type"] == "longrope":
        raise UnsupportedModel(
            "rope_parameters say longrope, which mlx-vlm's positions on several axes do not have"
        )
    dims = 2 * embedding._inv_freq.size
    rotation: Any = _rotation(dims, False, scaling, longest)
    is_linear = isinstance(rotation, nn.RoPE)
    embedding._inv_freq = (
        embedding._inv_freq * rotation.scale if is_linear else 1.0 / rotation._freqs
    )
    embedding.attention_scaling = attention_factor(scaling, longest)
    # mlx-vlm's kernel for Metal has no such factor
    if "fused_apply" in vars(embedding):
        embedding.fused_apply = (
            embedding.fused_apply and embedding.attention_scaling == 1.0
        )


def apply_tower_epsilon(model: Any, epsilon: float) -> None:
    """Set the epsilon of CLIP's and SigLIP's outer norms, which mlx-vlm ignores (llava/vision.py:149)."""
    for owner, name in vision_towers(model):
        for _, key, norm in _children(owner[name]):
            if key in ("pre_layrnorm", "post_layernorm") and type(norm) is nn.LayerNorm:
                norm.eps = epsilon


def apply_tower_base(model: Any, base: float) -> bool:
    """Set the towers' rotary base; False if there is none."""
    towers = [owner[name] for owner, name in vision_towers(model)]
    found = [
        (module, name)
        for tower in towers
        for _, module in tower.named_modules()
        # attributes of mlx-vlm's rotations for grids
        for name in ("theta", "theta_base")
        if name in vars(module)
    ]
    for module, name in found:
        setattr(module, name, base)
    return bool(found)


# Windows
# ---------------------------------------------------------------------------------------------------------------------


def apply_sliding_window(model: Any, text: Any, *, all_slide: bool) -> None:
    """Give a decoder the sliding window that mlx-vlm ignores; ``all_slide`` is for models without ``layer_types``.

    If only some layers slide, requests are limited to the window: mlx-vlm has one mask for all layers.
    """
    window: int | None = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    caches = make_prompt_cache(model.language_model)
    if window is None or (
        not all_slide if kinds is None else "sliding_attention" not in kinds
    ):
        return
    # mlx-vlm's class has windows
    if any(type(cache) is not KVCache for cache in caches):
        return
    if kinds is None or set(kinds) == {"sliding_attention"}:
        model.language_model.make_cache = lambda: [
            RotatingKVCache(window) for _ in caches
        ]
        return
    for config in (model.config, getattr(model.config, "text_config", None)):
        if config is not None:
            longest: int | None = getattr(config, "max_position_embeddings", None)
            config.max_position_embeddings = min(longest or window, window)
    logger.warning(
        "some layers of this model have a sliding_window of %d tokens, which mlx-vlm's class of it has not: a prompt with its "
        "answer may have %d tokens",
        window,
        window,
    )


# Activations
# ---------------------------------------------------------------------------------------------------------------------


class Activation(nn.Module):
    """An activation that adapters do not replace."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = ACTIVATIONS[name]

    def __call__(self, x: mx.array) -> mx.array:
        return self.function(x)


def is_activation(name: str) -> bool:
    return name.endswith(("hidden_act", "hidden_activation", "activation_function"))


def apply_activation(model: Any, path: tuple[str, ...], name: Any) -> bool:
    """Set a tower's or projector's activation, not patch mergers'; False if unknown."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        return False
    parts: list[Any] = []
    if path == ("projector_hidden_act",):
        parts = [getattr(model, "multi_modal_projector", None)]
    elif path == ("vision_config", "hidden_act"):
        parts = [owner[name] for owner, name in vision_towers(model)]
    found = [
        (owner, key)
        for part in parts
        if part is not None
        for owner, key, child in _children(part, without="merger")
        if isinstance(child, (nn.GELU, nn.ReLU, nn.SiLU))
    ]
    for owner, key in found:
        owner[key] = Activation(name)
    return bool(found)
