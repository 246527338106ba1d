"""The code fixes constants that a configuration names: activations, epsilons, scales.

Right is what the published ``config.json`` and transformers' class of the family say.
"""

import math

import mlx.core as mx
import mlx.nn as nn
from tiny import CONFIGS, case, config_of, filled, noise, report, text, tiny

X = noise(1, 64) * 2


def activations(module):
    """What a GELU of the module makes of some values."""
    return next(
        child for _, child in module.named_modules() if isinstance(child, nn.GELU)
    )(X)


def tower_of(name):
    """The vision tower of a tiny model."""
    model = tiny(name)
    return next(
        model[part] for part in ("vision_tower", "vision_model") if part in model
    )


@case("llava", at="models/llava/vision.py:8")
def llava_siglip():
    """For SigLIP's ``gelu_pytorch_tanh`` the tower takes CLIP's activation, a sigmoid."""
    return activations(tower_of("llava")), nn.gelu_approx(X)


@case("llava_bunny", at="models/llava_bunny/vision.py:8")
def llava_bunny_siglip():
    """As llava."""
    return activations(tower_of("llava_bunny")), nn.gelu_approx(X)


@case("granite_vision", at="models/granite_vision/vision.py:8")
def granite_vision_siglip():
    """As llava."""
    return activations(tower_of("granite_vision")), nn.gelu_approx(X)


@case("granite4_vision", at="models/granite4_vision/vision.py:77")
def granite4_vision_siglip():
    """As llava."""
    return activations(tower_of("granite4_vision")), nn.gelu_approx(X)


@case("idefics2", at="models/idefics2/vision.py:8")
def idefics2_tower():
    """For ``gelu_pytorch_tanh`` the tower takes the sigmoid form."""
    return activations(tower_of("idefics2")), nn.gelu_approx(X)


@case("molmo2", at="models/molmo2/vision.py:13")
def molmo2_tower():
    """For ``gelu_pytorch_tanh`` the tower takes the sigmoid form: both branches of ``_gelu_from_name`` return it."""
    from mlx_vlm.models.molmo2.vision import _gelu_from_name

    return _gelu_from_name("gelu_pytorch_tanh")(X), nn.gelu_approx(X)


@case("llama4", at="models/llama4/vision.py:155")
def llama4_tower():
    """For ``gelu`` the tower takes the sigmoid form."""
    return activations(tower_of("llama4")), nn.gelu(X)


@case("internvl_chat", at="models/internvl_chat/vision.py:70")
def internvl_chat_tower():
    """For ``gelu`` the vision side takes the tanh form."""
    return activations(tower_of("internvl_chat")), nn.gelu(X)


@case("internvl", at="models/internvl/internvl.py:21")
def internvl_projector():
    """For ``gelu`` the vision side takes the tanh form."""
    return activations(tiny("internvl").multi_modal_projector), nn.gelu(X)


@case("minicpmv4_6", "minicpmv4_7", at="models/minicpmv4_6/minicpmv4_6.py:154")
def minicpmv_merger():
    """The merger takes the tanh form of GELU. Right (MiniCPMV4_6DownsampleMLP): the exact one."""
    from mlx_vlm.models.minicpmv4_6.minicpmv4_6 import MergerBlock

    return activations(MergerBlock(8, 8)), nn.gelu(X)


@case("qwen3_vl_moe", at="models/qwen3_vl_moe/vision.py:109")
def qwen3_vl_moe_merger():
    """The merger takes the tanh form of GELU. Right: the exact one."""
    return activations(tower_of("qwen3_vl_moe").merger), nn.gelu(X)


@case("qwen3_vl_moe", at="models/qwen3_vl_moe/vision.py:164")
def qwen3_vl_moe_blocks():
    """For ``gelu_pytorch_tanh`` the blocks take the exact form."""
    from mlx_vlm.models.qwen3_vl_moe.vision import MLP

    return activations(MLP(8, 8)), nn.gelu_approx(X)


@case("qwen3_omni_moe", at="models/qwen3_omni_moe/vision.py:163")
def qwen3_omni_moe_blocks():
    """For ``gelu_pytorch_tanh`` the blocks take the exact form."""
    from mlx_vlm.models.qwen3_omni_moe.vision import MLP

    return activations(MLP(8, 8)), nn.gelu_approx(X)


@case("kimi_vl", at="models/kimi_vl/vision.py:228")
def kimi_vl_blocks():
    """MoonViT takes the exact GELU. Right: its tanh form."""
    from mlx_vlm.models.kimi_vl.vision import MLP

    return activations(MLP(8, 8)), nn.gelu_approx(X)


@case("kimi_k25", at="models/kimi_k25/vision.py:245")
def kimi_k25_blocks():
    """As kimi_vl."""
    from mlx_vlm.models.kimi_k25.vision import MLP

    return activations(MLP(8, 8)), nn.gelu_approx(X)


@case("paddleocr_vl", at="models/paddleocr_vl/vision.py:149")
def paddleocr_vl_epsilon():
    """The projector's norm has an epsilon of 1e-6. Right: 1e-5."""
    from mlx_vlm.models.paddleocr_vl.vision import PaddleOCRProjector

    return f"{PaddleOCRProjector(8, 8, 2).pre_norm.eps:g}", "1e-05"


@case("paddleocr_vl", at="models/paddleocr_vl/vision.py:332")
def paddleocr_vl_width():
    """The projector's width is 1,024. Right: the text model's (64 here)."""
    return tiny("paddleocr_vl").visual.projector.linear_2.weight.shape[0], 64


@case("glm4v", at="models/glm4v/vision.py:233")
def glm4v_epsilon():
    """The vision blocks' norms have an epsilon of 1e-6. Right: the configured one, 1e-3 here."""
    return _norm1_epsilon("glm4v")


@case("glm4v_moe", at="models/glm4v_moe/vision.py:232")
def glm4v_moe_epsilon():
    """As glm4v."""
    return _norm1_epsilon("glm4v_moe")


def _norm1_epsilon(name):
    vision = {**CONFIGS[name]["vision_config"], "rms_norm_eps": 1e-3}
    return (
        f"{tiny(name, vision_config=vision).vision_tower.blocks[0].norm1.eps:g}",
        "0.001",
    )


@case("mistral3", at="models/mistral4/language.py:34")
def mistral4_yarn():
    """Mistral 4's attention lacks YaRN's factor, (0.1 mscale_all_dim log(factor) + 1) squared (transformers,
    yarn_apply_mscale).
    """
    text_config = dict(CONFIGS["mistral3_mistral4"]["text_config"])
    text_config["rope_parameters"] = {
        **text_config["rope_parameters"],
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale_all_dim": 1.0,
    }
    attention = (
        tiny("mistral3_mistral4", text_config=text_config)
        .language_model.model.layers[0]
        .self_attn
    )
    return attention.scale, attention.qk_head_dim**-0.5 * (0.1 * math.log(4.0) + 1) ** 2


@case("gemma3", at="models/gemma3/gemma3.py:113 models/gemma3/config.py:50")
def gemma3_scale():
    """Picture features are divided by the root of a default of 2,048, and multiplied by that of the text's width.

    Right: as the projector gives them.
    """
    model = tiny("gemma3")
    ids, pixels = mx.array([[5, *[128] * 9, 6]]), noise(2, 1, 3, 24, 24)
    embeds = model.get_input_embeddings(
        ids, pixels, mask=mx.ones(ids.shape)
    ).inputs_embeds[0, 1:10]
    states, *_ = model.vision_tower(
        pixels.transpose(0, 2, 3, 1), output_hidden_states=True
    )
    return (
        embeds * model.config.text_config.hidden_size**0.5,
        model.multi_modal_projector(states)[0],
    )


@case("paligemma", at="models/paligemma/paligemma.py:97")
def paligemma2_scale():
    """Features are divided by the root of the checkpoint's hidden_size (2,048 beside a text of another width in
    PaliGemma 2). Right: by the text's.
    """
    model = tiny("paligemma2")
    ids, pixels = mx.array([[*[128] * 9, 5, 6]]), noise(2, 1, 3, 12, 12)
    width = model.config.text_config.hidden_size
    embeds = model.get_input_embeddings(
        ids, pixels, mask=mx.ones(ids.shape)
    ).inputs_embeds[0, :9]
    states, *_ = model.vision_tower(
        pixels.transpose(0, 2, 3, 1), output_hidden_states=True
    )
    return embeds * width**0.5, model.multi_modal_projector(states).reshape(-1, width)


@case("gemma3n", at="models/gemma3n/gemma3n.py:122 models/gemma3n/language.py:479")
def gemma3n_scale():
    """A prompt's embeddings lack the root of the width, which those of decoded tokens have.

    Right (Gemma3nTextScaledWordEmbedding): both have it.
    """
    from types import SimpleNamespace

    from mlx_vlm.models.gemma3n.gemma3n import Model
    from mlx_vlm.models.gemma3n.language import LanguageModel

    language = filled(LanguageModel(config_of("gemma3n").text_config))
    like = SimpleNamespace(language_model=language, vocab_size_per_layer_input=128)
    ids = text(3, 5)["input_ids"]
    found = Model.get_input_embeddings(like, ids).inputs_embeds
    return found, language.model.embed_tokens(ids) * language.config.hidden_size**0.5


if __name__ == "__main__":
    report()
