"""Words that a processor takes for more than text, found in what people typed before they can stand for anything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from vlm_batch.errors import InvalidPrompt
from vlm_batch.inputs.processing import Processing
from vlm_batch.types import Message

#: Attributes by which processors and tokenizers name the words that stand for pictures, videos and sounds.
_PLACEHOLDER_NAMES = (
    "image_token",
    "video_token",
    "audio_token",
    "boi_token",
    "eoi_token",
    "image_start_token",
    "image_end_token",
    "image_break_token",
    "vision_start_token",
    "vision_end_token",
    "fake_image_token",
)
#: Chats whose renderings show the words with which a template marks turns.
_PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "x"}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}],
    [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}],
)


class ReservedWords:
    """The words of one processor that typed text may not hold.

    ``placeholders`` stand for a picture or video. ``turns`` are the special tokens that the chat template writes: they
    begin and end turns. Special tokens that it does not write are commands of the model (``<|grounding|>``), which
    people type.
    """

    def __init__(self, processing: Processing, image_token_ids: Iterable[int] = ()) -> None:
        self._processing = processing
        self._image_token_ids = image_token_ids

    @cached_property
    def placeholders(self) -> frozenset[str]:
        processor, tokenizer = self._processing.processor, self._processing.tokenizer
        named = [getattr(part, name, None) for part in (processor, tokenizer) for name in _PLACEHOLDER_NAMES]
        special = self._special
        marked = [special[token] for token in self._image_token_ids if token in special]
        around = self._rendering("x", num_images=1) or ""  # a picture's beginning and end
        framing = [word for word in special.values() if word in around and word not in self.turns and _is_mark(word)]
        words = (*named, *marked, *framing)
        return frozenset(word for word in words if isinstance(word, str) and len(word.strip()) > 1)

    @cached_property
    def turns(self) -> frozenset[str]:
        renderings = [text for probe in _PROBES if (text := self._rendering(probe)) is not None]
        marks = filter(_is_mark, self._special.values())
        return frozenset(word for word in marks if any(word in text for text in renderings))

    def check_prompt(self, text: str) -> None:
        """Refuse a prompt that holds a reserved word. Raises InvalidPrompt."""
        self._check(text, self.placeholders | self.turns, "give text that is final already with rendered=True")

    def check_chat(self, messages: Iterable[Message]) -> None:
        """Refuse a chat that holds one; an assistant's turn may repeat what the model itself writes."""
        for message in messages:
            words = self.placeholders if message.get("role") == "assistant" else self.placeholders | self.turns
            for text in texts_of(message):
                self._check(text, words, "render the chat yourself and give it as prompt with rendered=True")

    def _check(self, text: str, words: Iterable[str], way_out: str) -> None:
        found = sorted(word for word in words if word in text)
        if found:
            meaning = (
                "a picture's or video's place" if found[0] in self.placeholders else "the beginning or end of a turn"
            )
            raise InvalidPrompt(
                f"the text holds {found[0]!r}, which this model's processor reads as {meaning}; leave it out "
                f"(pictures get their places by themselves), or {way_out}"
            )

    @cached_property
    def _special(self) -> dict[int, str]:
        """The tokenizer's special tokens: their ids and words."""
        added = getattr(self._processing.tokenizer, "added_tokens_decoder", None) or {}
        return {int(token): str(word) for token, word in added.items() if getattr(word, "special", False)}

    def _rendering(self, chat: str | list[Message], num_images: int = 0) -> str | None:
        try:
            return self._processing.render(chat, num_images)
        except InvalidPrompt:  # not every template takes a system turn, or a picture
            return None


def _is_mark(word: str) -> bool:
    """Whether a special token is no word or letter of its own."""
    return not word.isalnum()


def texts_of(value: Any, key: str = "") -> Iterator[str]:
    """Every text in a message; of what a template writes in its place."""
    if isinstance(value, str):
        if key not in ("role", "type"):
            yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from texts_of(part, str(name))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from texts_of(part)
