"""Events of a request while it runs, and its result."""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vlm_batch.errors import RequestFailed, describe, let_go

if TYPE_CHECKING:
    from vlm_batch.store.prompt import PromptCache

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one step: the chosen token's, and the most likely ones' in falling order."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Usage:
    """Token counts of a request.

    Attributes:
        prompt_tokens: positions of the prompt, media included.
        image_tokens: prompt positions of pictures, videos or recordings.
        cached_tokens: prompt positions taken from a cache.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds of a request's life; prefill and decode share the device.

    Attributes:
        queue: waiting for a place, without ``encode``.
        encode: encoding its media.
        prefill: from its place to its first token.
        decode: from then to its end.
        ttft: from submit to its first token, or to the end of an answer that has none.
        total: from submit to its end.
        read: within ``queue``, reading files and URLs.
        process: within ``queue``, decoding media and running the processor.
    """

    queue: float = 0.0
    encode: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    ttft: float = math.nan
    total: float = 0.0
    read: float = 0.0
    process: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """A request's end and answer.

    Attributes:
        stop_reason: the stop string or token id that matched.
        image_sizes: (width, height) of the pictures as read.
        model_image_sizes: the same after the processor, for families with a patch grid.
        video_sizes: (frames, width, height) for the processor.
        audio_seconds: lengths of the recordings.
        prompt_logprobs: of each prompt position; None for the first, for media, and for tokens that the model sees
            before predicting them.
        prompt_token_ids: with ``return_prompt_ids``: the prompt as the model reads it, media as placeholders.
        parsed: an answer with a form: the value of its JSON, or its text. None if incomplete.
        others: further answers (``n``), each with its own end and usage.
        error: set if and only if ``finish_reason`` is "error".
        cache: the conversation's state, with ``return_cache``.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = "stop"
    stop_reason: str | int | None = None
    usage: Usage = Usage()
    timings: Timings = Timings()
    image_sizes: tuple[tuple[int, int], ...] = ()
    model_image_sizes: tuple[tuple[int, int], ...] = ()
    video_sizes: tuple[tuple[int, int, int], ...] = ()
    audio_seconds: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    parsed: Any = None
    others: tuple[Result, ...] = ()
    error: str | None = None
    if TYPE_CHECKING:
        exception: BaseException | None = None
        cache: PromptCache | None = None
    else:
        # objects, not data: set like the others, and left out by dataclasses.asdict, which goes to JSON
        exception: InitVar[BaseException | None] = None
        cache: InitVar[PromptCache | None] = None

        def __post_init__(
            self, exception: BaseException | None, cache: PromptCache | None
        ) -> None:
            object.__setattr__(self, "exception", exception)
            object.__setattr__(self, "cache", cache)

    @property
    def ok(self) -> bool:
        """Whether the answer ended by a stop or its length."""
        return self.finish_reason in ("stop", "length")

    def raise_for_error(self) -> Result:
        """Return self, or raise RequestFailed."""
        if self.error is not None:
            raise RequestFailed(
                f"request {self.request_id}: {self.error}"
            ) from self.exception
        return self


def failed_result(request_id: str, error: BaseException) -> Result:
    """Return a failed request's result."""
    return Result(
        request_id=request_id,
        finish_reason="error",
        error=describe(error),
        exception=let_go(error),
    )


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a request: a token and the text that it completes, an end, or both.

    Attributes:
        result: set on the request's last event.
        index: number of the answer.
        answer: set at the end of that answer.
        prompt_tokens: length of the prompt; of events with a token that ends nothing.
        prompt_token_ids: likewise its tokens, with ``Request.return_prompt_ids``.
    """

    request_id: str
    token: int | None = None
    text: str = ""
    logprobs: TokenLogprobs | None = None
    result: Result | None = None
    index: int = 0
    answer: Result | None = None
    prompt_tokens: int = 0
    prompt_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Stats:
    """Counters of a batcher: present ones, and totals since its start."""

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
    cache_hits: int = 0  # requests that reused a prefix
    cached_tokens: int = 0  # prompt positions that they reused
    cache_bytes: int = 0  # kept for later requests
    # of the engine: if it does not grow while requests run, the engine hangs
    steps: int = 0
    # requests recomputed after a failed step or a lack of memory; no token is told twice
    recomputed: int = 0
    input_bytes: int = 0  # processors' outputs of live requests, on the host
    max_kv_bytes: int | None = None  # bound on kv_bytes
    # all of MLX's memory in this process: weights, and everything here but input_bytes
    mlx_bytes: int = 0
    stalled: float = 0.0  # seconds in a step that does not end; 0 while steps go on
    ahead_bytes: int = 0  # read and prepared for requests that wait
    most_rows: int = 0  # requests that may have a place now; varies with max_rows=None
    # with requests to compute; waiting for their media to be read does not count
    busy_seconds: float = 0.0
    drafted: int = 0  # tokens computed as drafts
    drafts_held: int = 0  # accepted drafts: each saved its request a step
