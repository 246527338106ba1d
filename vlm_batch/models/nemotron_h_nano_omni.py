"""Nemotron Nano Omni: Mamba-2 and attention layers without positions, and experts, behind a RADIO tower."""

from __future__ import annotations

from typing import Any

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import LastPosition
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

    encodes_apart = "its tower answers with an object of its own"
    input_keys = frozenset({"pixel_values"})
    ignored_inputs = frozenset({"num_patches", "num_tokens", "imgs_sizes"})

    @property
    def token_table(self) -> Any:
        return self.language.backbone.embeddings

    def last_position_logits(self) -> None:
        """Let the trunk answer for its last position only; it has another name here."""
        self.language.backbone = LastPosition(self.language.backbone)

    def image_token_ids(self) -> frozenset[int]:
        return frozenset({self.config.img_context_token_id})
