"""Mistral Large 3: Pixtral's tower before DeepSeek-V3's decoder."""

from __future__ import annotations

from vlm_batch.adapters.modules import patches_in
from vlm_batch.models.mistral3 import Mistral3
from vlm_batch.models.pixtral import Pixtral
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="mistral_large3",
        model_types=("mistral_large3",),
        notes=(
            "pictures reach the decoder; mlx-vlm's embeds the placeholders' ids in their place, for this family's text "
            "model ignores the embeddings that it is given (deepseek_v3/language.py:519)",
            "experts, in one group, are weighed by a softmax, as in vLLM (configs/mistral.py, _remap_moe_args) and in "
            "transformers' Mistral 4; mlx-vlm weighs them by sigmoids, as DeepSeek-V3's (deepseek_v3/language.py:159)",
            "positions are as config.json says (rope_scaling). mlx-vlm's translation of params.json leaves out its YaRN and "
            "the growth of queries after 8,192 tokens (mistral_large3/config.py:78), and so do checkpoints made with it",
        ),
    )
)
class MistralLarge3(Pixtral):
    last_hidden = "model.norm"
    patches = patches_in(
        "vlm_batch.models._mistral_large3", *Pixtral.sized, Mistral3.merger
    )
