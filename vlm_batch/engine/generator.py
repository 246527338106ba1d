"""The engine's step, on one thread: decode, read, encode, prefill, join.

A step launches a decode forward on unread tokens, then reads the step before: the device works while Python runs. A stop
token wastes a column.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlm_batch.arrays import as_mlx
from vlm_batch.caches import Placement
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.admission import Admission
from vlm_batch.engine.choosing import Flight, choose
from vlm_batch.engine.decoding import Decoder
from vlm_batch.engine.drafts import NO_DRAFTS, NoDrafts
from vlm_batch.engine.groups import DecodeGroups
from vlm_batch.engine.limit import Capacity
from vlm_batch.engine.memory import RowMemory
from vlm_batch.engine.pace import Pace
from vlm_batch.engine.planning import Planner
from vlm_batch.engine.pressure import MemoryGuard
from vlm_batch.engine.retry import Retry
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Prompt, Row, Stage, new_row
from vlm_batch.engine.rows import Rows, at_ready, without_place
from vlm_batch.engine.runner import Runner
from vlm_batch.engine.sampling import Sampler, sample
from vlm_batch.engine.schedule import DecodePlan
from vlm_batch.engine.shapes import FreeShapes, Shapes
from vlm_batch.engine.telling import Telling
from vlm_batch.engine.text import AnswerText
from vlm_batch.engine.trial import Trial
from vlm_batch.engine.warming import forwards
from vlm_batch.engine.work import Part, Work, attempt_each
from vlm_batch.policy import Policy, policy_of
from vlm_batch.records import Terms
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import Event, SamplingParams

if TYPE_CHECKING:
    from vlm_batch.adapters.base import Adapter
    from vlm_batch.inputs.loaders import Loading


class BatchGenerator:
    """Continuous batching of one model's rows. All calls come from one thread.

    Args:
        text: decodes tokens, for text and stop strings.
        compile_decode: None leaves it to the adapter.
        reuse: states of earlier rows; by default a request's own cache.

    Raises:
        ValueError: ``reuse`` has other shapes.
    """

    def __init__(
        self,
        adapter: Adapter,
        *,
        text: AnswerText | None = None,
        policy: Policy | None = None,
        compile_decode: bool | None = None,
        reuse: Reuse | None = None,
        kv: KVQuantisation | None = None,
        sampler: Sampler = sample,
        shapes: Shapes | None = None,
        drafts: NoDrafts = NO_DRAFTS,
    ) -> None:
        policy = policy or policy_of(
            {} if shapes is None else {"placement": shapes.layout.value}
        )
        shapes = shapes or FreeShapes.of(adapter, kv, policy)
        self.reuse = reuse or Reuse(adapter, shapes=shapes)
        if shapes.settings != self.reuse.shapes.settings:
            raise ValueError(
                "what is reused is not what is computed here: reuse and generator need the same shapes"
            )
        policy, self.adapter = shapes.limited(policy), shapes.adapter(adapter)
        self.shapes = shapes
        self.text = text or AnswerText()
        self.policy = policy
        self.capacity = Capacity(policy)
        self.sampler = sampler
        graphs = shapes.graphs(compile_decode)
        self._decoder = Decoder(
            self.adapter,
            shapes.decode_call(),
            compile_decode=graphs,
            keeps_hidden=drafts.model is not None,
        )
        batch = DecodeGroups(shapes, self.capacity.most_rows)
        self._pace = Pace(policy)
        self.trial = Trial(self.adapter, kv, shapes)
        more = 0 if drafts.model is None else drafts.model.bytes_per_token
        self.memory = RowMemory(policy.max_bytes, batch.slabs, more)
        self.rows = Rows(
            batch, self.capacity, self.memory, self.reuse, policy.ageing_seconds
        )
        self.admission = Admission(self.rows, policy, self.capacity, self.memory)
        self.retry = Retry(self.rows, self.capacity, self.reuse.budget)
        self.guard = MemoryGuard(
            self.rows, self.capacity, self.retry, self.reuse.budget, policy.least_free
        )
        self.drafts = drafts
        self.runner = Runner(
            self.adapter,
            self.rows,
            self.reuse,
            self._decoder,
            policy.max_prompt_tokens,
            kv,
            shapes,
            self.drafts,
            self.memory,
            self._pace,
        )
        self.telling = Telling(
            self.rows, self.retry, self.reuse, self.text, self.drafts
        )
        self._planner = Planner(
            self.rows, self.runner, self.memory, self.reuse, self._pace, policy
        )
        # in the device's order; the next step reads it
        self._launched: list[Flight | Part] = []
        # set by any thread: a step begins no further picture or prompt
        self.is_ending = False
        # whether this step has read or launched something
        self._has_worked = False
        self._has_decoded = False  # in the last step
        # clients from whom something has come since the step began
        self.callers: Callable[[], Sequence[int]] = tuple

    def warm_up(self) -> Iterator[None]:
        """Run a made-up forward of the next shape for each ``next``."""
        if self.shapes.layout is Placement.ROWS:
            return iter(())
        return forwards(
            self.trial, self._decoder, self.sampler, self.capacity.num_places
        )

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
        """Queue a request. Raises ValueError for an id in use.

        Args:
            inputs: a processor's output: input_ids (1, L), ... MLX arrays are copied to the host; NumPy arrays must not
                change.
            cache: state of the prompt's beginning.
        """
        row = new_row(
            request_id,
            Prompt(inputs=as_mlx(inputs)),
            params or SamplingParams(),
            text=self.text,
            terms=Terms(priority, returns_cache=return_cache),
            cache=cache,
            given=inputs,
        )
        self.rows.add(row)

    def take_in(self, row: Row, loading: Loading) -> None:
        """Queue or end a row whose loading is done."""
        if not row.has_ended:
            self.retry.attempt(row, self.admission.take_in, row, loading)

    def cancel(self, request_id: str) -> bool:
        """End a row at any stage; the next step has its event. False if there is none."""
        row = self.rows.ledger.get(request_id)
        if row is None:
            return False
        self.rows.end(row, "cancelled")
        return True

    def fail_all(self, error: BaseException) -> list[Event]:
        """End every row with an error. Returns all events."""
        self._launched = []
        for row in self.rows.ledger.at(*Stage):
            self.rows.end(row, "error", error)
        return self.rows.tell()

    def reset(self) -> None:
        """Forget every row, without an event."""
        self._launched = []
        for row in self.rows.ledger.at(*Stage):
            self.rows.forget(row)
        self.rows.tell()

    @property
    def has_work(self) -> bool:
        return bool(self.rows.events) or self.rows.is_active

    @property
    def is_waiting(self) -> bool:
        """Whether the last step had others rest for a row that is still being prepared."""
        return self._planner.is_still and not self._has_worked

    # A step

    def step(self) -> list[Event]:
        """Run a step. Returns its events."""
        begin = time.perf_counter()
        self.guard.step()
        before, self._launched = self._launched, []
        self._has_worked = bool(before)
        plan = self._planner.decode()
        self._give_way(plan)
        self.telling.begin()
        at_once: list[Part] = []
        held: list[Part] = []
        if not plan.is_still:
            before = self._draft(before)
            at_once, held = self._decode()
        num_decoding = 0 if plan.is_still else len(self.rows.batch)
        self._choose(at_once)
        self.telling.read(before)
        self._choose(self.telling.in_time(held))
        self._read_last()
        joined, encoding = self._fill_places()
        chunks = self._planner.chunks(begin, encoding)
        prefilled, num_tokens = self._prefill(chunks)
        self._choose(joined + self._join(prefilled))
        others = [*joined, *chunks]
        self._time_drafts(is_alone=not (plan.is_still or others or encoding))
        self._record(begin, encoding, num_decoding, num_tokens)
        return self._tell()

    def _draft(self, before: list[Flight | Part]) -> list[Flight | Part]:
        """Let rows draft, if it pays. That needs their last tokens, so what is launched is read; returns what is not."""
        batch, patience = self.rows.batch, self.telling.patience
        if not self.drafts.wants(batch.groups):
            return before
        self.telling.read(before)
        self.telling.take_untold()
        self.retry.settle_all(self.drafts.propose(batch, patience))
        return []

    def _give_way(self, plan: DecodePlan) -> None:
        """Take places from rows."""
        for row in self._rows_of(plan.outgrown):
            self.retry.outgrow(row)
        self._refuse(plan.refused)
        for one in plan.yields:
            row = self.rows.ledger[one.request_id]
            row.gave_way |= one.is_for_due
            self.retry.attempt(row, self.rows.park, row)

    def _decode(self) -> tuple[list[Part], list[Part]]:
        """Launch the forwards. Returns the parts to choose from at once, and once tokens are read."""
        batch = self.rows.batch
        for row in batch.misplaced():
            self.retry.attempt(row, batch.move, row)
        found: dict[bool, list[Part]] = {False: [], True: []}
        for group in batch.groups:
            self._has_worked = True
            parts = attempt_each(group.rows, self.runner.decode, group)
            for part in self.retry.made(parts):
                found[part.is_held].append(part)
        return found[False], found[True]

    def _choose(self, parts: Sequence[Part]) -> None:
        """Launch the choice of tokens. A row that needs no further forward leaves its place."""
        if not parts:
            return
        for flight in self.retry.made(choose(parts, self.sampler)):
            self._launched.append(flight)
            for row in flight.advance():
                self.retry.attempt(row, self.rows.leave, row)

    def _read_last(self) -> None:
        """Read the last tokens before prompts begin, if nobody waits for a next one."""
        if self._launched and not self.rows.is_decoding:
            launched, self._launched = self._launched, []
            self.telling.read(launched)

    # Rows on their way to a place

    def _fill_places(self) -> tuple[list[Part], float]:
        """Encode the first rows in line and place those that fit. Returns parts that joined, and seconds of encoding."""
        begin, seconds = time.perf_counter(), 0.0
        joined: list[Part] = []
        self.runner.encoding.step()
        while not self.is_ending:
            self._look_who_came()
            plan = self._planner.prompts(seconds)
            for row in self._rows_of(plan.placed):
                self.rows.place(row)
            joined += self._join(self._rows_of(plan.joining))
            self._refuse(plan.refused)
            if not plan.encoded:
                break
            may_go_on = self._encode(self._rows_of(plan.encoded))
            seconds = time.perf_counter() - begin
            if not may_go_on:
                break
        return joined, seconds

    def _encode(self, rows: Sequence[Row]) -> bool:
        """Encode the first rows, as many as share a call. Returns whether others may be in this step."""
        self._has_worked = True
        recomputed = self.retry.num_recomputed
        for part in self.retry.made(self.runner.encode(rows)):
            self.reuse.take_continued(part.rows[0])
            self.rows.ledger.move(part.rows[0], Stage.ENCODED)
        return self.retry.num_recomputed == recomputed

    def _look_who_came(self) -> None:
        """Have others rest for them: they would wait for the next picture or prompt. A step does one thing at least."""
        if self._has_worked:
            self._planner.rest_for(self.callers())

    def _prefill(self, plan: Sequence[Work]) -> tuple[list[Row], int]:
        """Launch chunks. Returns the rows whose prompts end, and the tokens that were launched."""
        last: dict[Row, Part] = {}  # holding an earlier chunk's arrays would copy them
        num_tokens = 0
        works = plan if len(plan) < 2 else self.runner.group(plan)
        for work in works:
            if self.is_ending:
                break
            self._look_who_came()
            if self._planner.rests(work):
                continue
            self._has_worked = True
            for part in self.retry.made(self.runner.prefill(work)):
                row = part.rows[0]
                last[row] = part
                num_tokens += row.prompt.prefilled - work.begin
        self._launched += last.values()
        ready: list[Row] = []
        for row, part in last.items():
            if part.logits is not None:
                siblings = row.siblings
                self.retry.attempt(row, self.rows.end_prefill, row, part.logits)
                ready += [*without_place(siblings), row]
        return at_ready(ready), num_tokens

    def _join(self, rows: Sequence[Row]) -> list[Part]:
        """Move ready rows to the batch. Returns the parts of those whose next token is to be chosen."""
        joined: list[Part] = []
        left = sum(row.needs_place for row in rows)
        for row in rows:
            logits = row.prompt.logits
            left -= row.needs_place
            self.retry.attempt(row, self.rows.join, row, left)
            # one that was parked has chosen; one that could not join is passed over where tokens are chosen
            if logits is not None:
                joined.append(Part([row], logits))
        return joined

    # The end of a step

    def _time_drafts(self, *, is_alone: bool) -> None:
        """Have a forward timed that had the step for itself."""
        groups = self.rows.batch.groups
        is_one = is_alone and len(groups) == 1
        self.drafts.launched(groups[0].num_positions if is_one else 0)

    def _record(
        self, begin: float, encoding: float, num_decoding: int, tokens: int
    ) -> None:
        """Record what the step took. Behind one without a forward it reads nothing, or what was launched meanwhile."""
        has_decoded, self._has_decoded = self._has_decoded, num_decoding > 0
        tokens += self._pace.end_step()
        if not num_decoding:
            self.capacity.pause()
            return
        seconds = time.perf_counter() - begin - encoding
        if has_decoded:
            self.telling.patience.end(seconds)
            self._pace.record(seconds, tokens)
        are_waiting = self.rows.ledger.num(Stage.PREPARED, Stage.ENCODED) > 0
        self.capacity.record(num_decoding, seconds, tokens, are_waiting=are_waiting)

    def _tell(self) -> list[Event]:
        """Return the step's events. Where no step may follow, nothing stays launched of rows that have ended."""
        if not self.rows.is_active:
            self._launched = []
            self.reuse.store_ended()
        return self.rows.tell()

    def _refuse(self, request_ids: Sequence[str]) -> None:
        """End rows that do not fit into memory alone."""
        for row in self._rows_of(request_ids):
            self.retry.attempt(row, self.memory.check, row)

    def _rows_of(self, request_ids: Sequence[str]) -> list[Row]:
        """Return the rows that are still there."""
        found = map(self.rows.ledger.get, request_ids)
        return list(filter(None, found))
