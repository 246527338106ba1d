"""Finds settings of config.json that mlx-vlm's classes never read, and refuses those that would change an answer.

A setting counts if transformers' class of the same type derives something else with it than without it, and its model reads
that while it runs. It is served if mlx-vlm derives something from it that the model's code or the family's adapter reads:
what is read is recorded while the model is built, and found in the code that runs later. So nothing is listed here but names
whose values the tensors' shapes say (``SHAPES``), and what no answer depends on (``NO_EFFECT``).
"""

from __future__ import annotations

import ast
import copy
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import mlx.nn as nn
import mlx_vlm.utils
from transformers import CONFIG_MAPPING, PreTrainedConfig

from vlm_batch.errors import UnsupportedModel
from vlm_batch.models._applied import SCALED, activate, scale_positions, scaling_of, slide, without_scaling
from vlm_batch.models._layouts import FIXED, TENSORS, corrected
from vlm_batch.models._rules import Config, Tensors

#: What transformers' models read through its own library.
SHARED = frozenset({"attention_chunk_size"})
#: Widths and numbers of layers: with another value a tensor would not fit.
SHAPES = re.compile(
    r"(hidden|intermediate|projection|vocab|encoder_hidden|text_hidden|projection_hidden)_(size|dim)|projection_dim"
    r"|num_hidden_layers|vocab_size_per_layer_input|vision_use_head|pos_emb_(height|width)|cross_attention_frequency"
    r"|max_position_embeddings|ple_layer_ids|head_dim|image_size|.*bias"
)
#: Words' ids, of which the processor and the adapter know; what training reads; types of numbers; what others look after.
NO_EFFECT = re.compile(
    r"_.*|.*(token_ids?|token_index|start_id|end_id|newline_id)|.*(drop|loss|noise|jitter|initializer|init_std).*"
    r"|(torch_)?dtype|architectures|transformers_version|model_type|use_cache|output_.*|return_dict.*|quantization_config"
    r"|tie_word_embeddings|rope_.*|partial_rotary_factor|(use_)?sliding_window|max_window_layers|layer_types"
    r"|image_grid_pinpoints|pretraining_tp|chunk_size_feed_forward|problem_type|num_labels"
)


class Watch:
    """The configuration objects of one model that mlx-vlm's loader builds, and which of their attributes are read."""

    def __init__(self) -> None:
        self.objects: dict[int, tuple[str, Any]] = {}
        self._read: set[tuple[int, str]] = set()

    def configs(self, theirs: Callable[..., Any], config: Any, *args: Any) -> Any:
        """In the place of the last function that mlx-vlm's loader calls before it builds the model."""
        found = theirs(config, *args)
        self.objects = {id(one): (path, one) for path, one in objects_of(found)}
        for _, one in self.objects.values():
            one.__class__ = _watched(type(one), self._read)
        return found

    def end(self) -> None:
        """Let the configurations be as they were."""
        for _, one in self.objects.values():
            one.__class__ = type(one).__mro__[1]

    def reads(self, model: nn.Module, model_type: str, adapter: type) -> Callable[[tuple[str, str]], bool]:
        """Return a test: whether an attribute (path, name) was read while the model was built, or is in code that runs later.

        That is the model's, its adapter's, and what puts its tensors."""
        while_built = {(path, name) for at, (path, _) in self.objects.items() for one, name in self._read if one == at}
        tensors = TENSORS.get(model_type, Tensors())
        later = set(names_in(adapter))
        for rule in (tensors.change, tensors.finish):
            later |= names_of(rule.__code__)
        for _, module in model.named_modules():
            if any(id(value) in self.objects for value in vars(module).values()):
                later |= names_in(module.__class__)
        return lambda place: place in while_built or place[1] in later


def _watched(kind: type, read: set[tuple[int, str]]) -> type:
    def get(self: Any, name: str) -> Any:
        read.add((id(self), name))
        return kind.__getattribute__(self, name)  # type: ignore[call-arg]

    return type(kind.__name__, (kind,), {"__getattribute__": get, "__module__": kind.__module__})


@cache
def names_in(kind: Any) -> frozenset[str]:
    """The names that a class's functions use, its own and those that it inherits from files beside it; not to build or load."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__ in ("builtins", "vlm_batch.adapters.base") or base.__module__.startswith("mlx."):
            continue
        for value in vars(base).values():
            value = getattr(value, "fget", value)
            value = getattr(value, "func", value)
            if isinstance(value, FunctionType) and value.__name__ not in ("__init__", "sanitize"):
                found |= names_of(value.__code__)
    return frozenset(found)


def names_of(code: CodeType) -> set[str]:
    """The names and short texts in code, functions within it included."""
    found = set(code.co_names)
    for one in code.co_consts:
        if isinstance(one, CodeType):
            found |= names_of(one)
        elif isinstance(one, str):
            found.add(one)
    return found


def objects_of(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A configuration object and those within it, with their paths."""
    yield path, config
    for name, value in vars(config).items():
        if name.endswith("_config") and hasattr(value, "__dict__"):
            yield from objects_of(value, f"{path}.{name}" if path else name)


# What mlx-vlm derives
# ---------------------------------------------------------------------------------------------------------------------


def built(corrected_config: Config) -> dict[tuple[str, str], str]:
    """The attributes of the configuration objects that mlx-vlm's loader would make, as texts, by (path, name)."""
    read = copy.deepcopy(corrected_config)
    package, _ = mlx_vlm.utils.get_model_and_args(config=read)
    read.setdefault("text_config", read.pop("llm_config", {}))
    for name in ("vision_config", "audio_config"):
        read.setdefault(name, {})
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    found = mlx_vlm.utils.update_module_configs(package.ModelConfig.from_dict(read), package, read, parts)
    return {
        (path, name): repr(value)
        for path, one in objects_of(found)
        for name, value in vars(one).items()
        if not (name.endswith("_config") and hasattr(value, "__dict__"))
    }


def readable(config: Config) -> Config:
    """A configuration for mlx-vlm's classes, with plain positions where these refuse its own: they are scaled later."""
    read, text = corrected(config), text_of(config)
    rope = getattr(text, "rope_parameters", None) or {}
    try:
        built(read)
        is_refused = rope.get("rope_type") == "dynamic" and "alpha" not in rope
    except ValueError:
        is_refused = True
    if not is_refused or rope.get("rope_type") not in SCALED | {"dynamic"}:
        return read
    plain = without_scaling(read)
    parts = {name: plain[name] for name in ("text_config", "llm_config") if plain.get(name)}
    return plain | {name: without_scaling(part) for name, part in parts.items()}


def other(value: Any) -> Any:
    """Another value of a setting, of its type."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return 2 * value + 1
    if isinstance(value, str):
        return f"{value}x"
    return [other(one) for one in value] if isinstance(value, list) else {}


# What transformers derives
# ---------------------------------------------------------------------------------------------------------------------


@cache
def forward_reads(folder: Path) -> frozenset[str]:
    """The settings that a model of transformers' reads, but to draw weights: names behind "config" in its source."""
    found = set(SHARED)
    for path in folder.glob("modeling_*.py"):
        todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.FunctionDef) and node.name == "_init_weights":
                continue
            todo += ast.iter_child_nodes(node)
            if isinstance(node, ast.FunctionDef) and "merge_with_config_defaults" in map(
                ast.unparse, node.decorator_list
            ):
                found |= {argument.arg for argument in node.args.args}
            elif isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                if name.endswith("config"):
                    found.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
                found.add(str(getattr(node.args[1], "value", "")))
    return frozenset(found)


def read_in(kind: type) -> frozenset[str]:
    return forward_reads(Path(str(sys.modules[kind.__module__].__file__)).parent)


def text_of(config: Config) -> Any:
    """The decoder's configuration as transformers has it; None where it has no class of it."""
    for _, root in roots(config):
        try:
            with _quiet():
                return whole_of(CONFIG_MAPPING[root["model_type"]], root).get_text_config(decoder=True)
        except Exception:
            return None
    return None


def whole_of(kind: Any, config: Config) -> Any:
    """transformers' class of a configuration as it lies in a file, where infinity is a mapping."""
    return kind.from_dict(kind._decode_special_floats(copy.deepcopy(config)))


def derived(kind: type, config: Config) -> dict[tuple[type, str, str], str]:
    """Return what transformers' class has of a configuration, as texts, by (class, path, name)."""
    todo: list[tuple[str, Any]] = [("", whole_of(kind, config))]
    found = {}
    while todo:
        path, one = todo.pop()
        for name, value in vars(one).items():
            if isinstance(value, PreTrainedConfig):
                todo.append((f"{path}.{name}", value))
            elif not name.startswith("_"):
                found[type(one), path, name] = repr(value)
    return found


# The check
# ---------------------------------------------------------------------------------------------------------------------


def roots(config: Config, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Config]]:
    """The configuration, or else the parts of it, of which transformers has a class."""
    if config.get("model_type") in CONFIG_MAPPING:
        yield path, config
        return
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            yield from roots(dict(value), (*path, name))


def settings_of(config: Config, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The settings of a configuration and of its parts that may have an effect, by their paths."""
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            if name not in ("quantization_config", "generation_config"):
                yield from settings_of(dict(value), (*path, name))
        elif not NO_EFFECT.fullmatch(name) and not SHAPES.fullmatch(name) and value is not None:
            yield (*path, name), value


def changed(config: Config, path: tuple[str, ...], change: Callable[[Config], Config]) -> Config:
    """A configuration with a change of the part that has the path's last name."""
    if len(path) == 1:
        return change(config)
    return config | {path[0]: changed(config[path[0]], path[1:], change)}


def counts(kind: type, config: Config, path: tuple[str, ...], whole: Mapping[tuple[type, str, str], str]) -> bool:
    """Whether a setting makes transformers' model compute something else than the same configuration without it."""
    try:
        without = derived(kind, changed(config, path, lambda part: {k: v for k, v in part.items() if k != path[-1]}))
    except Exception:  # what cannot be left out agrees with others
        return False
    moved = [place for place in whole.keys() | without.keys() if whole.get(place) != without.get(place)]
    return any(name in read_in(one) | read_in(kind) for one, _, name in moved)


def is_served(
    config: Config,
    path: tuple[str, ...],
    base: Mapping[tuple[str, str], str],
    is_read: Callable[[tuple[str, str]], bool],
) -> bool:
    """Whether mlx-vlm's model reads what follows from a setting. A value that its configuration refuses is read by that."""
    try:
        moved = built(readable(changed(config, path, lambda part: part | {path[-1]: other(part[path[-1]])})))
    except Exception:
        return True
    return any(is_read(place) for place in base.keys() | moved.keys() if base.get(place) != moved.get(place))


def unread(config: Config, is_read: Callable[[tuple[str, str]], bool]) -> dict[tuple[str, ...], Any]:
    """The settings of a configuration, as it lies in its file, that count and are not served."""
    found = {}
    base = built(readable(config))
    with _quiet():
        for path, root in roots(config):
            kind = CONFIG_MAPPING[root["model_type"]]
            try:
                whole = derived(kind, root)
            except Exception:  # a file that transformers' class does not take says nothing about it
                continue
            for inner, value in settings_of(root):
                if counts(kind, root, inner, whole) and not is_served(config, path + inner, base, is_read):
                    found[path + inner] = value
    return found


def serve_settings(model: Any, config: Config, watch: Watch, adapter: type) -> None:
    """Give a model what its configuration, as it lies in its file, says beyond what mlx-vlm's classes and the adapter read.

    Raises UnsupportedModel, which names a setting that would be passed over.
    """
    model_type = str(mlx_vlm.utils.get_model_type(corrected(config)))
    text = text_of(config)
    if text is not None:
        scaling = scaling_of(text)
        if scaling is not None and not scale_positions(model.language_model, scaling, text.max_position_embeddings):
            kind = scaling["rope_type"]
            raise UnsupportedModel(
                f"this {model_type} model has {kind} positions, which mlx-vlm's class of it does not know"
            )
        slide(model, text)
    said = {".".join(path): value for path, value in settings_of(config)}
    found = unread(config, watch.reads(model, model_type, adapter))
    found |= {tuple(name.split(".")): said[name] for kind, name in FIXED if kind == model_type and name in said}
    for path, value in found.items():
        name = ".".join(path)
        twin = name.removeprefix("text_config.") if len(path) > 1 else f"text_config.{name}"
        if twin != name and twin in said and said[twin] == value and tuple(twin.split(".")) not in found:
            continue  # transformers 4.52 to 4.56 write the text's settings twice, of which one is read
        fixed = FIXED.get((model_type, name), ())
        if value not in fixed and not activate(model, path, value):
            served = f"; it computes {' or '.join(map(repr, fixed))}" if fixed else ""
            raise UnsupportedModel(
                f"config.json says {name}: {json.dumps(value)}, which mlx-vlm's {model_type} never reads{served}"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """No word of transformers' about configurations that nobody uses."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
