"""The engine's step: plan -> encode -> prefill -> join -> decode -> sample -> events. One thread calls all of it.

Work is launched one step ahead: the decode forward of a step is queued on tokens that are still being computed, the
step's prefill chunks are queued behind it, and only in the next step are they read. So the device has work while Python
runs, also when rows join and leave. A row that ends at a stop token costs at most one column of wasted work, which
nobody sees.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from vlm_batch.arrays import num_bytes, stack_logits
from vlm_batch.caches import Placement
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.admission import Admission
from vlm_batch.engine.constraints import apply_masks
from vlm_batch.engine.decoding import Decoder
from vlm_batch.engine.defaults import for_policy
from vlm_batch.engine.encoding import Encoder
from vlm_batch.engine.exact import Exact
from vlm_batch.engine.faults import is_out_of_memory, is_users_own, let_go, raised_in, too_large
from vlm_batch.engine.groups import DecodeGroups
from vlm_batch.engine.memory import GROWTH, RowMemory
from vlm_batch.engine.pace import Pace
from vlm_batch.engine.penalties import RowRules
from vlm_batch.engine.port import AnswerText, Loading, ModelAdapter, Sampler
from vlm_batch.engine.prefill import Prefill
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Prompt, Row, Status, fork, new_row
from vlm_batch.engine.sampling import Sampled, SamplingRow, needs_processing, process, sample, to_list
from vlm_batch.engine.scheduler import Scheduler, SchedulerConfig
from vlm_batch.errors import OutOfMemory
from vlm_batch.policy import Policy, policy_for
from vlm_batch.runtime.device import device
from vlm_batch.runtime.memory import give_back
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import Event, FinishReason, SamplingParams, TokenLogprobs

T = TypeVar("T")

#: Places that a slab begins with where the number of rows is left open: a lone row does not pay for those that may come.
FIRST_PLACES = 8


@dataclass(frozen=True)
class _Flight:
    """A launched step: the sampled tokens, perhaps not yet computed, and the rows that they belong to.

    ``losses`` are the rows' own at its launch: a row that has begun again since has no use for it. ``is_known``: the
    tokens were said before, by rows that are on their way back to where they were.
    """

    rows: tuple[Row, ...]
    losses: tuple[int, ...]
    sampled: Sampled
    is_known: bool = False

    @classmethod
    def of(cls, rows: Sequence[Row], sampled: Sampled, *, is_known: bool = False) -> _Flight:
        return cls(tuple(rows), tuple(row.losses for row in rows), sampled, is_known)

    @property
    def waiting(self) -> list[Row]:
        """The rows that its tokens are still for."""
        return [row for row, losses in zip(self.rows, self.losses, strict=True) if _is_current(row, losses)]


@dataclass
class _Launched:
    """The work that a step launched, in the device's order; the next step reads it."""

    decode: Sequence[_Flight] = ()
    guided: Sequence[_Flight] = ()  # of the same forward: rows whose choice waited for their last token
    chunks: dict[Row, list[mx.array]] = field(default_factory=dict)  # what to wait for: what a row's last chunk left
    joined: Sequence[_Flight] = ()  # first tokens of the rows whose prompts ended


class BatchGenerator:
    """Continuous batching of one model's rows.

    ``insert`` adds a request at any time; ``step`` advances every row by one token and prefills within its budget;
    ``cancel`` ends a row at any stage. A row's error ends that row alone. All calls come from one thread.

    ``text`` says how tokens read and which of them end an answer (needed for text and stop strings). ``compile_decode``
    runs decode steps as compiled graphs where the family allows it (``vlm_batch.engine.compiled`` says when that pays).
    ``reuse`` decides what rows take over from earlier ones; by default only what a request brings. ``kv`` says how keys
    and values are quantised; by default they are not. ``sampler`` chooses the tokens, by default ``sampling.sample``.
    ``policy`` has what ``config`` leaves open, by default the device's. ``exact`` keeps every row's numbers, to the last bit,
    a function of its request; ``reuse`` must have the same.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        *,
        text: AnswerText | None = None,
        config: SchedulerConfig | None = None,
        placement: Placement | None = None,
        policy: Policy | None = None,
        compile_decode: bool = False,
        reuse: Reuse | None = None,
        kv: KVQuantisation | None = None,
        sampler: Sampler = sample,
        exact: Exact | None = None,
    ) -> None:
        self.adapter = adapter
        self.reuse = reuse or Reuse(adapter, exact=exact)
        if exact != self.reuse.exact:
            raise ValueError("what is reused is not what is computed here: reuse and generator need the same exact")
        if exact is not None and compile_decode:
            raise ValueError("compile_decode: graphs are made of steps that come back, and round otherwise; not exact")
        self.text = text or AnswerText()
        self.sampler = sampler
        self._decoder = Decoder(adapter, compile_decode=compile_decode)
        if policy is None:
            policy = policy_for((placement or Placement.for_device()).value, device())
        placement = placement or Placement(policy.placement)
        config = for_policy(config or SchedulerConfig(), policy)
        if exact is not None:
            config = exact.config(config)
            adapter.go_by_shapes()
        self.scheduler = Scheduler(config)
        first = min(config.first_rows, FIRST_PLACES) if config.first_rows is not None else None
        self.batch = DecodeGroups(placement, self.scheduler.most_rows, exact, first_rows=first)
        self._pace = Pace(config)
        self.encoder = Encoder(adapter, self.reuse, config, kv)
        guard = _weakly(self._guard)
        self.memory = RowMemory(config.max_bytes, self.batch.places_for if placement is Placement.SLAB else None)
        self.prefill = Prefill(adapter, self.reuse, config, kv, guard, exact)
        self.admission = Admission(
            self.scheduler,
            self.encoder,
            self.prefill,
            self.reuse,
            idle_budget=self._pace.idle_budget,
            guard=guard,
            memory=self.memory,
        )
        self._rows: dict[str, Row] = {}
        self._launched = _Launched()
        self._held: tuple[tuple[Row, mx.array], ...] = ()  # guided rows, with their logits (1, V) of this step
        self._forks: list[tuple[Row, mx.array]] = []  # further answers to prefilled prompts, with those prompts' logits
        self._events: list[Event] = []
        self._until_look = 0  # steps, until it is asked whether rows have outgrown the memory
        self.num_recomputed = 0  # rows that began again, after a failed step or for want of memory

    # Rows in and out

    def insert(
        self,
        request_id: str,
        inputs: Mapping[str, Any],
        params: SamplingParams | None = None,
        priority: int = 0,
        *,
        cache: PromptCache | None = None,
        return_cache: bool = False,
    ) -> None:
        """Queue a request: ``inputs`` is its processor's output (input_ids (1, L), pixel_values, ...).

        ``cache`` is the state of the prompt's beginning, to be continued; ``return_cache`` asks for the state at the
        end. Raises ValueError for an id in use.
        """
        row = new_row(
            request_id,
            Prompt(inputs=inputs),
            params or SamplingParams(),
            decode=self.text.decode,
            priority=priority,
            cache=cache,
            return_cache=return_cache,
        )
        self.add(row)

    def add(self, row: Row) -> None:
        """Queue a row; one that has a question waits until ``take_in``. Raises ValueError for an id in use."""
        if row.request_id in self._rows:
            raise ValueError(f"request id {row.request_id!r} is already in use")
        self._rows[row.request_id] = row
        eos = () if row.params.ignore_eos else self.text.eos_token_ids
        row.answer.rules = RowRules(end_ids=(*eos, *row.params.stop_token_ids))
        self.admission.add(row)

    def take_in(self, row: Row, loading: Loading) -> None:
        """Take a row whose loading is done: it waits for a place, or ends with the error that loading raised."""
        if row.status is not Status.FINISHED:
            self._guard(row, self.admission.take_in, row, loading)

    def fail(self, row: Row, error: BaseException) -> None:
        """End a row with an error that came from outside. Its end comes with the next step."""
        self._end(row, "error", raised_in(error))

    def cancel(self, request_id: str) -> bool:
        """End a row at whatever stage it is; False if there is none of that id. Its end comes with the next step."""
        row = self._rows.get(request_id)
        if row is None:
            return False
        self._end(row, "cancelled")
        return True

    def fail_all(self, error: BaseException) -> list[Event]:
        """End every row with an error, and forget what was launched; their ends, and what was to be told before."""
        self._launched = _Launched()
        error = raised_in(error)
        for row in list(self._rows.values()):
            self._end(row, "error", error)
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Forget every row, without events."""
        self._launched = _Launched()
        self._held, self._forks = (), []
        for row in list(self._rows.values()):
            self._forget(row)
        self._events = []

    @property
    def input_bytes(self) -> int:
        """Bytes of processors' outputs that rows keep, to begin again from."""
        return sum(num_bytes(row.given) for row in tuple(self._rows.values()))

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything left to do or to tell."""
        return bool(self._events) or self._is_active

    @property
    def _is_active(self) -> bool:
        """Whether any row has been prepared."""
        return len(self._rows) > self.admission.num_unprepared

    # A step

    def step(self) -> list[Event]:
        """Advance: launch the next decode step and a budget's worth of prefill, and read what the last step launched."""
        begin = time.perf_counter()
        before, self._launched = self._launched, _Launched()
        self._set_apart()
        self._keep_within_memory()
        rows = [row for row in self.batch.rows if not row.is_last]
        if rows:
            self._launched.decode = self._launch(rows)
        self._await(before)
        self._launched.guided = self._sample_held()
        joined = self._join_forks()
        encoding = self.admission.admit(self.batch.rows, is_decoding=bool(rows))
        prefilling = self.prefill.views(begin)
        longest = max((row.waited for row in prefilling), default=0.0)
        budget = self._pace.budget(is_decoding=bool(rows), pending=self.prefill.num_pending, waited=longest)
        plan = self.scheduler.plan(prefilling, budget)
        done, self._launched.chunks = self.prefill.run(plan)
        joined += [(row, logits) for row, logits in done if self._guard(row, self._join, row, logits)]
        self._launched.joined = self._sample_joined(joined)
        if rows:
            seconds, tokens = time.perf_counter() - begin - encoding, sum(chunk.end - chunk.start for chunk in plan)
            self._pace.record(seconds, tokens)
            self.scheduler.record(len(rows), seconds, tokens, are_waiting=bool(self.admission.num_prepared))
        if not self._is_active:
            self.reuse.settle_ended()
        events, self._events = self._events, []
        return events

    def _await(self, launched: _Launched) -> None:
        """Wait for a step's work, in its order on the device, and hand out its tokens."""
        self.reuse.settle_ended()
        for flight in (*launched.decode, *launched.guided):
            self._read(flight)
        for row, arrays in launched.chunks.items():
            if row.status is not Status.FINISHED:
                self._guard(row, mx.eval, arrays)
        for flight in launched.joined:
            self._read(flight)

    def _join_forks(self) -> list[tuple[Row, mx.array]]:
        """Give places to further answers of prompts that are prefilled, with their logits (1, V): they go before all others."""
        free = self.scheduler.num_free(len(self.prefill) + len(self.batch))
        self._forks = [(row, logits) for row, logits in self._forks if row.status is not Status.FINISHED]
        taken, self._forks = self._forks[:free], self._forks[free:]
        return [(row, logits) for row, logits in taken if self._guard(row, self._join, row, logits)]

    def _join(self, row: Row, logits: mx.array) -> bool:
        """Move a row whose prompt is done to the decoding batch; its embeddings and features are freed here."""
        for sibling in fork(row) if row.siblings else ():
            self._rows[sibling.request_id] = sibling
            self._forks.append((sibling, logits))
        prompt, row.prompt = row.prompt, None
        assert prompt is not None and prompt.cache is not None
        self.prefill.remove(row)
        self.memory.learn(prompt.cache, row.facts.length)
        self.batch.join(row, prompt.cache, apart=row.is_suspect)
        return True

    def _set_apart(self) -> None:
        """Give rows that a failed forward may be the fault of a forward of their own, and let those back that are past it."""
        for row in [row for row in self.batch.rows if row.suspected is not None]:
            if row.is_suspect is not self.batch.is_apart(row):
                self._guard(row, self.batch.move, row, apart=row.is_suspect)

    def _keep_within_memory(self) -> None:
        """Have the last in line wait where rows have grown beyond the bound; one that has done so alone ends."""
        self._until_look -= 1
        if self._until_look > 0 or self.memory.max_bytes is None:
            return
        self._until_look = GROWTH
        live = sorted([*self.batch.rows, *self.prefill.rows.values()], key=self.admission.urgency)
        while live and not self.memory.fits(live[-1], live[:-1]):
            row = live.pop()
            if live:
                self._begin_again(row, OutOfMemory("keys and values have grown beyond max_bytes"))
            else:
                self._guard(row, self.memory.check, row)

    def _launch(self, rows: Sequence[Row]) -> Sequence[_Flight]:
        """Decode one token for every live row and sample it, without waiting for the result."""
        self._held = ()
        wanted = set(rows)
        shared: list[tuple[list[Row], mx.array]] = []
        flights: list[_Flight] = []
        for group in self.batch.groups:
            live = [row for row in group.rows if row in wanted]
            logits = self._together(live, self._decoder.logits, group, live) if live else None
            if logits is None:
                continue
            if self.batch.is_apart(live[0]):
                flights += self._choose(logits, live)
            else:
                shared.append((live, logits))
        if shared:
            logits = shared[0][1] if len(shared) == 1 else stack_logits([logits for _, logits in shared])
            flights += self._choose(logits, [row for live, _ in shared for row in live])
        return flights

    def _choose(self, logits: mx.array, rows: Sequence[Row]) -> Sequence[_Flight]:
        """Sample a forward's logits (R, V), but for rows whose last token has to be read first."""
        free = [
            index for index, row in enumerate(rows) if row.answer.guide is None or row.answer.known_token is not None
        ]
        if len(free) == len(rows):
            return self._sample(logits, rows)
        if self._together(rows, _launch, logits) is None:
            return ()
        self._held += tuple((row, logits[index : index + 1]) for index, row in enumerate(rows) if index not in free)
        return self._sample(logits[mx.array(free)], [rows[index] for index in free]) if free else ()

    def _sample_joined(self, joined: Sequence[tuple[Row, mx.array]]) -> Sequence[_Flight]:
        """First tokens of rows whose prompts ended, with those prompts' logits (1, V); suspects are each alone."""
        apart = [[pair] for pair in joined if pair[0].is_suspect]
        shared = [pair for pair in joined if not pair[0].is_suspect]
        flights: list[_Flight] = []
        for pairs in ([shared] if shared else []) + apart:
            flights += self._sample(stack_logits([logits for _, logits in pairs]), [row for row, _ in pairs])
        return flights

    def _sample_held(self) -> Sequence[_Flight]:
        """Choose the tokens of rows that had to be read first; their forward is on its way, and the others' choice too."""
        held = [(row, logits) for row, logits in self._held if row.status is Status.DECODE]
        self._held = ()
        return self._sample_joined(held)

    def _sample(self, logits: mx.array, rows: Sequence[Row]) -> Sequence[_Flight]:
        """Processors, then sampling of (R, V). A row whose processor or parameters raise ends alone; the others go on."""
        here = [index for index, row in enumerate(rows) if row.status is Status.DECODE]
        if len(here) < len(rows):  # the others began again meanwhile, with what was sampled before these
            if not here:
                return ()
            rows, logits = [rows[index] for index in here], logits[mx.array(here)]
        known = [index for index, row in enumerate(rows) if row.answer.known_token is not None]
        if known:
            new = [index for index in range(len(rows)) if index not in known]
            flights = self._say_again(logits[mx.array(known)], [rows[index] for index in known])
            return [*flights, *(self._sample(logits[mx.array(new)], [rows[index] for index in new]) if new else ())]
        if any(needs_processing(row.params) for row in rows):
            single = [logits[index : index + 1] for index in range(len(rows))]
            picked = [
                self._guard(row, process, one, _sampling_row(row)) if needs_processing(row.params) else one
                for row, one in zip(rows, single, strict=True)
            ]
            rows = [row for row, one in zip(rows, picked, strict=True) if one is not None]
            if not rows:
                return ()
            logits = stack_logits([one for one in picked if one is not None])
        guided = [row for row in rows if row.answer.guide is not None]
        if guided:
            masks = {row: self._guard(row, _mask, row, logits.shape[-1]) for row in guided}
            alive = [index for index, row in enumerate(rows) if row.status is Status.DECODE]
            if not alive:
                return ()
            if len(alive) < len(rows):
                rows, logits = [rows[index] for index in alive], logits[mx.array(alive)]
            logits = apply_masks(logits, [masks.get(row) for row in rows])
        try:
            flights = [_Flight.of(rows, self.sampler(logits, [_sampling_row(row) for row in rows]))]
        except Exception:  # each alone then, so that only the culprit ends
            one_by_one = [
                (row, self._guard(row, self.sampler, logits[index : index + 1], [_sampling_row(row)]))
                for index, row in enumerate(rows)
            ]
            flights = [_Flight.of([row], sampled) for row, sampled in one_by_one if sampled is not None]
        return [flight for flight in flights if self._advance(flight)]

    def _say_again(self, logits: mx.array, rows: Sequence[Row]) -> Sequence[_Flight]:
        """The tokens that rows have said before, in place of sampled ones: the caches see them again, nobody else does."""
        tokens = mx.array([row.answer.known_token for row in rows], dtype=mx.int32)
        chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        flight = _Flight.of(rows, Sampled(tokens, chosen), is_known=True)
        return [flight] if self._advance(flight) else []

    def _advance(self, flight: _Flight) -> bool:
        """Launch what was chosen, as the rows' next tokens; False if that fails."""
        if len(flight.waiting) < len(flight.rows) or self._together(flight.rows, _launch_flight, flight) is None:
            return False
        for index, row in enumerate(flight.rows):
            row.answer.advance(flight.sampled.tokens[index : index + 1].astype(mx.int32))
            if row.is_last:
                self._guard(row, self._leave, row)  # its last token needs no further step
        return True

    def _read(self, flight: _Flight) -> None:
        """Wait for a launched step and hand out its tokens."""
        if not (rows := flight.waiting):
            return
        found = self._together(rows, _values, flight)
        if found is None:
            return
        tokens, are_finite, logprobs = found
        for index, (row, losses) in enumerate(zip(flight.rows, flight.losses, strict=True)):
            if not _is_current(row, losses):  # it ended meanwhile and has no use for it
                continue
            if not are_finite[index]:
                self._end(row, "error", _not_finite(row))
                continue
            self.reuse.settle(row)
            if not flight.is_known:
                self._take(row, tokens[index], logprobs.get(index))

    def _take(self, row: Row, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append a token to its row, with the text that it completes, and end the row if that is its end."""
        answer, params = row.answer, row.params
        row.clock.first_token = row.clock.first_token or time.perf_counter()
        answer.token_ids.append(token)
        if logprobs is not None:
            answer.logprobs.append(logprobs)
        is_stop = token in params.stop_token_ids or (token in self.text.eos_token_ids and not params.ignore_eos)
        if answer.guide is not None and self._guard(row, answer.feed_guide, token, self.text.decode) is None:
            return
        is_full = answer.is_whole or len(answer.token_ids) >= answer.max_tokens
        added = self._guard(row, answer.add_text, token, is_stop, is_stop or is_full)
        if added is None:  # its text could not be decoded
            return
        text, matched = added
        if not (is_stop or is_full or matched is not None):
            self._events.append(Event(row.request_id, token, text, logprobs))
            return
        is_stop = is_stop or matched is not None or answer.is_whole
        stop_reason = matched if matched is not None else token if is_stop and not answer.is_whole else None
        saved = self._guard(row, self._save, row)
        if saved is None:  # its caches, which its user wants, could not be kept
            return
        result = row.result("stop" if is_stop else "length", stop_reason, cache=saved[0])
        self.scheduler.end()
        self._events.append(Event(row.request_id, token, text, logprobs, result))
        self._forget(row)

    # Ends

    def _end(self, row: Row, reason: FinishReason, error: BaseException | None = None) -> None:
        cache = None
        if reason == "cancelled" and row.status is Status.DECODE:
            with contextlib.suppress(Exception):  # it was cancelled, whatever comes of its caches
                (cache,) = self._save(row)
        if error is not None:
            let_go(error)
        self._events.append(Event(row.request_id, result=row.result(reason, error=error, cache=cache)))
        for sibling in row.siblings:  # their prompt is this one's
            self._events.append(Event(sibling.request_id, result=sibling.result(reason, error=error)))
            sibling.clear()
        if row.status is Status.DECODE:
            self.scheduler.end()
        self._forget(row)

    def _leave(self, row: Row) -> None:
        """Free a row's place; what is wanted of its caches goes with it."""
        if row.reuse is not None and row in self.batch and self.reuse.wants(row):
            row.reuse.left = self.batch.take(row)
        self.batch.leave(row)

    def _save(self, row: Row) -> tuple[PromptCache | None]:
        """Its answer is complete: save its caches for later requests and for its user."""
        self._leave(row)
        return (self.reuse.end(row),)

    def _forget(self, row: Row) -> None:
        del self._rows[row.request_id]
        self.admission.remove(row)
        self.prefill.remove(row)
        self.batch.leave(row)
        self.reuse.forget(row)
        row.clear()

    # What raises

    def _guard(self, row: Row, work: Callable[..., T], *arguments: Any, **how: Any) -> T | None:
        """Do one row's work; whatever it raises ends that row with an error and gives None. For want of memory it waits
        and begins again."""
        try:
            return work(*arguments, **how)
        except BaseException as error:
            if is_users_own(error):
                raise
            error = raised_in(error)
            if is_out_of_memory(error) and not isinstance(error, OutOfMemory):
                self._wait_for_memory([row], error)
            else:
                self._end(row, "error", error)
            return None

    def _together(self, rows: Sequence[Row], work: Callable[..., T], *arguments: Any) -> T | None:
        """Do work that rows share; None if it raises. Then it is nobody's fault yet, and no array that it may have touched is
        trusted: these rows, and all whose caches lie in the same arrays, begin again, and are tried apart where it was. Who
        fails apart is the culprit."""
        try:
            return work(*arguments)
        except BaseException as error:
            if is_users_own(error):
                raise
            error = raised_in(error)
            is_apart = len(rows) == 1 and (self.batch.is_apart(rows[0]) or rows[0].is_suspect)
            lost = list(dict.fromkeys([*rows, *self.batch.drop(rows)]))
            if is_out_of_memory(error):
                self._wait_for_memory(lost, error)
                return None
            for row in lost:
                if is_apart and row is rows[0]:
                    self._end(row, "error", error)
                else:
                    row.suspect()
                    self._begin_again(row, error)
            return None

    def _wait_for_memory(self, rows: Sequence[Row], error: BaseException) -> None:
        """Rows that found no memory begin again, one row fewer at a time: the last in line, by priority and age, waits until
        others have ended. Who does not fit alone, though all that was kept for later requests is gone, never will."""
        live = len({*self.prefill.rows.values(), *self.batch.rows, *rows})
        self.scheduler.run_out(live)
        if live == 1:
            self.reuse.budget.clear()
            give_back()
        for row in rows:
            if live == 1 and row.was_alone:
                self._end(row, "error", too_large(row, error))
                continue
            row.was_alone = live == 1
            self._begin_again(row, error)

    def _begin_again(self, row: Row, error: BaseException) -> None:
        """Put a row back in line, in its place by priority and age; it ends with the error if nothing is left of its prompt."""
        if row.status is Status.FINISHED:
            return
        if row.given is None:
            self._end(row, "error", error)
            return
        self.admission.remove(row)
        self.prefill.remove(row)
        self.batch.leave(row)
        row.begin_again()
        self.num_recomputed += 1
        self.admission.add(row)


def _is_current(row: Row, losses: int) -> bool:
    return row.status is not Status.FINISHED and row.losses == losses


def _launch(*arrays: mx.array) -> bool:
    mx.async_eval(list(arrays))
    return True


def _launch_flight(flight: _Flight) -> bool:
    return _launch(*flight.sampled.arrays())


def _values(flight: _Flight) -> tuple[list[int], list[bool], dict[int, TokenLogprobs]]:
    tokens = to_list(flight.sampled.tokens)
    logprobs = {} if flight.is_known else flight.sampled.read_logprobs([row.params for row in flight.rows], tokens)
    return tokens, flight.sampled.are_finite(), logprobs


def _not_finite(row: Row) -> FloatingPointError:
    at = len(row.answer.token_ids) + 1
    return FloatingPointError(
        f"the logits of token {at} are not finite (NaN or infinity): the model overflows on this prompt, or a logits "
        "processor leaves no token to choose"
    )


def _weakly(method: Callable[..., T]) -> Callable[..., T]:
    """A method that does not keep its object alive: parts may call it without a cycle that would hold the model."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> T:
        alive = reference()
        assert alive is not None
        return alive(*arguments)

    return call


def _mask(row: Row, size: int) -> np.ndarray | None:
    assert row.answer.guide is not None
    return row.answer.guide.allowed(size)


def _sampling_row(row: Row) -> SamplingRow:
    answer = row.answer
    return SamplingRow(row.params, row.seed, answer.num_sampled, answer.history, row.facts.vocabulary, answer.rules)
