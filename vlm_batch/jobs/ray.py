"""Jobs on a Ray cluster: one process reads rows and writes answers.

Workers need this version of the package, and the model's files.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vlm_batch._version import __version__
from vlm_batch.assets import sample_model
from vlm_batch.checks import demand
from vlm_batch.errors import describe
from vlm_batch.inputs.chats import split_messages
from vlm_batch.inputs.fetch import Fetched, Unreadable, fetch, is_address
from vlm_batch.jobs.rows import InvalidJob
from vlm_batch.jobs.workers import NoWorkers, Workers, why_of
from vlm_batch.many import try_submit
from vlm_batch.types import Audio, FetchPolicy, Request, Result, Video

if TYPE_CHECKING:
    from vlm_batch.batcher import VLMBatcher
    from vlm_batch.handle import Handle

#: Default rows of a worker's batch, and further rows that it prepares ahead.
DEFAULT_ROWS, DEFAULT_LOOK_AHEAD = 32, 16


class Worker:
    """An asynchronous actor with one engine: ``load`` once, then ``ask`` often."""

    def __init__(self) -> None:
        self._batcher: VLMBatcher | None = None

    async def load(
        self, model: str | None, options: Mapping[str, Any], version: str
    ) -> str:
        """Load the model; return its place. Raises InvalidJob for what no retry mends."""
        where = platform.node()
        if version != __version__:
            raise InvalidJob(
                f"{where} has vlm-batch {__version__}, and this machine {version}; install one version on all"
            )
        self._batcher = self._batcher or open_here(model, options)
        import mlx.core as mx

        return (
            f"{where}, {'GPU' if mx.default_device() == mx.Device(mx.gpu) else 'CPU'}"
        )

    async def ask(self, request: Request) -> Result:
        assert self._batcher is not None
        # A new id, because a row that is asked again after a lost connection may still run here.
        result = await ended(
            try_submit(self._batcher.submit_request, replace(request, request_id=None))
        )
        # these two are bound to the process
        bare = partial(replace, exception=None, cache=None)
        return bare(
            result,
            request_id=request.request_id or "",
            others=tuple(map(bare, result.others)),
        )


def open_here(model: str | None, options: Mapping[str, Any]) -> VLMBatcher:
    from vlm_batch.batcher import VLMBatcher

    path = Path(sample_model() if model is None else model).expanduser()
    try:
        if str(model).startswith((".", "/", "~")) and not path.exists():
            raise InvalidJob(
                "there is no such folder on this machine; every worker needs the files"
            )
        return VLMBatcher(str(path), **options)
    except Exception as error:
        raise InvalidJob(
            f"cannot load the model {model} on {platform.node()}: {describe(error)}"
        ) from error


async def ended(one: Handle | Result) -> Result:
    """Wait for a submitted row; cancelling this cancels it."""
    if isinstance(one, Result):
        return one
    try:
        return await one
    except asyncio.CancelledError:
        one.cancel()
        raise


class Cluster:
    """A batcher for ``jobs.run`` on a Ray cluster, with an engine per device.

    A context manager: entering waits for the first worker, or raises InvalidJob if none can start.

    Args:
        model: A hub id, or a folder on every machine; None is the embedded sample.
        address: "auto" (this machine's cluster), an address, or "local" (this machine alone).
        workers: One a GPU by default, or one a machine without GPUs.
        num_gpus: GPUs per worker, at most 1.
        num_cpus: CPUs per worker.
        shared_files: All machines have the rows' files; otherwise this machine sends them.
        options: Keywords of ``VLMBatcher``.
        say: Gets workers' news; standard error by default.
    """

    def __init__(
        self,
        model: str | None,
        *,
        address: str = "auto",
        workers: int | None = None,
        num_gpus: float | None = None,
        num_cpus: float = 1.0,
        shared_files: bool = False,
        options: Mapping[str, Any] = MappingProxyType({}),
        say: Callable[[str], None] | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise InvalidJob(f"{workers} workers answer nothing; at least 1 is needed")
        if num_gpus is not None and not 0 <= num_gpus <= 1:
            raise InvalidJob(
                f"num_gpus is {num_gpus}; a worker uses one GPU, or a part of it: a number in 0..1"
            )
        demand(num_cpus >= 0, InvalidJob, "num_cpus", num_cpus, "at least 0")
        self._model = (model, dict(options), __version__)
        self._address, self._shared_files = address, shared_files
        self._count, self._gpus, self._cpus = workers, num_gpus, num_cpus
        self._say = say or partial(print, "vlm-batch:", file=sys.stderr)
        self._workers: Workers | None = None
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        try:
            import ray
        except ImportError as error:
            raise InvalidJob(
                "Ray is not installed here: pip install 'vlm-batch[ray]'"
            ) from error
        with contextlib.ExitStack() as held:
            if not ray.is_initialized():
                self._join(ray)
                held.callback(ray.shutdown)
            self._workers = held.enter_context(contextlib.closing(self._start(ray)))
            try:
                self._workers.wait_for_one()
            except NoWorkers as error:
                raise InvalidJob(str(error)) from error
            self._held = held.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Yield results as they end; leaving cancels the rest. Raises NoWorkers."""
        assert self._workers is not None, (
            "a cluster is entered first: with Cluster(...) as batcher"
        )
        import ray

        try:
            yield from self._workers.as_completed(
                to_send(request, self._shared_files) for request in requests
            )
        except (ray.exceptions.RayError, ConnectionError) as error:
            # the cluster itself has gone
            raise NoWorkers(f"the Ray cluster is gone: {why_of(error)}") from error

    def close(self) -> None:
        self._held.close()

    def _join(self, ray: Any) -> None:
        more = {"include_dashboard": False} if self._address == "local" else {}
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address=self._address,
                log_to_driver=False,
                logging_level="ERROR",
                **more,
            )
        except Exception as error:
            # ConnectionError, RuntimeError, ValueError: whatever the address leads to
            raise InvalidJob(
                f"cannot join a Ray cluster at {self._address} (does it run? local needs none): {why_of(error)}"
            ) from error
        finally:
            # Ray's own handler leaves the process in the middle of a job, and Ray with an abort
            if (
                before is not None
                and threading.current_thread() is threading.main_thread()
            ):
                signal.signal(signal.SIGTERM, before)

    def _start(self, ray: Any) -> Workers:
        all_gpus = float(ray.cluster_resources().get("GPU", 0))
        gpus = min(1.0, all_gpus) if self._gpus is None else self._gpus
        count = self._count or max(1, _most_workers(ray, all_gpus, gpus))
        options = self._model[1]
        ahead = (options.get("policy") or {}).get("look_ahead", DEFAULT_LOOK_AHEAD)
        room = (options.get("max_rows") or DEFAULT_ROWS) + ahead
        actor = ray.remote(Worker).options(
            num_gpus=gpus,
            num_cpus=self._cpus,
            max_concurrency=room + 2,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        self._say(
            f"Ray is asked for {count} workers, with {gpus:g} GPU and {self._cpus:g} CPU each"
        )
        return Workers(
            ray, [actor.remote() for _ in range(count)], self._model, room, self._say
        )


def _most_workers(ray: Any, all_gpus: float, gpus: float) -> int:
    """Return how many workers have room by their GPUs, or one a machine where they need none."""
    if gpus:
        return int(all_gpus / gpus + 1e-9)
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(resources.get("CPU", 0) > 0 for resources in alive)


def to_send(request: Request, shared_files: bool) -> Request:
    """Return a request with local files' bytes or absolute paths; wrong media stay as they are."""
    messages = request.messages
    media: Sequence[Sequence[Any]] = (request.images, request.videos, request.audios)
    if messages is not None:
        try:
            messages, media = split_messages(messages, *media)
        except Exception:
            return request
    sent = partial(_medium_to_send, shared_files=shared_files)
    images, videos, audios = (tuple(map(sent, several)) for several in media)
    return replace(
        request, messages=messages, images=images, videos=videos, audios=audios
    )


def _medium_to_send(source: Any, shared_files: bool) -> Any:
    sent = partial(_medium_to_send, shared_files=shared_files)
    if isinstance(source, (list, tuple)):
        return list(map(sent, source))
    if isinstance(source, (Video, Audio)):
        found = sent(source.source)
        if isinstance(found, Fetched):
            found = found.data
        return replace(source, source=found)
    if not isinstance(source, (str, Path)) or is_address(source):
        return source
    if shared_files:
        return str(Path(source).expanduser().absolute())
    try:
        return fetch(source, FetchPolicy())
    except (Unreadable, OSError, ValueError):
        return source
