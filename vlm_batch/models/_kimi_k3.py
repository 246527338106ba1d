"""Replacement modules for Kimi K3."""

from __future__ import annotations

import mlx.core as mx
from mlx_vlm.models.kimi_k3 import language as upstream
from mlx_vlm.models.kimi_k3.language import KimiK3DeltaAttention, KimiK3MLAAttention

from vlm_batch.adapters.hooks import hook
from vlm_batch.adapters.latent import latent_attention
from vlm_batch.adapters.recurrent import in_order

#: mlx-vlm's function, before a hook replaces it.
COMBINE = upstream._attn_res_combine


class GatedLatentAttention(latent_attention(KimiK3MLAAttention)):  # type: ignore[misc]
    """Latent attention without positions, with an output gate."""

    def turned(self, part: mx.array, offset: mx.array) -> mx.array:
        return part

    def projected(self, output: mx.array, x: mx.array) -> mx.array:
        return self.o_proj(
            output * mx.sigmoid(self.g_proj(x)) if self.use_gate else output
        )


def combine(
    raw: mx.array, inv_rms: mx.array, partial_sum: mx.array, w_eff: mx.array, eps: float
) -> mx.array:
    """Weigh earlier blocks (N, B, L, D) and this one (B, L, D): (B, L, D).

    A softmax along the first axis (language.py:216) gives 2 and 3 rows other bits than 1 on CUDA.
    """
    own = partial_sum.astype(mx.float32)
    scores = [
        (block.astype(mx.float32) @ w_eff) * scale
        for block, scale in zip(raw, inv_rms, strict=True)
    ]
    scores.append((own @ w_eff) * mx.rsqrt((own * own).mean(axis=-1) + eps))
    *weights, last = mx.split(
        mx.softmax(mx.stack(scores, axis=-1), axis=-1, precise=True),
        len(scores),
        axis=-1,
    )
    found = sum(
        (weight * block for weight, block in zip(weights, raw, strict=True)), last * own
    )
    return found.astype(partial_sum.dtype)


HOOKS = {"_attn_res_combine": hook(COMBINE, combine)}

PATCHES: dict[type, type] = {
    KimiK3DeltaAttention: in_order(KimiK3DeltaAttention),
    KimiK3MLAAttention: GatedLatentAttention,
}
