"""The forward of a step: one token for every row of a group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.compiled import CompiledDecode
from vlm_batch.engine.port import ModelAdapter
from vlm_batch.engine.row import Row
from vlm_batch.records import Call, DecodeStep, Graphs


class Decoder:
    """Runs a model's decode step, compiled where that is asked for and the family allows it; ``None`` leaves it to the adapter,
    and to slabs of plain keys and values."""

    def __init__(self, adapter: ModelAdapter, call: Call = Call(), *, compile_decode: bool | None = False) -> None:
        self._adapter = adapter
        self._call = call
        compiles = compile_decode and adapter.graphs is not Graphs.NEVER
        if compile_decode is None:
            compiles = adapter.graphs is Graphs.BY_DEFAULT
        self._compiled = CompiledDecode(partial(adapter.decode, call=call)) if compiles else None
        self._is_plain = compile_decode is None

    def __call__(self, step: DecodeStep) -> mx.array:
        """Logits (B, V) of a step."""
        if self._compiled is None or not CompiledDecode.can_compile(step.caches, step.extras, is_plain=self._is_plain):
            return self._adapter.decode(step, self._call)
        return self._compiled(step)

    def logits(self, batch: DecodeBatch, rows: Sequence[Row]) -> mx.array:
        """A forward over every place of a group; logits (R, V) of ``rows``, in their order."""
        places = batch.places
        tokens = last_tokens(places)[:, None]  # (B, 1)
        positions = mx.array([0 if row is None else row.position for row in places], dtype=mx.int32)
        extras = [{} if row is None else row.facts.extras for row in places]
        logits = self(DecodeStep(tokens, positions, batch.layers, extras))
        return logits if len(rows) == len(places) else logits[mx.array([places.index(row) for row in rows])]


def last_tokens(places: Sequence[Row | None]) -> mx.array:
    """The tokens (B,) that the rows at these places were given last; 0 at places without a row.

    Rows that were sampled together mostly lie together still. Their tokens are cut out at once: each cut is copied in an
    operation of its own, and on a GPU the number of operations decides.
    """
    runs: list[tuple[mx.array, int, int]] = []  # (tokens, first, end)
    for row in places:
        tokens, first, end = runs[-1] if runs else (mx.zeros((1,), dtype=mx.int32), 0, 0)
        if row is not None:
            drawn, at = row.answer.drawn, row.answer.drawn_at
            assert drawn is not None
            is_next = runs and drawn is tokens and at == end
        else:  # whatever comes next there, to be made 0 below
            drawn, at = (tokens, end) if end < tokens.size else (mx.zeros((1,), dtype=mx.int32), 0)
            is_next = runs and drawn is tokens
        if is_next:
            runs[-1] = (tokens, first, end + 1)
        else:
            runs.append((drawn, at, at + 1))
    parts = [tokens if end - first == tokens.size else tokens[first:end] for tokens, first, end in runs]
    found = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return found if None not in places else found * mx.array([row is not None for row in places], dtype=mx.int32)
