"""Run a job: check it, plan it, stream its rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vlm_batch.jobs.answers import record_of, with_form
from vlm_batch.jobs.files import is_file_of, stat_of
from vlm_batch.jobs.lines import Record
from vlm_batch.jobs.plan import Job, Plan
from vlm_batch.jobs.questions import Item, Questions
from vlm_batch.jobs.rows import Ids, InvalidJob, JobRow, Shard, Source, digest
from vlm_batch.jobs.sinks import Sink
from vlm_batch.jobs.sources import Files
from vlm_batch.jobs.stamps import Stamp, line_of
from vlm_batch.jobs.summary import Summary
from vlm_batch.many import try_submit
from vlm_batch.types import Request, Result, Stats

if TYPE_CHECKING:
    from vlm_batch.batcher import VLMBatcher
    from vlm_batch.handle import Handle


class Batcher(Protocol):
    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]: ...


@runtime_checkable
class Counting(Protocol):
    """A batcher with engine statistics."""

    def stats(self) -> Stats: ...


OpenBatcher = Callable[[], AbstractContextManager[Batcher]]


class Watch:
    """Observer of a job."""

    def counted(self, rows: int) -> None:
        """Called now and then while rows are counted."""

    def planned(self, plan: Plan) -> None:
        """Called before the model is loaded."""

    def began(self, batcher: Batcher, summary: Summary) -> None:
        """Called before the first row."""

    def ended(self, item: Item, result: Result, in_flight: int) -> None:
        """Called for each stored answer."""


#: A job that nobody says more of.
_PLAIN, _WHOLE, _NOBODY = Questions(), Shard(), Watch()


def run(
    source: Source | Sequence[Source],
    sink: Sink,
    batcher: Batcher | OpenBatcher,
    *,
    questions: Questions = _PLAIN,
    shard: Shard = _WHOLE,
    settings: Mapping[str, Any] = MappingProxyType({}),
    carried: tuple[str, ...] = (),
    resume: bool = False,
    retry_errors: bool = False,
    overwrite: bool = False,
    force: bool = False,
    keeps_samples: bool = False,
    watch: Watch = _NOBODY,
) -> Summary:
    """Answer sources' rows into a sink, in bounded memory; an interrupt ends the job, and keeps its answers.

    Args:
        batcher: A batcher, or a function that opens one after the checks.
        settings: Further settings that resumed runs must share, such as the model's name.
        carried: The sink's columns, to check.
        resume: Continue an earlier run's output; ``retry_errors`` also asks failed rows again.
        overwrite: Replace the output; ``force`` resumes it despite other settings.
        keeps_samples: Collect sample answers for a report.

    Raises:
        InvalidJob: The job cannot begin as asked; nothing was changed.
        CannotWrite: An answer cannot be stored; earlier ones are safe.
    """
    sources: Sequence[Source] = source if isinstance(source, Sequence) else [source]
    job = Job(sources, questions, sink, shard, carried)
    resume = resume or retry_errors
    _check_apart(sources, sink)
    header = job.settings(settings)
    with sink.locked():
        sink.check(header, resume=resume, overwrite=overwrite, force=force)
        done, failed = sink.existing() if resume else (Ids(), Ids())
        failed = Ids() if retry_errors else failed  # which are asked again
        plan = job.plan(done, failed, watch.counted)
        if not force:
            plan.check_resumable()
        # of rows that are not known yet, what the output has is what was done
        if plan.total is None:
            plan = replace(plan, done=len(done), failed_before=len(failed))
        summary = Summary(plan.total, plan.done, plan.failed_before, keeps_samples)
        watch.planned(plan)
        is_done = _known(
            [done, failed], sink.stamps() if resume and job.is_once else {}, summary
        )
        with _opened(batcher, plan) as ready:
            sink.begin(
                header,
                overwrite=overwrite and ready is not None,
                drop_errors=retry_errors,
            )
            try:
                if ready is not None:
                    _JobStream(job, ready, summary, watch, is_done).run()
                sink.finish()
            finally:
                sink.close()
    return summary


def _opened(
    batcher: Batcher | OpenBatcher, plan: Plan
) -> AbstractContextManager[Batcher | None]:
    """Open the batcher; None if no row is left: the last run may have been killed before it could make the output."""
    if plan.left == 0:
        return contextlib.nullcontext()
    if callable(batcher):
        return batcher()
    return contextlib.nullcontext(batcher)


def _known(
    ended: Sequence[Ids], stamps: Mapping[int, Stamp], summary: Summary
) -> Callable[[Item], bool]:
    """Return whether a row has ended before; ``stamps`` are of rows that no plan has compared."""

    def is_done(item: Item) -> bool:
        if not any(item.id in ids for ids in ended):
            return False
        stamp = stamps.get(digest(item.id))
        if stamp is not None and stamp.asks_else(item):
            summary.otherwise += 1
        return True

    return is_done


def _check_apart(sources: Sequence[Source], sink: Sink) -> None:
    """Raise InvalidJob if the output is a file that the job reads."""
    if sink.name in ("", "-"):
        return
    there = stat_of(sink.name)
    for path in _paths_of(sources):
        if path == sink.name or is_file_of(path, there):
            raise InvalidJob(
                f"{sink.name} is read by this job; its answers need a file of their own"
            )


def _paths_of(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        if isinstance(source, Files):
            yield from source.paths
        else:
            yield source.name


class _JobStream:
    """A job's rows on their way through the batcher.

    Attributes:
        alive: Items that the batcher has, by their ids.
        second: Items whose answers are asked for again.
        stamps: What is stored with the answers of these items.
    """

    def __init__(
        self,
        job: Job,
        batcher: Batcher,
        summary: Summary,
        watch: Watch,
        is_done: Callable[[Item], bool],
    ) -> None:
        self._job = job
        self._batcher = batcher
        self._summary = summary
        self._watch = watch
        self._is_done = is_done
        self.alive: dict[str, Item] = {}
        self.second: list[Item] = []
        self.stamps: dict[str, Record] = {}
        self._seen = Ids()
        self._busy_before = 0.0

    def run(self) -> None:
        """Ask the questions that are left, then those whose answers are asked for again; an interrupt ends it."""
        self._summary.begin()
        self._busy_before = self._busy_seconds()
        self._watch.began(self._batcher, self._summary)
        try:
            self._answer(self._job.ordered(self._left()))
            self._answer(iter(self.second))
        except KeyboardInterrupt:
            self._summary.interrupted = True

    def _busy_seconds(self) -> float:
        if not isinstance(self._batcher, Counting):
            return self._busy_before
        return self._batcher.stats().busy_seconds

    def _left(self) -> Iterator[Item]:
        for item in self._job.items():
            # its source has grown since it was counted, or can be read only once
            if not self._seen.add(item.id):
                self._summary.skip(item.id)
            elif not self._is_done(item):
                yield item

    def _answer(self, items: Iterator[Item]) -> None:
        for result in self._batcher.as_completed(self._requests(items)):
            item = self.alive.pop(result.request_id, None)
            # of no row: as_completed makes a result of what the rows' own iterator raises
            if item is None:
                raise InvalidJob(
                    f"the rows cannot be read to their end: {result.error}"
                )
            self._end(item, result)
            if isinstance(self._batcher, Counting):
                self._summary.busy = self._busy_seconds() - self._busy_before

    def _requests(self, items: Iterator[Item]) -> Iterator[Request]:
        """Yield requests of items, and end those that cannot be asked."""
        while True:
            began = time.perf_counter()
            item = next(items, None)
            if item is None:
                return
            request, item = make_request(item)
            self._summary.source += time.perf_counter() - began
            if request is None:
                self._end(item, _failed(item))
                continue
            self.alive[item.id] = item
            self.stamps[item.id] = line_of(item)
            yield request

    def _end(self, item: Item, result: Result) -> None:
        if result.finish_reason == "cancelled":  # not answered: the next run asks it
            return
        result = with_form(item.params, result)
        if item.attempt == 1:
            further = self._job.questions.again(item, result)
            if further is not None:
                self.second.append(replace(further, attempt=2))
                return
        stamp = self.stamps.pop(item.id, None)
        if stamp is not None:
            self._job.sink.stamp(stamp)
        self._job.sink.append(record_of(item, result))
        self._summary.add(item, result)
        self._watch.ended(item, result, len(self.alive))


def _failed(item: Item) -> Result:
    return Result(request_id=item.id, finish_reason="error", error=item.error)


def make_request(item: Item) -> tuple[Request | None, Item]:
    """Return the request, or None, and the item with any error."""
    if item.error is not None:
        return None, item
    try:
        return item.request(), item
    except Exception as error:  # whatever reading a page or a cell raises is this row's
        return None, replace(item, error=f"{type(error).__name__}: {error}")


def submitted_row(
    batcher: VLMBatcher, questions: Questions, row: JobRow
) -> Handle | Result:
    """Submit a table's row, or return its error."""
    request, item = make_request(next(questions.ask(row)))
    if request is None:
        return _failed(item)
    return try_submit(batcher.submit_request, replace(request, request_id=None))
