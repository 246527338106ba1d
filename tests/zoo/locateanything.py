"""LocateAnything: Qwen2 text behind MoonViT."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import locateanything as upstream

from . import _kimi
from ._build import Rule, enliven, fan_in, spread, text_request
from ._deepseek import IMAGE
from ._kimi import image, small_table, two_images
from ._types import END_OF_TEXT, VOCABULARY, TinyFamily


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="locateanything",
            image_token_index=IMAGE,
            vocab_size=VOCABULARY,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
                tie_word_embeddings=False,
            ),
            vision_config=upstream.VisionConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                patch_size=_kimi.PATCH,
                init_pos_emb_height=4,
                init_pos_emb_width=4,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [Rule(head, fan_in(3.0)), Rule(r"pos_emb\.weight$", spread(0.5))]
    small_table(model)
    enliven(model, seed=43, rules=rules, quiet=head)
    return model


FAMILY = TinyFamily(
    name="locateanything",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=_kimi.greedy,
    oracle_note="mlx-vlm's generate_step with positions resized by PyTorch's rule.",
    wrong_alone=("image_2",),
    no_pictures_recorded="transformers has the language model (Qwen2) and not the family; its tower is Kimi-VL's",
)
