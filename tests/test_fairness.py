"""Where ten times as many requests come as fit, all are answered, about in their order, and each client has its share."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from tests.fairness import LOOK_AHEAD, oversubscribe
from tests.harness import inputs_of, settings_for, shared_adapter
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import Placement
from vlm_batch.engine import rows
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.memory import RowMemory
from vlm_batch.engine.row import Prompt, Stage, new_row
from vlm_batch.engine.several import Several
from vlm_batch.records import Terms
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


def answers(
    family: str, placement: Placement, asked: list[tuple[str, int, str, int]]
) -> dict[str, tuple[int, ...]]:
    """Tokens by row; each request of another client comes ten steps after the one before. At most ``PLACES`` live, and whoever
    waits with less than an even share gets it."""
    generator = BatchGenerator(
        shared_adapter(family), policy=settings_for(placement, max_rows=PLACES)
    )
    ends: dict[str, tuple[int, ...]] = {}
    waited: Counter[str] = Counter()
    coming, step = list(asked), 0
    while coming or generator.has_work:
        while coming and step >= 10 * (coming[0][1] - 1):
            name, client, key, n = coming.pop(0)
            params = SamplingParams(
                max_tokens=40, temperature=1.0, seed=len(name), n=n, ignore_eos=True
            )
            row = new_row(
                name,
                Prompt(inputs=as_mlx(inputs_of(family, key))),
                params,
                terms=Terms(client=client),
            )
            generator.rows.add(row)
        for event in generator.step():
            if event.result is not None:
                assert event.result.error is None, event.result.error
                ends[event.request_id] = event.result.token_ids
        placed = generator.rows.ledger.num(Stage.PREFILL, Stage.DECODE)
        assert placed <= PLACES
        if len(asked) > 1:
            waited.update(
                row.request_id
                for row in generator.rows.ledger.at(Stage.PREPARED, Stage.ENCODED)
                if row.request_id in ("one", "two")
            )
        step += 1
        assert step < 2000
    assert all(count <= 4 for count in waited.values()), waited
    return ends


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "qwen3_5", "mllama"])
def test_clients_share_places_and_nobody_gets_another_answer(
    family: str, placement: Placement
) -> None:
    """Rows of the client that has most give places up, with what they have, and go on from there later."""
    alone: dict[str, tuple[int, ...]] = {}
    for request in ASKED:
        alone |= answers(family, placement, [(request[0], 1, *request[2:])])
    assert len(alone) == sum(len(Several(name, n).row_ids) for name, _, _, n in ASKED)
    assert answers(family, placement, ASKED) == alone


def test_who_comes_new_does_not_wait_for_all_that_others_have_asked_for() -> None:
    """Six clients who ask for four long answers each, again and again, and share two places: another's turn is the next."""
    generator = BatchGenerator(
        shared_adapter("qwen2_vl"), policy=settings_for(Placement.SLAB, max_rows=2)
    )

    def ask(name: str, client: int, n: int, tokens: int) -> None:
        params = SamplingParams(
            max_tokens=tokens, temperature=1.0, seed=1, n=n, ignore_eos=True
        )
        inputs = as_mlx(inputs_of("qwen2_vl", f"text:{client}:9"))
        generator.rows.add(
            new_row(name, Prompt(inputs=inputs), params, terms=Terms(client=client))
        )

    for client in range(6):
        ask(f"crowd {client}", client, 4, 30)
    for _ in range(150):  # each of the crowd has had a place
        generator.step()
    ask("new", 9, 1, 3)
    ended: list[str] = []
    while "new" not in ended:
        ended += [
            event.request_id
            for event in generator.step()
            if event.result is not None or event.answer is not None
        ]
        assert len(ended) < 24
    assert len(ended) <= 3, ended


@pytest.mark.parametrize("placement", Placement)
def test_who_has_waited_gets_a_place_from_a_row_of_those_who_ask_for_more(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a crowd has one place at most. A row of theirs gives way, once, and all goes on as it was. Seconds are steps."""
    now = 0
    monkeypatch.setattr(rows, "time", SimpleNamespace(perf_counter=lambda: float(now)))

    def play(
        asked: list[tuple[str, int, int, int]], ageing: float
    ) -> tuple[dict[str, tuple[int, ...]], Counter[str]]:
        nonlocal now
        policy = settings_for(placement, max_rows=2, ageing_seconds=ageing)
        generator = BatchGenerator(shared_adapter("qwen2_vl"), policy=policy)
        tokens: dict[str, tuple[int, ...]] = {}
        told, gave_way, coming, now = Counter[str](), Counter[str](), list(asked), 0
        while coming or generator.has_work:
            while coming and (coming[0][1] < 9 or now >= 20 or len(asked) == 1):
                name, client, n, length = coming.pop(0)
                params = SamplingParams(
                    max_tokens=length,
                    temperature=1.0,
                    seed=client,
                    n=n,
                    ignore_eos=True,
                )
                inputs = as_mlx(inputs_of("qwen2_vl", f"text:{client}:9"))
                row = new_row(
                    name, Prompt(inputs=inputs), params, terms=Terms(client=client)
                )
                row.clock.submitted = now
                generator.rows.add(row)
            before = {row for row in generator.rows.ledger.at(*Stage) if row.gave_way}
            for event in generator.step():
                told[event.request_id] += event.token is not None
                if event.result is not None:
                    assert event.result.error is None
                    tokens[event.request_id] = event.result.token_ids
            gave_way.update(
                row.request_id
                for row in generator.rows.ledger.at(*Stage)
                if row.gave_way and row not in before
            )
            now += 1
            assert now < 3000
        # nothing is told twice
        assert told == {name: len(ids) for name, ids in tokens.items()}
        return tokens, gave_way

    crowd = [(f"crowd {client}", client, 4, 40) for client in range(4)]
    newcomers = [(f"new {client}", client, 1, 3) for client in (9, 10, 11)]
    alone: dict[str, tuple[int, ...]] = {}
    for one in (*crowd, *newcomers):
        alone |= play([one], 5.0)[0]
    patient, gave_way = play([*crowd, *newcomers], 1e6)
    assert patient == alone
    assert not gave_way
    found, gave_way = play([*crowd, *newcomers], 10.0)
    assert found == alone
    assert gave_way.total() >= 2
    names = [name for name, *_ in newcomers]
    assert sorted([*found][:3]) == sorted(names)
    assert sorted([*patient][:3]) != sorted(names)


def test_who_has_places_goes_behind_who_has_none_whatever_the_priority() -> None:
    """Its next place counts with those that it has."""
    generator = BatchGenerator(
        shared_adapter("qwen2_vl"), policy=settings_for(Placement.SLAB, max_rows=2)
    )

    def ask(name: str, client: int, priority: int, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        row = new_row(
            name,
            Prompt(inputs=as_mlx(inputs_of("qwen2_vl", f"text:{client}:9"))),
            params,
            terms=Terms(priority, client),
        )
        generator.rows.add(row)

    for number in range(6):
        ask(f"urgent {number}", 1, 100, 40)
    for _ in range(10):
        generator.step()
    ask("plain", 2, 0, 3)
    ended: list[str] = []
    while not ended:
        ended += [
            event.request_id for event in generator.step() if event.result is not None
        ]
    assert ended == ["plain"]


@pytest.mark.parametrize("places", [1, 4])
def test_further_answers_and_who_waits_for_their_memory_do_not_wait_for_each_other(
    places: int,
) -> None:
    """Memory has room for one row: of a client's answers each holds its share of it from the prompt on."""
    family, key = "qwen2_vl", "text:5:26"

    def generator(max_bytes: int) -> BatchGenerator:
        policy = settings_for(Placement.ROWS, max_rows=places, max_bytes=max_bytes)
        return BatchGenerator(shared_adapter(family), policy=policy)

    def ask(engine: BatchGenerator, name: str, client: int, n: int) -> None:
        inputs = inputs_of(family, key)
        params = SamplingParams(max_tokens=6, n=n, temperature=1.0, seed=1)
        prompt = Prompt(inputs=as_mlx(inputs))
        engine.rows.add(
            new_row(name, prompt, params, terms=Terms(client=client), given=inputs)
        )

    known = generator(2**40)
    ask(known, "a", 1, 1)
    while known.has_work:
        known.step()
    assert isinstance(known.memory, RowMemory)
    engine = generator(int(1.5 * known.memory.of(32)))
    ask(engine, "several", 1, 3)
    engine.step()
    ask(engine, "one", 2, 1)
    ended = 0
    for _ in range(200):
        ended += sum(event.result is not None for event in engine.step())
    assert ended == 4 and not engine.has_work
