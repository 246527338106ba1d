"""HunyuanOCR: four-axis positions, a picture's tokens in rows that end with a line break, between a begin and an end."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import hunyuan_vl as upstream

from ._build import (
    Rule,
    asks,
    enliven,
    fan_in,
    ids,
    pixels,
    spread,
    text_request,
    words,
)
from ._oracle import generate_by_recomputing, to_mx
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace

PATCH, MERGE = 4, 2
IMAGE, START, END = PLAIN, PLAIN + 1, PLAIN + 2
GRIDS = ((4, 4), (4, 6), (6, 8))
Grid = tuple[int, int]


def build() -> nn.Module:
    """Four layers of 64, two vision blocks of 32, learned vision positions of 4 x 4."""
    model = upstream.Model(
        upstream.ModelConfig(
            image_token_id=IMAGE,
            image_start_token_id=START,
            image_end_token_id=END,
            eos_token_id=END_OF_TEXT,
            vocab_size=VOCABULARY,
            text_config=upstream.TextConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                intermediate_size=96,
                rope_theta=100.0,
                rope_scaling={"type": "xdrope", "xdrope_section": [2, 2, 2, 2]},
                max_position_embeddings=1024,
                tie_word_embeddings=False,
            ),
            vision_config=upstream.VisionConfig(
                hidden_size=32,
                out_hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                patch_size=PATCH,
                max_image_size=PATCH * 4,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"perceive\.image_(newline|begin|end|sep)$", spread(1.0)),
    ]
    enliven(model, seed=120, rules=rules, quiet=head)
    return model


def _merged(grids: Sequence[Grid]) -> list[Grid]:
    return [(high // MERGE, wide // MERGE) for high, wide in grids]


def request(seed: int, grids: Sequence[Grid]) -> Inputs:
    """Words, then each picture between its markers followed by words; positions are the oracle's and the adapter's own."""
    parts = [words(seed, 3)]
    for index, (high, wide) in enumerate(_merged(grids)):
        parts += [
            [START, *[IMAGE] * (high * (wide + 1) + 2), END],
            words(seed + 101 * (index + 1), 4 + index),
        ]
    flat = [
        pixels(seed + 31 * i, high * wide, 3 * PATCH * PATCH)
        for i, (high, wide) in enumerate(grids)
    ]
    return {
        "input_ids": ids(*parts),
        "pixel_values": np.concatenate(flat),
        "image_grid_thw": np.array(
            [[1, high, wide] for high, wide in grids], dtype=np.int32
        ),
    }


# One picture of 8, 10 or 17 placeholders. Two pictures of different grids.
image, two_images = asks(request, GRIDS, (GRIDS[1], GRIDS[0]))


def _positions(tokens: np.ndarray, grids: Sequence[Grid]) -> mx.array:
    """(1, 4, L): all tokens; then, inside a picture, its columns, rows and number."""
    positions = np.tile(np.arange(len(tokens)), (4, 1))
    # the marker, then the picture's own begin
    starts = np.flatnonzero(tokens == START) + 2
    for number, (start, (high, wide)) in enumerate(
        zip(starts, _merged(grids), strict=False)
    ):
        for row in range(high):
            for column in range(wide + 1):
                positions[1:, start + row * (wide + 1) + column] = column, row, number
    return mx.array(positions[None].astype(np.int32))


def _resized(embed: nn.Module, table: mx.array, high: int, wide: int) -> mx.array:
    """(1, H, W, D) -> (1, high, wide, D): linear along both sides, the last of the table beyond its ends."""
    values = np.array(table[0], dtype=np.float64)
    for axis, new in enumerate((high, wide)):
        old = values.shape[axis]
        if old == new:
            continue
        at = (np.arange(new) + 0.5) * old / (new + 0.1) - 0.5
        flat = np.moveaxis(values, axis, -1).reshape(-1, old)
        rows = np.stack([np.interp(at, np.arange(old), row) for row in flat])
        values = np.moveaxis(
            rows.reshape(*np.moveaxis(values, axis, -1).shape[:-1], new), -1, axis
        )
    return mx.array(values[None].astype(np.float32))


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, positions of all of it, each picture encoded alone."""
    arrays = to_mx(inputs)
    trunk = model.language_model.model
    prompt = trunk.embed_tokens(arrays["input_ids"])
    grids: list[Grid] = []
    if "pixel_values" in arrays:
        grids = [(high, wide) for _, high, wide in arrays["image_grid_thw"].tolist()]
        ends = np.cumsum([high * wide for high, wide in grids])[:-1].tolist()
        parts = zip(mx.split(arrays["pixel_values"], ends), grids, strict=True)
        holes = np.flatnonzero(np.array(arrays["input_ids"][0]) == IMAGE)
        with mock.patch(
            "mlx_vlm.models.hunyuan_vl.vision.PatchEmbed._interpolate_pos_embed",
            _resized,
        ):
            found = [
                model.vision_tower(part, [[1, high, wide]])
                for part, (high, wide) in parts
            ]
        prompt[:, mx.array(holes)] = mx.concatenate(found, axis=1)

    def logits(generated: list[int]) -> mx.array:
        tail = mx.array([generated], dtype=mx.int32)
        tokens = mx.concatenate([arrays["input_ids"], tail], axis=1)
        hidden = mx.concatenate([prompt, trunk.embed_tokens(tail)], axis=1)
        hidden = trunk(
            inputs_embeds=hidden,
            mask="causal",
            position_ids=_positions(np.array(tokens[0]), grids),
        )
        return model.language_model.lm_head(hidden[0, -1])

    return generate_by_recomputing(logits, num_tokens)


FAMILY = TinyFamily(
    name="hunyuan_vl",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="The whole sequence at each step over the model's own layers, with four-axis positions written out here and "
    "each picture encoded alone. mlx-vlm's loop counts text positions after the first chunk, and its tower lets pictures "
    "see each other. transformers agrees where its class does as the published code (tests/references/documents.py).",
)
