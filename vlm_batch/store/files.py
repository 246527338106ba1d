"""Saved rows as safetensors files."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.caches.states import FILED_STATES, LayerState, can_file
from vlm_batch.errors import InvalidCache
from vlm_batch.store.digest import digest
from vlm_batch.store.kept import opened
from vlm_batch.store.saved import SavedRow, Snapshot

FORMAT, VERSION = "vlm_batch.row", "1"
#: Numbers that tell two positions of a row apart.
KEY_WIDTH = 3
#: Most bytes of a file's header, and of its keys: eleven million positions.
MAX_HEADER_BYTES, MAX_KEY_BYTES = 1 << 26, 1 << 28


@dataclasses.dataclass(frozen=True)
class Identity:
    """The model and settings that can continue a row."""

    model: str
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def check(self, other: Identity) -> None:
        """Raise InvalidCache unless ``other``'s rows can be continued here."""
        if other.model != self.model:
            raise InvalidCache(
                f"the cache was made by another model ({other.model}; this one is {self.model})"
            )
        for name in sorted({*self.settings, *other.settings}):
            mine, theirs = self.settings.get(name), other.settings.get(name)
            if mine != theirs:
                raise InvalidCache(
                    f"the cache was made with {name}={theirs}; this batcher has {name}={mine}"
                )


def can_write(row: SavedRow) -> bool:
    """Whether a file can hold all layers of a row."""
    states = list(row.whole.values())
    for snapshot in row.snapshots.values():
        states += snapshot.layers.values()
    return all(map(can_file, states))


def write_row(path: str | Path, row: SavedRow, identity: Identity) -> int:
    """Write a row atomically. Returns its bytes. Raises InvalidCache if files cannot hold a layer."""
    if not can_write(row):
        raise InvalidCache(
            "the row has a layer whose kind of cache cannot be written to a file"
        )
    tensors = {"keys": mx.array(row.keys)}
    snapshots: dict[str, Any] = {}
    for at, snapshot in row.snapshots.items():
        prefix = f"point.{at}"
        snapshots[str(at)] = {
            "layers": _pack_layers(snapshot.layers, prefix, tensors),
            "logits": _pack_value(snapshot.logits, f"{prefix}.logits", tensors),
        }
    structure = {
        "num_layers": row.num_layers,
        "num_pictures": row.num_pictures,
        "whole": _pack_layers(row.whole, "whole", tensors),
        "points": snapshots,
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "identity": json.dumps(dataclasses.asdict(identity)),
        "structure": json.dumps(structure),
    }
    metadata["digest"] = _seal(tensors, metadata)
    return _write(Path(path), tensors, metadata)


def _write(path: Path, tensors: dict[str, mx.array], metadata: dict[str, str]) -> int:
    """Write a file beside ``path`` and put it in its place. Returns its bytes."""
    handle, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=".part"
    )
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


def read_row(
    path: str | Path, max_bytes: int | None = None
) -> tuple[SavedRow, Identity]:
    """Read a row and its identity. Raises InvalidCache for a damaged, foreign or too large file."""
    header, _ = read_head(path, max_bytes)
    try:
        tensors, metadata = _load(path)
    except Exception as error:
        raise InvalidCache(f"{path} cannot be read: {error}") from error
    if header.get("digest") != _seal(tensors, metadata):
        raise InvalidCache(f"{path} is damaged: its contents do not match their digest")
    try:
        row = _row_of(json.loads(header["structure"]), tensors)
        _check_form(row)
        return row, identity_of(header)
    except Exception as error:  # whatever a value of the wrong form raises
        raise InvalidCache(
            f"{path} is no saved cache of this library: {error!r}"
        ) from error


def _row_of(structure: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> SavedRow:
    snapshots: dict[int, Snapshot] = {}
    for at, snapshot in structure["points"].items():
        layers = _unpack_layers(snapshot["layers"], tensors)
        logits = _unpack_value(snapshot["logits"], tensors)
        snapshots[int(at)] = Snapshot(layers, logits)
    whole = _unpack_layers(structure["whole"], tensors)
    keys = np.array(tensors["keys"])
    return SavedRow(
        keys, structure["num_layers"], whole, snapshots, structure["num_pictures"]
    )


def _check_form(row: SavedRow) -> None:
    """Raise ValueError if a row cannot be one."""
    _check_count("layers", row.num_layers)
    _check_count("pictures", row.num_pictures)
    _check_layers(row.whole, row.num_layers)
    for at, snapshot in row.snapshots.items():
        if not 0 <= at <= row.length:
            raise ValueError(
                f"it has a snapshot at {at}, beyond its {row.length} positions"
            )
        _check_layers(snapshot.layers, row.num_layers)


def _check_count(name: str, number: Any) -> None:
    if type(number) is not int or number < 0:
        raise ValueError(f"it has {number!r} {name}")


def _check_layers(layers: Mapping[int, LayerState], num_layers: int) -> None:
    for index in layers:
        if not 0 <= index < num_layers:
            raise ValueError(f"it has a layer {index}, which is none of {num_layers}")


def identity_of(header: Mapping[str, str]) -> Identity:
    try:
        return Identity(**json.loads(header["identity"]))
    except Exception as error:
        raise InvalidCache(
            f"the file does not name its model and settings: {error!r}"
        ) from error


def read_head(
    path: str | Path, max_bytes: int | None = None
) -> tuple[dict[str, str], np.ndarray]:
    """Return a file's metadata and keys (L, 3). Raises InvalidCache for a wrong size or format."""
    try:
        with opened(path, max_bytes) as (file, size):
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, MAX_HEADER_BYTES):
                raise ValueError("it ends within its header")
            tensors = json.loads(file.read(length))
            metadata = tensors.pop("__metadata__")
            if metadata["format"] != FORMAT:
                raise ValueError(f"its format is {metadata['format']!r}")
            if metadata["version"] != VERSION:
                raise ValueError(
                    f"its version is {metadata['version']}; this library reads version {VERSION}"
                )
            _check_sizes(tensors, size - 8 - length)
            begin, end = _keys_of(tensors["keys"])
            file.seek(8 + length + begin)
            keys = np.frombuffer(file.read(end - begin), dtype=np.int64)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise InvalidCache(f"{path} is no saved cache, or damaged: {error}") from error
    return metadata, keys.reshape(-1, KEY_WIDTH)


def _check_sizes(tensors: Mapping[str, Any], nbytes: int) -> None:
    """Raise ValueError unless the header's tensors have the bytes that follow it, all of them."""
    end = 0
    for name, tensor in tensors.items():
        first, last = tensor["data_offsets"]
        if not 0 <= first <= last:
            raise ValueError(f"{name} lies at {first} to {last}")
        end = max(end, last)
    if end != nbytes:
        raise ValueError(
            f"it has {nbytes} bytes after its header and should have {end}"
        )


def _keys_of(tensor: Mapping[str, Any]) -> tuple[int, int]:
    """Return where a row's keys lie. Raises ValueError if they are none."""
    begin, end = tensor["data_offsets"]
    length, width = tensor["shape"]
    nbytes = length * width * np.dtype(np.int64).itemsize
    is_formed = (tensor["dtype"], width) == ("I64", KEY_WIDTH)
    is_whole = end - begin == nbytes
    if not is_formed or not is_whole or not 0 <= nbytes <= MAX_KEY_BYTES:
        raise ValueError(
            f"its keys are {tensor['dtype']} of the shape {tensor['shape']} in {end - begin} bytes"
        )
    return begin, end


def _load(path: str | Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
    tensors, metadata = loaded
    mx.eval(list(tensors.values()))
    return tensors, metadata


def _seal(tensors: Mapping[str, mx.array], metadata: Mapping[str, str]) -> str:
    rest = {name: value for name, value in metadata.items() if name != "digest"}
    return digest([dict(tensors), rest], in_full=True).hex()


def _pack_layers(
    layers: Mapping[int, LayerState], path: str, tensors: dict[str, mx.array]
) -> dict[str, Any]:
    return {
        str(index): _pack(state, f"{path}.{index}", tensors)
        for index, state in layers.items()
    }


def _unpack_layers(
    packed: Mapping[str, Any], tensors: Mapping[str, mx.array]
) -> dict[int, LayerState]:
    return {int(index): _unpack(state, tensors) for index, state in packed.items()}


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
        return [
            _pack_value(item, f"{path}.{index}", tensors)
            for index, item in enumerate(value)
        ]
    if type(value) in FILED_STATES.values():
        return _pack(value, path, tensors)
    return value


def _unpack(packed: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> LayerState:
    values = {
        name: _unpack_value(value, tensors)
        for name, value in packed.items()
        if name != "kind"
    }
    state: LayerState = FILED_STATES[packed["kind"]](**values)
    return state


def _unpack_value(value: Any, tensors: Mapping[str, mx.array]) -> Any:
    if isinstance(value, list):
        return tuple(_unpack_value(item, tensors) for item in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    return _unpack(value, tensors)
