"""Pictures and videos of a chat's messages: from what the wire names them by to what the library reads."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from vlm_batch.errors import InvalidRequest
from vlm_batch.server.config import ServerConfig
from vlm_batch.server.errors import ApiError, refusal

#: ``(url) -> its bytes``; raises InvalidRequest for what the policy forbids or the network does not give. Blocks.
Fetch: TypeAlias = Callable[[str], bytes]

#: Downloads and file reads at a time; each is bounded in time and size, so that a slow host holds one for so long at most.
NUM_READERS = 8


class MediaReader:
    """Reads what messages name, within the server's rules. Data URIs pass: the library decodes them as it loads."""

    def __init__(
        self, config: ServerConfig, *, fetch_image: Fetch | None = None, fetch_video: Fetch | None = None
    ) -> None:
        self._config = config
        self._fetch = {"picture": fetch_image, "video": fetch_video}
        self._folders = tuple(folder.resolve() for folder in config.allow_dirs)
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="vlm-batch-media")

    def close(self) -> None:
        """Stop the readers."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def read(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with every picture and video as bytes or a data URI. Raises ApiError."""
        parts = [part for message in messages for part in _parts(message)]
        self._check_counts(parts)
        payloads = iter(await asyncio.gather(*(self._payload(part) for part in parts)))
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

    async def _payload(self, part: Mapping[str, Any]) -> bytes | str:
        named = part[part["type"]]
        source: str = named["url"] if isinstance(named, Mapping) else named
        noun = "picture" if part["type"] == "image_url" else "video"
        if source.startswith("data:"):
            return source
        if source.startswith(("http://", "https://")):
            return await self._download(source, noun)
        path = self._allowed_file(source)
        if path is not None:
            return await self._run(self._read_file, path, noun)
        if source.startswith(("file:", "/", "./", "../", "~")) and not _looks_like_base64(source):
            raise ApiError(
                400,
                f"this server reads no {noun} from that place; send it as a data URI",
                param="messages",
                code="file",
            )
        try:
            return base64.b64decode(source, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ApiError(
                400, f"a {noun} is named by neither data URI, base64, http(s) URL nor file", param="messages"
            ) from error

    async def _download(self, url: str, noun: str) -> bytes:
        fetch = self._fetch[noun]
        if fetch is None:
            raise ApiError(
                400, f"this server fetches no URLs; send the {noun} as a data URI", param="messages", code="url"
            )
        try:
            return await self._run(fetch, url)
        except InvalidRequest as error:
            raise refusal(error) from error

    def _allowed_file(self, source: str) -> Path | None:
        """The file that ``source`` names, links followed, if it lies under an allowed folder. None says nothing more."""
        if not self._folders or "\0" in source or len(source) > 4096:
            return None
        path = Path(source.removeprefix("file://"))
        if not path.is_absolute():
            return None
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):  # not there, or links in a circle
            return None
        return real if any(real.is_relative_to(folder) for folder in self._folders) else None

    def _read_file(self, path: Path, noun: str) -> bytes:
        """A regular file's bytes. It is opened without following a link that was put there since it was resolved."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise ApiError(400, f"a {noun}'s file cannot be read", param="messages") from error
        with os.fdopen(handle, "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ApiError(400, f"a {noun} is not a file", param="messages")
            if about.st_size > self._config.max_file:
                raise ApiError(
                    413, f"a {noun}'s file has {about.st_size} bytes; at most {self._config.max_file} are read"
                )
            return file.read(self._config.max_file)

    async def _run(self, call: Callable[..., bytes], *args: Any) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._readers, call, *args)


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [part for part in content if part["type"] != "text"] if isinstance(content, list) else []


def _with_payload(part: Mapping[str, Any], payloads: Any) -> dict[str, Any]:
    if part["type"] == "text":
        return dict(part)
    kind = part["type"].removesuffix("_url")
    options = {name: value for name, value in part.items() if name not in ("type", part["type"])}
    return {"type": kind, kind: next(payloads), **options}


def _looks_like_base64(source: str) -> bool:
    """Base64 may begin with a slash, as every JPEG's does; a file's name has a dot, or is short."""
    return len(source) > 64 and "." not in source[:4096]
