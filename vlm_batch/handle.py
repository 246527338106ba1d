"""One request as its submitter sees it: a stream of events and a result, from any thread and from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from functools import partial
from numbers import Real

from vlm_batch.errors import shown
from vlm_batch.runtime import threads
from vlm_batch.types import Event, Result

_log = logging.getLogger(__name__)


class Handle:
    """A submitted request: iterate it for pieces of text (``for``, ``async for``), ``await`` it or call ``result`` for its end.

    ``events`` gives all that is known of each step. Every iteration begins with the first piece. Of several answers to one
    prompt (``n``), the pieces are the first one's; ``events`` has all of them. The stream of a failed request just ends, and
    ``result().error`` says why.

    A timeout does not end the request: after ``asyncio.wait_for(handle, seconds)`` or ``result(seconds)`` has raised
    TimeoutError, it goes on and can be waited for again. ``cancel`` ends it, for example in the ``except`` that follows.
    """

    def __init__(
        self, request_id: str, cancel: Callable[[str], bool], is_on_engine: Callable[[], bool] = lambda: False
    ) -> None:
        self.request_id = request_id
        self._is_on_engine = is_on_engine
        self._cancel: Callable[[str], bool] | None = cancel  # until the end: a handle that is kept holds no model
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._result: Result | None = None
        self._listeners: list[
            tuple[bool, Callable[[], None]]
        ] = []  # called once: at the end (True), or at the next event

    def __repr__(self) -> str:
        state = "running" if self._result is None else self._result.finish_reason
        return f"<Handle {self.request_id}: {state}>"

    def done(self) -> bool:
        """Whether the request has ended."""
        return self._result is not None

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the request's result. Raises TimeoutError after ``timeout`` seconds; a failed request raises nothing."""
        seconds = None if timeout is None else _checked_timeout(timeout)
        if self._result is None:
            self.check_can_wait()
            with self._changed:
                threads.look_until(
                    lambda left: self._changed.wait_for(lambda: self._result is not None, left) or None, seconds
                )
            if self._result is None:
                raise TimeoutError(f"request {self.request_id} has not ended within {shown(timeout)} s")
        assert self._result is not None
        return self._result

    def cancel(self) -> bool:
        """Ask the engine to end the request; False if it has ended already. Its result follows, with what was generated."""
        cancel = self._cancel
        return cancel is not None and cancel(self.request_id)

    def check_can_wait(self) -> None:
        """Raise RuntimeError on the engine's own thread (in a listener or a logits processor), which would wait for itself."""
        if self._is_on_engine():
            raise RuntimeError(
                f"request {self.request_id} is waited for on the engine's own thread (in a callback or a logits processor), "
                "which would then never answer it: wait for it on another thread"
            )

    def events(self) -> EventStream:
        """Every ``Event`` of the request, by ``for`` or ``async for``: a token each, with the text that it completed (perhaps
        none yet) and its log-probabilities; the last one has the result."""
        return EventStream(self)

    def __iter__(self) -> Iterator[str]:
        for event in self.events():
            if event.text and not event.index:
                yield event.text

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self.events():
            if event.text and not event.index:
                yield event.text

    def __await__(self) -> Generator[object, None, Result]:
        return self._wait().__await__()

    async def _wait(self) -> Result:
        while self._result is None:
            change = self._next_change()
            if self._result is None:
                await change
        return self._result

    def _next_change(self) -> asyncio.Future[None]:
        """A future of the running loop that is set when anything is added. Ask before looking, or a change can be missed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_set, future)

        def forget(given_up: asyncio.Future[None]) -> None:
            if given_up.cancelled():  # a timeout: many may come before anything is told
                with self._changed, contextlib.suppress(ValueError):
                    self._listeners.remove((False, tell))

        future.add_done_callback(forget)
        with self._changed:
            if self._result is None:
                self._listeners.append((False, tell))
            else:
                future.set_result(None)
        return future

    def when_done(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once when the request has ended, on the engine's thread, or now if it has. An exception in
        ``call`` on the engine's thread is logged."""
        with self._changed:
            if self._result is None:
                self._listeners.append((True, call))
                return
        call()

    def push(self, event: Event) -> None:
        """Add an event of the engine's. Nothing is added after the event with the result."""
        with self._changed:
            if self._result is not None:
                return
            self._events.append(event)
            self._result = event.result
            is_end = event.result is not None
            listeners = [call for only_end, call in self._listeners if is_end or not only_end]
            self._listeners = [] if is_end else [one for one in self._listeners if one[0]]
            if is_end:
                self._cancel, self._is_on_engine = None, lambda: False
            self._changed.notify_all()
        for tell in listeners:
            try:
                tell()
            except BaseException:  # whoever listens is no part of the engine, which has others to tell
                _log.exception("a listener of request %s raised", self.request_id)

    def renew_lock(self) -> None:
        """Make a new lock in a child process, where the thread that holds the old one may not exist."""
        self._changed = threading.Condition()
        self._listeners = []


class EventStream:
    """A handle's events from the first to the last, as they come; it can be iterated again."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __iter__(self) -> Iterator[Event]:
        handle, position = self._handle, 0
        while True:
            if not handle.done():
                if len(handle._events) == position:
                    handle.check_can_wait()
                with handle._changed:
                    threads.look_until(partial(self._wait, position))
            events = handle._events[position:]
            if not events:
                return
            yield from events
            position += len(events)

    def _wait(self, position: int, seconds: float) -> bool | None:
        """True once there is more than so many events, or the end; None if there is not within so many seconds."""
        handle = self._handle
        return handle._changed.wait_for(lambda: len(handle._events) > position or handle.done(), seconds) or None

    async def __aiter__(self) -> AsyncIterator[Event]:
        handle, position = self._handle, 0
        while True:
            change = handle._next_change()
            events = handle._events[position:]
            if not events:
                if handle.done():
                    return
                await change
                continue
            for event in events:
                yield event
            position += len(events)


def _checked_timeout(timeout: float) -> float | None:
    """``timeout`` as ``Condition.wait`` takes it: None, for ever, in place of a number beyond the system's limit."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or timeout != timeout:
        raise ValueError(f"timeout is {shown(timeout)}; it must be a number of seconds, or None to wait for ever")
    return None if timeout > threading.TIMEOUT_MAX else float(max(timeout, 0))


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
