"""Warm-up: the shapes that requests will bring, computed while nothing is asked, of which nothing is left."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.exact_cases import adapter_of
from tests.harness import Ask, check, run_family, settings_for, shared_adapter
from vlm_batch import Request, VLMBatcher
from vlm_batch.adapters import operations
from vlm_batch.adapters.cuda import plans
from vlm_batch.assets import default_checkpoint
from vlm_batch.caches import Placement
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.shapes import FreeShapes
from vlm_batch.policy import POLICIES
from vlm_batch.proofs.proving import fixed_shapes
from vlm_batch.proofs.shared import SharedCallProofs
from vlm_batch.runtime.device import Device
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.prefix import PrefixCache

FAMILY = "qwen2_vl"
CONFIG = {
    "max_rows": 4,
    "pad_to": 16,
    "max_chunk": 64,
    "prefill_together": 4,
    "together_tokens": 128,
}
ASKS = [
    Ask("text:4:9"),
    Ask("text:6:14"),
    Ask("image:2:1", at=1),
    Ask("text:5:26", at=2),
    Ask("text:9:40", at=2),
]
QUESTION = Request(prompt="count to 5", params={"max_tokens": 8})  # type: ignore[arg-type]
SLAB = {"placement": "slab", "most_rows": 4, "max_chunk": 128}


class Shapes:
    """The shapes of an adapter's forwards: of embeddings (B, L), or of a step's rows and the columns that they see."""

    def __init__(self, adapter: Any, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, tuple[int, ...]]] = []
        plain = adapter.forward

        def forward(ids: Any, embeds: Any, cache: Any, extra: Any) -> mx.array:
            if embeds is not None:
                self.seen.append(("prompt", embeds.shape[:2]))
                return plain(ids, embeds, cache, extra)
            logits = plain(ids, embeds, cache, extra)
            self.seen.append(("step", (len(ids), cache[0].capacity)))
            return logits

        patch.setattr(adapter, "forward", forward)

    def take(self) -> set[tuple[str, tuple[int, ...]]]:
        found, self.seen = set(self.seen), []
        return found


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs are measured here."""
    monkeypatch.setenv("VLM_BATCH_CACHE", str(tmp_path))


@pytest.mark.parametrize("is_exact", [False, True], ids=["by default", "reproducible"])
def test_requests_bring_no_shape_that_was_not_computed(
    is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapter_of(FAMILY, "float32")
    policy = replace(POLICIES[Device.CUDA], grid=256, pad_to=16, call_tokens=64)
    exact = fixed_shapes(adapter, policy=policy) if is_exact else None
    reuse = Reuse(adapter, PrefixCache(ByteBudget(2**28)), shapes=exact or FreeShapes())
    engine = BatchGenerator(
        adapter,
        policy=settings_for(Placement.SLAB, **CONFIG),
        reuse=reuse,
        shapes=exact,
    )
    if exact is not None:
        # proven before it is watched
        assert [exact.prompts(length) for length in (9, 25, 48, 64)] == [4, 2, 1, 1]
    shapes = Shapes(adapter, monkeypatch)
    assert sum(1 for _ in engine.warm_up()) == len(shapes.seen) - 1, (
        "one is of the row that steps are of"
    )
    warmed = shapes.take()
    assert (
        not engine.has_work
        and not engine.rows.batch.rows
        and not len(engine.rows.ledger)
        and not engine.reuse.budget.nbytes
    )
    check(FAMILY, run_family(FAMILY, ASKS, generator=engine))
    assert shapes.take() <= warmed


def test_prompts_of_shapes_that_were_computed_attend_by_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA a plan is made then, and not beside rows that decode."""
    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    monkeypatch.setattr(plans, "takes_plans", lambda queries: True)
    monkeypatch.setattr(plans, "_uses", Counter())
    spelled: list[tuple[int, ...]] = []

    def watch(name: str) -> None:
        plain = getattr(plans, name)

        def watched(queries: mx.array, *rest: Any) -> mx.array:
            spelled.append(queries.shape)
            return plain(queries, *rest)

        monkeypatch.setattr(plans, name, watched)

    watch("attend_unfused")
    watch("attend_before")
    asks = [ask for ask in ASKS if ask.key.startswith("text")]
    engine = BatchGenerator(
        adapter_of(FAMILY, "float32"), policy=settings_for(Placement.SLAB, **CONFIG)
    )
    check(FAMILY, run_family(FAMILY, asks, generator=engine))
    assert spelled, "without a warm-up shapes that come seldom are spelled out"
    for _ in engine.warm_up():
        pass
    spelled.clear()
    check(FAMILY, run_family(FAMILY, asks, generator=engine))
    assert not spelled


def test_lengths_of_reproducible_prompts_are_proven_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request waits for the proof of its length, where there was time for a warm-up."""
    adapter = adapter_of(FAMILY, "float32")
    exact = fixed_shapes(
        adapter,
        policy=replace(POLICIES[Device.CUDA], grid=256, pad_to=16, call_tokens=64),
    )
    engine = BatchGenerator(
        adapter,
        policy=settings_for(Placement.SLAB, **CONFIG),
        reuse=Reuse(adapter, shapes=exact),
        shapes=exact,
    )
    for _ in engine.warm_up():
        pass
    measured: list[int] = []
    monkeypatch.setattr(
        SharedCallProofs,
        "_of_prompts",
        lambda self, count, length: measured.append(length),
    )
    assert [exact.prompts(length) for length in (9, 25, 48, 64)] == [4, 2, 1, 1]
    assert not measured


def test_steps_of_long_rows_are_computed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA attention over slabs of a new shape costs a plan."""
    adapter = adapter_of(FAMILY, "float32")
    config = {"max_rows": 2, "pad_to": 256, "max_chunk": 512, "prefill_together": 1}
    engine = BatchGenerator(adapter, policy=settings_for(Placement.SLAB, **config))
    shapes = Shapes(adapter, monkeypatch)
    for _ in engine.warm_up():
        pass
    warmed = shapes.take()
    assert {shape for kind, shape in warmed if kind == "step"} == {
        (1, 256),
        (2, 256),
        (1, 512),
        (2, 512),
    }
    check(
        FAMILY,
        run_family(
            FAMILY, [Ask("text:4:9"), Ask("text:5:300", at=1)], generator=engine
        ),
    )
    assert shapes.take() <= warmed


def test_there_is_nothing_to_compute_where_rows_keep_caches_of_their_own() -> None:
    engine = BatchGenerator(
        shared_adapter(FAMILY), policy=settings_for(Placement.ROWS, **CONFIG)
    )
    assert list(engine.warm_up()) == []


def wait_until(is_so: Any) -> None:
    waiting = threading.Event()
    for _ in range(6000):
        if is_so():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not come about")


def test_no_counter_moves_and_no_answer_changes() -> None:
    with (
        VLMBatcher(default_checkpoint(), policy=SLAB) as plain,
        VLMBatcher(default_checkpoint(), policy=SLAB, warm_up=True) as warm,
    ):
        wait_until(lambda: warm._loop._warming is None)
        moving = {"mlx_bytes", "max_kv_bytes"}
        one, other = plain.stats(), warm.stats()
        assert [vars(one)[f.name] for f in fields(one) if f.name not in moving] == [
            vars(other)[f.name] for f in fields(other) if f.name not in moving
        ]
        assert (
            warm.submit_request(QUESTION).result().token_ids
            == plain.submit_request(QUESTION).result().token_ids
        )


def test_requests_go_before_whatever_is_left_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A warm-up without an end: its forwards lie between requests, while one is read, and never between a request's steps."""
    asked, beside = threading.Event(), list[bool]()

    def forwards(self: BatchGenerator) -> Iterator[None]:
        assert asked.wait(60)
        while not handle.done():
            beside.append(self.has_work)
            yield

    monkeypatch.setattr(BatchGenerator, "warm_up", forwards)
    with VLMBatcher(default_checkpoint(), warm_up=True) as batcher:
        handle = batcher.submit_request(QUESTION)
        asked.set()
        assert handle.result(timeout=60).ok
        wait_until(lambda: batcher._loop._warming is None)
    assert beside and not any(beside)


def test_a_warm_up_that_raises_ends_and_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forwards(self: Any) -> Iterator[None]:
        yield
        raise RuntimeError("[malloc] Unable to allocate 4096 bytes.")

    monkeypatch.setattr(BatchGenerator, "warm_up", forwards)
    with (
        caplog.at_level(logging.WARNING),
        VLMBatcher(default_checkpoint(), warm_up=True) as batcher,
    ):
        wait_until(lambda: batcher._loop._warming is None)
        assert batcher.submit_request(QUESTION).result().ok
    assert "the warm-up ended early" in caplog.text
