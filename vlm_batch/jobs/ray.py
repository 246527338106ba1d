"""Jobs on a Ray cluster: a batcher whose rows are answered by its machines, and an actor class for Ray Data.

::

    from vlm_batch import jobs
    from vlm_batch.jobs.ray import Cluster

    sources, _ = jobs.open_sources(["photos/"])
    jobs.run(sources, jobs.open_sink("answers.jsonl"), Cluster("hub/id"))

One process reads the rows and writes the answers, so that a job can be resumed, with every row once. ``Answer`` is for those
whose tables are Ray Datasets already. The workers need this package, of the same version, and the model's files.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_batch._version import __version__
from vlm_batch.assets import default_checkpoint
from vlm_batch.errors import describe, shown
from vlm_batch.jobs.cells import Columns, row_of_cells
from vlm_batch.jobs.questions import DEFAULT_PROMPT, Questions
from vlm_batch.jobs.rows import InvalidJob, Row
from vlm_batch.jobs.runner import submitted_row
from vlm_batch.jobs.sending import changed_ahead, with_files, with_whole_paths
from vlm_batch.jobs.workers import NoWorkers, Workers, why_of
from vlm_batch.many import submitted
from vlm_batch.types import Request, Result, SamplingParams, params_of

if TYPE_CHECKING:
    from vlm_batch.batcher import VLMBatcher
    from vlm_batch.handle import Handle

#: Rows that a worker has beside those of its batch, so that its engine finds the next ones read and processed.
DEFAULT_ROWS, DEFAULT_LOOK_AHEAD = 32, 16


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InvalidJob("Ray is not installed here: pip install 'vlm-batch[ray]'") from error
    return ray


# ---- what runs on the cluster ----


class Worker:
    """One engine of a cluster, an asynchronous actor: ``load`` first, then any number of ``ask`` at once."""

    def __init__(self) -> None:
        self._batcher: VLMBatcher | None = None

    async def load(self, model: str | None, options: Mapping[str, Any], version: str) -> str:
        """Load the model, and say where. Raises InvalidJob for what is wrong with it: another attempt would end alike."""
        where = platform.node()
        if version != __version__:
            raise InvalidJob(f"{where} has vlm-batch {__version__}, and this machine {version}")
        self._batcher = self._batcher or open_here(model, options)
        import mlx.core as mx

        return f"{where}, {'GPU' if mx.default_device() == mx.Device(mx.gpu) else 'CPU'}"

    async def ask(self, request: Request) -> Result:
        """One row's end. Cancelled, it ends the row."""
        assert self._batcher is not None
        # By an id of the batcher's own: a row that comes again after a lost connection may still be under way here.
        result = await _ended(submitted(self._batcher.submit_request, replace(request, request_id=None)))
        return _plain(replace(result, request_id=request.request_id or ""))


def open_here(model: str | None, options: Mapping[str, Any]) -> VLMBatcher:
    """A batcher in this process; without a model, of the embedded checkpoint. Raises InvalidJob."""
    from vlm_batch.batcher import VLMBatcher

    path = Path(default_checkpoint() if model is None else model).expanduser()
    try:
        if str(model).startswith((".", "/", "~")) and not path.exists():
            where = platform.node()
            raise InvalidJob(f"there is no such folder on this machine ({where}); every worker needs the files")
        return VLMBatcher(str(path), **options)
    except Exception as error:
        raise InvalidJob(f"cannot load the model {model} on {platform.node()}: {describe(error)}") from error


async def _ended(one: Handle | Result) -> Result:
    if isinstance(one, Result):
        return one
    try:
        return await one
    except asyncio.CancelledError:
        one.cancel()
        raise


def _plain(result: Result) -> Result:
    """A result without what belongs to its process: exceptions of any class, arrays of a cache."""
    others = tuple(_plain(one) for one in result.others)
    return replace(result, others=others, exception=None, cache=None)  # type: ignore[call-arg]


# ---- the cluster as a batcher ----


class Cluster:
    """A batcher for ``jobs.run`` whose rows are answered by a Ray cluster: a worker with an engine for each device.

    ``model`` is a hub id, or a folder that every machine has; None is the embedded checkpoint. ``address`` is "auto" for
    the cluster that this machine belongs to, a cluster's address, or "local" for one of this machine alone, which ends
    with the job. A Ray that the process has joined already is used as it is.

    ``workers`` is by default one a GPU, or without GPUs one a machine; ``num_gpus`` (at most 1, may be a fraction) and
    ``num_cpus`` are what Ray sets aside for each. ``options`` are keywords of ``VLMBatcher``. Pictures and videos that
    rows name by path are read here and sent, unless ``shared_files`` says that all machines have them at these paths.
    ``say`` is told what becomes of the workers.

    A context manager. Entering waits for the first worker, and raises InvalidJob if none can start.
    """

    def __init__(
        self,
        model: str | None,
        *,
        address: str = "auto",
        workers: int | None = None,
        num_gpus: float | None = None,
        num_cpus: float | None = None,
        shared_files: bool = False,
        options: Mapping[str, Any] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise InvalidJob(f"{workers} workers answer nothing; at least 1 is needed")
        if num_gpus is not None and not 0 <= num_gpus <= 1:
            raise InvalidJob(f"num_gpus is {num_gpus}; a worker uses one GPU, or a part of it: a number in 0..1")
        if num_cpus is not None and not num_cpus >= 0:
            raise InvalidJob(f"num_cpus is {num_cpus}; it must be at least 0")
        self._model = (model, dict(options or {}), __version__)
        self._address = address
        self._wanted = (workers, num_gpus, num_cpus)
        self._shared_files = shared_files
        self._say = say or partial(print, "vlm-batch:", file=sys.stderr)
        self._workers: Workers | None = None
        self._is_ours = False

    def __enter__(self) -> Cluster:
        ray = _ray()
        try:
            self._join(ray)
            count, resources = _share(ray, *self._wanted)
            options = self._model[1]
            ahead = (options.get("policy") or {}).get("look_ahead", DEFAULT_LOOK_AHEAD)
            room = (options.get("max_rows") or DEFAULT_ROWS) + ahead
            actor = ray.remote(Worker).options(
                **resources, max_concurrency=room + 2, max_restarts=-1, max_task_retries=0, scheduling_strategy="SPREAD"
            )
            needs = ", ".join(f"{amount:g} {name[4:].upper()}" for name, amount in resources.items() if amount)
            actors = [actor.remote() for _ in range(count)]
            self._workers = Workers(ray, actors, self._model, room, self._say, needs or "nothing")
            self._workers.wait_for_one()
        except NoWorkers as error:
            self.close()
            raise InvalidJob(str(error)) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results as they end; match them by ``request_id``. Leaving the loop cancels the rest.

        Rows of a worker that dies are asked again, each answered once; a row under which three workers die ends with an error.
        Raises NoWorkers when no worker is left.
        """
        assert self._workers is not None, "a cluster is entered first: with Cluster(...) as batcher"
        ray = _ray()
        change = with_whole_paths if self._shared_files else with_files
        with contextlib.closing(changed_ahead(requests, change)) as sent:
            try:
                yield from self._workers.as_completed(sent)
            except (ray.exceptions.RayError, ConnectionError) as error:  # the cluster itself has gone
                raise NoWorkers(f"the Ray cluster is gone: {why_of(error)}") from error

    def close(self) -> None:
        """End the workers, and a Ray that was started or joined for them."""
        if self._workers is not None:
            self._workers.close()
        if self._is_ours:
            self._is_ours = False
            _ray().shutdown()

    def _join(self, ray: Any) -> None:
        if ray.is_initialized():
            return
        more = {"include_dashboard": False} if self._address == "local" else {}
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=self._address, log_to_driver=False, logging_level="ERROR", **more)
        except Exception as error:  # ConnectionError, RuntimeError, ValueError: whatever the address leads to
            raise InvalidJob(f"cannot join a Ray cluster at {self._address}: {why_of(error)}") from error
        finally:  # Ray's own handler leaves the process in the middle of a job, and Ray with an abort
            if before is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
        self._is_ours = True


def _share(ray: Any, workers: int | None, gpus: float | None, cpus: float | None) -> tuple[int, dict[str, float]]:
    """The number of workers that a cluster is asked for, and what is set aside for each."""
    all_gpus = float(ray.cluster_resources().get("GPU", 0))
    gpus = gpus if gpus is not None else min(1.0, all_gpus)
    machines = sum(bool(node["Alive"]) and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
    count = workers or (int(all_gpus / gpus + 1e-9) if gpus else machines)
    return max(1, count), {"num_gpus": gpus, "num_cpus": 1.0 if cpus is None else cpus}


# ---- an actor class for Ray Data ----

#: What answers add to a row, of its result and seconds, named as by ``ray.data.llm``. The error is "" where there is an answer.
_CELLS: Mapping[str, Callable[[Result, float], Any]] = {
    "generated_text": lambda result, seconds: result.text,
    "generated_tokens": lambda result, seconds: np.asarray(result.token_ids, np.int64),
    "num_input_tokens": lambda result, seconds: result.usage.prompt_tokens,
    "num_generated_tokens": lambda result, seconds: result.usage.completion_tokens,
    "finish_reason": lambda result, seconds: result.finish_reason,
    "time_taken_llm": lambda result, seconds: seconds if result.ok else -1.0,
    "__inference_error__": lambda result, seconds: result.error or "",
}
OUTPUT_COLUMNS = tuple(_CELLS)


class Answer:
    """For ``Dataset.map_batches``: an engine that answers every row of a batch, and of several batches at once.

    A row has ``messages`` (OpenAI's form), or a ``prompt`` column, or the class is given a ``prompt`` that may name
    columns; pictures and videos lie in columns of the usual names (``image``, ``video``) or in the messages. Its
    ``sampling_params`` go before ``params``. Every row comes back, in its place and with its columns, and ``OUTPUT_COLUMNS``.

    The engine is full when there are more rows under way than it has places: give ``max_concurrency`` so that an actor
    works on several blocks, and ``batch_size`` of a few dozen. Raises InvalidJob for a model that cannot be loaded.
    """

    def __init__(
        self,
        model: str | None,
        *,
        prompt: str | None = None,
        system: str | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        image: str | None = None,
        video: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._prompt = prompt
        self._columns = Columns(image=image, video=video)
        self._questions = Questions((prompt or DEFAULT_PROMPT,), system, params_of(params))
        self._batcher = open_here(model, options or {})

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        if not isinstance(batch, dict):
            raise InvalidJob(f"a batch is {type(batch).__name__}; leave batch_format as it is (numpy)")
        count = len(next(iter(batch.values()), ()))
        rows = [{name: values[place] for name, values in batch.items()} for place in range(count)]
        answers = await asyncio.gather(*(self._answer(self._row(row, f"row {at}")) for at, row in enumerate(rows)))
        yield {**batch, **{name: _column([cell(*answer) for answer in answers]) for name, cell in _CELLS.items()}}

    async def _answer(self, row: Row) -> tuple[Result, float]:
        """One row's result, whatever is wrong with the row, and its seconds."""
        began = time.perf_counter()
        result = await _ended(submitted_row(self._batcher, self._questions, row))
        return result, time.perf_counter() - began

    def _row(self, cells: dict[str, Any], place: str) -> Row:
        try:
            cells = {name: _plain_cell(value) for name, value in cells.items()}
            columns = self._columns.among(list(cells), "the dataset")
            if columns.image is not None and cells[columns.image] is None:  # a row of text
                columns = replace(columns, image=None)
            row = row_of_cells(cells, columns, place=place, folder="")
            messages, params = cells.get("messages"), cells.get("sampling_params") or {}
            if self._prompt is None and messages:
                row = replace(row, messages=messages)
            elif self._prompt is None:
                if not isinstance(cells.get("prompt"), str):
                    raise InvalidJob(f"a row needs messages, or a prompt; it has the columns {', '.join(cells)}")
                row = replace(row, prompt=cells["prompt"])
            if not isinstance(params, Mapping):
                raise InvalidJob(f"sampling_params is {shown(params)}; it must be a mapping")
            return replace(row, params=params)
        except Exception as error:
            return Row(id=place, error=describe(error))


def _plain_cell(value: Any) -> Any:
    """A cell as Python has it. Arrow gives every mapping of a column the same keys, with None where there was none."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain_cell(one) for name, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [_plain_cell(one) for one in value]
    return value


def _column(values: list[Any]) -> np.ndarray:
    """A column of a batch: texts, and arrays of different lengths, are cells of their own."""
    if values and not isinstance(values[0], (np.ndarray, str)):
        return np.array(values)
    column = np.empty(len(values), object)
    for place, value in enumerate(values):
        column[place] = value
    return column
