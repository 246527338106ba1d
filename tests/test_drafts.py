"""Drafts change no answer: whatever is drafted, every request gets the tokens and log-probabilities that it gets alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import exact_cases
from tests.drafters import Scripted
from tests.exact_cases import Arrival, Way, adapter_of, alone, engine_of, exact_of
from tests.harness import (
    NUM_TOKENS,
    TOLERANCE,
    Ask,
    check,
    every_family,
    inputs_of,
    oracle,
    run_family,
    shared_adapter,
)
from vlm_batch import InvalidRequest, Request, VLMBatcher
from vlm_batch.arrays import as_mlx
from vlm_batch.assets import default_checkpoint
from vlm_batch.caches import Placement, RecurrentCache, RingSlabCache
from vlm_batch.caches.drafted import Square
from vlm_batch.caches.recurrent import After
from vlm_batch.engine import choosing
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.constraints import NO_GUIDE
from vlm_batch.engine.decoding import counts_ahead
from vlm_batch.engine.drafter import COMMON_WEIGHT, Acceptance, Drafter
from vlm_batch.engine.drafts import Drafts
from vlm_batch.engine.earlier import EarlierText, behinds, common
from vlm_batch.engine.paths import Options, Path
from vlm_batch.engine.retry import Retry
from vlm_batch.engine.row import Prompt, Row, new_row
from vlm_batch.engine.sampling import SamplingRow
from vlm_batch.engine.shapes import FixedShapes
from vlm_batch.types import SamplingParams

#: Families whose rows never have drafts, with layers of their own kind: pools, chunks, cross-attention, one cache of all.
OTHERS = frozenset(
    {
        "deepseek_v4",
        "deepseek_v41",
        "deepseek_v4_text",
        "falcon_perception",
        "florence2",
        "llama4",
        "minimax_m3_vl",
    }
    | {"mllama", "molmo_point", "nemotron_parse", "unlimited_ocr"}
)
#: Families with windows, which the tiny ones fill before the answer begins.
WINDOWS = frozenset(
    {
        "aya_vision",
        "aya_vision_cohere2",
        "cohere_compass",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_experts",
    }
    | {"gemma4_unified", "mimo_v2", "muse_glimmer", "muse_spark", "step3p7"}
)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What work raised during a test."""
    found: list[str] = []
    settle = Retry.settle

    def settling(self: Retry, failed: object) -> None:
        found.append(repr(getattr(failed, "error", failed)))
        settle(self, failed)  # type: ignore[arg-type]

    monkeypatch.setattr(Retry, "settle", settling)
    return found


@pytest.mark.parametrize("placement", Placement, ids=lambda placement: placement.value)
@pytest.mark.parametrize("name", every_family())
def test_drafts_change_nothing(
    name: str, placement: Placement, failures: list[str]
) -> None:
    """Rows with right, wrong and mixed drafts and without any, which join, leave and are cancelled."""
    asks = [
        Ask("text:4:9", tokens=12),
        Ask("image:2:1", at=1),
        Ask("text:6:14", at=2, tokens=10),
        Ask("text:5:26", at=4, tokens=5),
        Ask("image:1:0", at=6, tokens=9, cancel_at=9),
    ]
    drafts = Scripted(
        [oracle(name, ask.key, max(NUM_TOKENS, ask.tokens)).tokens for ask in asks]
    )
    answers = run_family(
        name,
        asks,
        placement=placement,
        drafts=drafts,
        config={"max_rows": 4, "short_rows": 0},
    )
    check(name, answers)
    assert not failures  # a forward that fails is made good by another, without drafts
    can = name not in OTHERS
    assert (drafts.num_held > 0) is can and (
        drafts.num_drafted > drafts.num_held
    ) is can


#: One family of each kind that has drafts, in a served precision.
EXACT = {
    "qwen3_vl": "bfloat16",
    "kimi_k25_groups": "4 bits",
    "qwen2_5_vl": "4 bits",
    "hunyuan_vl": "bfloat16",
    "gemma3": "4 bits",
    "paligemma": "float32",
    "falcon_ocr": "4 bits",
    "qwen3_5": "bfloat16",
    "falcon_h1": "4 bits",
    "inkling": "float32",
    "lfm2_vl": "float16",
    "glm5_next": "float32",
}


@pytest.mark.parametrize("layout", Placement, ids=lambda layout: layout.value)
@pytest.mark.parametrize("name", EXACT)
def test_reproducible_answers_have_the_same_bits(
    name: str, layout: Placement, failures: list[str]
) -> None:
    precision = EXACT[name]
    exact = exact_of(name, precision, layout)
    arrivals = [
        Arrival(key, at=index, tokens=10)
        for index, key in enumerate(("text:4:9", "image:2:1", "text:6:14"))
    ]
    right = [alone(name, precision, one.key, exact, tokens=10) for one in arrivals]
    drafts = Scripted([one.tokens for one in right])
    engine = engine_of(
        adapter_of(name, precision), exact, Way(max_rows=4), drafts=drafts
    )
    answers = exact_cases.play(name, engine, arrivals)
    assert not failures
    assert [
        exact_cases.is_same(one, other)
        for one, other in zip(answers, right, strict=True)
    ] == [True] * 3
    # a tiny window is full from the first answer on, and to put a row's own ring into order changes bits
    assert (drafts.num_held > 0) is (name not in WINDOWS or layout is Placement.SLAB), (
        exact.counts
    )


#: One family of each way in which an idle place gets through a layer.
IDLE = ("qwen3_vl", "kimi_k25_groups", "paligemma", "qwen3_5", "inkling", "glm5_next")


@pytest.mark.parametrize("name", IDLE)
def test_an_idle_place_takes_what_fills_a_drafted_step(
    name: str, failures: list[str]
) -> None:
    """Seven rows stand in eight places, and the positions of a step are made up to a number that agrees: several for nobody."""
    precision = EXACT[name]
    exact = exact_of(name, precision)
    keys = [
        f"text:{seed}:{length}"
        for seed, length in enumerate((9, 14, 26, 5, 11, 7, 20), 3)
    ]
    arrivals = [Arrival(key, tokens=8) for key in keys]
    right = [alone(name, precision, one.key, exact, tokens=8) for one in arrivals]
    drafts = Scripted([one.tokens for one in right])
    engine = engine_of(
        adapter_of(name, precision), exact, Way(max_rows=7), drafts=drafts
    )
    counts: list[tuple[Sequence[Any], Sequence[int]]] = []
    drafted = DecodeBatch.was_drafted

    def watched(batch: DecodeBatch, of: Sequence[int]) -> None:
        counts.append((list(batch.places), of))
        drafted(batch, of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeBatch, "was_drafted", watched)
        answers = exact_cases.play(name, engine, arrivals)
    assert not failures
    assert all(map(exact_cases.is_same, answers, right))
    idle = [
        count
        for places, of in counts
        for row, count in zip(places, of, strict=True)
        if row is None
    ]
    assert max(idle, default=0) > 1 or exact.counts[-1] < 8, (exact.counts, idle)


#: Parameters of which each changes what a row may say next.
PARAMS: dict[str, SamplingParams] = {
    "sampled": SamplingParams(temperature=1.3, top_k=40, top_p=0.9),
    "penalties": SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    ),
    "rules": SamplingParams(bad_words=("a", "the"), min_tokens=5, logit_bias={7: 2.0}),
    "logprobs": SamplingParams(logprobs=3, temperature=0.7),
    "prompts": SamplingParams(prompt_logprobs=2, logprobs=0, temperature=0.7),
}


@pytest.mark.parametrize("layout", Placement, ids=lambda layout: layout.value)
@pytest.mark.parametrize("said", PARAMS)
def test_every_stage_of_sampling_sees_every_position(
    said: str, layout: Placement, failures: list[str]
) -> None:
    """Two rows with the parameters, and one beside them without."""
    name = "qwen2_5_vl"
    asks = [
        Ask("text:4:9", tokens=16, params=PARAMS[said]),
        Ask("text:5:26", at=1, tokens=12),
        Ask("text:6:14", at=2, tokens=14, params=PARAMS[said]),
    ]
    how: dict[str, Any] = {
        "placement": layout,
        "config": {"max_rows": 4, "short_rows": 0},
    }
    right = [one.result for one in run_family(name, asks, **how)]
    drafts = Scripted([one.token_ids for one in right if one is not None])
    found = [one.result for one in run_family(name, asks, drafts=drafts, **how)]
    assert not failures and drafts.num_held and drafts.num_drafted > drafts.num_held
    for one, other in zip(found, right, strict=True):
        assert one is not None and other is not None
        assert (one.token_ids, one.finish_reason, one.text) == (
            other.token_ids,
            other.finish_reason,
            other.text,
        )
        for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)
            assert [token for token, _ in mine.top] == [
                token for token, _ in theirs.top
            ]
        assert one.prompt_logprobs == other.prompt_logprobs
        assert bool(one.prompt_logprobs) is (said == "prompts" and one is not found[1])


def test_a_stop_string_in_the_middle_of_a_draft_ends_its_row() -> None:
    with VLMBatcher(default_checkpoint(), caches=None) as batcher:

        def ask(draft: str, **said: Any) -> Any:
            params = SamplingParams(max_tokens=60, ignore_eos=True, **said)
            return batcher.submit_request(
                Request(prompt="count to 9", params=params, draft=draft)
            ).result(timeout=60)

        # what later ones draft goes on behind the stop
        text = [ask("auto") for _ in range(2)][1].text
        parts = (text[at : at + 3] for at in range(len(text) // 2, len(text) - 3))
        stop = next(part for part in parts if text.count(part) == 1)
        right, before = ask("off", stop=(stop,)), batcher.stats()
        found = [ask("auto", stop=(stop,)) for _ in range(3)]
        assert batcher.stats().drafts_held > before.drafts_held
    for one in (right, *found):
        assert (one.finish_reason, one.text) == ("stop", text[: text.find(stop)])
        assert one.token_ids == right.token_ids


def broken_keep(self: DecodeBatch, place: int, kept: int, of: int) -> None:
    """A length one too long."""
    keep(self, place, min(of, kept + 1), of)


def kept_all(self: DecodeBatch, place: int, kept: int, of: int) -> None:
    """A state that was not rolled back."""
    keep(self, place, of, of)


def state_of_the_last(self: RecurrentCache, place: int, kept: int, of: int) -> None:
    """A recurrent state that was not rolled back, beside lengths that were."""
    later = self._later.pop(place, [])
    if later:
        self._kept[place] = later[-1]


def state_of_the_first(self: RecurrentCache, place: int, kept: int, of: int) -> None:
    """A recurrent state that stays behind."""
    self._later.pop(place, None)


def state_of_the_next(self: After, at: int) -> mx.array:
    """A recurrent state of one call of several positions that is one ahead."""
    return state_after(self, min(at + 1, self.count - 1))


def same_noise(rows: Sequence[Row]) -> list[SamplingRow]:
    """A noise that is used twice."""
    return [one for row in rows for one in sampling_rows([row])]


state_after = After.position
sampling_rows, keep = choosing._sampling_rows, DecodeBatch._keep


@pytest.mark.parametrize("layout", Placement, ids=lambda layout: layout.value)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("qwen2_5_vl", change) for change in (broken_keep, kept_all, same_noise)),
        *(
            ("qwen3_5", change)
            for change in (broken_keep, kept_all, state_of_the_last, state_of_the_first)
        ),
        ("qwen3_5", state_of_the_next),
        *(
            (name, kept_all)
            for name in ("qwen4_exp", "glm5_next", "inkling", "zaya1_vl", "gemma3")
        ),
    ],
)
def test_the_scenarios_find_what_is_wrong(
    name: str,
    change: Callable[..., Any],
    layout: Placement,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(temperature=1.5)
    asks = [
        Ask(key, at=index, tokens=16, params=params)
        for index, key in enumerate(("text:4:9", "text:6:14"))
    ]
    how: dict[str, Any] = {
        "placement": layout,
        "config": {"max_rows": 4, "short_rows": 0},
    }
    right = [
        one.result.token_ids
        for one in run_family(name, asks, **how)
        if one.result is not None
    ]
    if change is same_noise:
        monkeypatch.setattr(choosing, "_sampling_rows", change)
    elif change in (state_of_the_last, state_of_the_first):
        monkeypatch.setattr(RecurrentCache, "keep", change)
    elif change is state_of_the_next:
        monkeypatch.setattr(After, "position", change)
    else:
        monkeypatch.setattr(DecodeBatch, "_keep", change)
    found = run_family(name, asks, drafts=Scripted(right), **how)
    assert [one.result.token_ids for one in found if one.result is not None] != right


def test_the_scenarios_find_a_ring_that_rejected_tokens_have_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RingSlabCache, "hold", lambda *_: None)
    asks = [
        Ask(key, at=index, tokens=16)
        for index, key in enumerate(("text:4:9", "text:6:14"))
    ]
    drafts = Scripted(
        [oracle("gemma3", ask.key, 16).tokens for ask in asks], kinds=("mixed", "wrong")
    )
    answers = run_family("gemma3", asks, placement=Placement.SLAB, drafts=drafts)
    with pytest.raises(AssertionError):
        check("gemma3", answers)


SHOP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "shop": {"type": "string", "maxLength": 6},
        "total": {"type": "integer", "maximum": 99},
    },
    "required": ["shop", "total"],
    "additionalProperties": False,
}


def test_users_get_the_same_answers_with_and_without() -> None:
    """Forms, plain texts and sampled ones; what a request says goes for it, what a policy says for all."""
    asks: dict[str, SamplingParams] = {
        "what is the total?": SamplingParams(
            max_tokens=60, json_schema=SHOP, logprobs=0
        ),
        "count to 9": SamplingParams(max_tokens=80, ignore_eos=True, logprobs=0),
        "count to 5": SamplingParams(
            max_tokens=60, temperature=1.2, seed=3, ignore_eos=True, logprobs=0
        ),
    }
    found: dict[str, list[Any]] = {}
    with VLMBatcher(default_checkpoint(), caches=None) as batcher:
        for draft in ("auto", "off"):
            before = batcher.stats().drafted
            handles = [
                batcher.submit_request(
                    Request(prompt=prompt, params=params, draft=draft)
                )
                for _ in range(4)
                for prompt, params in asks.items()
            ]
            found[draft] = [handle.result(timeout=120) for handle in handles]
            if draft == "off":
                assert batcher.stats().drafted == before
        assert batcher.stats().drafts_held <= batcher.stats().drafted
    for one, other in zip(found["auto"], found["off"], strict=True):
        assert one.error is None and (one.token_ids, one.text, one.parsed) == (
            other.token_ids,
            other.text,
            other.parsed,
        )
        for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)
    with VLMBatcher(default_checkpoint(), policy={"draft": "off"}) as batcher:
        batcher.submit(prompt="count to 9", params=asks["count to 9"]).result(
            timeout=60
        )
        assert batcher.stats().drafted == 0
    for wrong in ("on", None, 3, np.array(["auto", "off"])):
        with pytest.raises(InvalidRequest, match="auto, off"):
            Request(prompt="a", draft=wrong)  # type: ignore[arg-type]


def test_positions_of_unequal_rows_are_padded_and_cut_again() -> None:
    square = Square.of((1, 3, 2))
    assert square.padded(mx.arange(6)).tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 5]]
    assert square.flat(mx.arange(9).reshape(3, 3)).tolist() == [0, 3, 4, 5, 6, 7]
    assert Square.of((2, 2)).flat(Square.of((2, 2)).padded(mx.arange(4))).tolist() == [
        0,
        1,
        2,
        3,
    ]


def test_what_stood_behind_the_last_words() -> None:
    """The source of drafts by itself: the last places count, a text that repeats itself goes on, and bytes are no tokens."""

    def text(*tokens: int) -> bytearray:
        return bytearray(np.array(tokens, dtype=np.int32).tobytes())

    tail = bytes(text(1, 2, 3))
    assert [*behinds(text(1, 2, 3, 7, 8, 1, 2, 3, 9, 1, 2, 3), tail, 2)] == [
        (9, 1),
        (7, 8),
    ]
    assert [*behinds(text(1, 2, 3), tail, 4)] == [] == [*behinds(text(), tail, 4)]
    assert [*behinds(text(5, 1, 2, 3, 1, 2, 3), tail, 7)] == [(1, 2, 3, 1, 2, 3, 1)]
    # the same bytes, one to the right
    assert [*behinds(text(256, 512, 768, 4, 0), tail, 3)] == []
    assert (
        common([(1, 2, 3), (1, 2, 4, 5)]) == (1, 2)
        and common([(1, 2)]) == (1, 2)
        and common([]) == ()
    )
    drafter = Drafter(
        EarlierText(bytes(text(1, 2, 3, 4, 5)), text(9, 9, 9, 7, 7)), Acceptance()
    )
    for token in (1, 2, 3):
        drafter.add(token, NO_GUIDE)
    assert drafter.proposed[:2] == (4, 5)
    drafter.add(4, NO_GUIDE)
    assert drafter.proposed[0] == 5 and drafter.rates["text"] > 0.5
    for token in (9, 9, 9):
        drafter.add(token, NO_GUIDE)
    assert drafter.proposed[:2] == (7, 7)
    earlier = EarlierText(bytes(text(1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2)), text())
    drafter = Drafter(earlier, Acceptance())
    drafter.add(3, NO_GUIDE)
    assert drafter.proposed == (4,)  # what followed, as far as it was the same
    assert earlier.propose(3, [8, 1, 2, 3]) == ()
    assert earlier.propose(3, [4, 6, 1]) == (2, 3, 4)


def test_a_draft_has_to_be_worth_its_forward() -> None:
    """By what forwards were measured to take: nothing is drafted while that is unknown, or where positions cost as much as
    steps."""
    drafts = Drafts()
    assert drafts.gain(1, 3.0, 1, 4) == 0
    for rows, seconds in ((1, 0.010), (4, 0.012), (32, 0.030), (64, 0.062)):
        for _ in range(8):
            drafts.seconds.record(rows, seconds)
    assert drafts.gain(1, 2.5, 1, 4) == pytest.approx(3.5 / 1.2, rel=1e-3)
    assert drafts.gain(32, 16.0, 32, 64) < 1 < drafts.gain(32, 48.0, 32, 64)
    # what is far beyond is not tried
    assert drafts.seconds.of(256) is not None and drafts.seconds.of(300) is None


def test_one_slow_moment_does_not_end_drafts() -> None:
    """A forward's seconds are a median, and what was slow is measured again after a while, less and less often."""
    drafts = Drafts()
    for rows, seconds in ((1, 0.010), (4, 0.012)):
        for _ in range(6):
            drafts.seconds.record(rows, seconds)
    drafts.seconds.record(4, 3.0)
    assert drafts.seconds.of(4) == pytest.approx(0.012)
    for seconds in (3.0, 0.011, 0.011):  # the first is slow
        drafts.seconds.record(2, seconds)
        assert (drafts.seconds.of(2) or 1.0) <= 0.012
    for _ in range(5):
        drafts.seconds.record(4, 3.0)
    assert drafts.gain(1, 2.5, 1, 4) < 0.1
    tries = []
    for refusal in range(5000):
        drafts._refuse(1)
        if drafts.gain(1, 2.5, 1, 4) > 1:
            tries.append(refusal)
            drafts.seconds.record(4, 3.0)
    assert (
        len(tries) == 9
        and tries[0] == 15
        and drafts.seconds.of(1) == pytest.approx(0.010)
    )


def test_a_forward_that_waited_for_nothing_is_no_measure() -> None:
    """A step that waits for its rows' tokens and then has no draft is slower than one that runs ahead."""
    drafts = Drafts()

    def step(positions: int, *, waits: bool) -> None:
        if waits:
            drafts.clock.waits(1)
        drafts.launched(positions)
        drafts.was_read()

    for _ in range(4):
        step(1, waits=False)
    assert drafts.seconds.sizes == {1}
    measured = drafts.seconds.of(1)
    for _ in range(4):
        step(1, waits=True)
    assert drafts.seconds.sizes == {1} and drafts.seconds.of(1) == measured
    for _ in range(4):
        step(4, waits=True)
    assert drafts.seconds.sizes == {1, 4}


def raising(self: EarlierText, most: int, ahead: Sequence[int] = ()) -> Sequence[int]:
    raise RuntimeError("out of luck")


#: What a source may return in place of tokens.
NONSENSE: dict[str, Any] = {
    "raises": raising,
    "none": lambda self, most, ahead=(): None,
    "floats": lambda self, most, ahead=(): [1.5] * most,
    "nan": lambda self, most, ahead=(): [float("nan")] * most,
    "text": lambda self, most, ahead=(): "abc",
    "arrays": lambda self, most, ahead=(): [np.array([1, 2])] * most,
    "beyond": lambda self, most, ahead=(): [10**6] * most,
    "beyond all": lambda self, most, ahead=(): [2**40] * most,
    "negative": lambda self, most, ahead=(): [-1] * most,
}


class Eager(Drafts):
    """Drafts whatever it is told."""

    def is_due(self, groups: Sequence[DecodeBatch]) -> bool:
        return True

    def gain(
        self,
        rows: int,
        hoped: float,
        places: int,
        positions: int,
        drafting: float = 0.0,
    ) -> float:
        return 2.0 + hoped


@pytest.mark.parametrize("own", [False, True], ids=["always", "when it is asked"])
@pytest.mark.parametrize("said", NONSENSE)
def test_a_source_that_fails_loses_its_drafts_alone(
    said: str,
    own: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failures: list[str],
) -> None:
    """All answers are those without drafts, and one line says it."""
    monkeypatch.setattr(EarlierText, "propose", NONSENSE[said])
    asks = [Ask("text:4:9", tokens=12), Ask("text:6:14", at=1, tokens=12)]
    drafts = Eager() if own else Drafts()
    check(
        "qwen2_5_vl",
        run_family("qwen2_5_vl", asks, drafts=drafts, config={"max_rows": 4}),
    )
    assert not failures and not drafts.num_drafted
    is_used = own or said != "beyond"  # nothing is drafted before seconds are known
    assert [record.name for record in caplog.records] == ["vlm_batch.drafts"] * is_used


def test_a_row_whose_source_failed_gets_no_other_drafter() -> None:
    """It may be computed again, and a new drafter would not know what was said before."""
    name = "qwen2_5_vl"
    prompt = shared_adapter(name).encode(as_mlx(inputs_of(name, "text:4:9")))
    drafts, row = Drafts(), new_row("0", Prompt(), SamplingParams())
    drafts.give_drafter(row, prompt)
    assert isinstance(row.answer.drafter, Drafter)
    drafts._give_up(row)
    drafts.give_drafter(row, prompt)
    assert not isinstance(row.answer.drafter, Drafter)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [((), [4, 4]), ((5,) * 3, [4, 4]), ((5,) * 6, [1, 7]), ((5,) * 9, None)],
    ids=["drafts alone", "both fit", "options fit", "neither fits"],
)
def test_where_positions_are_too_many_drafts_give_way_first_then_options(
    options: tuple[int, ...], wanted: list[int] | None
) -> None:
    """A draft of three tokens beside a path, in forwards of at most eight positions."""
    drafting, scoring = (new_row(name, Prompt(), SamplingParams()) for name in "ab")
    drafter = Drafter(EarlierText(b"", bytearray()), Acceptance())
    drafter.launch((1, 2, 3))
    drafting.answer.drafter = drafter
    scoring.answer.path = Path(Options(), ahead=options)
    batch = DecodeBatch(FixedShapes((1, 2, 4, 8)), 2)
    batch.places = [drafting, scoring]
    assert counts_ahead(batch, [drafting, scoring]) == wanted
    ahead = len(drafting.answer.ahead), len(scoring.answer.ahead)
    right = {0: (3, 0), 3: (3, 3), 6: (0, 6), 9: (0, 0)}
    assert ahead == right[len(options)]


def test_tokens_that_held_are_counted_up_to_the_first_wrong_one() -> None:
    acceptance = Acceptance()
    drafter = Drafter(EarlierText(b"", bytearray()), acceptance)
    held = []
    for count in (0, 1, 3, 4):  # none: its first logits were not finite
        drafter.launch((1, 2, 3))
        drafter.accept(count)
        held.append(acceptance.num_held)
    assert held == [0, 0, 2, 5] and acceptance.num_drafted == 12
    assert not drafter.ahead
    # right, right, wrong; wrong; right three times; nothing is said of the row without logits but that it was wrong
    rate = Acceptance().rates["text"]
    for is_right in (False, False, True, True, False, True, True, True):
        rate += COMMON_WEIGHT * (is_right - rate)
    assert acceptance.rates["text"] == pytest.approx(rate)


@pytest.mark.parametrize("how", ["too many", "one row"])
def test_a_source_that_goes_too_far(
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failures: list[str],
) -> None:
    """What is too much is cut off; a source that fails for one row goes on for others."""
    begun = list[EarlierText]()

    def proposing(
        self: EarlierText, most: int, ahead: Sequence[int] = ()
    ) -> Sequence[int]:
        begun.extend([self] * (self not in begun))
        if how == "one row" and self is begun[0]:
            raise RuntimeError("out of luck")
        return range(3, 3 + 4 * most)

    monkeypatch.setattr(EarlierText, "propose", proposing)
    asks = [Ask("text:4:9", tokens=12), Ask("text:6:14", at=1, tokens=12)]
    drafts = Eager()
    check(
        "qwen2_5_vl",
        run_family("qwen2_5_vl", asks, drafts=drafts, config={"max_rows": 4}),
    )
    assert not failures and drafts.num_drafted
    assert len(caplog.records) == (how == "one row")
