"""Warm-up: a forward of each shape that requests will bring, of made-up prompts, run while there is nothing else to do.

The first call of a shape takes several times as long as the next one on a GPU (docs/benchmarks.md, where the time went). No
row, cache or counter of the engine's takes part, so nothing is left of it but what MLX keeps of a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx

from vlm_batch.engine.port import Sampler
from vlm_batch.engine.sampling import SamplingRow
from vlm_batch.engine.trial import Trial
from vlm_batch.records import DecodeStep
from vlm_batch.types import SamplingParams

#: Positions of the rows that decode steps are tried with.
LENGTH = 32


def forwards(trial: Trial, decode: Callable[[DecodeStep], mx.array], sampler: Sampler, most: int) -> Iterator[None]:
    """Run one forward for each ``next``, prompts of one row first, and wait for it: of each shape that prompts come in, and of
    decode steps, and the choice of their tokens, of up to ``most`` rows over slabs of each width that such prompts come to.
    Raises what the model raises."""
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
    """Prompts of one position less than ``width``, which are padded to it where the family pads."""
    prompt = trial.prompt(max(1, width - 1))
    mx.eval(trial.prefilled([prompt] * rows, makes_plans=True)[0])
