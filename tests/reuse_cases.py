"""Requests that begin as others do, and their answers alone: what the tests of prompt and prefix caches share."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.harness import (
    NUM_TOKENS,
    TOLERANCE,
    Answer,
    Ask,
    Inputs,
    every_family,
    inputs_of,
    run,
    shared_adapter,
)
from tests.recording import record_none
from tests.zoo import Trace, apart
from tests.zoo import family as tiny_family
from tests.zoo._build import words
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import Placement
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.reuse import Reuse
from vlm_batch.records import PromptKey
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.prefix import PrefixCache

#: Families whose whole prompt attends both ways: a longer or other prompt has nothing in common with it.
TWO_WAY = ("paligemma", "paligemma2")

#: Tokens by which "~SEED" replaces a request's last ones, and which "+SEED" appends to it.
TAIL, MORE = 3, 9


def in_turns() -> list[Any]:
    """Every family in one placement, the next one in the other: both together would take twice as long."""
    placements = list(Placement)
    return [
        pytest.param(
            name,
            placement := placements[index % len(placements)],
            id=f"{name}-{placement.value}",
        )
        for index, name in enumerate(every_family())
    ]


@cache
def request(name: str, key: str) -> Inputs:
    """The harness's request of a key like "image:3:2", with another ending ("image:3:2~5") or a longer one ("...+5")."""
    base, mark, seed = key.partition("~") if "~" in key else key.partition("+")
    inputs = inputs_of(name, base)
    if not mark:
        return inputs
    new = words(int(seed) + 1000, TAIL if mark == "~" else MORE)
    return followed_by(
        inputs, new, len(inputs["input_ids"][0]) - (TAIL if mark == "~" else 0)
    )


def followed_by(inputs: Inputs, ids: list[int], at: int) -> Inputs:
    """The first ``at`` positions of a request and then other words, about the same pictures."""
    changed = {
        **inputs,
        "input_ids": np.concatenate(
            [inputs["input_ids"][:, :at], np.array([ids], dtype=np.int32)], axis=1
        ),
    }
    # one row a token: later ones see what the last one sees
    if "cross_attention_mask" in inputs:
        seen = inputs["cross_attention_mask"]
        changed["cross_attention_mask"] = np.concatenate(
            [seen[:, :at], np.repeat(seen[:, -1:], len(ids), axis=1)], axis=1
        )
    for name in {"images_seq_mask", "mm_token_type_ids", "token_type_ids"} & set(
        inputs
    ):
        changed[name] = np.concatenate(
            [inputs[name][:, :at], np.zeros((1, len(ids)), inputs[name].dtype)], axis=1
        )
    return changed


@cache
def alone(name: str, key: str) -> Trace:
    """The answer of a request alone, on a model of its own."""
    return answer_to(name, request(name, key))


def answer_to(name: str, inputs: Inputs, num_tokens: int = NUM_TOKENS) -> Trace:
    tiny = tiny_family(name)
    return tiny.greedy(tiny.build(), inputs, num_tokens)


class Asker:
    """Asks one family's generator, and checks every answer against the request's answer alone."""

    def __init__(self, name: str, generator: BatchGenerator) -> None:
        self.name = name
        self.generator = generator
        self.largest = 0.0  # difference of log-probabilities so far

    def ask(self, *keys: str) -> list[int]:
        """Requests that are there together; how many tokens of each were cached."""
        return self._run(
            {key: request(self.name, key) for key in keys},
            {key: alone(self.name, key) for key in keys},
        )

    def ask_inputs(self, *inputs: Inputs) -> list[int]:
        """The same for requests that have no key."""
        named = {str(index): one for index, one in enumerate(inputs)}
        return self._run(
            named, {key: answer_to(self.name, one) for key, one in named.items()}
        )

    def _run(self, inputs: dict[str, Inputs], traces: dict[str, Trace]) -> list[int]:
        asks = [Ask(key) for key in inputs]
        answers = run(
            shared_adapter(self.name),
            inputs.__getitem__,
            asks,
            generator=self.generator,
        )
        self.largest = max(
            self.largest,
            *(checked(self.name, answer, traces[answer.ask.key]) for answer in answers),
        )
        return [cached(answer) for answer in answers]


def asker(name: str, budget: int = 2**30, **how: Any) -> Asker:
    """One whose generator has a prefix cache."""
    adapter = shared_adapter(name)
    prefix = PrefixCache(ByteBudget(budget))
    return Asker(name, BatchGenerator(adapter, reuse=Reuse(adapter, prefix), **how))


def checked(name: str, answer: Answer, trace: Trace) -> float:
    """The largest difference of its log-probabilities, once it is shown to be the right answer."""
    result = answer.result
    assert result is not None
    assert result.error is None, result.error
    assert list(result.token_ids) == trace.tokens[: len(result.token_ids)], (
        name,
        answer.ask.key,
    )
    worst = max(
        (apart(*pair) for pair in zip(answer.logprobs, trace.logprobs, strict=False)),
        default=0.0,
    )
    assert worst <= TOLERANCE, (name, answer.ask.key, worst)
    return worst


def cached(answer: Answer) -> int:
    """How many positions of its prompt were there already."""
    assert answer.result is not None
    return answer.result.usage.cached_tokens


def only_resumable(name: str, scenario: str | None = None) -> None:
    """Skips a family whose rows do not go on from others, with the reason that its adapter gives."""
    if (why := shared_adapter(name).spec.no_prefix_reuse) is None:
        return
    if scenario is not None:
        record_none(name, scenario, f"refused: {why}")
    pytest.skip(f"rows of this family do not go on from others: {why}")


def key_of(name: str, inputs: Inputs) -> PromptKey:
    return shared_adapter(name).prompt_key(as_mlx(inputs))


def length(name: str, key: str) -> int:
    """Positions, pictures included."""
    return key_of(name, request(name, key)).length


def end_of_pictures(name: str, key: str) -> int:
    """The first position behind the last picture."""
    return max((end for _, end in key_of(name, request(name, key)).pictures), default=0)
