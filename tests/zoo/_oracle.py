"""How an answer is made when a request is alone: mlx-vlm's own loop, or the whole sequence again at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.generate.ar import generate_step

from ._types import Inputs, Trace

# What mlx-vlm's language models remember of the last request.
_REMEMBERED = ("_position_ids", "_rope_deltas")


def to_mx(inputs: Inputs) -> dict:
    """The same mapping with MLX arrays."""

    def convert(value: object) -> object:
        if isinstance(value, list):
            return [convert(item) for item in value]
        return mx.array(value) if isinstance(value, np.ndarray) else value

    return {key: convert(value) for key, value in inputs.items()}


@contextmanager
def nothing_remembered(model: nn.Module) -> Iterator[None]:
    """Hide what an earlier request left on the language model, and put it back afterwards."""
    language = model.language_model
    before = {name: getattr(language, name) for name in _REMEMBERED if hasattr(language, name)}
    for name in before:
        setattr(language, name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(language, name, value)


def generate_alone(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """mlx-vlm's own single-request path, with nothing left over from an earlier request."""
    arrays = to_mx(inputs)
    input_ids, pixel_values = arrays.pop("input_ids"), arrays.pop("pixel_values", None)
    with nothing_remembered(model):
        steps = generate_step(input_ids, model, pixel_values, None, max_tokens=num_tokens, temperature=0.0, **arrays)
        pairs = [(int(token), np.array(logprobs, dtype=np.float32)) for token, logprobs in steps]
    return Trace([token for token, _ in pairs], np.stack([logprobs for _, logprobs in pairs]))


def generate_by_recomputing(logits: Callable[[list[int]], mx.array], num_tokens: int) -> Trace:
    """Greedy tokens where `logits` maps the tokens generated so far to the (V,) logits of the next."""
    tokens: list[int] = []
    rows: list[np.ndarray] = []
    for _ in range(num_tokens):
        last = logits(tokens)
        row = np.array(last - mx.logsumexp(last), dtype=np.float32)
        rows.append(row)
        tokens.append(int(row.argmax()))
    return Trace(tokens, np.stack(rows))
