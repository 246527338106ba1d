"""Latent attention (DeepSeek-V2, arXiv:2405.04434) over single-row caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from vlm_batch.caches.drafted import each_position
from vlm_batch.caches.rows import RowsCache, attend_rows
from vlm_batch.caches.slab import DraftedSlab


def attend_latent(
    queries: mx.array,
    latents: mx.array,
    rotated: mx.array,
    cache: Any,
    scale: float,
    mask: mx.array | None,
) -> mx.array:
    """Attend with queries (1, H, 1, R + D_rope) over latents (1, 1, L, R) and rotated keys."""
    query, turned = mx.split(queries, [latents.shape[-1]], axis=-1)
    # (1, H, 1, L), added to the score
    scores = (turned * scale) @ rotated.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    return mx.fast.scaled_dot_product_attention(
        query, latents, latents, scale=scale, mask=scores
    )


def latent_attention(parent: type) -> type:
    """Subclass an attention over latents (B, 1, L, R) to take single-row caches."""

    class RowLatentAttention(parent):  # type: ignore[misc]
        """Attend row by row: mlx-vlm needs one array from the cache.

        See deepseek_v3/language.py:120, youtu_vl/language.py:119, kimi_k3/language.py:589.
        """

        def __call__(
            self, x: mx.array, mask: Any = None, cache: Any = None
        ) -> mx.array:
            if isinstance(cache, DraftedSlab):
                return each_position(super().__call__, x, mask, cache)
            if not isinstance(cache, RowsCache):
                return super().__call__(x, mask, cache)
            batch = x.shape[0]
            wide = (
                self.q_proj(x)
                if self.q_lora_rank is None
                else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
            )
            queries = wide.reshape(batch, 1, self.num_heads, self.q_head_dim).swapaxes(
                1, 2
            )
            queries, turned = mx.split(queries, [self.qk_nope_head_dim], axis=-1)
            latent, rotated = mx.split(
                self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1
            )
            # (B, 1, 1, R), (B, 1, 1, D_rope)
            latent, rotated = self.kv_a_layernorm(latent)[:, None], rotated[:, None]
            turned, rotated = (
                self.turned(part, cache.offset) for part in (turned, rotated)
            )
            latents, keys = cache.update_and_fetch(latent, rotated)
            queries = mx.concatenate([self.embed_q(queries), turned], axis=-1)
            output = attend_rows(
                attend_latent, queries, latents, keys, self.scale, None, None
            )
            return self.projected(
                self.unembed_out(output).swapaxes(1, 2).flatten(-2), x
            )

        def turned(self, part: mx.array, offset: mx.array) -> mx.array:
            """Rotate queries or keys (B, H, 1, D_rope) by positions (B,)."""
            return self.rope(part, offset)

        def projected(self, output: mx.array, x: mx.array) -> mx.array:
            """Project the output (B, 1, H * D_head) for input x."""
            return self.o_proj(output)

    return RowLatentAttention
