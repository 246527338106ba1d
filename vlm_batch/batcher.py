"""``VLMBatcher``: a model, one engine thread that owns MLX, and requests from anywhere."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from vlm_batch import many
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine import loop as engine_loop
from vlm_batch.engine.reuse import Caches
from vlm_batch.errors import BatcherClosed, InvalidRequest, shown
from vlm_batch.handle import Handle
from vlm_batch.inputs.prepare import Limits
from vlm_batch.inputs.processing import Processing
from vlm_batch.loading import EngineOptions, find_checkpoint, load_engine, make_engine
from vlm_batch.many import Asked
from vlm_batch.policy import check_policy, described, policy_of
from vlm_batch.progress import progress_bar
from vlm_batch.registry import ModelSpec
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import (
    PLAIN_TEMPLATE,
    FetchPolicy,
    ImageInput,
    Message,
    Request,
    Result,
    SamplingParams,
    Stats,
    Template,
    VideoInput,
    params_of,
)

__all__ = ["Caches", "Handle", "KVQuantisation", "Limits", "PromptCache", "Stats", "VLMBatcher"]

DEFAULT_CACHES = Caches()


class VLMBatcher:
    """Answer requests about pictures and videos with one model, batched: each answer is what the request would get alone.

    One thread owns MLX; every method is safe from any thread and inside a running event loop, in the process that made
    the batcher. Leaving the ``with`` or ``async with`` block, or ``close``, ends what is still running with
    ``finish_reason="cancelled"``.

    Args:
        model: a path, a hub id, or a loaded mlx-vlm model.
        processor: the processor of a loaded model.
        max_rows: requests that decode together at most. None lets their number follow what is measured: it grows while a
            step becomes cheaper for each of them and memory allows, up to the device's most.
        max_bytes: bytes of keys and values of the requests that decode or are prefilled. As many as fit go on together, the
            last in line waits where they grow beyond it, and a request that does not fit alone is refused with DoesNotFit.
            None takes four fifths of the device's memory without the weights and ``caches``.
        limits: bounds on what a request may bring, as ``Limits``.
        fetch: the paths and URLs that are read, how much of them and for how long, as ``FetchPolicy``.
        caches: what is kept of requests, so that later ones with the same beginning or the same pictures start from there
            (docs/caches.md), as ``Caches``; None keeps nothing.
        kv_bits: store keys and values of full attention in so many bits, in groups of 64: 2, 3, 4, 5, 6 or 8.
        kv: the same with all its settings, as ``KVQuantisation``.
        reproducible: make an answer's tokens and log-probabilities, bit for bit, a function of its request, whoever else is
            there (docs/exactness.md).
        policy: settings of the engine in the place of the device's, by name: ``{"token_gap": 0.05}`` (docs/tuning.md).
        warm_up: compute the shapes that requests will bring, lengths of prompts and numbers of rows, one by one while nothing
            is asked. Worth it on a GPU, where the first call of a shape takes several times as long as the next one.
        dtype: the type that the weights of a path or id are loaded in: "checkpoint" as they are stored, "float32",
            "bfloat16", "float16", or "auto", which is the checkpoint's own but float32 on a CPU.
        trust_remote_code: allow code that comes with the checkpoint.

    Raises UnsupportedModel for a model that cannot be run (with quantised keys and values, where those are asked for),
    ValueError for an option out of range, and whatever the loader raises for a damaged checkpoint.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        processor: Any = None,
        *,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        limits: Limits | None = None,
        fetch: FetchPolicy | None = None,
        caches: Caches | None = DEFAULT_CACHES,
        kv_bits: float | None = None,
        kv: KVQuantisation | None = None,
        reproducible: bool = False,
        policy: Mapping[str, Any] | None = None,
        warm_up: bool = False,
        dtype: str = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        if not isinstance(model, (str, Path, nn.Module)):
            raise ValueError(f"model is a {type(model).__name__}; it must be a path, a hub id or a loaded model")
        if isinstance(model, nn.Module) and processor is None:
            raise ValueError("a loaded model needs its processor: VLMBatcher(model, processor)")
        if not isinstance(trust_remote_code, bool):
            raise ValueError(f"trust_remote_code is {shown(trust_remote_code)}; it must be True or False")
        if kv_bits is not None:
            if kv is not None:
                raise ValueError("kv_bits and kv exclude each other: the second has its bits")
            kv = KVQuantisation(kv_bits)
        self._said = check_policy(policy)
        options = EngineOptions(
            policy=policy_of({**self._said, "max_rows": max_rows, "max_bytes": max_bytes}),
            limits=Limits() if limits is None else limits,
            fetch=FetchPolicy() if fetch is None else fetch,
            caches=Caches(0) if caches is None else caches,
            kv=kv,
            reproducible=reproducible,
            warm_up=warm_up,
        )
        self._policy = options.policy
        self._lock = threading.Lock()
        self._closed = False
        self._ids = itertools.count()
        if isinstance(model, nn.Module):  # its arrays belong to this thread until they are evaluated here
            made = make_engine(model, processor, options)
            engine, self._running = engine_loop.start(lambda look: made)
        else:
            folder = find_checkpoint(model)  # on this thread, where Ctrl-C ends a download
            load = partial(load_engine, folder, options, dtype=dtype, trust_remote_code=trust_remote_code)
            engine, self._running = engine_loop.start(load)
        self._loop, self._preparer = engine.loop, engine.preparer
        weakref.finalize(self, self._loop.stop).atexit = False  # a forgotten batcher's thread ends, too

    def submit(
        self,
        images: ImageInput | Sequence[ImageInput] | None = None,
        prompt: str | None = None,
        *,
        videos: VideoInput | list[VideoInput] | None = None,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        inputs: Mapping[str, Any] | None = None,
        template: Template | Mapping[str, Any] | None = PLAIN_TEMPLATE,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache: PromptCache | None = None,
        return_cache: bool = False,
    ) -> Handle:
        """Ask one question; returns at once. ``Request`` says what its fields mean.

        Raises InvalidRequest for what is wrong already now, BatcherClosed after ``close``. What turns out later ends that
        request alone, with an error.
        """
        return self.submit_request(
            Request(
                prompt=prompt,
                messages=messages,
                token_ids=token_ids,
                inputs=inputs,
                images=images,
                videos=videos,
                template=template,  # type: ignore[arg-type]
                min_pixels=min_pixels,
                max_pixels=max_pixels,
                params=params_of(params),
                request_id=request_id,
                priority=priority,
                cache=cache,
                return_cache=return_cache,
            )
        )

    def submit_request(self, request: Request) -> Handle:
        """``submit`` for a ``Request`` object."""
        self._loop.check_runs()  # before any lock: in a child process nobody would let go of it
        question = self._preparer.check(request)
        self._loop.check_fits(question)
        request_id = request.request_id if request.request_id is not None else f"request-{next(self._ids)}"
        handle = Handle(request_id, self.cancel, self._running.is_here)
        with self._lock:
            if self._closed:
                raise BatcherClosed("the batcher is closed; make a new one")
            if self._loop.is_alive(request_id):
                raise InvalidRequest(f"request id {shown(request_id)} is in use by a request that has not ended")
            if request.cache is not None:
                request.cache.claim(self._loop.generator.reuse.identity)
            self._loop.submit(question, request, handle)
        return handle

    def generate(
        self, requests: Asked | Iterable[Asked], *, progress: bool = False, raise_on_error: bool = False
    ) -> list[Result]:
        """Answer many requests, or one: each a ``Request``, a mapping of its fields, or a prompt. Results in their order.
        ``requests`` may be a generator: it is read the policy's ``look_ahead`` ahead of those in the batch.

        A request that fails, at submit or later, gives a result with ``error`` set, and so does an item that is no
        request. If ``requests`` itself raises, those before are answered and the last result says so. ``raise_on_error``
        raises RequestFailed for the first one once all are done. ``progress`` shows a bar on stderr.
        """
        results: dict[int, Result] = {}
        requests = many.several(requests)
        total = len(requests) if isinstance(requests, Sequence) else None
        with progress_bar(total, enabled=progress) as advance:
            for index, result in many.in_turn(self.submit_request, requests, self._most_in_flight):
                results[index] = result
                advance(result)
        ordered = [results[index] for index in sorted(results)]
        for result in ordered if raise_on_error else ():
            result.raise_for_error()
        return ordered

    def as_completed(self, requests: Asked | Iterable[Asked]) -> Iterator[Result]:
        """The same requests' results as they end; match them by ``request_id``. Leaving the loop cancels the rest."""
        for _, result in many.in_turn(self.submit_request, many.several(requests), self._most_in_flight):
            yield result

    async def as_completed_async(
        self, requests: Asked | Iterable[Asked] | AsyncIterable[Asked]
    ) -> AsyncIterator[Result]:
        """``as_completed`` for ``async for``; ``requests`` may be an asynchronous iterator, too."""
        async for _, result in many.in_turn_async(self.submit_request, many.several(requests), self._most_in_flight):
            yield result

    def _most_in_flight(self) -> int:
        """Requests of one call that are alive at a time: as many as may live now, and those that are read ahead."""
        return self._loop.generator.scheduler.num_places + self._policy.look_ahead

    def rendered(self, request: Request) -> str | None:
        """A request's prompt as the chat template makes it, one placeholder a picture; None if it is tokens already.

        Raises InvalidRequest, as ``submit_request`` would.
        """
        return self._preparer.check(request).prompt

    def cancel(self, request_id: str) -> bool:
        """End a request at whatever stage it is; False if none of that id is alive. Raises InvalidRequest for what is no id."""
        if not isinstance(request_id, str):
            raise InvalidRequest(f"request_id is {shown(request_id)}; it must be a string: handle.request_id")
        return self._loop.cancel(request_id)

    @property
    def policy(self) -> dict[str, dict[str, Any]]:
        """The settings that this batcher runs with, by name: each with its value and its source."""
        return described(self._policy, self._said)

    @property
    def spec(self) -> ModelSpec:
        """The facts about the model's family."""
        return self._preparer.spec

    @property
    def processing(self) -> Processing:
        """The model's processor, tokenizer and chat template, for reading."""
        return self._preparer.processing

    @property
    def max_context(self) -> int | None:
        """The number of positions that the model was made for; None if it does not say."""
        return self._preparer.max_context

    def stats(self) -> Stats:
        """Live counters; a moment's view, taken without stopping the engine."""
        return self._loop.stats()

    def close(self) -> None:
        """End every request that is still alive as cancelled, and stop the engine. Idempotent."""
        if self._loop.is_gone:
            return
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                self._loop.stop()
        self._running.join()

    def __enter__(self) -> VLMBatcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> VLMBatcher:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.close)
