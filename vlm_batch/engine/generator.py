"""The engine's step: plan -> encode -> prefill -> join -> decode -> sample -> events. One thread calls all of it.

Work is launched one step ahead: the decode forward of a step is queued on tokens that are still being computed, the
step's prefill chunks are queued behind it, and only in the next step are they read. So the device has work while Python
runs, also when rows join and leave. A row that ends at a stop token costs at most one column of wasted work, which
nobody sees.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.arrays import as_mlx, num_bytes
from vlm_batch.caches import Placement
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.admission import Admission
from vlm_batch.engine.choosing import Flight, choose
from vlm_batch.engine.decoding import Decoder
from vlm_batch.engine.groups import DecodeGroups
from vlm_batch.engine.memory import RowMemory
from vlm_batch.engine.pace import Pace
from vlm_batch.engine.port import AnswerText, Loading, ModelAdapter, Sampler
from vlm_batch.engine.retry import Retry
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Ending, Prompt, Row, Status, new_row
from vlm_batch.engine.rows import Rows
from vlm_batch.engine.runner import Runner, picture_bytes
from vlm_batch.engine.sampling import sample
from vlm_batch.engine.scheduler import Scheduler
from vlm_batch.engine.shapes import FreeShapes, Shapes
from vlm_batch.engine.trial import Trial
from vlm_batch.engine.warming import forwards
from vlm_batch.engine.work import Failed, Kind, Part, Work, attempt
from vlm_batch.errors import InvalidParameters
from vlm_batch.policy import Policy, policy_of
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import Event, SamplingParams, TokenLogprobs

#: Seconds that a step waits for rows' forms, which work while the device does: who is later misses the step.
FORM_SECONDS = 0.01


class BatchGenerator:
    """Continuous batching of one model's rows.

    ``insert`` adds a request at any time; ``step`` advances every row by one token and prefills within its budget;
    ``cancel`` ends a row at any stage. A row's error ends that row alone. All calls come from one thread.

    ``text`` says how tokens read and which of them end an answer (needed for text and stop strings). ``compile_decode``
    runs decode steps as compiled graphs where the family allows it; None leaves it to the adapter.
    ``reuse`` decides what rows take over from earlier ones; by default only what a request brings. ``kv`` says how keys
    and values are quantised; by default they are not. ``sampler`` chooses the tokens, by default ``sampling.sample``.
    ``policy`` are its settings, by default the device's. ``shapes`` decide the shape of every call, by default
    those that cost least; ``reuse`` must have the same.
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
    ) -> None:
        policy = policy or policy_of({} if shapes is None else {"placement": shapes.layout.value})
        shapes = shapes or FreeShapes.of(adapter, kv, policy)
        self.reuse = reuse or Reuse(adapter, shapes=shapes)
        if shapes.settings != self.reuse.shapes.settings:
            raise ValueError("what is reused is not what is computed here: reuse and generator need the same shapes")
        policy, self.adapter = shapes.limited(policy), shapes.adapter(adapter)
        self.shapes = shapes
        self.text = text or AnswerText()
        self.scheduler = Scheduler(policy)
        self.sampler = sampler
        self._decoder = Decoder(self.adapter, shapes.decode_call(), compile_decode=shapes.graphs(compile_decode))
        batch = DecodeGroups(shapes, self.scheduler.most_rows)
        self._pace = Pace(policy)
        self.trial = Trial(self.adapter, kv, shapes)
        self.memory = RowMemory(policy.max_bytes, batch.slabs)
        self.rows = Rows(Admission(self.scheduler, self.memory), batch, self.scheduler, self.reuse)
        self.retry = Retry(self.rows, self.scheduler, self.memory, self.reuse.budget)
        self.runner = Runner(self.adapter, self.rows, self.reuse, self._decoder, policy.max_prompt_tokens, kv, shapes)
        self._launched: list[Flight | Part] = []  # in the device's order; the next step reads it
        self._untold: list[tuple[Row, int, TokenLogprobs | None]] = []  # tokens that their rows' forms are at

    def warm_up(self) -> Iterator[None]:
        """Run a forward of one of the shapes that requests will bring for each ``next``; nothing is left of it. Where rows keep
        caches of their own, no shape is new, and there are none."""
        if self.shapes.layout is Placement.ROWS:
            return iter(())
        return forwards(self.trial, self._decoder, self.sampler, self.scheduler.num_places)

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
        self.rows.add(row)

    def take_in(self, row: Row, loading: Loading) -> None:
        """Take a row whose loading is done: it waits for a place, or ends with the error that loading raised."""
        if row.status is not Status.FINISHED:
            self._try(row, self.rows.waiting.take_in, row, loading)

    def cancel(self, request_id: str) -> bool:
        """End a row at whatever stage it is; False if there is none of that id. Its end comes with the next step."""
        row = self.rows.by_id.get(request_id)
        if row is None:
            return False
        self.rows.end(row, "cancelled")
        return True

    def fail_all(self, error: BaseException) -> list[Event]:
        """End every row with an error, and forget what was launched; their ends, and what was to be told before."""
        self._launched, self._untold, self.rows.forks = [], [], []
        for row in list(self.rows.by_id.values()):
            self.rows.end(row, "error", error)
        return self.rows.tell()

    def reset(self) -> None:
        """Forget every row, without events."""
        self._launched, self._untold, self.rows.forks = [], [], []
        for row in list(self.rows.by_id.values()):
            self.rows.forget(row)
        self.rows.tell()

    @property
    def input_bytes(self) -> int:
        """Bytes of processors' outputs that rows keep, to begin again from."""
        return sum(num_bytes(row.given) for row in tuple(self.rows.by_id.values()))

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything left to do or to tell."""
        return bool(self.rows.events) or self.rows.is_active

    # A step

    def step(self) -> list[Event]:
        """Advance: launch the next decode step, read what the last step launched, and launch a budget's worth of pictures and
        prompts."""
        begin, rows = time.perf_counter(), self.rows
        before, self._launched = self._launched, []
        rows.waiting.placed = rows.placed
        self.retry.set_apart()
        self.retry.keep_within_memory()
        groups = [tuple(row.request_id for row in group.rows) for group in rows.batch.groups]
        decoded = [part for names in groups for part in self._run(Work(Kind.DECODE, names))]
        decoded = self._share_places(decoded)
        self._choose([part for part in decoded if not part.is_held])
        self._read(before)
        self._take_untold()
        self._choose(self._in_time([part for part in decoded if part.is_held]))
        joined = self._join(self._next_forks()) if rows.forks else []
        encoding = self._encode(bool(groups))
        prefilling = self.runner.views(begin)
        longest = max((row.waited for row in prefilling), default=0.0)
        budget = self._pace.budget(bool(groups), rows.num_pending, longest, encoding)
        plan = self.scheduler.plan(prefilling, budget)
        self._choose(joined + self._join(self._prefill(plan)))
        if groups:
            seconds, tokens = time.perf_counter() - begin - encoding, sum(work.end - work.begin for work in plan)
            self._pace.record(seconds, tokens)
            are_waiting = bool(rows.waiting.prepared)
            self.scheduler.record(sum(map(len, groups)), seconds, tokens, are_waiting=are_waiting)
        if not rows.is_active:  # no step may follow: nothing stays launched of rows that have ended
            self._launched = []
            self.reuse.settle_ended()
        return rows.tell()

    def _run(self, work: Work) -> list[Part]:
        """Launch a work; its parts, but for those that failed, which are settled."""
        parts: list[Part] = []
        for part in self.runner.run(work):
            if isinstance(part, Failed):
                self.retry.settle(part)
            else:
                parts.append(part)
        return parts

    def _try(self, row: Row, work: Callable[..., None], *arguments: Any) -> bool:
        """Do a row's own work; whether it was done."""
        failed = attempt([row], work, *arguments)
        if failed is not None:
            self.retry.settle(failed)
        return failed is None

    def _choose(self, parts: Sequence[Part]) -> None:
        """Launch the choice of rows' tokens, at once but for suspects, of whom one may make it fail."""
        shared = [part for part in parts if not part.rows[0].is_suspect]
        for those in ([shared] if shared else []) + [[part] for part in parts if part.rows[0].is_suspect]:
            rows = [row for part in those for row in part.rows]
            found = attempt(rows, choose, those, self.sampler, is_shared=True)
            for flight in [found] if isinstance(found, Failed) else found:
                if isinstance(flight, Failed):
                    self.retry.settle(flight)
                    continue
                tokens = flight.sampled.tokens.astype(mx.int32)
                for index, row in enumerate(flight.rows):
                    if flight.is_for(index):
                        row.answer.advance(tokens, index)
                        if row.answer.num_sampled >= row.answer.max_tokens:  # its last token needs no further step
                            self._try(row, self.rows.leave, row)
                self._launched.append(flight)

    def _read(self, launched: Sequence[Flight | Part]) -> None:
        """Wait for a step's work, in its order on the device, and hand out its tokens."""
        self.reuse.settle_ended()
        for flight in launched:
            if isinstance(flight, Part):
                if flight.rows[0].status is not Status.FINISHED:
                    self._try(flight.rows[0], mx.eval, flight.arrays)
                flight.arrays.clear()  # the next chunk is written into what they are cut out of, if nobody holds them
            elif rows := flight.waiting:
                found = attempt(rows, flight.sampled.read, is_shared=True)
                if isinstance(found, Failed):
                    self.retry.settle(found)
                else:
                    self._take(flight, *found)

    def _take(
        self, flight: Flight, tokens: Sequence[int], highest: Sequence[float], logprobs: Mapping[int, TokenLogprobs]
    ) -> None:
        """Append tokens to their rows; rows that are complete end, and those whose numbers are none."""
        for index, row in enumerate(flight.rows):
            if not flight.is_for(index):  # it ended meanwhile and has no use for it
                continue
            if not math.isfinite(highest[index]):
                self.rows.end(row, "error", _no_token(row, highest[index]))
                continue
            if row.reuse is not None and row.reuse.pending is not None:  # what its prompt left is sound
                self.reuse.store(row.reuse.pending)
                row.reuse.pending = None
            if not flight.is_known:
                if row.answer.guide is None:
                    self._tell(row, tokens[index], logprobs.get(index))
                elif self._try(row, row.answer.guide.feed, tokens[index]):
                    self._untold.append((row, tokens[index], logprobs.get(index)))
            elif row.answer.ending is not None and row.answer.known_token is None:  # it has said all of it again
                self._try(row, self.rows.finish, row, row.answer.ending)

    def _tell(self, row: Row, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append a token to its row, and tell of it."""
        told = attempt([row], row.take, token, logprobs, self.text.decode)
        if isinstance(told, Failed):
            self.retry.settle(told)
        elif isinstance(told, Ending):
            self._try(row, self.rows.finish, row, told)
        else:
            self.rows.events.append(told)

    def _take_untold(self) -> None:
        """Append the tokens whose rows' forms have taken them, after waiting a little for those that have not."""
        untold, self._untold = self._untold, []
        until = time.perf_counter() + FORM_SECONDS
        for row, token, logprobs in untold:
            if row.status is Status.FINISHED or row.answer.guide is None:
                continue
            if row.answer.guide.is_ready(until - time.perf_counter()):
                self._tell(row, token, logprobs)
            else:
                self._untold.append((row, token, logprobs))

    def _in_time(self, parts: Sequence[Part]) -> list[Part]:
        """The parts whose rows' forms know what may be next; rows of others leave the batch until theirs do."""
        late = {row for row, _, _ in self._untold}
        for part in parts:
            if part.rows[0] in late and part.rows[0].status is Status.DECODE:
                self._try(part.rows[0], self.rows.park, part.rows[0], part.logits)
        return [part for part in parts if part.rows[0] not in late]

    # Rows on their way to a place

    def _encode(self, is_decoding: bool) -> float:
        """Encode the first in line and a few ahead, and give free places to those that are; the seconds that this took."""
        begin, rows, waiting, runner = time.perf_counter(), self.rows, self.rows.waiting, self.runner
        runner.encoding.step()
        if not waiting.prepared:
            return 0.0
        live = [*rows.prefilling.values(), *rows.batch.rows, *(row for row, _ in rows.forks)]
        # those whose beginnings others may wait for
        others = [
            *rows.prefilling.values(),
            *(row for row in waiting.prepared.values() if row.prompt.encoded is not None),
        ]
        free, whole = self._num_free(), self._line()
        ahead = [row for row in whole[free:] if row.request_id in waiting.prepared]
        line = [*whole[:free], *ahead[: self.scheduler.config.encode_ahead]]
        has_begun = False
        for place, (row, losses) in enumerate([(row, row.losses) for row in line]):
            if row.losses != losses or row.status is Status.FINISHED or row.request_id not in waiting.prepared:
                continue  # it failed, in a call with another; or it is a fork
            if row.prompt.encoded is None:
                if others and self.reuse.waits_for(row, others):
                    continue  # a row that was encoded just now has its beginning
                if live and not runner.encoding.fits(picture_bytes(row)):
                    break  # nobody overtakes it: it is encoded once those beside it have ended
                seconds = time.perf_counter() - begin
                most = self.scheduler.most_encoded(is_decoding, seconds, rows.num_pending, has_begun=has_begun)
                if not most or (has_begun and place >= free):
                    break  # the step has done enough
                those = [row]  # who found no memory alone is alone again: others of the same call would take the room
                if most > 1 and not row.was_alone:
                    unencoded = [other for other in line[place:] if other.prompt.encoded is None]
                    those = self.reuse.new_ones(unencoded, others, most)
                made = self._run(Work(Kind.ENCODE, tuple(one.request_id for one in those)))
                others += [part.rows[0] for part in made]
                has_begun = True
            if place >= free or row.prompt.encoded is None:
                continue  # it is encoded ahead, or has failed
            if self.memory.fits(row, live):
                live.append(row)
                rows.place(row)
            elif live:
                free = 0  # nobody overtakes it: it is the first in line
            else:
                self._try(row, self.memory.check, row)
        return time.perf_counter() - begin

    def _next_forks(self) -> list[Part]:
        """Further answers to prefilled prompts, with those prompts' logits, as far as there are places: they go before all
        others."""
        rows = self.rows
        rows.forks = [(row, logits) for row, logits in rows.forks if row.status is not Status.FINISHED]
        forks, live = dict(rows.forks), [*rows.batch.rows, *rows.prefilling.values()]
        taken: list[Part] = []
        for row in [row for row in self._line()[: self._num_free()] if row in forks]:
            if live and not self.memory.fits(row, live):
                break
            live.append(row)
            taken.append(Part([row], forks.pop(row)))
        rows.forks = list(forks.items())
        return taken

    def _num_free(self) -> int:
        """Free places but for those of rows whose forms are late."""
        rows = self.rows
        late = {row for row, _, _ in self._untold}
        return self.scheduler.num_free(
            len(rows.batch) + len(rows.prefilling) + sum(row in late for row, _ in rows.forks)
        )

    def _line(self) -> list[Row]:
        """The rows that could have a place now, the first in line first; of one client's, forks are before all others."""
        rows, waiting = self.rows, self.rows.waiting
        waiting.placed = rows.placed
        others = [
            *rows.prefilling.values(),
            *(row for row in waiting.prepared.values() if row.prompt.encoded is not None),
        ]
        late = {row for row, _, _ in self._untold}
        forks = {row for row, _ in rows.forks if row not in late}
        prepared = [row for row in waiting.prepared.values() if not (others and self.reuse.waits_for(row, others))]
        return waiting.line([*forks, *prepared], first=forks)

    def _share_places(self, decoded: list[Part]) -> list[Part]:
        """Park rows of clients who have more than their share, for who is next in line with fewer and has no place."""
        rows, memory = self.rows, self.memory
        if len({row.client for row in rows.by_id.values()}) < 2 or self._num_free():
            return decoded
        placed = rows.placed
        for row in self._line()[: self.scheduler.config.encode_ahead]:
            giver = self.scheduler.giver(placed, row.client)
            mine = [one for part in decoded for one in part.rows if one.client == giver and not one.is_suspect]
            held = [*rows.live(), *(one for one, _ in rows.forks if one is not row)]
            if (
                not mine
                or not (row.prompt.encoded is not None or row in dict(rows.forks))
                or not memory.fits(row, held)
            ):
                break
            last = rows.waiting.line(mine)[-1]
            for part in decoded:
                if last in part.rows and part.logits is not None:
                    at = part.rows.index(last)
                    self._try(last, rows.park, last, part.logits[at : at + 1])
            decoded = [kept for part in decoded for kept in part.without(last)]
            placed[last.client] -= 1
            placed[row.client] += 1
        return decoded

    def _prefill(self, plan: Sequence[Work]) -> list[Part]:
        """Launch chunks; those that ended their rows' prompts."""
        last: dict[Row, Part] = {}  # whoever holds what an earlier chunk left has it copied
        done: list[Part] = []
        for work in self.runner.group(plan) if len(plan) > 1 else plan:
            for part in self._run(work):
                last[part.rows[0]] = part
                if part.logits is not None:
                    done.append(part)
        self._launched += last.values()
        return done

    def _join(self, parts: Sequence[Part]) -> list[Part]:
        """Move rows whose prompts are done to the decoding batch; those that could be."""
        return [
            part
            for left, part in zip(reversed(range(len(parts))), parts, strict=True)
            if self._try(part.rows[0], self.rows.join, part.rows[0], part.logits, left)
        ]


def _no_token(row: Row, highest: float) -> Exception:
    """The end of a row whose highest logit is not finite: its own parameters leave it no token, or the model overflows."""
    at, params = len(row.answer.token_ids) + 1, row.params
    said = {
        params.form: row.answer.guide is not None,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": at <= params.min_tokens,
        "logits_processors": bool(params.logits_processors),
    }
    names = [name for name, is_said in said.items() if name is not None and is_said]
    if highest == -math.inf and names not in ([], ["logits_processors"]):
        return InvalidParameters(
            f"{' and '.join(names)} leave no token to choose for token {at}: they contradict each other"
        )
    return FloatingPointError(
        f"the logits of token {at} are not finite (NaN or infinity): the model overflows on this prompt, or a logits "
        "processor leaves no token to choose"
    )
