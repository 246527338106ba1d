"""Llama 3.2 Vision: cross-attention without its picture, and under the wrong mask."""

import mlx.core as mx
from mlx_vlm.generate.ar import generate_step
from tiny import (
    alone,
    batched,
    case,
    first_logprobs,
    noise,
    prompt,
    report,
    text,
    tiny,
    together_and_alone,
)


def picture(num_tiles):
    """A request with one picture of 8 x 8 tiles, padded with black ones to four."""
    ids = prompt(1, [152])
    tiles = mx.concatenate(
        [noise(2, 1, 1, num_tiles, 3, 8, 8), mx.zeros((1, 1, 4 - num_tiles, 3, 8, 8))],
        axis=2,
    )
    mask = mx.array([[[1] * num_tiles + [0] * (4 - num_tiles)]])
    seen = (
        mx.broadcast_to(mask[:, None], (1, ids.shape[1], 1, 4))
        * (mx.arange(ids.shape[1]) >= 3)[None, :, None, None]
    )
    ratio = {1: 1, 2: 2, 4: 6}[num_tiles]
    return {
        "input_ids": ids,
        "pixel_values": tiles,
        "aspect_ratio_ids": mx.array([[ratio]]),
        "aspect_ratio_mask": mask,
        "cross_attention_mask": seen,
    }


@case("mllama", at="generate/ar.py:1190 models/mllama/language.py:78")
def picture_lost_in_a_batch():
    """One request in a BatchGenerator: the picture's states are neither handed on after the first token nor kept in a
    cache. Right: as alone.
    """
    return batched(tiny("mllama"), picture(4)), [alone(tiny("mllama"), picture(4))]


@case("mllama", at="models/mllama/language.py:78")
def text_only():
    """Without a picture, cross-attention layers take halves of the query for keys and values.

    Right (transformers): the layers are skipped.
    """
    model = tiny("mllama")
    found = first_logprobs(model, text(3, 7))
    language = model.language_model
    hidden = language.model.embed_tokens(text(3, 7)["input_ids"])
    for index, layer in enumerate(language.model.layers):
        if index not in model.config.text_config.cross_attention_layers:
            hidden = layer(hidden, mask="causal")
    logits = language.lm_head(language.model.norm(hidden))[0, -1]
    return found, logits - mx.logsumexp(logits)


@case("mllama", at="generate/ar.py:411")
def mask_forgotten_at_decode():
    """A picture of one tile: from the second token on the mask is gone, and padding tiles are attended to. Right: as if
    the first token belonged to the prompt.
    """
    request = picture(1)
    ids, pixels = request.pop("input_ids"), request.pop("pixel_values")
    steps = generate_step(
        ids, tiny("mllama"), pixels, None, max_tokens=2, temperature=0.0, **request
    )
    (token, _), (_, found) = steps
    seen = request["cross_attention_mask"]
    longer = {
        **request,
        "input_ids": mx.concatenate([ids, mx.array([[int(token)]])], axis=1),
        "pixel_values": pixels,
    }
    longer["cross_attention_mask"] = mx.concatenate([seen, seen[:, -1:]], axis=1)
    return found, first_logprobs(tiny("mllama"), longer)


@case("mllama", at="models/mllama/language.py:150")
def shared_column():
    """RoPE takes the batch's column for all rows: a shorter text is turned too far as soon as a longer one has joined."""
    return together_and_alone(
        "mllama", text(1, 9), text(2, 26), at=(0, 2), num_tokens=8
    )


if __name__ == "__main__":
    report()
