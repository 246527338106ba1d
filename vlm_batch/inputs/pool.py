"""Threads that read files and downloads, and survive hanging reads."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vlm_batch.errors import InvalidRequest
from vlm_batch.inputs.fetch import Cancelled, OperationCancelled
from vlm_batch.runtime import threads

#: Most calls that were given up and have not returned; beyond that, calls are refused.
MAX_LOST = 64
#: Seconds that a call counts for among clients' turns, at least and at most: a read that hangs is no work.
LEAST_CHARGED, MOST_CHARGED = 0.001, 1.0
#: A client's cheaper call overtakes a dearer one that came at most this many times the difference of their costs before.
PATIENCE = 20.0
#: Most clients whose use is kept.
MAX_CLIENTS = 1024


@dataclass(eq=False)
class _Job:
    pool: Pool
    call: Callable[[], Any]
    cancelled: Cancelled
    seconds: float | None
    late: Callable[[], Exception]
    client: int = 0
    due: float = 0.0  # of one client's calls, the earliest goes first
    future: Future[Any] = field(default_factory=Future)
    deadline: float = math.inf
    has_ended: bool = False

    def cancel(self) -> None:
        self.pool.give_up(self, OperationCancelled)


class Pool:
    """Up to ``num_threads`` threads that run calls and give up hanging ones.

    A free thread is for the client whose calls have taken the least time, and there for its cheapest call, if no other
    has waited long. Of several threads one client takes at most ``most_of_client``. With ``rests``, a thread pauses
    after each call for as long as it took: C code that holds the GIL leaves others as much of it. After ``seconds`` a
    call is given up; a new thread replaces its own. With ``is_awaited``, the interpreter waits for running calls at
    exit; ``is_deep`` gives deep stacks.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        *,
        is_awaited: bool = False,
        is_deep: bool = False,
        rests: bool = False,
        most_of_client: int | None = None,
    ) -> None:
        self._num_threads = num_threads
        self._rests = rests
        self._most_of_client = num_threads if most_of_client is None else most_of_client
        self._is_awaited, self._is_deep = is_awaited, is_deep
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._used: dict[int, float] = {}  # client -> seconds that its calls took
        # the same of the client that was served last: whoever comes anew begins there
        self._level = 0.0
        self._running: set[_Job] = set()
        self._threads = 0
        self._lost = 0  # threads whose call was given up and has not returned
        self._has_watch = self._is_closed = False

    def submit(
        self,
        call: Callable[[], Any],
        cancelled: Cancelled,
        *,
        seconds: float | None = None,
        late: Callable[[], Exception] = TimeoutError,
        client: int = 0,
        cost: float = 0.0,
    ) -> Future[Any]:
        """Run ``call`` on a free thread.

        Args:
            call: What runs.
            cancelled: Ends the call before it begins, or while it has ``seconds``.
            seconds: After these a running call is given up.
            late: Makes the exception of a late call.
            client: Whose call it is.
            cost: Seconds that it will probably take.
        """
        due = time.monotonic() + PATIENCE * cost
        job = _Job(self, call, cancelled, seconds, late, client, due)
        with self._changed:
            refused = self._refusal()
            if refused is None:
                # else it waits for one of its client's
                if self._running_of(client) < self._most_of_client:
                    self._add_thread()
                self._begin_turn(client)
                self._waiting.append(job)
        if refused is not None:
            job.future.set_exception(refused)
            return job.future
        cancelled.when_set(job.cancel)
        if job.has_ended:
            cancelled.forget(job.cancel)
        return job.future

    def _refusal(self) -> Exception | None:
        """Return why no further call is taken."""
        if self._is_closed:
            return OperationCancelled()
        if self._lost < MAX_LOST:
            return None
        return InvalidRequest(
            f"{MAX_LOST} reads before this one hang: a drive or a name server does not answer"
        )

    def close(self) -> None:
        """Start no further call."""
        with self._changed:
            self._is_closed = True
            waiting = list(self._waiting)
        for job in waiting:
            job.cancel()

    def join(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether nothing runs."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._running and not self._lost, seconds
            )

    def _add_thread(self) -> None:
        if self._threads >= self._num_threads:
            return
        try:
            threads.start(
                self._run,
                self._name,
                is_awaited=self._is_awaited,
                is_deep=self._is_deep,
            )
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads += 1

    def _run(self) -> None:
        # a frame of its own: nothing of a call is held while the next one runs
        while self._serve():
            pass

    def _begin_turn(self, client: int) -> None:
        """Let a client that had nothing to do begin where the others are: time without calls is not saved up."""
        calls = (*self._waiting, *self._running)
        if any(one.client == client for one in calls):
            return
        if len(self._used) >= MAX_CLIENTS:
            self._forget_others()
        self._used[client] = max(self._used.get(client, 0.0), self._level)

    def _forget_others(self) -> None:
        """Keep the clients that have had more than those whose turn it is."""
        for client, used in list(self._used.items()):
            if used <= self._level:
                del self._used[client]

    def _next(self) -> _Job | None:
        """Return the call whose turn it is, unless those that wait are of clients that have their part."""
        most = self._most_of_client
        allowed = [one for one in self._waiting if self._running_of(one.client) < most]
        return min(allowed, key=self._turn_of, default=None)

    def _turn_of(self, job: _Job) -> tuple[float, float]:
        return self._used.get(job.client, self._level), job.due

    def _running_of(self, client: int) -> int:
        return sum(one.client == client for one in self._running)

    def _charge(self, client: int, seconds: float) -> None:
        self._used[client] = self._used.get(client, self._level) + min(
            MOST_CHARGED, max(0.0, seconds)
        )

    def _serve(self) -> bool:
        """Run the next call; return whether the thread goes on."""
        with self._changed:
            job = self._next()
            if job is None:
                self._end_thread()
                return False
            self._begin(job)
        begin = time.monotonic()
        result, error = _outcome_of(job.call)
        seconds = time.monotonic() - begin
        goes_on = self._end(job, result, error, seconds)
        if self._rests and goes_on:
            del job, result, error
            time.sleep(seconds)
        return goes_on

    def _end_thread(self) -> None:
        self._threads -= 1
        if not self._running and not self._waiting:
            self._used.clear()
            self._level = 0.0

    def _begin(self, job: _Job) -> None:
        """Take a call up, with a watch on its deadline."""
        self._waiting.remove(job)
        self._level = self._used.get(job.client, self._level)
        self._charge(job.client, LEAST_CHARGED)
        self._running.add(job)
        if job.seconds is None:
            return
        job.deadline = time.monotonic() + job.seconds
        if not self._has_watch:
            # no thread to be had: then the next call tries again
            with suppress(RuntimeError):
                threads.start(self._watch, f"{self._name}-watch")
                self._has_watch = True
        self._changed.notify_all()

    def _end(
        self, job: _Job, result: Any, error: Exception | None, seconds: float
    ) -> bool:
        """Deliver an outcome; return whether the pool keeps the thread."""
        with self._changed:
            self._charge(job.client, seconds - LEAST_CHARGED)
            if job.has_ended:
                self._lost -= 1
                self._changed.notify_all()
                return False
            self._running.discard(job)
            job.has_ended = True
            self._changed.notify_all()
        job.cancelled.forget(job.cancel)
        if error is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)
        return True

    def give_up(self, job: _Job, error: Callable[[], Exception]) -> None:
        """End a call without waiting for it."""
        without_thread: list[_Job] = []
        with self._changed:
            if job.has_ended or (job in self._running and job.seconds is None):
                return
            job.has_ended = True
            if job in self._running:
                self._running.remove(job)
                without_thread = self._replace_thread()
            else:
                self._waiting.remove(job)
            self._changed.notify_all()
        job.cancelled.forget(job.cancel)
        job.future.set_exception(error())
        for other in without_thread:
            self.give_up(other, _no_thread)

    def _replace_thread(self) -> list[_Job]:
        """Start a thread in the place of a lost one; return the calls that wait for ever if there is none."""
        self._threads, self._lost = self._threads - 1, self._lost + 1
        if not self._waiting or self._is_closed:
            return []
        try:
            self._add_thread()
        except RuntimeError:  # the lost thread was the last one
            return list(self._waiting)
        return []

    def _watch(self) -> None:
        while True:
            late = self._late()
            if late is None:
                return
            for job in late:
                self.give_up(job, job.late)

    def _late(self) -> list[_Job] | None:
        """Wait for the next deadline, and return the calls that have missed theirs; None if no call has one."""
        with self._changed:
            deadline = min((job.deadline for job in self._running), default=math.inf)
            if deadline == math.inf:
                self._has_watch = False
                return None
            now = time.monotonic()
            if now < deadline:
                self._changed.wait(deadline - now)
                return []
            return [job for job in self._running if job.deadline <= now]


def _outcome_of(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return a call's result, or what it raised."""
    try:
        return call(), None
    except Exception as raised:
        return None, raised
    except BaseException as raised:
        # SystemExit of a picture's own code would end whoever asks for the result
        error = InvalidRequest(
            f"{type(raised).__name__} was raised while the request was prepared: {raised}"
        )
        error.__cause__ = raised
        return None, error


def _no_thread() -> Exception:
    return RuntimeError("the system gives no thread to read the request's pictures on")
