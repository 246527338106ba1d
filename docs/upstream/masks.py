"""The masks of pictures do not reach the attention.

``get_input_embeddings`` returns the mask by which a picture's tokens attend to each other both ways as ``attention_mask_4d``.
``generate`` hands it on as a keyword, and the language model swallows it in ``**kwargs``: pictures are causal. Right: the same
language model given that mask.
"""

import mlx.core as mx
import numpy as np
from tiny import case, first_logprobs, noise, prompt, report, tiny


def logprobs(logits):
    """(V,) of the last position."""
    return np.array((logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0, -1])


def two_way(ids, marker):
    """(1, 1, L, L) bool: causal, and both ways within a picture."""
    inside = np.array(ids[0] == marker)
    number = np.cumsum(inside & ~np.roll(inside, 1)) * inside
    causal = np.tril(np.ones((len(inside),) * 2, dtype=bool))
    return mx.array(causal | (inside & (number[:, None] == number)))[None, None]


@case("gemma3", at="models/gemma3/gemma3.py:123")
def gemma3():
    """Pictures are causal. Right (transformers, create_masks_for_vision_model): both ways within a picture. The window here
    is longer than the prompt.
    """
    model = tiny("gemma3")
    for layer_window in (model.language_model.config, model.language_model.model):
        layer_window.sliding_window = layer_window.window_size = 64
    ids = prompt(1, [129, *[128] * 9, 130])
    request = {
        "input_ids": ids,
        "attention_mask": mx.ones(ids.shape),
        "pixel_values": noise(2, 1, 3, 24, 24),
    }
    embeds = model.get_input_embeddings(
        ids, request["pixel_values"], mask=request["attention_mask"]
    ).inputs_embeds
    return first_logprobs(model, request), logprobs(
        model.language_model(ids, embeds, mask=two_way(ids, 128)).logits
    )


def moondream(name):
    """A picture and a question."""
    model = tiny(name)
    request = {
        "input_ids": prompt(1, [0] * 9),
        "pixel_values": noise(2, 1, 12, 12, 3),
        "num_crops": [1],
        "crop_layouts": [None],
    }
    right = model(
        request["input_ids"],
        pixel_values=request["pixel_values"],
        num_crops=[1],
        crop_layouts=[None],
    ).logits
    return first_logprobs(model, request), logprobs(right)


@case("moondream3", at="models/moondream3/language.py:282")
def moondream3():
    """BOS and picture are causal. Right (``Model.__call__``, which hands the mask on, and Moondream's own code): they see
    each other.
    """
    return moondream("moondream3")


@case("moondream2", at="models/moondream2/language.py:130")
def moondream2():
    """As moondream3."""
    return moondream("moondream2")


@case("molmo2", at="models/molmo2/language.py:175")
def molmo2():
    """No mask of pictures is made. Right (transformers): one block of all picture tokens."""
    model = tiny("molmo2")
    language = model.language_model
    ids = prompt(1, [128, 129, 130])
    embeds = noise(3, 1, ids.shape[1], 64)
    types = mx.array([[0, 0, 0, 1, 1, 1, 0, 0, 0]])
    found = language(ids, inputs_embeds=embeds, token_type_ids=types).logits
    return logprobs(found), logprobs(
        language(ids, inputs_embeds=embeds, mask=two_way(types, 1)).logits
    )


if __name__ == "__main__":
    report()
