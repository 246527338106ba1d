"""Files of checkpoints are read wrongly.

Right is what transformers reads from the same files: folders that transformers 5 saved, in half precision or not.
"""

import copy
from importlib import import_module
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from PIL import Image
from tiny import alone, attempt, case, noise, prompt, report, tiny

ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 123.0,
        "partial_rotary_factor": 0.5,
    }
}


@case(
    "falcon_h1", at="models/falcon_h1/language.py:425 models/falcon_h1/language.py:427"
)
def falcon_h1_multipliers():
    """``key_multiplier`` is looked for beside "key_proj.weight", which is no name of the model, and values miss
    ``attention_in_multiplier``. Right (transformers, modeling_falcon_h1.py): keys times both, values times one."""
    upstream = import_module("mlx_vlm.models.falcon_h1")
    config = upstream.ModelConfig(
        num_hidden_layers=1,
        hidden_size=8,
        vocab_size=8,
        head_dim=4,
        num_attention_heads=2,
    )
    config.key_multiplier, config.attention_in_multiplier = 0.5, 3.0
    weights = {
        f"model.layers.0.self_attn.{name}_proj.weight": mx.ones((1, 1)) for name in "kv"
    }
    weights["model.layers.0.mamba.conv1d.weight"] = mx.zeros((8, 1, 4))
    holder = SimpleNamespace(args=config, model=SimpleNamespace(_mup_vector=mx.ones(1)))
    found = import_module("mlx_vlm.models.falcon_h1.language").LanguageModel.sanitize(
        holder, weights
    )
    return [value.item() for name, value in sorted(found.items()) if "_proj" in name], [
        1.5,
        3.0,
    ]


def norm_from_one(sanitize, name):
    """A norm of 1.0037 whose file has 0.0037 in bfloat16, and what lies beside it to be told as transformers' folder."""
    weight = mx.array([0.0037], mx.bfloat16)
    right = 1 + mx.array([0.0037], mx.bfloat16).astype(mx.float32)
    beside = {
        "model.language_model.layers.0.linear_attn.conv1d.weight": mx.zeros((8, 1, 4))
    }
    found = sanitize({**beside, name: weight})
    return next(value for key, value in found.items() if "norm" in key).astype(
        mx.float32
    ), right


@case("qwen3_5", at="models/qwen3_5/qwen3_5.py:171")
def qwen3_5_norms():
    """Norms that count from one get one added in the file's type, of which bfloat16 keeps two digits. Right: in float32."""
    return norm_from_one(tiny("qwen3_5").sanitize, "model.language_model.norm.weight")


@case("qwen3_5_moe", at="models/qwen3_5_moe/qwen3_5_moe.py:81")
def qwen3_5_moe_norms():
    """As qwen3_5."""
    upstream = import_module("mlx_vlm.models.qwen3_5_moe.qwen3_5_moe")
    text = SimpleNamespace(
        tie_word_embeddings=False, num_hidden_layers=0, num_experts=0
    )
    holder = SimpleNamespace(config=SimpleNamespace(text_config=text))
    return norm_from_one(
        lambda weights: upstream.Model.sanitize(holder, weights),
        "model.language_model.norm.weight",
    )


@case("qwen3_next", at="models/qwen3_next/language.py:443")
def qwen3_next_norms():
    """As qwen3_5."""
    upstream = import_module("mlx_vlm.models.qwen3_next.language")
    holder = SimpleNamespace(
        args=SimpleNamespace(
            tie_word_embeddings=False, num_hidden_layers=0, num_experts=0
        )
    )
    weights = {"model.layers.0.mlp.experts.0.up_proj.weight": mx.zeros((1, 1))}
    return norm_from_one(
        lambda more: upstream.LanguageModel.sanitize(holder, {**weights, **more}),
        "model.norm.weight",
    )


@case("minicpmv4_6", at="models/minicpmv4_6/minicpmv4_6.py:492")
def minicpmv4_6_norms():
    """As qwen3_5."""
    return norm_from_one(
        tiny("minicpmv4_6").sanitize, "model.language_model.norm.weight"
    )


@case("step3p7", at="models/step3p7/language.py:353 models/step3p5/language.py:415")
def step3p7_norms():
    """As qwen3_5."""
    upstream = import_module("mlx_vlm.models.step3p7.language")
    holder = SimpleNamespace(args=SimpleNamespace(num_hidden_layers=1))
    weights = {"language_model.model.layers.0.moe.gate.weight": mx.zeros((1, 1))}
    sanitize = upstream.LanguageModel.sanitize
    return norm_from_one(
        lambda more: sanitize(holder, {**weights, **more}),
        "language_model.model.norm.weight",
    )


@case("muse_spark", at="models/muse_spark/sanitize.py:11")
def muse_spark_norms():
    """Norms that count from one get one added in float32, and the sum is rounded to bfloat16. Right: it stays in float32."""
    from mlx_vlm.models.muse_spark.sanitize import norm_gain

    weight = mx.array([0.0037], mx.bfloat16)
    return norm_gain(weight).astype(mx.float32), 1 + weight.astype(mx.float32)


def base_of(family):
    """The base of rotary positions that a family's class reads from what transformers 5 writes."""
    upstream = import_module(f"mlx_vlm.models.{family}.config")
    sizes = [
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "rms_norm_eps",
        "vocab_size",
        "num_key_value_heads",
    ]
    return upstream.TextConfig.from_dict(
        {"model_type": "", **dict.fromkeys(sizes, 1), **ROPE}
    ).rope_theta


@case(
    "idefics2",
    "idefics3",
    "smolvlm",
    "mllama",
    "glm4v",
    at="models/idefics2/config.py:31 models/idefics3/config.py:15 models/mllama/config.py:20 models/glm4v/config.py:19",
)
def rope_parameters():
    """transformers 5 writes the base of rotary positions into ``rope_parameters``, where nobody looks: the class's default
    is taken. Some twenty further families refuse the folder.
    """
    families = ("idefics2", "idefics3", "mllama", "glm4v")
    return [base_of(family) for family in families], [123.0] * len(families)


@case("mllama", at="models/mllama/config.py:42")
def mllama_heads():
    """The tower's number of heads is the class's default. Right: ``attention_heads``, as every checkpoint calls it."""
    from mlx_vlm.models.mllama.config import VisionConfig

    return [VisionConfig.from_dict({"attention_heads": 2}).num_attention_heads], [2]


@case("gemma3", at="models/gemma3/language.py:266")
def gemma3_head():
    """A head of its own is looked for under a name that it does not have, and overwritten with the embedding table."""
    head = "language_model.lm_head.weight"
    table = "language_model.model.embed_tokens.weight"
    holder = SimpleNamespace()
    found = import_module("mlx_vlm.models.gemma3.language").LanguageModel.sanitize(
        holder, {head: mx.ones((2, 2)), table: mx.zeros((2, 2))}
    )
    return found[head], mx.ones((2, 2))


@case("llama4", at="models/llama4/llama4.py:99")
def llama4_placeholders():
    """With a placeholder more than a picture has features, an index reads past the features' end, and the request is
    answered. Right: an error.
    """
    request = {
        "input_ids": prompt(1, [128] * 5),
        "pixel_values": noise(2, 1, 3, 16, 16),
    }
    return attempt(
        lambda: f"{len(alone(tiny('llama4'), request, 1))} token"
    ), "an error that names both numbers"


@case(
    "llama4",
    at="models/llama4/processing_llama4.py:67 models/llama4/processing_llama4.py:206",
)
def llama4_tiles():
    """The whole picture behind several tiles has placeholders and no pixels. Right (transformers,
    image_processing_llama4.py): as many tiles as the prompt has room for, undistorted, from grids of up to 16.
    """
    from mlx_vlm.models.llama4.processing_llama4 import Llama4ImageProcessor

    pictures = Llama4ImageProcessor(size=16).preprocess([Image.new("RGB", (32, 16))])
    ((rows, columns),) = pictures["aspect_ratios"]
    return [len(pictures["pixel_values"])], [rows * columns + 1]


@case("llava", at="models/llava/processing_llava.py:90 utils.py:1766")
def llava_padding():
    """``padding``, which is the tokenizer's, is handed to the pictures' processor; those of transformers 5 refuse it."""
    from mlx_vlm.models.llava.processing_llava import LlavaProcessor
    from mlx_vlm.utils import process_inputs

    class Words:
        """As little of a tokenizer as the processor asks for."""

        def __call__(self, text, **options):
            return {"input_ids": [[1]]}

    class Pictures:
        """A processor of pictures that takes no option but its own."""

        def __call__(self, images, *, return_tensors=None):
            return {"pixel_values": np.zeros((1, 3, 4, 4), np.float32)}

    processor = copy.copy(LlavaProcessor.__new__(LlavaProcessor))
    processor.__dict__.update(
        image_processor=Pictures(),
        tokenizer=Words(),
        image_token="<image>",
        patch_size=4,
    )
    processor.__dict__.update(
        num_additional_image_tokens=0, vision_feature_select_strategy="full"
    )
    found = attempt(
        lambda: str(
            sorted(process_inputs(processor, ["<image>"], [Image.new("RGB", (4, 4))]))
        )
    )
    return found, "['input_ids', 'pixel_values']"


@case("falcon_h1", at="tokenizer_utils.py:96")
def bare_tokenizer():
    """The detokeniser that a tokenizer gets, where it is neither byte-level nor SentencePiece, cannot be copied."""
    from mlx_vlm.tokenizer_utils import NaiveStreamingDetokenizer

    class Words:
        def decode(self, tokens):
            return ""

    detokenizer = NaiveStreamingDetokenizer(Words())
    return attempt(
        lambda: type(copy.deepcopy(detokenizer)).__name__
    ), "NaiveStreamingDetokenizer"


if __name__ == "__main__":
    report()
