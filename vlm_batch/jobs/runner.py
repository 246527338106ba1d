"""Run a job: check it, plan it, then stream its rows through a batcher into a sink."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vlm_batch.errors import describe
from vlm_batch.jobs import journal
from vlm_batch.jobs.cells import hint
from vlm_batch.jobs.files import identity
from vlm_batch.jobs.order import by_size
from vlm_batch.jobs.questions import DEFAULT_PROMPT, Item, Questions, schema_fields
from vlm_batch.jobs.rows import Ids, InvalidJob, Row, Shard, Source, digest, name_of
from vlm_batch.jobs.sinks import Record, Sink
from vlm_batch.jobs.sources import Files, fingerprint
from vlm_batch.jobs.summary import Kinds, Summary
from vlm_batch.jobs.tables import REQUEST_KEYS
from vlm_batch.many import submitted
from vlm_batch.types import Request, Result, SamplingParams, Stats, TokenLogprobs, Usage

if TYPE_CHECKING:
    from vlm_batch.batcher import VLMBatcher
    from vlm_batch.handle import Handle


class Batcher(Protocol):
    """The part of a batcher that a job needs."""

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]: ...


@runtime_checkable
class Counting(Protocol):
    """A batcher that says how busy its engine was."""

    def stats(self) -> Stats: ...


OpenBatcher = Callable[[], AbstractContextManager[Batcher]]


class Watch:
    """Follows a job. The methods of this base class do nothing."""

    def planned(self, plan: Plan) -> None:
        """The job is checked, and begins unless nothing is left of it. The model is loaded next."""

    def began(self, batcher: Batcher, summary: Summary) -> None:
        """The model is there, and the first row is about to be asked."""

    def ended(self, item: Item, result: Result, in_flight: int) -> None:
        """One more row has ended, and its answer is kept."""


@dataclass(frozen=True)
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
    changed: Sequence[str] = ()

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
        if self.questions.params.form is not None:
            from vlm_batch.inputs.grammar import check_form  # with transformers, which no other job needs here

            check_form(self.questions.params)
        for source in self.sources:
            if source.columns is not None:
                self._check_columns(source.columns, source.name)
            if source.found is not None:
                asks = self.questions.prompts != (DEFAULT_PROMPT,)
                source.found.check_meant(source.columns or (), source.name, self.named, asks=asks)
        if self.is_once:
            return Plan(None)
        known, twice, wrong = Ids(), Counter[str](), Kinds()
        columns, fields, strange = set[str](), set[str](), Counter[str]()
        num_done = num_failed = total = own = 0
        num_items, stamps, changed = 0, self.sink.stamps() if len(done) else {}, []
        for item in self._all_items(scan=True):
            num_items += 1
            if not known.add(item.id):
                twice[item.id] += 1
            columns.update(item.row.columns)
            strange.update(item.row.strange)
            fields |= schema_fields(item.params)
            if not self.shard.has(item.id):
                continue
            total += 1
            own += item.row.prompt is not None or item.row.messages is not None
            if item.id in done:
                num_done += 1
                before = stamps.get(digest(item.id))
                if before is not None and (now := journal.stamps_of(item.row)) and digest(str(now)) != before:
                    changed.append(item.id)
            elif item.id in failed:
                num_failed += 1
            elif item.error is not None:
                wrong.add(item.error, item.names)
        if twice:
            named = ", ".join(repr(one) for one in list(twice)[:3])
            number = sum(twice.values())
            said = "1 row has" if number == 1 else f"{number} rows have"
            raise InvalidJob(f"{said} an id that another row has: {named}")
        if not num_items:
            raise InvalidJob(f"there are no rows in {', '.join(source.name for source in self.sources)}")
        self._check_columns(tuple(sorted(columns)), "any row", fields)
        if mistakes := [name for name, count in strange.items() if count == num_items and name not in self.named]:
            raise InvalidJob(_said_of(mistakes[0]))
        others = len(done) + len(failed) - num_done - num_failed
        return Plan(total, num_done, num_failed, wrong, own, others, changed)

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
    """What is wrong with a line of JSON that has an unknown key."""
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


def run(
    source: Source | Sequence[Source],
    sink: Sink,
    batcher: Batcher | OpenBatcher,
    *,
    questions: Questions | None = None,
    shard: Shard | None = None,
    settings: Mapping[str, Any] | None = None,
    carried: tuple[str, ...] = (),
    resume: bool = False,
    retry_errors: bool = False,
    overwrite: bool = False,
    force: bool = False,
    keeps_samples: bool = False,
    watch: Watch | None = None,
) -> Summary:
    """Answer a source's rows into a sink, in bounded memory, and go on where an earlier run ended (``resume``).

    ``batcher`` is a batcher, or opens one when it is needed: after the checks, and not if nothing is left to be done.
    ``settings`` are compared with the first run's beside prompts and sampling (the model's name, say); other ones are
    refused unless ``force``. ``retry_errors`` resumes and asks failed rows again. ``carried`` are columns that the sink
    takes along. An interrupt (KeyboardInterrupt) ends the job with what is done kept, and ``Summary.interrupted`` set.

    Raises InvalidJob for a job that cannot be begun as asked, before anything is changed; CannotWrite when an answer
    cannot be kept, with all earlier ones kept.
    """
    sources: Sequence[Source] = source if isinstance(source, Sequence) else [source]
    job = Job(sources, questions or Questions(), sink, shard or Shard(), carried)
    watch = watch or Watch()
    resume = resume or retry_errors
    _check_apart(sources, sink)
    header = job.settings(settings or {})
    with sink.locked():
        sink.check(header, resume=resume, overwrite=overwrite, force=force)
        done, failed = sink.existing() if resume else (Ids(), Ids())
        plan = job.plan(done, Ids() if retry_errors else failed)
        if not force:
            plan.check_goes_on()
        if plan.total is None:  # of rows that are not known yet, what the output has is what was done
            plan = replace(plan, done=len(done), failed_before=0 if retry_errors else len(failed))
        summary = Summary(plan.total, plan.done, plan.failed_before, keeps_samples)
        watch.planned(plan)
        if plan.left == 0:  # its last run may have been killed before it could make the output
            opened: AbstractContextManager[Batcher | None] = contextlib.nullcontext()
        else:
            opened = batcher() if callable(batcher) else contextlib.nullcontext(batcher)
        with opened as ready:
            sink.begin(header, overwrite=overwrite and ready is not None, drop_errors=retry_errors)
            try:
                if ready is not None:
                    asked_before = [done] if retry_errors else [done, failed]
                    _stream(job, ready, summary, watch, lambda item: any(item.id in ids for ids in asked_before))
                sink.finish()
            finally:
                sink.close()
    return summary


def _check_apart(sources: Sequence[Source], sink: Sink) -> None:
    """Raise InvalidJob for an output that is one of the job's own sources."""
    output = identity(sink.name)
    for source in sources:
        paths = source.paths if isinstance(source, Files) else (source.name,)
        if sink.name not in ("", "-") and any(identity(path) == output for path in paths):
            raise InvalidJob(f"{sink.name} is read by this job; its answers need a file of their own")


def _stream(job: Job, batcher: Batcher, summary: Summary, watch: Watch, is_done: Callable[[Item], bool]) -> None:
    """Ask the questions that are not answered. Rows are read when the batcher has room; a bad row ends with its error."""
    alive: dict[str, Item] = {}
    made_of: dict[str, list[journal.Stamp]] = {}
    seen = Ids()

    def end(item: Item, result: Result) -> None:
        if result.finish_reason == "cancelled":  # not answered: the next run asks it
            return
        result = with_form(item.params, result)
        if stamps := made_of.pop(item.id, None):
            job.sink.stamp(item.id, stamps)
        job.sink.append(record_of(item, result))
        summary.add(item, result)
        watch.ended(item, result, len(alive))

    def left() -> Iterator[Item]:
        for item in job.items():
            if job.is_once and not seen.add(item.id):
                summary.again += 1
            elif not is_done(item):
                yield item

    def requests() -> Iterator[Request]:
        items = by_size(left()) if all(isinstance(source, Files) for source in job.sources) else left()
        while True:
            began = time.perf_counter()
            item = next(items, None)
            if item is None:
                return
            request, item = make_request(item)
            summary.source += time.perf_counter() - began
            if request is None:
                end(item, Result(request_id=item.id, finish_reason="error", error=item.error))
                continue
            alive[item.id], made_of[item.id] = item, journal.stamps_of(item.row)
            yield request

    summary.begin()
    busy_before = batcher.stats().busy_seconds if isinstance(batcher, Counting) else 0.0
    watch.began(batcher, summary)
    try:
        for result in batcher.as_completed(requests()):
            end(alive.pop(result.request_id), result)
            if isinstance(batcher, Counting):
                summary.busy = batcher.stats().busy_seconds - busy_before
    except KeyboardInterrupt:
        summary.interrupted = True


def make_request(item: Item) -> tuple[Request | None, Item]:
    """An item's request; None with the item's error if it cannot be made."""
    if item.error is not None:
        return None, item
    try:
        return item.request(), item
    except Exception as error:  # whatever reading a page or a cell raises is this row's
        return None, replace(item, error=f"{type(error).__name__}: {error}")


def submitted_row(batcher: VLMBatcher, questions: Questions, row: Row) -> Handle | Result:
    """A row of a table under way, by an id of the batcher's own, or the result that says why it cannot be."""
    request, item = make_request(next(questions.ask(row)))
    if request is None:
        return Result(request_id=item.id, finish_reason="error", error=item.error)
    return submitted(batcher.submit_request, replace(request, request_id=None))


def with_form(params: SamplingParams, result: Result) -> Result:
    """The result, with an error where its answer ended before it had the form that was asked for."""
    others = tuple(with_form(params, other) for other in result.others)
    if params.json_schema is not None:
        is_whole, what = result.parsed is not None or result.text.strip() == "null", "its JSON was whole"
    else:
        is_whole, what = params.choice is None or result.text in params.choice, "it was one of the choices"
    if is_whole or result.error is not None:
        return replace(result, others=others)
    cut = f" by its longest length (max_tokens is {params.max_tokens})" if result.finish_reason == "length" else ""
    return replace(result, error=f"CutAnswer: the answer was ended{cut} before {what}", others=others)


def record_of(item: Item, result: Result) -> Record:
    """An answer as a record: its own fields, and the row's columns under "columns"."""
    timings = {
        name: None if seconds != seconds else round(seconds, 6) for name, seconds in vars(result.timings).items()
    }
    record: Record = {
        "id": item.id,
        "request_id": item.id,
        "images": item.row.image_names,
        "videos": [name_of(video.source) for video in item.row.videos],
        "prompt": item.prompt,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "error": result.error,
        "image_sizes": result.image_sizes,
        "model_image_sizes": result.model_image_sizes,
        "video_sizes": result.video_sizes,
        "usage": dict(vars(result.usage)),
        "timings": timings,
        "columns": item.row.columns,
    }
    if item.params.json_schema is not None:
        record["parsed"] = result.parsed
    if result.logprobs is not None:
        record["logprobs"] = list(map(_as_json, result.logprobs))
    if result.prompt_logprobs is not None:
        record["prompt_logprobs"] = list(map(_as_json, result.prompt_logprobs))
    if result.others:
        record["others"] = [_other(item, other) for other in result.others]
    return record


def _other(item: Item, result: Result) -> Record:
    """A further answer of a request that asked for several."""
    names = ("text", "finish_reason", "error", "usage", "parsed", "logprobs")
    whole = record_of(item, result)
    return {name: whole[name] for name in names if name in whole}


def _as_json(one: TokenLogprobs | None) -> dict[str, Any] | None:
    return None if one is None else {"token_id": one.token_id, "logprob": one.logprob, "top": one.top}


#: Fields that an answer has where they were asked for.
_ASKED_FOR = ("parsed", "logprobs", "prompt_logprobs", "others")
#: The names of an answer's fields that an output can choose among, beside its row's columns.
ANSWER_FIELDS = frozenset(record_of(Item("", Row(id="")), Result(request_id=""))) - {"columns"} | {
    "seconds",
    *_ASKED_FOR,
    *vars(Usage()),
}
