"""Launches a step's work without waiting: encoding, prefill, decoding."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.arrays import arrays_of, own_array
from vlm_batch.caches import Placement, take_row, trim
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.decoding import Decoder
from vlm_batch.engine.drafts import SIZES, Drafts
from vlm_batch.engine.logprobs import POSITIONS_TOGETHER, PromptScores
from vlm_batch.engine.memory import EncoderMemory, RowMemory
from vlm_batch.engine.port import ModelAdapter
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Facts, Row, Stage
from vlm_batch.engine.rows import Rows
from vlm_batch.engine.sampling import READ_HISTORY, RowRules, stages_of
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
from vlm_batch.records import DraftState, Encoded, Hidden
from vlm_batch.runtime.memory import default_limit


class Runner:
    def __init__(
        self,
        adapter: ModelAdapter,
        rows: Rows,
        reuse: Reuse,
        decoder: Decoder,
        max_prompt_tokens: int | None,
        kv: KVQuantisation | None,
        shapes: Shapes,
        drafts: Drafts | None,
        memory: RowMemory,
    ) -> None:
        self.adapter = adapter
        self._memory = memory
        self.drafts = drafts
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
        logits = self._decoder.logits(group, rows)
        for row in rows:
            row.answer.num_fed = row.answer.num_sampled
        apart = [
            row
            for row in rows
            if row.answer.ahead or (row.answer.guide and row.answer.known_token is None)
        ]
        if not apart:
            return [Part(rows, logits)]
        mx.async_eval(logits)
        parts, free, first = [], [], 0
        for row in rows:
            end = first + 1 + len(row.answer.ahead)
            if row in apart:
                is_held = not row.answer.ahead
                parts.append(
                    Part(
                        [row],
                        logits[first:end],
                        is_held=is_held,
                        ahead=row.answer.ahead,
                    )
                )
            else:
                free.append(first)
            first = end
        together = [row for row in rows if row not in apart]
        return [Part(together, logits[mx.array(free)]), *parts] if free else parts

    # Pictures and prompts, encoded

    def encode(self, rows: Sequence[Row]) -> list[Part | Failed]:
        """Encode the first rows, as many as share a call."""
        count = self._encode_pictures(rows) if len(rows) > 1 else 0
        if not count:
            self.encoding.begin(picture_bytes(rows[0]))
            count = 1
        found = launch(attempt([row], self._encode_row, row) for row in rows[:count])
        for part in found:
            if (
                isinstance(part, Part)
                and (continues := part.rows[0].reuse.continues) is not None
            ):
                continues.take()
                part.rows[0].reuse.continues = None
        return found

    def _encode_pictures(self, rows: Sequence[Row]) -> int:
        """Encode first rows' pictures in one call. Returns the number of rows, 0 if none share it."""
        sizes = list(itertools.accumulate(map(picture_bytes, rows)))
        count = next(
            (
                at
                for at, nbytes in enumerate(sizes)
                if at and not self.encoding.fits(nbytes)
            ),
            len(rows),
        )
        if count < 2:
            return 0
        before = mx.get_active_memory()
        prompts = [row.prompt for row in rows[:count]]
        given = [prompt.inputs or {} for prompt in prompts]
        try:
            found = self.adapter.encode_together(given, self._shapes.encode_call())
        except Exception:
            return 0  # each row is encoded alone, for an error of its own
        for prompt, inputs in zip(prompts, found, strict=True):
            prompt.inputs = inputs
        reach = max(
            (index + 1 for index in range(count) if found[index] is not given[index]),
            default=1,
        )
        if reach < 2:
            return 0
        self.encoding.begin(sizes[reach - 1], before)
        # the next row that needs a tower of its own is another call's
        return next(
            (index for index in range(1, reach) if found[index] is given[index]), reach
        )

    def _encode_row(self, row: Row) -> Made:
        """Encode a row. Raises PromptTooLong, DoesNotFit, and the family's errors."""
        prompt, answer, params = row.prompt, row.answer, row.params
        assert prompt.inputs is not None
        begin = time.perf_counter()
        cached = self._reuse.begin(row, self.adapter.make_cache(self._kv))
        encoded = self.adapter.encode(prompt.inputs, self._shapes.encode_call(), cached)
        check_encoded(encoded)
        prompt.ends = self._shapes.ends(encoded.length, encoded.atomic)
        if params.prompt_logprobs is not None:
            if prompt.ends and not self.adapter.scores_chunks:
                raise InvalidParameters(
                    "prompt_logprobs: this family's take a forward a token, which reproducible=True excludes"
                )
            answer.prompt_scores = self._scores(params.prompt_logprobs, encoded)
        context = self.adapter.max_context
        check_length(
            encoded.length,
            context,
            self._max_prompt_tokens,
            least=min(1, params.max_tokens),
        )
        prompt.is_shared = answer.prompt_scores is None and self._shapes.shares(encoded)
        prompt.inputs, prompt.encoded, prompt.prefilled = None, encoded, cached
        row.facts = Facts(
            encoded.length,
            encoded.position.delta,
            encoded.image_tokens,
            encoded.model_image_sizes,
            encoded.vocabulary,
            encoded.decode,
            tuple(encoded.input_ids[0].tolist()) if row.returns_prompt_ids else None,
        )
        answer.max_tokens = (
            params.max_tokens
            if context is None
            else min(params.max_tokens, context - encoded.length)
        )
        answer.rules = RowRules(answer.end_ids, answer.bad_words)
        stages = stages_of(params, answer.rules)
        answer.changes_logits = bool(stages)
        self._give_drafter(row, encoded)
        if answer.bad_words or not READ_HISTORY.isdisjoint(stages):
            known = [token for token in encoded.input_ids[0].tolist() if token >= 0]
            answer.history = mx.array(known, dtype=mx.int32)
        if not row.clock.first_token:
            row.clock.encode_seconds = time.perf_counter() - begin
        self._memory.check(row)
        return Part([row]), [encoded.inputs_embeds]

    def _give_drafter(self, row: Row, encoded: Encoded) -> None:
        """Let a row draft, unless its logits processors may count calls."""
        if (
            self.drafts is None
            or not row.may_draft
            or row.params.logits_processors
            or row.answer.drafter is not None
        ):
            return
        row.answer.drafter = self.drafts.drafter(
            row.client, np.array(encoded.input_ids, dtype=np.int32)[0].tobytes()
        )
        model = self.drafts.model
        # else tokens and states do not fit
        if model is not None and encoded.input_ids.shape[1] == encoded.length:
            row.answer.draft_state = DraftState(deque(maxlen=model.context))
        if row.answer.guide is not None:
            row.answer.guide.most_ahead = SIZES[-1]

    def _scores(self, count: int, encoded: Encoded) -> PromptScores:
        """Return an empty record, or raise InvalidParameters."""
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
        found = []
        for row in self._rows.ledger.at(Stage.PREFILL):
            prompt, length = row.prompt, row.facts.length
            assert prompt.encoded is not None
            stops = (*self._stops, *row.reuse.stops)
            if row.answer.prompt_scores is not None:
                together = POSITIONS_TOGETHER if self.adapter.scores_chunks else 1
                stops = (*stops, *range(together, length, together))
            found.append(
                PrefillRow(
                    row.request_id,
                    length,
                    prompt.prefilled,
                    prompt.encoded.atomic,
                    stops,
                    row.priority,
                    max(0.0, now - row.clock.submitted),
                    prompt.ends,
                    row.client,
                )
            )
        return found

    def group(self, chunks: Sequence[Work]) -> list[Work]:
        """Merge chunks of whole prompts that share an array."""
        rows = {row.request_id: row for row in self._rows.ledger.at(Stage.PREFILL)}
        whole = [
            chunk
            for chunk in chunks
            if (row := rows[chunk.rows[0]]).prompt.is_shared
            and (chunk.begin, chunk.end) == (0, row.facts.length)
        ]
        works = {chunk: chunk for chunk in chunks if chunk not in whole}
        kinds: dict[Any, list[Work]] = {}
        for chunk in whole:
            encoded = rows[chunk.rows[0]].prompt.encoded
            kinds.setdefault(encoded and encoded.kind, []).append(chunk)
        for those in kinds.values():
            for places in self._shapes.groups([chunk.end for chunk in those]):
                group = [those[place] for place in places]
                names = tuple(chunk.rows[0] for chunk in group)
                works[group[0]] = replace(
                    group[0], rows=names, end=max(chunk.end for chunk in group)
                )
        return [works[chunk] for chunk in chunks if chunk in works]

    def prefill(self, work: Work) -> list[Part | Failed]:
        """Launch a chunk, or several prompts together; if that fails, each alone."""
        # without those that failed in an earlier chunk of this step
        found = map(self._rows.ledger.get, work.rows)
        rows = [row for row in found if row and row.stage is Stage.PREFILL]
        if len(rows) > 1:
            try:
                made = self._launch(rows)
                return launch(
                    [
                        attempt([row], self._take, row, index, *made)
                        for index, row in enumerate(rows)
                    ]
                )
            except Exception as error:
                if not is_out_of_memory(error):
                    note_again(len(rows), let_go(error))
        begin, end = work.begin, work.end
        return [
            part
            for row in rows
            for part in launch(
                [
                    attempt(
                        [row],
                        self._prefill_alone,
                        row,
                        begin,
                        min(end, row.facts.length),
                    )
                ]
            )
        ]

    def _prefill_alone(self, row: Row, begin: int, end: int) -> Made:
        """Launch one row's chunk, with the idle rows of its shape."""
        prompt = row.prompt
        assert prompt.encoded is not None and prompt.cache is not None
        is_whole = prompt.is_shared and (begin, end) == (0, row.facts.length)
        logits = row.prompt.logits  # (1, V), kept from the same prompt
        scores, scored = row.answer.prompt_scores, []
        if logits is None:
            # else a forward per token
            is_scored = scores is not None and self.adapter.scores_chunks
            count, stop, call = self._shapes.prefill_call(
                begin, [end], is_whole=is_whole, is_scored=is_scored
            )
            if count > 1:
                return self._take(row, 0, *self._launch([row]))
            hidden: list[mx.array] | None = (
                None if row.answer.draft_state is None else []
            )
            logits = self.adapter.prefill(
                [prompt.encoded],
                prompt.cache,
                begin,
                stop,
                replace(call, hidden=hidden),
            )
            if hidden:
                _keep_hidden(hidden[0], [row], begin, [end])
            if stop > end:
                trim(prompt.cache, stop - end)
            if scores is not None:
                scored, logits = scores.add(logits, end), logits[-1:]
        prompt.prefilled = end
        return self._chunk_done(row, logits, scored)

    def _launch(self, rows: Sequence[Row]) -> tuple[mx.array, list[Any], int]:
        prompts = [row.prompt.encoded for row in rows if row.prompt.encoded is not None]
        cache = self.adapter.make_cache(self._kv)
        count, end, call = self._shapes.prefill_call(
            0, [prompt.length for prompt in prompts], is_whole=True
        )
        filled = [*prompts, *[prompts[-1]] * (count - len(prompts))]
        hidden: list[mx.array] | None = (
            [] if any(row.answer.draft_state is not None for row in rows) else None
        )
        logits = self.adapter.prefill(
            filled, cache, 0, end, replace(call, hidden=hidden)
        )
        if hidden:
            _keep_hidden(hidden[0], rows, 0, [prompt.length for prompt in prompts])
        mx.async_eval(logits, [layer.state for layer in cache])
        return logits, cache, end

    def _take(
        self, row: Row, index: int, logits: mx.array, cache: list[Any], width: int
    ) -> Made:
        prompt, length = row.prompt, row.facts.length
        prompt.cache = take_row(
            cache, index, is_own=self._shapes.layout is Placement.ROWS
        )
        prompt.prefilled = length
        trim(prompt.cache, width - length)
        return self._chunk_done(row, logits[index : index + 1])

    def _chunk_done(
        self, row: Row, logits: mx.array, scored: Sequence[mx.array] = ()
    ) -> Made:
        """Return a chunk's part and arrays. ``logits`` (1, V): of its last position."""
        prompt = row.prompt
        assert prompt.encoded is not None and prompt.cache is not None
        is_done = prompt.prefilled == row.facts.length
        kept = self._reuse.keep(row, logits if is_done else None)
        if is_done:
            self.adapter.finish_prefill(prompt.encoded, prompt.cache)
        state = arrays_of([cache.state for cache in prompt.cache])
        last = [logits] if is_done else []
        # A part does not hold a row's state, which the next token would have to copy.
        part = Part(
            [row], logits if is_done else None, [*(last or state), *kept, *scored]
        )
        return part, [*state, *last, *kept, *scored]


def _keep_hidden(
    hidden: mx.array, rows: Sequence[Row], begin: int, ends: Sequence[int]
) -> None:
    """Keep the last of a chunk's hidden states (R, L, D) from ``begin`` for the draft model."""
    for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
        if (state := row.answer.draft_state) is not None:
            first = max(begin, end - (state.hidden.maxlen or 0))
            states = own_array(hidden[index, first - begin : end - begin])
            mx.async_eval(states)
            state.hidden.append(Hidden(states, 0, first, end - first))


def picture_bytes(row: Row) -> int:
    return (
        row.prompt.nbytes
        if row.image_sizes or row.video_sizes or row.audio_seconds
        else 0
    )


def check_length(
    prompt: int, context: int | None, limit: int | None, *, least: int = 1
) -> None:
    """Raise PromptTooLong. ``least``: fewest tokens of the answer."""
    if limit is not None and prompt > limit:
        raise PromptTooLong(
            f"the prompt has {prompt} tokens (pictures included); {limit} are taken",
            advice=" (Limits.prompt_tokens)",
        )
    if context is not None and prompt + least > context:
        raise PromptTooLong(
            f"the prompt has {prompt} tokens (pictures included); the model's context holds {context}"
        )
