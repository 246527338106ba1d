"""Corrections of tensors that mlx-vlm 0.7.10 misreads."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.models._rules import Config, Tensors, Weights, joined_attention


def gemma3_head(on_disk: Weights, sanitized: Weights, config: Config) -> Weights:
    """Keep untied heads, which mlx-vlm overwrites (gemma3/language.py:266)."""
    head = "language_model.lm_head.weight"
    return (
        sanitized
        if config.get("tie_word_embeddings", True) or head not in on_disk
        else sanitized | {head: on_disk[head]}
    )


def gemma4_head(on_disk: Weights, sanitized: Weights, config: Config) -> Weights:
    """Keep an untied head, which mlx-vlm drops (gemma4_unified/gemma4_unified.py:360, gemma4/gemma4.py:272)."""
    head = "lm_head.weight"
    if config.get("tie_word_embeddings", True) or head not in on_disk:
        return sanitized
    return {name: value for name, value in sanitized.items() if name != head} | {
        f"language_model.{head}": on_disk[head]
    }


def falcon_h1(weights: Weights, config: Config) -> Weights:
    """Fold in multipliers of keys, values and biases, which mlx-vlm omits (falcon_h1/language.py:425-428).

    Sources: transformers, modeling_falcon_h1.py. Folders that mlx-vlm converted have all multipliers.
    """
    first = weights.get("model.layers.0.mamba.conv1d.weight")
    if first is None or first.shape[-1] <= first.shape[1]:
        return weights
    gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
    groups = config["mamba_n_groups"] * config["mamba_d_state"]
    inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
    sizes = (inner, inner, groups, groups, config["mamba_n_heads"])
    factors: dict[str, Any] = {
        "k_proj.weight": config.get("key_multiplier", 1.0),
        "v_proj.weight": config.get("attention_in_multiplier", 1.0),
        "k_proj.bias": config.get("key_multiplier", 1.0),
        "o_proj.bias": config.get("attention_out_multiplier", 1.0),
        "gate_proj.bias": gate,
        "down_proj.bias": down,
        "in_proj.bias": mx.array(
            np.repeat(config.get("ssm_multipliers") or [1.0] * 5, sizes), mx.float32
        ),
        "out_proj.bias": config.get("ssm_out_multiplier", 1.0),
    }
    ends = {name: ".".join(name.rsplit(".", 2)[1:]) for name in weights}
    return {
        name: (value * factors[ends[name]]).astype(value.dtype)
        if ends[name] in factors
        else value
        for name, value in weights.items()
    }


def muse_spark_norms(on_disk: Weights, sanitized: Weights, config: Config) -> Weights:
    """Keep norms in float32, not bfloat16 (muse_spark/sanitize.py:10)."""
    norms = r"(input_layernorm|p(re|ost)_feedforward_layernorm|p(re|ost)_expert_norm)\.weight$"
    found = {
        name.replace("model.language_model.", "language_model.model.", 1): 1.0
        + value.astype(mx.float32)
        for name, value in on_disk.items()
        if re.search(rf"^model\.language_model\..*{norms}", name)
    }
    return sanitized | found


def florence2_projection(weights: Weights, config: Config) -> Weights:
    """Transpose Florence-2's projection."""
    projection = weights.pop("image_projection.weight", None)
    return (
        weights if projection is None else weights | {"image_projection": projection.T}
    )


def internvl_attention(weights: Weights, config: Config) -> Weights:
    return joined_attention(
        weights, r"\.attention\.q_proj\.(weight|bias)$", ".attention.", ".attn.qkv."
    )


def molmo2_tables(weights: Weights, config: Config) -> Weights:
    """Cut two embedding tables where the vocabulary ends."""
    first, second = (
        f"model.transformer.wte.{name}" for name in ("embedding", "new_embedding")
    )
    if first not in weights or second not in weights:
        return weights
    size = config["text_config"]["vocab_size"]
    rows = mx.concatenate([weights[first], weights[second]])
    return weights | {first: rows[:size], second: rows[size:]}


def radio_weights(weights: Weights, config: Config) -> Weights:
    """Fold RADIO's output scales, which mlx-vlm's tower lacks, into the layers before.

    Pixels' means and deviations are neutral: the processor applies them.
    """
    before = {"layer_scale1": "attn.proj", "layer_scale2": "mlp.fc2"}
    found = dict(weights)
    for name in [
        name for name in weights if re.search(r"\.layer_scale[12]\.lambda1$", name)
    ]:
        block, scale, _ = name.rsplit(".", 2)
        layer, factors = f"{block}.{before[scale]}", found.pop(name)
        found[f"{layer}.weight"] = found[f"{layer}.weight"] * factors[:, None]
        found[f"{layer}.bias"] = found[f"{layer}.bias"] * factors
    norm = "vision_model.radio_model.input_conditioner.norm_"
    if not any("radio_model" in name for name in weights):
        return found
    return {
        f"{norm}mean": mx.zeros((3, 1, 1)),
        f"{norm}std": mx.ones((3, 1, 1)),
        **found,
    }


def nemotron_weights(weights: Weights, config: Config) -> Weights:
    """Correct the tower; add the tensor that tells mlx-vlm of torch's convolutions (nemotron_h_nano_omni/audio.py:554)."""
    sound = "sound_encoder.encoder"
    first = weights.get(f"{sound}.subsampling.layers.0.weight")
    is_theirs = first is not None and first.shape[1] == 1 and first.shape[-1] > 1
    sign = {f"{sound}.feature_extractor.window": mx.zeros(0)} if is_theirs else {}
    return radio_weights({**weights, **sign}, config)


def transposed_experts(weights: Weights, config: Config) -> Weights:
    """Transpose experts saved as (experts, outputs, inputs)."""
    inner = (config.get("text_config") or {}).get("moe_intermediate_size")
    downs = [
        value for name, value in weights.items() if name.endswith(".experts.down_proj")
    ]
    if not downs or downs[0].shape[-1] != inner:
        return weights
    ends = (".experts.down_proj", ".experts.gate_up_proj")
    return {
        name: value.swapaxes(1, 2) if name.endswith(ends) else value
        for name, value in weights.items()
    }


def deepseek_vl_tower(weights: Weights, config: Config) -> Weights:
    """Join queries, keys and values; give positions a batch axis."""
    positions = weights.pop(
        "model.vision_model.embeddings.position_embedding.weight", None
    )
    if positions is None:
        return weights
    found = joined_attention(
        weights, r"vision_tower.*\.self_attn\.q_proj\.", ".self_attn.", ".attn.qkv."
    )
    return found | {"vision_model.vision_tower.pos_embed": positions[None]}


def thinker_names(weights: Weights, config: Config) -> Weights:
    """Prefix a lone thinker's tensors."""
    is_whole = any(name.startswith("thinker.") for name in weights)
    return (
        weights
        if is_whole
        else {f"thinker.{name}": value for name, value in weights.items()}
    )


#: Norms of Qwen's decoders, which transformers saves as the distance from one. mlx-vlm's conversions have other names, and
#: whole norms.
QWEN = Tensors(norms_from_one=r"^model\..*(_layernorm|[qk]_norm|\bnorm)\.weight$")
STEP = Tensors(norms_from_one=r"^model\..*norm\.weight$")
#: SigLIP's pooling head, which no answer needs.
SIGLIP = Tensors(
    ((r"(\.head\.attention)\.in_proj_(weight|bias)$", r"\1.in_proj.\2"),),
    unused="vision_tower.vision_model.head.",
)

#: Corrections of tensors by the model type that mlx-vlm reads. New names are mlx-vlm's, or the published ones.
TENSORS: dict[str, Tensors] = {
    "ernie4_5_moe_vl": Tensors(((r"^model\.vision_model\.", "vision_model."),)),
    "falcon_h1": Tensors(change=falcon_h1),
    "florence2": Tensors(
        (
            (r"^model\.(vision_tower\.convs\.\d+)\.conv\.", r"\1.proj."),
            (r"^model\.vision_tower\.", "vision_tower."),
            (r"_block\.(conv[12])\.(weight|bias)$", r"_block.\1.fn.dw.\2"),
            (r"(spatial_block)\.norm1\.", r"\1.window_attn.norm."),
            (r"(channel_block)\.norm1\.", r"\1.channel_attn.norm."),
            (r"_block\.norm2\.", "_block.ffn.norm."),
            (r"\.(window_attn|channel_attn)\.(qkv|proj)\.", r".\1.fn.\2."),
            (r"\.ffn\.(fc[12])\.", r".ffn.fn.net.\1."),
            (
                r"^model\.multi_modal_projector\.image_position_embed\.",
                "image_pos_embed.",
            ),
            (r"^model\.multi_modal_projector\.", ""),
            (r"^model\.language_model\.", "language_model.model."),
            (r"^lm_head\.", "language_model.lm_head."),
        ),
        florence2_projection,
    ),
    "gemma3": Tensors(finish=gemma3_head),
    "gemma4": Tensors(finish=gemma4_head),
    "gemma4_unified": Tensors(finish=gemma4_head),
    "got": Tensors(
        (
            (r"^multi_modal_projector\.conv_upsampler1\.", "vision_tower.net_2."),
            (r"^multi_modal_projector\.conv_upsampler2\.", "vision_tower.net_3."),
            (
                r"^multi_modal_projector\.multimodal_projector\.",
                "multi_modal_projector.",
            ),
            (r"^vision_tower\.neck\.layer_norm", "vision_tower.norm"),
            (r"^vision_tower\.neck\.conv", "vision_tower.conv"),
            (
                r"^vision_tower\.patch_embed\.projection\.",
                "vision_tower.patch_embed.proj.",
            ),
            (
                r"^vision_tower\.layers\.(\d+)\.layer_norm",
                r"vision_tower.blocks.\1.norm",
            ),
            (r"^vision_tower\.layers\.", "vision_tower.blocks."),
        )
    ),
    "granite4_vision": SIGLIP,
    "granite_vision": SIGLIP,
    "hunyuan_vl": Tensors(((r"^lm_head\.", "language_model.lm_head."),)),
    "internvl_chat": Tensors(
        (
            (
                r"^vision_tower\.embeddings\.cls_token$",
                "vision_model.embeddings.class_embedding",
            ),
            (
                r"^vision_tower\.embeddings\.position_embeddings$",
                "vision_model.embeddings.position_embedding",
            ),
            (
                r"^vision_tower\.embeddings\.patch_embeddings\.projection\.",
                "vision_model.embeddings.patch_embedding.",
            ),
            (r"^vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
            (r"\.attention\.projection_layer\.", ".attn.proj."),
            (r"\.layernorm_before\.", ".norm1."),
            (r"\.layernorm_after\.", ".norm2."),
            (r"\.lambda_([12])$", r".ls\1"),
            (r"^multi_modal_projector\.layer_norm\.", "mlp1.0."),
            (r"^multi_modal_projector\.linear_1\.", "mlp1.1."),
            (r"^multi_modal_projector\.linear_2\.", "mlp1.3."),
        ),
        internvl_attention,
    ),
    "kimi_k25": Tensors(
        (
            (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
            (r"^model\.mm_projector\.", "mm_projector."),
        )
    ),
    "minicpmv4_6": QWEN,
    "minicpmv4_7": QWEN,
    "molmo2": Tensors(change=molmo2_tables),
    "multi_modality": Tensors(
        (
            (
                r"^model\.vision_model\.embeddings\.patch_embedding\.",
                "vision_model.vision_tower.patch_embed.proj.",
            ),
            (
                r"^model\.vision_model\.encoder\.layers\.",
                "vision_model.vision_tower.blocks.",
            ),
            (
                r"^model\.vision_model\.post_layernorm\.",
                "vision_model.vision_tower.norm.",
            ),
            (r"\.layer_norm([12])\.", r".norm\1."),
            (r"(vision_tower.*)\.self_attn\.out_proj\.", r"\1.attn.proj."),
            (r"^model\.aligner\.linear1\.", "aligner.layers.0."),
            (r"^model\.aligner\.linear2\.", "aligner.layers.2."),
            (r"^model\.language_model\.", "language_model.model."),
            (r"^lm_head\.", "language_model.lm_head."),
        ),
        deepseek_vl_tower,
        unused="vision_model.vision_tower.attn_pool.",
    ),
    "muse_spark": Tensors(finish=muse_spark_norms),
    "nemotron_h_nano_omni": Tensors(change=nemotron_weights),
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_next": QWEN,
    "qwen3_omni_moe": Tensors(change=thinker_names),
    "qwen3_vl_moe": Tensors(change=transposed_experts),
    "step3p5": STEP,
    "step3p7": STEP,
}
