"""Answers that see their prompt and their own window (Unlimited-OCR)."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_batch.arrays import own_array
from vlm_batch.caches.layers import CacheKind
from vlm_batch.caches.states import LayerState, LostState, filed


class RetainedPromptCache(CacheKind, KVCache):
    """Keys and values (1, H, L, D): the prompt, then a ring of the answer's last ``window`` tokens."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.prompt: int | None = None  # the prompt's length, once it has ended

    def end_prompt(self) -> None:
        self.prompt = self.offset

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array | None, mx.array | None]:
        if self.prompt is None or self.offset < self.prompt + self.window:
            return super().update_and_fetch(keys, values)
        column = self.prompt + (self.offset - self.prompt) % self.window
        self.keys[..., column : column + 1, :] = keys
        self.values[..., column : column + 1, :] = values
        self.offset += 1
        return self.state

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        if self.keys is None:
            return None, None
        kept = self.offset
        if self.prompt is not None:
            kept = min(kept, self.prompt + self.window)
        return self.keys[..., :kept, :], self.values[..., :kept, :]

    def saved(self, length: int) -> LayerState:
        if self.prompt is not None:
            return LostState()
        keys, values = self.state
        assert keys is not None and values is not None
        return RetainedState(own_array(keys), own_array(values), self.window)


@filed
@dataclass(frozen=True)
class RetainedState(LayerState):
    """A prompt before its answer."""

    keys: mx.array  # (1, H, L, D)
    values: mx.array
    window: int

    def reaches(self, length: int) -> bool:
        return length <= int(self.keys.shape[2])

    def restore(self, length: int) -> RetainedPromptCache:
        cache = RetainedPromptCache(self.window)
        cache.keys = self.keys[:, :, :length]
        cache.values = self.values[:, :, :length]
        cache.offset = length
        return cache
