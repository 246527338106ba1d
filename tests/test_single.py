"""Models without a verified adapter: one row at a time, whatever kinds of caches their layers have."""

from __future__ import annotations

import pytest

from tests.harness import TOLERANCE, Ask, difference, inputs_of, oracle, run
from tests.zoo import family
from vlm_batch.caches import Placement
from vlm_batch.models.single import SingleRow
from vlm_batch.scheduler import SchedulerConfig


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("name", ["falcon_h1", "lfm2_vl", "llava", "qwen3_5"])
def test_rows_one_after_another(name: str, placement: Placement) -> None:
    """Keys and values, recurrent states, and both in one layer: rows get what they get alone, and leave nothing behind."""
    keys = ("image:1:0", "text:4:9", "image:3:2", "text:4:9", "image:1:0")
    adapter, one = SingleRow(family(name).build()), SchedulerConfig(max_rows=1, encode_ahead=0)
    asks = [Ask(key) for key in keys]
    answers = run(adapter, lambda key: inputs_of(name, key), asks, config=one, placement=placement)
    for answer in answers:
        assert answer.result is not None
        assert answer.result.error is None, answer.result.error
        assert difference(answer, oracle(name, answer.ask.key)) <= TOLERANCE
