"""Qwen4-Exp: delta nets, hashed n-grams, sparse attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.attention import HOOKS
from vlm_batch.adapters.base import Adapter, trunk_logits
from vlm_batch.adapters.grids import MRoPEAdapter
from vlm_batch.adapters.hooks import install_hooks
from vlm_batch.adapters.modules import patches_in
from vlm_batch.adapters.placing import Merge
from vlm_batch.caches import IndexedCache
from vlm_batch.inputs.videos import Sampling
from vlm_batch.records import DecodeStep
from vlm_batch.registry import ModelSpec, register

#: File with the functions of sparse attention.
SPARSE = "mlx_vlm.models.qwen4_exp.qsa_kernel"


@register(
    ModelSpec(
        family="qwen4_exp",
        model_types=("qwen4_exp",),
        video=True,
        notes=(
            "attention runs a row at a time, over the blocks of the row's own index; all else runs for all rows at once",
            "each row keeps its sparse mask; in mlx-vlm's batch the padding of one row takes it from all "
            "(qwen4_exp/language.py:1872)",
        ),
    )
)
class Qwen4Exp(MRoPEAdapter):
    merge = Merge(
        "merge_input_ids_with_image_features",
        keeps_type=True,
        takes_all=True,
        gives_mask=True,
    )
    video_sampling = Sampling(frame_factor=1)
    patches = patches_in("vlm_batch.models._qwen4_exp")

    def hook_functions(self) -> None:
        """Hook sparse attention's file, but not M-RoPE: attention runs by rows."""
        install_hooks(
            [SPARSE],
            HOOKS,
            family=self.spec.family,
            required=["scaled_dot_product_attention"],
        )
        Adapter.hook_functions(self)

    def row_caches(self) -> list[Any]:
        from mlx_vlm.models.qwen4_exp.language import QSAKVCache

        return [
            IndexedCache() if isinstance(one, QSAKVCache) else one
            for one in super().row_caches()
        ]

    def run_step(self, step: DecodeStep) -> mx.array:
        """Pass positions (B, 1), the same for all axes."""
        return self.forward(
            step.tokens, None, step.caches, {"position_ids": step.positions[:, None]}
        )

    def forward(
        self,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Sequence[Any],
        extra: Mapping[str, Any],
    ) -> mx.array:
        """Run trunk and head, not ``Qwen4ExpBatchInvariantForward``, which needs its own caches (language.py)."""
        return trunk_logits(self.language, ids, embeds, cache, extra)
