"""Chats' media, read by the server's rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from vlm_batch.inputs.fetch import (
    Cancelled,
    FetchPolicy,
    OperationCancelled,
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
from vlm_batch.server.errors import ApiError

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
    ) -> list[dict[str, Any]]:
        """Return messages with all media as bytes or data URIs; ``hold`` counts bytes, and clients take turns."""
        parts = [part for message in messages for part in _media(message)]
        self._check_counts(parts)
        payloads = iter(await self._payloads(parts, hold, client))
        return [
            {
                **message,
                "content": [
                    _with_payload(part, payloads) for part in message["content"]
                ],
            }
            if isinstance(message["content"], list)
            else dict(message)
            for message in messages
        ]

    def _check_counts(self, parts: Sequence[Mapping[str, Any]]) -> None:
        config = self._config
        for kind, most in zip(
            KINDS,
            (config.max_images, config.max_videos, config.max_audios),
            strict=True,
        ):
            count = sum(part["type"] in kind.parts for part in parts)
            if count > most:
                raise ApiError(
                    400,
                    f"{count} {kind.noun}s; at most {most} go into one request",
                    param="messages",
                )

    async def _payloads(
        self,
        parts: Sequence[Mapping[str, Any]],
        hold: Callable[[int], None],
        client: int,
    ) -> list[bytes | str]:
        cancelled = Cancelled()
        named = zip(parts, _names_of(parts), strict=True)
        tasks = [
            asyncio.ensure_future(self._payload(part, name, cancelled, hold, client))
            for part, name in named
        ]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            cancelled.set()
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
    ) -> bytes | str:
        named = part[part["type"]]
        if isinstance(named, Mapping) and "data" in named:
            return f"data:audio;base64,{named['data']}"
        source: str = named["url"] if isinstance(named, Mapping) else named
        if is_data_uri(source):
            return source
        if len(source) > SHORTEST_PICTURE and "." not in source and not is_url(source):
            # beside the event loop: it may have 60 MB
            decode = partial(_of_base64, source, name)
            return await asyncio.shield(
                asyncio.wrap_future(
                    self._readers.submit(decode, cancelled, client=client)
                )
            )
        if is_url(source) and not self._policy.allow_http:
            raise _refused(
                f"this server fetches no URLs; send {name} as a data URI (or start it with --allow-urls)",
                "url",
            )
        if not is_url(source) and not self._policy.allow_files:
            raise _refused(
                f"{name} is no data URI, and this server reads no files; send data:...;base64,... (or start it with "
                "--allow-dir FOLDER)",
                "file",
            )
        data = await self._fetch(source, name, cancelled, client)
        hold(len(data))
        return data

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
            return (await asyncio.shield(asyncio.wrap_future(reading))).data
        except OperationCancelled:
            raise asyncio.CancelledError from None
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


def _media(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return (
        [part for part in content if part["type"] != "text"]
        if isinstance(content, list)
        else []
    )


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


def _with_payload(
    part: Mapping[str, Any], payloads: Iterator[bytes | str]
) -> dict[str, Any]:
    if part["type"] == "text":
        return dict(part)
    kind = _kind_of(part).marker
    options = {
        name: value
        for name, value in part.items()
        if name not in ("type", part["type"])
    }
    return {"type": kind, kind: next(payloads), **options}
