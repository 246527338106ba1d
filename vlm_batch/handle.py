"""One request as its submitter sees it: a stream of text and a result, from any thread and from asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator

from vlm_batch.types import Result


class Handle:
    """Iterate it for pieces of text (``for`` or ``async for``), ``await`` it or call ``result`` for the end.

    Every iteration gives all pieces from the beginning. A failed request's stream just ends; its ``result().error``
    says why.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], bool]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._changed = threading.Condition()
        self._pieces: list[str] = []
        self._result: Result | None = None
        self._listeners: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = "running" if self._result is None else self._result.finish_reason
        return f"<Handle {self.request_id}: {state}>"

    def done(self) -> bool:
        """Whether the request has ended."""
        return self._result is not None

    def result(self, timeout: float | None = None) -> Result:
        """The request's end, waited for. Raises TimeoutError after ``timeout`` seconds; a failed request raises nothing."""
        with self._changed:
            if not self._changed.wait_for(self.done, timeout):
                raise TimeoutError(f"request {self.request_id} has not ended within {timeout} s")
        assert self._result is not None
        return self._result

    def cancel(self) -> bool:
        """Ask for the request to end now; False if it has ended already. Its result follows, with what was generated."""
        return not self.done() and self._cancel(self.request_id)

    def __iter__(self) -> Iterator[str]:
        position = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda at=position: len(self._pieces) > at or self.done())  # type: ignore[misc]
                pieces = self._pieces[position:]
            if not pieces:
                return
            yield from pieces
            position += len(pieces)

    async def __aiter__(self) -> AsyncIterator[str]:
        position = 0
        while True:
            change = self._next_change()
            pieces = self._pieces[position:]
            if not pieces:
                if self.done():
                    return
                await change
                continue
            for piece in pieces:
                yield piece
            position += len(pieces)

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
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set, future)

        with self._changed:
            if self._result is None:
                self._listeners.append(tell)
            else:
                future.set_result(None)
        return future

    # Called by the engine
    # -----------------------------------------------------------------------------------------------

    def add_listener(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called once, at the next change; at once if the request has ended."""
        with self._changed:
            if self._result is None:
                self._listeners.append(tell)
                return
        tell()

    def push(self, piece: str) -> None:
        """Add a piece of text."""
        if piece:
            self._change(piece, None)

    def finish(self, result: Result) -> None:
        """Set the result; the first one stands."""
        if self._result is None:
            self._change("", result)

    def _change(self, piece: str, result: Result | None) -> None:
        with self._changed:
            if piece:
                self._pieces.append(piece)
            self._result = result
            listeners, self._listeners = self._listeners, []
            self._changed.notify_all()
        for tell in listeners:
            tell()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
