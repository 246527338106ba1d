"""Request bodies (``wire``) to engine requests: every field is honoured or refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vlm_batch.errors import InvalidParameters, InvalidPrompt, shown
from vlm_batch.server.calls import CallWriter, CannotForce
from vlm_batch.server.config import RECOMMENDED, ServerConfig
from vlm_batch.server.errors import ApiError, refusal
from vlm_batch.server.wire import (
    NO_LIMIT,
    SAMPLING,
    TEMPLATE,
    AllowedChoice,
    ChatRequest,
    Common,
    CompletionRequest,
    FrameArguments,
    MediaArguments,
    NamedTool,
    StreamOptions,
    TextFormat,
    VllmArguments,
    Wire,
)
from vlm_batch.types import FORMS, Request, SamplingParams, Template

#: Sampling of a folder that recommends none.
NOTHING_RECOMMENDED: Mapping[str, Any] = MappingProxyType({})
#: Arguments of templates that ask for no thinking.
_NO_THINKING: Mapping[str, Any] = {
    "enable_thinking": False,
    "thinking": False,
    "reasoning_effort": "none",
}
_END = object()
#: Largest priority.
MAX_PRIORITY = 100
#: A token id as a JSON key.
_TOKEN = re.compile(r"[0-9]{1,10}")

#: Refused fields of OpenAI's and vLLM's, and why.
REFUSED: Mapping[str, str] = {
    "audio": "audio is not made here",
    "best_of": "use n, and choose among the answers",
    "function_call": "use tools and tool_choice",
    "functions": "use tools",
    "guided_json": "use response_format",
    "moderation": "nothing is moderated",
    "prediction": "answers are not speculated",
    "prompt_cache_retention": "prefixes are kept as long as they fit",
    "resize_shape": "it sets the sides of pictures, up and down; min_pixels and max_pixels bound their pixels",
    "suffix": "text is only added at the end",
    "verbosity": "no family has a control for it",
    "web_search_options": "nothing is searched",
}

#: Values that change nothing, which some clients always send.
NEUTRAL: Mapping[str, Any] = {
    "top_k": -1,
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
    """A body as engine requests, one per prompt, each answered ``n`` times."""

    # each a Request's messages, or its prompt or token_ids
    prompts: tuple[Mapping[str, Any], ...]
    params: SamplingParams
    template: Template | None
    stream: bool
    include_usage: bool
    has_running_usage: bool = False
    returns_ids: bool = False
    echoes: bool = False
    tells_prompt: bool = False  # its log-probabilities, as vLLM
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
                return_prompt_ids=self.returns_ids or self.echoes,
                cache_salt=self.cache_salt,
                **prompt,
                **self.pixels,
            )
            for index, prompt in enumerate(self.prompts)
        ]


def chat_ask(
    body: ChatRequest,
    config: ServerConfig,
    writer: CallWriter | None = None,
    reads: Collection[str] | None = None,
    recommended: Mapping[str, Any] = NOTHING_RECOMMENDED,
    *,
    thinks: bool = True,
) -> Ask:
    """Return a chat's engine requests, whose media are still to be read.

    Args:
        body: The request.
        config: The server's settings.
        writer: The model's form of tool calls, if it has one.
        reads: The arguments that its chat template reads; None where that is unknown.
        recommended: The folder's sampling, for requests that ask for it.
        thinks: Whether the model may think; how much has no meaning for others.

    Raises:
        ApiError: A field cannot be honoured.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (
        None,
        body.max_tokens,
    ):
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens differ; give one",
            param="max_completion_tokens",
        )
    max_tokens = (
        body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    tools = _tools(body)
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ApiError(
            400, f"tools: two of them are named {twice[:100]!r}", param="tools"
        )
    given = {
        TEMPLATE[name]: value
        for name, value in _asked(body, TEMPLATE).items()
        if name != "tools"
    }
    pixels: dict[str, Any] = {
        name: given.pop(name) for name in ("min_pixels", "max_pixels") if name in given
    }
    if body.mm_processor_kwargs is not None:
        pixels = body.mm_processor_kwargs.model_dump(exclude_none=True) | pixels
    if config.enable_thinking and "enable_thinking" not in (
        body.chat_template_kwargs or {}
    ):
        given.setdefault("enable_thinking", True)
    if not thinks and "reasoning_effort" not in (reads or ()):
        given.pop("reasoning_effort", None)
    if reads is not None:
        given = _without_no_thinking(given, reads)
    try:
        template = Template(
            tools=tools or None,
            escape_special_tokens=config.escape_special_tokens,
            **given,
        )
    except InvalidPrompt as error:
        raise refusal(error) from error
    return Ask(
        prompts=(
            {"messages": _with_frames(wire_messages(body), body.media_io_kwargs)},
        ),
        params=_params(
            body,
            max_tokens,
            logprobs,
            config,
            recommended,
            grammar=_call_grammar(body, tools, writer),
        ),
        template=template,
        is_forced=_is_forced(body),
        tools=tools,
        pixels=pixels,
        **_shape(body),
    )


def _without_no_thinking(
    given: Mapping[str, Any], reads: Collection[str]
) -> dict[str, Any]:
    """Return a template's arguments without those that say not to think to a model that does not."""
    args = {
        name: value
        for name, value in given.get("args", {}).items()
        if name in reads or _NO_THINKING.get(name, _END) != value
    }
    others = {
        name: value
        for name, value in given.items()
        if name in reads or _NO_THINKING.get(name, _END) != value
    }
    return {**others, "args": args} if "args" in given else others


def _tools(body: ChatRequest) -> tuple[dict[str, Any], ...]:
    tools = tuple(
        tool.model_dump(exclude_none=True)
        for tool in body.tools or ()
        if body.tool_choice != "none"
    )
    if not isinstance(body.tool_choice, AllowedChoice):
        return tools
    allowed = {tool.function.name for tool in body.tool_choice.allowed_tools.tools}
    if unknown := sorted(allowed - {tool["function"]["name"] for tool in tools}):
        raise ApiError(400, _no_tool(unknown[0], tools), param="tool_choice")
    return tuple(tool for tool in tools if tool["function"]["name"] in allowed)


def _no_tool(name: str | None, tools: Sequence[Mapping[str, Any]]) -> str:
    if not tools or name is None:
        return "tool_choice: no tools are given; name them in tools"
    given = ", ".join(tool["function"]["name"][:100] for tool in tools[:10])
    return f"tool_choice: there is no tool {name[:100]!r}; given: {given}"


def completion_ask(
    body: CompletionRequest,
    config: ServerConfig,
    recommended: Mapping[str, Any] = NOTHING_RECOMMENDED,
) -> Ask:
    prompts = _prompts(body.prompt)
    if len(prompts) > config.max_prompts:
        raise ApiError(
            400,
            f"{len(prompts)} prompts; at most {config.max_prompts} go into one request",
            param="prompt",
        )
    if body.echo and body.stream:
        raise ApiError(
            400, "echo comes with the whole answer; leave stream out", param="echo"
        )
    return Ask(
        prompts=prompts,
        params=_params(
            body,
            body.max_tokens,
            body.logprobs,
            config,
            recommended,
            echoes=bool(body.echo),
        ),
        template=None,
        is_chat=False,
        echoes=bool(body.echo),
        **_shape(body),
    )


def wire_messages(body: ChatRequest) -> list[dict[str, Any]]:
    """Return messages as plain mappings, with calls' arguments parsed."""
    found = [message.model_dump(exclude_none=True) for message in body.messages]
    for plain in found:
        # OpenAI's newer name; templates know the older one
        if plain["role"] == "developer":
            plain["role"] = "system"
        for call in plain.get("tool_calls", ()):
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
        if plain["role"] == "assistant":
            _clean_answer(plain)
        plain.setdefault("content", "")  # a tool's that returned nothing
    return found


def _with_frames(
    messages: list[dict[str, Any]], given: MediaArguments | None
) -> list[dict[str, Any]]:
    """Return messages whose videos have the choice of frames that is said for all; what a part says goes first."""
    frames = {} if given is None or given.video is None else _frames(given.video)
    for message in messages if frames else ():
        parts = message["content"] if isinstance(message["content"], list) else ()
        for part in parts:
            if part["type"] == "video_url" and part.keys().isdisjoint(
                ("fps", "num_frames", "max_frames")
            ):
                part |= frames
    return messages


def _frames(given: FrameArguments) -> dict[str, Any]:
    """Return the choice of frames as a part says it. In vLLM -1 is no number, and both make a rate with a bound."""
    number = None if given.num_frames == NO_LIMIT else given.num_frames
    fps = None if given.fps == NO_LIMIT else given.fps
    if number is None and fps is None and given.num_frames == NO_LIMIT:
        said = "num_frames -1 takes every frame; say a number, or fps"
        raise ApiError(
            400,
            f"media_io_kwargs.video: {said}",
            param="media_io_kwargs.video.num_frames",
        )
    named = {"fps": fps, "num_frames" if fps is None else "max_frames": number}
    return {name: value for name, value in named.items() if value is not None}


def _clean_answer(plain: dict[str, Any]) -> None:
    """Convert an earlier answer for templates; a refusal becomes text."""
    plain.pop("annotations", None)
    refused = plain.pop("refusal", None)
    plain.setdefault("content", refused or "")
    if isinstance(plain["content"], list):
        plain["content"] = [
            {"type": "text", "text": part.get("text", part.get("refusal"))}
            for part in plain["content"]
        ]
    if (reasoning := plain.pop("reasoning", None)) is not None:
        plain.setdefault("reasoning_content", reasoning)


def _shape(body: Common) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(
            400,
            "prompt_logprobs come with the whole answer; leave stream out",
            param="prompt_logprobs",
        )
    options = body.stream_options or StreamOptions()
    if options.continuous_usage_stats and not options.include_usage:
        said = "continuous_usage_stats needs include_usage: true"
        raise ApiError(400, said, param="stream_options.continuous_usage_stats")
    return {
        "stream": bool(body.stream),
        "include_usage": bool(options.include_usage),
        "has_running_usage": bool(options.continuous_usage_stats),
        "returns_ids": bool(body.return_token_ids),
        "tells_prompt": body.prompt_logprobs is not None,
        # vLLM's lower goes first
        "priority": max(-MAX_PRIORITY, min(MAX_PRIORITY, -(body.priority or 0))),
        "cache_salt": body.cache_salt,
        "user": body.user or body.safety_identifier,
    }


def _call_grammar(
    body: ChatRequest, tools: Sequence[Mapping[str, Any]], writer: CallWriter | None
) -> str | None:
    """Return the grammar that restricts tool calls, or None."""
    choice = body.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else None
    is_forced = _is_forced(body)
    one_only = body.parallel_tool_calls is False
    given = tools
    if named is not None:
        tools = [tool for tool in tools if tool["function"]["name"] == named]
    is_without_tools = choice == "auto" and body.tools is None  # OpenAI refuses it, too
    if (is_forced or is_without_tools) and not tools:
        raise ApiError(400, _no_tool(named, given), param="tool_choice")
    is_strict = any(tool["function"].get("strict") for tool in tools)
    if not tools or not (is_forced or one_only or is_strict):
        return None
    asked = (
        "tool_choice" if is_forced else "parallel_tool_calls" if one_only else "tools"
    )
    if writer is None:
        raise ApiError(
            400,
            f"{asked}: this model's chat template has no form for tool calls",
            param=asked,
        )
    if not is_forced and not writer.is_marked:
        said = "only with tool_choice required or a tool's name: this model's calls begin like other text"
        raise ApiError(
            400, f"{asked}: {'one call' if one_only else 'strict'} {said}", param=asked
        )
    try:
        return writer.grammar(
            tools, several=named is None and not one_only, is_free=not is_forced
        )
    except CannotForce as error:
        raise ApiError(400, f"{asked}: {error}", param=asked) from error


def _is_forced(body: ChatRequest) -> bool:
    choice = body.tool_choice
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
    return mode == "required" or isinstance(choice, NamedTool)


def names_of(body: Common) -> dict[str, str]:
    """Return the fields that errors may name -> the ones that this body has in their place."""
    names: dict[str, str] = {}
    if isinstance(body, ChatRequest) and body.tools and body.guided_grammar is None:
        names["guided_grammar"] = "tools"  # the grammar of their calls
    if body.structured_outputs is not None:
        given = body.structured_outputs
        schema = "json_object" if given.json_object else "json"
        wire = {
            "response_format": schema,
            "guided_regex": "regex",
            "guided_choice": "choice",
            "guided_grammar": "grammar",
        }
        names |= {
            name: f"structured_outputs.{own}"
            for name, own in wire.items()
            if name not in body.model_fields_set
        }
    return names


def _params(
    body: Common,
    max_tokens: int | None,
    logprobs: int | None,
    config: ServerConfig,
    recommended: Mapping[str, Any],
    *,
    grammar: str | None = None,
    echoes: bool = False,
) -> SamplingParams:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= config.max_choices:
        raise ApiError(
            400, f"n is {n}; it must be in 1..{config.max_choices}", param="n"
        )
    given = {SAMPLING[name]: value for name, value in _asked(body, SAMPLING).items()}
    given |= _ngrams(body.vllm_xargs)
    if (body.sampling or config.sampling) == RECOMMENDED:
        given = {**recommended, **given}
    if forms := _structured(body):
        if set(FORMS) & given.keys() or len(forms) > 1:
            raise ApiError(
                400,
                "structured_outputs: an answer has one form",
                param="structured_outputs",
            )
        given |= forms
    if grammar is not None and set(FORMS) & given.keys():
        raise ApiError(
            400,
            "an answer that calls tools has their form, and no other",
            param="response_format",
        )
    given |= {} if grammar is None else {"grammar": grammar}
    most = config.default_max_tokens if max_tokens in (None, NO_LIMIT) else max_tokens
    if echoes and (logprobs is not None or not most):
        given["prompt_logprobs"] = max(logprobs or 0, given.get("prompt_logprobs", 0))
    if not most and "prompt_logprobs" not in given:
        name = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
        raise ApiError(
            400,
            f"{name} is 0; an answer has at least one token, but with prompt_logprobs",
            param=name,
        )
    try:
        return SamplingParams(max_tokens=most, logprobs=logprobs, n=n, **given)
    except InvalidParameters as error:
        raise refusal(error) from error


def _ngrams(given: VllmArguments | None) -> dict[str, Any]:
    """Return the sampling parameters of vLLM's processors against repeated sequences."""
    if given is None:
        return {}
    size = (
        given.ngram_size
        if given.no_repeat_ngram_size is None
        else given.no_repeat_ngram_size
    )
    if not size or size < 0:  # off, as there
        return {}
    found = {
        "no_repeat_ngram_size": size,
        "whitelist_token_ids": given.whitelist_token_ids or (),
    }
    return found | (
        {} if given.window_size is None else {"window_size": given.window_size}
    )


def _asked(body: Common, table: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in sorted(body.model_fields_set & table.keys()):
        value = body.model_dump(include={name}, by_alias=True, exclude_none=True).get(
            name
        )
        neutral = NEUTRAL.get(name)
        if value is None or value == (
            neutral.model_dump() if isinstance(neutral, Wire) else neutral
        ):
            continue
        found[name] = _CONVERSIONS[name](value) if name in _CONVERSIONS else value
    return found


def _format(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return (
        value["json_schema"]["schema"]
        if value["type"] == "json_schema"
        else {"type": "object"}
    )


def _structured(body: Common) -> dict[str, Any]:
    asked = body.structured_outputs
    if asked is None:
        return {}
    found = {
        "json_schema": {"type": "object"} if asked.json_object else asked.json_,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
    }
    return {name: value for name, value in found.items() if value is not None}


def _seed(value: int) -> int:
    """Return a negative seed's bits as unsigned."""
    if not -(2**63) <= value < 2**64:
        raise ApiError(
            400,
            f"seed is {shown(value)}; it must be an integer in {-(2**63)}..{2**64 - 1}",
            param="seed",
        )
    return value % 2**64 if -(2**63) <= value < 0 else value


def _bias(value: Mapping[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for token, bias in value.items():
        if not _TOKEN.fullmatch(token):
            raise ApiError(
                400,
                f"logit_bias has the key {shown(token)}; it must be a token id",
                param="logit_bias",
            )
        if int(token) in found:
            raise ApiError(
                400,
                f"logit_bias has the token {int(token)} twice, as {shown(token)}, too",
                param="logit_bias",
            )
        found[int(token)] = bias
    return found


_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "response_format": _format,
    "logit_bias": _bias,
    "seed": _seed,
}


def _prompts(prompt: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(prompt, str):
        return ({"prompt": prompt},)
    if not prompt:
        raise ApiError(400, "prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return ({"token_ids": prompt},)
    return tuple(
        {"prompt" if isinstance(one, str) else "token_ids": one} for one in prompt
    )


def _arguments(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
