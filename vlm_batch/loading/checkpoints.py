"""Reads a model and its processor from a checkpoint's folder.

mlx-vlm 0.7.10 misses settings of transformers 5 and takes its own defaults. Rules (``models/_layouts.py``) correct the
folder for mlx-vlm's loader.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx_vlm.utils
from mlx.utils import tree_flatten
from mlx_vlm.tokenizer_utils import load_tokenizer
from mlx_vlm.utils import get_model_type, load_image_processor
from transformers import CONFIG_MAPPING, AutoProcessor, ProcessorMixin

from vlm_batch.errors import UnsupportedModel
from vlm_batch.inputs.processors import with_stops
from vlm_batch.loading.quantised import check_decoded
from vlm_batch.loading.recommended import json_object
from vlm_batch.models import package_of
from vlm_batch.models._derived import decoder_config, readable
from vlm_batch.models._fitting import fit
from vlm_batch.models._layouts import KEEP_PROCESSOR, PLAIN_ROPE, PROCESSORS, corrected
from vlm_batch.models._rules import Config, Tensors, Weights, to_float32, without
from vlm_batch.models._settings import apply_settings
from vlm_batch.models._tensors import TENSORS

#: Types whose class accepts any kind of rotary positions, and computes plain ones (glm_ocr/language.py:60).
PLAIN_ALONE = frozenset({"glm_ocr"})

#: Files of transformers 4 -> their parts of processor_config.json in transformers 5.
OLDER_FILES = {
    "preprocessor_config.json": "image_processor",
    "video_preprocessor_config.json": "video_processor",
}

#: Up to so many weights in few bits are widened where a CPU computes in float32: MLX's products of few bits take seven times as
#: long for the prompt of fixtures/reader.
MOST_WIDENED = 64_000_000

#: The decoder's place in tokenizer.json. Within a token's text, the quotation mark would have a backslash before it.
_DECODER = re.compile(rb'(?<!\\)"decoder"\s*:\s*')
#: Longest description of a decoder that is read.
MOST_DECODER_BYTES = 65_536


def read_config(path: Path, **options: Any) -> Config:
    """Read a folder's configuration under mlx-vlm's names."""
    return corrected(mlx_vlm.utils.load_config(path, **options))


def read_model(path: Path, *, in_float32: bool, **options: Any) -> nn.Module:
    """Read a folder's model; ``in_float32`` raises half-precision weights."""
    written = mlx_vlm.utils.load_config(path, **options)
    # mlx-vlm's loader changes what it is given
    read = readable(copy.deepcopy(written))
    tensors = TENSORS.get(str(get_model_type(read)), Tensors())
    on_disk: Weights = {}

    def sanitize_weights(
        theirs: Callable[..., Weights], model: Any, weights: Weights, config: Any = None
    ) -> Weights:
        if config is not None:  # a part's call; the whole model's comes first
            return theirs(model, weights, config)
        on_disk.update(
            to_float32(weights, "" if in_float32 else tensors.norms_from_one)
        )
        return theirs(model, with_nested_towers(tensors.apply(on_disk, read), model))

    def load_model_weights(
        theirs: Callable[..., nn.Module],
        model: nn.Module,
        config: Config,
        weights: Weights,
        *args: Any,
        **kwargs: Any,
    ) -> nn.Module:
        apply_settings(model, written)
        loaded = fit(model, tensors.finish(on_disk, weights, read), read)
        # before anything is computed: joined and transposed tensors are not held twice
        on_disk.clear()
        if tensors.unused:
            loaded = with_unused(loaded, model, tensors.unused)
        check_decoded(loaded, written)
        if in_float32:
            loaded = widened(loaded, config.get("quantization") or {})
        # mlx-vlm's convert leaves "quantization" in the configuration of dequantised weights.
        if not any(name.endswith(".scales") for name in loaded):
            config = without("quantization")(config)
        return theirs(model, config, loaded, *args, **kwargs)

    with reading(
        read,
        sanitize_weights=sanitize_weights,
        load_model_weights=load_model_weights,
    ):
        if decoder_config(written) is None:
            check_rope(read, path)
        model: nn.Module = mlx_vlm.utils.load_model(path, **options)
    if not in_float32:
        keep_type(model)
    # mlx-vlm's LLaVA-NeXT drops the grids of its tiles
    if "image_grid_pinpoints" in read:
        model.config.image_grid_pinpoints = read["image_grid_pinpoints"]
    return model


def read_processor(path: Path, model: nn.Module, **options: Any) -> Any:
    """Read a processor, with mlx-vlm's detokeniser and image processor."""
    written = mlx_vlm.utils.load_config(path, **options)
    config = corrected(written)
    keeps = written.get("model_type") in KEEP_PROCESSOR
    model_type = str(written["model_type"] if keeps else config["model_type"])
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
        processor = with_stops(processor, detokenizer_of(folder), model.config)
    if images is not None and not _has_read(processor, type(images)):
        processor.image_processor = images
    PROCESSORS.get(str(get_model_type(config)), lambda *_: None)(processor, config)
    return processor


def detokenizer_of(folder: Path) -> Callable[..., Any]:
    """Return the class that mlx-vlm's ``load_tokenizer`` chooses, without parsing a vocabulary of tens of megabytes."""
    path = folder / "tokenizer.json"
    written = path.read_bytes() if path.exists() else b""
    found = _DECODER.search(written)
    if found is None:
        return _theirs_for(folder)
    part = written[found.end() : found.end() + MOST_DECODER_BYTES]
    decoder, _ = json.JSONDecoder().raw_decode(part.decode("utf-8", "ignore"))
    with TemporaryDirectory(prefix="vlm_batch-") as name:
        alone = json.dumps({"decoder": decoder})
        (Path(name) / path.name).write_text(alone, encoding="utf-8")
        return _theirs_for(Path(name))


def _theirs_for(folder: Path) -> Callable[..., Any]:
    found: Any = load_tokenizer(folder, return_tokenizer=False)
    return cast("Callable[..., Any]", found)


def _has_read(processor: Any, kind: type) -> bool:
    """Whether the folder gave an image processor of this class, and mlx-vlm would make one without its settings
    (utils.py:974)."""
    knows = "config" in inspect.signature(kind).parameters
    return not knows and type(vars(processor).get("image_processor")) is kind


# mlx-vlm's loader
# ---------------------------------------------------------------------------------------------------------------------


class _Replacements(threading.local):
    """Functions that replace mlx-vlm's on this thread, by name."""

    by_name: Mapping[str, Callable[..., Any]] = {}


_replacements = _Replacements()


@contextmanager
def reading(config: Config, **ours: Callable[..., Any]) -> Iterator[None]:
    """Have mlx-vlm's loader on this thread read ``config``, and call ``ours`` in place of its functions of these names.

    The first argument of each is the replaced function.
    """

    def get_model_and_args(
        theirs: Callable[..., Any], config: Config, model_path: Path | None = None
    ) -> Any:
        package = package_of(str(get_model_type(config)))
        if package is None:
            return theirs(config, model_path)
        return (package, get_model_type(config))

    ours |= {
        "load_config": lambda *_, **__: config,
        "get_model_and_args": get_model_and_args,
    }
    for name in ours:
        _hook(name)
    before, _replacements.by_name = _replacements.by_name, ours
    try:
        yield
    finally:
        _replacements.by_name = before


@cache
def _hook(name: str) -> None:
    """Bind a name of mlx-vlm's loader to the thread's function."""
    if name not in mlx_vlm.utils.load_model.__code__.co_names:
        raise LookupError(f"load_model of mlx-vlm does not call {name}")
    theirs = vars(mlx_vlm.utils)[name]

    @wraps(theirs)
    def either(*args: Any, **kwargs: Any) -> Any:
        ours = _replacements.by_name.get(name)
        if ours is None:
            return theirs(*args, **kwargs)
        return ours(theirs, *args, **kwargs)

    vars(mlx_vlm.utils)[name] = either


def with_unused(weights: Weights, model: nn.Module, prefix: str) -> Weights:
    """Fill in the parameters that no answer needs and the folder lacks."""
    filled: Weights = {}
    parameters: Weights = dict(tree_flatten(model.parameters()))
    for name, value in parameters.items():
        if name.startswith(prefix):
            filled[name] = mx.zeros(value.shape)
    return filled | weights


def widened(weights: Weights, layout: Mapping[str, Any]) -> Weights:
    """Return weights, those in few bits as float32, if at most ``MOST_WIDENED``."""
    layouts: dict[str, Mapping[str, Any]] = {}
    for tensor in weights:
        layer_name = tensor.removesuffix(".scales")
        if layer_name != tensor:
            layouts[layer_name] = _layout_of(layer_name, layout)
    if not all("bits" in layer for layer in layouts.values()):
        return weights
    count = 0
    for name, layer in layouts.items():
        count += weights[f"{name}.weight"].size * 32 // layer["bits"]
    if count > MOST_WIDENED:
        return weights
    kept = dict(weights)
    for name, layer in layouts.items():
        weight = mx.dequantize(
            kept[f"{name}.weight"],
            kept.pop(f"{name}.scales"),
            kept.pop(f"{name}.biases", None),
            group_size=layer.get("group_size"),
            bits=layer["bits"],
            mode=layer.get("mode", "affine"),
        )
        kept[f"{name}.weight"] = weight.astype(mx.float32)
    return kept


def _layout_of(layer: str, layout: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a layer's bits: its own, or those of all."""
    own = layout.get(layer)
    if isinstance(own, Mapping):
        return own
    return layout


def check_rope(config: Mapping[str, Any], path: Path) -> None:
    """Raise UnsupportedModel for position scaling that mlx-vlm's class does not read."""
    architecture, model_type = mlx_vlm.utils.get_model_and_args(dict(config), path)
    part, name = config, "ModelConfig"
    if config.get("text_config"):
        part, name = config["text_config"], "TextConfig"
    kinds = _kinds_of_positions(part)
    scaled = set(kinds.values()).difference(PLAIN_ROPE)
    if not scaled or name not in vars(architecture):
        return
    fields = inspect.signature(vars(architecture)[name]).parameters
    if fields.keys().isdisjoint(kinds) or model_type in PLAIN_ALONE:
        raise UnsupportedModel(
            f"this {model_type} model has {min(scaled)} positions, which mlx-vlm's class of it does not know"
        )


def _kinds_of_positions(part: Mapping[str, Any]) -> dict[str, str]:
    """Return the kinds of rotary positions, by the setting that says them."""
    found = {}
    for setting in ("rope_parameters", "rope_scaling"):
        said = part.get(setting)
        if isinstance(said, Mapping):
            found[setting] = said.get("rope_type", said.get("type", "default"))
    return found


def with_nested_towers(weights: Weights, model: nn.Module) -> Weights:
    """Insert ``vision_model`` in tensors' names where mlx-vlm has it."""
    there = set(map(str, dict(tree_flatten(model.parameters()))))
    renamed = {}
    for name, value in weights.items():
        nested = _nested(name)
        is_nested_there = name not in there and nested in there
        renamed[nested if is_nested_there else name] = value
    return renamed


def _nested(name: str) -> str:
    """Return a tensor's name with ``vision_model`` in it."""
    if ".vision_model." in name:
        return name
    inner = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    return inner[inner.find("vision_tower.") :]  # some have "model." before it


class TypedNorm(nn.RMSNorm):
    """A float32 norm that returns its input's type (modeling_qwen3_5.py, Qwen3_5RMSNorm); MLX's returns float32."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x).astype(x.dtype)


def keep_type(model: nn.Module) -> None:
    for _, module in model.named_modules():
        if type(module) is nn.RMSNorm and module.weight.dtype == mx.float32:
            module.__class__ = TypedNorm


# Files of processors
# ---------------------------------------------------------------------------------------------------------------------


def processor_error(folder: Path, config: Config, **options: Any) -> Exception | None:
    """Return the error of mlx-vlm's own processor; None if it has none or reads it.

    mlx-vlm hides it and falls back to transformers (models/base.py:675).
    """
    package = mlx_vlm.utils.get_model_and_args(config)[0].__name__
    error = None
    for kind in _processors_of(package):
        try:
            kind.from_pretrained(folder, **options)
        except Exception as raised:
            error = raised
    return error


def _processors_of(package: str) -> set[Any]:
    """Return the classes of processors in a package's modules."""
    kinds: set[Any] = set()
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{package}."):
            kinds.update(filter(_is_processor, vars(module).values()))
    return kinds


def _is_processor(value: Any) -> bool:
    if value is ProcessorMixin or not isinstance(value, type):
        return False
    return issubclass(value, ProcessorMixin)


@contextmanager
def older_processor_files(path: Path, model_type: str) -> Iterator[Path]:
    """Yield the folder with processor settings in transformers 4's files, which mlx-vlm reads.

    If files must change, it is a temporary folder with links.
    """
    files = _split_processor_files(path)
    config = json_object(path / "config.json")
    changed = config | {"model_type": model_type}
    if model_type not in CONFIG_MAPPING:
        # transformers' plain class raises for kinds of positions that it does not know
        changed.pop("rope_scaling", None)
    if changed != config:
        files["config.json"] = changed
    if not files:
        yield path
        return
    with TemporaryDirectory(prefix="vlm_batch-") as name:
        folder = Path(name)
        linked = set(path.iterdir()).difference(path.glob("*.safetensors"))
        for item in linked:
            if item.name not in files:
                (folder / item.name).symlink_to(item.resolve())
        for file_name, settings in files.items():
            (folder / file_name).write_text(json.dumps(settings), encoding="utf-8")
        yield folder


def _split_processor_files(path: Path) -> dict[str, Config]:
    """Return the files of transformers 4 that processor_config.json has together, and the folder has not."""
    together = json_object(path / "processor_config.json")
    kept: Config = {}
    if "processor_class" in together:
        kept["processor_class"] = together["processor_class"]
    found = {}
    for name, part in OLDER_FILES.items():
        settings = together.get(part)
        if isinstance(settings, dict) and not (path / name).exists():
            found[name] = {**kept, **settings}
    return found
