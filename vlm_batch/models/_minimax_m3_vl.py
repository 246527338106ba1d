"""Replacement modules for MiniMax M3 VL."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxAttention

from vlm_batch.adapters.attention import attention, each_row
from vlm_batch.caches.rows import RowsCache


class RowAttention(MiniMaxAttention):
    """Index heads pick blocks for their groups of heads (arXiv 2606.13392; MiniMaxM3VLIndexer).

    mlx-vlm picks one set for all heads (minimax_m3_vl/language.py:238, :1466-1530).
    """

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, position_ids: Any = None) -> mx.array:
        if not self.has_sparse_index:
            return super().__call__(x, mask, cache, position_ids)
        parts = (
            self._turned(x, cache, self.q_proj, "q_norm"),
            self._turned(x, cache, self.k_proj, "k_norm"),
            self._heads(x, self.v_proj, self.head_dim),
            self._turned(x, cache, self.index_q_proj, "index_q_norm", self.index_dim),
            self._turned(x, cache, self.index_k_proj, "index_k_norm", self.index_dim),
        )
        output = each_row(self._row, cache, cache, *parts) if isinstance(cache, RowsCache) else self._row(cache, *parts)
        return self.o_proj(output.swapaxes(1, 2).flatten(-2))

    def _heads(self, x: mx.array, project: Any, width: int) -> mx.array:
        """(B, L, D) -> (B, H, L, width)."""
        return project(x).reshape(*x.shape[:2], -1, width).swapaxes(1, 2)

    def _turned(self, x: mx.array, cache: Any, project: Any, norm: str, width: int | None = None) -> mx.array:
        heads = self._heads(x, project, width or self.head_dim)
        normed = self[norm](heads) if norm in self else heads
        return self.rope(normed, offset=cache.offset)

    def _row(
        self,
        single: Any,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        index_queries: mx.array,
        index_keys: mx.array,
    ) -> mx.array:
        """Attend over indexed blocks: (B, H, L, D)."""
        keys, values = single.update_and_fetch(keys, values)
        index_keys = single.update_index_and_fetch(index_keys)
        length, new = index_keys.shape[2], queries.shape[2]
        if length <= self.sparse_block_size * self.sparse_topk_blocks:
            return attention(queries, keys, values, single, self.scale, "causal" if new > 1 else None)
        here = mx.broadcast_to(mx.arange(length - new, length), (len(queries), new))
        groups, outputs = index_queries.shape[1], []
        for group in range(groups):
            q, k, v, index = (
                part[:, share(part.shape[1], group, groups)] for part in (queries, keys, values, index_queries)
            )
            outputs.append(self._over_blocks(single, q, k, v, index, index_keys, here))
        return mx.concatenate(outputs, axis=1)

    def _over_blocks(
        self,
        single: Any,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        index_queries: mx.array,
        index_keys: mx.array,
        here: mx.array,
    ) -> mx.array:
        blocks = self.indexer.select_blocks(index_queries, index_keys, 0, None, here)  # (B, L, picked)
        for attend in (self._sparse_prefill_attention, self._sparse_decode_attention):  # where those are faster
            output = attend(queries, keys, values, blocks, None, here)
            if output is not None:
                return output
        mask = self.indexer.build_block_mask(blocks, None, index_keys.shape[2], queries.dtype, here)
        return attention(queries, keys, values, single, self.scale, mask)


def share(heads: int, group: int, groups: int) -> slice:
    """Return a group's heads; groups may share one."""
    first = group * heads // groups
    return slice(first, first + max(1, heads // groups))


PATCHES: dict[type, type] = {MiniMaxAttention: RowAttention}
