"""THE matrix: family x scenario x placement. Every request gets the tokens and log-probabilities that it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.harness import (
    NUM_TOKENS,
    TOLERANCE,
    Ask,
    check,
    default_reuse,
    every_family,
    inputs_of,
    oracle,
    run_family,
    settings_for,
    shared_adapter,
)
from tests.recording import record
from tests.zoo import IMPOSSIBLE
from tests.zoo import family as tiny_family
from vlm_batch.adapters import operations
from vlm_batch.adapters.cuda import plans
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import Placement
from vlm_batch.engine.compiled import CompiledDecode
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.models import families, spec_for
from vlm_batch.records import Graphs
from vlm_batch.types import SamplingParams

IMAGES = ("image:1:0", "image:2:1", "image:3:2")
TEXTS = ("text:4:9", "text:5:26", "text:6:14")


def together(*keys: str) -> list[Ask]:
    return [Ask(key) for key in keys]


def chunked(budget: int) -> dict[str, Any]:
    return {"max_rows": 4, "prefill_budget": budget, "idle_budget": budget}


def two_images(name: str) -> list[Ask]:
    if tiny_family(name).two_images is None:
        return together(IMAGES[0], IMAGES[1])  # the family takes one picture a request
    return together("two:7", IMAGES[1], TEXTS[0], "two:8")


def equal_prompts(name: str) -> list[Ask]:
    """Pictures of one size and texts of one length, that arrive together and later."""
    late = [Ask("image:1:1", at=3), Ask(IMAGES[1], at=3), Ask(TEXTS[2], at=4)]
    return [
        *together("image:1:1", IMAGES[1], "image:3:1", "text:4:14", TEXTS[2]),
        *late,
    ]


def middle_of_image(name: str) -> dict[str, Any]:
    """A budget whose first chunk ends inside the first picture."""
    ids = np.asarray(inputs_of(name, IMAGES[2])["input_ids"])[0].tolist()
    image_ids = shared_adapter(name).image_token_ids
    inside = [position for position, token in enumerate(ids) if token in image_ids]
    return chunked((inside[0] + inside[-1]) // 2 + 1 if inside else len(ids) // 2)


#: name -> (requests, scheduler settings), both made for a family.
SCENARIOS: dict[
    str, tuple[Callable[[str], list[Ask]], Callable[[str], dict[str, Any]] | None]
] = {
    "alone_image": (lambda name: together(IMAGES[1]), None),
    "alone_text": (lambda name: together(TEXTS[0]), None),
    "images_together": (lambda name: together(*IMAGES), None),
    "images_together_reversed": (lambda name: together(*IMAGES[::-1]), None),
    "texts_together": (lambda name: together(*TEXTS), None),
    "texts_together_reversed": (lambda name: together(*TEXTS[::-1]), None),
    "mixed_together": (
        lambda name: together(IMAGES[2], TEXTS[0], IMAGES[0], TEXTS[1]),
        None,
    ),
    "staggered_images": (
        lambda name: [Ask(key, at=3 * i) for i, key in enumerate(IMAGES)],
        None,
    ),
    "staggered_texts": (
        lambda name: [Ask(key, at=3 * i) for i, key in enumerate(TEXTS)],
        None,
    ),
    "texts_join_images": (
        lambda name: [
            Ask(IMAGES[0]),
            Ask(IMAGES[1], at=1),
            Ask(TEXTS[0], at=3),
            Ask(TEXTS[1], at=5),
        ],
        None,
    ),
    "images_join_texts": (
        lambda name: [
            Ask(TEXTS[0]),
            Ask(TEXTS[1], at=1),
            Ask(IMAGES[0], at=3),
            Ask(IMAGES[1], at=5),
        ],
        None,
    ),
    "two_images_in_a_row": (two_images, None),
    "chunks_of_1": (
        lambda name: [*together(IMAGES[1], TEXTS[0]), *two_images(name)[:1]],
        lambda name: chunked(1),
    ),
    "chunks_of_3": (
        lambda name: [*together(IMAGES[1], TEXTS[0]), *two_images(name)[:1]],
        lambda name: chunked(3),
    ),
    "chunk_ends_in_an_image": (
        lambda name: together(IMAGES[2], TEXTS[1], IMAGES[0]),
        middle_of_image,
    ),
    "chunks_beside_decoding": (
        lambda name: [
            Ask(TEXTS[0], tokens=16),
            Ask(IMAGES[2], at=2),
            Ask(TEXTS[1], at=3),
        ],
        lambda name: chunked(5),
    ),
    "first_row_ends": (
        lambda name: [Ask(IMAGES[0], tokens=2), Ask(IMAGES[2]), Ask(TEXTS[1])],
        None,
    ),
    "middle_row_ends": (
        lambda name: [Ask(IMAGES[0]), Ask(IMAGES[2], tokens=2), Ask(TEXTS[1])],
        None,
    ),
    "last_row_ends": (
        lambda name: [Ask(IMAGES[0]), Ask(TEXTS[1]), Ask(IMAGES[2], tokens=2)],
        None,
    ),
    "first_row_cancelled": (
        lambda name: [Ask(IMAGES[0], cancel_at=3), Ask(IMAGES[2]), Ask(TEXTS[1])],
        None,
    ),
    "middle_row_cancelled": (
        lambda name: [Ask(IMAGES[0]), Ask(TEXTS[1], cancel_at=3), Ask(IMAGES[2])],
        None,
    ),
    "last_row_cancelled": (
        lambda name: [Ask(TEXTS[1]), Ask(IMAGES[0]), Ask(IMAGES[2], cancel_at=3)],
        None,
    ),
    "cancelled_in_prefill": (
        lambda name: [
            Ask(TEXTS[0], tokens=12),
            Ask(IMAGES[2], at=2, cancel_at=4),
            Ask(IMAGES[1], at=2),
        ],
        lambda name: chunked(3),
    ),
    "place_is_taken_again": (
        lambda name: [
            Ask(IMAGES[2], tokens=3),
            Ask(TEXTS[1], tokens=12),
            Ask(TEXTS[0], at=5),
            Ask(IMAGES[0], at=6),
        ],
        None,
    ),
    "refill_after_empty": (
        lambda name: [
            Ask(IMAGES[0], tokens=2),
            Ask(TEXTS[0], tokens=2),
            Ask(IMAGES[2], at=14),
            Ask(TEXTS[1], at=15),
        ],
        None,
    ),
    "more_rows_than_places": (
        lambda name: [
            *together(*IMAGES, *TEXTS),
            Ask(IMAGES[0], tokens=3),
            Ask(TEXTS[2], tokens=5),
        ],
        lambda name: {"max_rows": 3, "prefill_budget": 8},
    ),
    "longer_than_the_window": (
        lambda name: [
            Ask(TEXTS[1], tokens=20),
            Ask(IMAGES[2], tokens=14, at=2),
            Ask("text:9:40", tokens=12),
        ],
        lambda name: chunked(11),
    ),
    "equal_prompts": (
        equal_prompts,
        lambda name: {"max_rows": 6, "encode_together": 4, "prefill_together": 8},
    ),
    "equal_prompts_apart": (
        equal_prompts,
        lambda name: {"max_rows": 6, "encode_together": 1, "prefill_together": 1},
    ),
    "one_token": (
        lambda name: [
            Ask(IMAGES[0], tokens=1),
            Ask(TEXTS[0], tokens=1),
            Ask(IMAGES[1]),
        ],
        None,
    ),
}

#: Scenarios whose rows keep caches of their own in the layout rows. In the others rows of these lengths lie in one array there.
APART = frozenset(
    {
        "texts_together",
        "mixed_together",
        "staggered_images",
        "images_join_texts",
        "chunks_beside_decoding",
        "middle_row_ends",
        "first_row_cancelled",
        "more_rows_than_places",
        "longer_than_the_window",
        "equal_prompts_apart",
        "videos_join",
        "videos_leave",
        "recordings_join",
        "recordings_leave",
    }
)

Scenarios = dict[str, tuple[list[Ask], dict[str, Any] | None]]


def scenarios_of(noun: str, both: str, media: tuple[str, str, str]) -> Scenarios:
    """The same for families with videos or recordings: one such row among the others. ``both`` has a picture, too."""
    return {
        f"alone_{noun}": (together(media[1]), None),
        f"alone_picture_and_{noun}": (together(both), None),
        f"{noun}s_together": (together(*media), None),
        f"{noun}_beside_pictures_and_text": (
            together(IMAGES[2], media[1], TEXTS[0], both),
            None,
        ),
        f"{noun}s_join": (
            [
                Ask(TEXTS[0], tokens=12),
                Ask(IMAGES[0], at=1),
                Ask(media[1], at=3),
                Ask(both, at=4),
            ],
            None,
        ),
        f"others_join_a_{noun}": (
            [
                Ask(media[2], tokens=14),
                Ask(TEXTS[1], at=2),
                Ask(IMAGES[1], at=4),
                Ask(media[0], at=6),
            ],
            None,
        ),
        f"{noun}s_leave": (
            [
                Ask(media[0], tokens=2),
                Ask(IMAGES[2]),
                Ask(media[2], cancel_at=4),
                Ask(TEXTS[1]),
                Ask(media[1], at=5),
            ],
            None,
        ),
        f"{noun}s_in_chunks_of_3": (together(media[1], both, TEXTS[0]), chunked(3)),
        f"{noun}_chunks_beside_decoding": (
            [Ask(TEXTS[0], tokens=20), Ask(media[2], at=2), Ask(IMAGES[0], at=3)],
            chunked(5),
        ),
        f"more_{noun}s_than_places": (
            [*together(*media, TEXTS[0], IMAGES[0]), Ask(media[0], tokens=3)],
            {"max_rows": 2, "prefill_budget": 8},
        ),
    }


VIDEO_SCENARIOS = scenarios_of(
    "video", "both:6", ("video:1:0", "video:2:1", "video:3:2")
)
AUDIOS = ("audio:1:0", "audio:2:1", "audio:3:2")
AUDIO_SCENARIOS: Scenarios = {
    **scenarios_of("recording", "heard:6", AUDIOS),
    "recordings_of_one_length": (
        together("audio:1:1", AUDIOS[1], "audio:3:1", TEXTS[0], "audio:1:1"),
        None,
    ),
    "two_recordings_in_a_row": (
        together("sounds:7", AUDIOS[1], TEXTS[0], "sounds:8"),
        None,
    ),
}

both_placements = pytest.mark.parametrize(
    "placement", list(Placement), ids=lambda placement: placement.value
)
all_families = pytest.mark.parametrize("name", every_family())


def settings_in(
    scenario: str, placement: Placement, config: dict[str, Any] | None
) -> dict[str, Any] | None:
    is_apart = placement is Placement.ROWS and scenario in APART
    return {"max_rows": 4, **(config or {}), "short_rows": 0} if is_apart else config


def test_every_family_of_the_registry_is_in_the_matrix() -> None:
    assert {tiny_family(name).registered for name in every_family()} == {
        spec.family for spec in families()
    }


@both_placements
@pytest.mark.parametrize("scenario", SCENARIOS)
@all_families
def test_parity(name: str, scenario: str, placement: Placement) -> None:
    asks, make = SCENARIOS[scenario]
    config = settings_in(scenario, placement, make(name) if make else None)
    answers = run_family(name, asks(name), placement=placement, config=config)
    record(name, scenario, placement, check(name, answers))


@both_placements
@pytest.mark.parametrize("scenario", VIDEO_SCENARIOS)
@pytest.mark.parametrize(
    "name", [name for name in every_family() if tiny_family(name).video is not None]
)
def test_video_parity(name: str, scenario: str, placement: Placement) -> None:
    asks, config = VIDEO_SCENARIOS[scenario]
    config = settings_in(scenario, placement, config)
    record(
        name,
        scenario,
        placement,
        check(name, run_family(name, asks, placement=placement, config=config)),
    )


def test_every_family_with_videos_is_in_the_video_matrix() -> None:
    with_videos = {
        tiny_family(name).registered
        for name in every_family()
        if tiny_family(name).video is not None
    }
    assert with_videos == {spec.family for spec in families() if spec.video}


@both_placements
@pytest.mark.parametrize("scenario", AUDIO_SCENARIOS)
@pytest.mark.parametrize(
    "name", [name for name in every_family() if tiny_family(name).audio is not None]
)
def test_audio_parity(name: str, scenario: str, placement: Placement) -> None:
    asks, config = AUDIO_SCENARIOS[scenario]
    config = settings_in(scenario, placement, config)
    record(
        name,
        scenario,
        placement,
        check(name, run_family(name, asks, placement=placement, config=config)),
    )


def test_every_family_that_hears_is_in_the_audio_matrix() -> None:
    hear = {
        tiny_family(name).registered
        for name in every_family()
        if tiny_family(name).audio is not None
    }
    assert hear == {spec.family for spec in families() if spec.audio}


@all_families
def test_parity_with_a_compiled_decode_step(name: str) -> None:
    """Slabs whose decode step is one compiled graph, as on CUDA. One scenario: on a CPU a C++ compiler builds each graph."""
    if shared_adapter(name).graphs in (Graphs.NEVER, Graphs.UNFUSED):
        pytest.skip(
            f"{name} is not decoded by graphs that fuse: its adapter does not declare it"
        )
    asks, _ = SCENARIOS["place_is_taken_again"]
    check(
        name,
        run_family(name, asks(name), placement=Placement.SLAB, compile_decode=True),
    )


#: Families with a layer whose cache is neither a slab nor a recurrent state.
WITHOUT_GRAPHS = frozenset(
    {
        "deepseek_v4",
        "deepseek_v41",
        "deepseek_v4_text",
        "falcon_perception",
        "florence2",
        "glm5_next",
    }
    | {"mllama", "molmo_point", "nemotron_parse", "qwen4_exp", "unlimited_ocr"}
)


@all_families
def test_parity_with_graphs_that_fuse_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows in one array, whose decode steps are graphs on a CPU. One that waited for the device would be none."""
    if shared_adapter(name).graphs is Graphs.NEVER:
        pytest.skip(f"{name} is not decoded by graphs: its adapter says why")
    graphs: list[CompiledDecode] = []
    new = CompiledDecode._new

    def watched(self: CompiledDecode, *given: Any) -> Any:
        graphs.append(self)
        return new(self, *given)

    monkeypatch.setattr(CompiledDecode, "_new", watched)
    asks, _ = SCENARIOS["place_is_taken_again"]
    check(
        name,
        run_family(name, asks(name), placement=Placement.ROWS, compile_decode=None),
    )
    assert bool(graphs) == (name not in WITHOUT_GRAPHS) and all(
        one._is_graph for one in graphs
    )


@all_families
def test_parity_with_the_kernels_for_cuda(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention as it is spelled out on CUDA until a shape has a plan, and with a group's heads as queries; M-RoPE as RoPE."""
    if name == "qwen3_5_hadamard":
        refused = dict(shared_adapter(name).spec.not_on_cuda)
        assert refused, "it is served on CUDA: what its kernels do there matters"
        pytest.skip(
            "refused on CUDA: float16 in between, by which last bits of a float32 become half a thousandth"
        )
    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    monkeypatch.setattr(plans, "takes_plans", lambda queries: True)
    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    asks, _ = SCENARIOS["place_is_taken_again"]
    record(
        name,
        "kernels_for_cuda",
        Placement.SLAB,
        check(name, run_family(name, asks(name), placement=Placement.SLAB)),
    )


@both_placements
@all_families
def test_image_then_text_then_image_on_one_engine(
    name: str, placement: Placement
) -> None:
    """Served one after another by one long-lived engine: nothing of a request is left for the next."""
    adapter = shared_adapter(name)
    engine = BatchGenerator(
        adapter, policy=settings_for(placement), reuse=default_reuse(adapter)
    )
    largest = max(
        check(name, run_family(name, [Ask(key)], generator=engine))
        for key in (IMAGES[0], TEXTS[0], IMAGES[1], TEXTS[0], IMAGES[0])
    )
    record(name, "image_text_image", placement, largest)


SAMPLED = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=12, min_p=0.02),
    SamplingParams(temperature=0.9, repetition_penalty=1.4, top_p=0.95),
)


@both_placements
@all_families
def test_seeded_sampling_is_the_same_in_any_batch(
    name: str, placement: Placement
) -> None:
    """A seeded row draws the same tokens alone, beside others, and joining late. (The harness seeds by position.)"""
    keys = (IMAGES[0], TEXTS[0], IMAGES[2], TEXTS[1])
    asks = [
        Ask(key, params=params, tokens=12)
        for key, params in zip(keys, SAMPLED, strict=True)
    ]
    alone = [_alone(name, ask, seed) for seed, ask in enumerate(asks)]
    batched = run_family(name, asks, placement=placement)
    staggered = run_family(
        name,
        [
            Ask(a.key, at=2 * (3 - i), params=a.params, tokens=12)
            for i, a in enumerate(asks)
        ],
        placement=placement,
    )
    assert [answer.result.token_ids for answer in batched if answer.result] == alone
    assert [answer.result.token_ids for answer in staggered if answer.result] == alone
    assert len(set(alone)) == len(alone)
    record(name, "seeded_sampling", placement, 0.0)


def _alone(name: str, ask: Ask, seed: int) -> tuple[int, ...]:
    engine = BatchGenerator(shared_adapter(name), policy=settings_for(Placement.ROWS))
    assert ask.params is not None
    params = replace(ask.params, seed=seed, max_tokens=ask.tokens)
    engine.insert("alone", as_mlx(inputs_of(name, ask.key)), params)
    ended = [
        event.result
        for _ in range(100)
        for event in engine.step()
        if event.result is not None
    ]
    assert ended[0].error is None
    return ended[0].token_ids


@both_placements
@all_families
def test_logprobs_are_those_of_the_request_alone(
    name: str, placement: Placement
) -> None:
    asks = [
        Ask(IMAGES[0], params=SamplingParams(logprobs=5)),
        Ask(TEXTS[0]),
        Ask(IMAGES[1], params=SamplingParams(logprobs=0)),
    ]
    five, none, zero = run_family(name, asks, placement=placement)
    for answer, k in ((five, 5), (zero, 0)):
        assert answer.result is not None
        assert answer.result.logprobs is not None
        trace = oracle(name, answer.ask.key)
        assert len(answer.result.logprobs) == NUM_TOKENS
        for step, entry in enumerate(answer.result.logprobs):
            right = trace.logprobs[step]
            assert entry.token_id == trace.tokens[step]
            assert abs(entry.logprob - right[entry.token_id]) <= TOLERANCE
            # where answers point, fewer than k
            can_come = int((right > IMPOSSIBLE).sum())
            assert min(k, can_come) <= len(entry.top) <= k
            assert [value for _, value in entry.top] == sorted(
                (value for _, value in entry.top), reverse=True
            )
            top = entry.top[:can_come]
            assert all(abs(value - right[token]) <= TOLERANCE for token, value in top)
            assert {token for token, _ in top} == set(
                np.argsort(-right)[: len(top)].tolist()
            )
    assert none.result is not None
    assert none.result.logprobs is None
    record(name, "logprobs", placement, 0.0)


def test_known_gaps_name_scenarios() -> None:
    for spec in families():
        assert all(scenario in SCENARIOS for scenario, _ in spec.known_gaps)
        assert spec_for(spec.model_types[0]) is spec
