"""The types of Anthropic's Messages, and what the engine is asked with them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from vlm_batch.server.conversation import (
    Conversation,
    TalkContent,
    TalkPart,
    document_part,
    picture_part,
    text_part,
)
from vlm_batch.server.sampled import ThoughtBody
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


class Base64Source(Member):
    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def place(self) -> dict[str, str]:
        return {"url": f"data:{self.media_type};base64,{self.data}"}


class UrlSource(Member):
    type: Literal["url"]
    url: str

    @property
    def place(self) -> dict[str, str]:
        return {"url": self.url}


class FileSource(Member):
    """A file of ``/v1/files``."""

    type: Literal["file"]
    file_id: str

    @property
    def place(self) -> dict[str, str]:
        return {"file_id": self.file_id}


class TextSource(Member):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class SaidBlock(Member):
    """Text or media in a turn."""

    nothing = _OWN

    @abstractmethod
    def parts(self) -> list[TalkPart]:
        """Return it as ``Conversation`` has it."""

    def ask(self, talk: Conversation) -> None:
        talk.say("user", self.parts())

    def add_to(self, talk: Conversation) -> None:
        talk.answer(self.parts())


class TextBlock(SaidBlock):
    nothing = {**_OWN, "citations": ANY, "parsed_output": ANY}
    type: Literal["text"]
    text: str

    def parts(self) -> list[TalkPart]:
        return [text_part(self.text)]


class ImageBlock(SaidBlock):
    nothing = {**_OWN, "transformations": ({}, {"oversized_image": "downsize"})}
    type: Literal["image"]
    source: Annotated[
        Base64Source | UrlSource | FileSource, Field(discriminator="type")
    ]

    def parts(self) -> list[TalkPart]:
        return [picture_part(self.source.place)]


class DocumentBlock(SaidBlock):
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
        if isinstance(self.source, TextSource):
            return [*said, text_part(self.source.data)]
        return [*said, document_part(self.source.place)]


class ThinkingBlock(Member):
    nothing = _OWN
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None

    def add_to(self, talk: Conversation) -> None:
        talk.think(self.thinking)


class RedactedBlock(Member):
    """Thinking of another server's, which nobody can read here."""

    nothing = _OWN
    type: Literal["redacted_thinking"]
    data: str

    def add_to(self, talk: Conversation) -> None:
        return


class ToolUseBlock(Member):
    nothing = {**_OWN, "caller": ANY, "toolset_name": ()}
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json

    def add_to(self, talk: Conversation) -> None:
        talk.call(self.id, self.name, self.input)


OfResult: TypeAlias = Annotated[
    TextBlock | ImageBlock | DocumentBlock,
    Field(discriminator="type"),
]


class ToolResultBlock(Member):
    nothing = {**_OWN, "toolset_name": ()}
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Parts[OfResult] | None = None
    is_error: bool | None = None

    def ask(self, talk: Conversation) -> None:
        talk.result(self.tool_use_id, said_in(self.content or ""))


OfUser: TypeAlias = Annotated[
    TextBlock | ImageBlock | DocumentBlock | ToolResultBlock,
    Field(discriminator="type"),
]
OfAssistant: TypeAlias = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock,
    Field(discriminator="type"),
]


def said_in(content: str | Sequence[SaidBlock]) -> TalkContent:
    """Return a content as ``Conversation`` has it."""
    if isinstance(content, str):
        return content
    return [part for block in content for part in block.parts()]


class UserTurn(Member):
    role: Literal["user"]
    content: str | Parts[OfUser]

    def add_to(self, talk: Conversation) -> None:
        """Add a user's words and tools' results, in their order."""
        if isinstance(self.content, str):
            talk.say("user", self.content)
            return
        for block in self.content:
            block.ask(talk)


class AssistantTurn(Member):
    """An earlier answer, or the beginning of the one that is asked for."""

    role: Literal["assistant"]
    content: str | Parts[OfAssistant]

    def add_to(self, talk: Conversation) -> None:
        if isinstance(self.content, str):
            talk.begin_answer(self.content)
            return
        talk.begin_answer([])
        for block in self.content:
            block.add_to(talk)


class SystemTurn(Member):
    role: Literal["system"]
    content: str | Parts[TextBlock]

    def add_to(self, talk: Conversation) -> None:
        # within a chat most templates know none; Claude Code writes them there
        is_head = all(turn["role"] == "system" for turn in talk.turns)
        talk.say("system" if is_head else "user", said_in(self.content))


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
