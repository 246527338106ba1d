"""Protocols of the engine's collaborators: adapter, loaders, tokenizer, sampler."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import mlx.core as mx

from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.constraints import AnswerForm
from vlm_batch.engine.sampling import Sampled, SamplingRow
from vlm_batch.records import (
    Call,
    DecodeStep,
    DraftState,
    Encoded,
    Graphs,
    PromptKey,
    Thinking,
)

#: ``(processed logits (B, V), their rows) -> Sampled``; ``sampling.sample`` unless another is handed in.
Sampler: TypeAlias = Callable[[mx.array, Sequence[SamplingRow]], Sampled]


#: ``token ids -> text``
Decode: TypeAlias = Callable[[Sequence[int]], str]


class Family(Protocol):
    """A family's facts (``vlm_batch.registry.ModelSpec``)."""

    @property
    def no_prefix_reuse(self) -> str | None: ...


class ModelAdapter(Protocol):
    """A family's adapter (``vlm_batch.adapters.base.Adapter``)."""

    @property
    def spec(self) -> Family: ...
    @property
    def graphs(self) -> Graphs: ...
    @property
    def max_context(self) -> int | None: ...
    @property
    def is_causal(self) -> bool: ...
    @property
    def scores_chunks(self) -> bool: ...
    def prompt_key(self, inputs: Mapping[str, Any]) -> PromptKey: ...
    def encode_together(
        self, requests: Sequence[Mapping[str, Any]], call: Call = Call()
    ) -> list[Mapping[str, Any]]: ...
    def encode(
        self, inputs: Mapping[str, Any], call: Call = Call(), cached: int = 0
    ) -> Encoded: ...
    def make_cache(self, kv: KVQuantisation | None = None) -> list[Any]: ...
    def prefill(
        self,
        rows: Sequence[Encoded],
        cache: list[Any],
        begin: int,
        end: int,
        call: Call = Call(),
    ) -> mx.array: ...
    def finish_prefill(self, encoded: Encoded, cache: list[Any]) -> None: ...
    def decode(self, step: DecodeStep, call: Call = Call()) -> mx.array: ...
    def with_products(self, numbers: Mapping[str, Sequence[int]]) -> ModelAdapter: ...
    def watched(self) -> AbstractContextManager[list[mx.array]]: ...


class DraftModel(Protocol):
    """A model that drafts for the adapter's (``vlm_batch.adapters.heads.Heads``)."""

    @property
    def context(self) -> int:
        """Number of last hidden states that it reads per row."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes per position in its own caches."""

    def propose(
        self, rows: Sequence[DraftState | None], layers: Sequence[Any], count: int
    ) -> mx.array:
        """Return each row's probable next tokens (B, count).

        Args:
            rows: each place's state, or None. The model reads ``hidden``; the caller then empties it.
            layers: the batch's layers, with all tokens but the last.
        """


@dataclass(frozen=True)
class AnswerText:
    """A tokenizer's decoders and end tokens.

    Attributes:
        decode: leaves special tokens out.
        decode_all: shows them.
        decode_usual: does with them what the family's answers need; None: leaves them out.
    """

    decode: Decode = lambda ids: ""
    eos_token_ids: frozenset[int] = frozenset()
    decode_all: Decode | None = None
    decode_usual: Decode | None = None


NO_TEXT = AnswerText()


class Question(Protocol):
    """A checked request. Requests of one ``lane`` wait for each other's preparation."""

    @property
    def lane(self) -> Hashable: ...
    @property
    def videos(self) -> Sequence[Any]: ...
    @property
    def least_tokens(self) -> int:
        """Fewest positions of its prompt known so far."""


class Prepared(Protocol):
    """A processor's output, evaluated, with its media's (width, height), (frames, width, height), seconds."""

    @property
    def inputs(self) -> Mapping[str, Any]: ...
    @property
    def kept(self) -> Mapping[str, Any] | None:
        """Inputs on the host to recompute from; None if too large."""

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def video_sizes(self) -> tuple[tuple[int, int, int], ...]: ...
    @property
    def audio_seconds(self) -> tuple[float, ...]: ...
    @property
    def bad_words(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def form(self) -> AnswerForm | None: ...
    @property
    def thinking(self) -> Thinking | None: ...


class Loading(Protocol):
    """A question in preparation. Safe from any thread."""

    @property
    def nbytes(self) -> int: ...
    @property
    def is_read(self) -> bool: ...
    @property
    def num_pixels(self) -> int: ...  # once it ``is_read``
    @property
    # the output's size, where it is known once it ``is_read``
    def known_nbytes(self) -> int | None: ...
    @property
    def read_seconds(self) -> float: ...
    @property
    def process_seconds(self) -> float: ...
    def result(self) -> Prepared: ...
    def when_done(self, call: Callable[[], None]) -> None: ...
    def cancel(self) -> None: ...


class Loaders(Protocol):
    """Threads that prepare questions: ``start`` reads media, ``process`` runs the processor; both return at once."""

    #: ``when_read`` is not called if there is nothing to read.
    def start(self, question: Any, /, when_read: Callable[[], None]) -> Loading: ...
    def process(self, loading: Any, /) -> None: ...
    def close(self) -> None: ...
