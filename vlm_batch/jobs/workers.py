"""Rows handed to Ray actors that may die: every row is answered once, and a row that kills its worker fails alone.

Ray restarts the actors. It does not ask rows again itself: rows that were beside one that kills would run out of attempts.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlm_batch.errors import VLMBatchError
from vlm_batch.types import Request, Result, failed_result

#: Deaths of a worker with no answer of its between them, after which it is given up.
MAX_DEATHS = 5
#: Deaths under a row after which it is asked with no other beside it: if the worker dies then, it was the row.
ALONE_FROM = 2
#: Seconds without any news after which it is said what is waited for.
PATIENCE = 30.0
#: Most characters of Ray's own account of a death.
_WHY_CHARACTERS = 300


class NoWorkers(VLMBatchError):
    """Every worker is gone for good; the message says why the last one is."""


@dataclass(eq=False)
class _Row:
    """A request under way, and how many workers died under it."""

    request: Request
    deaths: int = 0


@dataclass(eq=False)
class _Worker:
    """An actor with the rows that it was asked, by Ray's references. ``loading`` is a reference, too, until it is ready."""

    actor: Any
    loading: Any
    where: str = ""
    asked: dict[Any, _Row] = field(default_factory=dict)
    deaths: int = 0  # since its last answer
    #: It takes no new rows, and is asked the suspected ones, one at a time.
    is_apart: bool = False


class Workers:
    """A batcher whose rows are answered by Ray actors, ``room`` at a time each; ``say`` is told what happens to them.

    An actor's ``load(*model)`` says where it runs, or raises what no restart would mend; ``ask(request)`` gives a result. Each
    row is with one actor at a time. When that dies, the row is asked again; with its second death it is asked with no other
    row beside it, and the third one is its own error.
    """

    def __init__(
        self,
        ray: Any,
        actors: Iterable[Any],
        model: Sequence[Any],
        room: int,
        say: Callable[[str], None],
        needs: str = "nothing",
    ) -> None:
        self._ray = ray
        self._model = model
        self._room = room
        self._say = say
        self._needs = needs
        self._workers = [_Worker(actor, self._load(actor)) for actor in actors]
        self._tickets = 0
        self._last_words = ""
        self._begin(())

    def _begin(self, requests: Iterable[Request]) -> None:
        self._source, self._is_open = iter(requests), True
        self._again: deque[_Row] = deque()  # of dead workers
        self._alone: deque[_Row] = deque()  # suspected of their deaths

    def wait_for_one(self) -> None:
        """Wait until a worker is ready. Raises NoWorkers if none can be."""
        while all(worker.loading is not None for worker in self._workers):
            self._news()

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results as they end; ``requests`` are read when a worker has room. Leaving the loop cancels the rest.

        Raises NoWorkers when no worker is left, after the results that there are.
        """
        self._begin(requests)
        try:
            while True:
                yield from self._hand_out()
                if not (self._is_open or self._again or self._alone or any(w.asked for w in self._workers)):
                    return
                yield from self._news()
        finally:
            for worker in self._workers:
                for ref in worker.asked:
                    with contextlib.suppress(Exception):  # ended or dead meanwhile
                        self._ray.cancel(ref)
                worker.asked, worker.is_apart = {}, False

    def close(self) -> None:
        """End the actors."""
        while self._workers:
            self._end(self._workers[0])

    # ---- handing out ----

    def _hand_out(self) -> Iterator[Result]:
        """Fill the room that there is, of the worker with the fewest rows first. Gives the ends of rows that cannot be sent."""
        ready = [worker for worker in self._workers if worker.loading is None]
        if self._alone and ready and not any(worker.is_apart for worker in ready):
            min(ready, key=lambda worker: len(worker.asked)).is_apart = True
        for worker in ready:
            if worker.is_apart and not worker.asked:
                if self._alone:
                    yield from self._send(worker, self._alone.popleft())
                worker.is_apart = bool(worker.asked or self._alone)
        while free := [worker for worker in ready if len(worker.asked) < self._room and not worker.is_apart]:
            row = self._next()
            if row is None:
                return
            yield from self._send(min(free, key=lambda worker: len(worker.asked)), row)

    def _next(self) -> _Row | None:
        """The next row that may be asked beside others."""
        if self._again:
            return self._again.popleft()
        request = next(self._source, None) if self._is_open else None
        self._is_open = request is not None
        if request is None:
            return None
        if request.request_id is None:  # the workers' own would be alike
            request = replace(request, request_id=f"request-{self._tickets}")
            self._tickets += 1
        return _Row(request)

    def _send(self, worker: _Worker, row: _Row) -> Iterator[Result]:
        try:
            worker.asked[worker.actor.ask.remote(row.request)] = row
        except Exception as error:  # what cannot be pickled, or is too large
            yield failed_result(row.request.request_id or "", error)

    # ---- taking in ----

    def _news(self) -> list[Result]:
        """The results that came, waited for, none after a while. All is noted before anybody is told: who reads may stop."""
        if not self._workers:
            raise NoWorkers(f"no worker is left: {self._last_words}")
        owners = {ref: worker for worker in self._workers for ref in worker.asked}
        owners |= {worker.loading: worker for worker in self._workers if worker.loading is not None}
        ready, _ = self._ray.wait(list(owners), num_returns=1, timeout=PATIENCE)
        if ready:  # all that there is
            ready, _ = self._ray.wait(list(owners), num_returns=len(owners), timeout=0)
        elif loading := sum(worker.loading is not None for worker in self._workers):
            free = self._ray.available_resources()
            there = f"{free.get('GPU', 0):g} GPUs, {free.get('CPU', 0):g} CPUs"
            self._say(f"waiting for {loading} workers to start ({self._needs} each); free in the cluster: {there}")
        results: list[Result] = []
        deaths: dict[_Worker, Exception] = {}
        for ref in ready:
            worker = owners[ref]
            try:
                value = self._ray.get(ref)
            except self._ray.exceptions.RayTaskError as error:  # raised by the call, and its worker lives
                if ref is worker.loading:
                    deaths[worker] = error
                else:
                    results.append(failed_result(worker.asked.pop(ref).request.request_id or "", error))
            except self._ray.exceptions.RayError as error:
                deaths[worker] = error
            else:
                worker.deaths = 0 if ref in worker.asked else worker.deaths
                if worker.asked.pop(ref, None) is not None:
                    results.append(value)
                else:
                    worker.loading, worker.where = None, value
                    num_ready = sum(one.loading is None for one in self._workers)
                    self._say(f"a worker is ready on {value} ({num_ready} of {len(self._workers)})")
        for worker, error in deaths.items():
            results += self._bury(worker, error)
        return results

    def _bury(self, worker: _Worker, error: Exception) -> list[Result]:
        """Put a dead worker's rows back, and have it load again unless it is given up. Returns the end of a row that killed."""
        why = why_of(error)
        rows = list(worker.asked.values())
        ended: list[Result] = []
        for row in rows:
            row.deaths += 1
            if worker.is_apart and len(rows) == 1 and row.deaths > ALONE_FROM:
                died = f"WorkerDied: {row.deaths} workers died while they answered this row, the last one with no other: {why}"
                ended.append(Result(request_id=row.request.request_id or "", finish_reason="error", error=died))
            else:
                (self._alone if row.deaths >= ALONE_FROM else self._again).append(row)
        said = f"a worker{f' on {worker.where}' if worker.where else ''} is gone: {why}"
        if len(rows) > len(ended):
            said += f"; {len(rows) - len(ended)} rows that it had are asked again"
        is_loading = worker.loading is not None  # Ray has tried that as often as it pays
        worker.asked, worker.is_apart, worker.deaths = {}, False, worker.deaths + 1
        if is_loading or worker.deaths >= MAX_DEATHS:
            self._last_words = why
            self._end(worker)
            said += f"; no other one is started in its place ({len(self._workers)} are left)"
        else:
            worker.loading = self._load(worker.actor)
        self._say(said)
        return ended

    def _load(self, actor: Any) -> Any:
        """Have an actor load the model; Ray asks again when it dies of it, and has restarted it."""
        return actor.load.options(max_task_retries=MAX_DEATHS - 1).remote(*self._model)

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        with contextlib.suppress(Exception):  # dead already, or the cluster is
            self._ray.kill(worker.actor, no_restart=True)


def why_of(error: BaseException) -> str:
    """Ray's account of an error, in one line of bearable length; of what an actor raised, that."""
    cause = vars(error).get("cause")
    if isinstance(cause, Exception):
        return str(cause)
    _, _, why = str(error).rpartition("The actor is dead because ")
    why = " ".join(why.split())
    return f"{type(error).__name__}: {why[:_WHY_CHARACTERS]}{'...' if len(why) > _WHY_CHARACTERS else ''}"
