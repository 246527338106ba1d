"""Output to terminals and files; only terminals get colours."""

from __future__ import annotations

import os
import unicodedata
from typing import TextIO

from rich.console import Console


def plain_text(text: str) -> str:
    """Escape control characters, and bytes that are not UTF-8."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _WRITTEN_OUT else _escaped(c) for c in text)


_WRITTEN_OUT = ("Cc", "Cs")


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte of a name that is no UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def open_console(file: TextIO) -> Console:
    """Return a console that hardly wraps in files."""
    if file.isatty():
        return Console(file=file, highlight=False)
    return Console(file=file, highlight=False, width=max(160, int(os.environ.get("COLUMNS", "0") or 0)))
