"""From a forward's logits to launched tokens: penalties, masks, processors, the sampler.

A row whose own processor or parameters raise fails alone, and the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from vlm_batch.arrays import stack_logits
from vlm_batch.engine.constraints import apply_masks
from vlm_batch.engine.port import Sampler
from vlm_batch.engine.row import Row, Status
from vlm_batch.engine.sampling import Sampled, SamplingRow, process
from vlm_batch.engine.work import Failed, Part, attempt


@dataclass(frozen=True)
class Flight:
    """A launched step: the sampled tokens, perhaps not yet computed, and the rows that they belong to.

    ``losses`` are the rows' own at its launch: a row that has begun again since has no use for it. ``is_known``: the
    tokens were said before, by rows that are on their way back to where they were.
    """

    rows: tuple[Row, ...]
    losses: tuple[int, ...]
    sampled: Sampled
    is_known: bool = False

    def is_for(self, index: int) -> bool:
        """Whether a token of its own still has a row that waits for it."""
        return self.rows[index].status is not Status.FINISHED and self.rows[index].losses == self.losses[index]

    @property
    def waiting(self) -> list[Row]:
        """The rows that its tokens are still for."""
        return [row for index, row in enumerate(self.rows) if self.is_for(index)]


def choose(parts: Sequence[Part], sampler: Sampler) -> list[Flight | Failed]:
    """Choose the next tokens of the rows that decode from their logits, and launch that: all at once, but for those who have
    said theirs before."""
    rows = [row for part in parts for row in part.rows]
    given = [part.logits for part in parts if part.logits is not None]
    logits = given[0] if len(given) == 1 else stack_logits(given)
    here = [index for index, row in enumerate(rows) if row.status is Status.DECODE]  # others began again meanwhile
    known = [index for index in here if rows[index].answer.known_token is not None]
    new = [index for index in here if index not in known] if known else here
    found: list[Flight | Failed] = []
    if known:
        again = [rows[index] for index in known]
        tokens = mx.array([row.answer.known_token for row in again], dtype=mx.int32)
        chosen = mx.take_along_axis(logits[mx.array(known)], tokens[:, None], axis=-1)[:, 0]
        found.append(attempt(again, _launch, again, Sampled(tokens, chosen), is_known=True, is_shared=True))
    if len(new) < len(rows):
        rows, logits = [rows[index] for index in new], logits[mx.array(new)] if new else logits
    if any(row.answer.changes_logits or row.answer.guide is not None for row in rows):
        rows, logits, failed = _allowed(rows, logits)
        found += failed
    if not rows:
        return found
    try:
        sampled = [(rows, sampler(logits, [_sampling_row(row) for row in rows]))]
    except Exception:  # each alone then, so that only the culprit ends
        sampled = []
        for index, row in enumerate(rows):
            one = attempt([row], sampler, logits[index : index + 1], [_sampling_row(row)])
            if isinstance(one, Failed):
                found.append(one)
            else:
                sampled.append(([row], one))
    return found + [attempt(those, _launch, those, one, is_shared=True) for those, one in sampled]


def _allowed(rows: list[Row], logits: mx.array) -> tuple[list[Row], mx.array, list[Failed]]:
    """Rows with their logits (R, V), after the rows' own penalties and processors, of which only those stay that the rows'
    forms allow; and who failed."""
    failed: list[Failed] = []
    if any(row.answer.changes_logits for row in rows):
        made = [
            attempt([row], process, logits[index : index + 1], _sampling_row(row))
            if row.answer.changes_logits
            else logits[index : index + 1]
            for index, row in enumerate(rows)
        ]
        failed = [one for one in made if isinstance(one, Failed)]
        rows = [row for row, one in zip(rows, made, strict=True) if not isinstance(one, Failed)]
        logits = stack_logits([one for one in made if not isinstance(one, Failed)]) if rows else logits
    if any(row.answer.guide is not None for row in rows):
        masks = [
            None if row.answer.guide is None else attempt([row], row.answer.guide.allowed, logits.shape[-1])
            for row in rows
        ]
        wrong = [mask for mask in masks if isinstance(mask, Failed)]
        if wrong:
            failed += wrong
            good = [index for index, mask in enumerate(masks) if not isinstance(mask, Failed)]
            rows, logits = [rows[index] for index in good], logits[mx.array(good)] if good else logits
        logits = apply_masks(logits, [mask for mask in masks if not isinstance(mask, Failed)]) if rows else logits
    return rows, logits, failed


def _launch(rows: Sequence[Row], sampled: Sampled, *, is_known: bool = False) -> Flight:
    mx.async_eval(sampled.arrays())
    return Flight(tuple(rows), tuple(row.losses for row in rows), sampled, is_known)


def _sampling_row(row: Row) -> SamplingRow:
    answer = row.answer
    return SamplingRow(row.params, row.seed, answer.num_sampled, answer.history, row.facts.vocabulary, answer.rules)
