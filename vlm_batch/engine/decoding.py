"""Decode forwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from vlm_batch.arrays import joined
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.compiled import CompiledDecode, can_leave_unfused
from vlm_batch.engine.row import Answer, Row
from vlm_batch.records import Call, DecodeStep, Graphs, Hidden
from vlm_batch.runtime.device import Device, device

if TYPE_CHECKING:
    from vlm_batch.adapters.base import Adapter

#: Whether graphs fuse operations, by what is asked for (None: nothing) and what the adapter allows. Else there are none.
IS_FUSED: Mapping[tuple[bool | None, Graphs], bool] = {
    (None, Graphs.BY_DEFAULT): True,
    (True, Graphs.BY_DEFAULT): True,
    (True, Graphs.IF_ASKED): True,
    (None, Graphs.IF_ASKED): False,
    (None, Graphs.UNFUSED): False,
}


class Decoder:
    """Runs a model's decode step, compiled if asked for and allowed.

    ``compile_decode=None`` compiles the adapter's default over plain slabs, and unfused all that the family allows.
    ``keeps_hidden``: rows keep final hidden states.
    """

    def __init__(
        self,
        adapter: Adapter,
        call: Call = Call(),
        *,
        compile_decode: bool | None = False,
        keeps_hidden: bool = False,
    ) -> None:
        # no method: graphs would hold this decoder
        self._plain = partial(_decode, adapter, call, keeps_hidden)
        graphs = adapter.graphs
        is_fused = IS_FUSED.get((compile_decode, graphs))
        if is_fused is False and not can_leave_unfused():
            is_fused = None
        # on CUDA a free step attends by a kernel that takes masks as they are (adapters/cuda/one_query.py)
        has_kernel = device() is Device.CUDA and not call.is_fixed
        adds_masks = graphs is Graphs.BY_DEFAULT and not has_kernel
        self._compiled: CompiledDecode | None = None
        if is_fused is not None:
            self._compiled = CompiledDecode(
                self._plain, is_fused=is_fused, adds_masks=adds_masks
            )
        self._is_plain = compile_decode is None and is_fused is True

    def __call__(self, step: DecodeStep) -> mx.array:
        """Logits (B, V) of a step."""
        return self._forward(step)[0]

    def _forward(self, step: DecodeStep) -> list[mx.array]:
        """Return logits (B, V), and hidden states (B, D) if kept."""
        graphs = self._compiled
        if graphs is None or not step.caches[0].can_trace:
            return self._plain(step)
        is_plain = self._is_plain
        if not graphs.can_compile(step.caches, step.extras, is_plain=is_plain):
            return self._plain(step)
        found: list[mx.array] = graphs(step)
        return found

    def logits(self, batch: DecodeBatch, rows: Sequence[Row]) -> mx.array:
        """Return logits (R, V) of ``rows`` from a forward over all places. K tokens ahead add K rows."""
        counts = counts_ahead(batch, rows)
        if counts is None:
            return self._one_each(batch, rows)
        return self._drafted(batch, rows, counts)

    def _one_each(self, batch: DecodeBatch, rows: Sequence[Row]) -> mx.array:
        """Run a forward with one position of each place."""
        batch.num_positions = len(batch.places)
        positions: list[int] = []
        extras: list[Mapping[str, Any]] = []
        places: list[int] = []  # of rows
        for place, row in enumerate(batch.places):
            if row is None:
                positions.append(0)
                extras.append({})
                continue
            places.append(place)
            positions.append(row.position)
            extras.append(row.facts.extras)
        step = DecodeStep(
            last_tokens(batch.places)[:, None],
            mx.array(positions, dtype=mx.int32),
            batch.layers,
            extras,
        )
        logits, *hidden = self._forward(step)
        if hidden:
            _keep_hidden(hidden[0], rows, places)
        if len(places) == len(batch.places):
            return logits
        return logits[mx.array(places)]

    def _drafted(
        self, batch: DecodeBatch, rows: Sequence[Row], counts: Sequence[int]
    ) -> mx.array:
        """Run a forward with one row per position."""
        tokens: list[int] = []
        positions: list[int] = []
        extras: list[Mapping[str, Any]] = []
        begins: dict[Row | None, int] = {}
        unread: list[Row] = []
        for row, count in zip(batch.places, counts, strict=True):
            begins[row] = len(tokens)
            if row is None:
                tokens += [0] * count
                positions += [0] * count
                extras += [{}] * count
                continue
            last = row.answer.last_token
            if last is None:
                unread.append(row)
            said = [last or 0, *row.answer.ahead]
            padding = [0] * (count - len(said))
            tokens += said + padding
            positions += range(row.position, row.position + count)
            extras += [row.facts.extras] * count
        layers = batch.with_drafts(counts)
        ids = mx.array(tokens, dtype=mx.int32)
        if unread:
            ids[mx.array([begins[row] for row in unread])] = last_tokens(unread)
        logits, *hidden = self._plain(
            DecodeStep(
                ids[:, None],
                mx.array(positions, dtype=mx.int32),
                layers,
                extras,
            )
        )
        batch.was_drafted(counts)
        if hidden:
            _keep_hidden(hidden[0], rows, [begins[row] for row in rows])
        wanted: list[int] = []
        for row in rows:
            first = begins[row]
            wanted += range(first, first + 1 + len(row.answer.ahead))
        if wanted == list(range(logits.shape[0])):
            return logits
        return logits[mx.array(wanted)]


def counts_ahead(batch: DecodeBatch, rows: Sequence[Row]) -> list[int] | None:
    """Return each place's positions for what rows have ahead; None if each has one.

    Where they are more than a forward has, drafts give way first, then options.
    """
    for give_way in (_drop_draft, Answer.drop_ahead):
        lengths = {row: len(row.answer.ahead) for row in rows if row.answer.ahead}
        if not lengths:
            return None  # as mostly
        counts = batch.counts(lengths)
        if counts is not None:
            return counts
        for row in lengths:
            give_way(row.answer)
    return None


def _drop_draft(answer: Answer) -> None:
    answer.drafter.drop()


def _decode(
    adapter: Adapter, call: Call, keeps_hidden: bool, step: DecodeStep
) -> list[mx.array]:
    if not keeps_hidden:
        return [adapter.decode(step, call)]
    hidden: list[mx.array] = []
    logits = adapter.decode(step, replace(call, hidden=hidden))
    return [logits, *(states[:, -1] for states in hidden)]


def _keep_hidden(states: mx.array, rows: Sequence[Row], firsts: Sequence[int]) -> None:
    """Keep hidden states (P, D) for the draft model; each row's begin at one of ``firsts``."""
    for row, first in zip(rows, firsts, strict=True):
        begin = row.facts.length + row.answer.num_sampled - 1
        count = 1 + len(row.answer.drafter.ahead)
        row.answer.drafter.see(Hidden(states, first, begin, count))


def last_tokens(places: Sequence[Row | None]) -> mx.array:
    """Return the rows' last tokens (B,), 0 for empty places.

    Tokens sampled together, as mostly, are one array; of several one operation takes them: on a GPU each costs.
    """
    arrays: list[mx.array] = []
    begins: dict[int, int] = {}  # of each array among all tokens, by identity
    wanted: list[int] = []
    size = 0
    for row in places:
        if row is None:
            wanted.append(-1)
            continue
        tokens, at = row.answer.drawn
        begin = begins.setdefault(id(tokens), size)
        if begin == size:
            arrays.append(tokens)
            size += tokens.size
        wanted.append(begin + at)
    if None in places:
        arrays.append(mx.zeros((1,), dtype=mx.int32))
    found = joined(arrays)
    return found if wanted == [*range(size)] else found[mx.array(wanted)]
