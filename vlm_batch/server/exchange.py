"""One body and its answers: what is the same at every door."""

from __future__ import annotations

import asyncio
import codecs
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vlm_batch.errors import OutOfMemory
from vlm_batch.handle import Handle
from vlm_batch.server.answers import AnswerReader, Delta, Dialect, UnreadableCall
from vlm_batch.server.asking import MAX_PRIORITY, Abilities, Ask
from vlm_batch.server.door import Answer, Core, entry_of
from vlm_batch.server.edge import Entry
from vlm_batch.server.errors import ApiError, JsonResponse, failure, json_bytes
from vlm_batch.server.service import Visit
from vlm_batch.server.streams import SentEvents, unless_left
from vlm_batch.server.wire import Body
from vlm_batch.types import Event, Result, TokenLogprobs

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("vlm_batch.server")

#: Most events that wait for a slow reader.
MAX_PENDING = 64
#: Seconds after a request's own time limit at which its stream is cut.
GRACE = 10.0
#: Error codes about the prompt.
OF_PROMPTS = frozenset({
    "context_length_exceeded", "InvalidPrompt", "InvalidImage", "InvalidVideo", "InvalidAudio",
})  # fmt: skip


@dataclass
class Choice:
    """One answer so far."""

    index: int
    reader: AnswerReader
    is_first_of_prompt: bool
    asked: Mapping[str, Any]  # the prompt that it answers
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    length: int = 0  # characters that the tokens given out have, for text offsets
    characters: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    has_begun: bool = False
    has_told_prompt: bool = False
    prompt_tokens: int = 0
    prompt_token_ids: tuple[int, ...] | None = None
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    result: Result | None = None

    def add(self, delta: Delta) -> None:
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        self.logprobs.extend(delta.logprobs)
        self.token_ids.extend(delta.token_ids)
        for call in delta.tool_calls:
            known = self.calls.get(call["index"])
            if known is None:
                self.calls[call["index"]] = {**call, "function": dict(call["function"])}
            else:
                known["function"]["arguments"] += call["function"]["arguments"]

    @property
    def ended(self) -> Result:
        """The result of an answer that has one."""
        assert self.result is not None
        return self.result

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.reader.has_calls else self.ended.finish_reason


@dataclass
class Counts:
    """Tokens of a body's answers, and its pictures; a prompt counts once."""

    prompt: int = 0
    cached: int = 0
    images: int = 0
    pictures: int = 0
    completion: int = 0
    reasoning: int = 0


class Exchange(ABC):
    """One body's answers. A door says how a body becomes an ``Ask``, and how answers look.

    Attributes:
        prompt: The body's field with the prompt.
        names: Fields in errors -> the ones that this body has in their place.
        tells_tokens: Pieces of answers have their tokens' ids.
        choices: The answers, in order.
    """

    prompt: ClassVar[str]

    def __init__(
        self, core: Core, entry: Entry, body: Any, *, priority: int = 0
    ) -> None:
        """Begin nothing yet.

        Args:
            core: What doors share.
            entry: The request's line in the access log, with its place in the queue.
            body: What came in, of the door's own type.
            priority: Higher goes first among the client's requests.
        """
        self.core = core
        self.entry = entry
        self.body = body
        self.created = int(time.time())
        self.names: Mapping[str, str] = {}
        self.tells_tokens = False
        self.choices: list[Choice] = []
        self._priority = priority
        self._dialect: Dialect | None = None
        self._last_token_at: dict[int, float] = {}

    @classmethod
    async def made(
        cls, core: Core, entry: Entry, body: Any, *, priority: int = 0
    ) -> Self:
        """Return an exchange that has at hand what its body goes on from. Raises ApiError."""
        return cls(core, entry, body, priority=priority)

    @property
    def seconds(self) -> float:
        """The time limit of the answers."""
        return self.core.service.config.request_seconds

    @property
    def dialect(self) -> Dialect:
        """The checkpoint's dialect, once the engine has been asked."""
        assert self._dialect is not None
        return self._dialect

    # The door's ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def ask(self, able: Abilities) -> Ask:
        """Return what the body asks for; large bodies are read on a thread. Raises ApiError."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the answers, whole."""

    @abstractmethod
    def told(self, choice: Choice, delta: Delta) -> bytes:
        """Return events for a piece of an answer, or nothing. After the last piece ``choice.result`` is there."""

    @abstractmethod
    def last(self) -> bytes:
        """Return the events behind all answers."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the events of an error in the middle of a stream."""

    # Answers ---------------------------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._deltas()) as deltas:
            async for choice, delta in deltas:
                choice.add(delta)
        return self.answer()

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events.

        Raises ApiError before the first; later errors are events that end the stream.
        """
        has_begun = False
        try:
            async with aclosing(self._deltas()) as deltas:
                async for choice, delta in deltas:
                    has_begun = True
                    if said := self.told(choice, delta):
                        yield said
            last = self.last()
        except Exception as error:
            if not has_begun:
                raise
            last = self.failed(self._said_in_stream(error))
        yield last

    def _said_in_stream(self, error: Exception) -> ApiError:
        """Log an error after the first event; return what the client hears of it."""
        if isinstance(error, ApiError):
            self.entry.said["error"] = error.reason
            return error
        name = self.entry.request_id
        logger.error("request %s ended in its middle", name, exc_info=error)
        return ApiError(500, "the server failed in the middle of this answer")

    def counts(self) -> Counts:
        """Count tokens of the answers, which have ended."""
        counts = Counts()
        for choice in self.choices:
            usage = choice.ended.usage
            counts.completion += usage.completion_tokens
            counts.reasoning += choice.reader.reasoning_tokens
            if choice.is_first_of_prompt:
                counts.prompt += usage.prompt_tokens
                counts.cached += usage.cached_tokens
                counts.images += usage.image_tokens
                counts.pictures += len(choice.ended.image_sizes)
        return counts

    async def num_prompt_tokens(self) -> int:
        """Count the prompt's tokens; nothing is answered."""
        service, number = self.core.service, self.entry.number
        async with service.visit(self.entry.visit) as visit, self.renaming():
            ask = await self.asked(visit)
            name = visit.request_id
            (one,) = ask.requests(request_id=name, priority=0, client=number)
            return await service.count_tokens(visit, one)

    # The engine ------------------------------------------------------------------------------------------------------

    async def asked(self, visit: Visit) -> Ask:
        """Return what the body asks for, with its media read."""
        assert visit.loaded is not None
        self._dialect = visit.loaded.dialect
        core, entry = self.core, self.entry
        ask = await core.bodies.read(entry, self.ask, self._dialect.abilities)
        if not ask.is_chat:
            return ask
        (prompt,) = ask.prompts
        messages = await core.media.read(
            prompt["messages"],
            entry.hold,
            client=entry.number,
            stored=partial(core.stored, entry.owner),
        )
        return replace(ask, prompts=({"messages": messages},))

    @asynccontextmanager
    async def renaming(self) -> AsyncGenerator[None]:
        """Let errors name the fields that the client sent."""
        try:
            yield
        except ApiError as error:
            is_of_prompt = error.param is None and error.code in OF_PROMPTS
            if is_of_prompt or error.param == "messages":
                error.param = self.prompt
            error.rename(self.names)
            raise

    async def _deltas(self) -> AsyncGenerator[tuple[Choice, Delta]]:
        """Yield events' choices and deltas. Raises ApiError once a choice fails."""
        service = self.core.service
        async with service.visit(self.entry.visit) as visit, self.renaming():
            ask = await self.asked(visit)
            self._begin(ask)
            requests = ask.requests(
                request_id=visit.request_id,
                priority=self._priority_of(ask),
                client=self.entry.number,
            )
            handles = await service.submit(visit, requests)
            if visit.is_background:
                # nobody reads along: one turn of the event loop a row, not one a token
                await asyncio.gather(*handles)
            async with aclosing(_merged(handles)) as merged:
                async for index, event in merged:
                    choice = self.choices[index * ask.params.n + event.index]
                    delta = self._read(choice, event, visit)
                    if not delta.is_empty or choice.result is not None:
                        yield choice, delta
        self._note(ask)

    def _priority_of(self, ask: Ask) -> int:
        """A body's priority is advice within its client: without the right to the header it may only wait longer."""
        if self._priority or self.entry.has_priority:
            return self._priority or ask.priority
        return min(0, ask.priority)

    def _begin(self, ask: Ask) -> None:
        opens = ask.is_chat and self.dialect.opens_thinking(ask.template)
        for index in range(len(ask.prompts) * ask.params.n):
            reader = AnswerReader()
            if ask.is_chat:
                reader = self.dialect.reader(
                    tools=ask.tools, thinking=opens, is_forced=ask.is_forced
                )
            at, of_prompt = divmod(index, ask.params.n)
            self.choices.append(
                Choice(index, reader, of_prompt == 0, asked=ask.prompts[at])
            )

    def _read(self, choice: Choice, event: Event, visit: Visit) -> Delta:
        choice.prompt_tokens = event.prompt_tokens or choice.prompt_tokens
        choice.prompt_token_ids = event.prompt_token_ids or choice.prompt_token_ids
        result = event.answer or event.result
        try:
            delta = choice.reader.feed(event)
            if event.token is not None:
                self._note_token(choice, visit)
            if event.token is not None and self.tells_tokens:
                delta += Delta(token_ids=(event.token,))
            if result is not None:
                self._end(choice, result, visit)
                delta += choice.reader.finish()
        except UnreadableCall as error:
            said = f"the model's tool call cannot be read: {error}"
            raise ApiError(500, said) from error
        return delta

    def _end(self, choice: Choice, result: Result, visit: Visit) -> None:
        choice.prompt_tokens = result.usage.prompt_tokens
        choice.prompt_token_ids = result.prompt_token_ids
        shares = not choice.is_first_of_prompt
        self.core.service.ended(result, shares_prompt=shares)
        self._check(result, visit)
        choice.result = result
        if visit.is_background and choice.num_tokens:
            self.entry.said.setdefault("ttft", round(result.timings.ttft, 6))

    def _check(self, result: Result, visit: Visit) -> None:
        if result.finish_reason == "error":
            answer = failure(result)
            # what is the client's fault is in its line of the access log
            if answer.status_code >= 500:
                cause = result.exception
                logger.error(
                    "request %s failed: %s",
                    self.entry.request_id,
                    result.error,
                    exc_info=None if isinstance(cause, OutOfMemory) else cause,
                )
            raise answer
        if result.finish_reason != "cancelled":
            return
        if visit.is_expired:
            within = f"the answer was not done within {self.seconds:.0f} s"
            raise ApiError(504, f"{within}; ask for fewer tokens (max_tokens)")
        said = "the server ended this request: it is shutting down"
        raise ApiError(503, said, headers={"Retry-After": "5"})

    def _note_token(self, choice: Choice, visit: Visit) -> None:
        choice.num_tokens += 1
        if visit.is_background:
            return
        now = time.perf_counter()
        before = self._last_token_at.get(choice.index)
        if before is not None:
            self.core.service.metrics.gap(now - before)
        else:
            self.entry.said.setdefault("ttft", round(now - self.entry.began, 6))
        self._last_token_at[choice.index] = now

    def _note(self, ask: Ask) -> None:
        counts = self.counts()
        self.entry.said |= {
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.completion,
            "cached_tokens": counts.cached,
            "pictures": counts.pictures,
            "finish_reasons": [choice.finish_reason for choice in self.choices],
        }
        if ask.user is not None:
            self.entry.said["user"] = ask.user[:128]


def through(exchange: type[Exchange]) -> Answer:
    """Return a door's way to answer: whole, or as a stream whose errors before its first event have a status."""

    async def answer(core: Core, body: Body, request: HttpRequest) -> Response:
        core.check_model(body.model)
        entry = entry_of(request)
        priority = priority_of(request)
        one = await exchange.made(core, entry, body, priority=priority)
        return await answer_whole_or_streamed(one, request)

    return answer


def counted(exchange: type[Exchange], head: Mapping[str, Any]) -> Answer:
    """Return a door's way to answer with the number of a prompt's tokens, beside what is in ``head``."""

    async def answer(core: Core, body: Body, request: HttpRequest) -> Response:
        core.check_model(body.model)
        one = await exchange.made(core, entry_of(request), body)
        number = await unless_left(request, one.num_prompt_tokens())
        return JsonResponse({**head, "input_tokens": number})

    return answer


async def answer_whole_or_streamed(
    exchange: Exchange, request: HttpRequest
) -> Response:
    """Return an exchange's answer, or its stream; both end when the client leaves."""
    if not exchange.body.stream:
        return JsonResponse(await unless_left(request, exchange.whole()))
    chunks = exchange.stream()
    first = await unless_left(request, anext(chunks))  # type: ignore[arg-type]
    exchange.entry.sent = b""
    return SentEvents(first, chunks, seconds=exchange.seconds + GRACE)


def priority_of(request: HttpRequest) -> int:
    """Return ``X-Priority``. Raises ApiError if it is none, or not this key's to say."""
    given = request.headers.get("x-priority", "0")
    if not re.fullmatch(r"-?[0-9]{1,3}", given) or abs(int(given)) > MAX_PRIORITY:
        bounds = f"-{MAX_PRIORITY}..{MAX_PRIORITY}"
        said = f"X-Priority must be an integer in {bounds}; higher goes first"
        raise ApiError(400, said)
    if int(given) and not entry_of(request).has_priority:
        marked = "keys that are marked for it (vlm-batch serve --keys)"
        raise ApiError(403, f"X-Priority is taken with {marked}")
    return int(given)


def event_bytes(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json_bytes(value) + b"\n\n"


async def _merged(handles: Sequence[Handle]) -> AsyncGenerator[tuple[int, Event]]:
    """Yield handles' events, with the handle's index."""
    if len(handles) == 1:
        async for event in handles[0].events():
            yield 0, event
        return
    pending: asyncio.Queue[tuple[int, Event]] = asyncio.Queue(MAX_PENDING)

    async def pump(index: int, handle: Handle) -> None:
        async for event in handle.events():
            await pending.put((index, event))

    tasks = [
        asyncio.create_task(pump(index, handle)) for index, handle in enumerate(handles)
    ]
    try:
        left = len(handles)
        while left:
            index, event = await pending.get()
            yield index, event
            left -= event.result is not None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
