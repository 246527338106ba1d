"""A request's way to a model's inputs: checked and rendered at submit, read and processed on a loader's thread."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from vlm_batch.arrays import as_numpy
from vlm_batch.errors import InvalidImage, InvalidPrompt, InvalidRequest, InvalidVideo
from vlm_batch.inputs.chats import split_messages
from vlm_batch.inputs.fetch import Cancelled, is_data_uri, is_url
from vlm_batch.inputs.images import DEFAULT_MAX_PIXELS, describe_source, fetch_image, load_image, own_image
from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.videos import (
    DEFAULT_MAX_VIDEO_PIXELS,
    as_video,
    describe_video,
    fetch_video,
    is_to_be_fetched,
    load_video,
    own_video,
)
from vlm_batch.registry import ModelSpec
from vlm_batch.types import FetchPolicy, ImageInput, Message, Request, Video, VideoInput


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what one request may bring; None lifts a bound.

    ``image_pixels`` is checked before a picture is decoded, ``video_pixels``, for all frames together that are taken
    of a video, before these are. ``prompt_tokens`` counts a prompt's positions, pictures included; the model's context
    bounds them as well. ``fetch`` says which paths and URLs are read, and how much of them.
    """

    image_pixels: int | None = DEFAULT_MAX_PIXELS
    video_pixels: int | None = DEFAULT_MAX_VIDEO_PIXELS
    prompt_tokens: int | None = None
    fetch: FetchPolicy = field(default_factory=FetchPolicy)


#: Characters from which on a prompt counts as long: a tokenizer takes tenths of a second for as many.
LONG_PROMPT = 200_000


class Lane(Enum):
    """What a question's loading waits for. Those of one lane wait for each other, and for no other lane's."""

    MEMORY = "memory"  # everything is here
    DISK = "disk"
    NETWORK = "network"
    LONG = "long prompt"


@dataclass(frozen=True)
class Question:
    """A checked request: its rendered prompt, final token ids, or processed inputs (numpy); pictures and videos unread.

    Nothing of it can be changed by the submitter any more. ``fetch`` says how paths and URLs are read.
    """

    prompt: str | None = None
    token_ids: tuple[int, ...] = ()
    inputs: Mapping[str, Any] | None = None
    images: tuple[ImageInput, ...] = ()
    videos: tuple[Video, ...] = ()
    fetch: FetchPolicy = field(default_factory=FetchPolicy)

    @property
    def media(self) -> tuple[ImageInput | Video, ...]:
        """The pictures, then the videos."""
        return self.images + self.videos

    def with_media(self, media: Sequence[ImageInput | Video]) -> Question:
        """The same with other ``media``, as many of each."""
        count = len(self.images)
        return replace(self, images=tuple(media[:count]), videos=tuple(media[count:]))

    @property
    def is_long(self) -> bool:
        """Whether its prompt takes long to become tokens."""
        return self.prompt is not None and len(self.prompt) >= LONG_PROMPT

    @cached_property
    def lane(self) -> Lane:
        """The slowest of what it waits for."""
        lanes = {lane_of(medium) for medium in self.media}
        for lane in (Lane.NETWORK, Lane.LONG, Lane.DISK):
            if lane in lanes or (lane is Lane.LONG and self.is_long):
                return lane
        return Lane.MEMORY


@dataclass(frozen=True)
class Prepared:
    """A processor's output as numpy arrays, its pictures' (width, height), its videos' (frames, width, height)."""

    inputs: Mapping[str, Any]
    image_sizes: tuple[tuple[int, int], ...] = ()
    video_sizes: tuple[tuple[int, int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that it holds until the engine has taken it in."""
        return sum(_nbytes(value) for value in self.inputs.values())


class Preparer:
    """One model's ``check`` (submitter's thread) and ``prepare`` (a loader's thread).

    ``spec`` says what the family takes; ``image_token_ids`` are the ids whose positions hold picture features;
    ``max_context`` is how many positions the model was made for, None if it does not say.
    """

    def __init__(
        self,
        processing: Processing,
        spec: ModelSpec,
        *,
        image_token_ids: frozenset[int],
        max_context: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.processing = processing
        self.spec = spec
        self.limits = limits or Limits()
        self.max_context = max_context
        self._image_token_ids = image_token_ids
        self._processor_lock = Lock()  # processors and tokenizers are not made for two threads at once

    # In the submitter's thread
    # -----------------------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> Question:
        """Refuse what can be known to be wrong now, and render the prompt. Raises InvalidRequest."""
        ways = {
            "prompt": request.prompt,
            "messages": request.messages,
            "token_ids": request.token_ids,
            "inputs": request.inputs,
        }
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            said = ", ".join(given) or "none"
            raise InvalidPrompt(f"exactly one of prompt, messages, token_ids and inputs is needed; given: {said}")
        images, videos = tuple(request.images), tuple(request.videos)
        turns: list[Message] = []
        if request.messages is not None:
            turns, *media = split_messages(request.messages, images, videos)
            images, videos = map(tuple, media)
        self._check_pictures(len(images))
        images, clips = tuple(map(own_image, images)), self._checked_videos(videos)
        if request.inputs is not None:
            return Question(inputs=_checked_inputs(request.inputs, images or videos))
        if request.token_ids is not None:
            ids = _checked_ids(request.token_ids)
            return Question(token_ids=ids, images=images, videos=clips, fetch=self.limits.fetch)
        if request.prompt is not None:
            prompt = self._rendered(request.prompt, request.rendered, len(images), len(clips))
        else:
            prompt = self.processing.render(turns, len(images), len(clips))
        return Question(prompt=prompt, images=images, videos=clips, fetch=self.limits.fetch)

    def _check_pictures(self, count: int) -> None:
        """Raise InvalidImage for more pictures than the family takes."""
        if count and not self.spec.images:
            raise InvalidImage(f"{self.spec.family} takes no pictures: it answers texts only")
        if count > 1 and not self.spec.multi_image:
            raise InvalidImage(f"{self.spec.family} takes one picture a request; given: {count}")

    def _checked_videos(self, videos: Sequence[VideoInput]) -> tuple[Video, ...]:
        if videos and not self.spec.video:
            raise InvalidVideo(f"{self.spec.family} takes no videos: {self.spec.no_video}")
        return tuple(own_video(as_video(video)) for video in videos)

    def _rendered(self, prompt: str, is_final: bool, num_images: int, num_videos: int) -> str:
        if not is_final:
            return self.processing.render(prompt, num_images, num_videos)
        if not prompt.strip():
            raise InvalidPrompt("the prompt is empty")
        for kind, noun, given in (("image", "picture", num_images), ("video", "video", num_videos)):
            room = self.processing.count_placeholders(prompt, kind)
            if room is not None and room != given:
                raise InvalidPrompt(f"the rendered prompt has {room} {noun} placeholders for {given} {noun}s")
        return prompt

    # On a loader's thread
    # -----------------------------------------------------------------------------------------------------------------

    def prepare(self, question: Question, cancelled: Cancelled | None = None) -> Prepared:
        """Read a question's pictures and videos and run the processor. What comes out is numpy: no array crosses threads.

        Raises InvalidRequest for what cannot be read or does not fit, and OperationCancelled soon after ``cancelled`` is
        set.
        """
        if question.inputs is not None:
            return Prepared(question.inputs)
        cancelled, limits = cancelled or Cancelled(), self.limits
        images = []
        for source in question.images:
            cancelled.check()
            images.append(load_image(source, limits.image_pixels, limits.fetch, cancelled))
        clips = []
        for video in question.videos:
            cancelled.check()
            sampling = self.processing.sampling
            clips.append(load_video(video, sampling, limits.video_pixels, limits.image_pixels, limits.fetch, cancelled))
        with self._processor_lock:
            cancelled.check()
            if question.prompt is not None:
                found = self.processing.inputs(question.prompt, images, clips)
            else:
                found = self.processing.inputs_of_ids(question.token_ids, images, self._image_token_ids, clips)
            return Prepared(as_numpy(found), tuple(image.size for image in images), tuple(clip.size for clip in clips))


def lane_of(medium: ImageInput | Video) -> Lane | None:
    """What reading a picture or video waits for; None if it is in memory."""
    if isinstance(medium, Video):
        if not is_to_be_fetched(medium):
            return None
        sources = [medium.source] if isinstance(medium.source, (str, Path)) else list(medium.source)
    else:
        sources = [medium]
    if any(is_url(source) for source in sources):
        return Lane.NETWORK
    is_here = all(is_data_uri(source) or not isinstance(source, (str, Path)) for source in sources)
    return None if is_here else Lane.DISK


def read_medium(medium: ImageInput | Video, policy: FetchPolicy, cancelled: Cancelled) -> ImageInput | Video:
    """The picture or video with its file in memory or at hand. Raises InvalidRequest, or OperationCancelled."""
    fetched = fetch_video if isinstance(medium, Video) else fetch_image
    return fetched(medium, policy, cancelled)


def late_error(medium: ImageInput | Video, policy: FetchPolicy) -> InvalidRequest:
    """The error of a picture or video whose reading does not come back."""
    is_video = isinstance(medium, Video)
    name = describe_video(medium) if is_video else describe_source(medium)
    return (InvalidVideo if is_video else InvalidImage)(
        f"{name} was not read within {policy.seconds:g} s (FetchPolicy.seconds): its drive or server does not answer"
    )


def _nbytes(value: Any) -> int:
    """Bytes of the arrays in a value of a processor's output."""
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return int(value.nbytes) if isinstance(value, np.ndarray) else 0


def _checked_ids(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Token ids that are some: an array of embeddings is read at what is asked of it, outside of it, too."""
    if not len(token_ids):
        raise InvalidPrompt("token_ids is empty")
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < 2**31:
            raise InvalidPrompt(f"token_ids holds {token!r}; token ids are integers in 0..2**31-1")
    return tuple(int(token) for token in token_ids)


def _checked_inputs(inputs: Mapping[str, Any], media: tuple[Any, ...]) -> dict[str, Any]:
    if media:
        raise InvalidPrompt("inputs= are processed already: their pictures belong into pixel_values, not into images")
    if "input_ids" not in inputs:
        raise InvalidPrompt("inputs= needs input_ids of shape (1, L)")
    arrays = copy.deepcopy(as_numpy(inputs))  # the caller's buffers stay the caller's
    shape = arrays["input_ids"].shape
    if len(shape) != 2 or shape[0] != 1 or shape[1] == 0:
        raise InvalidPrompt(f"inputs= needs input_ids of shape (1, L), one request a submit; given: {tuple(shape)}")
    return arrays
