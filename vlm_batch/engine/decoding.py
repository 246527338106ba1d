"""The forward of a step: one token for every row that decodes, group by group."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from vlm_batch.arrays import stack_logits
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.compiled import CompiledDecode
from vlm_batch.engine.groups import DecodeGroups
from vlm_batch.engine.port import ModelAdapter
from vlm_batch.engine.row import Row
from vlm_batch.types import DecodeStep


class Decoder:
    """Runs a model's decode step, compiled where that is asked for and the family allows it."""

    def __init__(self, adapter: ModelAdapter, *, compile_decode: bool = False) -> None:
        self._adapter = adapter
        self._compiled = CompiledDecode(adapter.decode) if compile_decode and adapter.compiles else None

    def logits(self, batch: DecodeBatch | DecodeGroups, rows: Sequence[Row]) -> mx.array:
        """A forward over every place of each group of the batch; logits (R, V) of ``rows``, which are in that order."""
        wanted = set(rows)
        groups = [(group, [row for row in group.rows if row in wanted]) for group in batch.groups]
        logits = [self._group(group, live) for group, live in groups if live]
        return logits[0] if len(logits) == 1 else stack_logits(logits)

    def _group(self, batch: DecodeBatch, rows: Sequence[Row]) -> mx.array:
        """The forward over every place of a group; logits (R, V) of ``rows``, in their order."""
        places = batch.places
        empty = mx.zeros((1,), dtype=mx.int32)
        tokens = mx.concatenate([empty if row is None else _last(row) for row in places])[:, None]  # (B, 1)
        positions = mx.array([0 if row is None else row.position for row in places], dtype=mx.int32)
        extras = [{} if row is None else row.facts.extras for row in places]
        step = DecodeStep(tokens, positions, batch.layers, extras)
        if self._compiled is not None and CompiledDecode.can_compile(batch.layers, extras):
            logits = self._compiled(step)  # (B, V)
        else:
            logits = self._adapter.decode(step)
        return logits if len(rows) == len(places) else logits[mx.array([places.index(row) for row in rows])]


def _last(row: Row) -> mx.array:
    token = row.answer.next_token
    assert token is not None
    return token
