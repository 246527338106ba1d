"""Replacement modules for Qwen4-Exp."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.qwen3_vl import vision
from mlx_vlm.models.qwen4_exp import language as upstream
from mlx_vlm.models.qwen4_exp.vision import VisionModel

from vlm_batch.adapters.attention import attention, each_row
from vlm_batch.adapters.deepstack import HostPositions
from vlm_batch.adapters.hooks import current
from vlm_batch.adapters.modules import under
from vlm_batch.adapters.recurrent import in_order
from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.caches.indexed import IndexedCache
from vlm_batch.caches.rows import DraftedRows, RowMasks, RowsCache


class RowAttention(upstream.Qwen4ExpAttention):
    """Decode steps pick blocks for all rows at once."""

    def __call__(
        self,
        x: mx.array,
        mask: Any = None,
        cache: Any = None,
        position_ids: Any = None,
        embeddings: Any = None,
    ) -> mx.array:
        if not isinstance(cache, RowsCache):
            return super().__call__(x, mask, cache, position_ids, embeddings)
        if isinstance(cache, DraftedRows) or current().is_fixed:
            return each_row(
                super().__call__, cache, x, mask, cache, position_ids, embeddings
            )
        masks = self._pick(x, cache, position_ids)
        projected = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        queries, keys, values, gate, _ = self._prepare_projected_qkv(
            *projected, cache, position_ids, embeddings, None
        )
        output = attention(queries, keys, values, cache, self.scale, masks)
        return self.o_proj(output.swapaxes(1, 2).flatten(-2) * mx.sigmoid(gate))

    def _pick(
        self, x: mx.array, cache: RowsCache, position_ids: mx.array
    ) -> RowMasks | None:
        # Add the tokens to the rows' indexes; return masks (1, 1, 1, L), to be added, for rows with blocks to choose from.
        indexer, far = self.indexer, {}
        rows = {
            place: single
            for place, single in enumerate(cache.places)
            if single is not None
        }
        both = indexer.index_qk_proj(x).reshape(len(x), 1, -1, indexer.head_dim)
        queries, keys = mx.split(both, [indexer.n_heads], axis=2)
        for place, single in rows.items():
            single.update_indexer(
                keys[place, :, 0][None], position_ids[place : place + 1]
            )
            if single.index_offset // indexer.compress_ratio > indexer.block_topk:
                far[place] = single
        if not far:
            return None
        self._block(list(far.values()))
        queries = indexer._apply_rope(
            indexer.q_layernorm(queries).swapaxes(1, 2), position_ids
        ).astype(mx.float32)
        counts = {
            place: single.index_offset // indexer.compress_ratio
            for place, single in far.items()
        }
        best = self._scores(queries, far, max(counts.values()))  # (places, N)
        ahead = np.arange(best.shape[1] + 1) >= np.array(list(counts.values()))[:, None]
        if ahead[:, :-1].any():
            best = mx.where(mx.array(ahead[:, :-1]), -mx.inf, best)
        picked = mx.argpartition(best, -indexer.block_topk, axis=-1)[
            :, -indexer.block_topk :
        ]
        blocks = mx.array(np.where(ahead, 0, -np.inf), x.dtype)
        blocks = mx.put_along_axis(blocks, picked, mx.array(0, x.dtype), axis=-1)
        seen = mx.repeat(blocks, indexer.compress_ratio, axis=-1)[:, None, None, None]
        masks: list[mx.array | None] = [None] * len(x)
        for index, (place, single) in enumerate(far.items()):
            masks[place] = seen[index, ..., : single.index_offset]
        return RowMasks(tuple(masks))

    def _block(self, rows: Sequence[IndexedCache]) -> None:
        # Add what is missing to the rows' keys of whole blocks.
        size, parts, places, counts = self.indexer.compress_ratio, [], [], []
        for row in rows:
            first = 0 if row.index_block_keys is None else row.index_block_keys.shape[2]
            tokens = slice(first * size, row.index_offset // size * size)
            counts.append((tokens.stop - tokens.start) // size)
            if counts[-1]:
                keys, positions = row.index
                # (n, size, D)
                parts.append(mx.unflatten(keys[0, tokens], 0, (-1, size)))
                # (3, n, 1)
                places.append(positions[..., tokens][..., ::size].swapaxes(1, 2))
        if not parts:
            return
        means = (
            mx.concatenate(parts).astype(mx.float32).mean(axis=1).astype(parts[0].dtype)
        )
        means = self.indexer.k_layernorm(means)[:, None, None]
        # (N, 1, 1, D)
        made, begin = self.indexer._apply_rope(means, mx.concatenate(places, axis=1)), 0
        for row, count in zip(rows, counts, strict=True):
            if count:
                new, begin = made[begin : begin + count].swapaxes(0, 2), begin + count
                old = row.index_block_keys
                row.index_block_keys = (
                    new if old is None else mx.concatenate([old, new], axis=2)
                )
                row.index_block_ratio = size

    def _scores(
        self, queries: mx.array, rows: Mapping[int, IndexedCache], count: int
    ) -> mx.array:
        # Return scores (rows, count) of blocks, by queries (B, H, 1, D).
        products = []
        for place, row in rows.items():
            keys = row.index_block_keys
            assert keys is not None
            product = queries[place : place + 1] @ keys.astype(mx.float32).swapaxes(
                2, 3
            )
            products.append(
                mx.pad(product, [(0, 0), (0, 0), (0, 0), (0, count - keys.shape[2])])
            )
        scores = mx.maximum(mx.concatenate(products), 0).sum(axis=1).squeeze(1)
        return scores / math.sqrt(self.indexer.head_dim)


PATCHES: dict[type, type] = {
    upstream.Qwen4ExpAttention: RowAttention,
    upstream.Qwen4ExpGatedDeltaNet: in_order(
        upstream.Qwen4ExpGatedDeltaNet, ("in_proj_qkv", "in_proj_z"), "out_proj"
    ),
    upstream.Qwen4ExpPLELayer: in_order(upstream.Qwen4ExpPLELayer),
    vision.Attention: attend_pictures(vision.Attention),
    vision.PatchEmbed: embed_by_product(vision.PatchEmbed),
    VisionModel: under(HostPositions)(VisionModel),
}
