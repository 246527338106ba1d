"""Replacement modules for Gemma 4."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.gemma4.language import Gemma4TextModel, LanguageModel, logit_softcap


class PictureMasks(Gemma4TextModel):
    """Takes a chunk's masks by kind of layer; mlx-vlm makes a whole prompt's (gemma4/language.py:499)."""

    def _make_masks(
        self, h: mx.array, cache: Any, mm_token_type_ids: Any = None
    ) -> list[Any]:
        masks = super()._make_masks(h, cache)
        kinds = dict(mm_token_type_ids or {})
        for index, (layer, entry) in enumerate(zip(self.layers, cache, strict=True)):
            if layer.layer_type in kinds:
                # a layer without a cache shares an earlier one's keys
                if entry is not None:
                    usual = entry.make_mask(
                        h.shape[1], window_size=self.window_size, return_array=True
                    )
                    kinds[layer.layer_type] = kinds[layer.layer_type][
                        ..., -usual.shape[-1] :
                    ]
                masks[index] = kinds[layer.layer_type]
        return masks


class OwnHead(LanguageModel):
    """mlx-vlm's head is always tied (gemma4/language.py:687)."""

    def logits_from_hidden(self, hidden: mx.array) -> mx.array:
        if "lm_head" not in self:
            return super().logits_from_hidden(hidden)
        logits, bound = self.lm_head(hidden), self.final_logit_softcapping
        return logits if bound is None else logit_softcap(bound, logits)


PATCHES: dict[type, type] = {Gemma4TextModel: PictureMasks, LanguageModel: OwnHead}
