"""Phi-4 with SigLIP 2: pictures of any shape, one id per picture."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.attention import fuse_rows
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.adapters.placeholders import OnePlaceholder
from vlm_batch.registry import ModelSpec, register

#: LLaVA's id of a picture's placeholder.
NO_TOKEN = -200


@register(
    ModelSpec(
        family="phi4_siglip",
        model_types=("phi4_siglip", "phi4-siglip"),
        notes=(
            "attention runs a row at a time too; mlx-vlm calls MLX's directly (phi4_siglip/language.py:66)",
            "SigLIP 2's positions are resized bilinearly with antialiasing, as in transformers (Siglip2VisionEmbeddings); "
            "mlx-vlm does it bicubically without (phi4_siglip/vision.py:87)",
            "a picture's patches attend to each other alone; mlx-vlm lets them attend to padding (phi4_siglip/vision.py:133)",
        ),
    )
)
class Phi4SigLip(OnePlaceholder):
    tower_class = RememberingBatchTower
    input_keys = OnePlaceholder.input_keys | {"spatial_shapes", "pixel_attention_mask"}

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.interpolate import resize_bilinear_nhwc
        from mlx_vlm.models.phi4_siglip.language import Attention
        from mlx_vlm.models.phi4_siglip.vision import VisionEmbeddings

        class BilinearEmbeddings(VisionEmbeddings):
            """Resizes bilinearly, not bicubically (phi4_siglip/vision.py:87)."""

            @staticmethod
            def resize_positional_embeddings(
                table: mx.array, shapes: mx.array, max_length: int
            ) -> mx.array:
                """(H, W, D), shapes (pictures, 2) -> (pictures, patches, D)."""
                sizes = [
                    (int(rows), int(columns))
                    for rows, columns in np.array(shapes).tolist()
                ]
                tables = [
                    resize_bilinear_nhwc(
                        table[None].astype(mx.float32), size, antialias=True
                    )
                    for size in sizes
                ]
                return mx.concatenate([one.flatten(1, 2) for one in tables]).astype(
                    table.dtype
                )

        # mlx-vlm calls ``mx.fast`` itself (phi4_siglip/language.py:66).
        return {
            Attention: fuse_rows(Attention, "qkv_proj", "o_proj"),
            VisionEmbeddings: BilinearEmbeddings,
        }

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        return frozenset({NO_TOKEN})

    def count_positions(self, extra: Mapping[str, Any]) -> list[int]:
        mask = extra.get("pixel_attention_mask")
        if mask is None:
            return [extra["pixel_values"].shape[1]] * len(extra["pixel_values"])
        return [int(count) for count in mask.sum(axis=-1).tolist()]

    def encode_pictures(
        self, extra: Mapping[str, Any], dtype: mx.Dtype
    ) -> list[mx.array]:
        features = []
        for index, count in enumerate(self.count_positions(extra)):
            patches, shape = (
                extra[name][index : index + 1]
                for name in ("pixel_values", "spatial_shapes")
            )
            states, *_ = self.model.vision_tower(
                patches[:, :count], output_hidden_states=True, spatial_shapes=shape
            )
            features.append(
                self.model.mm_projector(states[self.config.mm_vision_select_layer][0])
            )
        return features
