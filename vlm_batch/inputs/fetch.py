"""Bytes from files, URLs and data URIs, within ``FetchPolicy``. Only this module opens paths."""

from __future__ import annotations

import base64
import io
import os
import re
import stat
import tempfile
import threading
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vlm_batch.errors import printable
from vlm_batch.types import FetchPolicy

#: Bytes read at a time; the limits are checked between two reads.
BLOCK_BYTES = 1 << 18
#: Most characters of a source in a message.
SHOWN_CHARACTERS = 200
#: Longer texts are no paths (Linux's PATH_MAX).
MAX_PATH_CHARACTERS = 4096
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")
#: base64's characters for URLs, as the usual ones.
_OF_URLS = str.maketrans("-_", "+/")
#: A name and a password in a URL.
_SECRET = re.compile(r"(?<=:)//[^/?#\s]*@")


class Unreadable(Exception):
    """A source could not be read; ``advice`` names the deciding setting."""

    def __init__(self, reason: str, setting: str = "") -> None:
        self.reason = reason
        self.advice = f" (FetchPolicy.{setting})" if setting else ""
        super().__init__(reason + self.advice)


class OperationCancelled(Exception):
    """The request was cancelled while loading."""


class Cancelled:
    """Cancellation flag that any thread may set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._calls: list[Callable[[], None]] = []

    def set(self) -> None:
        """Ask the work to stop; interrupt its waits."""
        with self._lock:
            self._is_set, calls, self._calls = True, self._calls, []
        for call in calls:
            call()

    def check(self) -> None:
        if self._is_set:
            raise OperationCancelled

    def when_set(self, call: Callable[[], None]) -> None:
        """Call ``call`` once the flag is set."""
        with self._lock:
            if not self._is_set:
                self._calls.append(call)
                return
        call()

    def forget(self, call: Callable[[], None]) -> None:
        with self._lock, suppress(ValueError):
            self._calls.remove(call)

    @contextmanager
    def interrupting(self, call: Callable[[], None]) -> Iterator[None]:
        self.when_set(call)
        try:
            yield
        finally:
            self.forget(call)


#: The flag of what nobody cancels.
NEVER = Cancelled()
#: What may be read where nobody says.
USUAL = FetchPolicy()


@dataclass(frozen=True)
class Fetched:
    """A source that was read, with its name for messages."""

    name: str
    data: bytes = field(default=b"", repr=False)
    path: Path | None = None
    # a temporary file, deleted once nothing refers to it
    owner: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class RecalledUri:
    """A data URI whose picture was decoded before."""

    uri: str = field(repr=False)
    size: tuple[int, int]
    content: bytes


def shown(source: str | Path) -> str:
    """Shorten a path or URL for messages, without passwords."""
    text = str(source)
    if is_data_uri(text):
        return "the data URI"
    text = _SECRET.sub("//...@", text)
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[: SHOWN_CHARACTERS // 2]}... ({len(text):,} characters)"
    return printable(text if text.strip() else repr(text))


def name_medium(source: Any, noun: str) -> str:
    """Name a medium for messages: its address, or how it was given."""
    if isinstance(source, Fetched):
        return source.name
    if isinstance(source, RecalledUri):
        source = source.uri
    if isinstance(source, (str, Path)):
        return shown(source)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return f"the {noun} given as bytes"
    return f"the {noun} given as {type(source).__name__}"


def contents(source: Any) -> Any:
    """Return the bytes of a source that was read, and any other source as it is."""
    return source.data if isinstance(source, Fetched) else source


def is_data_uri(source: Any) -> bool:
    return isinstance(source, str) and source[:5].lower() == "data:"


def is_url(source: Any) -> bool:
    if not isinstance(source, str):
        return False
    return source[:8].lower().startswith(("http://", "https://"))


def is_address(source: Any) -> bool:
    """Return whether a source is a URL or a data URI, and so no path."""
    return is_url(source) or is_data_uri(source)


def fetch(
    source: str | Path, policy: FetchPolicy, cancelled: Cancelled = NEVER
) -> Fetched:
    """Read a source into memory. Raises Unreadable or OperationCancelled."""
    buffer = io.BytesIO()
    _read_into(source, policy, cancelled, buffer.write)
    return Fetched(shown(source), buffer.getvalue())


def fetch_to_file(
    source: str | Path, policy: FetchPolicy, cancelled: Cancelled = NEVER
) -> Fetched:
    """Return a video's file, temporary unless local.

    A local file's first byte is read, to notice a hanging drive.
    """
    if not is_address(source):
        path = local_path(source, policy)
        with _opened(path, shown(source)) as file:
            file.read(1)
        return Fetched(shown(source), path=path)
    temporary = _TemporaryFile()
    with open(temporary.path, "wb") as opened:
        _read_into(source, policy, cancelled, opened.write)
    return Fetched(shown(source), path=temporary.path, owner=temporary)


def file_of_bytes(data: bytes, name: str) -> Fetched:
    temporary = _TemporaryFile()
    temporary.path.write_bytes(data)
    return Fetched(name, path=temporary.path, owner=temporary)


class _TemporaryFile:
    """An empty file, deleted with this object."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="vlm-batch-")
        os.close(handle)
        self.path = Path(name)
        weakref.finalize(self, self.path.unlink, missing_ok=True)


def _read_into(
    source: str | Path,
    policy: FetchPolicy,
    cancelled: Cancelled,
    write: Callable[[bytes], Any],
) -> None:
    if is_data_uri(source):
        write(_of_data_uri(str(source), policy))
    elif is_url(source):
        # with libraries that take long to import
        from vlm_batch.inputs.download import Download

        Download(str(source), policy, cancelled).read(write)
    else:
        _copy_file(local_path(source, policy), shown(source), policy, cancelled, write)


def _copy_file(
    path: Path,
    name: str,
    policy: FetchPolicy,
    cancelled: Cancelled,
    write: Callable[[bytes], Any],
) -> None:
    with _opened(path, name) as file:
        left = os.fstat(file.fileno()).st_size
        if left > policy.max_bytes:
            raise Unreadable(
                f"{name} has {left:,} bytes; at most {policy.max_bytes:,} are read",
                "max_bytes",
            )
        # what is appended meanwhile is left out; of a file that says 0, as those of /proc, the first byte is read
        block = file.read(min(BLOCK_BYTES, max(left, 1)))
        while block:
            cancelled.check()
            write(block)
            left -= len(block)
            block = file.read(min(BLOCK_BYTES, max(left, 0)))


def _of_data_uri(uri: str, policy: FetchPolicy) -> bytes:
    head, _, data = uri.partition(",")
    if not data or head.lower().rpartition(";")[2].strip() != "base64":
        raise Unreadable(
            "the data URI is malformed: data:image/...;base64,... is expected"
        )
    if len(data) // 4 * 3 > policy.max_bytes + 2:
        raise Unreadable(
            f"the data URI holds more than {policy.max_bytes:,} bytes", "max_bytes"
        )
    try:
        return of_base64(data)
    except ValueError as error:
        raise Unreadable(f"the data URI is not base64: {error}") from error


def of_base64(text: str) -> bytes:
    """Return the bytes of base64, also broken into lines, of the alphabet for URLs, or without its padding.

    Raises ValueError.
    """
    with suppress(ValueError):
        return base64.b64decode(text, validate=True)
    plain = "".join(text.split()).translate(_OF_URLS).rstrip("=")
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)


# Files
# ---------------------------------------------------------------------------------------------------------------------


def local_path(source: str | Path, policy: FetchPolicy) -> Path:
    """Return a text's path, if the policy allows it."""
    text, name = str(source), shown(source)
    if not policy.allow_files:
        raise Unreadable(
            f"{name} is a local path, and none may be read here", "allow_files"
        )
    if len(text) > MAX_PATH_CHARACTERS:
        raise Unreadable(
            f"{name} is no path; pictures in base64 go as data:image/png;base64,..."
        )
    text = _without_scheme(text, name)
    try:
        path = Path(text).expanduser()
        if not policy.directories:
            return path
        roots = [Path(root).expanduser().resolve() for root in policy.directories]
        path = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        # no such user, a loop of links, a null character
        raise Unreadable(f"{name} is no path: {said(error)}") from error
    if not any(map(path.is_relative_to, roots)):
        raise Unreadable(f"{name} is not in a folder that may be read", "directories")
    return path


def _without_scheme(text: str, name: str) -> str:
    """Return the path of a file URL, or the text itself."""
    scheme = _SCHEME.match(text)
    if scheme is None:
        return text
    if scheme[1].lower() != "file":
        raise Unreadable(
            f"{name} cannot be fetched: {scheme[1]} URLs are not read; http, https, data and file are"
        )
    return urllib.request.url2pathname(urlsplit(text).path)


@contextmanager
def _opened(path: Path, name: str) -> Iterator[io.BufferedReader]:
    """Open a regular file; refuse pipes at once."""
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
        raise Unreadable(f"{name} cannot be read: {said(error)}") from error


def said(error: BaseException) -> str:
    """Say an exception's reason in one short line."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text[:SHOWN_CHARACTERS] or type(error).__name__
