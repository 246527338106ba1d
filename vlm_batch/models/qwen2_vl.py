"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Qwen3-Omni, with and without experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.attention import seal_masks
from vlm_batch.adapters.frames import each_frame_bounded
from vlm_batch.adapters.grids import GridAdapter, MRoPEAdapter
from vlm_batch.adapters.prompts import cut
from vlm_batch.adapters.windows import window_runs
from vlm_batch.inputs.videos import Sampling
from vlm_batch.registry import ModelSpec, register
from vlm_batch.types import Encoded, PositionState

_BOTH = "a prompt with pictures and videos keeps both; mlx-vlm drops the videos (qwen2_vl.py:27, qwen2_5_vl.py:27)"
_FRAMES = (
    "video frames are bounded in size one by one, as in transformers' Qwen2VLVideoProcessor; mlx-vlm gives these models "
    "Qwen3-VL's bound for the whole video"
)


@register(ModelSpec(family="qwen2_vl", model_types=("qwen2_vl",), video=True, notes=(_BOTH, _FRAMES)))
class Qwen2VL(MRoPEAdapter):
    """M-RoPE and nothing else."""

    compiles = True
    shares_prefill = True
    encode_together = MRoPEAdapter.encode_grids_together

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.qwen2_vl.language import Attention

        return {Attention: seal_masks(Attention)}

    @classmethod
    def video_processor(cls, part: Any) -> Any:
        return each_frame_bounded(part)


@register(
    ModelSpec(
        family="qwen2_5_vl",
        model_types=("qwen2_5_vl",),
        video=True,
        notes=(
            "vision windows of length zero are dropped: mlx-vlm compares array scalars by identity and keeps them",
            "a video's positions go by its seconds, as in the published model; mlx-vlm drops second_per_grid_ts and "
            "counts frames (processing_qwen2_5_vl.py:87, language.py, get_rope_index)",
            _BOTH,
            _FRAMES,
        ),
    )
)
class Qwen25VL(Qwen2VL):
    """M-RoPE whose time axis goes by seconds; windowed attention in the vision tower."""

    input_keys = MRoPEAdapter.input_keys | {"second_per_grid_ts"}

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        return super().features(ids, {name: extra[name] for name in extra.keys() - {"second_per_grid_ts"}})

    def positions(self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]) -> PositionState:
        """A video's time steps are ``tokens_per_second`` times their seconds apart (arXiv:2502.13923, section 2.1.2).

        The rule and its float32 are those of the code that came with the model (transformers 4.49, get_rope_index).
        """
        if "video_grid_thw" not in extra:
            return super().positions(ids, extra, features)
        rate = np.float32(self.config.vision_config.tokens_per_second)
        seconds = np.array(extra.get("second_per_grid_ts", np.ones(len(extra["video_grid_thw"]))), dtype=np.float32)
        return self.grid_positions(ids, extra, (seconds * rate).tolist())

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.qwen2_5_vl.language import Attention
        from mlx_vlm.models.qwen2_5_vl.vision import VisionModel

        return {VisionModel: window_runs(VisionModel), Attention: seal_masks(Attention)}


@register(ModelSpec(family="qwen3_vl", model_types=("qwen3_vl",), video=True))
class Qwen3VL(MRoPEAdapter):
    """M-RoPE and deepstack: features of several vision layers are added to the picture positions of the first text layers.

    A video's time steps are pictures with their seconds in words before them.
    """

    compiles = True
    video_sampling = Sampling(frame_factor=1)
    prefill_axes = {"visual_pos_masks": 1, "deepstack_visual_embeds": None}

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.qwen3_vl.language import Attention

        return {Attention: seal_masks(Attention)}

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        """A chunk takes the deepstack rows of its own picture positions (mlx-vlm's batch takes the whole prompt's)."""
        if "deepstack_visual_embeds" not in encoded.prefill:  # text, or picture features that came without them
            return {}
        mask = encoded.prefill["visual_pos_masks"]  # (1, L)
        before, inside = int(mask[:, :start].sum().item()), int(mask[:, start:end].sum().item())
        if not inside:
            return {}
        features = [layer[before : before + inside] for layer in encoded.prefill["deepstack_visual_embeds"]]
        return {"visual_pos_masks": cut(mask, 1, start, end), "deepstack_visual_embeds": features}


@register(
    ModelSpec(
        family="qwen3_vl_moe",
        model_types=("qwen3_vl_moe",),
        video=True,
        notes=(
            "the vision blocks take the tanh form of GELU and the mergers the exact one, as in transformers; mlx-vlm has "
            "them the other way round (qwen3_vl_moe/vision.py:109 and :164)",
        ),
    )
)
class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL with experts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # transformers: Qwen3VLMoeVisionMLP takes hidden_act, gelu_pytorch_tanh; Qwen3VLMoeVisionPatchMerger nn.GELU().
        tower = self.model.vision_tower
        for block in tower.blocks:
            block.mlp.act_fn = nn.GELU(approx="tanh")
        for merger in (tower.merger, *tower.deepstack_merger_list):
            merger.act_fn = nn.GELU()

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.qwen3_vl_moe.language import Attention

        return {Attention: seal_masks(Attention)}  # cut to the longest row at qwen3_vl_moe/language.py:107


@register(
    ModelSpec(
        family="qwen3_5",
        model_types=("qwen3_5", "indic_ocr", "prism_hadamard_qwen35"),
        video=True,
        notes=(
            "the OCR stage of IndicOCR is this model; its layout stage and the pipeline of both are not served",
            "Hadamard packs (prism_hadamard_qwen35) are this model with 2-bit weights and rotated activations",
        ),
    )
)
class Qwen35(MRoPEAdapter):
    """M-RoPE; most layers keep a recurrent state and not keys and values."""

    video_sampling = Sampling(frame_factor=1)

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.qwen3_5.language import Qwen3_5Attention

        return {Qwen3_5Attention: seal_masks(Qwen3_5Attention)}  # cut to the longest row at qwen3_5/language.py:1024


@register(ModelSpec(family="qwen3_5_moe", model_types=("qwen3_5_moe",), video=True))
class Qwen35Moe(Qwen35):
    """Qwen3.5 with experts."""


@register(
    ModelSpec(
        family="qwen3_omni_moe",
        model_types=("qwen3_omni_moe",),
        no_video="a video's positions are fractions of seconds in the published model (modeling_qwen3_omni_moe.py, "
        "get_rope_index) and whole frames in mlx-vlm's",
        notes=(
            "pictures and text in, text out; sound and video are refused, and nothing is spoken",
            "the vision blocks take the tanh form of GELU, as configured and as in transformers; mlx-vlm fixes the exact "
            "one (qwen3_omni_moe/vision.py:163)",
        ),
    )
)
class Qwen3OmniMoe(MRoPEAdapter):
    """The thinker of Qwen3-Omni; its deepstack features come expanded to the prompt's positions."""

    input_keys = GridAdapter.input_keys
    prefill_axes: ClassVar[Mapping[str, int | None]] = {"deepstack_visual_embeds": 1}
    #: Says where the features are not zero; the decoder adds them everywhere (qwen3_omni_moe/language.py, _deepstack_process).
    ignored_features = frozenset({"visual_pos_masks"})

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.config = self.config.thinker_config
        for block in self.model.thinker.vision_tower.blocks:
            block.mlp.act_fn = nn.GELU(approx="tanh")  # transformers: Qwen3OmniMoeVisionMLP takes hidden_act

    def towers(self) -> list[tuple[nn.Module, str]]:
        return [(self.model.thinker, "vision_tower")]

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.qwen3_omni_moe.language import Attention

        return {Attention: seal_masks(Attention)}  # cut to the longest row at qwen3_omni_moe/language.py:123
