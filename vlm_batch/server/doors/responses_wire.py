"""The types of OpenAI's Responses, and what the engine is asked with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from vlm_batch.server.conversation import (
    Conversation,
    TalkContent,
    TalkPart,
    document_part,
    parsed_arguments,
    picture_part,
    text_part,
)
from vlm_batch.server.errors import ApiError
from vlm_batch.server.sampled import ObjectFormat, TextFormat, ThoughtBody
from vlm_batch.server.wire import (
    ANY,
    Json,
    Member,
    Metadata,
    Name,
    Nothing,
    Parts,
    Tools,
    Turns,
    Wire,
)

# Types -----------------------------------------------------------------------------------------------------------------

_HINT: Nothing = {"prompt_cache_breakpoint": ANY}
_OWN: Nothing = {"id": ANY, "status": ANY}


def _place(kind: str, address: str | None, file_id: str | None) -> dict[str, str]:
    """Return where media are: at an address, or in a stored file. Raises ApiError."""
    if address:
        return {"url": address}
    if file_id:
        return {"file_id": file_id}
    places = "image_url" if kind == "input_image" else "file_data, file_url"
    raise ApiError(400, f"{kind} needs {places} or file_id", param="input")


class InputText(Member):
    nothing = _HINT
    type: Literal["input_text"]
    text: str

    def part(self) -> TalkPart:
        return text_part(self.text)


class InputImage(Member):
    """A picture: a data URI, base64, a stored file, or, where the server allows it, an http(s) URL or file."""

    nothing = {**_HINT, "detail": ANY}
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None

    def part(self) -> TalkPart:
        return picture_part(_place(self.type, self.image_url, self.file_id))


class InputFile(Member):
    """A PDF, whose pages are pictures, or text."""

    nothing = {**_HINT, "detail": ANY}
    type: Literal["input_file"]
    file_id: str | None = None
    filename: str | None = None
    file_data: str | None = None
    file_url: str | None = None

    def part(self) -> TalkPart:
        address = self.file_data or self.file_url
        return document_part(_place(self.type, address, self.file_id))


class OutputText(Member):
    nothing = {"annotations": ANY, "logprobs": ANY, "parsed": ANY}
    type: Literal["output_text"]
    text: str

    def part(self) -> TalkPart:
        return text_part(self.text)


class OutputRefusal(Member):
    type: Literal["refusal"]
    refusal: str

    def part(self) -> TalkPart:
        return text_part(self.refusal)


Given: TypeAlias = Annotated[
    InputText | InputImage | InputFile, Field(discriminator="type")
]
Content: TypeAlias = Annotated[
    InputText | InputImage | InputFile | OutputText | OutputRefusal,
    Field(discriminator="type"),
]


def _said_in(given: str | list[Any]) -> TalkContent:
    """Return a content as ``Conversation`` has it."""
    return given if isinstance(given, str) else [part.part() for part in given]


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model sees a function."""
    return name if namespace is None else f"{namespace}__{name}"


class MessageItem(Member):
    nothing = {**_OWN, "phase": ANY}
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts[Content]

    def add_to(self, talk: Conversation) -> None:
        said = _said_in(self.content)
        if self.role == "assistant":
            talk.answer(said)
        else:
            talk.say("system" if self.role == "developer" else self.role, said)


class CallItem(Member):
    nothing = {
        **_OWN,
        "caller": ANY,
        "async": (False,),
        # as the client dumps it
        "async_": (False,),
        "parsed_arguments": ANY,
    }
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str

    def add_to(self, talk: Conversation) -> None:
        name = full_name(self.namespace, self.name)
        talk.call(self.call_id, name, parsed_arguments(self.arguments))


class ResultItem(Member):
    nothing = {**_OWN, "caller": ANY, "name": ANY, "namespace": ()}
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts[Given]

    def add_to(self, talk: Conversation) -> None:
        talk.result(self.call_id, _said_in(self.output))


class ThoughtText(Wire):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class ReasoningItem(Member):
    nothing = {**_OWN, "encrypted_content": ANY}
    type: Literal["reasoning"]
    summary: Parts[ThoughtText] = Field(default_factory=list)
    content: Parts[ThoughtText] | None = None

    def add_to(self, talk: Conversation) -> None:
        thoughts = "".join(part.text for part in self.content or self.summary)
        if thoughts:
            talk.think(thoughts)


class ReferenceItem(Member):
    """An item of a response that is kept."""

    type: Literal["item_reference"]
    id: str


def _with_type(value: Any) -> Any:
    """Return an item with its type; messages may leave it out."""
    if isinstance(value, dict) and value.get("type") is None:
        return {**value, "type": "item_reference" if "role" not in value else "message"}
    return value


Item: TypeAlias = Annotated[
    Annotated[
        MessageItem | CallItem | ResultItem | ReasoningItem | ReferenceItem,
        Field(discriminator="type"),
    ],
    BeforeValidator(_with_type),
]


#: Kinds of items that are kept.
ITEMS: Mapping[str, type[Member]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
}


class FunctionTool(Wire):
    nothing = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": ANY,
    }
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamespaceTools(Wire):
    """Codex's groups of functions. The model sees them by both names, and calls go back by the two."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Tools[FunctionTool]


class CachedSearch(Wire):
    """Codex's search of the web, switched off."""

    nothing = {"search_context_size": ANY, "user_location": ANY, "filters": ANY}
    type: Literal["web_search"]
    external_web_access: Literal[False]


class NamedFunction(Wire):
    type: Literal["function"]
    name: Name


class AllowedFunctions(Wire):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Tools[NamedFunction]


class FlatFormat(Member):
    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Json = Field(alias="schema")


class TextConfig(Wire):
    nothing = {"verbosity": ("medium",)}
    format: (
        Annotated[TextFormat | ObjectFormat | FlatFormat, Field(discriminator="type")]
        | None
    ) = None


class ReasoningConfig(Wire):
    nothing = {"summary": ANY, "generate_summary": ANY, "context": ANY, "mode": ANY}
    effort: str | None = None


class InputRequest(ThoughtBody):
    """The body of ``POST /v1/responses``, and of ``/v1/responses/input_tokens``."""

    nothing = {
        "access_programs": (),
        "background_options": ({},),
        "client_metadata": ANY,
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": ANY,
        "moderation": (),
        "prompt": (),
        "prompt_cache_options": ({},),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default", "flex", "priority", "scale"),
        "stream_options": ({}, {"include_obfuscation": False}),
        "truncation": ("disabled",),
    }
    refused = {
        "context_management": "the client sends what the model is to see",
        "conversation": "use previous_response_id",
        "prompt": "no prompts are kept here; send instructions",
        "moderation": "nothing is moderated",
        "prompt_cache_retention": "prefixes are kept as long as they fit",
    }
    input: str | Turns[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    include: Annotated[list[str], Field(max_length=32)] | None = None
    tools: (
        Tools[
            Annotated[
                FunctionTool | NamespaceTools | CachedSearch,
                Field(discriminator="type"),
            ]
        ]
        | None
    ) = None
    tool_choice: (
        Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None
    ) = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
