"""Where ten times as many requests come as fit, all are answered, about in their order, and each client has its share."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fairness import LOOK_AHEAD, oversubscribe
from tests.harness import inputs_of, settings_for, shared_adapter
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import Placement
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.row import Prompt, new_row
from vlm_batch.engine.several import Several
from vlm_batch.types import SamplingParams


def test_ten_times_as_many_as_fit_wait_in_their_order() -> None:
    fit = 4
    waited, most, _ = oversubscribe(10 * fit, fit)
    assert [one.result.finish_reason for one in waited] == ["length"] * (10 * fit)
    assert most <= fit
    # a picture takes longer to be read than a text, and those that are read are encoded some at a time
    assert max(one.overtaken for one in waited) <= LOOK_AHEAD + fit


#: (request, client, prompt, answers): one client's would fill all places twice over.
ASKED = [
    *((f"many {at}", 1, f"text:{at}:9", 4) for at in (1, 2)),
    ("one", 2, "image:2:1", 1),
    ("two", 3, "text:5:26", 2),
]
PLACES = 4


def answers(family: str, placement: Placement, asked: list[tuple[str, int, str, int]]) -> dict[str, tuple[int, ...]]:
    """Tokens by row; each request of another client comes ten steps after the one before. At most ``PLACES`` live, and whoever
    waits with less than an even share gets it."""
    generator = BatchGenerator(shared_adapter(family), policy=settings_for(placement, max_rows=PLACES))
    ends: dict[str, tuple[int, ...]] = {}
    waited: Counter[str] = Counter()
    coming, step = list(asked), 0
    while coming or generator.has_work:
        while coming and step >= 10 * (coming[0][1] - 1):
            name, client, key, n = coming.pop(0)
            params = SamplingParams(max_tokens=40, temperature=1.0, seed=len(name), n=n, ignore_eos=True)
            row = new_row(name, Prompt(inputs=as_mlx(inputs_of(family, key))), params, client=client)
            generator.rows.add(row)
        for event in generator.step():
            if event.result is not None:
                assert event.result.error is None, event.result.error
                ends[event.request_id] = event.result.token_ids
        placed = generator.rows.placed
        assert placed.total() <= PLACES
        if len(asked) > 1:
            waited.update(name for name in generator.rows.waiting.prepared if name in ("one", "two"))
        step += 1
        assert step < 2000
    assert all(count <= 4 for count in waited.values()), waited
    return ends


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "qwen3_5", "mllama"])
def test_clients_share_places_and_nobody_gets_another_answer(family: str, placement: Placement) -> None:
    """Rows of the client that has most give places up, with what they have, and go on from there later."""
    alone: dict[str, tuple[int, ...]] = {}
    for request in ASKED:
        alone |= answers(family, placement, [(request[0], 1, *request[2:])])
    assert len(alone) == sum(len(Several(name, n).row_ids) for name, _, _, n in ASKED)
    assert answers(family, placement, ASKED) == alone
