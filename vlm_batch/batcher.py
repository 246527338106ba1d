"""``VLMBatcher``: a model, one engine thread that owns MLX, and requests from anywhere."""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from vlm_batch.adapters.quantisation import check_quantisation
from vlm_batch.arrays import as_mlx
from vlm_batch.caches.quantized import KVQuantisation, settings_of
from vlm_batch.engine.generator import BatchGenerator, describe
from vlm_batch.engine.reuse import DEFAULT_CACHE_BYTES, DEFAULT_DIRECTORY_BYTES, Kept, Reuse
from vlm_batch.engine.scheduler import SchedulerConfig
from vlm_batch.errors import BatcherClosed, InvalidRequest
from vlm_batch.handle import Handle
from vlm_batch.inputs.images import DEFAULT_MAX_PIXELS, is_image_list
from vlm_batch.inputs.loaders import NUM_LOADERS, Loaders, Loading
from vlm_batch.inputs.prepare import Limits, Preparer, Question
from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.videos import DEFAULT_MAX_VIDEO_PIXELS
from vlm_batch.loading import adapt, load_model
from vlm_batch.progress import progress_bar
from vlm_batch.registry import ModelSpec
from vlm_batch.runtime import threads
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.features import FeatureStore
from vlm_batch.store.files import Identity
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import Event, ImageInput, Message, Request, Result, SamplingParams, Timings, VideoInput

#: Requests with videos that are decoded ahead, and rows that may wait before one more of them is taken in: a clip's patches can
#: be half a gigabyte.
VIDEOS_AHEAD = NUM_LOADERS
#: Seconds that the engine sleeps at most when it has nothing to do (a submit wakes it at once).
IDLE_SECONDS = 1.0


@dataclass(frozen=True)
class Stats:
    """What the batcher is doing now, and what it did since it was made."""

    queued: int
    waiting: int
    prefilling: int
    decoding: int
    kv_bytes: int
    finished: int
    failed: int
    cancelled: int
    generated_tokens: int
    tokens_per_second: float = 0.0  # generated, over the last five seconds of work
    cache_hits: int = 0  # requests that took a beginning from earlier ones
    cached_tokens: int = 0  # prompt positions that they took
    cache_bytes: int = 0  # kept for later requests


class Rate:
    """How many things happen in a second, over the last ``SPAN`` seconds in which any did."""

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


@dataclass(eq=False)
class _Job:
    """A submitted request on its way to the engine."""

    request: Request
    handle: Handle
    question: Question
    submitted: float = field(default_factory=time.perf_counter)
    loading: Loading | None = None
    image_sizes: tuple[tuple[int, int], ...] = ()
    video_sizes: tuple[tuple[int, int, int], ...] = ()


class VLMBatcher:
    """Answer requests about pictures and videos with one model, batched: each answer is what the request would get alone.

    ``model`` is a path, a hub id, or a loaded mlx-vlm model with its ``processor``. At most ``max_rows`` requests
    decode together. Prompts are prefilled beside them in chunks that keep the gap between two tokens near ``token_gap``
    seconds (up to twice that while a prompt has waited long), or of ``prefill_budget`` tokens a step if that is given.
    ``max_prompt_tokens`` refuses longer prompts (pictures included). ``max_image_pixels`` is checked before a picture
    is decoded, and ``max_video_pixels``, for all frames together that are taken of a video, before these are; None
    lifts either. ``look_ahead`` requests are read ahead of the engine, and ``generate`` keeps that many in flight.
    ``cache_bytes`` are kept of what requests leave behind, so that later ones with the same beginning or the same
    pictures start from there (docs/caches.md); 0 keeps nothing. What they push out, and all of it at ``close``, goes to
    files in ``cache_dir``, ``cache_dir_bytes`` at most. ``kv_bits`` stores keys and values of full attention in
    so many bits, from token ``quantized_kv_start`` on: 2, 3, 4, 5, 6 or 8 in groups of ``kv_group_size`` with
    ``kv_quant_scheme="uniform"``, or 2 to 8 in steps of a half with "turboquant".

    One thread owns MLX; every method is safe from any thread and inside a running event loop. Leaving the ``with``
    block, or ``close``, ends what is still running with ``finish_reason="cancelled"``.

    Raises UnsupportedModel for a model that cannot be run (with quantised keys and values, where those are asked for),
    ValueError for an option out of range, and whatever the loader raises for a damaged checkpoint.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        processor: Any = None,
        *,
        max_rows: int = 8,
        prefill_budget: int | None = None,
        token_gap: float = 0.1,
        max_prompt_tokens: int | None = None,
        max_image_pixels: int | None = DEFAULT_MAX_PIXELS,
        max_video_pixels: int | None = DEFAULT_MAX_VIDEO_PIXELS,
        look_ahead: int = 16,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        cache_dir: str | Path | None = None,
        cache_dir_bytes: int = DEFAULT_DIRECTORY_BYTES,
        kv_bits: float | None = None,
        kv_group_size: int = 64,
        kv_quant_scheme: str = "uniform",
        quantized_kv_start: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("look_ahead", look_ahead)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if cache_bytes < 0:
            raise ValueError(f"cache_bytes is {cache_bytes}; it must be at least 0 (0 keeps nothing)")
        if cache_dir is not None and (not cache_bytes or cache_dir_bytes < 1):
            raise ValueError("cache_dir needs cache_bytes and cache_dir_bytes above 0: files are read into memory")
        if isinstance(model, nn.Module) and processor is None:
            raise ValueError("a loaded model needs its processor: VLMBatcher(model, processor)")
        self.look_ahead = look_ahead
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[str, _Job] = {}  # every request that has not ended, by id; guarded by _lock
        self._queued: list[_Job] = []  # engine thread only, like _preparing
        self._preparing: list[_Job] = []
        self._lock = threading.Lock()
        self._closed = False
        self._ids = itertools.count()
        self._counts = {"finished": 0, "failed": 0, "cancelled": 0, "generated": 0, "cached": 0, "hits": 0}
        self._rate = Rate()
        settings = SchedulerConfig(max_rows=max_rows, prefill_budget=prefill_budget, token_gap=token_gap)
        kv = None if kv_bits is None else KVQuantisation(kv_bits, kv_group_size, kv_quant_scheme, quantized_kv_start)
        kept = Kept(cache_bytes, None if cache_dir is None else Path(cache_dir), cache_dir_bytes)
        limits = Limits(image_pixels=max_image_pixels, video_pixels=max_video_pixels, prompt_tokens=max_prompt_tokens)
        make_engine = partial(
            _engine, settings=settings, max_prompt_tokens=max_prompt_tokens, kept=kept, kv=kv, limits=limits
        )
        ready: Future[tuple[BatchGenerator, Preparer]] = Future()
        if isinstance(model, nn.Module):  # its arrays belong to this thread until they are evaluated here
            ready.set_result(make_engine(model, processor))
        me = weakref.ref(self)
        work = partial(_run, me, self._inbox, ready, model, make_engine, trust_remote_code)
        self._engine_thread = threads.start(work, name="vlm-batch-engine")
        del work
        self._generator, self._preparer = ready.result()
        self._loaders = Loaders(self._preparer.prepare)
        atexit.register(_close, weakref.ref(self))

    # Requests
    # -----------------------------------------------------------------------------------------------------------

    def submit(
        self,
        images: ImageInput | Sequence[ImageInput] | None = None,
        prompt: str | None = None,
        *,
        videos: VideoInput | list[VideoInput] | None = None,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        inputs: Mapping[str, Any] | None = None,
        rendered: bool = False,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache: PromptCache | None = None,
        return_cache: bool = False,
    ) -> Handle:
        """Ask one question; returns at once.

        ``images`` is a picture (path, URL, data URI, bytes, PIL image, array), a list of them, or None; ``videos`` a
        video (path, URL, data URI, bytes, array (T, H, W, 3), or a ``Video``, which also holds frames), a list of
        them, or None. Exactly one of ``prompt``, ``messages``, ``token_ids`` and ``inputs`` says what is asked (see
        ``Request``). Higher ``priority`` goes first. ``return_cache`` asks for the conversation's state in the result,
        which a request that goes on with it takes as ``cache``. Raises InvalidRequest for what is wrong already now,
        BatcherClosed after ``close``; what turns out later (an unreadable picture, a prompt too long) ends that
        request alone, with an error in its result.
        """
        pictures = () if images is None else tuple(images) if is_image_list(images) else (images,)
        clips = () if videos is None else tuple(videos) if is_image_list(videos) else (videos,)
        return self.submit_request(
            Request(
                prompt=prompt,
                messages=messages,
                token_ids=token_ids,
                inputs=inputs,
                images=pictures,
                videos=clips,
                rendered=rendered,
                params=params or SamplingParams(),
                request_id=request_id,
                priority=priority,
                cache=cache,
                return_cache=return_cache,
            )
        )

    def submit_request(self, request: Request) -> Handle:
        """``submit`` for a ``Request`` object."""
        job = self._job(request)
        with self._lock:
            if self._closed:
                raise BatcherClosed("the batcher is closed; make a new one")
            if job.handle.request_id in self._jobs:
                raise InvalidRequest(f"request id {job.handle.request_id!r} is in use by a request that has not ended")
            if request.cache is not None:
                request.cache.claim(self._generator.reuse.identity)
            self._jobs[job.handle.request_id] = job
        self._inbox.put(lambda: self._queued.append(job))
        return job.handle

    def generate(
        self, requests: Iterable[Request | Mapping[str, Any]], *, progress: bool = False, raise_on_error: bool = False
    ) -> list[Result]:
        """Answer many requests; results in their order. ``requests`` may be a generator: it is read ``look_ahead``
        ahead.

        A request that fails, at submit or later, gives a result with ``error`` set; ``raise_on_error`` raises
        RequestFailed for the first one once all are done. ``progress`` shows a bar on stderr.
        """
        results: dict[int, Result] = {}
        total = len(requests) if isinstance(requests, Sequence) else None
        with progress_bar(total, enabled=progress) as advance:
            for index, result in self._as_completed(requests):
                results[index] = result
                advance(result)
        ordered = [results[index] for index in sorted(results)]
        for result in ordered if raise_on_error else ():
            result.raise_for_error()
        return ordered

    def as_completed(self, requests: Iterable[Request | Mapping[str, Any]]) -> Iterator[Result]:
        """The same requests' results as they end; match them by ``request_id``. Leaving the loop cancels the rest."""
        for _, result in self._as_completed(requests):
            yield result

    def cancel(self, request_id: str) -> bool:
        """End a request at whatever stage it is; False if none of that id is alive."""
        with self._lock:
            alive = request_id in self._jobs
        if alive:
            self._inbox.put(lambda: self._cancel(request_id))
        return alive

    # The batcher itself
    # -------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> ModelSpec:
        """The facts about the model's family."""
        return type(self._generator.adapter).spec  # type: ignore[attr-defined,no-any-return]

    @property
    def processing(self) -> Processing:
        """The model's processor, tokenizer and chat template, for reading."""
        return self._preparer.processing

    @property
    def max_context(self) -> int | None:
        """How many positions the model was made for; None if it does not say."""
        return self._generator.adapter.max_context

    def stats(self) -> Stats:
        """Live counters; a moment's view, taken without stopping the engine."""
        generator, counts = self._generator, self._counts
        waiting, prefilling, decoding = generator.num_waiting, generator.num_prefilling, len(generator.batch)
        with self._lock:
            queued = len(self._jobs) - waiting - prefilling - decoding
        return Stats(
            queued=max(0, queued),
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
        )

    def close(self) -> None:
        """End every request that is still alive as cancelled, and stop the engine. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._inbox.put(self._cancel_all)
            self._inbox.put(self._generator.reuse.close)
            self._inbox.put(_stop)
        self._engine_thread.join()
        self._loaders.close()

    def __enter__(self) -> VLMBatcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # In the submitter's thread
    # ------------------------------------------------------------------------------------------

    def _job(self, request: Request) -> _Job:
        """Check a request and render its prompt."""
        question = self._preparer.check(request)
        request_id = request.request_id if request.request_id is not None else f"request-{next(self._ids)}"
        return _Job(request, Handle(request_id, self.cancel), question)

    def _as_completed(self, requests: Iterable[Request | Mapping[str, Any]]) -> Iterator[tuple[int, Result]]:
        done: queue.SimpleQueue[tuple[int, Handle]] = queue.SimpleQueue()
        source = enumerate(requests)
        alive: dict[int, Handle] = {}
        try:
            while True:
                while len(alive) < self.look_ahead and (item := next(source, None)) is not None:
                    index, request = item
                    try:
                        handle = self.submit_request(Request(**request) if isinstance(request, Mapping) else request)
                    except BatcherClosed:
                        raise
                    except Exception as error:
                        yield index, _failed(request, index, error)
                        continue
                    alive[index] = handle
                    _when_done(handle, partial(done.put, (index, handle)))
                if not alive:
                    return
                index, handle = done.get()
                del alive[index]
                yield index, handle.result()
        finally:
            for handle in alive.values():
                handle.cancel()

    # On the engine thread
    # -----------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """One round: start loading, take in what is loaded, step, hand out events. False if there was nothing to do."""
        self._load_ahead()
        self._take_in()
        if not self._generator.has_work:
            return False
        try:
            events = self._generator.step()
        except Exception as error:  # a defect of the engine itself: nobody may wait forever for it
            for request_id in list(self._jobs):
                self._finish(
                    Result(request_id=request_id, finish_reason="error", error=describe(error), exception=error)
                )
            self._generator.reset()
            return True
        for event in events:
            self._hand_out(event)
        return True

    def _load_ahead(self) -> None:
        """Have the most urgent requests' pictures and videos read, ``look_ahead`` requests at most, few of them with videos."""
        now = time.perf_counter()
        scheduler = self._generator.scheduler
        while len(self._preparing) < self.look_ahead:
            is_full = sum(bool(job.question.videos) for job in self._preparing) >= VIDEOS_AHEAD
            queued = [job for job in self._queued if not (is_full and job.question.videos)]
            if not queued:
                return
            job = min(queued, key=lambda job: scheduler.urgency(job.request.priority, now - job.submitted))
            self._queued.remove(job)
            self._preparing.append(job)
            job.loading = self._loaders.start(job.question)
            job.loading.when_done(partial(self._inbox.put, _nothing))

    def _take_in(self) -> None:
        """Insert prepared requests while the engine has room: a batch's worth of them waits there, fewer with videos."""
        room = self._generator.scheduler.config.max_rows - self._generator.num_waiting
        ready = [job for job in self._preparing if job.loading is not None and job.loading.done()]
        for job in ready[: max(0, room)]:
            if job.question.videos and self._generator.num_waiting >= VIDEOS_AHEAD:
                return  # nor those behind it, or it might wait for ever
            self._preparing.remove(job)
            self._insert(job)

    def _insert(self, job: _Job) -> None:
        request, loading = job.request, job.loading
        assert loading is not None
        job.loading = None
        job.question = Question()  # pictures are let go of
        try:
            prepared = loading.result()
            job.image_sizes, job.video_sizes = prepared.image_sizes, prepared.video_sizes
            inputs = as_mlx(prepared.inputs)
            self._generator.insert(
                job.handle.request_id,
                inputs,
                request.params,
                request.priority,
                job.submitted,
                cache=request.cache,
                return_cache=request.return_cache,
            )
        except Exception as error:
            waited = Timings(total=time.perf_counter() - job.submitted)
            self._finish(_error_result(job.handle.request_id, error, waited))

    def _hand_out(self, event: Event) -> None:
        job = self._jobs.get(event.request_id)
        if job is None:
            return
        if event.token is not None:
            self._counts["generated"] += 1
            self._rate.count(time.perf_counter())
        job.handle.push(event.text)
        if event.result is not None:
            self._finish(event.result)

    def _finish(self, result: Result) -> None:
        with self._lock:
            job = self._jobs.pop(result.request_id, None)
        if job is None:
            return
        if job.request.cache is not None:
            job.request.cache.release()  # it keeps what the request did not get to take
        kind = {"error": "failed", "cancelled": "cancelled"}.get(result.finish_reason, "finished")
        self._counts[kind] += 1
        self._counts["cached"] += result.usage.cached_tokens
        self._counts["hits"] += result.usage.cached_tokens > 0
        job.handle.finish(replace(result, image_sizes=job.image_sizes, video_sizes=job.video_sizes))

    def _cancel(self, request_id: str) -> None:
        for job in self._preparing:
            if job.handle.request_id == request_id and job.loading is not None:
                job.loading.cancel()
        for jobs in (self._queued, self._preparing):
            jobs[:] = [job for job in jobs if job.handle.request_id != request_id]
        if not self._generator.cancel(request_id):  # it has not reached the engine
            self._finish(Result(request_id=request_id, finish_reason="cancelled"))

    def _cancel_all(self) -> None:
        for request_id in list(self._jobs):
            self._cancel(request_id)
        while self._generator.has_work:
            self._turn()


def _engine(
    model: nn.Module,
    processor: Any,
    *,
    settings: SchedulerConfig,
    max_prompt_tokens: int | None,
    kept: Kept,
    kv: KVQuantisation | None,
    limits: Limits,
) -> tuple[BatchGenerator, Preparer]:
    adapter = adapt(model)
    if kv is not None:
        check_quantisation(adapter, kv)
    identity = Identity(adapter.fingerprint, settings_of(kv))
    budget = ByteBudget(kept.max_bytes)
    if kept.max_bytes:
        adapter.remember_features(FeatureStore(budget))
    prefix = kept.prefix_cache(budget, identity) if kept.max_bytes and adapter.no_prefix_reuse is None else None
    reuse = Reuse(adapter, prefix, identity)
    if adapter.max_rows is not None:
        # Where rows cannot share a batch, what a row's encoding leaves on the model must last until its end.
        settings = replace(settings, max_rows=min(settings.max_rows, adapter.max_rows), encode_ahead=0)
    processing = Processing(adapter.processor(processor), model.config, adapter.video_sampling)
    generator = BatchGenerator(
        adapter,
        decode_text=processing.decode,
        eos_token_ids=processing.eos_token_ids,
        config=settings,
        max_prompt_tokens=max_prompt_tokens,
        reuse=reuse,
        kv=kv,
    )
    preparer = Preparer(
        processing,
        adapter.spec,
        image_token_ids=adapter.image_token_ids(),
        max_context=adapter.max_context,
        limits=limits,
    )
    return generator, preparer


def _run(
    owner: weakref.ref[VLMBatcher],
    inbox: queue.SimpleQueue[Callable[[], None]],
    ready: Future[tuple[BatchGenerator, Preparer]],
    model: Any,
    make_engine: Callable[[nn.Module, Any], tuple[BatchGenerator, Preparer]],
    trust_remote_code: bool,
) -> None:
    """The engine thread. It holds no strong reference to its batcher while idle, so that a forgotten one can go."""
    if not ready.done():
        try:
            loaded, processor = load_model(model, trust_remote_code=trust_remote_code)
            ready.set_result(make_engine(loaded, processor))
        except BaseException as error:
            ready.set_exception(error)
            return
    del model
    is_busy = False
    while True:
        try:
            action = inbox.get(block=not is_busy, timeout=IDLE_SECONDS)
        except queue.Empty:
            action = _nothing
        if action is _stop:
            return
        batcher = owner()
        if batcher is None:
            return
        action()
        if inbox.empty():
            is_busy = batcher._turn()
        del batcher, action


def _error_result(request_id: str, error: Exception, timings: Timings | None = None) -> Result:
    timings = timings or Timings()
    return Result(request_id=request_id, finish_reason="error", error=describe(error), exception=error, timings=timings)


def _failed(request: Request | Mapping[str, Any], index: int, error: Exception) -> Result:
    given = request.get("request_id") if isinstance(request, Mapping) else request.request_id
    return _error_result(given if given is not None else f"refused-{index}", error)


def _when_done(handle: Handle, call: Callable[[], None]) -> None:
    def check() -> None:
        if handle.done():
            call()
        else:
            handle.add_listener(check)

    handle.add_listener(check)


def _close(owner: weakref.ref[VLMBatcher]) -> None:
    batcher = owner()
    if batcher is not None:
        batcher.close()


def _nothing() -> None:
    """Wakes the engine."""


def _stop() -> None:
    """Tells the engine thread to end."""
