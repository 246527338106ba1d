"""An answer depends on how its prompt is cut into chunks.

``generate`` takes a prompt ``prefill_step_size`` tokens at a time. Right: a token's position, and what it may attend to, are
those of the whole prompt, whatever the size.
"""

import mlx.core as mx
from tiny import (
    attempt,
    case,
    config_of,
    filled,
    first_logprobs,
    logits_in_chunks,
    noise,
    pictures,
    report,
    text,
    tiny,
)

PICTURE = pictures(3, (6, 8))


def whole_and_chunked(name, request):
    """Log-probabilities of the first token with a prompt in chunks of 4, and in one."""
    found = attempt(lambda: first_logprobs(tiny(name), request, prefill_step_size=4))
    return found, first_logprobs(tiny(name), request, prefill_step_size=None)


@case("glm4v", at="models/glm4v/language.py:518")
def glm4v():
    """From the second chunk on, tokens count as text, pictures' too."""
    return whole_and_chunked("glm4v", PICTURE)


@case("glm4v_moe", at="models/glm4v_moe/language.py:577")
def glm4v_moe():
    """As glm4v."""
    return whole_and_chunked("glm4v_moe", PICTURE)


@case("ernie4_5_moe_vl", at="models/ernie4_5_moe_vl/language.py:603")
def ernie4_5_moe_vl():
    """Positions are made of each chunk, without the pictures' grids."""
    return whole_and_chunked("ernie4_5_moe_vl", pictures(3, (6, 8), length=48))


@case(
    "hunyuan_vl",
    at="models/hunyuan_vl/language.py:206 models/hunyuan_vl/language.py:459",
)
def hunyuan_vl():
    """From the second chunk on, tokens count as text, and turn by one axis."""
    ids = text(4, 16)["input_ids"]
    # below 4: the first chunk's table of angles has as many rows as the chunk has tokens
    positions = mx.concatenate(
        [mx.arange(16)[None], noise(5, 3, 16).astype(mx.int32) % 4]
    )[None]
    return whole_and_chunked(
        "hunyuan_vl", {"input_ids": ids, "position_ids": positions}
    )


@case("gemma3n", at="models/gemma3n/language.py:138")
def gemma3n():
    """Layers that share keys read the cache's offset after it has advanced, and turn their queries by a chunk's
    length too far.
    """
    from mlx_vlm.models.gemma3n.language import LanguageModel

    language = filled(LanguageModel(config_of("gemma3n").text_config))
    ids = text(6, 12)["input_ids"]
    return logits_in_chunks(language, ids, 4), logits_in_chunks(language, ids, 1)


@case("zaya1_vl", at="generate/ar.py:497")
def zaya1_vl():
    """generate passes ``inputs=`` to a model that calls it ``input_ids``: a prompt of more than one chunk raises."""
    return whole_and_chunked("zaya1_vl", text(7, 9))


@case("phi3_v", "phi4mm", at="models/rope_utils.py:172")
def phi_long_rope():
    """Long or short factors are chosen for each chunk.

    Right (transformers): by the whole prompt's length, 20 of 8 here.
    """
    from mlx_vlm.models.rope_utils import SuScaledRoPE

    rope = SuScaledRoPE(
        8,
        100.0,
        64,
        8,
        short_factor=[1.0, 1.1, 1.2, 1.3],
        long_factor=[2.0, 3.0, 4.0, 5.0],
    )
    x = noise(1, 1, 1, 20, 8)
    return mx.concatenate(
        [rope(x[:, :, i : i + 4], offset=i) for i in range(0, 20, 4)], axis=2
    ), rope(x)


@case("unlimited_ocr", at="models/unlimited_ocr/language.py:38")
def unlimited_ocr():
    """The prompt's last token runs by itself and is taken for the answer's first.

    The ring overwrites it. Right: the prompt stays.
    """
    from mlx_vlm.models.unlimited_ocr.language import RingSlidingKVCache

    cache = RingSlidingKVCache(3)
    # a prompt of 5, an answer of 4
    for start, end in [(0, 4), (4, 5), *[(place, place + 1) for place in range(5, 9)]]:
        keys = mx.arange(start, end, dtype=mx.float32)[None, None, :, None]
        seen, _ = cache.update_and_fetch(keys, keys)
    return sorted(seen.flatten().tolist()), [0, 1, 2, 3, 4, 6, 7, 8]


@case(
    "deepseek_v4",
    at="models/deepseek_v4/language.py:403 models/deepseek_v4/language.py:857",
)
def deepseek_v4_pools():
    """A pool is made of its four tokens and the four before. Those are forgotten after every chunk and every decoded token,
    and in prompts of up to eight tokens. Right (transformers, modeling_deepseek_v4.py, update_overlap_state): the same
    whatever cuts the two apart.
    """
    language, ids = tiny("deepseek_v4").language_model, text(6, 44)["input_ids"]
    return logits_in_chunks(language, ids, 11), logits_in_chunks(language, ids, 44)


if __name__ == "__main__":
    report()
