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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, singledispatch
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias

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
    writing,
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

#: OpenAI's batch form, and all forms of outputs; their names by file suffix.
BATCH = "openai-batch"
FORMS = ("jsonl", "csv", "tsv", "parquet", BATCH)
SUFFIXES: Mapping[str, str] = {
    **dict.fromkeys(("", ".jsonl", ".ndjson"), "jsonl"),
    ".csv": "csv",
    ".tsv": "tsv",
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
}

DELIMITED = ("csv", "tsv")


def _formats(*, is_safe: bool) -> Mapping[str, Format]:
    """Return the forms that are made at a job's end; others are JSON lines."""
    return {
        "csv": DelimitedFile(is_safe=is_safe),
        "tsv": DelimitedFile("\t", is_safe=is_safe),
        "parquet": ParquetFile(),
    }


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

    def has_answers(self) -> bool:
        """Whether earlier runs have left something here."""
        return False

    def records(self) -> Iterator[Record]:
        """Yield the answers of earlier runs."""
        return iter(())

    def existing(self) -> tuple[Ids, Ids]:
        """Return answered ids, and failed ones."""
        answered, failed = Ids(), Ids()
        for record in self.records():
            ids = failed if record.get("error") else answered
            ids.add(str(record["id"]))
        return answered, failed

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


#: Makes a line of an answer.
LineOf: TypeAlias = Callable[[Record], Record]


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
    path = Path(target).expanduser()
    written = _formats(is_safe=spreadsheet_safe).get(form)
    if written is not None:
        if target == "-":
            raise InvalidJob(
                f"--format {form} needs a file: it is made when the job ends; give it by --out FILE"
            )
        return MadeFile(path, FLAT_COLUMNS if columns is None else columns, written)
    line_of: LineOf = whole if columns is None else partial(chosen, columns=columns)
    if form == BATCH:
        if columns:
            raise InvalidJob(
                "OpenAI's batch form has its own fields; leave --columns out"
            )
        line_of = partial(line_of_answer, model=model)
    if target == "-":
        return StandardOutput(line_of)
    if is_device(path):
        return DeviceSink(path, line_of)
    kind = BatchFile if form == BATCH else AnswerFile
    return kind(path, line_of)


def _form_of(target: str, form: str | None) -> str:
    """Return the form that was named, or that the target's suffix says. Raises InvalidJob for one that is not known."""
    if form is None:
        form = "jsonl" if target == "-" else suffix_form(target)
    if form is None:
        known = ", ".join(filter(None, SUFFIXES))
        raise InvalidJob(
            f"cannot write {target}: {Path(target).suffix.lower()} is no form of output that is known here; {known} are, and "
            "--format says the form of other names"
        )
    if form not in FORMS:
        raise InvalidJob(
            f"there is no form {form!r} of outputs; {', '.join(FORMS)} are"
        )
    return form


class StandardOutput(Sink):
    name = "-"

    def __init__(self, line_of: LineOf) -> None:
        self._line_of = line_of

    def append(self, record: Record) -> None:
        sys.stdout.write(encoded(self._line_of(record)).decode())
        sys.stdout.flush()


class DeviceSink(Sink):
    """A device or a pipe: it takes JSON lines, holds none, and has nothing beside it."""

    def __init__(self, path: Path, line_of: LineOf) -> None:
        self.name = str(path)
        self._path = path
        self._line_of = line_of
        self._held = contextlib.ExitStack()

    def locked(self) -> contextlib.AbstractContextManager[None]:
        journal.check_writable(self._path)
        return contextlib.nullcontext()

    def check(
        self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool
    ) -> None:
        _check_exclusive(resume, overwrite)

    def begin(
        self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool
    ) -> None:
        self._open(LineFile(self._path))

    def _open(self, file: LineFile) -> None:
        self._file = file
        self._held.callback(file.close)

    def append(self, record: Record) -> None:
        self._file.append(self._line_of(record))

    def finish(self) -> None:
        self._file.sync()
        self._file.check()

    def close(self) -> None:
        self._held.close()


class AnswerFile(DeviceSink):
    """JSON lines in a file, with a header, a lock and stamps beside it."""

    def __init__(self, path: Path, line_of: LineOf) -> None:
        # what lies beside it is the same by whatever name it is given
        super().__init__(linked_file(path), line_of)
        self.name = str(path)
        self.path = self._path
        self._stamps = Stamps(self.path)

    @property
    def journal(self) -> Path:
        """The file that has answers as they come."""
        return self.path

    def locked(self) -> contextlib.AbstractContextManager[None]:
        journal.check_writable(self.path)
        return journal.locked(self.path)

    def check(
        self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool
    ) -> None:
        _check_exclusive(resume, overwrite)
        if overwrite or not self.has_answers():
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

    def has_answers(self) -> bool:
        return has_lines(self.path) or has_lines(self.journal)

    def stamps(self) -> Mapping[int, Stamp]:
        return self._stamps.read()

    def begin(
        self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool
    ) -> None:
        if overwrite:
            self._clear()
        elif drop_errors:
            self._drop_errors()
        self._open(LineFile(self.journal, is_watched=True))
        journal.write_header(self.path, settings)

    def _clear(self) -> None:
        with writing(self.path):
            self._stamps.clear()
            self._clear_answers()

    def _clear_answers(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self.path, 0)

    def _drop_errors(self) -> None:
        """Write the answers anew without the rows that failed."""
        with replacing(self.journal) as beside:
            file = LineFile(beside)
            for record in _without_errors(read_answers(self.journal)):
                file.append(record)
            file.close()

    def stamp(self, line: Record) -> None:
        self._stamps.add(line)

    def records(self) -> Iterator[Record]:
        """Yield all rows of a file that was made, then the answers that are only in the journal."""
        there = Ids()
        for record in self._made():
            there.add(str(record["id"]))
            yield record
        for record in read_answers(self.journal):
            if there.add(str(record["id"])):
                yield record

    def _made(self) -> Iterator[Record]:
        """Yield the rows of a file that an earlier run made at its end."""
        return iter(())

    def close(self) -> None:
        self._stamps.close()
        super().close()


class MadeFile(AnswerFile):
    """A file that is made of JSON lines when the job ends; until then they lie beside it."""

    def __init__(self, path: Path, columns: tuple[str, ...], form: Format) -> None:
        super().__init__(path, partial(chosen, columns=columns))
        self._columns = tuple(map(spelled, columns))
        self._form = form
        self._had_lines = False

    @property
    def journal(self) -> Path:
        return self.path.with_name(f"{self.path.name}.journal.jsonl")

    def locked(self) -> contextlib.AbstractContextManager[None]:
        lock = super().locked()
        if is_device(self.path):
            raise InvalidJob(
                f"{self.path} is no file; CSV and Parquet need one, and JSON lines (--format jsonl) do not"
            )
        return lock

    def begin(
        self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool
    ) -> None:
        super().begin(settings, overwrite=overwrite, drop_errors=drop_errors)
        self._had_lines = has_lines(self.path)

    def _clear_answers(self) -> None:
        self.path.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)

    def _drop_errors(self) -> None:
        super()._drop_errors()
        if has_lines(self.path):
            self._make(lambda: _without_errors(self._made()))

    def finish(self) -> None:
        super().finish()
        if self._had_lines and not has_lines(self.path):
            raise CannotWrite(
                f"{self.path} was deleted or emptied while the job ran, with the answers of earlier runs; those of this "
                f"one are in {self.journal}"
            )
        if has_lines(self.journal) or not self.path.exists():
            self._make(self.records)
        self.close()
        self.journal.unlink(missing_ok=True)

    def _made(self) -> Iterator[Record]:
        return self._form.read(self.path) if has_lines(self.path) else iter(())

    def _make(self, records: Callable[[], Iterator[Record]]) -> None:
        try:
            with replacing(self.path) as beside:
                self._form.write(beside, records, self._columns)
        except Exception as error:
            # a full disk, or whatever Arrow finds: the journal has every answer
            why: object = error
            if isinstance(error, OSError) and error.strerror:
                why = error.strerror
            raise CannotWrite(
                f"cannot write {self.path}: {why}; every answer is in {self.journal}"
            ) from error


class BatchFile(AnswerFile):
    """Lines in OpenAI's batch form."""

    def records(self) -> Iterator[Record]:
        for line in super().records():
            try:
                record = record_of_line(line)
            except Exception as error:  # whatever a line of another form raises
                raise InvalidJob(
                    f"{self.path} is not in OpenAI's batch form; --format says which form an output has"
                ) from error
            yield record


def _check_exclusive(resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise InvalidJob("--resume and --overwrite exclude each other")


def _without_errors(records: Iterator[Record]) -> Iterator[Record]:
    return itertools.filterfalse(operator.methodcaller("get", "error"), records)


def whole(record: Record) -> Record:
    """Return an answer without its row's columns."""
    kept = dict(record)
    del kept["columns"]
    return kept


def chosen(record: Record, columns: tuple[str, ...]) -> Record:
    """Return the ``columns`` of an answer; ``NAMESPACES`` tell equal names apart."""
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


@singledispatch
def plain(value: Any) -> Any:
    """Return what JSON can hold of a value: it has no NaN, no infinity and no bytes."""
    return str(value)


@plain.register(str)
@plain.register(int)
@plain.register(NoneType)
def _as_it_is(value: Any) -> Any:
    return value


@plain.register
def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@plain.register(Mapping)
def _plain_object(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): plain(one) for name, one in value.items()}


@plain.register(list)
@plain.register(tuple)
def _plain_list(value: Sequence[Any]) -> list[Any]:
    return list(map(plain, value))


@plain.register(bytes)
@plain.register(bytearray)
def _size_of_bytes(value: bytes) -> str:
    return f"{len(value)} bytes"
