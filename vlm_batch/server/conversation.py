"""Chats as ``Talk`` has them, put together from what the doors' clients write."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from vlm_batch.server.pages import DOCUMENT

#: A message's part; its content, which is text or parts; a message.
TalkPart: TypeAlias = dict[str, Any]
TalkContent: TypeAlias = "str | list[TalkPart]"
TalkTurn: TypeAlias = dict[str, Any]


def text_part(words: str) -> TalkPart:
    """Return text as a part of a message."""
    return {"type": "text", "text": words}


def picture_part(place: dict[str, str]) -> TalkPart:
    """Return a picture as a part: its place is ``{"url": ...}`` or ``{"file_id": ...}``."""
    return {"type": "image_url", "image_url": place}


def document_part(place: dict[str, str]) -> TalkPart:
    """Return a document as a part."""
    return {"type": DOCUMENT, DOCUMENT: place}


def listed(content: TalkContent) -> list[TalkPart]:
    """Return a message's content as parts."""
    return [text_part(content)] if isinstance(content, str) else content


def parts_of(message: Mapping[str, Any]) -> Sequence[TalkPart]:
    """Return a message's parts; none of text alone."""
    content = message.get("content")
    return content if isinstance(content, list) else ()


def parsed_arguments(text: str) -> Any:
    """Return a call's arguments as templates need them: an object, or the text where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


class Conversation:
    """A chat that grows. What a user or the system says in succession is one turn, and so is all that an answer is made of.

    Attributes:
        turns: In the form of OpenAI's chats, plain, with calls' arguments parsed.
    """

    def __init__(self) -> None:
        self.turns: list[TalkTurn] = []

    def say(self, role: str, content: TalkContent) -> None:
        """Add what a user or the system says."""
        before: TalkTurn = self.turns[-1] if self.turns else {"role": None}
        if before["role"] == role:
            before["content"] = [*listed(before["content"]), *listed(content)]
        else:
            self.turns.append({"role": role, "content": content})

    def go_on(self, turns: Sequence[Mapping[str, Any]]) -> None:
        """Go on with turns of another chat; instructions at their beginning join those that are here."""
        begins = bool(turns) and turns[0]["role"] == "system"
        if begins:
            self.say("system", turns[0]["content"])
        self.turns += [dict(turn) for turn in turns[begins:]]

    def begin_answer(self, content: TalkContent) -> None:
        """Begin an answer, though there be one before it."""
        self.turns.append({"role": "assistant", "content": content})

    def answer(self, content: TalkContent) -> None:
        """Add words to the answer."""
        self._answer()["content"] += listed(content)

    def think(self, words: str) -> None:
        """Add thoughts to the answer."""
        answer = self._answer()
        answer["reasoning_content"] = answer.get("reasoning_content", "") + words

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """Add a call to the answer."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._answer().setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, content: TalkContent) -> None:
        """Add what a call gave."""
        self.turns.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _answer(self) -> TalkTurn:
        if not self.turns or self.turns[-1]["role"] != "assistant":
            self.begin_answer([])
        return self.turns[-1]


def turns_of(said: Iterable[Any]) -> list[TalkTurn]:
    """Return what a client wrote as turns; each of it has ``add_to``, which takes a ``Conversation``."""
    talk = Conversation()
    for one in said:
        one.add_to(talk)
    return talk.turns
