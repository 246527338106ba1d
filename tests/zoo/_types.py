"""The nouns of the zoo, and the vocabulary that all its families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn
import numpy as np

Inputs = dict[str, Any]
"""What `mlx_vlm.utils.prepare_inputs` returns for a family, as numpy arrays; `input_ids` is (1, L)."""

PLAIN = 128
"""Ids below this are plain text. A family's marker ids follow; no oracle ever generates one."""
VOCABULARY = 160
END_OF_TEXT = VOCABULARY - 1
"""Declared as the end of text by every family, so that no tiny model stops by accident."""


IMPOSSIBLE = -1e4
"""A log-probability below this is that of a token which cannot come: models write -1e5, -1e9 or minus infinity."""


@dataclass(frozen=True)
class Trace:
    """The answer of one request: greedy `tokens`, and `logprobs` (T, V) float32 from which each was taken."""

    tokens: list[int]
    logprobs: np.ndarray


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of log-probabilities (..., V); inf unless the same tokens are possible in both.

    Where one row is the longer, what is beyond the other must be impossible.
    """
    width = min(one.shape[-1], other.shape[-1])
    possible, same = one[..., :width] > IMPOSSIBLE, other[..., :width] > IMPOSSIBLE
    beyond = [rows[..., width:] > IMPOSSIBLE for rows in (one, other)]
    if (
        (possible != same).any()
        or any(rest.any() for rest in beyond)
        or np.isnan(one).any()
        or np.isnan(other).any()
    ):
        return np.inf
    return float(
        np.abs(one[..., :width][possible] - other[..., :width][possible]).max(
            initial=0.0
        )
    )


@dataclass(frozen=True, kw_only=True)
class TinyFamily:
    """A family's tiny model, the requests that can be made to it, and the answer each request gets alone."""

    name: str
    build: Callable[[], nn.Module]
    """A fresh, evaluated float32 model; the same weights at each call."""
    text: Callable[[int, int], Inputs]
    """(seed, length) -> a request without a picture."""
    image: Callable[[int, int], Inputs]
    """(seed, size) -> a request with one picture; sizes 0, 1, 2 differ in prompt length."""
    two_images: Callable[[int], Inputs] | None
    """(seed) -> a request with two pictures."""
    greedy: Callable[[nn.Module, Inputs, int], Trace]
    """(model, inputs, number of tokens) -> the answer of the request alone."""
    oracle_note: str
    """Which path `greedy` takes, and why it is the right one."""
    window: int | None = None
    no_two_images: str = ""
    """Why `two_images` is None, when it is."""
    variant_of: str = ""
    """The registered family, where `name` is that of another kind of model in it."""
    no_reference: str = ""
    """Why transformers' answers are not recorded in tests/references, when they are not."""
    no_pictures_recorded: str = ""
    """Why those of texts and recordings alone are, when they are."""
    video: Callable[[int, int], Inputs] | None = None
    """(seed, size) -> a request with one video, where the family takes them; of size 2 it has more time than width."""
    picture_and_video: Callable[[int], Inputs] | None = None
    """(seed) -> a request with a video between two pictures."""
    audio: Callable[[int, int], Inputs] | None = None
    """(seed, size) -> a request with one recording, where the family takes them; sizes differ in its length."""
    two_audios: Callable[[int], Inputs] | None = None
    """(seed) -> a request with two recordings of different lengths."""
    picture_and_audio: Callable[[int], Inputs] | None = None
    """(seed) -> a request with a picture and a recording."""
    also: Mapping[str, Callable[[int], Inputs]] = field(default_factory=dict)
    """Further requests by name, (seed) -> request, where the family has a case that the others do not show."""
    wrong_alone: tuple[str, ...] = ()
    """Requests (names of `requests_of`) that mlx-vlm's own loop answers wrongly, where `greedy` is another path."""
    points: int | None = None
    """The first id that stands for a point, where answers point at pictures. At most steps many tokens are impossible."""
    text_only: bool = False
    """Whether the model has no pictures: `image` then makes texts, of three lengths."""

    @property
    def registered(self) -> str:
        """The family of the registry that serves the model."""
        return self.variant_of or self.name
