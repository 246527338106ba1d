"""Defaults of a scheduler's config for each kind of device, as measured (docs/benchmarks.md, settings that were measured)."""

from __future__ import annotations

from dataclasses import replace

from vlm_batch.caches import Placement
from vlm_batch.engine.scheduler import SchedulerConfig

#: Prompt tokens of a forward where rows have their own caches (CPUs): longer chunks take more time a token.
ROWS_CHUNK = 256
#: On GPUs the number of launches decides. A forward of 64 tokens takes as long as one of 1,024, and a matrix product of a
#: new length costs extra. So prompts are cut only where they have to be.
SLAB_CHUNK = 1024
SLAB_LONGEST = 2048
SLAB_BUDGET = 8192
TOGETHER = {Placement.ROWS: (1, 8), Placement.SLAB: (16, 32)}  # rows encoded and prompts prefilled together
#: Prompt tokens of one array: beyond this, memory grows and time a prompt does not shrink.
MAX_TOGETHER = 4096
#: Beside decoding rows one encoder call takes a quarter as many pictures, so that the gap between tokens stays short.
BESIDE_DECODE = 4
#: Seconds of a step beside decoding rows: half of the default gap between tokens. On a GPU launches return before the
#: encoding is done, so that the clock says nothing.
ENCODE_SECONDS = {Placement.ROWS: 0.05, Placement.SLAB: 0.0}


def for_placement(config: SchedulerConfig, placement: Placement) -> SchedulerConfig:
    """A config whose open settings are filled in for devices of a placement."""
    encode, prefill = TOGETHER[placement]
    config = replace(
        config,
        encode_together=encode if config.encode_together is None else config.encode_together,
        prefill_together=prefill if config.prefill_together is None else config.prefill_together,
        encode_seconds=ENCODE_SECONDS[placement] if config.encode_seconds is None else config.encode_seconds,
    )
    is_timed = config.prefill_budget is None
    if placement is Placement.SLAB:
        slack = SLAB_CHUNK // 2 if is_timed else 0
        return replace(
            config,
            max_chunk=config.max_chunk or SLAB_LONGEST,
            idle_budget=config.idle_budget or SLAB_BUDGET,
            smallest_chunk=config.smallest_chunk or SLAB_CHUNK,
            slack=config.slack or slack,
        )
    return replace(
        config,
        max_chunk=config.max_chunk or ROWS_CHUNK,
        idle_budget=config.idle_budget or ROWS_CHUNK,
        smallest_chunk=config.smallest_chunk or ROWS_CHUNK,
    )
