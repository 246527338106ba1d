"""Chats' media, read by the server's rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from vlm_batch.inputs.fetch import (
    Cancelled,
    FetchPolicy,
    Unreadable,
    fetch,
    is_data_uri,
    is_url,
    of_base64,
)
from vlm_batch.inputs.loaders import GRACE_SECONDS
from vlm_batch.inputs.media import KINDS, Kind
from vlm_batch.inputs.pool import Pool
from vlm_batch.server.config import ServerConfig
from vlm_batch.server.conversation import parts_of
from vlm_batch.server.errors import ApiError
from vlm_batch.server.pages import DOCUMENT, num_page_bytes, pages_of
from vlm_batch.server.streams import finished

#: Downloads and file reads at a time.
NUM_READERS = 8
#: Those of one client.
MOST_OF_CLIENT = 6
#: Longer texts without a dot are base64, not file names; a JPEG's begins with a slash.
SHORTEST_PICTURE = 64


class MediaReader:
    """Reads media within ``policy``; data URIs stay as they are."""

    def __init__(self, config: ServerConfig, policy: FetchPolicy | None = None) -> None:
        self._config = config
        self._policy = policy or policy_of(config)
        self._readers = Pool(
            NUM_READERS, "vlm-batch-media", most_of_client=MOST_OF_CLIENT
        )

    def close(self) -> None:
        self._readers.close()

    async def read(
        self,
        messages: Sequence[Mapping[str, Any]],
        hold: Callable[[int], None],
        *,
        client: int,
        stored: Callable[[str], bytes],
    ) -> list[dict[str, Any]]:
        """Return messages with all media as bytes or data URIs, and documents as their pages' pictures.

        ``hold`` counts bytes, clients take turns, and ``stored`` reads a file by its id.
        """
        cancelled = Cancelled()
        messages = await self._with_stored(messages, hold, client, stored, cancelled)
        try:
            paged = await self._with_pages(messages, hold, client, cancelled)
            parts = [part for message in paged for part in _media(message)]
            self._check_counts(parts)
            payloads = await self._payloads(parts, hold, client, cancelled)
        finally:
            cancelled.set()
        left = iter(payloads)
        return [_with_payloads(message, left) for message in paged]

    async def _with_stored(
        self,
        messages: Sequence[Mapping[str, Any]],
        hold: Callable[[int], None],
        client: int,
        stored: Callable[[str], bytes],
        cancelled: Cancelled,
    ) -> Sequence[Mapping[str, Any]]:
        """Return messages with files' contents in the place of their ids."""
        parts = [part for message in messages for part in _media(message)]
        contents: dict[str, bytes] = {}
        for name in dict.fromkeys(map(_file_id, parts)):
            if name is None:
                continue
            reading = self._readers.submit(
                partial(stored, name), cancelled, client=client
            )
            contents[name] = await finished(reading)
            hold(len(contents[name]))
        return [_filled(message, contents) for message in messages]

    def _check_counts(self, parts: Sequence[Mapping[str, Any]]) -> None:
        config = self._config
        bounds = config.max_images, config.max_videos, config.max_audios
        for kind, most in zip(KINDS, bounds, strict=True):
            count = sum(part["type"] in kind.parts for part in parts)
            if count > most:
                said = f"{count} {kind.noun}s; at most {most} go into one request"
                raise ApiError(400, said, param="messages")

    async def _with_pages(
        self,
        messages: Sequence[Mapping[str, Any]],
        hold: Callable[[int], None],
        client: int,
        cancelled: Cancelled,
    ) -> Sequence[Mapping[str, Any]]:
        """Return messages with each document's pages in its place."""
        found = []
        for message in messages:
            content: list[Any] = []
            for part in parts_of(message):
                if part["type"] != DOCUMENT:
                    content.append(part)
                    continue
                pages = await self._pages(part, hold, client, cancelled)
                hold(sum(map(num_page_bytes, pages)))
                content += pages
            found.append(_with_content(message, content))
        return found

    async def _pages(
        self,
        part: Mapping[str, Any],
        hold: Callable[[int], None],
        client: int,
        cancelled: Cancelled,
    ) -> list[dict[str, Any]]:
        name = "the document"
        source = await self._payload(part, name, cancelled, hold, client)
        read = partial(_pages_of, source, name, self._config.max_images, cancelled)
        reading = self._readers.submit(read, cancelled, client=client)
        return await finished(reading)

    async def _payloads(
        self,
        parts: Sequence[Mapping[str, Any]],
        hold: Callable[[int], None],
        client: int,
        cancelled: Cancelled,
    ) -> list[Any]:
        named = zip(parts, _names_of(parts), strict=True)
        tasks = [
            asyncio.ensure_future(self._payload(part, name, cancelled, hold, client))
            for part, name in named
        ]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    async def _payload(
        self,
        part: Mapping[str, Any],
        name: str,
        cancelled: Cancelled,
        hold: Callable[[int], None],
        client: int,
    ) -> Any:
        """Return a part's bytes or data URI; a picture that was drawn here as it is."""
        named = part[part["type"]]
        if isinstance(named, Mapping) and "data" in named:
            return f"data:audio;base64,{named['data']}"
        source = named["url"] if isinstance(named, Mapping) else named
        if not isinstance(source, str) or is_data_uri(source):
            return source
        is_address = is_url(source)
        if not is_address and len(source) > SHORTEST_PICTURE and "." not in source:
            # beside the event loop: it may have 60 MB
            decode = partial(_of_base64, source, name)
            decoding = self._readers.submit(decode, cancelled, client=client)
            return await finished(decoding)
        self._check_source(is_address, name)
        data = await self._fetch(source, name, cancelled, client)
        hold(len(data))
        return data

    def _check_source(self, is_address: bool, name: str) -> None:
        """Raise ApiError for URLs and files that this server does not read."""
        if is_address and not self._policy.allow_http:
            instead = f"send {name} as a data URI (or start it with --allow-urls)"
            raise _refused(f"this server fetches no URLs; {instead}", "url")
        if not is_address and not self._policy.allow_files:
            instead = "send data:...;base64,... (or start it with --allow-dir FOLDER)"
            said = f"{name} is no data URI, and this server reads no files; {instead}"
            raise _refused(said, "file")

    async def _fetch(
        self, source: str, name: str, cancelled: Cancelled, client: int
    ) -> bytes:
        reading = self._readers.submit(
            partial(fetch, source, self._policy, cancelled),
            cancelled,
            seconds=self._policy.seconds + GRACE_SECONDS,
            late=partial(Unreadable, "it hangs"),
            client=client,
        )
        try:
            return (await finished(reading)).data
        except Unreadable as error:
            # Why it could not be read would tell a stranger what there is in this machine's network and folders.
            what = "URL cannot be fetched" if is_url(source) else "file cannot be read"
            raise _refused(
                f"{name}: its {what}, or may not be; send it as a data URI",
                "unreadable",
            ) from error


def policy_of(config: ServerConfig) -> FetchPolicy:
    return FetchPolicy(
        allow_http=config.allow_urls,
        allow_private=False,
        allow_files=bool(config.allow_dirs),
        directories=config.allow_dirs,
        max_bytes=config.max_file,
        seconds=config.fetch_seconds,
    )


def _of_base64(source: str, name: str) -> bytes:
    try:
        return of_base64(source)
    except ValueError as error:
        raise _refused(
            f"{name} is neither data URI, base64, http(s) URL nor file", "unreadable"
        ) from error


def _refused(message: str, code: str) -> ApiError:
    return ApiError(400, message, param="messages", code=code)


def _file_id(part: Mapping[str, Any]) -> str | None:
    named = part[part["type"]]
    return named.get("file_id") if isinstance(named, Mapping) else None


def _filled(
    message: Mapping[str, Any], contents: Mapping[str, bytes]
) -> Mapping[str, Any]:
    """Return a message with files' contents in the place of their ids."""
    filled = []
    for part in parts_of(message):
        name = _file_id(part)
        if name is not None:
            part = {**part, part["type"]: contents[name]}
        filled.append(part)
    return _with_content(message, filled)


def _with_content(message: Mapping[str, Any], parts: list[Any]) -> Mapping[str, Any]:
    """Return a message with other parts; one of text alone has none, and stays."""
    return {**message, "content": parts} if parts else message


def _media(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [part for part in parts_of(message) if part["type"] != "text"]


def _pages_of(
    source: bytes | str, name: str, most: int, cancelled: Cancelled
) -> list[dict[str, Any]]:
    if isinstance(source, str):
        source = _of_base64(source.partition(",")[2], name)
    return pages_of(source, name, most, cancelled)


def _names_of(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return names for messages: "the picture", or "picture 2 of 3"."""
    nouns = [_kind_of(part).noun for part in parts]
    return [
        f"the {noun}"
        if nouns.count(noun) == 1
        else f"{noun} {nouns[: at + 1].count(noun)} of {nouns.count(noun)}"
        for at, noun in enumerate(nouns)
    ]


def _kind_of(part: Mapping[str, Any]) -> Kind:
    return next(kind for kind in KINDS if part["type"] in kind.parts)


def _with_payloads(
    message: Mapping[str, Any], payloads: Iterator[Any]
) -> dict[str, Any]:
    content = [_with_payload(part, payloads) for part in parts_of(message)]
    return dict(_with_content(message, content))


def _with_payload(part: Mapping[str, Any], payloads: Iterator[Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return dict(part)
    kind = _kind_of(part).marker
    found = {**part, "type": kind, kind: next(payloads)}
    if part["type"] != kind:
        del found[part["type"]]
    return found
