"""Prefill: rows that have a place, and whose prompts go into their caches chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.arrays import arrays_of
from vlm_batch.caches import Placement, take_row, trim
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.port import ModelAdapter
from vlm_batch.engine.prompt_scores import POSITIONS_TOGETHER
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Prompt, Row, Status
from vlm_batch.engine.scheduler import Chunk, PrefillRow
from vlm_batch.engine.shapes import Shapes
from vlm_batch.records import Encoded

#: Does one row's work; an exception ends that row with an error and gives None.
Guard = Callable[..., Any]


class Prefill:
    """Runs a plan's chunks. ``guard`` turns an exception into the end of its row."""

    def __init__(
        self, adapter: ModelAdapter, reuse: Reuse, shapes: Shapes, kv: KVQuantisation | None, guard: Guard
    ) -> None:
        self.adapter = adapter
        self._shapes = shapes
        self.rows: dict[str, Row] = {}
        self._reuse = reuse
        self._guard = guard
        self._kv = kv
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
        whole = [chunk for chunk in plan if self._is_shared(self.rows[chunk.request_id], chunk)]
        groups = {
            whole[group[0]]: [whole[place] for place in group]
            for group in self._shapes.groups([chunk.end for chunk in whole])
        }
        return [groups.get(chunk, [chunk]) for chunk in plan if chunk in groups or chunk not in whole]

    def _is_shared(self, row: Row, chunk: Chunk) -> bool:
        """Whether a chunk is a whole prompt that may be in an array with others, or always is."""
        return _prompt(row).rows != 1 and (chunk.start, chunk.end) == (0, row.facts.length)

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
        if _prompt(row).rows > 1 and self._is_shared(row, chunk):
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
        prompt.cache, prompt.prefilled = take_row(cache, index, is_own=self._shapes.layout is Placement.ROWS), length
        trim(prompt.cache, width - length)
        return self._settle(row, logits)

    def computed(self, rows: Sequence[Encoded]) -> tuple[mx.array, list[Any], int]:
        """Whole prompts in one forward, not evaluated: logits (R, V), the cache of all, and how many positions are in it."""
        count, end, call = self._shapes.prefill_call(0, [row.length for row in rows], is_whole=True)
        cache = self.adapter.make_cache(self._kv)
        return self.adapter.prefill([*rows, *[rows[-1]] * (count - len(rows))], cache, 0, end, call), cache, end

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
        is_scored = is_scored and self.adapter.scores_chunks
        _, end, call = self._shapes.prefill_call(chunk.start, [chunk.end], is_scored=is_scored)
        logits = self.adapter.prefill([encoded], cache, chunk.start, end, call)
        trim(cache, end - chunk.end)
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


def _prompt(row: Row) -> Prompt:
    assert row.prompt is not None
    return row.prompt


def _encoded(prompt: Prompt) -> Encoded:
    assert prompt.encoded is not None
    return prompt.encoded
