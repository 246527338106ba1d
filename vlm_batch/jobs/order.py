"""Order of pictures: equal sizes together, as prompts of one length are prefilled together."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Iterator

from vlm_batch.inputs.images import size_of_file
from vlm_batch.jobs.questions import Item

#: Items sorted together, and the most that stay unsorted because they fill one batch.
WINDOW, LEAST = 64, 8
#: Seconds to read the sizes of one window. Slow drives get shorter windows.
LOOK_SECONDS = 0.1


def by_size(items: Iterator[Item]) -> Iterator[Item]:
    """Yield items, sorted by size within a window."""
    while window := list(_window(items)):
        if len(window) > LEAST:
            window.sort(key=operator.itemgetter(0))
        yield from map(operator.itemgetter(1), window)


def _window(items: Iterator[Item]) -> Iterator[tuple[tuple[object, ...], Item]]:
    """Yield the next items with what they are sorted by: their pictures' sizes, then the prompt's length."""
    end = time.monotonic() + LOOK_SECONDS
    for item in itertools.islice(items, WINDOW):
        files = filter(_is_name, item.row.images)
        sizes = list(map(_size_of, files))
        num_characters = len(item.prompt or "")
        yield (sizes, num_characters), item
        if time.monotonic() > end:
            return


def _is_name(image: object) -> bool:
    return isinstance(image, str)


def _size_of(file: str) -> tuple[int, int]:
    """Return a picture's width and height; (0, 0) if they are unknown."""
    return size_of_file(file) or (0, 0)
