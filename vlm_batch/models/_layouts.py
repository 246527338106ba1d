"""Corrects configurations that mlx-vlm 0.7.10 misreads (``RULES``).

mlx-vlm uses its own defaults for missing settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_vlm.utils import get_model_type

from vlm_batch.errors import UnsupportedModel
from vlm_batch.models._rules import (
    Config,
    Rule,
    chain,
    filled,
    full_attention_interval,
    layers_of,
    only_known,
    refused,
    renamed,
    text_at_the_root,
    with_layer_kinds,
    without,
)

#: Kinds of rotary positions without parameters beside their base: mlx-vlm's plain ones.
PLAIN_ROPE = ("default", "axial", "proportional", "mrope")


def corrected(config: Mapping[str, Any]) -> Config:
    """Return a configuration under the names that mlx-vlm reads. Raises UnsupportedModel."""
    found = dict(config)
    for rule in RULES:
        found = rule.apply(found, str(get_model_type(found)))
    return found


# Every family
# ---------------------------------------------------------------------------------------------------------------------


def flatten_rope(part: Config) -> Config:
    """Copy ``rope_parameters`` to their older names."""
    rope: Mapping[str, Any] = part["rope_parameters"]
    kinds = {name: kind for name, kind in rope.items() if isinstance(kind, Mapping)}
    chosen = kinds.get("full_attention", next(iter(kinds.values()))) if kinds else rope
    found = {
        name: chosen[name]
        for name in ("rope_theta", "partial_rotary_factor")
        if name in chosen
    }
    kind = chosen.get("rope_type", "default")
    if kind not in PLAIN_ROPE or "mrope_section" in chosen:
        found["rope_scaling"] = {"type": kind, **chosen}
    if "rope_theta" in (sliding := kinds.get("sliding_attention", {})):
        found["rope_local_base_freq"] = sliding["rope_theta"]
    return filled(**found)(part)


def plain_for_dynamic_rope(part: Config) -> Config:
    """Replace dynamic positions by plain ones, equal up to ``max_position_embeddings``, the longest request."""
    found = dict(part)
    for place in ("rope_parameters", "rope_scaling"):
        scaling = part.get(place) or {}
        if (
            isinstance(scaling, Mapping)
            and scaling.get("rope_type", scaling.get("type")) == "dynamic"
        ):
            kept = without("rope_type", "type", "factor")(dict(scaling))
            found[place] = (
                {**kept, "rope_type": "default"} if place == "rope_parameters" else None
            )
    return found


def ends_of_decoder(config: Config) -> Config:
    """Take the decoder's end tokens where the whole has none (transformers' GenerationConfig.from_model_config)."""
    text = config["text_config"]
    named = text.get("eos_token_id") if isinstance(text, Mapping) else None
    return config if named is None else filled(eos_token_id=named)(config)


def add_head_width(part: Config) -> Config:
    """Add a missing or null head width."""
    heads, width = part.get("num_attention_heads"), part.get("hidden_size")
    if (
        not heads
        or not width
        or part.get("head_dim") is not None
        or "qk_nope_head_dim" in part
    ):
        return part
    return part | {"head_dim": width // heads}


def replace_null_head_width(part: Config) -> Config:
    return add_head_width(part) if "head_dim" in part else part


def short_vision_type(config: Config) -> Config:
    """Remove transformers' suffix from a tower's type, which mlx-vlm refuses."""
    own, tower = str(config["model_type"]), config["vision_config"]
    is_named = tower.get("model_type") == f"{own}_vision"
    return (
        config | {"vision_config": tower | {"model_type": own}} if is_named else config
    )


def tie_decoder_as_model(config: Config) -> Config:
    """Copy the model's ``tie_word_embeddings`` to the decoder."""
    text, tied = config["text_config"], config["tie_word_embeddings"]
    return (
        config | {"text_config": {**text, "tie_word_embeddings": tied}}
        if "rope_parameters" in text
        else config
    )


# Folders of another type
# ---------------------------------------------------------------------------------------------------------------------


def as_pixtral(config: Config) -> Config:
    """Pixtral, which transformers saves as a LLaVA."""
    return (
        config | {"model_type": "pixtral"}
        if config["vision_config"].get("model_type") == "pixtral"
        else config
    )


def as_granite_vision(config: Config) -> Config:
    """Granite Vision, which transformers saves as a LLaVA-NeXT."""
    return (
        config | {"model_type": "granite_vision"}
        if config["text_config"].get("model_type") == "granite"
        else config
    )


def by_architecture(config: Config) -> Config:
    """A model that is published under another's type, by its architecture."""
    types = [
        ARCHITECTURES[name] for name in config["architectures"] if name in ARCHITECTURES
    ]
    return config | {"model_type": types[0]} if types else config


def as_internvl_chat(config: Config) -> Config:
    """InternVL with Qwen 2: mlx-vlm's ``internvl`` always builds Qwen 3. Raises UnsupportedModel for other decoders."""
    kind = config["text_config"].get("model_type", "qwen3")
    tower = dict(config.get("vision_config") or {})
    if kind in ("qwen3", "internvl"):
        return config
    if kind != "qwen2" or tower.get("use_qk_norm"):
        tall = (
            " and a tower that normalises queries and keys"
            if tower.get("use_qk_norm")
            else ""
        )
        raise UnsupportedModel(
            f"this internvl checkpoint has a {kind} decoder{tall}, and mlx-vlm's internvl a Qwen 3 one; the same model as "
            "published before transformers took it over (model_type internvl_chat) can be loaded"
        )
    named = renamed(attention_bias="qkv_bias", use_qk_norm="qk_normalization")(tower)
    # Qwen 2 always has biases; without this entry mlx-vlm builds Qwen 3.
    text = {**config["text_config"], "attention_bias": True}
    parts = {
        "text_config": text,
        "vision_config": named | {"model_type": "intern_vit_6b"},
    }
    return config | {"model_type": "internvl_chat"} | parts


def as_ernie4_5_moe_vl(config: Config) -> Config:
    """ERNIE 4.5 VL. Raises UnsupportedModel unless layers with experts are consecutive."""
    text, tower = dict(config["text_config"]), dict(config["vision_config"])
    sparse = layers_of("sparse", text.get("mlp_layer_types") or ())
    if not sparse or sparse != list(range(sparse[0], sparse[-1] + 1)):
        raise UnsupportedModel(
            f"mlp_layer_types {text.get('mlp_layer_types')} have no experts in a row of layers"
        )
    text["moe_num_experts"] = [text["moe_num_experts"]] * 2  # of text, and of pictures
    text["moe_layer_start_index"], text["moe_layer_end_index"] = (
        [sparse[0]] * 2,
        [sparse[-1]] * 2,
    )
    width = tower["hidden_size"]
    tower = renamed(hidden_size="embed_dim", rms_norm_eps="layer_norm_eps")(tower)
    tower |= {
        "mlp_ratio": tower["intermediate_size"] / width,
        "model_type": "DFNRope_vision_transformer",
    }
    found = {
        "model_type": "ernie4_5_moe_vl",
        "text_config": text,
        "vision_config": tower,
        "im_patch_id": config["image_token_id"],
        "pixel_hidden_size": width,
        "spatial_conv_size": tower.get("spatial_merge_size", 2),
        "temporal_conv_size": tower.get("temporal_merge_size", 2),
    }
    own = text.keys() - {"tie_word_embeddings"}  # a setting of the whole model
    return text_at_the_root(without(*own)(config) | found)


def as_got(config: Config) -> Config:
    """GOT-OCR, with the decoder's settings at the root."""
    tower = renamed(
        image_size="img_size",
        num_channels="in_chans",
        hidden_size="embed_dim",
        num_hidden_layers="depth",
        num_attention_heads="num_heads",
        output_channels="out_chans",
    )(config["vision_config"])
    tower |= {
        "mlp_ratio": tower["mlp_dim"] / tower["hidden_size"],
        "out_dim": 4 * tower["output_channels"],
    }
    found = config | {
        "model_type": "got",
        "vision_config": tower | {"model_type": "got"},
    }
    return renamed(image_token_id="im_patch_token")(text_at_the_root(found))


def as_multi_modality(config: Config) -> Config:
    """DeepSeek-VL as Janus."""
    tower = config["vision_config"]
    projector = {
        "cls": "MlpProjector",
        "model_type": "aligner",
        "params": {"projector_type": "mlp_gelu", "depth": 2},
    }
    return config | {
        "model_type": "multi_modality",
        "vision_config": tower
        | {"model_type": "vision", "cls": "CLIPVisionTower", "params": {}},
        "projector_config": projector,
        "num_image_tokens": (tower["image_size"] // tower["patch_size"]) ** 2,
    }


def as_qwen3_omni_moe(config: Config) -> Config:
    """A Qwen3-Omni's thinker as a model without speech."""
    unused = {
        "text_config": dict(config["text_config"]),
        "code_predictor_config": dict(config["text_config"]),
    }
    silent = {
        "enable_audio_output": False,
        "talker_config": unused,
        "code2wav_config": {},
    }
    passed_on: Config = {
        name: config[name]
        for name in ("transformers_version", "eos_token_id")
        if name in config
    }
    return {
        "model_type": "qwen3_omni_moe",
        "thinker_config": config,
        **silent,
        **passed_on,
    }


# One family
# ---------------------------------------------------------------------------------------------------------------------


def gemma_activation(text: Config) -> Config:
    """Replace Gemma's "gelu" by its tanh form (transformers, configuration_gemma.py)."""
    named = "gelu_pytorch_tanh" if text["hidden_act"] == "gelu" else text["hidden_act"]
    return filled(hidden_activation=named)(text)


def gemma4_full_layers(text: Config) -> Config:
    """Set full layers' settings from ``per_layer_config``. Raises UnsupportedModel if they differ."""
    names = {
        "head_dim": "global_head_dim",
        "num_key_value_heads": "num_global_key_value_heads",
    }
    # transformers writes "05" for the fifth of ten layers or more.
    layers: Mapping[str, Mapping[str, Any]] = {
        str(int(at)): one for at, one in text["per_layer_config"].items()
    }
    full = [
        str(layer)
        for layer in layers_of("full_attention", text.get("layer_types") or ())
    ]
    said = [dict(layers.get(layer, {})) for layer in full]
    if layers and (
        set(layers) - set(full)
        or any(one != said[0] for one in said)
        or said[0].keys() - names.keys()
    ):
        raise UnsupportedModel(
            f"per_layer_config {dict(layers)} does not set all layers of full attention alike"
        )
    return (
        text | {names[name]: value for name, value in said[0].items()}
        if layers
        else text
    )


def picture_tokens_to_text(config: Config) -> Config:
    text = filled(mm_tokens_per_image=config["mm_tokens_per_image"])(
        config["text_config"]
    )
    return config | {"text_config": text}


def glm_ocr_rope(text: Config) -> Config:
    older = ("rope_theta", "partial_rotary_factor")
    rope = {
        **(text.get("rope_scaling") or {}),
        **{name: text[name] for name in older if text.get(name) is not None},
    }
    kept = without(*older, "rope_scaling")(text)
    return (
        kept
        if "rope_parameters" in text or not rope
        else kept | {"rope_parameters": rope}
    )


def lfm2_widths(text: Config) -> Config:
    """Add widths, constants in mlx-vlm."""
    width = text["hidden_size"]
    return filled(
        block_dim=width,
        conv_dim=width,
        conv_dim_out=width,
        num_heads=text["num_attention_heads"],
    )(text)


def gemma4_patch_size(tower: Config) -> Config:
    """Add the merged patch's side."""
    return filled(model_patch_size=tower["patch_size"] * tower["pooling_kernel_size"])(
        tower
    )


def inkling_widths(text: Config) -> Config:
    """Rename two widths; mlx-vlm's ``intermediate_size`` is the experts'."""
    widths = {
        "intermediate_size": text["moe_intermediate_size"],
        "dense_intermediate_size": text["intermediate_size"],
    }
    return renamed(conv_kernel_size="sconv_kernel_size")(text) | widths


def kimi_tower(tower: Config) -> Config:
    sizes = renamed(
        num_hidden_layers="depth",
        hidden_size="embed_dim",
        num_attention_heads="num_heads",
    )
    places = renamed(
        pos_emb_height="init_pos_emb_height", pos_emb_width="init_pos_emb_width"
    )
    return places(sizes(tower)) | {"model_type": "moonvit"}


def nemotron_names(config: Config) -> Config:
    named = renamed(
        image_token_id="img_context_token_id",
        vision_hidden_size="vit_hidden_size",
        audio_config="sound_config",
        audio_token_id="sound_context_token_id",
    )
    return filled(ps_version="v2")(named(config))


def refuse_scaled_embeddings(text: Config) -> Config:
    """Raise UnsupportedModel for scaled embeddings."""
    if text["scale_embedding"]:
        raise UnsupportedModel(
            "config.json says text_config.scale_embedding: true, which mlx-vlm's florence2 passes over: it computes false"
        )
    return text


def florence2_tower(tower: Config) -> Config:
    if tower["model_type"] != "florence_vision":
        return tower
    return renamed(embed_dim="dim_embed", in_channels="in_chans")(tower) | {
        "model_type": "davit"
    }


def minimax_m3_rotary_dim(text: Config) -> Config:
    """Set the rotated width from ``partial_rotary_factor``."""
    share = {**text, **(text.get("rope_parameters") or {})}.get("partial_rotary_factor")
    return (
        text if share is None else text | {"rotary_dim": int(text["head_dim"] * share)}
    )


def muse_glimmer_rope(text: Config) -> Config:
    """Set one base for all rotated layers, as transformers."""
    base = text["rope_parameters"].get("rope_theta")
    bases = [base if one else one for one in text["layer_rope_theta"]]
    return text if base is None else text | {"layer_rope_theta": bases}


def radio_tower(tower: Config) -> Config:
    summaries, registers = tower["num_cls_tokens"], tower["num_registers"]
    arguments = {
        "teachers": [{"name": str(n)} for n in range(summaries)],
        "register_multiple": summaries + registers,
    }
    inner = int(tower["hidden_size"] * tower["mlp_ratio"])
    return renamed(max_img_size="max_resolution")(
        filled(args=arguments, intermediate_size=inner)(tower)
    )


def hunyuan_rope(config: Config) -> Config:
    """Set positions on four axes. Raises UnsupportedModel if there are none."""
    text: Config = dict(config.get("text_config") or config)
    rope: Mapping[str, Any] = (
        text.get("rope_parameters") or text.get("rope_scaling") or {}
    )
    sections = rope.get("mrope_section") or rope.get("xdrope_section")
    if not sections:
        raise UnsupportedModel(
            "config.json of this hunyuan_vl says no mrope_section (xdrope_section in older folders), and mlx-vlm's class has "
            "positions on several axes alone"
        )
    found = {"rope_scaling": {**rope, "type": "xdrope", "xdrope_section": sections}}
    return config | (
        {"text_config": text | found} if config.get("text_config") else found
    )


def molmo2_tower(config: Config) -> Config:
    if "vit_config" in config["vision_config"]:
        return config
    vit = renamed(
        patch_size="image_patch_size",
        num_position_embeddings="image_num_pos",
        image_size="image_default_input_size",
    )(config["vision_config"])
    adapter = renamed(vision_feature_layer="vit_layers")(config["adapter_config"])
    return config | {"vision_config": {"vit_config": vit, "adapter_config": adapter}}


def step3p5_text(text: Config) -> Config:
    rope: Mapping[str, Any] = text.get("rope_parameters") or {}
    per_kind: list[Mapping[str, Any]] = [
        rope.get(kind, rope) for kind in text.get("layer_types") or []
    ]
    named = renamed(
        num_key_value_heads="num_attention_groups",
        n_routed_experts="moe_num_experts",
        num_experts_per_tok="moe_top_k",
    )(text)
    named |= {"use_head_wise_attn_gate": True, "use_moe_router_bias": True}
    if per_kind and all("rope_theta" in one for one in per_kind):
        named["rope_theta"] = [one["rope_theta"] for one in per_kind]
        named["partial_rotary_factors"] = [
            one.get("partial_rotary_factor", 1.0) for one in per_kind
        ]
    if (layers := text.get("mlp_layer_types")) is not None:
        named["moe_layers_enum"] = ",".join(map(str, layers_of("sparse", layers)))
    if (heads := text.get("num_sliding_attention_heads")) is not None:
        groups = named.get("num_attention_groups")
        named["attention_other_setting"] = {
            "num_attention_heads": heads,
            "num_attention_groups": groups,
        }
    return named


def refuse_saved_by_transformers(config: Config) -> Config:
    """Raise UnsupportedModel for transformers' folders, with other tensor names."""
    if config.get("compress_ratios"):
        return config
    return refused(
        "transformers saved it under names of its own, which mlx-vlm does not read; the published folder can be loaded"
    )(config)


#: Architectures whose published model_type is another family's -> mlx-vlm's type.
ARCHITECTURES = {
    "DeepseekOCRForCausalLM": "deepseekocr",
    "DeepseekOCR2ForCausalLM": "deepseekocr_2",
}
#: transformers' model types that no class of mlx-vlm's can read -> reason.
UNREADABLE = {
    "deepseek_ocr2": "mlx-vlm's DeepSeek-OCR-2 has its encoder's sizes written in (deepseekocr_2/config.py:76), and no "
    "settings of transformers' for it can be told to it; the published folder can be loaded",
    "deepseek_vl_hybrid": "its second tower (SAM) is not verified here; deepseek_vl can be loaded",
    "qwen3_omni_moe_text": "it is the decoder of a Qwen3-Omni alone; the whole model's folder (qwen3_omni_moe) can be loaded",
}
#: Types for which mlx-vlm raises for settings that it does not know (glm_ocr/config.py:88).
STRICT_TYPES = ("glm_ocr", "phi4_siglip")
#: Both names of the placeholder tokens' ids.
TOKEN_IDS = chain(
    renamed(image_token_id="image_token_index", image_token_index="image_token_id"),
    renamed(video_token_id="video_token_index", video_token_index="video_token_id"),
)
ROPE_AND_HEADS = chain(flatten_rope, add_head_width)
INTERVAL = full_attention_interval("full_attention_interval")
GLM_MARKERS = renamed(
    image_start_token_id="vision_start_token_id",
    image_end_token_id="vision_end_token_id",
)
QWEN4_LAYERS = with_layer_kinds(
    "layer_types", indexed_attention="qwen_sparse_attention"
)
NEMOTRON_LAYERS = with_layer_kinds(
    "layers_block_type", linear_attention="mamba", full_attention="attention"
)
STEP_TOWER = renamed(
    hidden_size="width",
    num_hidden_layers="layers",
    num_attention_heads="heads",
    layer_scale_init_value="ls_init_value",
)

EVERY_TYPE = ""
CONFIGURATION_UTILS = "configuration_utils.py of transformers"
MODELING_UTILS = "modeling_utils.py of transformers"

#: Corrections of ``config.json``; each sees what those before it have made.
RULES = (
    *(Rule(kind, refused(reason)) for kind, reason in UNREADABLE.items()),
    Rule("deepseek_v4", refuse_saved_by_transformers, needs="layer_types"),
    Rule(
        EVERY_TYPE,
        plain_for_dynamic_rope,
        part="*",
        needs="max_position_embeddings",
        read_by="rope_utils.py",
    ),
    # transformers 5 has rotary positions in ``rope_parameters``, and leaves out what follows from other settings.
    Rule(
        EVERY_TYPE,
        ROPE_AND_HEADS,
        part="*",
        needs="rope_parameters",
        read_by=CONFIGURATION_UTILS,
    ),
    Rule(EVERY_TYPE, replace_null_head_width, part="*", read_by=CONFIGURATION_UTILS),
    Rule(
        EVERY_TYPE,
        renamed(num_local_experts="num_experts"),
        part="*",
        read_by="mixtral/config.py",
    ),
    Rule(EVERY_TYPE, TOKEN_IDS, part="*", read_by="glm4v/config.py"),
    Rule(
        EVERY_TYPE,
        ends_of_decoder,
        needs="text_config",
        read_by="generation/configuration_utils.py of transformers",
    ),
    Rule(
        EVERY_TYPE,
        tie_decoder_as_model,
        needs="tie_word_embeddings text_config",
        read_by=MODELING_UTILS,
    ),
    # Types that are another family's in mlx-vlm.
    Rule(
        "deepseek_vl_v2",
        by_architecture,
        needs="architectures",
        read_by="deepseekocr_2/config.py",
    ),
    Rule(
        "deepseek_vl",
        as_multi_modality,
        needs="text_config vision_config",
        read_by="multi_modality/config.py",
    ),
    Rule(
        "ernie4_5_vl_moe",
        as_ernie4_5_moe_vl,
        needs="text_config vision_config",
        read_by="ernie4_5_moe_vl/config.py",
    ),
    Rule(
        "got_ocr2", as_got, needs="text_config vision_config", read_by="got/config.py"
    ),
    Rule(
        "internvl",
        as_internvl_chat,
        needs="text_config",
        read_by="internvl_chat/config.py",
    ),
    Rule("llava", as_pixtral, needs="vision_config", read_by="pixtral/config.py"),
    Rule(
        "llava_next",
        as_granite_vision,
        needs="text_config",
        read_by="granite_vision/config.py",
    ),
    Rule(
        "qwen3_omni_moe_thinker",
        as_qwen3_omni_moe,
        needs="text_config",
        read_by="qwen3_omni_moe/config.py",
    ),
    # Lists of kinds of layers.
    Rule(
        "gemma3 aya_vision",
        full_attention_interval("sliding_window_pattern"),
        part="text",
        needs="layer_types",
    ),
    Rule(
        "qwen3_5 qwen3_5_moe minicpmv4_6 minicpmv4_7",
        INTERVAL,
        part="text",
        needs="layer_types",
    ),
    Rule("qwen3_next", INTERVAL, needs="layer_types"),
    Rule(
        "nemotron_h_nano_omni nemotron_h",
        NEMOTRON_LAYERS,
        part="*",
        needs="layers_block_type",
    ),
    Rule("qwen4_exp", QWEN4_LAYERS, part="text", needs="layer_types"),
    # Other names, and constants of transformers' classes.
    Rule("florence2", refuse_scaled_embeddings, part="text", needs="scale_embedding"),
    Rule("florence2", florence2_tower, part="vision", needs="model_type"),
    Rule(
        "florence2",
        filled(image_feature_source=["spatial_avg_pool", "temporal_avg_pool"]),
        needs="vision_config",
    ),
    Rule("gemma3", renamed(rope_theta="rope_global_base_freq"), part="text"),
    Rule("gemma3", picture_tokens_to_text, needs="mm_tokens_per_image text_config"),
    Rule("paligemma", gemma_activation, part="text", needs="hidden_act"),
    Rule(
        "gemma4 gemma4_unified",
        gemma4_full_layers,
        part="text",
        needs="per_layer_config",
    ),
    Rule(
        "gemma4_unified",
        gemma4_patch_size,
        part="vision",
        needs="patch_size pooling_kernel_size",
    ),
    Rule("glm4v glm4v_moe glm_ocr", GLM_MARKERS),
    Rule("glm4v", lambda text: {"eos_token_id": None, **text}, part="text"),
    Rule("glm4v_moe", filled(use_qk_norm=False), part="text"),
    Rule("glm_ocr", glm_ocr_rope, part="text"),
    *(Rule(kind, only_known(kind, "TextConfig"), part="text") for kind in STRICT_TYPES),
    *(
        Rule(kind, only_known(kind, "VisionConfig"), part="vision")
        for kind in STRICT_TYPES
    ),
    Rule(
        "hunyuan_vl",
        renamed(im_start_id="image_start_token_id", im_end_id="image_end_token_id"),
    ),
    Rule("hunyuan_vl", hunyuan_rope),
    Rule(
        "inkling",
        inkling_widths,
        part="text",
        needs="moe_intermediate_size intermediate_size",
    ),
    Rule("kimi_k25", renamed(image_token_id="media_placeholder_token_id")),
    Rule("kimi_k25", kimi_tower, part="vision", needs="num_hidden_layers"),
    Rule("lfm2_vl", lfm2_widths, part="text", needs="hidden_size num_attention_heads"),
    Rule("llama4", filled(vision_feature_layer=-1), part="vision"),
    Rule("minimax_m3_vl", minimax_m3_rotary_dim, part="text", needs="head_dim"),
    Rule("mllama", renamed(attention_heads="num_attention_heads"), part="vision"),
    Rule("molmo2", molmo2_tower, needs="vision_config adapter_config"),
    Rule("molmo2", renamed(rms_norm_eps="layer_norm_eps"), part="text"),
    Rule(
        "muse_glimmer",
        muse_glimmer_rope,
        part="text",
        needs="rope_parameters layer_rope_theta",
    ),
    Rule("nemotron_h_nano_omni", nemotron_names, needs="vision_hidden_size"),
    Rule(
        "nemotron_h_nano_omni",
        radio_tower,
        part="vision",
        needs="num_cls_tokens num_registers hidden_size mlp_ratio",
    ),
    Rule("qwen2_vl qwen2_5_vl paddleocr_vl", text_at_the_root, needs="text_config"),
    Rule(
        "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe hunyuan_vl paddleocr_vl",
        short_vision_type,
        needs="vision_config",
    ),
    Rule("step3p5", step3p5_text, needs="n_routed_experts"),
    Rule("step3p7", step3p5_text, part="text", needs="n_routed_experts"),
    Rule("step3p7", STEP_TOWER, part="vision"),
)

# Processors
# ---------------------------------------------------------------------------------------------------------------------


def llama4_processor(processor: Any, config: Config) -> None:
    """Set sizes that are constants in mlx-vlm (llama4/processing_llama4.py:129)."""
    tower = config["vision_config"]
    processor.patch_size = tower["patch_size"]
    processor.downsample_ratio = round(1 / tower["pixel_shuffle_ratio"] ** 2)


#: Types that keep transformers' processor though their model is read as another type.
KEEP_PROCESSOR = frozenset({"deepseek_vl", "internvl"})
#: Corrections of processors from the configuration, by model type.
PROCESSORS = {"llama4": llama4_processor}
