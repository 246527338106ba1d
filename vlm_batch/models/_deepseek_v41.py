"""Replacement modules for DeepSeek-V4.1."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.deepseek_v41 import language as upstream

from vlm_batch.models.deepseek_v41 import Rows

rounded = upstream.fake_quant_fp8_ue8m0


class Attention(upstream.DeepseekV41Attention):
    """Projects all rows at once, attends by rows."""

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        if not isinstance(cache, Rows):
            return super().__call__(x, cache)
        batch = x.shape[0]
        residual = self.q_norm(self.wq_a(rounded(x)))
        queries = (
            self.wq_b(rounded(residual))
            .reshape(batch, 1, self.n_heads, self.head_dim)
            .swapaxes(1, 2)
        )
        output = cache.map(self.see, x, residual, self.rope(queries, cache.offset))
        output = self.rope(output, cache.offset, inverse=True)
        output = output.reshape(batch, self.o_groups, -1, 1, self.head_dim)
        output = self.wo_a(output.transpose(0, 1, 3, 2, 4).flatten(-2))
        return self.wo_b(rounded(output.swapaxes(1, 2).flatten(-2)))

    def see(
        self, row: Any, x: mx.array, residual: mx.array, queries: mx.array
    ) -> mx.array:
        """Attend a row's token (1, 1, D): (1, H, 1, D_head)."""
        window, mask = self._window_part(x, row.offset, row)
        if self.compress_ratio:
            pool, chosen = self._compress_part(x, residual, row.offset, row)
            if pool.shape[1]:
                return self._sparse_attention(queries, window, pool, chosen, mask)
        keys = window[:, None].astype(queries.dtype)
        sinks = self.attn_sink.astype(queries.dtype)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, keys, scale=self.scale, mask=mask, sinks=sinks
        )


PATCHES: dict[type, type] = {upstream.DeepseekV41Attention: Attention}
