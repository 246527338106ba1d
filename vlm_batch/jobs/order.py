"""Order of pictures: equal sizes together, as prompts of one length are prefilled together."""

from __future__ import annotations

import itertools
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
            window.sort(key=lambda pair: pair[0])
        yield from (item for _, item in window)


def _window(items: Iterator[Item]) -> Iterator[tuple[tuple[object, ...], Item]]:
    end = time.monotonic() + LOOK_SECONDS
    for item in itertools.islice(items, WINDOW):
        files = [one for one in item.row.images if isinstance(one, str)]
        sizes = [size_of_file(file) or (0, 0) for file in files]
        yield (sizes, len(item.prompt or "")), item
        if time.monotonic() > end:
            return
