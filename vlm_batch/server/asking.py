"""Questions of doors to the engine: a chat, its tools and its sampling, as one ``Ask``."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlm_batch.server.calls import CallWriter, CannotForce
from vlm_batch.server.config import RECOMMENDED, ServerConfig
from vlm_batch.server.errors import ApiError, refusing
from vlm_batch.server.wire import ANY
from vlm_batch.types import FORMS, Request, SamplingParams, Template

#: ``max_tokens`` of an answer that says no number, as llama.cpp's and LM Studio's clients write it.
NO_LIMIT = -1
#: Largest priority.
MAX_PRIORITY = 100
#: Arguments of templates that ask for no thinking.
_NO_THINKING: Mapping[str, Any] = {
    "enable_thinking": False,
    "thinking": False,
    "reasoning_effort": "none",
}


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """A checkpoint's abilities, as far as requests depend on them.

    Attributes:
        writer: The model's form of tool calls, if it has one.
        reads: The arguments that its chat template reads; by default, every one.
        recommended: The folder's sampling, for requests that ask for it.
        thinks: Whether the model may think; how much has no meaning for others.
    """

    writer: CallWriter | None = None
    reads: Container[str] = ANY
    recommended: Mapping[str, Any] = field(default_factory=dict)
    thinks: bool = True

    def readable(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a template's arguments that it reads; none if the model does not think."""
        if not self.thinks:
            return {}
        return {name: asked[name] for name in asked if name in self.reads}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A body as engine requests, one per prompt, each answered ``params.n`` times."""

    # each a Request's messages, or its prompt or token_ids
    prompts: tuple[Mapping[str, Any], ...]
    params: SamplingParams
    template: Template | None = None
    returns_ids: bool = False  # the prompt's
    priority: int = 0  # the body's; higher goes first
    cache_salt: str | None = None
    is_chat: bool = True
    is_forced: bool = False  # to be tool calls
    tools: tuple[Mapping[str, Any], ...] = ()
    pixels: Mapping[str, Any] = field(default_factory=dict)
    user: str | None = None

    def requests(self, *, request_id: str, priority: int, client: int) -> list[Request]:
        return [
            Request(
                params=self.params,
                request_id=f"{request_id}-{index}",
                priority=priority,
                client=client,
                template=self.template,
                return_prompt_ids=self.returns_ids,
                cache_salt=self.cache_salt,
                **prompt,
                **self.pixels,
            )
            for index, prompt in enumerate(self.prompts)
        ]


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """The tools that an answer may or must call.

    Attributes:
        mode: "auto", "none" or "required".
        named: The one tool that it must call.
        allowed: The tools that the model sees; None: all.
        one_only: At most one call, as of a tool that is named.
    """

    mode: str = "auto"
    named: str | None = None
    allowed: Sequence[str] | None = None
    one_only: bool = False

    @property
    def is_forced(self) -> bool:
        return self.mode == "required" or self.named is not None


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A chat, as every door hands it over.

    Attributes:
        messages: In OpenAI's form, plain, with calls' arguments parsed; media are still to be read.
        sampling: Fields of ``SamplingParams``.
        sampling_source: "greedy" or "recommended"; None: the server's.
        tools: In OpenAI's form.
        choice: Which of them may or must be called.
        template: Fields of ``Template``.
        pixels: Bounds of pictures' pixels, by the names of ``Request``.
        others: Further fields of ``Ask``.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any]
    sampling_source: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice = ToolChoice()
    template: Mapping[str, Any] = field(default_factory=dict)
    pixels: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)


def ask_of(talk: Talk, config: ServerConfig, able: Abilities) -> Ask:
    """Return a chat's engine request, whose media are still to be read. Raises ApiError for what cannot be honoured."""
    tools = _offered(talk.tools, talk.choice)
    template = _template(talk.template, tools, config, able)
    grammar = _call_grammar(talk.choice, tools, able.writer)
    return Ask(
        prompts=({"messages": talk.messages},),
        params=params_of(
            talk.sampling, talk.sampling_source, config, able, grammar=grammar
        ),
        template=template,
        is_forced=talk.choice.is_forced,
        tools=tools,
        pixels=talk.pixels,
        **talk.others,
    )


def params_of(
    given: Mapping[str, Any],
    source: str | None,
    config: ServerConfig,
    able: Abilities,
    *,
    grammar: str | None = None,
) -> SamplingParams:
    """Return an answer's sampling.

    Args:
        given: What the request says of it, by the names of ``SamplingParams``.
        source: Where the rest is taken from, "greedy" or "recommended"; None: as the server says.
        config: The server's settings.
        able: The checkpoint's abilities.
        grammar: The form of tool calls, if they must have one.

    Raises:
        ApiError: A value is out of range, or two exclude each other.
    """
    n = given.get("n", 1)
    if not 1 <= n <= config.max_choices:
        raise ApiError(
            400, f"n is {n}; it must be in 1..{config.max_choices}", param="n"
        )
    params = dict(given)
    if (source or config.sampling) == RECOMMENDED:
        params = {**able.recommended, **params}
    if grammar is not None:
        if set(FORMS) & params.keys():
            said = "an answer that calls tools has their form, and no other"
            raise ApiError(400, said, param="response_format")
        params["grammar"] = grammar
    if params.get("max_tokens") in (None, NO_LIMIT):
        params["max_tokens"] = config.default_max_tokens
    with refusing():
        return SamplingParams(**params)


# Thinking and templates ------------------------------------------------------------------------------------------------


def _template(
    asked: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    config: ServerConfig,
    able: Abilities,
) -> Template:
    given = dict(asked)
    args = given.pop("args", {})
    if config.enable_thinking and "enable_thinking" not in args:
        given.setdefault("enable_thinking", True)
    given = _without_no_thinking(given, able.reads)
    args = _without_no_thinking(args, able.reads)
    if not able.thinks and "reasoning_effort" not in able.reads:
        given.pop("reasoning_effort", None)
    escapes = config.escape_special_tokens
    with refusing():
        return Template(
            tools=tools or None, args=args, escape_special_tokens=escapes, **given
        )


def _without_no_thinking(
    given: Mapping[str, Any], reads: Container[str]
) -> dict[str, Any]:
    """Return arguments without those that say not to think to a template that does not read them."""
    found = dict(given)
    for name, nothing in _NO_THINKING.items():
        if name in found and name not in reads and found[name] == nothing:
            del found[name]
    return found


# Tools -----------------------------------------------------------------------------------------------------------------


def name_of(tool: Mapping[str, Any]) -> str:
    """Return a tool's name."""
    return str(tool["function"]["name"])


def _offered(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice
) -> tuple[Mapping[str, Any], ...]:
    """Return the tools that the model sees."""
    if choice.mode == "none":
        return ()
    by_name: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        name = name_of(tool)
        if name in by_name:
            said = f"tools: two of them are named {name[:100]!r}"
            raise ApiError(400, said, param="tools")
        by_name[name] = tool
    if choice.allowed is None:
        return tuple(tools)
    unknown = sorted(set(choice.allowed) - by_name.keys())
    if unknown:
        raise _no_tool(unknown[0], list(by_name))
    return tuple(by_name[name] for name in by_name if name in choice.allowed)


def _call_grammar(
    choice: ToolChoice, tools: Sequence[Mapping[str, Any]], writer: CallWriter | None
) -> str | None:
    """Return the grammar that restricts tool calls, or None."""
    names = list(map(name_of, tools))
    tools = [tool for tool in tools if choice.named in (None, name_of(tool))]
    if choice.is_forced and not tools:
        raise _no_tool(choice.named or "", names)
    field_name = _what_holds(choice, tools)
    if field_name is None:
        return None

    def cannot(why: object) -> ApiError:
        return ApiError(400, f"{field_name}: {why}", param=field_name)

    if writer is None:
        raise cannot("this model's chat template has no form for tool calls")
    if not choice.is_forced and not writer.is_marked:
        what = "one call" if choice.one_only else "strict"
        only = "only with tool_choice required or a tool's name"
        raise cannot(f"{what} {only}: this model's calls begin like other text")
    is_free, several = not choice.is_forced, not choice.one_only
    try:
        return writer.grammar(tools, several=several, is_free=is_free)
    except CannotForce as error:
        raise cannot(error) from error


def _what_holds(choice: ToolChoice, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the field by which calls must follow a grammar, or None."""
    if not tools:
        return None
    if choice.is_forced:
        return "tool_choice"
    if choice.one_only:
        return "parallel_tool_calls"
    is_strict = any(tool["function"].get("strict") for tool in tools)
    return "tools" if is_strict else None


def _no_tool(name: str, names: Sequence[str]) -> ApiError:
    said = "no tools are given; name them in tools"
    if names:
        given = ", ".join(one[:100] for one in names[:10])
        said = f"there is no tool {name[:100]!r}; given: {given}"
    return ApiError(400, f"tool_choice: {said}", param="tool_choice")


def no_tools() -> ApiError:
    """Return the refusal of a choice among no tools."""
    return _no_tool("", ())
