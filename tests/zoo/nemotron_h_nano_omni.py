"""Nemotron Nano Omni: Mamba-2, attention without positions and experts in one stack; a RADIO tower."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import nemotron_h_nano_omni as upstream
from mlx_vlm.models.nemotron_h_nano_omni import config as upstream_config

from ._build import Rule, enliven, fan_in, ids, pixels, spread, text_request, words
from ._oracle import generate_alone
from ._pictures import both, prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

PATCH = 4
IMAGE, START, END, AUDIO, AUDIO_START, AUDIO_END = range(PLAIN, PLAIN + 6)
# of a spectrogram: its bands, samples a frame, and frames that are one token
BANDS, HOP, SHRINK = 128, 160, 8
GRIDS = ((4, 4), (4, 6), (6, 6))


def build() -> nn.Module:
    """Five layers of 64: Mamba-2, experts, attention, Mamba-2, attention; two vision blocks of 32."""
    model = upstream.Model(
        upstream_config.ModelConfig(
            text_config=upstream_config.TextConfig(
                model_type="nemotron_h",
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=5,
                max_position_embeddings=1024,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                attention_bias=False,
                mamba_num_heads=4,
                mamba_head_dim=8,
                mamba_proj_bias=False,
                ssm_state_size=8,
                conv_kernel=4,
                n_groups=2,
                mlp_bias=False,
                layer_norm_epsilon=1e-5,
                use_bias=False,
                use_conv_bias=True,
                hybrid_override_pattern=["M", "E", "*", "M", "*"],
                moe_intermediate_size=48,
                moe_shared_expert_intermediate_size=48,
                n_group=1,
                topk_group=1,
                n_routed_experts=4,
                n_shared_experts=1,
                num_experts_per_tok=2,
                norm_topk_prob=True,
                routed_scaling_factor=1.5,
            ),
            vision_config=upstream_config.VisionConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                image_size=16,
                patch_size=PATCH,
                max_resolution=32,
                args={
                    "teachers": [{"name": "one"}, {"name": "other"}],
                    "register_multiple": 4,
                },
            ),
            sound_config=upstream_config.AudioConfig(
                hidden_size=16,
                num_attention_heads=2,
                num_hidden_layers=2,
                intermediate_size=32,
                subsampling_conv_channels=4,
                num_mel_bins=BANDS,
                projection_hidden_size=32,
            ),
            ps_version="v2",  # as published; v1 mixes up rows and columns
            projector_hidden_size=64,
            vit_hidden_size=32,
            img_context_token_id=IMAGE,
            image_token_index=IMAGE,
            sound_context_token_id=AUDIO,
            eos_token_id=END_OF_TEXT,
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"\.A_log$", spread(0.5, -0.5)),
        Rule(r"\.dt_bias$", spread(0.5, -1.0)),
        Rule(r"mixer\.D$", spread(0.3, 1.0)),
        Rule(r"mixer\.norm\.weight$", spread(0.2, 1.0)),
        Rule(r"mixer\.gate\.weight$", fan_in(1.3)),
        Rule(r"e_score_correction_bias$", spread(0.1)),
        Rule(r"(cls_token\.token|pos_embed)$", spread(1.0)),
        Rule(r"\.bias_[uv]$", spread(0.5)),
        Rule(r"conv\.norm\.weight$", spread(0.2, 1.0)),
        Rule(r"(conv\.norm\.bias|running_mean)$", spread(0.2)),
        Rule(r"running_var$", lambda random, shape: random.uniform(0.5, 1.5, shape)),
        Rule(r"input_conditioner\.norm_", spread(0.1, 1.0)),
    ]
    enliven(model, seed=88, rules=rules, quiet=head)
    return model


def request(seed: int, grid: tuple[int, int], number: int) -> Inputs:
    """Words, then each picture between its markers followed by words; pictures of one size come in one array."""
    high, wide = grid
    parts = [words(seed, 3)]
    for index in range(number):
        parts += [
            [START, *[IMAGE] * (high * wide // 4), END],
            words(seed + 101 * (index + 1), 4 + index),
        ]
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(seed, number, 3, high * PATCH, wide * PATCH),
    }


def image(seed: int, size: int) -> Inputs:
    """One picture of 4, 6 or 9 placeholders."""
    return request(seed, GRIDS[size], 1)


def two_images(seed: int) -> Inputs:
    """Two pictures of one grid."""
    return request(seed, GRIDS[1], 2)


def heard(seed: int, counts: Sequence[int]) -> Inputs:
    """Recordings of so many samples between their markers, and words after each."""
    random = np.random.RandomState(seed + 104729)
    clips = [
        (0.3 * random.standard_normal(count)).astype(np.float32) for count in counts
    ]
    pieces = [-(-(1 + count // HOP) // SHRINK) for count in counts]
    marked = [[AUDIO_START, *[AUDIO] * count, AUDIO_END] for count in pieces]
    return {"input_ids": prompt(seed, marked), "sound_clips": clips}


def audio(seed: int, size: int) -> Inputs:
    """One recording of 4, 6 or 11 placeholders. Of a multiple of 8 * HOP samples transformers differs (the family's notes)."""
    return heard(seed, [(4_900, 7_000, 13_500)[size]])


def two_audios(seed: int) -> Inputs:
    """Two recordings, of which the first is the shorter one."""
    return heard(seed, [4_500, 9_700])


def picture_and_audio(seed: int) -> Inputs:
    """A picture, and then a recording."""
    return both(image(seed, 1), audio(seed + 1, 1))


FAMILY = TinyFamily(
    name="nemotron_h_nano_omni",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    audio=audio,
    two_audios=two_audios,
    picture_and_audio=picture_and_audio,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step.",
)
