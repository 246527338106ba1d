"""Read pictures as RGB. Every failure is an InvalidImage."""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFile, ImageOps

from vlm_batch.checks import is_table
from vlm_batch.errors import InvalidImage, InvalidVideo
from vlm_batch.inputs import heif
from vlm_batch.inputs.fetch import (
    NEVER,
    USUAL,
    Cancelled,
    Fetched,
    RecalledUri,
    contents,
    fetch,
    is_address,
    is_data_uri,
    name_medium,
)
from vlm_batch.inputs.refusals import exceeds, refused_as, unread_as
from vlm_batch.types import FetchPolicy, ImageInput

#: Pillow's own limit against decompression bombs (a quarter of a gigabyte of RGB).
DEFAULT_MAX_PIXELS: int = Image.MAX_IMAGE_PIXELS or 89_478_485
#: The longest side of a picture, in pixels: JPEG's own limit. Longer ones cost minutes to resize whatever their area.
MAX_SIDE = 65_535
#: Pillow's readers in use. None starts another program (as EPS starts Ghostscript), and all were tested with damaged files.
#: HEIF needs pillow-heif (``heif.add_reader``), AVIF a Pillow that was built with it.
FORMATS = (
    "PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "ICO", "PPM", "TGA", "PCX", "QOI", "JPEG2000", "AVIF", "HEIF"
)  # fmt: skip
#: Most pixels of a picture that Pillow decodes in Python (QOI, PPM of text or odd depth, BMP of run lengths), a 4K screen's:
#: each takes about a microsecond, in which no other thread of Python's runs.
MOST_IN_PYTHON = 2**23
#: Pixel rows converted at a time, which bounds the memory of wide grey values and of transparency.
_STRIP = 256
#: First bytes of files that people mistake for pictures, and advice for each.
_NO_PICTURES = (
    (
        rb"\s*<svg|\s*(?:<\?xml|<!--|<!DOCTYPE svg).*<svg",
        "an SVG drawing, which is not read here; save it as PNG first",
    ),
    (
        rb"%PDF",
        "a PDF; make a picture of each page first (vlm-batch run reads PDF files)",
    ),
    (
        rb"\s*<(?:!doctype html|html|head|body)",
        "a web page; give the address of the picture itself",
    ),
    (
        rb".{4}ftyp(?:isom|mp4|M4V|qt|avc)|\x1aE\xdf\xa3",
        "a video; it goes where videos go",
    ),
    (rb"PK\x03\x04|\x1f\x8b", "an archive; unpack it first"),
    (rb".{4}ftyp(?:hei|hev|mif1|msf1)", "a HEIC picture that is damaged"),
    (
        rb".{4}ftypavi",
        "an AVIF picture that is damaged, or this Pillow reads none: pip install --upgrade pillow",
    ),
    (
        rb"\0\0\0\x0cJXL |\xff\x0a",
        "a JPEG XL picture, which is not read here; save it as PNG first",
    ),
    (rb"8BPS", "a Photoshop file, which is not read here; save it as PNG first"),
    (
        rb"%!PS|\xc5\xd0\xd3\xc6",
        "PostScript, which is not read here; save it as PNG first",
    ),
)
#: First bytes of an ICO file.
ICON = b"\x00\x00\x01\x00"
#: TIFF's tag NewSubfileType, and its bits for a reduced copy and for a mask of another picture of the file.
_TIFF_KIND, _TIFF_NO_PAGE = 254, 0b101
#: Frames of a TIFF that are looked at for a second page.
_MAX_PREVIEWS = 64
_LIMIT_LOCK = threading.Lock()
#: Most pieces in which a file in memory is read until its size is known: ten million empty ones would take a minute.
MAX_PIECES = 1 << 16


def load_image(
    source: ImageInput,
    max_pixels: int | None = DEFAULT_MAX_PIXELS,
    policy: FetchPolicy = USUAL,
    cancelled: Cancelled = NEVER,
) -> Image.Image:
    """Read one picture, or an animation's first frame, as RGB, upright (EXIF orientation).

    Transparency becomes white; grey of more than 8 bits is scaled. Raises InvalidImage or OperationCancelled.
    """
    cancelled.check()
    if isinstance(source, Image.Image):
        image = source
    elif isinstance(
        source, (str, Path, bytes, bytearray, memoryview, BytesIO, Fetched, RecalledUri)
    ):
        image = _open(source, max_pixels, policy, cancelled)
    else:
        image = _from_array(source)
    name = describe_source(source)
    width, height = image.size
    if 0 in image.size:
        raise InvalidImage(f"{name} has no pixels ({width} x {height})")
    check_size(name, width, height, max_pixels)
    if _is_decoded_in_python(image) and width * height > MOST_IN_PYTHON:
        raise InvalidImage(
            f"{name} is a {image.format} picture of {width} x {height} pixels; where Pillow's decoder is Python code, at "
            f"most {MOST_IN_PYTHON:,} are read: save it as PNG"
        )
    # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
    with refused_as(InvalidImage, f"{name} cannot be decoded", _said):
        if image is source:
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
        _check_pages(image, name)
        image.load()
        # a copy less of what may be a quarter of a gigabyte
        ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image)


def check_size(
    name: str,
    width: int,
    height: int,
    max_pixels: int | None,
    kind: type[InvalidImage] | type[InvalidVideo] = InvalidImage,
) -> None:
    if exceeds(width * height, max_pixels):
        raise kind(
            f"{name} has {width} x {height} = {width * height:,} pixels; at most {max_pixels:,} are read",
            advice=" (Limits.image_pixels)",
        )
    if max(width, height) > MAX_SIDE:
        raise kind(
            f"{name} has {width} x {height} pixels; a side may have {MAX_SIDE:,} at most"
        )


def _is_decoded_in_python(image: Image.Image) -> bool:
    """Whether a picture is still to be decoded, by Python code."""
    tiles = getattr(image, "tile", ())
    return any(tile[0] in Image.DECODERS for tile in tiles)


def _icon_sizes(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the sizes of an ICO's pictures; Pillow decodes one on opening."""
    for index in range(int.from_bytes(data[4:6], "little")):
        start = int.from_bytes(data[18 + 16 * index : 22 + 16 * index], "little")
        head = data[start : start + 24]
        if head.startswith(b"\x89PNG"):
            width = int.from_bytes(head[16:20], "big")
            height = int.from_bytes(head[20:24], "big")
            yield width, height
            continue
        width = int.from_bytes(head[4:8], "little", signed=True)
        height = int.from_bytes(head[8:12], "little", signed=True)
        yield abs(width), abs(height) // 2  # a bitmap, with its mask below it


def size_of_file(path: str) -> tuple[int, int] | None:
    """Return (width, height) from a file's header, or None."""
    try:
        # opening a pipe would wait for somebody to write
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(path, "rb") as file:
            if file.read(len(ICON)) == ICON:
                file.seek(0)
                return max(_icon_sizes(file.read()), key=math.prod)
            file.seek(0)
            with opened(file) as image:
                return image.size
    except Exception:  # as reading it will say
        return None


def names_picture(text: str) -> bool:
    """Whether a text looks like a picture's address or file name."""
    if is_address(text):
        return True
    return text.lower().endswith(tuple(picture_suffixes()))


describe_source = partial(name_medium, noun="picture")


def each_picture(
    call: Callable[[ImageInput], Any], images: Sequence[ImageInput]
) -> list[Any]:
    """Call a function with each picture; of several, an error says which one it was."""
    made = []
    for number, source in enumerate(images, 1):
        try:
            made.append(call(source))
        except InvalidImage as error:
            has_name = isinstance(source, (str, Path)) and not is_data_uri(source)
            if len(images) == 1 or has_name:
                raise
            raise InvalidImage(
                f"picture {number} of {len(images)}: {error.reason}",
                advice=error.advice,
            ) from error
    return made


def own_image(
    source: ImageInput,
    policy: FetchPolicy = USUAL,
    max_pixels: int | None = DEFAULT_MAX_PIXELS,
) -> ImageInput:
    """Copy what the caller could still change.

    Undecoded PIL images become their files' bytes, so that thousands can wait. Foreign code's SystemExit becomes
    InvalidImage.
    """
    if is_data_uri(source):
        return fetch_image(source, policy)
    if isinstance(source, np.ndarray) and source.ndim > 1:
        # before it is copied: a mapped file may be larger than memory
        height, width = source.shape[:2]
        check_size(describe_source(source), width, height, max_pixels)
    own = next(own for kinds, own in _OWN if isinstance(source, kinds))
    with refused_as(
        InvalidImage, f"{describe_source(source)} cannot be decoded", _said
    ):
        return own(source)


def _own_array(source: Any) -> np.ndarray:
    name = describe_source(source)
    with refused_as(InvalidImage, f"{name} is no path, bytes, PIL image or array"):
        array = np.array(source)
    are_numbers = array.ndim > 0 and array.dtype.kind not in "USO"
    if are_numbers and not is_table(source):
        return array
    hint = ""
    if isinstance(source, io.TextIOBase):
        hint = "; a file is opened by 'rb'"
    elif array.ndim == 1:
        hint = "; several pictures go in a list, images=[first, second]"
    raise InvalidImage(
        f"{name} is no path, URL, bytes, PIL image or array of numbers{hint}"
    )


#: Two threads may submit one PIL image at once, and Pillow's files have one position.
_PILLOW_LOCK = threading.Lock()


def _own_pillow(image: Image.Image) -> ImageInput:
    with _PILLOW_LOCK:
        if isinstance(image, ImageFile.ImageFile):
            data = _file_bytes(image)
            if data is not None:
                return data
        if 0 in image.size:
            return image
        copy = image.copy()
        copy.info = dict(image.info)
        return copy


def _unchanged(source: ImageInput) -> ImageInput:
    return source


def _own_file(file: io.IOBase) -> bytes:
    return bytes(file.read())  # type: ignore[attr-defined]


#: How a picture is copied, by its type; the first that fits. Text files are refused as arrays.
_OWN: tuple[tuple[Any, Callable[[Any], ImageInput]], ...] = (
    ((str, Path, bytes, Fetched), _unchanged),
    (BytesIO, BytesIO.getvalue),
    ((bytearray, memoryview), bytes),
    (io.TextIOBase, _own_array),
    (io.IOBase, _own_file),
    (Image.Image, _own_pillow),
    (object, _own_array),
)


def _file_bytes(image: ImageFile.ImageFile) -> bytes | None:
    """Return an undecoded picture's file; None if it was decoded, or rereads could differ."""
    if not image.tile or image.format not in FORMATS:
        return None
    if image.fp is None:
        raise InvalidImage("the picture was closed before it was decoded")
    if image.tell() != 0 or _is_one_of_several(image):
        return None
    position = image.fp.tell()
    try:
        image.fp.seek(0)
        data = image.fp.read()
    finally:
        image.fp.seek(position)
    with opened_bytes(data) as again:
        is_same = (again.size, again.mode) == (image.size, image.mode)
    if is_same:
        return data
    return None


def _is_one_of_several(image: Image.Image) -> bool:
    """Whether a picture is the page of a TIFF that the caller has opened."""
    return image.format == "TIFF" and getattr(image, "n_frames", 1) > 1


def count_pixels(source: ImageInput) -> int:
    """Return the pixels in the header of a picture in memory, else 0."""
    source = contents(source)
    try:
        if isinstance(source, (Image.Image, RecalledUri)):
            return math.prod(source.size)
        if isinstance(source, np.ndarray):
            height, width = source.shape[:2]
            return int(height * width)
        if isinstance(source, bytes):
            return _count_in_file(source)
    except Exception:  # whoever decodes it will say what is wrong
        pass
    return 0


def _count_in_file(data: bytes) -> int:
    if data.startswith(ICON):
        return max(map(math.prod, _icon_sizes(data)))
    with opened_bytes(data) as image:
        return math.prod(image.size)


def fetch_image(
    source: ImageInput, policy: FetchPolicy, cancelled: Cancelled = NEVER
) -> ImageInput:
    """Read a path or URL into memory."""
    if isinstance(source, RecalledUri):
        source = source.uri
    if not isinstance(source, (str, Path)):
        return source
    with unread_as(InvalidImage):
        return fetch(source, policy, cancelled)


def _open(
    source: Any,
    max_pixels: int | None,
    policy: FetchPolicy,
    cancelled: Cancelled,
) -> Image.Image:
    name = describe_source(source)
    source = contents(fetch_image(source, policy, cancelled))
    data = source.getvalue() if isinstance(source, BytesIO) else bytes(source)
    if not data:
        raise InvalidImage(f"{name} is empty (0 bytes)")
    if data.startswith(ICON):
        for width, height in _icon_sizes(data):
            check_size(name, width, height, max_pixels)
    with refused_as(InvalidImage, f"{name} cannot be opened", _said):
        try:
            return opened_bytes(data)
        except Image.UnidentifiedImageError as error:
            raise InvalidImage(f"{name} is {_what_it_is(data)}") from error


def _what_it_is(data: bytes) -> str:
    """Say what a file is that Pillow does not read."""
    if heif.is_heif(data) and "HEIF" not in Image.OPEN:
        return f"a HEIC picture, and pillow-heif is not installed: {heif.REMEDY}"
    for begin, said in _NO_PICTURES:
        if re.match(begin, data[:1024], re.DOTALL | re.IGNORECASE):
            return said
    return "not a picture that Pillow can read"


def opened(source: Any) -> Image.Image:
    """Read a picture's header, without Pillow's global limit."""
    with _LIMIT_LOCK:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            Image.init()
            if source.read(8)[4:] == b"ftyp":  # a file of boxes, as HEIC pictures are
                heif.add_reader()
            source.seek(0)
            # of the formats that are read, those that this Pillow has, with what plugins have registered since
            formats = list(filter(Image.OPEN.__contains__, FORMATS))
            return Image.open(source, formats=formats)
        finally:
            Image.MAX_IMAGE_PIXELS = limit


class _Pieces(BytesIO):
    """A picture's file, which counts how often it is read until it is open."""

    left: float = MAX_PIECES

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise OSError(f"its header has over {MAX_PIECES:,} pieces")
        return super().read(size)


def opened_bytes(data: bytes) -> Image.Image:
    """Read the header of a picture in memory."""
    file = _Pieces(data)
    image = opened(file)
    file.left = math.inf
    return image


def page_numbers(image: Any) -> list[int]:
    """Return the frames of a TIFF that are pages, without previews and masks; of other pictures the first."""
    pages = [0]
    if image.format != "TIFF":
        return pages
    for number in itertools.count(1):
        before = image.tag_v2.next
        try:
            is_page = _is_page(image, number)
        except EOFError:
            break
        except Exception:
            # a page of an unknown kind, or one that is cut: it fails by itself, when it is read
            is_page = True
        if is_page:
            pages.append(number)
        if image.tag_v2.next == before:  # the file ends within this page
            break
    return pages


def _is_page(image: Any, number: int) -> bool:
    image.seek(number)
    return not image.tag_v2.get(_TIFF_KIND, 0) & _TIFF_NO_PAGE


def _check_pages(image: Image.Image, name: str) -> None:
    """Refuse a TIFF of several pages, of which the first alone would be seen. Leave it at that page."""
    if image.format != "TIFF":
        return
    with suppress(EOFError):
        for number in range(1, _MAX_PREVIEWS):
            if _is_page(image, number):
                raise InvalidImage(
                    f"{name} has several pages, and a picture is one of them",
                    advice="; `vlm-batch run` asks about each, and PIL's image.seek(number) goes to one",
                )
    image.seek(0)


def picture_suffixes() -> frozenset[str]:
    """Return the suffixes of pictures that can be read here."""
    Image.init()
    readable = set(FORMATS).intersection(Image.OPEN)
    suffixes = set(heif.SUFFIXES if heif.INSTALLED else ())
    for suffix, name in Image.EXTENSION.items():
        if name in readable:
            suffixes.add(suffix)
    return frozenset(suffixes)


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _from_array(source: Any) -> Image.Image:
    """Convert (H, W), (H, W, 3) or (H, W, 4) of uint8, floats in 0..1, or booleans (true is white)."""
    name = describe_source(source)
    with refused_as(InvalidImage, f"{name} is no path, bytes, PIL image or array"):
        array = np.asarray(source)
    channels = array.shape[2:]
    is_picture = array.ndim in (2, 3) and channels in ((), (3,), (4,))
    if not is_picture or array.dtype.kind not in "buif":
        raise InvalidImage(
            f"an array of shape {array.shape} and type {array.dtype} is no picture: "
            "(H, W), (H, W, 3) or (H, W, 4) of uint8 or floats in 0..1 is expected"
        )
    if array.size == 0:
        raise InvalidImage(f"an array of shape {array.shape} has no pixels")
    return Image.fromarray(_in_bytes(array))


def _in_bytes(array: np.ndarray) -> np.ndarray:
    """Return a picture's numbers in 0..255."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == bool:
        return array * np.uint8(255)
    if array.dtype.kind == "f":
        if not _lie_within(array, 0, 1):
            raise InvalidImage("an array of floats must hold values in 0..1")
        return np.round(array * 255).astype(np.uint8)
    if not _lie_within(array, 0, 255):
        raise InvalidImage("an array of integers must hold values in 0..255")
    return array.astype(np.uint8)


def _lie_within(array: np.ndarray, least: int, most: int) -> bool:
    """Whether all numbers lie in a range. NaN lies in none."""
    return bool(array.min() >= least and array.max() <= most)


#: Ranges of grey, and the white of each.
_WHITES_OF_FLOATS = ((-0.5, 1.5, 1.0), (0, 255, 255.0))
_WHITES_OF_INTEGERS = ((0, 255, 255.0), (0, 65535, 65535.0))


def _range_of(values: np.ndarray) -> tuple[float, float]:
    """Return black and white of grey in floats or more than 8 bits.

    These are 0 and 1, 255 or 65,535, else the minimum and maximum. Resampled floats may overshoot 0..1.
    """
    low, high = float(values.min()), float(values.max())
    whites = _WHITES_OF_FLOATS if values.dtype.kind == "f" else _WHITES_OF_INTEGERS
    for least, most, white in whites:
        if least <= low and high <= most:
            return 0.0, white
    return low, max(high, low + 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    mode = image.mode
    if mode == "F" or mode.startswith("I"):
        image = _with_grey_scaled(image)
    elif mode in ("La", "RGBa"):
        image = image.convert(mode.upper())
    is_transparent = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    if is_transparent:
        return _on_white(image)
    if image.mode == "RGB":
        return image  # ``convert`` would copy it
    return image.convert("RGB")


def _with_grey_scaled(image: Image.Image) -> Image.Image:
    """Return grey of more than 8 bits, or of floats, in 8: Pillow's own conversion clips at 255."""
    values = np.asarray(image)
    if image.mode == "F" and not np.isfinite(values).all():
        raise ValueError("it has values that are no numbers (NaN or infinity)")
    least, most = _range_of(values)
    scaled = np.empty(values.shape, np.uint8)
    # in eight bytes a value: a few rows at a time
    for top in range(0, len(values), _STRIP):
        rows = values[top : top + _STRIP].astype(np.float64)
        share = (rows - least) / (most - least)
        scaled[top : top + _STRIP] = np.clip(share * 255, 0, 255).round()
    made = Image.fromarray(scaled)
    clear = image.info.get("transparency")  # of a 16-bit PNG, in its own numbers
    if clear is not None:
        opaque = np.where(values == clear, np.uint8(0), np.uint8(255))
        made.putalpha(Image.fromarray(opaque))
    return made


def _on_white(image: Image.Image) -> Image.Image:
    """Lay a transparent picture on white."""
    width, height = image.size
    laid = Image.new("RGB", image.size)
    # in twelve bytes a pixel: a few rows at a time
    for top in range(0, height, _STRIP):
        box = (0, top, width, min(top + _STRIP, height))
        strip = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", strip.size, "white")
        laid.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return laid
