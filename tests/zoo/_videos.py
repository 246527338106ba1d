"""The answer to a request with a video alone: pictures and videos encoded apart, positions counted token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ._oracle import (
    generate_alone,
    generate_by_recomputing,
    nothing_remembered,
    put_pictures,
    to_mx,
)
from ._qwen import IMAGE, MERGE, VIDEO
from ._types import Inputs, Trace

#: Marker, pixels and grids of pictures and of videos.
KINDS = (
    (IMAGE, "pixel_values", "image_grid_thw"),
    (VIDEO, "pixel_values_videos", "video_grid_thw"),
)


def encode_apart(model: nn.Module, arrays: dict[str, mx.array]) -> dict[int, Any]:
    """Marker -> what the tower makes of the pictures, and of the videos, in a call for each."""
    return {
        marker: model.vision_tower(arrays[pixels], arrays[grid])
        for marker, pixels, grid in KINDS
        if pixels in arrays
    }


def encode_in_one_call(model: nn.Module, arrays: dict[str, mx.array]) -> dict[int, Any]:
    """The same features, of towers without deepstack, in the bits that one call for the whole prompt gives them."""
    blocks = []  # (place, marker, pixels, grid) of each time step
    for marker, pixels, grid in KINDS:
        places, row = np.flatnonzero(np.array(arrays["input_ids"][0]) == marker), 0
        for t, high, wide in np.array(arrays[grid]).tolist() if grid in arrays else ():
            for _ in range(t):
                blocks.append(
                    (
                        places[row // MERGE**2],
                        marker,
                        arrays[pixels][row : row + high * wide],
                        [1, high, wide],
                    )
                )
                row += high * wide
    blocks.sort(key=lambda block: block[0])
    _, markers, pixels_of, grids = zip(*blocks, strict=True)
    features, _ = model.vision_tower(mx.concatenate(list(pixels_of)), mx.array(grids))
    parts = mx.split(
        features,
        np.cumsum([len(pixels) // MERGE**2 for pixels in pixels_of])[:-1].tolist(),
    )
    owned = [
        (
            marker,
            [part for own, part in zip(markers, parts, strict=True) if own == marker],
        )
        for marker in set(markers)
    ]
    return {marker: mx.concatenate(own) for marker, own in owned}


def greedy(
    model: nn.Module,
    inputs: Inputs,
    num_tokens: int,
    encode: Callable[..., dict[int, Any]] = encode_apart,
) -> Trace:
    """mlx-vlm's own loop without a video; with one, the whole sequence at each step, with positions by the definition."""
    if "video_grid_thw" not in inputs:
        return generate_alone(model, inputs, num_tokens)
    arrays = to_mx(inputs)
    language, ids = model.language_model, arrays["input_ids"]
    prompt = language.model.embed_tokens(ids)
    rows = []
    for marker, found in encode(model, arrays).items():
        features, deep = found if isinstance(found, tuple) else (found, None)
        prompt = put_pictures(prompt, ids, marker, features)
        places = np.flatnonzero(inputs["input_ids"][0] == marker)
        rows += [
            (place, [layer[index] for layer in deep or ()])
            for index, place in enumerate(places)
        ]
    rows.sort(key=lambda row: row[0])
    deepstack = [
        mx.stack(list(layer))
        for layer in zip(*(layers for _, layers in rows), strict=True)
    ]
    asked = positions(inputs)
    where = np.isin(inputs["input_ids"], (IMAGE, VIDEO))

    def logits(generated: list[int]) -> mx.array:
        tail = (
            [language.model.embed_tokens(mx.array([generated], dtype=mx.int32))]
            if generated
            else []
        )
        hidden = mx.concatenate([prompt, *tail], axis=1)
        after = asked.max() + 1 + np.arange(len(generated))
        given = np.concatenate(
            [asked, np.broadcast_to(after, (3, len(generated)))], axis=1
        )
        more: dict[str, Any] = {"position_ids": mx.array(given[:, None])}
        if deepstack:
            mask = np.concatenate([where, np.zeros((1, len(generated)), bool)], axis=1)
            more |= {
                "visual_pos_masks": mx.array(mask),
                "deepstack_visual_embeds": deepstack,
            }
        # which n-grams are made of
        tokens = mx.concatenate([ids, mx.array([generated], dtype=ids.dtype)], axis=1)
        return language(tokens, inputs_embeds=hidden, **more).logits[0, -1]

    with nothing_remembered(model):
        return generate_by_recomputing(logits, num_tokens)


def positions(inputs: Inputs) -> np.ndarray:
    """(3, L): text counts on all axes; a block of placeholders has its time, row and column, counted from the text before.

    A block is a picture, or all of a video, or one of a video's time steps where the prompt has them apart. Time steps
    are a position apart, or ``second_per_grid_ts`` times 2, Qwen2.5-VL's ``tokens_per_second``.
    """
    tokens = inputs["input_ids"][0].tolist()
    spacing = (
        2 * inputs["second_per_grid_ts"][0]
        if "second_per_grid_ts" in inputs
        else np.float32(1)
    )
    grids = {IMAGE: iter(inputs.get("image_grid_thw", [])), VIDEO: _blocks(inputs)}
    found: list[tuple[int, int, int]] = []
    while len(found) < len(tokens):
        after = 1 + max((max(position) for position in found), default=-1)
        marker = tokens[len(found)]
        if marker not in grids:
            found.append((after, after, after))
            continue
        time, high, wide = next(grids[marker])
        for t in range(time):
            for y in range(high // MERGE):
                found += [
                    (after + int(np.float32(t) * spacing), after + y, after + x)
                    for x in range(wide // MERGE)
                ]
    return np.array(found, dtype=np.int32).T


def _blocks(inputs: Inputs) -> Iterator[tuple[int, int, int]]:
    tokens = inputs["input_ids"][0]
    runs = int((np.diff((tokens == VIDEO).astype(int), prepend=0) == 1).sum())
    for time, high, wide in inputs["video_grid_thw"].tolist():
        if runs == len(inputs["video_grid_thw"]):
            yield time, high, wide
        else:
            yield from [(1, high, wide)] * time
