"""``/v1/responses``: OpenAI's Responses, kept for the next turn, and made in the background if asked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import FastAPI
from pydantic import BeforeValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

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
from vlm_batch.server.door import Core, Door, entry_of
from vlm_batch.server.edge import Entry
from vlm_batch.server.errors import ApiError, JsonResponse
from vlm_batch.server.exchange import (
    GRACE,
    Choice,
    Exchange,
    answer_whole_or_streamed,
    counted,
    event_bytes,
    priority_of,
)
from vlm_batch.server.fields import SAMPLING, THINKING
from vlm_batch.server.kept import Kept, new_id
from vlm_batch.server.openai import (
    ObjectFormat,
    TextFormat,
    Thought,
    asked_of,
    finite,
)
from vlm_batch.server.pages import DOCUMENT
from vlm_batch.server.streams import SentEvents
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
from vlm_batch.types import TokenLogprobs

logger = logging.getLogger("vlm_batch.server")

# Types -----------------------------------------------------------------------------------------------------------------

_HINT: Nothing = {"prompt_cache_breakpoint": ANY}
_OWN: Nothing = {"id": ANY, "status": ANY}


class InputText(Member):
    nothing = _HINT
    type: Literal["input_text"]
    text: str


class InputImage(Member):
    """A picture: a data URI, base64, or, where the server allows it, an http(s) URL or file."""

    nothing = {**_HINT, "file_id": (), "detail": ANY}
    type: Literal["input_image"]
    image_url: str


class InputFile(Member):
    """A PDF, whose pages are pictures, or text."""

    nothing = {**_HINT, "file_id": (), "detail": ANY}
    type: Literal["input_file"]
    filename: str | None = None
    file_data: str | None = None
    file_url: str | None = None


class OutputText(Member):
    nothing = {"annotations": ANY, "logprobs": ANY, "parsed": ANY}
    type: Literal["output_text"]
    text: str


class OutputRefusal(Member):
    type: Literal["refusal"]
    refusal: str


Given: TypeAlias = Annotated[
    InputText | InputImage | InputFile, Field(discriminator="type")
]
Content: TypeAlias = Annotated[
    InputText | InputImage | InputFile | OutputText | OutputRefusal,
    Field(discriminator="type"),
]


class MessageItem(Member):
    nothing = {**_OWN, "phase": ANY}
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts[Content]


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


class ResultItem(Member):
    nothing = {**_OWN, "caller": ANY, "name": ANY, "namespace": ()}
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts[Given]


class ThoughtText(Wire):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class ReasoningItem(Member):
    nothing = {**_OWN, "encrypted_content": ANY}
    type: Literal["reasoning"]
    summary: Parts[ThoughtText] = Field(default_factory=list)
    content: Parts[ThoughtText] | None = None


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


class InputRequest(Thought):
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


# In --------------------------------------------------------------------------------------------------------------------

#: Fields in errors -> this door's.
NAMES: Mapping[str, str] = {
    "guided_grammar": "tools",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


def turns_of(items: Iterable[Any]) -> list[dict[str, Any]]:
    """Return items as turns; what an answer is made of is one turn."""
    turns: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, CallItem):
            arguments = parsed_arguments(item.arguments)
            name = _full_name(item.namespace, item.name)
            function = {"name": name, "arguments": arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _answer_turn(turns).setdefault("tool_calls", []).append(call)
        elif isinstance(item, ReasoningItem):
            thoughts = "".join(part.text for part in item.content or item.summary)
            if thoughts:
                _answer_turn(turns)["reasoning_content"] = thoughts
        elif isinstance(item, ResultItem):
            named = {"role": "tool", "tool_call_id": item.call_id}
            turns.append({**named, "content": _content(item.output)})
        elif item.role == "assistant":
            _answer_turn(turns)["content"] += _listed(_content(item.content))
        else:
            role = "system" if item.role == "developer" else item.role
            add_turn(turns, {"role": role, "content": _content(item.content)})
    return turns


def _answer_turn(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer's turn that is being put together."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": []})
    return turns[-1]


def _listed(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [text_part(content)] if isinstance(content, str) else content


def _content(given: str | Sequence[Any]) -> str | list[dict[str, Any]]:
    return given if isinstance(given, str) else [_part(part) for part in given]


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    if isinstance(part, InputFile):
        source = part.file_url if part.file_data is None else part.file_data
        if source is None:
            said = "input_file needs file_data or file_url"
            raise ApiError(400, said, param="input")
        return {"type": DOCUMENT, DOCUMENT: {"url": source}}
    return text_part(part.refusal if isinstance(part, OutputRefusal) else part.text)


def _full_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}__{name}"


def _functions(body: InputRequest) -> dict[tuple[str | None, str], FunctionTool]:
    """Return a body's functions by namespace and name."""
    found: dict[tuple[str | None, str], FunctionTool] = {}
    for tool in body.tools or ():
        if isinstance(tool, NamespaceTools):
            found |= {(tool.name, one.name): one for one in tool.tools}
        elif isinstance(tool, FunctionTool):
            found[None, tool.name] = tool
    return found


def _tool(namespace: str | None, tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    function["name"] = _full_name(namespace, tool.name)
    return {"type": "function", "function": function}


def _choice(body: InputRequest) -> ToolChoice:
    given, one_only = body.tool_choice, body.parallel_tool_calls is False
    if isinstance(given, NamedFunction):
        return ToolChoice(named=given.name, one_only=one_only)
    if isinstance(given, AllowedFunctions):
        names = [tool.name for tool in given.tools]
        return ToolChoice(mode=given.mode, allowed=names, one_only=one_only)
    return ToolChoice(mode=given or "auto", one_only=one_only)


def _sampling(body: InputRequest) -> dict[str, Any]:
    found = {**asked_of(body, SAMPLING), "max_tokens": body.max_output_tokens}
    if "message.output_text.logprobs" in (body.include or ()):
        found["logprobs"] = body.top_logprobs or 0
    form = None if body.text is None else body.text.format
    if isinstance(form, FlatFormat):
        found["json_schema"] = form.schema_
    if isinstance(form, ObjectFormat):
        found["json_schema"] = {"type": "object"}
    return found


def _thinking(body: InputRequest, able: Abilities) -> dict[str, Any]:
    """Return the template's arguments; a model that does not think is asked for none."""
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort is None or not able.thinks:
        return {}
    asked = {"reasoning_effort": effort}
    if effort == "none":
        asked = {"enable_thinking": False}
    return asked if asked.keys() <= set(able.reads or ()) else {}


# Out -------------------------------------------------------------------------------------------------------------------


class ResponseExchange(Exchange):
    """One response; its output is put together as it comes."""

    prompt = "input"
    body: InputRequest

    def __init__(
        self, core: Core, entry: Entry, body: InputRequest, *, priority: int = 0
    ) -> None:
        super().__init__(core, entry, body, priority=priority)
        self.names = NAMES
        self.kept = Kept(entry.number, {})
        items = self._items()
        self.turns = [*self._before(), *turns_of(items)]
        self.kept.items = [_shown_item(item) for item in items]
        self._response: dict[str, Any] = {
            **_echo(body),
            "id": new_id("resp"),
            "created_at": self.created,
            "model": core.service.config.name,
            "status": "in_progress",
            "output": [],
        }
        self.kept.body = self._response
        # what the model calls a function -> its namespace and name
        self._names = {_full_name(*place): place for place in _functions(body)}
        self._num_events = 0
        # the item that is being put together, of a kind and, of calls, a number
        self._open: tuple[str, int] | None = None

    def _items(self) -> list[Any]:
        given = self.body.input
        if isinstance(given, str):
            return [MessageItem(type="message", role="user", content=given)]
        return [self._known(item) for item in given]

    def _known(self, item: Any) -> Any:
        """Return an item; of a reference, what it names."""
        if not isinstance(item, ReferenceItem):
            return item
        found = self.core.kept.item(item.id, self.entry.number)
        if found is None:
            said = f"there is no item {item.id[:100]!r} in what is kept"
            raise ApiError(400, said, param="input", code="item_not_found")
        kinds = {"message": MessageItem, "reasoning": ReasoningItem}
        kinds |= {"function_call": CallItem, "function_call_output": ResultItem}
        return kinds[found["type"]].model_validate(found)

    def _before(self) -> Sequence[Mapping[str, Any]]:
        """Return the turns of the response that this one goes on from."""
        before = self.body.previous_response_id
        if before is None:
            return []
        kept = self.core.kept.find(before, self.entry.number)
        if kept is None or kept.body["status"] not in ("completed", "incomplete"):
            said = f"there is no finished response {before[:100]!r}"
            raise ApiError(
                400,
                said,
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return kept.turns

    def ask(self, able: Abilities) -> Ask:
        body = self.body
        turns = list(self.turns)
        if body.instructions:
            head = {"role": "system", "content": body.instructions}
            turns = [head, *turns]
            if turns[1:] and turns[1]["role"] == "system":
                both = [*_listed(body.instructions), *_listed(turns[1]["content"])]
                turns[:2] = [{"role": "system", "content": both}]
        functions = _functions(body)
        talk = Talk(
            messages=turns,
            sampling=_sampling(body),
            sampling_source=body.sampling,
            tools=[_tool(place[0], one) for place, one in functions.items()],
            choice=_choice(body),
            template={**_thinking(body, able), **asked_of(body, THINKING)},
            others={"user": body.user or body.safety_identifier},
        )
        return ask_of(talk, self.core.service.config, able)

    def answer(self) -> dict[str, Any]:
        (choice,) = self.choices
        whole = Delta(
            "".join(choice.content),
            "".join(choice.reasoning),
            tuple(choice.calls.values()),
            tuple(choice.logprobs),
        )
        self.told(choice, whole)
        self.last()
        return self._response

    def told(self, choice: Choice, delta: Delta) -> bytes:
        events: list[bytes] = []
        if not choice.has_begun:
            choice.has_begun = True
            self._response["status"] = "in_progress"
            events.append(self._event("created", response=self._response))
            events.append(self._event("in_progress", response=self._response))
        if delta.reasoning:
            events += self._opened(("reasoning", 0), _thoughts())
            events += self._added("reasoning_text", delta.reasoning)
        if delta.content:
            events += self._opened(("message", 0), _message())
            logprobs = [self._step(step) for step in delta.logprobs]
            events += self._added("output_text", delta.content, logprobs)
        for call in delta.tool_calls:
            key = ("function_call", call["index"])
            events += self._opened(key, self._call(call) if "id" in call else None)
            events.append(self._argued(call["function"]["arguments"]))
        return b"".join(events)

    def last(self) -> bytes:
        (choice,) = self.choices
        events = self._closed()
        is_cut = choice.finish_reason == "length"
        self._response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
            if self._response["output"]:
                self._response["output"][-1]["status"] = "incomplete"
        self._response["completed_at"] = int(time.time())
        self._response["usage"] = self._usage()
        self._keep()
        kind = self._response["status"]
        return b"".join([*events, self._event(kind, response=self._response)])

    def failed(self, error: ApiError) -> bytes:
        is_ours = error.status_code >= 500
        code = "server_error" if is_ours else "invalid_prompt"
        self._response["status"] = "failed"
        self._response["error"] = {"code": code, "message": str(error.detail)}
        return self._event("failed", response=self._response)

    def _keep(self) -> None:
        if self.body.store is False:
            return
        items = [_ITEMS[item["type"]].model_validate(item) for item in self._output]
        self.kept.turns = [*self.turns, *turns_of(items)]
        self.core.kept.keep(self.kept)

    @property
    def _output(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._response["output"]
        return found

    # Events ----------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **said: Any) -> bytes:
        name = f"response.{kind}"
        head = {"type": name, "sequence_number": self._num_events}
        self._num_events += 1
        event = event_bytes({**head, **said}, name)
        if self.body.background:
            self.kept.tell(event)
        return event

    def _place(self) -> dict[str, Any]:
        index = len(self._output) - 1
        return {"output_index": index, "item_id": self._output[-1]["id"]}

    def _opened(self, key: tuple[str, int], item: dict[str, Any] | None) -> list[bytes]:
        """Return the events that end one item and begin another, if it is another."""
        if self._open == key or item is None:
            return []
        events = self._closed()
        self._open = key
        self._output.append(item)
        index = len(self._output) - 1
        begun = {**item, "content": []} if "content" in item else item
        events.append(self._event("output_item.added", output_index=index, item=begun))
        if "content" in item:
            place = {**self._place(), "content_index": 0}
            part = item["content"][0]
            events.append(self._event("content_part.added", **place, part=part))
        return events

    def _added(
        self, kind: str, words: str, logprobs: list[Any] | None = None
    ) -> list[bytes]:
        """Add words to the open item's text."""
        part = self._output[-1]["content"][0]
        part["text"] += words
        more: dict[str, Any] = {}
        if logprobs is not None:
            part["logprobs"] += logprobs
            more["logprobs"] = logprobs
        place = {**self._place(), "content_index": 0}
        return [self._event(f"{kind}.delta", **place, delta=words, **more)]

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        head = {"id": new_id("fc"), "type": "function_call", "status": "in_progress"}
        namespace, name = self._names.get(call["function"]["name"], (None, ""))
        place = {} if namespace is None else {"namespace": namespace}
        name = name or call["function"]["name"]
        return {**head, "call_id": call["id"], "name": name, **place, "arguments": ""}

    def _argued(self, words: str) -> bytes:
        self._output[-1]["arguments"] += words
        return self._event(
            "function_call_arguments.delta", **self._place(), delta=words
        )

    def _closed(self) -> list[bytes]:
        """Return the events that end the open item."""
        if self._open is None:
            return []
        self._open = None
        item, place = self._output[-1], self._place()
        item["status"] = "completed"
        events: list[bytes] = []
        if item["type"] == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            kind = "function_call_arguments.done"
            events.append(self._event(kind, **place, **said))
        else:
            part = item["content"][0]
            place["content_index"] = 0
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            events.append(self._event(f"{part['type']}.done", **place, **said))
            events.append(self._event("content_part.done", **place, part=part))
        index = place["output_index"]
        done = self._event("output_item.done", output_index=index, item=item)
        return [*events, done]

    def _step(self, step: TokenLogprobs) -> dict[str, Any]:
        tops = [self._token(token, logprob) for token, logprob in step.top]
        return {**self._token(step.token_id, step.logprob), "top_logprobs": tops}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self.dialect.token(token_id)
        return {"token": text, "bytes": raw, "logprob": finite(logprob)}

    def _usage(self) -> dict[str, Any]:
        counts = self.counts()
        cached = {"cached_tokens": counts.cached, "cache_write_tokens": 0}
        return {
            "input_tokens": counts.prompt,
            "input_tokens_details": cached,
            "output_tokens": counts.completion,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning},
            "total_tokens": counts.prompt + counts.completion,
        }

    # In the background -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the response beside its connection, with the place in the queue and the bytes of its request."""
        self._response["status"] = "queued"
        self.entry = self.entry.detached()
        self.kept.running = asyncio.create_task(self._make())
        self.kept.running.add_done_callback(self._made)
        self.core.kept.keep(self.kept)

    async def _make(self) -> None:
        try:
            async for _ in self.stream():
                pass
        except ApiError as error:  # before the first event
            self.failed(error)
        except Exception:
            logger.exception("response %s ended in its middle", self._response["id"])
            self.failed(ApiError(500, "the server failed; its log has more"))

    def _made(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._response["status"] = "cancelled"
        self.kept.running = None
        self.kept.wake()
        self.entry.said["background"] = self._response["status"]
        self.entry.close()


def _thoughts() -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": ""}
    head = {"id": new_id("rs"), "type": "reasoning", "status": "in_progress"}
    return {**head, "summary": [], "content": [part]}


def _message() -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
    head = {"id": new_id("msg"), "type": "message", "status": "in_progress"}
    return {**head, "role": "assistant", "content": [{**part, "logprobs": []}]}


_ITEMS: Mapping[str, type[Member]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
}


def _shown_item(item: Any) -> dict[str, Any]:
    found: dict[str, Any] = item.model_dump(exclude_none=True)
    if found["type"] == "message" and isinstance(found["content"], str):
        found["content"] = [{"type": "input_text", "text": found["content"]}]
    return {"id": new_id("msg"), "status": "completed", **found}


def _echo(body: InputRequest) -> dict[str, Any]:
    """Return a response's fields that say what was asked for."""
    said = body.model_dump(by_alias=True, exclude_none=True)
    form = {"format": {"type": "text"}, **said.get("text", {})}
    return {
        "object": "response",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **said.get("reasoning", {})},
        "store": body.store is not False,
        "background": bool(body.background),
        "temperature": body.temperature,
        "text": form,
        "tool_choice": said.get("tool_choice", "auto"),
        "tools": [_shown_tool(tool) for tool in said.get("tools", ())],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        return dict(tool)
    return {"parameters": None, "strict": False, **tool}


async def respond(core: Core, body: InputRequest, request: HttpRequest) -> Response:
    """Answer, whole, as a stream, or later."""
    core.check_model(body.model)
    if body.background and body.store is False:
        said = "background: a response that is not stored could not be found again"
        raise ApiError(400, said, param="background")
    priority = priority_of(request)
    exchange = ResponseExchange(core, entry_of(request), body, priority=priority)
    if not body.background:
        return await answer_whole_or_streamed(exchange, request)
    exchange.begin()
    if not body.stream:
        return JsonResponse(exchange.kept.body)
    return _following(exchange.kept, 0, exchange.seconds)


def _following(kept: Kept, begin: int, seconds: float) -> Response:
    return SentEvents(b"", kept.follow(begin), seconds=seconds + GRACE)


def _add_routes(app: FastAPI, core: Core) -> None:
    """Add the routes that show, end and delete what is kept."""

    def find(response_id: str, request: HttpRequest) -> Kept:
        kept = core.kept.find(response_id, entry_of(request).number)
        if kept is None:
            raise ApiError(404, f"there is no response {response_id[:100]!r}")
        return kept

    @app.get("/v1/responses/{response_id}")
    async def show(
        response_id: str,
        request: HttpRequest,
        stream: bool = False,
        starting_after: int = -1,
    ) -> Response:
        """Return a response that is kept, or its events from one on."""
        kept = find(response_id, request)
        if not stream:
            return JsonResponse(kept.body)
        if not kept.body["background"]:
            said = "only what was made in the background has events to follow"
            raise ApiError(400, said, param="stream")
        seconds = core.service.config.request_seconds
        return _following(kept, max(0, starting_after + 1), seconds)

    @app.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: HttpRequest) -> Response:
        """Forget a response, and end it if it is being made."""
        kept = find(response_id, request)
        if kept.running is not None:
            kept.running.cancel()
        core.kept.forget(kept)
        gone = {"id": response_id, "object": "response.deleted", "deleted": True}
        return JsonResponse(gone)

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, request: HttpRequest) -> Response:
        """End a response that is made in the background."""
        kept = find(response_id, request)
        if not kept.body["background"]:
            raise ApiError(400, "only what is made in the background can be cancelled")
        if kept.running is not None:
            kept.running.cancel()
            await asyncio.gather(kept.running, return_exceptions=True)
        return JsonResponse(kept.body)

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        response_id: str,
        request: HttpRequest,
        limit: int = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List what came in with a response."""
        items = list(find(response_id, request).items)
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        begin = ids.index(after) + 1 if after in ids else 0
        shown = items[begin : begin + max(1, min(100, limit))]
        ends = {"first_id": None, "last_id": None}
        if shown:
            ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]}
        has_more = begin + len(shown) < len(items)
        found = {"object": "list", "data": shown, **ends, "has_more": has_more}
        return JsonResponse(found)


RESPONSES = Door(
    path="/v1/responses",
    others=("/responses",),
    body=InputRequest,
    answer=respond,
    about="Answer in the form of OpenAI's Responses, and keep the answer for the next turn.",
    routes=_add_routes,
)
INPUT_TOKENS = Door(
    path="/v1/responses/input_tokens",
    others=("/responses/input_tokens",),
    body=InputRequest,
    answer=counted(ResponseExchange, {"object": "response.input_tokens"}),
    about="Count the tokens of what a response would be made from.",
)
