"""Outputs of a job: JSON lines, CSV, Parquet, standard output.

Answers are kept as JSON lines while a job runs: they are the output itself, or the journal of a CSV or Parquet file that is
made of them when the job ends. A process that is killed leaves every answer that it had.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from vlm_batch.jobs import journal
from vlm_batch.jobs.formats import DelimitedFile, Format, ParquetFile, Record
from vlm_batch.jobs.lines import CannotWrite, LineFile, encoded
from vlm_batch.jobs.outputs import check_rule, check_writable, has_lines, ids_of, is_device, read_answers, rewrite
from vlm_batch.jobs.rows import Ids, InvalidJob

#: The columns of CSV and Parquet files where none are named.
FLAT_COLUMNS = (
    "id",
    "text",
    "finish_reason",
    "error",
    "prompt",
    "prompt_tokens",
    "completion_tokens",
    "seconds",
)


class Sink(Protocol):
    """Answers, durable as they come.

    ``begin`` is called once everything else is ready: nothing is changed before. ``existing`` says how many answers are
    there already, and of which rows; ``locked`` holds the output for this process.
    """

    @property
    def name(self) -> str: ...
    def locked(self) -> contextlib.AbstractContextManager[None]: ...
    def check(self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool) -> None:
        """Raise InvalidJob if the job may not write here. Changes nothing."""
        ...

    def existing(self) -> tuple[Ids, Ids]:
        """The ids that are answered, and those that failed."""
        ...

    def begin(self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool) -> None: ...
    def append(self, record: Record) -> None:
        """Keep an answer. Raises CannotWrite, and what was kept before stays whole."""
        ...

    def finish(self) -> None:
        """Make the output from the kept answers, also if the job was cut short."""
        ...

    def close(self) -> None: ...


def open_sink(target: str, columns: tuple[str, ...] | None = None) -> Sink:
    """The sink of an output's name: by its suffix CSV, TSV or Parquet, else JSON lines; ``-`` is standard output."""
    if target == "-":
        return StandardOutput(columns)
    path = Path(target).expanduser()
    if path.suffix.lower() in (".csv", ".tsv"):
        separator = "\t" if path.suffix.lower() == ".tsv" else ","
        return Journalled(path, columns, DelimitedFile(separator))
    if path.suffix.lower() in (".parquet", ".pq"):
        return Journalled(path, columns, ParquetFile())
    return JsonLines(path, columns)


class Nowhere:
    """Keeps nothing: answers are shown only, and no job can be resumed."""

    name = ""

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def check(self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool) -> None:
        if resume:
            raise InvalidJob("--resume needs a file to go on with; name it with --out FILE")

    def existing(self) -> tuple[Ids, Ids]:
        return Ids(), Ids()

    def begin(self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool) -> None:
        pass

    def append(self, record: Record) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class StandardOutput(Nowhere):
    """JSON lines on standard output, each flushed."""

    name = "-"

    def __init__(self, columns: tuple[str, ...] | None = None) -> None:
        self._columns = columns

    def append(self, record: Record) -> None:
        sys.stdout.write(encoded(chosen(record, self._columns)).decode())
        sys.stdout.flush()


class JsonLines:
    """A file of JSON lines, written as the answers come."""

    def __init__(self, path: Path, columns: tuple[str, ...] | None = None) -> None:
        self.path = path
        self._columns = columns
        self._file: LineFile | None = None

    @property
    def name(self) -> str:
        return str(self.path)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        check_writable(self.path)
        return contextlib.nullcontext() if is_device(self.path) else journal.locked(self.path)

    def check(self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool) -> None:
        check_rule(self.path, has_lines(self.path), settings, resume=resume, overwrite=overwrite, force=force)

    def existing(self) -> tuple[Ids, Ids]:
        return ids_of(read_answers(self.path))

    def begin(self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool) -> None:
        if is_device(self.path):
            self._file = LineFile(self.path)
            return
        if overwrite and self.path.exists():
            _truncate(self.path)
        elif drop_errors and has_lines(self.path):
            rewrite(self.path, (record for record in read_answers(self.path) if not record.get("error")))
        self._file = LineFile(self.path)
        journal.write_header(self.path, settings)

    def append(self, record: Record) -> None:
        assert self._file is not None
        self._file.append(chosen(record, self._columns))

    def finish(self) -> None:
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Journalled:
    """A CSV or Parquet file: answers go to a journal beside it, and the file is made whole when the job ends.

    The journal is kept while it holds anything that the file lacks.
    """

    def __init__(self, path: Path, columns: tuple[str, ...] | None, form: Format) -> None:
        self.path = path
        self.journal = path.with_name(f"{path.name}.journal.jsonl")
        self._columns = columns
        self._form = form
        self._file: LineFile | None = None

    @property
    def name(self) -> str:
        return str(self.path)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        check_writable(self.path)
        if is_device(self.path):
            raise InvalidJob(f"{self.path} is no file; CSV and Parquet need one")
        return journal.locked(self.path)

    def check(self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool) -> None:
        is_begun = has_lines(self.path) or has_lines(self.journal)
        check_rule(self.path, is_begun, settings, resume=resume, overwrite=overwrite, force=force)

    def existing(self) -> tuple[Ids, Ids]:
        return ids_of(self._records())

    def begin(self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool) -> None:
        if overwrite:
            for path in (self.path, self.journal):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
        elif drop_errors and has_lines(self.journal):
            rewrite(self.journal, (record for record in read_answers(self.journal) if not record.get("error")))
        if drop_errors and has_lines(self.path):
            kept = [record["id"] for record in self._form.read(self.path) if not record.get("error")]
            self._replace(lambda: self._form_of(Ids(kept)))
        self._file = LineFile(self.journal)
        journal.write_header(self.path, settings)

    def append(self, record: Record) -> None:
        assert self._file is not None
        self._file.append(chosen(record, self._columns or FLAT_COLUMNS))

    def finish(self) -> None:
        if self._file is None:
            return
        self._file.sync()
        if has_lines(self.journal) or not self.path.exists():
            self._replace(self._records)
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self.journal.unlink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _records(self) -> Iterator[Record]:
        """The file's answers, then the journal's that the file lacks: a process can be killed between the two."""
        there = Ids()
        for record in self._form.read(self.path) if has_lines(self.path) else ():
            there.add(str(record["id"]))
            yield record
        for record in read_answers(self.journal):
            if there.add(str(record["id"])):
                yield record

    def _form_of(self, kept: Ids) -> Iterator[Record]:
        return (record for record in self._form.read(self.path) if str(record["id"]) in kept)

    def _replace(self, records: Callable[[], Iterator[Record]]) -> None:
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            self._form.write(beside, records, self._columns or FLAT_COLUMNS)
            with open(beside, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(beside, self.path)
        except Exception as error:  # a full disk, or whatever Arrow finds: the journal has every answer
            with contextlib.suppress(OSError):
                beside.unlink()
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise CannotWrite(f"cannot write {self.path}: {why}; every answer is in {self.journal}") from error


def chosen(record: Record, columns: tuple[str, ...] | None) -> Record:
    """An answer's fields that are asked for: its own by their names, counts of tokens and seconds, those of the object that a
    schema made it, columns of its row. What comes first here is meant by a name that several have.

    Without ``columns``, the answer as it is.
    """
    if columns is None:
        return {name: value for name, value in record.items() if name != "columns"}
    parsed = record.get("parsed")
    flat = {
        **record.get("columns", {}),
        **(parsed if isinstance(parsed, Mapping) else {}),
        **record,
        **record["usage"],
        "seconds": record["timings"]["total"],
    }
    return {name: plain(flat.get(name)) for name in columns}


def plain(value: Any) -> Any:
    """A value as JSON can hold it; any other value as its text."""
    if isinstance(value, float) and value != value:
        return None
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return f"{len(value)} bytes" if isinstance(value, (bytes, bytearray)) else str(value)


def _truncate(path: Path) -> None:
    try:
        os.truncate(path, 0)
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}") from error
