"""The files beside a job's output: a header with the settings of its first run, what answers were made of, a lock."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from vlm_batch._version import __version__
from vlm_batch.jobs.files import is_url
from vlm_batch.jobs.lines import LineFile, read_answers, replace_file
from vlm_batch.jobs.rows import InvalidJob, Row, digest

#: The header's form. A later one that reads differently has another number.
FORM = 1
#: The setting that has the stamps of a model's files, and the suffixes of those that decide answers.
MODEL_FILES, MODEL_SUFFIXES = (
    "model_files",
    (".safetensors", ".npz", ".json", ".jinja", ".model", ".txt", ".tiktoken", ".py"),
)


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
    first, second = before.pop(MODEL_FILES, {}), now.pop(MODEL_FILES, {})
    other = [
        f"{name} was {_short(before.get(name))} and is {_short(now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and not (name == "tables" and _tables_agree(before, now))
    ]
    if before.get("model") == now.get("model"):
        changed = [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]
        other += [f"the model's files have changed: {', '.join(changed[:3])}"] if changed else []
    if other:
        raise InvalidJob(f"{output} was made with other settings: {'; '.join(other)}. --force goes on all the same")


def _tables_agree(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """True if every table that both runs read, and whose ids are places in it is what it was."""
    first, second = before.get("tables") or {}, now.get("tables") or {}
    return all(first[name] == second[name] for name in first.keys() & second.keys())


Stamp = list[int]


def stamp(path: str | Path) -> Stamp | None:
    """A file's size and time of change; None for one that is not there."""
    with contextlib.suppress(OSError, ValueError):
        found = os.stat(os.path.expanduser(path))
        return [found.st_size, found.st_mtime_ns]
    return None


def model_files(folder: Path) -> dict[str, Stamp | None]:
    """The files that a model's answers depend on."""
    return {path.name: stamp(path) for path in folder.iterdir() if path.suffix in MODEL_SUFFIXES}


def stamps_of(row: Row) -> list[Stamp]:
    """A stamp for each of the row's pictures and videos that are files of their own, and there."""
    sources = (*(row.images if row.load is None else ()), *(video.source for video in row.videos))
    paths = (one for one in sources if isinstance(one, (str, Path)) and not is_url(str(one)))
    return [found for path in paths if (found := stamp(path)) is not None]


class Stamps:
    """What answers were made of, in a file beside the output: a line with its stamps for each row that has any."""

    def __init__(self, output: Path) -> None:
        self._path = Path(f"{output}.files")
        self._file: LineFile | None = None

    def read(self) -> dict[int, int]:
        """A digest of each row's stamps, by that of its id."""
        return {digest(str(line["id"])): digest(str(line["stamps"])) for line in read_answers(self._path)}

    def add(self, row_id: str, stamps: list[Stamp]) -> None:
        """Keep a row's stamps; the last count. Raises CannotWrite."""
        self._file = self._file or LineFile(self._path)
        self._file.append({"id": row_id, "stamps": stamps})

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
