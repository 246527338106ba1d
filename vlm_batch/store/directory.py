"""Saved rows as files: the prefix cache's second tier."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlm_batch.errors import InvalidCache
from vlm_batch.store.digest import DIGEST_SIZE, digest
from vlm_batch.store.files import (
    Identity,
    identity_of,
    read_head,
    read_row,
    write_row,
)
from vlm_batch.store.index import PrefixIndex
from vlm_batch.store.kept import make_private, note_bad
from vlm_batch.store.saved import SavedRow, common_length

#: The files' suffix and name pattern; other files are never touched.
SUFFIX = ".row.safetensors"
NAMES = "[0-9a-f]" * (2 * DIGEST_SIZE) + SUFFIX


@dataclass(frozen=True)
class _File:
    keys: np.ndarray
    nbytes: int


class RowFiles:
    """Rows of one model and settings in a directory that processes may share.

    Its files have at most ``max_bytes``; the least recently used goes first. Writes are atomic.
    """

    def __init__(self, directory: Path, max_bytes: int, identity: Identity) -> None:
        make_private(directory)
        self.directory = directory
        self.max_bytes = max_bytes
        self.identity = identity
        self._files: dict[str, _File] = {}
        self._index: PrefixIndex[str] = PrefixIndex()
        # left by a process that ended while writing
        for part in directory.glob(f".{NAMES}.*.part"):
            _remove(part)
        for _, name, _ in sorted(self._all_files()):
            self._take_up(directory / name)
        self._make_room()

    def __len__(self) -> int:
        return len(self._files)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self._files.values())

    def put(self, row: SavedRow) -> None:
        """Write a row unless it is there or cannot be filed. A full disk is ignored."""
        identity = self.identity
        contents = [row.keys, sorted(row.snapshots), identity.model, identity.settings]
        name = digest(contents).hex() + SUFFIX
        if name in self._files and self._use(name):
            return
        if row.nbytes > self.max_bytes:
            return
        try:
            file = _File(row.keys, write_row(self.directory / name, row, identity))
        except (InvalidCache, OSError):
            return
        for other, _ in list(self._index.candidates(row.keys)):
            keys = self._files[other].keys
            if common_length(keys, row.keys) == len(keys):  # the new row continues it
                self._drop(other)
        self._add(name, file)
        self._use(name)
        self._make_room()

    def find(self, keys: np.ndarray, beyond: int) -> SavedRow | None:
        """Read the row with most positions shared with ``keys`` (N, 3), if over ``beyond``."""
        while True:
            shared = {
                name: common_length(self._files[name].keys, keys)
                for name, _ in self._index.candidates(keys)
            }
            best = max(shared, key=lambda name: shared[name], default="")
            if shared.get(best, 0) <= beyond:
                return None
            try:
                row, identity = read_row(self.directory / best, self.max_bytes)
                self.identity.check(identity)
            except (InvalidCache, OSError) as error:
                # another process may have removed it
                if not isinstance(error, FileNotFoundError):
                    note_bad(self.directory / best, error)
                self._drop(best)
                continue
            self._use(best)
            return row

    def _use(self, name: str) -> bool:
        """Mark a file as used. False if it is gone."""
        try:
            now = time.time_ns()
            os.utime(self.directory / name, ns=(now, now))
        except FileNotFoundError:
            self._drop(name)
            return False
        except OSError:  # a read-only directory
            pass
        return True

    def _take_up(self, path: Path) -> None:
        try:
            header, keys = read_head(path, self.max_bytes)
            if identity_of(header) == self.identity:
                self._add(path.name, _File(keys, path.stat().st_size))
        except InvalidCache as error:
            note_bad(path, error)
            _remove(path)
        except OSError:
            return

    def _make_room(self) -> None:
        """Remove files of any process until the rest fit."""
        found = self._all_files()
        total = sum(nbytes for *_, nbytes in found)
        for _, name, nbytes in sorted(found):
            if total <= self.max_bytes:
                return
            total -= nbytes
            if name in self._files:
                self._drop(name)
            else:
                _remove(self.directory / name)

    def _all_files(self) -> list[tuple[int, str, int]]:
        """Return (when it was used, name, bytes) of each file, of any process."""
        found: list[tuple[int, str, int]] = []
        for path in self.directory.glob(NAMES):
            with contextlib.suppress(OSError):  # removed by another process
                file = path.stat()
                found.append((file.st_mtime_ns, path.name, file.st_size))
        return found

    def _add(self, name: str, file: _File) -> None:
        self._files[name] = file
        self._index.add(name, file.keys)

    def _drop(self, name: str) -> None:
        self._index.remove(name, self._files.pop(name).keys)
        _remove(self.directory / name)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
