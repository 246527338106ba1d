"""mlx-vlm's own server with this library's engine.

::

    python -m vlm_batch.integrations.mlx_vlm --model mlx-community/Qwen2.5-VL-3B-Instruct-4bit

Flags and endpoints are ``mlx_vlm.server``'s. ``ResponseEngine`` replaces its ``ResponseGenerator``.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import sys
import threading
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import vlm_batch  # noqa: F401  (before mlx.core: it chooses the BLAS)

# isort: split
import mlx.core as mx
import numpy as np
from fastapi import HTTPException
from mlx_vlm.sample_utils import make_logits_processors
from mlx_vlm.server.generation import (
    GenerationArguments,
    GenerationContext,
    PromptTooLongError,
    StreamingToken,
    get_configured_context_limit,
    get_max_num_seqs,
    get_server_max_tokens,
    load_model_resources,
)
from mlx_vlm.utils import ThinkingBudgetCriteria, process_image

from vlm_batch.batcher import KVQuantisation, VLMBatcher
from vlm_batch.checks import check_within
from vlm_batch.errors import InvalidParameters, InvalidRequest
from vlm_batch.handle import Handle
from vlm_batch.inputs.audio import load_audio
from vlm_batch.inputs.images import load_image
from vlm_batch.inputs.processing import PixelBounds
from vlm_batch.inputs.videos import as_video, load_video
from vlm_batch.loading import load_model
from vlm_batch.runtime.memory import peak_bytes
from vlm_batch.types import Event, Request, Result, SamplingParams

#: Threads of the event loop's pool: the application holds one per request that does not stream.
NUM_THREADS = 256
LOOPBACK = "127.0.0.1"
THINKING = ("<think>", "</think>")

#: Unsupported arguments, and their neutral values.
UNSUPPORTED: Mapping[str, Any] = {"typical_p": 1.0, "top_n_sigma": 0.0, "p_less": False}
#: Arguments that say how pictures are seen.
OF_PICTURES = {"min_pixels", "max_pixels", "resize_shape"}

logger = logging.getLogger("mlx_vlm.server")


class BadRequest(PromptTooLongError, HTTPException):
    """A request is at fault.

    Of an engine's exceptions, the application answers 400 to the first where it generates, and to the second elsewhere.
    """

    def __init__(self, message: str) -> None:
        HTTPException.__init__(self, 400, message)

    def __str__(self) -> str:
        return str(self.detail)


@contextmanager
def _as_bad_requests() -> Iterator[None]:
    """Raise BadRequest for the library's refusals."""
    try:
        yield
    except InvalidRequest as error:
        raise BadRequest(str(error)) from error


class ResponseEngine:
    """``mlx_vlm.server.generation.ResponseGenerator`` over a ``VLMBatcher``.

    Raises:
        ValueError: Draft models, or keys and values in different bits, are unsupported.
    """

    def __init__(
        self,
        model_path: str,
        adapter_path: str | None = None,
        vision_cache: Any = None,
        kv_bits: float | None = None,
        kv_key_bits: float | None = None,
        kv_value_bits: float | None = None,
        kv_key_scheme: str | None = None,
        kv_value_scheme: str | None = None,
        kv_group_size: int = 64,
        kv_quant_scheme: str = "uniform",
        quantized_kv_start: int = 0,
        top_logprobs_k: int = 0,
        apc_manager: Any = None,
        draft_model_path: str | None = None,
        draft_kind: str | None = None,
        prefill_step_size: int | None = None,
    ) -> None:
        refused: dict[str, Any] = {
            "kv_key_bits": kv_key_bits,
            "kv_value_bits": kv_value_bits,
        }
        refused |= {
            "kv_key_scheme": kv_key_scheme,
            "kv_value_scheme": kv_value_scheme,
            "draft_model": draft_model_path,
        }
        for name, value in refused.items():
            if value is not None:
                raise ValueError(f"{name} is not supported by vlm_batch's engine")
        self.model: Any = None
        self.processor: Any = None
        self.config: Any = None
        self.tokenizer: Any = None
        self.requests = Waiting(self)
        self._source = model_path, adapter_path
        self._quantisation = kv_bits, kv_group_size, kv_quant_scheme, quantized_kv_start
        self._top_logprobs = top_logprobs_k
        self._lock = threading.Lock()  # processors and loading are not thread-safe
        self.batcher: VLMBatcher | None = None

    # What the application calls
    # -----------------------------------------------------------------------------------------------------------------

    def wait_until_ready(self, timeout: float | None = None) -> tuple[Any, Any, Any]:
        """Load the model once; return (model, processor, config).

        Raises:
            HTTPException: 400, as the application's own engine, if it cannot be loaded.
        """
        with self._lock:
            if self.batcher is None:
                try:
                    self.batcher = self._load()
                except Exception as error:
                    logger.exception("Error loading model %s", self._source[0])
                    raise HTTPException(
                        400, f"Failed to load model: {error}"
                    ) from error
                self.processor = self.batcher.processing.processor
                self.tokenizer = self.batcher.processing.tokenizer
                self.config = self.model.config
                gc.collect()
                # the application collects garbage after every request, on its event loop
                gc.freeze()
        return self.model, self.processor, self.config

    def stop_and_join(self, timeout: float = 10.0) -> None:
        """End all requests and the engine."""
        if self.batcher is not None:
            gc.unfreeze()
            self.batcher.close()

    def generate(
        self,
        prompt: str,
        images: list[Any] | None = None,
        audio: list[Any] | None = None,
        args: GenerationArguments | None = None,
        videos: list[Any] | None = None,
    ) -> tuple[GenerationContext, Tokens]:
        """Submit a rendered prompt; return its context and a stream of tokens.

        Raises:
            BadRequest: The prompt, a medium or an argument cannot be used.
        """
        args = args or GenerationArguments(max_tokens=get_server_max_tokens())
        inputs = self._cpu_preprocess(
            prompt, images, audio, videos, **args.preprocessing_kwargs()
        )
        assert self.batcher is not None
        length = int(inputs["input_ids"].shape[-1])
        _check_context(length, args.max_tokens)
        with _as_bad_requests():
            params = sampling_params(
                args, self.tokenizer, inputs["input_ids"], self._top_logprobs
            )
            handle = self.batcher.submit_request(Request(inputs=inputs, params=params))
        shown = {} if args.skip_special_tokens else special_tokens(self.tokenizer)
        return GenerationContext(uid=id(handle), prompt_tokens=length), Tokens(
            handle, shown
        )

    def validate_context_budget(
        self,
        prompt: str,
        images: list[Any] | None = None,
        audio: list[Any] | None = None,
        args: GenerationArguments | None = None,
        videos: list[Any] | None = None,
    ) -> None:
        """Raise PromptTooLongError if prompt and answer exceed the server's limit, or an argument cannot be used.

        The application asks this before it begins a stream.
        """
        args = args or GenerationArguments(max_tokens=get_server_max_tokens())
        self.wait_until_ready()
        with _as_bad_requests():
            sampling_params(
                args,
                self.tokenizer,
                mx.zeros((1, 0), dtype=mx.int32),
                self._top_logprobs,
            )
        if get_configured_context_limit() is None:
            return
        inputs = self._cpu_preprocess(
            prompt, images, audio, videos, **args.preprocessing_kwargs()
        )
        _check_context(int(inputs["input_ids"].shape[-1]), args.max_tokens)

    def _cpu_preprocess(
        self,
        prompt: str,
        images: list[Any] | None = None,
        audio: list[Any] | None = None,
        videos: list[Any] | None = None,
        **preprocessing_kwargs: Any,
    ) -> dict[str, Any]:
        """Return model inputs; pixel limits hold for this request alone."""
        self.wait_until_ready()
        assert self.batcher is not None
        spec, processing = self.batcher.spec, self.batcher.processing
        if audio and not spec.audio:
            raise BadRequest(f"{spec.family} takes no recordings: {spec.no_audio}")
        unknown = preprocessing_kwargs.keys() - OF_PICTURES
        if unknown:
            raise BadRequest(
                f"vlm_batch's engine does not know the processor's {', '.join(sorted(unknown))}"
            )
        shape = preprocessing_kwargs.pop("resize_shape", None)
        sizer = vars(processing.processor).get("image_processor")
        with _as_bad_requests():
            sounds = [load_audio(sound, processing.audio_rate) for sound in audio or ()]
            pictures = [
                process_image(load_image(image), shape, sizer) for image in images or ()
            ]
            clips = [
                load_video(as_video(video), processing.sampling)
                for video in videos or ()
            ]
            with (
                self._lock,
                processing.scaled_to(_pixels(processing.pixels, preprocessing_kwargs)),
            ):
                return processing.inputs(prompt, pictures, clips, sounds)

    def _load(self) -> VLMBatcher:
        path, adapter = self._source
        trusted = os.environ.get("MLX_TRUST_REMOTE_CODE", "false").lower() == "true"
        if adapter is None:
            self.model, processor = load_model(path, trust_remote_code=trusted)
        else:
            self.model, processor, _ = load_model_resources(path, adapter)
        bits, group, scheme, start = self._quantisation
        return VLMBatcher(
            self.model,
            processor,
            max_rows=get_max_num_seqs() or None,
            kv=KVQuantisation(bits, group, scheme, start) if bits else None,
        )


def _pixels(own: PixelBounds | None, asked: Mapping[str, Any]) -> PixelBounds | None:
    """Return requested pixel bounds, else the processor's."""
    if not asked:
        return None
    if own is None:
        raise BadRequest(
            "the model's processor has no bounds on pixels: leave min_pixels and max_pixels out"
        )
    return PixelBounds(
        asked.get("min_pixels") or own.least, asked.get("max_pixels") or own.most
    )


class Waiting:
    """The application's queue, for its length only."""

    def __init__(self, engine: ResponseEngine) -> None:
        self._engine = engine

    def qsize(self) -> int:
        """Count waiting requests."""
        if self._engine.batcher is None:
            return 0
        stats = self._engine.batcher.stats()
        return stats.queued + stats.waiting


class Tokens:
    """A request's tokens for the application; ``next`` raises RuntimeError or BadRequest if the request failed.

    Args:
        handle: The request.
        shown: Special tokens to show, id -> text.
    """

    def __init__(self, handle: Handle, shown: Mapping[int, str]) -> None:
        self._handle = handle
        self._events = iter(handle.events())
        self._shown = shown

    def __iter__(self) -> Iterator[StreamingToken]:
        return self

    def __next__(self) -> StreamingToken:
        event = next(self._events)
        if event.result is not None:
            if isinstance(event.result.exception, InvalidRequest):
                raise BadRequest(
                    str(event.result.exception)
                ) from event.result.exception
            event.result.raise_for_error()
        return self._token(event)

    def close(self) -> None:
        """Cancel the unfinished request, from any thread."""
        self._handle.cancel()

    def __del__(self) -> None:
        self.close()

    def _token(self, event: Event) -> StreamingToken:
        made = StreamingToken(
            text=event.text,
            token=event.token or 0,
            logprobs=0.0,
            finish_reason=None,
            token_count=0 if event.token is None else 1,
        )
        if event.logprobs is not None:
            made.logprobs = event.logprobs.logprob
            made.top_logprobs = list(event.logprobs.top)
        if event.result is not None:
            _tell_ending(made, event.result)
        if event.token is not None and made.finish_reason != "stop":
            made.text = self._shown.get(event.token, "") + event.text
        return made


def _tell_ending(token: StreamingToken, result: Result) -> None:
    """Add what a request's last token says of it."""
    reason = result.finish_reason
    token.finish_reason = "stop" if reason == "cancelled" else reason
    token.peak_memory = peak_bytes() / 1e9
    usage, timings = result.usage, result.timings
    if usage is None:
        return
    token.cached_tokens = usage.cached_tokens
    if timings and timings.prefill:
        token.prompt_tps = usage.prompt_tokens / timings.prefill


class ThinkingBudget:
    """Logits processor that closes reasoning after some tokens, by mlx-vlm's rule."""

    def __init__(self, criteria: ThinkingBudgetCriteria) -> None:
        self._criteria = criteria
        self._seen: int | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Mask all but the closing token if it is due: tokens (T,), logits (1, V) -> (1, V)."""
        forced = None
        if self._seen is not None:
            for token in np.array(tokens[self._seen :]).tolist():
                forced = self._criteria(token)
        self._seen = tokens.size
        if forced is None:
            return logits
        return mx.where(mx.arange(logits.shape[-1]) == forced, logits, -mx.inf)


class BiasedTokens:
    """Logits processor that refuses biases of tokens that the model does not have: MLX writes them beyond the array.

    Args:
        tokens: Ids with a bias.

    Raises:
        InvalidParameters: An id is below 0.
    """

    def __init__(self, tokens: Collection[int]) -> None:
        self._highest = max(tokens)
        lowest = min(tokens)
        if lowest < 0:
            raise InvalidParameters(
                f"logit_bias holds {lowest}; token ids are integers of at least 0"
            )

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return the logits (1, V). Raises InvalidParameters."""
        check_within("logit_bias", (self._highest,), logits.shape[-1])
        return logits


class FormAfterThinking:
    """Logits processor of ``response_format`` that begins where thinking has ended.

    mlx-vlm's own applies its mask with a Metal kernel. This one takes the mask and works on every device.

    Args:
        form: mlx-vlm's processor.
        end: The token that ends thinking; None where nothing is thought.
    """

    def __init__(self, form: Any, end: int | None) -> None:
        self._form = form
        self._end = end
        self._seen: int | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Mask what the form does not allow: tokens (T,), logits (1, V) -> (1, V)."""
        told = [] if self._seen is None else np.array(tokens[self._seen :]).tolist()
        self._seen = tokens.size
        if self._end in told:
            self._end = None
        if self._end is not None:
            return logits
        # (1, V / 32), bits from the lowest
        mask = np.array(self._form.prepare_next_token_mask(int(tokens[-1])))
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[
            : logits.shape[-1]
        ]
        allowed = np.pad(allowed, (0, logits.shape[-1] - allowed.size))
        return mx.where(mx.array(allowed.astype(bool)), logits, -mx.inf)


def sampling_params(
    args: GenerationArguments, tokenizer: Any, input_ids: mx.array, top_logprobs: int
) -> SamplingParams:
    """Convert the application's arguments to sampling parameters.

    Raises:
        InvalidParameters: An argument is not supported.
    """
    for name, neutral in UNSUPPORTED.items():
        if vars(args)[name] != neutral:
            raise InvalidParameters(f"{name} is not supported by vlm_batch's engine")
    try:
        processors: list[Callable[[mx.array, mx.array], mx.array]] = (
            make_logits_processors(
                args.logit_bias,
                args.repetition_penalty,
                args.repetition_context_size,
                args.presence_penalty,
                args.presence_context_size,
                args.frequency_penalty,
                args.frequency_context_size,
            )
        )
    except ValueError as error:
        raise InvalidParameters(str(error)) from error
    if args.logit_bias:
        processors.insert(0, BiasedTokens(args.logit_bias))
    if args.thinking_budget is not None:
        processors.append(ThinkingBudget(_budget(args, tokenizer, input_ids)))
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p if 0 < args.top_p < 1 else 1.0,  # else mlx-vlm takes it as off
        top_k=max(0, args.top_k),
        min_p=args.min_p,
        seed=args.seed,
        logprobs=top_logprobs if args.logprobs or top_logprobs else None,
        logits_processors=[*processors, *_of_form(args, tokenizer, input_ids)],
    )


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return special tokens' texts by id, for parsers of tool calls."""
    return {
        token: added.content
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special
    }


def install() -> None:
    """Put ``ResponseEngine`` into mlx-vlm's application, and enlarge its event loop's thread pool."""
    # the attribute of that name is the application
    module = importlib.import_module("mlx_vlm.server.app")
    module.ResponseGenerator = ResponseEngine  # type: ignore[attr-defined]
    life: Callable[[Any], AbstractAsyncContextManager[Any]] = (
        module.app.router.lifespan_context
    )

    @asynccontextmanager
    async def with_threads(app: Any) -> AsyncIterator[Any]:
        pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="mlx-vlm-server")
        asyncio.get_running_loop().set_default_executor(pool)
        async with life(app) as state:
            yield state

    module.app.router.lifespan_context = with_threads


def arguments(argv: Sequence[str]) -> list[str]:
    """Add the loopback address, unless ``--host`` is given."""
    named = any(flag == "--host" or flag.startswith("--host=") for flag in argv)
    return [*argv] if named else [*argv, "--host", LOOPBACK]


def main() -> None:
    """Serve."""
    from mlx_vlm.server.cli import main as serve

    install()
    sys.argv = [sys.argv[0], *arguments(sys.argv[1:])]
    serve()


def _of_form(
    args: GenerationArguments, tokenizer: Any, input_ids: mx.array
) -> list[FormAfterThinking]:
    if not args.logits_processors:
        return []
    end, marks = None, list[str]()
    if args.enable_thinking:
        _, word, marks = _thinking_marks(args, tokenizer, input_ids)
        end = tokenizer.encode(word, add_special_tokens=False)[-1]
    is_closed = len(set(marks)) == 2 and marks[-1] == "end"  # by the prompt
    return [
        FormAfterThinking(form, None if is_closed else end)
        for form in args.logits_processors
    ]


def _budget(
    args: GenerationArguments, tokenizer: Any, input_ids: mx.array
) -> ThinkingBudgetCriteria:
    start, end, marks = _thinking_marks(args, tokenizer, input_ids)
    return ThinkingBudgetCriteria(
        tokenizer=tokenizer,
        thinking_budget=args.thinking_budget,
        thinking_end_token=end,
        thinking_start_token=start,
        enable_thinking=args.enable_thinking,
        prompt_preopens_thinking=marks[-1:] == ["start"],
    )


def _thinking_marks(
    args: GenerationArguments, tokenizer: Any, input_ids: mx.array
) -> tuple[str, str, list[str]]:
    """Return the texts that begin and end thinking, and which of both the prompt has, in order."""
    start = args.thinking_start_token or THINKING[0]
    end = args.thinking_end_token or THINKING[1]
    opening, closing = (
        tokenizer.encode(marker, add_special_tokens=False)[-1]
        for marker in (start, end)
    )
    names = {closing: "end", opening: "start"}
    prompt = np.array(input_ids).reshape(-1).tolist()
    return start, end, [names[token] for token in prompt if token in names]


def _check_context(prompt: int, answer: int) -> None:
    limit = get_configured_context_limit()
    if limit is not None and prompt + answer > limit:
        raise PromptTooLongError(
            f"{prompt} tokens of prompt and {answer} of answer; at most {limit} go together"
        )


if __name__ == "__main__":
    main()
