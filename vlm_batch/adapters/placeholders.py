"""Adapters of families whose prompts hold one id for each picture, often one that is no token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.prompts import put_features, repeat_placeholders


class OnePlaceholder(Adapter):
    """Every placeholder becomes as many positions as its picture has features."""

    def expand_ids(self, ids: mx.array, extra: Mapping[str, Any]) -> mx.array:
        if "pixel_values" not in extra:
            return ids
        (marker,) = self.image_token_ids()
        return repeat_placeholders(ids, marker, self.count_features(extra))

    def count_features(self, extra: Mapping[str, Any]) -> list[int]:
        """Count each picture's features; this needs none of them made."""
        given = extra.get("cached_image_features")
        return self.count_positions(extra) if given is None else [len(picture) for picture in given]

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        embeds = self.language.model.embed_tokens(mx.maximum(ids, 0))
        if "pixel_values" in extra:
            given = extra.get("cached_image_features")
            pictures = self.encode_pictures(extra) if given is None else list(given)
            embeds = put_features(embeds, ids, self.image_token_ids(), mx.concatenate(pictures))
        return {"inputs_embeds": embeds}

    def count_positions(self, extra: Mapping[str, Any]) -> list[int]:
        """Count the features that the family's tower makes of each picture."""
        raise NotImplementedError

    def encode_pictures(self, extra: Mapping[str, Any]) -> list[mx.array]:
        """The features (tokens, D) of each picture."""
        raise NotImplementedError
