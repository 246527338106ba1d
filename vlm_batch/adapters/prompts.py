"""Operations on a prompt's ids, embeddings, features and masks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Encoded, Picture
from vlm_batch.store.digest import as_words, digest


def cut(value: Any, axis: int | None, start: int, end: int) -> Any:
    """Slice ``value`` along an axis; None returns it whole."""
    if axis is None:
        return value
    index = [slice(None)] * value.ndim
    index[axis] = slice(start, end)
    return value[tuple(index)]


def pad_front(value: mx.array, axis: int | None, count: int) -> mx.array:
    if axis is None:
        return value
    shape = list(value.shape)
    shape[axis] = count
    return mx.concatenate([mx.zeros(shape, value.dtype), value], axis=axis)


def pad_behind(value: Any, axis: int | None, count: int) -> Any:
    """Append ``count`` entries to ``value``; an axis of None returns it.

    Floats repeat the last entry, against division by zero; others get zeros, as text.
    """
    if axis is None:
        return value
    if mx.issubdtype(value.dtype, mx.floating):
        return repeat_last(value, axis, count)
    shape = list(value.shape)
    shape[axis] = count
    return mx.concatenate([value, mx.zeros(shape, value.dtype)], axis=axis)


def repeat_last(value: Any, axis: int, count: int) -> mx.array:
    last = cut(value, axis, value.shape[axis] - 1, value.shape[axis])
    return mx.concatenate([value, mx.repeat(last, count, axis=axis)], axis=axis)


def padded(row: Encoded, length: int, axes: Mapping[str, int | None]) -> Encoded:
    """Pad a row to ``length`` text positions; ``axes`` are its features'."""
    count, prompt = length - row.length, row.position.prompt
    return replace(
        row,
        input_ids=repeat_last(row.input_ids, 1, count),
        inputs_embeds=repeat_last(row.inputs_embeds, 1, count),
        position=replace(
            row.position,
            prompt=None if prompt is None else repeat_last(prompt, -1, count),
        ),
        prefill={
            name: pad_behind(value, axes[name], count)
            for name, value in row.prefill.items()
        },
    )


def num_entries(value: Any) -> int | None:
    if isinstance(value, (mx.array, np.ndarray)):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


def ids_named(config: Any, names: Sequence[str]) -> frozenset[int]:
    return frozenset(
        token for name in names if isinstance(token := getattr(config, name, None), int)
    )


def taken_apart(
    ids: mx.array, inputs: Mapping[str, Any], markers: frozenset[int]
) -> tuple[Picture, ...]:
    """Return a prompt's media of one kind (1, L); see ``FamilyHooks.pictures``."""
    if not inputs:
        return ()
    runs = spans_of(ids, markers)
    if not runs:
        return (Picture(0, ids.shape[1], inputs),)
    lengths = {end - start for start, end in runs}
    entries = set(map(num_entries, inputs.values()))
    are_alike = len(lengths) == 1 and entries == {len(runs)}
    if not are_alike:
        return (Picture(runs[0][0], runs[-1][1], inputs),)
    found: list[Picture] = []
    for index, (start, end) in enumerate(runs):
        own = {name: value[index] for name, value in inputs.items()}
        found.append(Picture(start, end, own))
    return tuple(found)


def check_tokens(ids: mx.array, size: int | None, marks: frozenset[int]) -> None:
    """Raise InvalidPrompt for ids without embeddings, which MLX would read out of bounds.

    Args:
        size: Number of embeddings, if known.
        marks: Exempt placeholder ids.
    """
    tokens = np.array(ids)[0]
    read = tokens[~are_any(tokens, marks)]
    below = read[read < 0]
    if below.size:
        raise InvalidPrompt(f"token id {below[0]} is below 0")
    if size is None:
        return
    beyond = read[read >= size]
    if beyond.size:
        raise InvalidPrompt(
            f"token id {beyond[0]} is beyond the model's {size}: does the tokenizer belong to this model?"
        )


def num_words(table: Any) -> int | None:
    """Count the rows of a token embedding, if it has any."""
    total = 0
    for name in ("weight", "embedding", "new_embedding"):  # Molmo has two tables
        total += len(getattr(table, name, ()))
    return total or None


def num_logits(language: Any, table: Any) -> int | None:
    """Return the columns of a model's logits: its head's rows, or its token table's; None if it names neither."""
    for path, module in language.named_modules():
        if path.endswith("lm_head") and "weight" in module:
            return int(module["weight"].shape[0])
    # Molmo's second table has no logits
    rows = getattr(table, "weight", getattr(table, "embedding", ()))
    return len(rows) or None


def dtype_of(table: Any) -> mx.Dtype | None:
    """Return the type that a token embedding gives, if it says so."""
    name = "scales" if hasattr(table, "bits") else "weight"
    known = getattr(table, name, None)
    return None if known is None else known.dtype


def are_any(tokens: np.ndarray, marks: Collection[int]) -> np.ndarray:
    """Return which tokens are one of a few marks."""
    found = np.zeros(tokens.shape, dtype=np.bool_)
    for mark in marks:
        found |= tokens == mark
    return found


def spans_of(ids: mx.array, markers: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """Return runs [start, end) of placeholders in a prompt (1, L)."""
    inside = are_any(np.array(ids)[0], markers).astype(np.int8)
    edges = np.flatnonzero(np.diff(inside, prepend=0, append=0)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def repeat_placeholders(ids: mx.array, marker: int, counts: Sequence[int]) -> mx.array:
    """Repeat the n-th placeholder of ids (1, L) ``counts[n]`` times; raise InvalidPrompt if their numbers differ."""
    tokens = np.array(ids)[0]
    positions = np.flatnonzero(tokens == marker)
    if len(positions) != len(counts):
        raise InvalidPrompt(
            f"the prompt has {len(positions)} placeholders for {len(counts)} pictures"
        )
    repeats = np.ones(len(tokens), dtype=np.int64)
    repeats[positions] = counts
    return mx.array(np.repeat(tokens, repeats)[None])


def check_positions(
    ids: Any, runs: Sequence[np.ndarray], noun: str = "pictures"
) -> None:
    """Raise InvalidPrompt unless ids (1, L) have placeholders exactly in ``runs``.

    Each run's positions (N,) must hold one id, found nowhere else.
    """
    tokens = np.array(ids)[0]
    runs = [run for run in runs if run.size]
    said = np.unique(np.concatenate([np.zeros(0, np.int64), *runs]))
    if runs and not 0 <= said[0] <= said[-1] < len(tokens):
        raise InvalidPrompt(
            f"features of {noun} belong to position {said[-1]} of a prompt of {len(tokens)} tokens"
        )
    marks = [_most_common(tokens[run]) for run in runs]
    found = np.flatnonzero(np.isin(tokens, marks))
    if not np.array_equal(found, said):
        elsewhere = " at other positions" * (len(found) == len(said))
        raise InvalidPrompt(
            f"the {noun} need {len(said)} placeholder tokens; the prompt has {len(found)}{elsewhere}"
        )


def _most_common(ids: np.ndarray) -> Any:
    """Return the id that most of a run's positions have, the least of several."""
    least = ids.min()
    return np.bincount(ids - least).argmax() + least


def put_features(
    embeds: mx.array,
    ids: mx.array,
    markers: frozenset[int],
    features: mx.array,
    noun: str = "pictures",
) -> mx.array:
    """Replace N placeholders in (1, L, D) embeddings by features (N, D); raise InvalidPrompt if N differs."""
    return put_rows(
        embeds, np.flatnonzero(are_any(np.array(ids)[0], markers)), features, noun
    )


def put_rows(
    embeds: mx.array, positions: np.ndarray, features: mx.array, noun: str
) -> mx.array:
    if len(positions) != len(features):
        raise InvalidPrompt(
            f"the {noun} need {len(features)} placeholder tokens; the prompt has {len(positions)}"
        )
    filled = mx.array(embeds)
    filled[:, mx.array(positions)] = features.astype(embeds.dtype)[None]
    return filled


def sight_of(pictures: Sequence[Picture], rows: np.ndarray) -> np.ndarray:
    """Digest each position's visible tiles, or all pictures: (L, 2)."""
    masks = np.concatenate([picture.seen for picture in pictures], axis=1)
    everything = digest([rows[picture.start] for picture in pictures])
    found = []
    for mask in masks:
        seen = digest(np.flatnonzero(mask)) if mask.any() else everything
        found.append(as_words(seen))
    return np.stack(found)


def sized_pictures(extra: Mapping[str, Any]) -> list[tuple[mx.array, list[int]]]:
    """Pair pictures' tiles (T, 3, S, S) with (height, width); raise InvalidPrompt if numbers differ."""
    pictures = list(extra["pixel_values"])
    sizes = np.array(extra["image_sizes"]).reshape(-1, 2).tolist()
    if len(pictures) != len(sizes):
        raise InvalidPrompt(
            f"pixel_values holds {len(pictures)} pictures, and image_sizes the sizes of {len(sizes)}"
        )
    return list(zip(pictures, sizes, strict=True))


def tiles_of(tiles: mx.array, size: Sequence[int], grid: tuple[int, int]) -> mx.array:
    """Drop padding tiles; raise InvalidPrompt if the grid needs more tiles."""
    needed = grid[0] * grid[1] + 1
    if len(tiles) < needed:
        raise InvalidPrompt(
            f"a picture of {size[0]}x{size[1]} pixels takes {needed} tiles (the whole, and {grid[0]} rows of {grid[1]}); "
            f"pixel_values holds {len(tiles)}: its processor cuts by other grids than the model"
        )
    return tiles[:needed]


def bidirectional_mask(
    spans: Sequence[tuple[int, int]],
    start: int,
    end: int,
    window: int | None = None,
    *,
    cut_pictures: bool = True,
) -> mx.array | None:
    """Return a chunk's mask (1, 1, end - start, end), True attends, with bidirectional pictures.

    Args:
        spans: Atomic spans; the mask is None if the chunk holds none.
        window: The sliding window, own position included.
        cut_pictures: Whether the window limits attention within pictures.
    """
    inside = [(first, stop) for first, stop in spans if start <= first < end]
    if not inside:
        return None
    rows, columns = mx.arange(start, end)[:, None], mx.arange(end)[None, :]
    near = mx.array(True) if window is None else columns > rows - window
    mask = (columns <= rows) & near
    for first, stop in inside:
        is_query = (rows >= first) & (rows < stop)
        is_key = (columns >= first) & (columns < stop)
        picture = is_query & is_key
        mask = mask | (picture & near if cut_pictures else picture)
    return mask[None, None]
