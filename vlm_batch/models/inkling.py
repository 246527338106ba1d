"""Inkling: distances for positions, short convolutions, no tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.modules import RememberingBatchTower, patches_in
from vlm_batch.adapters.pictures import with_part
from vlm_batch.adapters.sound import SoundAdapter
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="inkling",
        model_types=("inkling", "inkling_mm_model"),
        audio=True,
        notes=(
            "a row's biases and its scale for long contexts follow its own length; mlx-vlm's follow the batch's common one "
            "(inkling/language.py:476)",
            "a recording's levels end where transformers' do (feature_extraction_inkling.py); in mlx-vlm silence is another "
            "level (inkling/audio_feature_extractor.py:141)",
        ),
    )
)
class Inkling(SoundAdapter):
    tower_class = RememberingBatchTower
    input_keys = SoundAdapter.input_keys | {"audio_input_ids", "audio_input_ids_mask"}
    patches = patches_in("vlm_batch.models._inkling")

    @classmethod
    def processor(cls, processor: Any) -> Any:
        from vlm_batch.models._inkling import with_floored_magnitudes

        return with_part(
            super().processor(processor), "feature_extractor", with_floored_magnitudes
        )

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        return len(extra["pixel_values"]) if "pixel_values" in extra else 0

    def encode_sound(self, sound: Mapping[str, Any]) -> mx.array:
        return self.model.get_audio_features(  # type: ignore[no-any-return]
            sound["audio_input_ids"], sound["audio_input_ids_mask"]
        )
