"""Runs requests through the engine as a scenario says, records what every row's tokens were chosen from, and compares.

The oracle of a request is its answer alone (``tests.zoo``). What the engine samples from is recorded by the sampler that it is
handed: every request gets a seed of its own, which sampling hands on, so that a row's logits can be told from its neighbours'.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.zoo import FAMILIES, Inputs, Trace, apart
from tests.zoo import family as tiny_family
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.towers import remember_features
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import Placement
from vlm_batch.engine.compiled import CompiledDecode
from vlm_batch.engine.drafts import NO_DRAFTS, NoDrafts
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.sampling import SamplingRow, sample
from vlm_batch.models import adapter_for
from vlm_batch.policy import Policy, policy_of
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.features import FeatureStore
from vlm_batch.store.prefix import PrefixCache
from vlm_batch.types import Result, SamplingParams

#: The largest difference of log-probabilities that is rounding. float32 has a unit roundoff of 6e-8; logits of a few
#: units go through 3-4 layers whose sums are ordered differently by batch shape and chunk. The largest seen over all
#: families is 8e-5 (mistral4, gemma3n), 2e-5 for most; a wrong position, mask or feature moves them by more than 1e-2
#: (tests/test_mutations.py).
TOLERANCE = 1e-4
NUM_TOKENS = 8
#: Every scenario with what a batcher keeps by default: features for the whole run, a prefix cache for each engine.
KEEPS = os.environ.get("VLM_BATCH_PARITY_KEEPS") == "1"


@dataclass(frozen=True)
class Ask:
    """A request of a scenario: which one, when it arrives, and what happens to it."""

    key: (
        # "image:SEED:SIZE", "text:SEED:LENGTH", "two:SEED", "video:SEED:SIZE", "both:SEED", "audio:SEED:SIZE", ...
        str
    )
    at: int = 0  # the step before which it is inserted
    tokens: int = NUM_TOKENS
    cancel_at: int | None = None
    params: SamplingParams | None = None


@dataclass
class Answer:
    """What the engine made of an ``Ask``: its result, and the log-probabilities (T, V) that its tokens came from."""

    ask: Ask
    result: Result | None = None
    logprobs: list[np.ndarray] = field(default_factory=list)


@cache
def shared_adapter(name: str) -> Adapter:
    """One adapter a family for the whole test run: whatever a row left on it, a later test would see."""
    tiny = tiny_family(name)
    adapter = adapter_for(tiny.registered)(tiny.build())
    if KEEPS:
        remember_features(adapter, FeatureStore(ByteBudget(2**28)))
    return adapter


def default_reuse(adapter: Adapter) -> Reuse:
    """What an engine of a scenario takes over from its earlier rows."""
    return Reuse(
        adapter,
        PrefixCache(ByteBudget(2**28))
        if KEEPS and adapter.spec.no_prefix_reuse is None
        else None,
    )


def inputs_of(name: str, key: str) -> Inputs:
    kind, *numbers = key.split(":")
    tiny, values = tiny_family(name), [int(number) for number in numbers]
    if kind == "two":
        if tiny.two_images is None:
            pytest.skip(f"{name}: {tiny.no_two_images}")
        return tiny.two_images(*values)
    media = {"video": tiny.video, "both": tiny.picture_and_video}
    media |= {
        "audio": tiny.audio,
        "sounds": tiny.two_audios,
        "heard": tiny.picture_and_audio,
    }
    if kind in media:
        make: Any = media[kind]
        if make is None:
            pytest.skip(f"{name} takes no {kind}")
        return make(*values)
    return tiny.image(*values) if kind == "image" else tiny.text(*values)


@cache
def oracle(name: str, key: str, num_tokens: int = NUM_TOKENS) -> Trace:
    """The request's answer alone, on a model of its own."""
    tiny = tiny_family(name)
    return tiny.greedy(tiny.build(), inputs_of(name, key), num_tokens)


def settings_for(placement: Placement | None = None, /, **said: Any) -> Policy:
    """The settings of a layout, by default this device's, with what is said in their places; None says nothing."""
    own = {} if placement is None else {"placement": placement.value}
    return policy_of(
        own | {name: value for name, value in said.items() if value is not None}
    )


def run(
    adapter: Adapter,
    inputs: Callable[[str], Inputs],
    asks: Sequence[Ask],
    *,
    placement: Placement = Placement.ROWS,
    config: Mapping[str, Any] | None = None,
    compile_decode: bool | None = False,
    generator: BatchGenerator | None = None,
    drafts: NoDrafts = NO_DRAFTS,
) -> list[Answer]:
    """Play a scenario to its end. ``generator`` continues a used one. ``drafts`` say which are tried."""
    config = config or {"max_rows": 4}
    answers = [Answer(ask) for ask in asks]
    recorded: dict[int, dict[int, mx.array]] = {index: {} for index in range(len(asks))}

    def recording(logits: mx.array, rows: Sequence[SamplingRow]) -> Any:
        for place, row in enumerate(rows):
            # the last: drafts may be wrong
            recorded[row.seed][row.step] = logits[place] - mx.logsumexp(logits[place])
        return sample(logits, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledDecode, "USES_BEFORE_GRAPH", 0)
        patch.setattr(CompiledDecode, "USES_BEFORE_UNFUSED", 0)
        batch = generator or BatchGenerator(
            adapter,
            policy=settings_for(placement, **config),
            compile_decode=compile_decode,
            reuse=default_reuse(adapter),
            drafts=drafts,
        )
        batch.sampler = recording
        step = 0
        while batch.has_work or step <= max(ask.at for ask in asks):
            for index, ask in enumerate(asks):
                if ask.at == step:
                    params = replace(
                        ask.params or SamplingParams(),
                        max_tokens=ask.tokens,
                        seed=index,
                    )
                    batch.insert(str(index), as_mlx(inputs(ask.key)), params)
                if ask.cancel_at == step:
                    batch.cancel(str(index))
            for event in batch.step():
                if event.result is not None:
                    answers[int(event.request_id)].result = event.result
            step += 1
            assert step < 1000, "the scenario does not end"
    for index, answer in enumerate(answers):
        answer.logprobs = [np.array(row) for _, row in sorted(recorded[index].items())]
    return answers


def run_family(name: str, asks: Sequence[Ask], **how: Any) -> list[Answer]:
    return run(shared_adapter(name), lambda key: inputs_of(name, key), asks, **how)


def difference(answer: Answer, trace: Trace) -> float:
    """The largest difference of log-probabilities over the vocabulary, up to the first token that differs, inf after it."""
    assert answer.result is not None
    largest = 0.0
    for step, token in enumerate(answer.result.token_ids):
        largest = max(largest, apart(answer.logprobs[step], trace.logprobs[step]))
        if token != trace.tokens[step]:
            return max(largest, np.inf) if largest <= TOLERANCE else largest
    return largest


def check(name: str, answers: Sequence[Answer]) -> float:
    """Every answer is the oracle's: tokens, log-probabilities, and how it ended. Returns the largest difference."""
    largest = 0.0
    for answer in answers:
        result, ask = answer.result, answer.ask
        assert result is not None, f"{ask} has no result"
        assert result.error is None, f"{ask}: {result.error}"
        trace = oracle(name, ask.key, max(NUM_TOKENS, ask.tokens))
        largest = max(largest, difference(answer, trace))
        assert list(result.token_ids) == trace.tokens[: len(result.token_ids)], (
            f"{name} {ask}: other tokens than alone"
        )
        if ask.cancel_at is None:
            assert result.finish_reason == "length"
            assert len(result.token_ids) == ask.tokens
    assert largest <= TOLERANCE, f"{name}: log-probabilities are {largest:.2g} off"
    return largest


def every_family() -> list[str]:
    return sorted(FAMILIES)


__all__ = [
    "NUM_TOKENS",
    "TOLERANCE",
    "Answer",
    "Ask",
    "Mapping",
    "check",
    "default_reuse",
    "difference",
    "every_family",
    "inputs_of",
    "oracle",
    "run",
    "run_family",
    "shared_adapter",
]
