"""GOT-OCR 2.0: SAM before Qwen2, one picture of 256 tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.adapters.placing import Merge
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Graphs
from vlm_batch.registry import ModelSpec, register


@register(ModelSpec(family="got", model_types=("got",), multi_image=False))
class GOT(Adapter):
    """One picture a request (got/got.py:71)."""

    graphs = Graphs.IF_ASKED

    merge = Merge("merge_input_ids_with_image_features")
    tower_class = RememberingBatchTower
    input_keys = frozenset({"pixel_values"})

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        if "pixel_values" in extra and extra["pixel_values"].shape[0] != 1:
            raise InvalidPrompt(
                "got takes one picture a request: its prompt has room for one"
            )
        return super().features(ids, extra)

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        return frozenset({self.config.im_patch_token})
