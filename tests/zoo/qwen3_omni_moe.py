"""Qwen3-Omni's thinker: as Qwen3-VL with experts, deepstack features expanded to the prompt's positions."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_vlm.models.qwen3_omni_moe import config as upstream_config
from mlx_vlm.models.qwen3_omni_moe import qwen3_omni_moe as upstream

from . import _qwen
from ._build import Rule, activated, enliven, fan_in, text_request
from ._oracle import generate_alone
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily, Trace
from .qwen3_vl import image, two_images

TEXT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "rope_theta": 100.0,
    "max_position_embeddings": 1024,
    "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2]},
}


def build() -> nn.Module:
    """Four layers of 64, the second and the fourth with experts; a vision tower of 32, and an ear that nobody uses."""
    text = upstream_config.TextConfig(**TEXT)
    thinker = upstream_config.ThinkerConfig(
        text_config=text,
        vision_config=upstream_config.VisionConfig(
            depth=2,
            hidden_size=32,
            intermediate_size=64,
            out_hidden_size=64,
            num_heads=2,
            patch_size=_qwen.PATCH,
            spatial_patch_size=_qwen.PATCH,
            num_position_embeddings=25,
            deepstack_visual_indexes=[0, 1],
        ),
        audio_config=upstream_config.AudioConfig(
            d_model=16,
            encoder_layers=1,
            num_hidden_layers=1,
            encoder_attention_heads=2,
            encoder_ffn_dim=16,
            num_mel_bins=16,
            output_dim=64,
            downsample_hidden_size=8,
        ),
        image_token_id=_qwen.IMAGE,
        video_token_id=_qwen.VIDEO,
        audio_token_id=_qwen.VIDEO + 1,
        vision_start_token_id=_qwen.VISION_START,
        vision_end_token_id=_qwen.VISION_END,
    )
    predictor = upstream_config.CodePredictorConfig()
    model = upstream.Model(
        upstream_config.ModelConfig(
            thinker_config=thinker,
            talker_config=upstream_config.TalkerConfig(text_config=text, code_predictor_config=predictor),
            code2wav_config=upstream_config.Code2WavConfig(),
            enable_audio_output=False,
            eos_token_id=END_OF_TEXT,
        )
    )
    head = "thinker.language_model.lm_head.weight"
    enliven(model, seed=37, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's loop over a tower with the activation of the configuration."""
    with activated([block.mlp for block in model.thinker.vision_tower.blocks], nn.GELU(approx="tanh")):
        return generate_alone(model, inputs, num_tokens)


FAMILY = TinyFamily(
    name="qwen3_omni_moe",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with a clean language model and the tanh form of GELU in the vision blocks, which the "
    "configuration names; transformers agrees (tests/references).",
)
