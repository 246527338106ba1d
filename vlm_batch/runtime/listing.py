"""Makes transformers list only the models asked for.

At import, transformers 5 reads all models' files twice. Four names of utils/import_utils.py (lines 2541, 3120, 3161,
3486) are replaced during its import; versions without them stay unchanged.

- ``define_import_structure`` lists the folder ``auto`` alone.
- ``_LazyModule`` lists other folders on lookup, by the beginning of a class's name.
- ``fetch__all__`` reads a file from its last ``__all__``.
- ``create_import_structure_from_path`` caches all folders.

Standard library only: this module runs before transformers' import.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = "transformers.utils.import_utils"
#: Attributes of a lazy module that list its contents.
LISTS = (
    "__all__",
    "_class_to_module",
    "_import_structure",
    "_modules",
    "_object_missing_backend",
)


def list_models_quickly() -> None:
    """Have transformers list models lazily, unless already imported."""
    if FILE in sys.modules:
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds ``FILE`` once, and replaces its names after its run."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name != FILE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_change(module: ModuleType) -> None:
                run(module)
                change(module)

            spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def change(module: ModuleType) -> None:
    """Replace the module's names, if it has them."""
    names = vars(module)
    fetch = names.get("fetch__all__")
    listed = names.get("create_import_structure_from_path")
    unbounded = vars(listed).get("__wrapped__") if callable(listed) else None
    if fetch is None or unbounded is None:
        return
    names["fetch__all__"] = _from_last_line(fetch)
    names["create_import_structure_from_path"] = functools.cache(unbounded)
    lazy, define = names.get("_LazyModule"), names.get("define_import_structure")
    models = Path(str(module.__file__)).parents[1] / "models"
    if isinstance(lazy, type) and callable(define) and (models / "auto").is_dir():
        names["_LazyModule"] = _lazier(lazy)
        names["define_import_structure"] = _of_few(define, models)


def _from_last_line(fetch: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    def from_last_line(file_content: str) -> list[str]:
        return fetch(file_content[file_content.rfind("\n__all__") + 1 :])

    return from_last_line


class Few(dict[Any, Any]):
    """The listing of some folders, in place of all."""

    def __init__(
        self, define: Callable[..., dict[Any, Any]], models: Path, prefix: str | None
    ) -> None:
        self.all = functools.partial(define, models, prefix)
        self._folder = lambda name: define(
            models / name, name if prefix is None else f"{prefix}.{name}"
        )
        self._names = [path.name for path in models.iterdir() if path.is_dir()]
        super().__init__({frozenset(): {}, **self._folder("auto")})

    def like(self, name: str) -> dict[Any, Any]:
        """Return the listing of the folder with the longest name that begins the class's, or an empty one."""
        spelled, longest = name.lower(), ""
        for folder in self._names:
            if len(folder) > len(longest) and spelled.startswith(
                folder.replace("_", "")
            ):
                longest = folder
        return self._folder(longest) if longest else {}


def _of_few(define: Any, models: Path) -> Callable[..., dict[Any, Any]]:
    def define_import_structure(
        module_path: str | Path, prefix: str | None = None
    ) -> dict[Any, Any]:
        path = Path(module_path)
        is_of_all = (path if path.is_dir() else path.parent) == models
        return Few(define, models, prefix) if is_of_all else define(module_path, prefix)

    return define_import_structure


def _lazier(lazy: Any) -> type:
    class LazyModule(lazy):  # type: ignore[misc]
        def __init__(
            self,
            name: str,
            module_file: str,
            import_structure: Any,
            *args: Any,
            **options: Any,
        ) -> None:
            super().__init__(name, module_file, import_structure, *args, **options)
            if isinstance(import_structure, Few):
                self._few = import_structure
                self._listed = lambda structure: vars(
                    lazy(name, module_file, structure, *args, **options)
                )
                del self.__all__

        def __getattr__(self, name: str) -> Any:
            if name == "__all__" or (not name.startswith("_") and not self._has(name)):
                self._list(name)
                if name in vars(self):
                    return vars(self)[name]
            return super().__getattr__(name)

        def __dir__(self) -> Iterable[str]:
            self._list_rest()
            return super().__dir__()  # type: ignore[no-any-return]

        def __reduce__(self) -> Any:
            self._list_rest()
            return super().__reduce__()

        def _has(self, name: str) -> bool:
            return any(
                name in known
                for known in (self._objects, self._class_to_module, self._modules)
            )

        def _list(self, name: str) -> None:
            """List the models that may have a name, else all."""
            if (few := vars(self).get("_few")) is not None and (like := few.like(name)):
                found = self._listed(like)
                self._modules |= found["_modules"]
                self._class_to_module |= found["_class_to_module"]
                self._object_missing_backend |= found["_object_missing_backend"]
            if not self._has(name) and not (
                name.endswith("Fast") and self._has(name[:-4])
            ):
                self._list_rest()

        def _list_rest(self) -> None:
            if (few := vars(self).get("_few")) is not None:
                everything = {
                    backends: dict(found) for backends, found in few.all().items()
                }
                for backends, found in few.items():  # with what was added to it
                    everything.setdefault(backends, {}).update(found)
                whole = self._listed(everything)
                self.__dict__.update({name: whole[name] for name in LISTS})
                for name in ("_few", "_listed"):
                    self.__dict__.pop(name, None)

    LazyModule.__name__ = LazyModule.__qualname__ = lazy.__name__
    LazyModule.__module__ = lazy.__module__
    return LazyModule
