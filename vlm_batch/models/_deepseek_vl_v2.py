"""Replacement modules for DeepSeek-VL2."""

from __future__ import annotations

import mlx.core as mx
from mlx_vlm.models.deepseek_vl_v2.language import MoEGate


class RowGate(MoEGate):
    """Chooses by score and bias, weighs by score (modeling_deepseek.py, MoEGate).

    mlx-vlm mixes rows and drops the bias (language.py:336-366).
    """

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """(B, L, D) -> experts and weights (B, L, K)."""
        if self.topk_method != "noaux_tc":
            return super().__call__(x)
        gates = x @ self.weight.T
        scores = (
            mx.sigmoid(gates)
            if self.scoring_func == "sigmoid"
            else mx.softmax(gates, -1, precise=True)
        )
        choice = scores + self.e_score_correction_bias
        if self.topk_group < self.n_group:
            grouped = mx.unflatten(choice, -1, (self.n_group, -1))
            ranks = mx.topk(grouped, 2, axis=-1).sum(axis=-1, keepdims=True)
            dropped = mx.argpartition(
                ranks, self.n_group - self.topk_group - 1, axis=-2
            )
            dropped = dropped[..., : self.n_group - self.topk_group, :]
            choice = mx.put_along_axis(
                grouped, dropped, mx.array(-mx.inf), axis=-2
            ).flatten(-2)
        experts = mx.argpartition(-choice, self.top_k - 1, axis=-1)[..., : self.top_k]
        return experts, mx.take_along_axis(
            scores, experts, axis=-1
        ) * self.routed_scaling_factor


PATCHES: dict[type, type] = {MoEGate: RowGate}
