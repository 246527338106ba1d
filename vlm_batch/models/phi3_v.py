"""Phi-3-Vision and Phi-3.5-Vision: fused projections, LongRoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.attention import fuse_rows
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.longrope import LONG_ROPE_NOTE
from vlm_batch.adapters.modules import patching
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import DecodeStep
from vlm_batch.registry import ModelSpec, register

#: Pixels of a crop's side.
CROP = 336


@register(ModelSpec(family="phi3_v", model_types=("phi3_v",), notes=(LONG_ROPE_NOTE,)))
class Phi3V(Adapter):
    """The k-th picture's placeholders have the id -k."""

    input_keys = frozenset({"pixel_values", "image_sizes"})
    # mlx-vlm calls ``mx.fast`` itself (phi3_v.py:89).
    patches = patching(
        (
            "phi3_v.phi3_v.Attention",
            lambda attention: fuse_rows(attention, "qkv_proj", "o_proj"),
        )
    )

    def run_step(self, step: DecodeStep) -> mx.array:
        """Embed tokens here: mlx-vlm reads ids back to look for pictures (phi3_v.py:211)."""
        return self.forward(step.tokens, self.token_table(step.tokens), step.caches, {})

    def check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        super().check_placeholders(ids, extra)
        tokens, each = np.array(ids)[0], int(self.config.vision_config.num_img_tokens)
        for index, (high, wide) in enumerate(
            (np.array(extra.get("image_sizes", ())) // CROP).tolist()
        ):
            needed = (high * wide + 1) * each + 1 + (high + 1) * math.isqrt(each)
            given = int((tokens == -1 - index).sum())
            if given != needed:
                raise InvalidPrompt(
                    f"picture {index + 1} needs {needed} placeholder tokens; the prompt has {given}"
                )

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        given = len(set(np.array(ids)[0].clip(max=0).tolist()) - {0})
        needed = len(extra.get("image_sizes", ()))
        if given != needed:
            raise InvalidPrompt(
                f"the prompt has placeholders for {given} pictures, and {needed} are given"
            )
        return super().features(ids, extra)

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        return frozenset(range(-256, 0))
