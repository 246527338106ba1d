"""Adapters that put pictures' features into the prompt themselves, in the place of its placeholders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.prompts import put_features, repeat_placeholders
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Picture


class PlacingAdapter(Adapter):
    """Families whose prompts hold a placeholder for each of a picture's features, where mlx-vlm puts them in wrongly."""

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Embeddings with each picture's features in its placeholders, some of which are no tokens (below 0)."""
        embeds = self.token_table(mx.maximum(ids, 0))
        if "pixel_values" in extra:
            given = extra.get("cached_image_features")
            given = self.encode_pictures(extra, embeds.dtype) if given is None else given
            pictures = [given] if isinstance(given, mx.array) else given
            rows = mx.concatenate([picture.reshape(-1, picture.shape[-1]) for picture in pictures])  # (N, D)
            embeds = put_features(embeds, ids, self.image_token_ids, self.to_embeddings(rows, embeds.dtype))
        return {"inputs_embeds": embeds}

    def encode_pictures(self, extra: Mapping[str, Any], dtype: mx.Dtype) -> list[mx.array]:
        """Encode a request's pictures: the features (tokens, D) of each. ``dtype`` is that of embeddings."""
        raise NotImplementedError

    def to_embeddings(self, features: mx.array, dtype: mx.Dtype) -> mx.array:
        """Bring features (N, D) to the scale of embeddings; the default leaves them as they are."""
        return features


class OnePlaceholder(PlacingAdapter):
    """Families whose prompts hold one id for each picture, which becomes as many positions as its picture has features."""

    def expand_ids(self, ids: mx.array, extra: Mapping[str, Any]) -> mx.array:
        if "pixel_values" not in extra:
            return ids
        (marker,) = self.image_token_ids
        return repeat_placeholders(ids, marker, self.count_features(extra))

    def count_features(self, extra: Mapping[str, Any]) -> list[int]:
        """Count each picture's features; this needs none of them made."""
        given = extra.get("cached_image_features")
        return self.count_positions(extra) if given is None else [len(picture) for picture in given]

    def count_positions(self, extra: Mapping[str, Any]) -> list[int]:
        """Count the features that the family's tower makes of each picture."""
        raise NotImplementedError


class MaskedPlaces(Adapter):
    """Families whose processors say by ``images_seq_mask`` (1, L) where features go."""

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """The mask is as long as the prompt and says no more than its ids: it is no part of a picture."""
        return super().pictures(ids, {name: value for name, value in extra.items() if name != "images_seq_mask"})

    def count_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> int | None:
        if (mask := extra.get("images_seq_mask")) is None:
            return None
        masked, marked = np.array(mask).astype(bool), np.isin(np.array(ids), list(self.image_token_ids))
        if masked.sum() == marked.sum() and not np.array_equal(masked, marked):
            raise InvalidPrompt("images_seq_mask marks other positions than those of the prompt's placeholder tokens")
        return int(masked.sum())
