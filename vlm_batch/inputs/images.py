"""Pictures from wherever they are to RGB: the only place that reads image files.

Every failure is an InvalidImage that names the source and what was wrong with it.
"""

from __future__ import annotations

import base64
import binascii
import threading
import urllib.request
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from vlm_batch.errors import InvalidImage
from vlm_batch.types import ImageInput

#: Pillow's own limit against decompression bombs (a quarter of a gigabyte of RGB).
DEFAULT_MAX_PIXELS: int = Image.MAX_IMAGE_PIXELS or 89_478_485
URL_TIMEOUT_SECONDS = 30.0
_LIMIT_LOCK = threading.Lock()


def is_image_list(images: Any) -> bool:
    """Whether ``images`` is a sequence of pictures rather than one."""
    return isinstance(images, Iterable) and isinstance(images, (list, tuple))


def load_image(source: ImageInput, max_pixels: int | None = DEFAULT_MAX_PIXELS) -> Image.Image:
    """Read one picture as RGB, upright (EXIF orientation applied), its first frame if it is animated.

    Transparent pictures are laid on white; 16-bit grey is scaled to 8 bits. ``max_pixels`` is checked on the header,
    before anything is decoded; None lifts it. Raises InvalidImage.
    """
    if isinstance(source, Image.Image):
        image = source
    elif isinstance(source, (str, Path, bytes, bytearray, memoryview, BytesIO)):
        image = _open(source, max_pixels)
    else:
        image = _from_array(source)
    name = describe_source(source)
    width, height = image.size
    if width == 0 or height == 0:
        raise InvalidImage(f"{name} has no pixels ({width} x {height})")
    if max_pixels is not None and width * height > max_pixels:
        raise InvalidImage(
            f"{name} has {width} x {height} = {width * height:,} pixels; at most {max_pixels:,} are read (max_image_pixels)"
        )
    try:
        image.load()
        return _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        raise InvalidImage(f"{name} cannot be decoded: {error}") from error


def describe_source(source: ImageInput) -> str:
    """What to call a picture in a message."""
    if isinstance(source, (str, Path)):
        text = str(source)
        return "the data URI" if text.startswith("data:") else text
    if isinstance(source, (bytes, bytearray, memoryview, BytesIO)):
        return "the picture given as bytes"
    return f"the picture given as {type(source).__name__}"


def _open(source: Any, max_pixels: int | None) -> Image.Image:
    name = describe_source(source)
    if isinstance(source, (str, Path)):
        text = str(source)
        if text.startswith("data:"):
            source = _from_data_uri(text)
        elif text.startswith(("http://", "https://")):
            source = _download(text)
        elif not Path(text).expanduser().is_file():
            raise InvalidImage(
                f"{name} is not a file" if Path(text).expanduser().exists() else f"{name} does not exist"
            )
        else:
            source = _read(Path(text).expanduser())
    elif not isinstance(source, BytesIO):
        source = BytesIO(bytes(source))
    try:
        return _open_within(source, max_pixels)
    except Image.UnidentifiedImageError as error:
        raise InvalidImage(f"{name} is not a picture that Pillow can read") from error
    except Image.DecompressionBombError as error:
        raise InvalidImage(f"{name} is too large to be read (max_image_pixels): {error}") from error
    except Exception as error:
        raise InvalidImage(f"{name} cannot be opened: {error}") from error


def _open_within(source: Any, max_pixels: int | None) -> Image.Image:
    """Pillow reads the header only. Its own limit is a global: it is lifted for this call where the caller's is another."""
    if max_pixels == Image.MAX_IMAGE_PIXELS:
        return Image.open(source)
    with _LIMIT_LOCK:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(source)
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _read(path: Path) -> BytesIO:
    """The whole file: Pillow would keep it open for as long as an animated or broken picture lives."""
    try:
        return BytesIO(path.read_bytes())
    except OSError as error:
        raise InvalidImage(f"{path} cannot be read: {error.strerror}") from error


def _from_data_uri(uri: str) -> BytesIO:
    head, _, data = uri.partition(",")
    if not data or not head.endswith(";base64"):
        raise InvalidImage("the data URI is malformed: data:image/...;base64,... is expected")
    try:
        return BytesIO(base64.b64decode(data, validate=True))
    except binascii.Error as error:
        raise InvalidImage(f"the data URI is not base64: {error}") from error


def _download(url: str) -> BytesIO:
    try:
        with urllib.request.urlopen(url, timeout=URL_TIMEOUT_SECONDS) as response:
            return BytesIO(response.read())
    except (OSError, ValueError) as error:
        raise InvalidImage(f"{url} cannot be fetched: {error}") from error


def _from_array(source: Any) -> Image.Image:
    """(H, W), (H, W, 3) or (H, W, 4) of uint8, or of floats in 0..1."""
    try:
        array = np.asarray(source)
    except Exception as error:
        raise InvalidImage(f"{describe_source(source)} is no path, bytes, PIL image or array") from error
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or array.dtype == object:
        raise InvalidImage(
            f"an array of shape {array.shape} and type {array.dtype} is no picture: "
            "(H, W), (H, W, 3) or (H, W, 4) of uint8 or floats in 0..1 is expected"
        )
    if np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise InvalidImage("an array of floats must hold values in 0..1")
        array = np.round(array * 255)
    elif array.dtype != np.uint8 and (array.min() < 0 or array.max() > 255):
        raise InvalidImage("an array of integers must hold values in 0..255")
    return Image.fromarray(array.astype(np.uint8))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":  # Pillow's own conversion clips these at 255
        values = np.asarray(image, dtype=np.float64)
        peak = 255.0 if values.max(initial=0) <= 255 else 65535.0
        image = Image.fromarray(np.clip(values / peak * 255, 0, 255).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
