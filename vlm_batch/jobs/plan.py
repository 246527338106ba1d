"""A job: its sources, questions and output; and its plan, the rows counted before it begins."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from vlm_batch.errors import describe
from vlm_batch.jobs import journal
from vlm_batch.jobs.cells import hint
from vlm_batch.jobs.questions import DEFAULT_PROMPT, Item, Questions, schema_fields
from vlm_batch.jobs.rows import Ids, InvalidJob, Row, Shard, Source, digest
from vlm_batch.jobs.sinks import Sink
from vlm_batch.jobs.sources import fingerprint
from vlm_batch.jobs.summary import Kinds
from vlm_batch.jobs.tables import REQUEST_KEYS


@dataclass
class Plan:
    """A job's rows, counted before it begins. ``total`` is None where they can be read once only.

    ``wrong`` counts rows that can be seen to fail, by kind; ``own`` those that have a prompt or messages of their own.
    ``others`` are answers of the output that are to none of the rows, and ``changed`` rows whose files are others since they
    were answered.
    """

    total: int | None
    done: int = 0
    failed_before: int = 0
    wrong: Kinds = field(default_factory=Kinds)
    own: int = 0
    others: int = 0
    changed: list[str] = field(default_factory=list)

    def add(self, item: Item, done: Ids, failed: Ids, stamps: Mapping[int, int]) -> None:
        """Count a row, by what the output has: rows that are answered and failed, and what these were made of."""
        assert self.total is not None
        self.total += 1
        self.own += item.row.prompt is not None or item.row.messages is not None
        if item.id in done:
            self.done += 1
            before = stamps.get(digest(item.id))
            if before is not None and (now := journal.stamps_of(item.row)) and digest(str(now)) != before:
                self.changed.append(item.id)
        elif item.id in failed:
            self.failed_before += 1
        elif item.error is not None:
            self.wrong.add(item.error, item.names)

    def check_goes_on(self) -> None:
        """Raise InvalidJob for rows that the output has by other names, or of other pictures."""
        if self.changed:
            named = ", ".join(self.changed[:3]) + (", ..." if len(self.changed) > 3 else "")
            raise InvalidJob(
                f"files of {len(self.changed)} answered rows have changed since: {named}. --overwrite asks all rows again, "
                "--force keeps their answers"
            )
        if self.others and not self.done and not self.failed_before:
            answers = "1 answer" if self.others == 1 else f"{self.others} answers"
            raise InvalidJob(
                f"none of the {answers} in the output is to one of these rows: are paths spelled as in its first run? "
                "--force goes on all the same"
            )

    @property
    def left(self) -> int | None:
        return None if self.total is None else self.total - self.done - self.failed_before


@dataclass
class Job:
    """Rows of ``sources`` asked ``questions``, answers into ``sink``. ``shard`` is the part of the rows that is this job's."""

    sources: Sequence[Source]
    questions: Questions
    sink: Sink
    shard: Shard = field(default_factory=Shard)
    carried: tuple[str, ...] = ()

    def items(self, *, scan: bool = False) -> Iterator[Item]:
        """Every question of this shard, in order. ``scan``: without what pictures hold."""
        return (item for item in self._all_items(scan) if self.shard.has(item.id))

    def _all_items(self, scan: bool) -> Iterator[Item]:
        rows = (self._known(row) for source in self.sources for row in _rows_of(source, scan))
        asked = (item for row in rows for item in self.questions.ask(row))
        return (replace(item, number=number) for number, item in enumerate(asked))

    @property
    def named(self) -> frozenset[str]:
        """The columns that prompts and the output use."""
        return self.questions.columns.union(self.carried)

    def _known(self, row: Row) -> Row:
        """The row, with an error if it says something that is neither known nor named."""
        strange = [name for name in row.strange if name not in self.named] if row.error is None else []
        return replace(row, error=_said_of(strange[0])) if strange else row

    @property
    def is_once(self) -> bool:
        return any(source.is_once for source in self.sources)

    def settings(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that make two runs the same job: compared when one goes on with the other's output."""
        tables = {
            source.name: fingerprint(
                os.path.join(source.name, "state.json") if os.path.isdir(source.name) else source.name
            )
            for source in self.sources
            if source.numbered and not source.is_once
        }
        return {**self.questions.settings(), "shard": str(self.shard), "tables": tables, **more}

    def plan(self, done: Ids, failed: Ids) -> Plan:
        """Count the rows. Raises InvalidJob for columns that are not there, and for ids that come twice, and
        InvalidParameters for a form of answers that is none."""
        self._check_sources()
        if self.is_once:
            return Plan(None)
        plan, ids, twice, num_items = Plan(0), Ids(), list[str](), 0
        columns, fields, strange = set[str](), set[str](), Counter[str]()
        stamps = self.sink.stamps() if len(done) else {}
        for item in self._all_items(scan=True):
            num_items += 1
            if not ids.add(item.id):
                twice.append(item.id)
            columns.update(item.row.columns)
            strange.update(item.row.strange)
            fields |= schema_fields(item.params)
            if self.shard.has(item.id):
                plan.add(item, done, failed, stamps)
        if twice:
            named = ", ".join(repr(one) for one in dict.fromkeys(twice[:3]))
            said = "1 row has" if len(twice) == 1 else f"{len(twice)} rows have"
            raise InvalidJob(f"{said} an id that another row has: {named}")
        if not num_items:
            raise InvalidJob(f"there are no rows in {', '.join(source.name for source in self.sources)}")
        self._check_columns(tuple(sorted(columns)), "any row", fields)
        if mistakes := [name for name, count in strange.items() if count == num_items and name not in self.named]:
            raise InvalidJob(_said_of(mistakes[0]))
        plan.others = len(done) + len(failed) - plan.done - plan.failed_before
        return plan

    def _check_sources(self) -> None:
        if self.questions.params.form is not None:
            from vlm_batch.inputs.grammar import check_form  # with transformers, which no other job needs here

            check_form(self.questions.params)
        for source in self.sources:
            if source.columns is not None:
                self._check_columns(source.columns, source.name)
            if source.found is not None:
                asks = self.questions.prompts != (DEFAULT_PROMPT,)
                source.found.check_meant(source.columns or (), source.name, self.named, asks=asks)

    def _check_columns(self, known: tuple[str, ...], where: str, fields: Set[str] = frozenset()) -> None:
        """Raise InvalidJob for a column that prompts or the output name, and that is not there. ``fields`` are answers'."""
        if missing := sorted(self.questions.columns - set(known)):
            raise InvalidJob(
                f"the prompt names {{{missing[0]}}}, which is no column of {where}; columns: {', '.join(known) or 'none'} "
                "(write {{ and }} for braces)"
            )
        there = {*known, *fields, *schema_fields(self.questions.params)}
        if lost := [name for name in self.carried if name not in there]:
            raise InvalidJob(f"{lost[0]!r} is neither a column of {where} nor a field of an answer")


def _said_of(key: str) -> str:
    """The message for a line of JSON that has an unknown key."""
    return (
        f"the line has {key!r}, which no request has{hint(key, REQUEST_KEYS)}; where it is a column, name it: in a prompt, "
        f"or by --columns {key}"
    )


def _rows_of(source: Source, scan: bool) -> Iterator[Row]:
    """A source's rows; what it raises on its way is the last one's error, and the job goes on with the next source."""
    try:
        yield from source.scan() if scan else source.rows()
    except Exception as error:  # whatever Arrow, datasets and disks have
        if scan and isinstance(error, InvalidJob):  # nothing has begun yet
            raise
        yield Row(id=f"{source.name}:damaged", error=f"{source.name} cannot be read to its end: {describe(error)}")
