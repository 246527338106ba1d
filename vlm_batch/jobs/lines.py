"""Files that are written whole or not at all, and files of JSON lines that are only ever added to, a whole line at a time."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vlm_batch.errors import VLMBatchError
from vlm_batch.jobs.rows import InvalidJob, spelled

Record = dict[str, Any]

#: Seconds after which written lines are put on the disk itself; a process that dies loses nothing either way.
SYNC_SECONDS = 5.0


class CannotWrite(VLMBatchError):
    """A file cannot be written; the message is one line for the user. What was written before is whole."""


def encoded(record: Mapping[str, Any]) -> bytes:
    """One record as a line, in UTF-8 whatever names it has: other readers of JSON take no lone surrogates."""
    return (spelled(json.dumps(record, ensure_ascii=False, allow_nan=False), "\\\\") + "\n").encode()


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


def repair(path: Path) -> None:
    """Cut what a killed process left of its last line; a last line that only lacks its end gets it."""
    size, torn = path.stat().st_size, torn_bytes(path)
    with open(path, "rb+") as file:
        if torn:
            file.truncate(size - torn)
        elif size and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")


def torn_bytes(path: Path) -> int:
    """The bytes at a file's end that are part of a line only."""
    if not path.stat().st_size:
        return 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        last = data[data.rfind(b"\n") + 1 :]
    try:
        return 0 if not last or isinstance(json.loads(last), dict) else len(last)
    except ValueError:
        return len(last)


def has_lines(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def read_answers(path: Path) -> Iterator[Record]:
    """The answers in a file of lines, but for what a killed process left of its last one. Raises InvalidJob."""
    if not has_lines(path):
        return
    left = path.stat().st_size - torn_bytes(path)
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            left -= len(line)
            if left < 0:
                return
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                wrong = None if isinstance(record, dict) else "is not an object"
            except ValueError as error:
                wrong = f"is not JSON: {error}"
            if wrong is not None:
                raise InvalidJob(f"{path}, line {number} {wrong}; take the line out, or begin anew with --overwrite")
            if "id" not in record:
                raise InvalidJob(f"{path} is no output of a job: a line has no id")
            yield record


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside a file, for what takes its place as a whole at the end of the block, or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)
    try:
        yield beside
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all. Raises CannotWrite."""
    try:
        with replacing(path) as beside:
            beside.write_bytes(data)
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}") from error
