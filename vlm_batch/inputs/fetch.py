"""Bytes from files, URLs and data URIs, within limits: the only place that opens a path or a connection.

A source may come from a stranger, so ``FetchPolicy`` says what may be reached and how much of it is read. A host name is
resolved once, its addresses are checked, and the connection goes to a checked address, so a name that resolves
differently a moment later reaches nothing else; every redirect is checked in the same way.
"""

from __future__ import annotations

import base64
import io
import ipaddress
import os
import re
import socket
import ssl
import stat
import tempfile
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import certifi
import httpcore
import httpx

from vlm_batch._version import __version__
from vlm_batch.errors import printable
from vlm_batch.types import FetchPolicy

#: Bytes that are read at a time: between two reads the limits are looked at.
BLOCK_BYTES = 1 << 18
#: Characters of a source that a message shows.
SHOWN_CHARACTERS = 200
#: Longer texts are no paths (Linux's PATH_MAX).
MAX_PATH_CHARACTERS = 4096
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")
#: A name and a password in a URL.
_SECRET = re.compile(r"(?<=:)//[^/?#\s]*@")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
#: The only IPv6 addresses that are handed out to be reached by everyone (IANA); Python calls others global, too, such as the
#: deprecated ones that carry an IPv4 address (``::127.0.0.1``) or belong to a site, and local translations (64:ff9b:1::/48).
_UNICAST = ipaddress.ip_network("2000::/3")


class Unreadable(Exception):
    """A source could not be read; ``reason`` names it and says why, ``advice`` which of our settings decides that."""

    def __init__(self, reason: str, setting: str = "") -> None:
        self.reason = reason
        self.advice = f" (FetchPolicy.{setting})" if setting else ""
        super().__init__(reason + self.advice)


class OperationCancelled(Exception):
    """The request was cancelled while a loader worked for it; users see its result instead."""


class Cancelled:
    """A flag that work is not wanted any more: any thread sets it, and the working thread checks it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._calls: list[Callable[[], None]] = []

    def set(self) -> None:
        """Ask the work to stop, and interrupt what it waits for."""
        with self._lock:
            self._is_set, calls, self._calls = True, self._calls, []
        for call in calls:
            call()

    def is_set(self) -> bool:
        return self._is_set

    def check(self) -> None:
        """Raise OperationCancelled if the work is no longer wanted."""
        if self._is_set:
            raise OperationCancelled

    def when_set(self, call: Callable[[], None]) -> None:
        """Have ``call`` called by ``set``, or now if that is past."""
        with self._lock:
            if not self._is_set:
                self._calls.append(call)
                return
        call()

    def forget(self, call: Callable[[], None]) -> None:
        """Hold on to a call no longer."""
        with self._lock, suppress(ValueError):
            self._calls.remove(call)

    @contextmanager
    def interrupting(self, call: Callable[[], None]) -> Iterator[None]:
        """``when_set`` for the length of a block."""
        self.when_set(call)
        try:
            yield
        finally:
            self.forget(call)


@dataclass(frozen=True)
class Fetched:
    """A source that was read: its bytes, or the file that holds it, under the name that messages call it by."""

    name: str
    data: bytes = field(default=b"", repr=False)
    path: Path | None = None
    owner: Any = field(default=None, repr=False)  # a temporary file, deleted once nothing refers to it


def shown(source: str | Path) -> str:
    """A path or URL for a message, at a bearable length."""
    text = str(source)
    if is_data_uri(text):
        return "the data URI"
    text = _SECRET.sub("//...@", text)
    short = text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS // 2]}... ({len(text):,} characters)"
    return printable(short if short.strip() else repr(short))


def is_data_uri(source: Any) -> bool:
    return isinstance(source, str) and source[:5].lower() == "data:"


def is_url(source: Any) -> bool:
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def fetch(source: str | Path, policy: FetchPolicy, cancelled: Cancelled | None = None) -> Fetched:
    """Read a picture's path, URL or data URI into memory. Raises Unreadable, or OperationCancelled."""
    cancelled = cancelled or Cancelled()
    buffer = io.BytesIO()
    _read_into(source, policy, cancelled, buffer.write)
    return Fetched(shown(source), buffer.getvalue())


def fetch_to_file(source: str | Path, policy: FetchPolicy, cancelled: Cancelled | None = None) -> Fetched:
    """The file that holds a video: a local one as it is, anything else in a temporary file.

    The first bytes of a local file are read, so that one on a drive that does not answer is noticed here. Raises
    Unreadable, or OperationCancelled.
    """
    cancelled = cancelled or Cancelled()
    if not is_data_uri(source) and not is_url(source):
        path = local_path(source, policy)
        with _opened(path, shown(source)) as file:
            file.read(1)
        return Fetched(shown(source), path=path)
    temporary = _TemporaryFile()
    with open(temporary.path, "wb") as opened:
        _read_into(source, policy, cancelled, opened.write)
    return Fetched(shown(source), path=temporary.path, owner=temporary)


def file_of_bytes(data: bytes, name: str) -> Fetched:
    """Bytes as a temporary file."""
    temporary = _TemporaryFile()
    temporary.path.write_bytes(data)
    return Fetched(name, path=temporary.path, owner=temporary)


class _TemporaryFile:
    """An empty file, which goes with this object."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="vlm-batch-")
        os.close(handle)
        self.path = Path(name)
        weakref.finalize(self, self.path.unlink, missing_ok=True)


def _read_into(source: str | Path, policy: FetchPolicy, cancelled: Cancelled, write: Callable[[bytes], Any]) -> None:
    if is_data_uri(source):
        write(_of_data_uri(str(source), policy))
    elif is_url(source):
        _Download(str(source), policy, cancelled).read(write)
    else:
        name = shown(source)
        with _opened(local_path(source, policy), name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > policy.max_bytes:
                raise Unreadable(f"{name} has {size:,} bytes; at most {policy.max_bytes:,} are read", "max_bytes")
            while block := file.read(min(BLOCK_BYTES, max(size, 1))):  # what is appended meanwhile is left out
                cancelled.check()
                write(block)
                size -= len(block)
                if size <= 0:
                    return


def _of_data_uri(uri: str, policy: FetchPolicy) -> bytes:
    head, _, data = uri.partition(",")
    if not data or not head.lower().endswith(";base64"):
        raise Unreadable("the data URI is malformed: data:image/...;base64,... is expected")
    if len(data) // 4 * 3 > policy.max_bytes + 2:
        raise Unreadable(f"the data URI holds more than {policy.max_bytes:,} bytes", "max_bytes")
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except ValueError as error:
        raise Unreadable(f"the data URI is not base64: {error}") from error


# Files
# ---------------------------------------------------------------------------------------------------------------------


def local_path(source: str | Path, policy: FetchPolicy) -> Path:
    """The path that a text or Path names, if the policy allows to read it. Raises Unreadable."""
    text, name = str(source), shown(source)
    if not policy.allow_files:
        raise Unreadable(f"{name} is a local path, and none may be read here", "allow_files")
    if len(text) > MAX_PATH_CHARACTERS:
        raise Unreadable(f"{name} is no path; pictures in base64 go as data:image/png;base64,...")
    if scheme := _SCHEME.match(text):
        if scheme[1].lower() != "file":
            raise Unreadable(f"{name} cannot be fetched: {scheme[1]} URLs are not read; http, https, data and file are")
        text = urllib.request.url2pathname(urlsplit(text).path)
    try:
        path = Path(text).expanduser()
        roots = [Path(root).expanduser().resolve() for root in policy.directories]
        resolved = path.resolve() if roots else path
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a loop of links, a null character
        raise Unreadable(f"{name} is no path: {_said(error)}") from error
    if roots and not any(resolved.is_relative_to(root) for root in roots):
        raise Unreadable(f"{name} is not in a folder that may be read", "directories")
    return resolved


@contextmanager
def _opened(path: Path, name: str) -> Iterator[io.BufferedReader]:
    """A regular file, opened. A pipe or device is refused without waiting for it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise Unreadable(f"{name} is not a file")
        with open(handle, "rb") as file:
            yield file
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Unreadable(f"{name} does not exist") from error
    except (OSError, ValueError) as error:
        raise Unreadable(f"{name} cannot be read: {_said(error)}") from error


# URLs
# ---------------------------------------------------------------------------------------------------------------------


class _Download:
    """One URL on its way, with one deadline for resolving, connecting, redirects and body together."""

    def __init__(self, url: str, policy: FetchPolicy, cancelled: Cancelled) -> None:
        self.name = shown(url)
        self._url = url
        self._policy = policy
        self._cancelled = cancelled
        self._deadline = time.monotonic() + policy.seconds
        self._network = _CheckedNetwork(policy, self._deadline)

    def read(self, write: Callable[[bytes], Any]) -> None:
        """Hand the body to ``write``, block by block. Raises Unreadable, or OperationCancelled."""
        timer = threading.Timer(self._policy.seconds, self._network.interrupt)
        timer.daemon = True
        try:
            timer.start()
            with self._cancelled.interrupting(self._network.interrupt):
                self._follow(httpx.URL(self._url), write)
        except Unreadable:
            raise
        except Exception as error:  # of sockets, TLS, HTTP, URLs and codecs: every library has its own
            self._cancelled.check()
            late = time.monotonic() >= self._deadline
            said = f"it took longer than {self._policy.seconds:g} s" if late else _said(error)
            raise Unreadable(f"{self.name} cannot be fetched: {said}", "seconds" if late else "") from error
        finally:
            timer.cancel()
            self._network.close()

    def _follow(self, url: httpx.URL, write: Callable[[bytes], Any]) -> None:
        for _ in range(self._policy.max_redirects + 1):
            if url.scheme not in ("http", "https") or not url.host:
                raise self._refused(f"it leads to {shown(str(url))}, which is no http or https URL")
            if not self._policy.allow_http:
                raise self._refused("URLs are not read here", "allow_http")
            self._cancelled.check()
            found = self._ask(url, write)
            if found is None:
                return
            url = url.join(found)
        raise self._refused(f"it redirects more than {self._policy.max_redirects} times", "max_redirects")

    def _ask(self, url: httpx.URL, write: Callable[[bytes], Any]) -> str | None:
        """Read the body and return None, or return the address that a redirect leads to."""
        seconds = self._deadline - time.monotonic()
        headers: dict[bytes | str, bytes | str] = {
            "Host": url.netloc.decode("ascii"),
            "User-Agent": f"vlm-batch/{__version__}",
            "Accept": "*/*",
            "Accept-Encoding": "identity",  # a compressed body could grow beyond its limit
        }
        if url.userinfo:
            headers["Authorization"] = "Basic " + base64.b64encode(url.userinfo).decode("ascii")
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        timeout = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
        proxy = _proxy_of(url)
        if proxy is not None:
            self._network.let_through(url.host, proxy)
        with (
            httpcore.ConnectionPool(_trusted(), proxy=proxy, network_backend=self._network) as pool,
            pool.stream("GET", target, headers=headers, extensions={"timeout": timeout}) as response,
        ):
            fields = {name.lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in (301, 302, 303, 307, 308) and b"location" in fields:
                return fields[b"location"]
            if response.status != 200:
                raise self._refused(f"HTTP {response.status}")
            if fields.get(b"content-encoding", "identity") != "identity":
                raise self._refused(f"its content encoding is {fields[b'content-encoding'][:40]}")
            self._receive(response.iter_stream(), fields.get(b"content-length", "0"), write)
        return None

    def _receive(self, blocks: Iterable[bytes], announced: str, write: Callable[[bytes], Any]) -> None:
        most, size = self._policy.max_bytes, int(announced)
        received = 0
        for block in blocks if size <= most else ():
            received += len(block)
            if received > most:
                break
            write(block)
        if max(size, received) > most:
            raise self._refused(f"it has more than {most:,} bytes", "max_bytes")
        if time.monotonic() >= self._deadline:  # a body without an announced length ends where it was interrupted
            raise TimeoutError
        self._cancelled.check()

    def _refused(self, reason: str, setting: str = "") -> Unreadable:
        return Unreadable(f"{self.name} cannot be fetched: {reason}", setting)


class _CheckedNetwork(httpcore.NetworkBackend):
    """Connections to addresses that the policy allows, which another thread can interrupt."""

    def __init__(self, policy: FetchPolicy, deadline: float) -> None:
        self._policy = policy
        self._deadline = deadline
        self._sockets: list[socket.socket] = []
        self._proxy: tuple[str, int | None] | None = None
        self._lock = threading.Lock()
        self._is_interrupted = False

    def let_through(self, host: str, proxy: httpcore.Proxy) -> None:
        """Allow connections to a proxy, which then reaches ``host`` by itself."""
        with suppress(OSError):  # a name that only the proxy can resolve
            self._addresses(host, None)
        self._proxy = proxy.url.host.decode("ascii"), proxy.url.port

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:
        addresses = [host] if self._proxy == (host, port) else self._addresses(host, port)
        failure: Exception | None = None
        for address in addresses:
            left = self._deadline - time.monotonic()
            if left <= 0 or self._is_interrupted:
                raise TimeoutError("it took too long to connect")
            try:
                stream = httpcore.SyncBackend().connect_tcp(address, port, left)
            except Exception as error:
                failure = error
                continue
            self._remember(stream)
            return stream
        raise failure or OSError(f"{host} has no address")

    def _addresses(self, host: str, port: int | None) -> list[str]:
        """The host's addresses that may be connected to, as text. Raises OSError if it has none."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if self._policy.allow_private:
            return addresses
        allowed = [address for address in addresses if is_public(address)]
        if not allowed:
            raise _NotPublic(f"{host} is at {addresses[0]}, which is no public address (FetchPolicy.allow_private)")
        return allowed

    def _remember(self, stream: httpcore.NetworkStream) -> None:
        # A second handle on the connection stays valid whatever TLS does with the first.
        handle = stream.get_extra_info("socket").dup()
        with self._lock:
            self._sockets.append(handle)
            late = self._is_interrupted
        if late:
            self.interrupt()

    def interrupt(self) -> None:
        """Make every read and write on the connections end now."""
        with self._lock:
            self._is_interrupted = True
            for handle in self._sockets:
                with suppress(OSError):
                    handle.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            for handle in self._sockets:
                handle.close()
            self._sockets.clear()


class _NotPublic(Exception):
    """An address that the policy does not allow; no OSError, so that it is never passed over."""


def is_public(address: str) -> bool:
    """Whether an IP address is reachable by everyone: not loopback, private, link-local, reserved or multicast.

    An IPv6 address that carries an IPv4 address (mapped, 6to4, Teredo, NAT64) is as public as that.
    """
    number: Any = ipaddress.ip_address(address.partition("%")[0])
    if number.version == 6:
        inner = [number.ipv4_mapped, number.sixtofour, *(number.teredo or ())]
        if number in _NAT64:
            inner.append(ipaddress.IPv4Address(int(number) & 0xFFFFFFFF))
        carried = [one for one in inner if one is not None]
        if carried:
            return all(one.is_global and not one.is_multicast for one in carried)
        if number not in _UNICAST:
            return False
    return bool(number.is_global and not number.is_multicast)


@cache
def _trusted() -> ssl.SSLContext:
    """The system's certificates and certifi's: some systems' Python finds none of its own."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _proxy_of(url: httpx.URL) -> httpcore.Proxy | None:
    found = urllib.request.getproxies().get(url.scheme)
    if not found or urllib.request.proxy_bypass(url.host):
        return None
    proxy = httpx.URL(found if "://" in found else f"http://{found}")
    auth = (proxy.username, proxy.password) if proxy.userinfo else None
    port = proxy.port or (443 if proxy.scheme == "https" else 80)
    target = httpcore.URL(scheme=proxy.raw_scheme, host=proxy.raw_host, port=port, target=b"/")
    return httpcore.Proxy(target, auth=auth)


def _said(error: BaseException) -> str:
    """An exception's reason in one short line."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text[:SHOWN_CHARACTERS] or type(error).__name__
