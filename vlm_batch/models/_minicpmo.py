"""MiniCPM-o's encoder of recordings and its processor."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.minicpmo.audio import AudioAttention, AudioModel

from vlm_batch.adapters.sound import PartsAsText
from vlm_batch.errors import InvalidPrompt
from vlm_batch.models.minicpmo import count_states

#: Seconds of one piece for Whisper's encoder.
PIECE = 30


class SecondsAttention(AudioAttention):
    """Attention with a bool mask (L, L); mlx-vlm masks padding only."""

    def __call__(
        self, hidden_states: mx.array, attention_mask: mx.array | None = None
    ) -> mx.array:
        batch, length, _ = hidden_states.shape
        shape = (batch, length, self.num_heads, self.head_dim)
        queries, keys, values = (
            project(hidden_states).reshape(shape).swapaxes(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=attention_mask
        )
        return self.out_proj(mixed.swapaxes(1, 2).flatten(-2))  # type: ignore[no-any-return]


class SecondsModel(AudioModel):
    """Whisper's encoder, whose states see chunks so far (MiniCPM-o 4.5, modeling_minicpmo.py, get_audio_embedding)."""

    def __call__(self, input_features: mx.array, chunk: int = 0) -> mx.array:
        """(B, bands, frames) -> (B, L, D); ``chunk`` is in states."""
        hidden = nn.gelu(self.conv1(input_features.swapaxes(1, 2)))
        hidden = nn.gelu(self.conv2(hidden))
        length = hidden.shape[1]
        hidden = hidden + self.embed_positions.weight[:length]
        mask = None
        if 0 < chunk < length:
            numbers = mx.arange(length) // chunk
            mask = numbers[None, :] <= numbers[:, None]
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.layer_norm(hidden)  # type: ignore[no-any-return]


class PiecewiseRecordings(PartsAsText):
    """Cuts recordings into pieces of 30 s, padded with silence (processing_minicpmo.py, audio_feature_extract).

    mlx-vlm drops all but the first.
    """

    audio_processor: Any
    audio_pool_step: int
    tokenizer: Any
    #: A recording's placeholder in a rendered prompt.
    audio_token = "<audio>./</audio>"
    separator = "\n"

    def mark(self, kind: str, number: int) -> str:
        return f"<{kind}>./</{kind}>"

    def _extract_audio_inputs(
        self, batched_audios: list[list[np.ndarray]]
    ) -> tuple[Any, Any, Any]:
        """Return spectrograms (pieces, bands, frames), pieces' frames and recordings' texts."""
        (recordings,) = batched_audios
        part = self.audio_processor
        if not recordings:
            return np.zeros((0, 80, 0), np.float32), [[]], [[]]
        if part is None:
            raise InvalidPrompt(
                "this checkpoint has no feature extractor for recordings"
            )
        most = PIECE * part.sampling_rate
        pieces = [
            [one[at : at + most] for at in range(0, len(one), most)]
            for one in recordings
        ]
        made = part(
            [piece for each in pieces for piece in each],
            sampling_rate=part.sampling_rate,
            padding="max_length",
            max_length=most,
            return_tensors="np",
        )
        frames = [
            [-(-len(piece) // part.hop_length) for piece in each] for each in pieces
        ]
        counts = [
            sum(count_states(one) // self.audio_pool_step for one in each)
            for each in frames
        ]
        if 0 in counts:
            raise InvalidPrompt(
                "a recording is so short that the model's processor makes nothing of it"
            )
        start, end = self.tokenizer.audio_start, self.tokenizer.audio_end
        written = [start + "<unk>" * count + end for count in counts]
        flat = [one for each in frames for one in each]
        return (
            made["input_features"][..., : max(flat)].astype(np.float32),
            [flat],
            [written],
        )
