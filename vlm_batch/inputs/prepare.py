"""Requests to model inputs: checked at submit, processed on a loader's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image

from vlm_batch.arrays import MOST_ON_HOST, evaluated, num_bytes, on_host
from vlm_batch.errors import InvalidAudio
from vlm_batch.inputs.audio import (
    Sound,
    check_seconds,
    describe_audio,
    load_audio,
)
from vlm_batch.inputs.checking import Checker, ModelFacts
from vlm_batch.inputs.fetch import NEVER, USUAL, Cancelled
from vlm_batch.inputs.grammar import Form, Forms
from vlm_batch.inputs.images import each_picture, load_image
from vlm_batch.inputs.limits import LIMITS, Limits, check_num_pictures
from vlm_batch.inputs.options import tokens_of_options
from vlm_batch.inputs.processing import ESCAPE, Processing, ProcessorPool
from vlm_batch.inputs.processors import settings_of
from vlm_batch.inputs.question import Prepared, Question
from vlm_batch.inputs.recalled import recalled_picture
from vlm_batch.inputs.refusals import exceeds
from vlm_batch.inputs.reserved import ReservedWords
from vlm_batch.inputs.videos import Clip, load_video
from vlm_batch.records import OptionTokens
from vlm_batch.runtime.memory import trim
from vlm_batch.store.digest import hash_ahead
from vlm_batch.store.pictures import PictureStore
from vlm_batch.types import Audio, FetchPolicy, ImageInput, Request


class Preparer:
    """One model's ``check`` (submitter's thread) and ``prepare`` (a loader's thread)."""

    def __init__(
        self,
        processing: Processing,
        facts: ModelFacts,
        *,
        limits: Limits = LIMITS,
        fetch: FetchPolicy = USUAL,
        pictures: PictureStore | None = None,
    ) -> None:
        self.processing = processing
        self.facts = facts
        self._pictures = pictures
        self._limits = limits
        self._fetch = fetch
        self._forms = Forms(processing.tokenizer, processing.eos_token_ids)
        self._reserved = ReservedWords(processing, facts.image_token_ids)
        self._checker = Checker(
            processing,
            facts,
            limits=limits,
            fetch=fetch,
            forms=self._forms,
            reserved=self._reserved,
            pictures=pictures,
        )
        # processors and tokenizers are not made for two threads at once
        self._processors = ProcessorPool(processing)
        self._rare_lock = Lock()
        #: Whether it escapes words -> settings, and the processor made with them.
        self._rare: dict[bool, tuple[str, Processing]] = {}

    # In the submitter's thread
    # -----------------------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> Question:
        """Validate a request and render its prompt. Raises InvalidRequest."""
        return self._checker.check(request)

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

    def prepare(self, question: Question, cancelled: Cancelled = NEVER) -> Prepared:
        """Read media and run the processor. Raises InvalidRequest or OperationCancelled."""
        self._checker.check_size(question)
        try:
            return self._prepared(question, cancelled)
        finally:
            if question.has_many_pixels:
                trim()

    def _prepared(self, question: Question, cancelled: Cancelled) -> Prepared:
        """Do what ``prepare`` does, but for the bounds and the memory."""
        images = self._decoded_images(question, cancelled)
        clips = self._decoded_clips(question, cancelled)
        num_frames = sum(len(clip.indices) for clip in clips)
        check_num_pictures(self._limits, len(images) + num_frames)
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

    def _decoded_images(
        self, question: Question, cancelled: Cancelled
    ) -> list[Image.Image]:
        load: Callable[[ImageInput], Image.Image] = partial(
            load_image,
            max_pixels=self._limits.image_pixels,
            policy=self._fetch,
            cancelled=cancelled,
        )
        if self._pictures is not None:
            load = partial(recalled_picture, load=load, store=self._pictures)
        return each_picture(load, question.images)

    def _decoded_clips(self, question: Question, cancelled: Cancelled) -> list[Clip]:
        bounds = self._limits.video_pixels, self._limits.image_pixels
        clips = []
        for video in question.videos:
            cancelled.check()
            clips.append(
                load_video(video, question.sampling, *bounds, self._fetch, cancelled)
            )
        return clips

    def _decoded_sounds(self, question: Question, cancelled: Cancelled) -> list[Sound]:
        sounds = []
        own = iter(question.audios)
        for at in question.tracks:
            cancelled.check()
            # a recording of its own, or a video's
            audio = next(own) if at is None else Audio(question.videos[at].source)
            sounds.append(replace(self._sound(audio, cancelled), video=at))
        seconds = sum(sound.seconds for sound in sounds)
        check_seconds(seconds, self._limits.audio_seconds, "the request's recordings")
        return sounds

    def _sound(self, audio: Audio, cancelled: Cancelled) -> Sound:
        sound = load_audio(
            audio,
            self.processing.audio_rate,
            self._limits.audio_seconds,
            self._fetch,
            cancelled,
        )
        spec = self.facts.spec
        most = spec.audio_seconds
        if exceeds(sound.seconds, most):
            raise InvalidAudio(
                f"{describe_audio(audio)} has {sound.seconds:,.1f} s; {spec.family} hears {most:g} s of a recording: "
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
        is_escaped = prompt is not None and ESCAPE in prompt
        lent: AbstractContextManager[Processing] = self._processors.acquire()
        if is_escaped or question.takes_long:
            lent = self._rare_one(escapes=is_escaped)
        with lent as processing, processing.scaled_to(question.pixels):
            if prompt is None:
                ids, marks = question.token_ids, self.facts.image_token_ids
                return processing.inputs_of_ids(ids, images, marks, clips, sounds)
            make = processing.escaped_inputs if is_escaped else processing.inputs
            return make(
                prompt, images, clips, sounds, is_templated=question.is_templated
            )

    @contextmanager
    def _rare_one(self, *, escapes: bool) -> Iterator[Processing]:
        """Lend the processor for very long or escaped prompts."""
        with self._rare_lock:
            settings = settings_of(self.processing.processor)
            if escapes not in self._rare or self._rare[escapes][0] != settings:
                self._rare[escapes] = settings, self.processing.copy()
            yield self._rare[escapes][1]

    def _ids_of_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of bad words, as they are and behind a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for spelled in (word, f" {word.lstrip()}"):
                found[self.processing.ids_of(spelled)] = None
        found.pop((), None)
        return tuple(found)

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
