"""While somebody waits for a first token, others rest, and go on to the same answers. Launches are counted, not seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from tests.harness import inputs_of, settings_for, shared_adapter
from tests.serving import IMAGES
from vlm_batch import VLMBatcher
from vlm_batch.arrays import as_mlx
from vlm_batch.assets import default_checkpoint
from vlm_batch.caches import Placement
from vlm_batch.engine import pressure, rows
from vlm_batch.engine.constraints import Untold
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.row import Prompt, Row, new_row
from vlm_batch.engine.schedule import MOST_RESTED
from vlm_batch.handle import Handle
from vlm_batch.records import Terms
from vlm_batch.runtime.available import Available
from vlm_batch.types import Request, SamplingParams

PLACES = 4
#: The chat's client, another, and one that has what nobody wants.
CHAT, BURST, BATCH = 1, 2, -1
#: Seconds of the tests' clock between two steps.
STEP = 0.01


class Counted:
    """A generator of which each launch is noted, as (what, clients), on a clock that a test moves."""

    def __init__(self, placement: Placement = Placement.ROWS, **policy: Any) -> None:
        # by no measured time
        fixed = {"prefill_budget": 64, "encode_seconds": 0.0}
        policy = {"max_rows": PLACES, **fixed, **policy}
        self.generator = BatchGenerator(
            shared_adapter("qwen2_vl"), policy=settings_for(placement, **policy)
        )
        self.launched: list[tuple[str, frozenset[int]]] = []
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.told: Counter[str] = Counter()
        self.now, self.seconds = 1.0, STEP
        runner = self.generator.runner
        ledger = self.generator.rows.ledger
        self._note(runner, "encode", lambda given: given)
        self._note(runner, "decode", lambda group: group.rows)
        self._note(runner, "prefill", lambda work: [ledger[one] for one in work.rows])

    def _note(
        self, runner: Any, name: str, rows_of: Callable[[Any], list[Row]]
    ) -> None:
        launch = getattr(runner, name)

        def noted(given: Any) -> Any:
            clients = frozenset(row.client for row in rows_of(given))
            self.launched.append((name, clients))
            return launch(given)

        setattr(runner, name, noted)

    def ask(self, name: str, client: int, key: str, tokens: int) -> None:
        params = SamplingParams(
            max_tokens=tokens, temperature=1.0, seed=len(name), ignore_eos=True
        )
        prompt = Prompt(inputs=as_mlx(inputs_of("qwen2_vl", key)))
        row = new_row(name, prompt, params, terms=Terms(client=client))
        row.clock.submitted = self.now
        self.generator.rows.add(row)

    def bulk(self, client: int, count: int, tokens: int = 60) -> None:
        for at in range(count):
            self.ask(f"bulk {client} {at}", client, "image:2:1", tokens)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += self.seconds
            for event in self.generator.step():
                self.told[event.request_id] += event.token is not None
                if event.result is not None:
                    assert event.result.error is None
                    self.tokens[event.request_id] = event.result.token_ids

    def of(self, client: int) -> int:
        return sum(client in clients for _, clients in self.launched)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counted]:
    def make(placement: Placement = Placement.ROWS, **policy: Any) -> Counted:
        made = Counted(placement, **policy)
        clock = SimpleNamespace(perf_counter=lambda: made.now)
        monkeypatch.setattr(rows, "time", clock)
        return made

    return make


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("bulk", [BURST, BATCH])
@pytest.mark.parametrize("steps", [20, 33])
def test_nothing_of_others_is_launched_before_a_first_token(
    counted: Callable[..., Counted], placement: Placement, bulk: int, steps: int
) -> None:
    """All places are another's, with prompts in each stage: who comes gets one, its prompt, and its token."""
    made = counted(placement)
    made.bulk(bulk, 30)
    made.step(steps)
    made.launched.clear()
    made.ask("chat", CHAT, "text:5:26", 8)
    while not made.told["chat"]:
        made.step()
        assert len(made.launched) < 9
    assert made.of(bulk) == 0
    assert made.of(CHAT) >= 2  # encoded, prefilled
    made.launched.clear()
    made.step(2)
    assert made.of(bulk) > 0


def test_a_step_behind_a_rest_is_not_timed(
    counted: Callable[..., Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing, or waits for a prompt: by its time neither the pace nor the number of rows is chosen."""
    made = counted(max_rows=None, first_rows=PLACES, most_rows=PLACES)
    made.bulk(BURST, PLACES)
    made.step(20)
    timed: list[str] = []
    limit = made.generator.capacity.limit
    assert limit is not None
    for name, what in (("pace", made.generator._pace), ("rows", limit)):
        monkeypatch.setattr(
            what, "record", lambda *_, name=name, **__: timed.append(name)
        )
    made.step(2)
    assert timed == ["pace", "rows"] * 2
    timed.clear()
    made.ask("chat", CHAT, "text:5:26", 8)
    while not made.told["chat"]:
        made.step()
    made.launched.clear()
    made.step()
    assert ("decode", frozenset({BURST, CHAT})) in made.launched
    assert timed == []
    made.step(2)
    assert timed == ["pace", "rows"] * 2


def test_a_step_ends_where_somebody_comes(counted: Callable[..., Counted]) -> None:
    """What is launched when another's request comes is the last of its step."""
    for client, is_last in ((CHAT, True), (BATCH, False)):
        for last in range(1, 4):
            made = counted()
            made.bulk(BATCH, 30)
            launched = made.launched
            made.generator.callers = lambda: (  # type: ignore[method-assign]
                [client] if len(launched) >= last else []  # noqa: B023
            )
            made.step()
            assert (len(launched) == last) is is_last, (client, last, launched)


def test_who_calls_does_not_stop_its_own_prompts(
    counted: Callable[..., Counted],
) -> None:
    """A client with many requests, of which one is read in each step, beside another's that waits."""

    def steps(callers: list[int]) -> int:
        made = counted()
        made.bulk(BATCH, 1)
        made.bulk(CHAT, 3 * PLACES, tokens=9)
        made.generator.callers = lambda: callers  # type: ignore[method-assign]
        count = 0
        while len(made.tokens) < 3 * PLACES:
            made.step()
            count += 1
        return count

    assert steps([CHAT]) == steps([])


@pytest.mark.parametrize("bulk", [BURST, BATCH])
def test_others_have_half_of_the_time_whoever_comes(
    counted: Callable[..., Counted], bulk: int
) -> None:
    """A client whose next request comes with the answer to the last, without end: the bulk work goes on beside it."""
    made = counted()
    made.bulk(bulk, 30, tokens=500)
    made.step(20)
    made.launched.clear()
    made.seconds = 0.05
    steps = int(6 * MOST_RESTED / made.seconds)
    asked, last = 0, 0
    for _ in range(steps):
        if made.told[f"chat {asked}"] or not asked:
            asked += 1
            made.ask(f"chat {asked}", CHAT, f"text:{asked % 9}:9", 1)
        before = made.of(bulk)
        made.step()
        last += made.of(bulk) > before
    assert last >= steps / 2 - MOST_RESTED / made.seconds
    assert asked > steps / 20


def test_a_row_that_memory_has_no_room_for_holds_nobody_up(
    counted: Callable[..., Counted],
) -> None:
    made = counted()
    made.bulk(BURST, PLACES)
    made.step(20)
    made.generator.memory.fits = lambda lengths: len(lengths) <= PLACES  # type: ignore[method-assign]
    # more than are encoded ahead
    for at in range(4):
        made.ask(f"chat {at}", CHAT, "text:5:26", 8)
    made.step(3)
    made.launched.clear()
    made.step(5)
    assert [what for what, _ in made.launched] == ["decode"] * 5
    made.step(300)
    assert len(made.tokens) == PLACES + 4


def test_a_row_that_the_encoder_has_no_room_for_holds_nobody_up(
    counted: Callable[..., Counted],
) -> None:
    made = counted()
    made.bulk(BURST, PLACES)
    made.step(20)
    made.generator.runner.encoding.fits = lambda nbytes: False  # type: ignore[method-assign]
    made.ask("chat", CHAT, "image:3:0", 8)
    made.step(3)
    made.launched.clear()
    made.step(5)
    assert [what for what, _ in made.launched] == ["decode"] * 5
    made.step(200)
    assert len(made.tokens) == PLACES + 1


def test_a_row_that_gave_way_keeps_no_place_while_its_form_is_late(
    counted: Callable[..., Counted],
) -> None:
    """One that was parked for that alone does: it goes on as soon as its form has its mask."""
    for logits, free in ((None, 1), (mx.zeros((1, 160)), 0)):
        made = counted()
        made.bulk(BURST, PLACES)
        made.step(20)
        held = made.generator.rows
        row = held.live()[0]
        held.park(row, logits)
        late: Any = SimpleNamespace(rules=True, untold=Untold(1, None))
        row.answer.guide = late
        assert held.num_free == free


def test_parked_rows_give_their_memory_back_to_a_system_that_is_short_of_it(
    counted: Callable[..., Counted],
) -> None:
    def play(total: int) -> Counted:
        made = counted()
        made.seconds = pressure.EVERY
        guard, ledger = made.generator.guard, made.generator.rows.ledger
        guard.clock = lambda: made.now
        made.bulk(BURST, PLACES)
        made.step(20)
        made.ask("chat 0", CHAT, "text:5:26", 30)
        made.ask("chat 1", CHAT, "text:6:26", 30)
        while len(made.generator.rows.parked()) < 2:
            made.step()
        guard.read = lambda: Available(0, total)
        made.step(3)
        assert len(made.generator.rows.parked()) == (0 if total else 2)
        guard.read = lambda: Available(total, total)
        for _ in range(400):
            made.step()
        assert not len(ledger)
        return made

    assert play(1 << 34).tokens == play(0).tokens


def test_nobody_rests_for_a_row_that_waits_for_their_prompts(
    counted: Callable[..., Counted],
) -> None:
    """The beginning of its prompt is another's that is in prefill."""
    made = counted()
    made.generator.reuse.waits_for = (  # type: ignore[method-assign]
        lambda row, others: row.client == CHAT
    )
    made.bulk(BATCH, 9)
    made.step(7)
    made.launched.clear()
    made.ask("chat", CHAT, "text:5:26", 8)
    made.step(5)
    assert made.of(BATCH) >= 5


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("bulk", [BURST, BATCH])
def test_rows_that_rest_give_the_same_answers(
    counted: Callable[..., Counted], placement: Placement, bulk: int
) -> None:
    def play(chats: int) -> dict[str, tuple[int, ...]]:
        made = counted(placement)
        made.bulk(bulk, 7, tokens=30)
        for at in range(chats):
            made.step(5 + at)
            made.ask(f"chat {at}", CHAT, f"text:{at}:9", 6)
        while made.generator.has_work:
            made.step()
        return made.tokens

    alone, beside = play(0), play(8)
    assert {name: beside[name] for name in alone} == alone
    for at in range(8):
        made = counted(placement)
        made.ask(f"chat {at}", CHAT, f"text:{at}:9", 6)
        made.step(20)
        assert made.tokens[f"chat {at}"] == beside[f"chat {at}"]


def test_who_comes_in_the_middle_of_a_step_waits_for_one_launch() -> None:
    """From ``submit`` on, while its prompt is tokenized too, nothing of a batch's is launched that was not."""
    with VLMBatcher(default_checkpoint(), max_rows=PLACES) as batcher:
        launched: list[str] = []
        chats: list[Handle] = []
        begun: list[int] = []
        runner = batcher._loop.generator.runner

        def note(name: str) -> None:
            launch = getattr(runner, name)

            def noted(given: Any) -> Any:
                launched.append(name)
                # in each kind of launch, once all is under way
                if len(launched) > 60 and name == kinds[len(chats) % len(kinds)]:
                    is_next = not chats or chats[-1].done()
                    if is_next and len(chats) < 6:
                        chats.append(ask(CHAT, "count to 3"))
                        begun.append(len(launched))
                return launch(given)

            setattr(runner, name, noted)

        def ask(client: int, prompt: str, **media: Any) -> Handle:
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            request = Request(prompt=prompt, params=params, client=client, **media)
            return batcher.submit_request(request)

        kinds = ("encode", "decode", "prefill")
        for name in kinds:
            note(name)
        picture = (IMAGES / "red_circle.png").read_bytes()
        bulk = [ask(BATCH, f"{at}", images=[picture]) for at in range(60)]
        assert all(one.result(timeout=60).ok for one in bulk)
        assert len(chats) == 6
        assert all(one.result(timeout=60).ok for one in chats)
        for first in begun:
            # its own are those of a prompt: encoded, and prefilled in one chunk
            assert launched[first : first + 2] == ["encode", "prefill"]
