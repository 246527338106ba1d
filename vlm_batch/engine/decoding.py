"""Decode forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import mlx.core as mx

from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.compiled import CompiledDecode, can_leave_unfused
from vlm_batch.engine.port import ModelAdapter
from vlm_batch.engine.row import Row
from vlm_batch.records import Call, DecodeStep, Graphs, Hidden
from vlm_batch.runtime.device import Device, device


class Decoder:
    """Runs a model's decode step, compiled if asked for and allowed.

    ``compile_decode=None`` compiles the adapter's default over plain slabs, and unfused all that the family allows.
    ``keeps_hidden``: rows keep final hidden states.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        call: Call = Call(),
        *,
        compile_decode: bool | None = False,
        keeps_hidden: bool = False,
    ) -> None:
        # no method: graphs would hold this decoder
        self._plain = partial(_decode, adapter, call, keeps_hidden)
        graphs = adapter.graphs if compile_decode is not False else Graphs.NEVER
        is_unfused = (
            compile_decode is None
            and graphs in (Graphs.UNFUSED, Graphs.IF_ASKED)
            and can_leave_unfused()
        )
        fused = (
            (Graphs.IF_ASKED, Graphs.BY_DEFAULT)
            if compile_decode
            else (Graphs.BY_DEFAULT,)
        )
        compiles = is_unfused or graphs in fused
        # on CUDA a free step attends by a kernel that takes masks as they are (adapters/cuda/one_query.py)
        is_added = graphs is Graphs.BY_DEFAULT and (
            call.is_fixed or device() is not Device.CUDA
        )
        self._compiled = (
            CompiledDecode(self._plain, is_fused=not is_unfused, adds_masks=is_added)
            if compiles
            else None
        )
        self._is_plain = compile_decode is None and not is_unfused

    def __call__(self, step: DecodeStep) -> mx.array:
        """Logits (B, V) of a step."""
        return self._forward(step)[0]

    def _forward(self, step: DecodeStep) -> list[mx.array]:
        """Return logits (B, V), and hidden states (B, D) if kept."""
        graphs = self._compiled
        if graphs is None or not step.caches[0].can_trace:
            return self._plain(step)
        if not graphs.can_compile(step.caches, step.extras, is_plain=self._is_plain):
            return self._plain(step)
        found: list[mx.array] = graphs(step)
        return found

    def logits(self, batch: DecodeBatch, rows: Sequence[Row]) -> mx.array:
        """Return logits (R, V) of ``rows`` from a forward over all places. K drafted tokens add K rows."""
        places = batch.places
        drafts = {row: len(row.answer.ahead) for row in rows if row.answer.ahead}
        counts = batch.counts(drafts) if drafts else None
        if counts is not None:
            return self._drafted(batch, rows, counts)
        for row in drafts:
            row.answer.ahead = ()
        batch.num_positions = len(places)
        tokens = last_tokens(places)[:, None]  # (B, 1)
        positions = mx.array(
            [0 if row is None else row.position for row in places], dtype=mx.int32
        )
        extras = [{} if row is None else row.facts.extras for row in places]
        logits, *hidden = self._forward(
            DecodeStep(tokens, positions, batch.layers, extras)
        )
        if hidden:
            _keep_hidden(hidden[0], rows, [places.index(row) for row in rows])
        return (
            logits
            if len(rows) == len(places)
            else logits[mx.array([places.index(row) for row in rows])]
        )

    def _drafted(
        self, batch: DecodeBatch, rows: Sequence[Row], counts: Sequence[int]
    ) -> mx.array:
        """Run a forward with one row per position."""
        tokens, positions, extras = [], [], []
        for row, count in zip(batch.places, counts, strict=True):
            said = (
                (0,)
                if row is None
                else (row.answer.said[row.answer.num_sampled - 1], *row.answer.ahead)
            )
            tokens += [*said, *[0] * (count - len(said))][:count]
            first = 0 if row is None else row.position
            positions += [first + ahead * (row is not None) for ahead in range(count)]
            extras += [{} if row is None else row.facts.extras] * count
        layers = batch.with_drafts(counts)
        at = mx.array(positions, dtype=mx.int32)
        logits, *hidden = self._plain(
            DecodeStep(mx.array(tokens, dtype=mx.int32)[:, None], at, layers, extras)
        )
        batch.was_drafted(counts)
        begins = dict(zip(batch.places, [0, *accumulate(counts)], strict=False))
        if hidden:
            _keep_hidden(hidden[0], rows, [begins[row] for row in rows])
        wanted = [
            begins[row] + ahead
            for row in rows
            for ahead in range(1 + len(row.answer.ahead))
        ]
        return (
            logits
            if wanted == list(range(logits.shape[0]))
            else logits[mx.array(wanted)]
        )


def _decode(
    adapter: ModelAdapter, call: Call, keeps_hidden: bool, step: DecodeStep
) -> list[mx.array]:
    hidden: list[mx.array] = []
    logits = adapter.decode(
        step, replace(call, hidden=hidden) if keeps_hidden else call
    )
    return [logits, *(states[:, -1] for states in hidden)]


def _keep_hidden(states: mx.array, rows: Sequence[Row], firsts: Sequence[int]) -> None:
    """Keep hidden states (P, D) for the draft model; each row's begin at one of ``firsts``."""
    for row, first in zip(rows, firsts, strict=True):
        if (state := row.answer.draft_state) is not None:
            begin = row.facts.length + row.answer.num_sampled - 1
            state.hidden.append(Hidden(states, first, begin, 1 + len(row.answer.ahead)))


def last_tokens(places: Sequence[Row | None]) -> mx.array:
    """Return the rows' last tokens (B,), 0 for empty places.

    One slice takes all tokens sampled together: on a GPU each operation costs.
    """
    same = None if places[0] is None else places[0].answer.drawn
    ats = [
        row.answer.drawn_at if row is not None and row.answer.drawn is same else -1
        for row in places
    ]
    # as mostly
    if same is not None and same.size == len(ats) and ats == list(range(len(ats))):
        return same
    runs: list[tuple[mx.array, int, int]] = []  # (tokens, first, end)
    for row in places:
        tokens, first, end = (
            runs[-1] if runs else (mx.zeros((1,), dtype=mx.int32), 0, 0)
        )
        if row is not None:
            drawn, at = row.answer.drawn, row.answer.drawn_at
            assert drawn is not None
            is_next = runs and drawn is tokens and at == end
        else:  # any token; it becomes 0 below
            drawn, at = (
                (tokens, end)
                if end < tokens.size
                else (mx.zeros((1,), dtype=mx.int32), 0)
            )
            is_next = runs and drawn is tokens
        if is_next:
            runs[-1] = (tokens, first, end + 1)
        else:
            runs.append((drawn, at, at + 1))
    parts = [
        tokens if end - first == tokens.size else tokens[first:end]
        for tokens, first, end in runs
    ]
    found = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return (
        found
        if None not in places
        else found * mx.array([row is not None for row in places], dtype=mx.int32)
    )
