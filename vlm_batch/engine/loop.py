"""The engine's thread: an inbox, a generator, and the handles that are told what it does."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, Protocol, TypeVar

from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.port import Loaders, Loading
from vlm_batch.engine.row import Prompt, Row, new_row
from vlm_batch.handle import Handle
from vlm_batch.runtime import threads
from vlm_batch.types import Event, Request, Result, Stats

#: Seconds after which the sleeping engine looks again whether more can be prepared, while some source is slow.
LOOK_SECONDS = 0.25


class Rate:
    """Events per second over a sliding window of ``SPAN`` seconds that ends with the last event."""

    SPAN = 5.0

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def count(self, now: float) -> None:
        self._times.append(now)
        while self._times[0] < now - self.SPAN:
            self._times.popleft()

    @property
    def value(self) -> float:
        """Zero until two have happened."""
        times = tuple(self._times)
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0


class EngineLoop:
    """Runs one generator until it is stopped, and tells the requests' handles what comes of them.

    ``submit``, ``cancel``, ``stop``, ``is_alive`` and ``stats`` are safe from any thread; everything else belongs to the
    thread that ``run`` is called on.
    """

    def __init__(self, generator: BatchGenerator, loaders: Loaders) -> None:
        self.generator = generator
        self._loaders = loaders
        self._inbox: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()  # None ends the loop
        self._alive: dict[str, Handle] = {}  # of every request that has not ended
        self._is_busy = False
        self._counts = {"finished": 0, "failed": 0, "cancelled": 0, "generated": 0, "steps": 0, "cached": 0, "hits": 0}
        self._rate = Rate()

    # From any thread

    def submit(self, question: Any, request: Request, handle: Handle, *, has_videos: bool = False) -> None:
        """Take in a checked request; its id must be free."""
        row = new_row(
            handle.request_id,
            Prompt(question=question),
            request.params,
            decode=self.generator.text.decode,
            priority=request.priority,
            cache=request.cache,
            return_cache=request.return_cache,
        )
        row.has_videos = has_videos
        self._alive[row.request_id] = handle
        self._inbox.put(partial(self.generator.add, row))

    def is_alive(self, request_id: str) -> bool:
        """Whether a request of that id has not ended."""
        return request_id in self._alive

    def cancel(self, request_id: str) -> bool:
        """Have a request end soon; False if none of that id is alive."""
        if not self.is_alive(request_id):
            return False
        self._inbox.put(partial(self.generator.cancel, request_id))
        return True

    def stop(self) -> None:
        """Have every request end as cancelled, and then the loop. Nothing may be submitted afterwards."""
        self._inbox.put(None)

    def stats(self) -> Stats:
        """A moment's view, taken without stopping the engine."""
        generator, counts = self.generator, self._counts
        waiting, prefilling, decoding = generator.num_waiting, generator.num_prefilling, len(generator.batch)
        return Stats(
            queued=max(0, len(self._alive) - waiting - prefilling - decoding),
            waiting=waiting,
            prefilling=prefilling,
            decoding=decoding,
            kv_bytes=generator.batch.nbytes,
            finished=counts["finished"],
            failed=counts["failed"],
            cancelled=counts["cancelled"],
            generated_tokens=counts["generated"],
            tokens_per_second=self._rate.value,
            cache_hits=counts["hits"],
            cached_tokens=counts["cached"],
            cache_bytes=generator.reuse.nbytes,
            steps=counts["steps"],
        )

    # On its own thread

    def run(self) -> None:
        """Serve until ``stop``."""
        while self._serve():
            pass
        for request_id in list(self._alive):
            self.generator.cancel(request_id)
        while self.generator.has_work:
            self._turn()
        self.generator.reuse.close()
        self._loaders.close()

    def _serve(self) -> bool:
        """Do what the inbox asks for, and then a turn. False for the end; nothing of a request is held while it waits."""
        try:
            timeout = LOOK_SECONDS if self.generator.admission.is_preparing else None
            action = self._inbox.get(block=not self._is_busy, timeout=timeout)
        except queue.Empty:
            pass
        else:
            if action is None:
                return False
            action()
        if self._inbox.empty():
            self._is_busy = self._turn()
        return True

    def _turn(self) -> bool:
        """One round: have more prepared, step, hand out events. False if there was nothing to do."""
        while (row := self.generator.admission.next_to_prepare()) is not None:
            self._prepare(row)
        if not self.generator.has_work:
            return False
        try:
            events = self.generator.step()
        except Exception as error:  # a defect of the engine itself: nobody may wait for ever for it
            events = self.generator.fail_all(error)
        self._counts["steps"] += 1
        for event in events:
            self._hand_out(event)
        return True

    def _prepare(self, row: Row) -> None:
        assert row.prompt is not None
        question, row.prompt.question = row.prompt.question, None
        row.prompt.loading = loading = self._loaders.start(question)
        loading.when_done(partial(self._inbox.put, partial(self._take_in, row, loading)))

    def _take_in(self, row: Row, loading: Loading) -> None:
        self.generator.take_in(row, loading)

    def _hand_out(self, event: Event) -> None:
        handle = self._alive.get(event.request_id)
        if handle is None:
            return
        if event.token is not None:
            self._counts["generated"] += 1
            self._rate.count(time.perf_counter())
        if event.result is not None:
            del self._alive[event.request_id]
            self._count(event.result)
        handle.push(event)

    def _count(self, result: Result) -> None:
        kind = {"error": "failed", "cancelled": "cancelled"}.get(result.finish_reason, "finished")
        self._counts[kind] += 1
        self._counts["cached"] += result.usage.cached_tokens
        self._counts["hits"] += result.usage.cached_tokens > 0


class HasLoop(Protocol):
    """An engine with whatever else its owner needs of it."""

    @property
    def loop(self) -> EngineLoop: ...


Made = TypeVar("Made", bound=HasLoop)


def start(make: Callable[[], Made]) -> tuple[Made, threads.Running]:
    """Make an engine on a thread of its own, which then runs it. Raises what ``make`` raises."""
    ready: Future[Made] = Future()
    running = threads.start(partial(_work, make, ready), name="vlm-batch-engine")
    try:
        return ready.result(), running
    except BaseException:
        ready.cancel()  # nobody waits for it any more
        raise


def _work(make: Callable[[], Made], ready: Future[Made]) -> None:
    try:
        engine = make()
    except BaseException as error:
        ready.set_exception(error)
        return
    loop = engine.loop
    try:
        ready.set_result(engine)
    except InvalidStateError:
        return
    del make, engine, ready
    loop.run()
