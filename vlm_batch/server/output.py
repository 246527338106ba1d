"""A response's items as they grow, and the events that tell of it, in OpenAI's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlm_batch.server.exchange import event_bytes
from vlm_batch.server.items import Items
from vlm_batch.server.private import new_id
from vlm_batch.types import TokenLogprobs


class Output(Items):
    """The output of one response."""

    def __init__(
        self,
        response: dict[str, Any],
        tell: Callable[[bytes], None] | None,
        scored: Callable[[TokenLogprobs], dict[str, Any]],
        named: Callable[[Mapping[str, Any]], dict[str, Any]],
    ) -> None:
        """Begin with no item.

        Args:
            response: The response, whose ``output`` grows.
            tell: Takes each event, where somebody may follow later.
            scored: Returns a token's scores as the client sees them.
            named: Returns the id and the names of a call that begins.
        """
        super().__init__()
        self._response = response
        self._items: list[dict[str, Any]] = response["output"]
        self._tell = tell
        self._scored = scored
        self._named = named
        self._num_events = 0
        #: Whether somebody hears the events; otherwise they are not made.
        self.is_heard = True

    def begin(self) -> bytes:
        self._response["status"] = "in_progress"
        created = self._event("created", response=self._response)
        return created + self._event("in_progress", response=self._response)

    def end(self, status: str) -> bytes:
        self._response["status"] = status
        return self._event(status, response=self._response)

    def think(self, words: str) -> bytes:
        events = self._opened("thoughts", lambda: self._begun(_thoughts()))
        return events + self._added("reasoning_text", words, {})

    def say(self, words: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        events = self._opened("words", lambda: self._begun(_message()))
        scores = [self._scored(one) for one in logprobs]
        self._items[-1]["content"][0]["logprobs"] += scores
        return events + self._added("output_text", words, {"logprobs": scores})

    def call(self, call: Mapping[str, Any]) -> bytes:
        def begin() -> bytes:
            return self._begun(_call(self._named(call)))

        events = self._opened("call", begin, call["index"])
        arguments = call["function"]["arguments"]
        self._items[-1]["arguments"] += arguments
        kind = "function_call_arguments.delta"
        return events + self._event(kind, **self._place(), delta=arguments)

    def _ended(self, kind: str) -> bytes:
        item, place = self._items[-1], self._place()
        item["status"] = "completed"
        if kind == "call":
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

    def _begun(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        index = len(self._items) - 1
        if "content" not in item:
            return self._event("output_item.added", output_index=index, item=item)
        begun = {**item, "content": []}
        added = self._event("output_item.added", output_index=index, item=begun)
        place = {**self._place(), "content_index": 0}
        part = item["content"][0]
        return added + self._event("content_part.added", **place, part=part)

    def _added(self, kind: str, words: str, more: Mapping[str, Any]) -> bytes:
        self._items[-1]["content"][0]["text"] += words
        place = {**self._place(), "content_index": 0}
        return self._event(f"{kind}.delta", **place, delta=words, **more)

    def _place(self) -> dict[str, Any]:
        index = len(self._items) - 1
        return {"output_index": index, "item_id": self._items[-1]["id"]}

    def _event(self, kind: str, **said: Any) -> bytes:
        if not self.is_heard:
            return b""
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
