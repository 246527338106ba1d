"""Measurements of a device's arithmetic, kept in files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vlm_batch.store.digest import digest
from vlm_batch.store.kept import make_private, note_bad, opened

Found = TypeVar("Found")

#: Environment variable for the folder.
FOLDER = "VLM_BATCH_CACHE"
#: Most bytes of a measurement's file; they have a few hundred.
MAX_BYTES = 1 << 20


def cache_folder() -> Path:
    """Return ``VLM_BATCH_CACHE`` or the platform's cache folder."""
    if given := os.environ.get(FOLDER):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "vlm_batch"
    kept = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(kept) / "vlm_batch"


def read_proof(
    key: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], Found]
) -> Found | None:
    """Return the measurement under a key, or None. A file that is none of ours, or of no form, is as none.

    Args:
        parse: makes the measurement of what a file holds; whatever it raises refuses the file.
    """
    try:
        path = _path(key)
    except RuntimeError:  # no home
        return None
    try:
        with opened(path, MAX_BYTES) as (file, _):
            kept = json.loads(file.read(MAX_BYTES))
        if kept["key"] != _plain(key):
            raise ValueError("it is of another measurement")
        return parse(kept["found"])
    except (FileNotFoundError, NotADirectoryError):  # none yet
        return None
    except Exception as error:
        # a damaged file, or another's: whatever a value of the wrong form raises
        note_bad(path, error)
        return None


def write_proof(key: Mapping[str, Any], found: Mapping[str, Any]) -> Path | None:
    """Write a measurement. Returns its path; None on failure."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(key)
        make_private(path.parent)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, delete=False
        ) as file:
            json.dump({"key": _plain(key), "found": found}, file)
        os.replace(file.name, path)
        return path
    return None


def counts_of(value: Any, tried: Container[int]) -> tuple[int, ...]:
    """Return ascending numbers of a file, all of them ``tried``. Raises ValueError or TypeError."""
    counts = tuple(value)
    for count in counts:
        is_number = type(count) is int
        if not is_number or count not in tried:
            raise ValueError(f"it has numbers that nobody tried: {value}")
    if sorted(set(counts)) != list(counts):
        raise ValueError(f"its numbers do not ascend: {value}")
    return counts


def _path(key: Mapping[str, Any]) -> Path:
    return cache_folder() / "classes" / f"{digest(_plain(key)).hex()}.json"


def _plain(key: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(key))
