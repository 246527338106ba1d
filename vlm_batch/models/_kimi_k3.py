"""Replacements of mlx-vlm's modules in Kimi K3."""

from __future__ import annotations

import mlx.core as mx
from mlx_vlm.models.kimi_k3.language import KimiK3MLAAttention

from vlm_batch.adapters.latent import latent_attention


class GatedLatentAttention(latent_attention(KimiK3MLAAttention)):  # type: ignore[misc]
    """Latent attention without positions, whose output a gate may scale."""

    def turned(self, part: mx.array, offset: mx.array) -> mx.array:
        return part

    def projected(self, output: mx.array, x: mx.array) -> mx.array:
        return self.o_proj(output * mx.sigmoid(self.g_proj(x)) if self.use_gate else output)


PATCHES: dict[type, type] = {KimiK3MLAAttention: GatedLatentAttention}
