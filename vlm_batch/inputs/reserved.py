"""Control tokens and placeholders in typed text, found and refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from typing import Any

from vlm_batch.errors import InvalidPrompt
from vlm_batch.inputs.media import KINDS
from vlm_batch.inputs.processing import ESCAPE, Processing
from vlm_batch.runtime.upstream import marks_of
from vlm_batch.types import Message

#: Attributes of processors and tokenizers that name placeholders.
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
#: Chats whose renderings show how a template marks turns.
_PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "x"}],
    [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "x"},
    ],
    [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}],
)


#: Media counts: none, and one of each kind by itself.
_ONE_OF_EACH = (
    (),
    *(tuple(int(at == one) for one in range(at + 1)) for at in range(len(KINDS))),
)


@dataclass(frozen=True)
class Words:
    """Words forbidden in typed text: marks of media, some numbered (``<|image_1|>``), and special tokens of turns.

    Other special tokens are commands that people type (``<|grounding|>``).
    """

    placeholders: frozenset[str]
    numbered: tuple[re.Pattern[str], ...]
    turns: frozenset[str]


class ReservedWords:
    """The reserved words of one processor."""

    def __init__(
        self, processing: Processing, image_token_ids: Iterable[int] = ()
    ) -> None:
        self._processing = processing
        self._image_token_ids = image_token_ids
        #: Found once, and before the first request: a template is rendered seven times for them.
        self.words = self._find()

    def _find(self) -> Words:
        renderings = "".join(map(self._rendering, _PROBES))
        turns = frozenset(filter(renderings.__contains__, self._special))
        # What the template writes for each kind of media, tokens or not: processors look for it in the text.
        plain, picture, *others = (
            self._rendering("x", *counts) for counts in _ONE_OF_EACH
        )
        around = set(filter(picture.__contains__, self._special)) - turns
        written = [_middle(plain, text) for text in (picture, *others)]
        with_numbers = set(filter(_NUMBER.search, filter(_is_mark, written)))
        kind: type = type(self._processing.processor)
        marks = _marks_of(kind)
        patterns = set(map(_with_any_number, with_numbers))
        patterns |= set(filter(_is_numbered, marks))
        placeholders = {
            *self._named,
            *self._marked,
            *around,
            *(set(filter(_is_mark, written)) - with_numbers),
            *itertools.filterfalse(_is_pattern, marks),
        }
        return Words(
            frozenset(word for word in placeholders if len(word.strip()) > 1),
            tuple(map(re.compile, sorted(patterns))),
            turns,
        )

    @property
    def _named(self) -> list[str]:
        """The placeholders that the processor and the tokenizer name."""
        parts = (self._processing.processor, self._processing.tokenizer)
        found = []
        for part, name in itertools.product(parts, _PLACEHOLDER_NAMES):
            word = getattr(part, name, None)
            if isinstance(word, str):
                found.append(word)
        return found

    @property
    def _marked(self) -> list[str]:
        """The tokens that mark picture features."""
        added = {int(token): str(word) for token, word in self._added.items()}
        return list(map(added.__getitem__, added.keys() & set(self._image_token_ids)))

    @property
    def _added(self) -> Mapping[Any, Any]:
        tokenizer = self._processing.tokenizer
        return getattr(tokenizer, "added_tokens_decoder", None) or {}

    @cached_property
    def _spellings(self) -> re.Pattern[str]:
        words = self.words
        literal = {*words.placeholders, *words.turns, *self._special}
        thinking = self._processing.template.thinking
        if thinking is not None:  # templates look for an earlier answer's
            literal -= {thinking.start, thinking.end}
        either = [pattern.pattern for pattern in words.numbered]
        either += map(re.escape, sorted(literal, key=len, reverse=True))
        grouped = [f"(?:{word})" for word in either]
        return re.compile("|".join(grouped) or "(?!)")

    @property
    def _special(self) -> list[str]:
        return list(map(str, filter(_is_special, self._added.values())))

    def escaped(self, value: Any) -> Any:
        """Put ``ESCAPE`` into each special token's spelling."""
        if isinstance(value, str):
            return self._escaped_text(value)
        if isinstance(value, (list, tuple)):
            return [self.escaped(part) for part in value]
        if not isinstance(value, Mapping):
            return value
        made = {name: self.escaped(part) for name, part in value.items()}
        if "role" in value:
            made["role"] = value["role"]
        return made

    def _escaped_text(self, text: str) -> str:
        number = 1
        while number:  # what is left of one may be another
            text, number = self._spellings.subn(_split, text)
        return text

    def check(
        self, asked: str | Iterable[Message], arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Raise InvalidPrompt if a prompt, a chat or an argument holds a reserved word.

        An assistant's turn may hold turn tokens.
        """
        if isinstance(asked, str):
            self._check([asked], "give text that is final already with template=None")
        else:
            for message in asked:
                self._check_message(message)
        self._check(texts_of(arguments), "leave that argument out")

    def _check_message(self, message: Message) -> None:
        self._check(
            [*texts_of(message), _joined(message.get("content"))],
            "render the chat yourself and give it as prompt with template=None",
            may_end_turns=message.get("role") == "assistant",
        )

    def _check(
        self, texts: Iterable[str], way_out: str, *, may_end_turns: bool = False
    ) -> None:
        words = self.words
        forbidden = words.placeholders
        if not may_end_turns:
            forbidden = forbidden | words.turns
        for text in texts:
            found = _first_of(forbidden, words.numbered, text)
            if found is None:
                continue
            meaning = "a picture's or video's place"
            if found in words.turns:
                meaning = "the beginning or end of a turn"
            raise InvalidPrompt(
                f"the text holds {found!r}, which this model's processor reads as {meaning}; leave it out "
                "(pictures get their places by themselves)",
                advice=f", or {way_out}",
            )

    def _rendering(self, chat: str | list[Message], *counts: int) -> str:
        """Render a chat; "" where the template does not take it, as a system turn or a picture."""
        try:
            return self._processing.render(chat, *counts)
        except InvalidPrompt:
            return ""


def _marks_of(kind: type) -> frozenset[str]:
    """Return media marks that the code of a processor has, some as patterns.

    A mark need be neither token nor attribute.
    """
    modules = {parent.__module__ for parent in kind.__mro__}
    return frozenset().union(*map(marks_of, modules))


def _is_special(word: Any) -> bool:
    return bool(getattr(word, "special", False)) and not str(word).isalnum()


def _is_mark(word: str) -> bool:
    return len(word) > 1 and not word.isalnum()


def _is_pattern(mark: str) -> bool:
    return "\\" in mark


def _is_numbered(mark: str) -> bool:
    return r"\d+" in mark and _compiles(mark)


def _with_any_number(word: str) -> str:
    """Return a pattern of a word with any number in the place of each of its own."""
    return r"\d+".join(map(re.escape, _NUMBER.split(word)))


def _split(found: re.Match[str]) -> str:
    """Put ``ESCAPE`` behind a spelling's first character."""
    return found[0][0] + ESCAPE + found[0][1:]


def _joined(parts: Any) -> str:
    """Return the texts of a message's parts in one, as templates write them; "" for a text."""
    if not isinstance(parts, (list, tuple)):
        return ""
    texts = map(_text_of_part, parts)
    return "".join(text for text in texts if isinstance(text, str))


def _text_of_part(part: Any) -> Any:
    if isinstance(part, Mapping):
        return part.get("text")
    return part


def _first_of(
    words: Iterable[str], numbered: Iterable[re.Pattern[str]], text: str
) -> str | None:
    """Return the first word, in their order, that a text holds, or else the first that has a number."""
    held = list(filter(text.__contains__, words))
    if held:
        return min(held)
    for pattern in numbered:
        match = pattern.search(text)
        if match is not None:
            return match.group()
    return None


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _middle(without: str, text: str) -> str:
    """Strip the beginning and end that ``text`` shares with ``without``."""
    start = len(commonprefix([without, text]))  # noqa: RUF071  (texts, not paths)
    end = len(commonprefix([without[start:][::-1], text[start:][::-1]]))  # noqa: RUF071
    return text[start : len(text) - end].strip()


def texts_of(value: Any) -> Iterator[str]:
    """Yield every text of a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield str(name)
            yield from texts_of(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from texts_of(part)
