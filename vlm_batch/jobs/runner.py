"""Run a job: check it, plan it, then stream its rows through a batcher into a sink."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vlm_batch.jobs import journal
from vlm_batch.jobs.answers import record_of, with_form
from vlm_batch.jobs.files import identity
from vlm_batch.jobs.order import by_size
from vlm_batch.jobs.plan import Job, Plan
from vlm_batch.jobs.questions import Item, Questions
from vlm_batch.jobs.rows import Ids, InvalidJob, Row, Shard, Source
from vlm_batch.jobs.sinks import Sink
from vlm_batch.jobs.sources import Files
from vlm_batch.jobs.summary import Summary
from vlm_batch.many import submitted
from vlm_batch.types import Request, Result, Stats

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
