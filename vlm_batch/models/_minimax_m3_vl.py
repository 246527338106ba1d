"""Replacement modules for MiniMax M3 VL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxAttention, MiniMaxM3KVCache

from vlm_batch.adapters.attention import attention, each_row
from vlm_batch.arrays import round_up
from vlm_batch.caches.layers import UpstreamKind, upstream
from vlm_batch.caches.rows import RowMasks, RowsCache, one_of, row_of


@upstream(MiniMaxM3KVCache)
class BlocksKind(UpstreamKind):
    """Keys, values and index of the same positions."""

    cache: MiniMaxM3KVCache
    holds_rows = True
    can_trim = True

    def row(self, index: int, *, is_own: bool = True) -> MiniMaxM3KVCache:
        taken = MiniMaxM3KVCache()
        taken.kv_cache = one_of(self.cache.kv_cache, index, is_own=is_own)
        taken.index_keys = row_of(index, is_own=is_own)(self.cache.index_keys)
        taken.index_offset = self.cache.index_offset
        return taken

    def trim(self, count: int) -> None:
        self.cache.trim(count)

    def most_positions(self, *, is_fixed: bool) -> int:
        return 1


#: The keys per picked key from which mlx-vlm gathers those (language.py:1376).
FAR = 64


class RowAttention(MiniMaxAttention):
    """Index heads pick blocks for their groups of heads (arXiv 2606.13392; MiniMaxM3VLIndexer).

    mlx-vlm picks one set for all heads (minimax_m3_vl/language.py:238, :1466-1530).
    """

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, position_ids: Any = None) -> mx.array:
        if not self.has_sparse_index:
            return super().__call__(x, mask, cache, position_ids)
        queries, keys, *index = self._turned(x, cache.offset)
        parts = (queries, keys, self._heads(x, self.v_proj, self.head_dim), *index)
        if not isinstance(cache, RowsCache):
            output = self._row(cache, *parts)
        elif cache._idx >= FAR * self.sparse_block_size * self.sparse_topk_blocks:
            output = each_row(self._row, cache, cache, *parts)
        else:
            output = self._step(cache, *parts)
        return self.o_proj(output.swapaxes(1, 2).flatten(-2))

    def _heads(self, x: mx.array, project: Any, width: int) -> mx.array:
        """(B, L, D) -> (B, H, L, width)."""
        return project(x).reshape(*x.shape[:2], -1, width).swapaxes(1, 2)

    def _turned(self, x: mx.array, offset: Any) -> list[mx.array]:
        # Return queries and keys, of the attention and of its index.
        heads = []
        for name, width in (("", self.head_dim), ("index_", self.index_dim)):
            for part in ("q", "k"):
                made, norm = self._heads(x, self[f"{name}{part}_proj"], width), f"{name}{part}_norm"
                heads.append(self[norm](made) if norm in self else made)
        if x.shape[1] > 1 or self.index_dim != self.head_dim:
            return [self.rope(part, offset=offset) for part in heads]
        ends = list(accumulate(part.shape[1] for part in heads[:-1]))
        return [*mx.split(self.rope(mx.concatenate(heads, axis=1), offset=offset), ends, axis=1)]

    def _step(
        self,
        rows: RowsCache,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        index_queries: mx.array,
        index_keys: mx.array,
    ) -> mx.array:
        # Attend with one token a row; blocks are picked for all rows at once.
        states = rows.update_and_fetch(keys, values)
        index = [
            cache and cache.update_index_and_fetch(index_keys[place : place + 1])
            for place, cache in enumerate(rows.places)
        ]
        masks = None
        if rows._idx > self.sparse_block_size * self.sparse_topk_blocks:
            masks = self._masks(rows.lengths, index_queries, index, queries)
        return attention(queries, *states, rows, self.scale, masks)

    def _masks(
        self, lengths: Sequence[int], index_queries: mx.array, index: Sequence[mx.array | None], queries: mx.array
    ) -> RowMasks:
        # Return the rows' masks (1, H, 1, L), to be added.
        size, (rows, groups) = self.sparse_block_size, index_queries.shape[:2]
        width = round_up(max(lengths), size)
        outside = mx.array(-math.inf)
        scores = [
            mx.broadcast_to(outside, (1, groups, 1, width))
            if keys is None
            else mx.pad(
                index_queries[row : row + 1].astype(mx.float32) @ keys.astype(mx.float32).swapaxes(2, 3),
                [(0, 0), (0, 0), (0, 0), (0, width - length)],
                constant_values=outside,
            )
            for row, (keys, length) in enumerate(zip(index, lengths, strict=True))
        ]
        blocks = mx.unflatten(mx.concatenate(scores).squeeze(2) * self.scale, -1, (-1, size))  # (B, G, N, size)
        best = mx.logsumexp(blocks, axis=-1) if self.sparse_score_type == "lse" else blocks.max(axis=-1)
        best = mx.maximum(best, mx.array(self._always(lengths, width // size)))
        picked = mx.argpartition(-best, self.sparse_topk_blocks - 1)[..., : self.sparse_topk_blocks]
        nothing = mx.full(best.shape, -math.inf, queries.dtype)
        seen = mx.put_along_axis(nothing, picked, mx.array(0.0, queries.dtype), axis=-1)
        shape = (rows, groups, queries.shape[1] // groups, width // size, size)
        seen = mx.broadcast_to(seen[:, :, None, :, None], shape).reshape(rows, -1, 1, width)
        return RowMasks(tuple(seen[row : row + 1, ..., :length] for row, length in enumerate(lengths)))

    def _always(self, lengths: Sequence[int], count: int) -> np.ndarray:
        # Return mlx-vlm's scores (B, 1, N) of blocks that are always picked.
        blocks, own = np.arange(count), (np.array(lengths)[:, None] - 1) // self.sparse_block_size
        first = (blocks < self.sparse_init_blocks) & (blocks <= own)
        near = (blocks > own - self.sparse_local_blocks) & (blocks <= own)
        return np.select([near, first], [1e29, 1e30], -np.inf).astype(np.float32)[:, None]

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
