"""Rows handed to workers that die, against a fleet that is made up: every row once, whoever dies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from vlm_batch.jobs.workers import ALONE_FROM, MAX_DEATHS, Answered, Died, Dispatcher, Event, NoWorkers, Started
from vlm_batch.types import Request, Result


@dataclass
class MadeUp:
    """Workers that answer in any order and die by chance, or of rows whose prompt is "poison"."""

    chance: random.Random
    death_rate: float = 0.0
    #: Workers by number that never start, and what they say.
    broken: dict[int, str] = field(default_factory=dict)
    kills_everything: bool = False
    room: int = 4
    count: int = 0
    rows: dict[int, dict[int, Request]] = field(default_factory=dict)
    loading: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    asked: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    most: int = 0
    cancelled: list[int] = field(default_factory=list)

    def start(self) -> int:
        number, self.count = self.count, self.count + 1
        self.rows[number] = {}
        self.loading.add(number)
        return number

    def send(self, worker: int, ticket: int, request: Request) -> None:
        assert worker not in self.loading | self.dead, "a row for a worker that is not there"
        self.rows[worker][ticket] = request
        self.asked[str(request.request_id)] += 1
        self.most = max(self.most, len(self.rows[worker]))

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)

    def wait(self) -> list[Event]:
        busy = [
            worker for worker in self.rows if worker not in self.dead and (self.rows[worker] or worker in self.loading)
        ]
        assert busy, "nothing can happen any more"
        worker = self.chance.choice(busy)
        if worker in self.broken:
            self.dead.add(worker)
            return [Died(worker, self.broken[worker], for_good=True)]
        if worker in self.loading:
            self.loading.remove(worker)
            if self.chance.random() < self.death_rate:
                return [self._die(worker)]
            return [Started(worker, self.room, "here")]
        poisoned = any(request.prompt == "poison" for request in self.rows[worker].values())
        if poisoned or self.kills_everything or self.chance.random() < self.death_rate:
            return [*self._answers(worker, self.chance.randrange(2)), self._die(worker)]
        return self._answers(worker, 1 + self.chance.randrange(2))

    def _answers(self, worker: int, count: int) -> list[Event]:
        fine = [] if self.kills_everything else [t for t, r in self.rows[worker].items() if r.prompt != "poison"]
        events: list[Event] = []
        for ticket in self.chance.sample(fine, min(count, len(fine))):
            request = self.rows[worker].pop(ticket)
            events.append(
                Answered(worker, ticket, Result(request_id=str(request.request_id), text=str(request.prompt)))
            )
        return events

    def _die(self, worker: int) -> Died:
        self.dead.add(worker)
        self.deaths.update(str(request.request_id) for request in self.rows[worker].values())
        return Died(worker, "killed")


def rows(count: int, poison: set[int] = frozenset()) -> Iterator[Request]:  # type: ignore[assignment]
    for number in range(count):
        yield Request(prompt="poison" if number in poison else f"row {number}", request_id=f"r{number}")


@pytest.mark.parametrize("seed", range(60))
def test_every_row_is_answered_once_whoever_dies(seed: int) -> None:
    chance = random.Random(seed)
    fleet = MadeUp(chance, death_rate=chance.choice([0.0, 0.02, 0.1]), room=chance.choice([1, 3, 8]))
    poison = set(chance.sample(range(80), chance.choice([0, 1, 3])))
    results: list[Result] = []
    lost = None
    try:
        results += Dispatcher(fleet, chance.choice([1, 2, 5]), lambda text: None).as_completed(rows(80, poison))
    except NoWorkers as error:  # by chance one place saw many deaths: what was answered is answered once all the same
        lost = error
    by_id = Counter(result.request_id for result in results)
    assert set(by_id.values()) <= {1}
    assert lost is not None or len(by_id) == 80
    assert fleet.most <= fleet.room
    for result in results:
        if result.error is not None:
            assert fleet.deaths[result.request_id] == ALONE_FROM + 1  # no row is blamed before
            assert "workers died while they answered this row" in result.error
        else:
            assert result.request_id not in {f"r{number}" for number in poison}
            assert result.text == f"row {result.request_id[1:]}"


def test_a_row_that_kills_fails_alone() -> None:
    """All others are answered, however many were in flight beside it at the first two deaths."""
    fleet = MadeUp(random.Random(1), room=8)
    results = list(Dispatcher(fleet, 2, lambda text: None).as_completed(rows(50, {3, 20})))
    assert sorted(result.request_id for result in results if result.error) == ["r20", "r3"]
    assert len(results) == 50


def test_workers_that_die_of_everything_are_not_started_for_ever() -> None:
    said: list[str] = []
    fleet = MadeUp(random.Random(2), kills_everything=True)
    results: list[Result] = []
    with pytest.raises(NoWorkers, match="killed"):
        results += Dispatcher(fleet, 2, said.append).as_completed(rows(1000))
    assert fleet.count <= 2 * MAX_DEATHS
    assert any("no other one is started in its place (0 are left)" in one for one in said)


def test_a_model_that_cannot_be_loaded_is_said_at_once() -> None:
    fleet = MadeUp(random.Random(3), broken={0: "no such model", 1: "no such model"})
    with pytest.raises(NoWorkers, match="no such model"):
        Dispatcher(fleet, 2, lambda text: None).wait_for_one()
    assert fleet.count == 2


def test_a_machine_without_the_model_is_gone_on_without() -> None:
    said: list[str] = []
    fleet = MadeUp(random.Random(4), broken={1: "no such model on b"})
    assert len(list(Dispatcher(fleet, 2, said.append).as_completed(rows(30)))) == 30
    assert sum("no such model on b" in one for one in said) == 1


def test_leaving_cancels_the_rest_and_the_next_rows_are_new() -> None:
    fleet = MadeUp(random.Random(5))
    dispatcher = Dispatcher(fleet, 2, lambda text: None)
    answers = dispatcher.as_completed(rows(30))
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert fleet.cancelled
    for worker in fleet.rows.values():
        worker.clear()
    assert len(list(dispatcher.as_completed(rows(10)))) == 10


def test_rows_are_read_when_there_is_room() -> None:
    fleet = MadeUp(random.Random(6), room=3)
    read = 0

    def source() -> Iterator[Request]:
        nonlocal read
        for request in rows(100):
            read += 1
            yield request

    for ended, _ in enumerate(Dispatcher(fleet, 2, lambda text: None).as_completed(source()), 1):
        assert read <= ended + 2 * 3 + 1


def test_requests_without_ids_get_one() -> None:
    fleet = MadeUp(random.Random(7))
    results = list(Dispatcher(fleet, 2, lambda text: None).as_completed(Request(prompt="x") for _ in range(9)))
    assert len({result.request_id for result in results}) == 9


def test_all_workers_are_used() -> None:
    fleet = MadeUp(random.Random(8), room=4)
    dispatcher = Dispatcher(fleet, 3, lambda text: None)
    fleet.wait = lambda: [Started(worker, 4, "here") for worker in range(3)]  # type: ignore[method-assign]
    dispatcher.wait_for_one()
    fleet.loading.clear()
    del fleet.wait  # type: ignore[method-assign]
    answers = dispatcher.as_completed(rows(6))
    next(answers)
    assert fleet.asked.total() == 6 and fleet.most == 2
    answers.close()  # type: ignore[attr-defined]
