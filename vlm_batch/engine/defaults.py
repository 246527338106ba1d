"""What a scheduler's config leaves open, by the kind of device, as measured (docs/benchmarks.md)."""

from __future__ import annotations

from dataclasses import replace

from vlm_batch.caches import Placement
from vlm_batch.engine.scheduler import SchedulerConfig

#: Prompt tokens of a forward where rows have their own caches (CPUs): 1.42 ms a token, 1.87 at 1,024 (docs/benchmarks.md).
ROWS_CHUNK = 256
#: Where launches decide (GPUs), a forward of 64 tokens takes as long as one of 1,024, and four small pictures as long as one;
#: and matrix products of a new length cost tens of milliseconds, so that prompts are cut only where they have to be.
SLAB_CHUNK = 1024
SLAB_LONGEST = 2048
SLAB_BUDGET = 8192
TOGETHER = {Placement.ROWS: (1, 8), Placement.SLAB: (16, 32)}  # rows encoded and prompts prefilled together
#: Prompt tokens of one array: of 290 each, 16 prompts take 57 ms and 3.5 GB there, 32 take 106 and 6.9.
MAX_TOGETHER = 4096
#: Beside decoding rows one encoder call takes a quarter as many: 48 ms of a gap for 4 pictures of 1,024 patches, 147 for 16.
BESIDE_DECODE = 4
#: Of a step, beside decoding rows: half of the gap between tokens by default. A GPU's launches do not say how long it encodes.
ENCODE_SECONDS = {Placement.ROWS: 0.05, Placement.SLAB: 0.0}


def for_placement(config: SchedulerConfig, placement: Placement) -> SchedulerConfig:
    """What the config leaves open, as measured on devices of a placement."""
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
