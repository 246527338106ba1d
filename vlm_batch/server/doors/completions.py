"""``/v1/completions``: texts or token ids, gone on with as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_batch.server.answers import Delta
from vlm_batch.server.asking import Abilities, Ask, params_of
from vlm_batch.server.choices import Completions, ending_of, finite, known
from vlm_batch.server.config import ServerConfig
from vlm_batch.server.door import Door
from vlm_batch.server.errors import ApiError
from vlm_batch.server.exchange import Choice, through
from vlm_batch.server.sampled import Common, NumTops
from vlm_batch.server.sampling import check_stream, others_of, sampling_of
from vlm_batch.server.unserved import NOTHING
from vlm_batch.server.wire import Many
from vlm_batch.types import TokenLogprobs


class CompletionRequest(Common):
    """The body of ``POST /v1/completions``: final prompts, without pictures."""

    nothing = {
        **NOTHING,
        "add_special_tokens": (True,),
        "prompt_embeds": ([],),
        "thinking_budget_tokens": (-1,),
    }
    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    logprobs: NumTops | None = None
    echo: bool | None = None


# In --------------------------------------------------------------------------------------------------------------------


def completion_ask(
    body: CompletionRequest, config: ServerConfig, able: Abilities | None = None
) -> Ask:
    """Return engine requests of a body's prompts. Raises ApiError."""
    prompts = _prompts(body.prompt)
    if len(prompts) > config.max_prompts:
        said = f"at most {config.max_prompts} go into one request"
        raise ApiError(400, f"{len(prompts)} prompts; {said}", param="prompt")
    echoes = bool(body.echo)
    if echoes and body.stream and body.logprobs is not None:
        said = "log-probabilities of echo come with the whole answer"
        raise ApiError(400, f"{said}; leave stream or logprobs out", param="echo")
    check_stream(body)
    sampling = sampling_of(
        body, max_tokens=body.max_tokens, logprobs=body.logprobs, echoes=echoes
    )
    others = others_of(body)
    return Ask(
        prompts=prompts,
        params=params_of(sampling, body.sampling, config, able or Abilities()),
        is_chat=False,
        **{**others, "returns_ids": others["returns_ids"] or echoes},
    )


def _prompts(prompt: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(prompt, str):
        return ({"prompt": prompt},)
    if not prompt:
        raise ApiError(400, "prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return ({"token_ids": prompt},)
    kind = "prompt" if isinstance(prompt[0], str) else "token_ids"
    return tuple({kind: one} for one in prompt)


# Out -------------------------------------------------------------------------------------------------------------------


class TextExchange(Completions):
    prefix = "cmpl"
    prompt = "prompt"
    kind = "text_completion"
    chunk_kind = "text_completion"
    body: CompletionRequest

    def ask(self, able: Abilities) -> Ask:
        return completion_ask(self.body, self.core.service.config, able)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.content)
        steps = choice.logprobs
        if self.body.echo:
            text = self._echo(choice) + text
            steps = [*self._scores_of_echo(choice), *steps]
        return {
            "index": choice.index,
            "text": text,
            **self._logprobs(choice, steps),
            **self.prompt_logprobs(choice),
            **self.prompt_ids(choice),
            **self.token_ids(choice.token_ids),
            **ending_of(choice),
        }

    def _echo(self, choice: Choice) -> str:
        """Return the prompt's text, as it came or as its tokens say."""
        if "prompt" in choice.asked:
            return str(choice.asked["prompt"])
        ids = choice.asked["token_ids"]
        return self.dialect.text_of(ids, self.body.skip_special_tokens)

    def _scores_of_echo(self, choice: Choice) -> list[TokenLogprobs]:
        """Return the echoed prompt's log-probabilities; the first token has none, which is not a number here."""
        result = choice.ended
        if self.body.logprobs is None:
            return []
        pairs = zip(
            result.prompt_token_ids or (), result.prompt_logprobs or (), strict=True
        )
        return [score or TokenLogprobs(token, math.nan, ()) for token, score in pairs]

    def _opening(self, choice: Choice) -> dict[str, Any] | None:
        if not self.body.echo:
            return None
        said = {"text": self._echo(choice), "logprobs": None, "finish_reason": None}
        return {"index": choice.index, **said}

    def _part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs(choice, delta.logprobs)
        part = {"index": choice.index, "text": delta.content, "finish_reason": None}
        return {**part, **logprobs}

    def _ending(self, choice: Choice) -> dict[str, Any]:
        ending = ending_of(choice)
        return {"index": choice.index, "text": "", "logprobs": None, **ending}

    def _logprobs(
        self, choice: Choice, steps: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        if not steps:
            return {"logprobs": None}
        found: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for step in steps:
            text = self.token_text(step.token_id)
            raw = self.dialect.token(step.token_id)[1]
            found["tokens"].append(text)
            found["token_logprobs"].append(known(step.logprob))
            found["top_logprobs"].append(self._tops(step, text))
            found["text_offset"].append(choice.length)
            if self._is_shown(choice, step.token_id):
                choice.length += len(choice.characters.decode(bytes(raw)))
        return {"logprobs": found}

    def _tops(self, step: TokenLogprobs, text: str) -> dict[str, float] | None:
        """Return the likely tokens and the chosen one, so that there may be one more than was asked for."""
        if math.isnan(step.logprob):
            return None
        tops = step.top[: self.body.logprobs]
        told = {self.token_text(token): finite(logprob) for token, logprob in tops}
        return {**told, text: finite(step.logprob)}

    def _is_shown(self, choice: Choice, token_id: int) -> bool:
        """Return whether a token is in the text: an echoed one as the prompt was written."""
        if not self.dialect.is_special(token_id):
            return True
        written = choice.asked.get("prompt", "") if self.body.echo else ""
        if choice.length < len(written):
            mark = self.dialect.token(token_id)[0]
            return bool(written.startswith(mark, choice.length))
        return not self.dialect.is_hidden(token_id, self.body.skip_special_tokens)


COMPLETIONS = Door(
    path="/v1/completions",
    others=("/completions",),
    body=CompletionRequest,
    answer=through(TextExchange),
    about="Continue a text or token ids.",
)
