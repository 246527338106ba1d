"""Requests on their way to other machines: the files that they name, read here and sent along."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vlm_batch.inputs.chats import split_messages
from vlm_batch.inputs.fetch import Cancelled, Unreadable, fetch, is_data_uri, is_url
from vlm_batch.inputs.pool import Pool
from vlm_batch.types import FetchPolicy, Request, Video

#: Files that are read at once, ahead of the workers.
READERS = 16


def changed_ahead(requests: Iterable[Request], change: Callable[[Request], Request]) -> Generator[Request, None, None]:
    """Requests in their order, changed on ``READERS`` threads, that many ahead of the one that is due."""
    pool, cancelled = Pool(READERS, "vlm-batch-files"), Cancelled()
    ahead: deque[Future[Request]] = deque()
    try:
        for request in requests:
            ahead.append(pool.submit(partial(change, request), cancelled))
            if len(ahead) >= READERS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.close()


def with_files(request: Request) -> Request:
    """A request with the bytes of the local files that it names. What cannot be read stays a path: its worker says why."""

    def file_of(path: str | Path, is_video: bool) -> Any:
        try:
            fetched = fetch(path, FetchPolicy())
        except (Unreadable, OSError, ValueError):
            return path
        return fetched.data if is_video else fetched

    return _with_media(request, file_of)


def with_whole_paths(request: Request) -> Request:
    """A request whose paths say the same from whatever folder a process was started in."""
    return _with_media(request, lambda path, _: str(Path(path).expanduser().absolute()))


def _with_media(request: Request, change: Callable[[str | Path, bool], Any]) -> Request:
    """A request with ``change(path, is_video)`` in the place of each local path."""

    def changed(source: Any, is_video: bool) -> Any:
        if isinstance(source, Video):
            return replace(source, source=changed(source.source, True))
        if isinstance(source, (list, tuple)):
            return [changed(one, is_video) for one in source]
        is_path = isinstance(source, (str, Path)) and not is_url(source) and not is_data_uri(source)
        return change(source, is_video) if is_path else source

    messages, images, videos = request.messages, request.images, request.videos
    if messages is not None:
        try:
            messages, images, videos = split_messages(messages, images, videos)
        except Exception:  # the worker says what is wrong with a chat
            return request
    return replace(
        request, messages=messages, images=changed(tuple(images), False), videos=changed(tuple(videos), True)
    )
