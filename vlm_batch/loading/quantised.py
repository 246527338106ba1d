"""Names the methods by which checkpoints are quantised, and refuses those that mlx-vlm's loader cannot read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlm_batch.errors import UnsupportedModel

#: Methods whose tensors no code of mlx-vlm 0.7.10 reads -> their own spelling.
#: (transformers/utils/quantization_config.py has the list of methods.)
UNREAD_METHODS = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "eetq": "EETQ",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fbgemm_fp8": "FBGEMM's FP8",
    "fouroversix": "Four Over Six",
    "fp_quant": "FP-Quant",
    "gemma": "Gemma's own method",
    "gguf": "GGUF",
    "gptq": "GPTQ",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "intel/auto-round": "AutoRound",
    "metal": "the method of transformers' Metal kernels",
    "quanto": "Quanto",
    "quark": "Quark",
    "sinq": "SINQ",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
#: Formats of compressed-tensors that mlx-vlm reads (quantization/checkpoint.py, _transform_compressed_tensors_weights).
READ_FORMATS = frozenset(
    {
        "dense",
        "float-quantized",
        "mixed-precision",
        "mxfp4-pack-quantized",
        "nvfp4-pack-quantized",
        "pack-quantized",
    }
)
#: Algorithms of ModelOpt that it reads (_transform_modelopt_nvfp4_weights; utils.py:529).
READ_ALGORITHMS = frozenset({"NVFP4", "W4A16_NVFP4", "MIXED_PRECISION", "MXFP8"})
#: MLX's group sizes of affine quantisation.
GROUP_SIZES = (32, 64, 128)
#: Types of tensors that are no plain numbers, as safetensors names them.
PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
#: Parts of config.json that may hold the decoder's own ``quantization_config``.
DECODERS = ("text_config", "llm_config", "language_config", "thinker_config")

INSTEAD = (
    "Take the folder that it was made of, in bfloat16, as it is or quantised by MLX (python -m mlx_vlm convert "
    "--hf-path MODEL -q), or a quantised folder of mlx-community"
)


@dataclass(frozen=True)
class Quantisation:
    """A checkpoint's method of quantisation: its name for readers, and its settings."""

    method: str
    name: str
    settings: Mapping[str, Any]


def quantisation_of(config: Mapping[str, Any]) -> Quantisation | None:
    """Return the method that config.json names; None if there is none, or it is MLX's own."""
    if config.get("quantization"):  # MLX's, which mlx-vlm's loader takes first
        return None
    parts = [
        config,
        *(config[name] for name in DECODERS if isinstance(config.get(name), Mapping)),
    ]
    found = [
        part["quantization_config"]
        for part in parts
        if isinstance(part.get("quantization_config"), Mapping)
    ]
    if not found:
        return None
    settings = found[0]
    method = _method(settings)
    return (
        None
        if method is None
        else Quantisation(method, _name(method, settings), settings)
    )


def _method(settings: Mapping[str, Any]) -> str | None:
    named = settings.get("quant_method")
    if named is not None:
        return str(named).lower()
    marks = ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit")
    return "bitsandbytes" if any(settings.get(mark) for mark in marks) else None


def _name(method: str, settings: Mapping[str, Any]) -> str:
    if method == "bitsandbytes":
        bits = (
            "8 bits"
            if settings.get("load_in_8bit") or settings.get("_load_in_8bit")
            else "4 bits"
        )
        kind = settings.get("bnb_4bit_quant_type")
        return (
            f"bitsandbytes ({str(kind).upper() if kind and bits == '4 bits' else bits})"
        )
    if method == "compressed-tensors":
        return f"compressed-tensors ({settings.get('format', 'no format')})"
    if method in ("modelopt", "modelopt_mixed"):
        return f"ModelOpt ({settings.get('quant_algo', 'no algorithm')})"
    own = {"fp8": "FP8", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}
    return {**UNREAD_METHODS, **own}.get(method, method)


def quantisation_fault(
    config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> str | None:
    """Return why quantised weights cannot be read; None if they can, or are plain all the same.

    Args:
        config: config.json.
        tensors: Heads of the tensors (``.dtype``, ``.shape``) by name; empty if they are not known.
    """
    found = quantisation_of(config)
    if found is None:
        return None
    why = _why_unread(found, tensors)
    # Some folders were made plain again, and kept the entry.
    if why is None or (tensors and not is_quantised(tensors)):
        return None
    return f"its weights are quantised by {found.name}, {why}. {INSTEAD}"


def is_quantised(tensors: Mapping[str, Any]) -> bool:
    """Whether some matrix is of integers or small floats."""
    return any(
        head.dtype not in PLAIN_TYPES
        and len(head.shape) > 1
        and not name.endswith(("position_ids", "index"))
        for name, head in tensors.items()
    )


def _why_unread(found: Quantisation, tensors: Mapping[str, Any]) -> str | None:
    if found.method in UNREAD_METHODS:
        return "which mlx-vlm cannot read"
    if found.method == "compressed-tensors":
        return _why_unread_compressed(found.settings, tensors)
    if found.method in ("modelopt", "modelopt_mixed"):
        algorithm = found.settings.get("quant_algo")
        read = ", ".join(sorted(READ_ALGORITHMS))
        return (
            None if algorithm in READ_ALGORITHMS else f"of which mlx-vlm reads {read}"
        )
    return None


def _why_unread_compressed(
    settings: Mapping[str, Any], tensors: Mapping[str, Any]
) -> str | None:
    """Judge a folder of compressed-tensors, which mlx-vlm reads in part and where it drops zero points silently."""
    groups = [
        one
        for one in (settings.get("config_groups") or {}).values()
        if isinstance(one, Mapping)
    ]
    kind = settings.get("format") or next(
        (one["format"] for one in groups if one.get("format")), None
    )
    if kind is not None and kind not in READ_FORMATS:
        return f"of which mlx-vlm reads {', '.join(sorted(READ_FORMATS))}"
    if any(name.endswith(".weight_g_idx") for name in tensors):
        return "with groups in an order of their own (actorder: group), which mlx-vlm cannot read"
    packed = [
        one.get("weights") or {}
        for one in groups
        if one.get("format", kind) == "pack-quantized"
    ]
    for weights in packed:
        if not weights.get("symmetric", True):
            return "with zero points (symmetric: false), which mlx-vlm leaves out of the answer"
        if weights.get("num_bits", 4) not in (4, 8):
            return f"in {weights['num_bits']} bits, which are not packed as MLX's are"
        if weights.get("group_size", 32) not in GROUP_SIZES:
            return f"in groups of {weights.get('group_size')}, and MLX's have {', '.join(map(str, GROUP_SIZES))}"
    kinds = {(one.get("num_bits", 4), one.get("group_size", 32)) for one in packed}
    if len(kinds) > 1:
        return "with several numbers of bits, of which mlx-vlm takes the first for all"
    return None


def check_decoded(weights: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for packed weights that are about to be loaded as if they were plain.

    Args:
        weights: Arrays for the built model.
        config: config.json.
    """
    found = quantisation_of(config)
    if found is None:
        return
    for name, value in weights.items():
        layer, _, leaf = name.rpartition(".")
        is_packed = leaf == "weight" and value.ndim > 1 and "int" in str(value.dtype)
        if is_packed and f"{layer}.scales" not in weights:
            raise UnsupportedModel(
                f"its weights are quantised by {found.name}, and mlx-vlm has not unpacked {name}. {INSTEAD}"
            )
