"""Kimi-VL, Kimi K2.5, Mistral Large 3 and Youtu-VL: attention over a latent (DeepSeek-V2, arXiv:2405.04434)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.latent import latent_attention
from vlm_batch.adapters.modules import LastPosition
from vlm_batch.adapters.routing import dropped_groups
from vlm_batch.adapters.towers import resized_positions, use_tanh_gelu
from vlm_batch.models.mistral3 import Pixtral
from vlm_batch.registry import ModelSpec, register


class _Kimi(Adapter):
    input_keys = Adapter.input_keys | {"image_grid_hws", "image_token_id"}

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        use_tanh_gelu(self.model.vision_tower)

    def model_image_sizes(self, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        patch = int(self.config.vision_config.patch_size)
        return tuple(
            (int(w) * patch, int(h) * patch) for h, w in extra.get("image_grid_hws", mx.zeros((0, 2))).tolist()
        )


@register(
    ModelSpec(
        family="kimi_vl",
        model_types=("kimi_vl",),
        notes=(
            "MoonViT's GELU has its tanh form, as published and as for kimi_k25 (kimi_vl/vision.py:228)",
            "positions are resized by PyTorch's rule, as for kimi_k25",
            "a dropped group of experts is out of the choice, as in DeepSeek-V3 and transformers; mlx-vlm gives it a score of "
            "zero, which beats a kept expert of less (kimi_vl/language.py:252); published checkpoints have one group",
        ),
    )
)
class KimiVL(_Kimi):
    """Its latents are made into keys and values before they are stored."""

    input_keys = _Kimi.input_keys | {"_grid_shapes"}

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.kimi_vl.language import MoEGate
        from mlx_vlm.models.kimi_vl.vision import Learnable2DInterpPosEmb

        return {
            MoEGate: dropped_groups(MoEGate),
            Learnable2DInterpPosEmb: resized_positions(Learnable2DInterpPosEmb),
        }


@register(
    ModelSpec(
        family="kimi_k25",
        model_types=("kimi_k25",),
        notes=(
            "MoonViT's GELU has its tanh form, as in transformers (configuration_kimi_k25.py, hidden_act); mlx-vlm takes the "
            "exact one (kimi_k25/vision.py:245)",
            "positions are resized by PyTorch's rule; without Metal mlx-vlm takes what lies past an edge for zeros "
            "(mlx_vlm/models/kernels.py:165)",
            "a dropped group of experts is out of the choice, as in DeepSeek-V3 and transformers; mlx-vlm gives it a score of "
            "zero, which beats a kept expert of less (deepseek_v3/language.py:167); published checkpoints have one group",
        ),
    )
)
class KimiK25(_Kimi):
    """The language model runs the trunk's layers itself. Videos are refused: they are not verified."""

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.deepseek_v3.language import DeepseekV3Attention, MoEGate
        from mlx_vlm.models.kimi_k25.vision import Learnable2DInterpPosEmb

        return {
            DeepseekV3Attention: latent_attention(DeepseekV3Attention),
            MoEGate: dropped_groups(MoEGate),
            Learnable2DInterpPosEmb: resized_positions(Learnable2DInterpPosEmb),
        }

    def last_position_logits(self) -> None:
        self.language.model.norm = LastPosition(self.language.model.norm)


@register(
    ModelSpec(
        family="mistral_large3",
        model_types=("mistral_large3",),
        notes=(
            "pictures reach the decoder; mlx-vlm's embeds the placeholders' ids in their place, for this family's text "
            "model ignores the embeddings that it is given (deepseek_v3/language.py:519)",
            "experts, in one group, are weighed by a softmax, as in vLLM (configs/mistral.py, _remap_moe_args) and in "
            "transformers' Mistral 4; mlx-vlm weighs them by sigmoids, as DeepSeek-V3's (deepseek_v3/language.py:159)",
            "positions are as config.json says (rope_scaling). mlx-vlm's translation of params.json leaves out its YaRN and "
            "the growth of queries after 8,192 tokens (mistral_large3/config.py:78), and so do checkpoints made with it",
        ),
    )
)
class MistralLarge3(Pixtral):
    """Pixtral's tower and merger as in Mistral Small 3.1, DeepSeek-V3's text."""

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.deepseek_v3.language import LanguageModel, MoEGate
        from mlx_vlm.models.kimi_k25.language import LanguageModel as Embedded

        class TakesEmbeddings(LanguageModel):
            """Kimi K2.5 has the same text model, and a forward that begins with embeddings where there are some."""

            __call__ = Embedded.__call__

        class SoftmaxGate(MoEGate):
            """Experts in one group."""

            def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
                """(B, L, D) -> the experts and their weights, (B, L, K) each."""
                scores = mx.softmax((x @ self.weight.T).astype(mx.float32), axis=-1)
                ranked = mx.argpartition(-(scores + self.e_score_correction_bias), kth=self.top_k - 1, axis=-1)
                chosen = ranked[..., : self.top_k]
                weights = mx.take_along_axis(scores, chosen, axis=-1)
                if self.norm_topk_prob:
                    weights = weights / weights.sum(axis=-1, keepdims=True)
                return chosen, weights * self.routed_scaling_factor

        return {**KimiK25.patches(), LanguageModel: TakesEmbeddings, MoEGate: SoftmaxGate}

    last_position_logits = KimiK25.last_position_logits  # type: ignore[assignment]


@register(
    ModelSpec(
        family="youtu_vl",
        model_types=("youtu_vl",),
        notes=("a dropped group of experts is out of the choice, as for kimi_k25 (youtu_vl/language.py:186)",),
    )
)
class YoutuVL(Adapter):
    """Latent attention; windows in the vision tower."""

    input_keys = frozenset({"pixel_values", "spatial_shapes"})
    ignored_inputs = frozenset({"pixel_attention_mask"})

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.youtu_vl.language import MoEGate, YoutuAttention

        return {YoutuAttention: latent_attention(YoutuAttention), MoEGate: dropped_groups(MoEGate)}
