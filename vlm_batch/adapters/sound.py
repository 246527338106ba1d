"""Adapters that put recordings' features into the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.media import sound_apart
from vlm_batch.adapters.pictures import with_mixin
from vlm_batch.adapters.prompts import put_rows


class SoundAdapter(Adapter):
    """Families with a placeholder per feature, where mlx-vlm repeats or drops misfits."""

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        sound, others = sound_apart(extra)
        made = super().features(ids, others)
        if sound:
            rows, embeds = self.encode_sound(sound), made["inputs_embeds"]
            made["inputs_embeds"] = put_rows(
                embeds, self.sound_positions(ids, sound), rows, "recordings"
            )
        return made

    def sound_positions(self, ids: Any, sound: Mapping[str, Any]) -> np.ndarray:
        """Return the positions (N,) of features in a prompt (1, L)."""
        return np.flatnonzero(np.isin(np.array(ids)[0], list(self._audio_token_ids)))

    def encode_sound(self, sound: Mapping[str, Any]) -> mx.array:
        """Return the features (N, D) of all recordings."""
        raise NotImplementedError


def rows_within(features: mx.array, is_own: np.ndarray) -> mx.array:
    """Select rows of (recordings, L, D) by a mask: (N, D)."""
    return features.reshape(-1, features.shape[-1])[mx.array(np.flatnonzero(is_own))]


def as_text(processor: Any, first: type[PartsAsText]) -> Any:
    """Put ``first`` before a processor's class; add the tokenizer's chat template if missing."""
    made = with_mixin(processor, first)
    if made is not processor and made.chat_template is None:
        made.chat_template = made.tokenizer.chat_template
    return made


class PartsAsText:
    """Mixin of processors that marks media for text-only chat templates."""

    #: The text between a message's parts.
    separator = ""
    chat_template: Any
    tokenizer: Any

    def mark(self, kind: str, number: int) -> str:
        """Return the mark of an "image" or "audio", counted from 1."""
        raise NotImplementedError

    def apply_chat_template(self, messages: Sequence[Any], **options: Any) -> Any:
        counts: dict[str, int] = {}

        def text_of(part: Any) -> str:
            kind = part["type"] if isinstance(part, Mapping) else "text"
            if kind not in ("image", "audio"):
                return str(
                    part.get("text", part.get("content", ""))
                    if isinstance(part, Mapping)
                    else part
                )
            counts[kind] = counts.get(kind, 0) + 1
            return self.mark(kind, counts[kind])

        turns = [
            {**turn, "content": self.separator.join(map(text_of, turn["content"]))}
            if isinstance(turn.get("content"), list)
            else turn
            for turn in messages
        ]
        return self.tokenizer.apply_chat_template(turns, **options)
