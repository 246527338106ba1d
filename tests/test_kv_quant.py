"""Quantised keys and values: a batched row is the same row alone under the same settings, and close to the exact one."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tests.harness import TOLERANCE, Answer, Ask, run, shared_adapter
from tests.reuse_cases import request
from vlm_batch.caches import Placement
from vlm_batch.caches.quantized import (
    KVQuantisation,
)
from vlm_batch.generator import BatchGenerator
from vlm_batch.scheduler import SchedulerConfig

IMAGE, TEXT, OTHER = "image:3:2", "text:5:26", "image:1:0"

#: The zoo's heads are of 16 numbers, less than the smallest group that ``mx.quantize`` has; so its rows go through TurboQuant,
#: or, where a family's heads allow it, uniformly.
TURBO = KVQuantisation(8, scheme="turboquant")


def generator(name: str, kv: KVQuantisation | None, **how: Any) -> BatchGenerator:
    return BatchGenerator(shared_adapter(name), kv=kv, **how)


@cache
def alone(name: str, key: str, kv: KVQuantisation, num_tokens: int = 8) -> tuple[list[int], np.ndarray]:
    """Tokens and log-probabilities (T, V) of a request that has the engine to itself, under the same settings."""
    (answer,) = run(
        shared_adapter(name),
        lambda key: request(name, key),
        [Ask(key, tokens=num_tokens)],
        generator=generator(name, kv, placement=Placement.ROWS, config=SchedulerConfig(idle_budget=2048)),
    )
    assert answer.result is not None
    assert answer.result.error is None, answer.result.error
    return list(answer.result.token_ids), np.stack(answer.logprobs)


def check(name: str, answers: list[Answer], kv: KVQuantisation) -> None:
    for answer in answers:
        assert answer.result is not None
        assert answer.result.error is None, answer.result.error
        tokens, logprobs = alone(name, answer.ask.key, kv)
        assert list(answer.result.token_ids) == tokens[: len(answer.result.token_ids)], (name, answer.ask.key)
        worst = max(np.abs(a - b).max() for a, b in zip(answer.logprobs, logprobs, strict=False))
        assert worst <= TOLERANCE, (name, answer.ask.key, worst)
