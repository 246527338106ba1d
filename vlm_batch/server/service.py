"""The server's model (loading, idle unloading), and admission."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from vlm_batch.errors import BatcherClosed, VLMBatchError, describe
from vlm_batch.inputs.fetch import Cancelled
from vlm_batch.inputs.pool import Pool
from vlm_batch.loading import answers_in_special_tokens
from vlm_batch.runtime.memory import release_memory
from vlm_batch.server.answers import Dialect
from vlm_batch.server.burst import Burst
from vlm_batch.server.config import ServerConfig
from vlm_batch.server.errors import ApiError, refusing, without_paths
from vlm_batch.server.metrics import Metrics
from vlm_batch.types import Request, Result

if TYPE_CHECKING:
    from vlm_batch.batcher import Stats, VLMBatcher
    from vlm_batch.handle import Handle

logger = logging.getLogger("vlm_batch.server")

#: Seconds between checks for idleness.
WATCH_SECONDS = 1.0
#: Ended requests by which the rate of the queue is estimated.
RECENT = 64
MIN_RETRY, MAX_RETRY = 1, 60
#: Seconds that a request without a client behind it may take.
AGE = 30 * 24 * 3600.0
#: Most requests that wait or are being answered: the rest of the sockets are for who comes then.
MAX_OPEN = 1792


@dataclass(frozen=True)
class Loaded:
    batcher: VLMBatcher
    dialect: Dialect


@dataclass(eq=False)
class Visit:
    client: int = 0
    loaded: Loaded | None = None
    handles: list[Handle] = field(default_factory=list)
    # the engine's: a client's own may come twice
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_expired: bool = False

    @property
    def is_background(self) -> bool:
        return self.client < 0

    @property
    def batcher(self) -> VLMBatcher:
        assert self.loaded is not None
        return self.loaded.batcher

    def expire(self) -> None:
        self.is_expired = True
        self.end()

    def end(self) -> None:
        for handle in self.handles:
            handle.cancel()


class Service:
    """One model and its state; methods run on the event loop's thread.

    States are "loading", "ready", "stalled" (a step hangs), "idle" (unloaded until asked), "failed" and "stopping".
    """

    def __init__(
        self, config: ServerConfig, open_batcher: Callable[[], VLMBatcher]
    ) -> None:
        self.config = config
        self.created = int(time.time())
        self.burst: Burst[Visit] = Burst(
            self._take_place, self.dismiss, self._num_open_by_client, self._no_sockets
        )
        self.burst.most = MAX_OPEN
        self.metrics = Metrics(config.name, self.stats, lambda: self.burst.size)
        self.error: str | None = None
        self._open = open_batcher
        self.model: Loaded | None = None
        self._loading: asyncio.Task[Loaded] | None = None
        self._stopping = False
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="vlm-batch-load")
        self._worker = Pool(1, "vlm-batch-submit", is_awaited=True)
        # Checking a form may take a second.
        self._form_worker = Pool(1, "vlm-batch-submit-form")
        self._visits: set[Visit] = set()
        self._last_used = time.monotonic()
        self._ends: deque[float] = deque(maxlen=RECENT)
        self._watching: asyncio.Task[None] | None = None

    # Life
    # ---------------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self._stopping:
            return "stopping"
        stats = self.stats()
        if stats is not None:
            return "stalled" if stats.stalled else "ready"
        if self._loading is not None and not self._loading.done():
            return "loading"
        return "idle" if self.error is None else "failed"

    def stats(self) -> Stats | None:
        return None if self.model is None else self.model.batcher.stats()

    async def start(self) -> None:
        """Start to load the model and watch for idleness."""
        self._begin_loading()
        self._watching = asyncio.create_task(self._watch())

    async def loaded(self) -> Loaded:
        """Return the model, loaded if needed. Raises ApiError."""
        if self._stopping:
            raise _stops()
        if self.model is not None:
            return self.model
        try:
            return await asyncio.shield(self._begin_loading())
        except Exception as error:
            raise ApiError(
                503,
                f"the model could not be loaded: {self.error}",
                code="model_not_loaded",
            ) from error

    @property
    def most_in_flight(self) -> int:
        """The requests that keep the batch full; one while no model is there."""
        if self.model is None:
            return 1
        return self.model.batcher.most_in_flight()

    @property
    def num_open(self) -> int:
        """Count requests that have a place: in the queue, or with the engine."""
        return len(self._visits)

    async def drain(
        self, seconds: float, *, is_hurried: Callable[[], bool] = lambda: False
    ) -> None:
        """Refuse new and held requests, wait for open ones until ``seconds`` are over or it ``is_hurried``, then end them."""
        self._stopping = True
        self.burst.end(_stops)
        for visit in self._visits:
            if visit.is_background:  # a later server answers it
                visit.end()
        until = time.monotonic() + seconds
        while self._visits and time.monotonic() < until and not is_hurried():
            await asyncio.sleep(0.05)
        for visit in self._visits:
            visit.end()

    async def stop(self) -> None:
        await self.drain(0)
        for task in (self._watching, self._loading):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._unload()
        self._loader.shutdown(wait=False)
        self._worker.close()
        self._form_worker.close()

    # Requests
    # -----------------------------------------------------------------------------------------------------------

    async def admit(self, client: int) -> Visit:
        """Return a place in the queue, which ``dismiss`` gives back, when there is one for this client.

        Raises:
            ApiError: 429 if memory or sockets end, 503 if the server stops.
        """
        if self._stopping:
            raise _stops()
        self.check_memory()
        place = None if self.burst.holds(client) else self._take_place(client)
        return await self.burst.wait(client) if place is None else place

    def dismiss(self, visit: Visit) -> None:
        """Give a place back. May be called again."""
        self._visits.discard(visit)
        self.burst.serve()

    @asynccontextmanager
    async def visit(self, visit: Visit) -> AsyncIterator[Visit]:
        """Lend a request that has a place the model, and cancel unfinished work. Raises ApiError 503 without a model."""
        # what waits for all others has the time of its own batch
        seconds = AGE if visit.is_background else self.config.request_seconds
        expiring = asyncio.get_running_loop().call_later(seconds, visit.expire)
        try:
            visit.loaded = await self.loaded()
            yield visit
        finally:
            expiring.cancel()
            self.metrics.aborted(sum(not handle.done() for handle in visit.handles))
            visit.end()
            self.dismiss(visit)
            self._last_used = time.monotonic()

    async def submit(self, visit: Visit, requests: list[Request]) -> list[Handle]:
        """Submit requests off the event loop. Raises ApiError."""
        batcher = visit.batcher

        def submit_all() -> None:
            for request in requests:
                visit.handles.append(batcher.submit_request(request))

        has_form = any(request.params.form for request in requests)
        worker = self._form_worker if has_form else self._worker
        try:
            await self._beside(worker, submit_all, visit)
        except BatcherClosed as error:
            raise _stops() from error
        if visit.is_expired or self._stopping:
            visit.end()
        return visit.handles

    async def count_tokens(self, visit: Visit, request: Request) -> int:
        """Count a prompt's tokens off the event loop. Raises ApiError."""
        count = partial(visit.batcher.count_tokens, request)
        found: int = await self._beside(self._form_worker, count, visit)
        return found

    async def _beside(self, worker: Pool, call: Callable[[], Any], visit: Visit) -> Any:
        """Run a call beside the event loop, where clients take turns. Raises ApiError for what is refused."""
        running = asyncio.wrap_future(
            worker.submit(call, Cancelled(), client=visit.client)
        )
        with refusing():
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                # so that what it submits is ended, too
                await asyncio.gather(running, return_exceptions=True)
                raise

    def ended(self, result: Result, *, shares_prompt: bool = False) -> None:
        self._ends.append(time.monotonic())
        self.metrics.ended(result, shares_prompt=shares_prompt)

    def check_memory(self) -> None:
        """Raise ApiError 429 if memory is short and somebody waits for it."""
        limit, waiting = self.config.max_memory, self._num_waiting()
        if limit is not None and waiting and (held := mx.get_active_memory()) > limit:
            raise self._busy(
                f"arrays hold {held} bytes of {limit}, and {waiting} requests wait",
                waiting,
            )

    def _take_place(self, client: int) -> Visit | None:
        """Return a place in the queue, or None if it is full; clients below their even share find one."""
        clients = self._num_open_by_client()
        num_clients = len(clients.keys() | {client})
        has_share = (
            num_clients == 1 or clients[client] * num_clients >= self.config.max_queue
        )
        if self._num_waiting() >= self.config.max_queue and has_share:
            return None
        visit = Visit(client)
        self._visits.add(visit)
        return visit

    def _num_waiting(self) -> int:
        # on their way to the engine
        waiting = sum(not visit.handles for visit in self._visits)
        stats = self.stats()
        return waiting if stats is None else waiting + stats.queued + stats.waiting

    def _num_open_by_client(self) -> Counter[int]:
        return Counter(visit.client for visit in self._visits)

    def _no_sockets(self) -> ApiError:
        ahead = self.burst.size + self.num_open
        return self._busy(f"{ahead} requests wait or are being answered already", ahead)

    def _busy(self, why: str, ahead: int) -> ApiError:
        rate = 0.0
        if len(self._ends) > 1:
            rate = (len(self._ends) - 1) / max(1e-3, time.monotonic() - self._ends[0])
        seconds = math.ceil(ahead / rate) if rate else MAX_RETRY
        retry = str(min(MAX_RETRY, max(MIN_RETRY, seconds)))
        return ApiError(
            429,
            f"{why}; try again in {retry} s",
            code="busy",
            headers={"Retry-After": retry},
        )

    # The model
    # ----------------------------------------------------------------------------------------------------------

    def _begin_loading(self) -> asyncio.Task[Loaded]:
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load())
            # Those who waited have seen its exception: asyncio need not report it again.
            self._loading.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )
        return self._loading

    async def _load(self) -> Loaded:
        begin = time.perf_counter()
        logger.info("loading %s", self.config.model)
        saying = asyncio.create_task(_say_loading(self.config.model))
        try:
            batcher = await self._on_loader(self._open)
            try:
                dialect = await self._on_loader(lambda: _dialect(batcher, self.config))
            except Exception:
                await self._on_loader(batcher.close)
                raise
        except Exception as error:
            self.error = without_paths(f"{type(error).__name__}: {error}")
            # A folder's fault is said in one line; anything else may be ours.
            is_known = isinstance(error, (VLMBatchError, FileNotFoundError))
            logger.error(
                "cannot load %s: %s",
                self.config.model,
                describe(error),
                exc_info=not is_known,
            )
            raise
        finally:
            saying.cancel()
        # The model's objects stay, so the garbage collector may skip them.
        gc.collect()
        gc.freeze()
        self.error = None
        self.model = Loaded(batcher, dialect)
        self._last_used = time.monotonic()
        logger.info(
            "%s is ready after %.1f s", self.config.name, time.perf_counter() - begin
        )
        return self.model

    async def _unload(self) -> None:
        loaded, self.model, self._loading = self.model, None, None
        if loaded is not None:
            await self._on_loader(loaded.batcher.close)
            del loaded
            gc.unfreeze()
            release_memory()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            idle = self.config.idle_unload
            if (
                idle is None
                or self.model is None
                or self._visits
                or time.monotonic() - self._last_used < idle
            ):
                continue
            logger.info(
                "letting go of %s after %.0f s without a request",
                self.config.name,
                idle,
            )
            await self._unload()

    async def _on_loader(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._loader, call)


def _stops() -> ApiError:
    return ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})


def _dialect(batcher: VLMBatcher, config: ServerConfig) -> Dialect:
    if (
        config.enable_thinking
        and "enable_thinking" not in batcher.processing.template.reads
    ):
        raise ValueError(
            "--enable-thinking: this model's chat template does not read enable_thinking"
        )
    return Dialect(
        batcher.processing,
        config.tool_parser,
        batcher.recommended_sampling.params,
        shows_special=answers_in_special_tokens(batcher.processing, batcher.spec),
    )


async def _say_loading(model: str) -> None:
    begin = time.monotonic()
    while True:
        await asyncio.sleep(10)
        logger.info("loading %s: %.0f s so far", model, time.monotonic() - begin)
