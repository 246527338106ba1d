"""Qwen3.5: M-RoPE, recurrent states in most layers."""

from __future__ import annotations

from typing import Any, ClassVar

from vlm_batch.adapters.attention import seal_masks
from vlm_batch.adapters.deepstack import HostPositions
from vlm_batch.adapters.grids import MRoPEAdapter
from vlm_batch.adapters.modules import patching, under, unshared
from vlm_batch.adapters.placing import Merge
from vlm_batch.adapters.recurrent import in_order
from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.inputs.videos import Sampling
from vlm_batch.registry import ModelSpec, register

#: Reason why pictures of several requests to a Hadamard pack do not share calls.
PACKED = "features become float16 among a pack's embeddings: other last bits of the tower are seen in its answers"


@register(
    ModelSpec(
        family="qwen3_5",
        model_types=("qwen3_5", "indic_ocr", "prism_hadamard_qwen35"),
        video=True,
        notes=(
            "the OCR stage of IndicOCR is this model; its layout stage and the pipeline of both are not served",
            "Hadamard packs (prism_hadamard_qwen35) are this model with 2-bit weights and rotated activations",
        ),
        not_on_cuda=(
            (
                "prism_hadamard_qwen35",
                "log-probabilities of its tiny model were 6e-4 off those of the same request alone on an H100, six times what "
                "is allowed",
            ),
        ),
    )
)
class Qwen35(MRoPEAdapter):
    merge: ClassVar[Merge | None] = Merge(
        "merge_input_ids_with_image_features",
        keeps_type=True,
        takes_all=True,
        gives_mask=True,
    )
    _masks_states = True
    video_sampling = Sampling(frame_factor=1)
    patches = patching(
        # cut to the longest row at qwen3_5/language.py:1024
        ("qwen3_5.language.Qwen3_5Attention", seal_masks),
        (
            "qwen3_5.language.Qwen3_5GatedDeltaNet",
            lambda net: in_order(
                net,
                ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
                "out_proj",
                has_history=True,
            ),
        ),
        ("qwen3_vl.vision.Attention", attend_pictures),
        ("qwen3_vl.vision.PatchEmbed", embed_by_product),
        ("qwen3_5.vision.VisionModel", under(HostPositions)),
        ("qwen3_5_moe.vision.VisionModel", under(HostPositions)),
    )

    def __init__(self, model: Any) -> None:
        if getattr(model.config, "model_type", None) == "prism_hadamard_qwen35":
            self.tower_class = unshared(type(self).tower_class, PACKED)
        super().__init__(model)
