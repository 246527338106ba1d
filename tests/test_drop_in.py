"""mlx-vlm's calls with this library's engine answer what mlx-vlm's own answer, on trained checkpoints."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_vlm.generate import ar, dispatch
from mlx_vlm.prompt_utils import apply_chat_template

from vlm_batch.errors import RequestFailed
from vlm_batch.integrations import drop_in

FIXTURES = Path(__file__).parent.parent / "fixtures"
PICTURES = [
    str(FIXTURES / "images" / name)
    for name in ("red_circle.png", "yellow_triangle_left_of_green_cross.png")
]
QUESTIONS = ["describe the picture", "how many shapes are there?"]
#: Checkpoints that mlx-vlm's own batch answers as its single request.
RIGHT = ("qwen2_vl", "qwen3_vl", "aya_vision")


@pytest.fixture(scope="module", params=RIGHT)
def loaded(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return drop_in.load(str(FIXTURES / "checkpoints" / request.param))


@pytest.fixture(scope="module")
def one() -> tuple[Any, Any]:
    return drop_in.load(str(FIXTURES / "checkpoints" / RIGHT[0]))


def formatted(loaded: tuple[Any, Any], question: str) -> str:
    model, processor = loaded
    return apply_chat_template(processor, model.config, question, num_images=1)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (ar.batch_generate, drop_in.batch_generate),
        (dispatch.generate, drop_in.generate),
        (dispatch.stream_generate, drop_in.stream_generate),
    ],
)
def test_arguments_have_their_names_and_order(
    theirs: Callable[..., Any], ours: Callable[..., Any]
) -> None:
    wanted = list(inspect.signature(theirs).parameters)
    taken = list(inspect.signature(ours).parameters)
    assert [*taken[:-1], "kwargs"] == [
        name for name in wanted if name in taken or name == "kwargs"
    ]


def test_a_batch_has_their_texts(loaded: tuple[Any, Any]) -> None:
    theirs = ar.batch_generate(
        *loaded, images=list(PICTURES), prompts=QUESTIONS, max_tokens=12
    )
    ours = drop_in.batch_generate(
        *loaded, images=list(PICTURES), prompts=QUESTIONS, max_tokens=12
    )
    assert ours.texts == theirs.texts and all(ours.texts)
    assert ours.image_sizes == theirs.image_sizes
    assert ours.stats.generation_tokens > 0 and ours.stats.generation_tps > 0
    assert ours.errors == [None, None]


def test_one_prompt_has_their_answer(loaded: tuple[Any, Any]) -> None:
    prompt = formatted(loaded, QUESTIONS[0])
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
    theirs = dispatch.generate(*loaded, prompt, PICTURES[0], **options)
    ours = drop_in.generate(*loaded, prompt, PICTURES[0], **options)
    assert ours.text == theirs.text and ours.text
    assert ours.prompt_tokens == theirs.prompt_tokens
    assert ours.finish_reason == theirs.finish_reason
    pieces = list(drop_in.stream_generate(*loaded, prompt, PICTURES[0], **options))
    assert "".join(piece.text for piece in pieces) == ours.text
    assert pieces[-1].finish_reason == ours.finish_reason


def test_texts_alone_and_lengths_of_their_own(one: tuple[Any, Any]) -> None:
    ours = drop_in.batch_generate(*one, prompts=["say hello"] * 2, max_tokens=[2, 5])
    assert ours.image_sizes is None
    assert ours.stats.generation_tokens <= 7
    with pytest.raises(ValueError, match="3 images for 1 prompts"):
        drop_in.batch_generate(*one, images=[*PICTURES, PICTURES[0]], prompts=["a"])


def test_a_prompt_that_cannot_be_answered_leaves_the_others(
    one: tuple[Any, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n and nothing else")
    ours = drop_in.batch_generate(
        *one, images=[str(broken), PICTURES[0]], prompts=QUESTIONS, max_tokens=8
    )
    assert ours.texts[0] == "" and ours.texts[1]
    assert ours.errors[0] and ours.errors[1] is None
    assert "prompt 0 has no answer" in caplog.text
    with pytest.raises(RequestFailed):
        drop_in.generate(*one, formatted(one, "what?"), str(broken))


def test_options_are_taken_or_refused_by_name(one: tuple[Any, Any]) -> None:
    prompt = formatted(one, QUESTIONS[0])
    whole = drop_in.generate(*one, prompt, PICTURES[0], max_tokens=8)
    assert whole.token_ids is not None
    first = one[1].tokenizer.convert_ids_to_tokens(whole.token_ids[1])
    short = drop_in.generate(
        *one,
        prompt,
        PICTURES[0],
        max_tokens=8,
        eos_tokens=[first],
        prefill_step_size=64,
    )
    assert short.finish_reason == "stop"
    said = {"max_tokens": 8, "eos_tokens": first}
    assert drop_in.generate(*one, prompt, PICTURES[0], **said).text == short.text
    assert short.generation_tokens <= 2
    with pytest.raises(TypeError, match="resize_shape is not supported"):
        drop_in.generate(*one, prompt, PICTURES[0], resize_shape=(32, 32))


def test_a_model_has_one_batcher_that_goes_with_it() -> None:
    model, processor = drop_in.load(str(FIXTURES / "checkpoints" / RIGHT[0]))
    before = set(drop_in._batchers)
    for _ in range(2):
        drop_in.batch_generate(model, processor, prompts=["say hello"], max_tokens=2)
    (key,) = set(drop_in._batchers) - before
    del model, processor
    gc.collect()
    assert key not in drop_in._batchers
