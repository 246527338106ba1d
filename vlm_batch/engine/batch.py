"""The live rows and where their KV lies: join and leave, one row at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from vlm_batch.caches import DenseCache, LayerCache, Placement, make_layer_cache
from vlm_batch.caches.states import LayerState
from vlm_batch.engine.text import Detokenizer, StopStrings
from vlm_batch.store.prompt import PromptCache
from vlm_batch.store.saved import SavedRow, Snapshot
from vlm_batch.types import Encoded, PromptKey, SamplingParams, Status, TokenLogprobs


@dataclass(eq=False)
class Traces:
    """What a row has of earlier rows, and what it keeps for later ones on its way (``vlm_batch.engine.reuse``)."""

    continues: PromptCache | None = None  # its user's
    is_returned: bool = False  # whether its result is to have its cache
    key: PromptKey | None = None
    cached: int = 0  # positions that it has not prefilled itself
    logits: mx.array | None = None  # (1, V) after its prompt, where they were kept
    known: tuple[int, int] = (-1, 0)  # the prefix cache's version, and how far it reached then
    shared: dict[Row, int] = field(default_factory=dict)  # positions in common with rows that were in prefill
    stops: tuple[int, ...] = ()  # where its chunks are to end
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    constant: dict[int, LayerState] = field(default_factory=dict)
    pending: SavedRow | None = None  # its prompt's state, until it is evaluated


@dataclass(eq=False)
class Row:
    """Everything that belongs to one request inside the engine; the one mutable record."""

    request_id: str
    params: SamplingParams
    seed: int
    priority: int = 0
    inputs: Mapping[str, Any] | None = None  # a processor's output, until it is encoded
    status: Status = Status.WAITING
    encoded: Encoded | None = None  # until its prefill ends
    prompt_length: int = 0
    max_tokens: int = 0  # what it asked for, cut to the model's context
    image_tokens: int = 0
    model_image_sizes: tuple[tuple[int, int], ...] = ()
    delta: int = 0
    vocabulary: int | None = None  # how many tokens it chooses from, if not as many as all rows do
    decode_extras: Mapping[str, Any] = field(default_factory=dict)
    cache: list[Any] | None = None  # its single-row cache, until it joins the batch and after it has left
    traces: Traces | None = None  # what it takes from earlier rows and leaves for later ones
    prefilled: int = 0
    next_token: mx.array | None = None  # (1,) the token that was sampled last, perhaps not yet computed
    num_sampled: int = 0  # tokens sampled so far, the last of them perhaps not yet read
    history: mx.array | None = None  # (T,) prompt and answer, for rows with processors
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    detokenizer: Detokenizer | None = None
    stop_strings: StopStrings | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    submitted: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    encode_seconds: float = 0.0
    first_token: float = 0.0

    @property
    def position(self) -> int:
        """The position of the token that is decoded next."""
        return self.prompt_length + self.num_sampled - 1 + self.delta

    @property
    def is_last(self) -> bool:
        """Whether the token that was sampled last is its last by count."""
        return self.num_sampled >= self.max_tokens


class DecodeBatch:
    """Rows that decode together. ``places[b]`` is the row at place b of every layer's cache, or None.

    With ``Placement.ROWS`` the places stay dense; with ``Placement.SLAB`` a place is kept until another row takes it.
    """

    def __init__(self, placement: Placement, max_rows: int) -> None:
        self.placement = placement
        self.max_rows = max_rows
        self.places: list[Row | None] = []
        self.layers: list[LayerCache] = []

    @property
    def rows(self) -> list[Row]:
        return [row for row in self.places if row is not None]

    def __len__(self) -> int:
        return len(self.rows)

    def join(self, row: Row) -> None:
        """Give a prefilled row a place. Only its own KV is touched; its single-row cache is given up."""
        assert row.cache is not None
        if not self.layers:
            self.layers = [make_layer_cache(single, self.placement, self.max_rows) for single in row.cache]
        if None not in self.places:
            self._resize(len(self.places) + 1)
        place = self.places.index(None)
        for layer, single in zip(self.layers, row.cache, strict=True):
            layer.put(place, single)
        self.places[place] = row
        row.cache = None
        row.status = Status.DECODE

    def take(self, row: Row) -> list[Any]:
        """A live row's single-row caches again, with all that it has seen; to be called when it leaves."""
        place = self.places.index(row)
        taken = [layer.take(place) for layer in self.layers]
        mx.async_eval([cache.state for cache in taken])  # a slab is written next step: nobody may hold it then
        return taken

    def leave(self, row: Row) -> None:
        """Free a row's place, if it has one; nobody else moves."""
        if row not in self.places:
            return
        place = self.places.index(row)
        if self.placement is Placement.ROWS:
            del self.places[place]
            for layer in self.layers:
                assert isinstance(layer, DenseCache)
                layer.remove(place)
        else:
            self.places[place] = None
            for layer in self.layers:
                layer.clear(place)
            self._resize(max((index + 1 for index, other in enumerate(self.places) if other is not None), default=0))
        if not self.places:
            self.layers = []  # the memory of an idle batch goes back

    def _resize(self, wanted: int) -> None:
        """Have ``wanted`` places. In slabs their number is a power of two (or all there are), so that the shapes of a step
        change rarely; places past the last row are given up, so that they cost nothing."""
        if self.placement is Placement.SLAB and wanted:
            wanted = min(1 << (wanted - 1).bit_length(), self.max_rows)
        self.places = (self.places + [None] * wanted)[:wanted]
        for layer in self.layers:
            layer.resize(wanted)

    @property
    def nbytes(self) -> int:
        """Bytes of KV that the live rows' layers hold."""
        return sum(layer.nbytes for layer in self.layers)
