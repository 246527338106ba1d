"""MiMo-V2: sliding layers with sinks, experts; pictures and recordings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.modules import RememberingPackedTower, patches_in
from vlm_batch.adapters.placing import Merge
from vlm_batch.adapters.sound import SoundAdapter
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="mimo_v2",
        model_types=("mimo_v2",),
        audio=True,
        no_video="not verified: transformers has no such model to compare with",
        notes=(
            "recordings are compared with mlx-vlm alone: transformers has no such model",
            "a recording is read at the 24 kHz that its codec takes; mlx-vlm reads it at 16 kHz first "
            "(mimo_v2/processing.py:76) and loses all above 8 kHz",
            "a window of sliding_window_size counts the token itself, as in mlx-vlm and vLLM; transformers' MiMoV2Flash adds "
            "one (configuration_mimo_v2_flash.py)",
        ),
    )
)
class MiMoV2(SoundAdapter):
    merge = Merge("_replace_modal_embeddings", keeps_type=True)
    tower_class = RememberingPackedTower
    input_keys = SoundAdapter.input_keys | {
        "image_grid_thw",
        "audio_codes",
        "audio_code_lengths",
    }
    patches = patches_in("vlm_batch.models._mimo_v2")

    @classmethod
    def processor(cls, processor: Any) -> Any:
        from vlm_batch.models._mimo_v2 import with_codec

        return with_codec(super().processor(processor))

    def hook_functions(self) -> None:
        """Give the encoder its tables once, so that features depend on codes alone."""
        vars(self.model.audio_encoder)["tables"] = self.model.speech_embeddings
        super().hook_functions()

    def encode_sound(self, sound: Mapping[str, Any]) -> mx.array:
        size, parts, start = self.config.audio_config.group_size, [], 0
        for length in sound["audio_code_lengths"]:
            codes = sound["audio_codes"][start : start + length]
            rest = mx.repeat(codes[-1:], -length % size, axis=0)
            parts.append(
                mx.concatenate([codes, rest]).reshape(-1, size, codes.shape[-1])
            )
            start += length
        return self.model.audio_encoder(mx.concatenate(parts))  # type: ignore[no-any-return]
