"""The engine's thread: inbox, generator and handles."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import mlx.core as mx

from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.inbox import MESSAGES_A_TURN, NO_CLIENT, Inbox, Message
from vlm_batch.engine.options import Scoring, give_options, params_to_score
from vlm_batch.engine.row import Prompt, Row, Stage, new_row
from vlm_batch.engine.several import Several
from vlm_batch.errors import BatcherClosed, describe, let_go
from vlm_batch.handle import Handle
from vlm_batch.records import OptionTokens, Terms
from vlm_batch.runtime import threads
from vlm_batch.runtime.memory import wired
from vlm_batch.runtime.watchdog import Watchdog
from vlm_batch.types import Event, Request, Stats, failed_result

if TYPE_CHECKING:
    from vlm_batch.inputs.loaders import Loaders
    from vlm_batch.inputs.question import Question

_log = logging.getLogger(__name__)


#: Seconds in which tokens are counted for their rate.
SPAN = 5.0


@dataclass
class _Totals:
    """Counts of what was handed out."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    generated_tokens: int = 0
    steps: int = 0
    cached_tokens: int = 0
    cache_hits: int = 0
    busy_seconds: float = 0.0
    # of the tokens in the last ``SPAN`` seconds
    times: deque[float] = field(default_factory=deque)

    def add(self, event: Event) -> None:
        if event.token is not None:
            self.generated_tokens += 1
            self.times.append(time.perf_counter())
            while self.times[0] < self.times[-1] - SPAN:
                self.times.popleft()
        if (result := event.result) is not None:
            self.failed += result.finish_reason == "error"
            self.cancelled += result.finish_reason == "cancelled"
            self.finished += result.ok
            self.cached_tokens += result.usage.cached_tokens
            self.cache_hits += result.usage.cached_tokens > 0

    @property
    def tokens_per_second(self) -> float:
        times = tuple(self.times)
        return (
            (len(times) - 1) / (times[-1] - times[0])
            if len(times) > 1 and times[-1] > times[0]
            else 0.0
        )


#: Seconds that the engine waits at a time for a row's inputs, while others rest for it.
WAIT_SECONDS = 0.005


class EngineLoop:
    """Runs a generator, and sends its events to handles.

    ``submit``, ``cancel``, ``stop``, ``abandon`` and ``stats`` are thread-safe. A request's error ends that request.
    The engine's own error ends its requests; the engine goes on.
    """

    def __init__(
        self, generator: BatchGenerator, loaders: Loaders, *, warm_up: bool = False
    ) -> None:
        self.generator = generator
        self._warming = generator.warm_up() if warm_up else None
        self._loaders = loaders
        # None ends the loop
        self._inbox = Inbox()
        generator.callers = self._inbox.callers
        self._alive: dict[str, Handle] = {}  # of every request that has not ended
        self._several: dict[str, Several] = {}  # by row id
        # gets an event now, and may have left ``_alive`` for it
        self._receiver: Handle | None = None
        self._cancelling: set[str] = set()  # requests with a cancel in the inbox
        self._num_messages = 0  # messages since the last turn
        self._is_busy = False
        self._process = os.getpid()
        self._gone: str | None = None  # reason why the loop has ended
        self._totals = _Totals()
        self._watchdog = Watchdog()

    # From any thread

    def submit(self, question: Question, request: Request, handle: Handle) -> None:
        """Queue a checked request with a free id. Raises BatcherClosed after the loop's end."""
        self.check_runs()
        row = new_row(
            handle.request_id,
            Prompt(question=question),
            params_to_score(request) if request.options else request.params,
            text=self.generator.text,
            terms=_terms(request),
            cache=request.cache,
        )
        row.lane, row.has_videos = question.lane, bool(question.videos)
        give_options(row, [OptionTokens(given) for given in request.options])
        self._alive[row.request_id] = handle
        self._inbox.put(Message(lambda loop: loop._add(row), row.client))
        if self._gone is not None:  # the loop ended meanwhile
            self.abandon()

    def check_runs(self) -> None:
        """Raise BatcherClosed with the reason after the loop's end."""
        if self._gone is not None:
            raise BatcherClosed(self._gone)

    def is_alive(self, request_id: str) -> bool:
        return request_id in self._alive

    def cancel(self, request_id: str) -> bool:
        """End a request soon. False if there is none."""
        if not self.is_alive(request_id):
            return False
        if request_id not in self._cancelling:
            self._cancelling.add(request_id)
            cancel = Message(lambda loop: loop._cancel(request_id), NO_CLIENT)
            self._inbox.put(cancel)
        return True

    def stop(self) -> None:
        self.generator.is_ending = True  # the step under way ends sooner
        self._inbox.put(None)  # cancels all requests

    @property
    def is_gone(self) -> bool:
        """Whether the thread has ended or belongs to another process."""
        return self._gone is not None

    def abandon(self) -> None:
        """End all requests with an error, since the thread is gone."""
        in_child = os.getpid() != self._process
        if self._gone is None:
            self._gone = (
                f"the batcher was made in another process ({self._process}); its thread is not in this one, and MLX does not "
                "outlive a fork"
                if in_child
                else "the batcher is closed: its engine has stopped; make a new one"
            )
        lost = [] if self._receiver is None else [self._receiver]
        with contextlib.suppress(KeyError):  # none is left
            while True:
                lost.append(self._alive.popitem()[1])
        for handle in lost:
            if in_child:
                handle.renew_lock()
            handle.push(_gone_event(handle.request_id, self._gone))

    def stats(self) -> Stats:
        generator, rows, totals = self.generator, self.generator.rows, self._totals
        waiting = rows.ledger.num(Stage.PREPARED, Stage.ENCODED)
        prefilling = rows.ledger.num(Stage.PREFILL)
        decoding = rows.ledger.num(Stage.DECODE)
        return Stats(
            queued=max(0, len(self._alive) - waiting - prefilling - decoding),
            waiting=waiting,
            prefilling=prefilling,
            decoding=decoding,
            kv_bytes=rows.batch.nbytes,
            finished=totals.finished,
            failed=totals.failed,
            cancelled=totals.cancelled,
            generated_tokens=totals.generated_tokens,
            tokens_per_second=totals.tokens_per_second,
            cache_hits=totals.cache_hits,
            cached_tokens=totals.cached_tokens,
            cache_bytes=generator.reuse.budget.nbytes,
            steps=totals.steps,
            recomputed=generator.retry.num_recomputed,
            input_bytes=rows.input_bytes,
            max_kv_bytes=generator.memory.max_bytes,
            mlx_bytes=mx.get_active_memory(),
            stalled=self._watchdog.stalled,
            pressed=generator.guard.pressed,
            ahead_bytes=generator.admission.nbytes,
            most_rows=generator.capacity.num_places,
            busy_seconds=totals.busy_seconds,
            drafted=generator.drafts.num_drafted,
            drafts_held=generator.drafts.num_held,
        )

    # On its own thread

    def run(self) -> None:
        try:
            while self._serve():
                pass
            self._finish()
        finally:
            self._loaders.close()

    def _finish(self) -> None:
        try:
            with self._watchdog.step():
                for request_id in tuple(self._alive):
                    self._cancel(request_id)
                while self.generator.has_work:
                    self._turn()
        except BaseException as error:
            self._recover(error)
        self.generator.reuse.close()

    def _serve(self) -> bool:
        """Act on the next message, or without one where there is work. False at the end."""
        message: Message | None = None
        with contextlib.suppress(queue.Empty):
            message = self._next_message()
            if message is None:
                return False
        try:
            with self._watchdog.step():  # listeners included
                self._act(message)
        except BaseException as error:  # a defect of the engine itself
            self._recover(error)
        return True

    def _act(self, message: Message | None) -> None:
        """Do what a message asks, then take a turn once no other waits. Without one, warm up."""
        if message is not None:
            self._num_messages += 1
            message.call(self)
        elif self._warming is not None and not self._is_busy:
            self._warm(self._warming)
            return
        if self._num_messages >= MESSAGES_A_TURN or not self.has_messages:
            self._num_messages = 0
            self._is_busy = self._turn()

    @property
    def has_messages(self) -> bool:
        return self._inbox.qsize() > 0

    def _next_message(self) -> Message | None:
        """Return the next message, or None at the end. Raises queue.Empty if there is none and work to do."""
        if self._is_busy and self.generator.is_waiting:
            return self._inbox.get(block=True, timeout=WAIT_SECONDS)
        return self._inbox.get(block=not self._is_busy and self._warming is None)

    def _warm(self, forwards: Iterator[None]) -> None:
        """Compute one more shape. Errors are only logged; requests raise their own."""
        try:
            next(forwards)
        except StopIteration:
            self._warming = None
        except Exception as error:
            self._warming = None
            _log.warning("the warm-up ended early: %s", describe(error))

    def _add(self, row: Row) -> None:
        try:
            several = _several(row)
            if several is not None:
                self._several.update(dict.fromkeys(several.row_ids, several))
            self.generator.rows.add(row)
        except BaseException as error:  # the generator does not know the row
            self._end(row.request_id, error)
            raise

    def _cancel(self, request_id: str) -> None:
        self._cancelling.discard(request_id)
        for row_id in self._row_ids(request_id):
            self.generator.cancel(row_id)

    def _turn(self) -> bool:
        """Hand rows to the loaders, run a step, hand out its events. False without work."""
        admission = self.generator.admission
        while (row := admission.next_to_read()) is not None:
            self._begin_reading(row)
        while (row := admission.next_to_process()) is not None:
            self._loaders.process(row.prompt.loading)
        if not self.generator.has_work:
            return False
        begin = time.perf_counter()
        events = self.generator.step()
        self._totals.steps += 1
        for event in events:
            self._hand_out(event)
        self._totals.busy_seconds += time.perf_counter() - begin
        return True

    def _recover(self, error: BaseException) -> None:
        let_go(error)
        try:
            for event in self.generator.fail_all(error):
                self._hand_out(event)
        except BaseException:  # the generator is broken, too
            self.generator.reset()
            for request_id in list(self._alive):
                self._end(request_id, error)

    def _end(self, request_id: str, error: BaseException) -> None:
        self._forget_several(request_id)
        self._hand_out(Event(request_id, result=failed_result(request_id, error)))

    def _begin_reading(self, row: Row) -> None:
        """Hand a row to the loaders, which tell by the inbox what they have read and made."""
        question, row.prompt.question = row.prompt.question, None
        put = self._inbox.put  # loaders' threads must not hold the engine
        try:
            note_read = Message(
                lambda loop: loop.generator.admission.note_read(row), row.client
            )
            when_read = partial(put, note_read)
            row.prompt.loading = loading = self._loaders.start(question, when_read)
        except BaseException as error:
            self.generator.rows.end(row, "error", error)
            return
        if loading.is_read:
            self.generator.admission.note_read(row)
        take_in = Message(lambda loop: loop.generator.take_in(row, loading), row.client)
        loading.when_done(partial(put, take_in))

    def _hand_out(self, event: Event) -> None:
        several = self._several.get(event.request_id)
        if several is not None:
            taken = several.take(event)
            if taken is None:
                return
            event = taken
        handle = self._alive.get(event.request_id)
        if handle is None:
            return
        self._totals.add(event)
        self._receiver = handle
        if event.result is not None:
            del self._alive[event.request_id]
            self._forget_several(event.request_id)
        handle.push(event)
        self._receiver = None

    def _row_ids(self, request_id: str) -> Sequence[str]:
        several = self._several.get(request_id)
        return (request_id,) if several is None else several.row_ids

    def _forget_several(self, request_id: str) -> None:
        for row_id in self._row_ids(request_id):
            self._several.pop(row_id, None)


def _terms(request: Request) -> Terms:
    return Terms(
        request.priority,
        request.client,
        may_draft=request.draft == "auto" and not request.options,
        returns_cache=request.return_cache,
        returns_prompt_ids=request.return_prompt_ids,
        cache_salt=request.cache_salt,
    )


def _several(row: Row) -> Several | None:
    """Return what makes one request of a row and its siblings, if it will have some."""
    if row.answer.path is not None:
        return Scoring(row.request_id, row.answer.path.request)
    return Several(row.request_id, row.params.n) if row.siblings else None


def _gone_event(request_id: str, reason: str) -> Event:
    return Event(request_id, result=failed_result(request_id, BatcherClosed(reason)))


class HasLoop(Protocol):
    @property
    def loop(self) -> EngineLoop: ...


Made = TypeVar("Made", bound=HasLoop)
#: Raises CancelledError if nobody waits for the engine any more.
Look = Callable[[], None]


def start(make: Callable[[Look], Made]) -> tuple[Made, threads.ThreadTask]:
    """Make and run an engine on a new thread. Raises what ``make`` raises.

    Args:
        make: makes the engine. Between stages it calls its argument, which raises CancelledError once nobody waits.
    """
    ready: Future[Made] = Future()
    # for a child process, which may find the lock of ``ready`` held
    made: list[Made] = []
    running = threads.start(
        partial(_work, make, ready, made),
        name="vlm-batch-engine",
        is_awaited=True,
        stop=partial(_stop, ready),
        after=partial(_abandon, made),
    )
    try:
        threads.wait_until_found(lambda seconds: wait((ready,), seconds).done or None)
        return ready.result(), running
    except BaseException:
        ready.cancel()
        raise


def _stop(ready: Future[Made]) -> None:
    if not ready.cancel() and ready.exception() is None:
        ready.result().loop.stop()


def _abandon(made: Sequence[HasLoop]) -> None:
    for engine in made:
        engine.loop.abandon()


def _raise_if_cancelled(ready: Future[Made]) -> None:
    if ready.cancelled():
        raise CancelledError


def _work(make: Callable[[Look], Made], ready: Future[Made], made: list[Made]) -> None:
    look = partial(_raise_if_cancelled, ready)
    try:
        engine = make(look)
        look()
        generator = engine.loop.generator
        generator.memory.probe(generator.trial)  # on the engine's thread
        made.append(engine)
        ready.set_result(engine)
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):  # cancelled
            ready.set_exception(error)
        return
    with wired():
        engine.loop.run()
