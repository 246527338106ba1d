"""``/v1/responses``: OpenAI's Responses, kept for the next turn, and made in the background if asked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

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
    listed,
    parsed_arguments,
    text_part,
)
from vlm_batch.server.door import Core, Door, entry_of
from vlm_batch.server.edge import Entry
from vlm_batch.server.errors import ApiError, JsonResponse
from vlm_batch.server.exchange import (
    Choice,
    Exchange,
    answer_whole_or_streamed,
    counted,
    priority_of,
)
from vlm_batch.server.fields import SAMPLING, THINKING
from vlm_batch.server.kept import Kept, new_id
from vlm_batch.server.openai import (
    ObjectFormat,
    TextFormat,
    ThoughtBody,
    asked_of,
    finite,
)
from vlm_batch.server.output import Output
from vlm_batch.server.pages import DOCUMENT
from vlm_batch.server.shown import add_routes, following
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


def _place(address: str | None, file_id: str | None) -> dict[str, str] | None:
    """Return where media are: at an address, or in a stored file."""
    if address:
        return {"url": address}
    return {"file_id": file_id} if file_id else None


class InputText(Member):
    nothing = _HINT
    type: Literal["input_text"]
    text: str

    def part(self) -> dict[str, Any]:
        return text_part(self.text)


class InputImage(Member):
    """A picture: a data URI, base64, a stored file, or, where the server allows it, an http(s) URL or file."""

    nothing = {**_HINT, "detail": ANY}
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None

    def part(self) -> dict[str, Any]:
        named = _place(self.image_url, self.file_id)
        if named is None:
            said = "input_image needs image_url or file_id"
            raise ApiError(400, said, param="input")
        return {"type": "image_url", "image_url": named}


class InputFile(Member):
    """A PDF, whose pages are pictures, or text."""

    nothing = {**_HINT, "detail": ANY}
    type: Literal["input_file"]
    file_id: str | None = None
    filename: str | None = None
    file_data: str | None = None
    file_url: str | None = None

    def part(self) -> dict[str, Any]:
        named = _place(self.file_data or self.file_url, self.file_id)
        if named is None:
            said = "input_file needs file_data, file_url or file_id"
            raise ApiError(400, said, param="input")
        return {"type": DOCUMENT, DOCUMENT: named}


class OutputText(Member):
    nothing = {"annotations": ANY, "logprobs": ANY, "parsed": ANY}
    type: Literal["output_text"]
    text: str

    def part(self) -> dict[str, Any]:
        return text_part(self.text)


class OutputRefusal(Member):
    type: Literal["refusal"]
    refusal: str

    def part(self) -> dict[str, Any]:
        return text_part(self.refusal)


Given: TypeAlias = Annotated[
    InputText | InputImage | InputFile, Field(discriminator="type")
]
Content: TypeAlias = Annotated[
    InputText | InputImage | InputFile | OutputText | OutputRefusal,
    Field(discriminator="type"),
]


def _said_in(given: str | list[Any]) -> str | list[dict[str, Any]]:
    """Return a content as ``Talk`` has it."""
    return given if isinstance(given, str) else [part.part() for part in given]


def _answer_turn(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer's turn that is being put together: what an answer is made of is one turn."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": []})
    return turns[-1]


class MessageItem(Member):
    nothing = {**_OWN, "phase": ANY}
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts[Content]

    def add_to(self, turns: list[dict[str, Any]]) -> None:
        said = _said_in(self.content)
        if self.role == "assistant":
            _answer_turn(turns)["content"] += listed(said)
            return
        role = "system" if self.role == "developer" else self.role
        add_turn(turns, {"role": role, "content": said})


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

    def add_to(self, turns: list[dict[str, Any]]) -> None:
        name = _full_name(self.namespace, self.name)
        function = {"name": name, "arguments": parsed_arguments(self.arguments)}
        call = {"id": self.call_id, "type": "function", "function": function}
        _answer_turn(turns).setdefault("tool_calls", []).append(call)


class ResultItem(Member):
    nothing = {**_OWN, "caller": ANY, "name": ANY, "namespace": ()}
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts[Given]

    def add_to(self, turns: list[dict[str, Any]]) -> None:
        said = _said_in(self.output)
        turns.append({"role": "tool", "tool_call_id": self.call_id, "content": said})


class ThoughtText(Wire):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class ReasoningItem(Member):
    nothing = {**_OWN, "encrypted_content": ANY}
    type: Literal["reasoning"]
    summary: Parts[ThoughtText] = Field(default_factory=list)
    content: Parts[ThoughtText] | None = None

    def add_to(self, turns: list[dict[str, Any]]) -> None:
        thoughts = "".join(part.text for part in self.content or self.summary)
        if thoughts:
            _answer_turn(turns)["reasoning_content"] = thoughts


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


# In --------------------------------------------------------------------------------------------------------------------

#: Fields in errors -> this door's.
NAMES: Mapping[str, str] = {
    "guided_grammar": "tools",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


def turns_of(items: Iterable[Any]) -> list[dict[str, Any]]:
    """Return items as turns."""
    turns: list[dict[str, Any]] = []
    for item in items:
        item.add_to(turns)
    return turns


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
    if body.reasoning is None or body.reasoning.effort is None:
        return {}
    effort = body.reasoning.effort
    if effort == "none":
        return able.readable({"enable_thinking": False})
    return able.readable({"reasoning_effort": effort})


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
        tell = self.kept.tell if body.background else None
        self._output = Output(self._response, tell)

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
        return _ITEMS[found["type"]].model_validate(found)

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
                both = [*listed(body.instructions), *listed(turns[1]["content"])]
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
        output = self._output
        events = b"" if choice.has_begun else output.begin()
        choice.has_begun = True
        if delta.reasoning:
            events += output.think(delta.reasoning)
        if delta.content or (delta.logprobs and output.is_message):
            logprobs = [self._step(step) for step in delta.logprobs]
            events += output.say(delta.content, logprobs)
        for call in delta.tool_calls:
            events += self._called(call)
        return events

    def _called(self, call: Mapping[str, Any]) -> bytes:
        named = self._named(call) if "id" in call else {}
        arguments = call["function"]["arguments"]
        return self._output.call(call["index"], named, arguments)

    def last(self) -> bytes:
        (choice,) = self.choices
        events = self._output.close()
        status = "completed"
        if choice.finish_reason == "length":
            status = "incomplete"
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
            for item in self._response["output"][-1:]:
                item["status"] = status
        self._response["completed_at"] = int(time.time())
        self._response["usage"] = self._usage()
        events += self._output.end(status)
        self._keep()
        return events

    def failed(self, error: ApiError) -> bytes:
        code = "invalid_prompt" if error.status_code < 500 else "server_error"
        self._response["error"] = {"code": code, "message": str(error.detail)}
        return self._output.end("failed")

    def _named(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's id, and its function's name as the client knows it."""
        said = call["function"]["name"]
        namespace, name = self._names.get(said, (None, said))
        found = {"call_id": call["id"], "name": name}
        return found if namespace is None else {**found, "namespace": namespace}

    def _keep(self) -> None:
        if self.body.store is False:
            return
        output = self._response["output"]
        items = [_ITEMS[item["type"]].model_validate(item) for item in output]
        self.kept.turns = [*self.turns, *turns_of(items)]
        self.core.kept.keep(self.kept)

    # Scores and counts ---------------------------------------------------------------------------------------------

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


_ITEMS: Mapping[str, type[Member]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
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
    return following(exchange.kept, 0, exchange.seconds)


RESPONSES = Door(
    path="/v1/responses",
    others=("/responses",),
    body=InputRequest,
    answer=respond,
    about="Answer in the form of OpenAI's Responses, and keep the answer for the next turn.",
    routes=add_routes,
)
INPUT_TOKENS = Door(
    path="/v1/responses/input_tokens",
    others=("/responses/input_tokens",),
    body=InputRequest,
    answer=counted(ResponseExchange, {"object": "response.input_tokens"}),
    about="Count the tokens of what a response would be made from.",
)
