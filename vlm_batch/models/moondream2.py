"""Moondream 2: BOS and one picture attend both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.attention import fuse_rows
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingTower, patching, under, unshared
from vlm_batch.adapters.prompts import bidirectional_mask
from vlm_batch.adapters.vision import adaptive_average
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Encoded, Graphs, Picture
from vlm_batch.registry import ModelSpec, register

_PREFIX = (
    "the two-way mask of BOS and picture reaches the model: generate passes it as attention_mask_4d, which "
    "the language model swallows (moondream3/language.py:276, moondream2/language.py:124); a text has no such prefix, as "
    "in Moondream's own engine"
)
_POOLING = (
    "crops are pooled over the overlapping windows of an adaptive average, as in Moondream's own code "
    "(moondream/torch/vision.py, vision_projection; vLLM and Moondream's engine do the same); mlx-vlm pools over "
    "rounded windows (moondream3/vision.py:114)"
)
_CROPS = (
    "pictures are cut as in Moondream's own code (moondream/torch/image_crops.py); mlx-vlm chooses another grid and other "
    "cuts for pictures of more than one crop (moondream3/image_crops.py:13)"
)


class AdaptivePooling:
    """Pools by adaptive_avg_pool2d (moondream/torch/vision.py), not rounded windows (moondream3/vision.py:114-140)."""

    config: Any

    def _reconstruct_local_features(
        self, crops: list[mx.array], layout: tuple[int, int]
    ) -> mx.array:
        """Crops' features (N, D) -> (N, D), without margins."""
        size = self.config.crop_size // self.config.patch_size
        margin = self.config.overlap_margin
        high, wide = layout

        def inner(index: int, count: int) -> slice:
            return slice(
                margin if index else 0, size - margin if index < count - 1 else size
            )

        grids = [crop.reshape(size, size, -1) for crop in crops]
        rows = [
            mx.concatenate(
                [
                    grids[r * wide + c][inner(r, high), inner(c, wide)]
                    for c in range(wide)
                ],
                axis=1,
            )
            for r in range(high)
        ]
        return adaptive_average(mx.concatenate(rows, axis=0), size).reshape(
            size * size, -1
        )


@register(
    ModelSpec(
        family="moondream2",
        model_types=("moondream2", "moondream1"),
        multi_image=False,
        notes=(_PREFIX, _POOLING, _CROPS),
    )
)
class Moondream2(Adapter):
    tower_class = unshared(
        RememberingTower, "its tower makes one picture of the crops that it is given"
    )
    graphs = Graphs.IF_ASKED
    input_keys = Adapter.input_keys | {"num_crops", "crop_layouts"}
    _features_have_rows = True
    #: Made per chunk as bools; mlx-vlm's float32 does not fit bfloat16 attention.
    ignored = frozenset({"attention_mask_4d"})
    patches = patching(
        # mlx-vlm calls ``mx.fast`` itself (moondream2/language.py:61).
        (
            "moondream2.language.Attention",
            lambda attention: fuse_rows(attention, "qkv", "proj"),
        ),
        ("moondream2.vision.VisionModel", under(AdaptivePooling)),
    )

    @classmethod
    def processor(cls, processor: Any) -> Any:
        from vlm_batch.models._moondream2 import with_published_crops

        return with_published_crops(processor)

    def check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        """Check the ids after BOS, which mlx-vlm overwrites (moondream3.py:70)."""
        if len(extra.get("num_crops", ())) > 1:
            raise InvalidPrompt(
                f"{self.spec.family} takes one picture a request: its prompt has room for one"
            )
        needed, tokens = self.num_features(extra), np.array(ids)[0, 1:]
        # leading tokens of one id
        same = int(np.append(tokens == tokens[:1], False).argmin())
        if needed and same != needed:
            raise InvalidPrompt(
                f"the picture needs {needed} placeholder tokens; the prompt has {same} alike ones after BOS"
            )

    def atomic_spans(
        self, ids: mx.array, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        count = self.num_features(extra)
        return ((0, 1 + count),) if count else ()

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        count = self.num_features(extra)
        return (Picture(1, 1 + count, extra),) if count else ()

    def picture_positions(self, ids: mx.array, extra: Mapping[str, Any]) -> np.ndarray:
        is_picture = np.zeros(ids.shape[1], dtype=np.bool_)
        is_picture[1 : 1 + self.num_features(extra)] = True
        return is_picture

    def num_features(self, extra: Mapping[str, Any]) -> int:
        """Count a crop's patches (moondream3/vision.py:114)."""
        vision = self.config.vision_config
        return (
            (vision.crop_size // vision.patch_size) ** 2
            if "pixel_values" in extra
            else 0
        )

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        return {"mask": bidirectional_mask(encoded.atomic, start, end)}
