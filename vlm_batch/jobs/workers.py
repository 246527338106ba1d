"""Rows handed out to workers that may die: every row is answered once, and a row that kills its worker fails alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from vlm_batch.errors import VLMBatchError
from vlm_batch.types import Request, Result

#: Deaths of a worker with no answer of its place between them, after which no other one is started there.
MAX_DEATHS = 5
#: Deaths under a row after which it is asked with no other beside it: if the worker dies then, it was the row.
ALONE_FROM = 2


class NoWorkers(VLMBatchError):
    """Every worker is gone for good; the message says why the last one is."""


@dataclass(frozen=True)
class Started:
    """A worker has loaded its model, and takes ``room`` rows at a time."""

    worker: int
    room: int
    where: str


@dataclass(frozen=True)
class Answered:
    """A row's result, failures among them."""

    worker: int
    ticket: int
    result: Result


@dataclass(frozen=True)
class Died:
    """A worker is gone with all that it was asked; ``for_good`` if another one in its place would end alike."""

    worker: int
    why: str
    for_good: bool = False


Event: TypeAlias = Started | Answered | Died


class Fleet(Protocol):
    """Starts workers, sends them rows and tells what comes of it. Numbers of workers are never used again."""

    def start(self) -> int:
        """Begin to start a worker. ``Started`` or ``Died`` follows."""
        ...

    def send(self, worker: int, ticket: int, request: Request) -> None: ...
    def wait(self) -> list[Event]:
        """The news since the last call, waited for; nothing after a while without any. A worker that ``Died`` has no more."""
        ...

    def cancel(self, ticket: int) -> None:
        """Nobody waits for this row any more."""
        ...


@dataclass
class _Row:
    """A request under way, and how many workers died under it."""

    request: Request
    deaths: int = 0


@dataclass
class _Place:
    """Where one worker is at a time. ``room`` is 0 until it has started; ``deaths`` counts since the last answer."""

    worker: int
    room: int = 0
    where: str = ""
    asked: dict[int, _Row] = field(default_factory=dict)
    deaths: int = 0
    #: It takes no new rows, and is asked the suspected ones, one at a time.
    is_apart: bool = False


@dataclass
class _Waiting:
    """Rows that are to be asked: of dead workers, suspected of their deaths, and those that nobody has had yet."""

    source: Iterator[Request]
    again: deque[_Row] = field(default_factory=deque)
    alone: deque[_Row] = field(default_factory=deque)
    is_open: bool = True

    def next(self) -> _Row | None:
        """The next row that may be asked beside others."""
        if self.again:
            return self.again.popleft()
        if self.is_open:
            request = next(self.source, None)
            if request is not None:
                return _Row(request)
            self.is_open = False
        return None


class Dispatcher:
    """A batcher whose rows are answered by a fleet of ``count`` workers; ``say`` is told what happens to them.

    Each row is with one worker at a time. When that dies, the row is asked again; with its second death it is asked with
    no other row beside it, and the third one is its own error. A worker that dies is replaced, but not for ever.
    """

    def __init__(self, fleet: Fleet, count: int, say: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._say = say
        self._places = [_Place(fleet.start()) for _ in range(count)]
        self._tickets = 0
        self._last_words = ""

    def wait_for_one(self) -> None:
        """Wait until a worker has started. Raises NoWorkers if none can."""
        while not any(place.room for place in self._places):
            self._check_any()
            self._take_all(self._fleet.wait(), _Waiting(iter(())))

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results as they end; ``requests`` are read when a worker has room. Leaving the loop cancels the rest.

        Raises NoWorkers when no worker is left, after the results that there are.
        """
        waiting = _Waiting(iter(requests))
        try:
            while True:
                self._hand_out(waiting)
                if not (waiting.is_open or waiting.again or waiting.alone or any(p.asked for p in self._places)):
                    return
                self._check_any()
                yield from self._take_all(self._fleet.wait(), waiting)
        finally:
            for place in self._places:
                for ticket in place.asked:
                    self._fleet.cancel(ticket)
                place.asked.clear()
                place.is_apart = False

    def _check_any(self) -> None:
        if not self._places:
            raise NoWorkers(f"no worker is left: {self._last_words}")

    # ---- handing out ----

    def _hand_out(self, waiting: _Waiting) -> None:
        """Fill the workers' room, the one with the fewest rows first."""
        self._set_apart(waiting)
        while True:
            free = [place for place in self._places if len(place.asked) < place.room and not place.is_apart]
            row = waiting.next() if free else None
            if row is None:
                return
            self._send(min(free, key=lambda place: len(place.asked)), row)

    def _set_apart(self, waiting: _Waiting) -> None:
        """Have one worker finish what it has, and then ask it the suspected rows, one at a time."""
        apart = next((place for place in self._places if place.is_apart), None)
        if apart is None and waiting.alone:
            ready = [place for place in self._places if place.room]
            apart = min(ready, key=lambda place: len(place.asked), default=None)
        if apart is None:
            return
        apart.is_apart = bool(waiting.alone or apart.asked)
        if waiting.alone and not apart.asked:
            self._send(apart, waiting.alone.popleft())

    def _send(self, place: _Place, row: _Row) -> None:
        ticket, self._tickets = self._tickets, self._tickets + 1
        if row.request.request_id is None:  # the workers' own would be alike
            row.request = replace(row.request, request_id=f"request-{ticket}")
        place.asked[ticket] = row
        self._fleet.send(place.worker, ticket, row.request)

    # ---- taking in ----

    def _take_all(self, events: Iterable[Event], waiting: _Waiting) -> list[Result]:
        """Note what has happened, all of it before anybody is told: whoever reads the results may stop."""
        results: list[Result] = []
        for event in events:
            place = next((place for place in self._places if place.worker == event.worker), None)
            if place is None:
                continue
            if isinstance(event, Started):
                place.room, place.where = event.room, event.where
                self._say(f"a worker is ready on {event.where} ({self._num_ready()} of {len(self._places)})")
            elif isinstance(event, Answered):
                if place.asked.pop(event.ticket, None) is not None:
                    place.deaths = 0
                    results.append(event.result)
            else:
                results += self._bury(place, event, waiting)
        return results

    def _bury(self, place: _Place, death: Died, waiting: _Waiting) -> list[Result]:
        """Put a dead worker's rows back, and another worker in its place. Returns the end of a row that it died of."""
        rows, was_apart = list(place.asked.values()), place.is_apart
        ended: list[Result] = []
        for row in rows:
            row.deaths += 1
            if was_apart and len(rows) == 1 and row.deaths > ALONE_FROM:
                ended.append(_killed(row, death))
            else:
                (waiting.alone if row.deaths >= ALONE_FROM else waiting.again).append(row)
        said = f"a worker{f' on {place.where}' if place.where else ''} is gone: {death.why}"
        if len(rows) > len(ended):
            said += f"; {len(rows) - len(ended)} rows that it had are asked again"
        place.asked, place.room, place.is_apart = {}, 0, False
        place.deaths += 1
        if death.for_good or place.deaths >= MAX_DEATHS:
            self._places.remove(place)
            self._last_words = death.why
            said += f"; no other one is started in its place ({len(self._places)} are left)"
        else:
            place.worker = self._fleet.start()
        self._say(said)
        return ended

    def _num_ready(self) -> int:
        return sum(place.room > 0 for place in self._places)


def _killed(row: _Row, death: Died) -> Result:
    """The end of a row under which workers die."""
    error = (
        f"WorkerDied: {row.deaths} workers died while they answered this row, the last one with no other: {death.why}"
    )
    return Result(request_id=row.request.request_id or "", finish_reason="error", error=error)
