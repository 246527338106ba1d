"""Molmo-Point from a picture to an answer with points: mlx-vlm's processor, a batch, and what is refused by name."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.molmo_point.processing_molmo_point import (
    MolmoPointImageProcessor,
    MolmoPointProcessor,
)
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.harness import inputs_of, shared_adapter
from tests.zoo import family
from tests.zoo._molmo import (
    COLUMN,
    END,
    LOW,
    LOW_START,
    NEW_IDS,
    PATCH,
    PATCH_TOKEN,
    SIDE,
    START,
)
from tests.zoo._types import PLAIN, VOCABULARY
from vlm_batch import SamplingParams, VLMBatcher
from vlm_batch.arrays import as_mlx
from vlm_batch.errors import InvalidPrompt

IMAGE = 168
MARKERS = {
    "<im_patch>": PATCH_TOKEN,
    "<im_col>": COLUMN,
    "<im_start>": START,
    "<im_end>": END,
    "<low_res_im_start>": LOW_START,
    "<im_low>": LOW,
    "<|image|>": IMAGE,
}
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|image|>{% endif %}{% endfor %}{% endif %}{% endfor %}!"
)


def processor() -> Any:
    """mlx-vlm's, for the tiny model's patches; ids are ASCII codes, and points have names as in the published tokenizer."""
    points = {f"<POINT_{index}>": VOCABULARY + NEW_IDS + index for index in range(80)}
    letters = {chr(code): code for code in range(PLAIN)}
    core = Tokenizer(models.WordLevel({**letters, **MARKERS, **points}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("<[^>]+>|."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="\0", eos_token="\4", unk_token="?"
    )
    tokenizer.chat_template = TEMPLATE
    side = SIDE * PATCH
    images = MolmoPointImageProcessor(
        max_crops=4,
        overlap_margins=(1, 1),
        base_image_input_size=(side, side),
        image_patch_size=PATCH,
    )
    return MolmoPointProcessor(tokenizer, images)


def picture(wide: int, high: int, seed: int) -> Image.Image:
    return Image.fromarray(
        np.random.RandomState(seed).randint(0, 256, (high, wide, 3), dtype=np.uint8)
    )


def asked() -> list[tuple[list[Image.Image], str]]:
    """Pictures of several shapes, a pair, and texts between them."""
    return [
        ([picture(40, 20, 0)], "point at it"),
        ([], "hello"),
        ([picture(16, 16, 1), picture(20, 50, 2)], "and both"),
        ([], "what now"),
        ([picture(30, 30, 3)], "once more"),
        ([picture(40, 20, 1)], "point at it"),
    ]


def answers(max_rows: int) -> list[tuple[tuple[int, ...], str]]:
    """Token ids and text of each request, all asked at once of one batcher."""
    params = SamplingParams(max_tokens=14)
    with VLMBatcher(
        family("molmo_point").build(), processor(), max_rows=max_rows
    ) as batcher:
        handles = [
            batcher.submit(images or None, words, params=params)
            for images, words in asked()
        ]
        results = [handle.result(timeout=120) for handle in handles]
    assert not [result.error for result in results if result.error]
    return [(result.token_ids, result.text) for result in results]


def test_pictures_and_texts_by_the_processor_are_answered_as_alone() -> None:
    """A text after a picture among them; a batcher that serves one row at a time is asked for each alone."""
    alone = []
    for images, words in asked():
        with VLMBatcher(
            family("molmo_point").build(), processor(), max_rows=1
        ) as batcher:
            result = batcher.submit(
                images or None, words, params=SamplingParams(max_tokens=14)
            ).result(timeout=120)
        alone.append((result.token_ids, result.text))
    assert answers(max_rows=6) == answers(max_rows=2) == answers(max_rows=1) == alone
    assert sum("<POINT_" in text for _, text in alone) >= 2
    assert not any(
        "<POINT_" in text
        for (images, _), (_, text) in zip(asked(), alone, strict=True)
        if not images
    )


def test_sampled_points_are_those_of_the_request_alone() -> None:
    """With a seed: the noise of a row has the width of its own vocabulary, whoever shares the batch."""
    params = SamplingParams(max_tokens=14, temperature=1.0, top_p=0.95, seed=5)
    found = []
    for company in ([], [([picture(60, 60, 7)], "a wide one"), ([], "and words")]):
        with VLMBatcher(
            family("molmo_point").build(), processor(), max_rows=4, caches=None
        ) as batcher:
            others = [
                batcher.submit(images or None, words, params=params)
                for images, words in company
            ]
            mine = batcher.submit([picture(40, 20, 0)], "point at it", params=params)
            found.append(mine.result(timeout=120).token_ids)
            for other in others:
                assert other.result(timeout=120).error is None
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_type_ids": None}, r"comes with \['token_type_ids'\]"),
        ({"image_token_pooling": np.full((12, 4), -1, np.int32)}, "pools no patch"),
        (
            {"image_token_pooling": np.zeros((11, 4), np.int32)},
            "the pictures need 11 placeholder tokens; the prompt has 8",
        ),
        (
            {"image_grids": np.ones((2, 4), np.int32)},
            "2 pictures have two views each; the prompt has the ends of 2",
        ),
    ],
    ids=["no kinds", "no patches", "other tokens", "other pictures"],
)
def test_what_does_not_fit_its_pictures_is_refused(
    change: dict[str, Any], said: str
) -> None:
    inputs = {**inputs_of("molmo_point", "image:1:1"), **change}
    with pytest.raises(InvalidPrompt, match=said):
        shared_adapter("molmo_point").encode(
            as_mlx({name: value for name, value in inputs.items() if value is not None})
        )


def test_a_point_of_an_earlier_answer_cannot_be_given_back() -> None:
    """It stands for a patch of a picture that the model has not seen in this prompt's places."""
    with pytest.raises(
        InvalidPrompt,
        match=r"token id 180 is beyond the model's 176: .* A point of an earlier answer",
    ):
        shared_adapter("molmo_point").encode({"input_ids": mx.array([[1, 2, 180]])})


def test_another_question_about_a_picture_goes_on_from_it() -> None:
    """What can be pointed at comes from the cache with the keys and values; a text before the pictures has none of it."""
    params = SamplingParams(max_tokens=14)
    questions = ["point at it", "where is it", "and now this one"]
    alone = []
    for question in questions:
        with VLMBatcher(
            family("molmo_point").build(), processor(), caches=None
        ) as batcher:
            alone.append(
                batcher.submit(picture(40, 20, 0), question, params=params).result(
                    timeout=120
                )
            )
    with VLMBatcher(family("molmo_point").build(), processor()) as batcher:
        found = [
            batcher.submit(picture(40, 20, 0), question, params=params).result(
                timeout=120
            )
            for question in questions
        ]
    assert [result.token_ids for result in found] == [
        result.token_ids for result in alone
    ]
    assert [result.usage.cached_tokens >= 18 for result in found] == [False, True, True]
    assert sum("<POINT_" in result.text for result in found) >= 1


def test_nothing_of_a_picture_stays_on_the_model() -> None:
    adapter = shared_adapter("molmo_point")
    adapter.encode(as_mlx(inputs_of("molmo_point", "image:1:1")))
    left = (
        adapter.model._image_cache,
        adapter.model._token_bounds,
        adapter.model._last_predicted_patch_id,
    )
    assert left == (None, None, None)
