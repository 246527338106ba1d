"""``/v1/responses``: OpenAI's Responses, kept for the next turn, and made in the background if asked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vlm_batch.server.answers import Delta
from vlm_batch.server.asking import Abilities, Ask, Talk, ToolChoice, ask_of
from vlm_batch.server.choices import finite
from vlm_batch.server.conversation import Conversation, turns_of
from vlm_batch.server.door import Core, Door, entry_of
from vlm_batch.server.doors.responses_wire import (
    ITEMS,
    AllowedFunctions,
    FlatFormat,
    FunctionTool,
    InputRequest,
    MessageItem,
    NamedFunction,
    NamespaceTools,
    ReferenceItem,
    full_name,
)
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
from vlm_batch.server.kept import Kept
from vlm_batch.server.output import Output
from vlm_batch.server.private import new_id
from vlm_batch.server.sampled import ObjectFormat
from vlm_batch.server.sampling import asked_of
from vlm_batch.server.shown import add_routes, following, make_beside
from vlm_batch.types import TokenLogprobs

# In --------------------------------------------------------------------------------------------------------------------

#: Fields in errors -> this door's.
NAMES: Mapping[str, str] = {
    "guided_grammar": "tools",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


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
    function["name"] = full_name(namespace, tool.name)
    return {"type": "function", "function": function}


def _choice(body: InputRequest) -> ToolChoice:
    given, one_only = body.tool_choice, body.parallel_tool_calls is False
    if isinstance(given, NamedFunction):
        return ToolChoice(named=given.name, one_only=True)
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
        self,
        core: Core,
        entry: Entry,
        body: InputRequest,
        *,
        priority: int = 0,
        before: Sequence[Mapping[str, Any]] = (),
        items: Sequence[Any] = (),
    ) -> None:
        """Begin a response.

        Args:
            before: The turns that it goes on from.
            items: What came in, with that which references name.
        """
        super().__init__(core, entry, body, priority=priority)
        self.names = NAMES
        self.kept = Kept(entry.owner, {})
        self.turns = [*before, *turns_of(items)]
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
        self._names = {full_name(*place): place for place in _functions(body)}
        tell = self.kept.tell if body.background else None
        self._output = Output(self._response, tell, self._step, self._named)

    @classmethod
    async def made(
        cls, core: Core, entry: Entry, body: InputRequest, *, priority: int = 0
    ) -> ResponseExchange:
        before = await _before(core, entry, body.previous_response_id)
        items = await _items(core, entry, body.input)
        return cls(core, entry, body, priority=priority, before=before, items=items)

    def ask(self, able: Abilities) -> Ask:
        body = self.body
        asked = Conversation()
        if body.instructions:
            asked.say("system", body.instructions)
        asked.go_on(self.turns)
        functions = _functions(body)
        talk = Talk(
            messages=asked.turns,
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
        self._output.is_heard = False
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
        begun = b"" if choice.has_begun else self._output.begin()
        choice.has_begun = True
        return begun + self._output.add(delta)

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
        if self.body.store is False or not self.core.keeps:
            return
        self.kept.turns = self.turns
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


async def _before(
    core: Core, entry: Entry, before: str | None
) -> Sequence[Mapping[str, Any]]:
    """Return the turns of the response that another goes on from. Raises ApiError."""
    if before is None:
        return ()
    kept = await core.kept.find(before, entry.owner)
    if kept is not None and kept.has_answer:
        output = kept.body["output"]
        items = [ITEMS[item["type"]].model_validate(item) for item in output]
        return [*kept.turns, *turns_of(items)]
    said = f"there is no finished response {before[:100]!r}"
    place, code = "previous_response_id", "previous_response_not_found"
    raise ApiError(400, said, param=place, code=code)


async def _items(core: Core, entry: Entry, given: str | list[Any]) -> list[Any]:
    """Return what came in as items; in place of references, what they name. Raises ApiError."""
    if isinstance(given, str):
        return [MessageItem(type="message", role="user", content=given)]
    items = []
    for item in given:
        if isinstance(item, ReferenceItem):
            found = await core.kept.item(item.id, entry.owner)
            if found is None:
                said = f"there is no item {item.id[:100]!r} in what is kept"
                raise ApiError(400, said, param="input", code="item_not_found")
            item = ITEMS[found["type"]].model_validate(found)
        items.append(item)
    return items


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
    entry = entry_of(request)
    exchange = await ResponseExchange.made(core, entry, body, priority=priority)
    if not body.background:
        return await answer_whole_or_streamed(exchange, request)
    make_beside(exchange, exchange.kept)
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
