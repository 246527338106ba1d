"""Replacement modules for GLM-5-Next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.glm5_next.language import Glm5NextAttention, Glm5NextLinearAttention
from mlx_vlm.models.glm5_next.vision import VisionPatchEmbed

from vlm_batch.adapters.attention import attention, each_row
from vlm_batch.adapters.hooks import current
from vlm_batch.adapters.recurrent import in_order
from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.caches.rows import DraftedRows, RowsCache


@dataclass(frozen=True)
class Picked:
    """Positions that rows attend to in a step; rows in no ``places`` attend to all."""

    places: list[int] = field(default_factory=list)
    positions: list[mx.array] = field(default_factory=list)  # (W,)
    mask: mx.array | None = None  # (places, 1, 1, W)


class RowAttention(Glm5NextAttention):
    """Decode steps pick pools for all rows at once, and gather each row's."""

    def __call__(
        self,
        x: mx.array,
        padding_mask: Any = None,
        cache: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if not isinstance(cache, RowsCache):
            return super().__call__(x, padding_mask, cache, *rest, **named)
        if (
            isinstance(cache, DraftedRows)
            or current().is_fixed
            or not self._picks_together(*rest)
        ):
            return each_row(
                super().__call__, cache, x, padding_mask, cache, *rest, **named
            )
        rows = {
            place: single.caches
            for place, single in enumerate(cache.places)
            if single is not None
        }
        compressed, new = mx.split(self.qkv_a_proj(x), (self.q_lora_rank,), axis=-1)
        compressed = self.q_a_layernorm(compressed)
        new = self.kv_a_layernorm(new)[:, None]
        latents = {
            place: appended(parts[0], new[place : place + 1])
            for place, parts in rows.items()
        }
        picked = rest[0] if self.indexer is None else self._pick(x, compressed, rows)
        queries = (
            self.q_b_proj(compressed)
            .reshape(len(x), 1, self.num_heads, -1)
            .swapaxes(1, 2)
        )
        # (B, H, 1, D)
        output = self.unembed_out(self._over(self.embed_q(queries), latents, picked))
        return self.o_proj(output.swapaxes(1, 2).flatten(-2)), picked

    def _picks_together(self, before: Any = None, *_: Any) -> bool:
        # Whether ``_pick`` takes the part of a step; a layer without an indexer goes by the layer before.
        if self.indexer is None:
            return isinstance(before, Picked)
        return self.indexer.always_select_tail or self.indexer.index_kpool == 1

    def _pick(
        self, x: mx.array, compressed: mx.array, rows: Mapping[int, Sequence[Any]]
    ) -> Picked:
        # Add the tokens to the rows' pools; return the pools with the best scores, and the tokens behind the last.
        indexer, size = self.indexer, self.indexer.index_kpool
        keys, gates = indexer._project_keys(x)
        gates, full = gates.astype(keys.dtype), {}
        for place, (_, seen, pools, *_) in rows.items():
            offset, own = seen.offset, slice(place, place + 1)
            appended(seen, True)
            *window, _ = pools.accumulate_windows(keys[own], gates[own], offset)
            if window[0].shape[1]:
                full[place] = window
        if full:
            made = indexer._compress_pools(
                *(
                    mx.concatenate(list(part))
                    for part in zip(*full.values(), strict=True)
                )
            )
            for index, place in enumerate(full):
                rows[place][2].update_and_fetch(made[index : index + 1])
        count = indexer.index_topk // size
        far = [place for place, parts in rows.items() if parts[2].offset > count]
        if not far:
            return Picked()
        pooled = [rows[place][2].pooled for place in far]
        best = mx.sort(
            mx.argpartition(-self._scores(x, compressed, far, pooled), count - 1)[
                :, :count
            ],
            axis=-1,
        )
        inside = (best[..., None] * size + mx.arange(size, dtype=best.dtype)).flatten(1)
        lengths = np.array([rows[place][1].offset for place in far])[:, None]
        behind = lengths // size * size + np.arange(size - 1)
        mask = np.concatenate([np.ones(inside.shape, bool), behind < lengths], axis=1)
        behind = mx.array(np.minimum(behind, lengths - 1).astype(np.uint32))
        positions = mx.concatenate([inside, behind.astype(inside.dtype)], axis=1)
        return Picked(
            far,
            [one.squeeze(0) for one in mx.split(positions, len(far))],
            mx.array(mask[:, None, None]),
        )

    def _scores(
        self,
        x: mx.array,
        compressed: mx.array,
        places: list[int],
        pooled: Sequence[mx.array],
    ) -> mx.array:
        # Return scores (places, P) of pools (1, P, D); those that a row lacks have the least.
        # (B, 1, H, D), (B, 1, H)
        queries, weights = self.indexer._project_queries(x, compressed)
        queries = queries.squeeze(1).astype(mx.float32)
        longest = max(pools.shape[1] for pools in pooled)
        products = [
            mx.pad(
                queries[place : place + 1] @ pools.astype(mx.float32).swapaxes(1, 2),
                [(0, 0), (0, 0), (0, longest - pools.shape[1])],
            )
            for place, pools in zip(places, pooled, strict=True)
        ]
        weights = (
            weights if len(places) == len(x) else weights[mx.array(places)]
        ).swapaxes(1, 2)
        scores = (
            mx.maximum(mx.concatenate(products), 0)
            * (weights * self.indexer.softmax_scale)
        ).sum(axis=1)
        counts = np.array([pools.shape[1] for pools in pooled])[:, None]
        if counts.min() == longest:
            return scores
        return mx.where(
            mx.array(np.arange(longest) < counts), scores, mx.finfo(mx.float32).min
        )

    def _over(
        self, queries: mx.array, latents: Mapping[int, mx.array], picked: Picked
    ) -> mx.array:
        # Attend with queries (B, H, 1, R) to what is picked of latents (1, 1, L, R).
        outputs = {
            place: attention(
                queries[place : place + 1], latent, latent, None, self.scale
            )
            for place, latent in latents.items()
            if place not in picked.places
        }
        if picked.places:
            chosen = mx.concatenate(
                [
                    mx.take(latents[place], positions, axis=2)
                    for place, positions in zip(
                        picked.places, picked.positions, strict=True
                    )
                ]
            )
            own = (
                queries
                if len(chosen) == len(queries)
                else queries[mx.array(picked.places)]
            )
            found = attention(own, chosen, chosen, None, self.scale, picked.mask)
            if len(found) == len(queries):
                return found
            outputs |= {
                place: found[index : index + 1]
                for index, place in enumerate(picked.places)
            }
        empty = mx.zeros_like(queries[:1])
        return mx.concatenate(
            [outputs.get(place, empty) for place in range(len(queries))]
        )


def appended(cache: Any, new: Any) -> mx.array:
    """Append a position to a ``KVCache`` without values; return the keys."""
    if cache.offset == cache.keys.shape[2]:
        spare = cache.step, cache.keys.shape[3], cache.values.shape[3]
        cache.keys, cache.values = (
            mx.concatenate(
                [part, mx.zeros((1, 1, spare[0], width), part.dtype)], axis=2
            )
            for part, width in zip((cache.keys, cache.values), spare[1:], strict=True)
        )
    cache.offset += 1
    cache.keys[..., cache.offset - 1 : cache.offset, :] = new
    return cache.keys[..., : cache.offset, :]


PATCHES: dict[type, type] = {
    Glm5NextAttention: RowAttention,
    Glm5NextLinearAttention: in_order(
        Glm5NextLinearAttention, ("qkv_proj", "fbg_a_proj"), "o_proj"
    ),
    VisionPatchEmbed: embed_by_product(VisionPatchEmbed),
}
