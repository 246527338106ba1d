"""Imports point one way, and what the style asks for of the package's names and attributes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vlm_batch

PACKAGE = Path(vlm_batch.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

#: The rooms by floor, lowest first: a file imports from floors below its room's, and from its own room.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("_version", "errors", "arrays", "runtime", "assets"),
    ("types", "registry"),
    ("handle", "progress"),
    ("many",),
    ("caches",),
    ("store",),
    ("inputs",),
    ("adapters",),
    ("models", "engine"),
    ("loading",),
    ("batcher",),
    ("server", "integrations", "jobs"),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


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
                {f"vlm_batch.{alias.name}" for alias in node.names} if node.module == "vlm_batch" else {node.module}
            )
    return {name.split(".")[1] for name in names if name.startswith("vlm_batch.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    here = unit(path)
    if here == "__init__":  # the package's own names
        return
    assert here in FLOOR, f"{path.name} is in no room; say where it stands in FLOORS and in docs/architecture.md"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for there in imported(tree) - {here}:
        assert FLOOR[there] < FLOOR[here], f"{here} imports {there}, which is no floor below it"


@pytest.mark.parametrize("path", sorted((PACKAGE / "engine").rglob("*.py")), ids=lambda path: path.name)
def test_the_engine_is_handed_what_it_works_with(path: Path) -> None:
    """An adapter, a ``prepare`` and a sampler are passed in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not imported(tree) & {"adapters", "inputs", "models", "registry", "loading"}


def test_the_scheduler_knows_integers_only() -> None:
    tree = ast.parse((PACKAGE / "engine" / "scheduler.py").read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(module.split(".")[0] in ("mlx", "numpy", "mlx_vlm") for module in modules)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_adapters_ask_objects_what_they_are(path: Path) -> None:
    """Outside models and adapters nothing asks whether an attribute exists: that is the adapter's knowledge."""
    if unit(path) in ("models", "adapters", "inputs"):
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asks = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
            assert not asks, f"{path.name}:{node.lineno} {ast.unparse(node)}"


def test_public_names_are_sorted_and_there() -> None:
    names = vlm_batch.__all__
    assert list(names) == sorted(names)
    assert len(set(names)) == len(names)
    for name in names:
        assert name in vars(vlm_batch) or vlm_batch.__getattr__(name) is not None
