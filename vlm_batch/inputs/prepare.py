"""A request's way to a model's inputs: checked and rendered at submit, read and processed on a loader's thread."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image

from vlm_batch.arrays import MOST_ON_HOST, as_numpy, num_bytes, on_host, settled
from vlm_batch.checks import put_pixels, whole_option
from vlm_batch.errors import (
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
from vlm_batch.inputs.chats import split_messages
from vlm_batch.inputs.fetch import Cancelled, is_data_uri, is_url
from vlm_batch.inputs.grammar import LARGE, Form, Forms
from vlm_batch.inputs.images import (
    DEFAULT_MAX_PIXELS,
    count_pixels,
    describe_source,
    fetch_image,
    load_image,
    names_picture,
    own_image,
)
from vlm_batch.inputs.processing import ESCAPE, Copies, PixelBounds, Processing
from vlm_batch.inputs.processors import settings_of
from vlm_batch.inputs.reserved import ReservedWords, texts_of
from vlm_batch.inputs.template import refuse
from vlm_batch.inputs.videos import (
    DEFAULT_MAX_VIDEO_PIXELS,
    Clip,
    Sampling,
    as_video,
    count_video_pixels,
    describe_video,
    is_to_be_fetched,
    load_video,
    own_video,
)
from vlm_batch.records import Thinking
from vlm_batch.registry import ModelSpec
from vlm_batch.runtime.memory import trim
from vlm_batch.store.digest import hash_ahead
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import FetchPolicy, ImageInput, Message, Request, SamplingParams, Template, Video, VideoInput

#: Pixels that the pictures and frames of one request may have together: as many as a video's may.
DEFAULT_MAX_REQUEST_PIXELS = DEFAULT_MAX_VIDEO_PIXELS
#: Pixels from which on what was decoded is given back to the system at once: the C library would keep it for its next arrays.
MANY_PIXELS = 20_000_000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what one request may bring; None lifts a bound.

    ``image_pixels`` is checked before a picture is decoded, ``video_pixels``, for all frames together that are taken
    of a video, before these are, ``request_pixels``, for all of a request's pictures and frames together, before any is.
    ``prompt_tokens`` counts a prompt's positions, pictures included; the model's context bounds them as well.
    ``min_pixels`` and ``max_pixels`` are a request's where it names none; it may not go beyond the second. Raises
    ValueError for a bound out of range.
    """

    image_pixels: int | None = DEFAULT_MAX_PIXELS
    video_pixels: int | None = DEFAULT_MAX_VIDEO_PIXELS
    request_pixels: int | None = DEFAULT_MAX_REQUEST_PIXELS
    prompt_tokens: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        put_pixels(self, self.min_pixels, self.max_pixels)
        for name in ("image_pixels", "video_pixels", "request_pixels", "prompt_tokens"):
            object.__setattr__(self, name, whole_option(name, vars(self)[name], least=1, or_none=True))


#: Characters that a token stands for at most on average in a prompt that is tokenized: words of English have four to five.
CHARACTERS_PER_TOKEN = 16
#: Tokens of a prompt at most where neither the model nor the batcher says how many.
MAX_TOKENS = 1 << 20
#: Characters from which on a prompt counts as long: a tokenizer takes tenths of a second for as many.
LONG_PROMPT = 200_000


class Lane(Enum):
    """The slowest thing that a question's loading waits for: those of one lane wait for each other, and for no other lane's."""

    MEMORY = "memory"  # everything is here
    DISK = "disk"
    NETWORK = "network"
    LONG = "long prompt or large form"
    FORM = "form that is not compiled yet"


@dataclass(frozen=True)
class Question:
    """A checked request: its rendered prompt, final token ids, or processed inputs (numpy); pictures and videos unread.

    Nothing of it can be changed by the submitter any more. ``fetch`` says how paths and URLs are read, ``sampling`` which
    frames of a video are taken. ``num_pixels`` are those of the pictures, and of the frames, that are at hand, ``new_form``
    the characters of a form that has still to be compiled.
    """

    prompt: str | None = None
    token_ids: tuple[int, ...] = ()
    inputs: Mapping[str, Any] | None = None
    images: tuple[ImageInput, ...] = ()
    videos: tuple[Video, ...] = ()
    fetch: FetchPolicy = field(default_factory=FetchPolicy)
    params: SamplingParams = field(default_factory=SamplingParams)
    thinking: Thinking | None = None
    pixels: PixelBounds | None = None
    num_pixels: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    client: int = 0
    new_form: int = 0
    form: Form | None = None

    @property
    def least_tokens(self) -> int:
        """The fewest positions that its prompt can have: exact for ids without pictures."""
        if self.inputs is not None:
            return int(self.inputs["input_ids"].shape[-1])
        return len(self.token_ids) if self.prompt is None else len(self.prompt) // CHARACTERS_PER_TOKEN

    @property
    def media(self) -> tuple[ImageInput | Video, ...]:
        """The pictures, then the videos."""
        return self.images + self.videos

    def with_media(self, media: Sequence[ImageInput | Video]) -> Question:
        """The same with other ``media``, as many of each."""
        count = len(self.images)
        question = replace(self, images=tuple(media[:count]), videos=tuple(media[count:]))
        return replace(question, num_pixels=question.count_pixels())

    def count_pixels(self) -> int:
        """Pixels of the pictures and frames that are at hand, by their headers."""
        frames = (count_video_pixels(video, self.sampling) for video in self.videos)
        return sum(map(count_pixels, self.images)) + sum(frames)

    @property
    def takes_long(self) -> bool:
        """Whether preparing it takes long, whatever it waits for."""
        return self.prompt is not None and len(self.prompt) >= LONG_PROMPT

    @cached_property
    def lane(self) -> Lane:
        """The slowest of what it waits for."""
        lanes = {lane_of(medium) for medium in self.media}
        lanes |= {Lane.LONG} if self.takes_long or self.new_form >= LARGE else set()
        lanes |= {Lane.FORM} if self.new_form else set()
        for lane in (Lane.NETWORK, Lane.LONG, Lane.FORM, Lane.DISK):
            if lane in lanes:
                return lane
        return Lane.MEMORY


@dataclass(frozen=True)
class Prepared:
    """A processor's output as evaluated mlx arrays, its pictures' (width, height), its videos' (frames, width, height).

    ``kept`` is the output on the host, for a row that has to begin again. ``bad_words`` are the parameters' as token ids,
    ``form`` is what the answer is held to, ``thinking`` how the model marks it.
    """

    inputs: Mapping[str, Any]
    kept: Mapping[str, Any] | None = field(default=None, kw_only=True)
    image_sizes: tuple[tuple[int, int], ...] = ()
    video_sizes: tuple[tuple[int, int, int], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    form: Form | None = None
    thinking: Thinking | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds until the engine has taken it in."""
        return num_bytes(self.inputs) + (0 if self.kept is None else num_bytes(self.kept))


class Preparer:
    """One model's ``check`` (submitter's thread) and ``prepare`` (a loader's thread).

    ``fetch`` says which paths and URLs are read. ``spec`` says what the family takes; ``image_token_ids`` are the ids whose
    positions hold picture features, and ``check_inputs`` refuses processed inputs (numpy) that do not fit;
    ``max_context`` is how many positions the model was made for, None if it does not say.
    """

    def __init__(
        self,
        processing: Processing,
        spec: ModelSpec,
        *,
        image_token_ids: frozenset[int],
        check_inputs: Callable[[Mapping[str, Any]], None] = lambda inputs: None,
        max_context: int | None = None,
        limits: Limits | None = None,
        fetch: FetchPolicy | None = None,
        hashes: bool = False,
    ) -> None:
        self.processing = processing
        self._hashes = hashes
        self.spec = spec
        self.limits = limits or Limits()
        self._fetch = fetch or FetchPolicy()
        bounds = (self.limits.min_pixels, self.limits.max_pixels)
        if spec.images and processing.pixels is None and bounds != (None, None):
            raise InvalidImage(f"min_pixels and max_pixels: the processor of {spec.family} has no such bounds")
        self.max_context = max_context
        self._image_token_ids = image_token_ids
        self._check_inputs = check_inputs
        self._reserved = ReservedWords(processing, image_token_ids)
        self._forms = Forms(processing.tokenizer, processing.eos_token_ids)
        self._copies = Copies(processing)  # processors and tokenizers are not made for two threads at once
        self._rare_lock = Lock()
        #: Copies for very long prompts, and (True) for those with escaped words, with the settings that they were made with.
        self._rare: dict[bool, tuple[str, Processing]] = {}

    # In the submitter's thread
    # -----------------------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> Question:
        """Refuse what can be known to be wrong now, render the prompt, and take what the submitter could still change.

        Raises InvalidRequest.
        """
        params, options = request.params, request.template
        new_form = 0 if params.form is None else self._forms.check(params)
        _check_types(request)
        if options is not None and (request.inputs is not None or request.token_ids is not None):
            refuse(options, "the prompt is final already; a chat template's arguments go with prompt or messages")
        images, videos = tuple(request.images), tuple(request.videos)
        turns: list[Message] = []
        if request.messages is not None:
            turns, *media = split_messages(request.messages, images, videos)
            images, videos = map(tuple, media)
        images, clips = self._own_media(images, videos)
        inputs: Mapping[str, Any] | None = None
        prompt: str | None = None
        ids: tuple[int, ...] = ()
        if request.inputs is not None:
            inputs = _checked_inputs(request.inputs, images or videos)
            self._check_inputs(inputs)
        elif request.token_ids is not None:
            ids = _checked_ids(request.token_ids, self._image_token_ids)
            if not images and not videos:
                self._check_inputs({"input_ids": np.array([ids])})
            self._check_length(len(ids), 1, "token_ids has {} ids")
        else:
            prompt = self._rendered(request, turns, len(images), len(clips), options)
        question = Question(
            prompt,
            ids,
            inputs,
            images,
            clips,
            self._fetch,
            params,
            pixels=self._pixels(request),
            sampling=self.processing.sampling,
            client=request.client,
            new_form=new_form,
        )
        question = replace(question, num_pixels=question.count_pixels())
        self._check_pixels(question.num_pixels)
        if params.form is None and params.thinking_budget is None:
            return question
        return replace(question, thinking=self._thinking(question, request))

    def _check_pixels(self, num_pixels: int) -> None:
        """Refuse more pixels than one request may have, before any is decoded. Raises InvalidImage."""
        most = self.limits.request_pixels
        if most is not None and num_pixels > most:
            raise InvalidImage(
                f"the request's pictures and frames have {num_pixels:,} pixels together; at most {most:,} are read",
                advice=" (Limits.request_pixels)",
            )

    def _pixels(self, request: Request) -> PixelBounds | None:
        """The bounds on pictures' pixels; None for the checkpoint's own. Raises InvalidImage."""
        limits = self.limits
        if request.min_pixels is None and request.max_pixels is None and limits.min_pixels is limits.max_pixels is None:
            return None
        own = self.processing.pixels
        if own is None:
            raise InvalidImage(f"min_pixels and max_pixels: the processor of {self.spec.family} has no such bounds")
        most = next(value for value in (request.max_pixels, limits.max_pixels, own.most) if value is not None)
        if limits.max_pixels is not None and most > limits.max_pixels:
            raise InvalidImage(f"max_pixels is {most:,}; the batcher's is {limits.max_pixels:,}")
        least = next(value for value in (request.min_pixels, limits.min_pixels, own.least) if value is not None)
        if request.min_pixels is not None and least > most:
            raise InvalidImage(f"min_pixels is {least:,}, above max_pixels, which is {most:,}")
        return PixelBounds(min(least, most), most)

    def _thinking(self, question: Question, request: Request) -> Thinking | None:
        """The state in which the prompt leaves thinking; None if the model's template does not mark it."""
        params, marks = request.params, self.processing.template.thinking
        if marks is None:
            if params.thinking_budget is not None:
                raise InvalidParameters("thinking_budget: this model's chat template does not mark thinking")
            return None
        start, end = (self.processing.ids_of(word) for word in (marks.start, marks.end))
        if question.prompt is None:
            given = question.token_ids if question.inputs is None else question.inputs["input_ids"][0].tolist()
            return Thinking(start, end, is_open=rfind(given, start) > rfind(given, end))
        is_open = marks.is_open(question.prompt)
        is_asked = params.form is None or (request.template is not None and request.template.enable_thinking is True)
        may_begin = is_asked and not is_open and not marks.is_over(question.prompt) and len(start) == 1
        return Thinking(start, end, is_open=is_open, may_begin=may_begin)

    def _own_media(
        self, images: Sequence[ImageInput], videos: Sequence[VideoInput]
    ) -> tuple[tuple[ImageInput, ...], tuple[Video, ...]]:
        """Pictures and videos in a form that nobody else can change. Raises InvalidImage and InvalidVideo."""
        spec = self.spec
        if images and not spec.images:
            raise InvalidImage(f"{spec.family} takes no pictures: it is a language model")
        if len(images) > 1 and not spec.multi_image:
            raise InvalidImage(f"{spec.family} takes one picture a request; given: {len(images)}")
        owned = tuple(map(self._own_image, images))
        if videos and not spec.video:
            raise InvalidVideo(f"{spec.family} takes no videos: {spec.no_video}")
        return owned, tuple(own_video(as_video(video), self._own_image) for video in videos)

    def _own_image(self, source: ImageInput) -> ImageInput:
        """The picture in a form that nobody else can change, and whose header can be read. Raises InvalidImage."""
        return fetch_image(source, self._fetch) if is_data_uri(source) else own_image(source)

    def _rendered(
        self, request: Request, turns: list[Message], num_images: int, num_videos: int, options: Template | None
    ) -> str:
        """The prompt as the processor takes it. Raises InvalidPrompt and PromptTooLong."""
        for text in texts_of([request.prompt, turns]):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InvalidPrompt(
                    f"the text holds {text[error.start]!r} at character {error.start:,}, half of a surrogate pair: it is no "
                    "Unicode text (what read it may have guessed another encoding)"
                ) from error
        prompt = request.prompt
        if prompt is None:
            if options is None:
                raise InvalidPrompt("template is None; messages need the chat template")
            size = sum(map(len, texts_of(turns)))
            self._check_length(size, CHARACTERS_PER_TOKEN, "the chat has {} characters")
            if options.escape_special_tokens:
                turns, options = self._reserved.escaped(turns), self._escaped(options)
            self._reserved.check_chat(turns, options.arguments)
            return self.processing.render(turns, num_images, num_videos, options)
        self._check_length(len(prompt), CHARACTERS_PER_TOKEN, "the prompt has {} characters")
        if options is not None:
            if options.escape_special_tokens:
                prompt, options = self._reserved.escaped(prompt), self._escaped(options)
            self._reserved.check_prompt(prompt, options.arguments)
            return self.processing.render(prompt, num_images, num_videos, options)
        if not prompt.strip():
            raise InvalidPrompt("the prompt is empty")
        for kind, noun, given in (("image", "picture", num_images), ("video", "video", num_videos)):
            room = self.processing.count_placeholders(prompt, kind)
            if room is not None and room != given:
                raise InvalidPrompt(f"the rendered prompt has {room} {noun} placeholders for {given} {noun}s")
        return prompt

    def _escaped(self, options: Template) -> Template:
        escaped = self._reserved.escaped
        return replace(
            options, tools=escaped(options.tools), documents=escaped(options.documents), args=escaped(options.args)
        )

    def _check_length(self, size: int, per_token: int, said: str) -> None:
        """Refuse what is too long however it becomes tokens: those would take seconds and gigabytes to make."""
        most = min((n for n in (self.max_context, self.limits.prompt_tokens) if n is not None), default=MAX_TOKENS)
        if size > most * per_token:
            raise PromptTooLong(
                f"{said.format(f'{size:,}')}; {most:,} tokens fit, which are {most * per_token:,} at most"
            )

    def compiled(self, question: Question, cancelled: Cancelled) -> Future[Form] | None:
        """The form that a question's answer is held to, once it is compiled, beside all other work; None if it has none."""
        if question.params.form is None:
            return None
        return self._forms.compiled(question.params, cancelled, question.client)

    # On a loader's thread
    # -----------------------------------------------------------------------------------------------------------------

    def prepare(self, question: Question, cancelled: Cancelled | None = None) -> Prepared:
        """Read a question's pictures and videos and run the processor. What comes out is evaluated: any thread may use it.

        Raises InvalidRequest for what cannot be read or does not fit, and OperationCancelled soon after ``cancelled`` is
        set. The question has its form, if it needs one.
        """
        self._check_pixels(question.num_pixels)
        try:
            return self._decoded(question, cancelled or Cancelled())
        finally:
            if question.num_pixels >= MANY_PIXELS:
                trim()

    def _decoded(self, question: Question, cancelled: Cancelled) -> Prepared:
        limits, params = self.limits, question.params
        images = []
        for source in question.images:
            cancelled.check()
            images.append(load_image(source, limits.image_pixels, self._fetch, cancelled))
        clips = []
        for video in question.videos:
            cancelled.check()
            bounds = limits.video_pixels, limits.image_pixels
            clips.append(load_video(video, question.sampling, *bounds, self._fetch, cancelled))
        cancelled.check()
        inputs = settled(self._processed(question, images, clips) if question.inputs is None else question.inputs)
        if self._hashes:  # what the engine would otherwise do on its own thread
            hash_ahead(inputs)
        words = [spelled for word in params.bad_words for spelled in (word, f" {word.lstrip()}")]
        return Prepared(
            inputs,
            tuple(image.size for image in images),
            tuple(clip.size for clip in clips),
            kept=on_host(inputs) if num_bytes(inputs) <= MOST_ON_HOST else None,
            bad_words=tuple(dict.fromkeys(filter(None, map(self.processing.ids_of, words)))),
            form=None if question.form is None else question.form.copy(question.client),
            thinking=question.thinking,
        )

    def _processed(self, question: Question, images: Sequence[Image.Image], clips: Sequence[Clip]) -> dict[str, Any]:
        """The processor's output."""
        prompt = question.prompt
        is_escaped = prompt is not None and ESCAPE in prompt
        is_rare = is_escaped or (prompt is not None and len(prompt) >= LONG_PROMPT)
        with (
            self._rare_one(escapes=is_escaped) if is_rare else self._copies.one() as processing,
            processing.seeing(question.pixels),
        ):
            if prompt is not None and is_escaped:
                return processing.escaped_inputs(prompt, images, clips)
            if prompt is not None:
                return processing.inputs(prompt, images, clips)
            return processing.inputs_of_ids(question.token_ids, images, self._image_token_ids, clips)

    @contextmanager
    def _rare_one(self, *, escapes: bool) -> Iterator[Processing]:
        """The processor of very long prompts, or of those with escaped words, one at a time: others do not wait for them."""
        with self._rare_lock:
            settings = settings_of(self.processing.processor)
            if escapes not in self._rare or self._rare[escapes][0] != settings:
                self._rare[escapes] = settings, self.processing.copy()
            yield self._rare[escapes][1]


def lane_of(medium: ImageInput | Video) -> Lane | None:
    """The lane that a picture or video is read in; None if it is in memory."""
    if isinstance(medium, Video):
        if not is_to_be_fetched(medium):
            return None
        sources = [medium.source] if isinstance(medium.source, (str, Path, bytes)) else list(medium.source)
        return Lane.NETWORK if any(map(is_url, sources)) else Lane.DISK
    if not isinstance(medium, (str, Path)):
        return None
    return Lane.NETWORK if is_url(medium) else Lane.DISK


def late_error(medium: ImageInput | Video, policy: FetchPolicy) -> InvalidRequest:
    """The error of a picture or video whose reading does not come back."""
    is_video = isinstance(medium, Video)
    name = describe_video(medium) if is_video else describe_source(medium)
    return (InvalidVideo if is_video else InvalidImage)(
        f"{name} was not read within {policy.seconds:g} s (FetchPolicy.seconds): its drive or server does not answer"
    )


def rfind(ids: Sequence[int], wanted: Sequence[int]) -> int:
    """The last place of ``wanted`` in ``ids``; -1 if it is not there."""
    size = len(wanted)
    return next((at for at in range(len(ids) - size, -1, -1) if tuple(ids[at : at + size]) == tuple(wanted)), -1)


def _check_types(request: Request) -> None:
    """Refuse a request whose fields are of another type. Raises InvalidRequest."""
    ways = {
        "prompt": request.prompt,
        "messages": request.messages,
        "token_ids": request.token_ids,
        "inputs": request.inputs,
    }
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        said = ", ".join(given) or "none"
        hint = ""
        if not given and len(request.images) == 1 and isinstance(request.images[0], str):
            hint = f" (images is {shown(request.images[0])}; text alone is prompt=...)"
        raise InvalidPrompt(f"exactly one of prompt, messages, token_ids and inputs is needed; given: {said}{hint}")
    rules: tuple[tuple[str, Any, type, str, type[InvalidRequest]], ...] = (
        (
            "prompt",
            request.prompt,
            str,
            "text (str), and comes after the pictures: submit(images, prompt)",
            InvalidPrompt,
        ),
        ("inputs", request.inputs, Mapping, "a mapping of names to arrays", InvalidPrompt),
        ("request_id", request.request_id, str, "text (str)", InvalidRequest),
        ("cache", request.cache, PromptCache, "a PromptCache: Result.cache, or PromptCache.load(path)", InvalidCache),
    )
    for name, value, kind, right, error in rules:
        if value is not None and not isinstance(value, kind):
            raise error(f"{name} is {shown(value)}; it must be {right}")
    if request.prompt is not None and len(request.images) == 1:
        _check_places(request.images[0], request.prompt)


def _check_places(image: ImageInput, prompt: str) -> None:
    """Refuse a picture that is none beside a prompt that names one. Raises InvalidImage."""
    if not isinstance(image, str) or names_picture(image) or not names_picture(prompt) or os.path.exists(image):
        return
    raise InvalidImage(
        f"images is {shown(image)}, which is no file, and prompt is {shown(prompt)}: have they changed places? "
        "It is submit(images, prompt)"
    )


def _checked_ids(given: Any, image_token_ids: frozenset[int]) -> tuple[int, ...]:
    """Final token ids of a list or an array (L,) or (1, L). Raises InvalidPrompt."""
    try:
        array = np.asarray(given)
    except Exception as error:
        raise InvalidPrompt(f"token_ids is {shown(given)}; a list or array of integers is expected") from error
    if array.size == 0:
        raise InvalidPrompt("token_ids is empty")
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    holds_truths = isinstance(given, Sequence) and any(isinstance(token, bool) for token in given)
    if array.ndim != 1 or array.dtype.kind not in "iu" or holds_truths:
        raise InvalidPrompt(f"token_ids is {shown(given)}; a list or array (L,) of integers is expected")
    ids = tuple(map(int, array.tolist()))
    for token in ids:
        if not 0 <= token < 2**31 and token not in image_token_ids:
            raise InvalidPrompt(f"token_ids holds {token}; token ids are integers of at least 0")
    return ids


def _checked_inputs(inputs: Mapping[str, Any], media: tuple[Any, ...]) -> dict[str, Any]:
    if media:
        raise InvalidPrompt("inputs= are processed already: their pictures belong into pixel_values, not into images")
    if "input_ids" not in inputs:
        raise InvalidPrompt("inputs= needs input_ids of shape (1, L)")
    try:
        arrays = copy.deepcopy(as_numpy(inputs))  # the caller's buffers stay the caller's
    except Exception as error:
        raise InvalidPrompt(f"inputs= cannot be copied: {describe(error)}") from error
    ids = arrays["input_ids"]
    if not isinstance(ids, np.ndarray):
        raise InvalidPrompt(f"inputs= needs input_ids as an array (1, L); given: {shown(ids)}")
    shape = ids.shape
    if len(shape) != 2 or shape[0] != 1 or shape[1] == 0:
        raise InvalidPrompt(f"inputs= needs input_ids of shape (1, L), one request a submit; given: {tuple(shape)}")
    if ids.dtype.kind not in "iu":
        raise InvalidPrompt(f"inputs= needs input_ids of integers; given: {ids.dtype}")
    if ids.min() < -(2**31) or ids.max() >= 2**31:  # MLX would cut them to 32 bits
        raise InvalidPrompt("inputs= has input_ids beyond 32 bits")
    return arrays
