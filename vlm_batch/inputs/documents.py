"""Pages of PDF and TIFF files as pictures. Every failure is an InvalidImage."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from PIL import Image

from vlm_batch.errors import InvalidImage
from vlm_batch.inputs.images import (
    DEFAULT_MAX_PIXELS,
    MAX_SIDE,
    load_image,
    opened,
    opened_bytes,
    page_numbers,
)
from vlm_batch.inputs.refusals import refused_as

DEFAULT_DPI = 150
PDF_SUFFIXES = (".pdf",)
TIFF_SUFFIXES = (".tif", ".tiff")
POINTS_PER_INCH = 72
NEEDS_PDFIUM = "PDF files need pypdfium2: pip install 'vlm-batch[pdf]'"
_NO_PAGES = "it has no pages"
#: PDFium serves one thread at a time, whatever the document.
_PDFIUM_TURN = threading.Lock()


def count_pages(path: str) -> int:
    """Count a file's pages: those of a PDF or a TIFF, 1 for any other picture.

    Raises:
        InvalidImage: The file is damaged, encrypted, missing or without pages, or PDFium is not installed.
    """
    if path.lower().endswith(PDF_SUFFIXES):
        return _count_pdf_pages(path)
    try:
        with open(path, "rb") as file, closing(opened(file)) as image:
            return len(page_numbers(image))
    except Exception as error:
        raise InvalidImage(f"{path} cannot be opened: {error}") from error


def load_page(
    path: str, number: int, dpi: int = DEFAULT_DPI, longest: int | None = None
) -> Image.Image:
    """Read page ``number``, counted from 0, as RGB.

    Args:
        dpi: Resolution of a PDF's pages.
        longest: Pixels of the longest side of a PDF's page, whatever its size, in the place of ``dpi``.

    Raises:
        InvalidImage: The page is missing, damaged or too large, or holds nothing but a form that cannot be drawn.
    """
    try:
        if path.lower().endswith(PDF_SUFFIXES):
            return _render(path, number, dpi, longest)
        with open(path, "rb") as file:
            data = file.read()
        with closing(opened_bytes(data)) as image:
            image.seek(page_numbers(image)[number])
            return load_image(image)
    except Exception as error:
        raise InvalidImage(
            f"{path}#{number + 1} cannot be rendered: {error}"
        ) from error


# PDF
# ---------------------------------------------------------------------------------------------------------------------


def has_pdfium() -> bool:
    try:
        _pdfium()
    except InvalidImage:
        return False
    return True


def _pdfium() -> Any:
    try:
        import pypdfium2
    except ImportError as error:
        raise InvalidImage(NEEDS_PDFIUM) from error
    # of forms in XFA it says how to build PDFium anew; ``_check_form`` says what is wrong, of the pages that lack something
    logging.getLogger("pypdfium2._helpers.document").setLevel(logging.ERROR)
    return pypdfium2


@contextmanager
def _opened_pdf(path: str) -> Iterator[Any]:
    """Open a PDF with its forms, without which PDFium leaves out what was filled in."""
    pdfium = _pdfium()
    with _PDFIUM_TURN:
        _forget_error(pdfium)
        with closing(pdfium.PdfDocument(path)) as document:
            document.init_forms()
            yield document


def _forget_error(pdfium: Any) -> None:
    """Have PDFium say that a file is missing: of a document without pages it names the error of an earlier one."""
    pdfium.raw.FPDF_LoadDocument(b"", None)


def _count_pdf_pages(path: str) -> int:
    what = f"{path} cannot be read as a PDF"
    # damaged, encrypted, missing: the library has errors of its own
    with refused_as(InvalidImage, what, _said), _opened_pdf(path) as document:
        count = len(document)
    if not count:
        raise InvalidImage(f"{what}: {_NO_PAGES}")
    return count


def _said(error: BaseException) -> str:
    message = str(error)
    if "password" in message.lower():
        return f"{message} It opens with a password alone; save a copy without one"
    # what PDFium says of a document without pages (``_forget_error``); the library itself looks for missing files
    if "File access error" in message:
        return _NO_PAGES
    return message


def _render(path: str, number: int, dpi: int, longest: int | None) -> Image.Image:
    with _opened_pdf(path) as document:
        page = document[number]
        scale = dpi / POINTS_PER_INCH
        if longest is not None:
            scale = longest / max(1, *page.get_size())
        width, height = (round(side * scale) for side in page.get_size())
        if min(width, height) < 1:
            raise InvalidImage(
                f"it has no area ({width} x {height} pixels at {dpi} dots an inch)"
            )
        if width * height > DEFAULT_MAX_PIXELS or max(width, height) > MAX_SIDE:
            raise InvalidImage(
                f"it would have {width} x {height} pixels at {dpi} dots an inch; --dpi makes it smaller"
            )
        has_fields = _has_fields(page)
        _check_form(document, has_fields)
        if has_fields and document.formenv is None:
            page = _flattened(document, page, number)
        return page.render(scale=scale).to_pil().convert("RGB")


def _has_fields(page: Any) -> bool:
    from pypdfium2 import raw

    for index in range(raw.FPDFPage_GetAnnotCount(page)):
        annotation = raw.FPDFPage_GetAnnot(page, index)
        kind = raw.FPDFAnnot_GetSubtype(annotation)
        raw.FPDFPage_CloseAnnot(annotation)
        if kind == raw.FPDF_ANNOT_WIDGET:
            return True
    return False


def _check_form(document: Any, has_fields: bool) -> None:
    """Refuse a page that Adobe's reader alone would fill: it says "Please wait", whatever the form holds."""
    from pypdfium2 import raw

    if document.get_formtype() == raw.FORMTYPE_XFA_FULL and not has_fields:
        raise InvalidImage(
            "it is a form of Adobe's kind XFA, which draws its pages anew in Adobe's reader; print it to a PDF there"
        )


def _flattened(document: Any, page: Any, number: int) -> Any:
    """Make fields part of their page, where the document has lost its list of them, as after a merge."""
    from pypdfium2 import raw

    if raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY) == raw.FLATTEN_FAIL:
        raise InvalidImage("its form cannot be drawn")
    page.close()
    return document[number]
