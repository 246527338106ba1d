"""Atomic file replacement, and append-only JSON lines."""

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

#: Seconds between fsyncs. A killed process loses nothing either way.
SYNC_SECONDS = 5.0
#: Bytes that are copied at once.
COPY_BYTES = 1 << 20


class CannotWrite(VLMBatchError):
    """A file cannot be written; earlier lines are whole."""


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raise CannotWrite for what the operating system says while a file is written."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}") from error


def encoded(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of valid UTF-8."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return (spelled(text, "\\\\") + "\n").encode()


class LineFile:
    """Appends whole lines to a file, or raises CannotWrite.

    ``is_watched``: a file that is deleted, moved, replaced or cut meanwhile is an error, too. What a deleted one held is
    written again.
    """

    def __init__(self, path: str | Path, *, is_watched: bool = False) -> None:
        self.path = Path(path)
        self._is_watched = is_watched and not is_device(self.path)
        self._size = 0
        with writing(path):
            if self.path.is_file():
                repair(self.path)
            mode = "a+b" if self._is_watched else "ab"
            self._file: BinaryIO = open(self.path, mode, buffering=0)  # type: ignore[assignment]  # noqa: SIM115
        self._synced = time.monotonic()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line through to the operating system."""
        line = encoded(record)
        self.check()
        begin = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self.sync()
        except OSError as error:
            # not every file can be cut: a device, a pipe
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), begin)
            raise CannotWrite(
                f"cannot write {self.path}: {error.strerror}; what was written before is whole"
            ) from error
        self._size = begin + len(line)

    def check(self) -> None:
        """Raise CannotWrite if the path leads no longer to what was written."""
        if not self._is_watched:
            return
        ours = os.fstat(self._file.fileno())
        there = _stat_of(self.path)
        if there is None or not os.path.samestat(ours, there):
            raise self._is_elsewhere(ours, there)
        if ours.st_size < self._size:
            raise CannotWrite(
                f"{self.path} was cut from {self._size:,} to {ours.st_size:,} bytes while it was written"
            )

    def _is_elsewhere(
        self, ours: os.stat_result, there: os.stat_result | None
    ) -> CannotWrite:
        if ours.st_nlink:
            return CannotWrite(
                f"{self.path} was moved while it was written; its answers are where it was moved to"
            )
        if there is None:
            return CannotWrite(
                f"{self.path} was deleted while it was written; {self._written_to(self.path)}"
            )
        beside = self.path.with_name(f"{self.path.name}.replaced")
        return CannotWrite(
            f"{self.path} was replaced by another file while it was written; {self._written_to(beside)}"
        )

    def _written_to(self, path: Path) -> str:
        """Write what the file held to another one. Returns where it is."""
        try:
            with replacing(path) as beside, open(beside, "wb") as file:
                place = 0
                while part := os.pread(self._file.fileno(), COPY_BYTES, place):
                    file.write(part)
                    place += len(part)
        except OSError as error:
            return f"its answers are lost ({path}: {error.strerror})"
        return f"the answers until then are in {path} again"

    def sync(self) -> None:
        with contextlib.suppress(OSError):  # a device or a pipe has no disk
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        self.sync()
        self._file.close()


def repair(path: Path) -> None:
    """Cut off an incomplete last line, or end a complete one."""
    torn = torn_bytes(path)
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if torn:
            file.truncate(size - torn)
        if torn or not size:
            return
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.write(b"\n")


def torn_bytes(path: Path) -> int:
    """Measure an incomplete last line."""
    if not path.stat().st_size:
        return 0
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        last = data[data.rfind(b"\n") + 1 :]
    try:
        is_whole = isinstance(json.loads(last), dict)
    except (ValueError, RecursionError):
        is_whole = False
    return 0 if is_whole else len(last)


def has_lines(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def read_answers(path: Path) -> Iterator[Record]:
    """Yield a file's records, without an incomplete last one."""
    if not has_lines(path):
        return
    left, is_output = path.stat().st_size - torn_bytes(path), False
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            left -= len(line)
            if left < 0:
                return
            if not line.strip():
                continue
            try:
                record = _record_of(line)
            except ValueError as error:
                why = f"line {number} {error}"
                if not is_output:
                    raise no_output(path, why) from error
                raise InvalidJob(f"{path}, {why}; take the line out") from error
            is_output = True
            yield record


def _record_of(line: bytes) -> Record:
    """Parse a line. Raises ValueError, which says what it is instead of a record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError("is not an object")
    if "id" not in record:
        raise ValueError("has no id")
    return record


def _stat_of(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def no_output(path: Path, why: str) -> InvalidJob:
    """Return the error of a file that no job wrote."""
    return InvalidJob(
        f"{path} is no output of a job: {why}; name the file that vlm-batch run --out wrote"
    )


def is_device(path: Path) -> bool:
    """Whether a path leads to a device or a pipe."""
    is_ordinary = path.is_file() or path.is_dir()
    return not is_ordinary and path.exists()


def linked_file(path: Path) -> Path:
    """Return the file that a link leads to, which need not exist. Others, devices and pipes stay as they are named."""
    is_link = path.is_symlink() and not is_device(path)
    if is_link:
        return Path(os.path.realpath(path))
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces the file of ``path`` after the block; links to it stay links.

    A device or a pipe is written itself.
    """
    if is_device(path):
        yield path
        return
    path = linked_file(path)
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
    with writing(path), replacing(path) as beside:
        beside.write_bytes(data)
