"""Moondream 3: BOS and one picture attend to each other both ways; attention is scaled by a learned tau; experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vlm_batch.errors import InvalidPrompt
from vlm_batch.models.base import Adapter, bidirectional_mask
from vlm_batch.models.modules import attention
from vlm_batch.registry import ModelSpec, register
from vlm_batch.types import Encoded, Picture


@register(
    ModelSpec(
        family="moondream3",
        model_types=("moondream3",),
        multi_image=False,
        notes=(
            "the two-way mask of BOS and picture reaches the model: generate passes it as attention_mask_4d, which "
            "moondream3/language.py:276 swallows; a text has no such prefix, as in Moondream's own engine",
            "tau and RoPE take each row's own position, without reading offsets back (moondream3/language.py:116)",
        ),
    )
)
class Moondream3(Adapter):
    """The prefix is one span; what follows is causal, so only the chunk that holds the prefix needs a mask."""

    compiles = True
    input_keys = Adapter.input_keys | {"num_crops", "crop_layouts"}
    #: Made again for the chunk that holds the prefix, as bools (upstream's float32 does not fit bfloat16 attention).
    ignored_features = frozenset({"attention_mask_4d"})

    @classmethod
    def mends(cls) -> Mapping[type, type]:
        from mlx_vlm.models.moondream3.language import Attention

        class RowAttention(Attention):
            """Upstream rotates row by row after a read-back of the offsets and calls ``mx.fast`` past the hook
            (moondream3/language.py:116-137); ``mx.fast.rope`` takes an offset per row, the hook takes rows."""

            def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
                """(B, L, D) -> (B, L, D)"""
                length = x.shape[1]
                qkv = self.qkv(x)  # (B, L, (H + 2 H_kv) * D_head)
                offset = cache.offset  # an int, or (B,)
                start = offset[:, None] if isinstance(offset, mx.array) else offset
                tau_q, tau_v = self.tau(qkv, start + mx.arange(length))  # (B, H, L, 1)
                heads, kv_heads = self.n_heads, self.n_kv_heads
                split = qkv.reshape(*qkv.shape[:2], heads + 2 * kv_heads, self.head_dim).swapaxes(1, 2)
                queries, keys, values = mx.split(split, [heads, heads + kv_heads], axis=1)  # (B, H, L, D_head)
                queries = self.rope(queries * tau_q, offset=offset)
                keys, values = cache.update_and_fetch(self.rope(keys, offset=offset), values * tau_v)
                output = attention(queries, keys, values, cache, self.scale, mask)
                return self.proj(output.swapaxes(1, 2).flatten(-2))

        return {Attention: RowAttention}

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's own, for one picture; it replaces the ids after BOS, whatever they are (moondream3.py:70)."""
        if len(extra.get("num_crops", ())) > 1:
            raise InvalidPrompt("moondream3 takes one picture a request: its prompt has room for one")
        if ids.shape[1] < 1 + (count := self.count_image_tokens(ids, extra)):
            raise InvalidPrompt(f"a moondream3 prompt with a picture begins with BOS and {count} placeholder ids")
        return super().features(ids, extra)

    def atomic_spans(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """BOS and the picture, if there is one."""
        count = self.count_image_tokens(ids, extra)
        return ((0, 1 + count),) if count else ()

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """The one after BOS."""
        count = self.count_image_tokens(ids, extra)
        return (Picture(1, 1 + count, extra),) if count else ()

    def count_image_tokens(self, ids: mx.array, extra: Mapping[str, Any]) -> int:
        """As many as patches in a crop, whatever the picture's size: crops are pooled (moondream3/vision.py:114)."""
        vision = self.config.vision_config
        return (vision.crop_size // vision.patch_size) ** 2 if "pixel_values" in extra else 0

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        return {"mask": bidirectional_mask(encoded.atomic, start, end)}
