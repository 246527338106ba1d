"""Nemotron Nano Omni: RADIO before Mamba-2 and attention without positions."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.hooks import running
from vlm_batch.adapters.modules import RememberingTower, patching, unshared
from vlm_batch.adapters.pictures import with_mixin, with_part
from vlm_batch.adapters.placing import Merge
from vlm_batch.adapters.recurrent import in_order
from vlm_batch.adapters.tables import hook_tables, made
from vlm_batch.records import Call
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="nemotron_h_nano_omni",
        model_types=("nemotron_h_nano_omni",),
        audio=True,
        audio_seconds=399.99,
        no_video="not verified: mlx-vlm drops some of a video's tokens after encoding them, which has not been compared with "
        "the published model",
        notes=(
            "if a recording's length is a multiple of eight frames, its last feature attends to nothing, as in mlx-vlm "
            "(nemotron_h_nano_omni/audio.py:230) and NeMo; in transformers 5.23 it is the "
            "mean of all positions, padding included",
        ),
    )
)
class NemotronHNanoOmni(Adapter):
    merge = Merge("_merge_features", keeps_type=True)
    embeddings = "backbone.embeddings"
    last_hidden = "backbone"
    tower_class = unshared(
        RememberingTower, "its tower answers with an object of its own"
    )
    input_keys = frozenset({"pixel_values", "sound_clips"})
    ignored = frozenset({"num_patches", "num_tokens", "imgs_sizes"})
    patches = patching(
        (
            "nemotron_h.language.NemotronHMamba2Mixer",
            lambda mixer: in_order(mixer, ("in_proj",), "out_proj"),
        )
    )

    @classmethod
    def processor(cls, processor: Any) -> Any:
        hook_tables(cls.spec.family)
        return with_part(
            super().processor(processor),
            "image_processor",
            lambda part: with_mixin(part, HookedPictures),
        )

    def hook_functions(self) -> None:
        """Make spectrograms' tables here: only the thread that made mlx_audio's may evaluate them."""
        super().hook_functions()
        if self.model.sound_feature_extractor is not None:
            self.model.sound_feature_extractor = with_tables(
                self.model.sound_feature_extractor
            )

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        return frozenset({self.config.img_context_token_id}) | self._audio_token_ids


class HookedPictures:
    """Resizes pictures within hooks: their threads share mlx-vlm's tables."""

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        theirs: Any = super()
        with running(Call()):
            return theirs._preprocess(*args, **kwargs)


def with_tables(part: Any) -> Any:
    """Copy the feature extractor with tables of its own."""
    config, part = part.config, copy.copy(part)
    window = made(part._hanning, config.win_length, periodic=False)
    sizes = (config.sampling_rate, config.n_fft, config.num_mel_bins)
    bands = made(part._mel_filters, *sizes, norm="slaney", mel_scale="slaney")
    part._hanning, part._mel_filters = lambda *_, **__: window, lambda *_, **__: bands
    return part
