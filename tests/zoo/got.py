"""GOT-OCR 2.0: Qwen2 text behind a SAM encoder; one picture before the prompt's words."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import got as upstream

from ._build import Rule, enliven, fan_in, ids, pixels, spread, text_request, words
from ._oracle import generate_alone
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

IMAGE, START, END = PLAIN, PLAIN + 1, PLAIN + 2
SIZE, PATCH = 32, 4
NUM_FEATURES = (SIZE // PATCH // 4) ** 2


def build() -> nn.Module:
    """Four layers of 64, two vision blocks of 32, one of them with windows."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="got",
            im_patch_token=IMAGE,
            im_start_token=START,
            im_end_token=END,
            vocab_size=VOCABULARY,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                model_type="qwen2",
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                rms_norm_eps=1e-6,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
                tie_word_embeddings=False,
            ),
            vision_config=upstream.VisionConfig(
                img_size=SIZE,
                patch_size=PATCH,
                embed_dim=32,
                depth=2,
                num_heads=2,
                out_chans=16,
                out_dim=64,
                window_size=3,
                global_attn_indexes=(1,),
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [Rule(head, fan_in(3.0)), Rule(r"pos_embed$|rel_pos", spread(0.3))]
    enliven(model, seed=44, rules=rules, quiet=head)
    return model


def image(seed: int, size: int) -> Inputs:
    """One picture and 4, 7 or 10 words."""
    return {
        "input_ids": ids(
            words(seed, 2),
            [START, *[IMAGE] * NUM_FEATURES, END],
            words(seed + 101, 4 + 3 * size),
        ),
        "pixel_values": pixels(seed, 1, SIZE, SIZE, 3),
    }


FAMILY = TinyFamily(
    name="got",
    build=build,
    text=text_request,
    image=image,
    two_images=None,
    no_two_images="the n-th row of features belongs to the n-th row of ids (got/got.py:71)",
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step.",
)
