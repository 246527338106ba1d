"""M-RoPE as one operation on queries and one on keys.

A token that is decoded has the same position on all three axes (Qwen2-VL, arXiv:2409.12191, section 2.1), so there M-RoPE
is RoPE. mlx-vlm spells it out everywhere but on Metal: six launches each for queries and keys, of about thirty that a
layer makes, and where launches decide (CUDA) a step takes as long as it has launches. A prompt's tokens are pairs times
factors that are made once for all layers, in the kernel that turns pictures' patches. On a CPU nothing changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.rope_utils import MRoPERotaryEmbedding

from vlm_batch.adapters import kernels
from vlm_batch.adapters.hooks import current, files_of, hook, is_hook, is_replacement, put_hooks
from vlm_batch.errors import UnsupportedModel

APPLY = "apply_multimodal_rotary_pos_emb"
#: Of mlx-vlm's ways to lay out the axes' frequencies, those whose cosines (B, L, D) go with halves of a head.
PLAIN_STYLES = ("chunked", "interleaved")


@dataclass(frozen=True)
class Turn:
    """The rotation of a decode step's queries and keys, handed on in the place of cosines."""

    positions: mx.array  # (B,)
    periods: mx.array  # (D_rotary / 2,) 1 / frequency
    is_traditional: bool  # whether neighbours are turned, rather than halves

    def __call__(self, x: mx.array) -> mx.array:
        """(B, H, 1, D) -> (B, H, 1, D)"""
        width = 2 * self.periods.size
        return mx.fast.rope(
            x,
            width,
            traditional=self.is_traditional,
            base=None,
            scale=1.0,
            offset=self.positions,
            freqs=self.periods,
        )


@dataclass(frozen=True)
class PromptTurn:
    """The rotation of a prompt's queries and keys, handed on in the place of cosines: factors of the first and of the second
    number of each pair (B, 1, L, 2, D_rotary / 2), in float32."""

    by_first: mx.array
    by_second: mx.array

    @classmethod
    def of(cls, cos: mx.array, sin: mx.array) -> PromptTurn:
        """The rotation by cosines and sines (B, L, D_rotary), whose halves are the same."""
        half = cos.shape[-1] // 2
        cos, sin = (turned[:, None, :, :half].astype(mx.float32) for turned in (cos, sin))
        return cls(mx.stack([cos, sin], axis=-2), mx.stack([-sin, cos], axis=-2))

    def __call__(self, x: mx.array) -> mx.array:
        """(B, H, L, D) -> (B, H, L, D)"""
        width = 2 * self.by_first.shape[-1]
        turned = x[..., :width]
        pairs = turned.reshape(*turned.shape[:-1], 2, -1)
        found = kernels.turn_pairs(pairs[..., :1, :], pairs[..., 1:, :], self.by_first, self.by_second)
        found = found.reshape(turned.shape)
        return found if width == x.shape[-1] else mx.concatenate([found, x[..., width:]], axis=-1)


def hook_rotary(module: nn.Module, *, family: str) -> None:
    """Let the M-RoPE of a model of ours (mlx-vlm's classes, our copy) turn a decode step's tokens in one operation.

    The function that applies it is hooked in each file that has one; for whatever is given cosines it is mlx-vlm's. Raises
    UnsupportedModel, naming the family, where a module with such an embedding lies in a file without that function.
    """
    found = [child for _, child in module.named_modules() if isinstance(child, MRoPERotaryEmbedding)]
    found = [child for child in found if not child.fused_apply and child.attention_scaling == 1.0]
    for child in found:
        periods = 1.0 / child.inv_freq
        mx.eval(periods)
        child.__class__ = turning(type(child))
        child.__dict__.update(_periods=periods)
    if found:
        for file in files_of(module):
            theirs = vars(sys.modules[file]).get(APPLY)
            if theirs is not None and not is_hook(theirs):
                put_hooks([file], {APPLY: hook(theirs, applying(theirs))}, family=family)
        check_applied(module, found, family=family)


def check_applied(module: nn.Module, found: list[nn.Module], *, family: str) -> None:
    """Refuse a model whose modules hold a rotary embedding of ours and come from no file with the hooked function."""
    ours = {id(child) for child in found}
    for _, owner in module.named_modules():
        if any(id(child) in ours for child in owner.values()):
            bases = [base for base in type(owner).__mro__ if not is_replacement(base)]
            if not any(is_hook(vars(sys.modules[base.__module__]).get(APPLY)) for base in bases):
                at = f"{bases[0].__module__}.{bases[0].__qualname__}"
                raise UnsupportedModel(f"{family}: the file of {at} has no {APPLY}, by which its M-RoPE is applied")


def turning(parent: type) -> type:
    """A rotary embedding that returns a ``Turn`` in the place of cosines for a decode step, and None for sines; for a prompt a
    ``PromptTurn``, where pairs are half a head apart and cosines those of all axes together."""

    class Turning(parent):  # type: ignore[misc]
        def __call__(self, x: mx.array, position_ids: mx.array) -> tuple[Any, Any]:
            positions = current().positions
            if positions is None or not kernels.counts_launches():
                cos, sin = super().__call__(x, position_ids)
                is_plain = self.style in PLAIN_STYLES and cos.ndim == 3 and kernels.counts_launches()
                return (PromptTurn.of(cos, sin), None) if is_plain else (cos, sin)
            return Turn(positions, self._periods, self.pairing == "even_odd"), None

    return Turning


def applying(upstream: Callable[..., tuple[mx.array, mx.array]]) -> Callable[..., tuple[mx.array, mx.array]]:
    """mlx-vlm's function that rotates queries and keys (B, H, L, D), and the same by a ``Turn`` or ``PromptTurn``."""

    def apply(q: mx.array, k: mx.array, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> tuple[mx.array, mx.array]:
        return (cos(q), cos(k)) if isinstance(cos, Turn | PromptTurn) else upstream(q, k, cos, sin, *args, **kwargs)

    return apply
