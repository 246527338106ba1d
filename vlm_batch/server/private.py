"""Clients' belongings: folders of this user's alone, ids that cannot be guessed, and how long they are kept."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import filelock

from vlm_batch.jobs.lines import replacing, writing
from vlm_batch.server.config import InvalidConfig

#: Seconds for which files and responses are kept, if nothing else is said: OpenAI's age of batch files.
AGE = 30 * 24 * 3600


def new_id(kind: str) -> str:
    """Return an id that cannot be guessed."""
    return f"{kind}_{secrets.token_hex(24)}"


def private_folder(folder: Path, flag: str) -> filelock.FileLock:
    """Make a folder private to this user, and take it for this process; ``release`` gives it back.

    Raises:
        InvalidConfig: It cannot be written, or another server has it.
    """
    # given back by another thread than takes it
    lock = filelock.FileLock(folder / "lock", timeout=0, thread_local=False)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock.acquire()
    except filelock.Timeout as error:
        said = f"{flag}: another server has {folder}; give each one of its own"
        raise InvalidConfig(said) from error
    except OSError as error:
        said = f"{flag}: {folder} cannot be used: {error.strerror}"
        raise InvalidConfig(said) from error
    return lock


def opened_private(path: str, flags: int) -> int:
    """Open a file that this user alone may read, as ``open``'s ``opener``."""
    return os.open(path, flags, 0o600)


def write_private(path: Path, data: bytes) -> None:
    """Write a file of this user's whole, or not at all. Raises CannotWrite."""
    with (
        writing(path),
        replacing(path) as beside,
        open(beside, "xb", opener=opened_private) as file,
    ):
        file.write(data)
