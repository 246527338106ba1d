"""Reads the pictures and videos that a chat's messages name, by the server's rules."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from vlm_batch.inputs.fetch import Cancelled, FetchPolicy, OperationCancelled, Unreadable, fetch, is_data_uri, is_url
from vlm_batch.inputs.loaders import GRACE_SECONDS
from vlm_batch.inputs.pool import Pool
from vlm_batch.server.config import ServerConfig
from vlm_batch.server.errors import ApiError

#: Downloads and file reads at a time: each is bounded in time and size, so that a slow host holds one for so long at most.
NUM_READERS = 8
#: Base64 may begin with a slash, as every JPEG's does. A text that is longer than this and has no dot is no file's name.
SHORTEST_PICTURE = 64


class MediaReader:
    """Reads what messages name, within ``policy``. Data URIs pass: the library decodes them as it loads."""

    def __init__(self, config: ServerConfig, policy: FetchPolicy | None = None) -> None:
        self._config = config
        self._policy = policy or policy_of(config)
        self._readers = Pool(NUM_READERS, "vlm-batch-media")

    def close(self) -> None:
        """Stop the readers."""
        self._readers.close()

    async def read(
        self, messages: Sequence[Mapping[str, Any]], hold: Callable[[int], None] = lambda size: None
    ) -> list[dict[str, Any]]:
        """The messages with every picture and video as bytes or a data URI; ``hold`` is told of bytes that are read.

        Raises ApiError.
        """
        parts = [part for message in messages for part in _media(message)]
        self._check_counts(parts)
        payloads = iter(await self._payloads(parts, hold))
        return [
            {**message, "content": [_with_payload(part, payloads) for part in message["content"]]}
            if isinstance(message["content"], list)
            else dict(message)
            for message in messages
        ]

    def _check_counts(self, parts: Sequence[Mapping[str, Any]]) -> None:
        config = self._config
        for kind, noun, most in (
            ("image_url", "pictures", config.max_images),
            ("video_url", "videos", config.max_videos),
        ):
            count = sum(part["type"] == kind for part in parts)
            if count > most:
                raise ApiError(400, f"{count} {noun}; at most {most} go into one request", param="messages")

    async def _payloads(self, parts: Sequence[Mapping[str, Any]], hold: Callable[[int], None]) -> list[bytes | str]:
        """The contents that the parts name, read side by side; a failure, or a client that leaves, stops the others."""
        cancelled = Cancelled()
        tasks = [asyncio.ensure_future(self._payload(part, cancelled, hold)) for part in parts]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            cancelled.set()
            for task in tasks:
                task.cancel()
            raise

    async def _payload(self, part: Mapping[str, Any], cancelled: Cancelled, hold: Callable[[int], None]) -> bytes | str:
        named = part[part["type"]]
        source: str = named["url"] if isinstance(named, Mapping) else named
        noun = "picture" if part["type"] == "image_url" else "video"
        if is_data_uri(source):
            return source
        if len(source) > SHORTEST_PICTURE and "." not in source and not is_url(source):
            return _of_base64(source, noun)
        if is_url(source) and not self._policy.allow_http:
            raise _refused(f"this server fetches no URLs; send the {noun} as a data URI", "url")
        if not is_url(source) and not self._policy.allow_files:
            raise _refused(f"a {noun} is no data URI, and this server reads no files", "file")
        data = await self._fetch(source, noun, cancelled)
        hold(len(data))
        return data

    async def _fetch(self, source: str, noun: str, cancelled: Cancelled) -> bytes:
        reading = self._readers.submit(
            partial(fetch, source, self._policy, cancelled),
            cancelled,
            seconds=self._policy.seconds + GRACE_SECONDS,
            late=partial(Unreadable, "it hangs"),
        )
        try:
            return (await asyncio.shield(asyncio.wrap_future(reading))).data
        except OperationCancelled:
            raise asyncio.CancelledError from None
        except Unreadable as error:
            # Why it could not be read would tell a stranger what there is in this machine's network and folders.
            what = "URL cannot be fetched" if is_url(source) else "file cannot be read"
            raise _refused(f"the {noun}'s {what}, or may not be", "unreadable") from error


def policy_of(config: ServerConfig) -> FetchPolicy:
    """The policy for clients' pictures: requests carry them; URLs and files are read only if the config allows it."""
    return FetchPolicy(
        allow_http=config.allow_urls,
        allow_private=False,
        allow_files=bool(config.allow_dirs),
        directories=config.allow_dirs,
        max_bytes=config.max_file,
        seconds=config.fetch_seconds,
    )


def _of_base64(source: str, noun: str) -> bytes:
    try:
        return base64.b64decode(source, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"a {noun} is neither data URI, base64, http(s) URL nor file", "unreadable") from error


def _refused(message: str, code: str) -> ApiError:
    return ApiError(400, message, param="messages", code=code)


def _media(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [part for part in content if part["type"] != "text"] if isinstance(content, list) else []


def _with_payload(part: Mapping[str, Any], payloads: Iterator[bytes | str]) -> dict[str, Any]:
    if part["type"] == "text":
        return dict(part)
    kind = part["type"].removesuffix("_url")
    options = {name: value for name, value in part.items() if name not in ("type", part["type"])}
    return {"type": kind, kind: next(payloads), **options}
