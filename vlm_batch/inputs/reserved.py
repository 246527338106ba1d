"""Control tokens and placeholders that a processor would act on, found and refused in text that people typed."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
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
_NUMBER = re.compile(r"\d+")
#: A mark of a picture, video or sound, as files of processors write them.
_MARK = re.compile(r"(?i)[<\[(◁][^\s]*(image|img|im_patch|video|vision|audio|media|patch|frame)[^\s]*[>\])▷]")
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
        special, added = self._special, self._added
        marked = [added[token] for token in self._image_token_ids if token in added]
        around = self._rendering("x", num_images=1) or ""  # a picture's beginning and end
        framing = [word for word in special.values() if word in around and word not in self.turns and _is_mark(word)]
        written = [word for word in self._written if not _NUMBER.search(word)]
        words = (*named, *marked, *framing, *written, *_words_of(type(processor)))
        return frozenset(word for word in words if isinstance(word, str) and len(word.strip()) > 1)

    @cached_property
    def numbered(self) -> tuple[re.Pattern[str], ...]:
        """Placeholders with a number (``<|image_1|>``): any number is taken for a picture's."""
        written = sorted(word for word in self._written if _NUMBER.search(word))
        patterns = {r"\d+".join(map(re.escape, _NUMBER.split(word))) for word in written}
        return tuple(map(re.compile, sorted(patterns | _patterns_of(type(self._processing.processor)))))

    @cached_property
    def _written(self) -> frozenset[str]:
        """The marks that the template writes for pictures and videos, tokens or not: processors look for them in text."""
        without = self._rendering("x") or ""
        renderings = [self._rendering("x", 1), self._rendering("x", 0, 1)]
        words = [_added(without, text).strip() for text in renderings if text is not None]
        return frozenset(word for word in words if len(word) > 1 and _is_mark(word))

    @cached_property
    def turns(self) -> frozenset[str]:
        renderings = [text for probe in _PROBES if (text := self._rendering(probe)) is not None]
        marks = filter(_is_mark, self._special.values())
        return frozenset(word for word in marks if any(word in text for text in renderings))

    def check_prompt(self, text: str) -> None:
        """Refuse a prompt that holds a reserved word. Raises InvalidPrompt."""
        self._check(text, self.placeholders | self.turns, "give text that is final already with template=None")

    def check_chat(self, messages: Iterable[Message]) -> None:
        """Refuse a chat that holds one; an assistant's turn may repeat what the model itself writes."""
        for message in messages:
            words = self.placeholders if message.get("role") == "assistant" else self.placeholders | self.turns
            for text in (*texts_of(message), _in_one(message.get("content"))):
                self._check(text, words, "render the chat yourself and give it as prompt with template=None")

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Refuse a template's further arguments, such as tools and documents, if they hold one."""
        for text in texts_of(arguments):
            self._check(text, self.placeholders | self.turns, "leave that argument out")

    def _check(self, text: str, words: Iterable[str], way_out: str) -> None:
        found = sorted(word for word in words if word in text)
        found += [match.group() for pattern in self.numbered if (match := pattern.search(text))]
        if found:
            meaning = "the beginning or end of a turn" if found[0] in self.turns else "a picture's or video's place"
            raise InvalidPrompt(
                f"the text holds {found[0]!r}, which this model's processor reads as {meaning}; leave it out "
                "(pictures get their places by themselves)",
                advice=f", or {way_out}",
            )

    @cached_property
    def _special(self) -> dict[int, str]:
        """The tokenizer's special tokens: their ids and words."""
        added = getattr(self._processing.tokenizer, "added_tokens_decoder", None) or {}
        return {int(token): str(word) for token, word in added.items() if getattr(word, "special", False)}

    @cached_property
    def _added(self) -> dict[int, str]:
        """All tokens that were added to the tokenizer's own, special or not."""
        added = getattr(self._processing.tokenizer, "added_tokens_decoder", None) or {}
        return {int(token): str(word) for token, word in added.items()}

    def _rendering(self, chat: str | list[Message], num_images: int = 0, num_videos: int = 0) -> str | None:
        try:
            return self._processing.render(chat, num_images, num_videos)
        except InvalidPrompt:  # not every template takes a system turn, or a picture
            return None


def _words_of(kind: type) -> frozenset[str]:
    """Marks of pictures, videos and sounds that a processor's file names: it looks for them in the text."""
    return frozenset(word for word in _literals(kind) if "\\" not in word)


def _patterns_of(kind: type) -> frozenset[str]:
    """The same with a number, as patterns."""
    return frozenset(word for word in _literals(kind) if r"\d+" in word and _compiles(word))


def _literals(kind: type) -> frozenset[str]:
    """Texts that look like a mark, in the files of a processor's classes that belong to one model."""
    modules = {parent.__module__ for parent in kind.__mro__ if ".models." in parent.__module__}
    return frozenset[str]().union(*map(_literals_in, modules))


@cache
def _literals_in(module: str) -> frozenset[str]:
    """Those of a module, and of the other files of its folder that process."""
    try:
        file = Path(inspect.getfile(sys.modules[module]))
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in {file, *file.parent.glob("*process*.py")}]
    except (KeyError, OSError, TypeError, ValueError):  # no file to read, or none of Python's
        return frozenset()
    nodes = (node for tree in trees for node in ast.walk(tree))
    texts = (node.value.strip() for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return frozenset(filter(_MARK.fullmatch, texts))


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _is_mark(word: str) -> bool:
    """Whether a special token is no word or letter of its own."""
    return not word.isalnum()


def _added(without: str, text: str) -> str:
    """The middle of ``text``, between the beginning and the end that it shares with ``without``."""
    start = _common(without, text)
    return text[start : len(text) - _common(without[start:][::-1], text[start:][::-1])]


def _common(one: str, other: str) -> int:
    """The number of first characters that two texts share."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a message or an argument that a template may write: values and names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield str(name)
            yield from texts_of(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from texts_of(part)


def _in_one(content: Any) -> str:
    """The texts of a content's parts as templates write them, one after the other."""
    parts = content if isinstance(content, (list, tuple)) else ()
    return "".join(text for part in parts if (text := _piece(part)) is not None)


def _piece(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else None
