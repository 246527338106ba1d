"""Gemma 4: sliding and full layers that may share keys and values; pictures and videos through a tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.frames import keep_every_frame
from vlm_batch.adapters.modules import RememberingRowTower
from vlm_batch.adapters.prompts import bidirectional_mask, spans_of
from vlm_batch.errors import InvalidPrompt
from vlm_batch.inputs.videos import Sampling
from vlm_batch.records import Encoded
from vlm_batch.registry import ModelSpec, register

MASK_NOTE = (
    "where the checkpoint asks for it (use_bidirectional_attention 'vision'), a picture is one chunk and attends within "
    "itself both ways in sliding layers, within their window, as in transformers (modeling_gemma4.py, "
    "create_masks_for_vision_model); mlx-vlm does so in full layers too, and past the window (gemma4/language.py:499)"
)


@register(
    ModelSpec(
        family="gemma4",
        model_types=("gemma4",),
        video=True,
        notes=(
            MASK_NOTE,
            "a number of placeholders that does not fit the pictures is refused; mlx-vlm begins again with the first feature "
            "(gemma4/gemma4.py:18)",
            "video frames are stamped with evenly spaced times (processing_gemma4.py:441); transformers stamps each with its "
            "own, which is another whole second where a file's frame rate is no whole number and the two round apart",
        ),
    )
)
class Gemma4(Adapter):
    """A video's frames are pictures with other placeholders. Audio is not verified, and refused."""

    tower_class = RememberingRowTower
    input_keys = Adapter.input_keys | {"image_position_ids", "pixel_values_videos", "video_position_ids"}
    ignored = frozenset({"num_soft_tokens_per_image", "num_frames_per_video"})
    video_sampling = Sampling(num_frames=32, frame_factor=1, to_the_end=False)
    prefill_axes: ClassVar[Mapping[str, int | None]] = {"per_layer_inputs": 1}

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.gemma4.language import Gemma4TextModel

        class PictureMasks(Gemma4TextModel):
            """Upstream lays pictures over the masks of all layers, from a whole prompt's token types
            (gemma4/language.py:499); here a chunk's masks, by the kind of layer, come in their place."""

            def _make_masks(self, h: mx.array, cache: Any, mm_token_type_ids: Any = None) -> list[Any]:
                masks = super()._make_masks(h, cache)
                kinds = dict(mm_token_type_ids or {})
                for index, (layer, entry) in enumerate(zip(self.layers, cache, strict=True)):
                    if layer.layer_type in kinds:
                        if entry is not None:  # without a cache, a layer shares the keys of one before it
                            usual = entry.make_mask(h.shape[1], window_size=self.window_size, return_array=True)
                            kinds[layer.layer_type] = kinds[layer.layer_type][..., -usual.shape[-1] :]
                        masks[index] = kinds[layer.layer_type]
                return masks

        return {Gemma4TextModel: PictureMasks}

    @classmethod
    def processor(cls, processor: Any) -> Any:
        from mlx_vlm.models.gemma4.processing_gemma4 import Gemma4VideoProcessor

        return keep_every_frame(processor, Gemma4VideoProcessor, "num_frames")

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's own, with as many placeholders as features."""
        extra = dict(extra)
        picture_places, frame_places = (extra.pop(f"{kind}_position_ids", None) for kind in ("image", "video"))
        if "pixel_values" in extra:
            found = extra.get("cached_image_features")
            found = self.model.encode_image(extra["pixel_values"], picture_places) if found is None else found
            self.check_room(ids, self.config.image_token_id, found, "pictures")
            extra["cached_image_features"] = found
        if "pixel_values_videos" in extra:
            videos = extra["pixel_values_videos"]
            found = self.encode_frames(videos, frame_places)
            self.check_room(ids, self.config.video_token_id, found, "videos")
            extra["cached_video_features"] = found
        return super().features(ids, extra)

    def encode_frames(self, videos: mx.array | list[mx.array], places: mx.array | list[mx.array]) -> mx.array:
        """(..., frames, N, 3 * patch * patch) patches, or a list of such, and their places -> (..., tokens, D)."""
        patches, where = (
            mx.concatenate(
                [part.reshape(-1, *part.shape[-2:]) for part in ([parts] if isinstance(parts, mx.array) else parts)]
            )
            for parts in (videos, places)
        )
        return self.model.encode_image(patches, where)

    def check_room(self, ids: mx.array, marker: int, found: mx.array, noun: str) -> None:
        """Refuse a prompt that has not one placeholder for each of the features."""
        needed, given = found.size // found.shape[-1], int(np.sum(np.array(ids) == marker))
        if needed != given:
            raise InvalidPrompt(f"the {noun} need {needed} placeholder tokens; the prompt has {given}")

    def atomic_spans(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        text = self.config.text_config
        if not {"pixel_values", "pixel_values_videos"} & extra.keys() or text.use_bidirectional_attention != "vision":
            return ()
        return spans_of(ids, self.image_token_ids)

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        features = super().chunk_features(encoded, start, end)
        return {**features, "mm_token_type_ids": self.picture_masks(encoded.atomic, start, end)}

    def picture_masks(self, spans: Sequence[tuple[int, int]], start: int, end: int) -> dict[str, mx.array]:
        """The masks of a chunk by kind of layer; full layers stay causal."""
        sliding = bidirectional_mask(spans, start, end, self.config.text_config.sliding_window)
        return {} if sliding is None else {"sliding_attention": sliding}
