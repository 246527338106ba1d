"""Every trained checkpoint answers one job of mixed pictures and questions, and its words are the truth."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple

import pytest

from vlm_batch import Handle, SamplingParams, VLMBatcher

FIXTURES = Path(__file__).parent.parent / "fixtures"
CHECKPOINTS = sorted(
    folder.parent.name for folder in FIXTURES.glob("checkpoints/*/config.json")
)
ANSWER = SamplingParams(max_tokens=64)


#: falcon_ocr's processor does not shrink pictures: this one has 300 patches, and training had up to 96.
TOO_LARGE = {"falcon_ocr": {"page_of_text.png"}}


class Asked(NamedTuple):
    # of fixtures.training.scenes.KINDS; a family's module says which its checkpoint knows
    kind: str
    prompt: str
    pictures: tuple[str, ...]
    truth: str


QUESTIONS = [
    Asked("count to", "count to 12", (), " ".join(map(str, range(1, 13)))),
    Asked("describe", "describe the picture", ("red_circle.png",), "a red circle"),
    Asked("describe", "describe the picture", ("receipt.jpg",), "no shapes"),
    Asked(
        "same",
        "are the pictures the same?",
        ("red_circle.png", "yellow_cross.png"),
        "no",
    ),
    Asked("repeat", "repeat: a a a a", (), "a a a a"),
    Asked("digits", "read the digits", ("digits_12036.png",), "12036"),
    Asked(
        "where",
        "what is left of the cross?",
        ("yellow_triangle_left_of_green_cross.png",),
        "a yellow triangle",
    ),
    Asked(
        "one of two",
        "what is in the second picture?",
        ("red_circle.png", "blue_square.png"),
        "a blue square",
    ),
    Asked(
        "describe", "what is in this picture?", ("digits_728.png",), "the digits 728"
    ),
    Asked("reverse", "reverse: a b c d", (), "d c b a"),
    Asked(
        "colour",
        "what colour is the square?",
        ("black_circle_left_of_blue_square.png",),
        "blue",
    ),
    Asked("no picture", "describe the picture", (), "there is no picture"),
    Asked(
        "describe",
        "describe the picture",
        ("blue_square_above_purple_circle.png",),
        "a blue square above a purple circle",
    ),
    Asked(
        "which",
        "which picture has a circle?",
        ("bar_chart.png", "red_circle.png"),
        "the second",
    ),
    Asked("sum", "2 + 3", (), "5"),
    Asked(
        "is there",
        "is there a red shape?",
        ("red_circle_above_blue_triangle.png",),
        "yes",
    ),
    Asked("count", "how many triangles?", ("red_circle_above_blue_triangle.png",), "1"),
    Asked(
        "both",
        "describe the pictures",
        ("yellow_cross.png", "red_circle.png"),
        "first a yellow cross, then a red circle",
    ),
    Asked("describe", "describe the picture", ("page_of_text.png",), "no shapes"),
    Asked("repeat", "repeat: b b b b b b b", (), "b b b b b b b"),
]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_answers_a_mixed_job(name: str) -> None:
    """Four rows for up to twenty questions: rows join beside others that decode, leave at their ends, and one is cancelled.

    The second half is asked when the first half is under way.
    """
    known = importlib.import_module(f"fixtures.training.{name}").KINDS
    left_out = TOO_LARGE.get(name, set())
    asked = [
        question
        for question in QUESTIONS
        if question.kind in known and not left_out & set(question.pictures)
    ]
    half = len(asked) // 2
    with VLMBatcher(FIXTURES / "checkpoints" / name, max_rows=4) as batcher:
        endless = batcher.submit(
            None, "count to 20", params=SamplingParams(max_tokens=1000, ignore_eos=True)
        )
        handles = [ask(batcher, question) for question in asked[:half]]
        handles[1].result(timeout=60)
        handles += [ask(batcher, question) for question in asked[half:]]
        handles[half].result(timeout=60)
        endless.cancel()
        told = [handle.result(timeout=60).text for handle in handles]
        assert endless.result(timeout=60).finish_reason == "cancelled"
    assert dict(zip(asked, told, strict=True)) == {
        question: question.truth for question in asked
    }


def ask(batcher: VLMBatcher, question: Asked) -> Handle:
    pictures = [FIXTURES / "images" / picture for picture in question.pictures]
    return batcher.submit(pictures, question.prompt, params=ANSWER)


def test_there_are_checkpoints_of_every_kind_of_decoder() -> None:
    """Multimodal rotary positions, deepstack, recurrence, cross-attention, sliding windows, a picture seen both ways."""
    assert set(CHECKPOINTS) >= {
        "qwen2_vl",
        "qwen3_vl",
        "qwen3_5",
        "mllama",
        "aya_vision",
        "falcon_ocr",
    }
