"""Output to terminals and files; only terminals get colours."""

from __future__ import annotations

import os
import unicodedata
from typing import TextIO

from rich.console import Console

from vlm_batch.jobs.rows import spelled


def plain_text(text: str) -> str:
    """Escape control characters, and bytes that are not UTF-8."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in spelled(text))


def open_console(file: TextIO) -> Console:
    """Return a console that hardly wraps in files."""
    if file.isatty():
        return Console(file=file, highlight=False)
    return Console(file=file, highlight=False, width=max(160, int(os.environ.get("COLUMNS", "0") or 0)))
