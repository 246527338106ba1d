"""Measurements of a device's arithmetic, kept in files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlm_batch.store.digest import digest

#: Environment variable for the folder.
FOLDER = "VLM_BATCH_CACHE"


def cache_folder() -> Path:
    """Return ``VLM_BATCH_CACHE`` or the platform's cache folder."""
    if given := os.environ.get(FOLDER):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "vlm_batch"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(Path.home()))) / "vlm_batch"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlm_batch"


def read_proof(key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the measurement under a key, if readable."""
    try:
        kept = json.loads(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # no home
        return None
    is_it = isinstance(kept, dict) and kept.get("key") == _plain(key) and isinstance(kept.get("found"), dict)
    return kept["found"] if is_it else None


def write_proof(key: Mapping[str, Any], found: Mapping[str, Any]) -> Path | None:
    """Write a measurement. Returns its path; None on failure."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            json.dump({"key": _plain(key), "found": found}, file)
        os.replace(file.name, path)
        return path
    return None


def _path(key: Mapping[str, Any]) -> Path:
    return cache_folder() / "classes" / f"{digest(_plain(key)).hex()}.json"


def _plain(key: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(key))
