"""How an answer is made when a request is alone: mlx-vlm's own loop, or the whole sequence again at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

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
    before = {
        name: getattr(language, name) for name in _REMEMBERED if hasattr(language, name)
    }
    for name in before:
        setattr(language, name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(language, name, value)


def generate_alone(
    model: nn.Module, inputs: Inputs, num_tokens: int, **settings: Any
) -> Trace:
    """mlx-vlm's own single-request path, with nothing left over from an earlier request. `settings` are the loop's."""
    arrays = to_mx(inputs)
    input_ids, pixel_values = arrays.pop("input_ids"), arrays.pop("pixel_values", None)
    mask = arrays.pop("attention_mask", None)
    with nothing_remembered(model):
        steps = generate_step(
            input_ids,
            model,
            pixel_values,
            mask,
            max_tokens=num_tokens,
            temperature=0.0,
            **arrays,
            **settings,
        )
        pairs = [
            (int(token), np.array(logprobs, dtype=np.float32))
            for token, logprobs in steps
        ]
    return Trace(
        [token for token, _ in pairs], of_one_width([logprobs for _, logprobs in pairs])
    )


def of_one_width(rows: list[np.ndarray]) -> np.ndarray:
    """(T, V) of rows (V,); where a step had fewer tokens to choose from, the others are impossible there."""
    widest = max(map(len, rows))
    return np.stack(
        [np.pad(row, (0, widest - len(row)), constant_values=-np.inf) for row in rows]
    )


def generate_by_recomputing(
    logits: Callable[[list[int]], mx.array], num_tokens: int
) -> Trace:
    """Greedy tokens where `logits` maps the tokens generated so far to the (V,) logits of the next."""
    tokens: list[int] = []
    rows: list[np.ndarray] = []
    for _ in range(num_tokens):
        last = logits(tokens)
        row = np.array(last - mx.logsumexp(last), dtype=np.float32)
        rows.append(row)
        tokens.append(int(row.argmax()))
    return Trace(tokens, of_one_width(rows))


def generate_from_embeddings(
    model: nn.Module, prompt: mx.array, num_tokens: int
) -> Trace:
    """The whole sequence at each step through the language model, without a cache: (1, L, D) embeddings of the prompt.

    For families whose pictures mlx-vlm embeds wrongly and whose language model is right.
    """
    language = model.language_model

    def logits(generated: list[int]) -> mx.array:
        tail = language.model.embed_tokens(mx.array([generated], dtype=mx.int32))
        hidden = mx.concatenate([prompt, tail], axis=1)
        return language(
            mx.zeros(hidden.shape[:2], mx.int32), inputs_embeds=hidden
        ).logits[0, -1]

    return generate_by_recomputing(logits, num_tokens)


def put_pictures(
    embeds: mx.array, ids: mx.array, marker: int, features: mx.array
) -> mx.array:
    """(1, L, D) embeddings with the rows of (N, D) features in place of the N ids that are `marker`."""
    places = np.flatnonzero(np.array(ids[0]) == marker)
    assert len(places) == len(features)
    embeds[:, mx.array(places)] = features[None]
    return embeds


@contextmanager
def _with_gelu(model: nn.Module, given: str, right: str) -> Iterator[None]:
    """Another form of GELU wherever a module of the model has the given one."""
    changed = [
        (module, name, child)
        for _, module in model.named_modules()
        for name, child in module.items()
        if isinstance(child, nn.GELU) and child._approx == given
    ]
    for module, name, _ in changed:
        module[name] = nn.GELU(approx=right)
    try:
        yield
    finally:
        for module, name, child in changed:
            module[name] = child


def with_exact_gelu(model: nn.Module) -> AbstractContextManager[None]:
    """GELU by the error function in place of its tanh form."""
    return _with_gelu(model, "precise", "none")


def with_tanh_gelu(model: nn.Module) -> AbstractContextManager[None]:
    """GELU in its tanh form in place of the sigmoid's."""
    return _with_gelu(model, "fast", "tanh")
