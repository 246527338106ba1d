"""Downloads within limits. Only this module opens connections.

A host name is resolved once, and the checked address is used: a second lookup could differ.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import certifi
import httpcore
import httpx

from vlm_batch._version import __version__
from vlm_batch.inputs.fetch import Cancelled, Unreadable, said, shown
from vlm_batch.types import FetchPolicy

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
#: Networks for special purposes by IANA's registries that some versions of Python take for public, or that answer on every
#: machine of a cloud: protocol assignments (192.0.0.192 has Oracle's metadata), old 6to4 relays, Azure's host, local NAT64,
#: segment routing, documentation.
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            *(
                "192.0.0.0/24",
                "192.88.99.0/24",
                "168.63.129.16/32",
                "240.0.0.0/4",
                "198.18.0.0/15",
                "100.64.0.0/10",
            ),
            *("64:ff9b:1::/48", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16"),
        ),
    )
)
#: IANA's global unicast range. Python also calls others global: deprecated forms with an IPv4 address (``::127.0.0.1``),
#: site-local ones, and local translations (64:ff9b:1::/48).
_UNICAST = ipaddress.ip_network("2000::/3")


_NOT_PUBLIC_BY_VERSION = {
    version: [network for network in _NOT_PUBLIC if network.version == version]
    for version in (4, 6)
}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"https": 443, "http": 80}


class Download:
    """A download with one deadline from lookup to body."""

    def __init__(self, url: str, policy: FetchPolicy, cancelled: Cancelled) -> None:
        self.name = shown(url)
        self._url = url
        self._policy = policy
        self._cancelled = cancelled
        self._deadline = time.monotonic() + policy.seconds
        self._network = _CheckedNetwork(policy, self._deadline)

    def read(self, write: Callable[[bytes], Any]) -> None:
        """Pass the body to ``write`` in blocks. Raises Unreadable or OperationCancelled."""
        timer = threading.Timer(self._policy.seconds, self._network.interrupt)
        timer.daemon = True
        try:
            timer.start()
            with self._cancelled.interrupting(self._network.interrupt):
                self._follow(httpx.URL(self._url), write)
        except Unreadable:
            raise
        except Exception as error:
            # of sockets, TLS, HTTP, URLs and codecs: every library has its own
            self._cancelled.check()
            why, setting = said(error), ""
            if time.monotonic() >= self._deadline:
                why, setting = (
                    f"it took longer than {self._policy.seconds:g} s",
                    "seconds",
                )
            raise Unreadable(
                f"{self.name} cannot be fetched: {why}", setting
            ) from error
        finally:
            timer.cancel()
            self._network.close()

    def _follow(self, url: httpx.URL, write: Callable[[bytes], Any]) -> None:
        for _ in range(self._policy.max_redirects + 1):
            if url.scheme not in ("http", "https") or not url.host:
                raise self._refused(
                    f"it leads to {shown(str(url))}, which is no http or https URL"
                )
            if not self._policy.allow_http:
                raise self._refused("URLs are not read here", "allow_http")
            self._cancelled.check()
            found = self._ask(url, write)
            if found is None:
                return
            url = url.join(found)
        raise self._refused(
            f"it redirects more than {self._policy.max_redirects} times",
            "max_redirects",
        )

    def _ask(self, url: httpx.URL, write: Callable[[bytes], Any]) -> str | None:
        """Read the body, or return a redirect's address."""
        seconds = self._deadline - time.monotonic()
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        timeout = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
        proxy = _proxy_of(url)
        if proxy is not None:
            self._network.let_through(url.host, proxy)
        with (
            httpcore.ConnectionPool(
                _trusted(), proxy=proxy, network_backend=self._network
            ) as pool,
            pool.stream(
                "GET",
                target,
                headers=_headers_for(url),
                extensions={"timeout": timeout},
            ) as response,
        ):
            fields = {
                name.lower(): value.decode("latin-1")
                for name, value in response.headers
            }
            if response.status in _REDIRECTS and b"location" in fields:
                return fields[b"location"]
            if response.status != 200:
                raise self._refused(f"HTTP {response.status}")
            encoding = fields.get(b"content-encoding", "identity")
            if encoding != "identity":
                raise self._refused(f"its content encoding is {encoding[:40]}")
            length = fields.get(b"content-length", "0")
            self._receive(response.iter_stream(), length, write)
        return None

    def _receive(
        self, blocks: Iterable[bytes], announced: str, write: Callable[[bytes], Any]
    ) -> None:
        most, received = self._policy.max_bytes, 0
        if int(announced) > most:
            raise self._too_large()
        for block in blocks:
            received += len(block)
            if received > most:
                raise self._too_large()
            write(block)
        # a body without an announced length ends where it was interrupted
        if time.monotonic() >= self._deadline:
            raise TimeoutError
        self._cancelled.check()

    def _too_large(self) -> Unreadable:
        most = self._policy.max_bytes
        return self._refused(f"it has more than {most:,} bytes", "max_bytes")

    def _refused(self, reason: str, setting: str = "") -> Unreadable:
        return Unreadable(f"{self.name} cannot be fetched: {reason}", setting)


class _CheckedNetwork(httpcore.NetworkBackend):
    """Interruptible connections to allowed addresses."""

    def __init__(self, policy: FetchPolicy, deadline: float) -> None:
        self._policy = policy
        self._deadline = deadline
        self._sockets: list[socket.socket] = []
        self._proxy: tuple[str, int | None] | None = None
        self._lock = threading.Lock()
        self._is_interrupted = False

    def let_through(self, host: str, proxy: httpcore.Proxy) -> None:
        """Allow connections to a proxy, which reaches ``host`` by itself."""
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
        addresses = (
            [host] if self._proxy == (host, port) else self._addresses(host, port)
        )
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
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if self._policy.allow_private:
            return addresses
        allowed = list(filter(is_public, addresses))
        if not allowed:
            raise _NotPublic(
                f"{host} is at {addresses[0]}, which is no public address (FetchPolicy.allow_private)"
            )
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
        """End every read and write now."""
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
    """The policy forbids the address. No OSError: those are skipped."""


def is_public(address: str) -> bool:
    """Whether everyone can reach an IP address.

    An embedded IPv4 address (mapped, 6to4, Teredo, NAT64) decides for an IPv6 one.
    """
    number: Any = ipaddress.ip_address(address.partition("%")[0])
    if number.version == 4:
        return _is_everyones(number)
    carried = _carried_by(number)
    if carried:
        return all(map(_is_everyones, carried))
    return number in _UNICAST and _is_everyones(number)


def _carried_by(number: Any) -> list[Any]:
    """Return the IPv4 addresses that an IPv6 one carries."""
    inner = [number.ipv4_mapped, number.sixtofour, *(number.teredo or ())]
    if number in _NAT64:
        inner.append(ipaddress.IPv4Address(int(number) & 0xFFFFFFFF))
    return list(filter(None, inner))


def _is_everyones(number: Any) -> bool:
    if not number.is_global or number.is_multicast:
        return False
    networks = _NOT_PUBLIC_BY_VERSION[number.version]
    return not any(number in network for network in networks)


def _headers_for(url: httpx.URL) -> dict[bytes | str, bytes | str]:
    headers: dict[bytes | str, bytes | str] = {
        "Host": url.netloc.decode("ascii"),
        "User-Agent": f"vlm-batch/{__version__}",
        "Accept": "*/*",
        # a compressed body could grow beyond its limit
        "Accept-Encoding": "identity",
    }
    if url.userinfo:
        secret = base64.b64encode(url.userinfo).decode("ascii")
        headers["Authorization"] = f"Basic {secret}"
    return headers


@cache
def _trusted() -> ssl.SSLContext:
    """Trust the system's certificates and certifi's: some systems' Python finds none."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _proxy_of(url: httpx.URL) -> httpcore.Proxy | None:
    found = urllib.request.getproxies().get(url.scheme)
    if not found or urllib.request.proxy_bypass(url.host):
        return None
    if "://" not in found:
        found = f"http://{found}"
    proxy = httpx.URL(found)
    auth = (proxy.username, proxy.password) if proxy.userinfo else None
    port = proxy.port or _PORTS.get(proxy.scheme, 80)
    target = httpcore.URL(
        scheme=proxy.raw_scheme, host=proxy.raw_host, port=port, target=b"/"
    )
    return httpcore.Proxy(target, auth=auth)
