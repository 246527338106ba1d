"""Gemma 4: sliding and full layers, pictures, videos and recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.frames import keep_every_frame
from vlm_batch.adapters.modules import RememberingRowTower, patches_in
from vlm_batch.adapters.pictures import with_mixin
from vlm_batch.adapters.prompts import bidirectional_mask, spans_of
from vlm_batch.adapters.sound import SoundAdapter, rows_within
from vlm_batch.errors import InvalidPrompt
from vlm_batch.inputs.videos import Sampling
from vlm_batch.records import Encoded
from vlm_batch.registry import ModelSpec, register

MASK_NOTE = (
    "if the checkpoint asks for it (use_bidirectional_attention 'vision'), a picture is one chunk and attends within "
    "itself both ways in sliding layers, within their window, as in transformers (modeling_gemma4.py, "
    "create_masks_for_vision_model); mlx-vlm does so in full layers too, and past the window (gemma4/language.py:499)"
)
SOUND_NOTE = (
    "a recording has one placeholder for each of its features, counted as its encoder does, and the features behind its end "
    "are left out, as in transformers (processing_gemma4.py, modeling_gemma4.py); mlx-vlm counts by its duration, one too many "
    "for a quarter of all lengths (gemma4/processing_gemma4.py:549), and puts in the features of silence, too "
    "(gemma4/gemma4.py:165)"
)
PLACE_NOTE = (
    "recordings and videos stand where the chat has them; mlx-vlm's processor moves recordings behind all words and leaves "
    "videos out (gemma4/processing_gemma4.py:877)"
)


@register(
    ModelSpec(
        family="gemma4",
        model_types=("gemma4",),
        video=True,
        audio=True,
        audio_seconds=30.0,
        notes=(
            MASK_NOTE,
            SOUND_NOTE,
            PLACE_NOTE,
            "a number of placeholders that does not fit the pictures is refused; mlx-vlm begins again with the first feature "
            "(gemma4/gemma4.py:18)",
            "video frames are stamped with evenly spaced times (processing_gemma4.py:441); transformers stamps each with its "
            "own, which is another whole second where a file's frame rate is no whole number and the two round apart",
        ),
    )
)
class Gemma4(SoundAdapter):
    """Video frames are pictures; recordings are causal."""

    tower_class = RememberingRowTower
    input_keys = Adapter.input_keys | {
        *("image_position_ids", "pixel_values_videos", "video_position_ids"),
        *("input_features", "input_features_mask"),
    }
    ignored = frozenset({"num_soft_tokens_per_image", "num_frames_per_video"})
    video_sampling = Sampling(num_frames=32, frame_factor=1, to_the_end=False)
    patches = patches_in("vlm_batch.models._gemma4")
    prefill_axes: ClassVar[Mapping[str, int | None]] = {"per_layer_inputs": 1}
    _features_have_rows = True

    @classmethod
    def processor(cls, processor: Any) -> Any:
        from mlx_vlm.models.gemma4.processing_gemma4 import Gemma4VideoProcessor

        return with_audio_token_counts(
            keep_every_frame(processor, Gemma4VideoProcessor, "num_frames")
        )

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        extra = dict(extra)
        picture_positions, frame_positions = (
            extra.pop(f"{kind}_position_ids", None) for kind in ("image", "video")
        )
        if "pixel_values" in extra:
            found = extra.get("cached_image_features")
            found = (
                self.model.encode_image(extra["pixel_values"], picture_positions)
                if found is None
                else found
            )
            self.check_room(ids, self.config.image_token_id, found, "pictures")
            extra["cached_image_features"] = found
        if "pixel_values_videos" in extra:
            videos = extra["pixel_values_videos"]
            found = self.encode_frames(videos, frame_positions)
            self.check_room(ids, self.config.video_token_id, found, "videos")
            extra["cached_video_features"] = found
        return super().features(ids, extra)

    def encode_sound(self, sound: Mapping[str, Any]) -> mx.array:
        is_own = sound["input_features_mask"].astype(mx.bool_)
        states, is_behind = self.model.audio_tower(sound["input_features"], ~is_own)
        return rows_within(self.model.embed_audio(states), ~np.array(is_behind))

    def encode_frames(
        self, videos: mx.array | list[mx.array], positions: mx.array | list[mx.array]
    ) -> mx.array:
        """Patches (..., frames, N, 3 * patch * patch) and positions -> (..., tokens, D)."""
        patches, where = (
            mx.concatenate(
                [
                    part.reshape(-1, *part.shape[-2:])
                    for part in ([parts] if isinstance(parts, mx.array) else parts)
                ]
            )
            for parts in (videos, positions)
        )
        return self.model.encode_image(patches, where)

    def check_room(
        self, ids: mx.array, marker: int, found: mx.array, noun: str
    ) -> None:
        needed = found.size // found.shape[-1]
        given = int(np.sum(np.array(ids) == marker))
        if needed != given:
            raise InvalidPrompt(
                f"the {noun} need {needed} placeholder tokens; the prompt has {given}"
            )

    def atomic_spans(
        self, ids: mx.array, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        text = self.config.text_config
        if (
            not {"pixel_values", "pixel_values_videos"} & extra.keys()
            or text.use_bidirectional_attention != "vision"
        ):
            return ()
        return spans_of(ids, self.image_token_ids - self._audio_token_ids)

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        features = super().chunk_features(encoded, start, end)
        return {
            **features,
            "mm_token_type_ids": self.picture_masks(encoded.atomic, start, end),
        }

    def picture_masks(
        self, spans: Sequence[tuple[int, int]], start: int, end: int
    ) -> dict[str, mx.array]:
        sliding = bidirectional_mask(
            spans, start, end, self.config.text_config.sliding_window
        )
        return {} if sliding is None else {"sliding_attention": sliding}


def with_audio_token_counts(processor: Any) -> Any:
    """Make a processor count recordings' placeholders as the encoder does, and keep media in place."""
    return (
        with_mixin(processor, AudioTokenCounts)
        if hasattr(type(processor), "_compute_audio_num_tokens")
        else processor
    )


class AudioTokenCounts:
    feature_extractor: Any
    audio_seq_length: int
    tokenizer: Any

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """Fill the template with unchanged messages; mlx-vlm rebuilds them (gemma4/processing_gemma4.py:877)."""
        return self.tokenizer.apply_chat_template(
            messages, **{"tokenize": False, **options}
        )

    def _compute_audio_num_tokens(self, waveform: Any, rate: int) -> int:
        part, count = self.feature_extractor, len(waveform)
        # raw waveforms, without a spectrogram
        if hasattr(part, "audio_samples_per_token"):
            return min(-(-count // part.audio_samples_per_token), self.audio_seq_length)
        frames = (
            count + part.frame_length // 2 - part.frame_length - 1
        ) // part.hop_length + 1
        # two convolutions of stride 2
        return min(-(-max(frames, 0) // 4), self.audio_seq_length)
