"""Requests that begin as others do, and their answers alone: what the tests of prompt and prefix caches share."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tests.harness import NUM_TOKENS, TOLERANCE, Answer, Ask, Inputs, inputs_of, run, shared_adapter
from tests.zoo import Trace
from tests.zoo import family as tiny_family
from tests.zoo._build import words
from vlm_batch.caches.budget import ByteBudget
from vlm_batch.caches.prefix import PrefixCache
from vlm_batch.generator import BatchGenerator
from vlm_batch.reuse import Reuse

#: Tokens by which "~SEED" replaces a request's last ones, and which "+SEED" appends to it.
TAIL, MORE = 3, 7


@cache
def request(name: str, key: str) -> Inputs:
    """The harness's request of a key like "image:3:2", with another ending ("image:3:2~5") or a longer one ("...+5")."""
    base, mark, seed = key.partition("~") if "~" in key else key.partition("+")
    inputs = inputs_of(name, base)
    if not mark:
        return inputs
    new = words(int(seed) + 1000, TAIL if mark == "~" else MORE)
    return followed_by(inputs, new, len(inputs["input_ids"][0]) - (TAIL if mark == "~" else 0))


def followed_by(inputs: Inputs, ids: list[int], at: int) -> Inputs:
    """The first ``at`` positions of a request and then other words, about the same pictures."""
    changed = {
        **inputs,
        "input_ids": np.concatenate([inputs["input_ids"][:, :at], np.array([ids], dtype=np.int32)], axis=1),
    }
    if "cross_attention_mask" in inputs:  # one row a token: later ones see what the last one sees
        seen = inputs["cross_attention_mask"]
        changed["cross_attention_mask"] = np.concatenate(
            [seen[:, :at], np.repeat(seen[:, -1:], len(ids), axis=1)], axis=1
        )
    return changed


@cache
def alone(name: str, key: str) -> Trace:
    """The answer of a request alone, on a model of its own."""
    return answer_to(name, request(name, key))


def answer_to(name: str, inputs: Inputs, num_tokens: int = NUM_TOKENS) -> Trace:
    tiny = tiny_family(name)
    return tiny.greedy(tiny.build(), inputs, num_tokens)


def engine(name: str, budget: int = 2**30, **how: Any) -> BatchGenerator:
    """A generator with a prefix cache."""
    adapter = shared_adapter(name)
    return BatchGenerator(adapter, reuse=Reuse(adapter, PrefixCache(ByteBudget(budget))), **how)


def ask(name: str, generator: BatchGenerator, *keys: str, together: bool = True) -> list[int]:
    """Run requests, check each against its answer alone, and return how many tokens of each were cached."""
    if not together:
        return [ask(name, generator, key)[0] for key in keys]
    answers = run(shared_adapter(name), lambda key: request(name, key), [Ask(key) for key in keys], generator=generator)
    return [checked(name, answer, alone(name, answer.ask.key)) for answer in answers]


def checked(name: str, answer: Answer, trace: Trace) -> int:
    """Its cached tokens, once it is shown to be the right answer."""
    result = answer.result
    assert result is not None
    assert result.error is None, result.error
    assert list(result.token_ids) == trace.tokens[: len(result.token_ids)], (name, answer.ask.key)
    worst = max(np.abs(found - right).max() for found, right in zip(answer.logprobs, trace.logprobs, strict=False))
    assert worst <= TOLERANCE, (name, answer.ask.key, worst)
    return result.usage.cached_tokens


def length(name: str, key: str) -> int:
    return int(request(name, key)["input_ids"].shape[1])


def end_of_pictures(name: str, key: str) -> int:
    """The first position behind the last picture."""
    from vlm_batch.models.processing import as_mlx

    return max(end for _, end in shared_adapter(name).prompt_key(as_mlx(request(name, key))).pictures)
