"""Reads a model from a checkpoint's files: configurations and weights of transformers, changed to what mlx-vlm reads.

transformers 5 saves folders that mlx-vlm 0.7.10 was not written for: rotary settings lie in ``rope_parameters``, towers and
decoders have other names, and experts lie in one array. mlx-vlm silently takes its own defaults for what it does not find.
So the configuration is read here first, and handed on with the older names beside the newer ones. Weights are renamed
where mlx-vlm has no rule. Rules for all families are in this file, and those of one family in
``models/_layouts.py``.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, MethodType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_vlm.utils
from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_type
from transformers import AutoProcessor

from vlm_batch.errors import UnsupportedModel
from vlm_batch.models._layouts import layout_of

Config = dict[str, Any]
Weights = dict[str, mx.array]

#: Kinds of rotary positions that have no parameters beside their base: mlx-vlm's plain ones.
PLAIN_ROPE = ("default", "axial", "proportional")

#: A pattern that finds no name.
NOTHING = r"(?!)"


def read_config(path: Path, **options: Any) -> Config:
    """A folder's ``config.json`` with its ``generation_config.json``, in the words that mlx-vlm's classes read."""
    return normalise_config(mlx_vlm.utils.load_config(path, **options))


def read_model(path: Path, *, in_float32: bool, **options: Any) -> nn.Module:
    """The model of a folder, through mlx-vlm's loader, its half-precision weights in float32 or as they are.

    Raises UnsupportedModel, and what the loader raises for a damaged checkpoint.
    """
    read = read_config(path, **options)
    check_rope(read, path)
    layout = layout_of(str(get_model_type(read)))
    lying: Weights = {}

    def sanitize_weights(model: Any, weights: Weights, config: Any = None) -> Weights:
        if config is None:  # the whole model's: the first call
            lying.update(raised(weights, r"" if in_float32 else layout.from_one or NOTHING))
            weights = layout.weights(with_nested_towers(lying, model), read)
        return mlx_vlm.utils.sanitize_weights(model, weights, config)

    def load_model_weights(model: nn.Module, config: Config, weights: Weights, *args: Any, **kwargs: Any) -> nn.Module:
        put = layout.finish(lying, weights, read)
        lying.clear()  # before anything is computed, lest what was joined or turned be held twice
        return mlx_vlm.utils.load_model_weights(model, config, put, *args, **kwargs)

    load_model = with_names(
        mlx_vlm.utils.load_model,
        load_config=lambda *_, **__: read,
        sanitize_weights=sanitize_weights,
        load_model_weights=load_model_weights,
    )
    model: nn.Module = load_model(path, **options)
    if not in_float32:
        keep_type(model)
    if "image_grid_pinpoints" in read:  # mlx-vlm's LLaVA-NeXT does not keep the grids that its tiles are cut by
        model.config.image_grid_pinpoints = read["image_grid_pinpoints"]
    return model


def read_processor(path: Path, model: nn.Module, **options: Any) -> Any:
    """The processor of a folder, with mlx-vlm's additions: a detokeniser, stop tokens, its own part for pictures."""
    config = read_config(path, **options)
    model_type, lying = str(config["model_type"]), str(mlx_vlm.utils.load_config(path, **options).get("model_type"))
    images = None
    if layout_of(lying).keeps_processor:
        model_type = lying
    else:
        load_image_processor = with_names(mlx_vlm.utils.load_image_processor, load_config=lambda *_, **__: config)
        images = load_image_processor(path, **options)
    eos_token_ids = vars(model.config).get("eos_token_id")
    with older_processor_files(path, model_type) as folder:
        load_processor = mlx_vlm.utils.load_processor
        if config["model_type"] == "cohere2_vision" and find_spec("torchvision") is None:
            from vlm_batch.models import _aya_vision

            load_processor = with_names(load_processor, AutoProcessor=_aya_vision)
        try:
            processor = load_processor(folder, True, eos_token_ids=eos_token_ids, **options)
        except Exception as error:
            raise processor_error(folder, model_type, **options) or error from error
    if images is not None:
        processor.image_processor = images
    layout_of(str(get_model_type(config))).processor(processor, config)
    return processor


def processor_error(folder: Path, model_type: str, **options: Any) -> Exception | None:
    """The reason for which mlx-vlm's own processor of a model type cannot be read; None if it can, or if there is none.

    mlx-vlm passes over it and asks transformers for its processor (models/base.py:675), whose complaint, often that there is
    no torch, says nothing of what is wrong.
    """
    reader: Any = AutoProcessor.from_pretrained
    function = reader.__func__
    while function is not None:  # each of mlx-vlm's hands on to the one that it replaced
        held = inspect.getclosurevars(function)
        if model_type in held.nonlocals.get("target_model_types", ()):
            try:
                held.nonlocals["processor_cls"].from_pretrained(folder, **options)
            except Exception as error:
                return error
        methods = [one for one in (*held.nonlocals.values(), *held.globals.values()) if isinstance(one, MethodType)]
        function = next((one.__func__ for one in methods if one.__self__ is AutoProcessor), None)
    return None


@contextmanager
def older_processor_files(path: Path, model_type: str) -> Iterator[Path]:
    """A folder whose processor's settings lie in the files of transformers 4, from which mlx-vlm's processors read them.

    transformers 5 saves all of them in ``processor_config.json``; mlx-vlm then finds no ``preprocessor_config.json`` and
    takes its own defaults for sizes, means and patches. The folder itself, where there is nothing to be put otherwise;
    else one of links beside the split settings, for as long as the processor is read.
    """
    with (path / "config.json").open(encoding="utf-8") as file:
        config = json.load(file)
    files = {
        name: settings for name, settings in _split_settings(path).items() if not (path / name).exists() and settings
    }
    if config.get("model_type") != model_type:
        files["config.json"] = config | {"model_type": model_type}
    if not files:
        yield path
        return
    with TemporaryDirectory(prefix="vlm_batch-") as name:
        folder = Path(name)
        for item in path.iterdir():
            if item.name not in files and item.suffix != ".safetensors":
                (folder / item.name).symlink_to(item.resolve())
        for file_name, settings in files.items():
            (folder / file_name).write_text(json.dumps(settings), encoding="utf-8")
        yield folder


def _split_settings(path: Path) -> dict[str, Config]:
    """The parts of ``processor_config.json`` that transformers 4 keeps in files of their own, by those files' names."""
    together = path / "processor_config.json"
    if not together.exists():
        return {}
    with together.open(encoding="utf-8") as file:
        settings = json.load(file)
    named = {"preprocessor_config.json": "image_processor", "video_preprocessor_config.json": "video_processor"}
    found = {name: settings.get(part) for name, part in named.items()}
    kept = {name: settings[name] for name in ("processor_class",) if name in settings}
    return {name: {**kept, **part} for name, part in found.items() if isinstance(part, dict)}


def raised(weights: Weights, names: str) -> Weights:
    """Weights in half precision whose names a pattern finds, made float32.

    mlx-vlm adds ones and multiplies in the file's type, which loses three digits of a norm that counts from one.
    """
    half = (mx.bfloat16, mx.float16)
    return {
        name: value.astype(mx.float32) if value.dtype in half and re.search(names, name) else value
        for name, value in weights.items()
    }


class TypedNorm(nn.RMSNorm):
    """A norm with a float32 weight in a model of half precision: what it answers has its input's type.

    As in transformers (modeling_qwen3_5.py, Qwen3_5RMSNorm); MLX's answers in the wider of both, and so would all after it.
    """

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x).astype(x.dtype)


def keep_type(model: nn.Module) -> None:
    """Let the norms of a model that were raised to float32 answer in their input's type."""
    for _, module in model.named_modules():
        if type(module) is nn.RMSNorm and module.weight.dtype == mx.float32:
            module.__class__ = TypedNorm


def with_nested_towers(weights: Weights, model: nn.Module) -> Weights:
    """CLIP's and SigLIP's tensors below ``vision_model``, where mlx-vlm's tower has them and transformers 5 has not."""
    there = {str(entry[0]) for entry in tree_flatten(model.parameters())}

    def nested(name: str) -> str:
        inner = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
        inner = inner[inner.find("vision_tower.") :]  # some have "model." before it
        return inner if inner in there and name not in there and ".vision_model." not in name else name

    return {nested(name): value for name, value in weights.items()}


def normalise_config(config: Mapping[str, Any]) -> Config:
    """A configuration with the names of transformers 4 beside those of 5, in each of its parts."""
    if not is_new(config):
        return dict(config)
    found = _normalise_part(config)
    if "tie_word_embeddings" in found and isinstance(found.get("text_config"), Mapping):  # the model's counts there
        found["text_config"] = {**found["text_config"], "tie_word_embeddings": found["tie_word_embeddings"]}
    model_type = None
    while model_type != (model_type := get_model_type(found)):  # a rule may say that it is another family's
        found = layout_of(str(model_type)).config(found)
    return found


def is_new(config: Mapping[str, Any]) -> bool:
    """Whether transformers 5 wrote a configuration: by its word, or by rotary settings in their newer place."""
    return str(config.get("transformers_version", "")).startswith("5.") or "rope_parameters" in json.dumps(config)


def _is_part(name: str, value: Any) -> bool:
    return name.endswith("_config") and isinstance(value, Mapping)


def _normalise_part(config: Mapping[str, Any]) -> Config:
    found = {name: _normalise_part(value) if _is_part(name, value) else value for name, value in config.items()}
    return _with_older_names(_with_flat_rope(found))


def _with_older_names(config: Config) -> Config:
    """A configuration with entries that transformers 5 renamed, or left out because they follow from others."""
    if "num_local_experts" in config:
        config = {"num_experts": config["num_local_experts"], **config}
    for one, other in (("image_token_id", "image_token_index"), ("video_token_id", "video_token_index")):
        for name, alias in ((one, other), (other, one)):
            if config.get(name) is not None and config.get(alias) is None:
                config = config | {alias: config[name]}
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if heads and width and config.get("head_dim") is None and "qk_nope_head_dim" not in config:
        config = config | {"head_dim": width // heads}
    return config


def _with_flat_rope(config: Config) -> Config:
    """The entries of ``rope_parameters`` under their older names, too; what a configuration says itself stays."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or not rope:
        return config
    kinds = {name: part for name, part in rope.items() if isinstance(part, Mapping)}
    found = _flat_rope(kinds.get("full_attention", next(iter(kinds.values()))) if kinds else rope)
    if "sliding_attention" in kinds and "rope_theta" in kinds["sliding_attention"]:
        found["rope_local_base_freq"] = kinds["sliding_attention"]["rope_theta"]
    return config | {name: value for name, value in found.items() if config.get(name) is None}


def _flat_rope(rope: Mapping[str, Any]) -> Config:
    found = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    kind = rope.get("rope_type", "default")
    if kind not in PLAIN_ROPE or "mrope_section" in rope:
        found["rope_scaling"] = {"type": kind, **rope}
    return found


def check_rope(config: Mapping[str, Any], path: Path) -> None:
    """Raise UnsupportedModel where a decoder's positions are scaled and mlx-vlm's class has no place to be told so."""
    architecture, model_type = mlx_vlm.utils.get_model_and_args(dict(config), path)
    text = config.get("text_config")
    part, name = (text, "TextConfig") if isinstance(text, Mapping) and text else (config, "ModelConfig")
    kind = (part.get("rope_parameters") or {}).get("rope_type", "default")
    if kind in PLAIN_ROPE or name not in vars(architecture):
        return
    fields = inspect.signature(vars(architecture)[name]).parameters
    if not fields.keys() & {"rope_scaling", "rope_parameters"}:
        raise UnsupportedModel(
            f"this {model_type} model has {kind} positions, which mlx-vlm's class of it does not know"
        )


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of a function of mlx-vlm's that finds other functions under these names. Its file stays as it is."""
    code = function.__code__
    if lacking := names.keys() - set(code.co_names):
        raise LookupError(f"{function.__qualname__} of mlx-vlm does not call {', '.join(sorted(lacking))}")
    copy = FunctionType(code, {**function.__globals__, **names}, code.co_name, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
