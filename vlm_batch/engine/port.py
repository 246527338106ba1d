"""The engine's collaborators, as it sees them: an adapter, loaders, a tokenizer's text and a sampler are handed in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import mlx.core as mx

from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.constraints import Form
from vlm_batch.engine.sampling import Sampled, SamplingRow
from vlm_batch.records import Call, DecodeStep, Encoded, Graphs, PromptKey, Thinking

#: ``(processed logits (B, V), their rows) -> Sampled``; ``sampling.sample`` unless another is handed in.
Sampler: TypeAlias = Callable[[mx.array, Sequence[SamplingRow]], Sampled]


class Family(Protocol):
    """Facts about an adapter's family (``vlm_batch.registry.ModelSpec``)."""

    @property
    def no_prefix_reuse(self) -> str | None: ...


class Recogniser(Protocol):
    """The part of an adapter that tells prompts apart."""

    @property
    def spec(self) -> Family: ...
    def prompt_key(self, inputs: Mapping[str, Any]) -> PromptKey: ...


class ModelAdapter(Recogniser, Protocol):
    """A model's family (``vlm_batch.adapters.base.Adapter`` says what each call does)."""

    @property
    def graphs(self) -> Graphs: ...
    @property
    def max_context(self) -> int | None: ...
    @property
    def is_causal(self) -> bool: ...
    @property
    def scores_chunks(self) -> bool: ...
    def encode_together(
        self, requests: Sequence[Mapping[str, Any]], call: Call = Call()
    ) -> list[Mapping[str, Any]]: ...
    def encode(self, inputs: Mapping[str, Any], call: Call = Call(), cached: int = 0) -> Encoded: ...
    def make_cache(self, kv: KVQuantisation | None = None) -> list[Any]: ...
    def prefill(
        self, rows: Sequence[Encoded], cache: list[Any], begin: int, end: int, call: Call = Call()
    ) -> mx.array: ...
    def finish_prefill(self, encoded: Encoded, cache: list[Any]) -> None: ...
    def decode(self, step: DecodeStep, call: Call = Call()) -> mx.array: ...
    def with_products(self, numbers: Mapping[str, Sequence[int]]) -> ModelAdapter: ...


@dataclass(frozen=True)
class AnswerText:
    """A tokenizer as the engine needs it: the ids that end an answer, and ``decode``, which turns token ids into text."""

    decode: Callable[[Sequence[int]], str] = lambda ids: ""
    eos_token_ids: frozenset[int] = frozenset()


NO_TEXT = AnswerText()


class Question(Protocol):
    """A checked request. Those of one ``lane`` wait for each other while they are prepared, and for no other lane's."""

    @property
    def lane(self) -> Hashable: ...
    @property
    def videos(self) -> Sequence[Any]: ...
    @property
    def least_tokens(self) -> int:
        """The fewest positions that its prompt can have, by what is known before it is prepared."""


class Prepared(Protocol):
    """A processor's output as evaluated mlx arrays, its pictures' (width, height), its videos' (frames, width, height).

    ``bad_words`` are the parameters' as token ids, ``form`` is what the answer is held to, ``thinking`` how the model marks it.
    """

    @property
    def inputs(self) -> Mapping[str, Any]: ...
    @property
    def kept(self) -> Mapping[str, Any] | None:
        """The same on the host, to begin again from; None where it is too large for that."""

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def video_sizes(self) -> tuple[tuple[int, int, int], ...]: ...
    @property
    def bad_words(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def form(self) -> Form | None: ...
    @property
    def thinking(self) -> Thinking | None: ...


class Loading(Protocol):
    """A question that is being prepared; safe from any thread.

    ``nbytes`` are those of the files that were read for it. Once it ``is_read``, ``num_pixels`` are its pictures', and
    ``known_nbytes`` what it will come to, where that is known already.
    """

    @property
    def nbytes(self) -> int: ...
    @property
    def is_read(self) -> bool: ...
    @property
    def num_pixels(self) -> int: ...
    @property
    def known_nbytes(self) -> int | None: ...
    @property
    def read_seconds(self) -> float: ...
    @property
    def process_seconds(self) -> float: ...
    def result(self) -> Prepared: ...
    def when_done(self, call: Callable[[], None]) -> None: ...
    def cancel(self) -> None: ...


class Loaders(Protocol):
    """Threads that prepare questions ahead of the engine.

    ``start`` has a question's pictures read, and ``when_read`` called once they are, unless there was nothing to read;
    ``process`` has the processor run on what was read. Both return at once.
    """

    def start(self, question: Any, /, when_read: Callable[[], None]) -> Loading: ...
    def process(self, loading: Any, /) -> None: ...
    def close(self) -> None: ...
