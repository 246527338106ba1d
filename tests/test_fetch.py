"""Reading what strangers name: addresses, redirects, sizes and times, against a server of our own on this machine."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlm_batch.errors import InvalidImage, InvalidVideo
from vlm_batch.inputs import download as module
from vlm_batch.inputs.download import is_public
from vlm_batch.inputs.fetch import (
    Cancelled,
    Fetched,
    OperationCancelled,
    Unreadable,
    fetch,
    fetch_to_file,
)
from vlm_batch.inputs.given import check_types
from vlm_batch.inputs.images import load_image
from vlm_batch.inputs.videos import load_video
from vlm_batch.types import FetchPolicy, Request

BODY = b"0123456789" * 1000
HERE = FetchPolicy(allow_private=True, seconds=20)
SOON = replace(HERE, seconds=0.5)


class Site(BaseHTTPRequestHandler):
    """Answers as each path says; what stalls does so until the server stops."""

    stopping = threading.Event()
    seen: list[str] = []

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        type(self).seen.append(self.headers["Host"])
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            getattr(self, self.path.strip("/").split("/")[0].split("?")[0])()

    def _head(self, status: int, **fields: Any) -> None:
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def good(self) -> None:
        self._head(200, Content_Length=len(BODY))
        self.wfile.write(BODY)

    def unsized(self) -> None:
        self._head(200)
        self.wfile.write(BODY)

    def endless(self) -> None:
        self._head(200)
        while not self.stopping.is_set():
            self.wfile.write(BODY)

    def drip(self) -> None:
        self._head(200, Content_Length=len(BODY))
        while not self.stopping.wait(0.05):
            self.wfile.write(b"0")

    def unsized_drip(self) -> None:
        self._head(200)
        while not self.stopping.wait(0.05):
            self.wfile.write(b"0")

    def slow_head(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not self.stopping.wait(0.05):
            self.wfile.write(b"X-More: 1\r\n")

    def silent(self) -> None:
        self.stopping.wait(30)

    def liar(self) -> None:
        self._head(200, Content_Length=10**12)

    def short(self) -> None:
        self._head(200, Content_Length=len(BODY) + 1)
        self.wfile.write(BODY)

    def missing(self) -> None:
        self._head(404)

    def zipped(self) -> None:
        self._head(200, Content_Encoding="gzip", Content_Length=4)
        self.wfile.write(b"\x1f\x8b\x08\x00")

    def garbage(self) -> None:
        self.wfile.write(b"\x00\xff no http at all\r\n\r\n")

    def moved(self) -> None:
        self._head(302, Location=self.path.partition("?")[2])

    def circle(self) -> None:
        self._head(302, Location="/circle")


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    Site.stopping.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Site.stopping.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("path", ["good", "unsized", "moved?/good", "moved?http:good"])
def test_a_body_is_read_whole(site: str, path: str) -> None:
    path = path.replace("http:", site + "/")
    assert fetch(f"{site}/{path}", HERE).data == BODY


@pytest.mark.parametrize(
    ("path", "policy", "said"),
    [
        ("endless", replace(HERE, max_bytes=100_000), "more than 100,000 bytes"),
        ("liar", HERE, "more than 268,435,456 bytes"),
        ("drip", SOON, "longer than 0.5 s"),
        ("unsized_drip", SOON, "longer than 0.5 s"),
        ("slow_head", SOON, "longer than 0.5 s"),
        ("silent", SOON, "longer than 0.5 s"),
        ("short", HERE, "cannot be fetched"),
        ("garbage", HERE, "cannot be fetched"),
        ("missing", HERE, "HTTP 404"),
        ("zipped", HERE, "content encoding is gzip"),
        ("circle", HERE, "redirects more than 5 times"),
        (
            "moved?file:///etc/passwd",
            HERE,
            "leads to file:/etc/passwd, which is no http",
        ),
        ("moved?data:text/plain,x", HERE, "no http or https URL"),
        ("moved?http://[", HERE, "cannot be fetched"),
        ("good", replace(HERE, allow_http=False), "URLs are not read here"),
        ("good", FetchPolicy(), "127.0.0.1, which is no public address"),
    ],
    ids=str,
)
def test_what_cannot_be_fetched_says_why_and_in_time(
    site: str, path: str, policy: FetchPolicy, said: str
) -> None:
    started = time.monotonic()
    with pytest.raises(Unreadable, match=said):
        fetch(f"{site}/{path}", policy)
    assert time.monotonic() - started < 15  # the policy's own limit is 20 s


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://exa mple.com/",
        "http://\x00/",
        "http://a:99999/",
        "http://" + "a" * 70_000,
        "http://" + "a" * 300 + ".example/",
        "http://[::1/",
        "http://no-such-host.invalid/ä.png",
        "HTTP://127.0.0.1:9/x",
        "ftp://example.org/x.png",
        "s3://bucket/x.png",
    ],
    ids=lambda url: url[:30],
)
def test_urls_of_every_wrong_kind_are_one_exception(url: str) -> None:
    with pytest.raises(Unreadable, match="cannot be fetched") as found:
        fetch(url, HERE)
    assert len(str(found.value)) < 800
    with pytest.raises(InvalidImage, match="cannot be fetched"):
        load_image(url)
    with pytest.raises(InvalidVideo, match="cannot be fetched"):
        load_video(url)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "0x7f000001",
        "2130706433",
        "127.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "10.0.0.1",
        "192.168.1.1",
        "172.16.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "[fe80::1]",
        "[fd00::1]",
        "224.0.0.1",
    ],
)
def test_addresses_that_are_not_public_are_not_connected_to(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.httpcore.SyncBackend, "connect_tcp", _must_not_connect)
    with pytest.raises(Unreadable, match="no public address"):
        fetch(f"http://{host}/x.png", FetchPolicy())


def _must_not_connect(*args: Any, **options: Any) -> Any:
    raise AssertionError(f"connected to {args}")


def test_what_is_public() -> None:
    assert is_public("93.184.216.34")
    assert is_public("2606:2800:220:1:248:1893:25c8:1946")
    assert not is_public("2002:7f00:1::")  # 6to4 of 127.0.0.1
    for carries in (
        "::127.0.0.1",
        "64:ff9b:1::7f00:1",
        "64:ff9b::7f00:1",
        "::ffff:10.0.0.1",
        "::ffff:0:127.0.0.1",
    ):
        assert not is_public(carries)
    for local in (
        "fec0::1",
        "fe80::1%eth0",
        "fd00::1",
        "::",
        "::1",
        "100::1",
        "4000::1",
        "ff0e::1",
        "2001:db8::1",
    ):
        assert not is_public(local)
    for special in (
        *(
            "192.0.0.192",
            "192.0.0.9",
            "192.88.99.1",
            "168.63.129.16",
            "198.18.0.1",
            "240.0.0.1",
            "255.255.255.255",
        ),
        *(
            "3fff::1",
            "5f00::1",
            "2001:20::1",
            "2001:db8::1",
            "64:ff9b:1::1",
            "::ffff:168.63.129.16",
            "64:ff9b::192.0.0.192",
        ),
    ):
        assert not is_public(special), special
    assert is_public("::ffff:93.184.216.34")
    assert is_public("64:ff9b::93.184.216.34")


def test_a_redirect_is_checked_like_the_first_address(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_public", lambda address: address == "127.0.0.1")
    assert fetch(f"{site}/moved?/good", FetchPolicy()).data == BODY
    other = site.replace("127.0.0.1", "127.0.0.2")
    with pytest.raises(Unreadable, match=r"127\.0\.0\.2, which is no public address"):
        fetch(f"{site}/moved?{other}/good", FetchPolicy())


def test_a_name_that_resolves_differently_a_moment_later(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address that was checked is the one that is connected to; the name is not asked again."""
    resolve, asked = socket.getaddrinfo, []

    def changing(host: Any, *args: Any, **options: Any) -> Any:
        if host == "turning.example":
            asked.append(host)
            host = "127.0.0.1" if len(asked) == 1 else "127.0.0.2"
        return resolve(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", changing)
    monkeypatch.setattr(module, "is_public", lambda address: address == "127.0.0.1")
    name = site.replace("127.0.0.1", "turning.example")
    assert fetch(f"{name}/good", FetchPolicy()).data == BODY
    assert asked == ["turning.example"]
    # the server is asked by its name
    assert Site.seen[-1] == name.removeprefix("http://")


@pytest.mark.parametrize("path", ["drip", "silent", "slow_head", "endless"])
def test_a_download_stops_when_it_is_cancelled(site: str, path: str) -> None:
    cancelled, policy = Cancelled(), replace(HERE, max_bytes=1 << 40)
    threading.Timer(0.3, cancelled.set).start()
    started = time.monotonic()
    with pytest.raises(OperationCancelled):
        fetch_to_file(f"{site}/{path}", policy, cancelled)
    assert time.monotonic() - started < 15


def test_nothing_of_a_download_is_left(site: str) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    threads = threading.active_count()
    for path in ("good", "missing", "short", "moved?/good", "zipped"):
        with contextlib.suppress(Unreadable):
            fetch(f"{site}/{path}", HERE)
    deadline = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= threads
    if before:
        # the server's own of the last answers
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_proxy_that_the_environment_names_is_used(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", site)
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr(module.urllib.request, "proxy_bypass", lambda host: False)
    with pytest.raises(Unreadable, match=r"HTTP 501|cannot be fetched"):
        # asked of the site, whole: it knows no such path
        fetch("http://no-such-host.invalid/good", FetchPolicy())
    assert Site.seen[-1] == "no-such-host.invalid"
    with pytest.raises(Unreadable, match="no public address"):
        fetch("http://10.0.0.1/good", FetchPolicy())


# Files and data URIs
# ---------------------------------------------------------------------------------------------------------------------


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    started = time.monotonic()
    for load, error in ((load_image, InvalidImage), (load_video, InvalidVideo)):
        with pytest.raises(error, match="is not a file"):
            load(tmp_path / "pipe.png")  # type: ignore[operator]
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("~nosuchuser/x.png", "~nosuchuser/x.png is no path"),
        ("iVBORw0KGgo" * 40_000, "is no path; pictures in base64 go as data:image"),
        ("a\x00b.png", "is no path|cannot be read"),
        ("x" * 300 + ".png", "cannot be read"),
        ("/etc/passwd/x.png", "does not exist"),
    ],
    ids=["user", "base64", "null", "long", "below a file"],
)
def test_what_is_no_path_says_so_in_a_line(source: str, said: str) -> None:
    for load, error in ((load_image, InvalidImage), (load_video, InvalidVideo)):
        with pytest.raises(error, match=said) as found:
            load(source)  # type: ignore[operator]
        assert len(str(found.value)) < 600


def test_files_only_where_the_policy_says(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.bin").write_bytes(BODY)
    (inside / "link.bin").symlink_to(outside / "a.bin")
    policy = FetchPolicy(directories=(inside,))
    assert fetch(inside / "a.bin", policy).data == BODY
    assert fetch((inside / "a.bin").as_uri(), policy).data == BODY
    for path in (
        outside / "a.bin",
        inside / "link.bin",
        inside / ".." / "out" / "a.bin",
    ):
        with pytest.raises(Unreadable, match="not in a folder that may be read"):
            fetch(path, policy)
    with pytest.raises(Unreadable, match="none may be read here"):
        fetch_to_file(inside / "a.bin", FetchPolicy(allow_files=False))


def test_what_is_where_nothing_may_be_read_is_not_said(tmp_path: Path) -> None:
    """A missing file is asked for where prompt and picture may have changed places."""
    swapped = Request(images=str(tmp_path / "missing"), prompt="there.png")
    with pytest.raises(InvalidImage, match="changed places"):
        check_types(swapped, FetchPolicy())
    for policy in (
        FetchPolicy(allow_files=False),
        FetchPolicy(directories=[tmp_path / "other"]),
    ):
        check_types(swapped, policy)


def test_files_and_data_uris_have_the_same_limit(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(BODY)
    small = FetchPolicy(max_bytes=len(BODY) - 1)
    uri = "data:image/png;base64," + base64.b64encode(BODY).decode()
    for source in (tmp_path / "a.bin", uri):
        assert fetch(source, FetchPolicy(max_bytes=len(BODY))).data == BODY
        with pytest.raises(Unreadable, match="9,999"):
            fetch(source, small)


def test_a_data_uri_may_have_line_breaks() -> None:
    broken = base64.encodebytes(BODY).decode()
    assert (
        fetch(f"DATA:application/octet-stream;base64,{broken}", FetchPolicy()).data
        == BODY
    )


def test_a_picture_that_was_fetched_is_called_by_its_name() -> None:
    with pytest.raises(InvalidImage, match=r"^far\.png is not a picture"):
        load_image(Fetched("far.png", b"nothing"))


# Pictures that cost more than they show
# ---------------------------------------------------------------------------------------------------------------------


def test_only_formats_that_start_no_other_program(tmp_path: Path) -> None:
    path = tmp_path / "ghost.jpg"
    path.write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with Image.open(path) as picture:  # Pillow would
        assert picture.format == "EPS"
    with pytest.raises(InvalidImage, match="PostScript, which is not read here"):
        load_image(path)


@pytest.mark.parametrize("size", [(1, 70_000), (70_000, 1)])
def test_a_picture_with_a_very_long_side(size: tuple[int, int]) -> None:
    buffer = BytesIO()
    Image.new("1", size).save(buffer, "PNG")
    with pytest.raises(InvalidImage, match="a side may have 65,535 at most"):
        load_image(buffer.getvalue())


def test_a_playlist_is_no_video(tmp_path: Path) -> None:
    """FFmpeg would open what it names."""
    path = tmp_path / "list.mp4"
    path.write_text(
        "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n/etc/passwd\n#EXT-X-ENDLIST\n"
    )
    with pytest.raises(InvalidVideo, match="playlists are not followed"):
        load_video(path)


def test_temporary_files_go_with_what_needed_them(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = fetch_to_file(f"{site}/good", HERE)
    assert held.path is not None
    assert held.path.read_bytes() == BODY
    assert len(list(tmp_path.iterdir())) == 1
    del held
    with pytest.raises(Unreadable):
        fetch_to_file(f"{site}/short", HERE)
    with pytest.raises(InvalidVideo):
        load_video(BODY)
    assert list(tmp_path.iterdir()) == []


def test_a_password_is_not_shown(site: str) -> None:
    url = site.replace("http://", "http://me:secret@") + "/gone"
    with pytest.raises(Unreadable) as found:
        fetch(url, HERE)
    assert "secret" not in str(found.value) and "//...@127.0.0.1" in str(found.value)
