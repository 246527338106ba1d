"""The server's configuration."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from vlm_batch.checks import demand
from vlm_batch.errors import VLMBatchError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8080
MEGABYTE = 1 << 20
#: Where what a request does not say of its sampling is taken from.
GREEDY, RECOMMENDED = SAMPLINGS = ("greedy", "recommended")


#: Bytes of responses in memory. What is shared among a conversation's responses counts in each.
MAX_KEPT = 512 * MEGABYTE


class InvalidConfig(VLMBatchError, ValueError):
    """Settings contradict each other, or would expose the server."""


@dataclass(frozen=True)
class Key:
    """A client's key; with ``has_priority`` it may send X-Priority."""

    text: str
    has_priority: bool = False


def read_keys(path: Path) -> tuple[Key, ...]:
    """Read keys, one a line, optionally followed by ``priority``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"--keys: the file cannot be read: {error}") from error
    needed = f"{path} must have a key a line, with 'priority' behind it or nothing"
    keys: list[Key] = []
    for line in text.splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key, *behind = words
        if behind not in ([], ["priority"]):
            number = len(keys) + 1
            said = f"number {number} is followed by something else than 'priority'"
            raise InvalidConfig(f"{needed}: {said}")
        keys.append(Key(key, has_priority=bool(behind)))
    if not keys:
        raise InvalidConfig(f"{needed}: there is none")
    return tuple(keys)


#: The least values of settings.
_LEAST = {
    "max_body": 1,
    "max_held": 1,
    "max_file": 1,
    "max_files": 1,
    "max_upload": 1,
    "max_responses": 1,
    "max_kept": 1,
    "max_images": 1,
    "max_choices": 1,
    "max_prompts": 1,
    "default_max_tokens": 1,
    "max_queue": 1,
    "max_videos": 0,
    "max_audios": 0,
    "shutdown_seconds": 0,
    "port": 0,
}


def _check_proxy(proxy: str) -> None:
    try:
        ipaddress.ip_network(proxy)
    except ValueError as error:
        said = f"{proxy!r} is no address and no network: {error}"
        raise InvalidConfig(f"--proxies: {said}") from error


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Server settings; times in seconds, sizes in bytes.

    Attributes:
        served_names: The model's names for clients; answers have the first. By default the last part of ``model``.
        any_model: Answer requests for models of any name.
        root_path: The path under which a proxy shows the server, with a slash before it and none behind.
        api_key: All clients' key. Beyond loopback, the server needs this, ``keys`` or ``no_auth``.
        keys: One key per client; other clients are told apart by address.
        allowed_hosts: Further ``Host`` names of a server without a key.
        proxies: Addresses or networks of proxies whose X-Forwarded-For says who the client is; others' is not read.
        allow_urls: Requests may name media by http(s) URL.
        allow_dirs: Requests may name files in these folders.
        max_held: Bodies and fetched media of unanswered requests.
        max_file: Size of one fetched file.
        files: The folder of files and batches; without one, neither is served.
        responses: The folder in which responses are kept; without one, they are kept in memory.
        max_kept: Responses in memory.
        max_queue: Waiting requests before others get 429.
        max_memory: MLX memory above which no request may wait.
        idle_unload: Seconds without requests after which the model is unloaded; the next request loads it.
        shutdown_seconds: Seconds that streams have to end in when the server stops.
        enable_thinking: Default for requests.
        escape_special_tokens: Read special tokens in chats as plain text, instead of refusing them.
        sampling: Defaults of what a request does not say: "greedy", or "recommended" by generation_config.json.
    """

    model: str
    served_names: tuple[str, ...] = ()
    any_model: bool = False
    root_path: str = ""
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_key: str | None = None
    keys: tuple[Key, ...] = ()
    no_auth: bool = False
    allowed_hosts: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()
    allow_urls: bool = False
    allow_dirs: tuple[Path, ...] = ()
    max_body: int = 64 * MEGABYTE
    max_held: int = 1024 * MEGABYTE
    max_file: int = 256 * MEGABYTE
    files: Path | None = None
    max_files: int = 10 * 1024 * MEGABYTE
    max_upload: int = 200 * MEGABYTE
    responses: Path | None = None
    max_responses: int = 10 * 1024 * MEGABYTE
    max_kept: int = MAX_KEPT
    fetch_seconds: float = 30.0
    max_images: int = 32
    max_videos: int = 4
    max_audios: int = 4
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
    sampling: str = GREEDY
    tool_parser: str | None = None

    def __post_init__(self) -> None:
        values = vars(self)
        for name, least in _LEAST.items():
            value = values[name]
            demand(value >= least, InvalidConfig, name, value, f"at least {least}")
        for name in ("request_seconds", "fetch_seconds", "idle_unload"):
            value = values[name]
            is_right = value is None or value > 0
            demand(is_right, InvalidConfig, name, value, "above 0")
        is_known = self.sampling in SAMPLINGS
        known = f"one of {', '.join(SAMPLINGS)}"
        demand(is_known, InvalidConfig, "sampling", self.sampling, known)
        self._check_access()
        self._check_names()
        if self.files is not None and self.files == self.responses:
            said = "--files and --responses need folders of their own"
            raise InvalidConfig(f"{said}; both are {self.files}")
        for proxy in self.proxies:
            _check_proxy(proxy)
        for folder in self.allow_dirs:
            if not folder.is_dir():
                said = "requests cannot be allowed to read files from it"
                raise InvalidConfig(f"{folder} is no folder; {said}")

    def _check_access(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            instead = "give one, or leave --api-key and VLM_BATCH_API_KEY out"
            raise InvalidConfig(f"the API key is empty; {instead}")
        if self.needs_key and self.no_auth:
            said = "an API key and --no-auth exclude each other; leave one out"
            raise InvalidConfig(said)
        is_closed = self.is_loopback or self.needs_key
        if not is_closed and not self.no_auth:
            raise InvalidConfig(
                f"{self.host} can be reached from other machines: give an API key (--api-key, or VLM_BATCH_API_KEY), "
                "or say --no-auth if everyone who can reach it may use it"
            )

    def _check_names(self) -> None:
        if "" in self.served_names:
            raise InvalidConfig("--served-model-name: a name is empty")
        path = self.root_path
        if path and (path[0] != "/" or path[-1] == "/"):
            said = "must begin with a slash and not end with one"
            raise InvalidConfig(f"--root-path: {path!r} {said}")

    @property
    def name(self) -> str:
        return self.all_names[0]

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names under which clients see the model."""
        return self.served_names or (Path(self.model).name or self.model,)

    @property
    def names(self) -> frozenset[str]:
        return frozenset({*self.all_names, self.model})

    @property
    def needs_key(self) -> bool:
        return self.api_key is not None or bool(self.keys)

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may resolve to anything
            return False

    @property
    def hosts(self) -> frozenset[str] | None:
        """Allowed ``Host`` headers, against DNS rebinding; a key protects by itself."""
        if self.needs_key or not self.is_loopback:
            return None
        return frozenset(
            {
                "localhost",
                "127.0.0.1",
                "[::1]",
                self.host,
                f"[{self.host}]",
                *self.allowed_hosts,
            }
        )
