"""Documents in chats: their pages as pictures, and plain text as text."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlm_batch.errors import InvalidImage
from vlm_batch.inputs.documents import count_pages, load_page
from vlm_batch.inputs.fetch import Cancelled
from vlm_batch.server.errors import ApiError, refusal

#: The type of a part that holds a document: a data URI, an http(s) URL, a file or base64.
DOCUMENT = "document"

#: How pictures' files begin; those of phones have their mark behind four bytes.
PICTURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"II*\0", b"MM\0*")


def num_page_bytes(part: Mapping[str, Any]) -> int:
    """Return the bytes that a page's picture holds, of 3 a pixel; a file's own are counted already."""
    if part["type"] == "text":
        return len(part["text"])
    if isinstance(part["image"], bytes):
        return 0
    width, height = part["image"].size
    return int(width * height * 3)


def pages_of(
    data: bytes, name: str, most: int, cancelled: Cancelled
) -> list[dict[str, Any]]:
    """Return a PDF's pages as parts with pictures; text as a part with text; a picture as it is.

    Raises:
        ApiError: It is none of them, or has more than ``most`` pages.
    """
    if data.startswith(PICTURES) or data[4:8] == b"ftyp":
        return [{"type": "image", "image": data}]
    if data[:1024].find(b"%PDF-") < 0:
        return [{"type": "text", "text": _text_of(data, name)}]
    with tempfile.TemporaryDirectory(prefix="vlm-batch-") as folder:
        path = str(Path(folder) / "document.pdf")
        Path(path).write_bytes(data)
        try:
            count = count_pages(path)
            if count > most:
                said = f"{name} has {count} pages; at most {most} go into one request"
                raise ApiError(400, said, param="messages")
            pages = []
            for number in range(count):
                cancelled.check()
                pages.append({"type": "image", "image": load_page(path, number)})
            return pages
        except InvalidImage as error:
            # with the document's name in the place of the file's
            reason = str(error).replace(path, name)
            raise refusal(InvalidImage(reason)) from error


def _text_of(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        said = f"{name} is neither a PDF nor text in UTF-8"
        raise ApiError(400, said, param="messages", code="unreadable") from error
