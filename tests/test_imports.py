"""Imports point one way, and what the style asks for of the package's names and attributes."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import mlx_vlm.models
import pytest

import vlm_batch
from vlm_batch.models import families

PACKAGE = Path(vlm_batch.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

#: The rooms by floor, lowest first: a file imports from floors below its room's, and from its own room.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("_version", "advice", "errors", "arrays", "runtime", "assets"),
    ("checks", "records"),
    ("parameters", "schemas"),
    ("types", "registry", "policy"),
    ("handle", "progress"),
    ("many",),
    ("caches",),
    ("store",),
    ("inputs",),
    ("adapters",),
    ("models", "engine"),
    ("proofs",),
    ("loading",),
    ("batcher",),
    ("integrations", "jobs"),
    ("server",),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

#: The rooms that families are made of and run in: none of them knows one.
TOOLKIT = tuple(
    path
    for room in (
        "runtime",
        "caches",
        "store",
        "inputs",
        "adapters",
        "engine",
        "proofs",
    )
    for path in (PACKAGE / room).rglob("*.py")
)
MODELS = tuple(
    path
    for path in sorted((PACKAGE / "models").glob("*.py"))
    if path.stem != "__init__"
)
#: CUDA's kernels, and what spares MLX kernels and plans there.
CUDA = PACKAGE / "adapters" / "cuda"
#: Lines of a function that fits on a screen, and of a ``patches`` with classes in it: longer ones stand in models/_<family>.py.
MAX_LINES, MAX_PATCHES_LINES = 95, 35


def unit(path: Path) -> str:
    """The room that a file belongs to: its folder, or its own name."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    """The rooms that a file imports from, other than for its annotations."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= (
                {f"vlm_batch.{alias.name}" for alias in node.names}
                if node.module == "vlm_batch"
                else {node.module}
            )
    return {name.split(".")[1] for name in names if name.startswith("vlm_batch.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    here = unit(path)
    if here == "__init__":  # the package's own names
        return
    assert here in FLOOR, (
        f"{path.name} is in no room; say where it stands in FLOORS and in docs/architecture.md"
    )
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for there in imported(tree) - {here}:
        assert FLOOR[there] < FLOOR[here], (
            f"{here} imports {there}, which is no floor below it"
        )


#: Files of models/ that hold facts of many families.
TABLES = {
    "_applied",
    "_derived",
    "_fitting",
    "_layouts",
    "_reads",
    "_refused",
    "_rules",
    "_settings",
    "_tensors",
}


def belongs_to(stem: str, family: str) -> bool:
    """Whether a file models/_<family>.py, or _<family>_<part>.py, is that family's."""
    return stem == f"_{family}" or stem.startswith(f"_{family}_")


def imports_from(path: Path) -> list[tuple[str, str]]:
    """What a file imports by ``from module import name``, wherever it stands: (module, name)."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [
        (node.module or "", alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


def functions(path: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def num_lines(node: ast.FunctionDef) -> int:
    """Lines of a function; of a constructor without its signature, whose options stand one a line."""
    return (
        int(node.end_lineno or 0)
        - (node.body[0].lineno if node.name == "__init__" else node.lineno)
        + 1
    )


@pytest.mark.parametrize(
    "path",
    [path for path in MODELS if path.stem not in TABLES],
    ids=lambda path: path.name,
)
def test_families_take_classes_from_each_other_and_nothing_else(path: Path) -> None:
    """Subclassing another family's adapter is fine; a function that two families need belongs into adapters/."""
    for module, name in imports_from(path):
        if not module.startswith("vlm_batch.models"):
            continue
        assert module.count(".") == 2, (
            f"{path.name}: say the file that {name} comes from"
        )
        other = module.rpartition(".")[2]
        if belongs_to(path.stem, other):
            continue
        if other.startswith("_"):
            assert belongs_to(other, path.stem), (
                f"{path.name} imports {other}.py, which is another family's alone"
            )
            continue
        tree = ast.parse(
            (PACKAGE / "models" / f"{other}.py").read_text(encoding="utf-8")
        )
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        assert name in classes, (
            f"{path.name} imports {name} from {other}.py: only classes; functions go to adapters/"
        )


def test_a_family_is_one_file_named_after_it() -> None:
    found = {
        spec.family: spec.adapter.__module__.rpartition(".")[2]
        for spec in families()
        if spec.adapter is not None
    }
    assert found == {family: family for family in found}
    assert set(found) == {path.stem for path in MODELS if not path.stem.startswith("_")}
    own = {path.stem for path in MODELS if path.stem.startswith("_")} - TABLES
    assert all(any(belongs_to(stem, family) for family in found) for stem in own), (
        "models/_<family>.py is a family's"
    )


@pytest.mark.parametrize(
    "path", TOOLKIT, ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_the_toolkit_knows_no_family(path: Path) -> None:
    """Of mlx-vlm's models it imports what all of them share: files of ``mlx_vlm.models``, no model's folder."""
    for module, name in imports_from(path):
        assert not module.startswith("vlm_batch.models"), (
            f"{path.name} imports {module}"
        )
        if module.startswith("mlx_vlm.models"):
            whole = (
                f"{module}.{name}"
                if module == "mlx_vlm.models"
                else ".".join(module.split(".")[:3])
            )
            spec = find_spec(whole)
            assert spec is not None and spec.submodule_search_locations is None, (
                f"{path.name} imports {whole}"
            )


def modules_after(code: str) -> list[str]:
    """The modules that a fresh interpreter has imported after some code."""
    code += "\nimport sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.split()


def test_importing_the_toolkit_imports_no_family() -> None:
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in TOOLKIT
    ]
    found = modules_after(
        "".join(f"import {name.removesuffix('.__init__')}\n" for name in names)
    )
    assert "vlm_batch.adapters.base" in found
    assert not [name for name in found if name.startswith("vlm_batch.models")]


def test_finding_the_families_imports_no_model() -> None:
    """Neither what replaces mlx-vlm's modules nor mlx-vlm's models: those of one family, when it is adapted."""
    found = modules_after("import vlm_batch.models; vlm_batch.models.families()")
    assert "vlm_batch.models.qwen2_vl" in found
    assert not [name for name in found if name.startswith("vlm_batch.models._")]
    families_upstream = {
        path.parent.name
        for path in Path(mlx_vlm.models.__file__).parent.glob("*/__init__.py")
    }
    assert not families_upstream & {
        name.split(".")[2] for name in found if name.startswith("mlx_vlm.models.")
    }


def test_importing_the_engine_loads_no_table_library_and_nothing_above_it() -> None:
    found = modules_after(
        "import vlm_batch; vlm_batch.VLMBatcher; import vlm_batch.loading"
    )
    assert "vlm_batch.engine.generator" in found
    assert not {"datasets", "pyarrow", "pandas", "polars"} & set(found)
    above = {
        room for floor in FLOORS[FLOORS.index(("batcher",)) + 1 :] for room in floor
    }
    assert not [
        name
        for name in found
        if name.startswith("vlm_batch.") and name.split(".")[1] in above
    ]


def test_a_request_is_answered_without_what_is_above_the_engine() -> None:
    found = modules_after(
        "from vlm_batch import VLMBatcher, assets\n"
        "with VLMBatcher(assets.default_checkpoint()) as batcher:\n"
        "    assert batcher.submit(assets.sample_images()[0], 'describe the picture').result().ok"
    )
    assert not [
        name
        for name in found
        if name.startswith(("vlm_batch.jobs", "vlm_batch.server", "vlm_batch.cli"))
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_functions_fit_on_a_screen(path: Path) -> None:
    for node in functions(path):
        has_classes = node.name == "patches" and any(
            isinstance(child, ast.ClassDef) for child in ast.walk(node)
        )
        most = MAX_PATCHES_LINES if has_classes else MAX_LINES
        assert num_lines(node) <= most, (
            f"{path.name}:{node.lineno} {node.name} has {num_lines(node)} lines, over {most}"
        )


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "engine").rglob("*.py")), ids=lambda path: path.name
)
def test_the_engine_is_handed_what_it_works_with(path: Path) -> None:
    """An adapter, a ``prepare`` and a sampler are passed in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not imported(tree) & {"adapters", "inputs", "models", "registry", "loading"}


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.parent != CUDA],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_one_file_enters_the_room_of_cuda(path: Path) -> None:
    """``operations`` alone asks it for attention and products: who does not work on CUDA need not open it."""
    inside = [
        module
        for module, name in imports_from(path)
        if f"{module}.{name}.".startswith("vlm_batch.adapters.cuda.")
    ]
    assert not inside or path == CUDA.with_name("operations.py"), inside


def test_the_room_of_cuda_has_all_kernels_and_knows_neither_its_door_nor_a_family() -> (
    None
):
    assert {path.parent for path in PACKAGE.rglob("*.cu")} == {CUDA}
    above = {"operations", "base", "attention"}
    for path in CUDA.glob("*.py"):
        for module, name in imports_from(path):
            if module.startswith("vlm_batch.adapters"):
                assert not above & {module.rpartition(".")[2], name}, path.name


def test_the_schedule_knows_numbers_only() -> None:
    tree = ast.parse((PACKAGE / "engine" / "schedule.py").read_text(encoding="utf-8"))
    modules = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    modules |= {
        node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    assert not any(
        module.split(".")[0] in ("mlx", "numpy", "mlx_vlm") for module in modules
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_adapters_ask_objects_what_they_are(path: Path) -> None:
    """Outside models and adapters nothing asks whether an attribute exists: that is the adapter's knowledge."""
    if unit(path) in ("models", "adapters", "inputs"):
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asks = node.func.id == "hasattr" or (
                node.func.id == "getattr" and len(node.args) == 3
            )
            assert not asks, f"{path.name}:{node.lineno} {ast.unparse(node)}"


def test_public_names_are_sorted_and_there() -> None:
    names = vlm_batch.__all__
    assert list(names) == sorted(names)
    assert len(set(names)) == len(names)
    for name in names:
        assert name in vars(vlm_batch) or vlm_batch.__getattr__(name) is not None
