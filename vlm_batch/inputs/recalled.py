"""Repeated pictures: known by their bytes, decoded on demand, processed once.

The key holds all pixels, settings and arguments of a call: output may depend on other pictures.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import NoneType
from typing import Any

import mlx.core as mx
import numpy as np
from blake3 import blake3
from PIL import Image

from vlm_batch.arrays import Deferred, Joined
from vlm_batch.inputs.fetch import RecalledUri, contents, is_data_uri
from vlm_batch.inputs.processors import settings_of
from vlm_batch.store.digest import digest
from vlm_batch.store.pictures import PictureStore
from vlm_batch.types import ImageInput

#: Leaves of an output that may be kept.
_PLAIN = (bool, int, float, str, NoneType, np.ndarray, np.generic, mx.array)


class RecalledPicture(Image.Image):
    """An RGB picture, decoded when read."""

    def __init__(
        self, size: tuple[int, int], content: bytes, decode: Callable[[], Image.Image]
    ) -> None:
        super().__init__()
        self._mode, self._size = "RGB", size
        #: The digest; None once the pixels may have changed.
        self.content: bytes | None = content
        self._decode = decode
        #: On the first of several pictures: what the processor got in place of their arrays.
        self.stand_in: StandIn | None = None

    def load(self) -> Any:
        if self.content is not None:
            self.im, self.content = self._decode().im, None
        return super().load()

    def convert(
        self, mode: str | None = None, *args: Any, **options: Any
    ) -> Image.Image:
        if mode == "RGB":
            return self
        return super().convert(mode, *args, **options)


def own_picture(
    source: ImageInput,
    own: Callable[[ImageInput], ImageInput],
    store: PictureStore | None,
) -> ImageInput:
    """Copy a picture, but for the data URI of one that was decoded before."""
    if store is None or not is_data_uri(source):
        return own(source)
    key = b"uri " + blake3(source.encode("utf-8", "surrogatepass")).digest()
    content = store.get(key)
    if content is not None and (size := store.get(content)) is not None:
        return RecalledUri(source, size, content)
    read = own(source)
    store.put(key, _content(contents(read)))
    return read


def _content(data: bytes) -> bytes:
    return b"file " + blake3(data).digest()


def recalled_picture(
    source: ImageInput, load: Callable[[ImageInput], Image.Image], store: PictureStore
) -> RecalledPicture:
    """Return a picture that ``load`` decodes, now or later."""
    if isinstance(source, RecalledUri):
        return RecalledPicture(source.size, source.content, partial(load, source))
    data = contents(source)
    if not isinstance(data, bytes):
        image = load(source)
        return RecalledPicture(
            image.size, digest(["pixels", np.asarray(image)]), lambda: image
        )
    content = _content(data)
    if (size := store.get(content)) is not None:
        return RecalledPicture(size, content, partial(load, source))
    image = load(source)
    store.put(content, image.size)
    return RecalledPicture(image.size, content, lambda: image)


class StandIn(mx.array):
    """Stands for several pictures' unjoined arrays; its numbers mean nothing."""

    def __init__(self, parts: Sequence[mx.array | Deferred]) -> None:
        rows, others = sum(part.shape[0] for part in parts), parts[0].shape[1:]
        super().__init__(mx.broadcast_to(mx.zeros((), mx.float32), (rows, *others)))
        self.joined = Joined(parts)


def with_picture_cache(processor: Any, store: PictureStore) -> Any:
    """Return a copy whose image processor tries ``store`` first."""
    part = getattr(processor, "image_processor", None)
    if not callable(part):
        return processor
    processor, part = copy.copy(processor), copy.copy(part)
    if not hasattr(part, "pictures"):
        kind: Any = type(part)
        part.__class__ = _with_caching(kind)
    part.pictures = store
    processor.image_processor = part
    return processor


@cache
def _with_caching(kind: Any) -> Any:
    return type(kind.__name__, (PictureCaching, kind), {"__module__": kind.__module__})


class PictureCaching:
    """Base class that caches an image processor's calls."""

    pictures: PictureStore
    _is_within = False  # a call of it that calls another of its methods

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._recalled("__call__", args, options)

    def preprocess(self, *args: Any, **options: Any) -> Any:
        return self._recalled("preprocess", args, options)

    def _recalled(
        self, name: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        theirs = getattr(super(), name)
        if self._is_within:
            return theirs(*args, **options)
        facts = [type(self).__qualname__, name, settings_of(self)]
        key = call_key(facts, [args, options])
        if key is None:
            return theirs(*args, **options)
        found = self.pictures.get(key)
        if found is None:
            self._is_within = True
            try:
                found = theirs(*args, **options)
            finally:
                del self._is_within
            if not is_plain_tree(found):
                return found
            self.pictures.put(key, found)
        return copy.deepcopy(found)


def call_key(facts: list[Any], call: list[Any]) -> bytes | None:
    """Digest a call with pictures; None without pictures."""
    contents: list[bytes] = []
    try:
        key = digest([facts, _with_contents(call, contents)])
    except TypeError:
        return None
    if contents:
        return key
    return None


def _with_contents(value: Any, contents: list[bytes]) -> Any:
    """Return a tree with known pictures' digests in their places; list those in ``contents``."""
    if isinstance(value, RecalledPicture) and value.content is not None:
        contents.append(value.content)
        return value.content
    if isinstance(value, Mapping):
        return {name: _with_contents(one, contents) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_contents(one, contents) for one in value]
    return value


def is_plain_tree(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return all(map(is_plain_tree, tree.values()))
    if isinstance(tree, (list, tuple)):
        return all(map(is_plain_tree, tree))
    return isinstance(tree, _PLAIN)
