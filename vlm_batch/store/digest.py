"""Digests of models' inputs: two inputs have equal digests if their values, shapes and types are equal, and only then."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from blake3 import blake3

from vlm_batch.arrays import arrays_of

#: Bytes of a digest: 128 bits, so that no two pictures ever meet by chance.
DIGEST_SIZE = 16
#: Bytes from which on an array stands for itself by its BLAKE3, which takes a sixth of BLAKE2's time.
LARGE = 1 << 16

#: BLAKE3 of large arrays that was taken ahead, by the arrays' ids, for as long as the arrays are there.
_ahead: dict[int, tuple[weakref.ref[mx.array], bytes]] = {}
#: The arrays that large ones were converted from, by the ids of these, for as long as these are there.
_sources: dict[int, tuple[weakref.ref[mx.array], mx.array | np.ndarray]] = {}


def hash_ahead(tree: Any) -> None:
    """Hash the large arrays in a tree, which are evaluated, on this thread: ``digest`` of them takes no time on another."""
    for array in arrays_of(tree):
        if array.nbytes >= LARGE:
            place = id(array)
            gone = weakref.ref(array, lambda _, place=place: _ahead.pop(place, None))  # type: ignore[misc]
            _ahead[place] = gone, blake3(array_bytes(array).data).digest()


class Sourced(mx.array):
    """A request's array that notes itself as the source of what ``astype`` makes of it: model code gives pixels its own type.

    What was made is not computed yet, and to read its bytes would wait for the device. So its digest is made of its source's.
    """

    def __init__(self, array: mx.array) -> None:
        super().__init__(array)
        self._array = array

    def astype(self, dtype: mx.Dtype, stream: Any = None) -> mx.array:
        """The same values in another type."""
        made = self._array.astype(dtype, stream=stream)
        if dtype != self._array.dtype:
            _note(made, self._array)
        return made


def sourced(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A request's inputs, whose large arrays of numbers with a point know what becomes of them."""
    found = dict(inputs)
    for name, value in inputs.items():
        if type(value) is mx.array and value.nbytes >= LARGE and mx.issubdtype(value.dtype, mx.floating):
            found[name] = Sourced(value)
    return found


def split_known(array: mx.array, ends: Sequence[int], axis: int) -> list[mx.array]:
    """An array split along an axis before each of ``ends``; parts of a converted one are known by parts of its source."""
    parts = list(mx.split(array, ends, axis=axis))
    if (source := _source(array)) is not None:
        for part, own in zip(parts, np.split(np.asarray(source), ends, axis=axis), strict=True):  # views of its memory
            _note(part, own)
    return parts


def _note(made: mx.array, source: mx.array | np.ndarray) -> None:
    if made.nbytes >= LARGE:
        place = id(made)
        _sources[place] = weakref.ref(made, lambda _: _sources.pop(place, None)), source  # type: ignore[arg-type, return-value]


def _source(made: Any) -> mx.array | np.ndarray | None:
    known = _sources.get(id(made))
    return known[1] if known is not None and known[0]() is made else None


def digest(value: Any, *, in_full: bool = False) -> bytes:
    """The digest of arrays, numbers, texts, None, and of sequences and mappings of those.

    ``in_full`` has every byte go through BLAKE2, as files are sealed. Raises TypeError for anything else: what cannot be
    told apart must not be taken for the same.
    """
    state = hashlib.blake2b(digest_size=DIGEST_SIZE)
    _feed(state, value, in_full)
    return state.digest()


def as_words(digested: bytes) -> np.ndarray:
    """A digest as two int64."""
    return np.frombuffer(digested, dtype=np.int64)


def array_bytes(array: Any) -> np.ndarray:
    """The bytes of an mlx or numpy array as they lie, flat; numpy has no bfloat16."""
    if isinstance(array, mx.array):
        array = np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)  # its memory, not a copy
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _feed(state: Any, value: Any, in_full: bool) -> None:
    if isinstance(value, (mx.array, np.ndarray)):
        state.update(f"array {str(value.dtype).split('.')[-1]} {tuple(value.shape)};".encode())
        known = None if in_full else _ahead.get(id(value))
        if known is not None and known[0]() is value:
            state.update(known[1])
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
