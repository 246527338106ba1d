"""Qwen3-VL with experts: as Qwen3-VL, half of the text layers with four experts of which two answer."""

from __future__ import annotations

import mlx.nn as nn
from mlx_vlm.models import qwen3_vl_moe as upstream

from . import _qwen, _videos
from ._build import Rule, activated, enliven, fan_in, text_request
from ._qwen import image, two_images
from ._types import Inputs, TinyFamily, Trace


def build() -> nn.Module:
    """Four layers of 64, the second and the fourth with experts; both vision blocks feed deepstack."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="qwen3_vl_moe",
            **_qwen.MARKERS,
            vision_end_token_id=_qwen.VISION_END,
            text_config=upstream.TextConfig(
                **_qwen.QWEN3_TEXT,
                model_type="qwen3_vl_moe_text",
                moe_intermediate_size=48,
                num_experts=4,
                num_experts_per_tok=2,
                decoder_sparse_step=2,
                mlp_only_layers=[],
            ),
            vision_config=upstream.VisionConfig(**_qwen.QWEN3_VISION),
        )
    )
    head = "language_model.lm_head.weight"
    enliven(model, seed=33, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's loop over a tower with the activations of the configuration."""
    tower = model.vision_tower
    mergers = [tower.merger, *tower.deepstack_merger_list]
    blocks = activated([block.mlp for block in tower.blocks], nn.GELU(approx="tanh"))
    with blocks, activated(mergers, nn.GELU()):
        return _videos.greedy(model, inputs, num_tokens)


FAMILY = TinyFamily(
    name="qwen3_vl_moe",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with a clean language model and the vision tower's two forms of GELU put where "
    "transformers has them (modeling_qwen3_vl_moe.py: gelu_pytorch_tanh in blocks, nn.GELU in mergers); "
    "transformers agrees with that (tests/references).",
    video=_qwen.stamped_video_request,
    picture_and_video=_qwen.stamped_picture_and_video,
)
