"""Reads a model from a checkpoint's files: configurations and weights, corrected where mlx-vlm would misread them.

mlx-vlm 0.7.10 was not written for the folders of transformers 5, and silently takes its own defaults for what it does not
find. So rules (``models/_layouts.py``) put the configuration and the tensors as it expects them. mlx-vlm's loader does the
rest: its file finds our functions in the place of four of its own, on a thread that reads, while it reads.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_vlm.utils
from mlx.utils import tree_flatten
from mlx_vlm.tokenizer_utils import load_tokenizer
from mlx_vlm.utils import get_model_type, load_image_processor
from transformers import AutoProcessor, ProcessorMixin

from vlm_batch.errors import UnsupportedModel
from vlm_batch.inputs.processors import with_stops
from vlm_batch.models import package_of, spec_for
from vlm_batch.models._fitting import fitted
from vlm_batch.models._layouts import KEEP_PROCESSOR, PLAIN_ROPE, PROCESSORS, TENSORS, corrected
from vlm_batch.models._rules import Config, Tensors, Weights, raised, without
from vlm_batch.models._settings import Watch, readable, serve_settings, text_of

#: Types whose class reads the kind of rotary positions, and computes plain ones whatever it is (glm_ocr/language.py:60).
PLAIN_ALONE = frozenset({"glm_ocr"})


def read_config(path: Path, **options: Any) -> Config:
    """A folder's ``config.json`` with its ``generation_config.json``, in the words that mlx-vlm's classes read."""
    return corrected(mlx_vlm.utils.load_config(path, **options))


def read_model(path: Path, *, in_float32: bool, **options: Any) -> nn.Module:
    """The model of a folder, through mlx-vlm's loader, its half-precision weights in float32 or as they are.

    Raises UnsupportedModel, and what the loader raises for a damaged checkpoint.
    """
    written = mlx_vlm.utils.load_config(path, **options)
    read, watch = readable(copy.deepcopy(written)), Watch()  # mlx-vlm's loader changes what it is given
    rules = TENSORS.get(str(get_model_type(read)), Tensors())
    lying: Weights = {}

    def sanitize_weights(theirs: Callable[..., Weights], model: Any, weights: Weights, config: Any = None) -> Weights:
        if config is not None:  # of a part: the whole model's call comes first
            return theirs(model, weights, config)
        lying.update(raised(weights, "" if in_float32 else rules.from_one))
        return theirs(model, with_nested_towers(rules.put(lying, read), model))

    def load_model_weights(
        theirs: Callable[..., nn.Module], model: nn.Module, config: Config, weights: Weights, *args: Any, **kwargs: Any
    ) -> nn.Module:
        watch.end()
        spec = spec_for(str(get_model_type(read)))
        serve_settings(model, written, watch, object if spec is None or spec.adapter is None else spec.adapter)
        put = fitted(model, rules.finish(lying, weights, read), read)
        lying.clear()  # before anything is computed, lest what was joined or turned be held twice
        if rules.unread and not any(name.startswith(rules.unread) for name in put):
            unread = {
                name: value
                for name, value in dict(tree_flatten(model.parameters())).items()
                if name.startswith(rules.unread)
            }
            put |= {name: mx.zeros(value.shape) for name, value in unread.items()}
        # What mlx-vlm's convert makes of few bits still says them.
        if not any(name.endswith(".scales") for name in put):
            config = without("quantization")(config)
        return theirs(model, config, put, *args, **kwargs)

    ours: dict[str, Callable[..., Any]] = {"apply_generation_config_defaults": watch.configs}
    with reading(read, sanitize_weights=sanitize_weights, load_model_weights=load_model_weights, **ours):
        if text_of(written) is None:
            check_rope(read, path)
        model: nn.Module = mlx_vlm.utils.load_model(path, **options)
    if not in_float32:
        keep_type(model)
    if "image_grid_pinpoints" in read:  # mlx-vlm's LLaVA-NeXT does not keep the grids that its tiles are cut by
        model.config.image_grid_pinpoints = read["image_grid_pinpoints"]
    return model


def read_processor(path: Path, model: nn.Module, **options: Any) -> Any:
    """The processor of a folder, with mlx-vlm's additions: a detokeniser, stop tokens, its own part for pictures."""
    lying = mlx_vlm.utils.load_config(path, **options)
    config = corrected(lying)
    keeps = lying.get("model_type") in KEEP_PROCESSOR
    model_type = str(lying["model_type"] if keeps else config["model_type"])
    with reading(config), older_processor_files(path, model_type) as folder:
        images = None if keeps else load_image_processor(path, **options)
        read: Callable[..., Any] = AutoProcessor.from_pretrained
        if model_type == "cohere2_vision":
            from vlm_batch.models import _aya_vision

            read = _aya_vision.from_pretrained
        try:
            processor = read(folder, **options)
        except Exception as error:
            raise processor_error(folder, config, **options) or error from error
        processor = with_stops(processor, load_tokenizer(folder, return_tokenizer=False), model.config)
    if images is not None:
        processor.image_processor = images
    PROCESSORS.get(str(get_model_type(config)), lambda *_: None)(processor, config)
    return processor


# mlx-vlm's loader
# ---------------------------------------------------------------------------------------------------------------------


class _Thread(threading.local):
    """Our functions for mlx-vlm's loader, by the names of those in whose place they are called; none where nothing is read."""

    ours: Mapping[str, Callable[..., Any]] = {}


_thread = _Thread()


@contextmanager
def reading(config: Config, **ours: Callable[..., Any]) -> Iterator[None]:
    """For as long as it lasts, have mlx-vlm's loader read ``config`` on this thread, find other packages' families, and call
    ``ours`` by these names. Each is handed mlx-vlm's own function first."""

    def get_model_and_args(theirs: Callable[..., Any], config: Config, model_path: Path | None = None) -> Any:
        package = package_of(str(get_model_type(config)))
        return theirs(config, model_path) if package is None else (package, get_model_type(config))

    ours |= {"load_config": lambda *_, **__: config, "get_model_and_args": get_model_and_args}
    for name in ours:
        _hook(name)
    before, _thread.ours = _thread.ours, ours
    try:
        yield
    finally:
        _thread.ours = before


@cache
def _hook(name: str) -> None:
    """Bind a name of mlx-vlm's loader to a function that calls ours on a thread that reads, and theirs on all others."""
    if name not in mlx_vlm.utils.load_model.__code__.co_names:
        raise LookupError(f"load_model of mlx-vlm does not call {name}")
    theirs = vars(mlx_vlm.utils)[name]

    @wraps(theirs)
    def either(*args: Any, **kwargs: Any) -> Any:
        ours = _thread.ours.get(name)
        return theirs(*args, **kwargs) if ours is None else ours(theirs, *args, **kwargs)

    vars(mlx_vlm.utils)[name] = either


def check_rope(config: Mapping[str, Any], path: Path) -> None:
    """Raise UnsupportedModel where a decoder's positions are scaled and mlx-vlm's class has no place to be told so."""
    architecture, model_type = mlx_vlm.utils.get_model_and_args(dict(config), path)
    text = config.get("text_config")
    part, name = (text, "TextConfig") if isinstance(text, Mapping) and text else (config, "ModelConfig")
    places = [place for place in ("rope_parameters", "rope_scaling") if isinstance(part.get(place), Mapping)]
    kinds = {part[place].get("rope_type", part[place].get("type", "default")) for place in places} - {*PLAIN_ROPE}
    if not kinds or name not in vars(architecture):
        return
    fields = inspect.signature(vars(architecture)[name]).parameters
    if not fields.keys() & set(places) or model_type in PLAIN_ALONE:
        raise UnsupportedModel(
            f"this {model_type} model has {min(kinds)} positions, which mlx-vlm's class of it does not know"
        )


def with_nested_towers(weights: Weights, model: nn.Module) -> Weights:
    """CLIP's and SigLIP's tensors below ``vision_model``, where mlx-vlm's tower has them and transformers 5 has not."""
    there = {str(entry[0]) for entry in tree_flatten(model.parameters())}

    def nested(name: str) -> str:
        inner = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
        inner = inner[inner.find("vision_tower.") :]  # some have "model." before it
        return inner if inner in there and name not in there and ".vision_model." not in name else name

    return {nested(name): value for name, value in weights.items()}


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


# Files of processors
# ---------------------------------------------------------------------------------------------------------------------


def processor_error(folder: Path, config: Config, **options: Any) -> Exception | None:
    """The reason for which mlx-vlm's own processor of a model cannot be read; None if it can, or if there is none.

    mlx-vlm passes over it and asks transformers for its processor (models/base.py:675), whose complaint, often that there is
    no torch, says nothing of what is wrong. Its processors are those that the files of the model's package name.
    """
    package = mlx_vlm.utils.get_model_and_args(config)[0].__name__
    files = [module for name, module in sys.modules.items() if name == package or name.startswith(f"{package}.")]
    found = {one for file in files for one in vars(file).values() if isinstance(one, type)} - {ProcessorMixin}
    error = None
    for kind in found:
        if issubclass(kind, ProcessorMixin):
            try:
                kind.from_pretrained(folder, **options)
            except Exception as raised:
                error = raised
    return error


@contextmanager
def older_processor_files(path: Path, model_type: str) -> Iterator[Path]:
    """A folder whose processor's settings lie in the files of transformers 4, from which mlx-vlm's processors read them.

    transformers 5 saves all of them in ``processor_config.json``; mlx-vlm then finds no ``preprocessor_config.json`` and
    takes its own defaults for sizes, means and patches. The folder itself, where there is nothing to be put otherwise;
    else one of links beside the split settings, for as long as the processor is read.
    """
    config, together = _read_json(path / "config.json"), _read_json(path / "processor_config.json")
    named = {"preprocessor_config.json": "image_processor", "video_preprocessor_config.json": "video_processor"}
    kept = {name: together[name] for name in ("processor_class",) if name in together}
    files = {
        name: {**kept, **together[part]}
        for name, part in named.items()
        if isinstance(together.get(part), dict) and not (path / name).exists()
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


def _read_json(path: Path) -> Config:
    """The contents of a file; nothing where there is none."""
    found: Config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found
