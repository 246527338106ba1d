"""Digests of model inputs, equal exactly if values, shapes and types are."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Generic, TypeVar

import mlx.core as mx
import numpy as np
from blake3 import blake3

from vlm_batch.arrays import Deferred, Joined, arrays_of

#: Bytes of a digest; 128 bits make collisions negligible.
DIGEST_SIZE = 16
#: Bytes from which an array is hashed by BLAKE3 first, in a sixth of BLAKE2's time.
LARGE = 1 << 16

Fact = TypeVar("Fact")


class ArrayNotes(Generic[Fact]):
    """A fact about each large array, while the array lives."""

    def __init__(self) -> None:
        # by id
        self._noted: dict[int, tuple[weakref.ref[mx.array], Fact]] = {}

    def note(self, array: mx.array, fact: Fact) -> None:
        if array.nbytes < LARGE:
            return
        name = id(array)

        def forget(_: Any) -> None:
            self._noted.pop(name, None)

        self._noted[name] = (weakref.ref(array, forget), fact)

    def of(self, array: Any) -> Fact | None:
        noted = self._noted.get(id(array))
        if noted is None:
            return None
        reference, fact = noted
        return fact if reference() is array else None


#: BLAKE3 of arrays.
HASHES = ArrayNotes[bytes]()
#: Parts of joined arrays.
_PARTS = ArrayNotes[list[mx.array]]()
#: Sources of converted arrays.
_SOURCES = ArrayNotes["mx.array | np.ndarray"]()


def hash_ahead(tree: Any) -> None:
    """Hash a tree's large, evaluated arrays for a later ``digest``."""
    for array in arrays_of(tree):
        if array.nbytes >= LARGE:
            HASHES.note(array, blake3(array_bytes(array).data).digest())


def joined(parts: Joined) -> mx.array:
    """Join parts lazily; the whole remembers them."""
    made = list(map(_made, parts))
    return made[0] if len(made) == 1 else _joined(made)


def _made(part: Deferred | mx.array) -> mx.array:
    return part.array() if isinstance(part, Deferred) else _same(part)


def _joined(parts: Sequence[mx.array]) -> mx.array:
    whole = mx.concatenate(list(parts))
    _PARTS.note(whole, list(parts))
    return whole


def _same(array: mx.array) -> mx.array:
    parts = _PARTS.of(array)
    if parts is not None:
        return _joined(list(map(_same, parts)))
    made = array[...]
    hashed = HASHES.of(array)
    if hashed is not None:
        HASHES.note(made, hashed)
    return made


class Sourced(mx.array):
    """An array that is registered as the source of its ``astype``, which models call on pixels.

    The source's digest needs no evaluation.
    """

    def __init__(self, array: mx.array) -> None:
        super().__init__(array)
        self._array = array
        parts = _PARTS.of(array)
        if parts is not None:
            _PARTS.note(self, parts)

    def astype(self, dtype: mx.Dtype, stream: Any = None) -> mx.array:
        if dtype == self._array.dtype:
            return _same(self._array)
        if (parts := _PARTS.of(self._array)) is not None:
            return _joined([Sourced(part).astype(dtype, stream) for part in parts])
        made = self._array.astype(dtype, stream=stream)
        _SOURCES.note(made, self._array)
        return made


def sourced(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap large float arrays as ``Sourced``."""
    return {
        name: Sourced(value) if _is_large_float(value) else value
        for name, value in inputs.items()
    }


def _is_large_float(value: Any) -> bool:
    if type(value) is not mx.array or value.nbytes < LARGE:
        return False
    return mx.issubdtype(value.dtype, mx.floating)


def _ends_of(parts: Sequence[mx.array]) -> list[int]:
    """Return where arrays that are joined end, but for the last."""
    return list(accumulate(map(len, parts)))[:-1]


def split_noted(array: mx.array, ends: Sequence[int], axis: int) -> list[mx.array]:
    """Split an array before ``ends``, keeping registered parts and sources."""
    parts = _PARTS.of(array) if axis == 0 else None
    if parts is not None and _ends_of(parts) == list(ends):
        return parts
    split = list(mx.split(array, ends, axis=axis))
    source = _SOURCES.of(array)
    if source is None:
        return split
    # views of its memory
    sources = np.split(np.asarray(source), ends, axis=axis)
    for part, own in zip(split, sources, strict=True):
        _SOURCES.note(part, own)
    return split


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
        if array.dtype == mx.bfloat16:
            array = array.view(mx.uint16)
        array = np.asarray(array)  # its memory, not a copy
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


#: Types that are digested by their names and texts.
PLAIN = (type(None), bool, int, float, str, bytes)


def _feed(state: Any, value: Any, in_full: bool) -> None:
    if isinstance(value, (mx.array, np.ndarray)):
        _feed_array(state, value, in_full)
        return
    if isinstance(value, PLAIN):
        state.update(f"{type(value).__name__} {value!r};".encode())
        return
    kind, items = "sequence", value
    if isinstance(value, Mapping):
        kind, items = "mapping", chain.from_iterable(sorted(value.items()))
    elif not isinstance(value, (list, tuple)):
        raise TypeError(f"no digest of {type(value).__name__}")
    state.update(f"{kind} {len(value)};".encode())
    for item in items:
        _feed(state, item, in_full)


def _feed_array(state: Any, array: mx.array | np.ndarray, in_full: bool) -> None:
    dtype = str(array.dtype).split(".")[-1]
    state.update(f"array {dtype} {tuple(array.shape)};".encode())
    if in_full:
        state.update(array_bytes(array).data)
        return
    hashed = HASHES.of(array)
    if hashed is not None:
        state.update(hashed)
        return
    source = _SOURCES.of(array)
    if source is not None:
        state.update(b"converted ")
        _feed_array(state, source, in_full)
        return
    data = array_bytes(array)
    is_small = data.nbytes < LARGE
    state.update(data.data if is_small else blake3(data.data).digest())
