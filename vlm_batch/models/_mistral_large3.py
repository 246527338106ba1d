"""Replacement modules for Mistral Large 3."""

from __future__ import annotations

import mlx.core as mx
from mlx_vlm.models.deepseek_v3.language import (
    DeepseekV3Attention,
    LanguageModel,
    MoEGate,
)
from mlx_vlm.models.kimi_k25.language import LanguageModel as Embedded

from vlm_batch.adapters.latent import latent_attention


class TakesEmbeddings(LanguageModel):
    """Kimi K2.5's forward, which takes embeddings."""

    __call__ = Embedded.__call__


class SoftmaxGate(MoEGate):
    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """(B, L, D) -> experts and weights (B, L, K)."""
        scores = mx.softmax((x @ self.weight.T).astype(mx.float32), axis=-1)
        ranked = mx.argpartition(
            -(scores + self.e_score_correction_bias), kth=self.top_k - 1, axis=-1
        )
        chosen = ranked[..., : self.top_k]
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return chosen, weights * self.routed_scaling_factor


PATCHES: dict[type, type] = {
    DeepseekV3Attention: latent_attention(DeepseekV3Attention),
    LanguageModel: TakesEmbeddings,
    MoEGate: SoftmaxGate,
}
