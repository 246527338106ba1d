"""Checks of what a row's own code gives, before it is joined with other rows' arrays."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from vlm_batch.records import Encoded


def checked_logits(found: Any, shape: tuple[int, ...]) -> mx.array:
    """Return a logits processor's result, at most float32 wide. Raises ValueError for another shape, or no real numbers."""
    if not isinstance(found, mx.array) or found.shape != shape:
        said = found.shape if isinstance(found, mx.array) else type(found).__name__
        raise ValueError(f"a logits processor must return logits of shape {shape}, not {said}")
    if not mx.issubdtype(found.dtype, mx.floating):
        raise ValueError(f"a logits processor must return logits of a floating type, not {found.dtype}")
    return found.astype(mx.float32) if found.dtype == mx.float64 else found


def check_encoded(encoded: Encoded) -> None:
    """Raise ValueError unless a prompt's embeddings are real numbers (1, L, D)."""
    embeds, length = encoded.inputs_embeds, int(encoded.inputs_embeds.shape[1])
    if embeds.ndim != 3 or embeds.shape[0] != 1 or not length or not mx.issubdtype(embeds.dtype, mx.floating):
        raise ValueError(
            f"the prompt's embeddings have the shape {embeds.shape} and the type {embeds.dtype}; they must be real numbers "
            "(1, L, D)"
        )
