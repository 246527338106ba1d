"""Padding reaches the answers.

``BatchGenerator`` pads the shorter prompts of a joint prefill with zeros on the left. Where a model makes its own mask, or
divides by a magnitude, the padding is attended to or becomes NaN.
"""

from tiny import alone, batched, case, report, text, tiny, together_and_alone

SHORT, LONG = text(1, 9), text(2, 26)


@case("paligemma", at="models/paligemma/language.py:237")
def paligemma_alone():
    """The language model that the server hands to BatchGenerator lacks the model's policy not to cut prompts, and
    is cut before its last token.
    """
    return batched(tiny("paligemma"), SHORT), [alone(tiny("paligemma"), SHORT)]


@case("minimax_m3_vl", at="models/minimax_m3_vl/language.py:1494")
def minimax_m3_vl():
    """Where positions are given, the padding's mask replaces the causal one: short prompts see their own future."""
    return together_and_alone("minimax_m3_vl", SHORT, LONG)


@case("falcon_perception", at="models/falcon_perception/language.py:288")
def falcon_perception():
    """No mask is made in a batch: padding is attended to, and positions begin there."""
    return together_and_alone("falcon_perception", SHORT, LONG)


@case(
    "qwen4_exp",
    at="models/qwen4_exp/language.py:1872 models/qwen4_exp/language.py:1113",
)
def qwen4_exp():
    """Once any row of a batch is padded, new tokens of all rows attend to all keys: the indexer's blocks are put into no
    mask. Beyond its budget (2,048 tokens as published) answers differ.
    """
    return together_and_alone("qwen4_exp", SHORT, LONG)


if __name__ == "__main__":
    report()
