"""MiniCPM-o (pictures and text): Qwen3 with positions that count, pictures as slices through a resampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.errors import InvalidPrompt
from vlm_batch.models.base import Adapter
from vlm_batch.models.grids import MRoPEAdapter
from vlm_batch.registry import ModelSpec, register
from vlm_batch.types import Picture, PositionState


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
class MiniCPMO(MRoPEAdapter):
    """The language model is Qwen3-VL's, whose three axes are all the count of tokens here."""

    input_keys = Adapter.input_keys | {"tgt_sizes", "image_bound"}
    #: What the processor says of audio: nothing, unless there is some.
    ignored_inputs = frozenset({"audio_feature_lens", "audio_bounds", "spk_bounds"})

    def _known_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        audio = inputs.get("audio_features")
        if audio is not None and np.size(audio):
            raise InvalidPrompt("minicpmo's audio is not verified here; it takes pictures and text")
        return super()._known_inputs({name: value for name, value in inputs.items() if name != "audio_features"})

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        return Adapter.features(self, ids, extra)

    def positions(self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]) -> PositionState:
        """The count of tokens on all three axes."""
        return PositionState(prompt=mx.broadcast_to(mx.arange(ids.shape[1], dtype=mx.int32), (3, 1, ids.shape[1])))

    def count_image_tokens(self, ids: mx.array, extra: Mapping[str, Any]) -> int:
        bounds = [np.array(bound).reshape(-1, 2) for bound in extra.get("image_bound", ())]
        return sum(int((bound[:, 1] - bound[:, 0]).sum()) for bound in bounds)

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """All slices are one, from the first one's tokens to the last one's."""
        bounds = [np.array(bound).reshape(-1, 2) for bound in extra.get("image_bound", ())]
        if not bounds:
            return super().pictures(ids, extra)
        ends = np.concatenate(bounds)
        return (Picture(int(ends.min()), int(ends.max()), extra),) if len(ends) else ()

    def model_image_sizes(self, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        return ()
