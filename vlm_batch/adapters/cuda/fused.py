"""Small operations as one launch each."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return nn.silu(gate) * x


def _turn(
    first: mx.array, second: mx.array, by_first: mx.array, by_second: mx.array
) -> mx.array:
    return (first * by_first + second * by_second).astype(first.dtype)


#: The same operations as in a compiled decode step, so that both share one fused kernel.
swiglu = mx.compile(_swiglu)
#: ``operations.turn_pairs``.
turn_pairs = mx.compile(_turn, shapeless=True)
