"""dots.ocr: Qwen2 behind a vision tower with rotary positions; the head is part of the trunk."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import dots_ocr as upstream

from . import _qwen
from ._build import Rule, asks, enliven, fan_in, spread, text_request
from ._oracle import generate_alone
from ._types import END_OF_TEXT, VOCABULARY, TinyFamily


def build() -> nn.Module:
    """Four layers of 64, two vision blocks of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            image_token_id=_qwen.IMAGE,
            video_token_id=_qwen.VIDEO,
            vocab_size=VOCABULARY,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=1024,
                rope_theta=100.0,
            ),
            vision_config=upstream.VisionConfig(
                embed_dim=32,
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                patch_size=_qwen.PATCH,
            ),
        )
    )
    head = "language_model.model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"^vision_tower.*norm\d?\.weight$", spread(0.2, 1.0)),
    ]
    enliven(model, seed=66, rules=rules, quiet=head)
    return model


image, two_images = asks(_qwen.still_request, _qwen.GRIDS, _qwen.PAIR)


FAMILY = TinyFamily(
    name="dots_ocr",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step.",
    no_pictures_recorded="transformers has the language model (Qwen2) and not the family, which is remote code",
)
