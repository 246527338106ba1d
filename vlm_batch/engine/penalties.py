"""Changes to a row's logits by its request's parameters: penalties, biases, tokens that may not come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from vlm_batch.errors import InvalidParameters
from vlm_batch.types import SamplingParams


@dataclass(frozen=True)
class RowRules:
    """Facts that a row's rules need beside its parameters: the ids that end it, its bad words as ids, its prompt's length."""

    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_prompt: int = 0  # of the history's tokens
    _made: list[tuple[SamplingParams, _Arrays]] = field(init=False, compare=False, repr=False, default_factory=list)

    def arrays(self, params: SamplingParams, size: int) -> _Arrays:
        """Arrays of the rules, made once: a list of ids may be long, and every row waits for a step."""
        if not self._made or self._made[0][0] is not params or self._made[0][1].size != size:
            self._made[:] = [(params, _Arrays.of(params, self.bad_words, size))]
        return self._made[0][1]


@dataclass(frozen=True)
class _Arrays:
    """Rules as arrays, for logits of ``size`` tokens; None for those that a row does not have.

    ``words`` (B, L) are the tokens before the last one of each of several bad words, at the right; ``lengths`` (B,) are
    how many, and ``lasts`` (B,) the last ones.
    """

    size: int
    biased: mx.array | None = None
    biases: mx.array | None = None
    allowed: mx.array | None = None  # (V,) bool
    single: mx.array | None = None  # bad words of one token
    words: mx.array | None = None
    lengths: mx.array | None = None
    lasts: mx.array | None = None

    @classmethod
    def of(cls, params: SamplingParams, bad_words: Sequence[Sequence[int]], size: int) -> _Arrays:
        """Raises InvalidParameters for ids that are no tokens of the model."""
        made: dict[str, mx.array] = {}
        if params.logit_bias:
            _check_within("logit_bias", params.logit_bias, size)
            made["biased"] = mx.array(list(params.logit_bias))
            made["biases"] = mx.array(list(params.logit_bias.values()))
        if params.allowed_token_ids is not None:
            _check_within("allowed_token_ids", params.allowed_token_ids, size)
            made["allowed"] = mx.zeros((size,), dtype=mx.bool_)
            made["allowed"][mx.array(list(params.allowed_token_ids))] = True
        known = [tuple(word) for word in bad_words if word[-1] < size]
        if single := [word[0] for word in known if len(word) == 1]:
            made["single"] = mx.array(single)
        if several := [word for word in known if len(word) > 1]:
            width = max(map(len, several)) - 1
            made["words"] = mx.array([[-1] * (width + 1 - len(word)) + list(word[:-1]) for word in several])
            made["lengths"] = mx.array([len(word) - 1 for word in several])
            made["lasts"] = mx.array([word[-1] for word in several])
        return cls(size, **made)


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
    made = rules.arrays(params, logits.shape[-1]) if params.logit_bias else None
    if made is not None and made.biased is not None and made.biases is not None:
        logits = logits.at[:, made.biased].add(made.biases.astype(logits.dtype))
    return logits


def forbid(logits: mx.array, params: SamplingParams, rules: RowRules, history: mx.array | None, step: int) -> mx.array:
    """A row's logits (1, V) with those at minus infinity that may not be the token of this ``step``."""
    if params.allowed_token_ids is None and not params.min_tokens and not rules.bad_words:
        return logits
    made = rules.arrays(params, logits.shape[-1])
    if made.allowed is not None:
        logits = mx.where(made.allowed, logits, -mx.inf)
    if step < params.min_tokens:
        logits = _without(logits, rules.end_ids)
    if made.single is not None:
        logits = logits.at[:, made.single].add(mx.array(-mx.inf, dtype=logits.dtype))
    if made.words is not None and made.lengths is not None and made.lasts is not None and history is not None:
        ends = _ends_with(history, made.words) & (made.lengths <= step)
        logits = logits.at[:, made.lasts].add(mx.where(ends, -mx.inf, 0.0).astype(logits.dtype))
    return logits


def _ends_with(history: mx.array, words: mx.array) -> mx.array:
    """A truth value (B,) for each word (B, L): the tokens so far (T,) end with it. Its -1 at the left stand for anything."""
    width = min(words.shape[1], history.shape[0])
    tail = history[history.shape[0] - width :]
    padding = words[:, : words.shape[1] - width]
    begun = words[:, words.shape[1] - width :]
    return mx.all((begun == tail) | (begun == -1), axis=1) & mx.all(padding == -1, axis=1)


def _counts(tokens: mx.array, size: int) -> mx.array:
    """The number of times that each token comes: (T,) -> (V,)."""
    return mx.zeros((size,)).at[mx.where(tokens < size, tokens, 0)].add((tokens < size).astype(mx.float32))


def _without(logits: mx.array, ids: Sequence[int]) -> mx.array:
    known = [token for token in ids if 0 <= token < logits.shape[-1]]
    return logits.at[:, mx.array(known)].add(mx.array(-mx.inf, dtype=logits.dtype)) if known else logits


def _check_within(name: str, ids: Iterable[int], size: int) -> None:
    if beyond := next((token for token in ids if token >= size), None):
        raise InvalidParameters(f"{name} holds {beyond}; this model has {size:,} tokens")
