"""``VLMBatcher``: one model, one engine thread, requests from anywhere."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from vlm_batch import many
from vlm_batch.advice import ENGINES, advises
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine import loop as engine_loop
from vlm_batch.engine.reuse import Caches
from vlm_batch.errors import BatcherClosed, InvalidRequest, shown
from vlm_batch.handle import Handle
from vlm_batch.inputs.limits import Limits
from vlm_batch.inputs.processing import Processing
from vlm_batch.loading import EngineOptions, find_checkpoint, load_engine, make_engine
from vlm_batch.loading.recommended import RecommendedSampling, read_recommended
from vlm_batch.many import RequestLike
from vlm_batch.policy import check_policy, describe_policy, policy_of
from vlm_batch.progress import progress_bar
from vlm_batch.registry import ModelSpec
from vlm_batch.runtime import threads
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import (
    OF_REQUESTS,
    PLAIN_TEMPLATE,
    AudioInput,
    FetchPolicy,
    ImageInput,
    Message,
    Option,
    OptionScore,
    Request,
    Result,
    SamplingParams,
    Stats,
    Template,
    VideoInput,
)

__all__ = [
    "Caches",
    "Handle",
    "KVQuantisation",
    "Limits",
    "PromptCache",
    "Stats",
    "VLMBatcher",
]

DEFAULT_CACHES = Caches()
#: Where an argument of one request goes in ``generate``.
IN_REQUESTS = "generate([Request(images=..., prompt=..., params=...), ...])"


class VLMBatcher:
    """Answers requests about media and text with one model, in a batch. Each request gets the answer that it gets
    alone.

    All methods are safe from any thread and inside an event loop, in the process that made the batcher. ``with``,
    ``async with`` and ``close`` cancel what still runs (``finish_reason="cancelled"``).

    Args:
        model: a path, a hub id, or a loaded mlx-vlm model.
        processor: the processor of a loaded model.
        max_rows: most requests in prefill or decoding at a time. None adapts the number to step times and memory.
        max_bytes: bytes of keys and values of live requests. Others wait, also when answers outgrow it; one that never
            fits ends with DoesNotFit. None takes four fifths of the device's memory, less weights and ``caches``.
        limits: bounds on a request.
        fetch: rules for reading paths and URLs.
        caches: memory for repeated prefixes and pictures (docs/caches.md). None keeps nothing.
        kv_bits: bits of full attention's keys and values: 2, 3, 4, 5, 6 or 8, in groups of 64. None does not quantise.
        kv: all settings of quantised keys and values, instead of ``kv_bits``.
        reproducible: tokens and log-probabilities depend on the request alone, bit for bit (docs/exactness.md).
        policy: engine settings instead of the device's: ``{"token_gap": 0.05}`` (docs/tuning.md).
        warm_up: compute usual shapes while idle; on a GPU a shape's first call takes several times as long.
        dtype: type of the weights: "checkpoint", "float32", "bfloat16", "float16", or "auto" (the checkpoint's, but
            float32 on a CPU). A loaded model keeps its own.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        UnsupportedModel: the model, or its quantised keys and values, cannot be run.
        ValueError: an option is out of range.
    """

    @advises({**OF_REQUESTS, **ENGINES})
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
        threads.check_not_forked()  # before anything of MLX is called
        if not isinstance(model, (str, Path, nn.Module)):
            raise ValueError(
                f"model is a {type(model).__name__}; it must be a path, a hub id or a loaded model"
            )
        if isinstance(model, nn.Module) and processor is None:
            raise ValueError(
                "a loaded model needs its processor: VLMBatcher(model, processor)"
            )
        if not isinstance(trust_remote_code, bool):
            raise ValueError(
                f"trust_remote_code is {shown(trust_remote_code)}; it must be True or False"
            )
        if kv_bits is not None:
            if kv is not None:
                raise ValueError(
                    "kv_bits and kv exclude each other: the second has its bits"
                )
            kv = KVQuantisation(kv_bits)
        self._policy_overrides = check_policy(policy)
        options = EngineOptions(
            policy=policy_of(
                {**self._policy_overrides, "max_rows": max_rows, "max_bytes": max_bytes}
            ),
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
        # lazy arrays must be evaluated on the thread that made them
        if isinstance(model, nn.Module):
            made = make_engine(model, processor, options)
            engine, self._running = engine_loop.start(lambda look: made)
            # mlx-vlm's loader keeps it there
            self._folder = vars(model).get("model_path")
        else:
            # on this thread, where Ctrl-C ends a download
            folder = self._folder = find_checkpoint(model)
            load = partial(
                load_engine,
                folder,
                options,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
            engine, self._running = engine_loop.start(load)
        self._loop, self._preparer = engine.loop, engine.preparer
        # ends the thread of a batcher that was not closed
        weakref.finalize(self, self._loop.stop).atexit = False

    @advises(OF_REQUESTS)
    def submit(
        self,
        images: ImageInput | Sequence[ImageInput] | None = None,
        prompt: str | None = None,
        *,
        videos: VideoInput | list[VideoInput] | None = None,
        audios: AudioInput | list[AudioInput] | None = None,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        template: Template | Mapping[str, Any] | None = PLAIN_TEMPLATE,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache: PromptCache | None = None,
        return_cache: bool = False,
    ) -> Handle:
        """Submit a request; returns at once. ``Request`` describes the arguments. For its ``inputs``, ``options``,
        ``client`` and ``draft``, use ``submit_request``.

        Raises:
            InvalidRequest: it cannot be answered. Later errors end this request only.
            BatcherClosed: the batcher is closed.
        """
        return self.submit_request(
            Request(
                prompt=prompt,
                messages=messages,
                token_ids=token_ids,
                images=images,
                videos=videos,
                audios=audios,
                template=template,  # type: ignore[arg-type]
                min_pixels=min_pixels,
                max_pixels=max_pixels,
                params=params,  # type: ignore[arg-type]
                request_id=request_id,
                priority=priority,
                cache=cache,
                return_cache=return_cache,
            )
        )

    def submit_request(self, request: Request) -> Handle:
        """Submit a ``Request``, as ``submit``."""
        # before any lock, which a child process might find held
        self._loop.check_runs()
        question = self._preparer.check(request)
        self._loop.generator.memory.check_length(question.least_tokens)
        self._loop.generator.reuse.check(
            request, partial(self._preparer.text_ids, question)
        )
        request_id = (
            request.request_id
            if request.request_id is not None
            else f"request-{next(self._ids)}"
        )
        handle = Handle(request_id, self.cancel, self._running.is_here)
        with self._lock:
            if self._closed:
                raise BatcherClosed("the batcher is closed; make a new one")
            if self._loop.is_alive(request_id):
                raise InvalidRequest(
                    f"request id {shown(request_id)} is in use by a request that has not ended"
                )
            if request.cache is not None:
                request.cache.claim(self._loop.generator.reuse.identity)
            self._loop.submit(question, request, handle)
        return handle

    def score(
        self, request: RequestLike, options: Sequence[Option]
    ) -> tuple[OptionScore, ...]:
        """Return what the model says of each option behind a prompt, in order (docs/evaluations.md).

        The prompt is computed once. Many questions share a batch through ``Request.options``, which all methods take.

        Args:
            request: a ``Request``, a mapping of its fields, or a prompt.
            options: texts, or lists of token ids. One that cannot be scored has an ``error``; the others are scored.

        Raises:
            InvalidRequest: it cannot be answered, or there are no options.
            RequestFailed: it failed later, or no option could be scored.
        """
        asked = replace(many.request_of(request, "request"), options=options)
        if not asked.options:
            raise InvalidRequest("options is empty; it must be what to score")
        return self.submit_request(asked).result().raise_for_error().options

    @advises(dict.fromkeys((*OF_REQUESTS, "images", "prompt"), IN_REQUESTS))
    def generate(
        self,
        requests: RequestLike | Iterable[RequestLike],
        *,
        progress: bool = False,
        raise_on_error: bool = False,
    ) -> list[Result]:
        """Answer one or many requests.

        Args:
            requests: ``Request`` objects, mappings of their fields, or prompts. An iterator is read as results come.
            progress: show a progress bar on stderr.
            raise_on_error: raise RequestFailed for the first failed request, once all are done.

        Returns:
            Results in order, failed ones with ``error``. If ``requests`` raises, the last result says so.
        """
        results: dict[int, Result] = {}
        requests = many.as_requests(requests)
        total = len(requests) if isinstance(requests, Sequence) else None
        with progress_bar(total, enabled=progress) as advance:
            for index, result in many.as_completed(
                self.submit_request, requests, self.most_in_flight
            ):
                results[index] = result
                advance(result)
        ordered = [results[index] for index in sorted(results)]
        for result in ordered if raise_on_error else ():
            result.raise_for_error()
        return ordered

    def as_completed(
        self, requests: RequestLike | Iterable[RequestLike]
    ) -> Iterator[Result]:
        """Yield results as requests end; ``request_id`` matches them. Leaving the loop cancels the rest."""
        for _, result in many.as_completed(
            self.submit_request, many.as_requests(requests), self.most_in_flight
        ):
            yield result

    async def as_completed_async(
        self, requests: RequestLike | Iterable[RequestLike] | AsyncIterable[RequestLike]
    ) -> AsyncIterator[Result]:
        """Yield results for ``async for``. ``requests`` may be asynchronous."""
        asked: Iterable[RequestLike] | AsyncIterable[RequestLike] = many.as_requests(
            requests, AsyncIterable
        )
        async for _, result in many.as_completed_async(
            self.submit_request, asked, self.most_in_flight
        ):
            yield result

    def most_in_flight(self) -> int:
        """Return how many requests keep the batch full: those with a place, and those that are read ahead."""
        return self._loop.generator.capacity.num_places + self._policy.look_ahead

    def rendered(self, request: Request) -> str | None:
        """Return the prompt from the chat template, with one placeholder per picture; None for tokens.

        Raises:
            InvalidRequest: it cannot be answered.
        """
        return self._preparer.check(request).prompt

    def count_tokens(self, request: Request) -> int:
        """Count the prompt's tokens as the processor makes them, with those of pictures, videos and recordings.

        Media are read and processed, and nothing is computed by the model.

        Raises:
            InvalidRequest: it cannot be answered.
        """
        question = self._preparer.check(request)
        inputs = self._preparer.prepare(question).inputs
        return int(inputs["input_ids"].shape[-1])

    def cancel(self, request_id: str) -> bool:
        """End a request at any stage. False if there is none.

        Raises:
            InvalidRequest: the id is not a string.
        """
        if not isinstance(request_id, str):
            raise InvalidRequest(
                f"request_id is {shown(request_id)}; it must be a string: handle.request_id"
            )
        return self._loop.cancel(request_id)

    @property
    def policy(self) -> dict[str, dict[str, Any]]:
        """Engine settings by name, with value and source."""
        return describe_policy(self._policy, self._policy_overrides)

    @property
    def spec(self) -> ModelSpec:
        """Facts about the model's family."""
        return self._preparer.facts.spec

    @property
    def processing(self) -> Processing:
        """The model's processor, tokenizer and chat template."""
        return self._preparer.processing

    @cached_property
    def recommended_sampling(self) -> RecommendedSampling:
        """The publisher's sampling, from generation_config.json; nothing of it is taken unless a request says so:
        ``params={**batcher.recommended_sampling.params, "max_tokens": 500}``."""
        if self._folder is None:
            return RecommendedSampling()
        return read_recommended(self._folder)

    @property
    def max_context(self) -> int | None:
        """The model's context in positions, if known."""
        return self._preparer.facts.max_context

    def stats(self) -> Stats:
        """Return live counters without stopping the engine."""
        return self._loop.stats()

    def close(self) -> None:
        """Cancel all requests and stop the engine. May be called again."""
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
