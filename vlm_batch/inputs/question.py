"""A checked request on its way to the model's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from vlm_batch.errors import InvalidRequest
from vlm_batch.inputs.audio import count_seconds
from vlm_batch.inputs.fetch import RecalledUri, is_url
from vlm_batch.inputs.grammar import LARGE, Form
from vlm_batch.inputs.images import count_pixels
from vlm_batch.inputs.media import Kind
from vlm_batch.inputs.processing import PixelBounds
from vlm_batch.inputs.videos import Sampling, measure_video, sources_to_read
from vlm_batch.records import OptionTokens, Thinking
from vlm_batch.types import (
    Audio,
    FetchPolicy,
    ImageInput,
    Option,
    SamplingParams,
    Video,
)

#: Most characters per token, on average; English has four to five.
CHARACTERS_PER_TOKEN = 16
#: Characters from which a prompt counts as long: tokenizing takes tenths of a second.
LONG_PROMPT = 200_000
#: Pixels from which a request counts as large: decoding takes tenths of a second or more, and its memory is returned to the
#: system at once, for the C library would keep it.
MANY_PIXELS = 2**24


class Lane(Enum):
    """The slowest thing that a question waits for."""

    MEMORY = "memory"  # everything is here
    DISK = "disk"
    NETWORK = "network"
    LONG = "long prompt or large form"
    PIXELS = "many pixels"
    FORM = "form that is not compiled yet"


@dataclass(frozen=True)
class Question:
    """A checked request with unread media, safe from the submitter's changes.

    ``num_pictures`` (with frames), ``num_pixels`` and ``seconds`` count media in memory, ``new_form`` the characters still
    to compile. ``tracks`` lists the recordings in the prompt's order: each one's video, or None for the next of ``audios``.
    ``is_templated`` if the chat template made the prompt.
    """

    prompt: str | None = None
    token_ids: tuple[int, ...] = ()
    inputs: Mapping[str, Any] | None = None
    images: tuple[ImageInput, ...] = ()
    videos: tuple[Video, ...] = ()
    audios: tuple[Audio, ...] = ()
    tracks: tuple[int | None, ...] = ()
    fetch: FetchPolicy = field(default_factory=FetchPolicy)
    params: SamplingParams = field(default_factory=SamplingParams)
    thinking: Thinking | None = None
    pixels: PixelBounds | None = None
    num_pictures: int = 0
    num_pixels: int = 0
    seconds: float = 0.0
    sampling: Sampling = field(default_factory=Sampling)
    client: int = 0
    new_form: int = 0
    form: Form | None = None
    is_templated: bool = True
    options: Sequence[Option] = ()

    @property
    def least_tokens(self) -> int:
        """The prompt's fewest possible positions."""
        if self.inputs is not None:
            return int(self.inputs["input_ids"].shape[-1])
        if self.prompt is None:
            return len(self.token_ids)
        return len(self.prompt) // CHARACTERS_PER_TOKEN

    @property
    def media(self) -> tuple[ImageInput | Video | Audio, ...]:
        return self.images + self.videos + self.audios

    def with_media(self, media: Sequence[Any]) -> Question:
        first_video = len(self.images)
        first_audio = first_video + len(self.videos)
        return replace(
            self,
            images=tuple(media[:first_video]),
            videos=tuple(media[first_video:first_audio]),
            audios=tuple(media[first_audio:]),
        ).measured()

    def measured(self) -> Question:
        """Return a copy with counted ``num_pictures``, ``num_pixels`` and ``seconds``."""
        count, pixels = len(self.images), sum(map(count_pixels, self.images))
        for video in self.videos:
            frames, frame_pixels = measure_video(video, self.sampling)
            count += frames
            pixels += frame_pixels
        return replace(
            self,
            num_pictures=count,
            num_pixels=pixels,
            seconds=sum(map(count_seconds, self.audios)),
        )

    @property
    def takes_long(self) -> bool:
        return self.prompt is not None and len(self.prompt) >= LONG_PROMPT

    @property
    def has_many_pixels(self) -> bool:
        """Whether unknown pictures take long to decode."""
        if self.num_pixels < MANY_PIXELS:
            return False
        known = [image for image in self.images if isinstance(image, RecalledUri)]
        return self.num_pixels - sum(map(count_pixels, known)) >= MANY_PIXELS

    @property
    def unread(self) -> dict[int, Lane]:
        """Lanes of the media that have still to be read, by their places among ``media``."""
        lanes = enumerate(map(lane_of, self.media))
        return {at: lane for at, lane in lanes if lane is not None}

    @property
    def lane(self) -> Lane:
        reads = set(self.unread.values())
        if Lane.NETWORK in reads:
            return Lane.NETWORK
        if self.takes_long or self.new_form >= LARGE:
            return Lane.LONG
        if self.new_form:
            return Lane.FORM
        if Lane.DISK in reads:
            return Lane.DISK
        if self.has_many_pixels:
            return Lane.PIXELS
        return Lane.MEMORY


@dataclass(frozen=True)
class Prepared:
    """A processor's output as evaluated mlx arrays; ``kept`` is its host copy, to begin again.

    ``image_sizes`` are (width, height), ``video_sizes`` (frames, width, height).
    """

    inputs: Mapping[str, Any]
    kept: Mapping[str, Any] | None = field(default=None, kw_only=True)
    image_sizes: tuple[tuple[int, int], ...] = ()
    video_sizes: tuple[tuple[int, int, int], ...] = ()
    audio_seconds: tuple[float, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    form: Form | None = None
    thinking: Thinking | None = None
    options: tuple[OptionTokens, ...] = ()


def lane_of(medium: ImageInput | Video | Audio) -> Lane | None:
    """Return a medium's lane; None in memory."""
    if isinstance(medium, Video):
        sources = sources_to_read(medium)
    else:
        source = medium.source if isinstance(medium, Audio) else medium
        sources = [source] if isinstance(source, (str, Path)) else []
    if any(map(is_url, sources)):
        return Lane.NETWORK
    return Lane.DISK if sources else None


def late_error(
    medium: ImageInput | Video | Audio, policy: FetchPolicy
) -> InvalidRequest:
    """Return the error of a hanging read."""
    kind = Kind.of(medium)
    return kind.error(
        f"{kind.describe(medium)} was not read within {policy.seconds:g} s (FetchPolicy.seconds): its drive or server does "
        "not answer"
    )
