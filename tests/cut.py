"""Published folders that can be loaded: every field of them kept, layers and widths cut, and weights drawn at random.

Weights have the published names and torch's order of axes. Where the folder has an index, it says which names there are.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import mlx.core as mx
import mlx.nn as nn
import mlx_vlm.utils
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models.deepseekocr.sam import SAMEncoder
from mlx_vlm.models.deepseekocr.vision import NoTPTransformer
from mlx_vlm.models.deepseekocr_2.config import Qwen2EncoderConfig
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from vlm_batch.models import package_of
from vlm_batch.models._derived import readable
from vlm_batch.models._layouts import corrected

INDEX = "model.safetensors.index.json"
PARTS = ["text", "vision", "perceiver", "projector", "audio"]


@dataclass(frozen=True)
class Cut:
    """How a folder becomes small.

    Attributes:
        config: What replaces its own in config.json, part by part.
        names: mlx-vlm's names -> the published ones, as patterns; the first that fits.
        absent: Parameters of mlx-vlm's model that the published files do not have.
        is_converted: The folder is MLX's own: mlx-vlm's names and axes, and its bits.
    """

    config: Mapping[str, Any]
    names: Sequence[tuple[str, str]] = ()
    absent: str | None = None
    is_converted: bool = False


OCR = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
}
OCR_NAMES = (
    (r"^language_model\.lm_head", "lm_head"),
    (r"^language_model\.model\.", "model."),
    (r"^vision_model\.qwen2_encoder\.(query_\d+)", r"model.qwen2_model.\1.weight"),
    (r"^vision_model\.qwen2_encoder\.", "model.qwen2_model.model.model."),
    (r"^view_separator", "model.view_seperator"),
    (r"^", "model."),
)
QWEN_NAMES = (
    (r"^language_model\.lm_head", "lm_head"),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^vision_tower\.", "model.visual."),
)
SIGLIP = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
#: Widths of heads stay, since their rotary settings name frequencies one by one.
CUTS = {
    "olmocr-7b": Cut(
        {
            "hidden_size": 128,
            "intermediate_size": 96,
            "num_attention_heads": 1,
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "vision_config": {
                "depth": 2,
                "embed_dim": 64,
                "hidden_size": 128,
                "num_heads": 2,
            },
        },
        (
            (r"^language_model\.lm_head", "lm_head"),
            (r"^language_model\.model\.", "model."),
            (r"^vision_tower\.", "visual."),
        ),
    ),
    "cosmos-reason2": Cut(
        {
            "text_config": {
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_attention_heads": 2,
                "num_hidden_layers": 4,
                "num_key_value_heads": 1,
            },
            "vision_config": {
                "deepstack_visual_indexes": [0, 1, 2],
                "depth": 4,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_heads": 2,
                "out_hidden_size": 64,
            },
        },
        QWEN_NAMES,
    ),
    "medgemma-27b-it": Cut(
        {
            "text_config": {
                "hidden_size": 64,
                "intermediate_size": 96,
                "layer_types": [
                    *["sliding_attention"] * 5,
                    "full_attention",
                    "sliding_attention",
                ],
                "num_attention_heads": 2,
                "num_hidden_layers": 7,
                "num_key_value_heads": 1,
            },
            "vision_config": SIGLIP,
        },
        absent=r"lm_head",
    ),
    "granite-docling-258m": Cut(
        {
            "text_config": {
                "hidden_size": 192,
                "intermediate_size": 96,
                "num_attention_heads": 3,
                "num_hidden_layers": 2,
                "num_key_value_heads": 1,
            },
            "vision_config": SIGLIP,
        },
        ((r"^language_model\.", "model.text_model."), (r"^", "model.")),
        absent=r"lm_head",
    ),
    "florence-2-base": Cut(
        {
            "projection_dim": 64,
            "text_config": {
                "d_model": 64,
                "decoder_attention_heads": 2,
                "decoder_ffn_dim": 96,
                "decoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 96,
                "encoder_layers": 2,
                "num_hidden_layers": 2,
            },
            "vision_config": {
                "depths": [1, 1, 2, 1],
                "dim_embed": [16, 32, 64, 64],
                "num_groups": [1, 2, 4, 4],
                "num_heads": [1, 2, 4, 4],
                "projection_dim": 64,
            },
        },
        absent=r"lm_head",
    ),
    "qwen3.5-9b-mlx-8bit": Cut(
        {
            "text_config": {
                "hidden_size": 128,
                "intermediate_size": 128,
                "layer_types": [*["linear_attention"] * 3, "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "num_attention_heads": 2,
                "num_hidden_layers": 4,
                "num_key_value_heads": 1,
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_heads": 2,
                "out_hidden_size": 128,
            },
        },
        is_converted=True,
    ),
    "deepseek-ocr-2": Cut(
        {"language_config": OCR, "projector_config": {"n_embed": 64}, **OCR}, OCR_NAMES
    ),
    "unlimited-ocr": Cut(
        {
            "language_config": OCR,
            "projector_config": {"n_embed": 64},
            **OCR,
        },
        OCR_NAMES,
    ),
}


@contextmanager
def small_towers() -> Iterator[None]:
    """Make SAM, and what stands behind it in the OCR models, small: mlx-vlm has most of their sizes written in."""
    sizes = {"embed_dim": 64, "depth": 2, "num_heads": 2, "global_attn_indexes": (1,)}

    def sam(**given: Any) -> nn.Module:
        return SAMEncoder(**{**given, **sizes})

    def encoder(**given: Any) -> Qwen2EncoderConfig:
        return Qwen2EncoderConfig(**{**given, "layers": 2, "intermediate_size": 96})

    def clip(config: Any) -> nn.Module:
        return NoTPTransformer(replace(config, layers=2))

    with ExitStack() as patched:
        for package in ("deepseekocr.deepseekocr", "deepseekocr_2.deepseekocr_2"):
            patched.enter_context(
                mock.patch(f"mlx_vlm.models.{package}.SAMEncoder", sam)
            )
        patched.enter_context(
            mock.patch(
                "mlx_vlm.models.deepseekocr_2.vision.Qwen2EncoderConfig", encoder
            )
        )
        patched.enter_context(
            mock.patch("mlx_vlm.models.deepseekocr.vision.NoTPTransformer", clip)
        )
        yield


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with some of its fields replaced, within its parts, too."""
    found = dict(config)
    for name, value in changes.items():
        assert name in config, f"{name} is not in the published file"
        found[name] = (
            merged(config[name], value) if isinstance(value, Mapping) else value
        )
    return found


def empty_model(config: Mapping[str, Any]) -> nn.Module:
    """The model of a config.json, as mlx-vlm's loader builds it before it reads weights."""
    read: dict[str, Any] = readable(copy.deepcopy(dict(config)))
    model_type = str(mlx_vlm.utils.get_model_type(corrected(config)))
    package = package_of(model_type) or mlx_vlm.utils.get_model_and_args(read)[0]
    read.setdefault("text_config", read.pop("llm_config", {}))
    for name in ("vision_config", "audio_config"):
        read.setdefault(name, {})
    built = mlx_vlm.utils.update_module_configs(
        package.ModelConfig.from_dict(read), package, read, PARTS
    )
    return package.Model(built)


def drawn(name: str, shape: Sequence[int]) -> np.ndarray:
    """A parameter's values, by its name alone: norms about 1, products that keep a row's size, and
    tables so small that layers are heard behind tied ones."""
    values = np.random.default_rng(crc32(name.encode())).standard_normal(
        shape, dtype=np.float32
    )
    if len(shape) < 2:
        return 0.1 * values + (
            1.0 if "norm" in name and name.endswith("weight") else 0.0
        )
    fan = int(np.prod(shape[1:]))
    return values * np.float32(
        0.15 if "embed" in name and "patch" not in name else fan**-0.5
    )


def published_tensors(cut: Cut, model: nn.Module) -> dict[str, np.ndarray]:
    """A model's parameters under the published names, in torch's order of axes."""
    found = {}
    parameters: Any = tree_flatten(model.parameters())
    for path, value in parameters:
        if cut.absent is not None and re.search(cut.absent, path):
            continue
        name = path
        for pattern, theirs in cut.names:
            name, times = re.subn(pattern, theirs, path)
            if times:
                break
        tensor = drawn(path, value.shape)
        if "switch_mlp" in name:
            for at, expert in enumerate(tensor):
                found[name.replace("switch_mlp", f"experts.{at}")] = expert
            continue
        is_convolution = tensor.ndim > 3 and name.endswith("weight")
        found[name] = np.moveaxis(tensor, -1, 1) if is_convolution else tensor
    return found


def save_converted(folder: Path, model: nn.Module, bits: Mapping[str, Any]) -> None:
    """Save a model as mlx-vlm converts one: its own names, the language side in bits."""
    parameters: Any = tree_flatten(model.parameters())
    values = [(path, mx.array(drawn(path, value.shape))) for path, value in parameters]
    model.load_weights(values)
    nn.quantize(
        model,
        class_predicate=lambda path, part: (
            hasattr(part, "to_quantized") and path.startswith("language_model")
        ),
        **bits,
    )
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters()))
    )


def save_bytes(folder: Path, names: Sequence[str]) -> None:
    """Save tensors of bytes, as methods of quantisation pack them."""
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {name: mx.zeros((4, 1), dtype=mx.uint8) for name in names},
    )


def write_tokenizer(folder: Path, special: Mapping[str, int]) -> None:
    """Write a stand-in for a tokenizer that a folder lacks: bytes, and the special tokens at their places."""
    words = {
        char: at
        for at, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), start=3)
    }
    taken = set(special.values())
    words |= {
        f"<stand-in {at}>": at
        for at in range(max(taken))
        if at not in taken and at not in words.values()
    }
    made = Tokenizer(BPE({**words, **special}, []))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    made.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in special]
    )
    made.save(str(folder / "tokenizer.json"))


def write(folder: Path, published: Path, cut: Cut) -> Path:
    """Write a published folder with small random weights."""
    folder.mkdir()
    for file in published.iterdir():
        if file.name not in ("config.json", INDEX):
            shutil.copy(file, folder / file.name)
    config = merged(
        json.loads((published / "config.json").read_text(encoding="utf-8")), cut.config
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = empty_model(config)
    if cut.is_converted:
        save_converted(folder, model, config["quantization"])
        return folder
    tensors = published_tensors(cut, model)
    if (published / INDEX).exists():
        names = set(
            json.loads((published / INDEX).read_text(encoding="utf-8"))["weight_map"]
        )
        assert tensors.keys() <= names, sorted(tensors.keys() - names)[:5]
        kinds = {re.sub(r"\d+", "N", name) for name in names}
        assert kinds == {re.sub(r"\d+", "N", name) for name in tensors}
    given = {name: mx.array(value) for name, value in tensors.items()}
    mx.save_safetensors(
        str(folder / "model.safetensors"), given, metadata={"format": "pt"}
    )
    return folder


#: Special tokens of the folder whose tokenizer lies elsewhere, from the first id behind its words.
QWEN_SPECIAL = (
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
    ),
    *(
        "<|box_end|>",
        "<|quad_start|>",
        "<|quad_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
    ),
    *("<|image_pad|>", "<|video_pad|>"),
)


def special_tokens(folder: Path) -> dict[str, int]:
    """The special tokens of a folder without a vocabulary, at their published ids."""
    said = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if "added_tokens_decoder" in said:
        return {
            added["content"]: int(at)
            for at, added in said["added_tokens_decoder"].items()
        }
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    first = config["image_token_id"] - QWEN_SPECIAL.index("<|image_pad|>")
    return {word: first + at for at, word in enumerate(QWEN_SPECIAL)}
