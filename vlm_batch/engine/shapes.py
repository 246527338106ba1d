"""The few shapes that work is computed in where a new shape costs more than padding: lengths of chunks, numbers of rows.

MLX's CUDA back end chooses kernels, and allocates memory, by the shapes of a call; the first call of a shape takes several
times as long as the next one (docs/benchmarks.md, where the time went).
"""

from __future__ import annotations

#: Lengths from one power of two to the next: padding is at most a quarter of a chunk, and an eighth of long ones on average.
STEPS = 4


def padded_length(length: int, pad_to: int) -> int:
    """Positions that a chunk of ``length`` is computed in: a multiple of ``pad_to``, and of a quarter of the power of two
    below. As many as it has where ``pad_to`` is 0."""
    if not pad_to or not length:
        return length
    step = max(pad_to, (1 << (length - 1).bit_length()) // (2 * STEPS))
    return -(-length // step) * step


def padded_count(count: int, pad_to: int) -> int:
    """Rows that ``count`` prompts are computed in as one array: a power of two, or one and a half times one."""
    if not pad_to or count < 4:
        return count
    power = 1 << (count - 1).bit_length()
    return power - power // 4 if count <= power - power // 4 else power
