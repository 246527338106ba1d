"""MiMo-V2: sliding layers with sinks and full ones with other heads, experts, a tower with windows and sinks."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import mimo_v2 as upstream
from mlx_vlm.models.mimo_v2.config import AudioConfig

from . import _qwen
from ._build import Rule, enliven, fan_in, spread, text_request
from ._deepseek import heads
from ._oracle import generate_alone
from ._pictures import both, prompt
from ._qwen import image, two_images
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily

WINDOW = 8
AUDIO, AUDIO_START, AUDIO_END = (_qwen.VIDEO + at for at in (1, 2, 3))
CHANNELS, CODES, GROUP = (
    20,
    8,
    4,
)  # of a frame of sound: quantisers that a codec has, and each one's codes; frames a token


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32, and one of 16 for each group of a recording's frames."""
    model = upstream.Model(
        upstream.ModelConfig(
            vocab_size=VOCABULARY,
            image_token_id=_qwen.IMAGE,
            video_token_id=_qwen.VIDEO,
            audio_token_id=AUDIO,
            vision_start_token_id=_qwen.VISION_START,
            vision_end_token_id=_qwen.VISION_END,
            eos_token_id=END_OF_TEXT,
            text_config=upstream.TextConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=96,
                moe_intermediate_size=32,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=1,
                head_dim=24,
                v_head_dim=16,
                swa_head_dim=24,
                swa_v_head_dim=16,
                swa_num_attention_heads=4,
                swa_num_key_value_heads=2,
                rope_theta=100.0,
                swa_rope_theta=50.0,
                max_position_embeddings=512,
                sliding_window_size=WINDOW,
                hybrid_layer_pattern=[0, 1, 0, 1],
                moe_layer_freq=[0, 0, 1, 1],
                n_routed_experts=4,
                num_experts_per_tok=2,
            ),
            vision_config=upstream.VisionConfig(
                depth=2,
                hidden_size=32,
                intermediate_size=64,
                out_hidden_size=64,
                num_heads=2,
                num_key_value_heads=1,
                qk_channels=16,
                patch_size=_qwen.PATCH,
                spatial_patch_size=_qwen.PATCH,
                window_size=16,
                visual_token_window_size=4,
                fullatt_block_indexes=[0],
                vit_window_attn_types=[-1, 0],
            ),
            audio_config=AudioConfig(
                out_hidden_size=64,
                audio_channels=2,
                input_local_attn_heads=2,
                input_local_dim=16,
                input_local_head_dim=8,
                input_local_intermediate_size=16,
                input_local_layers=1,
                projection_layers=1,
                speech_vocab_size=CODES,
                speech_zeroemb_idx=4,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"switch_mlp\.", heads),
        Rule(r"\.gate\.weight$", fan_in(1.3)),
        Rule(r"e_score_correction_bias$", spread(0.2)),
        Rule(r"sink", spread(1.0)),
    ]
    enliven(model, seed=45, rules=rules, quiet=head)
    return model


def heard(seed: int, lengths: Sequence[int]) -> Inputs:
    """Recordings of so many frames of codes between their markers, and words after each."""
    random = np.random.RandomState(seed + 104729)
    marked = [
        [AUDIO_START, *[AUDIO] * -(-length // GROUP), AUDIO_END] for length in lengths
    ]
    return {
        "input_ids": prompt(seed, marked),
        "audio_codes": random.randint(0, CODES, (sum(lengths), CHANNELS)).astype(
            np.int32
        ),
        "audio_code_lengths": list(lengths),
    }


def audio(seed: int, size: int) -> Inputs:
    """One recording of 4, 6 or 11 placeholders, the last more than the window."""
    return heard(seed, [(13, 24, 42)[size]])


def two_audios(seed: int) -> Inputs:
    """Two recordings, of which the first is the shorter one."""
    return heard(seed, [15, 29])


def picture_and_audio(seed: int) -> Inputs:
    """A picture, and then a recording."""
    return both(image(seed, 1), audio(seed + 1, 1))


FAMILY = TinyFamily(
    name="mimo_v2",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    audio=audio,
    two_audios=two_audios,
    picture_and_audio=picture_and_audio,
    window=WINDOW,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step.",
    no_pictures_recorded="transformers has the text model alone (MiMoV2Flash, of which MiMo-V2's is unchanged)",
)
