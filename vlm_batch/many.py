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
from typing import Any, NamedTuple, TypeAlias, TypeVar

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


class _Unread(NamedTuple):
    """In place of an item: what the requests raised."""

    error: BaseException


def as_completed(
    submit: Submit, requests: Iterable[RequestLike], most: Callable[[], int]
) -> Iterator[tuple[int, Result]]:
    """Yield (index, result) as requests end, with at most ``most()`` in flight. Leaving the loop cancels the rest.

    Refused items have results. If ``requests`` raises, that is the last result.

    Raises:
        BatcherClosed: the batcher was closed at the beginning.
    """
    ended: queue.SimpleQueue[tuple[int, Handle]] = queue.SimpleQueue()
    items = _numbered(requests)
    is_open = True
    alive: dict[int, Handle] = {}
    try:
        while True:
            while is_open and len(alive) < most():
                index, given = next(items, (0, _END))
                if given is _END:
                    is_open = False
                    break
                taken = _taken(submit, given, index)
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


def _numbered(requests: Iterable[RequestLike]) -> Iterator[tuple[int, Any]]:
    """Yield items with their numbers; at last an ``_Unread`` one if ``requests`` raises."""
    index = -1
    try:
        for index, given in enumerate(requests):
            yield index, given
    except Exception as error:
        yield index + 1, _Unread(error)


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
            pending = set(waited)
            if reading is not None:
                pending.add(reading)
            if not pending:
                return
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done - {reading}:
                index, handle = waited.pop(future)
                yield index, handle.result()
            if reading is None or reading not in done:
                continue
            given, reading = _read(reading), None
            if given is _END:
                is_open = False
                continue
            is_open = not isinstance(given, _Unread)
            index, count = count, count + 1
            taken = _taken(submit, given, index)
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


def _read(finished: asyncio.Future[Any]) -> Any:
    """Return an item, ``_Unread`` or ``_END``."""
    error = finished.exception()
    if error is None:
        return finished.result()
    return _Unread(error)


def _taken(submit: Submit, given: Any, index: int) -> Handle | Result:
    """Submit an item that was read."""
    if isinstance(given, _Unread):
        return failed_result(f"refused-{index}", given.error)
    return try_submit(submit, given, index)


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
        return submit(_request_of(given, index))
    except Exception as error:
        if isinstance(error, BatcherClosed) and index == 0:
            raise  # no result is lost
        return failed_result(_name_of(given) or f"refused-{index}", error)


def _request_of(given: Any, index: int) -> Request:
    if isinstance(given, Request):
        return given
    if isinstance(given, str):
        given = {"prompt": given}
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            f"item {index} is a {type(given).__name__}; it must be a Request, a mapping of its fields, or a prompt"
        )
    return record_of(Request, f"item {index}", given, InvalidRequest)


def _name_of(given: Any) -> str | None:
    """Return a refused item's own name, if it has one."""
    name = None
    if isinstance(given, Request):
        name = given.request_id
    elif isinstance(given, Mapping):
        name = given.get("request_id")
    if isinstance(name, str):
        return name
    return None
