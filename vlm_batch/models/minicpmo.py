"""MiniCPM-o (pictures and text): Qwen3 with positions that count, pictures as slices through a resampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.adapters.slices import SlicedAdapter
from vlm_batch.errors import InvalidPrompt
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="minicpmo",
        model_types=("minicpmo",),
        notes=(
            "positions travel with the row; mlx-vlm keeps the last request's on the model (minicpmo.py, "
            "_set_position_state). Audio and speech are not verified: audio is refused, answers are text",
        ),
    )
)
class MiniCPMO(SlicedAdapter):
    """The language model is Qwen3-VL's, whose three axes are all the count of tokens here."""

    tower_class = RememberingBatchTower
    input_keys = Adapter.input_keys | {"tgt_sizes", "image_bound"}
    #: The processor's outputs for audio, empty without any.
    ignored = frozenset({"audio_feature_lens", "audio_bounds", "spk_bounds"})

    def _known_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        audio = inputs.get("audio_features")
        if audio is not None and np.size(audio):
            raise InvalidPrompt("minicpmo's audio is not verified here; it takes pictures and text")
        return super()._known_inputs({name: value for name, value in inputs.items() if name != "audio_features"})
