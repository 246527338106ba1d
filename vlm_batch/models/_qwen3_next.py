"""Replacement modules for Qwen3-Next."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.gated_delta import gated_delta_update
from mlx_vlm.models.qwen3_next.language import Qwen3NextGatedDeltaNet

from vlm_batch.adapters.recurrent import in_order

#: Added to the sum of squares (transformers, modeling_qwen3_next.py, l2norm).
L2_EPS = 1e-6


class DeltaNet(Qwen3NextGatedDeltaNet):
    """mlx-vlm's layer without padding on the left, with published L2 norms."""

    def __call__(
        self, inputs: mx.array, mask: Any = None, cache: Any = None
    ) -> mx.array:
        batch, length, _ = inputs.shape
        *parts, z, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(inputs), self.in_proj_ba(inputs)
        )
        new = mx.concatenate(
            [part.reshape(batch, length, -1) for part in parts], axis=-1
        )
        if mask is not None:
            new = mx.where(mask[..., None], new, 0)
        kept = self.conv_kernel_size - 1
        seen = (
            mx.zeros((batch, kept, self.conv_dim), new.dtype)
            if cache[0] is None
            else cache[0]
        )
        window = mx.concatenate([seen, new], axis=1)
        if cache.lengths is None:
            cache[0] = mx.contiguous(window[:, -kept:])
        else:
            # of each row's own positions
            last = cache.lengths[:, None] + mx.arange(kept)
            cache[0] = mx.take_along_axis(window, last[..., None], axis=1)
        mixed = mx.split(
            nn.silu(self.conv1d(window)), [self.key_dim, 2 * self.key_dim], axis=-1
        )
        queries, keys, values = (
            one.reshape(part.shape) for one, part in zip(mixed, parts, strict=True)
        )
        width = self.head_k_dim
        # of length 1 / sqrt(width)
        queries = mx.fast.rms_norm(queries, None, L2_EPS / width) / width
        keys = mx.fast.rms_norm(keys, None, L2_EPS / width) * width**-0.5  # of length 1
        out, cache[1] = gated_delta_update(
            queries,
            keys,
            values,
            a,
            b,
            self.A_log,
            self.dt_bias,
            cache[1],
            mask,
            use_kernel=not self.training,
        )
        cache.advance(length)
        return self.out_proj(self.norm(out, z).reshape(batch, length, -1))


PATCHES: dict[type, type] = {
    Qwen3NextGatedDeltaNet: in_order(
        DeltaNet, ("in_proj_qkvz", "in_proj_ba"), "out_proj"
    )
}
