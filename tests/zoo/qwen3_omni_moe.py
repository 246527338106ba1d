"""Qwen3-Omni's thinker: as Qwen3-VL with experts, deepstack features expanded to the prompt's positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.qwen3_omni_moe import config as upstream_config
from mlx_vlm.models.qwen3_omni_moe import qwen3_omni_moe as upstream

from . import _qwen
from ._build import Rule, activated, enliven, fan_in, ids, text_request, words
from ._oracle import generate_alone, generate_by_recomputing, nothing_remembered, to_mx
from ._pictures import both, prompt
from ._types import END_OF_TEXT, VOCABULARY, Inputs, TinyFamily, Trace
from .qwen3_vl import image, two_images

AUDIO, AUDIO_START, AUDIO_END = (_qwen.VIDEO + at for at in (1, 2, 3))
BANDS = 16
#: Frames of a hundredth of a second, and the features that the tower makes of them: 13 of each second.
LENGTHS = {60: 8, 130: 17, 230: 30}

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
    """Four layers of 64, the second and the fourth with experts; a vision tower of 32, and one of 16 that hears."""
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
            n_window_infer=100,  # attention within each second
        ),
        image_token_id=_qwen.IMAGE,
        video_token_id=_qwen.VIDEO,
        audio_token_id=AUDIO,
        audio_start_token_id=AUDIO_START,
        audio_end_token_id=AUDIO_END,
        vision_start_token_id=_qwen.VISION_START,
        vision_end_token_id=_qwen.VISION_END,
    )
    predictor = upstream_config.CodePredictorConfig()
    model = upstream.Model(
        upstream_config.ModelConfig(
            thinker_config=thinker,
            talker_config=upstream_config.TalkerConfig(
                text_config=text, code_predictor_config=predictor
            ),
            code2wav_config=upstream_config.Code2WavConfig(),
            enable_audio_output=False,
            eos_token_id=END_OF_TEXT,
        )
    )
    head = "thinker.language_model.lm_head.weight"
    enliven(model, seed=37, rules=[Rule(head, fan_in(3.0))], quiet=head)
    return model


def _heard(seed: int, lengths: Sequence[int]) -> Inputs:
    """Recordings of so many frames between their markers, padded to the longest, and words after each."""
    random = np.random.RandomState(seed + 104729)
    longest = max(lengths)
    values = random.standard_normal(
        (len(lengths), BANDS, longest)
    ) + random.standard_normal((len(lengths), BANDS, 1))
    mask = (np.arange(longest)[None] < np.array(lengths)[:, None]).astype(np.int32)
    marked = [
        [AUDIO_START, *[AUDIO] * LENGTHS[length], AUDIO_END] for length in lengths
    ]
    return {
        "input_ids": prompt(seed, marked),
        "input_features": (values * mask[:, None]).astype(np.float32),
        "feature_attention_mask": mask,
    }


def audio(seed: int, size: int) -> Inputs:
    """One recording of less than a second, of more than one, or of more than two."""
    return _heard(seed, [sorted(LENGTHS)[size]])


def two_audios(seed: int) -> Inputs:
    """Two recordings, of which the first is the shorter one."""
    return _heard(seed, [60, 130])


def picture_and_audio(seed: int) -> Inputs:
    """A picture, and then a recording."""
    return both(image(seed, 1), audio(seed + 1, 1))


@dataclass(frozen=True)
class Film:
    """A video's patches (time, high, wide), the seconds between its time steps, and the frames of its sound, if any."""

    steps: _qwen.Steps
    seconds: float
    frames: int = 0

    @property
    def spacing(self) -> int:
        """Positions between two time steps, 13 of which are a second."""
        return round(13 * self.seconds)

    @property
    def tokens(self) -> list[int]:
        """Markers and placeholders: by time, a frame before the sound that begins with it."""
        time, high, wide = self.steps
        step = [_qwen.VIDEO] * (high * wide // _qwen.MERGE**2)
        length = LENGTHS[self.frames] if self.frames else 0
        timed = [(t * self.spacing, 0, step) for t in range(time)] + [
            (at, 1, [AUDIO]) for at in range(length)
        ]
        inside = [token for *_, some in sorted(timed) for token in some]
        if not length:
            return [_qwen.VISION_START, *inside, _qwen.VISION_END]
        return [_qwen.VISION_START, AUDIO_START, *inside, AUDIO_END, _qwen.VISION_END]


#: A silent one; sound that ends after the last frames; and before the frames' last columns, from which the answer counts on,
#: and the text does not (tests/references/omni_positions.py: transformers' generate forgets the former).
FILMS = (Film((2, 4, 4), 2.0), Film((3, 4, 10), 1.0, 230), Film((1, 4, 40), 1.0, 60))
#: Its sound ends before its last frames.
SHORT = Film((3, 4, 4), 2.0, 130)


def filmed(seed: int, film: Film, after: Inputs | None = None) -> Inputs:
    """Words, a video, words; and another request's words and media behind them."""
    made: Inputs = {
        "input_ids": ids(words(seed, 3), film.tokens, words(seed + 101, 4)),
        "pixel_values_videos": _qwen.video_pixels(seed, film.steps),
        "video_grid_thw": np.array([film.steps], dtype=np.int32),
        "video_second_per_grid": np.array([film.seconds], dtype=np.float32),
    }
    if film.frames:
        heard = _heard(seed, [film.frames])
        made |= {
            name: heard[name] for name in ("input_features", "feature_attention_mask")
        }
    return made if after is None else both(made, after)


def video(seed: int, size: int) -> Inputs:
    """A silent video, and two that are heard."""
    return filmed(seed, FILMS[size])


def picture_and_video(seed: int) -> Inputs:
    """A video that is heard, and then two pictures."""
    return filmed(seed, SHORT, two_images(seed))


def placed() -> list[Inputs]:
    """Requests whose positions transformers gave (tests/references/omni_positions.json)."""
    films = (*FILMS, Film((5, 4, 4), 1 / 13, 230))
    more = (SHORT, Film((2, 20, 4), 1.0, 130), Film((4, 4, 4), 2.0))
    return [filmed(5, film) for film in films] + [
        filmed(5, film, two_images(6)) for film in more
    ]


def positions(inputs: Inputs) -> np.ndarray:
    """(3, L) by the definition: text and sound count on all axes; a frame has its time, rows and columns.

    What follows a block counts on from its last piece: of a video with sound the frames, or the sound, that are left when the
    other has ended; of anything else all of it.
    """
    tokens, found = inputs["input_ids"][0].tolist(), list[tuple[int, int, int]]()
    grids = {
        _qwen.IMAGE: iter(inputs.get("image_grid_thw", [])),
        _qwen.VIDEO: iter(inputs.get("video_grid_thw", [])),
    }
    seconds, after = iter(inputs.get("video_second_per_grid", [])), 0
    while len(found) < len(tokens):
        marker = tokens[len(found)]
        if marker not in grids:
            found.append((after, after, after))
            after += 1
            continue
        time, high, wide = next(grids[marker])
        spacing = round(13 * float(next(seconds))) if marker == _qwen.VIDEO else 1
        shape = time, high // _qwen.MERGE, wide // _qwen.MERGE
        frames = iter(
            [
                (after + t * spacing, after + y, after + x)
                for t, y, x in np.ndindex(*shape)
            ]
        )
        heard = 0
        pieces = list[tuple[int, list[tuple[int, int, int]]]]()
        end = len(found)
        left = int(np.prod(shape))
        while left or tokens[end] == AUDIO:
            kind = tokens[end]
            one = next(frames) if kind == marker else (after + heard,) * 3
            left, heard = left - (kind == marker), heard + (kind == AUDIO)
            if not pieces or pieces[-1][0] != kind:
                pieces.append((kind, []))
            pieces[-1][1].append(one)  # type: ignore[arg-type]
            end += 1
        for _, piece in pieces:
            found += piece
        after = max(map(max, pieces[-1][1])) + 1
    return np.array(found, dtype=np.int32).T


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's loop over a tower with the activation of the configuration.

    With a video: mlx-vlm's embeddings, and the whole sequence at each step, with positions by the definition.
    """
    with activated(
        [block.mlp for block in model.thinker.vision_tower.blocks],
        nn.GELU(approx="tanh"),
    ):
        if "video_grid_thw" not in inputs:
            return generate_alone(model, inputs, num_tokens)
        with nothing_remembered(model):
            return _recomputed(model, inputs, num_tokens)


def _recomputed(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    arrays, language = to_mx(inputs), model.thinker.language_model
    prompt, deep = (
        getattr(model.thinker.get_input_embeddings(**arrays), name)
        for name in ("inputs_embeds", "deepstack_visual_embeds")
    )
    asked = positions(inputs)

    def logits(generated: list[int]) -> mx.array:
        tail = (
            [language.model.embed_tokens(mx.array([generated], dtype=mx.int32))]
            if generated
            else []
        )
        hidden = mx.concatenate([prompt, *tail], axis=1)
        after = asked.max() + 1 + np.arange(len(generated))
        where = np.concatenate(
            [asked, np.broadcast_to(after, (3, len(generated)))], axis=1
        )
        return language(
            mx.zeros(hidden.shape[:2], mx.int32),
            inputs_embeds=hidden,
            position_ids=mx.array(where[:, None]),
            deepstack_visual_embeds=mx.pad(
                deep, [(0, 0), (0, len(generated)), (0, 0), (0, 0)]
            ),
        ).logits[0, -1]

    return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="qwen3_omni_moe",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    audio=audio,
    two_audios=two_audios,
    picture_and_audio=picture_and_audio,
    video=video,
    picture_and_video=picture_and_video,
    greedy=greedy,
    oracle_note="mlx-vlm's generate_step with a clean language model and the tanh form of GELU in the vision blocks, which the "
    "configuration names; with a video its embeddings, and positions by transformers' definition; transformers agrees "
    "(tests/references).",
)
