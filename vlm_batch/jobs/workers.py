"""Rows handed to Ray actors that may die: every row is answered once, and a row that kills its worker fails alone.

Ray restarts the actors. It does not ask rows again itself: rows that were beside one that kills would run out of attempts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlm_batch.errors import VLMBatchError, describe
from vlm_batch.types import Request, Result

#: Deaths of a worker with no answer of its between them, after which it is given up.
MAX_DEATHS = 5
#: Deaths of workers under a row, the last of them with no other row beside it, that are its own error.
MAX_ROW_DEATHS = 3
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

    @property
    def is_suspected(self) -> bool:
        """Whether it is asked with no other beside it: if the worker dies then, it was this row."""
        return self.deaths >= MAX_ROW_DEATHS - 1

    def failed(self, error: str) -> Result:
        return Result(request_id=self.request.request_id or "", finish_reason="error", error=error)


@dataclass(eq=False)
class _Worker:
    """An actor with the rows that it was asked, by Ray's references. ``loading`` is a reference, too, until it is ready."""

    actor: Any
    loading: Any
    where: str = ""
    asked: dict[Any, _Row] = field(default_factory=dict)
    deaths: int = 0  # since its last answer


class Workers:
    """A batcher whose rows are answered by Ray actors, ``room`` at a time each; ``say`` is told what happens to them.

    An actor's ``load(*model)`` says where it runs, or raises what no restart would mend; ``ask(request)`` gives a result. Each
    row is with one actor at a time. When that dies, the row is asked again; with its second death it is asked with no other
    row beside it, and the third one is its own error. ``needs`` says what Ray sets aside for an actor.
    """

    def __init__(
        self, ray: Any, actors: Iterable[Any], model: Sequence[Any], room: int, say: Callable[[str], None], needs: str
    ) -> None:
        self._ray, self._model, self._room, self._say, self._needs = ray, model, room, say, needs
        self._workers = [_Worker(actor, self._load(actor)) for actor in actors]
        self._numbers = itertools.count()
        self._rows: Iterator[_Row] = iter(())
        self._is_open = False  # there may be more of these
        self._again: deque[_Row] = deque()
        self._suspected: deque[_Row] = deque()
        self._last_words = ""

    def wait_for_one(self) -> None:
        """Wait until a worker is ready. Raises NoWorkers if none can be."""
        while all(worker.loading is not None for worker in self._workers):
            self._news()

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results as they end; ``requests`` are read when a worker has room. Leaving the loop cancels the rest.

        Raises NoWorkers when no worker is left, after the results that there are.
        """
        self._rows, self._is_open = map(self._numbered, requests), True
        try:
            while True:
                yield from self._hand_out()
                under_way = any(worker.asked for worker in self._workers)
                if not (self._is_open or self._again or self._suspected or under_way):
                    return
                yield from self._news()
        finally:
            self._again.clear()
            self._suspected.clear()
            for worker in self._workers:
                for ref in worker.asked:
                    with contextlib.suppress(Exception):  # ended or dead meanwhile
                        self._ray.cancel(ref)
                worker.asked = {}

    def close(self) -> None:
        """End the actors."""
        while self._workers:
            self._end(self._workers[0])

    # ---- handing out ----

    def _numbered(self, request: Request) -> _Row:
        if request.request_id is None:  # the workers' own would be alike
            request = replace(request, request_id=f"request-{next(self._numbers)}")
        return _Row(request)

    def _hand_out(self) -> Iterator[Result]:
        """Fill the workers' room, that of the idlest first. Suspected rows come last, each with a worker to itself.

        Gives the ends of rows that cannot be sent.
        """
        ready = [worker for worker in self._workers if worker.loading is None]
        shared = [worker for worker in ready if not any(row.is_suspected for row in worker.asked.values())]
        while free := [worker for worker in shared if len(worker.asked) < self._room]:
            row = self._again.popleft() if self._again else next(self._rows, None)
            if row is None:
                self._is_open = False
                break
            yield from self._send(min(free, key=lambda worker: len(worker.asked)), row)
        for worker in ready:
            if self._suspected and not worker.asked:
                yield from self._send(worker, self._suspected.popleft())

    def _send(self, worker: _Worker, row: _Row) -> Iterator[Result]:
        try:
            worker.asked[worker.actor.ask.remote(row.request)] = row
        except Exception as error:  # what cannot be pickled, or is too large
            yield row.failed(describe(error))

    # ---- taking in ----

    def _news(self) -> list[Result]:
        """The results that came, waited for, none after a while. All is noted before anybody is told: who reads may stop."""
        if not self._workers:
            raise NoWorkers(f"no worker is left: {self._last_words}")
        owners = {ref: worker for worker in self._workers for ref in (*worker.asked, worker.loading) if ref is not None}
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
            worker, is_loading = owners[ref], ref is owners[ref].loading
            try:
                value = self._ray.get(ref)
            except self._ray.exceptions.RayError as error:
                if is_loading or not isinstance(error, self._ray.exceptions.RayTaskError):
                    deaths[worker] = error
                else:  # raised by the call, and its worker lives
                    results.append(worker.asked.pop(ref).failed(describe(error)))
                continue
            if is_loading:
                worker.loading, worker.where = None, value
                num_ready = sum(one.loading is None for one in self._workers)
                self._say(f"a worker is ready on {value} ({num_ready} of {len(self._workers)})")
            else:
                del worker.asked[ref]
                worker.deaths = 0
                results.append(value)
        for worker, death in deaths.items():
            results += self._bury(worker, why_of(death))
        return results

    def _bury(self, worker: _Worker, why: str) -> list[Result]:
        """Put a dead worker's rows back, and have it load again unless it is given up. Returns the end of a row that killed."""
        rows = list(worker.asked.values())
        ended: list[Result] = []
        for row in rows:
            row.deaths += 1
            if row.deaths == MAX_ROW_DEATHS:
                died = f"{row.deaths} workers died while they answered this row, the last one with no other: {why}"
                ended.append(row.failed(f"WorkerDied: {died}"))
            else:
                (self._suspected if row.is_suspected else self._again).append(row)
        said = f"a worker{f' on {worker.where}' if worker.where else ''} is gone: {why}"
        if len(rows) > len(ended):
            said += f"; {len(rows) - len(ended)} rows that it had are asked again"
        worker.asked, worker.deaths = {}, worker.deaths + (not ended)  # a row's own error is none of its worker's
        if worker.loading is not None or worker.deaths >= MAX_DEATHS:  # Ray has had it load as often as it pays
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
