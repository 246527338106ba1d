"""Several answers to one prompt: each as if asked alone, from a prompt that is encoded and prefilled once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.harness import inputs_of, settings_for, shared_adapter
from vlm_batch import Request, SamplingParams, VLMBatcher
from vlm_batch.arrays import as_mlx
from vlm_batch.assets import default_checkpoint, sample_images
from vlm_batch.caches import Placement
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.row import Prompt, new_row
from vlm_batch.engine.several import Several
from vlm_batch.records import Terms
from vlm_batch.types import Result

CIRCLE = str(sample_images()[3])
SAMPLED = SamplingParams(temperature=4.0, seed=2**64 - 2, max_tokens=24)
#: One family for each kind of state: plain, cross-attention, recurrent, windows, shared layers, pooled blocks.
KINDS = [
    "qwen2_vl",
    "mllama",
    "falcon_h1",
    "gemma3",
    "gemma3n",
    "deepseek_v4",
    "unlimited_ocr",
    "florence2",
]


@pytest.fixture(scope="module")
def batcher() -> Iterator[VLMBatcher]:
    with VLMBatcher(default_checkpoint(), max_rows=3, caches=None) as made:
        yield made


def counted(name: str, function: Any, calls: list[str]) -> Any:
    def call(*given: Any) -> Any:
        calls.append(name)
        return function(*given)

    return call


def answers_of(result: Result) -> list[Result]:
    return [result, *result.others]


def test_n_answers_are_those_of_n_requests(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds count on from the request's; there are more answers than places; nothing is kept, and yet nothing is done twice."""
    seeds = [(SAMPLED.seed or 0) + index for index in range(5)]
    alone = [
        batcher.submit(
            CIRCLE, "describe the image", params=replace(SAMPLED, seed=seed % 2**64)
        ).result(timeout=60)
        for seed in seeds
    ]
    adapter = batcher._loop.generator.adapter
    calls: list[str] = []
    for name in ("encode", "prefill"):
        monkeypatch.setattr(adapter, name, counted(name, getattr(adapter, name), calls))
    busy = batcher.submit(prompt="count to 9")
    result = batcher.submit(
        CIRCLE, "describe the image", params=replace(SAMPLED, n=5)
    ).result(timeout=60)
    assert busy.result(timeout=60).text == "1 2 3 4 5 6 7 8 9"
    assert [one.token_ids for one in answers_of(result)] == [
        one.token_ids for one in alone
    ]
    assert len({one.token_ids for one in alone}) > 1, "the seeds make no difference"
    assert calls.count("encode") == 2
    assert calls.count("prefill") <= 3
    assert {one.request_id for one in answers_of(result)} == {result.request_id}


def test_events_say_whose_they_are(batcher: VLMBatcher) -> None:
    handle = batcher.submit(prompt="count to 5", params=replace(SAMPLED, n=3))
    texts, ends = ["", "", ""], {}
    for event in handle.events():
        texts[event.index] += event.text
        if event.answer is not None:
            ends[event.index] = event.answer
        assert event.request_id == handle.request_id
    result = handle.result()
    assert texts == [one.text for one in answers_of(result)]
    assert [ends[index].text for index in range(3)] == texts
    assert "".join(handle) == result.text


def test_no_request_has_the_name_of_anothers_answer(batcher: VLMBatcher) -> None:
    """Answers have names inside the engine; whatever a request is called, it gets its own tokens and its own end."""
    alone = batcher.submit(prompt="count to 5").result(timeout=60)
    several = batcher.submit(
        CIRCLE, "describe the image", request_id="a", params=replace(SAMPLED, n=3)
    )
    others = [
        batcher.submit(prompt="count to 5", request_id=name)
        for name in ("a[1]", "a 2", "a1")
    ]
    assert [handle.result(timeout=60).text for handle in others] == [alone.text] * 3
    assert len(answers_of(several.result(timeout=60))) == 3


@pytest.mark.parametrize("after", [0, 6])
def test_cancelling_ends_all(batcher: VLMBatcher, after: int) -> None:
    handle = batcher.submit(
        prompt="count to 9", params=SamplingParams(n=4, ignore_eos=True, max_tokens=500)
    )
    for count, _ in enumerate(handle.events() if after else ()):
        if count >= after:
            break
    assert handle.cancel()
    result = handle.result(timeout=60)
    assert [one.finish_reason for one in answers_of(result)] == ["cancelled"] * 4
    assert not batcher.cancel(handle.request_id)
    assert batcher.submit(prompt="count to 3").result(timeout=60).text == "1 2 3"


def test_a_request_that_fails_fails_as_one(batcher: VLMBatcher) -> None:
    def broken(tokens: Any, logits: Any) -> Any:
        raise RuntimeError("broken")

    result = batcher.submit("gone.png", "what?", params=SamplingParams(n=3)).result(
        timeout=60
    )
    assert all(
        "gone.png does not exist" in (one.error or "") for one in answers_of(result)
    )
    result = batcher.submit(
        prompt="a", params=SamplingParams(n=3, logits_processors=[broken])
    ).result(timeout=60)
    assert ["broken" in (one.error or "") for one in answers_of(result)] == [True] * 3
    assert batcher.stats().decoding == 0


def test_forms_and_rules_of_several_answers(batcher: VLMBatcher) -> None:
    params = SamplingParams(n=4, regex="[a-z]{8}", temperature=2.0, seed=1)
    found = answers_of(batcher.submit(prompt="a", params=params).result(timeout=60))
    assert len({one.parsed for one in found}) > 1
    assert all(one.parsed == one.text and len(one.text) == 8 for one in found)
    (four,) = batcher._preparer.processing.ids_of("4")
    params = SamplingParams(
        n=3,
        bad_words=["4"],
        presence_penalty=0.5,
        min_tokens=10,
        max_tokens=12,
        temperature=1,
        seed=3,
    )
    for one in answers_of(
        batcher.submit(prompt="count to 9", params=params).result(timeout=60)
    ):
        assert four not in one.token_ids
        assert len(one.token_ids) >= 10


def test_closing_ends_all() -> None:
    batcher = VLMBatcher(default_checkpoint(), max_rows=2)
    handle = batcher.submit(
        prompt="count to 9", params=SamplingParams(n=6, ignore_eos=True, max_tokens=900)
    )
    next(iter(handle))
    batcher.close()
    assert {one.finish_reason for one in answers_of(handle.result(timeout=10))} == {
        "cancelled"
    }


def test_several_of_several(batcher: VLMBatcher) -> None:
    asked = [
        Request(prompt="count to 4", params=replace(SAMPLED, n=n, seed=9))
        for n in (1, 4, 2, 3)
    ]
    results = batcher.generate(asked)
    assert [len(one.others) for one in results] == [0, 3, 1, 2]
    for result in results:
        assert [one.text for one in answers_of(result)] == [
            one.text for one in answers_of(results[1])
        ][: 1 + len(result.others)]


@pytest.mark.parametrize(
    "placement", list(Placement), ids=lambda placement: placement.name.lower()
)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_state_forks(name: str, placement: Placement) -> None:
    """A prompt's state, copied for each answer: the tokens are those of single requests with the same seeds."""
    inputs = as_mlx(inputs_of(name, "image:1:2"))

    def run(asked: dict[str, SamplingParams]) -> dict[str, tuple[int, ...]]:
        generator = BatchGenerator(
            shared_adapter(name), policy=settings_for(placement, max_rows=2)
        )
        for request_id, params in asked.items():
            generator.insert(request_id, inputs, params)
        ends: dict[str, tuple[int, ...]] = {}
        while generator.has_work:
            for event in generator.step():
                if event.result is not None:
                    assert event.result.error is None, event.result.error
                    ends[event.request_id] = event.result.token_ids
        return ends

    params = SamplingParams(temperature=1.0, seed=4, max_tokens=6, ignore_eos=True)
    single = run({str(index): replace(params, seed=4 + index) for index in range(3)})
    forked = run({"a": replace(params, n=3)})
    names = Several("a", 3).row_ids
    assert [forked[name] for name in names] == [single["0"], single["1"], single["2"]]


def test_further_answers_have_what_their_request_asks() -> None:
    """Also when they are computed again; the conversation's state is the first answer's alone."""
    terms = Terms(2, 3, may_draft=False, returns_cache=True, cache_salt="one")
    row = new_row("a", Prompt(), SamplingParams(n=3, seed=1), terms=terms)
    assert [sibling.terms for sibling in row.siblings] == [
        replace(terms, returns_cache=False)
    ] * 2
