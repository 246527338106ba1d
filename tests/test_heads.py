"""Models that draft: whatever they say, every request gets the tokens and log-probabilities that it gets alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.speculative.drafters import load_drafter

from fixtures.training import scenes
from tests.drafters import assistant_folder, heads_folder
from tests.exact_cases import GRID, Answer, Arrival, Way, engine_of, is_same, play
from tests.harness import (
    NUM_TOKENS,
    TOLERANCE,
    Ask,
    check,
    inputs_of,
    oracle,
    run,
    run_family,
    shared_adapter,
)
from tests.hearing import silent_gemma
from tests.zoo import family, gemma4
from tests.zoo._types import Inputs
from vlm_batch import Request, VLMBatcher
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.heads import Heads, load_heads
from vlm_batch.caches import Placement
from vlm_batch.engine import drafter
from vlm_batch.engine import drafts as engine_drafts
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.compiled import CompiledDecode, can_leave_unfused
from vlm_batch.engine.drafter import FIRST_RATES, Drafter
from vlm_batch.engine.drafts import NO_DRAFTS, Drafts, NoDrafts
from vlm_batch.engine.row import Row
from vlm_batch.engine.shapes import FixedShapes
from vlm_batch.models import adapter_for
from vlm_batch.proofs.proving import prove
from vlm_batch.types import SamplingParams

FOUR = {"max_rows": 4, "short_rows": 0}
ASSISTED = ("gemma4", "gemma4_experts", "gemma4_unified")


class Always(Drafts):
    """Asks the model in each step, and may say what it should have said."""

    def __init__(
        self, model: Heads, answers: Sequence[Sequence[int]] = (), kind: str = "random"
    ) -> None:
        super().__init__(model)
        self.answers, self.kind = answers, kind
        # what was said, and what the model drafted
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def is_due(self, groups: Sequence[DecodeBatch]) -> bool:
        return True

    def draft(self, row: Row, form_seconds: Callable[[], float]) -> tuple[int, ...]:
        return ()

    def gain(
        self,
        rows: int,
        hoped: float,
        places: int,
        positions: int,
        drafting: float = 0.0,
    ) -> float:
        return 2.0 if positions <= 4 * places else 0.0

    def _ask(
        self, group: DecodeBatch, sizes: Mapping[Row, int]
    ) -> dict[Row, tuple[int, ...]]:
        found = super()._ask(group, sizes)
        for row, tokens in found.items():
            assert isinstance(row.answer.drafter, Drafter)
            end = row.facts.length + row.answer.num_sampled
            self.asked.append((row.answer.drafter.text.said(0, end), tokens))
            if self.kind != "random" and tokens:
                at = row.answer.num_sampled
                right = tuple(
                    int(token)
                    for token in self.answers[int(row.request_id)][
                        at : at + len(tokens)
                    ]
                )
                found[row] = (
                    right
                    if self.kind == "right"
                    else tuple(token ^ 1 for token in right)
                )
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assistant_folder(tmp_path_factory.mktemp("drafters") / "assistant")


@pytest.mark.parametrize("kind", ["random", "right", "wrong"])
@pytest.mark.parametrize("placement", Placement, ids=lambda placement: placement.value)
@pytest.mark.parametrize("name", ASSISTED)
def test_an_assistant_changes_nothing(
    name: str, placement: Placement, kind: str, folder: Path
) -> None:
    """Rows that join, leave and are cancelled."""
    asks = [
        Ask("text:4:9", tokens=12),
        Ask("image:2:1", at=1),
        Ask("text:6:14", at=2, tokens=10),
        Ask("text:5:26", at=4, tokens=5),
        Ask("image:1:0", at=6, tokens=9, cancel_at=9),
    ]
    answers = [
        oracle(name, ask.key, max(NUM_TOKENS, ask.tokens)).tokens for ask in asks
    ]
    drafts = Always(load_heads(str(folder), shared_adapter(name)), answers, kind)
    check(name, run_family(name, asks, placement=placement, drafts=drafts, config=FOUR))
    assert drafts.model is not None
    assert drafts.num_drafted and (
        kind == "random" or (drafts.num_held > 0) is (kind == "right")
    )


#: Of the wide windows, which no row fills.
WIDE = 64


@cache
def wide_adapter() -> Adapter:
    """A tiny Gemma 4 whose rows are shorter than its windows."""
    return adapter_for("gemma4")(wide_model())


def wide_model() -> Any:
    return gemma4.build_with(92, **gemma4.SHARING, sliding_window=WIDE)


def of_gemma4(key: str) -> Inputs:
    return inputs_of("gemma4", key)


@pytest.mark.parametrize("place", ["rows", "slab", "wide rows", "wide slab"])
def test_an_assistant_drafts_what_it_drafts_in_mlx_vlm(
    place: str, folder: Path
) -> None:
    """Three rows together, and each of their drafts from mlx-vlm's drafter, for one row and one array of keys."""
    asks = [
        Ask("text:4:9", tokens=12),
        Ask("text:5:26", at=1, tokens=8),
        Ask("text:6:14", at=2, tokens=10),
    ]
    is_wide, placement = "wide" in place, Placement(place.split()[-1])
    adapter = wide_adapter() if is_wide else shared_adapter("gemma4")
    drafts = Always(load_heads(str(folder), adapter))
    run(adapter, of_gemma4, asks, placement=placement, drafts=drafts, config=FOUR)
    model = wide_model() if is_wide else gemma4.build()
    drafter = load_drafter(str(folder))[0]
    language, compared = model.language_model, 0
    drafter.reset(model)
    # of a full window, mlx-vlm's mask leaves the first out (gemma4_assistant/masks.py, _local_window_offset)
    drafter.config.text_config.sliding_window = 1 + (WIDE if is_wide else gemma4.WINDOW)
    for said, drafted in drafts.asked:
        sink: dict[str, Any] = {}
        hidden = language.model(
            mx.array([said[:-1]]), cache=language.make_cache(), shared_kv_sink=sink
        )[:, -1:]
        # a prompt's keys are all there; a step's are those of the window
        if not is_wide:
            sink["sliding_attention"] = tuple(
                part[:, :, -gemma4.WINDOW :] for part in sink["sliding_attention"]
            )
        end = len(said) - 1
        drafter.set_shared_kv(sink, kv_offset=end, position=end - 1, kv_valid_len=end)
        theirs = drafter.draft_block(
            said[-1],
            hidden,
            None,
            1 + len(drafted),
            lambda logits: mx.argmax(logits, axis=-1),
        )
        assert tuple(theirs[0].tolist()) == drafted
        compared += len(drafted)
    assert compared > 15


HEADED = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


@pytest.fixture(scope="module", params=HEADED)
def headed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A tiny model's name, and the folder of heads for it."""
    name = request.param
    return name, heads_folder(tmp_path_factory.mktemp("drafters") / name, name)


@pytest.mark.parametrize("kind", ["random", "right", "wrong"])
@pytest.mark.parametrize("placement", Placement, ids=lambda placement: placement.value)
def test_heads_change_nothing(
    placement: Placement, kind: str, headed: tuple[str, Path]
) -> None:
    """Rows that join, leave and are cancelled."""
    name, folder = headed
    picture = "text:3:12" if name == "qwen3_next" else "image:2:1"
    asks = [
        Ask("text:4:9", tokens=12),
        Ask(picture, at=1),
        Ask("text:6:14", at=2, tokens=10),
        Ask("text:5:26", at=4, tokens=5),
        Ask(picture, at=6, tokens=9, cancel_at=9),
    ]
    answers = [
        oracle(name, ask.key, max(NUM_TOKENS, ask.tokens)).tokens for ask in asks
    ]
    drafts = Always(load_heads(str(folder), shared_adapter(name)), answers, kind)
    check(name, run_family(name, asks, placement=placement, drafts=drafts, config=FOUR))
    assert drafts.model is not None
    assert drafts.num_drafted and (
        kind == "random" or (drafts.num_held > 0) is (kind == "right")
    )


class Seldom(Always):
    """Asks the model in each third step; the steps between are graphs, where the layers allow it."""

    steps = 0

    def is_due(self, groups: Sequence[DecodeBatch]) -> bool:
        self.steps += 1
        return self.steps % 3 == 0


@pytest.mark.parametrize("kind", ["random", "right", "seldom"])
@pytest.mark.parametrize("placement", Placement, ids=lambda placement: placement.value)
def test_heads_draft_what_they_draft_in_mlx_vlm(
    placement: Placement,
    kind: str,
    headed: tuple[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each draft is mlx-vlm's for the whole text: what was cut off again is not seen, and what was kept is."""
    graphs, new = list[None](), CompiledDecode._new

    def counted(*args: Any) -> Any:
        graphs.append(None)
        return new(*args)

    monkeypatch.setattr(CompiledDecode, "_new", counted)
    name, folder = headed
    asks = [
        Ask("text:4:9", tokens=12),
        Ask("text:5:26", at=1, tokens=8),
        Ask("text:6:14", at=2, tokens=10),
    ]
    answers = [oracle(name, ask.key, ask.tokens).tokens for ask in asks]
    model, is_seldom = load_heads(str(folder), shared_adapter(name)), kind == "seldom"
    drafts = Seldom(model) if is_seldom else Always(model, answers, kind)
    compiled = None if is_seldom else False
    run_family(
        name,
        asks,
        placement=placement,
        drafts=drafts,
        config=FOUR,
        compile_decode=compiled,
    )
    target, drafter = family(name).build(), load_drafter(str(folder))[0]
    language, compared = target.language_model, 0
    for said, drafted in drafts.asked:
        ids = mx.array([said[:-1]])
        hidden = language.model(ids, cache=language.make_cache())
        drafter.reset(target)
        drafter.prefill_from_target_hidden(ids, hidden, said[-1], None, greedy=True)
        theirs = drafter.draft_block(
            said[-1], hidden[:, -1:], None, 1 + len(drafted), None, greedy=True
        )
        assert tuple(theirs[0].tolist()) == drafted
        compared += len(drafted)
    assert compared > (5 if is_seldom else 10)
    # unasked, recurrent states are graphs where these fuse nothing
    assert bool(graphs) is (
        is_seldom and placement is Placement.SLAB and can_leave_unfused()
    )


def test_heads_in_the_models_own_checkpoint(
    headed: tuple[str, Path], tmp_path: Path
) -> None:
    """Published folders have them beside the model's tensors; their norms multiply by one more."""
    name, folder = headed
    config = json.loads((folder / "config.json").read_text())
    saved: Any = mx.load(str(folder / "model.safetensors"))
    tensors = {
        f"mtp.{key}": value - 1 if "norm" in key else value
        for key, value in saved.items()
    }
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"),
        {**tensors, "model.other": mx.zeros(3)},
        {"format": "pt"},
    )
    text = config["text_config"]
    native = text if name == "qwen3_next" else {"text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**native, "model_type": name}))
    apart, within = (
        load_heads(str(path), shared_adapter(name)) for path in (folder, tmp_path)
    )
    assert mx.array_equal(apart.model.fc.weight, within.model.fc.weight)
    assert mx.allclose(
        apart.model.layers[0].input_layernorm.weight,
        within.model.layers[0].input_layernorm.weight,
    )
    # keys and values of two heads of 16 in float32
    assert apart.bytes_per_token == 2 * 2 * 16 * 4


SAMPLED = SamplingParams(temperature=1.2, top_k=30, logprobs=2)


@pytest.mark.parametrize("placement", Placement, ids=lambda placement: placement.value)
def test_sampled_answers_stay_the_same(placement: Placement, folder: Path) -> None:
    """Rows with noise of their own, two answers to a prompt, and a greedy row beside them."""
    asks = [
        Ask("text:4:9", tokens=16, params=SAMPLED),
        Ask("text:5:26", at=1, tokens=12),
        Ask("text:6:14", at=2, tokens=14, params=SAMPLED),
    ]
    how: dict[str, Any] = {"placement": placement, "config": FOUR}
    right = [one.result for one in run(wide_adapter(), of_gemma4, asks, **how)]
    for kind in ("random", "right"):
        tokens = [one.token_ids for one in right if one is not None]
        drafts = Always(load_heads(str(folder), wide_adapter()), tokens, kind)
        found = [
            one.result
            for one in run(wide_adapter(), of_gemma4, asks, drafts=drafts, **how)
        ]
        assert drafts.num_drafted and (
            drafts.num_held == drafts.num_drafted or kind == "random"
        )
        for one, other in zip(found, right, strict=True):
            assert (
                one is not None
                and other is not None
                and one.token_ids == other.token_ids
            )
            for mine, theirs in zip(
                one.logprobs or (), other.logprobs or (), strict=True
            ):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)


@pytest.mark.parametrize("placement", Placement, ids=lambda placement: placement.value)
def test_reproducible_answers_have_the_same_bits(
    placement: Placement, folder: Path
) -> None:
    proof = prove(wide_adapter(), None, placement)
    exact = FixedShapes(
        proof.best(placement),
        placement,
        GRID,
        products=proof.products,
        widths=proof.widths,
    )
    arrivals = [
        Arrival(key, at=index, tokens=10)
        for index, key in enumerate(("text:4:9", "image:2:1", "text:6:14"))
    ]

    def answers(asked: Sequence[Arrival], drafts: NoDrafts) -> list[Answer]:
        return play(
            "gemma4",
            engine_of(wide_adapter(), exact, Way(max_rows=4), drafts=drafts),
            asked,
        )

    right = [answers([replace(one, at=0)], NO_DRAFTS)[0] for one in arrivals]
    for kind in ("random", "right"):
        drafts = Always(
            load_heads(str(folder), wide_adapter()), [one.tokens for one in right], kind
        )
        found = answers(arrivals, drafts)
        assert [
            is_same(one, other) for one, other in zip(found, right, strict=True)
        ] == [True] * 3
        assert drafts.num_drafted and (kind == "random" or drafts.num_held)


#: What a model may return in place of tokens (B, count).
NONSENSE: dict[str, Callable[[mx.array], Any]] = {
    "none": lambda found: None,
    "nan": lambda found: mx.full(found.shape, float("nan")),
    "floats": lambda found: found.astype(mx.float32),
    "beyond": lambda found: found + 10**6,
    "negative": lambda found: -1 - found,
    "one row": lambda found: found[:0],
    "flat": lambda found: found[:, 0],
}


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("said", NONSENSE)
def test_a_model_that_says_nonsense_is_not_asked_again(
    said: str,
    first: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From its first draft on, or later."""
    asks = [Ask("text:4:9", tokens=12), Ask("text:6:14", at=1, tokens=12)]
    drafts = Always(load_heads(str(folder), shared_adapter("gemma4")))
    assert drafts.model is not None
    propose, calls = drafts.model.propose, 0

    def wrong(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        found = propose(*args)
        return NONSENSE[said](found) if calls >= first else found

    monkeypatch.setattr(drafts.model, "propose", wrong)
    check("gemma4", run_family("gemma4", asks, drafts=drafts, config=FOUR))
    assert calls == first and drafts.model is None and len(caplog.records) == 1


@pytest.mark.parametrize("first", [1, 3])
def test_a_model_that_fails_is_not_asked_again(
    first: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asks = [Ask("text:4:9", tokens=12), Ask("text:6:14", at=1, tokens=12)]
    drafts = Always(load_heads(str(folder), shared_adapter("gemma4")))
    assert drafts.model is not None
    propose, calls = drafts.model.propose, 0

    def failing(*args: Any) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == first:
            raise RuntimeError("out of luck")
        return propose(*args)

    monkeypatch.setattr(drafts.model, "propose", failing)
    check("gemma4", run_family("gemma4", asks, drafts=drafts, config=FOUR))
    assert calls == first and drafts.model is None and len(caplog.records) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": {"vocab_size": 96}}, "its vocabulary has 96 tokens, the model's 160"),
        ({"backbone_hidden_size": 48}, "hidden_size"),
        (None, "nowhere"),
    ],
    ids=["vocabulary", "width", "none"],
)
def test_a_folder_that_does_not_fit_is_refused(
    changes: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    path = (
        tmp_path / "nowhere"
        if changes is None
        else assistant_folder(tmp_path, **changes)
    )
    with pytest.raises(ValueError, match=said):
        VLMBatcher(gemma4.build(), silent_gemma("gemma4"), policy={"draft": str(path)})
    with pytest.raises(ValueError, match="drafts for gemma4"):
        load_heads(
            str(assistant_folder(tmp_path / "right")), shared_adapter("qwen2_5_vl")
        )


def test_a_user_names_a_folder(folder: Path) -> None:
    """Greedy and sampled answers, two to a prompt, are those without; a request may do without drafts."""
    asks = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=heat, seed=5, n=n)
        for heat, n in ((0.0, 1), (0.9, 2))
    ]
    found = {}
    for draft in ("off", str(folder)):
        with VLMBatcher(
            wide_model(), silent_gemma("gemma4"), caches=None, policy={"draft": draft}
        ) as batcher:
            assert batcher.policy["draft"]["value"] == draft
            results = [
                batcher.submit(prompt="abc", params=params).result(timeout=60)
                for params in asks * 3
            ]
            found[draft] = [
                (one.token_ids, [other.token_ids for other in one.others])
                for one in results
            ]
            drafted = batcher.stats().drafted
            batcher.submit_request(
                Request(prompt="abc", params=asks[0], draft="off")
            ).result(timeout=60)
            assert batcher.stats().drafted == drafted
    assert found["off"] == found[str(folder)]


def test_the_seconds_of_a_drafting_model_count() -> None:
    """A number of tokens is worth its forward and the model's, and rates that fell are tried again."""
    drafts = Drafts()
    for rows, seconds in ((1, 0.010), (4, 0.012)):
        for _ in range(8):
            drafts.seconds.record(rows, seconds)
    assert drafts.gain(1, 2.5, 1, 4, 0.023) == pytest.approx(1.0)
    assert drafts.gain(1, 2.5, 1, 4) == pytest.approx(3.5 / 1.2)
    drafts.acceptance.rates["model"] = 0.1
    for _ in range(16):
        drafts._refuse(1)
    assert drafts.acceptance.rates["model"] == FIRST_RATES["model"]


TRAINED = Path(__file__).parent.parent / "fixtures" / "checkpoints" / "qwen3_5"


def test_trained_heads_draft_what_the_model_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain, sampled and formed answers, about pictures and without, in one batch from the folders alone."""
    for module in (drafter, engine_drafts):
        monkeypatch.setattr(module, "SIZES", (3,))
    monkeypatch.setattr(Drafts, "is_due", lambda *args: True)
    monkeypatch.setattr(
        Drafts,
        "gain",
        lambda self, rows, hoped, *args: 1.5 + hoped if hoped < 3 * rows else 0.0,
    )
    monkeypatch.setattr(Drafts, "draft", lambda *args: ())
    both = scenes.record("held out heads", "both", held_out=True)
    schema = {
        "type": "object",
        "properties": {"said": {"type": "string", "maxLength": 20}},
        "required": ["said"],
    }
    asks = [
        Request(prompt="count to 14", params=SamplingParams(max_tokens=60)),
        Request(
            prompt=both.question,
            images=list(both.images),
            params=SamplingParams(max_tokens=30),
        ),
        Request(
            prompt="count to 9",
            params=SamplingParams(max_tokens=40, temperature=0.8, seed=3),
        ),
        Request(
            prompt="count to 5",
            params=SamplingParams(max_tokens=40, json_schema=schema),
        ),
    ]
    found = {}
    for draft in ("off", str(TRAINED / "heads")):
        with VLMBatcher(TRAINED, caches=None, policy={"draft": draft}) as batcher:
            results = batcher.generate(asks, raise_on_error=True)
            found[draft] = [(one.token_ids, one.text, one.parsed) for one in results]
            stats = batcher.stats()
    assert found["off"] == found[str(TRAINED / "heads")]
    assert found["off"][1][1] == both.answer
    assert stats.drafted > 40 and stats.drafts_held > 0.25 * stats.drafted
