"""Warm-up: a forward of each shape that requests will bring, of made-up prompts, run while there is nothing else to do.

The first call of a shape takes several times as long as the next one on a GPU (docs/benchmarks.md, where the time went). No
row, cache or counter of the engine's takes part, so nothing is left of it but what MLX keeps of a shape.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import mlx.core as mx

from vlm_batch.caches import take_row, trim
from vlm_batch.caches.slab import CAPACITY_STEP
from vlm_batch.engine.decoding import Decoder
from vlm_batch.engine.groups import DecodeGroups
from vlm_batch.engine.port import ModelAdapter, Sampler
from vlm_batch.engine.row import Facts, Prompt, Row, new_row
from vlm_batch.engine.runner import Runner
from vlm_batch.engine.sampling import SamplingRow
from vlm_batch.records import Encoded
from vlm_batch.types import SamplingParams

#: A token that every vocabulary has.
TOKEN = 5
#: Positions of the rows that a decode step is tried with.
LENGTH = 32


def forwards(
    adapter: ModelAdapter,
    prefill: Runner,
    decoder: Decoder,
    batch: Callable[[], DecodeGroups],
    sampler: Sampler,
    most: int,
) -> Iterator[None]:
    """Run one forward for each ``next``, prompts of one row first, and wait for it: of each shape that prompts come in, and of
    decode steps of 1, 2, 4 and so on up to ``most`` rows, over slabs of each width that such prompts come to. Raises what the
    model raises."""
    shapes = prefill.shapes
    alone = [shape for shape in shapes if shape[0] == 1]
    for rows, width in alone:
        _prompts(adapter, prefill, rows, width)
        yield
    counts = [1 << power for power in range(most.bit_length())]
    for count in counts:
        _step(adapter, prefill, decoder, batch(), sampler, count)
        yield
    longest = max(width for _, width in alone)
    for columns in range(2 * CAPACITY_STEP, longest + 1, CAPACITY_STEP):
        for count in counts:
            _step(adapter, prefill, decoder, batch(), sampler, count, columns - LENGTH)
            yield
    for rows, width in shapes[len(alone) :]:
        _prompts(adapter, prefill, rows, width)
        yield


def _prompts(adapter: ModelAdapter, prefill: Runner, rows: int, width: int) -> None:
    """Prompts of one position less than ``width``, which are padded to it where the family pads."""
    encoded = [_encoded(adapter, prefill, max(1, width - 1))] * rows
    mx.eval(prefill.computed(encoded, makes_plans=True)[0])


def _step(
    adapter: ModelAdapter,
    prefill: Runner,
    decoder: Decoder,
    batch: DecodeGroups,
    sampler: Sampler,
    count: int,
    length: int = LENGTH,
) -> None:
    """A decode step with places for so many rows, and the choice of their tokens: so many short ones, or one of ``length``."""
    encoded = _encoded(adapter, prefill, length)
    logits, cache, width = prefill.computed([encoded])
    cache = cache if len(logits) == 1 else take_row(cache, 0)
    trim(cache, width - length)
    adapter.finish_prefill(encoded, cache)
    rows = [_row(encoded) for _ in range(count if length == LENGTH else 1)]
    for row in rows:
        batch.join(row, copy.deepcopy(cache), others=count - 1 - len(batch))
    chosen = [SamplingRow(row.params, 0, 0) for row in rows]
    for group in batch.groups:
        logits = decoder.logits(group, group.rows)
        mx.eval(sampler(logits, chosen[: len(group)]).arrays())


def _encoded(adapter: ModelAdapter, prefill: Runner, length: int) -> Encoded:
    return adapter.encode(adapter.probe(mx.full((1, length), TOKEN, dtype=mx.int32)), prefill.call)


def _row(encoded: Encoded) -> Row:
    row = new_row("", Prompt(), SamplingParams(seed=0))
    row.facts = Facts.of(encoded)
    row.answer.advance(mx.array([TOKEN], dtype=mx.int32), 0)
    return row
