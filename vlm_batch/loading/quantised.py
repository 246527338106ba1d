"""Names the methods by which checkpoints are quantised, and refuses those that mlx-vlm's loader cannot read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
#: ModelOpt's names of its method.
MODELOPT = ("modelopt", "modelopt_mixed")
#: Algorithms of ModelOpt that it reads (_transform_modelopt_nvfp4_weights; utils.py:529).
READ_ALGORITHMS = frozenset({"NVFP4", "W4A16_NVFP4", "MIXED_PRECISION", "MXFP8"})
#: MLX's group sizes of affine quantisation.
GROUP_SIZES = (32, 64, 128)
#: Types of tensors that are no plain numbers, as safetensors names them.
PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
#: Methods that it reads -> their own spelling.
READ_METHODS = {"fp8": "FP8", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}
#: Settings of bitsandbytes, which older folders have without a method's name.
IN_8_BITS = ("load_in_8bit", "_load_in_8bit")
BITSANDBYTES_MARKS = ("load_in_4bit", "_load_in_4bit", *IN_8_BITS)
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
    settings = _settings_of(config)
    method = _method(settings)
    if method is None:
        return None
    return Quantisation(method, _name(method, settings), settings)


def _settings_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first ``quantization_config`` of the whole or its decoder; empty if there is none."""
    for part in (config, *map(config.get, DECODERS)):
        settings = _mapping(_mapping(part).get("quantization_config"))
        if settings:
            return settings
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping as it is, and anything else as an empty one."""
    if isinstance(value, Mapping):
        return value
    return {}


def _method(settings: Mapping[str, Any]) -> str | None:
    named = settings.get("quant_method")
    if named is not None:
        return str(named).lower()
    if any(map(settings.get, BITSANDBYTES_MARKS)):
        return "bitsandbytes"
    return None


def _name(method: str, settings: Mapping[str, Any]) -> str:
    """Return a method's name for readers, with its kind."""
    if method == "bitsandbytes":
        return f"bitsandbytes ({_bitsandbytes_kind(settings)})"
    if method == "compressed-tensors":
        return f"compressed-tensors ({settings.get('format', 'no format')})"
    if method in MODELOPT:
        return f"ModelOpt ({settings.get('quant_algo', 'no algorithm')})"
    return {**UNREAD_METHODS, **READ_METHODS}.get(method, method)


def _bitsandbytes_kind(settings: Mapping[str, Any]) -> str:
    if any(map(settings.get, IN_8_BITS)):
        return "8 bits"
    kind = settings.get("bnb_4bit_quant_type")
    if kind:
        return str(kind).upper()
    return "4 bits"


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
    # Some folders were made plain again, and kept the entry.
    is_plain = bool(tensors) and not is_quantised(tensors)
    why = _why_unread(found, tensors)
    if is_plain or why is None:
        return None
    return f"its weights are quantised by {found.name}, {why}. {INSTEAD}"


def is_quantised(tensors: Mapping[str, Any]) -> bool:
    """Whether some matrix is of integers or small floats."""
    return any(map(_is_packed, tensors, tensors.values()))


def _is_packed(name: str, head: Any) -> bool:
    if head.dtype in PLAIN_TYPES or len(head.shape) < 2:
        return False
    return not name.endswith(("position_ids", "index"))


def _why_unread(found: Quantisation, tensors: Mapping[str, Any]) -> str | None:
    if found.method in UNREAD_METHODS:
        return "which mlx-vlm cannot read"
    if found.method == "compressed-tensors":
        return _why_unread_compressed(found.settings, tensors)
    if found.method in MODELOPT:
        return _why_not_among(READ_ALGORITHMS, found.settings.get("quant_algo"))
    return None


def _why_not_among(read: frozenset[str], named: Any) -> str | None:
    if str(named) in read:
        return None
    return f"of which mlx-vlm reads {', '.join(sorted(read))}"


def _why_unread_compressed(
    settings: Mapping[str, Any], tensors: Mapping[str, Any]
) -> str | None:
    """Judge a folder of compressed-tensors, which mlx-vlm reads in part and where it drops zero points silently."""
    groups = list(map(_mapping, _mapping(settings.get("config_groups")).values()))
    # without a name anywhere, mlx-vlm goes by the tensors
    named = [part["format"] for part in (settings, *groups) if part.get("format")]
    kind, *_ = *named, "dense"
    packed = [
        _mapping(group.get("weights"))
        for group in groups
        if group.get("format", kind) == "pack-quantized"
    ]
    reasons = [
        _why_not_among(READ_FORMATS, kind),
        _why_out_of_order(tensors),
        *map(_why_unread_packed, packed),
        _why_mixed(packed),
    ]
    return next(filter(None, reasons), None)


def _why_out_of_order(tensors: Mapping[str, Any]) -> str | None:
    if any(name.endswith(".weight_g_idx") for name in tensors):
        return "with groups in an order of their own (actorder: group), which mlx-vlm cannot read"
    return None


def _why_mixed(packed: Sequence[Mapping[str, Any]]) -> str | None:
    """Judge the groups of packed weights together."""
    numbers = list(map(_packing, packed))
    if numbers != numbers[:1] * len(numbers):
        return "with several numbers of bits, of which mlx-vlm takes the first for all"
    return None


def _why_unread_packed(weights: Mapping[str, Any]) -> str | None:
    """Judge packed weights by the settings of their group."""
    bits, size = _packing(weights)
    if not weights.get("symmetric", True):
        return "with zero points (symmetric: false), which mlx-vlm leaves out of the answer"
    if bits not in (4, 8):
        return f"in {bits} bits, which are not packed as MLX's are"
    if size not in GROUP_SIZES:
        known = ", ".join(map(str, GROUP_SIZES))
        return f"in groups of {size}, and MLX's have {known}"
    return None


def _packing(weights: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the bits of packed weights and the size of their groups."""
    return weights.get("num_bits", 4), weights.get("group_size", 32)


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
        # MLX's own packed weights have scales beside them
        is_unpacked = name.removesuffix("weight") + "scales" in weights
        is_packed = value.ndim > 1 and "int" in str(value.dtype)
        if is_packed and name.endswith(".weight") and not is_unpacked:
            raise UnsupportedModel(
                f"its weights are quantised by {found.name}, and mlx-vlm has not unpacked {name}. {INSTEAD}"
            )
