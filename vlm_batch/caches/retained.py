"""The KV of a row whose answer sees all of its prompt and the answer's last tokens (Unlimited-OCR)."""

from __future__ import annotations

import mlx.core as mx
from mlx_vlm.models.cache import KVCache


class RetainedPromptCache(KVCache):
    """Keys and values (1, H, L, D): the prompt's in order, then a ring of the answer's last ``window``.

    Keys are rotated before they are stored, so their order in the ring does not matter.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.prompt: int | None = None  # its length, once it is known

    def end_prompt(self) -> None:
        """What comes from now on is the answer."""
        self.prompt = self.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array | None, mx.array | None]:
        if self.prompt is None or self.offset < self.prompt + self.window:
            return super().update_and_fetch(keys, values)
        place = self.prompt + (self.offset - self.prompt) % self.window
        self.keys[..., place : place + 1, :] = keys
        self.values[..., place : place + 1, :] = values
        self.offset += 1
        return self.state

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        if self.keys is None:
            return None, None
        kept = self.offset if self.prompt is None else min(self.offset, self.prompt + self.window)
        return self.keys[..., :kept, :], self.values[..., :kept, :]
