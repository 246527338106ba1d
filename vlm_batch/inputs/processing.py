"""A checkpoint's processor: templates, placeholders and model inputs."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.prompt_utils import MODEL_CONFIG, apply_chat_template, get_chat_template
from mlx_vlm.utils import (
    VideoMetadata,
    prepare_inputs,
    processor_video_sampling,
    resolve_eos_token_ids,
)
from PIL import Image
from transformers import AddedToken

from vlm_batch.arrays import as_mlx
from vlm_batch.errors import InvalidPrompt
from vlm_batch.inputs.audio import Sound
from vlm_batch.inputs.chats import in_parts, in_text, with_parts
from vlm_batch.inputs.processors import (
    ProcessorCopier,
    copy_for_thread,
    evaluate_held,
    no_special_tokens,
    settings_of,
    silence_lengths,
    with_switched_tokens,
    without_text_options,
)
from vlm_batch.inputs.recalled import RecalledPicture, StandIn
from vlm_batch.inputs.template import ChatTemplate, refuse
from vlm_batch.inputs.videos import Clip, Sampling
from vlm_batch.types import PLAIN_TEMPLATE, Message, Template

#: Splits a special token's spelling, so that it is tokenized as plain text; the split is removed afterwards. Two Unicode
#: noncharacters.
ESCAPE = "\ufdd0\ufdd1"


@dataclass(frozen=True)
class PixelBounds:
    """A processor's fewest and most pixels of a scaled picture."""

    least: int
    most: int


class Processing:
    """A model's processor: renders prompts (any thread), makes inputs (one thread at a time), decodes text."""

    def __init__(
        self, processor: Any, config: Any, sampling: Sampling | None = None
    ) -> None:
        self.processor = processor = with_switched_tokens(
            without_text_options(processor)
        )
        evaluate_held(processor)
        self.config = config
        self.sampling = _sampling(processor, sampling or Sampling())
        self.tokenizer = getattr(processor, "tokenizer", processor)
        silence_lengths(self.tokenizer)
        self.template = ChatTemplate(processor)
        # Answers are decoded while another thread encodes prompts, and a fast tokenizer serves one of them at a time.
        self._decoder = copy_for_thread(self.tokenizer)
        self._encoder: Any = None
        self._encoder_lock = Lock()

    def copy(self) -> Processing:
        return Processing(copy_for_thread(self.processor), self.config, self.sampling)

    # Text
    # ---------------------------------------------------------------------------------------------------------------

    def render(
        self,
        prompt: str | Sequence[Message],
        *counts: int,
        options: Template = PLAIN_TEMPLATE,
    ) -> str:
        """Render a prompt or chat; ``counts`` count pictures, videos and recordings."""
        if options.said:
            self.template.check(options)
        try:
            rendered = self._filled(self._messages(prompt, *counts), options)
        except Exception as error:
            raise InvalidPrompt(
                f"the chat template cannot render this prompt: {error}",
                advice="; a prompt that is final already goes with template=None",
            ) from error
        # families without a template get their last message back
        if isinstance(rendered, Mapping):
            rendered = rendered.get("content", "")
        if not isinstance(rendered, str):
            raise InvalidPrompt(
                f"the chat template gave {type(rendered).__name__}, not text"
            )
        return rendered

    def _filled(self, messages: Any, options: Template) -> Any:
        """Return the template's text, or the last message where there is no template."""
        if isinstance(messages, (str, Mapping)):
            refuse(options, "this family's processor takes the last message alone")
            return messages
        if self.template.owner is not None:
            return self.template.fill(messages, options)
        return get_chat_template(self.processor, messages, add_generation_prompt=True)

    @property
    def chat_template(self) -> Any:
        """transformers' template: text, texts by name, or None."""
        return getattr(self.processor, "chat_template", None) or getattr(
            self.tokenizer, "chat_template", None
        )

    def _messages(
        self, prompt: str | Sequence[Message], num_images: int = 0, *others: int
    ) -> Any:
        """Return turns as the template takes them: with the parts that the request has, as in transformers, or as text.

        mlx-vlm goes by the family's name (``prompt_utils.MODEL_CONFIG``): it places pictures behind the text for some, writes
        them as text for others, and leaves out what it does not know of a turn.
        """
        turns = prompt if isinstance(prompt, str) else list(prompt)
        if self._takes_parts_of(turns, num_images, *others):
            made = with_parts(turns, num_images, *others)
            return made if self.template.takes_text else list(map(in_parts, made))
        made = apply_chat_template(
            self.processor,
            self.config,
            turns,
            num_images=num_images,
            return_messages=True,
        )
        if self._takes_last_alone:
            return made[-1]
        if self.template.takes_text_alone:
            made = [_in_text(turn, self._image_mark) for turn in made]
        if isinstance(turns, str):
            return made
        pairs = zip(made, turns, strict=True)
        return list(itertools.starmap(_with_fields, pairs))

    def _takes_parts_of(
        self, turns: str | Sequence[Message], num_images: int, *others: int
    ) -> bool:
        """Whether turns are rendered as they are, with a part for each medium."""
        # mlx-vlm knows videos of single prompts only, by their paths, and no types but its own
        is_unknown = num_images > 0 and not self._is_of_mlx_vlm
        if is_unknown or any(others):
            return True
        if self._takes_last_alone:
            return False
        return self.template.takes(turns, num_images)

    @property
    def _is_of_mlx_vlm(self) -> bool:
        """Whether mlx-vlm knows how this family writes pictures."""
        return str(self.config.model_type).lower() in MODEL_CONFIG

    @property
    def _takes_last_alone(self) -> bool:
        return self.config.model_type in _LAST_MESSAGE and not self._has_own_template

    @property
    def _has_own_template(self) -> bool:
        """Whether a PaliGemma was tuned to chat: the published ones have no template."""
        return self.config.model_type == "paligemma" and self.chat_template is not None

    @property
    def _image_mark(self) -> str:
        return _text_of("image_token", self.processor, self.tokenizer) or "<image>"

    def count_placeholders(self, rendered: str, kind: str = "image") -> int | None:
        """Count placeholders of ``kind`` ("image", "video", "audio"); None if the processor names none."""
        token = _text_of(f"{kind}_token", self.processor, self.tokenizer)
        return None if token is None else rendered.count(token)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return a text without special tokens."""
        return self._text(token_ids, without_special=True)

    def _text(self, token_ids: Sequence[int], *, without_special: bool) -> str:
        if not len(token_ids):
            return ""
        ids = list(token_ids)
        return str(self._decoder.decode(ids, skip_special_tokens=without_special))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return a text with its special tokens."""
        return self._text(token_ids, without_special=False)

    def decode_content(self, token_ids: Sequence[int]) -> str:
        """Return a text with all special tokens but those that begin, end and pad sequences."""
        return self.decode_all(
            [token for token in token_ids if token not in self.around]
        )

    @cached_property
    def around(self) -> frozenset[int]:
        """The special tokens that begin, end and pad sequences."""
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids: set[Any] = {getattr(self.tokenizer, name, None) for name in names}
        return frozenset(ids - {None} | set(self.eos_token_ids))

    def has_special(self, word: str) -> bool:
        """Return whether a word is a special token of the tokenizer, which ``decode`` leaves out."""
        added = (getattr(self.tokenizer, "added_tokens_decoder", None) or {}).values()
        return any(one.special and one.content == word for one in added)

    def ids_of(self, text: str) -> tuple[int, ...]:
        with self._encoder_lock:
            if self._encoder is None:
                self._encoder = copy_for_thread(self.tokenizer)
            return tuple(self._encoder.encode(text, add_special_tokens=False))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids at which an answer ends: the configuration's, the tokenizer's and the processor's.

        mlx-vlm has put those of generation_config.json into the configuration (utils.py:105).
        """
        ends = resolve_eos_token_ids(
            getattr(self.config, "eos_token_id", None), self.tokenizer
        )
        ends += getattr(self.processor, "additional_eos_token_ids", ())
        return tuple(dict.fromkeys(end for end in ends if isinstance(end, int)))

    def escaped_inputs(
        self,
        rendered: str,
        images: Sequence[Image.Image],
        clips: Sequence[Clip] = (),
        sounds: Sequence[Sound] = (),
        *,
        is_templated: bool = True,
    ) -> dict[str, Any]:
        """Like ``inputs``, for a prompt with ``ESCAPE``."""
        self.tokenizer.add_tokens([AddedToken(ESCAPE, normalized=False)])
        found = self.inputs(rendered, images, clips, sounds, is_templated=is_templated)
        ids = np.array(found["input_ids"])
        kept = np.flatnonzero(ids[0] != self.tokenizer.convert_tokens_to_ids(ESCAPE))
        num_escaped = ids.shape[1] - len(kept)
        has_media = bool(images or sounds)
        says_positions = has_media and not BY_POSITION.isdisjoint(found)
        if num_escaped != rendered.count(ESCAPE) or says_positions:
            raise InvalidPrompt(
                "the text holds a special token's spelling, which this model's processor cannot escape"
            )
        columns = mx.array(kept)
        for name, value in found.items():
            if getattr(value, "shape", None) == ids.shape:
                found[name] = value[:, columns]
        return found

    # Inputs
    # -------------------------------------------------------------------------------------------------------------

    @property
    def pixels(self) -> PixelBounds | None:
        """The checkpoint's own bounds, if it has any."""
        part = getattr(self.processor, "image_processor", None)
        least = getattr(part, "min_pixels", None)
        most = getattr(part, "max_pixels", None)
        if not isinstance(least, int) or not isinstance(most, int):
            return None
        return PixelBounds(least, most)

    @contextmanager
    def scaled_to(self, bounds: PixelBounds | None) -> Iterator[None]:
        """Scale pictures to ``bounds`` within the block; None leaves the checkpoint's own."""
        if bounds is None:
            yield
            return
        part = self.processor.image_processor
        own = part.min_pixels, part.max_pixels
        try:
            part.min_pixels, part.max_pixels = bounds.least, bounds.most
            yield
        finally:
            part.min_pixels, part.max_pixels = own

    @property
    def audio_rate(self) -> int:
        """The processor's samples a second."""
        part = getattr(self.processor, "feature_extractor", None)
        rate = getattr(part, "sampling_rate", None)
        if isinstance(rate, int):
            return rate
        return 16_000

    def inputs(
        self,
        rendered: str,
        images: Sequence[Image.Image],
        clips: Sequence[Clip] = (),
        sounds: Sequence[Sound] = (),
        *,
        is_templated: bool = True,
    ) -> dict[str, Any]:
        """Return ``input_ids`` (1, L) and the media's arrays; ``is_templated`` if ``render`` made the prompt."""
        adds = self.adds_special_tokens(rendered, is_templated=is_templated)
        try:
            with no_special_tokens(not adds):
                given = prepare_inputs(
                    self.processor,
                    images=list(images) or None,
                    prompts=rendered,
                    image_token_index=getattr(self.config, "image_token_index", None),
                    add_special_tokens=adds,
                    **self._heard_and_seen(clips, sounds),
                )
        except Exception as error:
            raise InvalidPrompt(
                f"the processor refuses this request: {error}"
            ) from error
        found: dict[str, Any] = {**given}
        stand_in = _stand_in_of(images)
        if stand_in is not None:
            names = [name for name, value in found.items() if value is stand_in]
            if not names:  # the processor computed with its numbers
                own = [image.copy() for image in images]
                return self.inputs(
                    rendered, own, clips, sounds, is_templated=is_templated
                )
            found |= dict.fromkeys(names, stand_in.joined)
        found |= self._steps_of(clips)
        return as_mlx(found)

    def _heard_and_seen(
        self, clips: Sequence[Clip], sounds: Sequence[Sound]
    ) -> dict[str, Any]:
        """Return the processor's arguments for videos and recordings."""
        media: dict[str, Any] = {}
        if sounds:
            media["audio"] = [sound.samples for sound in sounds]
        if not clips:
            return media
        # decoded frames (T, 3, H, W) as mlx-vlm's processors take them, and when each was taken
        media["videos"] = [clip.frames.transpose(0, 3, 1, 2) for clip in clips]
        media["video_metadata"] = list(map(_metadata, clips))
        if hasattr(self.processor, "takes_rates"):
            media["rates"] = [clip.rate for clip in clips]
            media["sound_of"] = [sound.video for sound in sounds]
        return media

    def _steps_of(self, clips: Sequence[Clip]) -> dict[str, Any]:
        """Return transformers' seconds between a video's time steps (N,), which mlx-vlm leaves out."""
        part = getattr(self.processor, "video_processor", None)
        step = getattr(part, "temporal_patch_size", None)
        if not clips or step is None:
            return {}
        seconds = [step / clip.sampled_fps for clip in clips]
        return {"second_per_grid_ts": np.array(seconds, dtype=np.float32)}

    def adds_special_tokens(self, rendered: str, *, is_templated: bool = True) -> bool:
        """Whether the tokenizer adds its beginning and end to a prompt, as in transformers.

        Not to one that begins with them (processing_utils.py:2402), nor to what a bare tokenizer's template wrote
        (tokenization_utils_base.py:3190). mlx-vlm goes by the family's name (utils.py:2346): most prompts of templates that
        write the beginning have two.
        """
        # families whose class in transformers adds none
        if not getattr(self.processor, "adds_special_tokens", True):
            return False
        is_bare = self.processor is self.tokenizer and self.template.owner is not None
        if is_templated and is_bare:
            return False
        begin = _text_of("bos_token", self.tokenizer)
        has_begun = begin is not None and rendered.startswith(begin)
        return not has_begun

    def inputs_of_ids(
        self,
        token_ids: Sequence[int],
        images: Sequence[Image.Image],
        image_ids: frozenset[int],
        clips: Sequence[Clip] = (),
        sounds: Sequence[Sound] = (),
    ) -> dict[str, Any]:
        """Return model inputs for ids with all placeholders."""
        ids = mx.array([list(token_ids)], dtype=mx.int32)
        if not any((images, clips, sounds)):
            return {"input_ids": ids}
        found = self.inputs(
            self.render("?", len(images), len(clips), len(sounds)),
            images,
            clips,
            sounds,
        )
        needed = _count(found["input_ids"], image_ids)
        given = _count(ids, image_ids)
        if needed != given:
            noun = "media" if sounds else "pictures and videos"
            raise InvalidPrompt(
                f"the {noun} need {needed} placeholder tokens; the token ids hold {given}"
            )
        return with_token_ids(found, ids, image_ids)


class ProcessorPool:
    """Copies of a processor, one per working thread, renewed when settings change."""

    def __init__(self, processing: Processing) -> None:
        self._processing = processing
        self._copier: ProcessorCopier | None = ProcessorCopier(processing.processor)
        # with the settings that each was made with
        self._free: deque[tuple[str, Processing]] = deque()
        self._turn = Lock()
        first = self._new_one()  # which the first request need not make
        if first is not None:
            self._free.append((settings_of(processing.processor), first))

    @contextmanager
    def acquire(self) -> Iterator[Processing]:
        """Lend a copy, or the original if it cannot be copied."""
        settings = settings_of(self._processing.processor)
        taken = self._free_one(settings) or self._new_one()
        if taken is None:
            with self._turn:
                yield self._processing
            return
        try:
            yield taken
        finally:
            self._free.append((settings, taken))

    def _free_one(self, settings: str) -> Processing | None:
        """Take a free copy that was made with these settings; drop those of others."""
        with suppress(IndexError):
            while True:
                made_with, free = self._free.pop()
                if made_with == settings:
                    return free
        return None

    def _new_one(self) -> Processing | None:
        if self._copier is None:
            return None
        try:
            processor = self._copier.copy()
        except Exception:
            # a class of somebody's own that holds what cannot be copied
            self._copier = None
            return None
        made = copy.copy(self._processing)
        made.processor = processor
        made.tokenizer = getattr(processor, "tokenizer", processor)
        return made


#: Families without a template, whose processors take the last message alone (``mlx_vlm.prompt_utils``).
_LAST_MESSAGE = ("paligemma", "florence2", "falcon_ocr")

#: Processor outputs that hold positions, valid for the processor's own prompt only.
BY_POSITION = frozenset(
    {"image_input_idx", "image_bound", "audio_bounds", "cross_attention_mask"}
)


def with_token_ids(
    found: Mapping[str, Any], ids: mx.array, image_ids: frozenset[int]
) -> dict[str, Any]:
    """Adapt a processor's output to other ``ids`` (1, N) with as many placeholders.

    Raises InvalidPrompt if an array says more by position than where pictures are.
    """
    before, after = np.array(found["input_ids"]), np.array(ids)
    if np.array_equal(before, after):
        return dict(found)
    marks = list(image_ids)
    is_picture, will_be = np.isin(before, marks), np.isin(after, marks)
    result = {**found, "input_ids": ids}
    for name, value in found.items():
        if name in BY_POSITION:
            raise _by_position(name)
        if name == "input_ids" or getattr(value, "shape", None) != before.shape:
            continue
        array = np.array(value)
        inside, outside = np.unique(array[is_picture]), np.unique(array[~is_picture])
        if not inside.size == outside.size == 1:
            raise _by_position(name)
        result[name] = mx.array(np.where(will_be, inside[0], outside[0]))
    return result


def _by_position(name: str) -> InvalidPrompt:
    return InvalidPrompt(
        f"this model's processor says by position what a prompt holds ({name}): token ids with pictures cannot be "
        "given to it",
        advice="; give a prompt with template=None, or inputs=",
    )


def _with_fields(made: Any, turn: Mapping[str, Any]) -> Any:
    """Add a turn's fields that mlx-vlm leaves out, such as a name or earlier reasoning."""
    if not isinstance(made, Mapping):
        return made
    more = dict(turn)
    more.pop("role", None)
    more.pop("content", None)
    return {**more, **made}


def _in_text(made: Any, image_mark: str) -> Any:
    if isinstance(made, Mapping):
        return in_text(made, image_mark)
    return made


def _text_of(name: str, *owners: Any) -> str | None:
    """Return the text of the first owner that has one of that name."""
    for owner in owners:
        text = getattr(owner, name, None)
        if isinstance(text, str) and text:
            return text
    return None


def _stand_in_of(images: Sequence[Image.Image]) -> StandIn | None:
    """Return what the processor got in place of pictures that it had before."""
    if images and isinstance(images[0], RecalledPicture):
        return images[0].stand_in
    return None


def _sampling(processor: Any, habit: Sampling) -> Sampling:
    """Return a family's sampling of videos with what the processor declares."""
    declared = processor_video_sampling(processor)
    said = {
        "fps": declared.fps,
        "num_frames": declared.nframes,
        "min_frames": declared.min_frames,
        "max_frames": declared.max_frames,
        "frame_factor": declared.frame_factor,
    }
    given = {name: value for name, value in said.items() if value is not None}
    return replace(habit, **given)


def _metadata(clip: Clip) -> VideoMetadata:
    _, width, height = clip.size
    return VideoMetadata(
        total_num_frames=clip.total,
        fps=clip.fps,
        frames_indices=list(clip.indices),
        width=width,
        height=height,
        duration=clip.total / clip.fps,
    )


def _count(ids: mx.array, wanted: frozenset[int]) -> int:
    return int(np.isin(np.array(ids), list(wanted)).sum())
