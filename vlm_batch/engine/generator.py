"""The engine's step, on one thread: decode, read, encode, prefill, join.

A step launches a decode forward on unread tokens, then reads the step before: the device works while Python runs. A stop
token wastes a column.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.arrays import as_mlx, num_bytes
from vlm_batch.caches import Placement
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.admission import Admission
from vlm_batch.engine.choosing import Flight, choose
from vlm_batch.engine.decoding import Decoder
from vlm_batch.engine.drafts import Drafts
from vlm_batch.engine.groups import DecodeGroups
from vlm_batch.engine.memory import RowMemory
from vlm_batch.engine.pace import Pace
from vlm_batch.engine.port import AnswerText, Loading, ModelAdapter, Sampler
from vlm_batch.engine.retry import Retry
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Prompt, Row, Status, new_row
from vlm_batch.engine.rows import Rows
from vlm_batch.engine.runner import Runner, picture_bytes
from vlm_batch.engine.sampling import sample
from vlm_batch.engine.scheduler import Scheduler
from vlm_batch.engine.shapes import FreeShapes, Shapes
from vlm_batch.engine.telling import Telling
from vlm_batch.engine.trial import Trial
from vlm_batch.engine.warming import forwards
from vlm_batch.engine.work import Failed, Part, Work, attempt
from vlm_batch.policy import Policy, policy_of
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import Event, SamplingParams

#: Steps until the line is looked at again, though nobody came or went: its order goes by time, too.
LOOK_AGAIN = 16


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
        adapter: ModelAdapter,
        *,
        text: AnswerText | None = None,
        policy: Policy | None = None,
        compile_decode: bool | None = None,
        reuse: Reuse | None = None,
        kv: KVQuantisation | None = None,
        sampler: Sampler = sample,
        shapes: Shapes | None = None,
        drafts: Drafts | None = None,
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
        self.scheduler = Scheduler(policy)
        self.sampler = sampler
        model = None if drafts is None else drafts.model
        graphs = shapes.graphs(compile_decode)
        self._decoder = Decoder(
            self.adapter,
            shapes.decode_call(),
            compile_decode=graphs,
            keeps_hidden=model is not None,
        )
        batch = DecodeGroups(shapes, self.scheduler.most_rows)
        self._pace = Pace(policy)
        self.trial = Trial(self.adapter, kv, shapes)
        more = 0 if model is None else model.bytes_per_token
        self.memory = RowMemory(policy.max_bytes, batch.slabs, more)
        self.rows = Rows(
            Admission(self.scheduler, self.memory), batch, self.scheduler, self.reuse
        )
        self.retry = Retry(self.rows, self.scheduler, self.memory, self.reuse.budget)
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
        )
        # in the device's order; the next step reads it
        self._launched: list[Flight | Part] = []
        # who was there when nothing was left to be encoded or placed
        self._at_rest: tuple[int, ...] = ()
        self._rested = 0  # steps since then
        # set by any thread: a step begins no further picture or prompt
        self.is_ending = False
        self.telling = Telling(
            self.rows, self.retry, self.reuse, self.text, self.drafts
        )

    def warm_up(self) -> Iterator[None]:
        """Run a made-up forward of the next shape for each ``next``."""
        if self.shapes.layout is Placement.ROWS:
            return iter(())
        return forwards(
            self.trial, self._decoder, self.sampler, self.scheduler.num_places
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
            priority=priority,
            cache=cache,
            return_cache=return_cache,
            given=inputs,
        )
        self.rows.add(row)

    def take_in(self, row: Row, loading: Loading) -> None:
        """Queue or end a row whose loading is done."""
        if row.status is not Status.FINISHED:
            self.retry.attempt(row, self.rows.waiting.take_in, row, loading)

    def cancel(self, request_id: str) -> bool:
        """End a row at any stage; the next step has its event. False if there is none."""
        row = self.rows.by_id.get(request_id)
        if row is None:
            return False
        self.rows.end(row, "cancelled")
        return True

    def fail_all(self, error: BaseException) -> list[Event]:
        """End every row with an error. Returns all events."""
        self._launched, self.telling.untold, self.rows.forks = [], {}, {}
        for row in list(self.rows.by_id.values()):
            self.rows.end(row, "error", error)
        return self.rows.tell()

    def reset(self) -> None:
        self._launched, self.telling.untold, self.rows.forks = [], {}, {}
        for row in list(self.rows.by_id.values()):
            self.rows.forget(row)
        self.rows.tell()

    @property
    def input_bytes(self) -> int:
        """Bytes kept to recompute rows from."""
        return sum(num_bytes(row.given) for row in tuple(self.rows.by_id.values()))

    @property
    def has_work(self) -> bool:
        return bool(self.rows.events) or self.rows.is_active

    # A step

    def step(self) -> list[Event]:
        begin, rows = time.perf_counter(), self.rows
        before, self._launched = self._launched, []
        rows.note_placed()
        self.telling.patience.begin(
            beside_others=any(row.answer.guide is None for row in rows.batch.rows)
        )
        if self.drafts is not None and self.drafts.wants(rows.batch.groups):
            before = self._draft(self.drafts, before)
        for row in rows.batch.misplaced():
            self.retry.attempt(row, rows.batch.move, row)
        self.retry.keep_within_memory()
        groups, num_decoding = rows.batch.groups, len(rows.batch)
        decoded: list[Part] = []
        for group in groups:
            decoded += self.retry.settled(
                attempt(group.rows, self.runner.decode, group, is_shared=True)
            )
        if len(rows.waiting.asked) > 1:
            decoded = self._share_places(decoded)
        held = [part for part in decoded if part.is_held]
        self._choose([part for part in decoded if not part.is_held])
        self.telling.read(before)
        if self.telling.untold:
            self.telling.take_untold()
        if held:
            self._choose(self._in_time(held))
        joined = self._join(self._next_forks()) if rows.forks else []
        is_decoding = bool(rows.batch or self.telling.untold)
        # nobody waits for a next token: the last ones are told first
        if groups and not is_decoding:
            launched, self._launched = self._launched, []
            self.telling.read(launched)
        encoding = self._encode(is_decoding)
        prefilling = self.runner.views(begin)
        longest = max((row.waited for row in prefilling), default=0.0)
        budget = self._pace.budget(is_decoding, rows.num_pending, longest, encoding)
        plan = self.scheduler.plan(prefilling, budget)
        self._choose(joined + self._join(self._prefill(plan)))
        if self.drafts is not None:
            is_alone = len(groups) == 1 and not plan and not encoding and not joined
            self.drafts.launched(
                rows.batch.groups[0].num_positions
                if is_alone and rows.batch.groups
                else 0
            )
        if num_decoding:
            seconds = time.perf_counter() - begin - encoding
            tokens = sum(work.end - work.begin for work in plan)
            self.telling.patience.end(seconds)
            self._pace.record(seconds, tokens)
            are_waiting = bool(rows.waiting.prepared)
            self.scheduler.record(
                num_decoding, seconds, tokens, are_waiting=are_waiting
            )
        # no step may follow: nothing stays launched of rows that have ended
        if not rows.is_active:
            self._launched = []
            self.reuse.store_ended()
        return rows.tell()

    def _draft(
        self, drafts: Drafts, before: Sequence[Flight | Part]
    ) -> list[Flight | Part]:
        self.telling.read(before)
        self.telling.take_untold()
        for group in self.rows.batch.groups:
            if isinstance(
                failed := attempt(group.rows, group.lay_out, is_shared=True), Failed
            ):
                self.retry.settle(failed)
        begin, patience = time.perf_counter(), self.telling.patience
        until = begin + patience.left
        drafts.begin(self.rows.batch.groups)
        for group in self.rows.batch.groups:
            found = attempt(
                group.rows,
                drafts.plan,
                group,
                lambda: until - time.perf_counter(),
                is_shared=True,
            )
            if isinstance(found, Failed):
                self.retry.settle(found)
        patience.spend(time.perf_counter() - begin)
        return []

    def _choose(self, parts: Sequence[Part]) -> None:
        """Launch the choice of tokens; suspects apart."""
        if not parts:
            return
        if self.drafts is not None and parts[0].logits is not None:
            self.drafts.num_words = parts[0].logits.shape[-1]
        shared = [part for part in parts if not part.rows[0].is_suspect]
        for those in ([shared] if shared else []) + [
            [part] for part in parts if part.rows[0].is_suspect
        ]:
            rows = [row for part in those for row in part.rows]
            for flight in self.retry.settled(
                attempt(rows, choose, those, self.sampler, is_shared=True)
            ):
                tokens = flight.sampled.tokens.astype(mx.int32)
                for index, row in enumerate(flight.rows):
                    if flight.is_for(index) and not row.answer.drafter.ahead:
                        row.answer.advance(tokens, index)
                        # no further forward
                        if row.answer.num_sampled >= row.answer.max_tokens:
                            self.retry.attempt(row, self.rows.leave, row)
                self._launched.append(flight)

    def _in_time(self, parts: Sequence[Part]) -> list[Part]:
        """Park rows with late masks. Returns the others' parts."""
        late = self.telling.untold
        for part in parts:
            if part.rows[0] in late and part.rows[0].status is Status.DECODE:
                self.retry.attempt(
                    part.rows[0], self.rows.park, part.rows[0], part.logits
                )
        return [part for part in parts if part.rows[0] not in late]

    # Rows on their way to a place

    def _encode(self, is_decoding: bool) -> float:
        """Encode the first rows and place those that fit. Returns seconds."""
        begin = time.perf_counter()
        rows = self.rows
        waiting = self.rows.waiting
        runner = self.runner
        runner.encoding.step()
        if not waiting.prepared:
            return 0.0
        free = self._num_free()
        here = (waiting.changes, len(rows.batch), len(rows.prefilling), len(rows.forks))
        self._rested += 1
        if not free and here == self._at_rest and self._rested < LOOK_AGAIN:
            return 0.0
        live = [*rows.prefilling.values(), *rows.batch.rows, *rows.forks]
        whole = self._line()
        # rows whose prefixes others may wait for
        others = [
            *rows.prefilling.values(),
            *(row for row in whole if row.prompt.encoded is not None),
        ]
        ahead = [row for row in whole[free:] if row.request_id in waiting.prepared]
        line = [*whole[:free], *ahead[: self.scheduler.config.encode_ahead]]
        is_at_rest = not free and all(row.prompt.encoded is not None for row in line)
        self._at_rest, self._rested = here if is_at_rest else (), 0
        has_begun = False
        for place, (row, losses) in enumerate([(row, row.losses) for row in line]):
            if self.is_ending:
                break
            if (
                row.losses != losses
                or row.status is Status.FINISHED
                or row.request_id not in waiting.prepared
            ):
                continue  # it failed in a call with another, or is a fork
            if row.prompt.encoded is None:
                if others and self.reuse.waits_for(row, others):
                    continue  # a row encoded in this step has its prefix
                if live and not runner.encoding.fits(picture_bytes(row)):
                    # no row overtakes it: it is encoded once the others have ended
                    break
                seconds = time.perf_counter() - begin
                most = self.scheduler.most_encoded(
                    is_decoding, seconds, rows.num_pending, has_begun=has_begun
                )
                if not most or (has_begun and place >= free):
                    break
                those = [row]  # a row that ran out of memory alone stays alone
                if most > 1 and not row.was_alone:
                    unencoded = [
                        other for other in line[place:] if other.prompt.encoded is None
                    ]
                    those = self.reuse.new_ones(unencoded, others, most)
                others += [
                    part.rows[0] for part in self.retry.settled(runner.encode(those))
                ]
                has_begun = True
            if place >= free or row.prompt.encoded is None:
                continue  # encoded ahead, or failed
            if self.memory.fits(row, live):
                live.append(row)
                rows.place(row)
            elif live:
                free = 0  # no row overtakes it
            else:
                self.retry.attempt(row, self.memory.check, row)
        return time.perf_counter() - begin

    def _next_forks(self) -> list[Part]:
        rows = self.rows
        live = [*rows.batch.rows, *rows.prefilling.values()]
        taken: list[Part] = []
        for row in [
            row for row in self._line()[: self._num_free()] if row in rows.forks
        ]:
            if live and not self.memory.fits(row, live):
                break
            live.append(row)
            taken.append(Part([row], rows.forks.pop(row)))
        return taken

    def _num_free(self) -> int:
        rows = self.rows
        # rows with late masks keep their places
        num_late = sum(row in self.telling.untold for row in rows.forks)
        return max(
            0,
            self.scheduler.num_places
            - len(rows.batch)
            - len(rows.prefilling)
            - num_late,
        )

    def _line(self) -> list[Row]:
        """Return rows for places, in order; a client's forks first."""
        rows, waiting = self.rows, self.rows.waiting
        rows.note_placed()
        others = [
            *rows.prefilling.values(),
            *(
                row
                for row in waiting.prepared.values()
                if row.prompt.encoded is not None
            ),
        ]
        forks = {row: None for row in rows.forks if row not in self.telling.untold}
        prepared = [
            row
            for row in waiting.prepared.values()
            if not (others and self.reuse.waits_for(row, others))
        ]
        return waiting.line([*forks, *prepared], first=forks)

    def _share_places(self, decoded: list[Part]) -> list[Part]:
        """Park a row of a client above its share: for the next in line, or once for a due row."""
        rows, memory, waiting = self.rows, self.memory, self.rows.waiting
        if self._num_free():
            return decoded
        line, placed, asked = self._line(), waiting.placed, waiting.asked
        for row in line[: self.scheduler.config.encode_ahead]:
            giver = self.scheduler.giver(placed, row.client)
            decoding = [
                one
                for part in decoded
                for one in part.rows
                if not (one.is_suspect or part.ahead)
            ]
            mine = [one for one in decoding if one.client == giver]
            if giver is None and waiting.is_due(row):
                mine = [
                    one
                    for one in decoding
                    if asked[one.client] >= asked[row.client] + 2 and not one.gave_way
                ]
            held = [*rows.live(), *(one for one in rows.forks if one is not row)]
            if (
                not mine
                or not (row.prompt.encoded is not None or row in rows.forks)
                or not memory.fits(row, held)
            ):
                break
            last = sorted(
                mine, key=lambda one: (asked[one.client], waiting.urgency(one))
            )[-1]
            last.gave_way |= giver is None
            for part in decoded:
                if last in part.rows and part.logits is not None:
                    at = part.rows.index(last)
                    self.retry.attempt(last, rows.park, last, part.logits[at : at + 1])
            decoded = [kept for part in decoded for kept in part.without(last)]
            placed[last.client] -= 1
            placed[row.client] += 1
        return decoded

    def _prefill(self, plan: Sequence[Work]) -> list[Part]:
        """Launch chunks. Returns those that end prompts."""
        last: dict[Row, Part] = {}  # holding an earlier chunk's arrays would copy them
        done: list[Part] = []
        for work in self.runner.group(plan) if len(plan) > 1 else plan:
            if self.is_ending:
                break
            for part in self.retry.settled(self.runner.prefill(work)):
                last[part.rows[0]] = part
                if part.logits is not None:
                    done.append(part)
        self._launched += last.values()
        return done

    def _join(self, parts: Sequence[Part]) -> list[Part]:
        """Move prefilled rows to the batch, if they ask for tokens. Returns those that joined."""
        joining = [part for part in parts if part.rows[0].params.max_tokens]
        for part in parts:
            if part not in joining:
                self.retry.attempt(part.rows[0], self.rows.hold, part.rows[0])
        return [
            part
            for left, part in zip(reversed(range(len(joining))), joining, strict=True)
            if self.retry.attempt(
                part.rows[0], self.rows.join, part.rows[0], part.logits, left
            )
        ]
