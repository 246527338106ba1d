"""Attention of one query a row over spans of columns, which the kernels of ``few_bits.cu`` share, whatever the codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.cuda.launches import Kernel, Launch, kernel

#: Equal to the constants of ``few_bits.cu``.
THREADS = SPAN = 128
#: Query heads per block.
MOST_HEADS = 8
#: The widest head, padded to whole groups, that fits a block.
WIDEST = 256
TYPES = (mx.float32, mx.bfloat16, mx.float16)


class MaskForm(NamedTuple):
    """The form of a mask (B or 1, 1, 1, C), bool or additive, for which a kernel is built."""

    dtype: mx.Dtype | None  # None: there is none
    is_by_row: bool  # whether each row has its own

    @classmethod
    def of(cls, mask: Any) -> MaskForm:
        """Return a mask's form; None and "causal" hide nothing."""
        if not isinstance(mask, mx.array):
            return cls(None, False)
        return cls(mask.dtype, mask.shape[0] > 1)

    def seen(self, lengths: Sequence[int], columns: int) -> list[int]:
        """Return how many columns rows of such lengths see."""
        if self.dtype is None:
            return [columns] * len(lengths)
        return list(lengths) if self.is_by_row else [lengths[0]] * len(lengths)

    def example(self, behind: mx.array) -> mx.array | None:
        """Return a mask that hides columns ``behind`` (B, C) rows."""
        if self.dtype is None:
            return None
        hidden = behind[: None if self.is_by_row else 1, None, None]
        if self.dtype == mx.bool_:
            return ~hidden
        least = mx.array(mx.finfo(self.dtype).min, self.dtype)
        return mx.where(hidden, least, mx.array(0, self.dtype))


def fits_mask(mask: Any, rows: int, columns: int) -> bool:
    """Whether a mask is none, or (B or 1, 1, 1, C)."""
    if not isinstance(mask, mx.array):
        return True
    if mask.ndim != 4 or mask.shape[0] not in (1, rows):
        return False
    return tuple(mask.shape[1:]) == (1, 1, columns)


def behind_rows(seen: Sequence[int], columns: int) -> mx.array:
    """Return whether a column is behind what a row sees (B, C)."""
    return mx.array(np.arange(columns)[None] >= np.array(seen)[:, None])


def span_kernel(
    name: str,
    parts: Sequence[str],
    views: str,
    scale: float,
    more: Sequence[str] = (),
    *,
    turn: str = "few_bits::AsGiven{}",
    uses: Sequence[str] = ("masks",),
) -> Kernel:
    """Return the kernel for spans of columns.

    Args:
        parts: Names of the arrays of keys, and of values, each (B, H, C, ...).
        views: C++ that makes ``keys`` and ``values`` of them.
        more: Further inputs.
        turn: C++ of what works on queries first.
        uses: Files beside ``few_bits.cu``.
    """
    coded = [f"{what}_{part}" for what in ("keys", "values") for part in parts]
    body = f"""
  {views}
  const auto turn = {turn};
  few_bits::attend_span<
      T, decltype(turn), decltype(keys), decltype(values), M, DEPTH_K, DEPTH_V, SHARE, HEADS, IS_MASKED>(
      queries, queries_strides[0], queries_strides[1], queries_strides[3], turn, keys, values,
      mask, BY_ROW ? mask_strides[0] : 0, mask_strides[3], {coded[0]}_shape[2], {scale!r}f, sums, stats);
"""
    inputs = ("queries", *coded, *more, "mask")
    return kernel("few_bits", name, inputs, ("sums", "stats"), body, uses=uses)


def span_launch(
    kernel: Kernel,
    facts: dict[str, Any],
    heads: tuple[int, int],
    depths: tuple[int, int],
    dtype: mx.Dtype,
    mask: MaskForm,
    shape: tuple[int, int],
) -> Launch:
    """Return the launch for spans of columns.

    Args:
        facts: What ``kernel`` must know of the codes.
        heads: Of queries, of keys.
        depths: Of keys, of values.
        dtype: Of queries.
        shape: Rows, columns.
    """
    (num_heads, kv_heads), (rows, columns) = heads, shape
    share = num_heads // kv_heads
    tiles, spans = -(-share // MOST_HEADS), -(-columns // SPAN)
    template = {
        "T": dtype,
        "M": dtype if mask.dtype is None else mask.dtype,
        "DEPTH_K": depths[0],
        "DEPTH_V": depths[1],
        "SHARE": share,
        "HEADS": -(-share // tiles),
        "IS_MASKED": mask.dtype is not None,
        "BY_ROW": mask.is_by_row,
        **facts,
    }
    each = (rows, num_heads, spans)
    return Launch(
        kernel,
        tuple(template.items()),
        (THREADS * spans, kv_heads * tiles, rows),
        (THREADS, 1, 1),
        ((*each, depths[1]), (*each, 2)),
        (mx.float32, mx.float32),
    )
