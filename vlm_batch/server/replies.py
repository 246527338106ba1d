"""A body's requests, and their answers in OpenAI's form."""

from __future__ import annotations

import asyncio
import codecs
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vlm_batch._version import __version__
from vlm_batch.errors import OutOfMemory
from vlm_batch.handle import Handle
from vlm_batch.server.answers import AnswerReader, Delta, Dialect, UnreadableCall
from vlm_batch.server.edge import Entry
from vlm_batch.server.errors import ApiError, failure, json_bytes
from vlm_batch.server.openai import Ask
from vlm_batch.server.service import Service, Visit
from vlm_batch.types import Event, Result, TokenLogprobs

logger = logging.getLogger("vlm_batch.server")

#: Most events that wait for a slow reader.
MAX_PENDING = 64
DONE = b"data: [DONE]\n\n"
#: OpenAI's ``system_fingerprint``: seeds give the same answers while it stays the same.
FINGERPRINT = f"vlm-batch-{__version__}"
#: Error codes about the prompt.
OF_PROMPTS = (
    "context_length_exceeded",
    "InvalidPrompt",
    "InvalidImage",
    "InvalidVideo",
    "InvalidAudio",
)

#: Makes engine requests of a body, after admission.
Prepare: TypeAlias = Callable[[Dialect], Awaitable[Ask]]


@dataclass
class Choice:
    index: int
    reader: AnswerReader
    is_first_of_prompt: bool
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
    echo: Mapping[str, Any] | None = None  # the prompt that goes before the answer
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
    def finish_reason(self) -> str:
        assert self.result is not None
        return "tool_calls" if self.reader.has_calls else self.result.finish_reason


class Exchange(ABC):
    """One body's answers; ``entry`` is its line in the access log."""

    prefix: str
    kind: str
    chunk_kind: str
    #: The body's field with the prompt.
    prompt: str

    def __init__(
        self,
        service: Service,
        entry: Entry,
        prepare: Prepare,
        *,
        priority: int = 0,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Begin nothing yet.

        Args:
            service: What answers.
            entry: The request's line in the access log.
            prepare: Makes engine requests of the body, after admission.
            priority: Higher goes first among the client's requests.
            names: Fields in errors -> the ones that the client sent in their place.
        """
        self._service = service
        self._entry = entry
        self._prepare = prepare
        self._priority = priority
        self._names = names or {}
        self._created = int(time.time())
        self._dialect: Dialect | None = None
        self._choices: list[Choice] = []
        self._include_usage = self._has_running_usage = False
        self._returns_ids = self._tells_prompt = self._shows_special = False
        self._num_tops: int | None = None
        self._last: dict[int, float] = {}

    @property
    def seconds(self) -> float:
        return self._service.config.request_seconds

    # The wire ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def _part(self, choice: Choice, delta: Delta) -> dict[str, Any]: ...

    @abstractmethod
    def _opening(self, choice: Choice) -> dict[str, Any] | None: ...

    @abstractmethod
    def _ending(self, choice: Choice) -> dict[str, Any]: ...

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._deltas()) as deltas:
            async for choice, delta in deltas:
                choice.add(delta)
        choices = [self._whole(choice) for choice in self._choices]
        return {
            **self._head(self.kind),
            "choices": choices,
            "usage": self._usage(),
            **self._of_prompt(),
        }

    def _of_prompt(self) -> dict[str, Any]:
        return {}

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events.

        Raises ApiError before the first; later errors are events that end the stream.
        """
        has_begun, last = False, b""
        try:
            async with aclosing(self._deltas()) as deltas:
                async for choice, delta in deltas:
                    has_begun = True
                    if said := self._chunks(choice, delta):
                        yield said
            if self._include_usage:
                last = self._chunk([], self._usage())
        except ApiError as error:
            if not has_begun:
                raise
            self._entry.said["error"] = error.reason
            last = _event(error.body)
        except Exception:
            if not has_begun:
                raise
            logger.exception("request %s ended in its middle", self._entry.request_id)
            last = _event(
                ApiError(500, "the server failed in the middle of this answer").body
            )
        yield last + DONE

    def _chunks(self, choice: Choice, delta: Delta) -> bytes:
        """Join a delta's bytes, to save system calls."""
        opening = None if choice.has_begun else self._opening(choice)
        choice.has_begun = True
        parts = [] if opening is None else [opening]
        parts += (
            []
            if delta.is_empty
            else [{**self._part(choice, delta), **self._token_ids(delta.token_ids)}]
        )
        parts += [] if choice.result is None else [self._ending(choice)]
        usage = self._running_usage() if self._has_running_usage else None
        told = []
        for part in parts:
            of_prompt = self._prompt_ids(choice) if not choice.has_told_prompt else {}
            choice.has_told_prompt = True
            told.append(self._chunk([part], usage, of_prompt))
        return b"".join(told)

    def _token_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return an answer's tokens in vLLM's form, if they are asked for."""
        return {"token_ids": list(token_ids)} if self._returns_ids else {}

    def _prompt_ids(self, choice: Choice) -> dict[str, Any]:
        """Return the prompt's tokens in vLLM's form, if they are asked for."""
        return (
            {"prompt_token_ids": choice.prompt_token_ids} if self._returns_ids else {}
        )

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Return the prompt's log-probabilities in vLLM's form."""
        assert choice.result is not None and self._dialect is not None
        if choice.result.prompt_logprobs is None or not self._tells_prompt:
            return {}
        text = self._dialect.token
        found = []
        for one in choice.result.prompt_logprobs:
            told = (
                {} if one is None else {one.token_id: {"logprob": _finite(one.logprob)}}
            )
            for rank, (token, logprob) in enumerate(() if one is None else one.top, 1):
                told[token] = {"logprob": _finite(logprob), "rank": rank}
            entries = {
                str(token): {**entry, "decoded_token": text(token)[0]}
                for token, entry in told.items()
            }
            found.append(entries or None)
        return {"prompt_logprobs": found}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self._entry.request_id}",
            "object": kind,
            "created": self._created,
            "model": self._service.config.name,
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(
        self,
        choices: Sequence[Mapping[str, Any]],
        usage: Mapping[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> bytes:
        chunk = {**self._head(self.chunk_kind), "choices": choices, **(more or {})}
        if self._include_usage:
            chunk["usage"] = usage
        return _event(chunk)

    def _usage(self) -> dict[str, Any]:
        """Count tokens; a prompt counts once."""
        results = [
            (choice, choice.result)
            for choice in self._choices
            if choice.result is not None
        ]
        prompts = [
            result.usage for choice, result in results if choice.is_first_of_prompt
        ]
        prompt = sum(usage.prompt_tokens for usage in prompts)
        completion = sum(result.usage.completion_tokens for _, result in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(usage.cached_tokens for usage in prompts),
                "image_tokens": sum(usage.image_tokens for usage in prompts),
            },
            "completion_tokens_details": {
                "reasoning_tokens": sum(
                    choice.reader.reasoning_tokens for choice, _ in results
                )
            },
        }

    def _running_usage(self) -> dict[str, int]:
        """Count tokens so far, as vLLM does."""
        prompt = sum(
            choice.prompt_tokens
            for choice in self._choices
            if choice.is_first_of_prompt
        )
        completion = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    # The engine --------------------------------------------------------------------------------------------------------

    async def _deltas(self) -> AsyncGenerator[tuple[Choice, Delta]]:
        """Yield events' choices and deltas. Raises ApiError once a choice fails."""
        async with (
            self._service.visit(self._entry.visit) as visit,
            self._naming_the_prompt(),
        ):
            assert visit.loaded is not None
            ask = await self._prepare(visit.loaded.dialect)
            self._begin(ask, visit.loaded.dialect)
            # A body's priority is advice within its client: without the right to the header it may only wait longer.
            advice = ask.priority if self._entry.has_priority else min(0, ask.priority)
            priority = self._priority or advice
            asked = ask.requests(
                request_id=visit.request_id,
                priority=priority,
                client=self._entry.number,
            )
            handles = await self._service.submit(visit, asked)
            async with aclosing(_merged(handles)) as merged:
                async for index, event in merged:
                    choice = self._choices[index * ask.params.n + event.index]
                    delta = self._read(choice, event, visit)
                    if not delta.is_empty or choice.result is not None:
                        yield choice, delta
        self._note(ask)

    @asynccontextmanager
    async def _naming_the_prompt(self) -> AsyncGenerator[None]:
        """Set ``param`` of prompt errors."""
        try:
            yield
        except ApiError as error:
            if error.code in OF_PROMPTS and error.param is None:
                error.param = self.prompt
            error.rename(self._names)
            raise

    def _begin(self, ask: Ask, dialect: Dialect) -> None:
        self._dialect = dialect
        self._include_usage = ask.include_usage
        self._has_running_usage = ask.has_running_usage
        self._returns_ids, self._tells_prompt = ask.returns_ids, ask.tells_prompt
        self._shows_special = ask.params.skip_special_tokens is False
        self._num_tops = ask.params.logprobs
        is_open = bool(ask.is_chat) and dialect.opens_thinking(ask.template)
        for index in range(len(ask.prompts) * ask.params.n):
            reader = AnswerReader()
            if ask.is_chat:
                reader = dialect.reader(
                    tools=ask.tools, thinking=is_open, is_forced=ask.is_forced
                )
            asked = ask.prompts[index // ask.params.n] if ask.echoes else None
            self._choices.append(
                Choice(
                    index,
                    reader,
                    is_first_of_prompt=index % ask.params.n == 0,
                    echo=asked,
                )
            )

    def _read(self, choice: Choice, event: Event, visit: Visit) -> Delta:
        if event.token is not None:
            self._note_gap(choice.index)
        try:
            delta = choice.reader.feed(event)
            result = event.answer or event.result
            choice.prompt_tokens = event.prompt_tokens or choice.prompt_tokens
            choice.prompt_token_ids = event.prompt_token_ids or choice.prompt_token_ids
            if event.token is not None:
                choice.num_tokens += 1
                delta += Delta(token_ids=(event.token,) if self._returns_ids else ())
            if result is not None:
                choice.prompt_tokens = result.usage.prompt_tokens
                choice.prompt_token_ids = result.prompt_token_ids
                self._service.ended(result, shares_prompt=not choice.is_first_of_prompt)
                self._check(result, visit)
                choice.result = result
                delta += choice.reader.finish()
        except UnreadableCall as error:
            raise ApiError(
                500, f"the model's tool call cannot be read: {error}"
            ) from error
        return delta

    def _check(self, result: Result, visit: Visit) -> None:
        if result.finish_reason == "error":
            answer = failure(result)
            # what is the client's fault is in its line of the access log
            if answer.status_code >= 500:
                trace = (
                    None
                    if isinstance(result.exception, OutOfMemory)
                    else result.exception
                )
                logger.error(
                    "request %s failed: %s",
                    self._entry.request_id,
                    result.error,
                    exc_info=trace,
                )
            raise answer
        if result.finish_reason == "cancelled":
            if visit.is_expired:
                said = f"the answer was not done within {self.seconds:.0f} s; ask for fewer tokens (max_tokens)"
                raise ApiError(504, said)
            raise ApiError(
                503,
                "the server ended this request: it is shutting down",
                headers={"Retry-After": "5"},
            )

    def _note_gap(self, index: int) -> None:
        now = time.perf_counter()
        before = self._last.get(index)
        if before is not None:
            self._service.metrics.gap(now - before)
        else:
            self._entry.said.setdefault("ttft", round(now - self._entry.began, 6))
        self._last[index] = now

    def _note(self, ask: Ask) -> None:
        usage = self._usage()
        firsts = [
            choice.result
            for choice in self._choices
            if choice.result is not None and choice.is_first_of_prompt
        ]
        self._entry.said |= {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "pictures": sum(len(result.image_sizes) for result in firsts),
            "finish_reasons": [choice.finish_reason for choice in self._choices],
        }
        if ask.user is not None:
            self._entry.said["user"] = ask.user[:128]


class ChatExchange(Exchange):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl"
    prompt = "messages"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

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
            message["tool_calls"] = [
                {name: call[name] for name in ("id", "type", "function")}
                for call in calls
            ]
        told = {
            **self._logprobs(choice.logprobs),
            **_end(choice),
            **self._token_ids(choice.token_ids),
        }
        return {"index": choice.index, "message": message, **told}

    def _of_prompt(self) -> dict[str, Any]:
        return {
            **self._prompt_logprobs(self._choices[0]),
            **self._prompt_ids(self._choices[0]),
        }

    def _opening(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "finish_reason": None,
        }

    def _part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        said: dict[str, Any] = {}
        if delta.content or not (delta.reasoning or delta.tool_calls):
            said["content"] = delta.content
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            said["tool_calls"] = list(delta.tool_calls)
        return {
            "index": choice.index,
            "delta": said,
            "finish_reason": None,
            **self._logprobs(delta.logprobs),
        }

    def _ending(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "delta": {}, "logprobs": None, **_end(choice)}

    def _logprobs(self, steps: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if not steps:
            return {"logprobs": None}
        content = [
            {
                **self._token(step.token_id, step.logprob),
                "top_logprobs": [
                    self._token(token, logprob) for token, logprob in step.top
                ],
            }
            for step in steps
        ]
        return {"logprobs": {"content": content, "refusal": None}}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        assert self._dialect is not None
        text, raw = self._dialect.token(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": raw}


class TextExchange(Exchange):
    """``/v1/completions``."""

    prefix = "cmpl"
    prompt = "prompt"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.content)
        if choice.echo is not None:
            text = self._echo(choice) + text
        logprobs = self._logprobs(
            choice, [*self._scores_of_echo(choice), *choice.logprobs]
        )
        ids = {**self._prompt_ids(choice), **self._token_ids(choice.token_ids)}
        return {
            "index": choice.index,
            "text": text,
            **logprobs,
            **self._prompt_logprobs(choice),
            **ids,
            **_end(choice),
        }

    def _echo(self, choice: Choice) -> str:
        """Return the prompt's text, as it came or as its tokens say."""
        assert choice.echo is not None and self._dialect is not None
        if "prompt" in choice.echo:
            return str(choice.echo["prompt"])
        return self._dialect.text_of(
            choice.echo["token_ids"], skip_special_tokens=not self._shows_special
        )

    def _scores_of_echo(self, choice: Choice) -> list[TokenLogprobs]:
        """Return the echoed prompt's log-probabilities; the first token has none, which is not a number here."""
        result = choice.result
        if (
            choice.echo is None
            or result is None
            or self._num_tops is None
            or result.prompt_logprobs is None
        ):
            return []
        ids = result.prompt_token_ids or ()
        return [
            TokenLogprobs(token, math.nan, ()) if score is None else score
            for token, score in zip(ids, result.prompt_logprobs, strict=True)
        ]

    def _opening(self, choice: Choice) -> None:
        return None

    def _part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs(choice, delta.logprobs)
        return {
            "index": choice.index,
            "text": delta.content,
            "finish_reason": None,
            **logprobs,
        }

    def _ending(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "text": "", "logprobs": None, **_end(choice)}

    def _logprobs(
        self, choice: Choice, steps: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        if not steps:
            return {"logprobs": None}
        assert self._dialect is not None
        text, offsets, tops = self._dialect.token, [], []
        for step in steps:
            offsets.append(choice.length)
            if self._is_shown(choice, step.token_id):
                choice.length += len(
                    choice.characters.decode(bytes(text(step.token_id)[1]))
                )
            told = {
                text(token)[0]: _finite(logprob)
                for token, logprob in step.top[: self._num_tops]
            }
            is_scored = not math.isnan(step.logprob)
            # Up to one more than was asked for.
            tops.append(
                {**told, text(step.token_id)[0]: _finite(step.logprob)}
                if is_scored
                else None
            )
        found = {
            "tokens": [text(step.token_id)[0] for step in steps],
            "token_logprobs": [
                None if math.isnan(step.logprob) else _finite(step.logprob)
                for step in steps
            ],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
        return {"logprobs": found}

    def _is_shown(self, choice: Choice, token_id: int) -> bool:
        """Return whether a token is in the text: an echoed one as the prompt was written."""
        assert self._dialect is not None
        if not self._dialect.is_hidden(token_id):
            return True
        if (
            choice.echo is not None
            and "prompt" in choice.echo
            and choice.length < len(choice.echo["prompt"])
        ):
            written: str = choice.echo["prompt"]
            return written.startswith(self._dialect.token(token_id)[0], choice.length)
        return self._shows_special


def _end(choice: Choice) -> dict[str, Any]:
    assert choice.result is not None
    return {
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.result.stop_reason,
    }


def _finite(logprob: float) -> float:
    """Bound a log-probability as OpenAI: -9999 for an impossible token."""
    return max(logprob, -9999.0)


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


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
