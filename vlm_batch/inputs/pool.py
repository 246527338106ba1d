"""Threads that read files and downloads, and survive hanging reads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vlm_batch.errors import InvalidRequest
from vlm_batch.inputs.fetch import Cancelled, OperationCancelled
from vlm_batch.runtime import threads

#: Most calls that were given up and have not returned; beyond that, calls are refused.
MAX_LOST = 64


@dataclass(eq=False)
class _Job:
    pool: Pool
    call: Callable[[], Any]
    cancelled: Cancelled
    seconds: float | None
    late: Callable[[], Exception]
    client: int = 0
    future: Future[Any] = field(default_factory=Future)
    deadline: float | None = None
    has_ended: bool = False

    def cancel(self) -> None:
        self.pool.give_up(self, OperationCancelled)


class Pool:
    """Up to ``num_threads`` threads that run calls and give up hanging ones.

    Clients take turns. After ``seconds`` a call is given up; a new thread replaces its own. With ``is_awaited``, the
    interpreter waits for running calls at exit; ``is_deep`` gives deep stacks.
    """

    def __init__(self, num_threads: int, name: str, *, is_awaited: bool = False, is_deep: bool = False) -> None:
        self._num_threads = num_threads
        self._is_awaited, self._is_deep = is_awaited, is_deep
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._turns: dict[int, int] = {}  # client -> number of its latest call
        self._count = 0  # calls that have begun
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
    ) -> Future[Any]:
        """Run ``call`` on a free thread; ``late`` makes the exception of a late one."""
        job = _Job(self, call, cancelled, seconds, late, client)
        with self._changed:
            refused = self._is_closed or self._lost >= MAX_LOST
            if not refused:
                self._add_thread()
                self._waiting.append(job)
        if refused:
            job.future.set_exception(
                OperationCancelled()
                if self._is_closed
                else InvalidRequest(f"{MAX_LOST} reads before this one hang: a drive or a name server does not answer")
            )
        else:
            cancelled.when_set(job.cancel)
            if job.has_ended:
                cancelled.forget(job.cancel)
        return job.future

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
            return self._changed.wait_for(lambda: not self._running and not self._lost, seconds)

    def _add_thread(self) -> None:
        if self._threads >= self._num_threads:
            return
        try:
            threads.start(self._run, self._name, is_awaited=self._is_awaited, is_deep=self._is_deep)
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads += 1

    def _run(self) -> None:
        while self._serve():  # a frame of its own: nothing of a call is held while the next one runs
            pass

    def _serve(self) -> bool:
        """Run the next call; return whether the thread goes on."""
        with self._changed:
            if not self._waiting:
                self._threads -= 1
                if not self._running:
                    self._turns.clear()
                return False
            job = self._waiting[0]
            if len(self._waiting) > 1:
                job = min(self._waiting, key=lambda one: self._turns.get(one.client, 0))  # of equals the first
            self._waiting.remove(job)
            self._count += 1
            self._turns[job.client] = self._count
            self._running.add(job)
            if job.seconds is not None:
                job.deadline = time.monotonic() + job.seconds
                if not self._has_watch:
                    with suppress(RuntimeError):  # no thread to be had: then the next call tries again
                        threads.start(self._watch, f"{self._name}-watch")
                        self._has_watch = True
                self._changed.notify_all()
        result, error = None, None
        try:
            result = job.call()
        except Exception as raised:
            error = raised
        except BaseException as raised:  # SystemExit of a picture's own code would end whoever asks for the result
            error = InvalidRequest(f"{type(raised).__name__} was raised while the request was prepared: {raised}")
            error.__cause__ = raised
        return self._end(job, result, error)

    def _end(self, job: _Job, result: Any, error: Exception | None) -> bool:
        """Deliver an outcome; return whether the pool keeps the thread."""
        with self._changed:
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
            if job not in self._running:
                self._waiting.remove(job)
            else:
                self._running.remove(job)
                self._threads, self._lost = self._threads - 1, self._lost + 1
                try:
                    if self._waiting and not self._is_closed:
                        self._add_thread()
                except RuntimeError:  # the lost thread was the last one
                    without_thread = list(self._waiting)
            self._changed.notify_all()
        job.cancelled.forget(job.cancel)
        job.future.set_exception(error())
        for other in without_thread:
            self.give_up(other, partial(RuntimeError, "the system gives no thread to read the request's pictures on"))

    def _watch(self) -> None:
        while True:
            with self._changed:
                deadlines = [job.deadline for job in self._running if job.deadline is not None]
                if not deadlines:
                    self._has_watch = False
                    return
                now = time.monotonic()
                late = [job for job in self._running if job.deadline is not None and job.deadline <= now]
                if not late:
                    self._changed.wait(min(deadlines) - now)
            for job in late:
                self.give_up(job, job.late)
