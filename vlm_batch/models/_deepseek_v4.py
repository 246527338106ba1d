"""Replacement modules for DeepSeek-V4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.deepseek_v4 import language as upstream

from vlm_batch.adapters.attention import attention, each_row
from vlm_batch.adapters.hooks import current
from vlm_batch.adapters.rotary import rotate_step, shared, shares_angles
from vlm_batch.caches.pooled import PoolCache
from vlm_batch.caches.rows import DraftedRows, RowsCache
from vlm_batch.caches.whole import WholeCache


class RoPE(upstream.DeepseekV4RoPE):
    def __call__(self, x: mx.array, offset: Any = 0, inverse: bool = False) -> mx.array:
        if self.freq_scale != 1 or not shares_angles(x, offset):
            return super().__call__(x, offset, inverse)
        known: dict[Any, mx.array] = self.__dict__.setdefault("_known", {})
        key = x.shape[-1], inverse
        if key not in known:
            known[key] = shared(mx.reciprocal(self._get_freqs(*key)))
        return rotate_step(x, known[key], offset, is_traditional=True)


class Compressor(upstream.Compressor):
    """Pools windows of tokens across chunks."""

    def project(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """(B, L, D) -> value and gate (B, L, W)."""
        return self.wkv(x), self.wgate(x)

    def pool(
        self, value: mx.array, gate: mx.array, cache: PoolCache
    ) -> mx.array | None:
        """Add a row's tokens (1, L, W); return all pools (1, P, D), if any."""
        has_before = bool(cache.before)
        values, gates = cache.fill(value, gate)
        if values.shape[1]:
            new = self.norm(
                self.mix(values, gates + self.ape, has_before).astype(value.dtype)
            )
            cache.append(
                self.rope(
                    new[:, None], offset=cache.offset * self.compress_ratio
                ).squeeze(1)
            )
        return cache.pooled

    def mix(self, values: mx.array, gates: mx.array, has_before: bool) -> mx.array:
        """Pool tokens (1, N, R, W) by the gates' softmax: (1, N, D), float32.

        With overlap, a window's second half of channels mixes with the previous one's first.
        """
        if self.overlap:
            values, gates = (
                mx.concatenate([before, own], axis=2)
                for before, own in (
                    self.halves(values, 0, has_before),
                    self.halves(gates, -mx.inf, has_before),
                )
            )
        return (values * mx.softmax(gates.astype(mx.float32), axis=2)).sum(axis=2)

    def halves(
        self, windows: mx.array, missing: float, has_before: bool
    ) -> tuple[mx.array, mx.array]:
        first, second = mx.split(windows, 2, axis=-1)
        if has_before:
            return first[:, :-1], second[:, 1:]
        none = mx.full((1, 1, *first.shape[2:]), missing, first.dtype)
        return mx.concatenate([none, first[:, :-1]], axis=1), second


class Indexer(upstream.Indexer):
    def prepare(
        self, x: mx.array, residual: mx.array, rope: Any, offset: Any
    ) -> tuple[mx.array, ...]:
        """Return queries (B, H, L, D), weights (B, L, H), value and gate."""
        batch, length, _ = x.shape
        queries = (
            self.wq_b(residual)
            .reshape(batch, length, self.n_heads, self.head_dim)
            .swapaxes(1, 2)
        )
        weights = self.weights_proj(x).astype(mx.float32) * self.n_heads**-0.5
        return rope(queries, offset), weights, *self.compressor.project(x)

    def choose(
        self,
        queries: mx.array,
        weights: mx.array,
        pooled: mx.array,
        seen: mx.array | None,
    ) -> mx.array:
        """Return each token's best pools, (1, L, K)."""
        keys = pooled[:, None].swapaxes(-1, -2).astype(mx.float32)
        # (1, H, L, P)
        scores = mx.maximum(queries.astype(mx.float32) @ keys, 0) * self.scale
        scores = (scores * weights.swapaxes(-1, -2)[..., None]).sum(axis=1)
        if seen is not None:
            scores = mx.where(seen[None], scores, mx.finfo(scores.dtype).min)
        return mx.argpartition(-scores, kth=self.index_topk - 1, axis=-1)[
            ..., : self.index_topk
        ]

    def choose_each(
        self, queries: mx.array, weights: mx.array, pools: Mapping[int, mx.array]
    ) -> dict[int, mx.array]:
        """Return places' best pools (K,) in a step."""
        places, most = list(pools), max(keys.shape[1] for keys in pools.values())
        products = [
            mx.pad(
                queries[place : place + 1].astype(mx.float32)
                @ keys[:, None].swapaxes(-1, -2).astype(mx.float32),
                [(0, 0), (0, 0), (0, 0), (0, most - keys.shape[1])],
            )
            for place, keys in pools.items()
        ]
        # (places, H, 1, P)
        scores = mx.maximum(mx.concatenate(products), 0) * self.scale
        own = weights if len(places) == len(weights) else weights[mx.array(places)]
        scores = (scores * own.swapaxes(-1, -2)[..., None]).sum(axis=1).squeeze(1)
        lacks = (
            np.arange(most)
            >= np.array([keys.shape[1] for keys in pools.values()])[:, None]
        )
        if lacks.any():
            scores = mx.where(mx.array(lacks), mx.finfo(scores.dtype).min, scores)
        best = mx.argpartition(-scores, kth=self.index_topk - 1, axis=-1)[
            ..., : self.index_topk
        ]
        return dict(
            zip(
                places,
                (one.squeeze(0) for one in mx.split(best, len(places))),
                strict=True,
            )
        )


class Attention(upstream.LocalAttention):
    """Steps project and attend all rows at once."""

    def __call__(
        self, x: mx.array, mask: Any = None, cache: Any = None, **unread: Any
    ) -> mx.array:
        batch, length, _ = x.shape
        offset = cache.offset
        residual = self.q_norm(self.wq_a(x))
        queries = self.wq_b(residual).reshape(
            batch, length, self.n_heads, self.head_dim
        )
        queries = mx.fast.rms_norm(queries, None, self.config.rms_norm_eps).swapaxes(
            1, 2
        )
        keys = self.kv_norm(self.wkv(x))[:, None]  # (B, 1, L, D_head), the values too
        parts = (
            self.rope(queries, offset),
            self.rope(keys, offset),
            *self.prepare(x, residual, offset),
        )
        output = self.rope(self.attend(parts, mask, cache), offset, inverse=True)
        output = output.reshape(batch, self.o_groups, -1, length, self.head_dim)
        output = self.wo_a(output.transpose(0, 1, 3, 2, 4).flatten(-2))
        return self.wo_b(output.swapaxes(1, 2).flatten(-2))

    def prepare(
        self, x: mx.array, residual: mx.array, offset: Any
    ) -> tuple[mx.array, ...]:
        return ()

    def attend(self, parts: tuple[mx.array, ...], mask: Any, cache: Any) -> mx.array:
        """(B, H, L, D_head); zeros for empty places."""
        if not isinstance(cache, RowsCache):
            return self.see(parts, mask, cache)
        if not (isinstance(cache, DraftedRows) or current().is_fixed):
            return self.step(
                parts,
                {
                    place: row
                    for place, row in enumerate(cache.places)
                    if row is not None
                },
            )
        return each_row(
            lambda row, *own: self.see(own, None, row), cache, cache, *parts
        )

    def see(self, parts: tuple[mx.array, ...], mask: Any, cache: Any) -> mx.array:
        """Attend one row, or a slab: (B, H, L, D_head)."""
        keys = self.window(parts[1], cache)
        return self.over(parts[0], keys, mask, cache)

    def step(self, parts: tuple[mx.array, ...], rows: Mapping[int, Any]) -> mx.array:
        """Attend in one call: (B, H, 1, D_head)."""
        queries, count = parts[0], len(parts[0])
        seen = self.of_rows(parts, rows)
        lengths = [
            sum(keys.shape[2] for keys in seen.get(place, ())) for place in range(count)
        ]
        most, width = max(lengths), queries.shape[-1]
        missing = mx.zeros((1, 1, most, width), queries.dtype)
        keys = mx.concatenate(
            [
                mx.concatenate(
                    [*seen.get(place, ()), missing[:, :, : most - length]], axis=2
                )
                for place, length in enumerate(lengths)
            ]
        )
        mask = None
        if min(lengths) < most:  # an empty place attends to zeros
            hidden = (np.arange(most) >= np.array(lengths)[:, None]) & np.array(
                lengths, bool
            )[:, None]
            mask = mx.array(np.where(hidden, -np.inf, 0)[:, None, None], queries.dtype)
        return self.over(queries, keys, mask, None)

    def of_rows(
        self, parts: tuple[mx.array, ...], rows: Mapping[int, Any]
    ) -> dict[int, list[mx.array]]:
        """Add a step's tokens; return each place's keys (1, 1, K, D_head)."""
        keys = mx.split(parts[1], len(parts[1]))
        return {place: [self.window(keys[place], row)] for place, row in rows.items()}

    def window(self, keys: mx.array, cache: Any) -> mx.array:
        """Add keys (B, 1, L, D_head); return the window's."""
        return cache.update_and_fetch(keys, mx.zeros((*keys.shape[:3], 0), keys.dtype))[
            0
        ]

    def over(
        self, queries: mx.array, keys: mx.array, mask: Any, cache: Any
    ) -> mx.array:
        sinks = self.attn_sink.astype(queries.dtype)
        return attention(queries, keys, keys, cache, self.scale, mask, sinks)


class PooledAttention(Attention, upstream.CompressedAttention):
    def prepare(
        self, x: mx.array, residual: mx.array, offset: Any
    ) -> tuple[mx.array, ...]:
        return self.compressor.project(x)

    def of_rows(
        self, parts: tuple[mx.array, ...], rows: Mapping[int, Any]
    ) -> dict[int, list[mx.array]]:
        found = {}
        keys, value, gate = (mx.split(part, len(part)) for part in parts[1:4])
        for place, row in rows.items():
            window, pools, *_ = row.caches
            pooled = self.compressor.pool(value[place], gate[place], pools)
            found[place] = [self.window(keys[place], window)]
            if pooled is not None:
                found[place].append(pooled[:, None])
        return found

    def see(self, parts: tuple[mx.array, ...], mask: Any, cache: Any) -> mx.array:
        queries, keys, value, gate = parts
        window, pools = cache.caches
        length, offset = queries.shape[2], window.offset
        keys = self.window(keys, window)
        pooled = self.compressor.pool(value, gate, pools)
        return self.over_both(
            queries, keys, pooled, mask, pools.visible(length, offset), window
        )

    def over_both(
        self,
        queries: mx.array,
        keys: mx.array,
        pooled: mx.array | None,
        mask: mx.array | None,
        seen: mx.array | None,
        window: Any,
    ) -> mx.array:
        """Attend to keys (1, 1, K, D_head) and pools (1, P, D_head)."""
        if pooled is None:
            return self.over(queries, keys, mask, window)
        both = mx.concatenate([keys, pooled[:, None]], axis=2)
        if mask is not None:
            count, length = pooled.shape[1], queries.shape[2]
            seen = mx.ones((length, count), mx.bool_) if seen is None else seen
            mask = mx.concatenate(
                [mask, mx.broadcast_to(seen, (*mask.shape[:-1], count))], axis=-1
            )
        return self.over(queries, both, mask, window)


class SparseAttention(PooledAttention, upstream.SparseCompressedAttention):
    def prepare(
        self, x: mx.array, residual: mx.array, offset: Any
    ) -> tuple[mx.array, ...]:
        return *self.compressor.project(x), *self.indexer.prepare(
            x, residual, self.rope, offset
        )

    def of_rows(
        self, parts: tuple[mx.array, ...], rows: Mapping[int, Any]
    ) -> dict[int, list[mx.array]]:
        found, marks = super().of_rows(parts, rows), {}
        value, gate = (mx.split(part, len(part)) for part in parts[6:])
        for place, row in rows.items():
            own = self.indexer.compressor.pool(value[place], gate[place], row.caches[2])
            if own is not None and own.shape[1] > self.indexer.index_topk:
                marks[place] = own
        for place, chosen in (
            self.indexer.choose_each(parts[4], parts[5], marks) if marks else {}
        ).items():
            keys, pooled = found[place]
            found[place] = [keys, mx.take(pooled, chosen, axis=2)]
        return found

    def see(self, parts: tuple[mx.array, ...], mask: Any, cache: Any) -> mx.array:
        queries, keys, value, gate, asked, weights, index_value, index_gate = parts
        window, pools, index = cache.caches
        length, offset = queries.shape[2], window.offset
        keys = self.window(keys, window)
        pooled = self.compressor.pool(value, gate, pools)
        marks = self.indexer.compressor.pool(index_value, index_gate, index)
        seen = pools.visible(length, offset)
        if pooled is None or pooled.shape[1] <= self.indexer.index_topk:
            return self.over_both(queries, keys, pooled, mask, seen, window)
        chosen = self.indexer.choose(asked, weights, marks, seen)
        in_sight = (
            None
            if seen is None
            else mx.take_along_axis(seen[None], chosen, axis=2)[:, None]
        )
        sinks = self.attn_sink.astype(queries.dtype)
        return upstream._sparse_pooled_attention(
            queries, keys, pooled, chosen, mask, in_sight, self.scale, sinks
        )


class Trunk(upstream.DeepseekV4Model):
    """mlx-vlm's on one machine, without read-backs."""

    def __call__(
        self, ids: mx.array, inputs_embeds: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        """(B, L) ids -> (B, L, D)."""
        embeds = self.embed_tokens(ids) if inputs_embeds is None else inputs_embeds
        batch, length, width = embeds.shape
        streams = mx.contiguous(
            mx.broadcast_to(
                embeds[:, :, None], (batch, length, self.args.hc_mult, width)
            )
        )
        mask = None if length == 1 else self.mask(ids, cache[0])
        for layer, own in zip(self.layers, cache, strict=True):
            if length == 1:
                is_apart = isinstance(own, (RowsCache, WholeCache))
                mask = (
                    None
                    if is_apart
                    else own.make_mask(1, window_size=self.args.sliding_window)
                )
            streams = layer(streams, mask, own, ids)
        return self.norm(self.hc_head(streams[:, -1:]))

    def mask(self, ids: mx.array, cache: Any) -> mx.array:
        """Return a chunk's mask (L, K), bool; pictures attend both ways."""
        window = cache.caches[0] if isinstance(cache, WholeCache) else cache
        size, length = self.args.sliding_window, ids.shape[1]
        mask = window.make_mask(length, window_size=size, return_array=True)
        if not self.args.vision_n_layers or int(ids.max()) < self.vocab_size:
            return mask
        most = self.args.vision_max_n_token
        inside = upstream.create_image_attention_mask(ids, self.vocab_size, size, most)[
            0, 0
        ]
        return mx.concatenate([mask[:, :-length], inside], axis=-1)


PATCHES: dict[type, type] = {
    upstream.DeepseekV4RoPE: RoPE,
    upstream.Compressor: Compressor,
    upstream.Indexer: Indexer,
    upstream.LocalAttention: Attention,
    upstream.CompressedAttention: PooledAttention,
    upstream.SparseCompressedAttention: SparseAttention,
    upstream.DeepseekV4Model: Trunk,
}
