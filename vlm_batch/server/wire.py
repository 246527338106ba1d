"""Request bodies in OpenAI's wire format, and the library's names of their fields.

The rule of fields: what changes an answer is honoured, or refused by name. What asks for nothing, or is a client's own
bookkeeping, is accepted at every depth: each object's table ``nothing`` says which values these are. A field that nobody
knows is refused, with the nearest name.

Pydantic makes an error of each wrong value while the event loop waits. So a list ends at its first wrong item, and an
object with too many names is refused unread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StrictFloat,
    StrictInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

#: Limits on one request's contents.
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 512
MAX_CHOICES = 4096
MAX_BIASES = 1024
MAX_DOCUMENTS = 1024
MAX_METADATA = 16
#: Most names of an object with known names.
MAX_FIELDS = 128

#: Most values of a free JSON object: template arguments, a document, a tool's parameters.
MAX_JSON = 16_384

#: Fields of OpenAI's and vLLM's that are not served, and values beside null that change nothing, which some clients always
#: send. ``openai.REFUSED`` says why.
NOTHING: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default", "flex", "priority", "scale"),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "truncate_prompt_tokens": (),
    "request_id": (),
    "moderation": (),
    "prompt_cache_retention": (),
    "prompt_cache_options": ({},),
}
_NOTHING_OF_CHATS: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "modalities": (["text"],),
    "function_call": ("none",),
    "functions": ([],),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "include_reasoning": (True,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "thinking_token_budget": (-1,),
    "echo": (False,),
    "resize_shape": (),
}
_NOTHING_OF_TEXTS: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "prompt_embeds": ([],),
}


class _Any:
    """Stands for every value, in tables of what asks for nothing: a client's own bookkeeping."""

    def __contains__(self, value: object) -> bool:
        return True


ANY = _Any()
Nothing: TypeAlias = Mapping[str, "tuple[Any, ...] | _Any"]
#: What clients write beside contents, at every depth: their own ids, hints for other servers' caches and providers.
_OWN: Nothing = {
    "id": ANY,
    "cache_control": ANY,
    "provider_specific_fields": ANY,
    "extra_content": ANY,
}

Number: TypeAlias = StrictFloat | StrictInt
Item = TypeVar("Item")


def _at_most(most: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError(
                "too_long",
                "the object has {size} names; at most {most} are taken",
                {"size": len(value), "most": most},
            )
        return value

    return check


def _is_small(value: Any) -> Any:
    """Refuse a value that holds more than ``MAX_JSON`` others."""
    left, within = MAX_JSON, [iter((value,))]
    while within:
        one = next(within[-1], _END)
        if one is _END:
            within.pop()
            continue
        left -= 1
        if left < 0:
            raise PydanticCustomError(
                "too_long", "it holds more than {most} values", {"most": MAX_JSON}
            )
        if isinstance(one, (dict, list)):
            within.append(iter(one.values() if isinstance(one, dict) else one))
    return value


_END = object()
#: An object with any names.
Json: TypeAlias = Annotated[dict[str, JsonValue], BeforeValidator(_is_small)]
#: A list that ends at its first wrong item.
Many: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]
Biases: TypeAlias = Annotated[dict[str, Number], BeforeValidator(_at_most(MAX_BIASES))]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]


class Wire(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)
    #: Fields that are not served -> values beside null that ask for nothing.
    nothing: ClassVar[Nothing] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, value: Any) -> Any:
        """Drop fields that ask for nothing; refuse an object of too many."""
        value = _at_most(MAX_FIELDS)(value)
        if not isinstance(value, dict) or cls.nothing.keys().isdisjoint(value):
            return value
        return {
            name: given
            for name, given in value.items()
            if not _is_nothing(cls.nothing.get(name), given)
        }


#: Names of the members of unions, by which pydantic tells them apart.
UNIONS = frozenset({
    "system", "developer", "user", "assistant", "tool",
    "text", "refusal", "image_url", "video_url", "input_audio", "audio_url", "json_object", "json_schema",
})  # fmt: skip

# Messages ----------------------------------------------------------------------------------------------------------


class Url(Wire):
    """A picture: a data URI, base64, or, where the server allows it, an http(s) URL or file."""

    nothing = {"detail": ("",), "format": ANY, "uuid": ANY}
    url: str
    # a hint: pictures are taken as they are
    detail: Literal["auto", "low", "high", "original"] | None = None


class VideoUrl(Wire):
    nothing = {"detail": ("", "auto"), "format": ANY, "uuid": ANY}
    url: str


class AudioUrl(Wire):
    nothing = {"format": ANY, "uuid": ANY}
    url: str


class AudioData(Wire):
    """A recording in base64; its bytes decide the format."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus"] | None = None


class PartBase(Wire):
    """The fields that every part of a content may have beside it."""

    nothing = {
        **_OWN,
        "uuid": ANY,
        "name": ANY,
        "index": ANY,
        "annotations": ANY,
        "extras": ANY,
    }


class TextPart(PartBase):
    type: Literal["text"]
    text: str


class RefusalPart(PartBase):
    """The text of an earlier refusal."""

    type: Literal["refusal"]
    refusal: str


class ImagePart(PartBase):
    type: Literal["image_url"]
    image_url: Url | str


class VideoPart(PartBase):
    """A video and its sampling (``vlm_batch.Video``)."""

    type: Literal["video_url"]
    video_url: VideoUrl | str
    fps: Number | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    sound: bool = False


class AudioPart(PartBase):
    type: Literal["input_audio"]
    input_audio: AudioData


class AudioUrlPart(PartBase):
    type: Literal["audio_url"]
    audio_url: AudioUrl | str


Said: TypeAlias = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Part: TypeAlias = Annotated[
    TextPart | ImagePart | VideoPart | AudioPart | AudioUrlPart,
    Field(discriminator="type"),
]


class FunctionCall(Wire):
    nothing = {"parsed_arguments": ANY}
    name: str
    arguments: str


class ToolCall(Wire):
    """A call that the model made in an earlier turn."""

    nothing = {
        "cache_control": ANY,
        "provider_specific_fields": ANY,
        "extra_content": ANY,
        "caller": (),
    }
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class SystemMessage(Wire):
    nothing = _OWN
    role: Literal["system", "developer"]
    name: str | None = None
    content: (
        str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)]
    )


class UserMessage(Wire):
    nothing = _OWN
    role: Literal["user"]
    name: str | None = None
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)]


class AssistantMessage(Wire):
    """An earlier answer, with the fields that clients send back."""

    nothing = {
        **_OWN, "parsed": ANY, "status": ANY, "reasoning_details": ANY, "thinking_blocks": ([],), "images": ([],),
    }  # fmt: skip
    role: Literal["assistant"]
    name: str | None = None
    content: (
        str | Annotated[list[Said], Field(fail_fast=True, max_length=MAX_PARTS)] | None
    ) = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name of the same
    tool_calls: (
        Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_PARTS)] | None
    ) = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None


class ToolMessage(Wire):
    nothing = {**_OWN, "status": ANY, "is_error": ANY, "artifact": ANY}
    role: Literal["tool"]
    content: (
        str
        | Annotated[
            list[TextPart | ImagePart], Field(fail_fast=True, max_length=MAX_PARTS)
        ]
        | None
    ) = None
    tool_call_id: str | None = None
    name: str | None = None


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


def _is_nothing(values: tuple[Any, ...] | _Any | None, given: Any) -> bool:
    """Return whether a field asks for nothing; JSON's true is not 1."""
    if values is None or isinstance(values, _Any):
        return values is not None
    return given is None or any(
        given == one and isinstance(given, bool) == isinstance(one, bool)
        for one in values
    )


# Requests ----------------------------------------------------------------------------------------------------------


class Function(Wire):
    nothing = {"cache_control": ANY}
    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Wire):
    nothing = _OWN
    type: Literal["function"]
    function: Function


class ToolName(Wire):
    name: Name


class NamedTool(Wire):
    """The one tool that the answer must call."""

    type: Literal["function"]
    function: ToolName


class AllowedTools(Wire):
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[NamedTool], Field(min_length=1, fail_fast=True, max_length=MAX_TOOLS)
    ]


class AllowedChoice(Wire):
    """The tools that the answer may or must call."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


#: ``max_tokens`` of an answer that says no number, as llama.cpp's and LM Studio's clients write it.
NO_LIMIT = -1


def _is_length(value: int) -> int:
    if value == NO_LIMIT or 0 <= value < 2**63:
        return value
    raise PydanticCustomError("out_of_range", "it must be an integer of at least 1")


#: How many tokens an answer may have.
NumTokens: TypeAlias = Annotated[int, AfterValidator(_is_length)]


class VllmArguments(Wire):
    """Arguments of vLLM's processors against repeated sequences: DeepSeek-OCR's (``ngram_size``) and MinerU's."""

    no_repeat_ngram_size: int | None = None
    ngram_size: int | None = None
    window_size: int | None = None
    whitelist_token_ids: Many[int] | None = None
    debug: bool | None = None  # a word in vLLM's log


class PixelArguments(Wire):
    """The arguments of a model's processor that are honoured."""

    min_pixels: int | None = None
    max_pixels: int | None = None


class FrameArguments(Wire):
    """The choice of every video's frames: a rate, a number, or a rate with at most a number, as in vLLM."""

    fps: Number | None = None
    num_frames: int | None = None


class MediaArguments(Wire):
    """The arguments of vLLM's readers of media that are honoured."""

    nothing = {"image": ({},), "audio": ({},)}
    video: FrameArguments | None = None


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


class StructuredOutputs(Wire):
    """vLLM's form of an answer: one of the first five fields."""

    json_: Json | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: (
        Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICES)] | None
    ) = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: Literal[False] | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


ResponseFormat: TypeAlias = Annotated[
    TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")
]


class Common(Wire):
    nothing = NOTHING
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    n: int | None = None
    sampling: Literal["greedy", "recommended"] | None = None
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
    priority: int | None = None
    cache_salt: Name | None = None
    return_token_ids: bool | None = None
    stop: (
        str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)] | None
    ) = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    vllm_xargs: VllmArguments | None = None
    guided_regex: str | None = None
    guided_choice: (
        Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICES)] | None
    ) = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    # Without effect: prefixes are found by content.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: (
        Annotated[dict[str, str], BeforeValidator(_at_most(MAX_METADATA))] | None
    ) = None


class ChatRequest(Common):
    """The body of ``POST /v1/chat/completions``."""

    nothing = {**NOTHING, **_NOTHING_OF_CHATS}
    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = (
        None
    )
    tool_choice: (
        Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None
    ) = None
    parallel_tool_calls: bool | None = None
    documents: (
        Annotated[list[Json], Field(fail_fast=True, max_length=MAX_DOCUMENTS)] | None
    ) = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: (
        Annotated[Json, BeforeValidator(_at_most(MAX_FIELDS))] | None
    ) = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    thinking_budget: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    mm_processor_kwargs: PixelArguments | None = None
    media_io_kwargs: MediaArguments | None = None


class CompletionRequest(Common):
    """The body of ``POST /v1/completions``: final prompts, without pictures."""

    nothing = {**NOTHING, **_NOTHING_OF_TEXTS}
    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None


#: Wire fields -> fields of ``SamplingParams``.
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
        "stop_token_ids", "ignore_eos", "skip_special_tokens", "thinking_budget",
    )
}  # fmt: skip
#: Wire fields -> fields of ``Template`` or ``Request``.
TEMPLATE: Mapping[str, str] = {
    name: name
    for name in (
        "tools", "documents", "enable_thinking", "reasoning_effort", "add_generation_prompt", "continue_final_message",
        "min_pixels", "max_pixels",
    )
} | {"chat_template_kwargs": "args"}  # fmt: skip


def field_names() -> frozenset[str]:
    """Return the names of all fields, at every depth."""
    left: list[type[Wire]] = [Wire]
    found = {*NOTHING, *_NOTHING_OF_CHATS, *_NOTHING_OF_TEXTS}
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        found |= {field.alias or name for name, field in kind.model_fields.items()}
    return frozenset(found)
