"""Output to terminals and files; only terminals get colours."""

from __future__ import annotations

import os
import sys
import unicodedata
from typing import TextIO

from rich.console import Console

from vlm_batch.jobs.rows import spelled


def brief(text: str, most: int) -> str:
    """Return the beginning of a text, and how long it is if that is not all."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def plain_text(text: str, most: int | None = None) -> str:
    """Escape control characters, and bytes that are not UTF-8, of at most so many characters."""
    text = text if most is None else brief(text, most)
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}"
        for c in spelled(text)
    )


def beside(target: str | None) -> TextIO:
    """Return where tables go: to standard error, if a program reads what is written to standard output (-)."""
    return sys.stderr if target == "-" else sys.stdout


def open_console(file: TextIO) -> Console:
    """Return a console that hardly wraps in files."""
    if file.isatty():
        return Console(file=file, highlight=False)
    return Console(
        file=file,
        highlight=False,
        width=max(160, int(os.environ.get("COLUMNS", "0") or 0)),
    )
