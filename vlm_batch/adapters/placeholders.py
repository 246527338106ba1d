"""Adapters that put picture features into the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.placing import Merge
from vlm_batch.adapters.prompts import put_features, repeat_placeholders
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Picture


class PlacingAdapter(Adapter):
    """Families with a placeholder per feature, where mlx-vlm's merge is wrong."""

    merge: ClassVar[Merge | None] = None

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Embed the prompt and fill its placeholders, whose ids may be negative."""
        embeds = self.token_table(mx.maximum(ids, 0))
        if "pixel_values" in extra:
            given = extra.get("cached_image_features")
            given = (
                self.encode_pictures(extra, embeds.dtype) if given is None else given
            )
            pictures = [given] if isinstance(given, mx.array) else given
            # (N, D)
            rows = mx.concatenate(
                [picture.reshape(-1, picture.shape[-1]) for picture in pictures]
            )
            embeds = put_features(
                embeds,
                ids,
                self.image_token_ids,
                self.to_embeddings(rows, embeds.dtype),
            )
        return {"inputs_embeds": embeds}

    def encode_pictures(
        self, extra: Mapping[str, Any], dtype: mx.Dtype
    ) -> list[mx.array]:
        """Return each picture's features (tokens, D)."""
        raise NotImplementedError

    def to_embeddings(self, features: mx.array, dtype: mx.Dtype) -> mx.array:
        """Scale features (N, D) to embeddings; the default returns them."""
        return features


class OnePlaceholder(PlacingAdapter):
    """Families with one placeholder per picture."""

    def expand_ids(self, ids: mx.array, extra: Mapping[str, Any]) -> mx.array:
        if "pixel_values" not in extra:
            return ids
        (marker,) = self.image_token_ids
        return repeat_placeholders(ids, marker, self.count_features(extra))

    def count_features(self, extra: Mapping[str, Any]) -> list[int]:
        given = extra.get("cached_image_features")
        return (
            self.count_positions(extra)
            if given is None
            else [len(picture) for picture in given]
        )

    def count_positions(self, extra: Mapping[str, Any]) -> list[int]:
        """Count the features that the tower makes of each picture."""
        raise NotImplementedError


class MaskedPositions(Adapter):
    """Families whose processors mark features by ``images_seq_mask`` (1, L)."""

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        return super().pictures(
            ids,
            {name: value for name, value in extra.items() if name != "images_seq_mask"},
        )

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        mask = extra.get("images_seq_mask")
        return None if mask is None else int(np.array(mask).sum())

    def check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        super().check_placeholders(ids, extra)
        mask, marks = extra.get("images_seq_mask"), list(self.image_token_ids)
        if mask is not None and not np.array_equal(
            np.array(mask).astype(bool), np.isin(np.array(ids), marks)
        ):
            raise InvalidPrompt(
                "images_seq_mask marks other positions than those of the prompt's placeholder tokens"
            )
