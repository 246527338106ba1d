"""HEIC pictures, as phones take them: Pillow reads them by pillow-heif, where that is installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from PIL import Image

SUFFIXES = (".heic", ".heif", ".hif")
REMEDY = "pip install 'vlm-batch[heic]'"
#: Brands of ISO/IEC 23008-12, at the ninth byte of a file; the last two are of AVIF files, too.
_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
#: Bytes that tell a file of boxes, of which HEIC is one kind.
HEAD = 12


def has_boxes(head: bytes) -> bool:
    return head[4:8] == b"ftyp"


def is_heif(head: bytes) -> bool:
    return has_boxes(head) and head[8:HEAD] in _BRANDS


def is_readable() -> bool:
    """Whether HEIC pictures can be read, without importing what reads them."""
    return "HEIF" in Image.OPEN or _is_installed()


@cache
def _is_installed() -> bool:
    return find_spec("pillow_heif") is not None


def register() -> None:
    """Tell Pillow of pillow-heif, if it is installed and nobody has."""
    if "HEIF" in Image.OPEN or not _is_installed():
        return
    import pillow_heif

    pillow_heif.register_heif_opener()
