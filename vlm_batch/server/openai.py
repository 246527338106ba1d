"""OpenAI's wire format: the bodies of requests as types, and what becomes of each field.

A field is honoured or refused with its name, never ignored. ``SAMPLING`` and ``TEMPLATE`` say which field of
``SamplingParams`` and ``Request`` a field of the wire becomes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictFloat, StrictInt

from vlm_batch.errors import InvalidParameters
from vlm_batch.server.calls import CallWriter, CannotForce
from vlm_batch.server.errors import ApiError, refusal
from vlm_batch.types import FORMS, Request, SamplingParams

#: Bounds of what one request may hold beside its body's bytes.
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_PRIORITY = 100

Number: TypeAlias = StrictFloat | StrictInt


class Wire(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)


# Messages ----------------------------------------------------------------------------------------------------------


class Url(Wire):
    """A picture: a data URI, base64, an http(s) URL or a file, the last two where the server allows them."""

    url: str
    detail: Literal["auto", "high"] | None = None  # pictures are taken as they are; "low" would resize them


class VideoUrl(Wire):
    """A video, named like a picture."""

    url: str


class TextPart(Wire):
    type: Literal["text"]
    text: str


class ImagePart(Wire):
    type: Literal["image_url"]
    image_url: Url | str


class VideoPart(Wire):
    """A video and how its frames are taken (``vlm_batch.Video``)."""

    type: Literal["video_url"]
    video_url: VideoUrl | str
    fps: Number | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None


Part: TypeAlias = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


class FunctionCall(Wire):
    name: str
    arguments: str


class ToolCall(Wire):
    """A call that the model made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class SystemMessage(Wire):
    role: Literal["system", "developer"]
    content: str | list[TextPart]


class UserMessage(Wire):
    role: Literal["user"]
    content: str | list[Part]


class AssistantMessage(Wire):
    """An earlier answer. What OpenAI's client writes into every answer may come back: empty."""

    role: Literal["assistant"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None


class ToolMessage(Wire):
    role: Literal["tool"]
    content: str | list[TextPart | ImagePart]
    tool_call_id: str | None = None
    name: str | None = None


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


# Requests ----------------------------------------------------------------------------------------------------------


class Function(Wire):
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: Function


class ToolName(Wire):
    name: str


class NamedTool(Wire):
    """The one tool that the answer has to call."""

    type: Literal["function"]
    function: ToolName


class StreamOptions(Wire):
    include_usage: bool = False


class Schema(Wire):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")


class TextFormat(Wire):
    type: Literal["text"]


class ObjectFormat(Wire):
    type: Literal["json_object"]


class SchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: Schema


ResponseFormat: TypeAlias = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class Common(Wire):
    """The fields that chat and text completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    repetition_context_size: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Nothing to do: they say who asks and what belongs together, and prefixes are found by content.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # One value is what is done anyway; another is refused.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class ChatRequest(Common):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, JsonValue]] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    thinking_budget: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(Common):
    """The body of ``POST /v1/completions``: prompts that are final, as text or token ids; pictures need a chat."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Literal[False] | None = None


#: Fields of OpenAI's and vLLM's that are refused whatever they hold, and why.
REFUSED: Mapping[str, str] = {
    "audio": "audio is not made here",
    "best_of": "use n, and choose among the answers",
    "function_call": "use tools and tool_choice",
    "functions": "use tools",
    "guided_json": "use response_format",
    "metadata": "nothing is stored",
    "moderation": "nothing is moderated",
    "prediction": "answers are not speculated",
    "priority": "use the header X-Priority, in which higher goes first",
    "prompt_cache_retention": "prefixes are kept as long as they fit",
    "suffix": "text is only added at the end",
    "verbosity": "no family has a control for it",
    "web_search_options": "nothing is searched",
}

#: Fields of the wire, and the field of ``SamplingParams`` that each becomes.
SAMPLING: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "repetition_context_size": "repetition_context_size",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "min_tokens": "min_tokens",
    "bad_words": "bad_words",
    "allowed_token_ids": "allowed_token_ids",
    "prompt_logprobs": "prompt_logprobs",
    "seed": "seed",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "thinking_budget": "thinking_budget",
    "response_format": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
#: And the field of ``Request``.
TEMPLATE: Mapping[str, str] = {
    "tools": "tools",
    "documents": "documents",
    "enable_thinking": "enable_thinking",
    "reasoning_effort": "reasoning_effort",
    "chat_template_kwargs": "template_args",
    "add_generation_prompt": "add_generation_prompt",
    "continue_final_message": "continue_final_message",
    "min_pixels": "min_pixels",
    "max_pixels": "max_pixels",
}
#: Values that ask for nothing, so that clients that always send them are served.
NEUTRAL: Mapping[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_tokens": 0,
    "bad_words": [],
    "response_format": TextFormat(type="text"),
    "tools": [],
    "documents": [],
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
    "continue_final_message": False,
}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A body as requests for the engine: one for each of its prompts, each answered ``n`` times."""

    prompts: tuple[Mapping[str, Any], ...]  # each a Request's messages, or its prompt or token_ids
    params: SamplingParams
    template: Mapping[str, Any]
    stream: bool
    include_usage: bool
    is_chat: bool = True
    tools: tuple[Mapping[str, Any], ...] = ()
    user: str | None = None

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        return self.params.n

    def requests(self, *, request_id: str, priority: int) -> list[Request]:
        """One request for each prompt, in their order; its answers share what is encoded and prefilled."""
        return [
            Request(
                params=self.params, request_id=f"{request_id}-{index}", priority=priority, **prompt, **self.template
            )
            for index, prompt in enumerate(self.prompts)
        ]


@dataclass(frozen=True)
class Limits:
    """The server's bounds on what one body may ask for, and its defaults."""

    max_choices: int
    max_prompts: int
    default_max_tokens: int
    enable_thinking: bool = False  # for bodies that do not say


def chat_ask(
    body: ChatRequest, messages: Sequence[Mapping[str, Any]], limits: Limits, writer: CallWriter | None = None
) -> Ask:
    """The engine's part of a chat. ``messages`` are the body's, with pictures and videos as bytes; ``writer`` is of the
    model's tool calls, None if its template has no form for them. Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one", param="max_completion_tokens")
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    tools = tuple(tool.model_dump(exclude_none=True) for tool in body.tools or () if body.tool_choice != "none")
    template = _template(body, tools)
    if limits.enable_thinking and "enable_thinking" not in (body.chat_template_kwargs or {}):
        template.setdefault("enable_thinking", True)
    return Ask(
        prompts=({"messages": list(messages)},),
        params=_params(body, max_tokens, logprobs, limits, grammar=_call_grammar(body, tools, writer)),
        template=template,
        tools=tools,
        **_shape(body),
    )


def completion_ask(body: CompletionRequest, limits: Limits) -> Ask:
    """The engine's part of a text completion. Raises ApiError."""
    prompts = _prompts(body.prompt)
    if len(prompts) > limits.max_prompts:
        raise ApiError(400, f"{len(prompts)} prompts; at most {limits.max_prompts} go into one request", param="prompt")
    return Ask(
        prompts=prompts,
        params=_params(body, body.max_tokens, body.logprobs, limits),
        template={},
        is_chat=False,
        **_shape(body),
    )


def wire_messages(body: ChatRequest) -> list[dict[str, Any]]:
    """The body's messages as the library takes them: plain mappings, calls with their arguments parsed."""
    return [_message(message) for message in body.messages]


def field_status(model: type[Wire]) -> dict[str, str]:
    """Each field of a body, and "honoured", "refused" or "one value" (refused unless it asks for nothing)."""
    status = dict.fromkeys(model.model_fields, "honoured")
    status |= dict.fromkeys(("store", "service_tier", "modalities", "echo"), "one value")
    status = {name: value for name, value in status.items() if name in model.model_fields}
    return status | dict.fromkeys(REFUSED, "refused")


def _shape(body: Common) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs come with the whole answer; leave stream out", param="prompt_logprobs")
    options = body.stream_options or StreamOptions()
    user = body.user or body.safety_identifier
    return {"stream": bool(body.stream), "include_usage": options.include_usage, "user": user}


def _call_grammar(body: ChatRequest, tools: Sequence[Mapping[str, Any]], writer: CallWriter | None) -> str | None:
    """The grammar of an answer that must call a tool, may call one only, or must keep to a tool's schema; None for others."""
    choice = body.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else None
    is_forced = choice == "required" or named is not None
    one_only = body.parallel_tool_calls is False
    if named is not None:
        tools = [tool for tool in tools if tool["function"]["name"] == named]
    if is_forced and not tools:
        missing = "no tools are given" if named is None else f"there is no tool {named[:100]!r}"
        raise ApiError(400, f"tool_choice: {missing}", param="tool_choice")
    is_strict = any(tool["function"].get("strict") for tool in tools)
    if not tools or not (is_forced or one_only or is_strict):
        return None
    asked = "tool_choice" if is_forced else "parallel_tool_calls" if one_only else "tools"
    if writer is None:
        raise ApiError(400, f"{asked}: this model's chat template has no form for tool calls", param=asked)
    if not is_forced and not writer.is_marked:
        said = "only with tool_choice required or a tool's name: this model's calls begin like other text"
        raise ApiError(400, f"{asked}: {'one call' if one_only else 'strict'} {said}", param=asked)
    try:
        return writer.grammar(tools, several=named is None and not one_only, is_free=not is_forced)
    except CannotForce as error:
        raise ApiError(400, f"{asked}: {error}", param=asked) from error


def _params(
    body: Common, max_tokens: int | None, logprobs: int | None, limits: Limits, *, grammar: str | None = None
) -> SamplingParams:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= limits.max_choices:
        raise ApiError(400, f"n is {n}; it must be in 1..{limits.max_choices}", param="n")
    given = {SAMPLING[name]: value for name, value in _asked(body, SAMPLING).items()}
    if grammar is not None and set(FORMS) & given.keys():
        raise ApiError(400, "an answer that calls tools has their form, and no other", param="response_format")
    given |= {} if grammar is None else {"grammar": grammar}
    most = limits.default_max_tokens if max_tokens is None else max_tokens
    try:
        return SamplingParams(max_tokens=most, logprobs=logprobs, n=n, **given)
    except InvalidParameters as error:
        raise refusal(error) from error


def _template(body: ChatRequest, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    given = {TEMPLATE[name]: value for name, value in _asked(body, TEMPLATE).items() if name != "tools"}
    return {**given, "tools": list(tools)} if tools else given


def _asked(body: Common, table: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a table that a body sets to more than nothing. Raises ApiError for a value that cannot be read."""
    found: dict[str, Any] = {}
    for name in sorted(body.model_fields_set & table.keys()):
        value = body.model_dump(include={name}, by_alias=True, exclude_none=True).get(name)
        neutral = NEUTRAL.get(name)
        if value is None or value == (neutral.model_dump() if isinstance(neutral, Wire) else neutral):
            continue
        found[name] = _CONVERSIONS[name](value) if name in _CONVERSIONS else value
    return found


def _format(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON schema that a ``response_format`` stands for."""
    return value["json_schema"]["schema"] if value["type"] == "json_schema" else {"type": "object"}


def _bias(value: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError as error:
        raise ApiError(400, "logit_bias maps token ids to numbers", param="logit_bias") from error


_CONVERSIONS = {"response_format": _format, "logit_bias": _bias}


def _prompts(prompt: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(prompt, str):
        return ({"prompt": prompt, "rendered": True},)
    if not prompt:
        raise ApiError(400, "prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return ({"token_ids": prompt},)
    return tuple({"prompt": one, "rendered": True} if isinstance(one, str) else {"token_ids": one} for one in prompt)


def _message(message: Any) -> dict[str, Any]:
    plain: dict[str, Any] = message.model_dump(exclude_none=True)
    if plain["role"] == "developer":  # OpenAI's newer name; templates know the older one
        plain["role"] = "system"
    for call in plain.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    if plain["role"] == "assistant":
        plain.pop("annotations", None)
        plain.setdefault("content", "")
    return plain


def _arguments(text: str) -> Any:
    """A call's arguments as the mapping that templates iterate over; as they are if they are none."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, dict) else text
