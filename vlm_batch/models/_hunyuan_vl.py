"""Replacement modules for HunyuanOCR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.hunyuan_vl.language import Attention
from mlx_vlm.models.hunyuan_vl.vision import PatchEmbed
from mlx_vlm.models.rope_utils import rotate_half

from vlm_batch.adapters.attention import attention


class BoundedPositions(PatchEmbed):
    """Interpolates by (size + 0.1) / old size, as published; transformers 5.23 drops the 0.1 (modeling_hunyuan_vl.py:214)."""

    def _interpolate_pos_embed(
        self, pos_embed: mx.array, target_h: int, target_w: int
    ) -> mx.array:
        """(1, H, W, D) -> (1, target_h, target_w, D)."""
        for axis, new in ((1, target_h), (2, target_w)):
            old = pos_embed.shape[axis]
            if old == new:
                continue
            points = mx.clip(
                (mx.arange(new) + 0.5) * (old / (new + 0.1)) - 0.5, 0, old - 1
            )
            before = mx.floor(points).astype(mx.int32)
            share = (points - before).reshape((-1, 1) if axis == 2 else (-1, 1, 1))
            after = mx.take(pos_embed, mx.minimum(before + 1, old - 1), axis=axis)
            pos_embed = (
                mx.take(pos_embed, before, axis=axis) * (1 - share) + after * share
            )
        return pos_embed


class RowAttention(Attention):
    """mlx-vlm rotates by the batch's shared column (hunyuan_vl/language.py:206-228)."""

    def __call__(
        self, x: mx.array, mask: Any = None, cache: Any = None, position_ids: Any = None
    ) -> mx.array:
        """(B, L, D), positions (B, 4, L) -> (B, L, D)."""
        queries, keys, values = (
            project(x).reshape(*x.shape[:2], -1, self.head_dim).swapaxes(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # (B, 1, L, D_head)
        angles = axis_angles(
            position_ids, self.rotary_emb._inv_freq, self.xdrope_section
        )
        queries, keys = (turn(part, angles) for part in (queries, keys))
        if self.config.use_qk_norm:
            queries, keys = self.query_layernorm(queries), self.key_layernorm(keys)
        keys, values = cache.update_and_fetch(keys, values)
        output = attention(queries, keys, values, cache, self.scale, mask)
        return self.o_proj(output.swapaxes(1, 2).flatten(-2))


PATCHES: dict[type, type] = {Attention: RowAttention, PatchEmbed: BoundedPositions}


def axis_angles(
    positions: mx.array, frequencies: mx.array, sections: Sequence[int] | None
) -> mx.array:
    """Return angles (B, 1, L, D_head) of positions (B, axes, L).

    Sections, repeated once, cover the head (Tencent's and vLLM's xdrope). transformers 5.23 doubles each section
    (modeling_hunyuan_vl.py:165), so a pair's halves turn by different axes. No published weights were trained so.
    """
    if sections is None:
        sections, positions = [frequencies.size], positions[:, :1]
    # (D_head,)
    axis = np.repeat(np.tile(np.arange(len(sections)), 2), [*sections, *sections])
    doubled = mx.concatenate([frequencies, frequencies])  # (D_head,)
    # (B, L, D_head)
    turned = positions[:, mx.array(axis)].astype(mx.float32).swapaxes(1, 2)
    return (turned * doubled)[:, None]


def turn(x: mx.array, angles: mx.array) -> mx.array:
    """Rotate (B, H, L, D) by halves, in float32."""
    cos, sin = (
        table(angles).astype(x.dtype).astype(mx.float32) for table in (mx.cos, mx.sin)
    )
    wide = x.astype(mx.float32)
    return (wide * cos + rotate_half(wide) * sin).astype(x.dtype)
