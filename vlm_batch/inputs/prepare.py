"""Requests to model inputs: checked at submit, processed on a loader's thread."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image

from vlm_batch.arrays import MOST_ON_HOST, as_numpy, evaluated, num_bytes, on_host
from vlm_batch.checks import (
    check_within,
    seconds_option,
    set_pixel_bounds,
    whole_option,
)
from vlm_batch.errors import (
    InvalidAudio,
    InvalidCache,
    InvalidImage,
    InvalidParameters,
    InvalidPrompt,
    InvalidRequest,
    InvalidVideo,
    PromptTooLong,
    describe,
    shown,
)
from vlm_batch.inputs.audio import (
    DEFAULT_MAX_SECONDS,
    Sound,
    as_audio,
    check_seconds,
    count_seconds,
    describe_audio,
    load_audio,
    own_audio,
)
from vlm_batch.inputs.chats import Track, has_sound, split_messages
from vlm_batch.inputs.fetch import Cancelled, RecalledUri, is_data_uri, is_url
from vlm_batch.inputs.grammar import LARGE, Form, Forms
from vlm_batch.inputs.images import (
    DEFAULT_MAX_PIXELS,
    count_pixels,
    fetch_image,
    load_image,
    names_picture,
    own_image,
    picture_suffixes,
)
from vlm_batch.inputs.media import KINDS, Kind
from vlm_batch.inputs.options import tokens_of_options
from vlm_batch.inputs.processing import ESCAPE, PixelBounds, Processing, ProcessorPool
from vlm_batch.inputs.processors import settings_of
from vlm_batch.inputs.recalled import own_uri, recalled_picture
from vlm_batch.inputs.reserved import ReservedWords, texts_of
from vlm_batch.inputs.template import refuse
from vlm_batch.inputs.videos import (
    DEFAULT_MAX_VIDEO_PIXELS,
    Clip,
    Sampling,
    as_video,
    is_to_be_fetched,
    load_video,
    measure_video,
    own_video,
)
from vlm_batch.records import OptionTokens, Thinking
from vlm_batch.registry import ModelSpec
from vlm_batch.runtime.memory import trim
from vlm_batch.store.digest import hash_ahead
from vlm_batch.store.pictures import PictureStore
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import (
    Audio,
    FetchPolicy,
    ImageInput,
    Message,
    Option,
    Request,
    SamplingParams,
    Template,
    Video,
)

#: Most pictures and frames of one request. A model's processor makes 0.1 megapixels and more of the smallest.
DEFAULT_MAX_PICTURES = 4096
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
            object.__setattr__(
                self,
                "audio_seconds",
                seconds_option("audio_seconds", self.audio_seconds),
            )


#: Most characters per token, on average; English has four to five.
CHARACTERS_PER_TOKEN = 16
#: Most prompt tokens where neither the model nor the batcher sets a limit.
MAX_TOKENS = 1 << 20
#: Characters from which a prompt counts as long: tokenizing takes tenths of a second.
LONG_PROMPT = 200_000
#: Parameters that name tokens by their ids.
_TOKEN_IDS = (
    "stop_token_ids",
    "allowed_token_ids",
    "logit_bias",
    "whitelist_token_ids",
)
#: Pixels from which a request counts as large: decoding takes tenths of a second or more, and its memory is returned to the
#: system at once, for the C library would keep it.
MANY_PIXELS = 2**24


#: Ways to say what is asked, of which a request has one.
_WAYS = ("prompt", "messages", "token_ids", "inputs")
#: Fields of a request, the type of each, what is right, and the error of another type.
_TYPES: tuple[tuple[str, type, str, type[InvalidRequest]], ...] = (
    (
        "prompt",
        str,
        "text (str), and comes after the pictures: submit(images, prompt)",
        InvalidPrompt,
    ),
    ("inputs", Mapping, "a mapping of names to arrays", InvalidPrompt),
    (
        "cache",
        PromptCache,
        "a PromptCache: Result.cache, or PromptCache.load(path)",
        InvalidCache,
    ),
)


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
    options: tuple[Option, ...] = ()

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
        ends = len(self.images), len(self.images) + len(self.videos)
        images = media[: ends[0]]
        videos = media[ends[0] : ends[1]]
        audios = media[ends[1] :]
        return replace(
            self, images=tuple(images), videos=tuple(videos), audios=tuple(audios)
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
    def lane(self) -> Lane:
        reads = set(map(lane_of, self.media))
        if Lane.NETWORK in reads:
            return Lane.NETWORK
        if self.takes_long or self.new_form >= LARGE:
            return Lane.LONG
        if self.new_form:
            return Lane.FORM
        if Lane.DISK in reads:
            return Lane.DISK
        return Lane.PIXELS if self.has_many_pixels else Lane.MEMORY


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


class Preparer:
    """One model's ``check`` (submitter's thread) and ``prepare`` (a loader's thread).

    ``image_token_ids`` mark picture features; ``check_inputs`` refuses misfit processed inputs; ``num_logits`` is how many
    tokens the model chooses from, None where that depends on the request.
    """

    def __init__(
        self,
        processing: Processing,
        spec: ModelSpec,
        *,
        image_token_ids: frozenset[int],
        check_inputs: Callable[[Mapping[str, Any]], None] = lambda inputs: None,
        max_context: int | None = None,
        num_logits: int | None = None,
        limits: Limits | None = None,
        fetch: FetchPolicy | None = None,
        pictures: PictureStore | None = None,
    ) -> None:
        self.processing = processing
        self._pictures = pictures
        self.spec = spec
        self.limits = limits or Limits()
        self._fetch = fetch or FetchPolicy()
        bounds = (self.limits.min_pixels, self.limits.max_pixels)
        if spec.images and processing.pixels is None and bounds != (None, None):
            raise InvalidImage(
                f"min_pixels and max_pixels: {spec.family}'s processor has no such bounds; leave them out"
            )
        self.max_context = max_context
        self._num_logits = num_logits
        self._image_token_ids = image_token_ids
        self._check_inputs = check_inputs
        self._reserved = ReservedWords(processing, image_token_ids)
        self._forms = Forms(processing.tokenizer, processing.eos_token_ids)
        # processors and tokenizers are not made for two threads at once
        self._processors = ProcessorPool(processing)
        self._rare_lock = Lock()
        #: Whether it escapes words -> settings, and the processor made with them.
        self._rare: dict[bool, tuple[str, Processing]] = {}

    # In the submitter's thread
    # -----------------------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> Question:
        """Validate a request and render its prompt. Raises InvalidRequest."""
        params = request.params
        self._check_ids(params)
        new_form = 0 if params.form is None else self._forms.check(params)
        _check_types(request)
        _check_template(request)
        if any(map(has_sound, request.videos)):
            request = _as_chat(request)
        media: Sequence[Sequence[Any]] = (
            request.images,
            request.videos,
            request.audios,
        )
        turns: list[Message] = []
        if request.messages is not None:
            turns, media = split_messages(request.messages, *media)
        images, videos, audios = media = self._own_media(*media)
        question = Question(
            images=images,
            videos=videos,
            audios=tuple(audio for audio in audios if isinstance(audio, Audio)),
            tracks=tuple(map(_video_of, audios)),
            fetch=self._fetch,
            params=params,
            pixels=self._pixels(request),
            sampling=self.processing.sampling,
            client=request.client,
            new_form=new_form,
            is_templated=request.template is not None,
            options=tuple(request.options),
            **self._checked_prompt(request, turns, media),
        ).measured()
        self._check_size(question)
        if params.form is None and params.thinking_budget is None:
            return question
        return replace(question, thinking=self._thinking(question, request))

    def _checked_prompt(
        self, request: Request, turns: list[Message], media: Sequence[Sequence[Any]]
    ) -> dict[str, Any]:
        """Return the question's ``inputs``, ``token_ids`` or ``prompt``, whichever the request has."""
        if request.inputs is not None:
            inputs = _checked_inputs(request.inputs, any(media))
            self._check_fit(inputs)
            return {"inputs": inputs}
        if request.token_ids is not None:
            ids = _checked_ids(request.token_ids, self._image_token_ids)
            if not any(media):
                self._check_inputs({"input_ids": np.array([ids])})
            self._check_length(len(ids), 1, "token_ids has {} ids")
            return {"token_ids": ids}
        return {"prompt": self._rendered(request, turns, list(map(len, media)))}

    def _check_fit(self, inputs: Mapping[str, Any]) -> None:
        try:
            self._check_inputs(inputs)
        except InvalidRequest:
            raise
        except Exception as error:
            # the family's arithmetic on shapes and types that it does not know
            raise InvalidPrompt(
                f"inputs= are not what the model's processor makes: {describe(error)}"
            ) from error

    def _check_ids(self, params: SamplingParams) -> None:
        """Refuse ids of tokens that the model does not have."""
        if self._num_logits is None:
            return
        for name in _TOKEN_IDS:
            check_within(name, getattr(params, name) or (), self._num_logits)

    def _check_size(self, question: Question) -> None:
        if question.seconds:
            check_seconds(
                question.seconds, self.limits.audio_seconds, "the request's recordings"
            )
        self._check_count(question.num_pictures)
        most, num_pixels = self.limits.request_pixels, question.num_pixels
        if most is not None and num_pixels > most:
            raise InvalidImage(
                f"the request's pictures and frames have {num_pixels:,} pixels together; at most {most:,} are read",
                advice=" (Limits.request_pixels)",
            )
        if question.pixels is not None:
            self._check_enlarged(question.pixels.least, len(question.images))

    def _check_count(self, num_pictures: int) -> None:
        most = self.limits.request_pictures
        if most is not None and num_pictures > most:
            raise InvalidImage(
                f"the request has {num_pictures:,} pictures and frames; at most {most:,} are read",
                advice=" (Limits.request_pictures)",
            )

    def _check_num_recordings(self, count: int) -> None:
        """Refuse more recordings than seconds: processors fill short ones up, some to half a minute."""
        most = self.limits.audio_seconds
        if most is not None and count > max(1, most):
            raise InvalidAudio(
                f"the request has {count:,} recordings; at most {max(1, int(most)):,} are read",
                advice=" (one a second of Limits.audio_seconds)",
            )

    def _check_enlarged(self, least: int, count: int) -> None:
        """Refuse pictures that ``min_pixels`` would make larger than they may be."""
        limits = self.limits
        if limits.image_pixels is not None and least > limits.image_pixels:
            raise InvalidImage(
                f"min_pixels is {least:,}; a picture may have {limits.image_pixels:,}",
                advice=" (Limits.image_pixels)",
            )
        most = limits.request_pixels
        if most is not None and least * count > most:
            raise InvalidImage(
                f"min_pixels is {least:,}, which {count:,} pictures make {least * count:,} pixels together; "
                f"at most {most:,} are read",
                advice=" (Limits.request_pixels)",
            )

    def _pixels(self, request: Request) -> PixelBounds | None:
        """Return the bounds of the request's pictures; None for the processor's own."""
        limits = self.limits
        least = _first_given(request.min_pixels, limits.min_pixels)
        most = _first_given(request.max_pixels, limits.max_pixels)
        if least is None and most is None:
            return None
        own = self.processing.pixels
        if own is None:
            raise InvalidImage(
                f"min_pixels and max_pixels: {self.spec.family}'s processor has no such bounds; leave them out"
            )
        most = own.most if most is None else most
        if limits.max_pixels is not None and most > limits.max_pixels:
            raise InvalidImage(
                f"max_pixels is {most:,}; the batcher's is {limits.max_pixels:,}"
            )
        least = own.least if least is None else least
        # a most is a bound, and makes no picture larger; a least above the model's asks for it
        if least <= own.most:
            most = min(most, own.most)
        if request.min_pixels is not None and least > most:
            raise InvalidImage(
                f"min_pixels is {least:,}, above max_pixels, which is {most:,}"
            )
        bounds = PixelBounds(min(least, most), most)
        return None if bounds == own else bounds

    def _thinking(self, question: Question, request: Request) -> Thinking | None:
        """Return the thinking state after the prompt."""
        params, marks = request.params, self.processing.template.thinking
        if marks is None:
            if params.thinking_budget is not None:
                raise InvalidParameters(
                    "thinking_budget: this model's chat template does not mark thinking"
                )
            return None
        start, end = (
            self.processing.ids_of(marks.start),
            self.processing.ids_of(marks.end),
        )
        if question.prompt is None:
            given = question.token_ids
            if question.inputs is not None:
                given = question.inputs["input_ids"][0].tolist()
            return Thinking(start, end, is_open=rfind(given, start) > rfind(given, end))
        is_open = marks.is_open(question.prompt)
        template = request.template
        is_asked = template is not None and template.enable_thinking is True
        is_over = is_open or marks.is_over(question.prompt)
        may_begin = len(start) == 1 and not is_over
        if params.form is not None and not is_asked:
            may_begin = False
        return Thinking(start, end, is_open=is_open, may_begin=may_begin)

    def _own_media(
        self, images: Sequence[ImageInput], videos: Sequence[Any], audios: Sequence[Any]
    ) -> tuple[tuple[ImageInput, ...], tuple[Video, ...], tuple[Audio | Track, ...]]:
        """Copy what the caller could change of the media, in the order in which the family's facts are asked."""
        spec = self.spec
        if images and not spec.images:
            raise InvalidImage(
                f"{spec.family} takes no pictures: it is a language model"
            )
        if len(images) > 1 and not spec.multi_image:
            raise InvalidImage(
                f"{spec.family} takes one picture a request; given: {len(images)}"
            )
        self._check_count(len(images) + len(videos))
        owned = []
        for number, source in enumerate(images, 1):
            with _naming_the_picture(source, number, len(images)):
                owned.append(self._own_picture(source))
        if videos and not spec.video:
            raise InvalidVideo(f"{spec.family} takes no videos: {spec.no_video}")
        clips = [own_video(as_video(video), self._own_image) for video in videos]
        if audios and not spec.audio:
            is_track = isinstance(audios[0], Track)
            what = "no video's sound" if is_track else "no recordings"
            raise InvalidAudio(f"{spec.family} takes {what}: {spec.no_audio}")
        self._check_num_recordings(len(audios))
        return tuple(owned), tuple(clips), tuple(map(self._own_recording, audios))

    def _own_picture(self, source: ImageInput) -> ImageInput:
        """Return a picture of a request: one that was decoded before, or the caller's."""
        if self._pictures is not None and is_data_uri(source):
            return own_uri(source, self._own_image, self._pictures)
        return self._own_image(source)

    def _own_recording(self, audio: Any) -> Audio | Track:
        if isinstance(audio, Track):
            return audio
        return own_audio(as_audio(audio), self._fetch)

    def _own_image(self, source: ImageInput) -> ImageInput:
        if is_data_uri(source):
            return fetch_image(source, self._fetch)
        return own_image(source)

    def _rendered(
        self, request: Request, turns: list[Message], counts: Sequence[int]
    ) -> str:
        """Return the text that the processor gets; ``counts`` count media by ``KINDS``."""
        options = request.template
        asked: str | list[Message] = turns if request.prompt is None else request.prompt
        noun = "prompt" if isinstance(asked, str) else "chat"
        texts = list(texts_of(asked))
        for text in texts:
            _check_unicode(text)
        if options is None and not isinstance(asked, str):
            raise InvalidPrompt("template is None; messages need the chat template")
        said = f"the {noun} has {{}} characters"
        self._check_length(sum(map(len, texts)), CHARACTERS_PER_TOKEN, said)
        if options is None:
            assert isinstance(asked, str)
            self._check_final(asked, counts)
            return asked
        if options.escape_special_tokens:
            asked, options = self._reserved.escaped(asked), self._escaped(options)
        self._reserved.check(asked, options.arguments)
        return self.processing.render(asked, *counts, options=options)

    def _check_final(self, prompt: str, counts: Sequence[int]) -> None:
        """Refuse a rendered prompt that is empty, or has other media than the request."""
        if not prompt.strip():
            raise InvalidPrompt("the prompt is empty")
        for kind, given in zip(KINDS, counts, strict=True):
            room = self.processing.count_placeholders(prompt, kind.marker)
            if room is not None and room != given:
                raise InvalidPrompt(
                    f"the rendered prompt has {room} {kind.noun} placeholders for {given} {kind.noun}s"
                )

    def _escaped(self, options: Template) -> Template:
        escaped = self._reserved.escaped
        return replace(
            options,
            tools=escaped(options.tools),
            documents=escaped(options.documents),
            args=escaped(options.args),
        )

    def _check_length(self, size: int, per_token: int, said: str) -> None:
        """Refuse a prompt too long in any tokenization."""
        bounds = (self.max_context, self.limits.prompt_tokens)
        most = min((bound for bound in bounds if bound is not None), default=MAX_TOKENS)
        if size > most * per_token:
            raise PromptTooLong(
                f"{said.format(f'{size:,}')}; {most:,} tokens fit, which are {most * per_token:,} at most"
            )

    def text_ids(self, question: Question) -> Sequence[int] | None:
        """Return the prompt's ids; None if they depend on media that are not read yet. Raises InvalidRequest."""
        inputs = question.inputs
        if inputs is None:
            if question.media or question.tracks:
                return None
            if question.prompt is None:
                return question.token_ids
            inputs = self._processed(question, (), (), ())
        return np.array(inputs["input_ids"])[0].tolist()  # type: ignore[no-any-return]

    def compiled(self, question: Question, cancelled: Cancelled) -> Future[Form]:
        """Start to compile the question's form."""
        return self._forms.compiled(question.params, cancelled, question.client)

    # On a loader's thread
    # -----------------------------------------------------------------------------------------------------------------

    def prepare(
        self, question: Question, cancelled: Cancelled | None = None
    ) -> Prepared:
        """Read media and run the processor. Raises InvalidRequest or OperationCancelled."""
        self._check_size(question)
        try:
            return self._decoded(question, cancelled or Cancelled())
        finally:
            if question.has_many_pixels:
                trim()

    def _decoded(self, question: Question, cancelled: Cancelled) -> Prepared:
        images = self._decoded_images(question, cancelled)
        clips = self._decoded_clips(question, cancelled)
        self._check_count(len(images) + sum(len(clip.indices) for clip in clips))
        sounds = self._decoded_sounds(question, cancelled)
        cancelled.check()
        inputs = question.inputs
        if inputs is None:
            inputs = self._processed(question, images, clips, sounds)
        inputs = evaluated(inputs)
        # what the engine would otherwise do on its own thread
        if self._pictures is not None:
            hash_ahead(inputs)
        form = question.form
        return Prepared(
            inputs,
            tuple(image.size for image in images),
            tuple(clip.size for clip in clips),
            tuple(sound.seconds for sound in sounds),
            kept=on_host(inputs) if num_bytes(inputs) <= MOST_ON_HOST else None,
            bad_words=self._ids_of_words(question.params.bad_words),
            form=None if form is None else form.copy(question.client),
            thinking=question.thinking,
            options=self._options(question, inputs),
        )

    def _options(
        self, question: Question, inputs: Mapping[str, Any]
    ) -> tuple[OptionTokens, ...]:
        """Return the options' tokens behind the prompt's."""
        if not question.options:
            return ()
        ids = np.array(inputs["input_ids"])[0].tolist()
        return tokens_of_options(
            self.processing, self._reserved, question.prompt, ids, question.options
        )

    def _decoded_images(
        self, question: Question, cancelled: Cancelled
    ) -> list[Image.Image]:
        load: Callable[[ImageInput], Image.Image] = partial(
            load_image,
            max_pixels=self.limits.image_pixels,
            policy=self._fetch,
            cancelled=cancelled,
        )
        if self._pictures is not None:
            load = partial(recalled_picture, load=load, store=self._pictures)
        images = []
        for number, source in enumerate(question.images, 1):
            cancelled.check()
            with _naming_the_picture(source, number, len(question.images)):
                images.append(load(source))
        return images

    def _decoded_clips(self, question: Question, cancelled: Cancelled) -> list[Clip]:
        bounds = self.limits.video_pixels, self.limits.image_pixels
        clips = []
        for video in question.videos:
            cancelled.check()
            clips.append(
                load_video(video, question.sampling, *bounds, self._fetch, cancelled)
            )
        return clips

    def _decoded_sounds(self, question: Question, cancelled: Cancelled) -> list[Sound]:
        sounds = []
        recordings = iter(question.audios)
        for at in question.tracks:
            cancelled.check()
            source = None if at is None else question.videos[at].source
            audio = next(recordings) if source is None else Audio(source)
            sounds.append(replace(self._sound(audio, cancelled), video=at))
        seconds = sum(sound.seconds for sound in sounds)
        check_seconds(seconds, self.limits.audio_seconds, "the request's recordings")
        return sounds

    def _ids_of_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of bad words, as they are and behind a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for spelled in (word, f" {word.lstrip()}"):
                found[self.processing.ids_of(spelled)] = None
        found.pop((), None)
        return tuple(found)

    def _sound(self, audio: Audio, cancelled: Cancelled) -> Sound:
        sound = load_audio(
            audio,
            self.processing.audio_rate,
            self.limits.audio_seconds,
            self._fetch,
            cancelled,
        )
        most = self.spec.audio_seconds
        if most is not None and sound.seconds > most:
            raise InvalidAudio(
                f"{describe_audio(audio)} has {sound.seconds:,.1f} s; {self.spec.family} hears {most:g} s of a recording: "
                "cut it into several"
            )
        return sound

    def _processed(
        self,
        question: Question,
        images: Sequence[Image.Image],
        clips: Sequence[Clip],
        sounds: Sequence[Sound],
    ) -> dict[str, Any]:
        prompt = question.prompt
        media = images, clips, sounds
        is_escaped = prompt is not None and ESCAPE in prompt
        is_rare = is_escaped or question.takes_long
        lent = (
            self._rare_one(escapes=is_escaped)
            if is_rare
            else self._processors.acquire()
        )
        with lent as processing, processing.scaled_to(question.pixels):
            if prompt is None:
                ids, marks = question.token_ids, self._image_token_ids
                return processing.inputs_of_ids(ids, images, marks, clips, sounds)
            make = processing.escaped_inputs if is_escaped else processing.inputs
            return make(prompt, *media, is_templated=question.is_templated)

    @contextmanager
    def _rare_one(self, *, escapes: bool) -> Iterator[Processing]:
        """Lend the processor for very long or escaped prompts."""
        with self._rare_lock:
            settings = settings_of(self.processing.processor)
            if escapes not in self._rare or self._rare[escapes][0] != settings:
                self._rare[escapes] = settings, self.processing.copy()
            yield self._rare[escapes][1]


def lane_of(medium: ImageInput | Video | Audio) -> Lane | None:
    """Return a medium's lane; None in memory."""
    source = medium.source if isinstance(medium, (Audio, Video)) else medium
    sources = [source]
    if isinstance(medium, Video):
        if not is_to_be_fetched(medium):
            return None
        if not isinstance(source, (str, Path, bytes)):
            sources = list(source)
    elif not isinstance(source, (str, Path)):
        return None
    return Lane.NETWORK if any(map(is_url, sources)) else Lane.DISK


def late_error(
    medium: ImageInput | Video | Audio, policy: FetchPolicy
) -> InvalidRequest:
    """Return the error of a hanging read."""
    kind = Kind.of(medium)
    return kind.error(
        f"{kind.describe(medium)} was not read within {policy.seconds:g} s (FetchPolicy.seconds): its drive or server does "
        "not answer"
    )


def rfind(ids: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the last index of ``wanted`` in ``ids``, or -1."""
    size, wanted = len(wanted), tuple(wanted)
    for at in range(len(ids) - size, -1, -1):
        if tuple(ids[at : at + size]) == wanted:
            return at
    return -1


def _first_given(*values: int | None) -> int | None:
    for value in values:
        if value is not None:
            return value
    return None


def _video_of(audio: Audio | Track) -> int | None:
    return audio.video if isinstance(audio, Track) else None


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidPrompt(
            f"the text holds {text[error.start]!r} at character {error.start:,}, half of a surrogate pair: it is no "
            "Unicode text (what read it may have guessed another encoding)"
        ) from error


def _check_template(request: Request) -> None:
    """Refuse a chat template's arguments where the prompt needs none."""
    if request.template is None:
        return
    if request.inputs is not None or request.token_ids is not None:
        refuse(
            request.template,
            "the prompt is final already; a chat template's arguments go with prompt or messages",
        )


def _as_chat(request: Request) -> Request:
    """Return a request whose videos are heard as a chat, which says where their sound stands."""
    if request.messages is not None:
        return request
    if request.prompt is None or request.template is None:
        raise InvalidVideo(
            "a video's sound goes with a prompt or messages, and a chat template that says where it stands; "
            "elsewhere audios= takes the video's file"
        )
    turn: Message = {"role": "user", "content": request.prompt}
    return replace(request, prompt=None, messages=[turn])


def _check_types(request: Request) -> None:
    given = [name for name in _WAYS if getattr(request, name) is not None]
    if len(given) != 1:
        raise InvalidPrompt(
            f"exactly one of prompt, messages, token_ids and inputs is needed; given: {', '.join(given) or 'none'}"
            f"{_hint_of_text(request) if not given else ''}"
        )
    for name, kind, right, error in _TYPES:
        value = getattr(request, name)
        if value is not None and not isinstance(value, kind):
            raise error(f"{name} is {shown(value)}; it must be {right}")
    if request.prompt is not None:
        _check_places(request.prompt, request.images, request.videos)


def _hint_of_text(request: Request) -> str:
    """Say what is wrong where one text was given, which went to the pictures."""
    if len(request.images) != 1 or not isinstance(request.images[0], str):
        return ""
    return f" (images is {shown(request.images[0])}; text alone is prompt=...)"


@contextmanager
def _naming_the_picture(source: ImageInput, number: int, count: int) -> Iterator[None]:
    """Number the picture in errors, unless named."""
    try:
        yield
    except InvalidImage as error:
        has_name = isinstance(source, (str, Path)) and not is_data_uri(str(source))
        if count == 1 or has_name:
            raise
        raise InvalidImage(
            f"picture {number} of {count}: {error.reason}", advice=error.advice
        ) from error


def _check_places(
    prompt: str, images: Sequence[ImageInput], videos: Sequence[Any]
) -> None:
    """Refuse a picture in the prompt's place."""
    if not names_picture(prompt) and not _is_file_name(prompt):
        return
    if not images and not videos and _is_file_name(prompt):
        raise InvalidPrompt(
            f"prompt is {shown(prompt)}, the name of a picture: that is images=, and prompt= asks about it"
        )
    image = images[0] if len(images) == 1 else None
    if not isinstance(image, str) or names_picture(image):
        return
    if names_picture(prompt) and not os.path.exists(image):
        raise InvalidImage(
            f"images is {shown(image)}, which is no file, and prompt is {shown(prompt)}: have they changed places? "
            "It is submit(images, prompt)"
        )


def _is_file_name(prompt: str) -> bool:
    """Whether a prompt is one word that ends as a picture's file does, with or without a query."""
    name = prompt.lower().partition("?")[0]
    return name.endswith(tuple(picture_suffixes())) and len(name.split()) == 1


def _checked_ids(given: Any, image_token_ids: frozenset[int]) -> tuple[int, ...]:
    """Check a list or array of token ids, (L,) or (1, L)."""
    try:
        array = np.asarray(given)
    except Exception as error:
        raise InvalidPrompt(
            f"token_ids is {shown(given)}; a list or array of integers is expected"
        ) from error
    if array.size == 0:
        raise InvalidPrompt("token_ids is empty")
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1 or array.dtype.kind not in "iu" or _holds_truths(given):
        raise InvalidPrompt(
            f"token_ids is {shown(given)}; a list or array (L,) of integers is expected"
        )
    ids = tuple(map(int, array.tolist()))
    for token in ids:
        if not 0 <= token < 2**31 and token not in image_token_ids:
            raise InvalidPrompt(
                f"token_ids holds {token}; token ids are integers of at least 0"
            )
    return ids


def _holds_truths(given: Any) -> bool:
    """Whether a list has True or False, which numpy would take for numbers."""
    return isinstance(given, Sequence) and bool in set(map(type, given))


def _checked_inputs(inputs: Mapping[str, Any], has_media: bool) -> dict[str, Any]:
    if has_media:
        raise InvalidPrompt(
            "inputs= are processed already: their pictures belong into pixel_values, not into images"
        )
    if "input_ids" not in inputs:
        raise InvalidPrompt("inputs= needs input_ids of shape (1, L)")
    try:
        # the caller's buffers stay the caller's
        arrays = copy.deepcopy(as_numpy(inputs))
    except Exception as error:
        raise InvalidPrompt(f"inputs= cannot be copied: {describe(error)}") from error
    for name, value in arrays.items():
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
            raise InvalidPrompt(
                f"inputs= has {name} of {value.dtype}; arrays of real numbers are needed"
            )
    _check_input_ids(arrays["input_ids"])
    return arrays


def _check_input_ids(ids: Any) -> None:
    if not isinstance(ids, np.ndarray):
        raise InvalidPrompt(
            f"inputs= needs input_ids as an array (1, L); given: {shown(ids)}"
        )
    if ids.ndim != 2 or len(ids) != 1 or ids.size == 0:
        raise InvalidPrompt(
            f"inputs= needs input_ids of shape (1, L), one request a submit; given: {tuple(ids.shape)}"
        )
    if ids.dtype.kind not in "iu":
        raise InvalidPrompt(f"inputs= needs input_ids of integers; given: {ids.dtype}")
    if ids.min() < -(2**31) or ids.max() >= 2**31:  # MLX would cut them to 32 bits
        raise InvalidPrompt("inputs= has input_ids beyond 32 bits")
