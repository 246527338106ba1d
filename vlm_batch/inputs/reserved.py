"""Control tokens and placeholders in typed text, found and refused."""

from __future__ import annotations

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

    @cached_property
    def words(self) -> Words:
        processor, tokenizer = self._processing.processor, self._processing.tokenizer
        added = {
            int(at): word
            for at, word in (
                getattr(tokenizer, "added_tokens_decoder", None) or {}
            ).items()
        }
        special = self._special
        renderings = "".join(filter(None, map(self._rendering, _PROBES)))
        turns = frozenset(word for word in special if word in renderings)
        named = [
            getattr(part, name, None)
            for part in (processor, tokenizer)
            for name in _PLACEHOLDER_NAMES
        ]
        marked = [
            str(added[token]) for token in self._image_token_ids if token in added
        ]
        # What the template writes for each kind of media, tokens or not: processors look for it in the text.
        plain, picture, *others = (
            self._rendering("x", *counts) or "" for counts in _ONE_OF_EACH
        )
        around = [word for word in special if word in picture and word not in turns]
        written = [_middle(plain, text) for text in (picture, *others) if text]
        written = [word for word in written if len(word) > 1 and not word.isalnum()]
        kind: type = type(processor)
        known = _marks_of(kind)
        fixed = (
            *named,
            *marked,
            *around,
            *(word for word in written if not _NUMBER.search(word)),
        )
        fixed = (*fixed, *(word for word in known if "\\" not in word))
        patterns = {
            r"\d+".join(map(re.escape, _NUMBER.split(word)))
            for word in written
            if _NUMBER.search(word)
        }
        patterns |= {word for word in known if r"\d+" in word and _compiles(word)}
        placeholders = frozenset(
            word for word in fixed if isinstance(word, str) and len(word.strip()) > 1
        )
        return Words(placeholders, tuple(map(re.compile, sorted(patterns))), turns)

    @cached_property
    def _spellings(self) -> re.Pattern[str]:
        thinking, words = self._processing.template.thinking, self.words
        # templates look for an earlier answer's
        marks = set() if thinking is None else {thinking.start, thinking.end}
        literal = {*words.placeholders, *words.turns, *self._special} - marks
        either = [pattern.pattern for pattern in words.numbered]
        either += map(re.escape, sorted(literal, key=len, reverse=True))
        return re.compile("|".join(f"(?:{word})" for word in either) or "(?!)")

    @property
    def _special(self) -> list[str]:
        added = (
            getattr(self._processing.tokenizer, "added_tokens_decoder", None) or {}
        ).values()
        return [
            str(word)
            for word in added
            if getattr(word, "special", False) and not str(word).isalnum()
        ]

    def escaped(self, value: Any) -> Any:
        """Put ``ESCAPE`` into each special token's spelling."""
        if isinstance(value, str):
            text, number = value, 1
            while number:  # what is left of one may be another
                text, number = self._spellings.subn(
                    lambda found: found[0][0] + ESCAPE + found[0][1:], text
                )
            return text
        if isinstance(value, Mapping):
            return {
                name: part if name == "role" else self.escaped(part)
                for name, part in value.items()
            }
        return (
            [self.escaped(part) for part in value]
            if isinstance(value, (list, tuple))
            else value
        )

    def check(
        self, asked: str | Iterable[Message], arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Raise InvalidPrompt if a prompt, a chat or an argument holds a reserved word.

        An assistant's turn may hold turn tokens.
        """
        if isinstance(asked, str):
            self._check([asked], "give text that is final already with template=None")
        for message in () if isinstance(asked, str) else asked:
            parts = message.get("content")
            texts = [
                part.get("text") if isinstance(part, Mapping) else part
                for part in parts or ()
            ]
            # Templates write the parts' texts one after the other.
            in_one = (
                "".join(text for text in texts if isinstance(text, str))
                if isinstance(parts, (list, tuple))
                else ""
            )
            way_out = (
                "render the chat yourself and give it as prompt with template=None"
            )
            self._check(
                [*texts_of(message), in_one],
                way_out,
                may_end_turns=message.get("role") == "assistant",
            )
        self._check(texts_of(arguments), "leave that argument out")

    def _check(
        self, texts: Iterable[str], way_out: str, *, may_end_turns: bool = False
    ) -> None:
        words = sorted(
            self.words.placeholders
            | (frozenset() if may_end_turns else self.words.turns)
        )
        for text in texts:
            found = [word for word in words if word in text]
            found += [
                match.group()
                for pattern in self.words.numbered
                if (match := pattern.search(text))
            ]
            if found:
                meaning = (
                    "the beginning or end of a turn"
                    if found[0] in self.words.turns
                    else "a picture's or video's place"
                )
                raise InvalidPrompt(
                    f"the text holds {found[0]!r}, which this model's processor reads as {meaning}; leave it out "
                    "(pictures get their places by themselves)",
                    advice=f", or {way_out}",
                )

    def _rendering(self, chat: str | list[Message], *counts: int) -> str | None:
        try:
            return self._processing.render(chat, *counts)
        except InvalidPrompt:  # not every template takes a system turn, or a picture
            return None


def _marks_of(kind: type) -> frozenset[str]:
    """Return media marks that the code of a processor has, some as patterns.

    A mark need be neither token nor attribute.
    """
    modules = {parent.__module__ for parent in kind.__mro__}
    return frozenset().union(*map(marks_of, modules))


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
