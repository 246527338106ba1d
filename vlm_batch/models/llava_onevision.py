"""LLaVA-OneVision: tiles of pictures, pooled video frames."""

from __future__ import annotations

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower
from vlm_batch.adapters.placing import Merge
from vlm_batch.inputs.videos import Sampling
from vlm_batch.records import Graphs
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="llava_onevision",
        model_types=("llava_onevision",),
        video=True,
        notes=(
            "several videos in one prompt must give equally many frames: mlx-vlm's processor stacks them, and refuses others "
            "(processing_llava_onevision.py:79)",
        ),
    )
)
class LlavaOnevision(Adapter):
    graphs = Graphs.IF_ASKED
    merge = Merge("_scatter_features", keeps_type=True)
    tower_class = RememberingBatchTower
    input_keys = Adapter.input_keys | {"image_sizes", "pixel_values_videos"}
    #: At most 32 frames of 196 tokens (arXiv:2408.03326, section 3.2).
    video_sampling = Sampling(num_frames=32, frame_factor=1)
    ignored = frozenset({"batch_num_images"})
