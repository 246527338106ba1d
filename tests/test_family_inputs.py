"""What a family cannot take is refused when its row is encoded, and says what was wrong."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.harness import (
    NUM_TOKENS,
    TOLERANCE,
    Ask,
    difference,
    every_family,
    inputs_of,
    oracle,
    run,
    shared_adapter,
)
from tests.zoo import family
from vlm_batch.adapters.prompts import num_logits, num_words
from vlm_batch.arrays import as_mlx, as_numpy
from vlm_batch.errors import InvalidPrompt
from vlm_batch.loading import adapt


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_a_picture_for_a_text_model(name: str) -> None:
    with pytest.raises(
        InvalidPrompt, match=rf"{name} does not know the inputs \['pixel_values'\]"
    ):
        shared_adapter(name).encode(
            {"input_ids": mx.array([[1, 2, 3]]), "pixel_values": mx.zeros((1, 3, 4, 4))}
        )


@pytest.mark.parametrize(
    "name",
    [
        "dots_ocr",
        "ernie4_5_moe_vl",
        "glm_ocr",
        "hunyuan_vl",
        "mage_vl",
        "paddleocr_vl",
        "qwen3_5",
        "qwen4_exp",
        "zaya1_vl",
    ],
)
def test_a_prompt_without_room_for_its_picture(name: str) -> None:
    """Upstream's merges drop what they have no place for."""
    inputs = as_mlx(inputs_of(name, "image:1:1"))
    for token in shared_adapter(name).image_token_ids:
        inputs["input_ids"] = mx.where(
            inputs["input_ids"] == token, 1, inputs["input_ids"]
        )
    with pytest.raises(InvalidPrompt, match="placeholder tokens; the prompt has 0"):
        shared_adapter(name).encode(inputs)


@pytest.mark.parametrize("name", ["mage_vl", "minicpmv4_6", "nemotron_h_nano_omni"])
def test_a_video_where_videos_are_not_verified(name: str) -> None:
    with pytest.raises(InvalidPrompt, match="pixel_values_videos"):
        shared_adapter(name).encode(
            {"input_ids": mx.array([[1, 2]]), "pixel_values_videos": mx.zeros((1, 4))}
        )


@pytest.mark.parametrize("name", every_family())
def test_a_token_of_another_vocabulary(name: str) -> None:
    """As a tokenizer that does not belong to the model makes them. MLX reads other memory for such an id, or crashes."""
    adapter = shared_adapter(name)
    for token in (500_000_000, -(2**30)):
        # some families take no prompt without a picture
        given = as_mlx(inputs_of(name, "image:1:1"))
        given["input_ids"] = mx.concatenate(
            [given["input_ids"], mx.array([[token]])], axis=1
        )
        with pytest.raises(
            InvalidPrompt,
            match=rf"token id {token} is (below 0|beyond the model's \d+)",
        ):
            adapter.encode(given)


@pytest.mark.parametrize(
    "name", ["deepseek_v4", "florence2", "llmjpvl", "phi3_v", "phi4_siglip", "phi4mm"]
)
def test_a_mark_beyond_the_table_without_a_picture(name: str) -> None:
    """The ids by which these families mark a picture's positions have no embedding; without pictures nothing replaces them."""
    adapter = shared_adapter(name)
    marks = {
        *adapter.image_token_ids,
        getattr(adapter.config, "image_token_index", 0) or 0,
    }
    beyond = [
        token
        for token in marks
        if not 0 <= token < (num_words(adapter.token_table) or 0)
    ]
    assert beyond
    for token in beyond[:4]:
        with pytest.raises(InvalidPrompt, match=r"token id|\d placeholder"):
            adapter.encode({"input_ids": mx.array([[1, token, 2]])})


def test_nemotron_parse_without_a_picture_and_with_two() -> None:
    """One encoding is what its decoder reads."""
    adapter, ids = shared_adapter("nemotron_parse"), mx.array([[1, 2, 3]])
    with pytest.raises(
        InvalidPrompt, match="nemotron_parse reads a picture: a request needs one"
    ):
        adapter.encode({"input_ids": ids})
    with pytest.raises(InvalidPrompt, match="takes one picture a request; given: 2"):
        adapter.encode({"input_ids": ids, "pixel_values": mx.zeros((2, 3, 8, 16))})
    with pytest.raises(InvalidPrompt, match="token id 5000 is beyond the model's 160"):
        adapter.encode(
            {
                "input_ids": mx.array([[1, 5000]]),
                "pixel_values": mx.zeros((1, 3, 8, 16)),
            }
        )


@pytest.mark.parametrize("length", [1, 2])
def test_nemotron_parse_with_a_short_prompt(length: int) -> None:
    """One token is replaced by the start token, two stay as they are, whatever they are."""
    inputs = {**inputs_of("nemotron_parse", "image:1:1")}
    inputs["input_ids"] = inputs["input_ids"][:, :length]
    (answer,) = run(
        shared_adapter("nemotron_parse"), lambda key: inputs, [Ask("short")]
    )
    tiny = family("nemotron_parse")
    assert (
        difference(answer, tiny.greedy(tiny.build(), inputs, NUM_TOKENS)) <= TOLERANCE
    )


@pytest.mark.parametrize(
    ("name", "foreign"), [("qwen2_vl", "num_crops"), ("llava", "image_grid_thw")]
)
def test_what_another_familys_processor_returns(name: str, foreign: str) -> None:
    """A processor that does not belong to the model is told by what it returns."""
    inputs = {
        **as_mlx(inputs_of(name, "image:1:1")),
        foreign: mx.ones((1, 3), dtype=mx.int32),
    }
    with pytest.raises(
        InvalidPrompt,
        match=rf"{name} does not know the inputs \['{foreign}'\]; it takes",
    ):
        shared_adapter(name).encode(inputs)


@pytest.mark.parametrize(
    "name", ["inkling", "muse_spark", "glm5_next", "plamo2vl", "mistral_large3"]
)
def test_pictures_and_placeholders_that_do_not_match(name: str) -> None:
    inputs = as_mlx(inputs_of(name, "image:1:1"))
    for token in shared_adapter(name).image_token_ids:
        inputs["input_ids"] = mx.where(
            inputs["input_ids"] == token, 1, inputs["input_ids"]
        )
    with pytest.raises((InvalidPrompt, ValueError), match="token"):
        shared_adapter(name).encode(inputs)


def test_a_config_without_a_picture_token() -> None:
    model = family("qwen2_vl").build()
    for name in ("image_token_id", "video_token_id"):
        setattr(model.config, name, None)
    with pytest.raises(
        InvalidPrompt,
        match=r"need 6 placeholder tokens; the prompt has 0: config\.json names no",
    ):
        adapt(model).encode(as_mlx(inputs_of("qwen2_vl", "image:1:1")))


def _changed(name: str, change: str) -> dict[str, Any]:
    """A picture's inputs, made by hand: ``change`` says how the prompt's placeholders are not the picture's."""
    given = as_mlx(inputs_of(name, "image:1:1"))
    marks = list(shared_adapter(name).image_token_ids)
    ids = np.array(given["input_ids"])
    places = np.flatnonzero(np.isin(ids[0], marks))
    if change == "no picture":
        return {"input_ids": given["input_ids"]}
    if change == "one more":
        changed = np.concatenate([ids, ids[:, places[:1]]], axis=1)
    else:
        changed = ids.copy()
        changed[0, places[:1] if change == "one less" else places] = 1
    added = changed.shape[1] - ids.shape[1]
    for key, value in given.items():  # what a processor says of each position
        if (
            key != "input_ids"
            and getattr(value, "shape", ())[:2] == ids.shape
            and added
        ):
            given[key] = mx.concatenate([value, value[:, -1:]], axis=1)
    return {**given, "input_ids": mx.array(changed)}


#: Families whose processor says by position where pictures stand, or that take none.
WITHOUT_MARKS = frozenset(
    {
        "deepseek_v4_text",
        "falcon_h1",
        "florence2",
        "minicpmo",
        "minicpmv4_6",
        "molmo",
        "moondream2",
        "moondream3",
        "nemotron_parse",
        "qwen3_next",
    }
)


@pytest.mark.parametrize("change", ["one more", "one less", "none", "no picture"])
@pytest.mark.parametrize("name", every_family())
def test_as_many_placeholders_as_the_pictures_have_features(
    name: str, change: str
) -> None:
    """The prompt says so many, the picture needs so many: refused with the numbers, where mlx-vlm answers some of them."""
    adapter = shared_adapter(name)
    ids = inputs_of(name, "image:1:1")["input_ids"]
    has_marks = bool(np.isin(ids, list(adapter.image_token_ids)).any())
    assert has_marks == (name not in WITHOUT_MARKS)
    if not has_marks:
        pytest.skip(f"{name} is in WITHOUT_MARKS")
    given = _changed(name, change)
    with pytest.raises(
        InvalidPrompt,
        match=r"\d placeholder|placeholder tokens; the prompt has \d|placeholders for \d|token id",
    ):
        mx.eval(adapter.encode(given).inputs_embeds)
    with suppress(InvalidPrompt):
        adapter.prompt_key(given)


@pytest.mark.parametrize("name", every_family())
def test_the_prompt_of_one_picture_with_the_pictures_of_two(name: str) -> None:
    """And the other way round: no merge may leave a picture out, or take one twice."""
    adapter = shared_adapter(name)
    one, two = inputs_of(name, "image:1:1"), inputs_of(name, "two:1")
    counts = [
        int(np.isin(given["input_ids"], list(adapter.image_token_ids)).sum())
        for given in (one, two)
    ]
    if name in ("minicpmo", "minicpmv4_6"):
        assert counts == [0, 0]
        pytest.skip("its processor says by position where pictures stand")
    assert counts[0] != counts[1]
    for asked, shown in ((one, two), (two, one)):
        shape = shown["input_ids"].shape
        by_position = {
            key
            for key, value in shown.items()
            if getattr(value, "shape", ())[:2] == shape
        }
        given = as_mlx(
            {
                key: asked.get(key, value) if key in by_position else value
                for key, value in shown.items()
            }
        )
        with pytest.raises(InvalidPrompt):
            mx.eval(adapter.encode(given).inputs_embeds)


@pytest.mark.parametrize(
    "name", ["kimi_vl", "mllama", "qwen2_vl", "deepseek_vl_v2", "phi3_v"]
)
def test_what_shapes_tell_is_refused_at_submit(name: str) -> None:
    """Numpy, and no MLX: on the submitter's thread."""
    adapter = shared_adapter(name)
    adapter.check_inputs(inputs_of(name, "image:1:1"))
    adapter.check_inputs(inputs_of(name, "text:4:9"))
    for change in ("one more", "none", "no picture"):
        with pytest.raises(
            InvalidPrompt, match=r"\d placeholder|placeholder tokens; the prompt has \d"
        ):
            adapter.check_inputs(as_numpy(_changed(name, change)))


@pytest.mark.parametrize("change", ["shorter", "longer", "pictures", "tiles", "none"])
def test_a_mask_of_tiles_that_does_not_fit(change: str) -> None:
    """mllama's, for other tokens, pictures or tiles than the prompt has."""
    adapter, given = shared_adapter("mllama"), {**inputs_of("mllama", "image:1:1")}
    mask = given.pop("cross_attention_mask")
    masks = {
        "shorter": mask[:, :-1],
        "longer": np.concatenate([mask, mask[:, :1]], axis=1),
        "pictures": np.concatenate([mask, mask], axis=2),
        "tiles": mask[..., :1],
    }
    if change in masks:
        given["cross_attention_mask"] = masks[change]
    with pytest.raises(InvalidPrompt, match=r"here \(1, 12, 1, 4\), and it is"):
        adapter.check_inputs(given)


def test_a_mask_of_tiles_without_pictures() -> None:
    given = {**inputs_of("mllama", "text:4:9")}
    given["cross_attention_mask"] = np.ones((1, 3, 1, 4))
    with pytest.raises(InvalidPrompt, match=r"here none, and it is \(1, 3, 1, 4\)"):
        shared_adapter("mllama").check_inputs(given)


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_a_tile_with_padding_is_refused(name: str) -> None:
    """transformers hides it from attention (modeling_idefics3.py, Idefics3VisionTransformer); mlx-vlm's tower does not."""
    adapter, given = shared_adapter(name), {**inputs_of(name, "image:1:1")}
    adapter.check_inputs(given)
    mask = given["pixel_attention_mask"].copy()
    mask[0, 0, 8:] = 0
    with pytest.raises(
        InvalidPrompt, match=f"{name} takes whole tiles, as its processor makes them"
    ):
        adapter.check_inputs({**given, "pixel_attention_mask": mask})


def test_an_idefics2_picture_that_is_smaller_than_a_patch() -> None:
    given = {**inputs_of("idefics2", "image:1:1")}
    mask = given["pixel_attention_mask"].copy()
    mask[0, 0, 3:] = 0
    with pytest.raises(
        InvalidPrompt, match=r"own pixels are 3x20, less than a patch of 4"
    ):
        shared_adapter("idefics2").encode(
            as_mlx({**given, "pixel_attention_mask": mask})
        )


@pytest.mark.parametrize("change", ["one more", "one less", "others", "no picture"])
@pytest.mark.parametrize(
    "name", ["minicpmo", "minicpmv4_6", "molmo", "moondream2", "moondream3"]
)
def test_places_that_a_processor_names_hold_the_placeholders(
    name: str, change: str
) -> None:
    """Families that are told by position where features go look at no id, so nothing but this counts the placeholders."""
    adapter, given = shared_adapter(name), {**inputs_of(name, "image:1:2")}
    ids = given["input_ids"]
    (picture,) = adapter.pictures(
        mx.array(ids), as_mlx({key: given[key] for key in given.keys() - {"input_ids"}})
    )
    adapter.check_inputs(given)
    if change == "no picture":
        for key in given.keys() & {"pixel_values", "tgt_sizes"}:
            del given[key]
        if name.startswith("moondream"):
            pytest.skip("without a picture its zeros are text")
    elif change == "one more":
        last = picture.end - (name == "minicpmo")  # a slice ends in a mark of its own
        given["input_ids"] = np.insert(ids, last, ids[0, last - 1], axis=1)
    elif change == "one less":
        given["input_ids"] = np.delete(ids, picture.start, axis=1)
    else:
        given["input_ids"] = ids.copy()
        given["input_ids"][0, picture.start + 1] = 5
    with pytest.raises(InvalidPrompt, match=r"placeholder tokens|holds no picture"):
        adapter.check_inputs(given)
    with pytest.raises(InvalidPrompt, match=r"placeholder tokens|holds no picture"):
        adapter.encode(as_mlx(given))


def test_slices_without_a_place_in_the_prompt() -> None:
    """mlx-vlm answers without them (minicpmo.py:415, minicpmv4_6.py:372), or with a part of their features."""
    for name in ("minicpmo", "minicpmv4_6"):
        adapter, given = shared_adapter(name), {**inputs_of(name, "image:1:1")}
        with pytest.raises(
            InvalidPrompt,
            match=r"slices \(tgt_sizes\); the prompt has room for 0 \(image_bound\)",
        ):
            adapter.check_inputs(
                {key: given[key] for key in given.keys() - {"image_bound"}}
            )
    given = {**inputs_of("minicpmo", "image:1:0")}
    ((bounds,),) = given["image_bound"]
    short = {**given, "image_bound": [np.array([[bounds[0], bounds[1] - 1]])]}
    short["input_ids"] = np.delete(given["input_ids"], bounds[0], axis=1)
    with pytest.raises(
        InvalidPrompt, match=r"a slice needs \d placeholder tokens; the prompt has \d"
    ):
        shared_adapter("minicpmo").check_inputs(short)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("qwen2_vl", True),
        ("gemma3n", True),
        ("mllama", True),  # a head with fewer rows than the table
        ("molmo", True),  # two tables, of which one is the head
        ("molmo2", True),
        ("moondream2", True),
        ("qwen3_omni_moe", True),
        ("molmo_point", False),  # points at the request's pictures
    ],
)
def test_how_many_tokens_a_model_chooses_from(name: str, known: bool) -> None:
    adapter = shared_adapter(name)
    found = num_logits(adapter.language, adapter.token_table)
    columns = oracle(name, "text:1:7", 1).logprobs.shape[-1]
    assert found == (columns if known else None)
