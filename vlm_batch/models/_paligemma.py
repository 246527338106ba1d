"""Replacement modules for PaliGemma."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.paligemma.language import Attention

from vlm_batch.adapters.hooks import current
from vlm_batch.caches.drafted import attend_drafted
from vlm_batch.caches.rows import RowStates, attend_rows
from vlm_batch.caches.slab import DraftedSlab


class RowAttention(Attention):
    """Gemma 2's capped attention, also by rows (paligemma/language.py:110-152)."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if self.model_type == "gemma" or cache is None:
            return super().__call__(x, mask, cache)
        heads = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
        queries, keys, values = (
            project(x).reshape(*x.shape[:2], number, -1).swapaxes(1, 2)
            for project, number in zip(
                (self.q_proj, self.k_proj, self.v_proj), heads, strict=True
            )
        )
        queries = self.rope(queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
        if isinstance(cache, DraftedSlab):
            fixed = current().is_fixed
            output = attend_drafted(
                self.capped,
                queries,
                keys,
                values,
                cache,
                self.scale,
                mask,
                None,
                is_fixed=fixed,
            )
        elif isinstance(keys, RowStates):
            output = attend_rows(
                self.capped, queries, keys, values, self.scale, mask, None
            )
        else:
            output = self.capped(
                queries, keys, values, cache, scale=self.scale, mask=mask
            )
        return self.o_proj(output.swapaxes(1, 2).flatten(-2))

    def capped(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        *,
        scale: float,
        mask: Any,
    ) -> mx.array:
        """(B, H, L, D) over (B, H_kv, T, D), capped by tanh in float32."""
        groups = (queries.shape[0], self.n_kv_heads, self.repeats, *queries.shape[2:])
        scores = (queries.reshape(groups) * scale).astype(mx.float32) @ keys[
            :, :, None
        ].astype(mx.float32).swapaxes(-1, -2)  # (B, H_kv, H / H_kv, L, T)
        if (cap := self.attn_logit_softcapping) is not None:
            scores = mx.tanh(scores / cap) * cap
        if isinstance(mask, mx.array):
            visible = mask[:, :, None] if mask.ndim == 4 else mask
            scores = mx.where(visible, scores, mx.finfo(scores.dtype).min)
        weights = mx.softmax(scores, axis=-1, precise=True).astype(queries.dtype)
        return (weights @ values[:, :, None]).reshape(
            *queries.shape[:3], values.shape[-1]
        )


PATCHES: dict[type, type] = {Attention: RowAttention}
