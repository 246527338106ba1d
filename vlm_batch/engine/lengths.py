"""Lengths of chunks and arrays: where a chunk ends, how far it is padded, which prompts share an array.

Pure functions of numbers, which ``shapes`` and ``schedule`` ask.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

#: Padded lengths between two powers of two: padding is at most a quarter of a chunk.
STEPS = 4

Spans: TypeAlias = tuple[tuple[int, int], ...]


def first_enough(numbers: Sequence[int], wanted: int, default: int = 0) -> int:
    """Return the first of ascending numbers that is enough."""
    at = bisect_left(numbers, wanted)
    return numbers[at] if at < len(numbers) else default


def filling(size: int, room: int) -> int:
    """Return the largest power of two of items of ``size`` in ``room``, at least 1."""
    return 1 << max(0, (room // max(size, 1)).bit_length() - 1)


def chunk_end(
    done: int, length: int, room: int, atomic: Spans = (), stops: Sequence[int] = ()
) -> int:
    """Return the end of a chunk from ``done``: after ``room`` positions, or at the first stop.

    It ends before a span that it would cut, or after one at its beginning.
    """
    end = min(length, done + room)
    for stop in stops:
        if done < stop < end:
            end = stop
    for start, stop in atomic:
        if not start < end < stop:
            continue
        if start > done:
            return start
        return min(stop, length)
    return end


def padded_length(length: int, pad_to: int) -> int:
    """Return a padded length: a multiple of ``pad_to`` and of a quarter of the power of two below."""
    if not pad_to or not length:
        return length
    step = max(pad_to, (1 << (length - 1).bit_length()) // (2 * STEPS))
    return -(-length // step) * step


def padded_count(count: int, pad_to: int) -> int:
    """Return the padded rows for ``count`` prompts: 2**n or 1.5 * 2**n."""
    if not pad_to or count < 4:
        return count
    power = 1 << (count - 1).bit_length()
    less = power - power // 4
    return less if count <= less else power


def together(
    lengths: Sequence[int], most: int, most_tokens: int, pad_to: int, fill: int
) -> list[list[int]]:
    """Group whole prompts of one padded length, as indices of ``lengths``.

    A shorter group joins a longer one for under ``fill`` more positions.
    """

    def has_room(count: int, width: int) -> bool:
        rows = padded_count(count, pad_to)
        return rows <= most and rows * width <= most_tokens

    groups: list[_Group] = []
    latest: dict[int, _Group] = {}  # by width
    for index, length in enumerate(lengths):
        width = padded_length(length, pad_to)
        group = latest.get(width)
        if group is None or not has_room(len(group.indices) + 1, width):
            group = _Group(width)
            latest[width] = group
            groups.append(group)
        group.indices.append(index)
    if fill and len(groups) > 1:
        _join_shorter(groups, has_room, pad_to, fill)
    return [group.indices for group in groups if group.indices]


@dataclass
class _Group:
    """Prompts of one array."""

    width: int
    indices: list[int] = field(default_factory=list)

    def positions(self, pad_to: int, more: int = 0) -> int:
        """Return the array's positions, with so many prompts more."""
        return padded_count(len(self.indices) + more, pad_to) * self.width


def _join_shorter(
    groups: Sequence[_Group],
    has_room: Callable[[int, int], bool],
    pad_to: int,
    fill: int,
) -> None:
    """Let groups join the next longer one, where that takes under ``fill`` positions more."""
    longer, *shorter = sorted(groups, key=lambda group: -group.width)
    for group in shorter:
        count = len(group.indices)
        apart = longer.positions(pad_to) + group.positions(pad_to)
        more = longer.positions(pad_to, count) - apart
        if more < fill and has_room(len(longer.indices) + count, longer.width):
            longer.indices.extend(group.indices)
            group.indices.clear()
        else:
            longer = group


def widths_of(longest: int, context: int | None, pad_to: int) -> list[int]:
    """Return the padded lengths of one-chunk prompts; without padding, the longest."""
    most = longest
    if context is not None:
        most = min(longest, context - 1)
    if not pad_to:
        return [most]
    padded = {padded_length(length, pad_to) for length in range(1, most + 1)}
    return sorted(padded)
