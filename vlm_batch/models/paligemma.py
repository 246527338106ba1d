"""PaliGemma 1 and 2: SigLIP before Gemma; the prompt attends both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.modules import RememberingBatchTower, patches_in
from vlm_batch.adapters.placeholders import PlacingAdapter
from vlm_batch.records import DecodeStep
from vlm_batch.registry import ModelSpec, register


class LastStates(RememberingBatchTower):
    """Keeps the last states; the tower's other outputs are the first picture's."""

    def fresh(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        *_, states = self.tower(*args, **kwargs)
        return None, None, [states[-1]]


@register(
    ModelSpec(
        family="paligemma",
        model_types=("paligemma",),
        special_tokens=(
            (
                "<loc0000>",
                "boxes are <loc0000> to <loc1023>, masks <seg000> to <seg127>, parts of the answer's text "
                "(big_vision, README of PaliGemma); ordinary tokens in the published tokenizer, special ones in "
                "some copies",
            ),
        ),
        chunked_prefill=False,
        notes=(
            "a prompt is one chunk: its tokens attend to each other both ways",
            "every picture's features go to its own placeholders; mlx-vlm encodes the first only (paligemma/vision.py:48) "
            "and puts them at the start of the prompt (paligemma/paligemma.py:119)",
            "picture features enter at their own scale, as in transformers (modeling_paligemma.py); mlx-vlm divides them "
            "by the root of the checkpoint's hidden_size, which in PaliGemma 2 is not the text's (paligemma.py:96)",
        ),
    )
)
class PaliGemma(PlacingAdapter):
    """``use_bidirectional_attention: false`` makes a causal prompt."""

    tower_class = LastStates
    ignored = frozenset({"labels"})
    patches = patches_in("vlm_batch.models._paligemma")

    @property
    def is_causal(self) -> bool:
        return not self.config.text_config.use_bidirectional_attention

    def encode_pictures(
        self, extra: Mapping[str, Any], dtype: mx.Dtype
    ) -> list[mx.array]:
        """Norm all pictures; mlx-vlm norms the first (paligemma/vision.py:99)."""
        tower = self.model.vision_tower
        *_, states = tower(
            extra["pixel_values"].astype(dtype).transpose(0, 2, 3, 1),
            output_hidden_states=True,
        )
        return list(
            self.model.multi_modal_projector(
                tower.vision_model.post_layernorm(states[-1])
            )
        )

    def to_embeddings(self, features: mx.array, dtype: mx.Dtype) -> mx.array:
        return features / mx.array(features.shape[-1] ** 0.5, dtype=dtype)

    def atomic_spans(
        self, ids: mx.array, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        return ((0, ids.shape[1]),) if not self.is_causal else ()

    def run_step(self, step: DecodeStep) -> mx.array:
        """Pass a mask: without one a token is a prompt (paligemma/language.py:238)."""
        mask = {} if self.is_causal else {"mask": step.caches[0].make_mask(1)}
        return self.forward(step.tokens, None, step.caches, mask)
