"""Rows handed to workers that die, against a Ray that is made up: every row once, whoever dies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import pytest

from vlm_batch.jobs.workers import MAX_DEATHS, MAX_ROW_DEATHS, NoWorkers, Workers
from vlm_batch.types import Request, Result


class Died(Exception):
    """As Ray says it of an actor, or its machine."""


class Raised(Died):
    """As Ray says it of what a call raised."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


@dataclass(eq=False)
class Actor:
    """As Ray's handles, with an identity."""

    number: int
    load: SimpleNamespace
    ask: SimpleNamespace


class MadeUp:
    """Ray, with actors that answer in any order and die by chance, or of rows whose prompt is "poison".

    ``broken`` are actors by number that cannot load, and what they say.
    """

    exceptions = SimpleNamespace(RayError=Died, RayTaskError=Raised)

    def __init__(
        self,
        chance: random.Random,
        *,
        death_rate: float = 0.0,
        broken: Mapping[int, str] = MappingProxyType({}),
        kills_everything: bool = False,
        room: int = 4,
    ) -> None:
        self.chance, self.death_rate, self.broken = chance, death_rate, broken
        self.kills_everything, self.room = kills_everything, room
        self.rows: dict[int, dict[str, Request]] = {}  # by actor and reference
        self.loading: dict[int, str] = {}
        self.loads: Counter[int] = Counter()
        self.ended: dict[str, Result | str | Died] = {}
        self.asked: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()
        self.most = self.num_refs = 0
        self.cancelled: list[str] = []

    def workers(
        self, count: int, say: Callable[[str], None] = lambda text: None
    ) -> Workers:
        return Workers(
            self, [self.actor(number) for number in range(count)], (), self.room, say
        )

    def actor(self, number: int) -> Actor:
        self.rows[number] = {}
        load = SimpleNamespace(remote=lambda: self.load(number))
        ask = SimpleNamespace(remote=lambda request: self.ask(number, request))
        return Actor(
            number=number,
            load=SimpleNamespace(options=lambda max_task_retries: load),
            ask=ask,
        )

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 0.0, "memory": 1.0}

    def load(self, number: int) -> str:
        self.loads[number] += 1
        self.loading[number] = ref = self.reference()
        return ref

    def ask(self, number: int, request: Request) -> str:
        assert number not in self.loading, "a row for a worker that is not there"
        self.rows[number][ref := self.reference()] = request
        self.asked[str(request.request_id)] += 1
        self.most = max(self.most, len(self.rows[number]))
        return ref

    def reference(self) -> str:
        self.num_refs += 1
        return f"reference {self.num_refs}"

    def wait(
        self, refs: list[str], *, num_returns: int, timeout: float
    ) -> tuple[list[str], list[str]]:
        if num_returns == 1 and not any(ref in self.ended for ref in refs):
            self.happen()
        return [ref for ref in refs if ref in self.ended][:num_returns], []

    def get(self, ref: str) -> Result | str:
        value = self.ended.pop(ref)
        if isinstance(value, Died):
            raise value
        return value

    def cancel(self, ref: str) -> None:
        self.cancelled.append(ref)

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        assert no_restart
        self.rows.pop(actor.number)
        self.loading.pop(actor.number, None)

    def happen(self) -> None:
        """Have one actor load, answer or die."""
        busy = [
            number
            for number in self.rows
            if self.rows[number] or number in self.loading
        ]
        assert busy, "nothing can happen any more"
        number = self.chance.choice(busy)
        if number in self.loading:
            ref = self.loading.pop(number)
            # Ray has loaded it five times by then
            dies = self.chance.random() < self.death_rate / 10
            self.ended[ref] = Died("killed") if dies else f"machine {number}"
            if number in self.broken:
                self.ended[ref] = Raised(ValueError(self.broken[number]))
            return
        poisoned = any(
            request.prompt == "poison" for request in self.rows[number].values()
        )
        if poisoned or self.kills_everything or self.chance.random() < self.death_rate:
            self.answer(number, self.chance.randrange(2))
            for ref, request in self.rows[number].items():
                self.deaths[str(request.request_id)] += 1
                self.ended[ref] = Died("killed")
            self.rows[number] = {}
        else:
            self.answer(number, 1 + self.chance.randrange(2))

    def answer(self, number: int, count: int) -> None:
        fine = (
            []
            if self.kills_everything
            else [ref for ref, r in self.rows[number].items() if r.prompt != "poison"]
        )
        for ref in self.chance.sample(fine, min(count, len(fine))):
            request = self.rows[number].pop(ref)
            self.ended[ref] = Result(
                request_id=str(request.request_id), text=str(request.prompt)
            )


def rows(count: int, poison: set[int] = frozenset()) -> Iterator[Request]:  # type: ignore[assignment]
    for number in range(count):
        yield Request(
            prompt="poison" if number in poison else f"row {number}",
            request_id=f"r{number}",
        )


@pytest.mark.parametrize("seed", range(60))
def test_every_row_is_answered_once_whoever_dies(seed: int) -> None:
    chance = random.Random(seed)
    made_up = MadeUp(
        chance,
        death_rate=chance.choice([0.0, 0.02, 0.1]),
        room=chance.choice([1, 3, 8]),
    )
    poison = set(chance.sample(range(80), chance.choice([0, 1, 3])))
    results: list[Result] = []
    lost = None
    try:
        results += made_up.workers(chance.choice([1, 2, 5])).as_completed(
            rows(80, poison)
        )
    except NoWorkers as error:
        # by chance one place saw many deaths: what was answered is answered once all the same
        lost = error
    by_id = Counter(result.request_id for result in results)
    assert set(by_id.values()) <= {1}
    assert lost is not None or len(by_id) == 80
    assert made_up.most <= made_up.room
    for result in results:
        if result.error is not None:
            # no row is blamed before
            assert made_up.deaths[result.request_id] == MAX_ROW_DEATHS
            assert "workers died while they answered this row" in result.error
        else:
            assert result.request_id not in {f"r{number}" for number in poison}
            assert result.text == f"row {result.request_id[1:]}"


def test_a_row_that_kills_fails_alone() -> None:
    """All others are answered, however many were in flight beside it at the first two deaths."""
    made_up = MadeUp(random.Random(1), room=8)
    results = list(made_up.workers(2).as_completed(rows(50, {3, 20})))
    assert sorted(result.request_id for result in results if result.error) == [
        "r20",
        "r3",
    ]
    assert len(results) == 50


def test_workers_that_die_of_everything_are_not_started_for_ever() -> None:
    said: list[str] = []
    made_up = MadeUp(random.Random(2), kills_everything=True)
    results: list[Result] = []
    with pytest.raises(NoWorkers, match="killed"):
        results += made_up.workers(2, said.append).as_completed(rows(1000))
    assert max(made_up.loads.values()) <= MAX_DEATHS
    assert any(
        "no other one is started in its place (0 are left)" in one for one in said
    )


def test_a_model_that_cannot_be_loaded_is_said_at_once() -> None:
    made_up = MadeUp(random.Random(3), broken={0: "no such model", 1: "no such model"})
    with pytest.raises(NoWorkers, match="no such model"):
        made_up.workers(2).wait_for_one()
    assert made_up.loads == {0: 1, 1: 1}


def test_a_machine_without_the_model_is_gone_on_without() -> None:
    said: list[str] = []
    made_up = MadeUp(random.Random(4), broken={1: "no such model on b"})
    assert len(list(made_up.workers(2, said.append).as_completed(rows(30)))) == 30
    assert sum("no such model on b" in one for one in said) == 1


def test_leaving_cancels_the_rest_and_the_next_rows_are_new() -> None:
    made_up = MadeUp(random.Random(5))
    workers = made_up.workers(2)
    answers = workers.as_completed(rows(30))
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert made_up.cancelled
    for asked in made_up.rows.values():
        asked.clear()
    assert len(list(workers.as_completed(rows(10)))) == 10


def test_rows_are_read_when_there_is_room() -> None:
    made_up = MadeUp(random.Random(6), room=3)
    read = 0

    def source() -> Iterator[Request]:
        nonlocal read
        for request in rows(100):
            read += 1
            yield request

    for ended, _ in enumerate(made_up.workers(2).as_completed(source()), 1):
        assert read <= ended + 2 * 3 + 1


def test_requests_without_ids_get_one() -> None:
    made_up = MadeUp(random.Random(7))
    results = list(
        made_up.workers(2).as_completed(Request(prompt="x") for _ in range(9))
    )
    assert len({result.request_id for result in results}) == 9


def test_all_workers_are_used() -> None:
    made_up = MadeUp(random.Random(8), room=4)
    workers = made_up.workers(3)
    made_up.ended = dict.fromkeys(made_up.loading.values(), "here")
    made_up.loading.clear()
    workers.wait_for_one()
    answers = workers.as_completed(rows(6))
    next(answers)
    assert made_up.asked.total() == 6 and made_up.most == 2
    answers.close()  # type: ignore[attr-defined]
