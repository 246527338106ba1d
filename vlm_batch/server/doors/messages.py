"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's chats, as Claude Code and Anthropic's SDKs send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlm_batch.server.answers import Delta
from vlm_batch.server.asking import Abilities, Ask, Talk, ToolChoice, ask_of
from vlm_batch.server.blocks import (
    Blocks,
    named_event,
    text_block,
    thinking_block,
    use_block,
)
from vlm_batch.server.conversation import parsed_arguments, turns_of
from vlm_batch.server.door import Core, Door
from vlm_batch.server.doors.messages_wire import (
    AnyTurn,
    AssistantTurn,
    Choosing,
    CountRequest,
    CustomTool,
    MessagesRequest,
    SystemTurn,
)
from vlm_batch.server.edge import Entry
from vlm_batch.server.errors import ApiError
from vlm_batch.server.exchange import Choice, Exchange, counted, event_bytes, through
from vlm_batch.server.fields import SAMPLING, THINKING
from vlm_batch.server.sampling import asked_of

# In --------------------------------------------------------------------------------------------------------------------

#: Claude Code writes the bill's address before its instructions, with a number that is new in each request.
_BILLING = "x-anthropic-billing-header:"
#: Fields in errors -> this door's.
NAMES: Mapping[str, str] = {
    "guided_grammar": "tools",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_budget": "thinking.budget_tokens",
}


def talk_of(body: CountRequest, able: Abilities) -> Talk:
    """Return a body's chat. Raises ApiError."""
    turns = turns_of(_said(body))
    begins = isinstance(body.messages[-1], AssistantTurn)
    template = {**_thinking(body, able), **asked_of(body, THINKING)}
    if begins and not turns[-1].get("tool_calls"):
        # the answer goes on from there
        template |= {"continue_final_message": True, "add_generation_prompt": False}
    metadata = body.metadata if isinstance(body, MessagesRequest) else None
    return Talk(
        messages=turns,
        sampling=_sampling(body, able),
        sampling_source=body.sampling,
        tools=[_tool(tool) for tool in body.tools or ()],
        choice=_choice(body.tool_choice),
        template=template,
        others={"user": None if metadata is None else metadata.user_id},
    )


def _said(body: CountRequest) -> Sequence[AnyTurn]:
    if not body.system:
        return body.messages
    system = body.system
    if not isinstance(system, str):
        # what is new in each request would keep all others from the prompt's kept beginning
        system = [one for one in system if not one.text.startswith(_BILLING)]
    return [SystemTurn(role="system", content=system), *body.messages]


def _tool(tool: CustomTool) -> dict[str, Any]:
    function = tool.model_dump(exclude={"type", "input_schema"}, exclude_none=True)
    function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}


def _choice(given: Choosing | None) -> ToolChoice:
    if given is None:
        return ToolChoice()
    if (given.type == "tool") != (given.name is not None):
        said = "tool_choice: a name belongs to the type tool, and to no other"
        raise ApiError(400, said, param="tool_choice.name")
    if given.name is not None:
        return ToolChoice(named=given.name, one_only=True)
    mode = "required" if given.type == "any" else given.type
    return ToolChoice(mode=mode, one_only=bool(given.disable_parallel_tool_use))


def _thinking(body: CountRequest, able: Abilities) -> dict[str, Any]:
    """Return the template's arguments; a model that does not think is asked for none."""
    asked: dict[str, Any] = {}
    if body.thinking is not None:
        asked["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort:
        asked["reasoning_effort"] = body.output_config.effort
    return able.readable(asked)


def _sampling(body: CountRequest, able: Abilities) -> dict[str, Any]:
    found = asked_of(body, SAMPLING)
    if body.output_config is not None:
        found |= body.output_config.sampling()
    if body.thinking is not None and able.thinks:
        found |= body.thinking.sampling()
    return found | body.ends()


# Out -------------------------------------------------------------------------------------------------------------------

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageExchange(Exchange):
    prompt = "messages"
    body: CountRequest

    def __init__(
        self, core: Core, entry: Entry, body: CountRequest, *, priority: int = 0
    ) -> None:
        super().__init__(core, entry, body, priority=priority)
        self.names = NAMES
        thinking = body.thinking
        self._hides_thoughts = thinking is not None and thinking.display == "omitted"
        self._blocks = Blocks(hides_thoughts=self._hides_thoughts)

    def ask(self, able: Abilities) -> Ask:
        return ask_of(talk_of(self.body, able), self.core.service.config, able)

    def answer(self) -> dict[str, Any]:
        (choice,) = self.choices
        content: list[dict[str, Any]] = []
        if thoughts := "".join(choice.reasoning):
            content.append(thinking_block("" if self._hides_thoughts else thoughts))
        if words := "".join(choice.content):
            content.append(text_block(words))
        for call in choice.calls.values():
            given = parsed_arguments(call["function"]["arguments"])
            # an answer that is cut may end within them
            content.append(use_block(call, given if isinstance(given, dict) else {}))
        end, usage = self._ending(choice), self._usage()
        return {**self._head(), "content": content, **end, "usage": usage}

    def told(self, choice: Choice, delta: Delta) -> bytes:
        begun = b"" if choice.has_begun else self._start(choice)
        choice.has_begun = True
        return begun + self._blocks.add(delta)

    def last(self) -> bytes:
        (choice,) = self.choices
        closed, end = self._blocks.close(), self._ending(choice)
        delta = named_event("message_delta", delta=end, usage=self._usage())
        return closed + delta + named_event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return event_bytes(envelope(error, self.entry.request_id), "error")

    def _start(self, choice: Choice) -> bytes:
        usage = {"input_tokens": choice.prompt_tokens, "output_tokens": 0}
        end = {"stop_reason": None, "stop_sequence": None}
        message = {**self._head(), "content": [], **end, "usage": usage}
        return named_event("message_start", message=message)

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.entry.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.core.service.config.name,
        }

    def _ending(self, choice: Choice) -> dict[str, Any]:
        reason = _STOPS[choice.finish_reason]
        stop = choice.ended.stop_reason
        if reason == "end_turn" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        most = self.body.max_tokens if isinstance(self.body, MessagesRequest) else 0
        if reason == "max_tokens" and choice.ended.usage.completion_tokens < most:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        counts = self.counts()
        return {
            "input_tokens": counts.prompt - counts.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached,
            "output_tokens": counts.completion,
            "output_tokens_details": {"thinking_tokens": counts.reasoning},
        }


# Errors and counts -----------------------------------------------------------------------------------------------------

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


#: Refused fields -> by what Anthropic's clients know that they are to go on without: those that run tools ask for a thread.
_DETAILS = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
}


def envelope(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return an error as Anthropic writes it."""
    others = "invalid_request_error" if error.status_code < 500 else "api_error"
    kind = _KINDS.get(error.status_code, others)
    said: dict[str, Any] = {"type": kind, "message": str(error.detail)}
    if error.param in _DETAILS:
        said["details"] = _DETAILS[error.param]
    return {"type": "error", "error": said, "request_id": request_id}


MESSAGES = Door(
    path="/v1/messages",
    body=MessagesRequest,
    answer=through(MessageExchange),
    about="Answer a chat in Anthropic's form.",
    envelope=envelope,
    root="/v1/messages",
)
COUNT_TOKENS = Door(
    path="/v1/messages/count_tokens",
    body=CountRequest,
    answer=counted(MessageExchange, {}),
    about="Count the tokens of a chat in Anthropic's form.",
    envelope=envelope,
)
