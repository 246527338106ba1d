"""Digests of model inputs, equal exactly if values, shapes and types are."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from blake3 import blake3

from vlm_batch.arrays import Deferred, Joined, arrays_of

#: Bytes of a digest; 128 bits make collisions negligible.
DIGEST_SIZE = 16
#: Bytes from which an array is hashed by BLAKE3 first, in a sixth of BLAKE2's time.
LARGE = 1 << 16

#: BLAKE3 of large arrays, by id, while they live.
_ahead: dict[int, tuple[weakref.ref[mx.array], bytes]] = {}
#: Parts of joined arrays, by the id of the whole, while it lives.
_parts: dict[int, tuple[weakref.ref[mx.array], list[mx.array]]] = {}
#: Sources of converted arrays, by the id of the result, while it lives.
_sources: dict[int, tuple[weakref.ref[mx.array], mx.array | np.ndarray]] = {}


def hash_ahead(tree: Any) -> None:
    """Hash a tree's large, evaluated arrays for a later ``digest``."""
    for array in arrays_of(tree):
        if array.nbytes >= LARGE:
            note_hash(array, blake3(array_bytes(array).data).digest())


def note_hash(array: mx.array, known: bytes) -> None:
    """Register the BLAKE3 of a large array."""
    if array.nbytes >= LARGE:
        place = id(array)
        _ahead[place] = weakref.ref(array, lambda _: _ahead.pop(place, None)), known  # type: ignore[arg-type, return-value]


def hash_of(array: mx.array) -> bytes | None:
    known = _ahead.get(id(array))
    return known[1] if known is not None and known[0]() is array else None


def joined(parts: Joined) -> mx.array:
    """Join parts lazily; the whole remembers them."""
    made = [part.array() if isinstance(part, Deferred) else _same(part) for part in parts]
    return made[0] if len(made) == 1 else _joined(made)


def _joined(parts: Sequence[mx.array]) -> mx.array:
    whole = mx.concatenate(list(parts))
    place = id(whole)
    _parts[place] = weakref.ref(whole, lambda _: _parts.pop(place, None)), list(parts)  # type: ignore[arg-type, return-value]
    return whole


def _parts_of(array: mx.array) -> list[mx.array] | None:
    array = array._array if type(array) is Sourced else array
    known = _parts.get(id(array))
    return known[1] if known is not None and known[0]() is array else None


def _same(array: mx.array) -> mx.array:
    if (parts := _parts_of(array)) is not None:
        return _joined([_same(part) for part in parts])
    made = array[...]
    if (known := hash_of(array)) is not None:
        note_hash(made, known)
    return made


class Sourced(mx.array):
    """An array that is registered as the source of its ``astype``, which models call on pixels.

    The source's digest needs no evaluation.
    """

    def __init__(self, array: mx.array) -> None:
        super().__init__(array)
        self._array = array

    def astype(self, dtype: mx.Dtype, stream: Any = None) -> mx.array:
        if dtype == self._array.dtype:
            return _same(self._array)
        if (parts := _parts_of(self._array)) is not None:
            return _joined([Sourced(part).astype(dtype, stream) for part in parts])
        made = self._array.astype(dtype, stream=stream)
        _note(made, self._array)
        return made


def sourced(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap large float arrays as ``Sourced``."""
    found = dict(inputs)
    for name, value in inputs.items():
        if type(value) is mx.array and value.nbytes >= LARGE and mx.issubdtype(value.dtype, mx.floating):
            found[name] = Sourced(value)
    return found


def split_known(array: mx.array, ends: Sequence[int], axis: int) -> list[mx.array]:
    """Split an array before ``ends``, keeping registered parts and sources."""
    parts = _parts_of(array) if axis == 0 else None
    if parts is not None and np.cumsum([len(part) for part in parts])[:-1].tolist() == list(ends):
        return parts
    split = list(mx.split(array, ends, axis=axis))
    if (source := _source(array)) is not None:
        for part, own in zip(split, np.split(np.asarray(source), ends, axis=axis), strict=True):  # views of its memory
            _note(part, own)
    return split


def _note(made: mx.array, source: mx.array | np.ndarray) -> None:
    if made.nbytes >= LARGE:
        place = id(made)
        _sources[place] = weakref.ref(made, lambda _: _sources.pop(place, None)), source  # type: ignore[arg-type, return-value]


def _source(made: Any) -> mx.array | np.ndarray | None:
    known = _sources.get(id(made))
    return known[1] if known is not None and known[0]() is made else None


def digest(value: Any, *, in_full: bool = False) -> bytes:
    """Return the digest of arrays, numbers, strings, None, sequences and mappings. Raises TypeError for others.

    ``in_full``: BLAKE2 reads every byte, as for files.
    """
    state = hashlib.blake2b(digest_size=DIGEST_SIZE)
    _feed(state, value, in_full)
    return state.digest()


def as_words(digested: bytes) -> np.ndarray:
    return np.frombuffer(digested, dtype=np.int64)  # (2,)


def array_bytes(array: Any) -> np.ndarray:
    if isinstance(array, mx.array):
        array = np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)  # its memory, not a copy
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _feed(state: Any, value: Any, in_full: bool) -> None:
    if isinstance(value, (mx.array, np.ndarray)):
        state.update(f"array {str(value.dtype).split('.')[-1]} {tuple(value.shape)};".encode())
        known = None if in_full or not isinstance(value, mx.array) else hash_of(value)
        if known is not None:
            state.update(known)
            return
        if not in_full and (source := _source(value)) is not None:
            state.update(b"converted ")
            _feed(state, source, in_full)
            return
        data = array_bytes(value)
        state.update(data.data if in_full or data.nbytes < LARGE else blake3(data.data).digest())
    elif isinstance(value, Mapping):
        state.update(f"mapping {len(value)};".encode())
        for name in sorted(value):
            _feed(state, name, in_full)
            _feed(state, value[name], in_full)
    elif isinstance(value, (list, tuple)):
        state.update(f"sequence {len(value)};".encode())
        for item in value:
            _feed(state, item, in_full)
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        state.update(f"{type(value).__name__} {value!r};".encode())
    else:
        raise TypeError(f"no digest of {type(value).__name__}")
