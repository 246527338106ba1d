"""Replacement modules for DeepSeek-OCR."""

from __future__ import annotations

import mlx.core as mx
from mlx_vlm.models.deepseekocr.sam import Attention
from mlx_vlm.models.deepseekocr.vision import VisionEmbeddings
from mlx_vlm.models.kernels import bicubic_interpolate

from vlm_batch.adapters.vision import resize_linear


class RelativeAttention(Attention):
    """mlx-vlm resizes relative positions without torch's half step (sam.py, get_rel_pos)."""

    def __call__(self, x: mx.array) -> mx.array:
        batch, high, wide, _ = x.shape
        if not self.use_rel_pos or (len(self.rel_pos_h), len(self.rel_pos_w)) == (
            2 * high - 1,
            2 * wide - 1,
        ):
            return super().__call__(x)
        split = self.qkv(x).reshape(batch, high * wide, 3, self.num_heads, -1)
        # (B, heads, H W, D_head) each
        queries, keys, values = split.transpose(2, 0, 3, 1, 4)
        cells = queries.reshape(batch, self.num_heads, high, wide, -1)
        down = mx.einsum("bnhwd,hkd->bnhwk", cells, relative(self.rel_pos_h, high))[
            ..., None
        ]
        across = mx.einsum("bnhwd,wkd->bnhwk", cells, relative(self.rel_pos_w, wide))[
            ..., None, :
        ]
        bias = (down + across).reshape(batch, self.num_heads, high * wide, high * wide)
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=bias
        )
        return self.proj(out.swapaxes(1, 2).reshape(batch, high, wide, -1))


def relative(table: mx.array, side: int) -> mx.array:
    """Return relative positions (side, side, D)."""
    positions = mx.arange(side)
    return resize_linear(table, 2 * side - 1)[positions[:, None] - positions + side - 1]


class ResizedEmbeddings(VisionEmbeddings):
    """Resizes positions bicubically with antialiasing (deepencoder.py, get_abs_pos)."""

    def _get_abs_pos(self, abs_pos: mx.array, tgt_size: int) -> mx.array:
        """(1, 1 + H W, D) -> (1, tgt_size, D)."""
        old, new = (int((size - 1) ** 0.5) for size in (abs_pos.shape[1], tgt_size))
        if old == new:
            return abs_pos
        grid = abs_pos[:, 1:].reshape(1, old, old, -1).transpose(0, 3, 1, 2)
        resized = bicubic_interpolate(
            grid.astype(mx.float32), size=(new, new), antialias=True
        )
        return mx.concatenate(
            [abs_pos[:, :1], resized.flatten(2).swapaxes(1, 2).astype(abs_pos.dtype)],
            axis=1,
        )


PATCHES: dict[type, type] = {
    Attention: RelativeAttention,
    VisionEmbeddings: ResizedEmbeddings,
}
