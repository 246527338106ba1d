"""Positions are kept on the language model, where the next request's replace them.

``get_input_embeddings`` leaves ``_position_ids`` and ``_rope_deltas`` on the language model. In a ``BatchGenerator``
every row then gets those of the request that was embedded last, or positions that begin at the padding. Right: a
token's position counts the tokens before it in its own request, and what its own pictures take. The adapters return
``position_ids`` and ``rope_deltas`` in ``InputEmbeddingsFeatures``, so that they travel with the request.
"""

from tiny import case, report, text, together_and_alone

SHORT, LONG = text(1, 9), text(2, 26)


@case(
    "glm4v",
    at="models/glm4v/glm4v.py:31 models/glm4v/glm4v.py:76 models/glm4v/language.py:518",
)
def glm4v():
    """A short text beside a long one gets wrong positions."""
    return together_and_alone("glm4v", SHORT, LONG)


@case(
    "glm4v_moe",
    at="models/glm4v_moe/glm4v_moe.py:32 models/glm4v_moe/glm4v_moe.py:66 models/glm4v_moe/language.py:577",
)
def glm4v_moe():
    """A short text beside a long one gets wrong positions."""
    return together_and_alone("glm4v_moe", SHORT, LONG)


@case(
    "glm_ocr",
    at="models/glm_ocr/glm_ocr.py:31 models/glm_ocr/glm_ocr.py:77 models/glm_ocr/language.py:482",
)
def glm_ocr():
    """A short text beside a long one gets wrong positions."""
    return together_and_alone("glm_ocr", SHORT, LONG)


@case(
    "paddleocr_vl",
    at="models/paddleocr_vl/paddleocr_vl.py:34 models/paddleocr_vl/paddleocr_vl.py:67 models/paddleocr_vl/language.py:424",
)
def paddleocr_vl():
    """A short text beside a long one gets wrong positions."""
    return together_and_alone("paddleocr_vl", SHORT, LONG)


@case("minicpmv4_6", at="models/minicpmv4_6/minicpmv4_6.py:258")
def minicpmv4_6():
    """A short text beside a long one gets wrong positions."""
    return together_and_alone("minicpmv4_6", SHORT, LONG)


@case("ernie4_5_moe_vl", at="models/ernie4_5_moe_vl/language.py:603")
def ernie4_5_moe_vl():
    """A short text beside a long one: positions of the prompt count the padding, those of the answer do not."""
    return together_and_alone("ernie4_5_moe_vl", SHORT, LONG)


@case("hunyuan_vl", at="models/hunyuan_vl/language.py:459")
def hunyuan_vl():
    """Two texts: the batch ends in an exception."""
    return together_and_alone("hunyuan_vl", SHORT, LONG)


@case(
    "minimax_m3_vl",
    at="models/minimax_m3_vl/minimax_m3_vl.py:262 models/minimax_m3_vl/language.py:2081",
)
def minimax_m3_vl():
    """A text that arrives while another decodes: positions of the running one begin again at 0."""
    return together_and_alone("minimax_m3_vl", SHORT, LONG, at=(0, 3))


@case(
    "cohere_compass",
    at="models/cohere_compass/language.py:615 models/cohere_compass/language.py:713",
)
def cohere_compass():
    """Two texts: the padding that the batch's cache has already is added to it once more."""
    return together_and_alone("cohere_compass", SHORT, LONG)


@case("falcon_ocr", at="models/falcon_ocr/language.py:299")
def falcon_ocr():
    """Two texts: positions below zero, those of the padding, are raised to zero, and the row begins there."""
    return together_and_alone("falcon_ocr", SHORT, LONG)


if __name__ == "__main__":
    report()
