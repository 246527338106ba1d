"""MiniMax M3 VL: layers that attend to a few blocks of keys which an index picks for each token; experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.models.attention import attention
from vlm_batch.models.base import Adapter
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="minimax_m3_vl",
        model_types=("minimax_m3_vl",),
        no_video="not verified: its answers have not been compared with transformers",
        notes=(
            "blocks are picked for each row over its own keys; mlx-vlm counts padding and restarts positions when a "
            "request arrives (minimax_m3_vl.py:262, language.py:1494 and :2081). A row of such a layer keeps its own "
            "cache, whose attention is one call a row",
            "not mended: answers part from transformers' where a sparse layer first leaves out a block; mlx-vlm picks them by "
            "the best score of all the indexer's heads, transformers for each head (tests/test_zoo.py, NOT_MENDED)",
        ),
    )
)
class MiniMaxM3VL(Adapter):
    """Positions are counts, pictures included. Videos are refused: they are not verified."""

    input_keys = Adapter.input_keys | {"image_grid_thw"}
    #: Where the pictures are, which no layer reads.
    ignored_features = frozenset({"visual_pos_masks"})

    @classmethod
    def mends(cls) -> Mapping[type, type]:
        from mlx_vlm.models.minimax_m3_vl.language import MiniMaxAttention

        class RowAttention(MiniMaxAttention):
            """Upstream picks blocks over the batch's padded columns (minimax_m3_vl/language.py:1466-1530); here each row
            does over its own keys, as it does alone."""

            def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, position_ids: Any = None) -> mx.array:
                """(B, L, D) -> (B, L, D)"""
                if not self.has_sparse_index or isinstance(cache.offset, int):
                    return super().__call__(x, mask, cache, position_ids)
                queries, keys = (
                    self._turned(x, cache, self.q_proj, "q_norm"),
                    self._turned(x, cache, self.k_proj, "k_norm"),
                )
                values = self._heads(x, self.v_proj, self.head_dim)
                index_queries = self._turned(x, cache, self.index_q_proj, "index_q_norm", self.index_dim)
                index_keys = self._turned(x, cache, self.index_k_proj, "index_k_norm", self.index_dim)
                outputs = [
                    mx.zeros_like(queries[:1])
                    if single is None
                    else self._row(
                        single,
                        *(part[place : place + 1] for part in (queries, keys, values)),
                        *(part[place : place + 1] for part in (index_queries, index_keys)),
                    )
                    for place, single in enumerate(cache.places)
                ]
                return self.o_proj(mx.concatenate(outputs).swapaxes(1, 2).flatten(-2))

            def _heads(self, x: mx.array, project: Any, width: int) -> mx.array:
                """(B, 1, D) -> (B, H, 1, width)"""
                return project(x).reshape(x.shape[0], 1, -1, width).swapaxes(1, 2)

            def _turned(self, x: mx.array, cache: Any, project: Any, norm: str, width: int | None = None) -> mx.array:
                """Projected, normed and rotated by each row's own position."""
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
                """One token of one row over the blocks that its index picks: (1, H, 1, D)."""
                keys, values = single.update_and_fetch(keys, values)
                index_keys = single.update_index_and_fetch(index_keys)
                length, mask = keys.shape[2], None
                if length > self.sparse_block_size * self.sparse_topk_blocks:
                    here = mx.array([[length - 1]])
                    blocks = self.indexer.select_blocks(index_queries, index_keys, length - 1, None, here)
                    output = self._sparse_decode_attention(queries, keys, values, blocks, None, here)
                    if output is not None:
                        return output
                    mask = self.indexer.build_block_mask(blocks, None, length, queries.dtype, here)
                return attention(queries, keys, values, single, self.scale, mask)

        return {MiniMaxAttention: RowAttention}

    def forward(
        self, ids: mx.array, embeds: mx.array | None, cache: Sequence[Any], extra: Mapping[str, Any]
    ) -> mx.array:
        """Trunk and head; upstream's ``LanguageModel.__call__`` remembers positions and deltas."""
        hidden = self.language.model(ids, inputs_embeds=embeds, cache=cache, **extra)  # (B, 1, D)
        return self.language.logits_from_hidden(hidden)[:, -1]
