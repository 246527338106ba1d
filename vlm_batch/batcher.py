"""``VLMBatcher``: a model, one engine thread that owns MLX, and requests from anywhere."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from vlm_batch import many
from vlm_batch.caches.quantisation import quantisation_of
from vlm_batch.checks import whole_option
from vlm_batch.engine import loop as engine_loop
from vlm_batch.engine.reuse import DEFAULT_CACHE_BYTES, DEFAULT_DIRECTORY_BYTES, CacheSettings
from vlm_batch.engine.scheduler import DEFAULT_LOOK_AHEAD_BYTES, SchedulerConfig
from vlm_batch.errors import BatcherClosed, InvalidRequest, shown
from vlm_batch.handle import Handle
from vlm_batch.inputs.images import DEFAULT_MAX_PIXELS
from vlm_batch.inputs.prepare import Limits
from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.videos import DEFAULT_MAX_VIDEO_PIXELS
from vlm_batch.loading import EngineOptions, find_checkpoint, load_engine, make_engine
from vlm_batch.policy import TUNED, check_policy
from vlm_batch.progress import progress_bar
from vlm_batch.registry import ModelSpec
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import (
    FetchPolicy,
    ImageInput,
    Message,
    Request,
    Result,
    SamplingParams,
    Stats,
    VideoInput,
    params_of,
)

__all__ = ["Handle", "PromptCache", "Stats", "VLMBatcher"]


class VLMBatcher:
    """Answer requests about pictures and videos with one model, batched: each answer is what the request would get alone.

    ``model`` is a path, a hub id, or a loaded mlx-vlm model with its ``processor``. At most ``max_rows`` requests decode
    together; None lets their number follow what is measured: it grows while a step becomes cheaper for each of them and
    memory allows, up to the device's most. Prompts are prefilled beside them in chunks that keep the gap between two tokens
    near ``token_gap`` seconds (on a CPU twice that while a prompt has waited long), or of ``prefill_budget`` tokens a step if
    that is given. ``max_prompt_tokens`` refuses longer prompts (pictures included). ``max_image_pixels`` is checked before a
    picture is decoded, and ``max_video_pixels``, for all frames together that are taken of a video, before these are; None
    lifts either. ``min_pixels`` and ``max_pixels`` are what requests get that do not say how large pictures are to be seen,
    and the second is the most that they may ask for. ``fetch`` says which paths and URLs are read, how much of them and for
    how long. ``look_ahead`` requests are read ahead of the engine, of those with URLs as many besides; ``generate`` keeps
    that many in flight beside a batch's worth. What is read and prepared ahead is at most ``look_ahead_bytes`` large, but for
    a request that is larger by itself, which goes alone. ``max_bytes`` bounds the keys and values of the requests that decode
    or are prefilled: as many as fit go on together, the last in line waits where they grow beyond it, and a request that does
    not fit alone is refused with DoesNotFit and the numbers: by ``submit`` where ids or the length of the text show it, else
    once its processor has run, before anything is encoded. None takes four fifths of the device's memory without the weights
    and ``cache_bytes``. ``cache_bytes`` are kept of what requests leave behind, so that later ones with the same beginning or
    the same pictures start from there (docs/caches.md); 0 keeps nothing. What they push out, and all of it at ``close``, goes
    to files in ``cache_dir``, ``cache_dir_bytes`` at most. ``kv_bits`` stores keys and values of full attention in so many
    bits, from token ``quantized_kv_start`` on: 2, 3, 4, 5, 6 or 8 in groups of ``kv_group_size`` with
    ``kv_quant_scheme="uniform"``, or 2 to 8 in steps of a half with "turboquant". ``reproducible`` makes an answer's tokens
    and log-probabilities, bit for bit, a function of its request, whoever else is there (docs/exactness.md). ``policy`` has
    settings of the device in the place of its table's, by name (docs/tuning.md). By default, "tuned", they are what
    ``vlm-batch bench --tune`` found for this model here, if it was run; "device" is the table alone. ``warm_up`` computes the
    shapes that requests will bring, lengths of prompts and numbers of rows, one by one while nothing is asked: worth it on a
    GPU, where the first call of a shape takes several times as long as the next one. ``dtype`` is what the
    weights of a path or id are loaded in: "checkpoint" as they are stored, "float32", "bfloat16", "float16", or "auto", which
    is the checkpoint's own type but float32 on a CPU.

    One thread owns MLX; every method is safe from any thread and inside a running event loop, in the process that made
    the batcher. Leaving the ``with`` block, or ``close``, ends what is still running with ``finish_reason="cancelled"``.

    Raises UnsupportedModel for a model that cannot be run (with quantised keys and values, where those are asked for),
    ValueError for an option out of range, and whatever the loader raises for a damaged checkpoint.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        processor: Any = None,
        *,
        max_rows: int | None = None,
        prefill_budget: int | None = None,
        token_gap: float = 0.1,
        max_prompt_tokens: int | None = None,
        max_image_pixels: int | None = DEFAULT_MAX_PIXELS,
        max_video_pixels: int | None = DEFAULT_MAX_VIDEO_PIXELS,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        fetch: FetchPolicy | None = None,
        look_ahead: int = 16,
        look_ahead_bytes: int = DEFAULT_LOOK_AHEAD_BYTES,
        max_bytes: int | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        cache_dir: str | Path | None = None,
        cache_dir_bytes: int = DEFAULT_DIRECTORY_BYTES,
        kv_bits: float | None = None,
        kv_group_size: int = 64,
        kv_quant_scheme: str = "uniform",
        quantized_kv_start: int = 0,
        reproducible: bool = False,
        policy: Mapping[str, Any] | str = TUNED,
        warm_up: bool = False,
        dtype: str = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        _check_kinds(
            model,
            processor,
            fetch,
            {"trust_remote_code": trust_remote_code, "reproducible": reproducible, "warm_up": warm_up},
        )
        options = EngineOptions(
            scheduler=SchedulerConfig(
                max_rows=max_rows,
                prefill_budget=prefill_budget,
                token_gap=token_gap,
                look_ahead=look_ahead,
                look_ahead_bytes=look_ahead_bytes,
                max_prompt_tokens=max_prompt_tokens,
                max_bytes=max_bytes,
            ),
            caches=_cache_settings(cache_bytes, cache_dir, cache_dir_bytes),
            limits=Limits(
                image_pixels=whole_option("max_image_pixels", max_image_pixels, least=1, or_none=True),
                video_pixels=whole_option("max_video_pixels", max_video_pixels, least=1, or_none=True),
                min_pixels=min_pixels,
                max_pixels=max_pixels,
                prompt_tokens=max_prompt_tokens,
                fetch=fetch or FetchPolicy(),
            ),
            kv=quantisation_of(kv_bits, kv_group_size, kv_quant_scheme, quantized_kv_start),
            reproducible=reproducible,
            policy=check_policy(policy),
            warm_up=warm_up,
        )
        self.look_ahead = look_ahead
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
        self._loop, self._preparer, self._policy = engine.loop, engine.preparer, engine.policy
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
        rendered: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        template_args: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache: PromptCache | None = None,
        return_cache: bool = False,
    ) -> Handle:
        """Ask one question; returns at once.

        ``images`` is a picture (path, URL, data URI, bytes, PIL image, array), a list, or None; ``videos`` a video (path,
        URL, data URI, bytes, array (T, H, W, 3), or a ``Video``, which also holds frames), a list, or None. Exactly one of
        ``prompt``, ``messages``, ``token_ids`` and ``inputs`` says what is asked, and ``tools`` to
        ``continue_final_message`` what the chat template is told; ``min_pixels`` and ``max_pixels`` bound what the model
        sees of each picture (see ``Request``). Higher ``priority`` goes first. ``return_cache`` asks for the conversation's
        state, which a request that goes on with it takes as ``cache``. Raises InvalidRequest for what is wrong already now,
        BatcherClosed after ``close``; what turns out later ends that request alone, with an error.
        """
        return self.submit_request(
            Request(
                prompt=prompt,
                messages=messages,
                token_ids=token_ids,
                inputs=inputs,
                images=images,
                videos=videos,
                rendered=rendered,
                tools=tools,
                documents=documents,
                enable_thinking=enable_thinking,
                reasoning_effort=reasoning_effort,
                template_args={} if template_args is None else template_args,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
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
        self, requests: Iterable[Request | Mapping[str, Any]], *, progress: bool = False, raise_on_error: bool = False
    ) -> list[Result]:
        """Answer many requests; results in their order. ``requests`` may be a generator: it is read ``look_ahead``
        ahead of those in the batch.

        A request that fails, at submit or later, gives a result with ``error`` set, and so does an item that is no
        request. If ``requests`` itself raises, those before are answered and the last result says so. ``raise_on_error``
        raises RequestFailed for the first one once all are done. ``progress`` shows a bar on stderr.
        """
        results: dict[int, Result] = {}
        total = len(requests) if isinstance(requests, Sequence) else None
        with progress_bar(total, enabled=progress) as advance:
            for index, result in many.in_turn(self.submit_request, requests, self._most_in_flight):
                results[index] = result
                advance(result)
        ordered = [results[index] for index in sorted(results)]
        for result in ordered if raise_on_error else ():
            result.raise_for_error()
        return ordered

    def as_completed(self, requests: Iterable[Request | Mapping[str, Any]]) -> Iterator[Result]:
        """The same requests' results as they end; match them by ``request_id``. Leaving the loop cancels the rest."""
        for _, result in many.in_turn(self.submit_request, requests, self._most_in_flight):
            yield result

    async def as_completed_async(
        self, requests: Iterable[Request | Mapping[str, Any]] | AsyncIterable[Request | Mapping[str, Any]]
    ) -> AsyncIterator[Result]:
        """``as_completed`` for ``async for``; ``requests`` may be an asynchronous iterator, too."""
        async for _, result in many.in_turn_async(self.submit_request, requests, self._most_in_flight):
            yield result

    def _most_in_flight(self) -> int:
        """Requests of one call that are alive at a time: as many as may live now, and those that are read ahead."""
        return self._loop.generator.scheduler.num_places + self.look_ahead

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
        """The settings of the device that this batcher runs with, by name: each with its value and its source."""
        return self._policy.describe()

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


def _check_kinds(model: Any, processor: Any, fetch: Any, switches: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that are not what they should be."""
    if not isinstance(model, (str, Path, nn.Module)):
        raise ValueError(f"model is a {type(model).__name__}; it must be a path, a hub id or a loaded model")
    if isinstance(model, nn.Module) and processor is None:
        raise ValueError("a loaded model needs its processor: VLMBatcher(model, processor)")
    if fetch is not None and not isinstance(fetch, FetchPolicy):
        raise ValueError(f"fetch is a {type(fetch).__name__}; it must be a FetchPolicy")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {shown(value)}; it must be True or False")


def _cache_settings(cache_bytes: int, cache_dir: str | Path | None, cache_dir_bytes: int) -> CacheSettings:
    max_bytes = whole_option("cache_bytes", cache_bytes, least=0)
    if cache_dir is None:
        return CacheSettings(max_bytes, None, whole_option("cache_dir_bytes", cache_dir_bytes, least=0))
    if not isinstance(cache_dir, (str, Path)):
        raise ValueError(f"cache_dir is a {type(cache_dir).__name__}; it must be a path")
    if not max_bytes or whole_option("cache_dir_bytes", cache_dir_bytes, least=0) < 1:
        raise ValueError("cache_dir needs cache_bytes and cache_dir_bytes above 0: files are read into memory")
    return CacheSettings(max_bytes, Path(cache_dir), int(cache_dir_bytes))
