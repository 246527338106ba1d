"""Files that clients upload, in a private folder: bounded, emptied by age, each seen by its owner alone.

A file is its content, named by its id, and beside it a JSON file that says whose it is. The content is written first: a
file without the second is not there, and goes at the next start.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel, ConfigDict

from vlm_batch.errors import describe
from vlm_batch.server.edge import PART_OF_CLIENT
from vlm_batch.server.errors import ApiError
from vlm_batch.server.private import (
    new_id,
    opened_private,
    private_folder,
    write_private,
)

logger = logging.getLogger("vlm_batch.server")

#: Most files of all clients; a record takes about 1 KB of memory.
MAX_FILES = 20_000


class Record(BaseModel):
    """Facts that lie beside a file's content, or says how far a batch is; files of another form are left out."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    owner: str


class Described(BaseModel):
    """OpenAI's description of a file or a batch, as far as it is read."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    id: str
    created_at: int
    expires_at: int


class DescribedFile(Described):
    bytes: int


class FileRecord(Record):
    file: DescribedFile


AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class StoredFile:
    """One file: whose it is, and OpenAI's description of it."""

    owner: str
    shown: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.shown["id"])

    @property
    def size(self) -> int:
        return int(self.shown["bytes"])

    @property
    def is_over(self) -> bool:
        return bool(self.shown["expires_at"] <= time.time())


class FileStore:
    """The folder, and what is in it. One process has it at a time; methods run on the event loop's thread.

    Attributes:
        folder: Where it is.
        used_by: File ids -> the batch that reads them; these are neither deleted nor do they end by age.
    """

    def __init__(self, folder: Path, most: int) -> None:
        """Open a folder, or make it.

        Args:
            folder: Private to this user afterwards.
            most: Bytes of all files.

        Raises:
            InvalidConfig: It cannot be written, or another server has it.
        """
        self.folder = folder
        self.used_by: dict[str, str] = {}
        self._most = most
        # bytes by owner: of uploads under way, and of files
        self._coming: Counter[str] = Counter()
        self._sizes: Counter[str] = Counter()
        self._files: dict[str, StoredFile] = {}
        self._lock = private_folder(folder, "--files")
        for record in self.records("file-", FileRecord):
            if self.path(record.file.id).exists():
                self._add(StoredFile(record.owner, record.file.model_dump()))

    def close(self) -> None:
        self._lock.release()

    # Records ---------------------------------------------------------------------------------------------------------

    def records(self, prefix: str, kind: type[AnyRecord]) -> Iterator[AnyRecord]:
        """Yield records whose ids have a prefix; one that is damaged, or of another form, is logged and left."""
        for path in sorted(self.folder.glob(f"{prefix}*.json")):
            try:
                record = kind.model_validate_json(path.read_bytes())
            except (OSError, ValueError) as error:
                logger.error("%s cannot be read: %s", path.name, describe(error))
                continue
            yield record

    def write_record(self, name: str, record: Mapping[str, Any]) -> None:
        """Write a record whole, or not at all. Raises CannotWrite."""
        path = self.path(f"{name}.json")
        write_private(path, json.dumps(record, ensure_ascii=False).encode())

    def path(self, name: str) -> Path:
        return self.folder / name

    def forget(self, name: str) -> None:
        """Delete a record, then what it describes."""
        gone = self._files.pop(name, None)
        if gone is not None:
            self._sizes[gone.owner] -= gone.size
        self.path(f"{name}.json").unlink(missing_ok=True)
        self.path(name).unlink(missing_ok=True)

    # Files -----------------------------------------------------------------------------------------------------------

    def find(self, file_id: str, owner: str, *, param: str | None = None) -> StoredFile:
        """Return an owner's file. Raises ApiError 404; another's is not there."""
        found = self._files.get(file_id)
        if found is None or found.owner != owner or self._is_over(found):
            said = f"there is no file {file_id[:100]!r}"
            raise ApiError(404, said, param=param)
        return found

    def read(self, file_id: str, owner: str) -> bytes:
        """Return the content of a file that a chat names. Raises ApiError 404."""
        found = self.find(file_id, owner, param="messages")
        return self.path(found.id).read_bytes()

    def of(self, owner: str) -> list[StoredFile]:
        """Return an owner's files, the oldest first."""
        files = self._files.values()
        mine = [one for one in files if one.owner == owner and not self._is_over(one)]
        return sorted(mine, key=lambda one: (one.shown["created_at"], one.id))

    def delete(self, file_id: str, owner: str) -> None:
        """Delete an owner's file. Raises ApiError 404, or 409 while a batch reads it."""
        found = self.find(file_id, owner)
        if file_id in self.used_by:
            said = f"{self.used_by[file_id]} reads this file; cancel it first"
            raise ApiError(409, said)
        self.forget(found.id)

    def put(
        self, name: str, owner: str, filename: str, purpose: str, seconds: int
    ) -> StoredFile:
        """Take content that is there, whole, under an id. Raises CannotWrite."""
        now = int(time.time())
        shown = {
            "id": name,
            "object": "file",
            "bytes": self.path(name).stat().st_size,
            "created_at": now,
            "expires_at": now + seconds,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        self.write_record(name, {"owner": owner, "file": shown})
        return self._add(StoredFile(owner, shown))

    def _add(self, file: StoredFile) -> StoredFile:
        before = self._files.get(file.id)
        if before is not None:
            self._sizes[before.owner] -= before.size
        self._files[file.id] = file
        self._sizes[file.owner] += file.size
        return file

    @contextmanager
    def coming(self, owner: str) -> Iterator[Coming]:
        """Take in an upload; what was not ``kept`` is deleted."""
        path = self.path(f".{new_id('upload')}")
        with open(path, "xb", opener=opened_private) as file:
            one = Coming(path, file, lambda size: self._count(owner, size))
            try:
                yield one
            finally:
                self._coming[owner] -= one.size
                path.unlink(missing_ok=True)

    def _count(self, owner: str, size: int) -> None:
        """Count bytes of an upload. Raises ApiError 413 if there is no room for them."""
        self._coming[owner] += size
        mine = self._sizes[owner] + self._coming[owner]
        everything = self.size + self._coming.total()
        is_full = everything > self._most or mine > self._most * PART_OF_CLIENT
        if is_full or len(self._files) >= MAX_FILES:
            held = f"{self.size:,} bytes of {self._most:,} in {len(self._files)} files"
            said = f"there is no room for this file ({held}); delete some"
            raise ApiError(413, said, headers={"Connection": "close"})

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self._sizes.total()

    # Age -------------------------------------------------------------------------------------------------------------

    def _is_over(self, file: StoredFile) -> bool:
        return file.is_over and file.id not in self.used_by

    def sweep(self) -> None:
        """Delete files that are over."""
        for one in list(self._files.values()):
            if self._is_over(one):
                self.forget(one.id)

    def clear(self, growing: Iterable[str]) -> None:
        """Delete what a killed process has left: uploads that did not end, and content that no record names.

        Args:
            growing: Names of content that batches write.
        """
        known = {*self._files, *growing}
        for path in self.folder.iterdir():
            is_left = path.name.startswith((".upload_", ".file-", ".batch_"))
            is_nameless = path.name.startswith("file-") and not path.suffix
            if is_left or (is_nameless and path.name not in known):
                path.unlink(missing_ok=True)


class Coming:
    """An upload under way."""

    def __init__(
        self, path: Path, file: BinaryIO, count: Callable[[int], None]
    ) -> None:
        self.size = 0
        self._path = path
        self._file = file
        self._count = count

    def write(self, data: bytes) -> None:
        """Take bytes. Raises ApiError 413 if there is no room."""
        self.size += len(data)
        self._count(len(data))
        self._file.write(data)

    def keep(self, target: Path) -> None:
        """Give the content, which is on the disk afterwards, its name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._path, target)
