"""Want of memory at every point: whichever allocation fails, layers stay alike, and every request has the answer that it has
alone."""

from __future__ import annotations

import itertools

import pytest

from tests.allocations import WANT, announced, check_alike
from tests.harness import inputs_of, oracle, settings_for, shared_adapter
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import Placement
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine import retry
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.work import Failed
from vlm_batch.types import Result, SamplingParams

#: By family, the prompts and the tokens of their answers: plain keys and values, the same in few bits, windows beside them,
#: blocks of positions, recurrent states, states and keys in one layer, pictures' own layers. The first still decodes when the
#: last, which is longer, joins it.
ASKS = {
    "qwen2_vl": {"text:4:9": 6, "image:2:1": 3, "text:5:26": 2},
    "qwen2_vl in few bits": {"text:4:9": 5, "text:5:26": 2},
    "qwen2_vl together": {"text:4:9": 3, "text:7:9": 3},
    "gemma3n": {"text:4:9": 5, "text:5:26": 2},
    "llama4": {"text:4:9": 5, "text:5:26": 2},
    "qwen3_5": {"text:4:9": 5, "text:5:26": 2},
    "falcon_h1": {"text:4:9": 5, "text:5:26": 2},
    "mllama": {"text:4:9": 5, "image:2:1": 2},
}


class Want:
    """Counts allocations, and fails the ``at``-th of them."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise RuntimeError(WANT)


def answers(
    family: str, placement: Placement, want: Want
) -> tuple[dict[str, Result], int]:
    """The results of requests that come a step after one another, or at once, and how often one began again; after each step
    layers are looked at."""
    name, _, how = family.partition(" ")
    kv = KVQuantisation(8, 32, "uniform", 0) if how == "in few bits" else None
    config = {"max_rows": 4, "prefill_together": 2}
    generator = BatchGenerator(
        shared_adapter(name), policy=settings_for(placement, **config), kv=kv
    )
    results: dict[str, Result] = {}
    asked, steps = iter(ASKS[family].items()), itertools.count()
    while len(results) < len(ASKS[family]):
        step = next(steps)
        assert step < 200, "requests that do not end"
        for key, count in itertools.islice(asked, 2 if how == "together" else 1):
            params = SamplingParams(max_tokens=count, ignore_eos=True)
            generator.insert(key, as_mlx(inputs_of(name, key)), params)
        with announced(want):
            events = generator.step()
        results |= {
            event.request_id: event.result
            for event in events
            if event.result is not None
        }
        for group in generator.rows.batch.groups:
            check_alike(group)
    return results, generator.retry.num_recomputed


@pytest.mark.parametrize(
    "placement", list(Placement), ids=lambda placement: placement.value
)
@pytest.mark.parametrize("family", ASKS)
def test_whichever_allocation_fails_every_answer_is_as_alone(
    family: str, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slabs grow by 8 columns and rows by 8 positions, so that all of them grow while rows decode and when one joins."""
    monkeypatch.setattr("vlm_batch.caches.slab.CAPACITY_STEP", 8)
    monkeypatch.setattr("vlm_batch.caches.coded.STEP", 8)
    monkeypatch.setattr("mlx_vlm.models.cache.KVCache.step", 8)
    # it takes most of the time, and has tests of its own
    monkeypatch.setattr(retry, "release_memory", lambda: None)
    calm = Want()
    right, again = answers(family, placement, calm)
    assert calm.count > 9 and not again
    if "bits" not in family:
        for key, result in right.items():
            assert (
                list(result.token_ids)
                == oracle(family.split()[0], key).tokens[: len(result.token_ids)]
            )
    begun = 0
    for at in range(1, calm.count + 1):
        found, again = answers(family, placement, Want(at))
        begun += again
        for key, result in found.items():
            assert result.token_ids == right[key].token_ids, (
                f"allocation {at} of {calm.count}: {result.error}"
            )
    assert begun > calm.count // 2  # in the others prompts were made again one by one


def test_a_row_that_has_ended_is_not_ended_again() -> None:
    """Two failures of one call may be the same row's: the second finds that it has ended."""
    generator = BatchGenerator(shared_adapter("qwen2_vl"))
    generator.insert(
        "one", as_mlx(inputs_of("qwen2_vl", "text:4:9")), SamplingParams(max_tokens=2)
    )
    row = generator.rows.ledger["one"]
    for error in (ValueError("first"), MemoryError("second"), ValueError("third")):
        generator.retry.settle(Failed([row], error))
    (event,) = generator.rows.tell()
    assert event.result is not None and "first" in str(event.result.error)
