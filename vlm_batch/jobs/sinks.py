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
from typing import Any

from vlm_batch.jobs import journal
from vlm_batch.jobs.formats import DelimitedFile, Format, ParquetFile
from vlm_batch.jobs.lines import CannotWrite, LineFile, Record, encoded, has_lines, read_answers, replacing
from vlm_batch.jobs.rows import Ids, InvalidJob, spelled

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

#: The form of a file by its suffix; None is JSON lines.
FORMS: Mapping[str, Format | None] = {
    **dict.fromkeys(("", ".jsonl", ".ndjson")),
    ".csv": DelimitedFile(),
    ".tsv": DelimitedFile("\t"),
    **dict.fromkeys((".parquet", ".pq"), ParquetFile()),
}


class Sink:
    """Answers, durable as they come. This base class keeps none: they are shown only, and no job can be resumed.

    ``begin`` is called once everything else is ready: nothing is changed before.
    """

    name = ""

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the output for this process."""
        return contextlib.nullcontext()

    def check(self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool) -> None:
        """Raise InvalidJob if the job may not write here. Changes nothing."""
        if resume:
            raise InvalidJob("--resume needs a file to go on with; name it with --out FILE")

    def existing(self) -> tuple[Ids, Ids]:
        """The ids that are answered, and those that failed."""
        return Ids(), Ids()

    def stamps(self) -> Mapping[int, int]:
        """What the answers were made of: a digest of each row's stamps, by that of its id."""
        return {}

    def begin(self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool) -> None: ...

    def stamp(self, row_id: str, stamps: list[journal.Stamp]) -> None:
        """Keep what the answer that comes next is made of. Raises CannotWrite."""

    def append(self, record: Record) -> None:
        """Keep an answer. Raises CannotWrite, and what was kept before stays whole."""

    def finish(self) -> None:
        """Make the output from the kept answers, also if the job was cut short."""

    def close(self) -> None: ...


def open_sink(target: str, columns: tuple[str, ...] | None = None) -> Sink:
    """The sink of an output's name, by its suffix; without one JSON lines. ``-`` is standard output. Raises InvalidJob."""
    if target == "-":
        return StandardOutput(columns)
    path = Path(target).expanduser()
    if (suffix := path.suffix.lower()) not in FORMS:
        known = ", ".join(filter(None, FORMS))
        raise InvalidJob(f"cannot write {target}: {suffix} is no form of output that is known here; {known} are")
    return AnswerFile(path, columns, FORMS[suffix])


class StandardOutput(Sink):
    """JSON lines on standard output, each flushed."""

    name = "-"

    def __init__(self, columns: tuple[str, ...] | None = None) -> None:
        self._columns = columns

    def append(self, record: Record) -> None:
        sys.stdout.write(encoded(chosen(record, self._columns)).decode())
        sys.stdout.flush()


class AnswerFile(Sink):
    """A file of JSON lines, written as the answers come; or, with a ``form``, a CSV or Parquet file.

    That is made whole when the job ends. Until then the lines are its journal, which is kept while it holds anything that the
    file lacks.
    """

    def __init__(self, path: Path, columns: tuple[str, ...] | None = None, form: Format | None = None) -> None:
        self.path, self.name = path, str(path)
        self.journal = path if form is None else path.with_name(f"{path.name}.journal.jsonl")
        self._columns = FLAT_COLUMNS if form is not None and columns is None else columns
        self._form = form
        self._file: LineFile | None = None
        self._stamps = journal.Stamps(path)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        journal.check_writable(self.path)
        if self._is_device() and self._form is not None:
            raise InvalidJob(f"{self.path} is no file; CSV and Parquet need one")
        return contextlib.nullcontext() if self._is_device() else journal.locked(self.path)

    def check(self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool) -> None:
        if resume and overwrite:
            raise InvalidJob("--resume and --overwrite exclude each other")
        if not has_lines(self.path) and not has_lines(self.journal):
            return
        if not resume and not overwrite:
            raise InvalidJob(f"{self.path} has answers already: --resume goes on with them, --overwrite replaces them")
        if resume and not force:
            journal.check_same(self.path, settings)

    def existing(self) -> tuple[Ids, Ids]:
        answered, failed = Ids(), Ids()
        for record in self._records():
            (failed if record.get("error") else answered).add(str(record["id"]))
        return answered, failed

    def stamps(self) -> Mapping[int, int]:
        return self._stamps.read()

    def begin(self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool) -> None:
        if self._is_device():
            self._file = LineFile(self.path)
            return
        if overwrite:
            self._clear()
        elif drop_errors:
            if has_lines(self.journal):
                with replacing(self.journal) as beside:
                    file = LineFile(beside)
                    for record in read_answers(self.journal):
                        if not record.get("error"):
                            file.append(record)
                    file.close()
            if self._form is not None and has_lines(self.path):
                self._make(lambda: (record for record in self._made() if not record.get("error")))
        self._file = LineFile(self.journal)
        journal.write_header(self.path, settings)

    def stamp(self, row_id: str, stamps: list[journal.Stamp]) -> None:
        if not self._is_device():
            self._stamps.add(row_id, stamps)

    def append(self, record: Record) -> None:
        assert self._file is not None
        self._file.append(chosen(record, self._columns))

    def finish(self) -> None:
        if self._file is None:
            return
        self._file.sync()
        if self._form is not None:
            if has_lines(self.journal) or not self.path.exists():
                self._make(self._records)
            self.close()
            self.journal.unlink(missing_ok=True)

    def close(self) -> None:
        self._stamps.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_device(self) -> bool:
        """Whether something other than a file is there: a device, a pipe."""
        return self.path.exists() and not self.path.is_file() and not self.path.is_dir()

    def _clear(self) -> None:
        try:
            self._stamps.clear()
            if self._form is None and self.path.exists():
                os.truncate(self.path, 0)
            elif self._form is not None:
                self.path.unlink(missing_ok=True)
                self.journal.unlink(missing_ok=True)
        except OSError as error:
            raise CannotWrite(f"cannot write {self.path}: {error.strerror}") from error

    def _made(self) -> Iterator[Record]:
        """The answers in the file that was made at the end of an earlier run."""
        return self._form.read(self.path) if self._form is not None and has_lines(self.path) else iter(())

    def _records(self) -> Iterator[Record]:
        """The file's answers, then the journal's that the file lacks: a process can be killed between the two."""
        there = Ids()
        for record in self._made():
            there.add(str(record["id"]))
            yield record
        for record in read_answers(self.journal):
            if there.add(str(record["id"])):
                yield record

    def _make(self, records: Callable[[], Iterator[Record]]) -> None:
        assert self._form is not None
        try:
            with replacing(self.path) as beside:
                self._form.write(beside, records, tuple(map(spelled, self._columns or ())))
        except Exception as error:  # a full disk, or whatever Arrow finds: the journal has every answer
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
