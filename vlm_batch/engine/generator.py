"""The engine's loop: plan -> encode -> prefill -> join -> decode -> sample -> events. One thread calls all of it.

Work is launched one step ahead: the decode forward of a step is queued on tokens that are still being computed, the
step's prefill chunks are queued behind it, and only in the next step are they read. So the device has work while Python
runs, also when rows join and leave. A row that ends at a stop token costs at most one column of wasted work, which
nobody sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from vlm_batch.arrays import arrays_of, stack_logits
from vlm_batch.caches import Placement, can_share, take_row
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.batch import DecodeBatch, Row, Traces
from vlm_batch.engine.compiled import CompiledDecode
from vlm_batch.engine.defaults import BESIDE_DECODE, MAX_TOGETHER, for_placement
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.sampling import Sampled, SamplingRow, needs_history, process, sample, to_list
from vlm_batch.engine.scheduler import Pace, PrefillRow, Scheduler, SchedulerConfig, WaitingRow, together
from vlm_batch.engine.text import Detokenizer, StopStrings
from vlm_batch.errors import PromptTooLong
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import (
    Chunk,
    DecodeStep,
    Encoded,
    Event,
    FinishReason,
    PromptKey,
    Result,
    SamplingParams,
    Status,
    Timings,
    TokenLogprobs,
    Usage,
    fresh_seed,
)

T = TypeVar("T")


class ModelAdapter(Protocol):
    """What the engine asks of a family (``vlm_batch.adapters.base.Adapter`` says what each call does)."""

    @property
    def compiles(self) -> bool: ...
    @property
    def max_context(self) -> int | None: ...
    def image_token_ids(self) -> frozenset[int]: ...
    @property
    def shares_prefill(self) -> bool: ...
    @property
    def no_prefix_reuse(self) -> str | None: ...
    def prompt_key(self, inputs: Mapping[str, Any]) -> PromptKey: ...
    def encode_together(self, requests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]: ...
    def encode(self, inputs: Mapping[str, Any], cached: int = 0) -> Encoded: ...
    def make_cache(self) -> list[Any]: ...
    def prefill(self, encoded: Encoded, cache: list[Any], start: int, end: int) -> mx.array: ...
    def prefill_together(self, rows: Sequence[Encoded], cache: list[Any]) -> mx.array: ...
    def finish_prefill(self, encoded: Encoded, cache: list[Any]) -> None: ...
    def decode(self, step: DecodeStep) -> mx.array: ...


@dataclass(frozen=True)
class _Flight:
    """A launched step: the sampled tokens, perhaps not yet computed, and the rows that they belong to."""

    rows: tuple[Row, ...]
    sampled: Sampled


@dataclass
class _Launched:
    """What a step launched, in the order in which the device does it; the next step reads it."""

    decode: _Flight | None = None
    chunks: dict[Row, list[mx.array]] = field(default_factory=dict)  # what to wait for: what a row's last chunk left
    joined: _Flight | None = None  # first tokens of the rows whose prompts ended


class BatchGenerator:
    """Continuous batching of one model's rows.

    ``insert`` adds a request at any time; ``step`` advances every row by one token and prefills within its budget;
    ``cancel`` ends a row at any stage. A row's error ends that row alone. All calls come from one thread.

    ``decode_text`` turns token ids into text (needed for text and stop strings); ``eos_token_ids`` end an answer.
    ``compile_decode`` runs decode steps as compiled graphs where the family allows it (``vlm_batch.engine.compiled`` says when
    that pays). ``reuse`` decides what rows take over from earlier ones; by default only what a request brings. ``kv``
    says how keys and values are quantised; by default they are not.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        *,
        decode_text: Callable[[Sequence[int]], str] | None = None,
        eos_token_ids: Sequence[int] = (),
        config: SchedulerConfig | None = None,
        placement: Placement | None = None,
        max_prompt_tokens: int | None = None,
        compile_decode: bool = False,
        reuse: Reuse | None = None,
        kv: KVQuantisation | None = None,
    ) -> None:
        self.adapter = adapter
        self.kv = kv
        self.reuse = reuse or Reuse(adapter)
        self._compiled = CompiledDecode(adapter.decode) if compile_decode and adapter.compiles else None
        placement = placement or Placement.for_device()
        self.scheduler = Scheduler(for_placement(config or SchedulerConfig(), placement))
        self._shares_prefill = adapter.shares_prefill and can_share(adapter.make_cache())
        self.decode_text = decode_text or (lambda ids: "")
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_prompt_tokens = max_prompt_tokens
        self.batch = DecodeBatch(placement, self.scheduler.config.max_rows)
        self._waiting: dict[str, Row] = {}
        self._prefilling: dict[str, Row] = {}
        self._rows: dict[str, Row] = {}
        self._launched = _Launched()
        self._pace = Pace(self.scheduler.config)
        self._events: list[Event] = []

    # Rows in and out
    # ----------------------------------------------------------------------------------------------------

    def insert(
        self,
        request_id: str,
        inputs: Mapping[str, Any],
        params: SamplingParams | None = None,
        priority: int = 0,
        submitted: float | None = None,
        cache: PromptCache | None = None,
        return_cache: bool = False,
    ) -> None:
        """Queue a request: ``inputs`` is its processor's output (input_ids (1, L), pixel_values, ...).

        ``submitted`` is the ``time.perf_counter()`` from which it has waited, now by default. ``cache`` is the state of
        the prompt's beginning, to be continued; ``return_cache`` asks for the state at the end. Raises ValueError for
        an id in use.
        """
        if request_id in self._rows:
            raise ValueError(f"request id {request_id!r} is already in use")
        params = params or SamplingParams()
        seed = fresh_seed() if params.seed is None else params.seed
        row = Row(request_id, params, seed, priority, inputs)
        row.submitted = row.submitted if submitted is None else submitted
        if cache is not None or return_cache:
            row.traces = Traces(continues=cache, is_returned=return_cache)
        row.detokenizer, row.stop_strings = Detokenizer(self.decode_text), StopStrings(params.stop)
        self._waiting[request_id] = self._rows[request_id] = row

    def cancel(self, request_id: str) -> bool:
        """End a row at whatever stage it is; False if there is none of that id. Its end comes with the next step."""
        row = self._rows.get(request_id)
        if row is None:
            return False
        self._end(row, "cancelled")
        return True

    def reset(self) -> None:
        """Forget every row, without events."""
        self._launched = _Launched()
        self._events = []
        for row in list(self._rows.values()):
            self._forget(row)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything left to do or to tell."""
        return bool(self._rows) or bool(self._events)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_prefilling(self) -> int:
        return len(self._prefilling)

    # A step
    # -------------------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Advance: launch the next decode step and a budget's worth of prefill, and read what the last step launched."""
        begin = time.perf_counter()
        before, self._launched = self._launched, _Launched()
        rows = [row for row in self.batch.rows if not row.is_last]
        if rows:
            self._launched.decode = self._launch(rows)
        self._await(before)
        encoding = self._admit(is_decoding=bool(rows))
        stops = (self.kv.start,) if self.kv is not None and self.kv.start else ()
        prefilling = [_prefill_row(row, stops, begin) for row in self._prefilling.values()]
        longest = max((row.waited for row in prefilling), default=0.0)
        budget = self._pace.budget(is_decoding=bool(rows), pending=self._num_pending(), waited=longest)
        plan = self.scheduler.plan(prefilling, budget)
        joined = [row for group in self._together(plan) for row in self._prefill(group)]
        if joined:
            self._launched.joined = self._sample(stack_logits([_last(row) for row in joined]), joined)
        if rows:
            self._pace.record(time.perf_counter() - begin - encoding, sum(chunk.end - chunk.start for chunk in plan))
        if not self._rows:
            self.reuse.settle_ended()
        events, self._events = self._events, []
        return events

    def _await(self, launched: _Launched) -> None:
        """Wait for a step's work, in its order on the device, and hand out its tokens."""
        self.reuse.settle_ended()
        if launched.decode is not None:
            self._read(launched.decode)
        for row, arrays in launched.chunks.items():
            if row.status is not Status.FINISHED:
                self._guard(row, mx.eval, arrays)
                self.reuse.settle(row)
        if launched.joined is not None:
            self._read(launched.joined)

    def _admit(self, is_decoding: bool) -> float:
        """Give free places to waiting rows, and encode a few rows ahead.

        Beside decoding rows for the config's ``encode_seconds``, so that the scheduler has rows to choose from; else as many
        as fill a step.

        Returns the seconds that encoding took.
        """
        now = time.perf_counter()
        others = [*self._prefilling.values(), *(row for row in self._waiting.values() if row.encoded is not None)]
        order = self.scheduler.order(
            [
                WaitingRow(row.request_id, row.priority, now - row.submitted)
                for row in self._waiting.values()
                if not self.reuse.waits_for(row, others)
            ]
        )
        num_free = self.scheduler.num_free(len(self._prefilling) + len(self.batch))
        num_encoded = 0
        near = [self._waiting[request_id] for request_id in order[: num_free + self.scheduler.config.encode_ahead]]
        num_looked = 0
        for index, row in enumerate(near):
            request_id = row.request_id
            has_place = index < num_free
            if row.encoded is None:
                if self.reuse.waits_for(row, others):
                    continue  # a row that was encoded just now has its beginning
                if num_encoded >= num_looked:
                    if num_encoded and (not has_place or self._has_encoded_enough(is_decoding, now)):
                        break
                    num_looked = num_encoded + self._look(
                        [other for other in near[index:] if other.encoded is None], others, is_decoding
                    )
                self._guard(row, self._encode, row)
                others.append(row)
                num_encoded += 1
            if has_place and row.encoded is not None:
                row.started = row.started or now
                row.status = Status.PREFILL
                self._prefilling[request_id] = self._waiting.pop(request_id)
        return time.perf_counter() - now

    def _look(self, rows: Sequence[Row], others: Sequence[Row], is_decoding: bool) -> int:
        """Encode the pictures of the first rows in one call, where that can be done; how many rows."""
        most = self.scheduler.config.encode_together or 1
        together: list[Row] = []
        for row in rows[: -(-most // BESIDE_DECODE) if is_decoding else most]:
            if not self.reuse.is_new(row) or self.reuse.waits_for(row, [*others, *together]):
                break  # its pictures may not have to be encoded at all
            together.append(row)
        if len(together) < 2:
            return 1
        given = [row.inputs or {} for row in together]
        try:
            looked = self.adapter.encode_together(given)
        except Exception:
            return 1  # each of them is encoded alone and told its own error
        for row, inputs in zip(together, looked, strict=True):
            row.inputs = inputs
        return max((index for index in range(len(together)) if looked[index] is not given[index]), default=0) + 1

    def _has_encoded_enough(self, is_decoding: bool, begin: float) -> bool:
        """Whether a step that began to encode at ``begin`` goes on with what else it has to do."""
        config = self.scheduler.config
        if is_decoding:
            return time.perf_counter() - begin >= (config.encode_seconds or 0.0)
        return self._num_pending() >= self._pace.idle_budget

    def _num_pending(self) -> int:
        """Prompt tokens that have places and are not prefilled."""
        return sum(row.prompt_length - row.prefilled for row in self._prefilling.values())

    def _fresh_cache(self) -> list[Any]:
        fresh = self.adapter.make_cache()
        return fresh if self.kv is None else self.kv.caches(fresh)

    def _encode(self, row: Row) -> None:
        assert row.inputs is not None
        row.started = begin = time.perf_counter()
        cached = self.reuse.begin(row, self._fresh_cache())
        encoded = self.adapter.encode(row.inputs, cached)
        row.inputs = None
        context = self.adapter.max_context
        check_length(encoded.length, context, self.max_prompt_tokens)
        mx.async_eval(encoded.inputs_embeds)
        row.encoded, row.prompt_length, row.delta = encoded, encoded.length, encoded.position.delta
        row.max_tokens = (
            row.params.max_tokens if context is None else min(row.params.max_tokens, context - encoded.length)
        )
        row.image_tokens, row.model_image_sizes = encoded.image_tokens, encoded.model_image_sizes
        row.decode_extras, row.vocabulary = encoded.decode, encoded.vocabulary
        if needs_history(row.params):
            row.history = mx.array([token for token in encoded.input_ids[0].tolist() if token >= 0], dtype=mx.int32)
        row.prefilled = cached
        self.reuse.commit(row)
        row.encode_seconds = time.perf_counter() - begin

    def _together(self, plan: Sequence[Chunk]) -> list[list[Chunk]]:
        """The plan in groups that run as one array."""
        most = self.scheduler.config.prefill_together or 1
        if most == 1 or not self._shares_prefill or self.kv is not None:
            return [[chunk] for chunk in plan]
        lengths = {row.request_id: row.prompt_length for row in self._prefilling.values()}
        return together(plan, lengths, most, MAX_TOGETHER)

    def _prefill(self, group: Sequence[Chunk]) -> list[Row]:
        """Run a group of chunks; the rows whose prompts it ended. A row that failed in an earlier chunk has no further one."""
        group = [chunk for chunk in group if chunk.request_id in self._prefilling]
        rows = [self._prefilling[chunk.request_id] for chunk in group]
        if len(rows) > 1 and self._run_together(rows):
            return [row for row in rows if row.status is Status.DECODE]
        return [row for row, chunk in zip(rows, group, strict=True) if self._guard(row, self._run_chunk, row, chunk)]

    def _run_together(self, rows: Sequence[Row]) -> bool:
        """Launch whole prompts of one length as one array. False if that failed: each then runs alone and is told its error."""
        try:
            cache = self.adapter.make_cache()
            logits = self.adapter.prefill_together([_encoded(row) for row in rows], cache)  # (R, V)
            mx.async_eval(logits, [layer.state for layer in cache])
        except Exception:
            return False
        for index, row in enumerate(rows):
            row.cache = take_row(cache, index)
            row.prefilled = row.prompt_length
            self._guard(row, self._settle, row, logits[index : index + 1])
        return True

    def _run_chunk(self, row: Row, chunk: Chunk) -> bool:
        """Launch a chunk. Whether the row's prompt is done; it then is in the batch, with its logits as ``next_token``."""
        assert row.cache is not None
        logits = row.traces.logits if row.traces is not None else None  # (1, V), kept from the same prompt
        if logits is None:
            logits = self.adapter.prefill(_encoded(row), row.cache, chunk.start, chunk.end)  # (1, V)
        row.prefilled = chunk.end
        return self._settle(row, logits)

    def _settle(self, row: Row, logits: mx.array) -> bool:
        """Launch what a chunk left in a row's caches. Whether its prompt is done: it then joins, with ``logits`` (1, V)."""
        assert row.cache is not None
        done = row.prefilled == row.prompt_length
        kept = self.reuse.prompt_done(row, logits) if done else self.reuse.chunk_done(row)
        if done:
            self.adapter.finish_prefill(_encoded(row), row.cache)
        arrays = arrays_of([cache.state for cache in row.cache]) + ([logits] if done else []) + kept
        mx.async_eval(arrays)
        self._launched.chunks[row] = arrays
        if done:
            row.next_token = logits
            row.encoded = None  # embeddings and features are let go of here
            del self._prefilling[row.request_id]
            self.batch.join(row)
        return done

    def _launch(self, rows: Sequence[Row]) -> _Flight | None:
        """Decode one token for every live row and sample it, without waiting for the result."""
        try:
            return self._sample(self._decode(rows), rows)
        except Exception as error:
            self._fail_batch(error)
            return None

    def _decode(self, rows: Sequence[Row]) -> mx.array:
        """The forward over every place of the batch; logits (R, V) of ``rows``, in their order."""
        places = self.batch.places
        empty = mx.zeros((1,), dtype=mx.int32)
        tokens = mx.concatenate([empty if row is None else _last(row) for row in places])[:, None]  # (B, 1)
        positions = mx.array([0 if row is None else row.position for row in places], dtype=mx.int32)
        extras = [{} if row is None else row.decode_extras for row in places]
        step = DecodeStep(tokens, positions, self.batch.layers, extras)
        if self._compiled is not None and CompiledDecode.can_compile(self.batch.layers, extras):
            logits = self._compiled(step)  # (B, V)
        else:
            logits = self.adapter.decode(step)
        return logits if len(rows) == len(places) else logits[mx.array([places.index(row) for row in rows])]

    def _sample(self, logits: mx.array, rows: Sequence[Row]) -> _Flight | None:
        """Processors, then sampling of (R, V). A row whose processor raises ends with that error; the others go on."""
        alive = list(rows)
        if any(needs_history(row.params) for row in rows):
            picked = [self._guard(row, process, logits[i : i + 1], _sampling_row(row)) for i, row in enumerate(rows)]
            alive = [row for row, one in zip(rows, picked, strict=True) if one is not None]
            if not alive:
                return None
            logits = stack_logits([one for one in picked if one is not None])
        sampled = sample(logits, [_sampling_row(row) for row in alive])
        for index, row in enumerate(alive):
            row.next_token = sampled.tokens[index : index + 1].astype(mx.int32)
            row.num_sampled += 1
            if row.history is not None:
                row.history = mx.concatenate([row.history, row.next_token])
            if row.is_last:
                self._leave(row)  # its last token needs no further step
        mx.async_eval(sampled.arrays())
        return _Flight(tuple(alive), sampled)

    def _read(self, flight: _Flight) -> None:
        """Wait for a launched step and hand out its tokens."""
        try:
            tokens = to_list(flight.sampled.tokens)
            logprobs = flight.sampled.read_logprobs([row.params for row in flight.rows], tokens)
        except Exception as error:
            self._fail_batch(error, flight.rows)
            return
        for index, (row, token) in enumerate(zip(flight.rows, tokens, strict=True)):
            if row.status is not Status.FINISHED:  # a row that ended meanwhile has no use for it
                self._take(row, token, logprobs.get(index))

    def _take(self, row: Row, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append a token to its row, with the text that it completes, and end the row if that is its end."""
        row.first_token = row.first_token or time.perf_counter()
        row.token_ids.append(token)
        if logprobs is not None:
            row.logprobs.append(logprobs)
        is_stop = token in row.params.stop_token_ids or (token in self.eos_token_ids and not row.params.ignore_eos)
        is_full = len(row.token_ids) >= row.max_tokens
        text, matched = self._guard(row, _add_text, row, token, is_stop, is_stop or is_full) or ("", None)
        if row.status is Status.FINISHED:  # its text could not be decoded
            return
        row.text += text
        if not (is_stop or is_full or matched is not None):
            self._events.append(Event(row.request_id, token, text, logprobs))
            return
        is_stop = is_stop or matched is not None
        result = self._result(
            row,
            "stop" if is_stop else "length",
            matched if matched is not None else token if is_stop else None,
            cache=self._leave_traces(row),
        )
        self._events.append(Event(row.request_id, token, text, logprobs, result))
        self._forget(row)

    # Ends
    # ---------------------------------------------------------------------------------------------------------------

    def _end(self, row: Row, reason: FinishReason, error: BaseException | None = None) -> None:
        cache = self._leave_traces(row) if reason == "cancelled" and row.status is Status.DECODE else None
        self._events.append(Event(row.request_id, result=self._result(row, reason, None, error, cache)))
        self._forget(row)

    def _leave(self, row: Row) -> None:
        """Free a row's place; what is wanted of its caches goes with it."""
        if row in self.batch.places and self.reuse.wants(row):
            row.cache = self.batch.take(row)
        self.batch.leave(row)

    def _leave_traces(self, row: Row) -> PromptCache | None:
        """Its answer is complete: save its caches for later requests and for its user."""
        self._leave(row)
        return self.reuse.end(row)

    def _result(
        self,
        row: Row,
        reason: FinishReason,
        stop_reason: str | int | None,
        error: BaseException | None = None,
        cache: PromptCache | None = None,
    ) -> Result:
        now = time.perf_counter()
        started, first = row.started or now, row.first_token
        return Result(
            request_id=row.request_id,
            text=row.text,
            token_ids=tuple(row.token_ids),
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=Usage(
                row.prompt_length, len(row.token_ids), row.image_tokens, row.traces.cached if row.traces else 0
            ),
            timings=Timings(
                queue=started - row.submitted,
                encode=row.encode_seconds,
                prefill=first - started - row.encode_seconds if first else 0.0,
                decode=now - first if first else 0.0,
                ttft=first - row.submitted if first else float("nan"),
                total=now - row.submitted,
            ),
            model_image_sizes=row.model_image_sizes,
            logprobs=tuple(row.logprobs) if row.params.logprobs is not None else None,
            error=None if error is None else describe(error),
            exception=error,
            cache=cache,
        )

    def _forget(self, row: Row) -> None:
        self._waiting.pop(row.request_id, None)
        self._prefilling.pop(row.request_id, None)
        del self._rows[row.request_id]
        self.batch.leave(row)
        row.status = Status.FINISHED
        row.inputs = row.encoded = row.cache = row.next_token = row.history = row.traces = None
        row.decode_extras = {}

    def _guard(self, row: Row, work: Callable[..., T], *arguments: Any) -> T | None:
        """Do one row's work; an exception ends that row with an error and gives None."""
        try:
            return work(*arguments)
        except Exception as error:
            self._end(row, "error", error)
            return None

    def _fail_batch(self, error: BaseException, rows: Sequence[Row] = ()) -> None:
        """A forward of the whole batch failed: no row's token can be trusted, so all of them end. The engine goes on."""
        self._launched = _Launched()
        for row in {id(row): row for row in (*self.batch.rows, *rows)}.values():
            if row.status is not Status.FINISHED:
                self._end(row, "error", error)


def check_length(prompt: int, context: int | None, limit: int | None) -> None:
    """Raise PromptTooLong, with the numbers, for a prompt that can never be answered."""
    if limit is not None and prompt > limit:
        raise PromptTooLong(f"the prompt has {prompt} tokens (pictures included); max_prompt_tokens is {limit}")
    if context is not None and prompt >= context:
        raise PromptTooLong(f"the prompt has {prompt} tokens (pictures included); the model's context holds {context}")


def describe(error: BaseException) -> str:
    """An error as one line for a result: what kind, and what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _add_text(row: Row, token: int, is_stop: bool, is_end: bool) -> tuple[str, str | None]:
    """(text that a token adds to a row, the stop string that matched). A stop token has no text of its own."""
    assert row.detokenizer is not None and row.stop_strings is not None
    piece = "" if is_stop else row.detokenizer.add(token)
    if is_end:
        piece += row.detokenizer.finish()
    text, matched = row.stop_strings.feed(piece)
    return (text + row.stop_strings.finish(), None) if is_end and matched is None else (text, matched)


def _prefill_row(row: Row, stops: tuple[int, ...], now: float) -> PrefillRow:
    assert row.encoded is not None
    stops = stops if row.traces is None else (*stops, *row.traces.stops)
    waited = max(0.0, now - row.submitted)
    return PrefillRow(row.request_id, row.prompt_length, row.prefilled, row.encoded.atomic, stops, row.priority, waited)


def _encoded(row: Row) -> Encoded:
    assert row.encoded is not None
    return row.encoded


def _last(row: Row) -> mx.array:
    assert row.next_token is not None
    return row.next_token


def _sampling_row(row: Row) -> SamplingRow:
    return SamplingRow(row.params, row.seed, row.num_sampled, row.history, row.vocabulary)
