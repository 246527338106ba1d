"""Kimi K3: delta attention, and position-free latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.hooks import files_of, install_hooks
from vlm_batch.adapters.modules import RememberingPackedTower, patches_in
from vlm_batch.adapters.placing import Merge
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="kimi_k3", model_types=("kimi_k3",)))
class KimiK3(Adapter):
    merge = Merge("_prepare_inputs_for_multimodal", keeps_type=True, takes_all=True)
    _masks_states = True
    tower_class = RememberingPackedTower
    input_keys = Adapter.input_keys | {"grid_thws", "image_token_id"}
    patches = patches_in("vlm_batch.models._kimi_k3")

    def hook_functions(self) -> None:
        from vlm_batch.models._kimi_k3 import HOOKS

        install_hooks(
            files_of(self.language), HOOKS, family=self.spec.family, required=HOOKS
        )
        super().hook_functions()

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        return frozenset(
            {self.config.image_token_index, self.config.media_placeholder_token_id}
        )

    def model_image_sizes(
        self, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        if "grid_thws" not in extra:
            return ()
        patch = int(self.config.vision_config.patch_size)
        return tuple(
            (grid[-1] * patch, grid[-2] * patch) for grid in extra["grid_thws"].tolist()
        )
