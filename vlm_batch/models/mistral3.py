"""Mistral 3: Pixtral's pictures before Mistral decoders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.modules import patching, under
from vlm_batch.models.pixtral import Pixtral
from vlm_batch.registry import ModelSpec, register

#: transformers, modeling_mistral4.py, Mistral4RMSNorm.
LATENT_EPS = 1e-6


class ByOwnPosition:
    """Scales queries by each row's positions; mlx-vlm by the first's (mistral3/language.py:180, mistral4/language.py:267)."""

    config: Any

    def __call__(
        self, x: mx.array, attn_scale: mx.array, mask: Any = None, cache: Any = None
    ) -> mx.array:
        theirs: Any = super()
        found: mx.array = theirs.__call__(
            x, query_scale(self.config, cache.offset, x), mask, cache
        )
        return found


class AtStart:
    """A layer's cache with offset 0, of which an unused factor is made."""

    offset = 0

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class Layers(list[Any]):
    """Layers' caches; an index gives ``AtStart``, iteration the cache itself."""

    def __getitem__(self, at: Any) -> Any:
        return AtStart(super().__getitem__(at))


def without_waiting(trunk: type) -> type:
    """Return a decoder that does not read the first row's offset back (mistral3/language.py:180)."""

    class Trunk(trunk):  # type: ignore[misc]
        def __call__(self, inputs: mx.array, cache: Any = None, **how: Any) -> mx.array:
            return super().__call__(inputs, cache=cache and Layers(cache), **how)  # type: ignore[no-any-return]

    return Trunk


class GridMerger:
    """Merges all squares of patches at once. mlx-vlm cuts out each patch by itself (mistral3/mistral3.py:74)."""

    spatial_merge_size: int
    patch_size: int
    merging_layer: Any

    def __call__(self, image_features: mx.array, image_sizes: mx.array) -> mx.array:
        """States (N, D) -> (N / merge**2, D)."""
        merge, merged, begin = self.spatial_merge_size, [], 0
        for high, wide in (
            np.array(image_sizes).astype(int) // self.patch_size
        ).tolist():
            rows, columns = high // merge, wide // merge
            plane = image_features[begin : begin + high * wide].reshape(high, wide, -1)
            grid = plane[: rows * merge, : columns * merge]
            squares = grid.reshape(rows, merge, columns, merge, -1).transpose(
                0, 2, 4, 1, 3
            )
            merged.append(squares.reshape(rows * columns, -1))
            begin += high * wide
        found: mx.array = self.merging_layer(mx.concatenate(merged))
        return found


def yarn_scale(rope: Mapping[str, Any]) -> float:
    """Return YaRN's factor for partly rotated keys (transformers, modeling_rope_utils.py, yarn_apply_mscale)."""
    kind = rope.get("rope_type", rope.get("type"))
    factor = rope.get("factor", 1.0)
    all_dim = rope.get("mscale_all_dim")
    if kind != "yarn" or not all_dim or factor <= 1:
        return 1.0
    return float((0.1 * all_dim * math.log(factor) + 1) ** 2)


def query_scale(config: Any, offset: Any, x: mx.array) -> mx.array:
    """Return the queries' factor (1 or B, 1, L, 1) after ``offset`` (int or (B,)) tokens.

    1 + beta * log(1 + floor(position / length)) (transformers, modeling_ministral3.py).
    """
    rope = config.rope_parameters
    start = offset[:, None] if isinstance(offset, mx.array) else offset
    periods = mx.floor(
        (start + mx.arange(x.shape[1])) / rope["original_max_position_embeddings"]
    )
    scale = 1 + rope["llama_4_scaling_beta"] * mx.log(1 + periods)
    return scale.reshape(-1, 1, x.shape[1], 1).astype(x.dtype)


@register(
    ModelSpec(
        family="mistral3",
        model_types=("mistral3",),
        notes=(
            "queries of Ministral 3 and Mistral 4 grow with each row's own position; mlx-vlm takes the first row's for all "
            "(mistral3/language.py:180, mistral4/language.py:267)",
            "Mistral 4's attention has YaRN's factor, as in transformers (modeling_mistral4.py, yarn_apply_mscale); mlx-vlm "
            "leaves it out (mistral4/language.py:34); and the norms of its latents have an epsilon of 1e-6, not 1e-5",
        ),
    )
)
class Mistral3(Pixtral):
    #: The merger's class, for ``patching``.
    merger: ClassVar[Any] = ("mistral3.mistral3.Mistral3PatchMerger", under(GridMerger))
    patches = patching(
        *Pixtral.sized,
        merger,
        ("mistral3.language.Attention", under(ByOwnPosition)),
        ("mistral4.language.Mistral4Attention", under(ByOwnPosition)),
        ("mistral3.language.Ministral3", without_waiting),
        ("mistral4.language.Mistral4Model", without_waiting),
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        text = self.config.text_config
        for layer in self.language.layers:
            layer.self_attn.config = text  # for ``query_scale``
            if text.model_type == "mistral4":
                layer.self_attn.scale = layer.self_attn.qk_head_dim**-0.5 * yarn_scale(
                    text.rope_parameters
                )
                for norm in (
                    layer.self_attn.get("q_a_layernorm"),
                    layer.self_attn.kv_a_layernorm,
                ):
                    if norm is not None:
                        norm.eps = LATENT_EPS
