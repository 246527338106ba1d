"""Made-up rows for proofs of shapes (``vlm_batch.proofs``), warm-up, tuning and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from vlm_batch.caches import LayerCache, take_row, trim
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.caches.states import CopiedState
from vlm_batch.engine.batch import put_row
from vlm_batch.engine.shapes import Shapes
from vlm_batch.records import DecodeStep, Encoded

if TYPE_CHECKING:
    from vlm_batch.adapters.base import Adapter

#: Ids of plain text in every vocabulary.
FIRST_ID, LAST_ID = 3, 99
#: Tokens of a row's answer, repeated as needed.
ANSWER = 8


@dataclass(frozen=True)
class TrialRow:
    """A prefilled row that can be copied."""

    encoded: Encoded
    caches: tuple[CopiedState, ...]
    answer: tuple[int, ...]  # tokens to decode after it

    def restored(self) -> list[Any]:
        return [state.restore(0) for state in self.caches]


class Trial:
    """Runs made-up prompts in an engine's shapes. Raises what the model raises."""

    def __init__(
        self, adapter: Adapter, kv: KVQuantisation | None, shapes: Shapes
    ) -> None:
        self.adapter = adapter
        self.kv = kv
        self.shapes = shapes

    def prompt(self, length: int, seed: int = 0) -> Encoded:
        """Return a prompt of random tokens, no longer than the context.

        Learned positions are rows of a table, and MLX reads what lies behind one: another array's memory, or none.
        """
        context = self.adapter.max_context
        if context is not None:
            length = min(length, context)
        ids = np.random.RandomState(seed).randint(
            FIRST_ID, LAST_ID + 1, size=(1, length)
        )
        call = replace(self.shapes.encode_call(), is_made_up=True)
        return self.adapter.encode({"input_ids": mx.array(ids, dtype=mx.int32)}, call)

    def prefilled(
        self,
        prompts: Sequence[Encoded],
        *,
        is_whole: bool = True,
        makes_plans: bool = False,
    ) -> tuple[mx.array, list[Any], int]:
        """Prefill prompts lazily in one forward. Returns logits (R, V), the shared cache, its positions.

        Args:
            is_whole: in the shape of whole prompts.
        """
        is_whole = is_whole and self.shapes.shares(prompts[0])
        rows, end, call = self.shapes.prefill_call(
            0, [prompt.length for prompt in prompts], is_whole=is_whole
        )
        cache = self.adapter.make_cache(self.kv)
        filled = [*prompts, *[prompts[-1]] * (rows - len(prompts))]
        logits = self.adapter.prefill(
            filled, cache, 0, end, replace(call, makes_plans=makes_plans)
        )
        return logits, cache, end

    def row(self, length: int, seed: int = 0) -> TrialRow:
        encoded = self.prompt(length, seed)
        logits, cache, end = self.prefilled([encoded])
        cache = cache if len(logits) == 1 else take_row(cache, 0)
        trim(cache, end - encoded.length)
        self.adapter.finish_prefill(encoded, cache)
        mx.eval(logits, [layer.state for layer in cache])
        copied = tuple(CopiedState.of(layer, encoded.length) for layer in cache)
        mx.eval([state.arrays() for state in copied])
        draw = np.random.RandomState(seed + 1)
        answer: list[int] = draw.randint(FIRST_ID, LAST_ID + 1, size=ANSWER).tolist()
        return TrialRow(encoded, copied, tuple(answer))

    def steps(
        self,
        rows: Sequence[TrialRow],
        places: int,
        *,
        columns: int = 0,  # the fewest of slabs
        decode: Callable[[DecodeStep], mx.array] | None = None,
    ) -> Iterator[mx.array]:
        """Decode copies of rows without end, beside idle places. Yields lazy logits (places, V)."""
        if decode is None:
            decode = partial(self.adapter.decode, call=self.shapes.decode_call())
        layers = self._filled(rows, places, columns)
        idle = places - len(rows)
        extras = [row.encoded.decode for row in rows] + [{}] * idle
        first = [row.encoded.length + row.encoded.position.delta for row in rows]
        for step in count():
            tokens = [row.answer[step % ANSWER] for row in rows] + [0] * idle
            positions = [at + step for at in first] + [0] * idle
            yield decode(
                DecodeStep(
                    mx.array(tokens, dtype=mx.int32)[:, None],
                    mx.array(positions, dtype=mx.int32),
                    layers,
                    extras,
                )
            )

    def _filled(
        self, rows: Sequence[TrialRow], places: int, columns: int
    ) -> list[LayerCache]:
        """Return a batch's layers with copies of rows at the first places."""
        layers = self.shapes.layers(rows[0].restored(), places, columns)
        for layer in layers:
            layer.resize(places)
        for place, row in enumerate(rows):
            put_row(layers, place, row.restored())
        mx.eval([layer.arrays() for layer in layers])
        return layers
