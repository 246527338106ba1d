"""``ServerConfig``: everything that the server can be told, in one frozen record."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from vlm_batch.errors import VLMBatchError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8080
MEGABYTE = 1 << 20


class InvalidConfig(VLMBatchError, ValueError):
    """Settings that contradict each other or would open the server further than was asked for."""


@dataclass(frozen=True)
class Key:
    """A client's own key; ``has_priority`` lets it say which of its requests go first."""

    text: str
    has_priority: bool = False


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file, one a line, with the word ``priority`` behind those that may use it. Raises InvalidConfig."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"the keys cannot be read: {error}") from error
    lines = [words for words in lines if words and not words[0].startswith("#")]
    wrong = next((at for at, words in enumerate(lines, 1) if words[1:] not in ([], ["priority"])), None)
    if wrong is not None or not lines:
        said = "there is none" if wrong is None else f"number {wrong} is followed by something else than 'priority'"
        raise InvalidConfig(f"{path} must have a key a line, with 'priority' behind it or nothing: {said}")
    return tuple(Key(words[0], len(words) > 1) for words in lines)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the server: its address, its clients and its limits.

    ``served_name`` is the model's name on the wire (default: the last part of ``model``). Beyond loopback the server needs an
    ``api_key``, ``keys`` or ``no_auth``. Each of ``keys`` is a client; those who share ``api_key``, or need none, are told
    apart by their addresses. Clients share rows evenly. ``allowed_hosts`` are further names for the ``Host`` header of a
    server without a key.
    ``allow_urls`` lets requests name pictures and videos by http(s) URL, ``allow_dirs`` by files under these folders;
    each may have ``max_file`` bytes and take ``fetch_seconds``.
    Times are in seconds, sizes in bytes. Bodies and what was fetched for them have ``max_held`` bytes, of all requests
    that are not answered yet. ``max_queue`` requests may wait for a place before others are sent away (429), and
    none is taken in while MLX holds more than ``max_memory`` bytes and requests wait. ``idle_unload`` lets the model go after
    so long without a request; the next one loads it again. ``shutdown_seconds`` is what streams have left to end when
    the server is told to stop.
    ``enable_thinking`` holds for requests that do not say otherwise. ``escape_special_tokens`` reads special tokens'
    spellings in chats as plain text, where a chat that holds one is refused without it.

    Raises InvalidConfig.
    """

    model: str
    served_name: str | None = None
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_key: str | None = None
    keys: tuple[Key, ...] = ()
    no_auth: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allow_urls: bool = False
    allow_dirs: tuple[Path, ...] = ()
    max_body: int = 64 * MEGABYTE
    max_held: int = 1024 * MEGABYTE
    max_file: int = 256 * MEGABYTE
    fetch_seconds: float = 30.0
    max_images: int = 32
    max_videos: int = 4
    max_choices: int = 16
    max_prompts: int = 64
    default_max_tokens: int = 2048
    max_queue: int = 256
    max_memory: int | None = None
    request_seconds: float = 600.0
    idle_unload: float | None = None
    shutdown_seconds: float = 30.0
    enable_thinking: bool = False
    escape_special_tokens: bool = False
    tool_parser: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_body",
            "max_held",
            "max_file",
            "max_images",
            "max_choices",
            "max_prompts",
            "default_max_tokens",
            "max_queue",
        ):
            if vars(self)[name] < 1:
                raise InvalidConfig(f"{name} is {vars(self)[name]}; it must be at least 1")
        for name in ("request_seconds", "fetch_seconds"):
            if vars(self)[name] <= 0:
                raise InvalidConfig(f"{name} is {vars(self)[name]}; it must be above 0")
        for name in ("max_videos", "shutdown_seconds", "port"):
            if vars(self)[name] < 0:
                raise InvalidConfig(f"{name} is {vars(self)[name]}; it must be at least 0")
        if self.idle_unload is not None and self.idle_unload <= 0:
            raise InvalidConfig(f"idle_unload is {self.idle_unload}; it must be above 0")
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidConfig("the API key is empty")
        if self.needs_key and self.no_auth:
            raise InvalidConfig("an API key and no_auth exclude each other")
        if not self.is_loopback and not self.needs_key and not self.no_auth:
            raise InvalidConfig(
                f"{self.host} can be reached from other machines: give an API key (--api-key, or VLM_BATCH_API_KEY), "
                "or say --no-auth if everyone who can reach it may use it"
            )
        for folder in self.allow_dirs:
            if not folder.is_dir():
                raise InvalidConfig(f"{folder} is no folder; requests cannot be allowed to read files from it")

    @property
    def name(self) -> str:
        """The model's name on the wire."""
        return self.served_name or Path(self.model).name or self.model

    @property
    def names(self) -> frozenset[str]:
        """The names by which a request may call the model."""
        return frozenset({self.name, self.model})

    @property
    def needs_key(self) -> bool:
        """Whether clients have to send a key."""
        return self.api_key is not None or bool(self.keys)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may resolve to anything
            return False

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names that the ``Host`` header may hold, against pages that rebind a name to this machine; None for any.

        A key protects by itself: a foreign page does not know it.
        """
        if self.needs_key or not self.is_loopback:
            return None
        return frozenset({"localhost", "127.0.0.1", "[::1]", self.host, f"[{self.host}]", *self.allowed_hosts})
