"""A row: everything that belongs to one request inside the engine, in records that are dropped as wholes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import mlx.core as mx

from vlm_batch.arrays import MOST_ON_HOST, as_mlx, num_bytes, on_host
from vlm_batch.caches.states import LayerState
from vlm_batch.engine.constraints import Guide
from vlm_batch.engine.logprobs import PromptScores
from vlm_batch.engine.port import NO_TEXT, AnswerText, Loading
from vlm_batch.engine.sampling import NO_RULES, RowRules
from vlm_batch.engine.text import Detokenizer, StopStrings
from vlm_batch.errors import InvalidParameters, describe
from vlm_batch.records import Encoded, PromptKey
from vlm_batch.store.prompt import PromptCache
from vlm_batch.store.saved import SavedRow, Snapshot
from vlm_batch.types import Event, FinishReason, Result, SamplingParams, Timings, TokenLogprobs, Usage, fresh_seed


class Status(Enum):
    """The stages of a row's life, in order."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


#: The parameters of a row that has ended.
NO_PARAMS = SamplingParams()

#: Losses after which a row stays apart for the rest of its life: what fails goes by who is beside it, and would go on so.
ALWAYS_SUSPECT = 3


@dataclass(eq=False)
class Prompt:
    """A row's prompt on its way into keys and values; each field is there until the next one takes its place."""

    question: Any = None  # not read yet
    loading: Loading | None = None
    inputs: Mapping[str, Any] | None = None  # a processor's output
    encoded: Encoded | None = None
    cache: list[Any] | None = None  # its single-row caches, from encoding on
    prefilled: int = 0  # positions that are in them
    ends: tuple[int, ...] = ()  # where its chunks have to end; open where there are none
    is_shared: bool = False  # prefilled whole, it is in one array with others

    @property
    def nbytes(self) -> int:
        """Bytes of what was read or prepared, until it is encoded."""
        if self.inputs is not None:
            return num_bytes(self.inputs)
        return 0 if self.loading is None else self.loading.nbytes


@dataclass(frozen=True)
class Facts:
    """Sizes and settings of an encoded prompt that outlive it: numbers, and ``extras`` for every decode step.

    ``delta`` and ``vocabulary`` are as in ``PositionState`` and ``Encoded``.
    """

    length: int = 0
    delta: int = 0
    image_tokens: int = 0
    model_image_sizes: tuple[tuple[int, int], ...] = ()
    vocabulary: int | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """The last token of a complete answer, and why it is the last."""

    token: int
    text: str
    logprobs: TokenLogprobs | None
    reason: FinishReason
    stop_reason: str | int | None


@dataclass(eq=False)
class Answer:
    """A row's answer so far. ``drawn`` (R,) has the token that was sampled last, at ``drawn_at``, perhaps not computed yet."""

    detokenizer: Detokenizer
    stop_strings: StopStrings
    max_tokens: int = 0  # what was asked for, cut to the model's context
    drawn: mx.array | None = None
    drawn_at: int = 0
    num_sampled: int = 0  # the last of them perhaps not read yet
    num_fed: int = 0  # of them in its caches: all that were sampled when its last forward was launched
    history: mx.array | None = None  # (T,) prompt and answer, for rows with processors
    end_ids: frozenset[int] = frozenset()  # tokens that end it
    bad_words: tuple[tuple[int, ...], ...] = ()
    rules: RowRules = NO_RULES  # made of these two when its prompt is encoded
    changes_logits: bool = False  # whether any stage of its own concerns it
    guide: Guide | None = None  # for rows whose last token decides what may be the next
    is_whole: bool = False  # it has the form that it is held to, and can only end
    parsed: Any = None
    min_tokens: int = 0  # before which stop strings do not count
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_scores: PromptScores | None = None
    ending: Ending | None = None  # it is complete, and its row has still to end

    @property
    def known_token(self) -> int | None:
        """The next token, where the row has said it before and is on its way back to where it was."""
        return self.token_ids[self.num_sampled] if self.num_sampled < len(self.token_ids) else None

    def advance(self, drawn: mx.array, at: int) -> None:
        """Note the next token: that of ``drawn`` (R,) int32 at a place."""
        self.drawn, self.drawn_at = drawn, at
        self.num_sampled += 1
        if self.history is not None:
            self.history = mx.concatenate([self.history, drawn[at : at + 1]])

    def add_text(self, token: int, is_stop: bool, is_end: bool) -> tuple[str, str | None]:
        """(text that a token adds, the stop string that matched). A stop token has no text of its own."""
        piece = "" if is_stop else self.detokenizer.add(token)
        if is_end:
            piece += self.detokenizer.finish()
        if len(self.token_ids) < self.min_tokens:
            text, matched = piece, None
        else:
            text, matched = self.stop_strings.feed(piece)
        if is_end and matched is None:
            text += self.stop_strings.finish()
        self.text += text
        return text, matched


@dataclass(eq=False)
class Clock:
    """The moments of a row's life (``time.perf_counter``), 0 for those to come."""

    submitted: float = field(default_factory=time.perf_counter)
    read_seconds: float = 0.0
    process_seconds: float = 0.0
    encode_seconds: float = 0.0
    placed: float = 0.0
    first_token: float = 0.0

    def timings(self) -> Timings:
        now = time.perf_counter()
        placed, first = self.placed or now, self.first_token
        return Timings(
            read=self.read_seconds,
            process=self.process_seconds,
            queue=placed - self.submitted - self.encode_seconds,
            encode=self.encode_seconds,
            prefill=first - placed if first else 0.0,
            decode=now - first if first else 0.0,
            ttft=first - self.submitted if first else float("nan"),
            total=now - self.submitted,
        )


@dataclass(eq=False)
class RowReuse:
    """Prefix-cache bookkeeping: what a row has of earlier rows and leaves for later ones (``vlm_batch.engine.reuse``)."""

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
    pending: SavedRow | None = None  # its prompt's state, until its first token shows that it is sound
    is_wanted: bool = False  # whether its caches are, at its end
    left: list[Any] | None = None  # its single-row caches again, from leaving the batch to its end


@dataclass(eq=False)
class Row:
    """One request inside the engine. ``prompt`` is empty from the end of its prefill on."""

    request_id: str
    params: SamplingParams
    seed: int
    answer: Answer
    prompt: Prompt = field(default_factory=Prompt)
    priority: int = 0
    client: int = 0  # who asks
    lane: Hashable = None  # what its loading waits for
    has_videos: bool = False
    status: Status = Status.WAITING
    facts: Facts = Facts()
    image_sizes: tuple[tuple[int, int], ...] = ()
    video_sizes: tuple[tuple[int, int, int], ...] = ()
    clock: Clock = field(default_factory=Clock)
    reuse: RowReuse | None = None
    siblings: tuple[Row, ...] = ()  # further answers to its prompt, until that is prefilled
    given: Mapping[str, Any] | None = None  # its processor's output, to begin again from
    losses: int = 0  # how often it has begun again
    suspected: tuple[int, int] | None = None  # tokens, one of which a forward with this row in it failed to give
    was_alone: bool = False  # when memory ran out

    @property
    def is_suspect(self) -> bool:
        """Whether its next forward, or one that was not read yet, may be the one that failed with it: until it is past that, it
        is alone in a batch that ``is_apart``."""
        return (
            self.suspected is not None
            and self.suspected[0] <= self.answer.num_sampled
            and len(self.answer.token_ids) <= self.suspected[1]
        )

    @property
    def is_parked(self) -> bool:
        """Whether it was taken out of the decoding batch, and goes on from where it was."""
        return self.status is Status.WAITING and self.answer.num_sampled > 0

    def suspect(self) -> None:
        """Note that the forward that failed gave one of the tokens that are not read yet, or the next one; after several
        losses, that it may be any."""
        known = len(self.answer.token_ids)
        last = max(known, self.answer.num_sampled)
        self.suspected = (known, last) if self.losses < ALWAYS_SUSPECT else (0, self.params.max_tokens)

    def begin_again(self) -> None:
        """Go back to where its prompt was not encoded yet: what is in its caches is lost. What it has said stays said."""
        answer, book = self.answer, self.reuse
        if not self.clock.first_token:
            self.clock.placed = 0.0
        self.losses += 1
        self.status = Status.WAITING
        self.prompt = Prompt(inputs=None if self.given is None else as_mlx(self.given))
        self.reuse = None
        if book is not None and (book.continues is not None or book.is_returned):
            self.reuse = RowReuse(continues=book.continues, is_returned=book.is_returned)
        answer.drawn, answer.num_sampled, answer.num_fed, answer.history = None, 0, 0, None

    def take(
        self, token: int, logprobs: TokenLogprobs | None, decode: Callable[[Sequence[int]], str]
    ) -> Event | Ending:
        """Append a token that its guide has been fed, with the text that it completes: what is told of it, or the end of the
        answer. Raises what its form or ``decode`` raises."""
        answer, guide = self.answer, self.answer.guide
        self.clock.first_token = self.clock.first_token or time.perf_counter()
        answer.token_ids.append(token)
        if logprobs is not None:
            answer.logprobs.append(logprobs)
        is_stop = token in answer.end_ids
        if guide is not None:
            guide.settle()
            answer.is_whole = guide.is_whole
            if guide.is_whole and len(answer.token_ids) < answer.min_tokens:
                raise InvalidParameters(
                    f"min_tokens is {answer.min_tokens}, and the answer has its {self.params.form} after "
                    f"{len(answer.token_ids)}, where nothing may follow: they contradict each other"
                )
            if guide.is_whole or is_stop:
                answer.parsed = guide.parsed(decode)
            if guide.is_over:
                answer.guide = None
        is_full = answer.is_whole or len(answer.token_ids) >= answer.max_tokens
        text, matched = answer.add_text(token, is_stop, is_stop or is_full)
        if not (is_stop or is_full or matched is not None):
            return Event(self.request_id, token, text, logprobs)
        if matched is not None:
            return Ending(token, text, logprobs, "stop", matched)
        if answer.is_whole:
            return Ending(token, text, logprobs, "stop", None)
        return Ending(token, text, logprobs, "stop" if is_stop else "length", token if is_stop else None)

    @property
    def position(self) -> int:
        """The position of the token that is decoded next."""
        return self.facts.length + self.answer.num_sampled - 1 + self.facts.delta

    def result(
        self,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        *,
        error: BaseException | None = None,
        cache: PromptCache | None = None,
    ) -> Result:
        """The row's result: the reason for its end, and all that it has generated."""
        answer, facts, scores = self.answer, self.facts, self.answer.prompt_scores
        cached = self.reuse.cached if self.reuse else 0
        is_prefilled = reason != "error" and bool(answer.token_ids)
        return Result(
            request_id=self.request_id,
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=Usage(facts.length, len(answer.token_ids), facts.image_tokens, cached),
            timings=self.clock.timings(),
            image_sizes=self.image_sizes,
            model_image_sizes=facts.model_image_sizes,
            video_sizes=self.video_sizes,
            logprobs=tuple(answer.logprobs) if self.params.logprobs is not None else None,
            prompt_logprobs=scores.read() if scores is not None and is_prefilled else None,
            parsed=answer.parsed,
            error=None if error is None else describe(error),
            exception=error,
            cache=cache,
        )

    def clear(self) -> None:
        """Drop everything but the name: the row has ended, and a launched step may still hold it."""
        self.status, self.params = Status.FINISHED, NO_PARAMS
        self.prompt, self.reuse, self.given = Prompt(), None, None
        self.siblings = ()
        self.answer, self.facts = new_answer(self.params), Facts()


def new_answer(params: SamplingParams, text: AnswerText = NO_TEXT) -> Answer:
    """An empty answer to a request with ``params``."""
    return Answer(
        Detokenizer(text.decode),
        StopStrings(params.stop),
        params.max_tokens,
        end_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else text.eos_token_ids),
        min_tokens=params.min_tokens,
    )


def new_row(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    *,
    text: AnswerText = NO_TEXT,
    priority: int = 0,
    client: int = 0,
    cache: PromptCache | None = None,
    return_cache: bool = False,
    given: Mapping[str, Any] | None = None,
) -> Row:
    """A row that waits, with a seed of its own if its parameters name none. Of ``given``, a processor's output, by default
    its prompt's, it keeps a copy on the host to begin again from, if that is not too large."""
    seed = fresh_seed() if params.seed is None else params.seed
    row = Row(request_id, params, seed, new_answer(params, text), prompt, priority, client)
    if (given := given or prompt.inputs) is not None and num_bytes(given) <= MOST_ON_HOST:
        row.given = on_host(given)
    if cache is not None or return_cache:
        row.reuse = RowReuse(continues=cache, is_returned=return_cache)
    row.siblings = tuple(
        Row(sibling_id(request_id, index), params, (seed + index) % 2**64, new_answer(params, text))
        for index in range(1, params.n)
    )
    return row


def sibling_id(request_id: str, index: int) -> str:
    """The name inside the engine of a request's further answer. No request has it: ``Request`` takes no null character."""
    return f"{request_id}\0{index}"


def fork(row: Row) -> list[Row]:
    """A prefilled row's siblings, each with the prompt's state as its own; the row has none from now on.

    Arrays are shared until one of them writes: a copied cache costs nothing yet.
    """
    for sibling in row.siblings:
        sibling.prompt = Prompt(cache=copy.deepcopy(row.prompt.cache), prefilled=row.prompt.prefilled)
        sibling.facts, sibling.clock = row.facts, replace(row.clock)
        sibling.priority, sibling.client = row.priority, row.client
        sibling.image_sizes, sibling.video_sizes, sibling.given = row.image_sizes, row.video_sizes, row.given
        answer, given = sibling.answer, row.answer
        answer.max_tokens, answer.history = given.max_tokens, given.history
        answer.rules, answer.changes_logits = given.rules, given.changes_logits
        answer.bad_words, answer.prompt_scores = given.bad_words, given.prompt_scores
        answer.guide = None if given.guide is None else given.guide.copy()
    siblings, row.siblings = row.siblings, ()
    return list(siblings)
