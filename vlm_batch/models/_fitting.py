"""Adds biases, head widths and heads that mlx-vlm's layers support but its constructors omit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.errors import UnsupportedModel
from vlm_batch.models._rules import Config, Weights

#: Families whose adapters concatenate several of the tower's layers.
READ_SEVERAL = frozenset({"llava", "llava_next", "llava_onevision"})
_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


def fit(model: nn.Module, weights: Weights, config: Config) -> Weights:
    """Fit layers to ``config``; return the weights for them."""
    text: Config = config.get("text_config") or config
    language: Any = getattr(model, "language_model", model)
    _add_biases(model, weights, text)
    _set_head_widths(language, text)
    _widen_projector(model, config)
    return _add_heads(language, weights, config)


def _attentions(language: nn.Module) -> Iterator[tuple[Any, list[nn.Linear]]]:
    for _, module in language.named_modules():
        parts = [module[name] for name in _PARTS if name in module]
        if len(parts) == len(_PARTS) and all(type(part) is nn.Linear for part in parts):
            yield module, parts


def _add_biases(model: nn.Module, weights: Weights, text: Config) -> None:
    """Add configured biases; Qwen 2 always has them."""
    is_qwen = text.get("model_type") == "qwen2"
    asked = {
        r"\.self_attn\.[qkvo]_proj$": text.get("attention_bias"),
        r"\.self_attn\.[qkv]_proj$": is_qwen,
        r"\.mlp\.(gate|up|down)_proj$": text.get("mlp_bias"),
    }
    modules = dict(model.named_modules())
    for name, value in weights.items():
        path, _, leaf = name.rpartition(".")
        layer = modules.get(path)
        if leaf != "bias" or type(layer) is not nn.Linear or "bias" in layer:
            continue
        if any(said and re.search(pattern, path) for pattern, said in asked.items()):
            layer.bias = mx.zeros(value.shape)


def _set_head_widths(language: nn.Module, text: Config) -> None:
    heads, hidden, width = (
        text.get(name) for name in ("num_attention_heads", "hidden_size", "head_dim")
    )
    if not heads or not hidden or not width or width == hidden // heads:
        return
    usual = hidden // heads
    for attention, (queries, keys, values, out) in _attentions(language):
        if (
            queries.weight.shape[0] != heads * usual
            or type(attention.rope) is not nn.RoPE
        ):
            continue  # the class reads the width itself
        for part in (queries, keys, values):
            part.weight = mx.zeros(
                (part.weight.shape[0] // usual * width, part.weight.shape[1])
            )
            if "bias" in part:
                part.bias = mx.zeros(part.weight.shape[:1])
        out.weight = mx.zeros((out.weight.shape[0], heads * width))
        attention.rope.dims = width
        if (
            not text.get("attention_multiplier")
            and abs(attention.scale - usual**-0.5) < 1e-6
        ):
            attention.scale = width**-0.5
        if hasattr(attention, "head_dim"):
            attention.head_dim = width


def _widen_projector(model: nn.Module, config: Config) -> None:
    layers = config.get("vision_feature_layer")
    if config.get("model_type") not in READ_SEVERAL or not isinstance(
        layers, (list, tuple)
    ):
        return
    first = model.multi_modal_projector.linear_1
    width = config["vision_config"].get("hidden_size")
    if first.weight.shape[1] == width:
        first.weight = mx.zeros((first.weight.shape[0], width * len(layers)))


def _add_heads(language: nn.Module, weights: Weights, config: Config) -> Weights:
    """Copy a tied head, or add an untied one. Raises UnsupportedModel if the adapter does not read it."""
    text: Mapping[str, Any] = config.get("text_config") or config
    is_tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    table = (
        "language_model.model.embed_tokens."
        if "model" in language
        else "language_model.embed_tokens."
    )
    has_head = any(
        name.startswith(("language_model.lm_head.", "lm_head.")) for name in weights
    )
    if is_tied and "lm_head" in language and not has_head:
        return weights | {
            name.replace(table, "language_model.lm_head."): value
            for name, value in weights.items()
            if name.startswith(table)
        }
    if is_tied is False and has_head and "lm_head" not in language:
        if not hasattr(language, "logits_from_hidden"):
            raise UnsupportedModel(
                "config.json says tie_word_embeddings: false, and the folder has a head of its own; mlx-vlm's "
                f"{config.get('model_type')} answers by the table of words alone"
            )
        outputs, width = weights["language_model.lm_head.weight"].shape
        language.lm_head = nn.Linear(width, outputs, bias=False)
    return weights
