"""Layouts of families' folders that transformers 5 writes and mlx-vlm 0.7.10 does not read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.errors import UnsupportedModel
from vlm_batch.models._rules import (
    Config,
    Layout,
    Weights,
    after,
    filled,
    full_attention_interval,
    in_order,
    joined_attention,
    names,
    own_vision_type,
    part,
    refused,
    renamed,
    text_at_the_root,
    without,
)


def layout_of(model_type: str) -> Layout:
    """The rules of a model type; for most there are none beyond those of ``checkpoints``."""
    return LAYOUTS.get(model_type, Layout())


def gemma3_text(config: Config) -> Config:
    """Layers by pattern, the base of full layers by its older name, and how many tokens a picture takes."""
    text = in_order(
        full_attention_interval("sliding_window_pattern"),
        renamed(rope_theta="rope_global_base_freq"),
        filled(mm_tokens_per_image=config.get("mm_tokens_per_image")),
    )
    return part("text", text)(config)


def gemma3_head(lying: Weights, put: Weights, config: Config) -> Weights:
    """A head of its own, which mlx-vlm looks for by another name and overwrites with the table (gemma3/language.py:266)."""
    head = "language_model.lm_head.weight"
    return put if config.get("tie_word_embeddings", True) or head not in lying else put | {head: lying[head]}


def falcon_h1(weights: Weights, config: Config) -> Weights:
    """Multipliers that mlx-vlm leaves out when it folds them into the weights (falcon_h1/language.py:425-428).

    It looks for ``key_proj.weight``, which is no name of the model: keys miss ``key_multiplier``, and values
    ``attention_in_multiplier`` (transformers, modeling_falcon_h1.py, FalconH1Attention and FalconH1DecoderLayer). What
    mlx-vlm has converted before has its convolutions turned, and is folded already.
    """
    first = weights.get("model.layers.0.mamba.conv1d.weight")
    if first is None or first.shape[-1] <= first.shape[1]:
        return weights
    factors = {"self_attn.k_proj.weight": config.get("key_multiplier", 1.0)}
    factors["self_attn.v_proj.weight"] = config.get("attention_in_multiplier", 1.0)
    ends = tuple(factors)
    return {
        name: value * factors[next(end for end in ends if name.endswith(end))] if name.endswith(ends) else value
        for name, value in weights.items()
    }


def muse_spark_norms(lying: Weights, put: Weights, config: Config) -> Weights:
    """Norms that count from one, which mlx-vlm rounds to bfloat16 (muse_spark/sanitize.py:10)."""
    found = {
        name.replace("model.language_model.", "language_model.model.", 1): value
        for name, value in lying.items()
        if re.search(MUSE_SPARK_NORMS, name)
    }
    return put | {name: 1.0 + value.astype(mx.float32) for name, value in found.items()}


MUSE_SPARK_NORMS = (
    r"^model\.language_model\..*(input_layernorm|pre_feedforward_layernorm|post_feedforward_layernorm|pre_expert_norm"
    r"|post_expert_norm)\.weight$"
)


def gemma4_text(text: Config) -> Config:
    """The settings that ``per_layer_config`` has for the full layers, under the names that hold for all of them.

    Raises UnsupportedModel where the full layers differ, or where a sliding layer has settings of its own.
    """
    layers: Mapping[str, Mapping[str, Any]] = text.get("per_layer_config") or {}
    full = [str(layer) for layer, kind in enumerate(text.get("layer_types") or ()) if kind == "full_attention"]
    if not layers:
        return text
    said = [dict(layers.get(layer, {})) for layer in full]
    if set(layers) - set(full) or any(one != said[0] for one in said) or said[0].keys() - GEMMA4_FULL.keys():
        raise UnsupportedModel(f"per_layer_config {dict(layers)} does not set all layers of full attention alike")
    return text | {GEMMA4_FULL[name]: value for name, value in said[0].items()}


def gemma4_unified_tower(tower: Config) -> Config:
    """The side of a patch as the model takes it: several of the processor's."""
    side, pooled = tower.get("patch_size"), tower.get("pooling_kernel_size")
    return filled(model_patch_size=side * pooled)(tower) if side and pooled else tower


GEMMA4_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def lfm2_text(text: Config) -> Config:
    """Widths that follow from ``hidden_size``; mlx-vlm's class has those of one checkpoint as constants."""
    width = text.get("hidden_size")
    return filled(block_dim=width, conv_dim=width, conv_dim_out=width, num_heads=text.get("num_attention_heads"))(text)


def llama4_processor(processor: Any, config: Config) -> None:
    """Sizes by which placeholders are counted, which mlx-vlm's processor has as constants (llama4/processing_llama4.py:129)."""
    tower = config["vision_config"]
    processor.patch_size = tower["patch_size"]
    processor.downsample_ratio = round(1 / tower["pixel_shuffle_ratio"] ** 2)


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


def florence2(config: Config) -> Config:
    """The tower's settings by mlx-vlm's names, and the order in which features stand, which transformers has fixed."""
    tower = config.get("vision_config") or {}
    if tower.get("model_type") != "florence_vision":
        return config
    named = renamed(embed_dim="dim_embed", in_channels="in_chans")(tower) | {"model_type": "davit"}
    sources = filled(image_feature_source=["spatial_avg_pool", "temporal_avg_pool"])
    return sources(config | {"vision_config": named})


def florence2_weights(weights: Weights, config: Config) -> Weights:
    """Tensors by their published names, and the projection as the plain matrix that it was published as."""
    found = names(
        (r"^model\.(vision_tower\.convs\.\d+)\.conv\.", r"\1.proj."),
        (r"^model\.vision_tower\.", "vision_tower."),
        (r"_block\.(conv[12])\.(weight|bias)$", r"_block.\1.fn.dw.\2"),
        (r"(spatial_block)\.norm1\.", r"\1.window_attn.norm."),
        (r"(channel_block)\.norm1\.", r"\1.channel_attn.norm."),
        (r"_block\.norm2\.", "_block.ffn.norm."),
        (r"\.(window_attn|channel_attn)\.(qkv|proj)\.", r".\1.fn.\2."),
        (r"\.ffn\.(fc[12])\.", r".ffn.fn.net.\1."),
        (r"^model\.multi_modal_projector\.image_position_embed\.", "image_pos_embed."),
        (r"^model\.multi_modal_projector\.", ""),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^lm_head\.", "language_model.lm_head."),
    )(weights, config)
    projection = found.pop("image_projection.weight", None)
    return found if projection is None else found | {"image_projection": projection.T}


def internvl(config: Config) -> Config:
    """With a Qwen 2 decoder it is what was published as InternVL-Chat, of which mlx-vlm has a class of its own.

    Raises UnsupportedModel for other decoders than Qwen's: mlx-vlm's ``internvl`` builds Qwen 3's, whatever is said.
    """
    text, tower = config.get("text_config"), dict(config.get("vision_config") or {})
    kind = text.get("model_type") if isinstance(text, Mapping) else "qwen3"
    if kind in ("qwen3", "internvl"):
        return config
    if kind != "qwen2" or tower.get("use_qk_norm"):
        tall = " and a tower that normalises queries and keys" if tower.get("use_qk_norm") else ""
        raise UnsupportedModel(
            f"this internvl checkpoint has a {kind} decoder{tall}, and mlx-vlm's internvl a Qwen 3 one; the same model as "
            "published before transformers took it over (model_type internvl_chat) can be loaded"
        )
    named = renamed(attention_bias="qkv_bias", use_qk_norm="qk_normalization")(tower)
    return config | {"model_type": "internvl_chat", "vision_config": named | {"model_type": "intern_vit_6b"}}


def internvl_chat_weights(weights: Weights, config: Config) -> Weights:
    """Tensors by their published names, with queries, keys and values as one."""
    found = names(
        (r"^vision_tower\.embeddings\.cls_token$", "vision_model.embeddings.class_embedding"),
        (r"^vision_tower\.embeddings\.position_embeddings$", "vision_model.embeddings.position_embedding"),
        (r"^vision_tower\.embeddings\.patch_embeddings\.projection\.", "vision_model.embeddings.patch_embedding."),
        (r"^vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
        (r"\.attention\.projection_layer\.", ".attn.proj."),
        (r"\.layernorm_before\.", ".norm1."),
        (r"\.layernorm_after\.", ".norm2."),
        (r"\.lambda_([12])$", r".ls\1"),
        (r"^multi_modal_projector\.layer_norm\.", "mlp1.0."),
        (r"^multi_modal_projector\.linear_1\.", "mlp1.1."),
        (r"^multi_modal_projector\.linear_2\.", "mlp1.3."),
    )(weights, config)
    return joined_attention(found, r"\.attention\.q_proj\.(weight|bias)$", ".attention.", ".attn.qkv.")


def kimi_tower(tower: Config) -> Config:
    """MoonViT's settings by mlx-vlm's names."""
    named = renamed(
        num_hidden_layers="depth",
        hidden_size="embed_dim",
        num_attention_heads="num_heads",
        pos_emb_height="init_pos_emb_height",
        pos_emb_width="init_pos_emb_width",
    )(tower)
    return named | {"model_type": "moonvit"}


def molmo2_tables(weights: Weights, config: Config) -> Weights:
    """Two tables of words, cut where the vocabulary ends: transformers 5 saves their joined rows in halves."""
    first, second = (f"model.transformer.wte.{name}" for name in ("embedding", "new_embedding"))
    if first not in weights or second not in weights:
        return weights
    size = config["text_config"]["vocab_size"]
    rows = mx.concatenate([weights[first], weights[second]])
    return weights | {first: rows[:size], second: rows[size:]}


def nemotron_layers(text: Config) -> Config:
    """Kinds of layers by mlx-vlm's words."""
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    kinds = text.get("layers_block_type")
    return text if kinds is None else text | {"layers_block_type": [words.get(kind, kind) for kind in kinds]}


def nemotron_omni(config: Config) -> Config:
    """Nemotron's parts by mlx-vlm's names; features are put into the plane the newer way ("v2"), as transformers does."""
    if "image_token_id" not in config:
        return config
    named = renamed(image_token_id="img_context_token_id", vision_hidden_size="vit_hidden_size")(config)
    return in_order(filled(ps_version="v2"), part("text", nemotron_layers), part("vision", radio))(named)


def radio(tower: Config) -> Config:
    """RADIO's settings by mlx-vlm's names; it counts summary tokens by the teachers that the tower learned from."""
    summaries, registers = tower.get("num_cls_tokens"), tower.get("num_registers")
    if summaries is None or registers is None:
        return tower
    arguments = {"teachers": [{"name": str(n)} for n in range(summaries)], "register_multiple": summaries + registers}
    inner = int(tower["hidden_size"] * tower["mlp_ratio"])
    return renamed(max_img_size="max_resolution")(filled(args=arguments, intermediate_size=inner)(tower))


def without_layer_scales(weights: Weights, config: Config) -> Weights:
    """RADIO's scales of blocks' outputs, which mlx-vlm's tower has not, multiplied into the layers before them."""
    before = {"layer_scale1": "attn.proj", "layer_scale2": "mlp.fc2"}
    found = dict(weights)
    for name in [name for name in weights if re.search(r"\.layer_scale[12]\.lambda1$", name)]:
        block, scale, _ = name.rsplit(".", 2)
        layer, factors = f"{block}.{before[scale]}", found.pop(name)
        found[f"{layer}.weight"] = found[f"{layer}.weight"] * factors[:, None]
        found[f"{layer}.bias"] = found[f"{layer}.bias"] * factors
    return found


def radio_conditioner(weights: Weights, config: Config) -> Weights:
    """Means and deviations that a tower may take from pixels: none where the file has none, since the processor takes them."""
    conditioner = "vision_model.radio_model.input_conditioner.norm_"
    if not any("radio_model" in name for name in weights):
        return weights
    return {f"{conditioner}mean": mx.zeros((3, 1, 1)), f"{conditioner}std": mx.ones((3, 1, 1)), **weights}


def xdrope(text: Config) -> Config:
    """Positions on four axes by the name under which mlx-vlm looks for them."""
    rope: Mapping[str, Any] = text.get("rope_parameters") or {}
    if "mrope_section" not in rope:
        return text
    return text | {"rope_scaling": {**rope, "type": "xdrope", "xdrope_section": rope["mrope_section"]}}


def molmo2_tower(config: Config) -> Config:
    """The tower's and the pooling's settings as parts of one, by mlx-vlm's names."""
    tower, pooling = dict(config.get("vision_config") or {}), dict(config.get("adapter_config") or {})
    if not pooling:
        return config
    vit = renamed(
        patch_size="image_patch_size",
        num_position_embeddings="image_num_pos",
        image_size="image_default_input_size",
    )(tower)
    adapter = renamed(vision_feature_layer="vit_layers")(pooling)
    text = renamed(rms_norm_eps="layer_norm_eps")
    return part("text", text)(config) | {"vision_config": {"vit_config": vit, "adapter_config": adapter}}


def step3p5_text(text: Config) -> Config:
    """Step 3's decoder by mlx-vlm's names: experts, layers, and what sliding layers have otherwise."""
    if "n_routed_experts" not in text:  # the published form, which mlx-vlm reads
        return text
    kinds = text.get("layer_types") or []
    rope: Mapping[str, Any] = text.get("rope_parameters") or {}
    per_kind: list[Mapping[str, Any]] = [rope.get(kind, rope) for kind in kinds]
    named = renamed(
        num_key_value_heads="num_attention_groups",
        n_routed_experts="moe_num_experts",
        num_experts_per_tok="moe_top_k",
    )(text)
    named |= {"use_head_wise_attn_gate": True, "use_moe_router_bias": True}
    if per_kind and all("rope_theta" in one for one in per_kind):
        named["rope_theta"] = [one["rope_theta"] for one in per_kind]
        named["partial_rotary_factors"] = [one.get("partial_rotary_factor", 1.0) for one in per_kind]
    if (layers := text.get("mlp_layer_types")) is not None:
        named["moe_layers_enum"] = ",".join(str(layer) for layer, kind in enumerate(layers) if kind == "sparse")
    if (heads := text.get("num_sliding_attention_heads")) is not None:
        groups = named.get("num_attention_groups")
        named["attention_other_setting"] = {"num_attention_heads": heads, "num_attention_groups": groups}
    return named


def step3p5_tower(tower: Config) -> Config:
    """Step 3's tower by mlx-vlm's names."""
    return renamed(
        hidden_size="width",
        num_hidden_layers="layers",
        num_attention_heads="heads",
        layer_scale_init_value="ls_init_value",
    )(tower)


def inkling_text(text: Config) -> Config:
    """Widths of experts and of plain layers, which mlx-vlm's class calls the other way round."""
    if "moe_intermediate_size" not in text:
        return text
    experts, plain = text["moe_intermediate_size"], text["intermediate_size"]
    named = renamed(conv_kernel_size="sconv_kernel_size")(text)
    return named | {"intermediate_size": experts, "dense_intermediate_size": plain}


def turned_experts(weights: Weights, config: Config) -> Weights:
    """Experts as (experts, inputs, outputs), as published; transformers 5 also saves them the other way round."""
    inner = (config.get("text_config") or {}).get("moe_intermediate_size")
    downs = [value for name, value in weights.items() if name.endswith(".experts.down_proj")]
    if not downs or downs[0].shape[-1] != inner:
        return weights
    ends = (".experts.down_proj", ".experts.gate_up_proj")
    return {name: value.swapaxes(1, 2) if name.endswith(ends) else value for name, value in weights.items()}


def unused_head(weights: Weights, config: Config) -> Weights:
    """SigLIP's pooling head, which mlx-vlm's tower has and no answer reads: zeros where a checkpoint leaves it out."""
    tower = config.get("vision_config") or {}
    prefix = "vision_tower.vision_model.head."
    if tower.get("vision_use_head", True) or any(prefix in name for name in weights):
        return weights
    width, inner = tower["hidden_size"], tower["intermediate_size"]
    shapes = {
        "probe": (1, 1, width),
        "attention.in_proj.weight": (3 * width, width),
        "attention.in_proj.bias": (3 * width,),
    }
    shapes |= {"attention.out_proj.weight": (width, width), "attention.out_proj.bias": (width,)}
    shapes |= {"layernorm.weight": (width,), "layernorm.bias": (width,)}
    shapes |= {"mlp.fc1.weight": (inner, width), "mlp.fc1.bias": (inner,)}
    shapes |= {"mlp.fc2.weight": (width, inner), "mlp.fc2.bias": (width,)}
    return weights | {prefix + name: mx.zeros(shape) for name, shape in shapes.items()}


def ernie_moe(config: Config) -> Config:
    """ERNIE 4.5 VL as transformers calls it: experts of both kinds, the resampler and the tower by mlx-vlm's names.

    Raises UnsupportedModel for layers with experts that are not in a row, which mlx-vlm has no way to be told.
    """
    text, tower = dict(config.get("text_config") or {}), dict(config.get("vision_config") or {})
    if not text or not tower:
        raise UnsupportedModel("this ernie4_5_vl_moe checkpoint has no text_config or no vision_config")
    sparse = [layer for layer, kind in enumerate(text.get("mlp_layer_types") or ()) if kind == "sparse"]
    if not sparse or sparse != list(range(sparse[0], sparse[-1] + 1)):
        raise UnsupportedModel(f"mlp_layer_types {text.get('mlp_layer_types')} have no experts in a row of layers")
    text["moe_num_experts"] = [text["moe_num_experts"]] * 2  # for words, and for pictures
    text["moe_layer_start_index"], text["moe_layer_end_index"] = [sparse[0]] * 2, [sparse[-1]] * 2
    width = tower["hidden_size"]
    tower = renamed(hidden_size="embed_dim", rms_norm_eps="layer_norm_eps")(tower)
    tower["mlp_ratio"] = tower["intermediate_size"] / width
    found = config | {
        "model_type": "ernie4_5_moe_vl",
        "text_config": text,
        "vision_config": tower | {"model_type": "DFNRope_vision_transformer"},
        "im_patch_id": config["image_token_id"],
        "pixel_hidden_size": width,
        "spatial_conv_size": tower.get("spatial_merge_size", 2),
        "temporal_conv_size": tower.get("temporal_merge_size", 2),
    }
    return text_at_the_root(found)


def got(config: Config) -> Config:
    """GOT-OCR as transformers calls it: the decoder's settings at the root, and the tower's by mlx-vlm's names."""
    tower = dict(config.get("vision_config") or {})
    if not tower or not config.get("text_config"):
        raise UnsupportedModel("this got_ocr2 checkpoint has no text_config or no vision_config")
    named = renamed(
        image_size="img_size",
        num_channels="in_chans",
        hidden_size="embed_dim",
        num_hidden_layers="depth",
        num_attention_heads="num_heads",
        output_channels="out_chans",
    )(tower)
    named |= {"mlp_ratio": tower["mlp_dim"] / tower["hidden_size"], "out_dim": 4 * tower["output_channels"]}
    found = config | {"model_type": "got", "vision_config": named | {"model_type": "got"}}
    return renamed(image_token_id="im_patch_token")(text_at_the_root(found))


#: GOT-OCR's tensors, from transformers' names to mlx-vlm's.
GOT_NAMES = (
    (r"^multi_modal_projector\.conv_upsampler1\.", "vision_tower.net_2."),
    (r"^multi_modal_projector\.conv_upsampler2\.", "vision_tower.net_3."),
    (r"^multi_modal_projector\.multimodal_projector\.", "multi_modal_projector."),
    (r"^vision_tower\.neck\.layer_norm", "vision_tower.norm"),
    (r"^vision_tower\.neck\.conv", "vision_tower.conv"),
    (r"^vision_tower\.patch_embed\.projection\.", "vision_tower.patch_embed.proj."),
    (r"^vision_tower\.layers\.(\d+)\.layer_norm", r"vision_tower.blocks.\1.norm"),
    (r"^vision_tower\.layers\.", "vision_tower.blocks."),
)


def deepseek_vl(config: Config) -> Config:
    """DeepSeek-VL as transformers calls it: Janus where that reads pictures, with a projector of two layers."""
    tower = dict(config.get("vision_config") or {})
    if not tower or not config.get("text_config"):
        raise UnsupportedModel("this deepseek_vl checkpoint has no text_config or no vision_config")
    projector = {"cls": "MlpProjector", "model_type": "aligner", "params": {"projector_type": "mlp_gelu", "depth": 2}}
    return config | {
        "model_type": "multi_modality",
        "vision_config": tower | {"model_type": "vision", "cls": "CLIPVisionTower", "params": {}},
        "projector_config": projector,
        "num_image_tokens": (tower["image_size"] // tower["patch_size"]) ** 2,
    }


def deepseek_vl_weights(weights: Weights, config: Config) -> Weights:
    """Its tensors by mlx-vlm's names; queries, keys and values as one, and zeros for a head that no answer reads."""
    if not any(name.startswith("model.vision_model.encoder.") for name in weights):
        return weights
    tower = "vision_model.vision_tower."
    found = names(
        (r"^model\.vision_model\.embeddings\.patch_embedding\.", tower + "patch_embed.proj."),
        (r"^model\.vision_model\.encoder\.layers\.", tower + "blocks."),
        (r"^model\.vision_model\.post_layernorm\.", tower + "norm."),
        (r"\.layer_norm([12])\.", r".norm\1."),
        (r"(vision_tower.*)\.self_attn\.out_proj\.", r"\1.attn.proj."),
        (r"^model\.aligner\.linear1\.", "aligner.layers.0."),
        (r"^model\.aligner\.linear2\.", "aligner.layers.2."),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^lm_head\.", "language_model.lm_head."),
    )(weights, config)
    found = joined_attention(found, r"vision_tower.*\.self_attn\.q_proj\.", ".self_attn.", ".attn.qkv.")
    positions = found.pop("model.vision_model.embeddings.position_embedding.weight")
    found[tower + "pos_embed"] = positions[None]
    width = positions.shape[-1]
    shapes: dict[str, tuple[int, ...]] = {"latent": (1, 1, width)}
    for layer, rows, columns in (
        ("q", 1, 1),
        ("kv", 2, 1),
        ("proj", 1, 1),
        ("mlp.fc1", 4, 1),
        ("mlp.fc2", 1, 4),
    ):
        shapes |= {f"{layer}.weight": (rows * width, columns * width), f"{layer}.bias": (rows * width,)}
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    return found | {f"{tower}attn_pool.{name}": mx.zeros(shape) for name, shape in shapes.items()}


def deepseek_v4(config: Config) -> Config:
    """Raises UnsupportedModel for a folder of transformers' own: it knows only the published names of tensors to read, and
    saves others (layers by ``layer_types``, joined experts), of which mlx-vlm has none."""
    if config.get("layer_types") and not config.get("compress_ratios"):
        return refused(
            "transformers saved it under names of its own, which mlx-vlm does not read; the published folder can be loaded"
        )(config)
    return config


def qwen3_omni_thinker(config: Config) -> Config:
    """The half of a Qwen3-Omni that writes text, as a whole one without a voice."""
    if not config.get("text_config"):
        raise UnsupportedModel("this qwen3_omni_moe_thinker checkpoint has no text_config")
    unused = {"text_config": dict(config["text_config"]), "code_predictor_config": dict(config["text_config"])}
    silent = {"enable_audio_output": False, "talker_config": unused, "code2wav_config": {}}
    passed_on: Config = {name: config[name] for name in ("transformers_version", "eos_token_id") if name in config}
    return {"model_type": "qwen3_omni_moe", "thinker_config": config, **silent, **passed_on}


def thinker_names(weights: Weights, config: Config) -> Weights:
    """Tensors of that half alone below the name that they have in the whole."""
    is_whole = any(name.startswith("thinker.") for name in weights)
    return weights if is_whole else {f"thinker.{name}": value for name, value in weights.items()}


#: Types of transformers' that mlx-vlm has no class for, or none that takes their settings -> why.
UNREADABLE = {
    "deepseek_ocr2": "mlx-vlm's DeepSeek-OCR-2 has its encoder's sizes written in (deepseekocr_2/config.py:76), and no "
    "settings of transformers' for it can be told to it; the published folder can be loaded",
    "deepseek_vl_hybrid": "its second tower (SAM) is not verified here; deepseek_vl can be loaded",
    "qwen3_omni_moe_text": "it is the decoder of a Qwen3-Omni alone; the whole model's folder (qwen3_omni_moe) can be loaded",
}

#: Norms of Qwen's decoders, whose weights transformers keeps as the distance from one; not by the names that mlx-vlm's
#: own conversions have, whose norms are whole already.
QWEN_NORMS = r"^model\..*(_layernorm|[qk]_norm|\bnorm)\.weight$"
INTERVAL = part("text", full_attention_interval())
GLM_MARKERS = renamed(image_start_token_id="vision_start_token_id", image_end_token_id="vision_end_token_id")

LAYOUTS: dict[str, Layout] = {
    **{model_type: Layout(refused(reason)) for model_type, reason in UNREADABLE.items()},
    "aya_vision": Layout(part("text", full_attention_interval("sliding_window_pattern"))),
    "deepseek_v4": Layout(deepseek_v4),
    "deepseek_vl": Layout(deepseek_vl, keeps_processor=True),
    "ernie4_5_moe_vl": Layout(weights=names((r"^model\.vision_model\.", "vision_model."))),
    "ernie4_5_vl_moe": Layout(ernie_moe),
    "falcon_h1": Layout(weights=falcon_h1),
    "florence2": Layout(florence2, florence2_weights),
    "gemma3": Layout(gemma3_text, finish=gemma3_head),
    "gemma4": Layout(part("text", gemma4_text)),
    "gemma4_unified": Layout(in_order(part("text", gemma4_text), part("vision", gemma4_unified_tower))),
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
    "got": Layout(weights=names(*GOT_NAMES)),
    "got_ocr2": Layout(got),
    "granite4_vision": Layout(weights=unused_head),
    "granite_vision": Layout(weights=unused_head),
    "hunyuan_vl": Layout(
        in_order(
            own_vision_type,
            renamed(im_start_id="image_start_token_id", im_end_id="image_end_token_id"),
            part("text", xdrope),
        ),
        names((r"^lm_head\.", "language_model.lm_head.")),
    ),
    "inkling": Layout(part("text", inkling_text)),
    "internvl": Layout(internvl, keeps_processor=True),
    "internvl_chat": Layout(weights=internvl_chat_weights),
    "kimi_k25": Layout(
        in_order(part("vision", kimi_tower), renamed(image_token_id="media_placeholder_token_id")),
        names(
            (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
            (r"^model\.mm_projector\.", "mm_projector."),
        ),
    ),
    "lfm2_vl": Layout(part("text", lfm2_text)),
    "llama4": Layout(part("vision", filled(vision_feature_layer=-1)), processor=llama4_processor),
    "llava": Layout(llava),
    "llava_next": Layout(llava_next),
    "minicpmv4_6": Layout(INTERVAL, from_one=QWEN_NORMS),
    "minicpmv4_7": Layout(INTERVAL, from_one=QWEN_NORMS),
    "mllama": Layout(part("vision", renamed(attention_heads="num_attention_heads"))),
    "molmo2": Layout(molmo2_tower, molmo2_tables),
    "multi_modality": Layout(weights=deepseek_vl_weights),
    "muse_spark": Layout(finish=muse_spark_norms),
    "nemotron_h": Layout(nemotron_layers),
    "nemotron_h_nano_omni": Layout(nemotron_omni, after(without_layer_scales, radio_conditioner)),
    "paddleocr_vl": Layout(in_order(text_at_the_root, own_vision_type)),
    "qwen2_5_vl": Layout(in_order(text_at_the_root, own_vision_type)),
    "qwen2_vl": Layout(in_order(text_at_the_root, own_vision_type)),
    "qwen3_5": Layout(INTERVAL, from_one=QWEN_NORMS),
    "qwen3_5_moe": Layout(INTERVAL, from_one=QWEN_NORMS),
    "qwen3_next": Layout(full_attention_interval(), from_one=QWEN_NORMS),
    "qwen3_omni_moe": Layout(weights=thinker_names),
    "qwen3_omni_moe_thinker": Layout(qwen3_omni_thinker),
    "qwen3_vl": Layout(own_vision_type),
    "qwen3_vl_moe": Layout(own_vision_type, turned_experts),
    "qwen4_exp": Layout(part("text", indexed_attention)),
    "step3p5": Layout(step3p5_text, from_one=r"^model\..*norm\.weight$"),
    "step3p7": Layout(
        in_order(part("text", step3p5_text), part("vision", step3p5_tower)), from_one=r"^model\..*norm\.weight$"
    ),
}
