"""The order in which a folder's pictures are asked about: those of one size together, within a window.

Their prompts are then of one length, and prompts of one length that wait together are prefilled as one array.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from vlm_batch.inputs.images import size_of_file
from vlm_batch.jobs.questions import Item

#: Items that are put in order together: nothing waits for more than so many others. So few as fill one batch are not.
WINDOW, LEAST = 64, 8
#: Seconds that looking at the files of one window may take. On a slow drive windows are shorter.
LOOK_SECONDS = 0.1


def by_size(items: Iterator[Item]) -> Iterator[Item]:
    """The same items; those of a window by the sizes of their pictures and the length of their prompts, else as they come."""
    while window := list(_window(items)):
        if len(window) > LEAST:
            window.sort(key=lambda pair: pair[0])
        yield from (item for _, item in window)


def _window(items: Iterator[Item]) -> Iterator[tuple[tuple[object, ...], Item]]:
    end = time.monotonic() + LOOK_SECONDS
    for item in itertools.islice(items, WINDOW):
        sizes = [size_of_file(image) or (0, 0) for image in item.row.images if isinstance(image, str)]
        yield (sizes, len(item.prompt or "")), item
        if time.monotonic() > end:
            return
