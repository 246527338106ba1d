"""MiniCPM-o: Qwen3, resampled slices, Whisper's encoder."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.media import AUDIO_INPUTS
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.adapters.slices import SlicedAdapter, slice_bounds
from vlm_batch.adapters.sound import SoundAdapter, as_text
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Picture
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="minicpmo",
        model_types=("minicpmo",),
        special_tokens=(
            (
                "<box>",
                "grounding is <ref>name</ref><box>x1 y1 x2 y2</box>; the published _decode_text leaves out the "
                "end token alone (modeling_minicpmo.py)",
            ),
        ),
        audio=True,
        notes=(
            "positions travel with the row; mlx-vlm keeps the last request's on the model (minicpmo.py, "
            "_set_position_state)",
            "answers are text: nothing is spoken",
            "a recording is heard whole, in pieces of 30 s, and each state hears its own second and those before it, as in the "
            "published model (MiniCPM-o 4.5, modeling_minicpmo.py, get_audio_embedding); mlx-vlm cuts it after 30 s "
            "(minicpmo/processing_minicpmo.py:588) and lets every state hear all (minicpmo/audio.py:174)",
            "each recording is heard by itself; the published chat joins those of one message first "
            "(merge_audio_from_same_content), and its encoder sees some of the padding beside a longer one",
            "placeholders that do not fit a recording's features are refused: mlx-vlm drops some features, or leaves "
            "placeholders as they are (minicpmo/minicpmo.py:479)",
        ),
    )
)
class MiniCPMO(SoundAdapter, SlicedAdapter):
    tower_class = RememberingBatchTower
    input_keys = Adapter.input_keys | {
        *("tgt_sizes", "image_bound"),
        *("audio_features", "audio_feature_lens", "audio_bounds"),
    }
    ignored = frozenset({"spk_bounds"})

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.minicpmo.audio import AudioAttention, AudioModel

        from vlm_batch.models._minicpmo import SecondsAttention, SecondsModel

        return {AudioAttention: SecondsAttention, AudioModel: SecondsModel}

    @classmethod
    def processor(cls, processor: Any) -> Any:
        from vlm_batch.models._minicpmo import PiecewiseRecordings

        return as_text(super().processor(processor), PiecewiseRecordings)

    def check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        """Refuse what mlx-vlm would leave out (minicpmo.py:438)."""
        super().check_placeholders(ids, extra)
        needed = int(self.config.query_num)
        for first, end in (
            bound for request in slice_bounds(extra) for bound in request.tolist()
        ):
            if end - first != needed:
                raise InvalidPrompt(
                    f"a slice needs {needed} placeholder tokens; the prompt has {end - first}"
                )
        if "audio_features" in extra:
            needed = sum(map(self._count_features, lengths_of(extra)))
            given = len(self.sound_positions(ids, extra))
            if needed != given:
                raise InvalidPrompt(
                    f"the recordings need {needed} placeholder tokens; the prompt has {given}"
                )

    def feature_positions(self, extra: Mapping[str, Any]) -> list[np.ndarray]:
        return [
            *super().feature_positions(extra),
            *(np.arange(first, end) for first, end in sound_bounds(extra)),
        ]

    def sound_positions(self, ids: Any, sound: Mapping[str, Any]) -> np.ndarray:
        return np.concatenate(
            [
                np.zeros(0, int),
                *(np.arange(first, end) for first, end in sound_bounds(sound)),
            ]
        )

    def recordings(
        self, ids: mx.array, sound: Mapping[str, Any]
    ) -> tuple[Picture, ...]:
        """Separate one-piece recordings; otherwise return all as one."""
        bounds = sound_bounds(sound)
        lengths = lengths_of(sound)
        features = sound["audio_features"]
        if len(bounds) != len(lengths):
            return (Picture(bounds[0][0], bounds[-1][1], sound),)
        return tuple(
            Picture(first, end, features[at, :, :length])
            for at, ((first, end), length) in enumerate(
                zip(bounds, lengths, strict=True)
            )
        )

    def encode_sound(self, sound: Mapping[str, Any]) -> mx.array:
        tower, step = self.model.audio_tower, int(self.config.audio_pool_step)
        # 50 states are a second
        chunk = int(self.config.audio_chunk_length * 50)
        dtype = tower.conv1.weight.dtype
        rows = []
        for at, length in enumerate(lengths_of(sound)):
            # a recording's end, shorter than a feature
            if not (count := self._count_features(length)):
                continue
            piece = sound["audio_features"][at : at + 1, :, :length]
            states = self.model.audio_projection_layer(
                tower(piece.astype(dtype), chunk=chunk)
            )[0]
            rows.append(states[: count * step].reshape(count, step, -1).mean(axis=1))
        return mx.concatenate(rows)

    def _count_features(self, frames: int) -> int:
        return count_states(frames) // int(self.config.audio_pool_step)

    def _known_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if not np.size(inputs.get("audio_features", ())):
            inputs = {
                name: value
                for name, value in inputs.items()
                if not name.startswith(AUDIO_INPUTS)
            }
        return super()._known_inputs(inputs)


def sound_bounds(sound: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [
        (first, end)
        for bounds in sound.get("audio_bounds", ())
        for first, end in np.array(bounds).tolist()
    ]


def lengths_of(sound: Mapping[str, Any]) -> list[int]:
    return [int(length) for length in itertools.chain(*sound["audio_feature_lens"])]


def count_states(frames: int) -> int:
    """Count a piece's encoder states; one convolution has stride 2."""
    return (frames - 1) // 2 + 1
