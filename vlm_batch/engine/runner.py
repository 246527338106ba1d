"""Launches a step's work without waiting: encoding, prefill, decoding."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from vlm_batch.arrays import arrays_of, own_array
from vlm_batch.caches import Placement, take_row, trim
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.decoding import Decoder
from vlm_batch.engine.drafts import NoDrafts
from vlm_batch.engine.logprobs import POSITIONS_TOGETHER, PromptScores
from vlm_batch.engine.memory import EncoderMemory, RowMemory
from vlm_batch.engine.options import expect_options, look_ahead
from vlm_batch.engine.pace import Pace
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Answer, Row, Stage
from vlm_batch.engine.rows import Rows
from vlm_batch.engine.sampling import stages_of
from vlm_batch.engine.schedule import PrefillRow
from vlm_batch.engine.shapes import Shapes
from vlm_batch.engine.work import (
    Failed,
    Made,
    Part,
    Work,
    attempt,
    check_encoded,
    launch,
    note_again,
)
from vlm_batch.errors import InvalidParameters, PromptTooLong, is_out_of_memory, let_go
from vlm_batch.records import Call, Encoded, Hidden
from vlm_batch.runtime.memory import default_limit

if TYPE_CHECKING:
    from vlm_batch.adapters.base import Adapter


class Runner:
    """Launches encoding, prefill and decode forwards; each call returns ``Part`` or ``Failed``."""

    def __init__(
        self,
        adapter: Adapter,
        rows: Rows,
        reuse: Reuse,
        decoder: Decoder,
        max_prompt_tokens: int | None,
        kv: KVQuantisation | None,
        shapes: Shapes,
        drafts: NoDrafts,
        memory: RowMemory,
        pace: Pace,
    ) -> None:
        self._pace = pace
        self.adapter = adapter
        self._memory = memory
        self._drafts = drafts
        self.encoding = EncoderMemory(default_limit())
        self._rows = rows
        self._reuse = reuse
        self._decoder = decoder
        self._max_prompt_tokens = max_prompt_tokens
        self._kv = kv
        self._shapes = shapes
        self._stops = (kv.start,) if kv is not None and kv.start else ()

    def decode(self, group: DecodeBatch) -> list[Part]:
        """Launch a group's forward. A row whose next token depends on the last is a part of its own."""
        rows = group.rows
        group.lay_out()
        scoring = [row.answer for row in rows if row.answer.path is not None]
        if scoring:
            self._look_ahead(group, scoring)
        logits = self._decoder.logits(group, rows)
        self._drafts.note_words(logits)
        alone: set[Row] = set()
        for row in rows:
            answer = row.answer
            answer.num_fed = answer.num_sampled
            if answer.waits_for_token or answer.drafter.ahead:
                alone.add(row)
        for answer in scoring:
            answer.num_fed += len(answer.ahead)
        if not alone:
            return [Part(_each_position(rows) if scoring else rows, logits)]
        mx.async_eval(logits)
        return _split(rows, logits, alone)

    def _look_ahead(self, group: DecodeBatch, scoring: Sequence[Answer]) -> None:
        """Have rows that score options take several tokens in a group's next forward, as far as there is room."""
        room = self._pace.room_ahead(is_decoding=self._rows.is_heard)
        together = POSITIONS_TOGETHER if self.adapter.can_draft else 1
        each = min(together // len(group), group.room) - 1
        each = max(0, min(each, room // len(scoring)))
        self._pace.note_ahead(look_ahead(scoring, each))

    # Pictures and prompts, encoded

    def encode(self, rows: Sequence[Row]) -> list[Part | Failed]:
        """Encode the first rows, as many as share a call."""
        count = self._encode_pictures(rows) if len(rows) > 1 else 0
        if not count:
            self.encoding.begin(picture_bytes(rows[0]))
            count = 1
        return launch(attempt([row], self._encode_row, row) for row in rows[:count])

    def _encode_pictures(self, rows: Sequence[Row]) -> int:
        """Encode the first rows' pictures in one call of the tower. Returns how many rows go on, 0 if none share it."""
        sizes = list(itertools.accumulate(map(picture_bytes, rows)))
        fitting = itertools.takewhile(self.encoding.fits, sizes[1:])
        count = 1 + len(list(fitting))
        if count == 1:
            return 0
        before = mx.get_active_memory()
        prompts = [row.prompt for row in rows[:count]]
        given = [prompt.inputs for prompt in prompts]
        try:
            found = self.adapter.encode_together(given, self._shapes.encode_call())
        except Exception:
            return 0  # each row is encoded alone, for an error of its own
        last = 0  # the last row whose pictures the call had
        reach = count  # the first row that it left out is another call's
        for at in range(1, count):
            if found[at] is not given[at]:
                last = at
            else:
                reach = min(reach, at)
        for prompt, inputs in zip(prompts, found, strict=True):
            prompt.inputs = inputs
        if not last:
            return 0
        self.encoding.begin(sizes[last], before)
        return reach

    def _encode_row(self, row: Row) -> Made:
        """Encode a row. Raises PromptTooLong, DoesNotFit, and the family's errors."""
        prompt, answer, params = row.prompt, row.answer, row.params
        begin = time.perf_counter()
        cached = self._reuse.begin(row, self.adapter.make_cache(self._kv))
        encoded = self.adapter.encode(prompt.inputs, self._shapes.encode_call(), cached)
        check_encoded(encoded)
        if params.prompt_logprobs is not None:
            answer.prompt_scores = self._scores(row, params.prompt_logprobs, encoded)
        self._check_length(row, encoded.length)
        is_scored = answer.prompt_scores is not None
        prompt.is_shared = not is_scored and self._shapes.shares(encoded)
        prompt.inputs = {}
        prompt.encoded = encoded
        prompt.prefilled = cached
        row.facts = encoded.facts(with_ids=row.terms.returns_prompt_ids)
        self._begin_answer(row, encoded)
        if answer.path is not None:
            expect_options(row, answer.path, self._memory)
        if not row.clock.first_token:
            seconds = time.perf_counter() - begin
            row.clock.spent = replace(row.clock.spent, encode=seconds)
        self._memory.check(row)
        return Part([row]), [encoded.inputs_embeds]

    def _check_length(self, row: Row, length: int) -> None:
        """Raise PromptTooLong."""
        limit, context = self._max_prompt_tokens, self.adapter.max_context
        if limit is not None and length > limit:
            raise PromptTooLong(
                f"the prompt has {length} tokens (pictures included); {limit} are taken",
                advice=" (Limits.prompt_tokens)",
            )
        least = min(1, row.params.max_tokens)
        if context is not None and length + least > context:
            raise PromptTooLong(
                f"the prompt has {length} tokens (pictures included); the model's context holds {context}"
            )

    def _begin_answer(self, row: Row, encoded: Encoded) -> None:
        """Prepare what the choice of a row's tokens needs."""
        answer, context = row.answer, self.adapter.max_context
        answer.max_tokens = row.params.max_tokens
        if context is not None:
            answer.max_tokens = min(answer.max_tokens, context - encoded.length)
        stages = stages_of(row.params, answer.rules)
        answer.rules = replace(answer.rules, changes_logits=bool(stages))
        self._drafts.give_drafter(row, encoded)
        if any(stage.reads_history for stage in stages):
            ids: Any = encoded.input_ids[0].tolist()
            known = [token for token in ids if token >= 0]
            answer.history = mx.array(known, dtype=mx.int32)

    def _scores(self, row: Row, count: int, encoded: Encoded) -> PromptScores:
        """Return an empty record, or raise InvalidParameters."""
        ends = self._shapes.ends(encoded.length, encoded.atomic)
        if ends and not self.adapter.scores_chunks:
            raise InvalidParameters(
                "prompt_logprobs: this family's take a forward a token, which reproducible=True excludes"
            )
        if encoded.input_ids.shape[1] != encoded.length:
            raise InvalidParameters(
                "prompt_logprobs: this family's prompts have more positions than tokens"
            )
        ids: Any = encoded.input_ids[0].tolist()
        scores = PromptScores(
            ids, ~encoded.is_picture, encoded.atomic, count, encoded.vocabulary
        )
        if len(ids) > 1 and not scores.says_any:
            raise InvalidParameters(
                "prompt_logprobs: this family sees its prompts as wholes, and tells none of their tokens"
            )
        return scores

    # Prompts, into caches

    def views(self, now: float) -> list[PrefillRow]:
        """Return the rows in prefill as the schedule sees them."""
        rows = self._rows.ledger.at(Stage.PREFILL)
        return [self._view(row, now) for row in rows]

    def _view(self, row: Row, now: float) -> PrefillRow:
        encoded, _ = row.prompt.to_prefill()
        stops = (*self._stops, *row.reuse.stops)
        if row.answer.prompt_scores is not None:
            together = 1
            if self.adapter.scores_chunks:
                together = POSITIONS_TOGETHER
            stops = (*stops, *range(together, encoded.length, together))
        return PrefillRow(
            row.request_id,
            encoded.length,
            row.prompt.prefilled,
            encoded.atomic,
            stops,
            row.priority,
            max(0.0, now - row.clock.submitted),
            self._shapes.ends(encoded.length, encoded.atomic),
            row.client,
        )

    def group(self, chunks: Sequence[Work]) -> list[Work]:
        """Merge chunks of whole prompts that share an array."""
        kinds: dict[Any, list[Work]] = {}
        for chunk in chunks:
            row = self._rows.ledger[chunk.rows[0]]
            if _is_shared(row, chunk.begin, chunk.end):
                encoded, _ = row.prompt.to_prefill()
                kinds.setdefault(encoded.kind, []).append(chunk)
        # of each group the first chunk stands for all
        merged = {chunk: chunk for chunk in chunks}
        for alike in kinds.values():
            for indices in self._shapes.groups([chunk.end for chunk in alike]):
                first, *others = [alike[index] for index in indices]
                merged[first] = _merged([first, *others])
                for other in others:
                    del merged[other]
        return list(merged.values())

    def prefill(self, work: Work) -> list[Part | Failed]:
        """Launch a chunk, or several prompts together; if that fails, each alone."""
        rows: list[Row] = []
        for name in work.rows:
            row = self._rows.ledger.get(name)
            # else it failed in an earlier chunk of this step
            if row is not None and row.stage is Stage.PREFILL:
                rows.append(row)
        if len(rows) > 1:
            try:
                return self._prefill_together(rows)
            except Exception as error:
                if not is_out_of_memory(error):
                    note_again(len(rows), let_go(error))
        found: list[Part | Failed] = []
        for row in rows:
            end = min(work.end, row.facts.length)
            made = attempt([row], self._prefill_alone, row, work.begin, end)
            found += launch([made])
        return found

    def _prefill_together(self, rows: Sequence[Row]) -> list[Part | Failed]:
        """Launch whole prompts in one array."""
        made = self._launch(rows)
        taken: list[Made | Failed] = []
        for at, row in enumerate(rows):
            taken.append(attempt([row], self._take, row, at, *made))
        return launch(taken)

    def _prefill_alone(self, row: Row, begin: int, end: int) -> Made:
        """Launch one row's chunk, with the idle rows of its shape."""
        prompt, scores = row.prompt, row.answer.prompt_scores
        if prompt.logits is not None:  # of the same prompt
            prompt.prefilled = end
            return self._made(row, prompt.logits)
        encoded, cache = prompt.to_prefill()
        # else a forward per token
        is_scored = scores is not None and self.adapter.scores_chunks
        is_whole = _is_shared(row, begin, end)
        count, stop, call = self._shapes.prefill_call(
            begin, [end], is_whole=is_whole, is_scored=is_scored
        )
        if count > 1:
            return self._take(row, 0, *self._launch([row]))
        logits = self._forward([encoded], cache, [row], begin, end, stop, call)
        trim(cache, stop - end)
        scored: list[mx.array] = []
        if scores is not None:
            scored, logits = scores.add(logits, end), logits[-1:]
        prompt.prefilled = end
        return self._made(row, logits, scored)

    def _launch(self, rows: Sequence[Row]) -> tuple[mx.array, list[Any], int]:
        """Launch whole prompts in one array. Returns logits (R, V), the shared cache, its positions."""
        prompts = [row.prompt.to_prefill()[0] for row in rows]
        cache = self.adapter.make_cache(self._kv)
        lengths = [prompt.length for prompt in prompts]
        count, end, call = self._shapes.prefill_call(0, lengths, is_whole=True)
        filled = [*prompts, *[prompts[-1]] * (count - len(prompts))]
        logits = self._forward(filled, cache, rows, 0, end, end, call)
        mx.async_eval(logits, [layer.state for layer in cache])
        return logits, cache, end

    def _forward(
        self,
        prompts: Sequence[Encoded],
        cache: list[Any],
        rows: Sequence[Row],
        begin: int,
        end: int,
        stop: int,
        call: Call,
    ) -> mx.array:
        """Run positions [begin, stop) of prompts, of which the first are ``rows``'; keep their hidden states.

        Args:
            end: of what is no padding, unless the row is shorter.
        """
        if not any(row.answer.drafter.context for row in rows):
            return self.adapter.prefill(prompts, cache, begin, stop, call)
        hidden: list[mx.array] = []
        call = replace(call, hidden=hidden)
        logits = self.adapter.prefill(prompts, cache, begin, stop, call)
        if hidden:
            _keep_hidden(hidden[0], rows, begin, end)
        return logits

    def _take(
        self, row: Row, index: int, logits: mx.array, cache: list[Any], width: int
    ) -> Made:
        """Take a row's caches and logits out of a shared array of ``width`` positions."""
        prompt, length = row.prompt, row.facts.length
        prompt.cache = take_row(
            cache, index, is_own=self._shapes.layout is Placement.ROWS
        )
        prompt.prefilled = length
        trim(prompt.cache, width - length)
        return self._made(row, logits[index : index + 1])

    def _made(
        self, row: Row, logits: mx.array, scored: Sequence[mx.array] = ()
    ) -> Made:
        """Return a chunk's part and arrays. ``logits`` (1, V): of its last position."""
        encoded, caches = row.prompt.to_prefill()
        if row.prompt.prefilled < row.facts.length:
            kept = self._reuse.keep(row, None)
            state = arrays_of([cache.state for cache in caches])
            part = Part([row], None, [*state, *kept, *scored])
            return part, [*part.arrays]
        kept = self._reuse.keep(row, logits)
        self.adapter.finish_prefill(encoded, caches)
        self._drafts.note_words(logits)
        state = arrays_of([cache.state for cache in caches])
        # A part does not hold a row's state, which the next token would have to copy.
        part = Part([row], logits, [logits, *kept, *scored])
        return part, [*state, *part.arrays]


def _each_position(rows: Sequence[Row]) -> list[Row]:
    """Return each row as often as it has positions."""
    found: list[Row] = []
    for row in rows:
        found += [row] * (1 + len(row.answer.ahead))
    return found


def _split(rows: Sequence[Row], logits: mx.array, alone: Collection[Row]) -> list[Part]:
    """Return a part of the rows that are chosen together, and one of each row ``alone``.

    Args:
        logits: (P, V), of each row as many positions as it drafts, and one.
    """
    apart: list[Part] = []
    together: list[Row] = []
    places: list[int] = []
    end = 0
    for row in rows:
        ahead = row.answer.ahead
        first = end
        end = first + 1 + len(ahead)
        if row not in alone:
            together.append(row)
            places += range(first, end)
            continue
        is_held = not ahead and row.answer.waits_for_token
        part = Part([row], logits[first:end], is_held=is_held, ahead=ahead)
        apart.append(part)
    if not together:
        return apart
    return [Part(_each_position(together), logits[mx.array(places)]), *apart]


def _merged(group: Sequence[Work]) -> Work:
    """Return a chunk of all rows of several whole prompts."""
    names = tuple(chunk.rows[0] for chunk in group)
    longest = max(chunk.end for chunk in group)
    return replace(group[0], rows=names, end=longest)


def _is_shared(row: Row, begin: int, end: int) -> bool:
    """Return whether a chunk is a whole prompt that shares an array."""
    return row.prompt.is_shared and (begin, end) == (0, row.facts.length)


def _keep_hidden(hidden: mx.array, rows: Sequence[Row], begin: int, end: int) -> None:
    """Keep the last of rows' hidden states (R, L, D) from ``begin`` for the model that drafts."""
    for index, row in enumerate(rows):
        drafter = row.answer.drafter
        if not drafter.context:
            continue
        last = min(end, row.facts.length)
        first = max(begin, last - drafter.context)
        states = own_array(hidden[index, first - begin : last - begin])
        mx.async_eval(states)
        drafter.see(Hidden(states, 0, first, last - first))


def picture_bytes(row: Row) -> int:
    return row.prompt.nbytes if row.media.has_any else 0
