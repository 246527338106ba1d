"""Choosing the next token of every row at once; a row's choice depends on its own logits, parameters and seed only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from vlm_batch.engine.penalties import NO_RULES, RowRules, forbid, has_rules, penalise, reads_history
from vlm_batch.types import SamplingParams, TokenLogprobs

#: The number of a large vocabulary's most likely tokens that are put in order; ordering all of them is several times slower.
NUM_CANDIDATES = 1024


@dataclass(frozen=True)
class SamplingRow:
    """A row as sampling needs it: its parameters, its seed, ``step`` tokens drawn before, and its history."""

    params: SamplingParams
    seed: int
    step: int
    history: mx.array | None = None  # (T,) int, only for rows with processors or a repetition penalty
    vocabulary: int | None = None  # how many of the columns are its own; None for all
    rules: RowRules = NO_RULES


@dataclass(frozen=True)
class Sampled:
    """The chosen tokens (B,), and what the rows that asked for log-probabilities get (evaluated with the tokens)."""

    tokens: mx.array  # (B,)
    logits: mx.array | None = None  # (B,) of the chosen tokens, to see whether they are sound
    logprob_rows: tuple[int, ...] = ()
    chosen: mx.array | None = None  # (R,) log-probability of the chosen token
    top_ids: mx.array | None = None  # (R, k)
    top: mx.array | None = None  # (R, k)

    def arrays(self) -> list[mx.array]:
        return [a for a in (self.tokens, self.logits, self.chosen, self.top_ids, self.top) if a is not None]

    def are_finite(self) -> list[bool]:
        """For each row, whether its token's logit is finite: NaN anywhere in a row's state is in all its logits."""
        if self.logits is None:
            return [True] * self.tokens.size
        return [math.isfinite(value) for value in to_list(self.logits)]

    def read_logprobs(self, params: Sequence[SamplingParams], tokens: Sequence[int]) -> dict[int, TokenLogprobs]:
        """Host values of the rows that asked for log-probabilities, by row index; of tokens that cannot come, none."""
        if self.chosen is None or self.top_ids is None or self.top is None:
            return {}
        chosen, ids, top = to_list(self.chosen), to_list(self.top_ids), to_list(self.top)
        return {
            row: TokenLogprobs(tokens[row], chosen[i], _likely(ids[i], top[i])[: params[row].logprobs])
            for i, row in enumerate(self.logprob_rows)
        }


def _likely(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    return tuple((token, value) for token, value in zip(ids, logprobs, strict=True) if value > -math.inf)


def to_list(array: mx.array) -> list[Any]:
    """An array's values on the host; waits for them."""
    values = array.tolist()
    assert isinstance(values, list)
    return values


def needs_history(params: SamplingParams) -> bool:
    """Whether a row's tokens so far have a say in its next one."""
    return bool(params.logits_processors) or params.repetition_penalty != 1.0 or reads_history(params)


def needs_processing(params: SamplingParams) -> bool:
    """Whether a row's logits are changed before its token is chosen from them."""
    return needs_history(params) or has_rules(params)


def process(logits: mx.array, row: SamplingRow) -> mx.array:
    """One row's logits (1, V) after its penalties and biases, its own processors, and without what may not come.

    Raises whatever a processor raises, and ValueError if it changes the shape.
    """
    logits = logits[:, : row.vocabulary]
    shape = logits.shape
    if row.params.repetition_penalty != 1.0 and row.history is not None:
        logits = _repetition_penalty(
            logits, row.history[-row.params.repetition_context_size :], row.params.repetition_penalty
        )
    logits = penalise(logits, row.params, row.rules, row.history)
    for processor in row.params.logits_processors:
        logits = processor(row.history, logits)
        if not isinstance(logits, mx.array) or logits.shape != shape:
            found = logits.shape if isinstance(logits, mx.array) else type(logits).__name__
            raise ValueError(f"a logits processor must return logits of shape {shape}, not {found}")
    return forbid(logits, row.params, row.rules, row.history, row.step)


def sample(logits: mx.array, rows: Sequence[SamplingRow]) -> Sampled:
    """Choose a token for each row of processed logits (B, V), lazily.

    Greedy rows take the most likely token. Others divide by the temperature, keep ``top_k``, then ``top_p`` of what
    is left, then ``min_p`` (transformers' order), and draw by the Gumbel-max rule (Gumbel 1954) with noise from
    (seed, step).
    """
    tokens = mx.argmax(logits, axis=-1)
    plain = [i for i, row in enumerate(rows) if not row.params.is_greedy and not _needs_order(row.params)]
    ordered = [i for i, row in enumerate(rows) if not row.params.is_greedy and _needs_order(row.params)]
    for group, draw in ((plain, _draw), (ordered, _draw_sorted)):
        if group:
            picked = [rows[i] for i in group]
            scaled = logits[mx.array(group)].astype(mx.float32) / _column([row.params.temperature for row in picked])
            noise = mx.stack([_noise(row, scaled.shape[-1]) for row in picked])
            tokens = _merge(tokens, group, draw(scaled, noise, picked))
    wanting = tuple(i for i, row in enumerate(rows) if row.params.logprobs is not None)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]  # (B,)
    if not wanting:
        return Sampled(tokens, chosen)
    counts = [rows[i].params.logprobs or 0 for i in wanting]
    return replace(_with_logprobs(logits, tokens, wanting, counts), logits=chosen)


def _with_logprobs(logits: mx.array, tokens: mx.array, wanting: tuple[int, ...], counts: Sequence[int]) -> Sampled:
    index = mx.array(wanting)
    picked = logits[index].astype(mx.float32)  # (R, V)
    logprobs = picked - mx.logsumexp(picked, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[index][:, None], axis=-1)[:, 0]
    if max(counts) == 0:
        empty = mx.zeros((len(wanting), 0))
        return Sampled(tokens, None, wanting, chosen, empty.astype(mx.int32), empty)
    ids, top = likeliest(logprobs, counts)
    return Sampled(tokens, None, wanting, chosen, ids, top)


def likeliest(logprobs: mx.array, counts: Sequence[int]) -> tuple[mx.array, mx.array]:
    """Each row's ``counts[r]`` most likely tokens of (R, V), in order, and their values; -inf fills up the shorter ones.

    Rows that want as many are looked at together and no others: which of equal values come last depends on how many are wanted.
    """
    if len(set(counts)) > 1:
        widest = max(counts)
        found = [likeliest(logprobs[row : row + 1], [count]) if count else None for row, count in enumerate(counts)]
        blank = mx.zeros((1, widest), dtype=mx.uint32), mx.full((1, widest), -mx.inf)
        rows = [blank if one is None else _widened(*one, widest) for one in found]
        return mx.concatenate([ids for ids, _ in rows]), mx.concatenate([top for _, top in rows])
    k = counts[0]
    ids = mx.argpartition(-logprobs, kth=k - 1, axis=-1)[:, :k]
    order = mx.argsort(-mx.take_along_axis(logprobs, ids, axis=-1), axis=-1)
    ids = mx.take_along_axis(ids, order, axis=-1)
    return ids, mx.take_along_axis(logprobs, ids, axis=-1)


def _widened(ids: mx.array, top: mx.array, width: int) -> tuple[mx.array, mx.array]:
    """(1, k) of each, filled up to a width."""
    missing = [(0, 0), (0, width - ids.shape[1])]
    return mx.pad(ids, missing), mx.pad(top, missing, constant_values=-mx.inf)


def _needs_order(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1


def _column(values: Sequence[float]) -> mx.array:
    """(R, 1) float32."""
    return mx.array(list(values), dtype=mx.float32)[:, None]


def _merge(tokens: mx.array, places: Sequence[int], chosen: mx.array) -> mx.array:
    """``tokens`` (B,) with ``chosen`` (R,) at ``places``."""
    if len(places) == tokens.size:
        return chosen
    source = mx.array([places.index(i) if i in places else 0 for i in range(tokens.size)])
    return mx.where(mx.array([i in places for i in range(tokens.size)]), chosen[source], tokens)


def _draw(scaled: mx.array, noise: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Gumbel-max over the whole vocabulary: logits over temperature (R, V) -> (R,)."""
    return mx.argmax(_min_p(scaled, _column([row.params.min_p for row in rows])) + noise, axis=-1)


def _draw_sorted(scaled: mx.array, noise: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """``top_k`` and ``top_p`` need the likely tokens in order: (R, V) -> (R,).

    On a CPU only ``NUM_CANDIDATES`` of a large vocabulary are sorted, with the mass of all of it known; a row whose
    candidates do not hold its ``top_p`` is sorted whole. (On a GPU finding that out would cost more than the sort.)
    """
    size = scaled.shape[-1]
    if size <= 4 * NUM_CANDIDATES or mx.default_device().type == mx.DeviceType.gpu:
        return _draw_in_order(scaled, noise, rows, mx.argsort(-scaled, axis=-1))[0]
    candidates = mx.argpartition(-scaled, kth=NUM_CANDIDATES - 1, axis=-1)[:, :NUM_CANDIDATES]
    order = mx.argsort(-mx.take_along_axis(scaled, candidates, axis=-1), axis=-1)
    tokens, mass = _draw_in_order(scaled, noise, rows, mx.take_along_axis(candidates, order, axis=-1))
    may_miss = [not 0 < row.params.top_k <= NUM_CANDIDATES for row in rows]
    if not any(may_miss):
        return tokens
    missed = [
        index
        for index, (row, held) in enumerate(zip(rows, to_list(mass), strict=True))
        if may_miss[index] and (row.params.top_k > NUM_CANDIDATES or held < row.params.top_p)
    ]
    for index in missed:
        one = scaled[index : index + 1]
        again, _ = _draw_in_order(one, noise[index : index + 1], rows[index : index + 1], mx.argsort(-one, axis=-1))
        tokens = _merge(tokens, [index], again)
    return tokens


def _draw_in_order(
    scaled: mx.array, noise: mx.array, rows: Sequence[SamplingRow], order: mx.array
) -> tuple[mx.array, mx.array]:
    """Draw among the tokens ``order`` (R, C), most likely first: (R,) and the probability mass (R,) that they hold."""
    size = order.shape[-1]
    top_k = _column([row.params.top_k for row in rows])
    ranked = mx.take_along_axis(scaled, order, axis=-1)
    ranked = mx.where((top_k == 0) | (mx.arange(size)[None, :] < top_k), ranked, -mx.inf)
    total = mx.where(
        top_k == 0, mx.logsumexp(scaled, axis=-1, keepdims=True), mx.logsumexp(ranked, axis=-1, keepdims=True)
    )
    probabilities = mx.exp(ranked - total)
    cumulative = mx.cumsum(probabilities, axis=-1)
    top_p = _column([row.params.top_p for row in rows])
    ranked = mx.where((cumulative - probabilities < top_p) | (top_p >= 1), ranked, -mx.inf)
    ranked = _min_p(ranked, _column([row.params.min_p for row in rows]))
    # The noise belongs to token ids, not to ranks: two almost equal logits that swap ranks keep their own draws.
    best = mx.argmax(ranked + mx.take_along_axis(noise, order, axis=-1), axis=-1, keepdims=True)
    return mx.take_along_axis(order, best, axis=-1)[:, 0], cumulative[:, -1]


def _min_p(scaled: mx.array, min_p: mx.array) -> mx.array:
    """Drop tokens less likely than ``min_p`` times the most likely one (arXiv:2407.01082)."""
    floor = mx.max(scaled, axis=-1, keepdims=True) + mx.log(min_p)
    return mx.where(scaled >= floor, scaled, -mx.inf)


def _repetition_penalty(logits: mx.array, context: mx.array, penalty: float) -> mx.array:
    """Divide positive and multiply negative logits of the tokens in ``context`` (T,) (arXiv:1909.05858, section 4.1).

    Ids that have no logit (placeholders of pictures, below 0 or beyond the vocabulary) are passed over.
    """
    size = logits.shape[-1]
    context = mx.where((context >= 0) & (context < size), context, size)
    padded = mx.pad(logits, [(0, 0), (0, 1)])  # an own array: the assignment below must not reach the caller's
    picked = padded[:, context]
    padded[:, context] = mx.where(picked > 0, picked / penalty, picked * penalty)
    return padded[:, :size]


def _noise(row: SamplingRow, size: int) -> mx.array:
    """Gumbel noise (V,) that depends on the row's seed and step alone, whatever the width of its neighbours' logits."""
    own = size if row.vocabulary is None else row.vocabulary
    noise = mx.random.gumbel((own,), key=mx.random.key(_mix(row.seed, row.step)))
    return noise if own == size else mx.pad(noise, (0, size - own))


def _mix(seed: int, step: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014) of a seed advanced by ``step``: distinct keys for neighbouring seeds and steps."""
    mask = 2**64 - 1
    value = (seed + (step + 1) * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
