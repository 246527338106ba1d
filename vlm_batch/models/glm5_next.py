"""GLM-5-Next: delta nets, and sparse attention over pools."""

from __future__ import annotations

from typing import Any

from mlx_vlm.models.cache import CacheList

from vlm_batch.adapters.attention import row_by_row
from vlm_batch.adapters.grids import GridAdapter
from vlm_batch.adapters.modules import patching
from vlm_batch.adapters.recurrent import in_order
from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.caches import WholeCache
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="glm5_next",
        model_types=("glm5_next",),
        no_video="not verified: its answers have not been compared with transformers",
        notes=(
            "sparse attention runs a row at a time, with the row's own indexer and pools; delta nets and experts run for all "
            "rows at once",
        ),
    )
)
class Glm5Next(GridAdapter):
    patches = patching(
        ("glm5_next.language.Glm5NextAttention", row_by_row),
        (
            "glm5_next.language.Glm5NextLinearAttention",
            lambda layer: in_order(layer, ("qkv_proj", "fbg_a_proj"), "o_proj"),
        ),
        ("glm5_next.vision.VisionPatchEmbed", embed_by_product),
    )

    def row_caches(self) -> list[Any]:
        return [WholeCache(*one.caches) if isinstance(one, CacheList) else one for one in super().row_caches()]
