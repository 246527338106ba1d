"""Many requests, with a bounded number in flight."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from functools import partial
from pathlib import PurePath
from typing import Any, TypeAlias, TypeVar

from vlm_batch.checks import is_table
from vlm_batch.errors import BatcherClosed, InvalidRequest
from vlm_batch.handle import Handle
from vlm_batch.runtime import threads
from vlm_batch.types import Request, Result, failed_result, record_of

Submit: TypeAlias = Callable[[Request], Handle]
#: A request, a mapping of its fields, or a prompt.
RequestLike: TypeAlias = "Request | Mapping[str, Any] | str"

Many = TypeVar("Many")


def as_requests(
    given: RequestLike | Many, *more: type
) -> tuple[RequestLike, ...] | Many:
    """Return requests; one becomes a tuple.

    Args:
        more: further types of iterables.

    Raises:
        InvalidRequest: these are no requests, such as bytes or a table.
    """
    if isinstance(given, (Request, Mapping, str)):
        return (given,)
    hints = (
        (
            is_table(given),
            "; map_table(batcher, table, prompt) answers the rows of a table",
        ),
        (
            isinstance(given, (Handle, Result)),
            "; submit gives handles, and handle.result() their answers",
        ),
        (
            isinstance(given, (bytes, bytearray, PurePath)),
            "; a picture goes with its question: Request(images=..., prompt=...)",
        ),
        (not isinstance(given, (Iterable, *more)), ""),
    )
    for is_wrong, hint in hints:
        if is_wrong:
            said = "must be Request objects, mappings of their fields, or prompts: several, or one"
            raise InvalidRequest(
                f"requests {said}; given: {type(given).__name__}{hint}"
            )
    return given


_END: Any = object()  # marks the end of the requests: None could be an item


def as_completed(
    submit: Submit, requests: Iterable[RequestLike], most: Callable[[], int]
) -> Iterator[tuple[int, Result]]:
    """Yield (index, result) as requests end, with at most ``most()`` in flight. Leaving the loop cancels the rest.

    Refused items have results. If ``requests`` raises, that is the last result.

    Raises:
        BatcherClosed: the batcher was closed at the beginning.
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
                taken = try_submit(submit, given, index)
                if isinstance(taken, Result):
                    yield index, taken
                    continue
                alive[index] = taken
                taken.when_done(partial(ended.put, (index, taken)))
            if not alive:
                return
            next(iter(alive.values())).check_can_wait()
            found = threads.wait_until_found(partial(_next, ended))
            assert found is not None
            index, handle = found
            del alive[index]
            yield index, handle.result()
    finally:
        for handle in alive.values():
            handle.cancel()


def _next(
    ended: queue.SimpleQueue[tuple[int, Handle]], seconds: float
) -> tuple[int, Handle] | None:
    try:
        return ended.get(timeout=seconds)
    except queue.Empty:
        return None


async def as_completed_async(
    submit: Submit,
    requests: Iterable[RequestLike] | AsyncIterable[RequestLike],
    most: Callable[[], int],
) -> AsyncIterator[tuple[int, Result]]:
    """Yield as ``as_completed``, for asyncio."""
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
                    taken = try_submit(submit, given, index)
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


async def _as_async(
    requests: Iterable[RequestLike] | AsyncIterable[RequestLike],
) -> AsyncIterator[RequestLike]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
        return
    for request in requests:
        yield request


def try_submit(submit: Submit, given: Any, index: int = 0) -> Handle | Result:
    """Submit an item. Returns its handle, or a refused one's result. Raises BatcherClosed for the first."""
    try:
        if isinstance(given, (Mapping, str)):
            named = {"prompt": given} if isinstance(given, str) else given
            return submit(record_of(Request, f"item {index}", named, InvalidRequest))
        if not isinstance(given, Request):
            raise InvalidRequest(
                f"item {index} is a {type(given).__name__}; it must be a Request, a mapping of its fields, or a prompt"
            )
        return submit(given)
    except Exception as error:
        if isinstance(error, BatcherClosed) and index == 0:
            raise  # no result is lost
        name = given.get("request_id") if isinstance(given, Mapping) else None
        if isinstance(given, Request):
            name = given.request_id
        return failed_result(
            name if isinstance(name, str) and name else f"refused-{index}", error
        )
