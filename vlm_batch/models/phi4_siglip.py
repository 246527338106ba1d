"""Families whose prompts hold one id for each picture, often one that is no token: FastVLM, Bunny, Phi-4 with SigLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.attention import fuse_rows
from vlm_batch.adapters.modules import LastPosition
from vlm_batch.adapters.placeholders import OnePlaceholder
from vlm_batch.adapters.towers import use_tanh_gelu
from vlm_batch.registry import ModelSpec, register

#: What LLaVA's own code writes where a picture belongs.
NO_TOKEN = -200
#: Pixels of a picture's side for each of FastViTHD's features.
FASTVIT_STRIDE = 64


@register(
    ModelSpec(
        family="fastvlm",
        model_types=("fastvlm", "llava_qwen2"),
        notes=("text between two pictures is cut where they are; mlx-vlm cuts one id too late (fastvlm.py:120)",),
    )
)
class FastVLM(OnePlaceholder):
    """The tower is mlx-vlm's as it is: its sizes are fixed, and the tests feed its features."""

    def count_positions(self, extra: Mapping[str, Any]) -> list[int]:
        """The stem halves a picture twice, and four patch embeddings once each, rounding up (fastvlm/vision.py)."""
        count, _, height, width = extra["pixel_values"].shape
        return [-(-height // FASTVIT_STRIDE) * -(-width // FASTVIT_STRIDE)] * count

    def encode_pictures(self, extra: Mapping[str, Any]) -> list[mx.array]:
        tower = self.model.vision_tower
        dtype = tower.vision_model.patch_embed.blocks[0].reparam_conv.weight.dtype
        _, features, _ = tower(extra["pixel_values"].transpose(0, 2, 3, 1).astype(dtype))  # (N, H, W, C)
        return list(self.model.mm_projector(features.flatten(1, 2)))


@register(
    ModelSpec(
        family="llava_bunny",
        model_types=("llava_bunny", "llava-qwen2", "bunny-llama"),
        notes=(
            "every picture has its place; mlx-vlm puts in the first one only (llava_bunny.py:135)",
            "SigLIP's GELU has its tanh form, as for llava (llava_bunny/vision.py:8)",
        ),
    )
)
class LlavaBunny(OnePlaceholder):
    """The tower's last layer without its norm, as upstream takes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        use_tanh_gelu(self.model.vision_tower)

    def last_position_logits(self) -> None:
        """The head is a part of the trunk here, behind its norm."""
        self.language.model.norm = LastPosition(self.language.model.norm)

    def count_positions(self, extra: Mapping[str, Any]) -> list[int]:
        vision = self.config.vision_config
        return [(vision.image_size // vision.patch_size) ** 2] * len(extra["pixel_values"])

    def encode_pictures(self, extra: Mapping[str, Any]) -> list[mx.array]:
        *_, states = self.model.vision_tower(extra["pixel_values"].transpose(0, 2, 3, 1), output_hidden_states=True)
        return list(self.model.mm_projector(states[-1].astype(extra["pixel_values"].dtype)))


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
    """Pictures of any shape as a padded list of patches, of which a mask says how many are real."""

    input_keys = OnePlaceholder.input_keys | {"spatial_shapes", "pixel_attention_mask"}

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.interpolate import resize_bilinear_nhwc
        from mlx_vlm.models.phi4_siglip.language import Attention
        from mlx_vlm.models.phi4_siglip.vision import VisionEmbeddings

        class BilinearEmbeddings(VisionEmbeddings):
            """Upstream resizes bicubically (phi4_siglip/vision.py:87); its LFM2-VL has the same tower's rule."""

            @staticmethod
            def resize_positional_embeddings(table: mx.array, shapes: mx.array, max_length: int) -> mx.array:
                """(H, W, D) for each picture's (2,) rows and columns: (pictures, patches, D); no picture is padded."""
                sizes = [(int(rows), int(columns)) for rows, columns in np.array(shapes).tolist()]
                tables = [resize_bilinear_nhwc(table[None].astype(mx.float32), size, antialias=True) for size in sizes]
                return mx.concatenate([one.flatten(1, 2) for one in tables]).astype(table.dtype)

        # Upstream calls ``mx.fast`` itself (phi4_siglip/language.py:66).
        return {Attention: fuse_rows(Attention, "qkv_proj", "o_proj"), VisionEmbeddings: BilinearEmbeddings}

    def image_token_ids(self) -> frozenset[int]:
        return frozenset({NO_TOKEN})

    def count_positions(self, extra: Mapping[str, Any]) -> list[int]:
        mask = extra.get("pixel_attention_mask")
        if mask is None:
            return [extra["pixel_values"].shape[1]] * len(extra["pixel_values"])
        return [int(count) for count in mask.sum(axis=-1).tolist()]

    def encode_pictures(self, extra: Mapping[str, Any]) -> list[mx.array]:
        """Each picture by itself, without the padding that the others give it."""
        features = []
        for index, count in enumerate(self.count_positions(extra)):
            patches, shape = (extra[name][index : index + 1] for name in ("pixel_values", "spatial_shapes"))
            states, *_ = self.model.vision_tower(patches[:, :count], output_hidden_states=True, spatial_shapes=shape)
            features.append(self.model.mm_projector(states[self.config.mm_vision_select_layer][0]))
        return features
