"""Several requests' keywords are merged by rules that hold for some of them only.

``BatchGenerator`` merges the keywords of a joint prefill (``_merge_prefill_prompt_kwargs``): it pads the names that it knows,
concatenates other arrays, and takes the rest from the first row.
"""

import mlx.core as mx
from tiny import (
    alone,
    attempt,
    batched,
    case,
    noise,
    pictures,
    prompt,
    report,
    text,
    tiny,
    together_and_alone,
)

SMALL, LARGE = pictures(1, (4, 4)), pictures(2, (6, 8))


def merged(name, *shapes):
    """The shape of a keyword of two prompts of 5 and 7 tokens after merging."""
    from mlx_vlm.generate.ar import _merge_prefill_prompt_kwargs

    rows = [{"inputs_embeds": mx.zeros((1, 5 + 2 * row, 4))} for row in range(2)]
    for row, shape in zip(rows, shapes, strict=True):
        row |= {name: mx.zeros(shape)} if shape else {}
    return attempt(
        lambda: list(
            _merge_prefill_prompt_kwargs(rows, [[1] * 5, [1] * 7])[1][name].shape
        )
    )


@case(
    "gemma3",
    "moondream2",
    "moondream3",
    "paligemma",
    "falcon_ocr",
    at="generate/ar.py:799",
)
def square_masks():
    """Masks (1, 1, L, L) of two prompts are concatenated as they are. Right: padded as the prompts are."""
    return merged("attention_mask_4d", (1, 1, 5, 5), (1, 1, 7, 7)), [2, 1, 7, 7]


@case("mllama", at="generate/ar.py:799")
def cross_attention_masks():
    """Masks of cross-attention (1, L, pictures, tiles) are concatenated as they are. Right: padded along the prompt."""
    return merged("cross_attention_mask", (1, 5, 1, 4), (1, 7, 1, 4)), [2, 7, 1, 4]


@case("molmo", "jina_vlm", "deepseek_vl_v2", "deepseekocr", at="generate/ar.py:799")
def masks_along_the_prompt():
    """``images_seq_mask`` (1, L), and ``image_input_idx`` of pictures with different crops, are concatenated unpadded.
    Right: padded.
    """
    return merged("images_seq_mask", (1, 5), (1, 7)), [2, 7]


@case("idefics2", "idefics3", "smolvlm", "phi4_siglip", at="generate/ar.py:799")
def masks_of_pictures():
    """No language model reads ``pixel_attention_mask`` (1, pictures, H, W), and merging it ends all requests. Right: left
    out.
    """
    found = merged("pixel_attention_mask", (1, 1, 8, 8), (1, 2, 8, 8))
    return found, "left out"


@case("gemma3", at="generate/ar.py:799")
def gemma3():
    """Two pictures with questions of different lengths: all requests of the batch end in an exception."""
    image, marks = [129, *[128] * 9, 130], mx.ones
    requests = [
        {"input_ids": prompt(seed, *parts), "pixel_values": noise(seed, 1, 3, 24, 24)}
        for seed, parts in ((1, [image]), (2, [image, [5, 6, 7]]))
    ]
    requests = [
        {**request, "attention_mask": marks(request["input_ids"].shape)}
        for request in requests
    ]
    return together_and_alone("gemma3", *requests)


@case("qwen3_vl", at="generate/ar.py:844")
def qwen3_vl_deepstack():
    """``deepstack_visual_embeds`` is a list: every row gets the first row's visual features."""
    return together_and_alone("qwen3_vl", SMALL, LARGE)


@case("qwen3_vl_moe", at="generate/ar.py:844")
def qwen3_vl_moe_deepstack():
    """As qwen3_vl."""
    return together_and_alone("qwen3_vl_moe", SMALL, LARGE)


@case("qwen3_vl", at="generate/ar.py:843")
def qwen3_vl_text_and_picture():
    """A row without a keyword adds nothing to it: ``visual_pos_masks`` has fewer rows than the batch, and memory is read for
    the missing one. Right: a row for each request.
    """
    return merged("visual_pos_masks", None, (1, 7)), [2, 7]


@case("qwen3_vl", at="models/qwen3_vl/language.py:523")
def qwen3_vl_chunks():
    """One request in chunks of 5: the mask is cut for the chunk and the list of features is not, so each chunk takes the
    first ones.
    """
    return batched(tiny("qwen3_vl"), LARGE, prefill_step_size=5), [
        alone(tiny("qwen3_vl"), LARGE)
    ]


@case(
    "multi_modality",
    "llava_next",
    "granite_vision",
    "phi4_siglip",
    "phi4mm",
    "fastvlm",
    at="generate/ar.py:826",
)
def one_placeholder_for_a_picture():
    """A row's length is counted in ids, where one id stands for all of a picture's features (multi_modality,
    beside a text).
    """
    picture = {"input_ids": prompt(4, [128]), "pixel_values": noise(4, 1, 3, 16, 16)}
    return together_and_alone("multi_modality", text(5, 9), picture)


@case(
    "falcon_ocr",
    at="models/falcon_ocr/language.py:386 models/falcon_ocr/language.py:384",
)
def falcon_ocr_cut_twice():
    """``position_ids`` and ``pos_hw`` are cut to the chunk by BatchGenerator, and again by the model.

    Any picture ends in an exception.
    """
    ids = [*range(129, 134), *[128] * 6, 134]
    request = {
        "input_ids": prompt(6, ids),
        "pixel_values": noise(6, 1, 8, 12, 3),
        "image_grid_hw": mx.array([[2, 3]]),
    }
    return attempt(lambda: batched(tiny("falcon_ocr"), request)), [
        alone(tiny("falcon_ocr"), request)
    ]


if __name__ == "__main__":
    report()
