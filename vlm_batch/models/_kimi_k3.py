"""Replacements of mlx-vlm's modules in Kimi K3."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.kimi_k3.language import KimiK3MLAAttention

from vlm_batch.adapters.latent import attend_latent
from vlm_batch.caches.rows import RowsCache, attend_rows


class RowLatentAttention(KimiK3MLAAttention):
    """Upstream multiplies what the cache returns (kimi_k3/language.py:589), which must then be one array; rows
    that keep their own caches are multiplied one at a time."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """(B, L, D) -> (B, L, D)"""
        if not isinstance(cache, RowsCache):
            return super().__call__(x, mask, cache)
        wide = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        queries = wide.reshape(len(x), 1, self.num_heads, self.q_head_dim).swapaxes(1, 2)  # (B, H, 1, D_head)
        latent, shared = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        latents, keys = cache.update_and_fetch(self.kv_a_layernorm(latent)[:, None], shared[:, None])
        queries, extra = mx.split(queries, [self.qk_nope_head_dim], axis=-1)
        queries = mx.concatenate([self.embed_q(queries), extra], axis=-1)
        output = attend_rows(attend_latent, queries, latents, keys, self.scale, None, None)
        output = self.unembed_out(output).swapaxes(1, 2).flatten(-2)
        return self.o_proj(output * mx.sigmoid(self.g_proj(x)) if self.use_gate else output)


PATCHES: dict[type, type] = {KimiK3MLAAttention: RowLatentAttention}
