"""Unlimited-OCR: as DeepSeek-OCR, but an answer's tokens see the prompt and only the last tokens of the answer."""

from __future__ import annotations

from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models import unlimited_ocr as upstream

from . import _deepseek
from ._build import asks, enliven, text_request
from ._oracle import generate_by_recomputing, to_mx
from ._types import END_OF_TEXT, Inputs, TinyFamily, Trace

WINDOW = 2
TILES = ((1, 1), (1, 2), (2, 2))


def build() -> nn.Module:
    """Four layers of 64, the last three of four experts."""
    with mock.patch("mlx_vlm.models.deepseekocr.deepseekocr.SAMEncoder", _deepseek.sam):
        model = upstream.Model(
            upstream.ModelConfig(
                model_type="unlimited_ocr",
                image_token_index=_deepseek.IMAGE,
                eos_token_id=[END_OF_TEXT],
                text_config=upstream.TextConfig(
                    **_deepseek.TEXT,
                    num_key_value_heads=4,
                    sliding_window_size=WINDOW,
                    sliding_window=WINDOW,
                ),
                vision_config=upstream.VisionConfig(**_deepseek.clip()),
                projector_config=upstream.ProjectorConfig(input_dim=64, n_embed=64),
            )
        )
    enliven(model, seed=29, rules=_deepseek.RULES, quiet=_deepseek.HEAD)
    return model


# One picture of one tile, which is the whole view, or of 2 or 4 crops and a whole view. Two pictures, with crops
# and without.
image, two_images = asks(_deepseek.ocr_request, TILES, (TILES[1], TILES[0]))


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step; a token sees the prompt, and of the answer itself and those just before it."""
    with _deepseek.clip_as_published(model):
        prompt = model.get_input_embeddings(**to_mx(inputs)).inputs_embeds
        mx.eval(prompt)
    trunk, length = model.language_model.model, prompt.shape[1]

    def logits(generated: list[int]) -> mx.array:
        tail = trunk.embed_tokens(mx.array([generated], dtype=mx.int32))
        hidden = mx.concatenate([prompt, tail], axis=1)
        places = mx.arange(hidden.shape[1])
        rows, columns = places[:, None], places[None]
        mask = (columns <= rows) & ((columns < length) | (columns > rows - WINDOW))
        hidden = trunk(None, inputs_embeds=hidden, mask=mask)
        return model.language_model.lm_head(hidden[:, -1])[0]

    return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="unlimited_ocr",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    window=WINDOW,
    greedy=greedy,
    oracle_note="The whole sequence at each step under the mask that RingSlidingKVCache describes. mlx-vlm's loop runs the "
    "prompt's last token by itself, and its cache then takes that token for the answer's first, to be overwritten "
    "(unlimited_ocr/language.py:38). Positions of SAM and CLIP are resized as for deepseekocr; transformers agrees.",
    wrong_alone=("image_1",),
)
