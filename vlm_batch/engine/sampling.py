"""From logits to tokens: a row's own stages (``STAGES``), masks of forms, then ``sample`` for all rows.

A draw depends on its row's logits, parameters, seed and step alone. A further option is a function here and a line of
``STAGES``, which has the stages in their order, or a step of ``sample``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx

from vlm_batch.checks import check_within
from vlm_batch.engine.logprobs import AskedLogprobs, Logprobs, largest
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
    changes_logits: bool = False  # whether a stage of the row's own does; once encoded
    _made: list[tuple[SamplingParams, _Arrays]] = field(
        init=False, compare=False, repr=False, default_factory=list
    )

    def arrays(self, params: SamplingParams, size: int) -> _Arrays:
        """Return the rules as arrays, made once."""
        if self._made:
            given, made = self._made[0]
            if given is params and made.size == size:
                return made
        made = _Arrays.of(params, self.bad_words, size)
        self._made[:] = [(params, made)]
        return made


NO_RULES = RowRules()


class SamplingRow(NamedTuple):
    """A row for sampling: its parameters, seed, ``step`` tokens drawn before, and history."""

    params: SamplingParams
    seed: int
    step: int
    history: Any = None  # (T,) int, prompt and answer, if a stage reads it
    vocabulary: int | None = None  # number of its columns; None for all
    rules: RowRules = NO_RULES


@dataclass(frozen=True)
class _Arrays:
    """Rules as arrays for ``size`` tokens; None without a rule, whose stage is not run."""

    size: int
    biased: Any = None
    biases: Any = None
    allowed: Any = None  # (V,) bool
    single: mx.array | None = None  # bad words of one token
    longer: _BadWords | None = None  # of several
    may_repeat: mx.array | None = None  # ids that ``no_repeat_ngrams`` leaves alone

    @classmethod
    def of(
        cls, params: SamplingParams, bad_words: Sequence[Sequence[int]], size: int
    ) -> _Arrays:
        """Raise InvalidParameters for ids outside the vocabulary."""
        made = _word_arrays([word for word in bad_words if word[-1] < size])
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
        return cls(size, **made)


class _BadWords(NamedTuple):
    """B bad words of several tokens."""

    beginnings: mx.array  # (B, L) without their last tokens, padded on the left with -1
    lengths: mx.array  # (B,) of these
    lasts: mx.array  # (B,) their last tokens

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> _BadWords:
        longest = max(map(len, words))
        padded: list[list[int]] = []
        for word in words:
            padding = [-1] * (longest - len(word))
            padded.append(padding + list(word))
        every = mx.array(padded)
        lengths = mx.array([len(word) - 1 for word in words])
        return cls(every[:, :-1], lengths, every[:, -1])


def _word_arrays(words: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the fields of ``_Arrays`` for bad words."""
    single: list[int] = []
    several: list[Sequence[int]] = []
    for word in words:
        if len(word) == 1:
            single.append(word[0])
        else:
            several.append(word)
    made: dict[str, Any] = {}
    if single:
        made["single"] = mx.array(single)
    if several:
        made["longer"] = _BadWords.of(several)
    return made


@dataclass(frozen=True)
class Sampled:
    """Chosen tokens (B,), and log-probabilities for rows that asked. Lazy."""

    tokens: mx.array  # (B,)
    # (B,) logits: not finite if the row has NaN, +inf, or only -inf
    highest: mx.array
    logprobs: Logprobs | AskedLogprobs | None = None
    logprob_rows: Sequence[int] = ()

    def arrays(self) -> list[mx.array]:
        found = [self.tokens, self.highest]
        if self.logprobs is not None:
            found += self.logprobs.arrays()
        return found

    def read(self) -> tuple[list[int], list[float], dict[int, TokenLogprobs]]:
        """Wait for tokens, each row's highest logit, and log-probabilities by row."""
        tokens: Any = self.tokens.tolist()
        highest: Any = self.highest.tolist()
        if self.logprobs is None:
            return tokens, highest, {}
        told = self.logprobs.read([tokens[row] for row in self.logprob_rows])
        return tokens, highest, dict(zip(self.logprob_rows, told, strict=True))


#: A token, perhaps not computed yet: the array (N,) of those that were sampled with it, and its index there.
Drawn: TypeAlias = tuple[Any, int]
#: Of a row for which no token was sampled.
NOT_DRAWN: Drawn = (None, 0)


# One row at a time, where it asks for it ------------------------------------------------------------------------------


def repetition_penalty(logits: mx.array, row: SamplingRow) -> mx.array:
    """Divide positive and multiply negative logits of recent tokens (arXiv:1909.05858, section 4.1).

    Ids without a logit, such as pictures' placeholders, are ignored.
    """
    penalty, size = row.params.repetition_penalty, logits.shape[-1]
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
    if row.step < count:
        return logits
    answer = row.history[row.history.shape[0] - row.step :]  # (T,)
    prefix = answer[row.step - count + 1 :]  # (N - 1,)
    seen = answer if params.window_size is None else answer[-params.window_size :]
    num_ngrams = seen.shape[0] - count + 1  # W
    begins = mx.as_strided(seen, (num_ngrams, count - 1), (1, 1))
    ends = seen[count - 1 :]  # (W,)
    is_repeated = mx.all(begins == prefix, axis=1) & (ends >= 0) & (ends < size)
    # the last entry is for those that are not repeated
    is_banned = mx.zeros((size + 1,), dtype=mx.bool_)
    is_banned[mx.where(is_repeated, ends, size)] = True
    may_repeat = row.rules.arrays(params, size).may_repeat
    if may_repeat is not None:
        is_banned[may_repeat] = False
    return mx.where(is_banned[:size], -mx.inf, logits)


def allowed_only(logits: mx.array, row: SamplingRow) -> mx.array:
    """Exclude tokens outside ``allowed_token_ids``."""
    made = row.rules.arrays(row.params, logits.shape[-1])
    return mx.where(made.allowed, logits, -mx.inf)


def no_early_end(logits: mx.array, row: SamplingRow) -> mx.array:
    """Exclude tokens that end the answer before ``min_tokens``."""
    size = logits.shape[-1]
    if row.step >= row.params.min_tokens:
        return logits
    ends = [token for token in row.rules.end_ids if 0 <= token < size]
    return _without(logits, mx.array(ends)) if ends else logits


def no_bad_words(logits: mx.array, row: SamplingRow) -> mx.array:
    """Exclude bad words of one token, and the last tokens of others whose beginnings were said."""
    made = row.rules.arrays(row.params, logits.shape[-1])
    if made.single is not None:
        logits = _without(logits, made.single)
    longer = made.longer
    if longer is None:
        return logits
    was_said = longer.lengths <= row.step
    ends_word = _ends_with(row.history, longer.beginnings) & was_said
    lowered = mx.where(ends_word, -mx.inf, 0.0).astype(logits.dtype)
    return logits.at[:, longer.lasts].add(lowered)


def _without(logits: mx.array, tokens: mx.array) -> mx.array:
    return logits.at[:, tokens].add(mx.array(-mx.inf, dtype=logits.dtype))


@dataclass(frozen=True)
class LogitsStage:
    """A stage that changes one row's logits.

    Args:
        apply: (logits (1, V), their row) -> logits (1, V).
        is_asked: whether a row has the stage.
        reads_history: ``apply`` reads ``SamplingRow.history``.
    """

    apply: Callable[[mx.array, SamplingRow], mx.array]
    is_asked: Callable[[SamplingParams, RowRules], object]
    reads_history: bool = False


def _has_penalties(params: SamplingParams, rules: RowRules) -> object:
    return params.presence_penalty or params.frequency_penalty


#: All stages of one row, in their order.
STAGES = (
    LogitsStage(repetition_penalty, lambda p, _: p.repetition_penalty != 1.0, True),
    LogitsStage(count_penalties, _has_penalties, True),
    LogitsStage(biases, lambda p, _: p.logit_bias),
    LogitsStage(processors, lambda p, _: p.logits_processors, True),
    LogitsStage(no_repeat_ngrams, lambda p, _: p.no_repeat_ngram_size, True),
    LogitsStage(allowed_only, lambda p, _: p.allowed_token_ids is not None),
    LogitsStage(no_early_end, lambda p, _: p.min_tokens),
    LogitsStage(no_bad_words, lambda _, rules: rules.bad_words, True),
)


def stages_of(params: SamplingParams, rules: RowRules) -> list[LogitsStage]:
    """Return a row's stages in their order."""
    return [stage for stage in STAGES if stage.is_asked(params, rules)]


def process(logits: mx.array, row: SamplingRow) -> mx.array:
    """Apply a row's own stages to its logits (1, V)."""
    logits = logits[:, : row.vocabulary]
    for stage in stages_of(row.params, row.rules):
        logits = stage.apply(logits, row)
    return logits


def _ends_with(history: mx.array, words: mx.array) -> mx.array:
    """Return (B,): whether tokens (T,) end with ``words`` (B, L), where -1 matches any."""
    width = min(words.shape[1], history.shape[0])
    tail = history[history.shape[0] - width :]
    padding = words[:, : words.shape[1] - width]
    begun = words[:, words.shape[1] - width :]
    has_tail = mx.all((begun == tail) | (begun == -1), axis=1)
    return has_tail & mx.all(padding == -1, axis=1)


# All rows at once -----------------------------------------------------------------------------------------------------


def sample(logits: mx.array, rows: Sequence[SamplingRow]) -> Sampled:
    """Choose a token for each row of logits (B, V), lazily.

    Greedy rows take the most likely one. Others divide by the temperature, apply ``top_k``, ``top_p`` and ``min_p``
    (transformers' order), and draw by the Gumbel-max rule (Gumbel 1954).
    """
    tokens = mx.argmax(logits, axis=-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    # A cutoff could hide infinity or NaN: drawn rows look for them in all logits.
    highest = mx.max(logits, axis=-1) if drawn else _at(logits, tokens)
    if drawn:
        tokens = _drawn(tokens, logits, rows, drawn)
    counts = _num_logprobs(rows)
    if not counts:
        return Sampled(tokens, highest)
    asked = mx.array(list(counts))
    told = Logprobs.of(logits[asked], tokens[asked], list(counts.values()))
    return Sampled(tokens, highest, told, tuple(counts))


def _num_logprobs(rows: Sequence[SamplingRow]) -> dict[int, int]:
    """Return how many log-probabilities rows ask for, by index."""
    counts: dict[int, int] = {}
    for index, row in enumerate(rows):
        count = row.params.logprobs
        if count is not None:
            counts[index] = count
    return counts


def _drawn(
    tokens: mx.array,
    logits: mx.array,
    rows: Sequence[SamplingRow],
    indices: Sequence[int],
) -> mx.array:
    """Return tokens (B,), those at indices drawn."""
    plain: list[int] = []
    ordered: list[int] = []
    for index in indices:
        if _is_sorted(rows[index].params):
            ordered.append(index)
        else:
            plain.append(index)
    for those, draw in ((plain, _draw), (ordered, _draw_sorted)):
        if those:
            chosen = draw(*_noisy(logits, rows, those))
            tokens = _merge(tokens, those, chosen)
    return tokens


def _at(logits: mx.array, tokens: mx.array) -> mx.array:
    """Return the logits (B,) of tokens (B,)."""
    return mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]


def _is_sorted(params: SamplingParams) -> bool:
    """Return whether a draw needs logits in their order."""
    return params.top_k > 0 or params.top_p < 1


def _noisy(
    logits: mx.array, rows: Sequence[SamplingRow], indices: Sequence[int]
) -> tuple[mx.array, mx.array, list[SamplingRow]]:
    """Return logits (R, V) at indices over their temperatures, noise likewise, and their rows."""
    picked = [rows[index] for index in indices]
    heat = _column([row.params.temperature for row in picked])
    scaled = logits[mx.array(list(indices))].astype(mx.float32) / heat
    noise = mx.stack([_noise(row, scaled.shape[-1]) for row in picked])
    return scaled, noise, picked


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
    highest = mx.max(scaled, axis=-1, keepdims=True)
    floor = highest + mx.log(_column(least))  # -inf where it is 0
    return mx.where(scaled >= floor, scaled, -mx.inf)


# (R, V) -> (R,)
def _draw(scaled: mx.array, noise: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    return mx.argmax(min_p(scaled, rows) + noise, axis=-1)


def _draw_sorted(
    scaled: mx.array,
    noise: mx.array,
    rows: Sequence[SamplingRow],
    count: int = NUM_CANDIDATES,
) -> mx.array:
    """Draw with ``top_k`` or ``top_p`` from logits (R, V) -> (R,).

    It sorts ``count`` tokens first, and more for rows that may draw beyond them.
    """
    # On a GPU the check that they suffice costs more than to sort all.
    size = scaled.shape[-1]
    if size <= 4 * count or mx.default_device().type == mx.DeviceType.gpu:
        return _draw_in_order(scaled, noise, rows, mx.argsort(-scaled, axis=-1))[0]
    candidates = largest(scaled, count)
    order = mx.argsort(-mx.take_along_axis(scaled, candidates, axis=-1), axis=-1)
    tokens, mass = _draw_in_order(
        scaled, noise, rows, mx.take_along_axis(candidates, order, axis=-1)
    )
    if all(0 < row.params.top_k <= count for row in rows):
        return tokens
    masses: Any = mass.tolist()
    for index, (row, held) in enumerate(zip(rows, masses, strict=True)):
        if not _may_miss(row.params, count, held):
            continue
        more = size
        if 2 * held >= row.params.top_p:
            more = count * MORE_CANDIDATES
        own = slice(index, index + 1)
        again = _draw_sorted(scaled[own], noise[own], [row], more)
        tokens = _merge(tokens, [index], again)
    return tokens


def _may_miss(params: SamplingParams, count: int, held: float) -> bool:
    """Return whether a row may draw beyond the first ``count`` tokens, whose probability is ``held``."""
    if 0 < params.top_k <= count:
        return False
    return params.top_k > count or held < params.top_p


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


# (B,), with (R,) at indices
def _merge(tokens: mx.array, indices: Sequence[int], chosen: mx.array) -> mx.array:
    if len(indices) == tokens.size:
        return chosen
    is_chosen = [False] * tokens.size
    source = [0] * tokens.size
    for at, index in enumerate(indices):
        is_chosen[index] = True
        source[index] = at
    return mx.where(mx.array(is_chosen), chosen[mx.array(source)], tokens)


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


#: ``(processed logits (B, V), their rows) -> Sampled``; ``sample`` unless another is handed in.
Sampler: TypeAlias = Callable[[mx.array, Sequence[SamplingRow]], Sampled]
