"""mlx-vlm's calls with this library's engine, for a script that changes one import.

::

    from vlm_batch.integrations.drop_in import batch_generate, generate, load, stream_generate

Arguments and results are those of ``mlx_vlm`` (0.7). Prompts are made as transformers makes them (docs/prompts.md), and a
request that fails leaves the others of its batch alone. An option that would change an answer and is not supported is a
TypeError.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import vlm_batch  # noqa: F401  (before mlx.core: it chooses the BLAS)

# isort: split
import mlx.nn as nn
from mlx_vlm import load
from mlx_vlm.generate import GenerationResult
from mlx_vlm.generate.ar import BatchResponse, BatchStats

from vlm_batch.batcher import KVQuantisation, VLMBatcher
from vlm_batch.handle import Handle
from vlm_batch.runtime.memory import peak_bytes
from vlm_batch.types import Request, Result, SamplingParams

__all__ = ["BatchAnswers", "batch_generate", "generate", "load", "stream_generate"]

#: Options that are fields of ``SamplingParams`` under the same name.
SAME = frozenset(
    {
        "frequency_penalty",
        "logit_bias",
        "logits_processors",
        "max_tokens",
        "min_p",
        "presence_penalty",
        "repetition_context_size",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "temperature",
        "thinking_budget",
        "top_k",
        "top_p",
    }
)
#: Options that change how an answer is computed, and not the answer.
OF_SPEED = frozenset(
    {
        "apc_manager",
        "apc_tenant",
        "group_by_shape",
        "prefill_step_size",
        "track_image_sizes",
        "vision_cache",
    }
)
#: Options of keys and values in few bits -> fields of ``KVQuantisation``.
OF_KEYS = {
    "kv_bits": "bits",
    "kv_group_size": "group_size",
    "kv_quant_scheme": "scheme",
    "quantized_kv_start": "start",
}
#: What mlx-vlm's ``generate`` and ``stream_generate`` take where nothing is said.
DEFAULT_MAX_TOKENS = 256

logger = logging.getLogger("vlm_batch")

_batchers: dict[tuple[int, KVQuantisation | None], VLMBatcher] = {}
_making = threading.Lock()


@dataclass
class BatchAnswers(BatchResponse):
    """mlx-vlm's ``BatchResponse``.

    Attributes:
        errors: why a prompt has no answer; None for those that have one. The text of a failed one is empty.
    """

    errors: list[str | None] = field(default_factory=list)


def generate(
    model: nn.Module,
    processor: Any,
    prompt: str,
    image: Any = None,
    audio: Any = None,
    video: Any = None,
    verbose: bool = False,
    **options: Any,
) -> GenerationResult:
    """Answer one prompt that ``apply_chat_template`` made.

    Args:
        options: mlx-vlm's ``GenerateKwargs``. Sampling that nothing is said of is the checkpoint's, as there.

    Raises:
        TypeError: an option is not supported.
        RequestFailed: the request cannot be answered.
    """
    batcher, request = _prepared(model, processor, prompt, image, audio, video, options)
    result = batcher.submit_request(request).result().raise_for_error()
    if verbose:
        print(result.text)
    return _as_generation(result, result.text)


def stream_generate(
    model: nn.Module,
    processor: Any,
    prompt: str,
    image: Any = None,
    audio: Any = None,
    video: Any = None,
    **options: Any,
) -> Iterator[GenerationResult]:
    """Answer one prompt in pieces, as ``generate``. The last piece has the reason of the end. Leaving the loop cancels."""
    options.pop("verbose", None)
    batcher, request = _prepared(model, processor, prompt, image, audio, video, options)
    handle = batcher.submit_request(request)
    try:
        yield from _pieces(handle)
    finally:
        handle.cancel()


def batch_generate(
    model: nn.Module,
    processor: Any,
    images: Any = None,
    audios: Any = None,
    prompts: Sequence[str] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    group_by_shape: bool = True,
    track_image_sizes: bool = True,
    videos: Any = None,
    **options: Any,
) -> BatchAnswers:
    """Answer several prompts of one user turn each, with at most one picture, recording and video a prompt.

    Args:
        prompts: plain questions; the chat template is applied here, as there.
        max_tokens: for all, or one a prompt.
        group_by_shape: nothing here: pictures of any sizes share the batch.
        track_image_sizes: return ``image_sizes``, (height, width) of each prompt's picture.
        options: mlx-vlm's ``GenerateKwargs``. Sampling that nothing is said of is greedy, as there.

    Raises:
        ValueError: there are more media than prompts, or other numbers of ``max_tokens``.
        TypeError: an option is not supported.
    """
    questions = list(prompts or ())
    batcher = _batcher(model, processor, _keys_and_values(options))
    params = _params(options, batcher)
    if isinstance(max_tokens, int):
        max_tokens = [max_tokens] * len(questions)
    media = {
        name: _one_each(name, given, len(questions))
        for name, given in (("images", images), ("audios", audios), ("videos", videos))
    }
    requests = [
        Request(
            prompt=question,
            params=SamplingParams(**params, max_tokens=limit),
            **{name: each[index] for name, each in media.items()},
        )
        for index, (question, limit) in enumerate(
            zip(questions, max_tokens, strict=True)
        )
    ]
    begin = time.perf_counter()
    results = batcher.generate(requests)
    seconds = time.perf_counter() - begin
    for index, result in enumerate(results):
        if result.error is not None:
            logger.warning("prompt %d has no answer: %s", index, result.error)
        elif verbose:
            print(f"{index}: {result.text}")
    sizes = [_height_and_width(result) for result in results]
    return BatchAnswers(
        [result.text for result in results],
        _stats(results, seconds),
        sizes if track_image_sizes and images is not None else None,
        [result.error for result in results],
    )


# From mlx-vlm's arguments
# ----------------------------------------------------------------------------------------------------------------------


def _prepared(
    model: nn.Module,
    processor: Any,
    prompt: str,
    image: Any,
    audio: Any,
    video: Any,
    options: dict[str, Any],
) -> tuple[VLMBatcher, Request]:
    batcher = _batcher(model, processor, _keys_and_values(options))
    own = {"max_tokens": DEFAULT_MAX_TOKENS, **batcher.recommended_sampling.params}
    params = {**own, **_params(options, batcher)}
    request = Request(
        prompt=prompt,
        template=None,
        images=_several(image),
        audios=_several(audio),
        videos=_several(video),
        params=SamplingParams(**params),
    )
    return batcher, request


def _batcher(model: nn.Module, processor: Any, kv: KVQuantisation | None) -> VLMBatcher:
    """Return the model's batcher. It is made once, and goes with the model."""
    key = id(model), kv
    with _making:
        if key not in _batchers:
            _batchers[key] = VLMBatcher(model, processor, kv=kv)
            # a batcher that nobody holds ends its own thread
            weakref.finalize(model, _batchers.pop, key, None)
        return _batchers[key]


def _keys_and_values(options: dict[str, Any]) -> KVQuantisation | None:
    """Take the options of keys and values out of ``options``."""
    given = {OF_KEYS[name]: options.pop(name) for name in OF_KEYS if name in options}
    return None if given.get("bits") is None else KVQuantisation(**given)


def _params(options: Mapping[str, Any], batcher: VLMBatcher) -> dict[str, Any]:
    """Return fields of ``SamplingParams``.

    Raises:
        TypeError: an option would change the answer, and is not supported.
    """
    params: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or name in OF_SPEED:
            continue
        if name == "eos_tokens":
            tokens = _several(value)
            params["stop_token_ids"] = _token_ids(tokens, batcher.processing.tokenizer)
        elif name in SAME:
            params[name] = value
        else:
            raise TypeError(
                f"{name} is not supported here; vlm_batch.SamplingParams and VLMBatcher"
                " have what is (docs/from-mlx-vlm.md)"
            )
    return params


def _token_ids(tokens: Sequence[int | str], tokenizer: Any) -> list[int]:
    return [
        token if isinstance(token, int) else tokenizer.convert_tokens_to_ids(token)
        for token in tokens
    ]


def _several(media: Any) -> Sequence[Any]:
    if media is None:
        return ()
    return media if isinstance(media, (list, tuple)) else (media,)


def _one_each(name: str, media: Any, count: int) -> list[Any]:
    """Return one medium or None for each of ``count`` prompts."""
    given = list(_several(media))
    if len(given) > count:
        raise ValueError(f"there are {len(given)} {name} for {count} prompts")
    return given + [None] * (count - len(given))


# To mlx-vlm's results
# ----------------------------------------------------------------------------------------------------------------------


def _pieces(handle: Handle) -> Iterator[GenerationResult]:
    for piece in handle:
        yield GenerationResult(text=piece)
    result = handle.result().raise_for_error()
    yield _as_generation(result, "")


def _as_generation(result: Result, text: str) -> GenerationResult:
    usage, timings = result.usage, result.timings
    return GenerationResult(
        text=text,
        token=result.token_ids[-1] if result.token_ids else None,
        prompt_tokens=usage.prompt_tokens,
        generation_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tps=_rate(usage.prompt_tokens, timings.encode + timings.prefill),
        generation_tps=_rate(usage.completion_tokens, timings.decode),
        peak_memory=peak_bytes() / 1e9,
        cached_tokens=usage.cached_tokens,
        finish_reason=result.finish_reason,
        token_ids=list(result.token_ids),
    )


def _stats(results: Sequence[Result], seconds: float) -> BatchStats:
    """Return counts and rates; the time of prompts is that until the last first token."""
    prompt_tokens = sum(result.usage.prompt_tokens for result in results)
    tokens = sum(result.usage.completion_tokens for result in results)
    until_decoding = max((result.timings.ttft for result in results), default=0.0)
    prompt_time = min(until_decoding, seconds)
    return BatchStats(
        prompt_tokens=prompt_tokens,
        prompt_tps=_rate(prompt_tokens, prompt_time),
        prompt_time=prompt_time,
        generation_tokens=tokens,
        generation_tps=_rate(tokens, seconds - prompt_time),
        generation_time=seconds - prompt_time,
        peak_memory=peak_bytes() / 1e9,
    )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _height_and_width(result: Result) -> tuple[int, int]:
    """Return the picture's size in mlx-vlm's order; zeros where there is none."""
    if not result.image_sizes:
        return (0, 0)
    width, height = result.image_sizes[0]
    return (height, width)
