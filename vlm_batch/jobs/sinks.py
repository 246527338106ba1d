"""Outputs of a job: JSON lines, CSV, Parquet, standard output.

Answers are stored as JSON lines; CSV and Parquet files are made at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from vlm_batch.jobs import journal
from vlm_batch.jobs.formats import DelimitedFile, Format, ParquetFile
from vlm_batch.jobs.lines import (
    CannotWrite,
    LineFile,
    Record,
    encoded,
    has_lines,
    is_device,
    linked_file,
    read_answers,
    replacing,
)
from vlm_batch.jobs.openai import line_of_answer, record_of_line
from vlm_batch.jobs.rows import Ids, InvalidJob, spelled
from vlm_batch.jobs.stamps import Stamp, Stamps

#: Default columns of CSV and Parquet files.
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

#: Prefixes of column names: the answer's fields, its parsed object's, its row's columns.
NAMESPACES = ("answer", "parsed", "columns")

#: Forms of outputs (None is JSON lines), and their names by file suffix.
FORMS: Mapping[str, Format | None] = {
    "jsonl": None,
    "csv": DelimitedFile(),
    "tsv": DelimitedFile("\t"),
    "parquet": ParquetFile(),
    "openai-batch": None,
}
SUFFIXES: Mapping[str, str] = {
    **dict.fromkeys(("", ".jsonl", ".ndjson"), "jsonl"),
    ".csv": "csv",
    ".tsv": "tsv",
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
}

DELIMITED = ("csv", "tsv")


def suffix_form(target: str) -> str | None:
    """Return the form that a name's suffix says; None if it says none."""
    return SUFFIXES.get(Path(target).suffix.lower())


class Sink:
    """Stores answers as they come; the base class stores none. Nothing changes before ``begin``."""

    name = ""

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Lock the output for this process."""
        return contextlib.nullcontext()

    def check(
        self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool
    ) -> None:
        """Raise InvalidJob if the job may not write here."""
        if resume:
            raise InvalidJob(
                "--resume needs a file to go on with; name it with --out FILE"
            )

    def existing(self) -> tuple[Ids, Ids]:
        """Return answered ids, and failed ones."""
        return Ids(), Ids()

    def stamps(self) -> Mapping[int, Stamp]:
        """Return stamps of answered rows (``Stamps.read``)."""
        return {}

    def begin(
        self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool
    ) -> None: ...

    def stamp(self, line: Record) -> None:
        """Store what a row asks (``stamps.line_of``)."""

    def append(self, record: Record) -> None:
        """Store an answer. Raises CannotWrite."""

    def finish(self) -> None:
        """Make the output from stored answers, even of an interrupted job."""

    def close(self) -> None: ...


def open_sink(
    target: str,
    columns: tuple[str, ...] | None = None,
    *,
    form: str | None = None,
    model: str = "vlm-batch",
    spreadsheet_safe: bool = True,
) -> Sink:
    """Open an output.

    Args:
        target: A file's path, or ``-`` for standard output.
        columns: Fields to keep of each answer; the form's by default.
        form: One of ``FORMS``; by the file's suffix by default.
        model: The model's name in OpenAI's batch form.
        spreadsheet_safe: In CSV and TSV files, a ' goes before texts that a spreadsheet would run as formulas.

    Raises:
        InvalidJob: The form is unknown, or has fixed columns.
    """
    form = _form_of(target, form)
    is_batch = form == "openai-batch"
    if is_batch and columns:
        raise InvalidJob("OpenAI's batch form has its own fields; leave --columns out")
    line_of = partial(chosen, columns=columns)
    if is_batch:
        line_of = partial(line_of_answer, model=model)
    written = FORMS[form]
    if target == "-":
        if written is not None:
            raise InvalidJob(
                f"--format {form} needs a file: it is made when the job ends; give it by --out FILE"
            )
        return StandardOutput(line_of)
    path = Path(target).expanduser()
    if is_batch:
        return BatchFile(path, line_of)
    if isinstance(written, DelimitedFile) and not spreadsheet_safe:
        written = DelimitedFile(written.separator, is_safe=False)
    return AnswerFile(path, columns, written)


def _form_of(target: str, form: str | None) -> str:
    """Return the form that was named, or that the target's suffix says. Raises InvalidJob for one that is not known."""
    if form is not None and form not in FORMS:
        raise InvalidJob(
            f"there is no form {form!r} of outputs; {', '.join(FORMS)} are"
        )
    if form is not None:
        return form
    if target == "-":
        return "jsonl"
    said = suffix_form(target)
    if said is None:
        known = ", ".join(filter(None, SUFFIXES))
        raise InvalidJob(
            f"cannot write {target}: {Path(target).suffix.lower()} is no form of output that is known here; {known} are, and "
            "--format says the form of other names"
        )
    return said


class StandardOutput(Sink):
    name = "-"

    def __init__(self, line_of: Callable[[Record], Record]) -> None:
        self._line_of = line_of

    def append(self, record: Record) -> None:
        sys.stdout.write(encoded(self._line_of(record)).decode())
        sys.stdout.flush()


class AnswerFile(Sink):
    """JSON lines, or, with a ``form``, a file made of them at the end."""

    def __init__(
        self,
        path: Path,
        columns: tuple[str, ...] | None = None,
        form: Format | None = None,
    ) -> None:
        self.name = str(path)
        # what lies beside it is the same by whatever name it is given
        self.path = self.journal = path = linked_file(path)
        self._columns = columns
        if form is not None:
            self.journal = path.with_name(f"{path.name}.journal.jsonl")
            self._columns = FLAT_COLUMNS if columns is None else columns
        self._line_of: Callable[[Record], Record] = partial(
            chosen, columns=self._columns
        )
        self._form = form
        self._file: LineFile | None = None
        self._had_lines = False
        self._stamps = Stamps(path)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        journal.check_writable(self.path)
        if not is_device(self.path):
            return journal.locked(self.path)
        if self._form is not None:
            raise InvalidJob(
                f"{self.path} is no file; CSV and Parquet need one, and JSON lines (--format jsonl) do not"
            )
        return contextlib.nullcontext()

    def check(
        self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool
    ) -> None:
        if resume and overwrite:
            raise InvalidJob("--resume and --overwrite exclude each other")
        if overwrite or not self._has_answers():
            return
        if not resume:
            raise self._is_taken()
        if not force:
            journal.check_same(self.path, settings)

    def _is_taken(self) -> InvalidJob:
        if journal.header_path(self.path).exists():
            return InvalidJob(
                f"{self.path} has answers already: --resume goes on with them, --overwrite replaces them"
            )
        return InvalidJob(
            f"{self.path} is not empty, and nothing beside it says that a job wrote it: name another file with --out, "
            "or --overwrite replaces it"
        )

    def _has_answers(self) -> bool:
        return has_lines(self.path) or has_lines(self.journal)

    def existing(self) -> tuple[Ids, Ids]:
        answered, failed = Ids(), Ids()
        for record in self.records():
            ids = failed if record.get("error") else answered
            ids.add(str(record["id"]))
        return answered, failed

    def stamps(self) -> Mapping[int, Stamp]:
        return self._stamps.read()

    def begin(
        self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool
    ) -> None:
        if is_device(self.path):
            self._file = LineFile(self.path)
            return
        if overwrite:
            self._clear()
        elif drop_errors:
            self._drop_errors()
        self._file = LineFile(self.journal, is_watched=True)
        self._had_lines = self._form is not None and has_lines(self.path)
        journal.write_header(self.path, settings)

    def _drop_errors(self) -> None:
        """Write the output and the journal anew without the rows that failed."""
        if has_lines(self.journal):
            with replacing(self.journal) as beside:
                file = LineFile(beside)
                for record in _without_errors(read_answers(self.journal)):
                    file.append(record)
                file.close()
        if self._form is not None and has_lines(self.path):
            self._make(lambda: _without_errors(self._made()))

    def stamp(self, line: Record) -> None:
        if not is_device(self.path):
            self._stamps.add(line)

    def append(self, record: Record) -> None:
        assert self._file is not None
        self._file.append(self._line_of(record))

    def finish(self) -> None:
        if self._file is None:
            return
        self._file.sync()
        self._file.check()
        if self._form is None:
            return
        if self._had_lines and not has_lines(self.path):
            raise CannotWrite(
                f"{self.path} was deleted or emptied while the job ran, with the answers of earlier runs; those of this "
                f"one are in {self.journal}"
            )
        if has_lines(self.journal) or not self.path.exists():
            self._make(self.records)
        self.close()
        self.journal.unlink(missing_ok=True)

    def close(self) -> None:
        self._stamps.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _clear(self) -> None:
        try:
            self._stamps.clear()
            if self._form is not None:
                self.path.unlink(missing_ok=True)
                self.journal.unlink(missing_ok=True)
            elif self.path.exists():
                os.truncate(self.path, 0)
        except OSError as error:
            raise CannotWrite(f"cannot write {self.path}: {error.strerror}") from error

    def _made(self) -> Iterator[Record]:
        """Yield the records of a file that an earlier run made at its end."""
        if self._form is None or not has_lines(self.path):
            return iter(())
        return self._form.read(self.path)

    def records(self) -> Iterator[Record]:
        """Yield the file's answers, then those only in the journal."""
        there = Ids()
        for record in self._made():
            there.add(str(record["id"]))
            yield record
        for record in read_answers(self.journal):
            if there.add(str(record["id"])):
                yield record

    def _make(self, records: Callable[[], Iterator[Record]]) -> None:
        assert self._form is not None
        columns = tuple(map(spelled, self._columns or ()))
        try:
            with replacing(self.path) as beside:
                self._form.write(beside, records, columns)
        except Exception as error:
            # a full disk, or whatever Arrow finds: the journal has every answer
            why: object = error
            if isinstance(error, OSError) and error.strerror:
                why = error.strerror
            raise CannotWrite(
                f"cannot write {self.path}: {why}; every answer is in {self.journal}"
            ) from error


class BatchFile(AnswerFile):
    def __init__(self, path: Path, line_of: Callable[[Record], Record]) -> None:
        super().__init__(path)
        self._line_of = line_of

    def records(self) -> Iterator[Record]:
        for line in super().records():
            if "custom_id" not in line:
                raise InvalidJob(
                    f"{self.path} is not in OpenAI's batch form; --format says which form an output has"
                )
            yield record_of_line(line)


def _without_errors(records: Iterator[Record]) -> Iterator[Record]:
    return itertools.filterfalse(operator.methodcaller("get", "error"), records)


def chosen(record: Record, columns: tuple[str, ...] | None) -> Record:
    """Return the ``columns`` of an answer; ``NAMESPACES`` tell equal names apart."""
    if columns is None:
        kept = dict(record)
        kept.pop("columns", None)
        return kept
    own = {**record, **record["usage"], "seconds": record["timings"]["total"]}
    parsed = record.get("parsed")
    if not isinstance(parsed, Mapping):
        parsed = {}
    spaces = (own, parsed, record.get("columns", {}))
    flat: Record = {}
    for space, there in zip(NAMESPACES, spaces, strict=True):
        flat |= {f"{space}.{name}": value for name, value in there.items()}
    for there in reversed(spaces):
        flat |= there
    return {name: plain(flat.get(name)) for name in columns}


def plain(value: Any) -> Any:
    """Return what JSON can hold of a value: it has no NaN, no infinity and no bytes."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (str, int, NoneType)):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    return str(value)
