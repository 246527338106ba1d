"""Random histories of the engine (``tests.histories``): what must hold after every operation holds, whatever happened."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import queue
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from tests import many_histories
from tests.histories import (
    ACCIDENTS,
    ALLOCATIONS,
    KINDS,
    NO_GOING_ON,
    OPTIONS,
    PICTURES,
    PLACES,
    QUANTISED,
    TEXTS,
    TURBO,
    History,
    act,
    adapter_of,
    play,
)
from tests.many_histories import (
    How,
    News,
    Played,
    play_some,
    read_record,
    record_of,
    show,
    tell_fault,
)
from vlm_batch import Caches, SamplingParams, VLMBatcher, assets
from vlm_batch.caches import Placement
from vlm_batch.engine.compiled import CompiledDecode
from vlm_batch.records import Call, DecodeStep

#: Drawn histories of 120 operations each, 4,320 in all: three of both placements of every kind.
HISTORIES = 12 * 3


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without the warnings of disks that are full; and collections of garbage look at what comes from here on only."""
    logging.disable()
    gc.collect()
    gc.freeze()
    yield
    logging.disable(logging.NOTSET)


class Machine(RuleBasedStateMachine):
    """The same operations, chosen by hypothesis, which finds the shortest history that breaks a promise."""

    @initialize(
        family=st.sampled_from(KINDS),
        placement=st.sampled_from(Placement),
        quantised=st.booleans(),
        drafts=st.booleans(),
    )
    def begin(
        self, family: str, placement: Placement, quantised: bool, drafts: bool
    ) -> None:
        self.history = History(
            family,
            placement,
            is_quantised=quantised and family in QUANTISED,
            drafts=drafts,
        )

    @rule(
        key=st.sampled_from([*TEXTS, *PICTURES]),
        fault=st.sampled_from(["", "", "", *PLACES]),
        at=st.integers(0, 3),
        tokens=st.sampled_from([1, 3, 6]),
        n=st.sampled_from([1, 1, 2]),
        has_form=st.booleans(),
        is_drawn=st.booleans(),
        priority=st.integers(-1, 1),
        client=st.sampled_from([1, 1, 2, -1]),
        is_late=st.booleans(),
    )
    def submit(
        self,
        key: str,
        fault: str,
        at: int,
        tokens: int,
        n: int,
        has_form: bool,
        is_drawn: bool,
        priority: int,
        client: int,
        is_late: bool,
    ) -> None:
        exact = not self.history.is_quantised
        self.history.submit(
            key,
            max_tokens=tokens,
            temperature=0.9 if is_drawn and exact and fault != "sample" else 0.0,
            seed=10**6 + self.history.counts["submit"] if fault == "sample" else 11,
            n=n if is_drawn and exact and fault != "sample" else 1,
            has_form=has_form and exact,
            priority=priority,
            client=client,
            is_late=is_late,
            fault=fault,
            fault_at=0 if fault in ("load", "encode", "prefill") else at,
        )

    @rule(which=st.integers(0, 7), count=st.integers(1, 4))
    def load(self, which: int, count: int) -> None:
        self.history.load(which, count)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.history.step()

    @rule(which=st.integers(0, 15))
    def cancel(self, which: int) -> None:
        self.history.cancel(which)

    @rule(key=st.sampled_from(TEXTS), options=st.sampled_from(OPTIONS))
    def score(self, key: str, options: tuple[tuple[int, ...], ...]) -> None:
        self.history.submit(key, options=options, client=3)

    @rule()
    def press(self) -> None:
        self.history.press()

    @rule(kind=st.sampled_from(ACCIDENTS), after=st.integers(1, ALLOCATIONS))
    def accident(self, kind: str, after: int) -> None:
        self.history.accident(kind, after if kind == "allocation" else 1)

    @rule()
    def finish(self) -> None:
        self.history.finish()

    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.history.close()


def test_no_history_breaks_a_promise() -> None:
    quick = settings(
        max_examples=40,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Machine, settings=quick)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_histories(kind: str) -> None:
    """The same ones each time; ``python -m tests.histories`` plays as many as there is time for."""
    happened: Counter[str] = Counter()
    for seed in range(KINDS.index(kind), HISTORIES, len(KINDS)):
        happened += play(seed)
    assert happened["operations"] == 120 * HISTORIES // len(KINDS)
    assert (
        happened["recomputed"]
        and happened["cancelled"]
        and happened["error"]
        and happened["stop"] + happened["length"]
    )


#: Kinds whose keys and values TurboQuant codes, beside what it leaves alone.
TURNED = (
    "qwen2_5_vl",  # positions in three dimensions
    "qwen3_vl_moe",  # experts
    "gemma3n",  # windows, and layers that share keys
    "mimo_v2",  # values of another width, and sinks
    "qwen3_5",  # recurrent states beside full attention
    "falcon_h1",  # recurrent states and full attention in one layer
    "mllama",  # cross-attention
    "nemotron_parse",  # an encoder
    "kimi_vl",  # latent attention that makes its keys whole; kimi_k25's is refused (tests/test_kv_quant.py)
    "paligemma",  # prompts that attend both ways
)


@pytest.mark.parametrize("kind", TURNED)
def test_histories_with_turboquant(kind: str) -> None:
    """Forty operations in each placement, with drafts, kept beginnings, and conversations that go on."""
    coded, _ = TURBO.counts(adapter_of(kind).make_cache())
    assert coded
    for placement in Placement:
        draw = random.Random(f"{kind} {placement.value}")
        history = History(kind, placement, is_quantised=True, drafts=True)
        for _ in range(40):
            act(history, draw)
        history.finish()
        history.close()
        assert history.counts["length"] + history.counts["stop"]


@pytest.mark.parametrize(
    "placement", list(Placement), ids=lambda placement: placement.value
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NO_GOING_ON])
def test_an_answer_held_to_a_form_is_gone_on_with_from_what_its_caches_have_seen(
    kind: str, placement: Placement
) -> None:
    """Its last token is in them when it is read, and recurrent states cannot be cut back to the one before."""
    history = History(kind, placement)
    history.submit("text:6:14", max_tokens=10, has_form=True, return_cache=True)
    history.finish()
    for cache in history.caches:
        history.submit("", max_tokens=3, cache=cache)
    history.finish()
    assert history.counts["submit"] == 2
    history.close()


def test_a_history_is_a_function_of_its_seed() -> None:
    assert play(3, 40) == play(3, 40)


def test_the_history_that_fails_is_told_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def plays(seed: int, length: int) -> Counter[str]:
        assert seed != 12, "a promise"
        return Counter(operations=length)

    monkeypatch.setattr(many_histories, "play", plays)
    seeds = multiprocessing.Value("q", 10)
    news = queue.SimpleQueue[News]()
    played = Played()
    play_some(0, How(length=5), seeds, threading.Event(), news)
    while not news.empty():
        played.take(news.get())
    assert (played.histories, played.counts, list(played.faults)) == (
        2,
        Counter(operations=10),
        [12],
    )
    assert "a promise" in played.faults[12] and not played.begun
    tell_fault(12, played.faults[12], How(length=5))
    said = capsys.readouterr().out
    assert (
        "BROKEN, seed 12 (qwen2_vl): AssertionError: a promise\n" in said
        and "--seed 12 --length 5" in said
    )
    record = record_of(played, 10, How(length=5), 1.0)
    assert (
        record.first,
        record.last,
        record.counts["operations"],
        list(record.faults),
    ) == (10, 12, 10, ["12"])


def test_the_outputs_of_runs_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = How(length=5)
    files = [tmp_path / name for name in ("a", "b", "again", "killed")]
    parts = [
        Played(Counter(operations=10, stop=1), 2),
        Played(Counter(operations=5), 1, faults={21: "a promise"}),
    ]
    for file, part, first in zip(files, [*parts, parts[0]], (10, 20, 11), strict=False):
        file.write_text(
            f"10 operations\n{record_of(part, first, how, 2.0).to_json()}\n"
        )
    files[3].write_text("10 operations\n")
    assert (
        show([read_record(files[0])]) == 0
        and "none has broken" in capsys.readouterr().out
    )
    assert show([read_record(files[1]), read_record(files[0])]) == 1
    said = capsys.readouterr().out
    assert (
        "15 operations in 3 histories, seeds 10 to 11, 20 to 21, in 4 s" in said
        and "stop: 1" in said
    )
    assert "--seed 21 --length 5" in said and "1 have broken a promise" in said
    with pytest.raises(ValueError, match="11 was played twice"):
        show([read_record(files[0]), read_record(files[2])])
    with pytest.raises(ValueError, match="killed does not end"):
        read_record(files[3])


def test_a_history_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads ask, cancel and break a real batcher at once: every answer is what it is alone."""
    # a graph's steps would not come by ``flaky``
    monkeypatch.setattr(CompiledDecode, "USES_BEFORE_UNFUSED", 10**9)
    asks = [f"count to {number}" for number in range(1, 10)]

    def broken(tokens: mx.array, logits: mx.array) -> mx.array:
        raise ValueError("of the test")

    with VLMBatcher(
        assets.default_checkpoint(), max_rows=8, caches=Caches(300_000)
    ) as batcher:
        alone = {
            prompt: batcher.submit(None, prompt).result(60).text for prompt in asks
        }
        adapter = batcher._loop.generator.adapter
        decode, calls = adapter.decode, 0

        def flaky(step: DecodeStep, call: Call) -> mx.array:
            nonlocal calls
            calls += step.tokens.shape[0] > 1
            if step.tokens.shape[0] > 1 and calls % 15 == 0:
                raise RuntimeError(
                    "[malloc] Unable to allocate 1 bytes"
                    if calls % 30
                    else "a bad moment"
                )
            return decode(step, call)

        adapter.decode = flaky  # type: ignore[assignment,method-assign]
        wrong: list[str] = []

        def ask(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(60):
                prompt, how = draw.choice(asks), draw.random()
                params = (
                    SamplingParams(logits_processors=[broken])
                    if how < 0.1
                    else SamplingParams()
                )
                handle = batcher.submit(
                    None, prompt, params=params, priority=draw.randrange(2)
                )
                if how > 0.85:
                    handle.cancel()
                result = handle.result(timeout=60)
                right = {
                    "error": how < 0.1 and "of the test" in str(result.error),
                    "cancelled": how > 0.85 and alone[prompt].startswith(result.text),
                }.get(result.finish_reason, result.text == alone[prompt])
                if not right:
                    wrong.append(f"{prompt}: {result}")

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not wrong
        stats = batcher.stats()
        assert (stats.queued, stats.waiting, stats.prefilling, stats.decoding) == (
            0,
            0,
            0,
            0,
        )
        assert stats.finished + stats.failed + stats.cancelled == 4 * 60 + len(asks)
        assert stats.recomputed > 0
