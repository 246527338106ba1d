"""Prompts of the families that count their positions: words, then each picture's ids followed by words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._build import ids, words
from ._types import Inputs


def prompt(
    seed: int, pictures: Sequence[Sequence[int]], num_words: int = 4
) -> np.ndarray:
    """(1, L) ids: three words, then each picture's own ids and `num_words` words (one more after each picture)."""
    parts = [words(seed, 3)]
    for index, picture in enumerate(pictures):
        parts += [list(picture), words(seed + 101 * (index + 1), num_words + index)]
    return ids(*parts)


def expanded(ids: np.ndarray, marker: int, counts: Sequence[int]) -> np.ndarray:
    """(1, L) ids with the n-th marker repeated `counts[n]` times."""
    left = iter(counts)
    return np.array(
        [
            [
                token
                for one in ids[0].tolist()
                for token in [one] * (next(left) if one == marker else 1)
            ]
        ]
    )


def both(first: Inputs, second: Inputs) -> Inputs:
    """A request with the media of two, of which the second's are of another kind."""
    return {
        **second,
        **first,
        "input_ids": np.concatenate([first["input_ids"], second["input_ids"]], axis=1),
    }
