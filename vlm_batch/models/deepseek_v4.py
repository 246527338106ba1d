"""DeepSeek-V4: sliding windows, indexed pools of keys, experts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import RotatingKVCache

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingTower, patches_in, unshared
from vlm_batch.caches import PoolCache, WholeCache
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Picture
from vlm_batch.registry import ModelSpec, register

#: Ids after the vocabulary that mark a picture, from START to END (processing_deepseek_v4.py:14).
START, END, NUM_MARKS = 0, 4, 5
#: Outputs of the processor with one entry per picture.
PER_PICTURE = ("image_grid_hw", "image_sample_indices", "image_offsets")


@register(
    ModelSpec(
        family="deepseek_v4",
        model_types=("deepseek_v4",),
        notes=(
            "a pool is made of its four tokens and the four before, as in transformers and DeepSeek's own code; mlx-vlm "
            "forgets the four before at each chunk, each decoded token and in prompts of up to eight tokens "
            "(deepseek_v4/language.py:403 and :857)",
            "every pool is scored by the indexer, as in transformers; from 1,024 pools on (4,096 tokens) mlx-vlm chooses among "
            "means of blocks and never takes the last, incomplete block's (deepseek_v4/language.py:685 and :745)",
            "a step runs for all rows at once: each row's window and pools are filled up to the longest (on CUDA attention "
            "runs a row at a time)",
            "keys and pools are not rounded to 8 and 4 bits, as in mlx-vlm and transformers; DeepSeek's own code rounds them",
        ),
    )
)
class DeepseekV4(Adapter):
    """Pictures are spans of ids past the vocabulary, attending both ways."""

    last_hidden = None
    tower_class = unshared(RememberingTower, "its tower takes one picture a call")
    input_keys = Adapter.input_keys | {
        *PER_PICTURE,
        "image_types",
        "image_type_offsets",
        "image_permutations",
    }
    patches = patches_in("vlm_batch.models._deepseek_v4")

    def row_caches(self) -> list[Any]:
        caches: list[Any] = []
        for layer in self.language.layers:
            window = RotatingKVCache(max_size=self.config.sliding_window)
            ratio = layer.attn.compress_ratio
            kinds = [layer.attn.compressor] if "compressor" in layer.attn else []
            kinds += [layer.attn.indexer.compressor] if "indexer" in layer.attn else []
            pools = [PoolCache(ratio, overlaps=kind.overlap) for kind in kinds]
            caches.append(WholeCache(window, *pools) if pools else window)
        return caches

    def forward(
        self,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Sequence[Any],
        extra: Mapping[str, Any],
    ) -> mx.array:
        # (B, 1, D)
        hidden = self.language.model(ids, inputs_embeds=embeds, cache=cache)
        return self.language.lm_head(hidden)[:, -1]

    # Pictures
    # ----------------------------------------------------------------------------------------------------------------

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        size = int(self.config.vocab_size)
        return (
            frozenset(range(size, size + NUM_MARKS))
            if self.config.vision_n_layers
            else frozenset()
        )

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        if "image_grid_hw" not in extra:
            return 0
        return sum(
            len(np.array(extra["image_types"])[start:end])
            for start, end in self.parts(extra)
        )

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        if "image_grid_hw" in extra and np.any(np.array(extra["image_sample_indices"])):
            raise InvalidPrompt(
                "the pictures belong to several prompts; a request is one prompt with its own pictures"
            )
        return super().features(ids, extra)

    def parts(self, extra: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return each picture's range [start, end) of ``image_types``."""
        return list(itertools.pairwise(np.array(extra["image_type_offsets"]).tolist()))

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        if "image_grid_hw" not in extra:
            return ()
        grids = np.array(extra["image_grid_hw"])
        ends = np.cumsum(grids.prod(axis=1)).tolist()
        starts = np.array(extra["image_offsets"]).tolist()
        return tuple(
            Picture(
                start,
                start + last - first,
                {
                    "pixels": extra["pixel_values"][end - grid.prod() : end],
                    "grid": grid,
                },
            )
            for start, end, grid, (first, last) in zip(
                starts, ends, grids, self.parts(extra), strict=True
            )
        )

    def atomic_spans(
        self, ids: mx.array, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        """Return spans from start to end marks; padding before is causal."""
        if not self.config.vision_n_layers:
            return ()
        tokens, size = np.array(ids)[0], int(self.config.vocab_size)
        starts, ends = (
            np.flatnonzero(tokens == size + mark).tolist() for mark in (START, END)
        )
        return tuple((start, end + 1) for start, end in zip(starts, ends, strict=True))

    def model_image_sizes(
        self, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        if "image_grid_hw" not in extra:
            return ()
        patch = int(self.config.vision_patch_size)
        return tuple(
            (wide * patch, high * patch)
            for high, wide in np.array(extra["image_grid_hw"]).tolist()
        )
