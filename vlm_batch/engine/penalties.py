"""Changes to a row's logits by its request's parameters: penalties, biases, tokens that may not come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from vlm_batch.types import SamplingParams


@dataclass(frozen=True)
class RowRules:
    """Facts that a row's rules need beside its parameters: the ids that end it, its bad words as ids, its prompt's length."""

    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_prompt: int = 0  # of the history's tokens


NO_RULES = RowRules()


def reads_history(params: SamplingParams) -> bool:
    """Whether its rules look at the tokens so far."""
    return bool(params.presence_penalty or params.frequency_penalty or params.bad_words)


def has_rules(params: SamplingParams) -> bool:
    """Whether anything here concerns a row."""
    return bool(reads_history(params) or params.logit_bias or params.min_tokens or params.allowed_token_ids is not None)


def penalise(logits: mx.array, params: SamplingParams, rules: RowRules, history: mx.array | None) -> mx.array:
    """A row's logits (1, V) with penalties for what its answer has, and with its biases."""
    if (params.presence_penalty or params.frequency_penalty) and history is not None:
        counts = _counts(history[rules.num_prompt :], logits.shape[-1])
        lowered = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        logits = lowered.astype(logits.dtype)
    if params.logit_bias:
        ids, values = _within(params.logit_bias.items(), logits.shape[-1])
        logits = logits.at[:, mx.array(ids)].add(mx.array(values, dtype=logits.dtype)) if ids else logits
    return logits


def forbid(logits: mx.array, params: SamplingParams, rules: RowRules, history: mx.array | None, step: int) -> mx.array:
    """A row's logits (1, V) with those at minus infinity that may not be the token of this ``step``."""
    size = logits.shape[-1]
    if params.allowed_token_ids is not None:
        known = [token for token in params.allowed_token_ids if token < size]
        if not known:
            raise ValueError(f"none of allowed_token_ids is a token of this model, which has {size:,}")
        allowed = mx.zeros((size,), dtype=mx.bool_)
        allowed[mx.array(known)] = True
        logits = mx.where(allowed, logits, -mx.inf)
    if step < params.min_tokens:
        logits = _without(logits, rules.end_ids)
    if rules.bad_words and history is not None:
        logits = _without(logits, [word[0] for word in rules.bad_words if len(word) == 1])
        for *before, last in rules.bad_words:
            if 0 < len(before) <= step and last < size:
                begins = mx.all(history[-len(before) :] == mx.array(before))
                logits = logits.at[:, last].add(mx.where(begins, -mx.inf, 0.0).astype(logits.dtype))
    return logits


def _counts(tokens: mx.array, size: int) -> mx.array:
    """The number of times that each token comes: (T,) -> (V,)."""
    return mx.zeros((size,)).at[mx.where(tokens < size, tokens, 0)].add((tokens < size).astype(mx.float32))


def _without(logits: mx.array, ids: Sequence[int]) -> mx.array:
    known = [token for token in ids if 0 <= token < logits.shape[-1]]
    return logits.at[:, mx.array(known)].add(mx.array(-mx.inf, dtype=logits.dtype)) if known else logits


def _within(pairs: Iterable[tuple[int, float]], size: int) -> tuple[list[int], list[float]]:
    known = [(token, value) for token, value in pairs if token < size]
    return [token for token, _ in known], [value for _, value in known]
