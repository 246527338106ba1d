"""The tables of rules for folders that mlx-vlm 0.7.10 does not read, or not as they are meant.

``RULES`` corrects ``config.json`` from top to bottom, ``TENSORS`` the weights. mlx-vlm silently takes its own defaults for
what it does not find under the name that it looks for. A rule names who reads what it makes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.utils import get_model_type

from vlm_batch.errors import UnsupportedModel
from vlm_batch.models._rules import (
    Config,
    Rule,
    Tensors,
    Weights,
    every,
    filled,
    full_attention_interval,
    in_order,
    joined_attention,
    kinds_renamed,
    refused,
    renamed,
    text_at_the_root,
    without,
)

#: Kinds of rotary positions that have no parameters beside their base: mlx-vlm's plain ones.
PLAIN_ROPE = ("default", "axial", "proportional", "mrope")


def corrected(config: Mapping[str, Any]) -> Config:
    """A configuration with what mlx-vlm reads beside what the folder holds. Raises UnsupportedModel for what cannot be put."""
    found = dict(config)
    for rule in RULES:
        found = rule.apply(found, str(get_model_type(found)))
    return found


# Every family
# ---------------------------------------------------------------------------------------------------------------------


def flat_rope(part: Config) -> Config:
    """The entries of ``rope_parameters`` under their older names, too; what a configuration says itself stays."""
    rope: Mapping[str, Any] = part["rope_parameters"]
    kinds = {name: kind for name, kind in rope.items() if isinstance(kind, Mapping)}
    chosen = kinds.get("full_attention", next(iter(kinds.values()))) if kinds else rope
    found = {name: chosen[name] for name in ("rope_theta", "partial_rotary_factor") if name in chosen}
    kind = chosen.get("rope_type", "default")
    if kind not in PLAIN_ROPE or "mrope_section" in chosen:
        found["rope_scaling"] = {"type": kind, **chosen}
    if "rope_theta" in (sliding := kinds.get("sliding_attention", {})):
        found["rope_local_base_freq"] = sliding["rope_theta"]
    return filled(**found)(part)


def head_width(part: Config) -> Config:
    """The width of a head, which transformers leaves out where it follows from others."""
    heads, width = part.get("num_attention_heads"), part.get("hidden_size")
    if not heads or not width or part.get("head_dim") is not None or "qk_nope_head_dim" in part:
        return part
    return part | {"head_dim": width // heads}


def own_vision_type(config: Config) -> Config:
    """A tower's type without transformers' suffix, which mlx-vlm's tower refuses: qwen2_vl for qwen2_vl_vision."""
    own, tower = str(config["model_type"]), config["vision_config"]
    is_named = tower.get("model_type") == f"{own}_vision"
    return config | {"vision_config": tower | {"model_type": own}} if is_named else config


def the_models_tie(config: Config) -> Config:
    """The model's word on tied embeddings in the decoder's settings, where transformers 5 does not read it."""
    text, tied = config["text_config"], config["tie_word_embeddings"]
    return config | {"text_config": {**text, "tie_word_embeddings": tied}} if "rope_parameters" in text else config


# Folders of another type
# ---------------------------------------------------------------------------------------------------------------------


def llava(config: Config) -> Config:
    """Pixtral, which transformers saves as a LLaVA with another tower."""
    return config | {"model_type": "pixtral"} if config["vision_config"].get("model_type") == "pixtral" else config


def llava_next(config: Config) -> Config:
    """Granite Vision, which transformers saves as a LLaVA-NeXT with another tower and decoder."""
    return config | {"model_type": "granite_vision"} if config["text_config"].get("model_type") == "granite" else config


def internvl(config: Config) -> Config:
    """With a Qwen 2 decoder it is what was published as InternVL-Chat, of which mlx-vlm has a class of its own.

    Raises UnsupportedModel for other decoders than Qwen's: mlx-vlm's ``internvl`` builds Qwen 3's, whatever is said.
    """
    kind, tower = config["text_config"].get("model_type", "qwen3"), dict(config.get("vision_config") or {})
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


def ernie_moe(config: Config) -> Config:
    """ERNIE 4.5 VL as transformers calls it: experts of both kinds, the resampler and the tower by mlx-vlm's names.

    Raises UnsupportedModel for layers with experts that are not in a row, which mlx-vlm has no way to be told.
    """
    text, tower = dict(config["text_config"]), dict(config["vision_config"])
    sparse = every("sparse", text.get("mlp_layer_types") or ())
    if not sparse or sparse != list(range(sparse[0], sparse[-1] + 1)):
        raise UnsupportedModel(f"mlp_layer_types {text.get('mlp_layer_types')} have no experts in a row of layers")
    text["moe_num_experts"] = [text["moe_num_experts"]] * 2  # for words, and for pictures
    text["moe_layer_start_index"], text["moe_layer_end_index"] = [sparse[0]] * 2, [sparse[-1]] * 2
    width = tower["hidden_size"]
    tower = renamed(hidden_size="embed_dim", rms_norm_eps="layer_norm_eps")(tower)
    tower |= {"mlp_ratio": tower["intermediate_size"] / width, "model_type": "DFNRope_vision_transformer"}
    found = {
        "model_type": "ernie4_5_moe_vl",
        "text_config": text,
        "vision_config": tower,
        "im_patch_id": config["image_token_id"],
        "pixel_hidden_size": width,
        "spatial_conv_size": tower.get("spatial_merge_size", 2),
        "temporal_conv_size": tower.get("temporal_merge_size", 2),
    }
    return text_at_the_root(config | found)


def got(config: Config) -> Config:
    """GOT-OCR as transformers calls it: the decoder's settings at the root, and the tower's by mlx-vlm's names."""
    tower = renamed(
        image_size="img_size",
        num_channels="in_chans",
        hidden_size="embed_dim",
        num_hidden_layers="depth",
        num_attention_heads="num_heads",
        output_channels="out_chans",
    )(config["vision_config"])
    tower |= {"mlp_ratio": tower["mlp_dim"] / tower["hidden_size"], "out_dim": 4 * tower["output_channels"]}
    found = config | {"model_type": "got", "vision_config": tower | {"model_type": "got"}}
    return renamed(image_token_id="im_patch_token")(text_at_the_root(found))


def deepseek_vl(config: Config) -> Config:
    """DeepSeek-VL as transformers calls it: Janus where that reads pictures, with a projector of two layers."""
    tower = config["vision_config"]
    projector = {"cls": "MlpProjector", "model_type": "aligner", "params": {"projector_type": "mlp_gelu", "depth": 2}}
    return config | {
        "model_type": "multi_modality",
        "vision_config": tower | {"model_type": "vision", "cls": "CLIPVisionTower", "params": {}},
        "projector_config": projector,
        "num_image_tokens": (tower["image_size"] // tower["patch_size"]) ** 2,
    }


def qwen3_omni_thinker(config: Config) -> Config:
    """The half of a Qwen3-Omni that writes text, as a whole one without a voice."""
    unused = {"text_config": dict(config["text_config"]), "code_predictor_config": dict(config["text_config"])}
    silent = {"enable_audio_output": False, "talker_config": unused, "code2wav_config": {}}
    passed_on: Config = {name: config[name] for name in ("transformers_version", "eos_token_id") if name in config}
    return {"model_type": "qwen3_omni_moe", "thinker_config": config, **silent, **passed_on}


# One family
# ---------------------------------------------------------------------------------------------------------------------


def gemma4_text(text: Config) -> Config:
    """The settings that ``per_layer_config`` has for the full layers, under the names that hold for all of them.

    Raises UnsupportedModel where the full layers differ, or where a sliding layer has settings of its own.
    """
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    layers: Mapping[str, Mapping[str, Any]] = text["per_layer_config"]
    full = [str(layer) for layer in every("full_attention", text.get("layer_types") or ())]
    said = [dict(layers.get(layer, {})) for layer in full]
    if layers and (set(layers) - set(full) or any(one != said[0] for one in said) or said[0].keys() - names.keys()):
        raise UnsupportedModel(f"per_layer_config {dict(layers)} does not set all layers of full attention alike")
    return text | {names[name]: value for name, value in said[0].items()} if layers else text


def tokens_of_a_picture(config: Config) -> Config:
    """The number of tokens that a picture takes, which mlx-vlm looks for in the decoder's settings."""
    text = filled(mm_tokens_per_image=config["mm_tokens_per_image"])(config["text_config"])
    return config | {"text_config": text}


def glm_ocr_rope(text: Config) -> Config:
    """Rotary settings in ``rope_parameters`` alone: mlx-vlm's class has no other place for them."""
    older = ("rope_theta", "partial_rotary_factor")
    rope = {**(text.get("rope_scaling") or {}), **{name: text[name] for name in older if text.get(name) is not None}}
    kept = without(*older, "rope_scaling")(text)
    return kept if "rope_parameters" in text or not rope else kept | {"rope_parameters": rope}


def lfm2_text(text: Config) -> Config:
    """Widths that follow from ``hidden_size``; mlx-vlm's class has those of one checkpoint as constants."""
    width = text["hidden_size"]
    return filled(block_dim=width, conv_dim=width, conv_dim_out=width, num_heads=text["num_attention_heads"])(text)


def gemma4_tower(tower: Config) -> Config:
    """The side of a patch as the model takes it: several of the processor's."""
    return filled(model_patch_size=tower["patch_size"] * tower["pooling_kernel_size"])(tower)


def inkling_text(text: Config) -> Config:
    """Widths of experts and of plain layers, which mlx-vlm's class calls the other way round."""
    widths = {"intermediate_size": text["moe_intermediate_size"], "dense_intermediate_size": text["intermediate_size"]}
    return renamed(conv_kernel_size="sconv_kernel_size")(text) | widths


def kimi_tower(tower: Config) -> Config:
    """MoonViT's settings by mlx-vlm's names."""
    sizes = renamed(num_hidden_layers="depth", hidden_size="embed_dim", num_attention_heads="num_heads")
    places = renamed(pos_emb_height="init_pos_emb_height", pos_emb_width="init_pos_emb_width")
    return places(sizes(tower)) | {"model_type": "moonvit"}


def nemotron_omni(config: Config) -> Config:
    """Nemotron's parts by mlx-vlm's names; features are put into the plane the newer way ("v2"), as transformers does."""
    named = renamed(image_token_id="img_context_token_id", vision_hidden_size="vit_hidden_size")
    return filled(ps_version="v2")(named(config))


def florence2_text(text: Config) -> Config:
    """Raises UnsupportedModel for embeddings that are scaled: mlx-vlm scales none that are handed to its decoder."""
    if text["scale_embedding"]:
        raise UnsupportedModel(
            "config.json says text_config.scale_embedding: true, which mlx-vlm's florence2 passes over: it computes false"
        )
    return text


def florence2_tower(tower: Config) -> Config:
    """The tower's settings by mlx-vlm's names."""
    if tower["model_type"] != "florence_vision":
        return tower
    return renamed(embed_dim="dim_embed", in_channels="in_chans")(tower) | {"model_type": "davit"}


def radio(tower: Config) -> Config:
    """RADIO's settings by mlx-vlm's names; it counts summary tokens by the teachers that the tower learned from."""
    summaries, registers = tower["num_cls_tokens"], tower["num_registers"]
    arguments = {"teachers": [{"name": str(n)} for n in range(summaries)], "register_multiple": summaries + registers}
    inner = int(tower["hidden_size"] * tower["mlp_ratio"])
    return renamed(max_img_size="max_resolution")(filled(args=arguments, intermediate_size=inner)(tower))


def xdrope(text: Config) -> Config:
    """Positions on four axes by the name under which mlx-vlm looks for them."""
    rope: Mapping[str, Any] = text["rope_parameters"]
    if "mrope_section" not in rope:
        return text
    return text | {"rope_scaling": {**rope, "type": "xdrope", "xdrope_section": rope["mrope_section"]}}


def molmo2_tower(config: Config) -> Config:
    """The tower's and the pooling's settings as parts of one, by mlx-vlm's names."""
    if "vit_config" in config["vision_config"]:
        return config
    vit = renamed(
        patch_size="image_patch_size", num_position_embeddings="image_num_pos", image_size="image_default_input_size"
    )(config["vision_config"])
    adapter = renamed(vision_feature_layer="vit_layers")(config["adapter_config"])
    return config | {"vision_config": {"vit_config": vit, "adapter_config": adapter}}


def step3p5_text(text: Config) -> Config:
    """Step 3's decoder by mlx-vlm's names: experts, layers, and what sliding layers have otherwise."""
    rope: Mapping[str, Any] = text.get("rope_parameters") or {}
    per_kind: list[Mapping[str, Any]] = [rope.get(kind, rope) for kind in text.get("layer_types") or []]
    named = renamed(
        num_key_value_heads="num_attention_groups", n_routed_experts="moe_num_experts", num_experts_per_tok="moe_top_k"
    )(text)
    named |= {"use_head_wise_attn_gate": True, "use_moe_router_bias": True}
    if per_kind and all("rope_theta" in one for one in per_kind):
        named["rope_theta"] = [one["rope_theta"] for one in per_kind]
        named["partial_rotary_factors"] = [one.get("partial_rotary_factor", 1.0) for one in per_kind]
    if (layers := text.get("mlp_layer_types")) is not None:
        named["moe_layers_enum"] = ",".join(map(str, every("sparse", layers)))
    if (heads := text.get("num_sliding_attention_heads")) is not None:
        groups = named.get("num_attention_groups")
        named["attention_other_setting"] = {"num_attention_heads": heads, "num_attention_groups": groups}
    return named


def deepseek_v4(config: Config) -> Config:
    """Raises UnsupportedModel for a folder of transformers' own: it knows only the published names of tensors to read, and
    saves others (layers by ``layer_types``, joined experts), of which mlx-vlm has none."""
    if config.get("compress_ratios"):
        return config
    return refused(
        "transformers saved it under names of its own, which mlx-vlm does not read; the published folder can be loaded"
    )(config)


#: Types of transformers' that mlx-vlm has no class for, or none that takes their settings -> why.
UNREADABLE = {
    "deepseek_ocr2": "mlx-vlm's DeepSeek-OCR-2 has its encoder's sizes written in (deepseekocr_2/config.py:76), and no "
    "settings of transformers' for it can be told to it; the published folder can be loaded",
    "deepseek_vl_hybrid": "its second tower (SAM) is not verified here; deepseek_vl can be loaded",
    "qwen3_omni_moe_text": "it is the decoder of a Qwen3-Omni alone; the whole model's folder (qwen3_omni_moe) can be loaded",
}
#: Either name of the words that stand for a picture and a video.
TOKEN_IDS = in_order(
    renamed(image_token_id="image_token_index", image_token_index="image_token_id"),
    renamed(video_token_id="video_token_index", video_token_index="video_token_id"),
)
INTERVAL = full_attention_interval("full_attention_interval")
GLM_MARKERS = renamed(image_start_token_id="vision_start_token_id", image_end_token_id="vision_end_token_id")
NEMOTRON_LAYERS = kinds_renamed("layers_block_type", linear_attention="mamba", full_attention="attention")
STEP_TOWER = renamed(
    hidden_size="width", num_hidden_layers="layers", num_attention_heads="heads", layer_scale_init_value="ls_init_value"
)

#: Changes of ``config.json``: (types, the change, the part that is changed, what that must hold).
RULES = (
    *(Rule(kind, refused(reason)) for kind, reason in UNREADABLE.items()),
    Rule("deepseek_v4", deepseek_v4, where="layer_types"),
    # Rotary positions lie in ``rope_parameters`` since transformers 5, and what follows from others is left out.
    Rule("", in_order(flat_rope, head_width), "*", "rope_parameters", "configuration_utils.py of transformers"),
    Rule("", renamed(num_local_experts="num_experts"), "*", source="mixtral/config.py"),
    Rule("", TOKEN_IDS, "*", source="glm4v/config.py"),
    Rule("", the_models_tie, "", "tie_word_embeddings text_config", "modeling_utils.py of transformers"),
    # What is another family's for mlx-vlm.
    Rule("deepseek_vl", deepseek_vl, where="text_config vision_config", source="multi_modality/config.py"),
    Rule("ernie4_5_vl_moe", ernie_moe, where="text_config vision_config", source="ernie4_5_moe_vl/config.py"),
    Rule("got_ocr2", got, where="text_config vision_config", source="got/config.py"),
    Rule("internvl", internvl, where="text_config", source="internvl_chat/config.py"),
    Rule("llava", llava, where="vision_config", source="pixtral/config.py"),
    Rule("llava_next", llava_next, where="text_config", source="granite_vision/config.py"),
    Rule("qwen3_omni_moe_thinker", qwen3_omni_thinker, where="text_config", source="qwen3_omni_moe/config.py"),
    # Layers by their kinds.
    Rule("gemma3 aya_vision", full_attention_interval("sliding_window_pattern"), "text", "layer_types"),
    Rule("qwen3_5 qwen3_5_moe minicpmv4_6 minicpmv4_7", INTERVAL, "text", "layer_types"),
    Rule("qwen3_next", INTERVAL, where="layer_types"),
    Rule("nemotron_h_nano_omni nemotron_h", NEMOTRON_LAYERS, "*", "layers_block_type"),
    Rule("qwen4_exp", kinds_renamed("layer_types", indexed_attention="qwen_sparse_attention"), "text", "layer_types"),
    # Names, and constants of transformers' classes.
    Rule("florence2", florence2_text, "text", "scale_embedding"),
    Rule("florence2", florence2_tower, "vision", "model_type"),
    Rule("florence2", filled(image_feature_source=["spatial_avg_pool", "temporal_avg_pool"]), where="vision_config"),
    Rule("gemma3", renamed(rope_theta="rope_global_base_freq"), "text"),
    Rule("gemma3", tokens_of_a_picture, where="mm_tokens_per_image text_config"),
    Rule("gemma4 gemma4_unified", gemma4_text, "text", "per_layer_config"),
    Rule("gemma4_unified", gemma4_tower, "vision", "patch_size pooling_kernel_size"),
    Rule("glm4v glm4v_moe glm_ocr", GLM_MARKERS),
    Rule("glm4v", lambda text: {"eos_token_id": None, **text}, "text"),
    Rule("glm4v_moe", filled(use_qk_norm=False), "text"),
    Rule("glm_ocr", glm_ocr_rope, "text"),
    Rule("glm_ocr", without("rope_theta", "rope_parameters", "dtype"), "vision"),
    Rule("hunyuan_vl", renamed(im_start_id="image_start_token_id", im_end_id="image_end_token_id")),
    Rule("hunyuan_vl", xdrope, "text", "rope_parameters"),
    Rule("inkling", inkling_text, "text", "moe_intermediate_size intermediate_size"),
    Rule("kimi_k25", renamed(image_token_id="media_placeholder_token_id")),
    Rule("kimi_k25", kimi_tower, "vision", "num_hidden_layers"),
    Rule("lfm2_vl", lfm2_text, "text", "hidden_size num_attention_heads"),
    Rule("llama4", filled(vision_feature_layer=-1), "vision"),
    Rule("mllama", renamed(attention_heads="num_attention_heads"), "vision"),
    Rule("molmo2", molmo2_tower, where="vision_config adapter_config"),
    Rule("molmo2", renamed(rms_norm_eps="layer_norm_eps"), "text"),
    Rule("nemotron_h_nano_omni", nemotron_omni, where="vision_hidden_size"),
    Rule("nemotron_h_nano_omni", radio, "vision", "num_cls_tokens num_registers hidden_size mlp_ratio"),
    Rule("qwen2_vl qwen2_5_vl paddleocr_vl", text_at_the_root, where="text_config"),
    Rule("qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe hunyuan_vl paddleocr_vl", own_vision_type, where="vision_config"),
    Rule("step3p5", step3p5_text, where="n_routed_experts"),
    Rule("step3p7", step3p5_text, "text", "n_routed_experts"),
    Rule("step3p7", STEP_TOWER, "vision"),
)

# Tensors
# ---------------------------------------------------------------------------------------------------------------------


def gemma3_head(lying: Weights, put: Weights, config: Config) -> Weights:
    """A head of its own, which mlx-vlm looks for by another name and overwrites with the table (gemma3/language.py:266)."""
    head = "language_model.lm_head.weight"
    return put if config.get("tie_word_embeddings", True) or head not in lying else put | {head: lying[head]}


def falcon_h1(weights: Weights, config: Config) -> Weights:
    """Multipliers that mlx-vlm leaves out when it folds them into the weights (falcon_h1/language.py:425-428).

    It looks for ``key_proj.weight``, which is no name of the model: keys miss ``key_multiplier``, and values
    ``attention_in_multiplier`` (transformers, modeling_falcon_h1.py, FalconH1Attention and FalconH1DecoderLayer). And it
    folds none into biases, which multipliers of outputs multiply as well. What mlx-vlm has converted before has its
    convolutions turned, and is folded already.
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
        "in_proj.bias": mx.array(np.repeat(config.get("ssm_multipliers") or [1.0] * 5, sizes), mx.float32),
        "out_proj.bias": config.get("ssm_out_multiplier", 1.0),
    }
    ends = {name: ".".join(name.rsplit(".", 2)[1:]) for name in weights}
    return {
        name: (value * factors[ends[name]]).astype(value.dtype) if ends[name] in factors else value
        for name, value in weights.items()
    }


def muse_spark_norms(lying: Weights, put: Weights, config: Config) -> Weights:
    """Norms that count from one, which mlx-vlm rounds to bfloat16 (muse_spark/sanitize.py:10)."""
    norms = r"(input_layernorm|p(re|ost)_feedforward_layernorm|p(re|ost)_expert_norm)\.weight$"
    found = {
        name.replace("model.language_model.", "language_model.model.", 1): 1.0 + value.astype(mx.float32)
        for name, value in lying.items()
        if re.search(rf"^model\.language_model\..*{norms}", name)
    }
    return put | found


def plain_projection(weights: Weights, config: Config) -> Weights:
    """Florence-2's projection as the plain matrix that it was published as."""
    projection = weights.pop("image_projection.weight", None)
    return weights if projection is None else weights | {"image_projection": projection.T}


def internvl_attention(weights: Weights, config: Config) -> Weights:
    """The tower's queries, keys and values as one."""
    return joined_attention(weights, r"\.attention\.q_proj\.(weight|bias)$", ".attention.", ".attn.qkv.")


def molmo2_tables(weights: Weights, config: Config) -> Weights:
    """Two tables of words, cut where the vocabulary ends: transformers 5 saves their joined rows in halves."""
    first, second = (f"model.transformer.wte.{name}" for name in ("embedding", "new_embedding"))
    if first not in weights or second not in weights:
        return weights
    size = config["text_config"]["vocab_size"]
    rows = mx.concatenate([weights[first], weights[second]])
    return weights | {first: rows[:size], second: rows[size:]}


def radio_weights(weights: Weights, config: Config) -> Weights:
    """RADIO's scales of blocks' outputs, which mlx-vlm's tower has not, multiplied into the layers before them.

    It takes means and deviations from pixels, none where the file has none, since the processor takes them.
    """
    before = {"layer_scale1": "attn.proj", "layer_scale2": "mlp.fc2"}
    found = dict(weights)
    for name in [name for name in weights if re.search(r"\.layer_scale[12]\.lambda1$", name)]:
        block, scale, _ = name.rsplit(".", 2)
        layer, factors = f"{block}.{before[scale]}", found.pop(name)
        found[f"{layer}.weight"] = found[f"{layer}.weight"] * factors[:, None]
        found[f"{layer}.bias"] = found[f"{layer}.bias"] * factors
    norm = "vision_model.radio_model.input_conditioner.norm_"
    if not any("radio_model" in name for name in weights):
        return found
    return {f"{norm}mean": mx.zeros((3, 1, 1)), f"{norm}std": mx.ones((3, 1, 1)), **found}


def turned_experts(weights: Weights, config: Config) -> Weights:
    """Experts as (experts, inputs, outputs), as published; transformers 5 also saves them the other way round."""
    inner = (config.get("text_config") or {}).get("moe_intermediate_size")
    downs = [value for name, value in weights.items() if name.endswith(".experts.down_proj")]
    if not downs or downs[0].shape[-1] != inner:
        return weights
    ends = (".experts.down_proj", ".experts.gate_up_proj")
    return {name: value.swapaxes(1, 2) if name.endswith(ends) else value for name, value in weights.items()}


def deepseek_vl_tower(weights: Weights, config: Config) -> Weights:
    """The tower's queries, keys and values as one, and its positions with an axis for pictures."""
    positions = weights.pop("model.vision_model.embeddings.position_embedding.weight", None)
    if positions is None:
        return weights
    found = joined_attention(weights, r"vision_tower.*\.self_attn\.q_proj\.", ".self_attn.", ".attn.qkv.")
    return found | {"vision_model.vision_tower.pos_embed": positions[None]}


def thinker_names(weights: Weights, config: Config) -> Weights:
    """Tensors of the half of a Qwen3-Omni that writes text, alone, below the name that they have in the whole."""
    is_whole = any(name.startswith("thinker.") for name in weights)
    return weights if is_whole else {f"thinker.{name}": value for name, value in weights.items()}


def llama4_processor(processor: Any, config: Config) -> None:
    """Sizes by which placeholders are counted, which mlx-vlm's processor has as constants (llama4/processing_llama4.py:129)."""
    tower = config["vision_config"]
    processor.patch_size = tower["patch_size"]
    processor.downsample_ratio = round(1 / tower["pixel_shuffle_ratio"] ** 2)


#: Norms of Qwen's decoders, whose weights transformers keeps as the distance from one; not by the names that mlx-vlm's
#: own conversions have, whose norms are whole already.
QWEN = Tensors(from_one=r"^model\..*(_layernorm|[qk]_norm|\bnorm)\.weight$")
STEP = Tensors(from_one=r"^model\..*norm\.weight$")
#: SigLIP's pooling head, which no answer reads.
SIGLIP = Tensors(
    ((r"(\.head\.attention)\.in_proj_(weight|bias)$", r"\1.in_proj.\2"),), unread="vision_tower.vision_model.head."
)

#: Corrections of tensors, by the model type that mlx-vlm reads. Names are mlx-vlm's, or as published.
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
            (r"^model\.multi_modal_projector\.image_position_embed\.", "image_pos_embed."),
            (r"^model\.multi_modal_projector\.", ""),
            (r"^model\.language_model\.", "language_model.model."),
            (r"^lm_head\.", "language_model.lm_head."),
        ),
        plain_projection,
    ),
    "gemma3": Tensors(finish=gemma3_head),
    "got": Tensors(
        (
            (r"^multi_modal_projector\.conv_upsampler1\.", "vision_tower.net_2."),
            (r"^multi_modal_projector\.conv_upsampler2\.", "vision_tower.net_3."),
            (r"^multi_modal_projector\.multimodal_projector\.", "multi_modal_projector."),
            (r"^vision_tower\.neck\.layer_norm", "vision_tower.norm"),
            (r"^vision_tower\.neck\.conv", "vision_tower.conv"),
            (r"^vision_tower\.patch_embed\.projection\.", "vision_tower.patch_embed.proj."),
            (r"^vision_tower\.layers\.(\d+)\.layer_norm", r"vision_tower.blocks.\1.norm"),
            (r"^vision_tower\.layers\.", "vision_tower.blocks."),
        )
    ),
    "granite4_vision": SIGLIP,
    "granite_vision": SIGLIP,
    "hunyuan_vl": Tensors(((r"^lm_head\.", "language_model.lm_head."),)),
    "internvl_chat": Tensors(
        (
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
            (r"^model\.vision_model\.embeddings\.patch_embedding\.", "vision_model.vision_tower.patch_embed.proj."),
            (r"^model\.vision_model\.encoder\.layers\.", "vision_model.vision_tower.blocks."),
            (r"^model\.vision_model\.post_layernorm\.", "vision_model.vision_tower.norm."),
            (r"\.layer_norm([12])\.", r".norm\1."),
            (r"(vision_tower.*)\.self_attn\.out_proj\.", r"\1.attn.proj."),
            (r"^model\.aligner\.linear1\.", "aligner.layers.0."),
            (r"^model\.aligner\.linear2\.", "aligner.layers.2."),
            (r"^model\.language_model\.", "language_model.model."),
            (r"^lm_head\.", "language_model.lm_head."),
        ),
        deepseek_vl_tower,
        unread="vision_model.vision_tower.attn_pool.",
    ),
    "muse_spark": Tensors(finish=muse_spark_norms),
    "nemotron_h_nano_omni": Tensors(change=radio_weights),
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_next": QWEN,
    "qwen3_omni_moe": Tensors(change=thinker_names),
    "qwen3_vl_moe": Tensors(change=turned_experts),
    "step3p5": STEP,
    "step3p7": STEP,
}

#: Types whose pictures go through transformers' processor of that type, though the model is read as another's.
KEEP_PROCESSOR = frozenset({"deepseek_vl", "internvl"})
#: Attributes of processors, from the configuration, that mlx-vlm does not read from the files.
PROCESSORS = {"llama4": llama4_processor}

#: What mlx-vlm's classes compute whatever is said, where config.json may say it: (type, setting) -> its values.
FIXED: dict[tuple[str, str], tuple[Any, ...]] = {
    ("idefics2", "perceiver_config.rms_norm_eps"): (1e-5,),  # that of the decoder (idefics2/idefics2.py:92)
    ("mistral3", "vision_config.hidden_act"): ("silu",),
    ("multi_modality", "vision_config.hidden_act"): ("gelu",),
    ("pixtral", "vision_config.hidden_act"): ("silu",),
    ("pixtral", "vision_feature_layer"): (-1,),
}
