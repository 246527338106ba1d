"""A row: the state of one answer inside the engine. A request with several answers has several."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from vlm_batch.arrays import MOST_ON_HOST, as_mlx, num_bytes, on_host
from vlm_batch.caches.states import LayerState
from vlm_batch.engine.constraints import NO_GUIDE, NoGuide
from vlm_batch.engine.drafter import NO_DRAFTER, NoDrafter
from vlm_batch.engine.logprobs import PromptScores
from vlm_batch.engine.paths import Path
from vlm_batch.engine.sampling import NO_RULES, NOT_DRAWN, Drawn, RowRules
from vlm_batch.engine.text import (
    NO_TEXT,
    AnswerText,
    ShownText,
)
from vlm_batch.errors import InvalidParameters, describe
from vlm_batch.records import (
    Encoded,
    MediaSizes,
    PromptFacts,
    PromptKey,
    Terms,
)
from vlm_batch.store.prompt import PromptCache
from vlm_batch.store.saved import SavedRow, Snapshot
from vlm_batch.types import (
    Event,
    FinishReason,
    Result,
    SamplingParams,
    Timings,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from vlm_batch.inputs.loaders import Loading


class Stage(str, Enum):  # strings hash fast
    """Where a row is, in the order of its life. ``Ledger.move`` alone sets it."""

    INBOX = "inbox"  # no loader has it yet
    READING = "reading"  # a loader reads its media
    READ = "read"  # waits for room
    PROCESSING = "processing"  # a loader runs its processor
    PREPARED = "prepared"  # has the processor's output
    ENCODED = "encoded"  # has embeddings
    PREFILL = "prefill"  # has a place
    READY = "ready"  # prefilled, a further answer, or parked
    DECODE = "decode"  # has a place in a batch
    LAST = "last"  # its last work is launched, and it has no place
    ENDED = "ended"


NO_MEDIA = MediaSizes()
NO_FACTS = PromptFacts()
USUAL_TERMS = Terms()
#: Parameters of a row that has ended.
NO_PARAMS = SamplingParams()

#: A span of tokens that has none.
NO_TOKEN = (0, -1)
#: Losses after which a row stays in a group of its own: the failure depends on its neighbours and would come again.
ALWAYS_SUSPECT = 3


class NoLoading:
    """Of a row that no loader has."""

    nbytes = 0
    num_pixels = 0
    #: Bytes of what its processor will make; None: unknown.
    known_nbytes = 0

    def cancel(self) -> None:
        """Stop, as far as it can."""


NO_LOADING: Any = NoLoading()


@dataclass(eq=False)
class Prompt:
    """A row's prompt, until its keys and values hold it. Each field is set until the next replaces it."""

    question: Any = None  # until a loader has it
    loading: Loading = NO_LOADING
    inputs: Mapping[str, Any] = field(default_factory=dict)  # a processor's output
    encoded: Encoded | None = None
    # its single-row caches, from encoding on
    cache: list[Any] = field(default_factory=list)
    prefilled: int = 0  # positions that are in them
    is_shared: bool = False  # if prefilled whole, it shares an array
    logits: mx.array | None = None  # (1, V) of its next token, until that is chosen

    def to_prefill(self) -> tuple[Encoded, list[Any]]:
        """Return an encoded prompt, and its caches, one of each layer."""
        assert self.encoded is not None
        return self.encoded, self.cache

    @property
    def nbytes(self) -> int:
        return num_bytes(self.inputs) + self.loading.nbytes


class Ending(NamedTuple):
    """The end of a complete answer, with the event of its last token, if it has one."""

    event: Event
    reason: FinishReason
    stop_reason: str | int | None


@dataclass(eq=False)
class Answer:
    """A row's answer so far."""

    shown: ShownText
    max_tokens: int = 0  # as requested, within the model's context
    drawn: Drawn = NOT_DRAWN  # its last sampled token
    num_sampled: int = 0  # launched tokens included
    num_fed: int = 0  # tokens in its caches: those sampled before its last forward
    drafter: NoDrafter = NO_DRAFTER
    history: mx.array | None = None  # (T,) prompt and answer, for rows with processors
    rules: RowRules = NO_RULES  # tokens that end it, and words that it may not have
    guide: NoGuide = NO_GUIDE
    path: Path | None = None  # for rows that score options
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_scores: PromptScores | None = None  # if they are asked for
    ending: Ending | None = None  # set when it is complete, until its row ends

    @property
    def ahead(self) -> tuple[int, ...]:
        """Tokens of its next forward behind its last one: drafts, or those of its path."""
        return self.drafter.ahead if self.path is None else self.path.ahead

    @property
    def said(self) -> list[int]:
        """Tokens that were read; its form may still hold the last."""
        untold = self.guide.untold
        return self.token_ids if untold is None else [*self.token_ids, untold.token]

    @property
    def known_token(self) -> int | None:
        """The next token of a recomputed row, else None."""
        told = len(self.token_ids)
        if self.num_sampled < told:
            return self.token_ids[self.num_sampled]
        untold = self.guide.untold
        if untold is None or self.num_sampled > told:
            return None  # as mostly
        return untold.token

    @property
    def waits_for_token(self) -> bool:
        """Whether the choice of its next token needs its last one."""
        return self.guide.rules and self.known_token is None

    @property
    def last_token(self) -> int | None:
        """Its last chosen token; None until that is known."""
        known = self.said if self.path is None else self.path.tokens
        at = self.num_sampled - 1
        return known[at] if at < len(known) else None

    def drop_ahead(self) -> None:
        """Let the next forward take one token."""
        self.drafter.drop()
        if self.path is not None:
            self.path.ahead = ()

    def forget(self) -> None:
        """Forget what was computed. Told tokens stay; of a path nobody was told."""
        self.drawn = NOT_DRAWN
        self.num_sampled = 0
        self.num_fed = 0
        self.history = None
        self.drafter.begin_again()
        if self.path is not None:
            self.token_ids, self.logprobs = [], []

    def advance(self, drawn: mx.array, at: int, count: int = 1) -> None:
        self.drawn = (drawn, at + count - 1)
        self.num_sampled += count
        if self.history is not None:
            self.history = mx.concatenate([self.history, drawn[at : at + count]])


@dataclass(eq=False)
class Clock:
    """Times of a row's life (``time.perf_counter``); 0: not yet."""

    submitted: float = field(default_factory=time.perf_counter)
    spent: Timings = field(default_factory=Timings)  # seconds of its preparation
    placed: float = 0.0
    first_token: float = 0.0

    def note_place(self) -> None:
        """Note that the row has a place; the first one counts."""
        self.placed = self.placed or time.perf_counter()

    def note_token(self) -> None:
        """Note that the row has a token; the first one counts."""
        self.first_token = self.first_token or time.perf_counter()

    def timings(self) -> Timings:
        now = time.perf_counter()
        placed, first = self.placed or now, self.first_token
        found = replace(
            self.spent,
            queue=placed - self.submitted - self.spent.encode,
            ttft=float("nan"),
            total=now - self.submitted,
        )
        if not first:
            return found
        return replace(
            found,
            prefill=first - placed,
            decode=now - first,
            ttft=first - self.submitted,
        )


@dataclass(eq=False)
class RowReuse:
    """States that a row took and that it leaves."""

    continues: PromptCache | None = None  # its user's
    key: PromptKey | None = None
    cached: int = 0  # positions taken from an earlier row
    stops: tuple[int, ...] = ()  # ends of chunks, for snapshots
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    constant: dict[int, LayerState] = field(default_factory=dict)
    # its prompt's state, until its first token is known to be finite
    pending: SavedRow | None = None


@dataclass(eq=False)
class Row:
    """All state of one answer to a request, or of one path to options that are scored."""

    request_id: str
    params: SamplingParams
    seed: int
    answer: Answer
    prompt: Prompt = field(default_factory=Prompt)
    terms: Terms = USUAL_TERMS
    lane: Hashable = None  # rows of one lane wait for each other's loading
    has_videos: bool = False
    stage: Stage = Stage.INBOX
    facts: PromptFacts = NO_FACTS
    media: MediaSizes = NO_MEDIA
    clock: Clock = field(default_factory=Clock)
    reuse: RowReuse = field(default_factory=RowReuse)
    # further answers to its prompt, until that is prefilled
    siblings: tuple[Row, ...] = ()
    # its processor's output, to recompute it from, if that is kept
    given: Mapping[str, Any] = field(default_factory=dict)
    losses: int = 0  # number of times that it was recomputed
    # [first, last] token that the failed forward may have computed
    suspected: tuple[int, int] = NO_TOKEN
    was_alone: bool = False  # when memory ran out
    gave_way: bool = False  # parked once for a due client

    @property
    def priority(self) -> int:
        return self.terms.priority

    @property
    def client(self) -> int:
        return self.terms.client

    @property
    def is_suspect(self) -> bool:
        """Whether its forward may have failed; it then decodes alone."""
        if self.suspected is NO_TOKEN:
            return False
        first, last = self.suspected
        has_begun = self.answer.num_sampled >= first
        return has_begun and len(self.answer.token_ids) <= last

    @property
    def has_ended(self) -> bool:
        return self.stage is Stage.ENDED

    @property
    def needs_place(self) -> bool:
        """Whether its next token needs a forward, as of one parked before its forward, or is followed by one."""
        is_last = self.answer.num_sampled + 1 >= self.answer.max_tokens
        return self.prompt.logits is None or not is_last

    @property
    def is_untold(self) -> bool:
        """Whether its form still checks its last token."""
        return self.answer.guide.untold is not None

    @property
    def is_only_read(self) -> bool:
        """Whether it asks for no token and is prefilled: it ends once its last chunk was waited for."""
        return not self.params.max_tokens and self.answer.ending is not None

    def suspect(self) -> None:
        """Suspect unread tokens and the next, or all after ``ALWAYS_SUSPECT`` losses.

        Of a path, too: its forwards may take other positions together the next time.
        """
        if self.losses >= ALWAYS_SUSPECT or self.answer.path is not None:
            self.suspected = (0, self.params.max_tokens)
            return
        known = len(self.answer.token_ids)
        self.suspected = (known, max(known, self.answer.num_sampled))

    def begin_again(self) -> None:
        """Go back to before encoding. Told tokens stay."""
        answer, reuse = self.answer, self.reuse
        if not self.clock.first_token:
            self.clock.placed = 0.0
        self.losses += 1
        if self.is_only_read:
            answer.ending = None
        self.prompt = Prompt(inputs=as_mlx(self.given))
        self.reuse = RowReuse(continues=reuse.continues)
        answer.forget()

    def take(
        self,
        token: int,
        logprobs: TokenLogprobs | None,
        decode: Callable[[Sequence[int]], str],
    ) -> Event | Ending:
        """Append a token fed to its guide. Returns its event, or the answer's end."""
        answer, guide = self.answer, self.answer.guide
        self.clock.note_token()
        answer.token_ids.append(token)
        if logprobs is not None:
            answer.logprobs.append(logprobs)
        is_stop = token in answer.rules.end_ids
        # its form is complete: it can only end
        is_whole = False
        if guide.rules:
            is_whole = self._finish(guide, decode, is_stop=is_stop)
        answer.drafter.add(token, guide)
        count = len(answer.token_ids)
        is_end = is_stop or is_whole or count >= answer.max_tokens
        shown = None if is_stop else token
        may_stop = count >= self.params.min_tokens
        text, matched = answer.shown.add(shown, is_end=is_end, may_stop=may_stop)
        if not is_end and matched is None:
            return Event(
                self.request_id,
                token,
                text,
                logprobs,
                prompt_tokens=self.facts.length,
                prompt_token_ids=self.facts.token_ids,
            )
        event = Event(self.request_id, token, text, logprobs)
        if matched is not None:
            return Ending(event, "stop", matched)
        if is_whole:
            return Ending(event, "stop", None)
        if is_stop:
            return Ending(event, "stop", token)
        return Ending(event, "length", None)

    def _finish(
        self, guide: NoGuide, decode: Callable[[Sequence[int]], str], *, is_stop: bool
    ) -> bool:
        """Wait for what a guide makes of the last token. Returns whether the answer's form is complete."""
        guide.finish()
        is_whole = guide.is_whole
        count, least = len(self.answer.token_ids), self.params.min_tokens
        if is_whole and count < least:
            raise InvalidParameters(
                f"min_tokens is {least}, and the answer has its {self.params.form} after {count}, where nothing may "
                "follow: they contradict each other"
            )
        if is_whole or is_stop:
            guide.read(decode)
        if guide.is_over:
            self.answer.guide = NO_GUIDE
        return is_whole

    @property
    def position(self) -> int:
        """Position of the token to decode next."""
        return self.facts.length + self.answer.num_sampled - 1 + self.facts.delta

    def result(
        self,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        *,
        error: BaseException | None = None,
        cache: PromptCache | None = None,
    ) -> Result:
        answer, facts = self.answer, self.facts
        logprobs: tuple[TokenLogprobs, ...] | None = None
        if self.params.logprobs is not None:
            logprobs = tuple(answer.logprobs)
        return Result(
            request_id=self.request_id,
            text=answer.shown.text,
            token_ids=tuple(answer.token_ids),
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=Usage(
                facts.length,
                len(answer.token_ids),
                facts.image_tokens,
                self.reuse.cached,
            ),
            timings=self.clock.timings(),
            image_sizes=self.media.images,
            model_image_sizes=facts.model_image_sizes,
            video_sizes=self.media.videos,
            audio_seconds=self.media.audios,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(reason),
            prompt_token_ids=facts.token_ids,
            parsed=answer.guide.parsed,
            error=None if error is None else describe(error),
            exception=error,
            cache=cache,
        )

    def _prompt_logprobs(
        self, reason: FinishReason
    ) -> tuple[TokenLogprobs | None, ...] | None:
        """Return the prompt's log-probabilities, if they are asked for and all are there."""
        scores = self.answer.prompt_scores
        if scores is None or reason == "error":
            return None
        is_prefilled = reason == "length" or bool(self.answer.token_ids)
        return scores.read() if is_prefilled else None

    def clear(self) -> None:
        """Drop all but the id: launched work may hold the row."""
        self.params = NO_PARAMS
        self.prompt, self.reuse, self.given = Prompt(), RowReuse(), {}
        self.siblings = ()
        self.losses = -1  # launched tokens are not for it
        self.answer, self.facts = new_answer(self.params), NO_FACTS


def new_answer(params: SamplingParams, text: AnswerText = NO_TEXT) -> Answer:
    end_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        end_ids |= text.eos_token_ids
    return Answer(
        ShownText(text.decoder(params.skip_special_tokens), params.stop),
        params.max_tokens,
        rules=RowRules(end_ids),
    )


def new_row(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    *,
    text: AnswerText = NO_TEXT,
    terms: Terms = USUAL_TERMS,
    cache: PromptCache | None = None,
    given: Mapping[str, Any] | None = None,
) -> Row:
    """Return a waiting row. ``given``: inputs to recompute from (default: the prompt's), on the host unless too large."""
    seed = params.seed
    if seed is None:
        # a system call, which greedy rows need not pay
        seed = secrets.randbits(64) if params.temperature else 0
    answer = new_answer(params, text)
    row = Row(request_id, params, seed, answer, prompt, terms)
    given = given or prompt.inputs
    if num_bytes(given) <= MOST_ON_HOST:
        row.given = on_host(given)
    row.reuse.continues = cache
    row.siblings = siblings_of(row, params.n - 1, text)
    return row


def siblings_of(row: Row, count: int, text: AnswerText = NO_TEXT) -> tuple[Row, ...]:
    """Return so many further answers to a row's prompt."""
    terms = replace(row.terms, returns_cache=False)
    found: list[Row] = []
    for index in range(1, 1 + count):
        name, seed = sibling_id(row.request_id, index), (row.seed + index) % 2**64
        answer = new_answer(row.params, text)
        found.append(Row(name, row.params, seed, answer, terms=terms))
    return tuple(found)


def sibling_id(request_id: str, index: int) -> str:
    """Return a further answer's row id. No request has its null character."""
    return f"{request_id}\0{index}"


def fork(row: Row, siblings: Sequence[Row]) -> None:
    """Give further answers to a ready row's prompt lazy copies of its caches."""
    for sibling in siblings:
        sibling.prompt = Prompt(
            cache=copy.deepcopy(row.prompt.cache),
            prefilled=row.prompt.prefilled,
            logits=row.prompt.logits,
        )
        sibling.facts, sibling.clock = row.facts, replace(row.clock)
        sibling.media = row.media
        sibling.given = row.given
        answer, given = sibling.answer, row.answer
        answer.max_tokens, answer.history = given.max_tokens, given.history
        answer.rules = given.rules
        answer.prompt_scores = given.prompt_scores
        answer.guide = given.guide.copy()
        answer.drafter = given.drafter.copy()
