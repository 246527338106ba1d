"""Saved rows as safetensors files."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.caches.states import FILED_STATES, LayerState, can_file
from vlm_batch.errors import InvalidCache
from vlm_batch.store.digest import digest
from vlm_batch.store.saved import SavedRow, Snapshot

FORMAT, VERSION = "vlm_batch.row", "1"


@dataclasses.dataclass(frozen=True)
class Identity:
    """The model and settings that can continue a row."""

    model: str
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def check(self, other: Identity) -> None:
        """Raise InvalidCache unless ``other``'s rows can be continued here."""
        if other.model != self.model:
            raise InvalidCache(f"the cache was made by another model ({other.model}; this one is {self.model})")
        for name in sorted({*self.settings, *other.settings}):
            mine, theirs = self.settings.get(name), other.settings.get(name)
            if mine != theirs:
                raise InvalidCache(f"the cache was made with {name}={theirs}; this batcher has {name}={mine}")


def can_write(row: SavedRow) -> bool:
    states = [*row.whole.values(), *(layer for one in row.snapshots.values() for layer in one.layers.values())]
    return all(map(can_file, states))


def write_row(path: str | Path, row: SavedRow, identity: Identity) -> int:
    """Write a row atomically. Returns its bytes. Raises InvalidCache if files cannot hold a layer."""
    if not can_write(row):
        raise InvalidCache("the row has a layer whose kind of cache cannot be written to a file")
    tensors = {"keys": mx.array(row.keys)}
    snapshots = {
        str(at): {
            "layers": {str(i): _pack(s, f"point.{at}.{i}", tensors) for i, s in snapshot.layers.items()},
            "logits": _pack_value(snapshot.logits, f"point.{at}.logits", tensors),
        }
        for at, snapshot in row.snapshots.items()
    }
    structure = {
        "num_layers": row.num_layers,
        "num_pictures": row.num_pictures,
        "whole": {str(i): _pack(state, f"whole.{i}", tensors) for i, state in row.whole.items()},
        "points": snapshots,  # version 1's name
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "identity": json.dumps(dataclasses.asdict(identity)),
        "structure": json.dumps(structure),
    }
    metadata["digest"] = _seal(tensors, metadata)
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            mx.save_safetensors(file, tensors, metadata)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path.stat().st_size


def read_row(path: str | Path) -> tuple[SavedRow, Identity]:
    """Read a row and its identity. Raises InvalidCache for a damaged or foreign file."""
    header = read_header(path)
    try:
        tensors, metadata = _load(path)
    except Exception as error:
        raise InvalidCache(f"{path} cannot be read: {error}") from error
    if metadata.get("digest") != _seal(tensors, metadata):
        raise InvalidCache(f"{path} is damaged: its contents do not match their digest")
    try:
        return _row_of(json.loads(header["structure"]), tensors), identity_of(header)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidCache(f"{path} is no saved cache of this library: {error!r}") from error


def _row_of(structure: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> SavedRow:
    snapshots = {
        int(at): Snapshot(
            {int(i): _unpack(state, tensors) for i, state in snapshot["layers"].items()},
            _unpack_value(snapshot["logits"], tensors),
        )
        for at, snapshot in structure["points"].items()
    }
    whole = {int(i): _unpack(state, tensors) for i, state in structure["whole"].items()}
    keys = np.array(tensors["keys"])
    return SavedRow(keys, structure["num_layers"], whole, snapshots, structure["num_pictures"])


def identity_of(header: Mapping[str, str]) -> Identity:
    try:
        return Identity(**json.loads(header["identity"]))
    except Exception as error:
        raise InvalidCache(f"the file does not name its model and settings: {error!r}") from error


def read_header(path: str | Path) -> dict[str, str]:
    """Return a file's metadata. Raises InvalidCache for a wrong size or format."""
    metadata, _ = _header(path)
    return metadata


def read_keys(path: str | Path) -> np.ndarray:
    """Read only the keys (L, 3) of a file."""
    _, tensors = _header(path)
    try:
        begin, end = tensors["keys"]["data_offsets"]
        with open(path, "rb") as file:
            file.seek(tensors["begin"] + begin)
            return np.frombuffer(file.read(end - begin), dtype=np.int64).reshape(tensors["keys"]["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidCache(f"{path} has no keys of a row: {error!r}") from error


def _header(path: str | Path) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            size = os.fstat(file.fileno()).st_size
            if length > size:
                raise ValueError("it ends within its header")
            tensors = json.loads(file.read(length))
        metadata = tensors.pop("__metadata__")
        begin = 8 + length
        end = begin + max(tensor["data_offsets"][1] for tensor in tensors.values())
        if size != end:
            raise ValueError(f"it has {size} bytes and should have {end}")
        if metadata["format"] != FORMAT:
            raise ValueError(f"its format is {metadata['format']!r}")
        if metadata["version"] != VERSION:
            raise ValueError(f"its version is {metadata['version']}; this library reads version {VERSION}")
    except FileNotFoundError:
        raise
    except Exception as error:
        raise InvalidCache(f"{path} is no saved cache, or damaged: {error}") from error
    return metadata, {**tensors, "begin": begin}  # the offset of the tensors' bytes


def _load(path: str | Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
    tensors, metadata = loaded
    mx.eval(list(tensors.values()))
    return tensors, metadata


def _seal(tensors: Mapping[str, mx.array], metadata: Mapping[str, str]) -> str:
    rest = {name: value for name, value in metadata.items() if name != "digest"}
    return digest([dict(tensors), rest], in_full=True).hex()


def _pack(state: LayerState, path: str, tensors: dict[str, mx.array]) -> dict[str, Any]:
    packed: dict[str, Any] = {"kind": type(state).__name__}
    for name, value in vars(state).items():
        packed[name] = _pack_value(value, f"{path}.{name}", tensors)
    return packed


def _pack_value(value: Any, path: str, tensors: dict[str, mx.array]) -> Any:
    if isinstance(value, mx.array):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, tuple):
        return [_pack_value(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
    if type(value) in FILED_STATES.values():
        return _pack(value, path, tensors)
    return value


def _unpack(packed: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> LayerState:
    values = {name: _unpack_value(value, tensors) for name, value in packed.items() if name != "kind"}
    state: LayerState = FILED_STATES[packed["kind"]](**values)
    return state


def _unpack_value(value: Any, tensors: Mapping[str, mx.array]) -> Any:
    if isinstance(value, list):
        return tuple(_unpack_value(item, tensors) for item in value)
    if isinstance(value, dict):
        return tensors[value["tensor"]] if "tensor" in value else _unpack(value, tensors)
    return value
