"""Model packages of mlx-vlm that this library does not batch, each with its reason.

``REFUSED`` are refused when they are loaded: they make no text one token at a time. ``ONE_AT_A_TIME`` do, and have no
verified adapter: they are served through mlx-vlm's own path, one row at a time, which is said once.
``tests/test_registry.py`` fails for a package that is neither here nor in the registry.
"""

from __future__ import annotations

from collections.abc import Mapping

_PICTURES = "it makes pictures by diffusion, not text"
_DENOISES = "it writes text by denoising blocks of it, not one token at a time"
_EMBEDS = "it gives embeddings of its input, not text"
_ENCODES = "it is an encoder without a decoder: it gives features of its input, not text"
_DECIDES = "it chooses among given answers by scores, and writes no text"
_LABELS = "it labels the words of its input, and writes no text"
_DETECTS = "it finds objects in pictures and gives boxes or masks, not text"
_GEOMETRY = "it gives depth or shapes of what a picture shows, not text"
_DRAFTS = "it only proposes tokens to another model that decodes speculatively"

#: Model type, after mlx-vlm's remapping, -> why it is refused.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "bonsai",
            "ernie_image",
            "flux2",
            "flux3",
            "ideogram4",
            "llada_image",
            "mage_flow",
            "ming_image",
            "moss_image",
            "qwen_image",
            "z_image",
        ),
        _PICTURES,
    ),
    "minimax_h3": "it makes videos with sound by diffusion, not text",
    **dict.fromkeys(("diffusion_gemma", "llada2_moe", "nemotron_labs_diffusion"), _DENOISES),
    **dict.fromkeys(
        (
            "colidefics3",
            "colqwen2_5",
            "embedding_gemma2",
            "gemma3_embedding",
            "lfm2_colbert",
            "lfm2_embedding",
            "llama_bidirec",
            "llama_nemotron_vl_embedding",
            "ministral3_embedding",
            "qwen3_embedding",
            "qwen3_vl_embedding",
            "siglip",
        ),
        _EMBEDS,
    ),
    **dict.fromkeys(("bert", "dinov2", "lfm2_encoder", "modernbert", "xlm_roberta"), _ENCODES),
    **dict.fromkeys(("clef", "d1", "d1_omni", "decider2", "laya"), _DECIDES),
    **dict.fromkeys(("gliner2_5", "openai_privacy_filter"), _LABELS),
    **dict.fromkeys(("pp_doclayout_v3", "rfdetr", "rt_detr_v2", "sam3", "sam3_1", "yolo11"), _DETECTS),
    **dict.fromkeys(("moge3", "sam3d_body", "sam3d_objects", "video_depth_anything"), _GEOMETRY),
    "sapiens2": "it gives poses and dense maps of people in pictures, not text",
    "nemotron_voicechat": "it answers speech with speech, frame by frame",
    "mistral4": "it is the language half of mistral3, whose model type its checkpoints carry",
    **dict.fromkeys(
        (
            "deepseek_v4_dspark",
            "deepseek_v4_mtp",
            "dflash2",
            "dspark",
            "eagle3",
            "gemma4_assistant",
            "gemma4_dflash",
            "gemma4_dspark",
            "gemma4_unified_assistant",
            "glm4_moe_lite_mtp",
            "glm5_next_mtp",
            "glm_moe_dsa_mtp",
            "hy_v4_mtp",
            "inkling_mtp",
            "laguna_dflash",
            "muse_glimmer_assistant",
            "nemotron_h_mtp",
            "qwen3_5_mtp",
            "qwen3_dflash",
            "qwen3_dspark",
            "qwen4_exp_mtp",
        ),
        _DRAFTS,
    ),
}

_TEXT_ONLY = "it takes text only, and its rows have not been verified in a batch"

_TEXT_DECODERS = """
    afm7 afmoe apertus baichuan_m1 bailing_moe bailing_moe_linear bitnet cohere cohere2 cohere2_moe dbrx deepseek
    deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flint gemma gemma2
    gemma3_text gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss granite
    granitemoe granitemoehybrid helium hrm_text hunyuan hunyuan_v1_dense hy_v4 internlm2 internlm3 iquestloopcoder jamba
    k2_horizon kimi_linear klear kolibri1 laguna lfm2 lfm2_moe lille_130m limite llama llama4_text longcat_flash
    longcat_flash_ngram longcat_flash_sparse mamba mamba2 mellum mimo mimo_v2_flash minicpm minicpm3 minimax minimax_m3
    ministral3 mixtral nanochat nemotron nemotron_h nemotron_nas olmo olmo2 olmo3 olmoe openelm phi phi3 phi3small phimoe
    phixtral plamo plamo2 qwen qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe recurrent_gemma rwkv7
    seed_oss smollm3 solar_open spark2_5 stablelm starcoder2 step3p5 telechat3 xing4_0 youtu_llm z1t
"""

#: Model type, after mlx-vlm's remapping, -> why it is not batched.
ONE_AT_A_TIME: Mapping[str, str] = {
    **dict.fromkeys(_TEXT_DECODERS.split(), _TEXT_ONLY),
}
