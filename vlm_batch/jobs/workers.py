"""Rows for Ray actors that may die: a row that kills workers fails alone.

Ray does not retry a restarted actor's rows: neighbours of a killing row would lose attempts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlm_batch.errors import VLMBatchError, describe
from vlm_batch.types import Request, Result

#: Deaths without an answer between them after which a worker is given up.
MAX_DEATHS = 5
#: Workers that a row may kill, the last one alone, before it fails.
MAX_ROW_DEATHS = 3
#: Seconds without news after which ``say`` is told what is missing.
PATIENCE = 30.0


class NoWorkers(VLMBatchError):
    """Every worker is gone for good."""


@dataclass(eq=False)
class _Row:
    request: Request
    deaths: int = 0  # of workers under it

    @property
    def is_suspected(self) -> bool:
        """Whether the row is asked alone: a worker's death is then its fault."""
        return self.deaths == MAX_ROW_DEATHS - 1

    def failed(self, error: str) -> Result:
        return Result(
            request_id=self.request.request_id or "", finish_reason="error", error=error
        )


class Workers:
    """Ray actors that answer ``room`` rows each at a time; ``say`` gets their news.

    A row is asked again after its worker's first death, alone after the second; the third is its error.
    """

    def __init__(
        self,
        ray: Any,
        actors: Iterable[Any],
        model: Sequence[Any],
        room: int,
        say: Callable[[str], None],
    ):
        self._ray, self._model, self._room, self._say = ray, model, room, say
        self._ready: list[Any] = []
        self._loading: dict[Any, Any] = {}  # actors by Ray's references, as the next
        self._asked: dict[Any, tuple[Any, _Row]] = {}
        self._deaths: Counter[Any] = Counter()  # of each actor since its last answer
        self._again: deque[_Row] = deque()
        self._suspected: deque[_Row] = deque()
        self._is_open = False  # there may be more rows
        self._numbers = itertools.count()
        self._last_words = ""
        for actor in actors:
            self._load(actor)

    def wait_for_one(self) -> None:
        while not self._ready:
            self._news()

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Yield results as rows end; leaving cancels the rest."""
        rows, self._is_open = map(_Row, requests), True
        try:
            while True:
                yield from self._hand_out(rows)
                if not self._has_rows():
                    return
                yield from self._news()
        finally:
            for ref in self._asked:
                with contextlib.suppress(Exception):  # ended or dead meanwhile
                    self._ray.cancel(ref)
            self._asked.clear()
            self._again.clear()
            self._suspected.clear()

    def _has_rows(self) -> bool:
        """Whether a row is asked, is to be asked, or may still come."""
        held = (self._asked, self._again, self._suspected)
        return self._is_open or any(held)

    def close(self) -> None:
        for actor in [*self._ready, *self._loading.values()]:
            with contextlib.suppress(Exception):  # dead already, or the cluster is
                self._ray.kill(actor, no_restart=True)

    def _hand_out(self, rows: Iterator[_Row]) -> list[Result]:
        """Fill the workers' room; return errors of unsendable rows."""
        count = Counter(actor for actor, _ in self._asked.values())
        failed = self._fill(rows, count)
        for actor in self._ready:
            if self._suspected and not count[actor]:
                failed += self._ask(actor, self._suspected.popleft(), count)
        return failed

    def _fill(self, rows: Iterator[_Row], count: Counter[Any]) -> list[Result]:
        """Send rows to the workers that have none of their own suspected ones; ``count`` has each one's rows."""
        failed: list[Result] = []
        taken = {actor for actor, row in self._asked.values() if row.is_suspected}
        ready = list(itertools.filterfalse(taken.__contains__, self._ready))
        while ready:
            actor = min(ready, key=count.__getitem__)
            if count[actor] >= self._room:
                break
            row = self._next_row(rows)
            if row is None:
                break
            failed += self._ask(actor, row, count)
        return failed

    def _next_row(self, rows: Iterator[_Row]) -> _Row | None:
        if self._again:
            return self._again.popleft()
        row = next(rows, None)
        if row is None:
            self._is_open = False
        return row

    def _ask(self, actor: Any, row: _Row, count: Counter[Any]) -> list[Result]:
        """Send a row to a worker, and count it; return its error if it cannot be sent."""
        if row.request.request_id is None:  # the workers' own would be alike
            name = f"request-{next(self._numbers)}"
            row.request = replace(row.request, request_id=name)
        try:
            self._asked[actor.ask.remote(row.request)] = actor, row
        except Exception as error:  # what cannot be pickled, or is too large
            return [row.failed(describe(error))]
        count[actor] += 1
        return []

    def _news(self) -> list[Result]:
        """Wait for news, and record all of it."""
        if not self._ready and not self._loading:
            raise NoWorkers(f"no worker is left: {self._last_words}")
        refs = [*self._loading, *self._asked]
        ready, _ = self._ray.wait(refs, num_returns=1, timeout=PATIENCE)
        if not ready:
            self._say_what_is_missing()
            return []
        every, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        return list(filter(None, map(self._taken, every)))

    def _say_what_is_missing(self) -> None:
        if not self._loading:
            return
        resources = self._ray.available_resources()
        free = {name: resources[name] for name in resources if name in ("GPU", "CPU")}
        self._say(
            f"waiting for {len(self._loading)} workers to start; free in the cluster: {free}"
        )

    def _taken(self, ref: Any) -> Result | None:
        """Record an outcome; return its row's result, if ended."""
        if ref in self._loading:
            self._take_worker(ref, self._loading.pop(ref))
            return None
        actor, row = self._asked.pop(ref)
        try:
            value: Result = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            # raised by the call, and its worker lives
            return row.failed(describe(error))
        except self._ray.exceptions.RayError as error:
            return self._died(actor, row, why_of(error))
        self._deaths[actor] = 0
        return value

    def _take_worker(self, ref: Any, actor: Any) -> None:
        """Record that a worker has loaded its model, or never will."""
        try:
            where = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            # Ray has had it load as often as it pays
            self._give_up(actor, why_of(error))
            return
        self._ready.append(actor)
        self._say(f"a worker is ready on {where}")

    def _died(self, actor: Any, row: _Row, why: str) -> Result | None:
        """Requeue a dead worker's row, and reload the worker."""
        if actor in self._ready:
            self._ready.remove(actor)
            self._deaths[actor] += not row.is_suspected  # that death is the row's own
            self._replace(actor, why)
        row.deaths += 1
        if row.deaths == MAX_ROW_DEATHS:
            died = f"{row.deaths} workers died while they answered this row, the last one with no other: {why}"
            return row.failed(f"WorkerDied: {died}")
        waiting = self._suspected if row.is_suspected else self._again
        waiting.append(row)
        return None

    def _replace(self, actor: Any, why: str) -> None:
        """Have a dead worker load its model again, unless it dies too often."""
        if self._deaths[actor] >= MAX_DEATHS:
            self._give_up(actor, why)
            return
        self._say(f"a worker is gone: {why}; the rows that it had are asked again")
        self._load(actor)

    def _load(self, actor: Any) -> None:
        self._loading[
            actor.load.options(max_task_retries=MAX_DEATHS - 1).remote(*self._model)
        ] = actor

    def _give_up(self, actor: Any, why: str) -> None:
        self._last_words = why
        with contextlib.suppress(Exception):
            self._ray.kill(actor, no_restart=True)
        left = len(self._ready) + len(self._loading)
        self._say(
            f"a worker is gone: {why}; no other one is started in its place ({left} are left)"
        )


def why_of(error: BaseException) -> str:
    """Return Ray's account of an error in one line."""
    cause = vars(error).get("cause")
    if isinstance(cause, Exception):
        return str(cause)
    _, _, why = str(error).rpartition("The actor is dead because ")
    return f"{type(error).__name__}: {' '.join(why.split())[:300]}"
