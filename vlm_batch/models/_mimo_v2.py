"""MiMo-V2's encoder and codec of recordings."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import mlx.core as mx
from mlx_vlm.models.mimo_v2.audio import AudioEncoder

from vlm_batch.adapters.hooks import install_hooks, running
from vlm_batch.adapters.tables import kept
from vlm_batch.records import Call


class GroupEncoder(AudioEncoder):
    """Encodes groups of codes (N, size, channels) -> (N, D)."""

    tables: list[Any]

    def __call__(self, groups: mx.array) -> mx.array:
        embeds = sum(
            table(groups[..., channel]) for channel, table in enumerate(self.tables)
        )
        return self.projection(self.input_local_transformer(embeds).flatten(1))  # type: ignore[no-any-return]


PATCHES: dict[type, type] = {AudioEncoder: GroupEncoder}


#: One codec is loaded, or runs, at a time.
_TURN = Lock()


class Codec:
    """The codec of a processor and its copies, loaded with the first recording."""

    __slots__ = ("_owner",)
    sampling_rate = 24_000

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __deepcopy__(self, memo: dict[int, Any]) -> Codec:
        return self

    def encode(
        self, samples: Any, *, sample_rate: int, num_quantizers: int
    ) -> mx.array:
        """Return codes (quantizers, frames)."""
        folder = self._owner.audio_tokenizer_path
        if folder is None or not Path(folder).is_dir():
            raise FileNotFoundError(
                "the checkpoint has no folder audio_tokenizer, with the codec of its recordings"
            )
        with _TURN, running(Call()):
            codec = self._owner.audio_tokenizer
            _hook_bands()
            codes = codec.encode(
                samples, sample_rate=self.sampling_rate, num_quantizers=num_quantizers
            )
            mx.eval(codes)
        return codes  # type: ignore[no-any-return]


@cache
def _hook_bands() -> None:
    """Hook mlx_audio's table, which a recording that fails would leave to its thread."""
    from mlx_audio.codec.models.mimo_audio_tokenizer import audio

    hooks = {"mel_filters": kept(audio.mel_filters)}
    install_hooks([audio.__name__], hooks, family="mimo_v2", required=hooks)


def with_codec(processor: Any) -> Any:
    """Make a processor's copies share one codec."""
    if not hasattr(processor, "audio_tokenizer_path") or isinstance(
        processor._audio_tokenizer, Codec
    ):
        return processor
    codec, processor = Codec(processor), copy.copy(processor)
    processor._audio_tokenizer = processor.feature_extractor = codec
    return processor
