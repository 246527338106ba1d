"""Nemotron Nano Omni: Mamba-2 and attention layers without positions, and experts, behind a RADIO tower."""

from __future__ import annotations

from functools import cached_property

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingTower, apart
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="nemotron_h_nano_omni",
        model_types=("nemotron_h_nano_omni",),
        no_video="not verified: mlx-vlm drops some of a video's tokens after encoding them, which has not been compared with "
        "the published model",
        notes=("pictures and text; sound and video are refused",),
    )
)
class NemotronHNanoOmni(Adapter):
    """Nothing takes positions: the recurrent layers know the order."""

    tower_class = apart(RememberingTower, "its tower answers with an object of its own")
    input_keys = frozenset({"pixel_values"})
    ignored = frozenset({"num_patches", "num_tokens", "imgs_sizes"})

    embeddings = "backbone.embeddings"
    last_hidden = "backbone"

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        return frozenset({self.config.img_context_token_id})
