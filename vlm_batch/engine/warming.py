"""Warm-up: made-up forwards of coming shapes while the engine is idle.

A shape's first call takes several times as long on a GPU (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    alone = [shape for shape in arrays if shape[0] == 1]
    for rows, width in alone:
        _prompts(trial, rows, width)
        yield
    row, params = trial.row(LENGTH), SamplingParams(seed=0)
    for count, columns in trial.shapes.steps(most, max(width for _, width in alone)):
        logits = next(trial.steps([row] * count, count, columns=columns, decode=decode))
        mx.eval(sampler(logits, [SamplingRow(params, 0, 0)] * count).arrays())
        yield
    for rows, width in arrays[len(alone) :]:
        _prompts(trial, rows, width)
        yield


def _prompts(trial: Trial, rows: int, width: int) -> None:
    """Prefill padded prompts of ``width - 1`` positions."""
    prompt = trial.prompt(max(1, width - 1))
    mx.eval(trial.prefilled([prompt] * rows, makes_plans=True)[0])
