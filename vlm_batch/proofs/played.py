"""Plays whole requests on an engine, and records the logits of their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import mlx.core as mx

from vlm_batch.arrays import as_mlx
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.sampling import SamplingRow, sample
from vlm_batch.types import Result, SamplingParams


@dataclass(frozen=True)
class Asked:
    """A request to submit before step ``at``."""

    inputs: Any  # a processor's output
    params: SamplingParams
    at: int = 0


def played(
    engine: BatchGenerator, asked: Sequence[Asked]
) -> list[tuple[Result, list[mx.array]]]:
    """Run requests to their ends. Returns results and each token's logits (V,)."""
    # by step; wrong drafts are overwritten
    recorded: list[dict[int, mx.array]] = [{} for _ in asked]
    results: dict[int, Result] = {}

    def recording(logits: mx.array, rows: Sequence[SamplingRow]) -> Any:
        for place, row in enumerate(rows):
            recorded[row.seed][row.step] = logits[place]
        return sample(logits, rows)

    engine.sampler = recording
    due = deque(sorted(range(len(asked)), key=lambda index: asked[index].at))
    for step in count():
        while due and asked[due[0]].at <= step:
            index = due.popleft()
            one = asked[index]
            params = replace(one.params, seed=index)
            engine.insert(str(index), as_mlx(one.inputs), params)
        for event in engine.step():
            if event.result is not None:
                results[int(event.request_id)] = event.result
        if not due and not engine.has_work:
            break
    found: list[tuple[Result, list[mx.array]]] = []
    for index, by_step in enumerate(recorded):
        logits = [one for _, one in sorted(by_step.items())]
        found.append((results[index], logits))
    return found
