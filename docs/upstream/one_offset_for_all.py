"""Rows at different positions get one row's offset.

In a batch ``cache.offset`` is an array, one offset for each row. These models take one number of it for all rows. What is
counted from it (RoPE, llama-4 attention temperature, blocks of chunked attention, slices of a mask) is wrong for the other
rows, or raises.
"""

import mlx.core as mx
from tiny import attempt, case, noise, report, text, together_and_alone

SHORT, LONG = text(1, 9), text(2, 26)


@case("jina_vlm", at="models/jina_vlm/language.py:44")
def jina_vlm():
    """RoPE of two rows at offsets 3 and 7: both turn by 7. Right: what each gets at its own offset."""
    from mlx_vlm.models.jina_vlm.language import RoPE

    rope, x = RoPE(8), noise(1, 2, 1, 1, 8)
    right = mx.concatenate(
        [rope(x[row : row + 1], offset=offset) for row, offset in enumerate((3, 7))]
    )
    return attempt(lambda: rope(x, offset=mx.array([3, 7]))), right


@case("llama4", at="models/llama4/language.py:86 models/llama4/language.py:256")
def llama4():
    """Two texts: blocks and temperatures are counted from the farthest row."""
    return together_and_alone("llama4", SHORT, LONG)


@case("llama4", at="generate/ar.py:875")
def llama4_joins():
    """A text that arrives while another decodes: ``ChunkedKVCache`` cannot be extended, and all requests end."""
    return together_and_alone("llama4", SHORT, LONG, at=(0, 3))


@case("mistral3", at="models/mistral3/language.py:180")
def ministral3():
    """Queries of Ministral 3 grow with the first row's position, in all rows; padding makes it negative, and its
    logarithm NaN.
    """
    return together_and_alone("mistral3_ministral3", SHORT, LONG)


@case("mistral3", at="models/mistral4/language.py:267 models/mistral4/language.py:15")
def mistral4():
    """Queries of Mistral 4 grow with the first row's position, as those of Ministral 3."""
    return together_and_alone("mistral3_mistral4", SHORT, LONG)


@case("moondream3", at="models/moondream3/language.py:28")
def moondream3():
    """Padding has positions below zero, whose logarithm is NaN, which the mask's zeros do not stop."""
    return together_and_alone("moondream3", SHORT, LONG)


@case("phi3_v", "phi4mm", at="models/rope_utils.py:172")
def phi_long_rope():
    """Long or short RoPE factors are chosen by the farthest row: a row at 2 beside one at 64 gets the long ones. Right:
    each row's own.
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
    x = noise(1, 2, 1, 1, 8)
    right = mx.concatenate(
        [rope(x[row : row + 1], offset=offset) for row, offset in enumerate((2, 30))]
    )
    return rope(x, offset=mx.array([2, 30])), right


if __name__ == "__main__":
    report()
