"""GLM-4.1V: positions on three axes, interpolated vision positions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.grids import GridAdapter, MRoPEAdapter
from vlm_batch.adapters.modules import patching, under
from vlm_batch.adapters.placing import Merge
from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.adapters.vision import cubic_weights
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.registry import ModelSpec, register


class BicubicEmbeddings:
    """Interpolates by grid_sample(bicubic, border, align_corners=False) (transformers, Glm4vVisionEmbeddings)."""

    position_embedding: Any

    def __call__(
        self,
        embeddings: mx.array,
        lengths: list[int],
        image_shapes: mx.array,
        h_coords: mx.array,
        w_coords: mx.array,
    ) -> mx.array:
        table = self.position_embedding.weight  # (side * side, D)
        side = int(table.shape[0] ** 0.5)
        sizes = mx.concatenate(
            [
                mx.repeat(shape[None], length, axis=0)
                for shape, length in zip(image_shapes[:, 1:], lengths, strict=True)
            ]
        )  # (N, 2) rows and columns of each patch's picture
        rows, columns = (
            cubic_weights((coords + 0.5) / sizes[:, axis] * side - 0.5, side)
            for axis, coords in enumerate((h_coords, w_coords))
        )
        weights = (rows[:, :, None] * columns[:, None]).flatten(1)  # (N, side * side)
        return embeddings + (weights @ table.astype(mx.float32)).astype(table.dtype)


@register(
    ModelSpec(
        family="glm4v",
        model_types=("glm4v",),
        no_video="mlx-vlm's processor has no part for frames and leaves a video's placeholder (glm4v/processing.py:86)",
        notes=(
            "positions travel with the row: mlx-vlm keeps the last request's on the model (glm4v/glm4v.py:76) and "
            "counts text positions from the second chunk on (glm4v/language.py:518)",
            "vision positions are interpolated bicubically up to the border, as in transformers; mlx-vlm does it "
            "linearly with zeros outside (glm4v/vision.py:126)",
            "a picture attends to itself only; from the third on, mlx-vlm lets them attend to each other "
            "(glm4v/vision.py:214)",
            "the vision blocks' norms take the configured epsilon; mlx-vlm fixes 1e-6 (glm4v/vision.py:233)",
        ),
    )
)
class GLM4V(MRoPEAdapter):
    """Not compiled: mlx 0.32.4 raises "IndexError: _Map_base::at"."""

    merge = Merge("merge_input_ids_with_image_features")
    input_keys = GridAdapter.input_keys
    # mlx-vlm makes at most three segments, two empty for one picture (glm4v/vision.py:214); transformers one per picture
    # (Glm4vVisionAttention).
    patches = patching(
        ("glm4v.vision.Glm4vVisionAttention", attend_pictures),
        ("glm4v.vision.Glm4vVisionEmbeddings", under(BicubicEmbeddings)),
        ("glm4v.vision.Glm4vVisionPatchEmbed", embed_by_product),
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for block in self.model.vision_tower.blocks:
            # mlx-vlm: 1e-6 (glm4v/vision.py:233); transformers: the configuration's (Glm4vVisionBlock).
            block.norm1.eps = block.norm2.eps = self.config.vision_config.rms_norm_eps
