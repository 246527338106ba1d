"""DeepSeek-V4.1: shared pooled keys, n-gram tables, rounded activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.attention import each_row
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import (
    RememberingTower,
    evaluate_arrays,
    leave_on_disk,
    patches_in,
    unshared,
)
from vlm_batch.adapters.prompts import spans_of
from vlm_batch.caches import RowsCache
from vlm_batch.errors import InvalidPrompt, UnsupportedModel
from vlm_batch.records import Picture
from vlm_batch.registry import ModelSpec, register


class Rows:
    """Replaces the cache that mlx-vlm's layers share by one per row."""

    def __init__(self, cache: RowsCache) -> None:
        self.cache = cache

    def map(
        self, function: Callable[..., mx.array], *arrays: mx.array | None
    ) -> mx.array:
        """Call a function per row with its cache and parts (1, ...): (B, ...), zeros for empty places."""
        return each_row(function, self.cache, self.cache, *arrays)

    @property
    def offset(self) -> mx.array:
        return self.cache.offset

    def advance(self, width: int) -> None:
        for row in self.cache.places:
            if row is not None:
                row.advance(width)


@register(
    ModelSpec(
        family="deepseek_v41",
        model_types=("deepseek_v41",),
        notes=(
            "attention runs a row at a time; projections, experts and the n-grams' tables run for all rows at once",
            "a checkpoint without the map of its n-grams' tokens is refused; mlx-vlm leaves its tables out of the answer "
            "and says nothing (deepseek_v41/language.py:1282)",
            "activations are rounded to 8 and 4 bits as in training: a sum in another order can change an answer. The tests "
            "compare the model without this rounding",
        ),
    )
)
class DeepseekV41(Adapter):
    last_hidden = "norm"
    embeddings = "embed_tokens"
    tower_class = unshared(RememberingTower, "its tower takes one picture a call")
    patches = patches_in("vlm_batch.models._deepseek_v41")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        leave_on_disk(self.model)
        try:
            self.language._ensure_engram_hash()
        except ValueError as error:
            raise UnsupportedModel(
                f"the map of the n-grams' tokens is not this model's: (kinds of tokens, as config.json has them) = {error}"
            ) from error
        if self.language.layout is not None and self.language.engram_hash is None:
            raise UnsupportedModel(
                "the n-grams' tables cannot be read without the map of their tokens: the checkpoint's folder has neither "
                "engram_token_map.json nor tokenizer.json, or the model was not loaded from a folder"
            )
        evaluate_arrays(self.language)

    def forward(
        self,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Sequence[Any],
        extra: Mapping[str, Any],
    ) -> mx.array:
        """Pass the ids, which n-grams and experts need."""
        shared = Rows(cache[0]) if isinstance(cache[0], RowsCache) else cache[0]
        return self.language(ids, inputs_embeds=embeds, cache=[shared]).logits[:, -1]

    # Pictures
    # ----------------------------------------------------------------------------------------------------------------

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse pictures outside placeholders: mlx-vlm would overwrite words."""
        spans = [(one.start, one.start + len(one.types)) for one in self.given(extra)]
        marked = {
            at for span in spans_of(ids, self.image_token_ids) for at in range(*span)
        }
        if marked != {at for span in spans for at in range(*span)}:
            needed = sum(end - start for start, end in spans)
            raise InvalidPrompt(
                f"{len(spans)} pictures need {needed} placeholder tokens at their places; the prompt has {len(marked)}"
            )
        return super().features(ids, extra)

    def given(self, extra: Mapping[str, Any]) -> list[Any]:
        prompts = extra.get("pixel_values") or [[]]
        if len(prompts) > 1:
            raise InvalidPrompt(
                "the pictures belong to several prompts; a request is one prompt with its own pictures"
            )
        return list(prompts[0])

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        return tuple(
            Picture(
                one.start,
                one.start + len(one.types),
                {
                    "pixels": one.patches,
                    "grid": [one.n_vit_h, one.n_vit_w],
                    "types": list(one.types),
                },
            )
            for one in self.given(extra)
        )

    def model_image_sizes(
        self, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        patch = int(self.config.vision_patch_size)
        return tuple(
            (one.n_vit_w * patch, one.n_vit_h * patch) for one in self.given(extra)
        )
