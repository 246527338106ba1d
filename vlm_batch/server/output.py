"""A response's items as they grow, and the events that tell of it, in OpenAI's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vlm_batch.server.exchange import event_bytes
from vlm_batch.server.kept import new_id


class Output:
    """The output of one response: at most one item is open, and grows; an item of another kind ends it.

    Each method returns the events of what it did, joined.
    """

    def __init__(
        self, response: dict[str, Any], tell: Callable[[bytes], None] | None
    ) -> None:
        """Begin with no item.

        Args:
            response: The response, whose ``output`` grows.
            tell: Takes each event, where somebody may follow later.
        """
        self._response = response
        self._items: list[dict[str, Any]] = response["output"]
        self._tell = tell
        self._num_events = 0
        # a kind and, of calls, a number
        self._open: tuple[str, int] | None = None

    @property
    def is_message(self) -> bool:
        """Whether a message is open."""
        return self._open == ("message", 0)

    def begin(self) -> bytes:
        self._response["status"] = "in_progress"
        created = self._event("created", response=self._response)
        return created + self._event("in_progress", response=self._response)

    def end(self, status: str) -> bytes:
        self._response["status"] = status
        return self._event(status, response=self._response)

    def think(self, words: str) -> bytes:
        events = self._opened(("reasoning", 0), _thoughts)
        return events + self._added("reasoning_text", words, {})

    def say(self, words: str, logprobs: list[dict[str, Any]]) -> bytes:
        events = self._opened(("message", 0), _message)
        self._items[-1]["content"][0]["logprobs"] += logprobs
        return events + self._added("output_text", words, {"logprobs": logprobs})

    def call(self, index: int, named: Mapping[str, Any], arguments: str) -> bytes:
        """Go on with a call; ``named`` are the fields of one that begins."""
        events = self._opened(("function_call", index), lambda: _call(named))
        self._items[-1]["arguments"] += arguments
        kind = "function_call_arguments.delta"
        return events + self._event(kind, **self._place(), delta=arguments)

    def close(self) -> bytes:
        """End the open item."""
        if self._open is None:
            return b""
        self._open = None
        item, place = self._items[-1], self._place()
        item["status"] = "completed"
        if item["type"] == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            events = self._event("function_call_arguments.done", **place, **said)
        else:
            part = item["content"][0]
            inner = {**place, "content_index": 0}
            told = part.keys() & {"text", "logprobs"}
            said = {name: part[name] for name in told}
            events = self._event(f"{part['type']}.done", **inner, **said)
            events += self._event("content_part.done", **inner, part=part)
        index = place["output_index"]
        return events + self._event("output_item.done", output_index=index, item=item)

    def _opened(
        self, key: tuple[str, int], make: Callable[[], dict[str, Any]]
    ) -> bytes:
        """End one item and begin another, if it is another."""
        if self._open == key:
            return b""
        events = self.close()
        item = make()
        self._open = key
        self._items.append(item)
        index = len(self._items) - 1
        if "content" not in item:
            added = self._event("output_item.added", output_index=index, item=item)
            return events + added
        begun = {**item, "content": []}
        events += self._event("output_item.added", output_index=index, item=begun)
        place = {**self._place(), "content_index": 0}
        part = item["content"][0]
        return events + self._event("content_part.added", **place, part=part)

    def _added(self, kind: str, words: str, more: Mapping[str, Any]) -> bytes:
        self._items[-1]["content"][0]["text"] += words
        place = {**self._place(), "content_index": 0}
        return self._event(f"{kind}.delta", **place, delta=words, **more)

    def _place(self) -> dict[str, Any]:
        index = len(self._items) - 1
        return {"output_index": index, "item_id": self._items[-1]["id"]}

    def _event(self, kind: str, **said: Any) -> bytes:
        name = f"response.{kind}"
        head = {"type": name, "sequence_number": self._num_events}
        self._num_events += 1
        event = event_bytes({**head, **said}, name)
        if self._tell is not None:
            self._tell(event)
        return event


def _thoughts() -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": ""}
    head = {"id": new_id("rs"), "type": "reasoning", "status": "in_progress"}
    return {**head, "summary": [], "content": [part]}


def _message() -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
    head = {"id": new_id("msg"), "type": "message", "status": "in_progress"}
    return {**head, "role": "assistant", "content": [{**part, "logprobs": []}]}


def _call(named: Mapping[str, Any]) -> dict[str, Any]:
    head = {"id": new_id("fc"), "type": "function_call", "status": "in_progress"}
    return {**head, **named, "arguments": ""}
