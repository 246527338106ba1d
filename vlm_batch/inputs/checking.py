"""Requests to questions, in the submitter's thread: all that can be known at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from vlm_batch.checks import check_within
from vlm_batch.errors import (
    InvalidAudio,
    InvalidImage,
    InvalidParameters,
    InvalidPrompt,
    InvalidVideo,
)
from vlm_batch.inputs.audio import as_audio, check_seconds, own_audio
from vlm_batch.inputs.chats import Track, has_sound, split_messages
from vlm_batch.inputs.given import (
    check_template,
    check_text,
    check_types,
    checked_ids,
    checked_inputs,
)
from vlm_batch.inputs.grammar import Forms
from vlm_batch.inputs.images import each_picture, own_image
from vlm_batch.inputs.limits import (
    Limits,
    check_enlarged,
    check_length,
    check_num_pictures,
    check_num_recordings,
    check_pixels,
)
from vlm_batch.inputs.media import KINDS
from vlm_batch.inputs.processing import PixelBounds, Processing
from vlm_batch.inputs.question import CHARACTERS_PER_TOKEN, Question
from vlm_batch.inputs.recalled import own_picture
from vlm_batch.inputs.refusals import exceeds, refused_as
from vlm_batch.inputs.reserved import ReservedWords, texts_of
from vlm_batch.inputs.videos import as_video, own_video
from vlm_batch.records import Thinking
from vlm_batch.registry import ModelSpec
from vlm_batch.store.pictures import PictureStore
from vlm_batch.types import (
    FetchPolicy,
    Message,
    Request,
    SamplingParams,
    Template,
)

Other = TypeVar("Other")

#: Parameters that name tokens by their ids.
_TOKEN_IDS = (
    "stop_token_ids",
    "allowed_token_ids",
    "logit_bias",
    "whitelist_token_ids",
)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a model that decide about its requests.

    Attributes:
        spec: its family's.
        image_token_ids: tokens that mark picture features.
        check_inputs: refuses processed inputs that do not fit.
        max_context: positions of its context; None if unknown.
        num_logits: number of tokens that it chooses from; None where that depends on the request.
    """

    spec: ModelSpec
    image_token_ids: frozenset[int] = frozenset()
    check_inputs: Callable[[Mapping[str, Any]], None] = lambda inputs: None
    max_context: int | None = None
    num_logits: int | None = None


class Checker:
    """Checks one model's requests; its methods may be called by several threads at a time."""

    def __init__(
        self,
        processing: Processing,
        facts: ModelFacts,
        *,
        limits: Limits,
        fetch: FetchPolicy,
        forms: Forms,
        reserved: ReservedWords,
        pictures: PictureStore | None,
    ) -> None:
        self._processing = processing
        self._facts = facts
        self._limits = limits
        self._fetch = fetch
        self._forms = forms
        self._reserved = reserved
        own = partial(own_image, policy=fetch, max_pixels=limits.image_pixels)
        self._own_frame = own
        self._own_picture = partial(own_picture, own=own, store=pictures)
        bounds = (limits.min_pixels, limits.max_pixels)
        if facts.spec.images and processing.pixels is None and bounds != (None, None):
            raise self._without_bounds()

    def check(self, request: Request) -> Question:
        """Validate a request and render its prompt. Raises InvalidRequest."""
        params = request.params
        self._check_ids(params)
        new_form = 0 if params.form is None else self._forms.check(params)
        check_types(request, self._fetch)
        check_template(request)
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
        images, videos, audios = media
        self._check_takes(images, videos, audios)
        question = Question(
            images=tuple(each_picture(self._own_picture, images)),
            videos=tuple(
                own_video(as_video(video), self._own_frame) for video in videos
            ),
            audios=tuple(
                own_audio(as_audio(audio), self._fetch)
                for audio in audios
                if not isinstance(audio, Track)
            ),
            tracks=tuple(map(_video_of, audios)),
            fetch=self._fetch,
            params=params,
            pixels=self._pixels(request),
            sampling=self._processing.sampling,
            client=request.client,
            new_form=new_form,
            is_templated=request.template is not None,
            options=request.options,
            **self._checked_prompt(request, turns, media),
        ).measured()
        self.check_size(question)
        if params.form is None and params.thinking_budget is None:
            return question
        return replace(question, thinking=self._thinking(question, request))

    def _check_takes(
        self, images: Sequence[Any], videos: Sequence[Any], audios: Sequence[Any]
    ) -> None:
        """Refuse media of a kind that the family does not take, and more than are read."""
        spec = self._facts.spec
        if images and not spec.images:
            raise InvalidImage(
                f"{spec.family} takes no pictures: it is a language model"
            )
        if len(images) > 1 and not spec.multi_image:
            raise InvalidImage(
                f"{spec.family} takes one picture a request; given: {len(images)}"
            )
        check_num_pictures(self._limits, len(images) + len(videos))
        if videos and not spec.video:
            raise InvalidVideo(f"{spec.family} takes no videos: {spec.no_video}")
        if audios and not spec.audio:
            is_track = isinstance(audios[0], Track)
            what = "no video's sound" if is_track else "no recordings"
            raise InvalidAudio(f"{spec.family} takes {what}: {spec.no_audio}")
        check_num_recordings(self._limits, len(audios))

    def check_size(self, question: Question) -> None:
        """Refuse media that are larger together than is read."""
        limits = self._limits
        if question.seconds:
            check_seconds(
                question.seconds, limits.audio_seconds, "the request's recordings"
            )
        check_num_pictures(limits, question.num_pictures)
        check_pixels(limits, question.num_pixels)
        if question.pixels is not None:
            check_enlarged(limits, question.pixels.least, len(question.images))

    def _check_ids(self, params: SamplingParams) -> None:
        """Refuse ids of tokens that the model does not have."""
        if self._facts.num_logits is None:
            return
        for name in _TOKEN_IDS:
            check_within(name, getattr(params, name) or (), self._facts.num_logits)

    def _check_length(self, size: int, per_token: int, said: str) -> None:
        check_length(self._limits, self._facts.max_context, size, per_token, said)

    # The prompt
    # -----------------------------------------------------------------------------------------------------------------

    def _checked_prompt(
        self, request: Request, turns: list[Message], media: Sequence[Sequence[Any]]
    ) -> dict[str, Any]:
        """Return the question's ``inputs``, ``token_ids`` or ``prompt``, whichever the request has."""
        if request.inputs is not None:
            inputs = checked_inputs(request.inputs, any(media))
            self._check_fit(inputs)
            return {"inputs": inputs}
        if request.token_ids is not None:
            ids = checked_ids(request.token_ids, self._facts.image_token_ids)
            if not any(media):
                self._facts.check_inputs({"input_ids": np.array([ids])})
            self._check_length(len(ids), 1, "token_ids has {} ids")
            return {"token_ids": ids}
        # nested deeper than Python follows, or in itself
        with refused_as(InvalidPrompt, "the text cannot be read"):
            return {"prompt": self._rendered(request, turns, list(map(len, media)))}

    def _check_fit(self, inputs: Mapping[str, Any]) -> None:
        # the family's arithmetic on shapes and types that it does not know
        with refused_as(
            InvalidPrompt, "inputs= are not what the model's processor makes"
        ):
            self._facts.check_inputs(inputs)

    def _rendered(
        self, request: Request, turns: list[Message], counts: Sequence[int]
    ) -> str:
        """Return the text that the processor gets; ``counts`` count media by ``KINDS``."""
        options = request.template
        asked = turns if request.prompt is None else request.prompt
        texts = list(texts_of(asked))
        if options is not None:
            texts += texts_of(options.arguments)
        for text in texts:
            check_text(text)
        noun = "chat" if request.prompt is None else "prompt"
        said = f"the {noun} has {{}} characters"
        self._check_length(sum(map(len, texts)), CHARACTERS_PER_TOKEN, said)
        if isinstance(asked, str) and not asked.strip():
            raise InvalidPrompt("the prompt is empty")
        if options is None:
            self._check_placeholders(str(asked), counts)
            return str(asked)
        if options.escape_special_tokens:
            asked, options = self._reserved.escaped(asked), self._escaped(options)
        self._reserved.check(asked, options.arguments)
        return self._processing.render(asked, *counts, options=options)

    def _check_placeholders(self, prompt: str, counts: Sequence[int]) -> None:
        """Refuse a rendered prompt that has places for other media than the request's."""
        for kind, given in zip(KINDS, counts, strict=True):
            room = self._processing.count_placeholders(prompt, kind.marker)
            if room not in (None, given):
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

    # Pixels and thinking
    # -----------------------------------------------------------------------------------------------------------------

    def _pixels(self, request: Request) -> PixelBounds | None:
        """Return the bounds of the request's pictures; None for the processor's own."""
        limit = self._limits.max_pixels
        asked_least = _or_else(request.min_pixels, self._limits.min_pixels)
        asked_most = _or_else(request.max_pixels, limit)
        if (asked_least, asked_most) == (None, None):
            return None
        own = self._processing.pixels
        if own is None:
            raise self._without_bounds()
        most = _or_else(asked_most, own.most)
        if exceeds(most, limit):
            raise InvalidImage(f"max_pixels is {most:,}; the batcher's is {limit:,}")
        least = _or_else(asked_least, own.least)
        # a most is a bound, and makes no picture larger; a least above the model's asks for it
        if least <= own.most:
            most = min(most, own.most)
        if request.min_pixels is not None and least > most:
            raise InvalidImage(
                f"min_pixels is {least:,}, above max_pixels, which is {most:,}"
            )
        bounds = PixelBounds(min(least, most), most)
        if bounds == own:
            return None
        return bounds

    def _without_bounds(self) -> InvalidImage:
        return InvalidImage(
            f"min_pixels and max_pixels: {self._facts.spec.family}'s processor has no such bounds; leave them out"
        )

    def _thinking(self, question: Question, request: Request) -> Thinking | None:
        """Return the thinking state after the prompt."""
        params, marks = request.params, self._processing.template.thinking
        if marks is None:
            if params.thinking_budget is not None:
                raise InvalidParameters(
                    "thinking_budget: this model's chat template does not mark thinking"
                )
            return None
        start = self._processing.ids_of(marks.start)
        end = self._processing.ids_of(marks.end)
        if question.prompt is None:
            given = _ids_of(question)
            return Thinking(start, end, is_open=rfind(given, start) > rfind(given, end))
        is_open = marks.is_open(question.prompt)
        is_over = is_open or marks.is_over(question.prompt)
        may_begin = len(start) == 1 and not is_over
        if params.form is not None and not _asks_for_thinking(request):
            may_begin = False
        return Thinking(start, end, is_open=is_open, may_begin=may_begin)


def _asks_for_thinking(request: Request) -> bool:
    return request.template is not None and request.template.enable_thinking is True


def _ids_of(question: Question) -> Sequence[int]:
    """Return the ids of a question that was asked in tokens."""
    if question.inputs is None:
        return question.token_ids
    ids: list[int] = question.inputs["input_ids"][0].tolist()
    return ids


def _or_else(value: int | None, other: Other) -> int | Other:
    if value is None:
        return other
    return value


def rfind(ids: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the last index of ``wanted`` in ``ids``, or -1."""
    size, wanted = len(wanted), tuple(wanted)
    for at in range(len(ids) - size, -1, -1):
        if tuple(ids[at : at + size]) == wanted:
            return at
    return -1


def _video_of(audio: Any) -> int | None:
    if isinstance(audio, Track):
        return audio.video
    return None


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
