"""Florence-2: encoder and decoder, learned positions, one picture whose features stand before the prompt."""

from __future__ import annotations

from unittest import mock

import mlx.nn as nn
from mlx_vlm.models import florence2 as upstream

from ._build import Rule, enliven, fan_in, ids, pixels, spread, text_request, words
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

IMAGE, START = PLAIN, PLAIN + 1
NUM_FEATURES = 5


class _Nothing(nn.Module):
    """In the place of DaViT."""

    def __init__(self, config: object) -> None:
        super().__init__()


def build() -> nn.Module:
    """Three encoder and three decoder layers of 64."""
    config = upstream.ModelConfig(
        model_type="florence2",
        vocab_size=VOCABULARY,
        image_token_id=IMAGE,
        eos_token_id=[END_OF_TEXT],
        text_config=upstream.TextConfig(
            d_model=64,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            encoder_layers=3,
            decoder_layers=3,
            max_position_embeddings=128,
            vocab_size=VOCABULARY,
        ),
        vision_config=upstream.VisionConfig(),
    )
    config.text_config.decoder_start_token_id = START
    with mock.patch("mlx_vlm.models.florence2.florence2.VisionModel", _Nothing):
        model = upstream.Model(config)
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"image_proj|image_pos_embed|visual_temporal", spread(0.3)),
        # Small beside the tokens, which would else not be told apart after the last of the norms.
        Rule(r"decoder\.layers\.\d\.(self|encoder)_attn\.out_proj\.weight$", fan_in(0.4)),
        Rule(r"decoder\.layers\.\d\.(self|encoder)_attn\.[qk]_proj\.weight$", fan_in(2.0)),
        Rule(r"decoder\.layers\.\d\.fc2\.weight$", fan_in(0.6)),
    ]
    enliven(model, seed=40, rules=rules, quiet=head)
    return model


def image(seed: int, size: int) -> Inputs:
    """One picture's features and 5, 8 or 11 words."""
    return {
        "input_ids": ids([IMAGE], words(seed, 5 + 3 * size)),
        "pixel_values": pixels(seed, 1, 3, 8, 8),
        "cached_image_features": pixels(seed, 1, NUM_FEATURES, 64),
    }


FAMILY = TinyFamily(
    name="florence2",
    build=build,
    text=text_request,
    image=image,
    two_images=None,
    no_two_images="the processor places one picture before a prompt (processing_florence2.py)",
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step, which runs encoder and decoder. DaViT's features are fed in; encoder and decoder "
    "are the real ones.",
    no_reference="not recorded: transformers' Florence2 keeps the text model in another layout",
)
