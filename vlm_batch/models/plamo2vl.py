"""PLaMo 2.1 VL: SigLIP before Mamba and attention."""

from __future__ import annotations

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower, patches_in
from vlm_batch.adapters.placing import Merge
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="plamo2vl",
        model_types=("plamo2vl",),
        notes=(
            "attention runs a row at a time too; mlx-vlm calls MLX's directly (plamo2vl/language.py:262)",
        ),
    )
)
class Plamo2VL(Adapter):
    merge = Merge("_merge_input_ids_with_image_features", keeps_type=True)
    _masks_states = True
    tower_class = RememberingBatchTower
    patches = patches_in("vlm_batch.models._plamo2vl")
