"""Expert routers as published, where mlx-vlm's differ."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


def dropped_groups(gate_class: type[nn.Module]) -> type[nn.Module]:
    """Subclass DeepSeek-V3's router (``topk_method`` noaux_tc) to exclude dropped groups.

    They score minus infinity in transformers (modeling_deepseek_v3.py:151); mlx-vlm's zeros beat negatives.
    """

    class DroppedGroups(gate_class):  # type: ignore[misc,valid-type]
        def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
            """(B, L, D) -> experts and their weights (B, L, K)"""
            num_dropped = self.n_group - self.topk_group
            if num_dropped <= 0:
                return super().__call__(x)
            scores = mx.sigmoid((x @ self.weight.T).astype(mx.float32))
            # (B, L, G, E / G)
            grouped = mx.unflatten(
                scores + self.e_score_correction_bias, -1, (self.n_group, -1)
            )
            ranks = mx.topk(grouped, 2, axis=-1).sum(axis=-1, keepdims=True)
            dropped = mx.argpartition(ranks, num_dropped - 1, axis=-2)[
                ..., :num_dropped, :
            ]
            choice = mx.put_along_axis(
                grouped, dropped, mx.array(-mx.inf), axis=-2
            ).flatten(-2)
            experts = mx.argpartition(-choice, self.top_k - 1, axis=-1)[
                ..., : self.top_k
            ]
            weights = mx.take_along_axis(scores, experts, axis=-1)
            if self.top_k > 1 and self.norm_topk_prob:
                weights = weights / weights.sum(axis=-1, keepdims=True)
            return experts, weights * self.routed_scaling_factor

    return DroppedGroups
