"""M-RoPE in one operation each for queries and keys.

A decoded token has one position on all axes (Qwen2-VL, arXiv:2409.12191, section 2.1), so its M-RoPE is RoPE, which
mlx-vlm spells out in 12 of a layer's 30 launches. Prompts, and decode steps on a CPU, use factors made once for all
layers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.rope_utils import Llama3RoPE, MRoPERotaryEmbedding

from vlm_batch.adapters import operations
from vlm_batch.adapters.hooks import (
    current,
    files_of,
    hook,
    install_hooks,
    is_hook,
    is_replacement,
)
from vlm_batch.adapters.masks import once
from vlm_batch.adapters.powers import takes_powers
from vlm_batch.errors import UnsupportedModel

APPLY = "apply_multimodal_rotary_pos_emb"
#: mlx-vlm's frequency layouts whose cosines (B, L, D) rotate halves of a head.
PLAIN_STYLES = ("chunked", "interleaved")


def rotate_step(
    x: mx.array,
    frequencies: mx.array,
    offset: mx.array,
    *,
    is_traditional: bool,
    scale: float = 1.0,
) -> mx.array:
    """Compute ``mx.fast.rope`` of a decode step (B, H, 1, D), with factors made once per step.

    Args:
        frequencies: radians per position (D_rotary / 2,), as ``shared`` returns them.
    """
    own, others = once(offset, _factors, frequencies, scale, is_traditional)
    width = 2 * frequencies.size
    part = x if width == x.shape[-1] else x[..., :width]
    pairs = part.reshape(*part.shape[:-1], *own.shape[-2:])
    swapped = pairs[..., ::-1] if is_traditional else pairs[..., ::-1, :]
    return _with_rest((pairs * own + swapped * others).reshape(part.shape), x)


def _with_rest(turned: mx.array, x: mx.array) -> mx.array:
    """Append the numbers of ``x`` that are not rotated."""
    width = turned.shape[-1]
    if width == x.shape[-1]:
        return turned
    return mx.concatenate([turned, x[..., width:]], axis=-1)


def shares_angles(x: mx.array, offset: Any) -> bool:
    """Whether a decode step (B, H, 1, D), at offsets (B,), is rotated by ``rotate_step``."""
    if not isinstance(offset, mx.array) or offset.shape != x.shape[:1]:
        return False
    return x.ndim == 4 and x.shape[2] == 1 and makes_factors(x)


def makes_factors(x: mx.array) -> bool:
    """Whether this is a decode step on a CPU that need not be batch-invariant."""
    call = current()
    return call.positions is not None and not call.is_fixed and takes_powers(x)


def _factors(
    offset: mx.array, frequencies: mx.array, scale: float, is_traditional: bool
) -> tuple[mx.array, mx.array]:
    positions = offset[:, None].astype(mx.float32)
    if scale != 1:
        positions = positions * scale
    angles = positions * frequencies
    cos, sin = mx.cos(angles), mx.sin(angles)
    axis = -1 if is_traditional else -2
    own, others = mx.stack([cos, cos], axis=axis), mx.stack([-sin, sin], axis=axis)
    return own[:, None, None], others[:, None, None]


class RowRoPE(nn.RoPE):
    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if not shares_angles(x, offset):
            return super().__call__(x, offset)
        return rotate_step(
            x,
            plain_frequencies(self.dims, self.base),
            offset,
            is_traditional=self.traditional,
            scale=self.scale,
        )


class RowLlama3RoPE(Llama3RoPE):
    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if not shares_angles(x, offset):
            return super().__call__(x, offset)
        if "_frequencies" not in self.__dict__:
            self.__dict__["_frequencies"] = shared(mx.reciprocal(self._freqs))
        return rotate_step(
            x, self.__dict__["_frequencies"], offset, is_traditional=self.traditional
        )


@lru_cache(maxsize=64)
def plain_frequencies(width: int, base: float) -> mx.array:
    half = width // 2
    steps = mx.arange(0, -half, -1, dtype=mx.float32)
    return shared(mx.exp(steps * (math.log(base) / half)))


def shared(frequencies: mx.array) -> mx.array:
    """Return the one array of these float32 numbers, by which layers share factors."""
    numbers: Any = frequencies.tolist()
    return _shared(tuple(numbers))


@lru_cache(maxsize=64)
def _shared(numbers: tuple[float, ...]) -> mx.array:
    return evaluated(mx.array(numbers, dtype=mx.float32))


def evaluated(array: mx.array) -> mx.array:
    mx.eval(array)
    return array


#: Patches of every family.
STEP_ROPES: Mapping[type, type] = {nn.RoPE: RowRoPE, Llama3RoPE: RowLlama3RoPE}


def turn_step(
    x: mx.array,
    positions: mx.array,
    periods: mx.array,
    frequencies: mx.array,
    *,
    is_traditional: bool,
) -> mx.array:
    """Rotate a decode step (B, H, 1, D).

    Args:
        positions: (B,).
        periods: (D_rotary / 2,), 1 / frequency.
        is_traditional: whether pairs are neighbours instead of halves.
    """
    if shares_angles(x, positions):
        return rotate_step(x, frequencies, positions, is_traditional=is_traditional)
    return mx.fast.rope(
        x,
        2 * periods.size,
        traditional=is_traditional,
        base=None,
        scale=1.0,
        offset=positions,
        freqs=periods,
    )


def prompt_factors(cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array]:
    """Return float32 factors (B, 1, L, 2, D_rotary / 2) of pairs' first and second numbers.

    Args:
        cos: (B, L, D_rotary), with equal halves; ``sin``, too.
    """
    half = cos.shape[-1] // 2
    cos, sin = (turned[:, None, :, :half].astype(mx.float32) for turned in (cos, sin))
    return mx.stack([cos, sin], axis=-2), mx.stack([-sin, cos], axis=-2)


def turn_prompt(x: mx.array, by_first: mx.array, by_second: mx.array) -> mx.array:
    """Rotate a prompt (B, H, L, D)."""
    width = 2 * by_first.shape[-1]
    turned = x[..., :width]
    pairs = turned.reshape(*turned.shape[:-1], 2, -1)
    first, second = pairs[..., :1, :], pairs[..., 1:, :]
    found = operations.turn_pairs(first, second, by_first, by_second)
    return _with_rest(found.reshape(turned.shape), x)


def hook_rotary(module: nn.Module, *, family: str) -> None:
    """Hook a model's M-RoPE; raise UnsupportedModel if a file does not apply it."""
    found: list[Any] = list(filter(_is_plain, module.modules()))
    if not found:
        return
    for child in found:
        periods = 1.0 / child.inv_freq
        child.__class__ = turning(type(child))
        child.__dict__.update(
            _periods=evaluated(periods),
            _frequencies=shared(child.inv_freq),
        )
    for file in files_of(module):
        theirs = vars(sys.modules[file]).get(APPLY)
        if theirs is not None and not is_hook(theirs):
            ours = {APPLY: hook(theirs, applying(theirs))}
            install_hooks([file], ours, family=family)
    check_applied(module, found, family=family)


def _is_plain(module: Any) -> bool:
    """Whether a module is an M-RoPE that is applied by ``APPLY``, and scales nothing."""
    if not isinstance(module, MRoPERotaryEmbedding):
        return False
    return not module.fused_apply and module.attention_scaling == 1.0


def check_applied(module: nn.Module, found: list[nn.Module], *, family: str) -> None:
    """Raise UnsupportedModel if a module that holds one of ``found`` is of a file without the hook."""
    ours = {id(child) for child in found}
    for owner in module.modules():
        if ours.isdisjoint(map(id, owner.values())):
            continue
        bases = [base for base in type(owner).__mro__ if not is_replacement(base)]
        if any(map(_has_hook, bases)):
            continue
        at = f"{bases[0].__module__}.{bases[0].__qualname__}"
        raise UnsupportedModel(
            f"{family}: the file of {at} has no {APPLY}, by which its M-RoPE is applied"
        )


def _has_hook(kind: type) -> bool:
    """Whether the file of a class applies our rotations."""
    return is_hook(vars(sys.modules[kind.__module__]).get(APPLY))


def turning(parent: type) -> type:
    """Subclass an embedding to return a rotation for cosines."""

    class Turning(parent):  # type: ignore[misc]
        def __call__(self, x: mx.array, position_ids: mx.array) -> tuple[Any, Any]:
            positions = current().positions
            counts = operations.counts_launches()
            if positions is not None and (counts or makes_factors(x)):
                turn = partial(
                    turn_step,
                    positions=positions,
                    periods=self._periods,
                    frequencies=self._frequencies,
                    is_traditional=self.pairing == "even_odd",
                )
                return turn, None
            cos, sin = super().__call__(x, position_ids)
            is_plain = self.style in PLAIN_STYLES and cos.ndim == 3
            if counts and is_plain:
                by_first, by_second = prompt_factors(cos, sin)
                return partial(
                    turn_prompt, by_first=by_first, by_second=by_second
                ), None
            return cos, sin

    return Turning


def applying(
    upstream: Callable[..., tuple[mx.array, mx.array]],
) -> Callable[..., tuple[mx.array, mx.array]]:
    """Wrap mlx-vlm's function to take a rotation for cosines."""

    def apply(
        q: mx.array, k: mx.array, cos: Any, sin: Any, *args: Any, **kwargs: Any
    ) -> tuple[mx.array, mx.array]:
        if callable(cos):
            return cos(q), cos(k)
        return upstream(q, k, cos, sin, *args, **kwargs)

    return apply
