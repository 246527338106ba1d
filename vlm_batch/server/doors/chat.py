"""``/v1/chat/completions``: OpenAI's chats, with what vLLM's, llama.cpp's and mlx-vlm's clients add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vlm_batch.server.answers import Delta
from vlm_batch.server.asking import (
    Abilities,
    Ask,
    Talk,
    ToolChoice,
    ask_of,
    no_tools,
)
from vlm_batch.server.choices import Completions, ending_of, finite
from vlm_batch.server.config import ServerConfig
from vlm_batch.server.door import Core, Door
from vlm_batch.server.doors.chat_messages import (
    OWN,
    MediaArguments,
    Message,
    wire_messages,
    with_frames,
)
from vlm_batch.server.edge import Entry
from vlm_batch.server.errors import ApiError
from vlm_batch.server.exchange import Choice, through
from vlm_batch.server.fields import TEMPLATE
from vlm_batch.server.sampled import Common, NumTokens, NumTops
from vlm_batch.server.sampling import asked_of, check_stream, others_of, sampling_of
from vlm_batch.server.unserved import NOTHING
from vlm_batch.server.wire import (
    ANY,
    MAX_FIELDS,
    MAX_TOOLS,
    Json,
    Name,
    Tools,
    Turns,
    Wire,
    at_most,
)
from vlm_batch.types import TokenLogprobs

MAX_DOCUMENTS = 1024

# Tools and settings -------------------------------------------------------------------------------------------------


class Function(Wire):
    nothing = {"cache_control": ANY}
    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Wire):
    nothing = OWN
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


class PixelArguments(Wire):
    """The arguments of a model's processor that are honoured."""

    min_pixels: int | None = None
    max_pixels: int | None = None


class ChatRequest(Common):
    """The body of ``POST /v1/chat/completions``."""

    nothing = {
        **NOTHING,
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
        "echo": (False,),
        "resize_shape": (),
    }
    messages: Turns[Message]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumTops | None = None
    tools: Tools[Tool] | None = None
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
        Annotated[Json, BeforeValidator(at_most(MAX_FIELDS))] | None
    ) = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    thinking_budget_tokens: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    mm_processor_kwargs: PixelArguments | None = None
    media_io_kwargs: MediaArguments | None = None


# In --------------------------------------------------------------------------------------------------------------------


def chat_ask(
    body: ChatRequest, config: ServerConfig, able: Abilities | None = None
) -> Ask:
    """Return a chat's engine request, whose media are still to be read.

    Args:
        body: The request.
        config: The server's settings.
        able: What the checkpoint can do; by default, everything.

    Raises:
        ApiError: A field cannot be honoured.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.tool_choice == "auto" and body.tools is None:  # OpenAI refuses it, too
        raise no_tools()
    if body.add_generation_prompt and body.continue_final_message:
        said = "the last message goes on, or the next one begins; leave one out"
        raise ApiError(400, said, param="continue_final_message")
    check_stream(body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    tools = body.tools or ()
    talk = Talk(
        messages=with_frames(wire_messages(body.messages), body.media_io_kwargs),
        sampling=sampling_of(body, max_tokens=_max_tokens(body), logprobs=logprobs),
        sampling_source=body.sampling,
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
        choice=_choice(body),
        template=asked_of(body, TEMPLATE),
        pixels=_pixels(body),
        others=others_of(body),
    )
    return ask_of(talk, config, able or Abilities())


def _max_tokens(body: ChatRequest) -> int | None:
    older, newer = body.max_tokens, body.max_completion_tokens
    if len({older, newer} - {None}) > 1:
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens differ; give one",
            param="max_completion_tokens",
        )
    return newer if older is None else older


def _pixels(body: ChatRequest) -> dict[str, int]:
    names = {"min_pixels", "max_pixels", "mm_processor_kwargs"}
    own = body.model_dump(include=names, exclude_none=True)
    return own.pop("mm_processor_kwargs", {}) | own


def _choice(body: ChatRequest) -> ToolChoice:
    given = body.tool_choice
    one_only = body.parallel_tool_calls is False
    if isinstance(given, NamedTool):
        return ToolChoice(named=given.function.name, one_only=True)
    if isinstance(given, AllowedChoice):
        among = given.allowed_tools
        names = [tool.function.name for tool in among.tools]
        return ToolChoice(mode=among.mode, allowed=names, one_only=one_only)
    return ToolChoice(mode=given or "auto", one_only=one_only)


# Out -------------------------------------------------------------------------------------------------------------------


class ChatExchange(Completions):
    prefix = "chatcmpl"
    prompt = "messages"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    body: ChatRequest

    def __init__(
        self, core: Core, entry: Entry, body: ChatRequest, *, priority: int = 0
    ) -> None:
        super().__init__(core, entry, body, priority=priority)
        if body.tools and body.guided_grammar is None:
            # the grammar of their calls
            self.names = {"guided_grammar": "tools", **self.names}

    def ask(self, able: Abilities) -> Ask:
        return chat_ask(self.body, self.core.service.config, able)

    def answer(self) -> dict[str, Any]:
        first = self.choices[0]
        of_prompt = {**self.prompt_logprobs(first), **self.prompt_ids(first)}
        return {**super().answer(), **of_prompt}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.content)
        reasoning = "".join(choice.reasoning)
        calls = list(choice.calls.values())
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_whole_call(call) for call in calls]
        return {
            "index": choice.index,
            "message": message,
            **self._logprobs(choice.logprobs),
            **ending_of(choice),
            **self.token_ids(choice.token_ids),
        }

    def _opening(self, choice: Choice) -> dict[str, Any]:
        said = {"role": "assistant", "content": "", "refusal": None}
        opening = {"index": choice.index, "delta": said, "logprobs": None}
        return {**opening, "finish_reason": None}

    def _part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        said: dict[str, Any] = {}
        if delta.content or not (delta.reasoning or delta.tool_calls):
            said["content"] = delta.content
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            said["tool_calls"] = list(delta.tool_calls)
        logprobs = self._logprobs(delta.logprobs)
        part = {"index": choice.index, "delta": said, "finish_reason": None}
        return {**part, **logprobs}

    def _ending(self, choice: Choice) -> dict[str, Any]:
        ending = ending_of(choice)
        return {"index": choice.index, "delta": {}, "logprobs": None, **ending}

    def _logprobs(self, steps: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if not steps:
            return {"logprobs": None}
        return {"logprobs": {"content": list(map(self._step, steps)), "refusal": None}}

    def _step(self, step: TokenLogprobs) -> dict[str, Any]:
        tops = [self._token(token, logprob) for token, logprob in step.top]
        return {**self._token(step.token_id, step.logprob), "top_logprobs": tops}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self.token_text(token_id), self.dialect.token(token_id)[1]
        return {"token": text, "logprob": finite(logprob), "bytes": raw}


def _whole_call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: call[name] for name in ("id", "type", "function")}


CHAT = Door(
    path="/v1/chat/completions",
    others=("/chat/completions",),
    body=ChatRequest,
    answer=through(ChatExchange),
    about="Answer a chat, with pictures and videos in its messages.",
)
