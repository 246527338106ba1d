"""Requests beyond the queue, held on their connections until there is a place for them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

Place = TypeVar("Place")

#: Seconds between looks for places, beside those when a request ends.
TICK = 0.05


class Burst(Generic[Place]):
    """Held requests by client, in order of arrival.

    A place is for the client that has the fewest. When more than ``most`` requests are open, the client that holds the
    most gives up its latest, if it has at least two more than who came.
    """

    def __init__(
        self,
        take: Callable[[int], Place | None],
        give_back: Callable[[Place], None],
        num_open: Callable[[], Counter[int]],
        refused: Callable[[], Exception],
    ) -> None:
        """Hold nothing yet.

        Args:
            take: Returns a place for a client, or None where there is none.
            give_back: Takes a place back whose request has left.
            num_open: Counts the places that clients have.
            refused: Makes the exception of who is sent away.
        """
        self.most = 0
        self._take = take
        self._give_back = give_back
        self._num_open = num_open
        self._refused = refused
        self._lines: dict[int, deque[asyncio.Future[Place]]] = {}
        self._ticking: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        return sum(map(len, self._lines.values()))

    def holds(self, client: int) -> bool:
        """Return whether a client's request waits."""
        return client in self._lines

    async def wait(self, client: int) -> Place:
        """Return a place when it is this request's turn. Raises what ``refused`` makes if sockets end."""
        self._make_room(client)
        future: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(future)
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        try:
            return await future
        except asyncio.CancelledError:
            self._forget(client, future)
            if not future.cancelled() and future.exception() is None:
                self._give_back(future.result())
            raise

    def serve(self) -> None:
        """Give places to those whose turn it is, as long as there are any."""
        if not self._lines:
            return
        placed = self._num_open()
        full: set[int] = set()
        while left := [client for client in self._lines if client not in full]:
            client = min(left, key=lambda one: placed[one])
            future = self._lines[client][0]
            if future.done():  # its client has left
                self._forget(client, future)
                continue
            place = self._take(client)
            if place is None:
                full.add(client)
                continue
            placed[client] += 1
            self._forget(client, future)
            future.set_result(place)

    def end(self, error: Callable[[], Exception]) -> None:
        """Answer everybody who waits."""
        for client, line in list(self._lines.items()):
            for future in list(line):
                self._refuse(client, future, error())

    def _make_room(self, client: int) -> None:
        placed = self._num_open()
        if self.size + placed.total() < self.most:
            return
        busiest = max(
            self._lines,
            key=lambda one: len(self._lines[one]) + placed[one],
            default=client,
        )
        has = placed[client] + len(self._lines.get(client, ()))
        if busiest == client or placed[busiest] + len(self._lines[busiest]) < has + 2:
            raise self._refused()
        self._refuse(busiest, self._lines[busiest][-1], self._refused())

    def _refuse(
        self, client: int, future: asyncio.Future[Place], error: Exception
    ) -> None:
        self._forget(client, future)
        if not future.done():
            future.set_exception(error)

    def _forget(self, client: int, future: asyncio.Future[Place]) -> None:
        """Take a request out of its line, if it is there."""
        line = self._lines.get(client)
        if line is None or future not in line:
            return
        line.remove(future)
        if not line:
            del self._lines[client]

    async def _tick(self) -> None:
        try:
            while self._lines:
                await asyncio.sleep(TICK)
                self.serve()
        finally:
            self._ticking = None
