"""GLM-4.5V: GLM-4.1V with experts."""

from __future__ import annotations

from vlm_batch.adapters.modules import patching, under
from vlm_batch.adapters.routing import dropped_groups
from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.models.glm4v import GLM4V, BicubicEmbeddings
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="glm4v_moe",
        model_types=("glm4v_moe",),
        no_video="mlx-vlm's processor has no part for frames and leaves a video's placeholder (glm4v_moe/processing.py)",
        notes=(
            "positions travel with the row: mlx-vlm keeps the last request's on the model (glm4v_moe/glm4v_moe.py:66) and "
            "counts text positions from the second chunk on (glm4v_moe/language.py:577)",
            "vision positions are interpolated bicubically up to the border, as in transformers; mlx-vlm does it "
            "linearly with zeros outside (glm4v_moe/vision.py:126)",
            "the vision blocks' norms take the configured epsilon; mlx-vlm fixes 1e-6 (glm4v_moe/vision.py:232)",
            "a dropped group of experts is out of the choice, as in transformers and for kimi_k25 (glm4v_moe/language.py:179)",
        ),
    )
)
class GLM4VMoe(GLM4V):
    patches = patching(
        ("glm4v_moe.vision.Glm4vMoeVisionAttention", attend_pictures),
        ("glm4v_moe.vision.Glm4vVisionEmbeddings", under(BicubicEmbeddings)),
        ("glm4v_moe.vision.Glm4vMoeVisionPatchEmbed", embed_by_product),
        ("glm4v_moe.language.MoEGate", dropped_groups),
    )
