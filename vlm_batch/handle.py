"""One request as its submitter sees it."""

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
    """A submitted request.

    Iterate it (``for``, ``async for``) for all pieces of text; of several answers, the first one's. ``await`` it or
    call ``result`` for the result. A failed request's stream just ends; ``result().error`` says why.

    A timeout (``asyncio.wait_for(handle, seconds)``) does not end the request; ``cancel`` does.
    """

    def __init__(
        self,
        request_id: str,
        cancel: Callable[[str], bool],
        is_on_engine: Callable[[], bool] = lambda: False,
    ) -> None:
        self.request_id = request_id
        self._is_on_engine = is_on_engine
        # None at the end, so that handles hold no model
        self._cancel: Callable[[str], bool] | None = cancel
        self._new_conditions()
        self._events: list[Event] = []
        self._result: Result | None = None
        # each is called once: at the next event, at the end
        self._at_next: list[Callable[[], None]] = []
        self._at_end: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = "running" if self._result is None else self._result.finish_reason
        return f"<Handle {self.request_id}: {state}>"

    def done(self) -> bool:
        """Return whether the request has ended."""
        return self._result is not None

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result, also of a failed request.

        Args:
            timeout: seconds; None waits until the end.

        Raises:
            TimeoutError: the request goes on.
            RuntimeError: on the engine's thread, which would wait for itself.
        """
        seconds = None if timeout is None else _checked_timeout(timeout)
        if self._result is None:
            self.check_can_wait()
            with self._ended:
                threads.wait_until_found(
                    lambda left: self._ended.wait_for(self.done, left) or None, seconds
                )
            if self._result is None:
                raise TimeoutError(
                    f"request {self.request_id} has not ended within {shown(timeout)} s"
                )
        assert self._result is not None
        return self._result

    def cancel(self) -> bool:
        """End the request; its result has the text so far. False if it has ended."""
        cancel = self._cancel
        return cancel is not None and cancel(self.request_id)

    def check_can_wait(self) -> None:
        """Raise RuntimeError on the engine's thread."""
        if self._is_on_engine():
            raise RuntimeError(
                f"request {self.request_id} is waited for on the engine's own thread (in a callback or a logits processor), "
                "which would then never answer it: wait for it on another thread"
            )

    def events(self) -> EventStream:
        """Return all events for ``for`` or ``async for``: one per token, the last with the result."""
        return EventStream(self)

    def __iter__(self) -> Iterator[str]:
        for event in self.events():
            if _has_text(event):
                yield event.text

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self.events():
            if _has_text(event):
                yield event.text

    def __await__(self) -> Generator[object, None, Result]:
        return self._wait().__await__()

    async def _wait(self) -> Result:
        while self._result is None:
            await self._next_change(only_end=True)
        return self._result

    def _next_change(self, *, only_end: bool = False) -> asyncio.Future[None]:
        """Return a future of the next event, or of the end. A call after reading events can miss one."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        listeners = self._at_end if only_end else self._at_next

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_set, future)

        def forget(given_up: asyncio.Future[None]) -> None:
            # by a timeout; there may be many before the next event
            if given_up.cancelled():
                with self._changed, contextlib.suppress(ValueError):
                    listeners.remove(tell)

        future.add_done_callback(forget)
        with self._changed:
            if self._result is None:
                listeners.append(tell)
            else:
                future.set_result(None)
        return future

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call`` at the request's end on the engine's thread, or now if it has ended."""
        with self._changed:
            if self._result is None:
                self._at_end.append(call)
                return
        call()

    def push(self, event: Event) -> None:
        """Add an event, unless the request has ended."""
        with self._changed:
            if self._result is not None:
                return
            self._events.append(event)
            self._result = event.result
            listeners = self._take_listeners()
            self._changed.notify_all()
        for tell in listeners:
            try:
                tell()
            except BaseException:  # a listener's error must not stop the engine
                _log.exception("a listener of request %s raised", self.request_id)

    def _take_listeners(self) -> list[Callable[[], None]]:
        """Take the listeners of an event; at the end all, and let go of the engine."""
        taken = [*self._at_next]
        self._at_next.clear()
        if self._result is not None:
            taken += self._at_end
            self._at_end.clear()
            self._cancel, self._is_on_engine = None, lambda: False
            self._ended.notify_all()
        return taken

    def renew_lock(self) -> None:
        """Replace the lock in a child process: its holder may be gone."""
        self._new_conditions()
        self._at_next.clear()
        self._at_end.clear()

    def _new_conditions(self) -> None:
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # a token wakes nobody who waits for the result
        self._ended = threading.Condition(lock)


class EventStream:
    """A handle's events, from the first on."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __iter__(self) -> Iterator[Event]:
        handle, position = self._handle, 0
        while True:
            if not handle.done():
                if len(handle._events) == position:
                    handle.check_can_wait()
                with handle._changed:
                    threads.wait_until_found(partial(self._wait, position))
            events = handle._events[position:]
            if not events:
                return
            yield from events
            position += len(events)

    def _wait(self, position: int, seconds: float) -> bool | None:
        """Return True after an event or the end, None after ``seconds``."""
        handle = self._handle
        return (
            handle._changed.wait_for(
                lambda: len(handle._events) > position or handle.done(), seconds
            )
            or None
        )

    async def __aiter__(self) -> AsyncIterator[Event]:
        handle, position = self._handle, 0
        while True:
            # before the events: the last one comes with the end
            is_done = handle.done()
            events = handle._events[position:]
            if not events:
                if is_done:
                    return
                change = handle._next_change()
                if len(handle._events) == position:
                    await change
                else:
                    change.cancel()
                continue
            for event in events:
                yield event
            position += len(events)


def _checked_timeout(timeout: float) -> float | None:
    """Return a timeout for ``Condition.wait``, None beyond the system's limit."""
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if not is_number or timeout != timeout:  # which is no number
        raise ValueError(
            f"timeout is {shown(timeout)}; it must be a number of seconds, or None to wait for ever"
        )
    if timeout > threading.TIMEOUT_MAX:
        return None
    return float(max(timeout, 0))


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _has_text(event: Event) -> bool:
    """Return whether an event adds text to the first answer."""
    return bool(event.text) and not event.index
