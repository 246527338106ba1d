"""Responses that are kept for those who made them, within bounds: in memory, and on the disk if asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from vlm_batch.jobs.lines import CannotWrite
from vlm_batch.server.config import MAX_KEPT
from vlm_batch.server.errors import json_bytes
from vlm_batch.server.private import AGE, private_folder, write_private

logger = logging.getLogger("vlm_batch.server")

#: Most responses that are kept; one takes about 1 KB of memory, though it be on the disk.
MOST_RESPONSES = 100_000
#: Seconds between looks at what is over.
SWEEP_SECONDS = 60.0

Value = TypeVar("Value")


class Head(BaseModel):
    """The facts by which a response is found in a folder: the first line of its file."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: str
    owner: str
    expires_at: float
    items: list[str]


@dataclass(eq=False)
class Kept:
    """One response, and what its conversation goes on from.

    Attributes:
        owner: Whose it is.
        body: The response as its maker sees it; its status is the latest.
        items: What came in, as items.
        turns: The conversation up to the answer, which is in ``body``, as ``Talk`` has it.
        events: The stream's events in order, of one that runs in the background.
        running: What makes it, as long as it is made.
    """

    owner: str
    body: dict[str, Any]
    items: Sequence[Mapping[str, Any]] = ()
    turns: Sequence[Mapping[str, Any]] = ()
    events: list[bytes] = field(default_factory=list)
    running: asyncio.Task[None] | None = None
    size: int = 0
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return str(self.body["id"])

    @property
    def is_over(self) -> bool:
        return self.running is None

    @property
    def has_answer(self) -> bool:
        """Whether a conversation can go on from it."""
        return self.body.get("status") in ("completed", "incomplete")

    def item(self, item_id: str) -> Mapping[str, Any] | None:
        """Return an item that came in or went out."""
        for item in (*self.body["output"], *self.items):
            if item.get("id") == item_id:
                found: Mapping[str, Any] = item
                return found
        return None

    def item_ids(self) -> list[str]:
        return [str(one["id"]) for one in (*self.body["output"], *self.items)]

    def tell(self, event: bytes) -> None:
        self.events.append(event)
        self.wake()

    def cancel(self) -> None:
        """End what makes it, if it is being made."""
        if self.running is not None:
            self.running.cancel()

    def wake(self) -> None:
        """Wake those who follow."""
        self._told.set()
        self._told = asyncio.Event()

    async def follow(self, begin: int) -> AsyncGenerator[bytes]:
        """Yield events from one on, until there will be no more."""
        while True:
            told = self._told
            while begin < len(self.events):
                yield self.events[begin]
                begin += 1
            if self.is_over:
                return
            await told.wait()


@dataclass
class Place(Generic[Value]):
    """A value on a shelf."""

    owner: str
    size: int
    value: Value


class Shelf(Generic[Value]):
    """Values by id, within bounds: the one that was used longest ago, of the owner that has most bytes, goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[str, Place[Value]] = {}
        self._sizes: Counter[str] = Counter()

    def put(self, name: str, owner: str, size: int, value: Value) -> list[str]:
        """Take a value in. Returns the ids of those that made room, or its own if it alone is too large."""
        self.pop(name)
        if size > self._most:
            return [name]
        self._places[name] = Place(owner, size, value)
        self._sizes[owner] += size
        gone = []
        while self._is_full:
            gone.append(self._least_needed())
            self.pop(gone[-1])
        return gone

    def get(self, name: str, owner: str) -> Value | None:
        """Return an owner's value; another's is not there for it."""
        place = self._places.get(name)
        if place is None or place.owner != owner:
            return None
        # the last in line is the one that was used last
        self._places[name] = self._places.pop(name)
        return place.value

    def pop(self, name: str) -> None:
        """Let go of a value, if it is there."""
        place = self._places.pop(name, None)
        if place is not None:
            self._sizes[place.owner] -= place.size
            if not self._sizes[place.owner]:
                del self._sizes[place.owner]  # owners come and go

    def all(self) -> list[tuple[str, Place[Value]]]:
        """Return everything, what was used last first."""
        return list(reversed(self._places.items()))

    @property
    def _is_full(self) -> bool:
        has_too_many = len(self._places) > MOST_RESPONSES
        return has_too_many or self._sizes.total() > self._most

    def _least_needed(self) -> str:
        busiest = max(self._sizes, key=lambda owner: self._sizes[owner])
        return next(name for name, one in self._places.items() if one.owner == busiest)


class NoFolder:
    """The place of responses on the disk, where there is none."""

    def with_item(self, item_id: str, owner: str) -> str | None:
        """Return the id of an owner's response that has an item."""
        return None

    async def read(self, response_id: str, owner: str) -> Kept | None:
        """Return an owner's response; another's is not there for it, nor one that is over."""
        return None

    def write(self, kept: Kept) -> None:
        """Write a response, after what is being written."""

    def forget(self, response_id: str) -> None:
        """Delete a response, if it is there."""

    def sweep(self) -> None:
        """Delete what is over."""

    def close(self) -> None:
        """Wait until all is written."""


class KeptResponses:
    """Responses by id: in memory, and in a folder if there is one, which has those that have ended."""

    def __init__(
        self, most: int = MAX_KEPT, folder: ResponseFolder | None = None
    ) -> None:
        self._shelf: Shelf[Kept] = Shelf(most)
        self._folder = folder or NoFolder()
        # those that are made in the background, whatever room there is
        self._running: dict[str, Kept] = {}

    def hold(self, kept: Kept) -> None:
        """Have a response that is made in the background, until ``release``."""
        self._running[kept.id] = kept

    def release(self, kept: Kept) -> None:
        """Let go of a response that has ended; one without an answer can still be seen, if there is room."""
        was_held = self._running.pop(kept.id, None) is not None
        if was_held and not kept.has_answer:
            self.keep(kept)

    async def find(self, response_id: str, owner: str) -> Kept | None:
        """Return an owner's own response; another's is not there for it."""
        held = self._running.get(response_id)
        if held is not None and held.owner == owner:
            return held
        kept = self._shelf.get(response_id, owner)
        if kept is not None:
            return kept
        kept = await self._folder.read(response_id, owner)
        if kept is not None:
            self._shelf.put(response_id, owner, kept.size, kept)
        return kept

    async def item(self, item_id: str, owner: str) -> Mapping[str, Any] | None:
        """Return an item of an owner's own responses."""
        for _, place in self._shelf.all():
            kept = place.value
            if place.owner == owner and (found := kept.item(item_id)):
                return found
        response_id = self._folder.with_item(item_id, owner)
        if response_id is None:
            return None
        stored = await self.find(response_id, owner)
        return None if stored is None else stored.item(item_id)

    def keep(self, kept: Kept) -> None:
        """Keep a response, or count it anew. One that alone is more than a bound is not kept there."""
        whole = [kept.body, *kept.items, *kept.turns]
        kept.size = weight_of(whole) + sum(map(len, kept.events))
        self._shelf.put(kept.id, kept.owner, kept.size, kept)
        if kept.has_answer:
            self._folder.write(kept)

    def forget(self, kept: Kept) -> None:
        """Let go of a response, if it is there."""
        self._running.pop(kept.id, None)
        self._shelf.pop(kept.id)
        self._folder.forget(kept.id)

    async def sweep(self) -> None:
        """Delete what is over in the folder, now and then, until it is cancelled."""
        while True:
            self._folder.sweep()
            await asyncio.sleep(SWEEP_SECONDS)

    def close(self) -> None:
        """End what runs in the background, and have the folder whole."""
        for kept in self._running.values():
            kept.cancel()
        self._folder.close()


def weight_of(value: Any) -> int:
    """Return about how many bytes a JSON value takes; pictures in it are not copied, as they would be in JSON."""
    total, left = 0, [value]
    while left:
        one = left.pop()
        total += 8
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, dict):
            total += sum(map(len, one))
            left += one.values()
        elif isinstance(one, (list, tuple)):
            left += one
    return total


class ResponseFolder(NoFolder):
    """Responses that have ended, on the disk. One process has the folder at a time.

    A response is a file of two lines: what is needed to find it, then all of it. It is written beside its place, and
    renamed once it is on the disk. One thread writes and reads, so that what is read was written.
    """

    def __init__(self, folder: Path, most: int) -> None:
        """Open a folder, or make it.

        Args:
            folder: Private to this user afterwards.
            most: Bytes of all files.

        Raises:
            InvalidConfig: It cannot be written, or another server has it.
        """
        self._folder = folder
        self._lock = private_folder(folder, "--responses")
        self._heads: Shelf[Head] = Shelf(most)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="vlm-batch-responses")
        for path in folder.glob(".resp_*"):  # what a killed process was writing
            with contextlib.suppress(OSError):  # or a folder that somebody made
                path.unlink()
        files = [path for path in folder.glob("resp_*") if path.is_file()]
        by_age = sorted(files, key=lambda one: one.stat().st_mtime)
        for path in by_age:
            self._take_in(path)

    def with_item(self, item_id: str, owner: str) -> str | None:
        for name, place in self._heads.all():
            if place.owner == owner and item_id in place.value.items:
                return name
        return None

    async def read(self, response_id: str, owner: str) -> Kept | None:
        head = self._heads.get(response_id, owner)
        if head is None or head.expires_at <= time.time():
            return None
        loop = asyncio.get_running_loop()
        path = self._folder / response_id
        try:
            return await loop.run_in_executor(self._worker, _read_response, path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.error("%s cannot be read: %s", response_id, error)
            return None

    def write(self, kept: Kept) -> None:
        head = Head(
            id=kept.id,
            owner=kept.owner,
            expires_at=time.time() + AGE,
            items=kept.item_ids(),
        )
        for gone in self._heads.put(kept.id, kept.owner, kept.size, head):
            self._unlink(gone)
        if self._heads.get(kept.id, kept.owner) is not None:
            self._worker.submit(self._write, kept, head)

    def forget(self, response_id: str) -> None:
        self._heads.pop(response_id)
        self._unlink(response_id)

    def sweep(self) -> None:
        now = time.time()
        for name, place in self._heads.all():
            if place.value.expires_at <= now:
                self.forget(name)

    def close(self) -> None:
        self._worker.shutdown()
        self._lock.release()

    def _take_in(self, path: Path) -> None:
        """Take in a file of an earlier process, by its first line."""
        try:
            with open(path, "rb") as file:
                head = Head.model_validate_json(file.readline())
            size = path.stat().st_size
            if head.id != path.name:
                raise ValueError(f"it says that it is {head.id}")
        except (OSError, ValueError) as error:
            logger.error("%s cannot be read: %s", path.name, error)
            return
        for gone in self._heads.put(head.id, head.owner, size, head):
            self._unlink(gone)

    def _write(self, kept: Kept, head: Head) -> None:
        whole = {"body": kept.body, "items": kept.items, "turns": kept.turns}
        data = b"%b\n%b\n" % (head.model_dump_json().encode(), json_bytes(whole))
        try:
            write_private(self._folder / kept.id, data)
        except CannotWrite as error:
            logger.error("%s is kept in memory alone: %s", kept.id, error)

    def _unlink(self, response_id: str) -> None:
        path = self._folder / response_id
        self._worker.submit(path.unlink, missing_ok=True)


def _read_response(path: Path) -> Kept:
    with open(path, "rb") as file:
        head = Head.model_validate_json(file.readline())
        data = file.readline()
    whole = json.loads(data)
    kept = Kept(head.owner, whole["body"], whole["items"], whole["turns"])
    kept.item_ids()  # raises where somebody else has written it
    kept.size = len(data)
    return kept
