"""Qwen2.5-VL: as Qwen2-VL, with windowed attention in all vision blocks but one."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import qwen2_5_vl as upstream

from . import _qwen, _videos
from ._build import Rule, asks, enliven, fan_in, text_request
from ._types import VOCABULARY, TinyFamily

# A window is 4 x 4 patches. The first two grids end in partial windows; the last is 4 high, so that the windows
# divide it evenly and mlx-vlm's list of boundaries has repeats.
GRIDS = ((6, 6), (6, 10), (4, 10))


def build() -> nn.Module:
    """Four layers of 64, two vision blocks of 32: the first in windows, the second over the whole picture."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="qwen2_5_vl",
            **_qwen.MARKERS,
            vision_end_token_id=_qwen.VISION_END,
            text_config=upstream.TextConfig(
                model_type="qwen2_5_vl",
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                rms_norm_eps=1e-6,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
                rope_scaling=_qwen.MROPE,
                tie_word_embeddings=False,
            ),
            vision_config=upstream.VisionConfig(
                depth=2,
                hidden_size=32,
                intermediate_size=64,
                out_hidden_size=64,
                num_heads=2,
                **_qwen.PATCHES,
                window_size=16,
                fullatt_block_indexes=[1],
            ),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(model, seed=25, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


# One picture of 9, 15 or 10 placeholders. Two pictures of different grids.
image, two_images = asks(_qwen.request, GRIDS, (GRIDS[2], GRIDS[0]))


FAMILY = TinyFamily(
    name="qwen2_5_vl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=_videos.greedy,
    oracle_note="mlx-vlm's generate_step with a clean language model; tests.zoo._videos where there is a video: "
    "transformers agrees (tests/references).",
    video=_qwen.timed_video_request,
    picture_and_video=_qwen.timed_picture_and_video,
    wrong_alone=("video_1", "picture_and_video"),
)
