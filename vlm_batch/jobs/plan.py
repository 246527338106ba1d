"""A job and its plan: rows counted beforehand."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from vlm_batch.errors import describe
from vlm_batch.jobs import journal
from vlm_batch.jobs.answers import ANSWER_FIELDS
from vlm_batch.jobs.arrow import ArrowTable
from vlm_batch.jobs.cells import (
    Columns,
    did_you_mean,
    flag_doubtful_media,
    flag_overlooked_media,
)
from vlm_batch.jobs.order import by_size
from vlm_batch.jobs.questions import DEFAULT_PROMPT, Item, Questions, schema_fields
from vlm_batch.jobs.rows import Ids, InvalidJob, JobRow, Shard, Source, count_of, digest
from vlm_batch.jobs.sinks import NAMESPACES, Sink
from vlm_batch.jobs.sources import Files
from vlm_batch.jobs.stamps import Stamp
from vlm_batch.jobs.summary import Kinds
from vlm_batch.jobs.tables import REQUEST_KEYS, Delimited, JsonLines

#: Columns of rows that are fields of their answers.
ROW_FIELDS = frozenset({"id", "request_id", "images", "videos", "prompt"})
#: Rows between two words on how many were counted.
TOLD_ROWS = 1000

#: Sources whose columns must be found.
TABLES = (JsonLines, Delimited, ArrowTable)


@dataclass
class Plan:
    """Counts of a job's rows; ``total`` is None if rows can be read only once.

    Attributes:
        done: Rows answered by earlier runs.
        failed_before: Rows that failed in earlier runs.
        wrong: Rows bound to fail, by kind.
        own: Rows with their own prompt or messages.
        others: The output's answers to other rows.
        changed: Answered rows whose files have changed.
        otherwise: Answered rows that ask something else now.
        unknown: Answered rows of which nothing says what they asked.
    """

    total: int | None
    done: int = 0
    failed_before: int = 0
    wrong: Kinds = field(default_factory=Kinds)
    own: int = 0
    others: int = 0
    changed: list[str] = field(default_factory=list)
    otherwise: list[str] = field(default_factory=list)
    unknown: int = 0

    def add(
        self, item: Item, done: Ids, failed: Ids, stamps: Mapping[int, Stamp]
    ) -> None:
        """Count a row."""
        assert self.total is not None
        self.total += 1
        self.own += item.row.asks_itself
        if item.id in done:
            self.done += 1
            self._compare(item, stamps.get(digest(item.id)))
        elif item.id in failed:
            self.failed_before += 1
        elif item.error is not None:
            self.wrong.add(item.error, item.names)

    def _compare(self, item: Item, before: Stamp | None) -> None:
        """Compare an answered row with what it was."""
        if before is None:
            self.unknown += 1
            return
        if before.asks_else(item):
            self.otherwise.append(item.id)
        if before.has_other_files(item.row):
            self.changed.append(item.id)

    def check_resumable(self) -> None:
        """Raise InvalidJob if the output's rows have other names, other questions or changed files."""
        remedy = "--overwrite asks all rows again, --force keeps their answers"
        if self.changed:
            rows = count_of(len(self.changed), "answered row")
            raise InvalidJob(
                f"files of {rows} have changed since: {_named(self.changed)}. {remedy}"
            )
        if self.otherwise:
            rows = count_of(len(self.otherwise), "answered row")
            raise InvalidJob(
                f"{rows} asked something else (prompt, messages, params or pictures): {_named(self.otherwise)}. {remedy}"
            )
        if self.others and not self.num_before:
            raise InvalidJob(
                f"none of the {count_of(self.others, 'answer')} in the output is to one of these rows: "
                "are paths spelled as in its first run? --force goes on all the same"
            )

    @property
    def num_before(self) -> int:
        """The rows that earlier runs have asked."""
        return self.done + self.failed_before

    @property
    def left(self) -> int | None:
        """Rows to ask; None if their number is unknown."""
        if self.total is None:
            return None
        return self.total - self.num_before


@dataclass
class Job:
    """One job's sources, questions, sink, shard and output columns."""

    sources: Sequence[Source]
    questions: Questions
    sink: Sink
    shard: Shard = field(default_factory=Shard)
    carried: tuple[str, ...] = ()

    def items(self, *, scan: bool = False) -> Iterator[Item]:
        """Yield this shard's questions; ``scan`` skips pictures' contents."""
        for item in self._all_items(scan):
            if self.shard.has(item.id):
                yield item

    def _all_items(self, scan: bool) -> Iterator[Item]:
        read = self._scanned if scan else self._rows_of
        rows = itertools.chain.from_iterable(map(read, self.sources))
        items = itertools.chain.from_iterable(map(self.questions.ask, rows))
        for number, item in enumerate(items):
            yield replace(item, number=number)

    def ordered(self, items: Iterator[Item]) -> Iterator[Item]:
        """Return items in the order in which they are asked: pictures that are files, by their sizes."""
        if all(isinstance(source, Files) for source in self.sources):
            return by_size(items)
        return items

    @cached_property
    def named(self) -> frozenset[str]:
        """Columns of rows that a prompt or the output names."""
        carried = set(self.carried) - ANSWER_FIELDS
        return self.questions.columns.union(
            name.removeprefix("columns.") for name in carried
        )

    def _known(self, row: JobRow) -> JobRow:
        """Add an error to a row that has what no request has."""
        strange = set(row.strange) - self.named
        if row.error is not None or not strange:
            return row
        first = next(filter(strange.__contains__, row.strange))
        return replace(row, error=_said_of(first))

    def _rows_of(self, source: Source) -> Iterator[JobRow]:
        """Yield a source's rows; exceptions become the last row's error."""
        watch = _watch(source)
        try:
            for row in map(self._known, source.rows()):
                yield watch.seen(watch.checked(row))
        except Exception as error:  # whatever Arrow, datasets and disks have
            yield _damaged(source, error)

    def _scanned(self, source: Source) -> Iterator[JobRow]:
        """Yield a source's rows, likewise, without their pictures.

        Raises InvalidJob if a column holds pictures but no row has one.
        """
        watch = _watch(source)
        try:
            for row in map(self._known, source.scan()):
                sure = watch.checked(row)
                if sure is not row:
                    raise InvalidJob(sure.error or "")
                yield watch.seen(sure)
        except InvalidJob:  # nothing has begun yet
            raise
        except Exception as error:
            yield _damaged(source, error)
        if not watch.has_media:
            self._check_media(source, watch.left_out)

    def _check_media(self, source: Source, left_out: str | None) -> None:
        """Raise InvalidJob if a source without media has columns that look like some."""
        if left_out is not None:
            raise InvalidJob(left_out)
        if source.found is not None:
            self._check_overlooked(source, source.found)

    def _check_overlooked(self, source: Source, found: Columns) -> None:
        names = source.columns or ()
        found.check_overlooked(names, source.name, self.named, asks=self._asks)

    @property
    def _asks(self) -> bool:
        return self.questions.prompts != (DEFAULT_PROMPT,)

    @property
    def is_once(self) -> bool:
        return any(source.is_once for source in self.sources)

    def settings(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings that resumed runs must share."""
        tables = {}
        for source in self.sources:
            if not source.is_once and source.numbered:
                tables[source.name] = _fingerprint(source)
        return {
            **self.questions.settings(),
            "shard": str(self.shard),
            "tables": tables,
            **more,
        }

    def plan(
        self, done: Ids, failed: Ids, counted: Callable[[int], None] = lambda rows: None
    ) -> Plan:
        """Count rows; check columns, ids and the answers' form. ``counted`` is told now and then how many rows there are."""
        self._check_sources()
        if self.is_once:
            _check_clear(self.carried, self._spaces(frozenset(), frozenset()))
            return Plan(None)
        plan, seen = Plan(0), _Seen()
        stamps = self.sink.stamps() if len(done) else {}
        for item in self._all_items(scan=True):
            is_new = seen.add(item)
            if seen.num_items % TOLD_ROWS == 0:
                counted(seen.num_items)
            if is_new and self.shard.has(item.id):
                plan.add(item, done, failed, stamps)
        num_before = len(done) + len(failed)
        # else its sources may have grown since: the runner skips these rows
        if not num_before:
            _check_ids(seen.twice)
        self._check_seen(seen)
        plan.others = num_before - plan.num_before
        return plan

    def _check_seen(self, seen: _Seen) -> None:
        """Raise InvalidJob for what all rows together show to be wrong."""
        if not seen.num_items:
            names = ", ".join(source.name for source in self.sources)
            raise InvalidJob(f"there are no rows in {names}")
        self._check_columns(tuple(sorted(seen.columns)), "any row", seen.fields)
        for name in seen.in_every_line():
            if name not in self.named:
                raise InvalidJob(_said_of(name))

    def _check_sources(self) -> None:
        if self.questions.params.form is not None:
            # with transformers, which no other job needs here
            from vlm_batch.inputs.grammar import check_form

            check_form(self.questions.params)
        for source in self.sources:
            if source.columns is not None:
                self._check_columns(source.columns, source.name)
            if source.found is not None:  # of pictures its rows say more than its names
                image = source.found.image or ""
                self._check_overlooked(source, replace(source.found, image=image))

    def _check_columns(
        self, known: tuple[str, ...], where: str, fields: Set[str] = frozenset()
    ) -> None:
        self.questions.check_columns(known, f" of {where}")
        self._check_carried(frozenset(known), where, fields)

    def _check_carried(self, known: Set[str], where: str, fields: Set[str]) -> None:
        """Raise InvalidJob for an unknown or ambiguous output column."""
        spaces = self._spaces(known, fields)
        _check_clear(self.carried, spaces)
        of_answers = spaces["answer"] | spaces["parsed"]
        spelled = set(known)
        for space, names in spaces.items():
            spelled |= {f"{space}.{name}" for name in names}
        for name in self.carried:
            if name not in spelled | of_answers:
                raise _unknown_column(name, where, known, of_answers, spelled)

    def _spaces(self, known: Set[str], fields: Set[str]) -> dict[str, Set[str]]:
        """Return what ``NAMESPACES`` hold: fields of answers, of their objects, and columns of rows."""
        parsed = fields | schema_fields(self.questions.params)
        several = (ANSWER_FIELDS, parsed, known - ROW_FIELDS)
        return dict(zip(NAMESPACES, several, strict=True))


def _check_clear(carried: Sequence[str], spaces: Mapping[str, Set[str]]) -> None:
    """Raise InvalidJob for an output column that may be one of several."""
    for name in carried:
        there = [f"{space}.{name}" for space in spaces if name in spaces[space]]
        if len(there) > 1:
            either = " or ".join(there)
            raise InvalidJob(f"{name!r} in --columns may be {either}; write which")


def _unknown_column(
    name: str, where: str, columns: Set[str], fields: Set[str], spelled: Set[str]
) -> InvalidJob:
    hint = did_you_mean(name, spelled | fields)
    return InvalidJob(
        f"{name!r} is neither a column of {where} nor a field of an answer{hint}; "
        f"columns: {', '.join(sorted(columns)) or 'none'}; fields: {', '.join(sorted(fields))}"
    )


def _damaged(source: Source, error: Exception) -> JobRow:
    """Return the last row of a source that cannot be read to its end."""
    return JobRow(
        id=f"{source.name}:damaged",
        error=f"{source.name} cannot be read to its end: {describe(error)}",
    )


def _fingerprint(source: Source) -> str:
    file = source.name
    if os.path.isdir(file):
        file = os.path.join(file, "state.json")
    return journal.fingerprint(file)


@dataclass
class _Seen:
    """Findings of a scan of all rows.

    Attributes:
        twice: Ids of rows whose id an earlier row has.
        columns: Columns of any row.
        fields: Fields of the answers' JSON, by any row's schema.
        strange: How many rows have a key that no request has.
    """

    num_items: int = 0
    ids: Ids = field(default_factory=Ids)
    twice: list[str] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    strange: Counter[str] = field(default_factory=Counter)

    def add(self, item: Item) -> bool:
        """Look at a row; return False if an earlier one has its id."""
        self.num_items += 1
        self.columns.update(item.row.columns)
        self.strange.update(item.row.strange)
        self.fields |= schema_fields(item.params)
        is_new = self.ids.add(item.id)
        if not is_new:
            self.twice.append(item.id)
        return is_new

    def in_every_line(self) -> list[str]:
        counts = self.strange.items()
        return [name for name, count in counts if count == self.num_items]


class _MediaWatch:
    """A look at a source's rows, of which none is a table whose media are looked for.

    Attributes:
        has_media: Whether a row had any, or none is looked for.
        left_out: The error of the first row that names a picture in a column which nobody reads.
    """

    has_media = True
    left_out: str | None = None

    def checked(self, row: JobRow) -> JobRow:
        """Add an error to a row whose column of pictures is a guess, and holds none."""
        return row

    def seen(self, row: JobRow) -> JobRow:
        """Look at a row; of a source that is read but once, a row that names a picture fails."""
        return row


class _TableWatch(_MediaWatch):
    """A look at a table's rows: it finds media, or a column that holds them unread."""

    def __init__(self, source: Source, own: Columns) -> None:
        self._source = source
        self._own = own
        self._folder = os.path.dirname(source.name)
        found = source.found
        self.has_media = found is not None and found.has_media

    def checked(self, row: JobRow) -> JobRow:
        return flag_doubtful_media(row, self._own, self._source.name, self._folder)

    def seen(self, row: JobRow) -> JobRow:
        self.has_media = self.has_media or row.asks_about_media
        if self.has_media:
            return row
        flagged = flag_overlooked_media(row, self._source.name, self._folder)
        if flagged is row:
            return row
        self.left_out = self.left_out or flagged.error
        return flagged if self._source.is_once else row


def _watch(source: Source) -> _MediaWatch:
    if not isinstance(source, TABLES) or source.own.image == "":
        return _MediaWatch()
    return _TableWatch(source, source.own)


def _check_ids(twice: Sequence[str]) -> None:
    if not twice:
        return
    named = ", ".join(map(repr, dict.fromkeys(twice[:3])))
    said = "1 row has" if len(twice) == 1 else f"{len(twice)} rows have"
    raise InvalidJob(
        f"{said} an id that another row has: {named}; --id-column names another column, and '' counts rows instead"
    )


def _named(ids: Sequence[str]) -> str:
    more = ", ..." if len(ids) > 3 else ""
    return ", ".join(ids[:3]) + more


def _said_of(key: str) -> str:
    hint = did_you_mean(key, REQUEST_KEYS)
    return (
        f"the line has {key!r}, which no request has{hint}; where it is a column, name it: in a prompt, or by "
        f"--columns {key}"
    )
