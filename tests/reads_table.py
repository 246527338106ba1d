"""Which settings mlx-vlm and transformers read: ``python -m tests.reads_table`` makes vlm_batch/data/reads.json of their code.

A model of each kind is built without weights, of every configuration that lies in this project and of transformers' own
classes, and what it reads of its configuration is noted. What a model reads later, and what transformers' models read, is
taken from their code. Nothing of this happens when a checkpoint is loaded: ``vlm_batch/runtime/upstream.py`` has the table.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import inspect
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

import mlx.nn as nn
import mlx_vlm
import mlx_vlm.utils
import transformers
from transformers import CONFIG_MAPPING

from tests import checkpoints
from tests.variants import FOLDER as VARIANTS
from tests.zoo import FAMILIES, TinyFamily
from vlm_batch.models import package_of, spec_for
from vlm_batch.models._derived import readable, without_warnings
from vlm_batch.models._layouts import corrected
from vlm_batch.models._reads import config_objects, is_part
from vlm_batch.models._rules import Config, Tensors
from vlm_batch.models._tensors import TENSORS

#: The packages' folders.
MLX_VLM, TRANSFORMERS = (
    Path(str(package.__file__)).parent for package in (mlx_vlm, transformers)
)
TABLE = Path(__file__).parent.parent / "vlm_batch" / "data" / "reads.json"
#: mlx-vlm's folders of models and of drafters.
MODELS, DRAFTERS = MLX_VLM / "models", MLX_VLM / "speculative" / "drafters"
#: A part of transformers' code in models whose layers all slide if there is a window and no ``layer_types``.
ALL_LAYERS_SLIDE = "config.sliding_window is None"
#: A mark of a picture, video or sound in the code of a processor.
MARK = re.compile(
    r"(?i)[<\[(◁][^\s]*(image|img|im_patch|video|vision|audio|media|patch|frame)[^\s]*[>\])▷]"
)
#: Parts of a model that have a configuration of their own in mlx-vlm (utils.py, load_model).
PARTS = ["text", "vision", "perceiver", "projector", "audio"]
#: Layers that are enough to read what all layers read.
MOST_LAYERS = 4


# What mlx-vlm's models read
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Reads:
    """What the models of one type read of their configuration.

    Attributes:
        named: Attributes by the path of their part ("" for the whole).
        later: Names that code can read of any part after the model was built.
        activations: Activations that the code names.
    """

    named: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    later: set[str] = field(default_factory=set)
    activations: set[str] = field(default_factory=set)

    def as_json(self) -> dict[str, Any]:
        named = {path: sorted(names) for path, names in sorted(self.named.items())}
        return {
            "named": {path: names for path, names in named.items() if names},
            "later": sorted(self.later),
            "activations": sorted(self.activations),
        }


def reads_of_mlx_vlm(only: Container[str] | None = None) -> dict[str, Reads]:
    """Return what the models of each type read, or of some."""
    found: dict[str, Reads] = defaultdict(Reads)
    for model_type, config in configurations(only):
        built = built_of(config)
        if built is not None:
            note(found[model_type], model_type, *built)
    for name, tiny in FAMILIES.items():
        if only is None or name in only:
            note_tiny(found, tiny)
    for package in packages(MODELS):
        if package in found or (only is not None and package not in only):
            continue
        reads = reads_of_code(package)
        if reads is not None:
            found[package] = reads
    return dict(found)


def note_tiny(found: dict[str, Reads], tiny: TinyFamily) -> None:
    """Add what a tiny model of the zoo reads."""
    with noted() as models:
        tiny.build()
    for model, made, read in models:
        model_type = str(made.model_type)
        note(found[model_type], model_type, model, made, read)


def reads_of_code(package: str) -> Reads | None:
    """Return what the code of a package names, if no model of it was built; None if it has no configuration."""
    module = import_module(f"mlx_vlm.models.{package}")
    if "ModelConfig" not in vars(module):
        return None
    loaded = [
        part
        for name, part in list(sys.modules.items())
        if name.startswith(f"{module.__name__}.")
    ]
    kinds = {
        kind
        for part in (module, *loaded)
        for kind in vars(part).values()
        if isinstance(kind, type) and issubclass(kind, nn.Module)
    }
    code = {one for kind in kinds for one in class_code(kind, constructors=True)}
    settings = set(inspect.signature(module.ModelConfig).parameters)
    names = {name for one in code for name in one.co_names}
    return Reads(later=names & settings, activations=_strings(code) & activations())


def packages(folder: Path) -> list[str]:
    """Return the packages of a folder."""
    return sorted(path.parent.name for path in folder.glob("*/__init__.py"))


def configurations(
    only: Container[str] | None = None,
) -> Iterator[tuple[str, Config]]:
    """Yield (model type as mlx-vlm reads it, config.json)."""
    written = [
        checkpoints.layout(name)["files"]["config.json"] for name in checkpoints.names()
    ]
    written += [checkpoints.older(config) for config in written]
    written += [_read(path)["config"] for path in sorted(VARIANTS.glob("*.json"))]
    for name in sorted(CONFIG_MAPPING):
        if only is None or name in only:
            config = of_class(name)
            if config is not None:
                written.append(config)
    for config in written:
        model_type = _type_of(config)
        if model_type is not None and (only is None or model_type in only):
            yield model_type, config


def _type_of(config: Config) -> str | None:
    """Return the package of mlx-vlm that a configuration is for, if there is one."""
    try:
        model_type = str(mlx_vlm.utils.get_model_type(corrected(config)))
    except Exception:  # a kind that is refused by name
        return None
    return model_type if (MODELS / model_type).is_dir() else None


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def of_class(model_type: str) -> Config | None:
    """Return what transformers' class without arguments saves, with few layers."""
    try:
        with without_warnings():
            config: Config = CONFIG_MAPPING[model_type]().to_dict()
    except Exception:  # a class that needs arguments
        return None
    return None if _type_of(config) is None else _cut(config)


def _cut(config: Config) -> Config:
    """Return a configuration with few layers."""
    found: Config = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found[name] = _cut(dict(value))
        elif name in ("num_hidden_layers", "depth", "n_layers") and value:
            found[name] = min(value, MOST_LAYERS)
        else:
            found[name] = value
    return found


def built_of(config: Config) -> Built | None:
    """Build a model without weights: the model, its configuration, and what it read."""
    try:
        with without_warnings():
            read = readable(copy.deepcopy(config))
            model_type = str(mlx_vlm.utils.get_model_type(read))
            package = (
                package_of(model_type) or mlx_vlm.utils.get_model_and_args(read)[0]
            )
            read.setdefault("text_config", read.pop("llm_config", {}))
            for name in ("vision_config", "audio_config"):
                read.setdefault(name, {})
            made = mlx_vlm.utils.update_module_configs(
                package.ModelConfig.from_dict(read), package, read, PARTS
            )
            watch = Watch(made)
            return package.Model(made), made, watch.end()
    except Exception:  # a configuration that mlx-vlm's class does not take
        return None


class Watch:
    """Notes what is read of a configuration and its parts."""

    def __init__(self, config: Any) -> None:
        self._objects = [(path, part) for path, part in config_objects(config)]
        self._read: set[tuple[int, str]] = set()  # (id, attribute)
        for _, part in self._objects:
            part.__class__ = _watched(type(part), self._read)

    def end(self) -> set[tuple[str, str]]:
        """Return (path, attribute) of what was read since."""
        for _, part in self._objects:
            part.__class__ = type(part).__mro__[1]
        paths = {id(part): path for path, part in self._objects}
        return {(paths[owner], name) for owner, name in self._read if owner in paths}


def _watched(kind: type, read: set[tuple[int, str]]) -> type:
    """Make a subclass that notes every access in ``read``."""

    def get(self: Any, name: str) -> Any:
        read.add((id(self), name))
        return kind.__getattribute__(self, name)  # type: ignore[call-arg]

    return type(
        kind.__name__, (kind,), {"__getattribute__": get, "__module__": kind.__module__}
    )


Built = tuple[nn.Module, Any, set[tuple[str, str]]]


@contextmanager
def noted() -> Iterator[list[Built]]:
    """Yield a list that fills with what is built in the block: (model, configuration, what was read of it)."""
    found: list[Built] = []

    def noting(theirs: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            watch = Watch(config)
            theirs(self, config, *args, **kwargs)
            found.append((self, config, watch.end()))

        return init

    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            kind = vars(module).get("Model")
            is_package = name.startswith("mlx_vlm.models.") and name.count(".") == 2
            if is_package and isinstance(kind, type) and "__init__" in vars(kind):
                patches.enter_context(
                    mock.patch.object(kind, "__init__", noting(kind.__init__))  # type: ignore[misc]
                )
        yield found


def note(
    reads: Reads,
    model_type: str,
    model: nn.Module,
    config: Any,
    while_built: Iterable[tuple[str, str]],
) -> None:
    """Add what one model reads."""
    parts = dict(config_objects(config))
    attributes = {
        path: {name for name, value in vars(part).items() if not is_part(name, value)}
        for path, part in parts.items()
    }
    for path, name in while_built:
        if name in attributes[path]:
            reads.named[path].add(name)
    everywhere: set[CodeType] = set()
    later: set[CodeType] = set()
    built: set[CodeType] = set()
    kept = {id(part) for part in parts.values()}
    for _, module in model.named_modules():
        code = class_code(type(module))  # type: ignore[arg-type]
        everywhere |= code
        built |= class_code(type(module), constructors=True)  # type: ignore[arg-type]
        if any(id(value) in kept for value in vars(module).values()):
            later |= code
    later |= _own_code(model_type)
    names = {name for code in later for name in code.co_names} | _strings(later)
    reads.later |= names & set().union(*attributes.values())
    reads.activations |= _strings(everywhere) & activations()
    # A branch that no configuration here took: known by its name, if one part alone has it.
    times = Counter(name for names in attributes.values() for name in names)
    named = {name for code in built for name in code.co_names}
    for path, names in attributes.items():
        reads.named[path] |= {name for name in names & named if times[name] == 1}


def _own_code(model_type: str) -> frozenset[CodeType]:
    """Return the code of a family's adapter and of what corrects its tensors."""
    spec = spec_for(model_type)
    adapter = object if spec is None or spec.adapter is None else spec.adapter
    tensors = TENSORS.get(model_type, Tensors())
    functions: tuple[Any, ...] = (tensors.change, tensors.finish)
    return class_code(adapter).union(  # type: ignore[arg-type]
        *(_with_inner(function.__code__) for function in functions)
    )


@cache
def activations() -> frozenset[str]:
    """Return transformers' names of activations."""
    for node in ast.walk(_tree(TRANSFORMERS / "activations.py")):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ACT2CLS":
            assert isinstance(node.value, ast.Dict)
            return frozenset(
                str(ast.literal_eval(key)) for key in node.value.keys if key
            )
    raise LookupError("transformers/activations.py names no activations")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def class_code(kind: Hashable, *, constructors: bool = False) -> frozenset[CodeType]:
    """Return the code of a class's functions, also inherited."""
    found: set[CodeType] = set()
    left_out = () if constructors else ("__init__", "sanitize")
    for base in kind.__mro__:  # type: ignore[attr-defined]
        if base.__module__ in ("builtins", "vlm_batch.adapters.base"):
            continue
        if base.__module__.startswith("mlx."):
            continue
        for value in vars(base).values():
            function = getattr(value, "fget", value)  # a property's
            function = getattr(function, "func", function)  # a cached property's
            if isinstance(function, FunctionType) and function.__name__ not in left_out:
                found |= _with_inner(function.__code__)
    return frozenset(found)


def _with_inner(code: CodeType) -> frozenset[CodeType]:
    return frozenset({code}).union(
        *(_with_inner(inner) for inner in code.co_consts if isinstance(inner, CodeType))
    )


def _strings(codes: Iterable[CodeType]) -> set[str]:
    return {
        constant
        for code in codes
        for constant in code.co_consts
        if isinstance(constant, str)
    }


# What transformers' models read
# ---------------------------------------------------------------------------------------------------------------------


def reads_of_transformers() -> dict[str, list[str]]:
    """Return the settings that the models of each folder of transformers read."""
    folders = sorted((TRANSFORMERS / "models").iterdir())
    found = {folder.name: sorted(read_in(folder)) for folder in folders}
    return {name: names for name, names in found.items() if names}


def read_in(folder: Path) -> set[str]:
    """Return the settings that a folder's models read."""
    names: set[str] = set()
    for path in sorted(folder.glob("modeling_*.py")):
        names |= _names_read_in(_tree(path))
    return names


def _names_read_in(tree: ast.Module) -> set[str]:
    """Collect ``config.NAME``, ``getattr(config, NAME)`` and merged arguments."""
    found: set[str] = set()
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef) and node.name == "_init_weights":
            continue
        todo += ast.iter_child_nodes(node)
        found |= _names_read(node)
    return found


def _names_read(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef):
        decorators = map(ast.unparse, node.decorator_list)
        if "merge_with_config_defaults" not in decorators:
            return set()
        return {argument.arg for argument in node.args.args}
    if isinstance(node, ast.Attribute):
        owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
        return {node.attr} if owner.endswith("config") else set()
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "getattr":
        return set()
    name = getattr(node.args[1], "value", None) if len(node.args) > 1 else None
    return {name} if isinstance(name, str) else set()


def folders_that_slide() -> list[str]:
    """Return the folders of transformers whose models have ``ALL_LAYERS_SLIDE``."""
    files = sorted((TRANSFORMERS / "models").glob("*/modeling_*.py"))
    found = [file for file in files if ALL_LAYERS_SLIDE in file.read_text("utf-8")]
    return sorted({file.parent.name for file in found})


# Packages, and marks of media
# ---------------------------------------------------------------------------------------------------------------------


def knows_pictures(folder: Path) -> bool:
    """Whether a package's code mentions vision."""
    for file in sorted(folder.rglob("*.py")):
        mentions = "vision" in file.read_text(encoding="utf-8").lower()
        if mentions and any("vision" in name.lower() for name in _names(_tree(file))):
            return True
    return False


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        for attribute in ("id", "attr", "arg", "name", "module"):
            if isinstance(name := vars(node).get(attribute), str):
                yield name


def marks() -> dict[str, list[str]]:
    """Return the marks of media that the code of processors has, some as patterns.

    A folder of models has those of its files of processors, a module beside them has its own.
    """
    found: dict[str, list[str]] = {}
    for package in (mlx_vlm, transformers):
        root = Path(str(package.__file__)).parent
        for file in sorted((root / "models").rglob("*.py")):
            module = ".".join((package.__name__, *file.relative_to(root).parts))
            name = module.removesuffix(".py").removesuffix(".__init__")
            if "process" in file.stem:
                name = name.rpartition(".")[0]
            if marked := marks_in(file):
                found[name] = sorted(marked.union(found.get(name, ())))
    return found


@cache
def marks_in(file: Path) -> frozenset[str]:
    """Return the texts of a file that are marks, as they stand in the code."""
    constants = (
        node.value for node in ast.walk(_tree(file)) if isinstance(node, ast.Constant)
    )
    texts = {text.strip() for text in constants if isinstance(text, str)}
    return frozenset(text for text in texts if MARK.fullmatch(text))


# The table
# ---------------------------------------------------------------------------------------------------------------------


def digests() -> dict[str, str]:
    """Return a digest of each package's code that the table is made of."""
    found = {}
    for package in (mlx_vlm, transformers):
        root = Path(str(package.__file__)).parent
        digest = hashlib.sha256()
        for file in sorted((root / "models").rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
        found[package.__name__] = digest.hexdigest()
    return found


def of_mlx_vlm() -> dict[str, Any]:
    """Return what the table says of mlx-vlm."""
    models, drafters = packages(MODELS), packages(DRAFTERS)
    reads = reads_of_mlx_vlm()
    return {
        "version": version("mlx-vlm"),
        "drafters": [name for name in drafters if name not in models],
        "without_pictures": [
            name for name in models if not knows_pictures(MODELS / name)
        ],
        "models": {name: reads[name].as_json() for name in sorted(reads)},
    }


def of_transformers() -> dict[str, Any]:
    """Return what the table says of transformers."""
    return {
        "version": version("transformers"),
        "all_layers_slide": folders_that_slide(),
        "models": reads_of_transformers(),
    }


def made() -> dict[str, Any]:
    """Return the table."""
    return {
        "digests": digests(),
        "marks": marks(),
        "mlx_vlm": of_mlx_vlm(),
        "transformers": of_transformers(),
    }


def as_text(table: Mapping[str, Any]) -> str:
    """Return the table as JSON, with a line for each entry of its parts."""
    parts = [
        f"{json.dumps(name)}: {_lines(part, deep=name in ('mlx_vlm', 'transformers'))}"
        for name, part in table.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(part: Mapping[str, Any], *, deep: bool) -> str:
    lines = []
    for name, value in part.items():
        is_mapping = deep and isinstance(value, Mapping)
        text = (
            _lines(value, deep=False)
            if is_mapping
            else json.dumps(value, ensure_ascii=False)
        )
        lines.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def main() -> None:
    TABLE.write_text(as_text(made()), encoding="utf-8")


if __name__ == "__main__":
    main()
