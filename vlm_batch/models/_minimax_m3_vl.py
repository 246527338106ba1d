"""Replacement modules for MiniMax M3 VL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxAttention, MiniMaxM3KVCache

from vlm_batch.adapters.attention import attention, each_row
from vlm_batch.adapters.masks import once
from vlm_batch.adapters.operations import counts_launches
from vlm_batch.arrays import round_up
from vlm_batch.caches.layers import (
    LayerCache,
    Placement,
    UpstreamKind,
    kind_of,
    row_of,
    upstream,
)
from vlm_batch.caches.rows import RowMasks, RowsCache
from vlm_batch.caches.slab import SlabCache, columns_at, put_columns, widened


@upstream(MiniMaxM3KVCache)
class BlocksKind(UpstreamKind):
    """Keys, values and index of the same positions."""

    cache: MiniMaxM3KVCache
    holds_rows = True
    can_trim = True

    def row(self, index: int, *, is_own: bool = True) -> MiniMaxM3KVCache:
        inner = kind_of(self.cache.kv_cache).row(index, is_own=is_own)
        cut = row_of(index, is_own=is_own)
        return _cache(inner, cut(self.cache.index_keys))

    def trim(self, count: int) -> None:
        self.cache.trim(count)

    def most_positions(self, *, is_fixed: bool) -> int:
        return 1

    def batched(self, placement: Placement, num_places: int) -> LayerCache:
        return BlocksSlab(num_places) if placement is Placement.SLAB else RowsCache()


def _cache(inner: KVCache, index: mx.array) -> MiniMaxM3KVCache:
    cache = MiniMaxM3KVCache()
    cache.kv_cache, cache.index_keys, cache.index_offset = inner, index, inner.offset
    return cache


class BlocksSlab(SlabCache):
    """A slab with the index of its positions (S, 1, C, D_i)."""

    most_positions = 1

    def __init__(self, num_places: int) -> None:
        super().__init__(num_places)
        self.index: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        return [*super().arrays(), *([] if self.index is None else [self.index])]

    def put(self, place: int, cache: MiniMaxM3KVCache) -> None:
        super().put(place, cache)
        new = cache.index_keys
        if self.index is None:
            self.index = mx.zeros(
                (self.num_places, new.shape[1], self.capacity, new.shape[3]), new.dtype
            )
        self.index[place : place + 1, :, : cache.offset] = new[:, :, : cache.offset]

    def extract(self, place: int) -> MiniMaxM3KVCache:
        return _cache(
            super().extract(place),
            self._row(self.index, place, 0, self._lengths[place]),
        )

    def reserve(self, keys: mx.array, values: mx.array, tokens: int) -> None:
        super().reserve(keys, values, tokens)
        if self.index is not None and self.index.shape[2] < tokens:
            places, heads, _, width = self.index.shape
            self.index = widened(
                self.index,
                (places, heads, self._capacity(tokens), width),
                self.index.dtype,
            )

    def update_index_and_fetch(self, index_keys: mx.array) -> mx.array:
        """Write one token's index (S, 1, 1, D_i) before its keys and values; return the index."""
        assert (
            self.keys is not None and self.values is not None and self.index is not None
        )
        self.reserve(self.keys, self.values, self._columns(1))
        self.index = put_columns(
            self.index, columns_at(self._positions(), 1), index_keys
        )
        return self.index

    def trace(self, slabs: Any, made: Sequence[mx.array]) -> None:
        *slabs, self.index = slabs
        super().trace(slabs, made)

    def give(self) -> tuple[Any, ...]:
        index, self.index = self.index, None
        return *super().give(), index

    def take(self, slabs: Any, count: int) -> None:
        *slabs, self.index = slabs
        super().take(slabs, count)

    def _change(self, change: Any) -> None:
        super()._change(change)
        self.index = None if self.index is None else change(self.index)

    def _ordered(self, cache: MiniMaxM3KVCache) -> tuple[mx.array, mx.array]:
        return cache.kv_cache.state


#: The keys per picked key from which mlx-vlm gathers those (language.py:1376).
FAR = 64


class RowAttention(MiniMaxAttention):
    """Index heads pick blocks for their groups of heads (arXiv 2606.13392; MiniMaxM3VLIndexer).

    mlx-vlm picks one set for all heads (minimax_m3_vl/language.py:238, :1466-1530).
    """

    def __call__(
        self, x: mx.array, mask: Any = None, cache: Any = None, position_ids: Any = None
    ) -> mx.array:
        if not self.has_sparse_index:
            return super().__call__(x, mask, cache, position_ids)
        queries, keys, *index = self._turned(x, cache.offset)
        parts = (queries, keys, self._heads(x, self.v_proj, self.head_dim), *index)
        if isinstance(cache, BlocksSlab):
            output = self._slab(cache, *parts)
        else:
            output = (self._rows if isinstance(cache, RowsCache) else self._row)(
                cache, *parts
            )
        return self.o_proj(output.swapaxes(1, 2).flatten(-2))

    @property
    def most(self) -> int:
        """The most positions that a token reads."""
        return int(self.sparse_block_size * self.sparse_topk_blocks)

    def _heads(self, x: mx.array, project: Any, width: int) -> mx.array:
        """(B, L, D) -> (B, H, L, width)."""
        return project(x).reshape(*x.shape[:2], -1, width).swapaxes(1, 2)

    def _turned(self, x: mx.array, offset: Any) -> list[mx.array]:
        # Return queries and keys, of the attention and of its index.
        heads = []
        for name, width in (("", self.head_dim), ("index_", self.index_dim)):
            for part in ("q", "k"):
                made = self._heads(x, self[f"{name}{part}_proj"], width)
                norm = f"{name}{part}_norm"
                heads.append(self[norm](made) if norm in self else made)
        if x.shape[1] > 1 or self.index_dim != self.head_dim or counts_launches():
            return [self.rope(part, offset=offset) for part in heads]
        ends = list(accumulate(part.shape[1] for part in heads[:-1]))
        return [
            *mx.split(
                self.rope(mx.concatenate(heads, axis=1), offset=offset), ends, axis=1
            )
        ]

    def _slab(
        self,
        slab: BlocksSlab,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        index_queries: mx.array,
        index_keys: mx.array,
    ) -> mx.array:
        # Attend with one token a row. Columns decide what is done: a graph knows no lengths.
        offset, index = slab.offset, slab.update_index_and_fetch(index_keys)
        keys, values = slab.update_and_fetch(keys, values)
        columns, size = keys.shape[2], self.sparse_block_size
        mask = once(offset, _seen, round_up(columns, size), queries.dtype)
        if columns > self.most:
            scores = index_queries.squeeze(2).astype(mx.float32) @ index.squeeze(
                1
            ).astype(mx.float32).swapaxes(1, 2)
            if columns % size:
                scores = mx.pad(scores, [(0, 0), (0, 0), (0, -columns % size)])
            if not self.sparse_local_blocks:  # a row's last block goes by its scores
                scores = mx.where(mask.squeeze(1) < 0, -math.inf, scores)
            best = self._best(scores, offset)
            if columns < FAR * self.most or columns % size:
                mask = self._mask(best, mask)
            else:
                picked = mx.argpartition(-best, self.sparse_topk_blocks - 1)[
                    ..., : self.sparse_topk_blocks
                ]
                keys, values = (
                    _gathered(part, picked, size) for part in (keys, values)
                )
                mask = _gathered(mask.swapaxes(2, 3), picked, size).swapaxes(2, 3)
            mask = _of_heads(mask, queries, keys)
        return attention(queries, keys, values, slab, self.scale, mask[..., :columns])

    def _rows(self, rows: RowsCache, *parts: mx.array) -> mx.array:
        # Attend with one token a row. Long rows gather what they read; rows do so or not by their own lengths.
        is_far = [length >= FAR * self.most for length in rows.lengths]
        if not any(is_far):
            return self._step(rows, *parts)
        near, far = RowsCache(), RowsCache()
        near.places = [
            None if apart else cache
            for apart, cache in zip(is_far, rows.places, strict=True)
        ]
        far.places = [
            cache if apart else None
            for apart, cache in zip(is_far, rows.places, strict=True)
        ]
        return self._step(near, *parts) + each_row(self._row, far, far, *parts)

    def _step(
        self,
        rows: RowsCache,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        index_queries: mx.array,
        index_keys: mx.array,
    ) -> mx.array:
        # Blocks are picked for all rows at once.
        offset, states = rows.offset, rows.update_and_fetch(keys, values)
        index = [
            cache and cache.update_index_and_fetch(index_keys[place : place + 1])
            for place, cache in enumerate(rows.places)
        ]
        lengths, width = rows.lengths, round_up(rows._idx, self.sparse_block_size)
        if width <= self.most:
            return attention(queries, *states, rows, self.scale)
        outside = mx.array(-math.inf)
        scores = [
            mx.broadcast_to(outside, (1, index_queries.shape[1], 1, width))
            if keys is None
            else mx.pad(
                index_queries[row : row + 1].astype(mx.float32)
                @ keys.astype(mx.float32).swapaxes(2, 3),
                [(0, 0), (0, 0), (0, 0), (0, width - length)],
                constant_values=outside,
            )
            for row, (keys, length) in enumerate(zip(index, lengths, strict=True))
        ]
        best = self._best(mx.concatenate(scores).squeeze(2), offset)
        mask = _of_heads(
            self._mask(best, mx.zeros((1, 1, 1, width), queries.dtype)),
            queries,
            states[0],
        )
        masks = [
            mask[row : row + 1, ..., :length] if length > self.most else None
            for row, length in enumerate(lengths)
        ]
        return attention(queries, *states, rows, self.scale, RowMasks(tuple(masks)))

    def _best(self, scores: mx.array, offset: mx.array) -> mx.array:
        # Return the scores of blocks (B, G, N) from those of positions.
        blocks = mx.unflatten(scores, -1, (-1, self.sparse_block_size))
        is_lse = self.sparse_score_type == "lse"
        best = (
            mx.logsumexp(blocks * self.scale, axis=-1)
            if is_lse
            else blocks.max(axis=-1)
        )
        near, first = self.sparse_local_blocks, self.sparse_init_blocks
        is_set, others = once(
            offset, _set_scores, best.shape[2], self.sparse_block_size, near, first
        )
        return mx.where(is_set, others, best)

    def _mask(self, best: mx.array, seen: mx.array) -> mx.array:
        # Return what each group adds to scores (B, G, 1, C): ``seen`` (B, 1, 1, C) within the best blocks.
        others = best.shape[2] - self.sparse_topk_blocks
        is_picked = best >= mx.partition(best, others)[..., others : others + 1]
        blocks = mx.unflatten(seen.squeeze(2), -1, (-1, self.sparse_block_size))
        mask = mx.where(
            is_picked[..., None], blocks, mx.array(mx.finfo(seen.dtype).min, seen.dtype)
        )
        return mask.flatten(-2)[:, :, None]

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
        if length <= self.most:
            return attention(
                queries, keys, values, single, self.scale, "causal" if new > 1 else None
            )
        here = mx.broadcast_to(mx.arange(length - new, length), (len(queries), new))
        groups, outputs = index_queries.shape[1], []
        for group in range(groups):
            q, k, v, index = (
                part[:, share(part.shape[1], group, groups)]
                for part in (queries, keys, values, index_queries)
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
        # (B, L, picked)
        blocks = self.indexer.select_blocks(index_queries, index_keys, 0, None, here)
        # where those are faster
        for attend in (self._sparse_prefill_attention, self._sparse_decode_attention):
            output = attend(queries, keys, values, blocks, None, here)
            if output is not None:
                return output
        mask = self.indexer.build_block_mask(
            blocks, None, index_keys.shape[2], queries.dtype, here
        )
        return attention(queries, keys, values, single, self.scale, mask)


def _seen(offset: mx.array, columns: int, dtype: mx.Dtype) -> mx.array:
    """Return what hides columns behind the rows' last, to be added to scores: (B, 1, 1, C)."""
    is_seen = mx.arange(columns) <= offset[:, None, None, None]
    return mx.where(is_seen, mx.array(0, dtype), mx.array(mx.finfo(dtype).min, dtype))


def _set_scores(
    offset: mx.array, count: int, size: int, near: int, first: int
) -> tuple[mx.array, mx.array]:
    """Return which blocks (B, 1, N) have mlx-vlm's scores, not their own, and these scores."""
    blocks, own = mx.arange(count), offset[:, None, None] // size
    is_near = blocks > own - near
    scores = mx.where(blocks > own, mx.array(-math.inf), mx.array(1e29))
    return (
        (is_near | (blocks < first), mx.where(is_near, scores, mx.array(1e30)))
        if first
        else (is_near, scores)
    )


def _of_heads(mask: mx.array, queries: Any, keys: Any) -> mx.array:
    """Repeat groups' masks (B, G, 1, C) for heads of keys, or of queries where groups share those."""
    groups, heads = mask.shape[1], keys.shape[1]
    heads = heads if groups <= heads else queries.shape[1]
    return mask if groups in (1, heads) else mx.repeat(mask, heads // groups, axis=1)


def _gathered(states: mx.array, picked: mx.array, size: int) -> mx.array:
    """Return groups' picked blocks (B, G, K) of states (B, H, C, D), for the more of groups and heads."""
    batch, heads, columns, width = states.shape
    if picked.shape[1] < heads:
        picked = mx.repeat(picked, heads // picked.shape[1], axis=1)
    at = picked.reshape(batch, heads, -1, picked.shape[2], 1)
    blocks = states.reshape(batch, heads, 1, columns // size, size * width)
    return mx.take_along_axis(blocks, at, axis=3).reshape(
        batch, -1, picked.shape[2] * size, width
    )


def share(heads: int, group: int, groups: int) -> slice:
    """Return a group's heads; groups may share one."""
    first = group * heads // groups
    return slice(first, first + max(1, heads // groups))


PATCHES: dict[type, type] = {MiniMaxAttention: RowAttention}
