"""Qwen4-Exp: delta nets, hashed n-grams in some layers, sparse attention over blocks that an indexer picks in the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.attention import HOOKS, row_by_row
from vlm_batch.adapters.base import Adapter, trunk_logits
from vlm_batch.adapters.grids import MRoPEAdapter
from vlm_batch.adapters.hooks import put_hooks
from vlm_batch.adapters.towers import embed_by_product
from vlm_batch.adapters.windows import attend_pictures
from vlm_batch.caches import IndexedCache
from vlm_batch.inputs.videos import Sampling
from vlm_batch.records import DecodeStep
from vlm_batch.registry import ModelSpec, register

#: The file with the functions of sparse attention.
SPARSE = "mlx_vlm.models.qwen4_exp.qsa_kernel"


@register(
    ModelSpec(
        family="qwen4_exp",
        model_types=("qwen4_exp",),
        video=True,
        notes=(
            "sparse attention runs a row at a time, with the row's own indexer and blocks; delta nets, n-grams and experts "
            "run for all rows at once. In mlx-vlm's batch the padding of one row takes the sparse mask from all "
            "(qwen4_exp/language.py:1872)",
        ),
    )
)
class Qwen4Exp(MRoPEAdapter):
    """M-RoPE, as Qwen3.5; n-grams are made of the prompt's ids, a picture's placeholders included."""

    video_sampling = Sampling(frame_factor=1)

    def hook_functions(self) -> None:
        """Also in the file of functions that its attention calls; M-RoPE is no one operation for all rows,
        since attention runs a row at a time, and turns blocks of keys, too."""
        put_hooks([SPARSE], HOOKS, family=self.spec.family, required=["scaled_dot_product_attention"])
        Adapter.hook_functions(self)

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.qwen3_vl import vision
        from mlx_vlm.models.qwen4_exp.language import Qwen4ExpAttention

        return {
            Qwen4ExpAttention: row_by_row(Qwen4ExpAttention),
            vision.Attention: attend_pictures(vision.Attention),
            vision.PatchEmbed: embed_by_product(vision.PatchEmbed),
        }

    def row_caches(self) -> list[Any]:
        from mlx_vlm.models.qwen4_exp.language import QSAKVCache

        return [IndexedCache() if isinstance(one, QSAKVCache) else one for one in super().row_caches()]

    def run_step(self, step: DecodeStep) -> mx.array:
        """One position (B, 1) a row for all three axes, so that the rows lie along the first axis."""
        return self.forward(step.tokens, None, step.caches, {"position_ids": step.positions[:, None]})

    def forward(
        self, ids: mx.array, embeds: mx.array | None, cache: Sequence[Any], extra: Mapping[str, Any]
    ) -> mx.array:
        """Trunk and head; for a new token upstream's ``LanguageModel.__call__`` takes a forward that is written beside the
        modules (language.py, ``Qwen4ExpBatchInvariantForward``) and knows only caches of its own."""
        return trunk_logits(self.language, ids, embeds, cache, extra)
