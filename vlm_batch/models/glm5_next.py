"""GLM-5-Next: delta nets, and sparse attention over pools."""

from __future__ import annotations

from typing import Any

from mlx_vlm.models.cache import CacheList

from vlm_batch.adapters.grids import GridAdapter
from vlm_batch.adapters.modules import patches_in
from vlm_batch.caches import WholeCache
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="glm5_next",
        model_types=("glm5_next",),
        no_video="not verified: its answers have not been compared with transformers",
        notes=(
            "a step's attention gathers each row's positions, from the pools that its own indexer picks; all else runs for all "
            "rows at once",
        ),
        not_on_cuda=(
            (
                "glm5_next",
                "log-probabilities of its tiny model were 2e-4 off those of the same request alone on an H100, twice what is "
                "allowed",
            ),
        ),
    )
)
class Glm5Next(GridAdapter):
    patches = patches_in("vlm_batch.models._glm5_next")

    def row_caches(self) -> list[Any]:
        return [
            WholeCache(*one.caches) if isinstance(one, CacheList) else one
            for one in super().row_caches()
        ]
