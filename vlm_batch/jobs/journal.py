"""The files beside a job's output: a header with the settings of its first run, and a lock while it runs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from vlm_batch._version import __version__
from vlm_batch.jobs.lines import replace_file
from vlm_batch.jobs.rows import InvalidJob

#: The header's form. A later one that reads differently has another number.
FORM = 1


def check_writable(path: Path) -> None:
    """Raise InvalidJob for an output that cannot be written."""
    if path.is_dir():
        raise InvalidJob(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise InvalidJob(f"cannot write {path}: there is no such folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidJob(f"cannot write {path}: no permission")


def header_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.job.json")


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Hold an output for this process. Raises InvalidJob while another has it, and where its folder cannot be written."""
    lock = filelock.FileLock(output.with_name(f"{output.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        try:  # it says so, too, of a folder in which files cannot be made
            os.close(os.open(lock.lock_file, os.O_CREAT))
        except OSError as error:
            raise InvalidJob(f"cannot write {output}: {error.strerror}") from error
        raise InvalidJob(f"{output} is being written by another process") from None
    except OSError as error:
        raise InvalidJob(f"cannot write {output}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()  # and the file stays: who had opened it just before would hold one that nobody else finds


def read_header(output: Path) -> dict[str, Any] | None:
    """The settings of an output's first run; None without a header. Raises InvalidJob for one that is damaged."""
    path = header_path(output)
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        is_known = header["form"] == FORM
        settings = dict(header["settings"]) if is_known else {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidJob(f"{path} cannot be read ({error}); --force goes on without it") from error
    if not is_known:
        raise InvalidJob(f"{path} is of another version of vlm-batch ({header.get('vlm_batch')})")
    return settings


def write_header(output: Path, settings: Mapping[str, Any]) -> None:
    """Put the settings beside an output, whole or not at all. Raises CannotWrite."""
    text = json.dumps({"form": FORM, "vlm_batch": __version__, "settings": settings}, indent=1)
    replace_file(header_path(output), (text + "\n").encode())


def check_same(output: Path, settings: Mapping[str, Any]) -> None:
    """Raise InvalidJob if an output's answers were made with other settings, naming each."""
    before = read_header(output)
    if before is None:
        raise InvalidJob(f"{output} has no header beside it that says how it was made; --force goes on without it")
    now = json.loads(json.dumps(settings))
    other = [
        f"{name} was {_short(before.get(name))} and is {_short(now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and not (name == "tables" and _tables_agree(before, now))
    ]
    if other:
        raise InvalidJob(f"{output} was made with other settings: {'; '.join(other)}. --force goes on all the same")


def _tables_agree(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """True if every table that both runs read, and whose ids are places in it is what it was."""
    first, second = before.get("tables") or {}, now.get("tables") or {}
    return all(first[name] == second[name] for name in first.keys() & second.keys())


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
