"""Jina VLM: picture features are added to tokens by index."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import (
    RememberingTower,
    patching,
    two_tables,
    under,
    unshared,
)
from vlm_batch.errors import InvalidPrompt
from vlm_batch.registry import ModelSpec, register


class RowRoPE:
    """Rotates by each row's offset; mlx-vlm by the farthest for all (jina_vlm/language.py:43)."""

    _inv_freq: mx.array

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """(B, H, L, D) -> (B, H, L, D); offset is an int, or (B,)."""
        # (B or 1, L)
        positions = mx.array(offset).reshape(-1, 1) + mx.arange(x.shape[2])
        # (B or 1, 1, L, D / 2)
        angles = (positions.astype(mx.float32)[..., None] * self._inv_freq)[:, None]
        cos, sin = mx.cos(angles), mx.sin(angles)
        first, second = mx.split(x, 2, axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin]
        return mx.concatenate(turned, axis=-1).astype(x.dtype)


@register(
    ModelSpec(
        family="jina_vlm",
        model_types=("jina_vlm", "jvlm"),
        notes=(
            "RoPE takes each row's own offset; mlx-vlm takes the farthest row's for all (jina_vlm/language.py:43)",
        ),
    )
)
class JinaVLM(Adapter):
    embeddings = "embedding"
    last_hidden = "ln_f"
    tower_class = unshared(
        RememberingTower, "mlx-vlm's code calls the tower's parts, and not the tower"
    )
    input_keys = Adapter.input_keys | {"image_input_idx", "image_masks"}
    patches = patching(
        ("jina_vlm.language.RoPE", under(RowRoPE)),
        ("jina_vlm.language.ExtendedEmbedding", two_tables),
    )

    def check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        """Check that ``image_input_idx`` adds features at placeholders only."""
        super().check_placeholders(ids, extra)
        if "image_input_idx" not in extra:
            return
        index = np.array(extra["image_input_idx"]).reshape(-1)
        is_picture = np.isin(np.array(ids)[0], list(self.image_token_ids))
        used = index[index >= 0]
        places = int(is_picture.sum())
        if places > len(index) or (
            used.size and (used.max() >= len(is_picture) or not is_picture[used].all())
        ):
            raise InvalidPrompt(
                f"image_input_idx has places for {len(used)} of {len(index)} features; the prompt has {places} placeholder "
                "tokens, and not at all of these places"
            )

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Add all features at once (jina_vlm/jina_vlm.py:231)."""
        if "pixel_values" not in extra or "image_input_idx" not in extra:
            return super().features(ids, {})
        found = extra.get("cached_image_features")
        if found is None:
            pixels, masks = extra["pixel_values"], extra.get("image_masks")
            if pixels.ndim == 3:
                pixels, masks = pixels[None], None if masks is None else masks[None]
            found = self.model.get_image_features(pixels, masks)
        index = np.array(extra["image_input_idx"]).reshape(-1)
        used = np.flatnonzero((index >= 0) & (index < ids.shape[1]))
        added = found.reshape(len(index), -1)[mx.array(used)]
        return {
            "inputs_embeds": self.language.embedding(ids)
            .at[0, mx.array(index[used])]
            .add(added)
        }

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        return frozenset({self.config.image_patch_token_id})
