"""From logits to tokens: a row's own stages (``process``), masks of forms, then ``sample`` for all rows.

A draw depends on its row's logits, parameters, seed and step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx

from vlm_batch.checks import check_within
from vlm_batch.engine.logprobs import Logprobs, largest
from vlm_batch.engine.work import checked_logits
from vlm_batch.runtime import exponentials
from vlm_batch.types import SamplingParams, TokenLogprobs

#: Most likely tokens of a large vocabulary to sort: sorting all is several times slower.
NUM_CANDIDATES = 1024
#: How many times as many are sorted where these hold half of what is wanted. Otherwise all are.
MORE_CANDIDATES = 16


@dataclass(frozen=True)
class RowRules:
    """A row's end tokens, and its bad words as ids."""

    end_ids: Collection[int] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    _made: list[tuple[SamplingParams, _Arrays]] = field(
        init=False, compare=False, repr=False, default_factory=list
    )

    def arrays(self, params: SamplingParams, size: int) -> _Arrays:
        if (
            not self._made
            or self._made[0][0] is not params
            or self._made[0][1].size != size
        ):
            self._made[:] = [(params, _Arrays.of(params, self.bad_words, size))]
        return self._made[0][1]


NO_RULES = RowRules()


class SamplingRow(NamedTuple):
    """A row for sampling: its parameters, seed, ``step`` tokens drawn before, and history."""

    params: SamplingParams
    seed: int
    step: int
    history: mx.array | None = None  # (T,) int, prompt and answer, if a stage reads it
    vocabulary: int | None = None  # number of its columns; None for all
    rules: RowRules = NO_RULES


#: (logits (1, V), their row) -> logits (1, V)
Stage: TypeAlias = Callable[[mx.array, SamplingRow], mx.array]


@dataclass(frozen=True)
class _Arrays:
    """Rules as arrays for ``size`` tokens; None without a rule."""

    size: int
    biased: mx.array | None = None
    biases: mx.array | None = None
    allowed: mx.array | None = None  # (V,) bool
    single: mx.array | None = None  # bad words of one token
    # (B, L) longer bad words without their last token, padded on the left with -1
    words: mx.array | None = None
    lengths: mx.array | None = None  # (B,) of ``words``
    lasts: mx.array | None = None  # (B,) their last tokens
    may_repeat: mx.array | None = None  # ids that ``no_repeat_ngrams`` leaves alone

    @classmethod
    def of(
        cls, params: SamplingParams, bad_words: Sequence[Sequence[int]], size: int
    ) -> _Arrays:
        """Raise InvalidParameters for ids outside the vocabulary."""
        made: dict[str, mx.array] = {}
        if params.logit_bias:
            check_within("logit_bias", params.logit_bias, size)
            made["biased"] = mx.array(list(params.logit_bias))
            made["biases"] = mx.array(list(params.logit_bias.values()))
        if params.allowed_token_ids is not None:
            check_within("allowed_token_ids", params.allowed_token_ids, size)
            made["allowed"] = mx.zeros((size,), dtype=mx.bool_)
            made["allowed"][mx.array(list(params.allowed_token_ids))] = True
        if params.whitelist_token_ids:
            check_within("whitelist_token_ids", params.whitelist_token_ids, size)
            made["may_repeat"] = mx.array(list(params.whitelist_token_ids))
        known = [tuple(word) for word in bad_words if word[-1] < size]
        if single := [word[0] for word in known if len(word) == 1]:
            made["single"] = mx.array(single)
        if several := [word for word in known if len(word) > 1]:
            width = max(map(len, several)) - 1
            made["words"] = mx.array(
                [[-1] * (width + 1 - len(word)) + list(word[:-1]) for word in several]
            )
            made["lengths"] = mx.array([len(word) - 1 for word in several])
            made["lasts"] = mx.array([word[-1] for word in several])
        return cls(size, **made)


@dataclass(frozen=True)
class Sampled:
    """Chosen tokens (B,), and log-probabilities for rows that asked. Lazy."""

    tokens: mx.array  # (B,)
    # (B,) logits: not finite if the row has NaN, +inf, or only -inf
    highest: mx.array | None = None
    logprobs: Logprobs | None = None
    logprob_rows: Sequence[int] = ()

    def arrays(self) -> list[mx.array]:
        found = [self.tokens] if self.highest is None else [self.tokens, self.highest]
        return found if self.logprobs is None else [*found, *self.logprobs.arrays()]

    def read(self) -> tuple[list[int], list[float], dict[int, TokenLogprobs]]:
        """Wait for tokens, each row's highest logit, and log-probabilities by row."""
        tokens: Any = self.tokens.tolist()
        highest: Any = (
            [0.0] * len(tokens) if self.highest is None else self.highest.tolist()
        )
        told = (
            []
            if self.logprobs is None
            else self.logprobs.read([tokens[row] for row in self.logprob_rows])
        )
        return tokens, highest, dict(zip(self.logprob_rows, told, strict=True))


# One row at a time, where it asks for it ------------------------------------------------------------------------------


def repetition_penalty(logits: mx.array, row: SamplingRow) -> mx.array:
    """Divide positive and multiply negative logits of recent tokens (arXiv:1909.05858, section 4.1).

    Ids without a logit, such as pictures' placeholders, are ignored.
    """
    penalty, size = row.params.repetition_penalty, logits.shape[-1]
    if row.history is None:
        return logits
    context = row.history[-row.params.repetition_context_size :]
    context = mx.where((context >= 0) & (context < size), context, size)
    # a copy, since the assignment below is in place
    padded = mx.pad(logits, [(0, 0), (0, 1)])
    picked = padded[:, context]
    padded[:, context] = mx.where(picked > 0, picked / penalty, picked * penalty)
    return padded[:, :size]


def count_penalties(logits: mx.array, row: SamplingRow) -> mx.array:
    """Subtract presence and frequency penalties (OpenAI's definition)."""
    params, size = row.params, logits.shape[-1]
    if row.history is None:
        return logits
    answer = row.history[row.history.shape[0] - row.step :]
    counts = (
        mx.zeros((size,))
        .at[mx.where(answer < size, answer, 0)]
        .add((answer < size).astype(mx.float32))
    )
    lowered = (
        logits
        - params.frequency_penalty * counts
        - params.presence_penalty * (counts > 0)
    )
    return lowered.astype(logits.dtype)


def biases(logits: mx.array, row: SamplingRow) -> mx.array:
    made = row.rules.arrays(row.params, logits.shape[-1])
    assert made.biased is not None and made.biases is not None
    return logits.at[:, made.biased].add(made.biases.astype(logits.dtype))


def processors(logits: mx.array, row: SamplingRow) -> mx.array:
    """Apply the user's processors. Raises ValueError if one changes the shape, or returns no real numbers."""
    shape = logits.shape
    for processor in row.params.logits_processors:
        logits = checked_logits(processor(row.history, logits), shape)
    return logits


def no_repeat_ngrams(logits: mx.array, row: SamplingRow) -> mx.array:
    """Exclude tokens that would complete a sequence of the answer's last ``window_size`` tokens once more.

    As in vLLM's processor for DeepSeek-OCR. Without a window it is transformers' NoRepeatNGramLogitsProcessor over the
    answer; both know lists of tokens, and here the last token may not be computed yet.
    """
    params, size = row.params, logits.shape[-1]
    count = params.no_repeat_ngram_size
    if row.history is None or row.step < count:
        return logits
    answer = row.history[row.history.shape[0] - row.step :]  # (T,)
    prefix = answer[row.step - count + 1 :]  # (N - 1,)
    seen = answer if params.window_size is None else answer[-params.window_size :]
    num_ngrams = seen.shape[0] - count + 1  # W
    begins = mx.as_strided(seen, (num_ngrams, count - 1), (1, 1))
    ends = seen[count - 1 :]  # (W,)
    is_repeated = mx.all(begins == prefix, axis=1) & (ends >= 0) & (ends < size)
    # the last place is for those that are not repeated
    is_banned = mx.zeros((size + 1,), dtype=mx.bool_)
    is_banned[mx.where(is_repeated, ends, size)] = True
    may_repeat = row.rules.arrays(params, size).may_repeat
    if may_repeat is not None:
        is_banned[may_repeat] = False
    return mx.where(is_banned[:size], -mx.inf, logits)


def forbidden(logits: mx.array, row: SamplingRow) -> mx.array:
    """Exclude tokens not allowed, early ends, and last tokens of bad words."""
    params, rules, size = row.params, row.rules, logits.shape[-1]
    made = rules.arrays(params, size)
    if made.allowed is not None:
        logits = mx.where(made.allowed, logits, -mx.inf)
    if row.step < params.min_tokens and (
        ends := [token for token in rules.end_ids if 0 <= token < size]
    ):
        logits = logits.at[:, mx.array(ends)].add(mx.array(-mx.inf, dtype=logits.dtype))
    if made.single is not None:
        logits = logits.at[:, made.single].add(mx.array(-mx.inf, dtype=logits.dtype))
    if (
        made.words is not None
        and made.lengths is not None
        and made.lasts is not None
        and row.history is not None
    ):
        ends_word = _ends_with(row.history, made.words) & (made.lengths <= row.step)
        logits = logits.at[:, made.lasts].add(
            mx.where(ends_word, -mx.inf, 0.0).astype(logits.dtype)
        )
    return logits


def stages_of(params: SamplingParams, rules: RowRules) -> tuple[Stage, ...]:
    stages: dict[Stage, object] = {
        repetition_penalty: params.repetition_penalty != 1.0,
        count_penalties: params.presence_penalty or params.frequency_penalty,
        biases: params.logit_bias,
        processors: params.logits_processors,
        no_repeat_ngrams: params.no_repeat_ngram_size,
        forbidden: params.allowed_token_ids is not None
        or params.min_tokens
        or rules.bad_words,
    }
    return tuple(stage for stage, is_asked in stages.items() if is_asked)


#: Stages that read ``SamplingRow.history``, as bad words do.
READ_HISTORY: Set[Stage] = frozenset(
    {repetition_penalty, count_penalties, processors, no_repeat_ngrams}
)


def process(logits: mx.array, row: SamplingRow) -> mx.array:
    """Apply a row's own stages to its logits (1, V)."""
    logits = logits[:, : row.vocabulary]
    for stage in stages_of(row.params, row.rules):
        logits = stage(logits, row)
    return logits


def _ends_with(history: mx.array, words: mx.array) -> mx.array:
    """Return (B,): whether tokens (T,) end with ``words`` (B, L), where -1 matches any."""
    width = min(words.shape[1], history.shape[0])
    tail = history[history.shape[0] - width :]
    padding = words[:, : words.shape[1] - width]
    begun = words[:, words.shape[1] - width :]
    return mx.all((begun == tail) | (begun == -1), axis=1) & mx.all(
        padding == -1, axis=1
    )


# All rows at once -----------------------------------------------------------------------------------------------------


def sample(logits: mx.array, rows: Sequence[SamplingRow]) -> Sampled:
    """Choose a token for each row of logits (B, V), lazily.

    Greedy rows take the most likely one. Others divide by the temperature, apply ``top_k``, ``top_p`` and ``min_p``
    (transformers' order), and draw by the Gumbel-max rule (Gumbel 1954).
    """
    tokens = mx.argmax(logits, axis=-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    # Drawn rows look for infinity or NaN in all logits: a cutoff could hide them.
    highest = (
        mx.max(logits, axis=-1)
        if drawn
        else mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    )
    ordered = [i for i in drawn if rows[i].params.top_k > 0 or rows[i].params.top_p < 1]
    for group, draw in (
        ([i for i in drawn if i not in ordered], _draw),
        (ordered, _draw_sorted),
    ):
        if group:
            picked = [rows[i] for i in group]
            scaled = logits[mx.array(group)].astype(mx.float32) / _column(
                [row.params.temperature for row in picked]
            )
            noise = mx.stack([_noise(row, scaled.shape[-1]) for row in picked])
            tokens = _merge(tokens, group, draw(scaled, noise, picked))
    counts = {
        i: row.params.logprobs
        for i, row in enumerate(rows)
        if row.params.logprobs is not None
    }
    if not counts:
        return Sampled(tokens, highest)
    asked = mx.array(list(counts))
    return Sampled(
        tokens,
        highest,
        Logprobs.of(logits[asked], tokens[asked], list(counts.values())),
        tuple(counts),
    )


def top_k(ranked: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Keep the first ``top_k`` of sorted logits (R, C)."""
    counts = _column([row.params.top_k for row in rows])
    return mx.where(
        (counts == 0) | (mx.arange(ranked.shape[-1])[None, :] < counts), ranked, -mx.inf
    )


def top_p(
    ranked: mx.array, rows: Sequence[SamplingRow], scaled: mx.array
) -> tuple[mx.array, mx.array]:
    """Keep sorted logits (R, C) up to probability ``top_p``. Also returns the mass (R,) of all C.

    Probabilities are among what ``top_k`` left, else among ``scaled`` (R, V).
    """
    left, whole = (exponentials.log_of_sum(part) for part in (ranked, scaled))
    total = mx.where(_column([row.params.top_k for row in rows]) == 0, whole, left)
    probabilities = mx.exp(ranked - total)
    cumulative = mx.cumsum(probabilities, axis=-1)
    most = _column([row.params.top_p for row in rows])
    return mx.where(
        (cumulative - probabilities < most) | (most >= 1), ranked, -mx.inf
    ), cumulative[:, -1]


def min_p(scaled: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Drop tokens below ``min_p`` times the highest probability (arXiv:2407.01082)."""
    least = [row.params.min_p for row in rows]
    if not any(least):
        return scaled
    # -inf where it is 0
    floor = mx.max(scaled, axis=-1, keepdims=True) + mx.log(_column(least))
    return mx.where(scaled >= floor, scaled, -mx.inf)


# (R, V) -> (R,)
def _draw(scaled: mx.array, noise: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    return mx.argmax(min_p(scaled, rows) + noise, axis=-1)


def _draw_sorted(
    scaled: mx.array, noise: mx.array, rows: Sequence[SamplingRow]
) -> mx.array:
    """Draw with ``top_k`` or ``top_p`` from logits (R, V) -> (R,)."""
    return _draw_among(scaled, noise, rows, NUM_CANDIDATES)


def _draw_among(
    scaled: mx.array, noise: mx.array, rows: Sequence[SamplingRow], count: int
) -> mx.array:
    """Sort ``count`` tokens first, and more for rows that may draw beyond them."""
    # On a GPU the check that they suffice costs more than to sort all.
    size = scaled.shape[-1]
    if size <= 4 * count or mx.default_device().type == mx.DeviceType.gpu:
        return _draw_in_order(scaled, noise, rows, mx.argsort(-scaled, axis=-1))[0]
    candidates = largest(scaled, count)
    order = mx.argsort(-mx.take_along_axis(scaled, candidates, axis=-1), axis=-1)
    tokens, mass = _draw_in_order(
        scaled, noise, rows, mx.take_along_axis(candidates, order, axis=-1)
    )
    may_miss = [not 0 < row.params.top_k <= count for row in rows]
    held: Any = mass.tolist() if any(may_miss) else []
    for index, row in enumerate(rows):
        if may_miss[index] and (
            row.params.top_k > count or held[index] < row.params.top_p
        ):
            own = slice(index, index + 1)
            is_near = 2 * held[index] >= row.params.top_p
            more = count * MORE_CANDIDATES if is_near else size
            tokens = _merge(
                tokens, [index], _draw_among(scaled[own], noise[own], [row], more)
            )
    return tokens


def _draw_in_order(
    scaled: mx.array, noise: mx.array, rows: Sequence[SamplingRow], order: mx.array
) -> tuple[mx.array, mx.array]:
    """Draw among sorted tokens ``order`` (R, C). Also returns their probability mass (R,)."""
    ranked, mass = top_p(
        top_k(mx.take_along_axis(scaled, order, axis=-1), rows), rows, scaled
    )
    # Noise belongs to token ids, so that almost equal logits that swap ranks keep their draws.
    best = mx.argmax(
        min_p(ranked, rows) + mx.take_along_axis(noise, order, axis=-1),
        axis=-1,
        keepdims=True,
    )
    return mx.take_along_axis(order, best, axis=-1)[:, 0], mass


def _column(values: Sequence[float]) -> mx.array:  # (R, 1) float32
    return mx.array(list(values), dtype=mx.float32)[:, None]


# (B,), with (R,) at places
def _merge(tokens: mx.array, places: Sequence[int], chosen: mx.array) -> mx.array:
    if len(places) == tokens.size:
        return chosen
    source = mx.array(
        [places.index(i) if i in places else 0 for i in range(tokens.size)]
    )
    return mx.where(
        mx.array([i in places for i in range(tokens.size)]), chosen[source], tokens
    )


def _noise(row: SamplingRow, size: int) -> mx.array:
    """Return Gumbel noise (V,), its key splitmix64 (Steele, Lea, Flood 2014) of seed and step."""
    mask = 2**64 - 1
    value = (row.seed + (row.step + 1) * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    own = size if row.vocabulary is None else row.vocabulary
    noise = exponentials.gumbel(
        mx.random.uniform(shape=(own,), key=mx.random.key(value ^ (value >> 31)))
    )
    return noise if own == size else mx.pad(noise, (0, size - own))
