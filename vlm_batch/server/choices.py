"""Answers of OpenAI's two kinds of completions: choices and chunks as they go out."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_batch._version import __version__
from vlm_batch.server.answers import Delta
from vlm_batch.server.door import Core
from vlm_batch.server.edge import Entry
from vlm_batch.server.errors import ApiError
from vlm_batch.server.exchange import Choice, Exchange, event_bytes
from vlm_batch.server.sampled import Common, StreamOptions
from vlm_batch.server.sampling import names_of
from vlm_batch.types import TokenLogprobs

DONE = b"data: [DONE]\n\n"
#: OpenAI's ``system_fingerprint``: seeds give the same answers while it stays the same.
FINGERPRINT = f"vlm-batch-{__version__}"


class Completions(Exchange):
    """A body's answers as OpenAI's choices, whole or in chunks."""

    prefix: str
    kind: str
    chunk_kind: str
    body: Common

    def __init__(
        self, core: Core, entry: Entry, body: Common, *, priority: int = 0
    ) -> None:
        super().__init__(core, entry, body, priority=priority)
        self.names = names_of(body)
        self.tells_tokens = bool(body.return_token_ids)
        options = body.stream_options or StreamOptions()
        self._includes_usage = bool(options.include_usage)
        self._has_running_usage = bool(options.continuous_usage_stats)

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]:
        """Return an answer that has ended."""

    @abstractmethod
    def _opening(self, choice: Choice) -> dict[str, Any] | None:
        """Return what goes before an answer's first piece."""

    @abstractmethod
    def _part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """Return a piece of an answer."""

    @abstractmethod
    def _ending(self, choice: Choice) -> dict[str, Any]:
        """Return what goes behind an answer's last piece."""

    def answer(self) -> dict[str, Any]:
        choices = [self._whole(choice) for choice in self.choices]
        usage = self._usage()
        return {**self._head(self.kind), "choices": choices, "usage": usage}

    def told(self, choice: Choice, delta: Delta) -> bytes:
        """Join a delta's bytes, to save system calls."""
        told = [] if choice.has_begun else self._openings(choice)
        usage = self._running_usage()
        if not delta.is_empty:
            ids = self.token_ids(delta.token_ids)
            part = {**self._part(choice, delta), **ids}
            told.append(self._told(choice, part, usage))
        if choice.result is not None:
            told.append(self._told(choice, self._ending(choice), usage))
        return b"".join(told)

    def _openings(self, choice: Choice) -> list[bytes]:
        """Open all answers of a choice's prompt, in order, before the first piece of any.

        openai's helpers append an answer that they do not know, whatever its index.
        """
        n = self.body.n or 1
        first = choice.index - choice.index % n
        answers = self.choices[first : first + n]
        for one in answers:
            one.has_begun = True
            # they share the prompt, and only one of them may have had an event
            one.prompt_tokens = choice.prompt_tokens
            one.prompt_token_ids = choice.prompt_token_ids
        usage = self._running_usage()
        told = []
        for one in answers:
            opening = self._opening(one)
            if opening is not None:
                told.append(self._told(one, opening, usage))
        return told

    def last(self) -> bytes:
        if not self._includes_usage:
            return DONE
        return self._chunk([], self._usage(), {}) + DONE

    def failed(self, error: ApiError) -> bytes:
        return event_bytes(error.body) + DONE

    def _told(
        self, choice: Choice, part: Mapping[str, Any], usage: Mapping[str, Any] | None
    ) -> bytes:
        of_prompt = {} if choice.has_told_prompt else self.prompt_ids(choice)
        choice.has_told_prompt = True
        return self._chunk([part], usage, of_prompt)

    def token_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return an answer's tokens in vLLM's form, if they are asked for."""
        return self._ids("token_ids", list(token_ids))

    def prompt_ids(self, choice: Choice) -> dict[str, Any]:
        """Return the prompt's tokens in vLLM's form, if they are asked for."""
        return self._ids("prompt_token_ids", choice.prompt_token_ids)

    def _ids(self, name: str, ids: Sequence[int] | None) -> dict[str, Any]:
        return {name: ids} if self.tells_tokens else {}

    def prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Return the prompt's log-probabilities in vLLM's form, or null."""
        scores = choice.ended.prompt_logprobs
        if scores is None or self.body.prompt_logprobs is None:
            return {"prompt_logprobs": None}
        return {"prompt_logprobs": [self._score(one) for one in scores]}

    def _score(self, one: TokenLogprobs | None) -> dict[str, Any] | None:
        if one is None:
            return None
        told: dict[int, dict[str, Any]] = {
            one.token_id: {"logprob": finite(one.logprob)}
        }
        for rank, (token, logprob) in enumerate(one.top, 1):
            told[token] = {"logprob": finite(logprob), "rank": rank}
        for token, entry in told.items():
            entry["decoded_token"] = self.dialect.token(token)[0]
        return {str(token): entry for token, entry in told.items()}

    def token_text(self, token_id: int) -> str:
        """Return a token's text for log-probabilities, or its id in vLLM's notation."""
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self.dialect.token(token_id)[0]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.entry.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.core.service.config.name,
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(
        self,
        choices: Sequence[Mapping[str, Any]],
        usage: Mapping[str, Any] | None,
        of_prompt: Mapping[str, Any],
    ) -> bytes:
        chunk = {**self._head(self.chunk_kind), "choices": choices, **of_prompt}
        if self._includes_usage:
            chunk["usage"] = usage
        return event_bytes(chunk)

    def _usage(self) -> dict[str, Any]:
        counts = self.counts()
        return {
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.completion,
            "total_tokens": counts.prompt + counts.completion,
            "prompt_tokens_details": {
                "cached_tokens": counts.cached,
                "image_tokens": counts.images,
            },
            "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
        }

    def _running_usage(self) -> dict[str, int] | None:
        """Count tokens so far, as vLLM does, if that is asked for."""
        if not self._has_running_usage:
            return None
        firsts = [choice for choice in self.choices if choice.is_first_of_prompt]
        prompt = sum(choice.prompt_tokens for choice in firsts)
        completion = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def ending_of(choice: Choice) -> dict[str, Any]:
    """Return why an answer has ended."""
    reason = choice.finish_reason
    return {"finish_reason": reason, "stop_reason": choice.ended.stop_reason}


def finite(logprob: float) -> float:
    """Bound a log-probability as OpenAI: -9999 for an impossible token; what is no number is null elsewhere."""
    return max(logprob, -9999.0)


def known(logprob: float) -> float | None:
    """Return a log-probability, or null for the first token of a prompt, which has none."""
    return None if math.isnan(logprob) else finite(logprob)
