"""Inkling: relative distances in a band, short convolutions, experts with shared ones, pictures as projected patches."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn
import numpy as np
from mlx_vlm.models import inkling as upstream
from mlx_vlm.models.inkling.config import AudioConfig

from ._build import (
    Rule,
    asks,
    enliven,
    fan_in,
    ids,
    pixels,
    spread,
    text_request,
    words,
)
from ._oracle import generate_alone
from ._pictures import both, prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily

WINDOW = 8
PATCH = 4
IMAGE, AUDIO, AUDIO_START = PLAIN, PLAIN + 1, PLAIN + 2
BANDS, LEVELS = 80, 16  # of a frame of sound, which is one token
NUM_PATCHES = (2, 4, 9)


def build() -> nn.Module:
    """Four layers of 64: a dense one and three of four experts; the second and the fourth see everything."""
    model = upstream.Model(
        upstream.ModelConfig(
            image_token_id=IMAGE,
            audio_token_id=AUDIO,
            vocab_size=VOCABULARY,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                hidden_size=64,
                num_hidden_layers=4,
                vocab_size=VOCABULARY,
                logits_mup_width_multiplier=1.0,
                max_position_embeddings=1024,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                swa_num_attention_heads=4,
                swa_num_key_value_heads=2,
                swa_head_dim=16,
                sliding_window_size=WINDOW,
                layer_types=["hybrid_sliding", "hybrid_full"] * 2,
                d_rel=8,
                rel_extent=12,
                log_scaling_n_floor=6,
                log_scaling_alpha=0.3,
                dense_mlp_idx=1,
                intermediate_size=32,
                dense_intermediate_size=96,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_shared_experts=2,
                route_scale=2.0,
            ),
            vision_config=upstream.VisionConfig(patch_size=PATCH, n_layers=2),
            audio_config=AudioConfig(n_mel_bins=BANDS, mel_vocab_size=LEVELS),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"rel_proj$", spread(0.7)),
        Rule(r"gate_weight$", fan_in(1.3)),
        Rule(r"e_score_correction_bias$", spread(0.2)),
        Rule(r"global_scale$", spread(0.1, 1.0)),
        Rule(r"(gate|out)_scale$", spread(0.1, 1.0)),
    ]
    enliven(model, seed=92, rules=rules, quiet=head)
    return model


def request(seed: int, patches: list[int]) -> Inputs:
    """Pictures of so many patches, one placeholder for each, words after each picture."""
    parts = [words(seed, 3)]
    for index, count in enumerate(patches):
        parts += [[IMAGE] * count, words(seed + 101 * (index + 1), 4 + index)]
    return {
        "input_ids": ids(*parts),
        "pixel_values": pixels(seed, sum(patches), 2, PATCH, PATCH, 3),
    }


# One picture of 2, 4 or 9 placeholders. Two pictures of different sizes.
image, two_images = asks(request, NUM_PATCHES, (4, 2))


def heard(seed: int, counts: Sequence[int]) -> Inputs:
    """Recordings of so many frames behind their marker, padded to the longest, and words after each."""
    random = np.random.RandomState(seed + 104729)
    mask = np.arange(max(counts)) < np.array(counts)[:, None]
    levels = (
        random.randint(0, LEVELS, (*mask.shape, BANDS)).astype(np.int32)
        * mask[..., None]
    )
    ids = prompt(seed, [[AUDIO_START, *[AUDIO] * count] for count in counts])
    return {
        "input_ids": ids,
        "audio_input_ids": levels.astype(np.int32),
        "audio_input_ids_mask": mask,
    }


def audio(seed: int, size: int) -> Inputs:
    """One recording of 4, 6 or 11 frames, the last more than the window."""
    return heard(seed, [(4, 6, 11)[size]])


def two_audios(seed: int) -> Inputs:
    """Two recordings, of which the first is the shorter one."""
    return heard(seed, [4, 7])


def picture_and_audio(seed: int) -> Inputs:
    """A picture, and then a recording."""
    return both(image(seed, 1), audio(seed + 1, 1))


FAMILY = TinyFamily(
    name="inkling",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    audio=audio,
    two_audios=two_audios,
    picture_and_audio=picture_and_audio,
    window=WINDOW,
    greedy=generate_alone,
    oracle_note="mlx-vlm's generate_step; transformers agrees (tests/references).",
)
