"""The bodies of requests in OpenAI's wire format, as types, and the library's names of their fields.

``SAMPLING`` and ``TEMPLATE`` say which field of ``SamplingParams``, ``Template`` and ``Request`` a field of the wire becomes.

Every body is bounded in what a wrong one costs: pydantic makes an error of each wrong value, and the event loop waits
meanwhile. So a list ends at its first wrong item, and an object with too many names is refused before they are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, StrictFloat, StrictInt, model_validator
from pydantic_core import PydanticCustomError

#: Bounds of what one request may hold beside its body's bytes.
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 512
MAX_CHOICES = 4096
MAX_BIASES = 1024
#: Names of an object whose names are known: more than any has.
MAX_FIELDS = 128

Number: TypeAlias = StrictFloat | StrictInt
Item = TypeVar("Item")


def _at_most(most: int) -> Callable[[Any], Any]:
    """A check that an object has at most so many names, before any is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError(
                "too_long", "the object has {size} names; at most {most} are taken", {"size": len(value), "most": most}
            )
        return value

    return check


#: A list that ends at its first wrong item.
Many: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]
Biases: TypeAlias = Annotated[dict[str, Number], BeforeValidator(_at_most(MAX_BIASES))]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]


class Wire(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        return _at_most(MAX_FIELDS)(value)


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
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class UserMessage(Wire):
    role: Literal["user"]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)]


class AssistantMessage(Wire):
    """An earlier answer. What OpenAI's client writes into every answer may come back: empty."""

    role: Literal["assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None


class ToolMessage(Wire):
    role: Literal["tool"]
    content: str | Annotated[list[TextPart | ImagePart], Field(fail_fast=True, max_length=MAX_PARTS)]
    tool_call_id: str | None = None
    name: str | None = None


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


# Requests ----------------------------------------------------------------------------------------------------------


class Function(Wire):
    name: Name
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: Function


class ToolName(Wire):
    name: Name


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
    logit_bias: Biases | None = None
    min_tokens: int | None = None
    bad_words: Many[str] | None = None
    allowed_token_ids: Many[int] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICES)] | None = None
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

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    documents: Many[dict[str, JsonValue]] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    thinking_budget: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    modalities: Many[Literal["text"]] | None = None


class CompletionRequest(Common):
    """The body of ``POST /v1/completions``: prompts that are final, as text or token ids; pictures need a chat."""

    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Literal[False] | None = None


#: Fields of the wire, and the field of ``SamplingParams`` that each becomes.
SAMPLING: Mapping[str, str] = {
    "response_format": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
} | {
    name: name
    for name in (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "repetition_context_size", "presence_penalty",
        "frequency_penalty", "logit_bias", "min_tokens", "bad_words", "allowed_token_ids", "prompt_logprobs", "seed", "stop",
        "stop_token_ids", "ignore_eos", "thinking_budget",
    )
}  # fmt: skip
#: And the field of ``Template``, or of ``Request``.
TEMPLATE: Mapping[str, str] = {
    name: name
    for name in (
        "tools", "documents", "enable_thinking", "reasoning_effort", "add_generation_prompt", "continue_final_message",
        "min_pixels", "max_pixels",
    )
} | {"chat_template_kwargs": "args"}  # fmt: skip
