"""Bounds on one request, and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass

from vlm_batch.checks import seconds_option, set_pixel_bounds, whole_option
from vlm_batch.errors import InvalidAudio, InvalidImage, PromptTooLong
from vlm_batch.inputs.audio import DEFAULT_MAX_SECONDS
from vlm_batch.inputs.images import DEFAULT_MAX_PIXELS
from vlm_batch.inputs.refusals import exceeds
from vlm_batch.inputs.videos import DEFAULT_MAX_VIDEO_PIXELS

#: Most pictures and frames of one request. A model's processor makes 0.1 megapixels and more of the smallest.
DEFAULT_MAX_PICTURES = 4096
#: Most prompt tokens where neither the model nor the batcher sets a limit.
MAX_TOKENS = 1 << 20
#: Fields of ``Limits`` that are whole numbers.
_COUNTS = (
    "image_pixels",
    "video_pixels",
    "request_pixels",
    "request_pictures",
    "prompt_tokens",
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on one request; None lifts a bound.

    Attributes:
        image_pixels: Pixels of one picture, checked before decoding.
        video_pixels: Pixels of a video's sampled frames together, checked before decoding.
        request_pixels: Pixels of all pictures and frames together.
        request_pictures: Pictures and frames together: processors enlarge small ones.
        audio_seconds: Seconds of all recordings together.
        prompt_tokens: Positions of the prompt, pictures included; the model's context bounds it, too.
        min_pixels: Default of requests that name none.
        max_pixels: Default of requests that name none, and the most that one may name. Above the model's own it changes
            nothing, unless ``min_pixels`` is above that, too.

    Raises:
        ValueError: A bound is out of range.
    """

    image_pixels: int | None = DEFAULT_MAX_PIXELS
    video_pixels: int | None = DEFAULT_MAX_VIDEO_PIXELS
    request_pixels: int | None = DEFAULT_MAX_VIDEO_PIXELS
    request_pictures: int | None = DEFAULT_MAX_PICTURES
    audio_seconds: float | None = DEFAULT_MAX_SECONDS
    prompt_tokens: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        set_pixel_bounds(self, self.min_pixels, self.max_pixels)
        for name in _COUNTS:
            checked = whole_option(name, vars(self)[name], least=1, or_none=True)
            object.__setattr__(self, name, checked)
        if self.audio_seconds is not None:
            seconds = seconds_option("audio_seconds", self.audio_seconds)
            object.__setattr__(self, "audio_seconds", seconds)


#: Bounds where nobody says.
LIMITS = Limits()


def check_pixels(limits: Limits, num_pixels: int) -> None:
    """Refuse more pixels of all pictures and frames than are read."""
    most = limits.request_pixels
    if exceeds(num_pixels, most):
        raise InvalidImage(
            f"the request's pictures and frames have {num_pixels:,} pixels together; at most {most:,} are read",
            advice=" (Limits.request_pixels)",
        )


def check_num_pictures(limits: Limits, num_pictures: int) -> None:
    """Refuse more pictures and frames than are read."""
    most = limits.request_pictures
    if exceeds(num_pictures, most):
        raise InvalidImage(
            f"the request has {num_pictures:,} pictures and frames; at most {most:,} are read",
            advice=" (Limits.request_pictures)",
        )


def check_num_recordings(limits: Limits, count: int) -> None:
    """Refuse more recordings than seconds: processors fill short ones up, some to half a minute."""
    if limits.audio_seconds is None:
        return
    most = max(1, limits.audio_seconds)
    if count > most:
        raise InvalidAudio(
            f"the request has {count:,} recordings; at most {int(most):,} are read",
            advice=" (one a second of Limits.audio_seconds)",
        )


def check_enlarged(limits: Limits, least: int, count: int) -> None:
    """Refuse pictures that ``min_pixels`` would make larger than they may be.

    Args:
        least: fewest pixels of each, as asked.
        count: number of pictures.
    """
    most = limits.image_pixels
    if exceeds(least, most):
        raise InvalidImage(
            f"min_pixels is {least:,}; a picture may have {most:,}",
            advice=" (Limits.image_pixels)",
        )
    most = limits.request_pixels
    if exceeds(least * count, most):
        raise InvalidImage(
            f"min_pixels is {least:,}, which {count:,} pictures make {least * count:,} pixels together; "
            f"at most {most:,} are read",
            advice=" (Limits.request_pixels)",
        )


def check_length(
    limits: Limits, max_context: int | None, size: int, per_token: int, said: str
) -> None:
    """Refuse a prompt too long in any tokenization.

    Args:
        max_context: positions of the model's context; None if unknown.
        size: characters or tokens of the prompt.
        per_token: most of them to a token.
        said: the error's beginning, with a place for the size.
    """
    bounds = (max_context, limits.prompt_tokens)
    most = min((bound for bound in bounds if bound is not None), default=MAX_TOKENS)
    if size > most * per_token:
        raise PromptTooLong(
            f"{said.format(f'{size:,}')}; {most:,} tokens fit, which are {most * per_token:,} at most"
        )
