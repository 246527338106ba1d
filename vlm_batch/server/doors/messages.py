"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's chats, as Claude Code and Anthropic's SDKs send them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from vlm_batch.server.answers import Delta
from vlm_batch.server.asking import (
    Abilities,
    Ask,
    Talk,
    ToolChoice,
    add_turn,
    ask_of,
    parsed_arguments,
    text_part,
)
from vlm_batch.server.door import Core, Door
from vlm_batch.server.edge import Entry
from vlm_batch.server.errors import ApiError
from vlm_batch.server.exchange import Choice, Exchange, counted, event_bytes, through
from vlm_batch.server.fields import SAMPLING, THINKING
from vlm_batch.server.openai import ThoughtBody, asked_of
from vlm_batch.server.pages import DOCUMENT
from vlm_batch.server.wire import (
    ANY,
    Json,
    Member,
    Name,
    Nothing,
    Parts,
    Stops,
    Tools,
    Turns,
    Wire,
)

# Types -----------------------------------------------------------------------------------------------------------------

_OWN: Nothing = {"cache_control": ANY}
#: Claude Code writes the bill's address before its instructions, with a number that is new in each request.
_BILLING = "x-anthropic-billing-header:"


#: A message's part, as ``Talk`` has it.
TalkPart: TypeAlias = dict[str, Any]


class Base64Source(Member):
    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def place(self) -> dict[str, str]:
        return {"url": f"data:{self.media_type};base64,{self.data}"}

    def document(self) -> TalkPart:
        return {"type": DOCUMENT, DOCUMENT: self.place}


class UrlSource(Member):
    type: Literal["url"]
    url: str

    @property
    def place(self) -> dict[str, str]:
        return {"url": self.url}

    def document(self) -> TalkPart:
        return {"type": DOCUMENT, DOCUMENT: self.place}


class FileSource(Member):
    """A file of ``/v1/files``."""

    type: Literal["file"]
    file_id: str

    @property
    def place(self) -> dict[str, str]:
        return {"file_id": self.file_id}

    def document(self) -> TalkPart:
        return {"type": DOCUMENT, DOCUMENT: self.place}


class TextSource(Member):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str

    def document(self) -> TalkPart:
        return text_part(self.data)


class Block(Member):
    """A part of a turn. What a user says has ``parts``; what the model said is added to its turn."""

    nothing = _OWN

    def parts(self) -> list[TalkPart]:
        return []

    def user_turn(self) -> dict[str, Any]:
        return {"role": "user", "content": self.parts()}

    def add_to(self, answer: dict[str, Any]) -> None:
        answer["content"] += self.parts()


class TextBlock(Block):
    nothing = {**_OWN, "citations": ANY, "parsed_output": ANY}
    type: Literal["text"]
    text: str

    def parts(self) -> list[TalkPart]:
        return [text_part(self.text)]


class ImageBlock(Block):
    nothing = {**_OWN, "transformations": ({}, {"oversized_image": "downsize"})}
    type: Literal["image"]
    source: Annotated[
        Base64Source | UrlSource | FileSource, Field(discriminator="type")
    ]

    def parts(self) -> list[TalkPart]:
        return [{"type": "image_url", "image_url": self.source.place}]


class DocumentBlock(Block):
    nothing = {**_OWN, "citations": ({}, {"enabled": False})}
    type: Literal["document"]
    source: Annotated[
        Base64Source | UrlSource | FileSource | TextSource,
        Field(discriminator="type"),
    ]
    title: str | None = None
    context: str | None = None

    def parts(self) -> list[TalkPart]:
        """Return the title and what is said of the document, and the document."""
        about = filter(None, (self.title, self.context))
        said = [text_part(f"{words}\n") for words in about]
        return [*said, self.source.document()]


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None

    def add_to(self, answer: dict[str, Any]) -> None:
        before = answer.get("reasoning_content", "")
        answer["reasoning_content"] = before + self.thinking


class RedactedBlock(Block):
    """Thinking of another server's, which nobody can read here."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Block):
    nothing = {**_OWN, "caller": ANY, "toolset_name": ()}
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json

    def add_to(self, answer: dict[str, Any]) -> None:
        function = {"name": self.name, "arguments": self.input}
        call = {"id": self.id, "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)


OfResult: TypeAlias = Annotated[
    TextBlock | ImageBlock | DocumentBlock,
    Field(discriminator="type"),
]


class ToolResultBlock(Block):
    nothing = {**_OWN, "toolset_name": ()}
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Parts[OfResult] | None = None
    is_error: bool | None = None

    def user_turn(self) -> dict[str, Any]:
        content = said_in(self.content or "")
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


OfUser: TypeAlias = Annotated[
    TextBlock | ImageBlock | DocumentBlock | ToolResultBlock,
    Field(discriminator="type"),
]
OfAssistant: TypeAlias = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock,
    Field(discriminator="type"),
]


def said_in(content: str | Sequence[Block]) -> str | list[TalkPart]:
    """Return a content as ``Talk`` has it."""
    if isinstance(content, str):
        return content
    return [part for block in content for part in block.parts()]


class UserTurn(Member):
    role: Literal["user"]
    content: str | Parts[OfUser]

    def add_to(self, turns: list[dict[str, Any]]) -> None:
        """Add a user's words and tools' results as turns, in their order."""
        if isinstance(self.content, str):
            add_turn(turns, {"role": "user", "content": self.content})
            return
        for block in self.content:
            add_turn(turns, block.user_turn())


class AssistantTurn(Member):
    """An earlier answer, or the beginning of the one that is asked for."""

    role: Literal["assistant"]
    content: str | Parts[OfAssistant]

    def add_to(self, turns: list[dict[str, Any]]) -> None:
        turn: dict[str, Any] = {"role": "assistant", "content": self.content}
        turns.append(turn)
        if isinstance(self.content, str):
            return
        turn["content"] = []
        for block in self.content:
            block.add_to(turn)


class SystemTurn(Member):
    role: Literal["system"]
    content: str | Parts[TextBlock]

    def add_to(self, turns: list[dict[str, Any]]) -> None:
        # within a chat most templates know none; Claude Code writes them there
        is_head = all(turn["role"] == "system" for turn in turns)
        role = "system" if is_head else "user"
        add_turn(turns, {"role": role, "content": said_in(self.content)})


AnyTurn: TypeAlias = Annotated[
    UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")
]


class CustomTool(Wire):
    """A tool that the client runs."""

    nothing = {
        **_OWN,
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
        "eager_input_streaming": ANY,
        "input_examples": ([],),
    }
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: Json
    strict: bool | None = None


class Choosing(Wire):
    """The tool that must be called, if any."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinks(Wire):
    """A measure of thinking; a model that does not think takes every value."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    def sampling(self) -> dict[str, Any]:
        budget = self.budget_tokens
        return {} if budget is None else {"thinking_budget": budget}


class JsonFormat(Wire):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Wire):
    effort: str | None = None
    format: JsonFormat | None = None

    def sampling(self) -> dict[str, Any]:
        return {} if self.format is None else {"json_schema": self.format.schema_}


class UserOf(Wire):
    user_id: str | None = None


class CountRequest(ThoughtBody):
    """The body of ``POST /v1/messages/count_tokens``."""

    nothing = {
        **_OWN,
        "container": (),
        "context_management": (
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "diagnostics": ANY,
        "inference_geo": ANY,
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "thread": (),
        "user_profile_id": ANY,
        "workspace_id": ANY,
    }
    refused = {
        "container": "nothing is run here",
        "context_management": "the client sends what the model is to see",
        "mcp_servers": "tools are run by the client",
        "thread": "send the whole conversation; its beginning is kept and not computed again",
    }
    messages: Turns[AnyTurn]
    system: str | Parts[TextBlock] | None = None
    tools: Tools[CustomTool] | None = None
    tool_choice: Choosing | None = None
    thinking: Thinks | None = None
    output_config: OutputConfig | None = None

    def ends(self) -> dict[str, Any]:
        """Return what ends an answer, as fields of ``SamplingParams``."""
        return {}


class MessagesRequest(CountRequest):
    """The body of ``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**63)]
    stop_sequences: Stops | None = None
    metadata: UserOf | None = None

    def ends(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "stop": self.stop_sequences or ()}


# In --------------------------------------------------------------------------------------------------------------------

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
    turns = _turns(body)
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


def _turns(body: CountRequest) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    if body.system:
        turns.append({"role": "system", "content": _instructions(body.system)})
    for turn in body.messages:
        turn.add_to(turns)
    return turns


def _instructions(given: str | Sequence[TextBlock]) -> str | list[TalkPart]:
    if isinstance(given, str):
        return given
    # what is new in each request would keep all others from the prompt's kept beginning
    kept = [block for block in given if not block.text.startswith(_BILLING)]
    return said_in(kept)


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
    one_only = bool(given.disable_parallel_tool_use)
    mode = "required" if given.type == "any" else given.type
    if given.name is not None:
        mode = "auto"
    return ToolChoice(mode=mode, named=given.name, one_only=one_only)


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
        # the block that is being streamed, of a kind and, of calls, a number
        self._open: tuple[str, int] | None = None
        self._num_blocks = 0

    def ask(self, able: Abilities) -> Ask:
        return ask_of(talk_of(self.body, able), self.core.service.config, able)

    def answer(self) -> dict[str, Any]:
        (choice,) = self.choices
        content: list[dict[str, Any]] = []
        if thoughts := "".join(choice.reasoning):
            content.append(self._thinking_block(thoughts))
        if words := "".join(choice.content):
            content.append({**text_part(words), "citations": None})
        for call in choice.calls.values():
            given = parsed_arguments(call["function"]["arguments"])
            # an answer that is cut may end within them
            content.append(_use(call, given if isinstance(given, dict) else {}))
        end, usage = self._ending(choice), self._usage()
        return {**self._head(), "content": content, **end, "usage": usage}

    def told(self, choice: Choice, delta: Delta) -> bytes:
        events: list[dict[str, Any]] = []
        if not choice.has_begun:
            choice.has_begun = True
            events.append(self._start(choice))
        if delta.reasoning:
            said = "" if self._hides_thoughts else delta.reasoning
            events += self._opened(("thinking", 0), self._thinking_block(""))
            events.append(self._delta("thinking_delta", "thinking", said))
        if delta.content:
            events += self._opened(("text", 0), {**text_part(""), "citations": None})
            events.append(self._delta("text_delta", "text", delta.content))
        for call in delta.tool_calls:
            key = ("call", call["index"])
            events += self._opened(key, _use(call, {}) if "id" in call else None)
            arguments = call["function"]["arguments"]
            events.append(self._delta("input_json_delta", "partial_json", arguments))
        return _bytes_of(events)

    def last(self) -> bytes:
        (choice,) = self.choices
        end = {"type": "message_delta", "delta": self._ending(choice)}
        usage = {"usage": self._usage()}
        return _bytes_of([*self._closed(), {**end, **usage}, {"type": "message_stop"}])

    def failed(self, error: ApiError) -> bytes:
        return event_bytes(envelope(error, self.entry.request_id), "error")

    def _start(self, choice: Choice) -> dict[str, Any]:
        usage = {"input_tokens": choice.prompt_tokens, "output_tokens": 0}
        end = {"stop_reason": None, "stop_sequence": None}
        message = {**self._head(), "content": [], **end, "usage": usage}
        return {"type": "message_start", "message": message}

    def _opened(
        self, key: tuple[str, int], block: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        """Return the events that end one block and begin another, if it is another."""
        if self._open == key or block is None:
            return []
        events = self._closed()
        self._open = key
        self._num_blocks += 1
        begin = {"type": "content_block_start", "index": self._num_blocks - 1}
        return [*events, {**begin, "content_block": block}]

    def _closed(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        index = self._num_blocks - 1
        stop = {"type": "content_block_stop", "index": index}
        was_thinking = self._open[0] == "thinking"
        self._open = None
        if not was_thinking:
            return [stop]
        signed = {"type": "signature_delta", "signature": _SIGNATURE}
        return [{"type": "content_block_delta", "index": index, "delta": signed}, stop]

    def _delta(self, kind: str, name: str, said: str) -> dict[str, Any]:
        delta = {"type": kind, name: said}
        index = self._num_blocks - 1
        return {"type": "content_block_delta", "index": index, "delta": delta}

    def _thinking_block(self, thoughts: str) -> dict[str, Any]:
        said = "" if self._hides_thoughts else thoughts
        return {"type": "thinking", "thinking": said, "signature": _SIGNATURE}

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.entry.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.core.service.config.name,
        }

    def _ending(self, choice: Choice) -> dict[str, Any]:
        assert choice.result is not None
        reason = _STOPS[choice.finish_reason]
        stop = choice.result.stop_reason
        if reason == "end_turn" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        most = self.body.max_tokens if isinstance(self.body, MessagesRequest) else 0
        if reason == "max_tokens" and choice.result.usage.completion_tokens < most:
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


#: Thoughts come back as they are, so nothing is signed.
_SIGNATURE = ""


def _use(call: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    name = call["function"]["name"]
    return {"type": "tool_use", "id": call["id"], "name": name, "input": given}


def _bytes_of(events: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(event_bytes(event, event["type"]) for event in events)


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
