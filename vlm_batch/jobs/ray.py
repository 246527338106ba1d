"""Jobs on a Ray cluster: a batcher whose rows are answered by its machines, and an actor class for Ray Data.

::

    from vlm_batch import jobs
    from vlm_batch.jobs.ray import Cluster

    sources, _ = jobs.open_sources(["photos/"])
    jobs.run(sources, jobs.open_sink("answers.jsonl"), Cluster("hub/id"))

``Cluster`` keeps each worker's engine full, row by row, and one process writes the answers: that is what makes a job
resumable, with every row once. ``Answer`` is for those whose tables are Ray Datasets already::

    dataset.map_batches(Answer, fn_constructor_kwargs={"model": "hub/id"}, compute=ActorPoolStrategy(size=8), num_gpus=1)

Only Ray's public names are used. The workers need this package, of the same version, and the model's files.
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
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_batch._version import __version__
from vlm_batch.assets import default_checkpoint
from vlm_batch.errors import describe, shown
from vlm_batch.jobs.cells import Columns, row_of_cells
from vlm_batch.jobs.questions import DEFAULT_PROMPT, Item, Questions
from vlm_batch.jobs.rows import InvalidJob, Row
from vlm_batch.jobs.runner import make_request
from vlm_batch.jobs.sending import read_ahead, with_whole_paths
from vlm_batch.jobs.workers import Answered, Died, Dispatcher, Event, NoWorkers, Started
from vlm_batch.types import Request, Result, SamplingParams, failed_result, params_of

if TYPE_CHECKING:
    from vlm_batch.batcher import VLMBatcher

#: Seconds without any news after which it is said what is waited for.
PATIENCE = 30.0
#: Rows that a worker has beside those of its batch, so that its engine finds the next ones read and processed.
DEFAULT_ROWS, DEFAULT_LOOK_AHEAD = 32, 16
#: Most characters of Ray's own account of a death.
_WHY_CHARACTERS = 300


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InvalidJob("Ray is not installed here: pip install 'vlm-batch[ray]'") from error
    return ray


# ---- what runs on the cluster ----


@dataclass(frozen=True)
class _Facts:
    """A worker that has loaded its model, or why it cannot."""

    version: str
    where: str
    error: str | None = None


class Worker:
    """One engine of a cluster, an asynchronous actor: ``load`` first, then any number of ``ask`` at once."""

    def __init__(self) -> None:
        self._batcher: VLMBatcher | None = None

    async def load(self, model: str | None, options: Mapping[str, Any]) -> _Facts:
        """Load the model. What is wrong with it is told, not raised: another attempt would end alike."""
        facts = _Facts(__version__, platform.node())
        try:
            self._batcher = open_here(model, options)
        except Exception as error:
            return replace(facts, error=f"cannot load the model {model} on {facts.where}: {describe(error)}")
        import mlx.core as mx

        return replace(facts, where=f"{facts.where}, {'GPU' if mx.default_device() == mx.Device(mx.gpu) else 'CPU'}")

    async def ask(self, request: Request) -> Result:
        """One row's end. Cancelled, it ends the row."""
        assert self._batcher is not None
        return _plain(await _ended(self._batcher, request))


def open_here(model: str | None, options: Mapping[str, Any]) -> VLMBatcher:
    """A batcher in this process; without a model, of the embedded checkpoint. Raises what the loader raises."""
    from vlm_batch.batcher import VLMBatcher

    name = str(default_checkpoint()) if model is None else model
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
        raise InvalidJob(f"there is no such folder on this machine ({platform.node()}); every worker needs the files")
    return VLMBatcher(str(Path(name).expanduser()), **options)


async def _ended(batcher: VLMBatcher, request: Request) -> Result:
    """A request's result, whatever is wrong with it."""
    try:
        handle = batcher.submit_request(request)
    except Exception as error:
        return failed_result(request.request_id or "", error)
    try:
        return await handle
    except asyncio.CancelledError:
        handle.cancel()
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

    A context manager. Entering waits for the first worker, and raises InvalidJob if none can start; ``as_completed``
    raises ``NoWorkers`` when none is left. Rows of a worker that dies are asked again, each answered once; a row under
    which three workers die ends with an error.
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
        self._model = model
        self._address = address
        self._wanted = (workers, num_gpus, num_cpus)
        self._shared_files = shared_files
        self._options = dict(options or {})
        self._say = say or _say
        self._fleet: _RayFleet | None = None
        self._dispatcher: Dispatcher | None = None
        self._is_ours = False

    def __enter__(self) -> Cluster:
        ray = _ray()
        try:
            self._join(ray)
            count, resources = _share(ray, *self._wanted)
            ahead = (self._options.get("policy") or {}).get("look_ahead", DEFAULT_LOOK_AHEAD)
            room = (self._options.get("max_rows") or DEFAULT_ROWS) + ahead
            self._fleet = _RayFleet(ray, self._model, self._options, resources, room, self._say)
            self._dispatcher = Dispatcher(self._fleet, count, self._say)
            self._dispatcher.wait_for_one()
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
        """Results as they end; match them by ``request_id``. Leaving the loop cancels the rest. Raises NoWorkers."""
        assert self._dispatcher is not None, "a cluster is entered first: with Cluster(...) as batcher"
        ray = _ray()
        with contextlib.ExitStack() as stack:
            if not self._shared_files:
                requests = stack.enter_context(contextlib.closing(read_ahead(requests)))
            else:
                requests = map(with_whole_paths, requests)
            try:
                yield from self._dispatcher.as_completed(requests)
            except (ray.exceptions.RayError, ConnectionError) as error:  # the cluster itself has gone
                raise NoWorkers(f"the Ray cluster is gone: {_why(error)}") from error

    def close(self) -> None:
        """End the workers, and a Ray that was started or joined for them."""
        if self._fleet is not None:
            self._fleet.close()
        if self._is_ours:
            self._is_ours = False
            _ray().shutdown()

    def _join(self, ray: Any) -> None:
        if ray.is_initialized():
            return
        more = {"include_dashboard": False} if self._address == "local" else {}
        try:
            with _own_signals():
                ray.init(address=self._address, log_to_driver=False, logging_level="ERROR", **more)
        except Exception as error:  # ConnectionError, RuntimeError, ValueError: whatever the address leads to
            raise InvalidJob(f"cannot join a Ray cluster at {self._address}: {_why(error)}") from error
        self._is_ours = True


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep what SIGTERM does here: Ray's own handler leaves the process in the middle of a job, and Ray with an abort."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _share(ray: Any, workers: int | None, gpus: float | None, cpus: float | None) -> tuple[int, dict[str, float]]:
    """The number of workers that a cluster is asked for, and what is set aside for each."""
    all_gpus = float(ray.cluster_resources().get("GPU", 0))
    gpus = gpus if gpus is not None else min(1.0, all_gpus)
    machines = sum(bool(node["Alive"]) and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
    count = workers or (int(all_gpus / gpus + 1e-9) if gpus else machines)
    return max(1, count), {"num_gpus": gpus, "num_cpus": 1.0 if cpus is None else cpus}


class _RayFleet:
    """Workers as Ray actors. They are not restarted by Ray, which would not say so: the dispatcher does that."""

    def __init__(
        self,
        ray: Any,
        model: str | None,
        options: Mapping[str, Any],
        resources: Mapping[str, float],
        room: int,
        say: Callable[[str], None],
    ) -> None:
        self._ray = ray
        self._model, self._options = model, options
        self._room, self._say = room, say
        self._resources = resources
        self._actor = ray.remote(Worker).options(
            **resources,
            max_concurrency=room + 2,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        self._actors: dict[int, Any] = {}
        self._asked: dict[Any, tuple[int, int | None]] = {}  # by what Ray will have: worker, and ticket unless it loads
        self._refused: list[Event] = []
        self._started = 0

    def start(self) -> int:
        number, self._started = self._started, self._started + 1
        self._actors[number] = actor = self._actor.remote()
        self._asked[actor.load.remote(self._model, self._options)] = (number, None)
        return number

    def send(self, worker: int, ticket: int, request: Request) -> None:
        try:
            self._asked[self._actors[worker].ask.remote(request)] = (worker, ticket)
        except Exception as error:  # what cannot be pickled, or is too large
            self._refused.append(Answered(worker, ticket, failed_result(request.request_id or "", error)))

    def wait(self) -> list[Event]:
        if self._refused:
            events, self._refused = self._refused, []
            return events
        ready, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=PATIENCE)
        if not ready:
            self._say_what_is_waited_for()
            return []
        ready, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        told = [self._told(ref) for ref in ready]
        answers = [event for event in told if event is not None and not isinstance(event, Died)]
        deaths = {event.worker: event for event in told if isinstance(event, Died)}
        for worker in deaths:
            self._end(worker)
        return [*answers, *deaths.values()]

    def cancel(self, ticket: int) -> None:
        for ref, (_, known) in list(self._asked.items()):
            if known == ticket:
                del self._asked[ref]
                with contextlib.suppress(Exception):  # ended or dead meanwhile
                    self._ray.cancel(ref)

    def close(self) -> None:
        for worker in list(self._actors):
            self._end(worker)

    def _told(self, ref: Any) -> Event | None:
        """The news that an ended call brings."""
        worker, ticket = self._asked.pop(ref)
        try:
            value = self._ray.get(ref)
        except self._ray.exceptions.TaskCancelledError:
            return None
        except self._ray.exceptions.RayTaskError as error:  # raised by the call, and its worker lives
            if ticket is None:
                return Died(worker, _why(error), for_good=True)
            return Answered(worker, ticket, failed_result("", error))
        except self._ray.exceptions.RayError as error:
            return Died(worker, _why(error))
        if ticket is not None:
            return Answered(worker, ticket, value)
        if value.error is None and value.version != __version__:
            value = replace(value, error=f"{value.where} has vlm-batch {value.version}, and this machine {__version__}")
        if value.error is not None:
            return Died(worker, value.error, for_good=True)
        return Started(worker, self._room, value.where)

    def _end(self, worker: int) -> None:
        self._asked = {ref: known for ref, known in self._asked.items() if known[0] != worker}
        with contextlib.suppress(Exception):  # dead already, or the cluster is
            self._ray.kill(self._actors.pop(worker), no_restart=True)

    def _say_what_is_waited_for(self) -> None:
        loading = sum(ticket is None for _, ticket in self._asked.values())
        if loading:
            asked = ", ".join(f"{amount:g} {name[4:].upper()}" for name, amount in self._resources.items() if amount)
            self._say(f"waiting for {loading} workers to start ({asked or 'nothing'} each); {_free(self._ray)}")


def _free(ray: Any) -> str:
    free = ray.available_resources()
    return f"free in the cluster: {free.get('GPU', 0):g} GPUs, {free.get('CPU', 0):g} CPUs"


def _why(error: BaseException) -> str:
    """Ray's account of an error, in one line of bearable length; of a traceback, its last line."""
    text = str(error).strip()
    if '  File "' in text:
        text = text.splitlines()[-1]
    _, found, rest = text.partition("The actor is dead because ")
    text = " ".join((rest if found else text).split())
    return f"{type(error).__name__}: {text[:_WHY_CHARACTERS]}{'...' if len(text) > _WHY_CHARACTERS else ''}"


def _say(text: str) -> None:
    print(f"vlm-batch: {text}", file=sys.stderr)


# ---- an actor class for Ray Data ----

#: What answers add to a row, named as by ``ray.data.llm``. ``__inference_error__`` is "" where there is an answer.
OUTPUT_COLUMNS = (
    "generated_text",
    "generated_tokens",
    "num_input_tokens",
    "num_generated_tokens",
    "finish_reason",
    "time_taken_llm",
    "__inference_error__",
)


class Answer:
    """For ``Dataset.map_batches``: an engine that answers every row of a batch, and of several batches at once.

    A row has ``messages`` (OpenAI's form), or a ``prompt`` column, or the class is given a ``prompt`` that may name
    columns; pictures and videos lie in columns of the usual names (``image``, ``video``) or in the messages. Its
    ``sampling_params`` go before ``params``. Every row comes back, in its place and with its columns, with
    ``generated_text``, ``generated_tokens``, ``num_input_tokens``, ``num_generated_tokens``, ``finish_reason``,
    ``time_taken_llm`` (seconds, -1 for a failure) and ``__inference_error__``, which is "" for an answer.

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
        try:
            self._batcher = open_here(model, options or {})
        except Exception as error:
            raise InvalidJob(f"cannot load the model {model} on {platform.node()}: {describe(error)}") from error

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        if not isinstance(batch, dict):
            raise InvalidJob(f"a batch is {type(batch).__name__}; leave batch_format as it is (numpy)")
        count = len(next(iter(batch.values()), ()))
        rows = [{name: values[place] for name, values in batch.items()} for place in range(count)]
        answers = await asyncio.gather(*(self._answer(row, place) for place, row in enumerate(rows)))
        made = {name: _column([answer[name] for answer in answers]) for name in OUTPUT_COLUMNS}
        yield {**batch, **made}

    async def _answer(self, cells: dict[str, Any], place: int) -> dict[str, Any]:
        """One row's answer as cells. Whatever is wrong with the row is said there."""
        began = time.perf_counter()
        request, item = self._request(cells, place)
        if request is None:
            result = Result(request_id=item.id, finish_reason="error", error=item.error)
        else:  # the batcher has ids of its own: two batches may have rows of one id
            result = await _ended(self._batcher, replace(request, request_id=None))
        return {
            "generated_text": result.text,
            "generated_tokens": np.asarray(result.token_ids, np.int64),
            "num_input_tokens": result.usage.prompt_tokens,
            "num_generated_tokens": result.usage.completion_tokens,
            "finish_reason": result.finish_reason,
            "time_taken_llm": time.perf_counter() - began if result.ok else -1.0,
            "__inference_error__": result.error or "",
        }

    def _request(self, cells: dict[str, Any], place: int) -> tuple[Request | None, Item]:
        item = Item(f"row {place}", Row(id=f"row {place}"))
        try:
            cells = {name: _plain_cell(value) for name, value in cells.items()}
            columns = self._columns.among(list(cells), "the dataset")
            if columns.image is not None and cells[columns.image] is None:  # a row of text
                columns = replace(columns, image=None)
            row = row_of_cells(cells, columns, place=item.id, folder="")
            messages, params = cells.get("messages"), cells.get("sampling_params") or {}
            if self._prompt is None and messages:
                row = replace(row, messages=messages)
            elif self._prompt is None:
                if not isinstance(cells.get("prompt"), str):
                    raise InvalidJob(f"a row needs messages, or a prompt; it has the columns {', '.join(cells)}")
                row = replace(row, prompt=cells["prompt"])
            if not isinstance(params, Mapping):
                raise InvalidJob(f"sampling_params is {shown(params)}; it must be a mapping")
            return make_request(next(self._questions.ask(replace(row, params=params))))
        except Exception as error:
            return None, replace(item, error=describe(error))


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
