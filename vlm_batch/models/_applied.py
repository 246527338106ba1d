"""Settings of config.json that mlx-vlm's classes do not read and that a built model can be given: scaled positions, sliding
windows and activations. What they come to is asked of transformers' class of the same type."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_vlm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE, initialize_rope

from vlm_batch.adapters.towers import vision_towers
from vlm_batch.errors import UnsupportedModel

logger = logging.getLogger(__name__)

#: Kinds of scaled positions. "dynamic" differs from plain ones beyond ``max_position_embeddings`` alone, where no row goes.
SCALED = frozenset({"linear", "yarn", "llama3", "longrope"})
ROTATIONS = (nn.RoPE, Llama3RoPE, YarnRoPE, SuScaledRoPE)
ACTIVATIONS = {
    "gelu": nn.GELU(),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), nn.GELU(approx="tanh")),
    "quick_gelu": nn.GELU(approx="fast"),
    "relu": nn.ReLU(),
    **dict.fromkeys(("silu", "swish"), nn.SiLU()),
}


# Positions
# ---------------------------------------------------------------------------------------------------------------------


def scaling_of(text: Any) -> dict[str, Any] | None:
    """A decoder's scaled positions, in transformers' words; None where they are plain, or differ between layers."""
    found: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    return dict(found) if found.get("rope_type") in SCALED else None


def without_scaling(part: Mapping[str, Any]) -> dict[str, Any]:
    """A decoder's part of a configuration with plain positions, for a class of mlx-vlm's that refuses others."""
    found = dict(part)
    plain = {"type": "default", "rope_type": "default"}
    for name, needed in (("rope_parameters", "rope_theta"), ("rope_scaling", "mrope_section")):
        if isinstance(found.get(name), Mapping):
            kept = {key: found[name][key] for key in ("mrope_section", "rope_theta") if key in found[name]}
            found[name] = {**kept, **plain} if needed in kept else None
    return found


def scale_positions(language: nn.Module, scaling: dict[str, Any], longest: int) -> bool:
    """Let a decoder turn by the scaled frequencies that its configuration says. False where it has no rotation that is known.

    Raises UnsupportedModel.
    """
    scaling = {"original_max_position_embeddings": longest, **scaling}
    if not scaling.get("truncate", True):
        raise UnsupportedModel(
            "rope_parameters say truncate: false, and mlx-vlm's YaRN rounds its range of frequencies"
        )
    for name in ("mscale", "mscale_all_dim"):  # transformers reads either only beside the other
        if not (scaling.get("mscale") and scaling.get("mscale_all_dim")):
            scaling.pop(name, None)
    scaling = {name: value for name, value in scaling.items() if value is not None}
    found = False
    for owner, name, child in _children(language):
        if isinstance(child, ROTATIONS):
            dims, traditional = child.dim if isinstance(child, SuScaledRoPE) else child.dims, _is_traditional(child)
            owner[name] = _rotation(dims, scaling["rope_theta"], traditional, scaling, longest)
        elif "_inv_freq" in child and "attention_scaling" in vars(child):  # M-RoPE
            _scale_frequencies(child, scaling, longest)
        else:
            continue
        found = True
    return found


def _children(module: nn.Module) -> Iterator[tuple[Any, str, nn.Module]]:
    for _, owner in module.named_modules():
        for name, child in list(owner.items()):
            if isinstance(child, nn.Module):
                yield owner, name, child


def _is_traditional(rotation: Any) -> bool:
    return not isinstance(rotation, SuScaledRoPE) and bool(rotation.traditional)


def _rotation(dims: int, base: float, traditional: bool, scaling: dict[str, Any], longest: int) -> nn.Module:
    """mlx-vlm's rotation, with transformers' factor of attention."""
    rotation: Any = initialize_rope(dims, base, traditional, {**scaling, "type": scaling["rope_type"]}, longest)
    factor = attention_factor(scaling, longest)
    if isinstance(rotation, YarnRoPE):
        rotation.mscale = factor
    elif isinstance(rotation, SuScaledRoPE):
        rotation._short_scale = rotation._long_scale = mx.array(factor, mx.float32)
    return rotation


def attention_factor(scaling: Mapping[str, Any], longest: int) -> float:
    """Return the factor of queries and keys, as in transformers (modeling_rope_utils.py)."""
    if (said := scaling.get("attention_factor")) is not None:
        return float(said)
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or longest / original
    if scaling["rope_type"] == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if scaling["rope_type"] != "yarn" or factor <= 1:
        return 1.0
    over, under = (0.1 * scaling.get(name, 0) * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim"))
    return over / under if "mscale" in scaling else 0.1 * math.log(factor) + 1


def _scale_frequencies(embedding: Any, scaling: dict[str, Any], longest: int) -> None:
    """The same for M-RoPE, whose embedding hands out cosines and sines. Raises UnsupportedModel for long factors."""
    if scaling["rope_type"] == "longrope":
        raise UnsupportedModel("rope_parameters say longrope, which mlx-vlm's positions on several axes do not have")
    dims = 2 * embedding._inv_freq.size
    rotation: Any = _rotation(dims, scaling["rope_theta"], False, scaling, longest)
    is_linear = isinstance(rotation, nn.RoPE)
    embedding._inv_freq = embedding._inv_freq * rotation.scale if is_linear else 1.0 / rotation._freqs
    embedding.attention_scaling = attention_factor(scaling, longest)
    if "fused_apply" in vars(embedding):  # mlx-vlm's kernel for Metal has no such factor
        embedding.fused_apply = embedding.fused_apply and embedding.attention_scaling == 1.0


# Windows
# ---------------------------------------------------------------------------------------------------------------------


def slide(model: Any, text: Any) -> None:
    """Let a decoder attend within its sliding window, where its class of mlx-vlm's attends to everything.

    If all layers slide, their caches do. Where some do, such a model gets one mask for all layers; then a prompt and its
    answer may be as long as the window, within which there is no difference.
    """
    window: int | None = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    caches = make_prompt_cache(model.language_model)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return
    if any(type(cache) is not KVCache for cache in caches):  # mlx-vlm's class has windows
        return
    if kinds is None or set(kinds) == {"sliding_attention"}:
        model.language_model.make_cache = lambda: [RotatingKVCache(window) for _ in caches]
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


def activate(model: Any, path: tuple[str, ...], name: Any) -> bool:
    """Give the tower or the projector another activation. False for one that is not known, or where it is none of its own."""
    if not isinstance(name, str) or name not in ACTIVATIONS or path[-1] not in ("hidden_act", "projector_hidden_act"):
        return False
    parts = [getattr(model, "multi_modal_projector", None)] if path == ("projector_hidden_act",) else []
    if path[0] == "vision_config":
        parts = [owner[name] for owner, name in vision_towers(model)]
    kinds = tuple({type(one) for one in ACTIVATIONS.values()})
    found = [
        (owner, key)
        for part in parts
        if part is not None
        for owner, key, child in _children(part)
        if isinstance(child, kinds)
    ]
    for owner, key in found:
        owner[key] = ACTIVATIONS[name]
    return bool(found)
