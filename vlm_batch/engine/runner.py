"""Runs the work of a step: pictures and prompts are encoded, prompts go into caches chunk by chunk, rows decode.

Nothing is waited for. A row's own failure is a ``Failed`` beside what the others' work gave.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from vlm_batch.arrays import arrays_of
from vlm_batch.caches import can_share, can_trim, take_row, trim
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.decoding import Decoder
from vlm_batch.engine.exact import Exact
from vlm_batch.engine.logprobs import POSITIONS_TOGETHER, PromptScores
from vlm_batch.engine.memory import EncoderMemory
from vlm_batch.engine.port import ModelAdapter
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Facts, Prompt, Row
from vlm_batch.engine.rows import Rows
from vlm_batch.engine.sampling import RowRules, reads_history
from vlm_batch.engine.scheduler import PrefillRow, SchedulerConfig, padded_count, padded_length, together
from vlm_batch.engine.work import Failed, Kind, Part, Work, attempt
from vlm_batch.errors import InvalidParameters, PromptTooLong
from vlm_batch.records import Call, Encoded
from vlm_batch.runtime.memory import usual_limit

#: The longest chunk that is warmed up where chunks have no bound.
LONGEST = 2048


class Runner:
    """Runs a plan. ``exact`` fixes the ends of chunks. ``keeps_rows``: a row's caches are kept as they are when it decodes, not
    copied to a slab. ``encoding`` knows what the encoder takes."""

    def __init__(
        self,
        adapter: ModelAdapter,
        rows: Rows,
        reuse: Reuse,
        decoder: Decoder,
        config: SchedulerConfig,
        kv: KVQuantisation | None,
        call: Call,
        exact: Exact | None = None,
        *,
        keeps_rows: bool = True,
    ) -> None:
        self.adapter = adapter
        self.encoding = EncoderMemory(usual_limit())
        self._rows = rows
        self._reuse = reuse
        self._decoder = decoder
        self._config = config
        self._kv = kv
        self.call = call
        self._exact = exact
        self._keeps_rows = keeps_rows
        fresh = adapter.make_cache(kv)
        self._pad_to = (config.pad_to or 0) if pads(adapter, fresh) else 0
        self._most_together = (config.prefill_together or 1) if shares(adapter, fresh) else 1
        self._most_tokens = config.together_tokens
        # What a forward costs beside its positions, in positions; prompts of other lengths are no neighbours in exact answers.
        self._fill = (config.smallest_chunk or 0) // 2 if self._pad_to and exact is None else 0
        self._longest = config.max_chunk or LONGEST if exact is None else exact.grid
        self._stops = (kv.start,) if kv is not None and kv.start else ()

    def run(self, work: Work) -> list[Part | Failed]:
        """Launch a work, and tell of each of its rows what came of it; of those that were begun, the first ones."""
        if work.kind is Kind.DECODE:
            rows = [self._rows.by_id[name] for name in work.rows]
            parts = attempt(rows, self._decode, rows, is_shared=True)
            return [parts] if isinstance(parts, Failed) else [*parts]
        if work.kind is Kind.ENCODE:
            return self._encode([self._rows.by_id[name] for name in work.rows])
        here = self._rows.prefilling  # without those that failed in an earlier chunk of this step
        return self._prefill([here[name] for name in work.rows if name in here], work.begin, work.end)

    def _decode(self, rows: Sequence[Row]) -> list[Part]:
        """Launch a forward of the group that some rows are; rows whose last token decides what may be the next are held."""
        group = next(group for group in self._rows.batch.groups if rows[0] in group.places)
        logits = self._decoder.logits(group, rows)
        for row in rows:
            row.answer.num_fed = row.answer.num_sampled
        held = [
            index for index, row in enumerate(rows) if row.answer.guide is not None and row.answer.known_token is None
        ]
        if not held:
            return [Part(rows, logits)]
        mx.async_eval(logits)
        parts = [Part([rows[index]], logits[index : index + 1], is_held=True) for index in held]
        free = [index for index in range(len(rows)) if index not in held]
        return [Part([rows[index] for index in free], logits[mx.array(free)]), *parts] if free else parts

    # Pictures and prompts, encoded

    def _encode(self, rows: Sequence[Row]) -> list[Part | Failed]:
        """Encode the first row, and with it those whose pictures were encoded in the same call."""
        count = self._encode_pictures(rows)
        if not count:
            self.encoding.begin(picture_bytes(rows[0]))
        return [attempt([row], self._encode_row, row) for row in rows[: max(1, count)]]

    def _encode_pictures(self, rows: Sequence[Row]) -> int:
        """Encode pictures of the first rows in one call, where that can be done and has room; how many rows, or 0."""
        sizes = list(itertools.accumulate(map(picture_bytes, rows)))
        count = next((at for at, nbytes in enumerate(sizes) if at and not self.encoding.fits(nbytes)), len(rows))
        if count < 2:
            return 0
        before = mx.get_active_memory()
        prompts = [_prompt(row) for row in rows[:count]]
        given = [prompt.inputs or {} for prompt in prompts]
        try:
            found = self.adapter.encode_together(given, self.call)
        except Exception:
            return 0  # each of them is encoded alone and told its own error
        for prompt, inputs in zip(prompts, found, strict=True):
            prompt.inputs = inputs
        count = max((index + 1 for index in range(count) if found[index] is not given[index]), default=0)
        if count < 2:
            return 0
        self.encoding.begin(sizes[count - 1], before)
        return count

    def _encode_row(self, row: Row) -> Part:
        """Give a row its caches and its ``Encoded``. Raises PromptTooLong, DoesNotFit, and whatever the family raises for bad
        inputs."""
        prompt, answer, params = _prompt(row), row.answer, row.params
        assert prompt.inputs is not None
        begin = time.perf_counter()
        cached = self._reuse.begin(row, self.adapter.make_cache(self._kv))
        encoded = self.adapter.encode(prompt.inputs, self.call, cached)
        if params.prompt_logprobs is not None:
            answer.prompt_scores = self._scores(params.prompt_logprobs, prompt.inputs, encoded)
        context = self.adapter.max_context
        check_length(encoded.length, context, self._config.max_prompt_tokens)
        if self._exact is not None:
            prompt.ends = self._exact.ends(encoded.length, encoded.atomic)
            prompt.rows = self._exact.rows(encoded.length, encoded.atomic) if answer.prompt_scores is None else 1
        mx.async_eval(encoded.inputs_embeds)
        prompt.inputs, prompt.encoded, prompt.prefilled = None, encoded, cached
        row.facts = Facts.of(encoded)
        answer.max_tokens = params.max_tokens if context is None else min(params.max_tokens, context - encoded.length)
        answer.rules = RowRules(answer.end_ids, answer.bad_words)
        if reads_history(params):
            known = [token for token in encoded.input_ids[0].tolist() if token >= 0]
            answer.history = mx.array(known, dtype=mx.int32)
        if row.reuse is not None and row.reuse.continues is not None:
            row.reuse.continues.take()  # it is spent
            row.reuse.continues = None
        if not row.clock.first_token:
            row.clock.encode_seconds = time.perf_counter() - begin
        self._rows.waiting.memory.check(row)
        return Part([row])

    def _scores(self, count: int, inputs: Mapping[str, Any], encoded: Encoded) -> PromptScores:
        """A record for the log-probabilities of a prompt's tokens. Raises InvalidParameters where the family has none."""
        if encoded.input_ids.shape[1] != encoded.length:
            raise InvalidParameters("prompt_logprobs: this family's prompts have more positions than tokens")
        if self._exact is not None and not self.adapter.scores_chunks:
            raise InvalidParameters(
                "prompt_logprobs: this family's take a forward a token, which reproducible=True excludes"
            )
        ids: Any = encoded.input_ids[0].tolist()
        scores = PromptScores(ids, self.adapter.text_positions(inputs), encoded.atomic, count, encoded.vocabulary)
        if len(ids) > 1 and not scores.says_any:
            raise InvalidParameters(
                "prompt_logprobs: this family sees its prompts as wholes, and tells none of their tokens"
            )
        return scores

    # Prompts, into caches

    def views(self, now: float) -> list[PrefillRow]:
        """The rows in prefill as the scheduler sees them."""
        return [self._view(row, now) for row in self._rows.prefilling.values()]

    def _view(self, row: Row, now: float) -> PrefillRow:
        prompt = _prompt(row)
        stops = self._stops if row.reuse is None else (*self._stops, *row.reuse.stops)
        if row.answer.prompt_scores is not None:
            together = POSITIONS_TOGETHER if self.adapter.scores_chunks else 1
            stops = (*stops, *range(together, row.facts.length, together))
        waited = max(0.0, now - row.clock.submitted)
        atomic = _encoded(prompt).atomic
        return PrefillRow(
            row.request_id, row.facts.length, prompt.prefilled, atomic, stops, row.priority, waited, prompt.ends
        )

    def group(self, chunks: Sequence[Work]) -> list[Work]:
        """A plan's chunks in groups that run as one array."""
        if self._most_together == 1:
            return list(chunks)
        alone = {row.request_id for row in self._rows.prefilling.values() if not self._may_share(row)}
        lengths = {name: -1 if name in alone else row.facts.length for name, row in self._rows.prefilling.items()}
        groups = together(chunks, lengths, self._most_together, self._most_tokens, self._pad_to, self._fill)
        works = [
            replace(group[0], rows=tuple(chunk.rows[0] for chunk in group), end=max(chunk.end for chunk in group))
            for group in groups
        ]
        return works if self._exact is None else [part for work in works for part in self._parts(work)]

    def _may_share(self, row: Row) -> bool:
        """Whether a row's whole prompt may be in an array with others."""
        return row.answer.prompt_scores is None and (self._exact is None or _prompt(row).rows > 1)

    def _parts(self, group: Work) -> list[Work]:
        """A group in parts that fit the array in which prompts of their length always are."""
        size = _prompt(self._rows.prefilling[group.rows[0]]).rows
        return [replace(group, rows=group.rows[at : at + size]) for at in range(0, len(group.rows), size)]

    def _prefill(self, rows: Sequence[Row], begin: int, end: int) -> list[Part | Failed]:
        """Launch positions of one row, or several whole prompts as one array. If that fails, each runs alone, and is told its
        own error."""
        if len(rows) > 1:
            with contextlib.suppress(Exception):
                made = self._launch(rows)
                return [attempt([row], self._take, row, index, *made) for index, row in enumerate(rows)]
        return [attempt([row], self._prefill_alone, row, begin, min(end, row.facts.length)) for row in rows]

    def _prefill_alone(self, row: Row, begin: int, end: int) -> Part:
        """Launch one row's chunk, beside idle rows where its prompt always has some."""
        prompt = _prompt(row)
        if prompt.rows > 1 and (begin, end) == (0, row.facts.length):
            return self._take(row, 0, *self._launch([row]))
        assert prompt.cache is not None
        logits = row.reuse.logits if row.reuse is not None else None  # (1, V), kept from the same prompt
        scores, scored = row.answer.prompt_scores, []
        if logits is None:
            logits = self._forward(_encoded(prompt), prompt.cache, begin, end, is_scored=scores is not None)
            if scores is not None:
                scored, logits = scores.add(logits, end), logits[-1:]
        prompt.prefilled = end
        return self._settle(row, logits, scored)

    def _forward(self, encoded: Encoded, cache: list[Any], begin: int, end: int, *, is_scored: bool) -> mx.array:
        """The logits (1, V) of a chunk's last position; of each (L, V) where they are scored and one forward has them."""
        call = self.call
        if is_scored:
            call = replace(call, is_scored=self.adapter.scores_chunks)
            return self.adapter.prefill([encoded], cache, begin, end, call)
        stop = begin + padded_length(end - begin, self._pad_to)
        if stop > end:
            call = replace(call, ends=(end,))
        logits = self.adapter.prefill([encoded], cache, begin, stop, call)
        trim(cache, stop - end)
        return logits

    def _launch(self, rows: Sequence[Row]) -> tuple[mx.array, list[Any], int]:
        logits, cache, width = self.computed([_encoded(_prompt(row)) for row in rows])
        mx.async_eval(logits, [layer.state for layer in cache])
        return logits, cache, width

    def _take(self, row: Row, index: int, logits: mx.array, cache: list[Any], width: int) -> Part:
        """Give a row its own part of what an array of whole prompts left."""
        prompt, length = _prompt(row), row.facts.length
        prompt.cache, prompt.prefilled = take_row(cache, index, is_own=self._keeps_rows), length
        trim(prompt.cache, width - length)
        return self._settle(row, logits[index : index + 1])

    def _settle(self, row: Row, logits: mx.array, scored: Sequence[mx.array] = ()) -> Part:
        """Launch what a chunk left in a row's caches and ``scored`` of its tokens; ``logits`` (1, V) are those of its end."""
        prompt = _prompt(row)
        assert prompt.cache is not None
        is_done = prompt.prefilled == row.facts.length
        kept = self._reuse.keep(row, logits if is_done else None)
        if is_done:
            self.adapter.finish_prefill(_encoded(prompt), prompt.cache)
        state, last = arrays_of([cache.state for cache in prompt.cache]), [logits] if is_done else []
        mx.async_eval(state, last, kept, scored)
        # Whoever holds a row's state keeps the next token from being written into it: it would be copied first.
        return Part([row], logits if is_done else None, [*(last or state), *kept, *scored])

    def computed(self, rows: Sequence[Encoded], *, makes_plans: bool = False) -> tuple[mx.array, list[Any], int]:
        """Whole prompts in one forward, not evaluated: logits (R, V), the cache of all, and how many positions are in it.

        Behind a prompt there is padding up to the longest, or to one of the few lengths; behind the rows there are idle ones,
        up to the number that an array of such prompts always has where answers are reproducible.
        """
        cache, ends = self.adapter.make_cache(self._kv), [row.length for row in rows]
        width = padded_length(max(ends), self._pad_to)
        fixed = None if self._exact is None else self._exact.rows(rows[0].length, rows[0].atomic)
        idle = (fixed or padded_count(len(rows), self._pad_to)) - len(rows)  # places that run and are thrown away
        rows, ends = [*rows, *[rows[-1]] * idle], ends + ends[-1:] * idle
        is_looked_up = any(end < width for end in ends) or (fixed or 1) > 1
        call = replace(
            self.call,
            ends=tuple(ends) if is_looked_up else None,
            attends_apart=self._exact is not None and self._exact.attends_apart(len(rows), width),
            makes_plans=makes_plans,
        )
        return self.adapter.prefill(rows, cache, 0, width, call), cache, width

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, positions) of the arrays that whole prompts of one chunk come in; the longest where they are of any length."""
        most = self._longest if self.adapter.max_context is None else min(self._longest, self.adapter.max_context - 1)
        if not self._pad_to:
            return [(1, most)]
        widths = sorted({padded_length(length, self._pad_to) for length in range(1, most + 1)})
        if self._exact is not None:
            return [(1, width) for width in widths]  # beside as many idle ones as it always has
        counts = sorted({padded_count(count, self._pad_to) for count in range(1, self._most_together + 1)})
        tokens = self._most_tokens or self._longest
        return [(count, width) for count in counts for width in widths if count == 1 or count * width <= tokens]


def shares(adapter: ModelAdapter, fresh: Sequence[Any]) -> bool:
    """Whether whole prompts of one length may be prefilled as one array, into such fresh caches."""
    return adapter.shares_prefill and can_share(fresh)


def pads(adapter: ModelAdapter, fresh: Sequence[Any]) -> bool:
    """Whether positions may stand behind a chunk, in such caches, that belong to no prompt."""
    return adapter.pads_prefill and adapter.scores_chunks and can_trim(fresh)


def picture_bytes(row: Row) -> int:
    """Bytes of what the encoder gets of a row that has pictures or videos."""
    return row.prompt_bytes if row.image_sizes or row.video_sizes else 0


def check_length(prompt: int, context: int | None, limit: int | None) -> None:
    """Raise PromptTooLong, with the numbers, for a prompt that can never be answered."""
    if limit is not None and prompt > limit:
        raise PromptTooLong(
            f"the prompt has {prompt} tokens (pictures included); {limit} are taken", advice=" (max_prompt_tokens)"
        )
    if context is not None and prompt >= context:
        raise PromptTooLong(f"the prompt has {prompt} tokens (pictures included); the model's context holds {context}")


def _prompt(row: Row) -> Prompt:
    assert row.prompt is not None
    return row.prompt


def _encoded(prompt: Prompt) -> Encoded:
    assert prompt.encoded is not None
    return prompt.encoded
