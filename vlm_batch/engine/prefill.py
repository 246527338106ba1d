"""Prefill: rows that have a place, and whose prompts go into their caches chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from vlm_batch.arrays import arrays_of
from vlm_batch.caches import can_share, can_trim, take_row, trim
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.exact import Exact
from vlm_batch.engine.logprobs import POSITIONS_TOGETHER
from vlm_batch.engine.port import ModelAdapter
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Prompt, Row, Status
from vlm_batch.engine.scheduler import Chunk, PrefillRow, padded_count, padded_length, together
from vlm_batch.policy import Policy
from vlm_batch.records import Call, Encoded

#: Does one row's work; an exception ends that row with an error and gives None.
Guard = Callable[..., Any]


class Prefill:
    """Runs a plan's chunks. ``guard`` turns an exception into the end of its row. ``exact`` fixes the ends of chunks.
    ``keeps_rows``: a row's caches are kept as they are when it decodes, not copied to a slab."""

    def __init__(
        self,
        adapter: ModelAdapter,
        reuse: Reuse,
        config: Policy,
        kv: KVQuantisation | None,
        guard: Guard,
        exact: Exact | None = None,
        *,
        keeps_rows: bool = True,
    ) -> None:
        self.adapter = adapter
        self._keeps_rows = keeps_rows
        self._exact = exact
        self.call = Call(is_fixed=exact is not None)
        self.rows: dict[str, Row] = {}
        self._reuse = reuse
        self._guard = guard
        self._kv = kv
        fresh = adapter.make_cache(kv)
        self._pad_to = config.pad_to if pads(adapter, fresh) else 0
        self._most_together = config.prefill_together if shares(adapter, fresh) else 1
        self._most_tokens = config.together_tokens
        # What a forward costs beside its positions, in positions; prompts of other lengths are no neighbours in exact answers.
        self._fill = config.smallest_chunk // 2 if self._pad_to and exact is None else 0
        self._longest = config.max_chunk if exact is None else exact.grid
        self._stops = (kv.start,) if kv is not None and kv.start else ()
        self._launched: dict[Row, list[mx.array]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_pending(self) -> int:
        """Prompt tokens that have places and are not prefilled."""
        return sum(row.facts.length - _prompt(row).prefilled for row in self.rows.values())

    def add(self, row: Row) -> None:
        """Take in an encoded row, which has a place from now on."""
        row.status = Status.PREFILL
        if self._exact is not None:
            prompt = _prompt(row)
            prompt.ends = self._exact.ends(row.facts.length, _encoded(prompt).atomic)
        self.rows[row.request_id] = row

    def remove(self, row: Row) -> None:
        """Remove a row, if it is here."""
        self.rows.pop(row.request_id, None)

    def views(self, now: float) -> list[PrefillRow]:
        """The rows as the scheduler sees them."""
        return [self._view(row, now) for row in self.rows.values()]

    def run(self, plan: Sequence[Chunk]) -> tuple[list[tuple[Row, mx.array]], dict[Row, list[mx.array]]]:
        """Launch a plan: (rows whose prompts it ended, with their logits (1, V)), and the arrays to wait for, by row.

        Finished rows stay here until they are removed. A row that failed in an earlier chunk has no further one.
        """
        self._launched = {}
        done = [pair for group in self._groups(plan) for pair in self._run_group(group)]
        launched, self._launched = self._launched, {}
        return done, launched

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

    def _groups(self, plan: Sequence[Chunk]) -> list[list[Chunk]]:
        """The plan in groups that run as one array."""
        if self._most_together == 1:
            return [[chunk] for chunk in plan]
        alone = {row.request_id for row in self.rows.values() if not self._may_share(row)}
        lengths = {row.request_id: -1 if row.request_id in alone else row.facts.length for row in self.rows.values()}
        groups = together(plan, lengths, self._most_together, self._most_tokens, self._pad_to, self._fill)
        return groups if self._exact is None else [part for group in groups for part in self._parts(group)]

    def _may_share(self, row: Row) -> bool:
        """Whether a row's whole prompt may be in an array with others."""
        is_plain = row.answer.prompt_scores is None and _encoded(_prompt(row)).is_plain
        return is_plain and (self._exact is None or _prompt(row).rows > 1)

    def _parts(self, group: list[Chunk]) -> list[list[Chunk]]:
        """A group in parts that fit the array in which prompts of their length always are."""
        size = _prompt(self.rows[group[0].request_id]).rows
        return [group[start : start + size] for start in range(0, len(group), size)]

    def _run_group(self, group: Sequence[Chunk]) -> list[tuple[Row, mx.array]]:
        chunks = [chunk for chunk in group if chunk.request_id in self.rows]
        rows = [self.rows[chunk.request_id] for chunk in chunks]
        found = self._run_together(rows) if len(rows) > 1 else None
        if found is None:
            found = [self._guard(row, self._run_alone, row, chunk) for row, chunk in zip(rows, chunks, strict=True)]
        return [(row, logits) for row, logits in zip(rows, found, strict=True) if logits is not None]

    def _run_together(self, rows: Sequence[Row]) -> list[mx.array | None] | None:
        """Launch whole prompts as one array. None if that failed: each then runs alone and is told its error."""
        try:
            launched = self._launch(rows)
        except Exception:
            return None
        return self._taken(rows, *launched)

    def _run_alone(self, row: Row, chunk: Chunk) -> mx.array | None:
        """Launch one row's chunk, beside idle rows where its prompt always has some; the logits (1, V) if it ended that."""
        if _prompt(row).rows > 1 and (chunk.start, chunk.end) == (0, row.facts.length):
            (logits,) = self._taken([row], *self._launch([row]))
            return logits
        return self._run_chunk(row, chunk)

    def _launch(self, rows: Sequence[Row]) -> tuple[mx.array, list[Any], int]:
        logits, cache, width = self.computed([_encoded(_prompt(row)) for row in rows])
        mx.async_eval(logits, [layer.state for layer in cache])
        return logits, cache, width

    def _taken(self, rows: Sequence[Row], logits: mx.array, cache: list[Any], width: int) -> list[mx.array | None]:
        """Give each row its own part of what an array of whole prompts left; their logits (1, V)."""
        return [
            self._guard(row, self._take, row, index, logits[index : index + 1], cache, width)
            for index, row in enumerate(rows)
        ]

    def _take(self, row: Row, index: int, logits: mx.array, cache: list[Any], width: int) -> mx.array | None:
        prompt, length = _prompt(row), row.facts.length
        prompt.cache, prompt.prefilled = take_row(cache, index, is_own=self._keeps_rows), length
        trim(prompt.cache, width - length)
        return self._settle(row, logits)

    def computed(self, rows: Sequence[Encoded], *, makes_plans: bool = False) -> tuple[mx.array, list[Any], int]:
        """Whole prompts in one forward, not evaluated: logits (R, V), the cache of all, and how many positions are in it.

        Behind a prompt there is padding up to the longest, or to one of the few lengths; behind the rows there are idle ones,
        up to the number that an array of such prompts always has where answers are reproducible.
        """
        cache, ends = self.adapter.make_cache(self._kv), [row.length for row in rows]
        width = padded_length(max(ends), self._pad_to)
        fixed = None
        if self._exact is not None:
            fixed = self._exact.rows(rows[0].length, rows[0].atomic) if rows[0].is_plain else 1
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

    def _run_chunk(self, row: Row, chunk: Chunk) -> mx.array | None:
        """Launch a chunk; the logits (1, V) if it ended the row's prompt."""
        prompt = _prompt(row)
        assert prompt.cache is not None
        logits = row.reuse.logits if row.reuse is not None else None  # (1, V), kept from the same prompt
        scores, scored = row.answer.prompt_scores, []
        if logits is None:
            logits = self._forward(_encoded(prompt), prompt.cache, chunk, is_scored=scores is not None)
            if scores is not None:
                scored, logits = scores.add(logits, chunk.end), logits[-1:]
        prompt.prefilled = chunk.end
        return self._settle(row, logits, scored)

    def _forward(self, encoded: Encoded, cache: list[Any], chunk: Chunk, *, is_scored: bool) -> mx.array:
        """The logits (1, V) of a chunk's last position; of each (L, V) where they are scored and one forward has them."""
        start, end = chunk.start, chunk.end
        call = self.call
        if is_scored:
            call = replace(call, is_scored=self.adapter.scores_chunks)
            return self.adapter.prefill([encoded], cache, start, end, call)
        stop = start + padded_length(end - start, self._pad_to)
        if stop > end:
            call = replace(call, ends=(end,))
        logits = self.adapter.prefill([encoded], cache, start, stop, call)
        trim(cache, stop - end)
        return logits

    def _settle(self, row: Row, logits: mx.array, scored: Sequence[mx.array] = ()) -> mx.array | None:
        """Launch what a chunk left in a row's caches and ``scored`` of its tokens; ``logits`` (1, V) if the prompt is done."""
        prompt = _prompt(row)
        assert prompt.cache is not None
        is_done = prompt.prefilled == row.facts.length
        kept = self._reuse.prompt_done(row, logits) if is_done else self._reuse.chunk_done(row)
        if is_done:
            self.adapter.finish_prefill(_encoded(prompt), prompt.cache)
        state, last = arrays_of([cache.state for cache in prompt.cache]), [logits] if is_done else []
        mx.async_eval(state, last, kept, scored)
        # Whoever holds a row's state keeps the next token from being written into it: it would be copied first.
        self._launched[row] = [*(last or state), *kept, *scored]
        return logits if is_done else None


def shares(adapter: ModelAdapter, fresh: Sequence[Any]) -> bool:
    """Whether whole prompts of one length may be prefilled as one array, into such fresh caches."""
    return adapter.is_causal and can_share(fresh)


def pads(adapter: ModelAdapter, fresh: Sequence[Any]) -> bool:
    """Whether positions may stand behind a chunk, in such caches, that belong to no prompt."""
    return adapter.is_causal and adapter.scores_chunks and can_trim(fresh)


def _prompt(row: Row) -> Prompt:
    assert row.prompt is not None
    return row.prompt


def _encoded(prompt: Prompt) -> Encoded:
    assert prompt.encoded is not None
    return prompt.encoded
