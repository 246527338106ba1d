"""Qwen3-Omni's thinker: pictures and recordings in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.base import create_attention_mask

from vlm_batch.adapters.attention import seal_masks
from vlm_batch.adapters.base import trunk_logits
from vlm_batch.adapters.deepstack import HostPositions
from vlm_batch.adapters.grids import MRoPEAdapter
from vlm_batch.adapters.modules import RememberingTower, patching, under, unshared
from vlm_batch.adapters.pictures import with_mixin, with_part
from vlm_batch.adapters.sound import SoundAdapter
from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import PositionState
from vlm_batch.registry import ModelSpec, register


def unwaiting(trunk: type[nn.Module]) -> type[nn.Module]:
    """Subclass a decoder to drop mlx-vlm's wait for every fourth layer (qwen3_omni_moe/language.py:286)."""

    class Trunk(trunk):  # type: ignore[misc,valid-type]
        def __call__(
            self,
            inputs: mx.array,
            inputs_embeds: mx.array | None,
            cache: Sequence[Any],
            position_ids: mx.array,
            deepstack_visual_embeds: mx.array | None = None,
        ) -> mx.array:
            hidden = (
                self.embed_tokens(inputs) if inputs_embeds is None else inputs_embeds
            )
            rotary = self.layers[0].self_attn.rotary_emb
            mask = create_attention_mask(hidden, cache[0])
            angles = None if rotary.fused_apply else rotary(hidden, position_ids)
            added = (
                []
                if deepstack_visual_embeds is None
                else mx.unstack(deepstack_visual_embeds, axis=2)
            )
            for at, (layer, own) in enumerate(zip(self.layers, cache, strict=True)):
                hidden = layer(hidden, mask, own, position_ids, angles)
                if at < len(added):
                    hidden = hidden + added[at].astype(hidden.dtype)
            return self.norm(hidden)  # type: ignore[no-any-return]

    return Trunk


@register(
    ModelSpec(
        family="qwen3_omni_moe",
        model_types=("qwen3_omni_moe",),
        video=True,
        audio=True,
        notes=(
            "answers are text: nothing is spoken",
            "a video's time steps are 26 positions apart, divided by the frames a second asked for, and its own sound stands "
            "between its frames in order of time, as in the published model (modeling_qwen3_omni_moe.py, get_rope_index); "
            "mlx-vlm counts time steps (qwen3_omni_moe/language.py:330). Rates that make no whole number of positions are "
            "refused",
            "video frames are bounded in size one by one, as in transformers' Qwen3OmniMoeProcessor (videos_kwargs); mlx-vlm "
            "gives the whole video the bound for pictures",
            "a recording is heard whole, as in transformers (processing_qwen3_omni_moe.py); mlx-vlm cuts it after 30 s, "
            "and counts its frames otherwise beside a longer one (qwen3_omni_moe/processing_qwen3_omni_moe.py:108)",
            "features that do not fit their placeholders are refused; mlx-vlm drops some, or makes some up "
            "(qwen3_omni_moe/thinker.py:169)",
            "the vision blocks take the tanh form of GELU, as configured and as in transformers; mlx-vlm fixes the exact "
            "one (qwen3_omni_moe/vision.py:163)",
        ),
    )
)
class Qwen3OmniMoe(SoundAdapter, MRoPEAdapter):
    input_keys = MRoPEAdapter.input_keys | {
        "input_features",
        "feature_attention_mask",
        "video_second_per_grid",
    }
    sound_tower = unshared(
        RememberingTower,
        "its encoder pads parts of less than a second to the longest that is beside them",
    )
    prefill_axes: ClassVar[Mapping[str, int | None]] = {"deepstack_visual_embeds": 1}
    _features_have_rows = True
    #: The decoder adds features everywhere, zeros included (qwen3_omni_moe/language.py, _deepstack_process).
    ignored = frozenset({"visual_pos_masks"})
    patches = patching(
        # cut to the longest row at qwen3_omni_moe/language.py:123
        ("qwen3_omni_moe.language.Attention", seal_masks),
        ("qwen3_omni_moe.language.Qwen3VLMoEModel", unwaiting),
        ("qwen3_omni_moe.vision.Attention", attend_pictures),
        ("qwen3_omni_moe.vision.PatchEmbed", embed_by_product),
        ("qwen3_omni_moe.vision.VisionModel", under(HostPositions)),
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.config = self.config.thinker_config
        for block in self.model.thinker.vision_tower.blocks:
            # transformers: Qwen3OmniMoeVisionMLP takes hidden_act
            if type(block.mlp.act_fn) is nn.GELU:
                block.mlp.act_fn = nn.GELU(approx="tanh")

    @classmethod
    def processor(cls, processor: Any) -> Any:
        from vlm_batch.models._qwen3_omni_moe import with_videos

        return with_videos(
            with_part(
                super().processor(processor), "feature_extractor", with_whole_recordings
            )
        )

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        return super().features(
            ids,
            {name: extra[name] for name in extra.keys() - {"video_second_per_grid"}},
        )

    def positions(
        self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]
    ) -> PositionState:
        """Space a video's time steps by seconds, and count its sound beside them (get_rope_index).

        Positions after such a video continue from its last run of frames or sound alone.
        """
        if "video_grid_thw" not in extra:
            return super().positions(ids, extra, features)
        rate = float(self.config.position_id_per_seconds)
        given = extra.get(
            "video_second_per_grid", np.ones(len(extra["video_grid_thw"]))
        )
        steps = [spacing_of(float(seconds), rate) for seconds in np.array(given)]
        return self.grid_positions(ids, extra, steps)

    def inside(
        self, tokens: np.ndarray, first: int, grid: Sequence[int], step: float
    ) -> tuple[np.ndarray, int]:
        frames, span = super().inside(tokens, first, grid, step)
        video, sounds = self.marker("video"), list(self._audio_token_ids)
        is_block = np.isin(tokens[first:], [video, *sounds])
        run = tokens[first : first + int(np.argmin(np.append(is_block, False)))]
        if tokens[first] != video or not np.isin(run, sounds).any():
            return frames, span
        is_frame = run == video
        if is_frame.sum() != frames.shape[1]:
            raise InvalidPrompt(
                "a video's sound stands between the placeholders of another video"
            )
        found = np.empty((3, len(run)), dtype=np.int32)
        found[:, is_frame] = frames
        found[:, ~is_frame] = np.arange((~is_frame).sum())
        # the last run of frames or sound alone
        is_last = is_frame[::-1] == is_frame[-1]
        last = len(run) - int(np.argmin(np.append(is_last, False)))
        return found, int(found[:, last:].max()) + 1

    def forward(
        self,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Sequence[Any],
        extra: Mapping[str, Any],
    ) -> mx.array:
        """Skip the model's own call, which waits for the positions (qwen3_omni_moe/language.py:648)."""
        return trunk_logits(self.language, ids, embeds, cache, extra)

    def encode_sound(self, sound: Mapping[str, Any]) -> mx.array:
        return self.model.thinker.get_audio_features(  # type: ignore[no-any-return]
            sound["input_features"],
            feature_attention_mask=sound["feature_attention_mask"],
        )


def spacing_of(seconds: float, rate: float) -> int:
    """Return the positions between a video's time steps; raise InvalidPrompt for fractions."""
    steps = seconds * rate
    if not (steps > 0 and abs(steps - round(steps)) < 1e-3):
        raise InvalidPrompt(
            f"a video's time steps are {seconds:.3g} s apart, {steps:.4g} positions, and whole ones alone are taken: "
            "Video(..., fps=) of 1, 2, 0.5 or another number that divides 26"
        )
    return round(steps)


def with_whole_recordings(part: Any) -> Any:
    """Return a feature extractor that cuts nothing."""
    return with_mixin(part, WholeRecordings)


class WholeRecordings:
    def __call__(self, audio: Any, **said: Any) -> Any:
        theirs: Any = super()
        told = {"padding": True, "truncation": False, "return_attention_mask": True}
        return theirs.__call__(
            audio, **{"sampling_rate": vars(self)["sampling_rate"], **said, **told}
        )
