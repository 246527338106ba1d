"""Operations along a prompt: its placeholders, its embeddings, parts of its features, and its mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Encoded, Picture
from vlm_batch.store.digest import as_words, digest


def cut(value: Any, axis: int | None, start: int, end: int) -> Any:
    """``value`` between two prompt positions along an axis; None passes it whole."""
    if axis is None:
        return value
    index = [slice(None)] * value.ndim
    index[axis] = slice(start, end)
    return value[tuple(index)]


def pad_front(value: mx.array, axis: int | None, count: int) -> mx.array:
    """``value`` with ``count`` zeros in front of an axis; None leaves it as it is."""
    if axis is None:
        return value
    shape = list(value.shape)
    shape[axis] = count
    return mx.concatenate([mx.zeros(shape, value.dtype), value], axis=axis)


def pad_behind(value: Any, axis: int | None, count: int) -> Any:
    """``value`` with ``count`` more entries behind an axis; None leaves it as it is.

    Numbers repeat the last ones, so that nothing is divided by zero; masks and kinds of tokens are zero, as for text.
    """
    if axis is None:
        return value
    if mx.issubdtype(value.dtype, mx.floating):
        return repeat_last(value, axis, count)
    shape = list(value.shape)
    shape[axis] = count
    return mx.concatenate([value, mx.zeros(shape, value.dtype)], axis=axis)


def repeat_last(value: Any, axis: int, count: int) -> mx.array:
    """``value`` with its last entry along an axis ``count`` more times."""
    last = cut(value, axis, value.shape[axis] - 1, value.shape[axis])
    return mx.concatenate([value, mx.repeat(last, count, axis=axis)], axis=axis)


def padded(row: Encoded, length: int, axes: Mapping[str, int | None]) -> Encoded:
    """A row with ``length`` positions: behind its own its last one is repeated, as text. ``axes``: those of its features along
    the prompt."""
    count, prompt = length - row.length, row.position.prompt
    return replace(
        row,
        input_ids=repeat_last(row.input_ids, 1, count),
        inputs_embeds=repeat_last(row.inputs_embeds, 1, count),
        position=replace(row.position, prompt=None if prompt is None else repeat_last(prompt, -1, count)),
        prefill={name: pad_behind(value, axes[name], count) for name, value in row.prefill.items()},
    )


def num_entries(value: Any) -> int | None:
    """The length of an array's or list's first axis; None for anything else."""
    if isinstance(value, (mx.array, np.ndarray)):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


def check_tokens(ids: mx.array, size: int | None, marks: frozenset[int]) -> None:
    """Refuse tokens that the model has no embedding for: MLX would look them up in other memory, or crash. ``size`` is how many
    it has, if that is known; pictures stand where ``marks`` do."""
    tokens = np.array(ids)[0]
    unmarked = ~np.isin(tokens, list(marks))
    below = tokens[(tokens < 0) & unmarked]
    if below.size:
        raise InvalidPrompt(f"token id {below[0]} is below 0")
    beyond = tokens[(tokens >= size) & unmarked] if size is not None else below
    if beyond.size:
        raise InvalidPrompt(
            f"token id {beyond[0]} is beyond the model's {size}: does the tokenizer belong to this model?"
        )


def num_words(table: Any) -> int | None:
    """The number of tokens that a table has embeddings for; None where it is not known."""
    parts = [getattr(table, name, None) for name in ("weight", "embedding", "new_embedding")]  # the last: Molmo's two
    return sum(part.shape[0] for part in parts if part is not None) or None


def dtype_of(table: Any) -> mx.Dtype | None:
    """The type of a table's embeddings, or None where it is not known."""
    known = getattr(table, "scales", None) if hasattr(table, "bits") else getattr(table, "weight", None)
    return None if known is None else known.dtype


def spans_of(ids: mx.array, markers: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """The runs [start, end) of placeholder ids in a prompt (1, L)."""
    inside = np.isin(np.array(ids)[0], list(markers)).astype(np.int8)
    edges = np.flatnonzero(np.diff(inside, prepend=0, append=0)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def repeat_placeholders(ids: mx.array, marker: int, counts: Sequence[int]) -> mx.array:
    """Ids (1, L) with the n-th placeholder repeated ``counts[n]`` times.

    Raises InvalidPrompt if there are not as many placeholders as counts.
    """
    tokens = np.array(ids)[0]
    places = np.flatnonzero(tokens == marker)
    if len(places) != len(counts):
        raise InvalidPrompt(f"the prompt has {len(places)} placeholders for {len(counts)} pictures")
    repeats = np.ones(len(tokens), dtype=np.int64)
    repeats[places] = counts
    return mx.array(np.repeat(tokens, repeats)[None])


def put_features(embeds: mx.array, ids: mx.array, markers: frozenset[int], features: mx.array) -> mx.array:
    """(1, L, D) embeddings with the rows of (N, D) features in place of the N placeholder ids.

    Raises InvalidPrompt if the prompt has another number of placeholders.
    """
    places = [index for index, token in enumerate(np.array(ids)[0].tolist()) if token in markers]
    if len(places) != len(features):
        raise InvalidPrompt(f"the pictures need {len(features)} placeholder tokens; the prompt has {len(places)}")
    filled = mx.array(embeds)
    filled[:, mx.array(places)] = features.astype(embeds.dtype)[None]
    return filled


def sight_of(pictures: Sequence[Picture], rows: np.ndarray) -> np.ndarray:
    """What each position sees of pictures: the content (L, 2) of its tiles, or of all pictures, which a position attends to
    that sees no tile. ``rows`` (L, 3) are the positions of the prompt's key."""
    masks = np.concatenate([picture.seen for picture in pictures], axis=1)
    everything = digest([rows[picture.start] for picture in pictures])
    return np.stack([as_words(digest(np.flatnonzero(mask)) if mask.any() else everything) for mask in masks])


def sized_pictures(extra: Mapping[str, Any]) -> list[tuple[mx.array, list[int]]]:
    """Each picture's tiles (T, 3, S, S) with its (high, wide) in pixels, from ``pixel_values`` and ``image_sizes``.

    Raises InvalidPrompt if there are not as many of one as of the other.
    """
    pictures, sizes = list(extra["pixel_values"]), np.array(extra["image_sizes"]).reshape(-1, 2).tolist()
    if len(pictures) != len(sizes):
        raise InvalidPrompt(f"pixel_values holds {len(pictures)} pictures, and image_sizes the sizes of {len(sizes)}")
    return list(zip(pictures, sizes, strict=True))


def tiles_of(tiles: mx.array, size: Sequence[int], grid: tuple[int, int]) -> mx.array:
    """The whole picture and its grid of tiles, without the tiles that a processor pads with.

    Raises InvalidPrompt if a picture of (high, wide) pixels has fewer tiles than its grid.
    """
    needed = grid[0] * grid[1] + 1
    if len(tiles) < needed:
        raise InvalidPrompt(
            f"a picture of {size[0]}x{size[1]} pixels takes {needed} tiles (the whole, and {grid[0]} rows of {grid[1]}); "
            f"pixel_values holds {len(tiles)}: its processor cuts by other grids than the model"
        )
    return tiles[:needed]


def bidirectional_mask(
    spans: Sequence[tuple[int, int]], start: int, end: int, window: int | None = None, *, cut_pictures: bool = True
) -> mx.array | None:
    """The mask of a chunk whose pictures attend within themselves both ways: (1, 1, end - start, end) bool, True attends.

    With a ``window``, a token sees no further back than that many positions, its own included; unless ``cut_pictures``,
    it sees all of its own picture. None if no span lies in the chunk, which then is causal as usual. A span is atomic,
    so a chunk holds all of it or nothing.
    """
    inside = [(first, stop) for first, stop in spans if start <= first < end]
    if not inside:
        return None
    rows, columns = mx.arange(start, end)[:, None], mx.arange(end)[None, :]
    near = mx.array(True) if window is None else columns > rows - window
    mask = (columns <= rows) & near
    for first, stop in inside:
        picture = (rows >= first) & (rows < stop) & (columns >= first) & (columns < stop)
        mask = mask | (picture & near if cut_pictures else picture)
    return mask[None, None]
