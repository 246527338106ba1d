"""Models without a verified adapter: one row at a time, whatever kinds of caches their layers have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.harness import (
    TOLERANCE,
    Answer,
    Ask,
    difference,
    inputs_of,
    oracle,
    run,
    settings_for,
)
from tests.zoo import family, generate_alone
from vlm_batch.adapters.single import SingleRow
from vlm_batch.caches import Placement
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.models.deepseek_v4 import DeepseekV4

ONE = {"max_rows": 1, "encode_ahead": 0}
#: Families whose state is of kinds that no other has: several caches a layer, and one for all layers.
OF_THEIR_OWN = ["deepseek_v4", "deepseek_v4_text", "deepseek_v41"]


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("name", ["falcon_h1", "lfm2_vl", "llava", "qwen3_5"])
def test_rows_one_after_another(name: str, placement: Placement) -> None:
    """Keys and values, recurrent states, and both in one layer: rows get what they get alone, and leave nothing behind."""
    keys = ("image:1:0", "text:4:9", "image:3:2", "text:4:9", "image:1:0")
    adapter = SingleRow(family(name).build())
    answers = run(
        adapter,
        lambda key: inputs_of(name, key),
        [Ask(key) for key in keys],
        config=ONE,
        placement=placement,
    )
    for answer in answers:
        assert answer.result is not None
        assert answer.result.error is None, answer.result.error
        assert difference(answer, oracle(name, answer.ask.key)) <= TOLERANCE


class Marked(SingleRow):
    """Pictures whose ids follow the vocabulary, which are otherwise refused as another tokenizer's."""

    image_token_ids = DeepseekV4.image_token_ids  # type: ignore[assignment]


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_mlx_vlms_own_answers(name: str, placement: Placement) -> None:
    """Lengths below and above windows and pools, pictures, and again after others and after a cancelled row: what mlx-vlm's
    loop answers to the whole prompt on a model of its own, right or wrong."""
    texts = [f"text:{length}:{length}" for length in (2, 5, 9, 17, 40)]
    pictures = [] if family(name).text_only else ["image:1:0", "image:3:2", "two:7"]
    cancelled = Ask("text:9:40", tokens=30, cancel_at=5)
    asks = [cancelled, *map(Ask, [*texts, *pictures, *texts[::-1], *pictures])]
    adapter = (Marked if name == "deepseek_v4" else SingleRow)(family(name).build())
    engine = BatchGenerator(adapter, policy=settings_for(placement, **ONE))
    answers = run(
        adapter, lambda key: inputs_of(name, key), asks, config=ONE, generator=engine
    )
    assert answers[0].result is not None
    assert answers[0].result.finish_reason == "cancelled"
    check_alone(name, answers[1:])


def check_alone(name: str, answers: Sequence[Answer]) -> None:
    for answer in answers:
        assert answer.result is not None
        assert answer.result.error is None, answer.result.error
        model = family(name).build()
        trace = generate_alone(
            model,
            inputs_of(name, answer.ask.key),
            answer.ask.tokens,
            prefill_step_size=None,
        )
        assert list(answer.result.token_ids) == trace.tokens
        assert np.abs(np.stack(answer.logprobs) - trace.logprobs).max() <= TOLERANCE
