from __future__ import annotations

from vlm_batch.models.idefics3 import Idefics3
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="smolvlm",
        model_types=("smolvlm",),
        special_tokens=(
            (
                "<doctag>",
                "SmolDocling answers in DocTags, decoded with skip_special_tokens=False (model card; docling "
                "2.143, vlm_model_specs.py)",
            ),
        ),
        no_video="mlx-vlm's processor takes frames for pictures, without the words and times that the published one puts "
        "between them (processing_smolvlm.py:161)",
    )
)
class SmolVLM(Idefics3):
    """Videos are refused: not verified."""
