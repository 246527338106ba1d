"""Phi-4-multimodal: low-rank adapters, LongRoPE, recordings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.attention import fuse_rows
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.few_rows import suit_few_rows
from vlm_batch.adapters.hooks import current, running
from vlm_batch.adapters.longrope import LONG_ROPE_NOTE
from vlm_batch.adapters.media import AUDIO_INPUTS, has_pictures, has_sound
from vlm_batch.adapters.modules import RememberingListTower, patching, under
from vlm_batch.adapters.prompts import put_features, repeat_placeholders
from vlm_batch.adapters.sound import as_text
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import DecodeStep, Encoded, Picture, PromptKey
from vlm_batch.registry import ModelSpec, register
from vlm_batch.store.digest import as_words, digest


class Unpadded:
    """Encodes without padding, to which mlx-vlm attends (phi4mm/audio.py:680)."""

    def __call__(self, spectrograms: mx.array) -> mx.array:
        """(B, frames, bands) -> (B, L, D)."""
        theirs: Any = super()
        found: mx.array = theirs.__call__(spectrograms, None)[0]
        return found


@register(
    ModelSpec(
        family="phi4mm",
        model_types=("phi4mm",),
        audio=True,
        notes=(
            LONG_ROPE_NOTE,
            "each row has its own low-rank adapter, as published (modeling_phi4mm.py, forward): the vision one with a picture, "
            "the speech one with recordings alone, none with text; mlx-vlm changes the weights of the whole model "
            "(phi4mm/phi4mm.py:83, set_modality), so that a text gets the adapters of the request before",
            "recordings beside a picture go through the projection for both; mlx-vlm takes the one for speech and adds both "
            "adapters up (phi4mm/phi4mm.py:83)",
            "checkpoints in few bits have both adapters merged in",
            "spectrograms are mlx-vlm's, which has the published filters; transformers' differ by up to 0.02 in a logarithm",
            "each recording is heard by itself; mlx-vlm and transformers hear the padding beside a longer one",
            "pictures are plain patches: mlx-vlm drops the published model's crops and separators (phi4mm.py, sanitize)",
        ),
    )
)
class Phi4MM(Adapter):
    tower_class = RememberingListTower
    input_keys = Adapter.input_keys | {
        *("pixel_attention_mask", "spatial_shapes"),
        *("input_audio_embeds", "audio_embed_sizes", "audio_attention_mask"),
    }
    patches = patching(
        # mlx-vlm calls ``mx.fast`` itself (phi4mm/language.py:62).
        (
            "phi4mm.language.Attention",
            lambda attention: fuse_rows(attention, "qkv_proj", "o_proj"),
        ),
        ("phi4mm.audio.ConformerEncoder", under(Unpadded)),
    )

    def __init__(self, model: nn.Module) -> None:
        from vlm_batch.models._phi4mm import unmerge_adapters

        super().__init__(model)
        self._scales = unmerge_adapters(self.model)
        suit_few_rows(self.language)  # the layers are others now
        is_plain = isinstance(self.language.layers[0].self_attn.qkv_proj, nn.Linear)
        if is_plain and getattr(self.config, "speech_lora", None):
            lost = "this conversion of the checkpoint has its vision adapter merged in, and its speech adapter is lost"
            vars(self)["spec"] = replace(self.spec, audio=False, no_audio=lost)

    @classmethod
    def processor(cls, processor: Any) -> Any:
        from vlm_batch.models._phi4mm import NumberedPlaceholders

        return as_text(super().processor(processor), NumberedPlaceholders)

    def expand_ids(self, ids: mx.array, extra: Mapping[str, Any]) -> mx.array:
        (marker,) = self.image_token_ids - self._audio_token_ids
        return repeat_placeholders(ids, marker, self._num_patches(extra))

    def check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        super().check_placeholders(ids, extra)
        if has_sound(extra):
            needed = sum(map(self._count_features, frames_of(extra)))
            given = int(np.isin(np.array(ids), list(self._audio_token_ids)).sum())
            if needed != given:
                raise InvalidPrompt(
                    f"the recordings need {needed} placeholder tokens; the prompt has {given}"
                )

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Give mlx-vlm one id per picture, and add recordings."""
        sound = {
            name: value
            for name, value in extra.items()
            if name.startswith(AUDIO_INPUTS)
        }
        rest = {name: value for name, value in extra.items() if name not in sound}
        tokens = np.array(ids)[0]
        positions = np.flatnonzero(
            np.isin(tokens, list(self.image_token_ids - self._audio_token_ids))
        )
        firsts = np.cumsum([0, *self._num_patches(rest)])[:-1]
        kept = np.delete(
            np.where(np.isin(tokens, list(self._audio_token_ids)), 0, tokens),
            np.delete(positions, firsts),
        )
        made = super().features(mx.array(kept[None]), rest)
        if sound:
            rows = self.encode_sound(sound, _kind_of(extra))
            embeds = made["inputs_embeds"]
            made["inputs_embeds"] = put_features(
                embeds, ids, self._audio_token_ids, rows, "recordings"
            )
        return {**made, "decode": self._own(extra)}

    def features_after(
        self, ids: mx.array, extra: Mapping[str, Any], cached: int
    ) -> dict[str, Any]:
        return {
            **super().features_after(ids, extra, cached),
            "decode": self._own(extra),
        }

    def encode_sound(self, sound: Mapping[str, Any], projection: str) -> mx.array:
        """Encode each recording alone: (N, D)."""
        dtype = self.model.audio_projection.speech.proj_0.bias.dtype
        rows = []
        for at, frames in enumerate(frames_of(sound)):
            spectrogram = sound["input_audio_embeds"][at : at + 1, :frames].astype(
                dtype
            )
            rows.append(
                self.model.audio_projection(
                    self.model.audio_encoder(spectrogram), mode=projection
                )[0]
            )
        return mx.concatenate(rows)

    def recordings(
        self, ids: mx.array, sound: Mapping[str, Any]
    ) -> tuple[Picture, ...]:
        positions = np.flatnonzero(
            np.isin(np.array(ids)[0], list(self._audio_token_ids))
        )
        found = []
        done = 0
        for at, frames in enumerate(frames_of(sound)):
            own = positions[done : done + self._count_features(frames)]
            found.append(
                Picture(
                    int(own[0]),
                    int(own[-1]) + 1,
                    sound["input_audio_embeds"][at, :frames],
                )
            )
            done += len(own)
        return tuple(found)

    def _marked(self, key: PromptKey, extra: Mapping[str, Any]) -> PromptKey:
        """Mix the media's kind into the prompt's key: it names the adapter, and how recordings are projected."""
        key, kind = super()._marked(key, extra), _kind_of(extra)
        return key.mixed(as_words(digest(kind))) if kind else key

    def run_chunk(
        self, rows: Sequence[Encoded], cache: list[Any], start: int, end: int
    ) -> mx.array:
        names = [row.decode.get("adapter") for row in rows]
        with running(replace(current(), adapters=weights_of_rows(names, self._scales))):
            return super().run_chunk(rows, cache, start, end)

    def run_step(self, step: DecodeStep) -> mx.array:
        names = [extras.get("adapter") for extras in step.extras]
        with running(replace(current(), adapters=weights_of_rows(names, self._scales))):
            return super().run_step(step)

    def _own(self, extra: Mapping[str, Any]) -> dict[str, str]:
        kind = _kind_of(extra)
        return {"adapter": kind} if kind in self._scales else {}

    def _count_features(self, frames: int) -> int:
        return -(-frames // self.model.audio_encoder.config.time_reduction)

    def _num_patches(self, extra: Mapping[str, Any]) -> list[int]:
        return [
            high * wide
            for high, wide in np.array(extra.get("spatial_shapes", ()))
            .astype(int)
            .tolist()
        ]


def _kind_of(extra: Mapping[str, Any]) -> str:
    """Return the adapter and the recordings' projection of a request: "vision", "speech", or "" of text."""
    if has_pictures(extra):
        return "vision"
    return "speech" if has_sound(extra) else ""


def weights_of_rows(
    names: Sequence[str | None], scales: Mapping[str, float]
) -> dict[str, Any]:
    """Return adapters' weights (R, 1, 1), or a number for all rows."""
    found: dict[str, Any] = {}
    for name, scale in scales.items():
        is_own = [one == name for one in names]
        if any(is_own):
            found[name] = (
                scale
                if all(is_own)
                else mx.array([scale * own for own in is_own])[:, None, None]
            )
    return found


def frames_of(sound: Mapping[str, Any]) -> Iterator[int]:
    """Return each recording's frames."""
    mask, spectrograms = sound.get("audio_attention_mask"), sound["input_audio_embeds"]
    if mask is None:
        return iter([spectrograms.shape[1]] * spectrograms.shape[0])
    return iter(mask.sum(axis=1).tolist())
