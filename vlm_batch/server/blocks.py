"""An answer's blocks as they grow, and the events that tell of it, in Anthropic's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vlm_batch.server.conversation import text_part
from vlm_batch.server.exchange import event_bytes
from vlm_batch.server.items import Items
from vlm_batch.types import TokenLogprobs

#: Thoughts come back as they are, so nothing is signed.
SIGNATURE = ""


def thinking_block(words: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": words, "signature": SIGNATURE}


def text_block(words: str) -> dict[str, Any]:
    return {**text_part(words), "citations": None}


def use_block(call: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments."""
    name = call["function"]["name"]
    return {"type": "tool_use", "id": call["id"], "name": name, "input": given}


def named_event(kind: str, **said: Any) -> bytes:
    """Return an event with its fields."""
    return event_bytes({"type": kind, **said}, kind)


class Blocks(Items):
    """The blocks of one message."""

    def __init__(self, *, hides_thoughts: bool) -> None:
        super().__init__()
        self._hides_thoughts = hides_thoughts
        self._index = -1

    def think(self, words: str) -> bytes:
        events = self._opened("thoughts", partial(self._begun, thinking_block("")))
        said = "" if self._hides_thoughts else words
        return events + self._grown("thinking_delta", thinking=said)

    def say(self, words: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        events = self._opened("words", partial(self._begun, text_block("")))
        return events + self._grown("text_delta", text=words)

    def call(self, call: Mapping[str, Any]) -> bytes:
        def begin() -> bytes:
            return self._begun(use_block(call, {}))

        events = self._opened("call", begin, call["index"])
        arguments = call["function"]["arguments"]
        return events + self._grown("input_json_delta", partial_json=arguments)

    def _begun(self, block: Mapping[str, Any]) -> bytes:
        self._index += 1
        return named_event(
            "content_block_start", index=self._index, content_block=block
        )

    def _grown(self, kind: str, **said: str) -> bytes:
        delta = {"type": kind, **said}
        return named_event("content_block_delta", index=self._index, delta=delta)

    def _ended(self, kind: str) -> bytes:
        events = b""
        if kind == "thoughts":
            events = self._grown("signature_delta", signature=SIGNATURE)
        return events + named_event("content_block_stop", index=self._index)
