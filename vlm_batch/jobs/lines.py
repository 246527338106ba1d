"""A file of JSON lines that is only ever added to: whole lines or none, whatever happens to the process or the disk."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vlm_batch.errors import VLMBatchError

#: Seconds after which written lines are put on the disk itself; a process that dies loses nothing either way.
SYNC_SECONDS = 5.0


class CannotWrite(VLMBatchError):
    """A file cannot be written; the message is one line for the user. What was written before is whole."""


def encoded(record: Mapping[str, Any]) -> bytes:
    """One record as a line. A name that is no UTF-8 is written with JSON's escapes, and read back as it was."""
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", errors="backslashreplace")


class LineFile:
    """Adds lines to a file. A line that does not fit is taken back whole, with CannotWrite.

    The file is opened at its end, behind its last whole line (``repair``).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            if self.path.exists() and self.path.is_file():
                repair(self.path)
            self._file: BinaryIO = open(self.path, "ab", buffering=0)  # noqa: SIM115  (closed by close)
        except OSError as error:
            raise CannotWrite(f"cannot write {path}: {error.strerror}") from error
        self._synced = time.monotonic()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line; it is the operating system's when this returns."""
        line = encoded(record)
        begin = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self.sync()
        except OSError as error:
            with contextlib.suppress(OSError):  # not every file can be cut: a device, a pipe
                os.ftruncate(self._file.fileno(), begin)
            raise CannotWrite(
                f"cannot write {self.path}: {error.strerror}; what was written before is whole"
            ) from error

    def sync(self) -> None:
        """Flush written lines to the disk."""
        with contextlib.suppress(OSError):  # a device or a pipe has no disk
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        self.sync()
        self._file.close()


def repair(path: Path) -> int:
    """Cut what a killed process left of its last line; a last line that only lacks its end gets it. Returns bytes cut."""
    torn = torn_bytes(path)
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if torn:
            file.truncate(size - torn)
            return torn
        if size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return 0


def torn_bytes(path: Path) -> int:
    """The bytes at a file's end that are part of a line only."""
    with open(path, "rb") as file:
        size = end = file.seek(0, os.SEEK_END)
        tail = b""
        while end and b"\n" not in tail:  # backwards, a block at a time: the file may be large
            begin = max(0, end - 65536)
            file.seek(begin)
            tail = file.read(end - begin) + tail
            end = begin
    last = tail.rpartition(b"\n")[2] if size else b""
    return 0 if not last or _is_record(last) else len(last)


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def read_records(path: str | Path, size: int | None = None) -> Iterator[dict[str, Any]]:
    """The records of a file of lines, or of its first ``size`` bytes. Raises ValueError that names a line that is none."""
    read = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            read += len(line)
            if size is not None and read > size:
                return
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number} is not an object")
            yield record
