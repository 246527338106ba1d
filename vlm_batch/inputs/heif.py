"""HEIC pictures, as phones take them: Pillow reads them by pillow-heif, where that is installed."""

from __future__ import annotations

from importlib.util import find_spec

from PIL import Image

SUFFIXES = (".heic", ".heif", ".hif")
REMEDY = "pip install 'vlm-batch[heic]'"
#: Brands of ISO/IEC 23008-12, at the ninth byte of a file; the last two are of AVIF files, too.
_BRANDS = frozenset(
    {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}
)
#: Whether pillow-heif is installed, which takes a tenth of a second to import.
INSTALLED = find_spec("pillow_heif") is not None


def is_heif(head: bytes) -> bool:
    return head[4:8] == b"ftyp" and head[8:12] in _BRANDS


def add_reader() -> None:
    """Tell Pillow of pillow-heif, if it is installed and nobody has."""
    if "HEIF" in Image.OPEN or not INSTALLED:
        return
    import pillow_heif

    pillow_heif.register_heif_opener()
