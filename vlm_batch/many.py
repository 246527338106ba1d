"""Many requests, a bounded number in flight: their results as they end, for loops and for asyncio."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar

from vlm_batch.errors import BatcherClosed, InvalidRequest
from vlm_batch.handle import Handle
from vlm_batch.runtime import threads
from vlm_batch.types import Request, Result, failed_result

Submit: TypeAlias = Callable[[Request], Handle]
#: A request, a mapping of its fields, or a prompt.
Asked: TypeAlias = "Request | Mapping[str, Any] | str"

Many = TypeVar("Many")


def several(given: Asked | Many) -> tuple[Asked, ...] | Many:
    """Requests as they are; one by itself in a tuple."""
    return (given,) if isinstance(given, (Request, Mapping, str)) else given


_END: Any = object()  # marks the end of the requests: None could be an item


def in_turn(submit: Submit, requests: Iterable[Asked], most: Callable[[], int]) -> Iterator[tuple[int, Result]]:
    """(index, result) of each request as it ends, with at most ``most()`` in flight. Leaving the loop cancels the rest.

    An item that cannot be submitted has a result that says why; if reading ``requests`` raises, that is the last result.
    Raises BatcherClosed if the batcher is closed from the beginning.
    """
    ended: queue.SimpleQueue[tuple[int, Handle]] = queue.SimpleQueue()
    source, is_open, count = iter(requests), True, 0
    alive: dict[int, Handle] = {}
    try:
        while True:
            while is_open and len(alive) < most():
                index, count = count, count + 1
                try:
                    given = next(source)
                except StopIteration:
                    is_open = False
                    break
                except Exception as error:
                    is_open = False
                    yield index, failed_result(f"refused-{index}", error)
                    break
                taken = submitted(submit, given, index)
                if isinstance(taken, Result):
                    yield index, taken
                    continue
                alive[index] = taken
                taken.when_done(partial(ended.put, (index, taken)))
            if not alive:
                return
            next(iter(alive.values())).check_can_wait()
            found = threads.look_until(partial(_next, ended))
            assert found is not None
            index, handle = found
            del alive[index]
            yield index, handle.result()
    finally:
        for handle in alive.values():
            handle.cancel()


def _next(ended: queue.SimpleQueue[tuple[int, Handle]], seconds: float) -> tuple[int, Handle] | None:
    """One that has ended, waited for so many seconds."""
    try:
        return ended.get(timeout=seconds)
    except queue.Empty:
        return None


async def in_turn_async(
    submit: Submit, requests: Iterable[Asked] | AsyncIterable[Asked], most: Callable[[], int]
) -> AsyncIterator[tuple[int, Result]]:
    """``in_turn`` for asyncio. While ``requests`` keep it waiting, results go on coming."""
    source = _as_async(requests)
    waited: dict[asyncio.Future[Any], tuple[int, Handle]] = {}
    reading: asyncio.Future[Any] | None = None
    is_open, count = True, 0
    try:
        while True:
            if is_open and reading is None and len(waited) < most():
                reading = asyncio.ensure_future(anext(source, _END))
            pending = {*waited, *(() if reading is None else (reading,))}
            if not pending:
                return
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done - {reading}:
                index, handle = waited.pop(future)
                yield index, handle.result()
            if reading in done and reading is not None:
                finished, reading = reading, None
                index, count = count, count + 1
                if (error := finished.exception()) is not None:
                    is_open = False
                    yield index, failed_result(f"refused-{index}", error)
                elif (given := finished.result()) is _END:
                    is_open = False
                else:
                    taken = submitted(submit, given, index)
                    if isinstance(taken, Result):
                        yield index, taken
                    else:
                        waited[asyncio.ensure_future(taken)] = index, taken
    finally:
        for future, (_, handle) in waited.items():
            handle.cancel()
            future.cancel()
        if reading is not None:
            reading.cancel()


async def _as_async(requests: Iterable[Asked] | AsyncIterable[Asked]) -> AsyncIterator[Asked]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
        return
    for request in requests:
        yield request


def submitted(submit: Submit, given: Any, index: int = 0) -> Handle | Result:
    """A handle, or the result of what could not be submitted. Raises BatcherClosed if that was the first of many."""
    try:
        if isinstance(given, (Mapping, str)):
            return submit(Request(prompt=given) if isinstance(given, str) else Request(**given))
        if not isinstance(given, Request):
            raise InvalidRequest(
                f"item {index} is a {type(given).__name__}; it must be a Request, a mapping of its fields, or a prompt"
            )
        return submit(given)
    except Exception as error:
        if isinstance(error, BatcherClosed) and index == 0:
            raise  # nothing is lost by it
        name = given.get("request_id") if isinstance(given, Mapping) else None
        if isinstance(given, Request):
            name = given.request_id
        return failed_result(name if isinstance(name, str) and name else f"refused-{index}", error)
