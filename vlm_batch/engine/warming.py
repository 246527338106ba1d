"""Warm-up: made-up forwards of coming shapes while the engine is idle.

A shape's first call takes several times as long on a GPU (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx

from vlm_batch.engine.sampling import Sampler, SamplingRow
from vlm_batch.engine.trial import Trial
from vlm_batch.records import DecodeStep
from vlm_batch.types import SamplingParams

#: Positions of the rows of decode steps.
LENGTH = 32


def forwards(
    trial: Trial, decode: Callable[[DecodeStep], mx.array], sampler: Sampler, most: int
) -> Iterator[None]:
    """Run a forward per ``next``: single prompts, decode steps of up to ``most`` rows, arrays of prompts."""
    arrays = trial.shapes.arrays(trial.adapter.max_context)
    num_alone = [rows for rows, _ in arrays].count(1)
    alone, together = arrays[:num_alone], arrays[num_alone:]
    yield from _prompts(trial, alone)
    _, widest = max(alone)
    row, params = trial.row(LENGTH), SamplingParams(seed=0)
    for count, columns in trial.shapes.steps(most, widest):
        steps = trial.steps([row] * count, count, columns=columns, decode=decode)
        sampled = sampler(next(steps), [SamplingRow(params, 0, 0)] * count)
        mx.eval(sampled.arrays())
        yield
    yield from _prompts(trial, together)


def _prompts(trial: Trial, arrays: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Prefill arrays of (rows, width): padded prompts of ``width - 1`` positions."""
    for rows, width in arrays:
        prompt = trial.prompt(max(1, width - 1))
        mx.eval(trial.prefilled([prompt] * rows, makes_plans=True)[0])
        yield
