"""Replacement modules for Inkling."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.inkling.language import InklingAttention, InklingShortConvolution
from numpy.lib.stride_tricks import sliding_window_view

from vlm_batch.adapters.attention import attention
from vlm_batch.adapters.pictures import with_mixin
from vlm_batch.adapters.recurrent import in_order
from vlm_batch.adapters.tables import made
from vlm_batch.caches.rows import RowMasks, RowsCache, RowStates
from vlm_batch.caches.slab import DraftedSlab, SlabCache

#: mlx-vlm's score of a masked key (inkling/language.py, banded_additive_mask).
UNSEEN = -1e30


class RowAttention(InklingAttention):
    """Decodes a batch; a single row runs mlx-vlm's code."""

    def __call__(
        self, x: mx.array, cache: Any = None, conv_mask: Any = None
    ) -> mx.array:
        """(B, 1, D) -> (B, 1, D)."""
        kv, conv = cache[0], cache[1]
        if not isinstance(kv, (RowsCache, SlabCache, DraftedSlab)):
            return super().__call__(x, cache, conv_mask)
        batch, length, _ = x.shape
        wide, key_wide, value_wide, _ = self.qkvr_dims
        parts = mx.split(
            self.qkvr_proj(x),
            [wide, wide + key_wide, wide + key_wide + value_wide],
            axis=-1,
        )
        queries = parts[0]
        keys = self.k_sconv(parts[1], conv)
        values = self.v_sconv(parts[2], conv)
        queries = self.q_norm(
            queries.reshape(batch, length, self.n_heads, -1)
        ).swapaxes(1, 2)
        keys = self.k_norm(keys.reshape(batch, length, self.n_kv, -1)).swapaxes(1, 2)
        values = values.reshape(batch, length, self.n_kv, -1).swapaxes(1, 2)
        positions = kv.offset
        keys, values = kv.update_and_fetch(keys, values)
        # (B, H, E)
        bias = parts[3].reshape(batch, self.n_heads, self.d_rel) @ self.rel_proj.astype(
            x.dtype
        )
        if self.log_floor is not None:
            scale = self.scale_of(positions).astype(x.dtype)
            queries, bias = queries * scale[..., None], bias * scale
        output = attention(
            queries, keys, values, kv, self.scale, self.masks(bias, positions, keys)
        )
        return self.o_proj(output.swapaxes(1, 2).flatten(-2))

    def scale_of(self, positions: mx.array) -> mx.array:
        """Return the query factor (B, 1, 1) at positions (B,)."""
        past = mx.maximum((positions + 1).astype(mx.float32) / self.log_floor, 1.0)
        return (1 + self.log_alpha * mx.log(past))[:, None, None]

    def masks(
        self, bias: mx.array, positions: mx.array, keys: Any
    ) -> mx.array | RowMasks:
        """Return additive masks (B, H, 1, L) of biases (B, H, E) by distance."""
        if not isinstance(keys, RowStates):
            return self.mask(bias, positions, keys.shape[2])
        rows = [None if row is None else row.shape[2] for row in keys.apart().rows]
        return RowMasks(
            tuple(
                None
                if width is None
                else self.mask(
                    bias[place : place + 1], positions[place : place + 1], width
                )
                for place, width in enumerate(rows)
            )
        )

    def mask(self, bias: mx.array, positions: mx.array, width: int) -> mx.array:
        distance = (positions[:, None] - mx.arange(width))[:, None]  # (B, 1, L)
        near = mx.clip(distance, 0, self.rel_extent - 1)
        mask = mx.take_along_axis(
            bias, mx.broadcast_to(near, (*bias.shape[:2], width)), axis=-1
        )
        mask = mx.where(distance >= self.rel_extent, 0, mask)
        unseen = distance < 0
        if self.sliding:
            unseen = unseen | (distance >= self.sliding)
        return mx.where(unseen, mx.array(UNSEEN, bias.dtype), mask)[:, :, None]


PATCHES: dict[type, type] = {
    InklingAttention: RowAttention,
    InklingShortConvolution: in_order(InklingShortConvolution),
}


def with_floored_magnitudes(part: Any) -> Any:
    """Return a feature extractor with transformers' floor of 1e-5 (feature_extraction_inkling.py), not mlx-vlm's 1e-10.

    Its table is its own: that of mlx_audio belongs to the thread that loaded a processor first.
    """
    from mlx_audio.dsp import mel_filters

    if isinstance(part, FlooredMagnitudes):
        return part
    part = with_mixin(part, FlooredMagnitudes)
    sizes = (part.sampling_rate, part.n_fft, part.feature_size)
    part.mel_filters = made(
        mel_filters, *sizes, norm="slaney", mel_scale="slaney", precise=True
    )
    return part


class FlooredMagnitudes:
    hop_length: int
    n_fft: int
    max_frames_per_chunk: int
    window: mx.array
    mel_filters: mx.array

    def _extract_log_mel(self, waveform: mx.array, length: int) -> mx.array:
        """Return log magnitudes (frames, bands) of a recording, padded with silence."""
        hop, width, most = self.hop_length, self.n_fft, self.max_frames_per_chunk
        before, count = max(width - hop, 0), -(-length // hop)
        behind = count * hop - len(waveform)
        # (T, width)
        frames = sliding_window_view(
            np.pad(np.array(waveform), (before, behind)), width
        )[::hop]
        window, bands = np.array(self.window), np.array(self.mel_filters).T
        parts = []
        for start in range(0, count, most):
            magnitudes = np.abs(np.fft.rfft(frames[start : start + most] * window))
            parts.append(
                np.log10(np.maximum(np.maximum(magnitudes, 1e-5) @ bands, 1e-10))
            )
        return mx.array(np.concatenate(parts).astype(np.float32))
