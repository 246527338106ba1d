"""An output as a job finds it: the permission to write there, and the answers that it has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vlm_batch.jobs import journal
from vlm_batch.jobs.formats import Record
from vlm_batch.jobs.lines import LineFile, read_records, torn_bytes
from vlm_batch.jobs.rows import Ids, InvalidJob


def check_writable(path: Path) -> None:
    """Raise InvalidJob for an output that cannot be written."""
    folder = path.parent
    why = None
    if path.is_dir():
        why = "it is a folder"
    elif not folder.is_dir():
        why = "there is no such folder"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "no permission"
    if why is not None:
        raise InvalidJob(f"cannot write {path}: {why}")


def check_rule(
    path: Path, is_begun: bool, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool
) -> None:
    """Refuse, resume or overwrite: raise InvalidJob for an output that has answers, unless one of these was said."""
    if resume and overwrite:
        raise InvalidJob("--resume and --overwrite exclude each other")
    if is_begun and not resume and not overwrite:
        raise InvalidJob(f"{path} has answers already: --resume goes on with them, --overwrite replaces them")
    if is_begun and resume and not force:
        journal.check_same(path, settings)


def is_device(path: Path) -> bool:
    """True if something other than a file is there: a device, a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


def has_lines(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def read_answers(path: Path) -> Iterator[Record]:
    """The answers in a file of lines, but for what a killed process left of its last one. Raises InvalidJob."""
    if not has_lines(path):
        return
    whole = path.stat().st_size - torn_bytes(path)
    try:
        for record in read_records(path, whole):
            if "id" not in record:
                raise InvalidJob(f"{path} is no output of a job: a line has no id")
            yield record
    except InvalidJob:
        raise
    except ValueError as error:
        raise InvalidJob(f"{error}; take the line out, or begin anew with --overwrite") from error


def ids_of(records: Iterable[Record]) -> tuple[Ids, Ids]:
    """The ids of answers, and of failures."""
    answered, failed = Ids(), Ids()
    for record in records:
        (failed if record.get("error") else answered).add(str(record["id"]))
    return answered, failed


def rewrite(path: Path, records: Iterable[Record]) -> None:
    """Replace a file of lines by other ones, whole or not at all. Raises CannotWrite."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        beside.unlink()
    file = LineFile(beside)
    try:
        for record in records:
            file.append(record)
        file.close()
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
