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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx

from vlm_batch.arrays import as_mlx, num_bytes, stack_logits
from vlm_batch.caches import Placement
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.admission import Admission
from vlm_batch.engine.choosing import Chooser, Flight, Launched
from vlm_batch.engine.decoding import Decoder
from vlm_batch.engine.encoding import Encoder
from vlm_batch.engine.exact import Exact
from vlm_batch.engine.faults import let_go, raised_in
from vlm_batch.engine.groups import DecodeGroups
from vlm_batch.engine.memory import RowMemory
from vlm_batch.engine.pace import Pace
from vlm_batch.engine.port import AnswerText, Loading, ModelAdapter, Sampler
from vlm_batch.engine.prefill import Prefill
from vlm_batch.engine.recovery import Recovery
from vlm_batch.engine.reuse import Reuse, if_it_can_be
from vlm_batch.engine.row import Ending, Prompt, Row, Status, fork, new_row
from vlm_batch.engine.sampling import sample
from vlm_batch.engine.scheduler import Scheduler
from vlm_batch.engine.warming import forwards
from vlm_batch.policy import Policy, policy_of
from vlm_batch.records import Call
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import Event, FinishReason, SamplingParams, TokenLogprobs


class BatchGenerator:
    """Continuous batching of one model's rows.

    ``insert`` adds a request at any time; ``step`` advances every row by one token and prefills within its budget;
    ``cancel`` ends a row at any stage. A row's error ends that row alone. All calls come from one thread.

    ``text`` says how tokens read and which of them end an answer (needed for text and stop strings). ``compile_decode``
    runs decode steps as compiled graphs where the family allows it; None leaves it to the adapter.
    ``reuse`` decides what rows take over from earlier ones; by default only what a request brings. ``kv`` says how keys
    and values are quantised; by default they are not. ``sampler`` chooses the tokens, by default ``sampling.sample``.
    ``policy`` are its settings, by default the device's. ``exact`` keeps every row's numbers, to the last bit,
    a function of its request; ``reuse`` must have the same.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        *,
        text: AnswerText | None = None,
        policy: Policy | None = None,
        compile_decode: bool | None = None,
        reuse: Reuse | None = None,
        kv: KVQuantisation | None = None,
        sampler: Sampler = sample,
        exact: Exact | None = None,
    ) -> None:
        self.kv = kv
        self.reuse = reuse or Reuse(adapter, exact=exact)
        if exact != self.reuse.exact:
            raise ValueError("what is reused is not what is computed here: reuse and generator need the same exact")
        if exact is not None and compile_decode:
            raise ValueError(
                "compile_decode: graphs are made of steps that come back, and may round otherwise; not exact"
            )
        self.text = text or AnswerText()
        policy = policy or policy_of({})
        placement = Placement(policy.placement)
        if exact is not None:
            policy = exact.config(policy)
            adapter = adapter.with_products(dict(exact.products))
        self.adapter = adapter
        call = Call(is_fixed=exact is not None)
        self._decoder = Decoder(
            adapter, call, compile_decode=compile_decode if exact is None or exact.graphs else False
        )
        self.scheduler = Scheduler(policy)
        self._placement = placement
        self._empty_batch = partial(DecodeGroups, placement, self.scheduler.most_rows, exact, few_bits=policy.few_bits)
        self.batch = self._empty_batch()
        self._pace = Pace(policy)
        pictures = None if exact is None else exact.pictures
        encode_call = replace(call, most_patches=policy.most_patches, pictures=pictures)
        self.encoder = Encoder(adapter, self.reuse, policy, kv, encode_call)
        self.memory = RowMemory(policy.max_bytes, self.batch.places_for if placement is Placement.SLAB else None)
        itself: BatchGenerator = weakref.proxy(self)  # parts that held it would make a circle, and keep the model alive
        self.recovery = Recovery(itself, self.batch, self.scheduler, self.reuse, self.memory)
        guard = self.recovery.guard
        self.chooser = Chooser(sampler, self.recovery, lambda row: itself._leave(row))
        layout = placement if exact is None else exact.layout
        keeps_rows = layout is Placement.ROWS
        self.prefill = Prefill(adapter, self.reuse, policy, kv, guard, exact, keeps_rows=keeps_rows)
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
        self._launched = Launched()
        self._forks: list[tuple[Row, mx.array]] = []  # further answers to prefilled prompts, with those prompts' logits
        self._events: list[Event] = []

    def warm_up(self) -> Iterator[None]:
        """Run a forward of one of the shapes that requests will bring for each ``next``; nothing is left of it. Where rows keep
        caches of their own, no shape is new, and there are none."""
        if self._placement is Placement.ROWS:
            return iter(())
        places, sampler = self.scheduler.num_places, self.chooser.sampler
        return forwards(self.adapter, self.prefill, self._decoder, self._empty_batch, sampler, places)

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
        """Queue a request: ``inputs`` is its processor's output (input_ids (1, L), pixel_values, ...), mlx arrays, which are
        copied to the host to begin again from, or numpy's, which stay with the request (a view with all of its array) and
        must not be changed.

        ``cache`` is the state of the prompt's beginning, to be continued; ``return_cache`` asks for the state at the
        end. Raises ValueError for an id in use.
        """
        row = new_row(
            request_id,
            Prompt(inputs=as_mlx(inputs)),
            params or SamplingParams(),
            text=self.text,
            priority=priority,
            cache=cache,
            return_cache=return_cache,
            given=inputs,
        )
        self.add(row)

    def add(self, row: Row) -> None:
        """Queue a row; one that has a question waits until ``take_in``. Raises ValueError for an id in use."""
        if row.request_id in self._rows:
            raise ValueError(f"request id {row.request_id!r} is already in use")
        self._rows[row.request_id] = row
        self.admission.add(row)

    def take_in(self, row: Row, loading: Loading) -> None:
        """Take a row whose loading is done: it waits for a place, or ends with the error that loading raised."""
        if row.status is not Status.FINISHED:
            self.recovery.guard(row, self.admission.take_in, row, loading)

    def fail(self, row: Row, error: BaseException) -> None:
        """End a row with an error. Its end comes with the next step."""
        self._end(row, "error", error)

    def cancel(self, request_id: str) -> bool:
        """End a row at whatever stage it is; False if there is none of that id. Its end comes with the next step."""
        row = self._rows.get(request_id)
        if row is None:
            return False
        self._end(row, "cancelled")
        return True

    def fail_all(self, error: BaseException) -> list[Event]:
        """End every row with an error, and forget what was launched; their ends, and what was to be told before."""
        self._launched = Launched()
        self.chooser.held, self._forks = (), []
        error = raised_in(error)
        for row in list(self._rows.values()):
            self._end(row, "error", error)
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Forget every row, without events."""
        self._launched = Launched()
        self.chooser.held, self._forks = (), []
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
        before, self._launched = self._launched, Launched()
        self.recovery.set_apart()
        self.recovery.keep_within_memory()
        rows = [row for row in self.batch.rows if not row.is_last]
        if rows:
            self._launched.decode = self._launch(rows)
        self._await(before)
        self._launched.guided = self.chooser.choose_held()
        joined = self._join_forks()
        first = [row for row, _ in self._forks]  # they have what they need, and nobody takes their room
        encoding = self.admission.admit([*self.batch.rows, *first], is_decoding=bool(rows))
        prefilling = self.prefill.views(begin)
        longest = max((row.waited for row in prefilling), default=0.0)
        budget = self._pace.budget(bool(rows), self.prefill.num_pending, longest, encoding)
        plan = self.scheduler.plan(prefilling, budget)
        done, self._launched.chunks = self.prefill.run(plan)
        joined += self._join_all(done)
        self._launched.joined = self.chooser.choose_first(joined)
        if rows:
            seconds, tokens = time.perf_counter() - begin - encoding, sum(chunk.end - chunk.start for chunk in plan)
            self._pace.record(seconds, tokens)
            self.scheduler.record(len(rows), seconds, tokens, are_waiting=bool(self.admission.num_prepared))
        if not self._is_active:
            self.reuse.settle_ended()
        events, self._events = self._events, []
        return events

    def _await(self, launched: Launched) -> None:
        """Wait for a step's work, in its order on the device, and hand out its tokens."""
        self.reuse.settle_ended()
        for flight in (*launched.decode, *launched.guided):
            self._read(flight)
        for row, arrays in launched.chunks.items():
            if row.status is not Status.FINISHED:
                self.recovery.guard(row, mx.eval, arrays)
            arrays.clear()  # the next chunk is written into what they are cut out of, if nobody holds them
        for flight in launched.joined:
            self._read(flight)

    def _join_forks(self) -> list[tuple[Row, mx.array]]:
        """Give places to further answers of prompts that are prefilled, with their logits (1, V): they go before all others."""
        self._forks = [(row, logits) for row, logits in self._forks if row.status is not Status.FINISHED]
        if not self._forks:
            return []
        live = [*self.batch.rows, *self.prefill.rows.values()]
        count = 0
        for row, _ in self._forks[: self.scheduler.num_free(len(live))]:
            if live and not self.memory.fits(row, live):
                break
            live.append(row)
            count += 1
        taken, self._forks = self._forks[:count], self._forks[count:]
        return self._join_all(taken)

    def _join_all(self, done: Sequence[tuple[Row, mx.array]]) -> list[tuple[Row, mx.array]]:
        """Move rows whose prompts are done, with those prompts' logits, to the decoding batch; those that could be."""
        return [
            (row, logits)
            for left, (row, logits) in zip(reversed(range(len(done))), done, strict=True)
            if self.recovery.guard(row, self._join, row, logits, left)
        ]

    def _join(self, row: Row, logits: mx.array, others: int) -> bool:
        """Move a row to the decoding batch, which ``others`` will join at once; its embeddings and features are freed here."""
        for sibling in fork(row) if row.siblings else ():
            self._rows[sibling.request_id] = sibling
            self._forks.append((sibling, logits))
        prompt, row.prompt = row.prompt, None
        assert prompt is not None and prompt.cache is not None
        self.prefill.remove(row)
        self.memory.learn(prompt.cache, row.facts.length)
        self.batch.join(row, prompt.cache, others=others, apart=row.is_suspect)
        return True

    def _launch(self, rows: Sequence[Row]) -> Sequence[Flight]:
        """Decode one token for every live row and sample it, without waiting for the result."""
        self.chooser.held = ()
        wanted = set(rows)
        shared: list[tuple[list[Row], mx.array]] = []
        flights: list[Flight] = []
        for group in self.batch.groups:
            live = [row for row in group.rows if row in wanted]
            logits = self.recovery.together(live, self._decoder.logits, group, live) if live else None
            if logits is None:
                continue
            for row in live:
                row.answer.num_fed = row.answer.num_sampled
            if self.batch.is_apart(live[0]):
                flights += self.chooser.choose(logits, live)
            else:
                shared.append((live, logits))
        if shared:
            logits = shared[0][1] if len(shared) == 1 else stack_logits([logits for _, logits in shared])
            flights += self.chooser.choose(logits, [row for live, _ in shared for row in live])
        return flights

    def _read(self, flight: Flight) -> None:
        """Wait for a launched step and hand out its tokens."""
        if not (rows := flight.waiting):
            return
        found = self.recovery.together(rows, flight.values)
        if found is None:
            return
        tokens, are_finite, logprobs = found
        for index, row in enumerate(flight.rows):
            if not flight.is_for(index):  # it ended meanwhile and has no use for it
                continue
            if not are_finite[index]:
                self._end(row, "error", _not_finite(row))
                continue
            self.reuse.settle(row)
            if not flight.is_known:
                self._take(row, tokens[index], logprobs.get(index))
            elif row.answer.ending is not None and row.answer.known_token is None:
                self._finish(row, row.answer.ending)

    def _take(self, row: Row, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append a token to its row, with the text that it completes, and end the row if that is its end."""
        answer = row.answer
        row.clock.first_token = row.clock.first_token or time.perf_counter()
        answer.token_ids.append(token)
        if logprobs is not None:
            answer.logprobs.append(logprobs)
        is_stop = token in answer.end_ids
        if answer.guide is not None and self.recovery.guard(row, answer.feed_guide, token, self.text.decode) is None:
            return
        is_full = answer.is_whole or len(answer.token_ids) >= answer.max_tokens
        added = self.recovery.guard(row, answer.add_text, token, is_stop, is_stop or is_full)
        if added is None:  # its text could not be decoded
            return
        text, matched = added
        if not (is_stop or is_full or matched is not None):
            self._events.append(Event(row.request_id, token, text, logprobs))
            return
        is_stop = is_stop or matched is not None or answer.is_whole
        stop_reason = matched if matched is not None else token if is_stop and not answer.is_whole else None
        self._finish(row, Ending(token, text, logprobs, "stop" if is_stop else "length", stop_reason))

    def _finish(self, row: Row, ending: Ending) -> None:
        """End a row whose answer is complete. Where its user wants its caches and there was no memory for them, it begins
        again, and ends once it has said again what it had said."""
        row.answer.ending = ending
        saved = self.recovery.guard(row, self._save, row)
        if saved is None:
            return
        result = row.result(ending.reason, ending.stop_reason, cache=saved[0])
        self.scheduler.end()
        self._events.append(Event(row.request_id, ending.token, ending.text, ending.logprobs, result))
        self._forget(row)

    # Rows that begin again

    def live(self) -> list[Row]:
        """The rows that have places, the first in line first."""
        return sorted(dict.fromkeys([*self.batch.rows, *self.prefill.rows.values()]), key=self.admission.urgency)

    def put_back(self, row: Row) -> None:
        """Take a row's place from it, and put it back in line to begin again."""
        self.admission.remove(row)
        self.prefill.remove(row)
        self.batch.leave(row)
        row.begin_again()
        self.admission.add(row)

    # Ends

    def _end(self, row: Row, reason: FinishReason, error: BaseException | None = None) -> None:
        cache = None
        if reason == "cancelled" and row.status is Status.DECODE:
            with contextlib.suppress(Exception):  # it was cancelled, whatever comes of its caches
                (cache,) = self._save(row)
        if error is not None:
            let_go(error)
        if (ending := row.answer.ending) is not None:
            self._events.append(Event(row.request_id, ending.token, ending.text, ending.logprobs))
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
            with if_it_can_be(row.reuse):
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


def _not_finite(row: Row) -> FloatingPointError:
    at = len(row.answer.token_ids) + 1
    return FloatingPointError(
        f"the logits of token {at} are not finite (NaN or infinity): the model overflows on this prompt, or a logits "
        "processor leaves no token to choose"
    )
