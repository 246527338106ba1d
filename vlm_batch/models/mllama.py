"""Llama 3.2 Vision: pictures enter through cross-attention layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import create_attention_mask

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower, patches_in
from vlm_batch.caches.cross import CrossCache
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import DecodeStep, Encoded, Picture
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="mllama",
        model_types=("mllama",),
        notes=(
            "RoPE takes each row's own offset; mlx-vlm takes the longest row's for all (mllama/language.py:150)",
            "the pictures' keys and values stay with the row; mlx-vlm stores none, and attends to halves of the query",
            "a row without pictures skips the cross-attention layers, as transformers does (modeling_mllama.py:1128)",
            "a decoded token sees the tiles of the prompt's last token, as in transformers (modeling_mllama.py:1585); "
            "mlx-vlm forgets the mask after the first token and attends to padding tiles (generate/ar.py:411)",
        ),
    )
)
class Mllama(Adapter):
    """Cross-attention adds nothing to rows without pictures."""

    tower_class = RememberingBatchTower
    input_keys = Adapter.input_keys | {
        "aspect_ratio_ids",
        "aspect_ratio_mask",
        "cross_attention_mask",
    }
    #: ``seen`` (1, L, images * tiles), bool: the tiles that a token sees.
    prefill_axes: ClassVar[Mapping[str, int | None]] = {
        "cross_attention_states": None,
        "seen": 1,
    }
    patches = patches_in("vlm_batch.models._mllama")

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        pixels = extra.get("pixel_values")  # (1, images, tiles, ...)
        return None if pixels is None else int(pixels.shape[1])

    def check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        """Check also that a mask has what each token sees of each tile."""
        super().check_placeholders(ids, extra)
        pixels = extra.get("pixel_values")
        mask = extra.get("cross_attention_mask")
        needed = None if pixels is None else (*ids.shape, *pixels.shape[1:3])
        given = None if mask is None else tuple(mask.shape)
        if given != needed:
            raise InvalidPrompt(
                "mllama takes its pictures with a cross_attention_mask (1, length, images, tiles): "
                f"here {needed or 'none'}, and it is {given or 'none'}"
            )

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        extra = dict(extra)
        seen = extra.pop("cross_attention_mask", None)  # (1, L, images, tiles)
        found = super().features(ids, extra)
        if "cross_attention_states" in found:
            # The tower's float32 masks make its output float32, and so the whole batch's decode step.
            found["cross_attention_states"] = found["cross_attention_states"].astype(
                found["inputs_embeds"].dtype
            )
            found |= _sight(seen)
        return found

    def features_after(
        self, ids: mx.array, extra: Mapping[str, Any], cached: int
    ) -> dict[str, Any]:
        found = super().features_after(ids, extra, cached)
        seen = extra.get("cross_attention_mask")
        return found if seen is None else {**found, **_sight(seen)}

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        positions = np.flatnonzero(
            np.isin(np.array(ids)[0], list(self.image_token_ids))
        ).tolist()
        per_picture = {
            name: value
            for name, value in extra.items()
            if name != "cross_attention_mask"
        }
        if not all(
            value.ndim > 1 and value.shape[1] == len(positions)
            for value in per_picture.values()
        ):
            return super().pictures(ids, extra)
        parts = [
            {name: value[:, index] for name, value in per_picture.items()}
            for index in range(len(positions))
        ]
        masks: Any = [None] * len(positions)
        if "cross_attention_mask" in extra:
            # (images, L, tiles)
            masks = np.array(extra["cross_attention_mask"])[0].swapaxes(0, 1) > 0
        return tuple(
            Picture(at, at + 1, part, seen)
            for at, part, seen in zip(positions, parts, masks, strict=True)
        )

    def row_caches(self) -> list[Any]:
        cross = set(self.config.text_config.cross_attention_layers)
        return [
            CrossCache() if index in cross else single
            for index, single in enumerate(super().row_caches())
        ]

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        features = super().chunk_features(encoded, start, end)
        if not features:
            return {}
        visible, sees = self._visible(features["seen"])
        states = (
            features.get("cross_attention_states") if start == encoded.cached else None
        )
        return {
            "cross_attention_states": states,
            "cross_attention_mask": visible,
            "full_text_row_masked_out_mask": sees,
        }

    def finish_prefill(self, encoded: Encoded, cache: list[Any]) -> None:
        """Drop tiles unseen by the prompt's last token."""
        if "seen" in encoded.prefill:
            visible, _ = self._visible(encoded.prefill["seen"][:, -1:])
            kept = mx.array(np.flatnonzero(np.array(visible)))
            for entry in cache:
                if isinstance(entry, CrossCache):
                    entry.select(kept)

    def run_step(self, step: DecodeStep) -> mx.array:
        sees = mx.array([extras.get("sees", False) for extras in step.extras])
        mask = {"full_text_row_masked_out_mask": sees[:, None, None, None]}
        return self.forward(step.tokens, None, step.caches, mask)

    def forward(
        self,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Sequence[Any],
        extra: Mapping[str, Any],
    ) -> mx.array:
        """Take the mask of the first self-attention cache."""
        cross = self.config.text_config.cross_attention_layers
        own = next(entry for index, entry in enumerate(cache) if index not in cross)
        return super().forward(
            ids, embeds, cache, {**extra, "mask": create_attention_mask(ids, own)}
        )

    def _visible(self, seen: mx.array) -> tuple[mx.array, mx.array]:
        """(1, L, tiles) -> masks (1, 1, L, keys) and, of the MLP, (1, 1, L, 1).

        A token that sees no tile attends to all, without MLP (transformers, modeling_mllama.py:46, :705).
        """
        vision = self.config.vision_config
        tokens = (vision.image_size // vision.patch_size) ** 2 + 1
        sees = seen.any(axis=-1, keepdims=True)
        return mx.repeat(seen | ~sees, tokens, axis=-1)[:, None], sees[:, None]


def _sight(mask: mx.array) -> dict[str, Any]:
    """Return each token's visible tiles."""
    seen = mask.flatten(2) > 0
    return {"seen": seen, "decode": {"sees": bool(seen[:, -1].any().item())}}
