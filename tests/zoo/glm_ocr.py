"""GLM-OCR: three-axis positions over the whole head; no learned vision positions."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models.glm_ocr import config as upstream_config
from mlx_vlm.models.glm_ocr import glm_ocr as upstream

from . import _qwen
from ._build import Rule, enliven, fan_in, text_request
from ._oracle import generate_alone
from ._qwen import image, two_images
from ._types import END_OF_TEXT, VOCABULARY, TinyFamily
from .glm4v import four_images


def build() -> nn.Module:
    """Four layers of 64, two vision blocks of 32."""
    model = upstream.Model(
        upstream_config.ModelConfig(
            model_type="glm_ocr",
            vocab_size=VOCABULARY,
            hidden_size=64,
            image_token_id=_qwen.IMAGE,
            video_token_id=_qwen.VIDEO,
            image_start_token_id=_qwen.VISION_START,
            image_end_token_id=_qwen.VISION_END,
            pad_token_id=END_OF_TEXT,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream_config.TextConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                eos_token_id=[END_OF_TEXT],
                pad_token_id=END_OF_TEXT,
                intermediate_size=96,
                max_position_embeddings=1024,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                num_hidden_layers=4,
                rope_parameters={
                    "rope_type": "default",
                    "mrope_section": [2, 3, 3],
                    "partial_rotary_factor": 1.0,
                    "rope_theta": 100.0,
                },
            ),
            vision_config=upstream_config.VisionConfig(
                depth=2,
                hidden_size=32,
                intermediate_size=96,
                num_heads=2,
                patch_size=_qwen.PATCH,
                image_size=_qwen.PATCH * 4,
                out_hidden_size=64,
                spatial_merge_size=_qwen.MERGE,
                temporal_patch_size=_qwen.TEMPORAL_PATCH,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(model, seed=77, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


FAMILY = TinyFamily(
    name="glm_ocr",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    also={"four_images": four_images},
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step with a clean language model; transformers agrees (tests/references).",
)
