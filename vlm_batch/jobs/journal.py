"""Files beside an output: a header (settings), a lock; and what files hold."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import filelock

from vlm_batch._version import __version__
from vlm_batch.checks import parse_json
from vlm_batch.errors import describe, shown
from vlm_batch.jobs.lines import linked_file, replace_file
from vlm_batch.jobs.rows import InvalidJob

#: Version of the header's form.
FORM = 1
#: The setting with the stamps of a model's files, and the suffixes of those that decide answers.
MODEL_FILES = "model_files"
MODEL_SUFFIXES = (
    ".safetensors",
    ".npz",
    ".json",
    ".jinja",
    ".model",
    ".txt",
    ".tiktoken",
    ".py",
)

#: The setting of CSV and TSV files in which no spreadsheet finds a formula.
SAFE = "spreadsheet_safe"

#: Settings of a header that are read as more than values to compare.
_KINDS: Mapping[str, tuple[type, ...]] = {
    MODEL_FILES: (dict,),
    "tables": (dict,),
    "prompts": (list,),
    "dpi": (int, NoneType),
}

#: Bytes of a compared block; most blocks of a picture or table, and of a model's file.
BLOCK, MEDIUM_BLOCKS, MODEL_BLOCKS = 1 << 14, 16, 1024
#: Most characters of a setting's value in a message.
MOST_SHOWN = 60


def check_writable(path: Path) -> None:
    if path.is_dir():
        raise InvalidJob(f"cannot write {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise InvalidJob(
            f"cannot write {path}: there is no folder {path.parent}; make it first"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidJob(f"cannot write {path}: no permission")


def header_path(output: Path) -> Path:
    output = linked_file(output)
    return output.with_name(f"{output.name}.job.json")


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Lock an output's file, by whatever links. Raises InvalidJob if another process has it."""
    output = linked_file(output)
    lock = filelock.FileLock(output.with_name(f"{output.name}.lock"), timeout=0)
    with _writable(output):
        try:
            lock.acquire()
        except filelock.Timeout:
            # filelock raises Timeout for a read-only folder, too
            os.close(os.open(lock.lock_file, os.O_CREAT))
            raise _taken(output) from None
    try:
        with _locked_itself(output):
            yield
    finally:
        # keeps the file: a process that has just opened it would lock a deleted one
        lock.release()


@contextlib.contextmanager
def _writable(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidJob(f"cannot write {output}: {error.strerror}") from error


@contextlib.contextmanager
def _locked_itself(output: Path) -> Iterator[None]:
    """Lock the file, too, which may have other names in other folders (hard links)."""
    try:
        file = open(output, "rb")  # noqa: SIM115  (closed below)
    except OSError:  # not there yet, so it has no other name
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken(output) from None
        except OSError:  # a file system without locks
            pass
        yield


def _taken(output: Path) -> InvalidJob:
    return InvalidJob(
        f"{output} is being written by another process; wait for it, or name another file"
    )


def read_header(output: Path) -> dict[str, Any] | None:
    path = header_path(output)
    try:
        header = parse_json(path.read_bytes())
        if header["form"] == FORM:
            return _checked(header["settings"])
        made_by = header["vlm_batch"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidJob(
            f"{path} cannot be read ({describe(error)}); --force goes on without it"
        ) from error
    raise InvalidJob(
        f"{path} is of another version of vlm-batch ({made_by}): go on with that one, or name another file"
    )


def _checked(settings: Any) -> dict[str, Any]:
    """Return a header's settings. Raises ValueError for what no header has."""
    if not isinstance(settings, dict):
        raise ValueError(f"its settings are {shown(settings)}")
    for name, kind in _KINDS.items():
        if name in settings and not isinstance(settings[name], kind):
            raise ValueError(f"its {name} are {shown(settings[name])}")
    return settings


def write_header(output: Path, settings: Mapping[str, Any]) -> None:
    text = json.dumps(
        {"form": FORM, "vlm_batch": __version__, "settings": settings}, indent=1
    )
    replace_file(header_path(output), (text + "\n").encode())


def check_same(output: Path, settings: Mapping[str, Any]) -> None:
    """Raise InvalidJob without a header, or if its settings differ."""
    before = read_header(output)
    if before is None:
        raise InvalidJob(
            f"{output} has no header beside it that says how it was made; --force goes on without it"
        )
    now = json.loads(json.dumps(settings))
    of_model = _compare_models(before, now)
    if _tables_agree(before, now):
        before["tables"] = now.get("tables")
    other = []
    for name in sorted({*before, *now}):
        first, second = before.get(name), now.get(name)
        if first != second:
            other.append(f"{name} {_difference(first, second)}")
    other += of_model
    if other:
        raise InvalidJob(
            f"{output} was made with other settings: {'; '.join(other)}. Give the same ones, or name another file; "
            "--force goes on all the same"
        )


def _compare_models(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Take the models' files out of settings, and say what has changed in them, if anything.

    The same files in another place are the same model: ``before`` then names it as ``now`` does.
    """
    first, second = before.pop(MODEL_FILES, {}), now.pop(MODEL_FILES, {})
    changed = _changed(first, second)
    if not changed:
        if first:  # and second, which has the same
            before["model"] = now["model"]
        return []
    has_one_name = before.get("model") == now.get("model")
    has_same_files = len(changed) < len(first)
    if not has_one_name and not has_same_files:
        return []  # the names of two models say enough
    told = []
    for name in changed[:3]:
        new = " (new)" if name not in first else ""
        gone = " (gone)" if name not in second else ""
        told.append(f"{name}{new}{gone}")
    return [f"the model's files have changed: {', '.join(told)}"]


def _changed(
    first: Mapping[str, Stamp | None], second: Mapping[str, Stamp | None]
) -> list[str]:
    """Return the files whose stamps differ, sorted."""
    every = sorted({*first, *second})
    return [name for name in every if not _is_same(first.get(name), second.get(name))]


def _tables_agree(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the tables that both have are the same."""
    first, second = before.get("tables", {}), now.get("tables", {})
    both = first.keys() & second.keys()
    return all(first[name] == second[name] for name in both)


#: A file's size and time of change, and a digest of what it holds.
Stamp = list[int | str]


def stamp(path: str | Path, blocks: int) -> Stamp | None:
    found = times_of([path])
    if found:
        return [*found[0], fingerprint(path, blocks)]
    return None


def _is_same(first: Any, second: Stamp | None) -> bool:
    """Compare a header's stamp with one of now, by content: files are touched and copied."""
    if first == second:
        return True
    if second is None or not isinstance(first, list):
        return False
    content = first[2:]
    return bool(content) and content == second[2:]


def fingerprint(path: str | Path, blocks: int = MEDIUM_BLOCKS) -> str:
    """Return a digest of a file's size and evenly spaced blocks; "" for no file."""
    try:
        with open(os.path.expanduser(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            found = hashlib.blake2b(str(size).encode(), digest_size=16)
            for place in _places_of_blocks(size, blocks):
                file.seek(place)
                found.update(file.read(BLOCK))
            return found.hexdigest()
    except OSError:  # a folder, a stream
        return ""


def _places_of_blocks(size: int, blocks: int) -> range:
    """Return where the blocks of a file begin: all of them, or as many as ``blocks``, the last at its end."""
    if size <= blocks * BLOCK:
        return range(0, size, BLOCK)
    last = size - BLOCK
    return range(0, last + 1, last // (blocks - 1))


def model_files(folder: Path) -> dict[str, Stamp | None]:
    """Return stamps of files that decide answers."""
    found = {}
    for path in folder.iterdir():
        if path.suffix in MODEL_SUFFIXES:
            found[path.name] = stamp(path, MODEL_BLOCKS)
    return found


def times_of(paths: Iterable[str | Path]) -> list[list[int]]:
    """Return size and modification time of existing files."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            here = os.stat(os.path.expanduser(path))
            found.append([here.st_size, here.st_mtime_ns])
    return found


def _difference(before: Any, now: Any) -> str:
    """Describe both values, long ones from shortly before their difference."""
    first, second = (json.dumps(value, ensure_ascii=False) for value in (before, now))
    same = len(os.path.commonprefix([first, second]))  # noqa: RUF071  (texts, not paths)
    return f"was {_short(first, same)} and is {_short(second, same)}"


def _short(text: str, at: int) -> str:
    if len(text) <= MOST_SHOWN:
        return text
    begin = max(0, min(at - MOST_SHOWN // 3, len(text) - MOST_SHOWN))
    end = begin + MOST_SHOWN
    return "..." * (begin > 0) + text[begin:end] + "..." * (end < len(text))
