"""Files in cache folders: private to their user, and checked before they are believed."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_log = logging.getLogger(__name__)


def make_private(folder: Path) -> None:
    """Make a folder, and those that it lies in, for this user alone, whatever the umask; leave what is there.

    Raises OSError.
    """
    if folder.is_dir():
        return
    make_private(folder.parent)
    # another process may just have made it
    folder.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def opened(
    path: str | Path, max_bytes: int | None = None
) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file; yield it and its bytes. A pipe or a device is not touched: it may wait, or never end.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is no regular file, or has more than ``max_bytes``.
    """
    # before it is opened, which alone may wait or wind a tape
    _check_regular(os.stat(path))
    with open(path, "rb", opener=_open_at_once) as file:
        found = os.fstat(file.fileno())
        _check_regular(found)
        if max_bytes is not None and found.st_size > max_bytes:
            raise ValueError(f"it has {found.st_size:,} bytes, more than {max_bytes:,}")
        yield file, found.st_size


def note_bad(path: str | Path, error: BaseException) -> None:
    """Log that a file counts as none."""
    _log.warning(
        "%s is left out, as if it were not there: %s",
        path,
        str(error) or type(error).__name__,
    )


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
