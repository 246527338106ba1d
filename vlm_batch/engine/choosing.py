"""Choice of the next tokens. A row whose own processor raises fails alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from vlm_batch.arrays import stack_logits
from vlm_batch.engine.constraints import apply_masks
from vlm_batch.engine.port import Sampler
from vlm_batch.engine.row import Row, Status
from vlm_batch.engine.sampling import Sampled, SamplingRow, check_within, process
from vlm_batch.engine.work import Failed, Part, attempt


@dataclass(frozen=True)
class Flight:
    """Launched tokens; a drafting row has one per position."""

    rows: tuple[Row, ...]
    # ``Row.losses`` at the launch: a row recomputed since ignores its token
    losses: tuple[int, ...]
    sampled: Sampled
    is_known: bool = False  # told before, by rows that are recomputed

    def is_for(self, index: int) -> bool:
        return (
            self.rows[index].status is not Status.FINISHED
            and self.rows[index].losses == self.losses[index]
        )

    @property
    def waiting(self) -> list[Row]:
        return list(
            dict.fromkeys(
                row for index, row in enumerate(self.rows) if self.is_for(index)
            )
        )


def choose(parts: Sequence[Part], sampler: Sampler) -> list[Flight | Failed]:
    """Choose and launch the next tokens. Recomputed rows repeat theirs."""
    rows = [
        row for part in parts for row in part.rows for _ in range(1 + len(part.ahead))
    ]
    given = [part.logits for part in parts if part.logits is not None]
    logits = given[0] if len(given) == 1 else stack_logits(given)
    # the others began again
    here = [index for index, row in enumerate(rows) if row.status is Status.DECODE]
    known = [index for index in here if rows[index].answer.known_token is not None]
    new = [index for index in here if index not in known] if known else here
    found: list[Flight | Failed] = []
    if known:
        again = [rows[index] for index in known]
        tokens = mx.array([row.answer.known_token for row in again], dtype=mx.int32)
        chosen = mx.take_along_axis(logits[mx.array(known)], tokens[:, None], axis=-1)[
            :, 0
        ]
        found.append(
            attempt(
                again,
                _launch,
                again,
                Sampled(tokens, chosen),
                is_known=True,
                is_shared=True,
            )
        )
    if len(new) < len(rows):
        rows = [rows[index] for index in new]
        logits = logits[mx.array(new)] if new else logits
    if any(
        row.answer.changes_logits or row.answer.guide is not None or _has_new_ends(row)
        for row in rows
    ):
        rows, logits, failed = _allowed(rows, logits)
        found += failed
    if not rows:
        return found
    try:
        sampled = [(rows, sampler(logits, _sampling_rows(rows)))]
    except Exception:  # one at a time, so that only the culprit fails
        sampled = []
        for row, places in _places(rows).items():
            own = [row] * len(places)
            one = attempt([row], sampler, logits[mx.array(places)], _sampling_rows(own))
            if isinstance(one, Failed):
                found.append(one)
            else:
                sampled.append((own, one))
    return found + [
        attempt(those, _launch, those, one, is_shared=True) for those, one in sampled
    ]


def _allowed(
    rows: list[Row], logits: mx.array
) -> tuple[list[Row], mx.array, list[Failed]]:
    """Apply the rows' own stages and forms to logits (R, V). Returns rows, logits, failures."""
    failed = _with_unknown_ends(rows, logits.shape[-1])
    if failed:
        wrong_rows = {row for one in failed for row in one.rows}
        known = [index for index, row in enumerate(rows) if row not in wrong_rows]
        rows = [rows[index] for index in known]
        logits = logits[mx.array(known)] if known else logits
    if any(row.answer.changes_logits for row in rows):
        made = [
            attempt([owner], process, logits[index : index + 1], row)
            if owner.answer.changes_logits
            else logits[index : index + 1]
            for index, (owner, row) in enumerate(
                zip(rows, _sampling_rows(rows), strict=True)
            )
        ]
        failed += [one for one in made if isinstance(one, Failed)]
        rows = [
            row
            for row, one in zip(rows, made, strict=True)
            if not isinstance(one, Failed)
        ]
        logits = (
            stack_logits([one for one in made if not isinstance(one, Failed)])
            if rows
            else logits
        )
    if any(row.answer.guide is not None for row in rows):
        masks = [
            mask
            for row, places in _places(rows).items()
            for mask in _masks(row, len(places), logits.shape[-1])
        ]
        wrong = [mask for mask in masks if isinstance(mask, Failed)]
        if wrong:
            failed += wrong
            good = [
                index
                for index, mask in enumerate(masks)
                if not isinstance(mask, Failed)
            ]
            rows = [rows[index] for index in good]
            logits = logits[mx.array(good)] if good else logits
        logits = (
            apply_masks(
                logits, [mask for mask in masks if not isinstance(mask, Failed)]
            )
            if rows
            else logits
        )
    return rows, logits, failed


def _has_new_ends(row: Row) -> bool:
    return bool(row.params.stop_token_ids) and not row.answer.num_sampled


def _with_unknown_ends(rows: Sequence[Row], size: int) -> list[Failed]:
    """Return the failures of rows that have just begun and would end at a token that the model does not have."""
    checked = [
        attempt(
            [row],
            check_within,
            "stop_token_ids",
            row.params.stop_token_ids,
            row.facts.vocabulary or size,
        )
        for row in dict.fromkeys(rows)
        if _has_new_ends(row)
    ]
    return [one for one in checked if isinstance(one, Failed)]


def _launch(rows: Sequence[Row], sampled: Sampled, *, is_known: bool = False) -> Flight:
    mx.async_eval(sampled.arrays())
    return Flight(tuple(rows), tuple(row.losses for row in rows), sampled, is_known)


def _places(rows: Sequence[Row]) -> dict[Row, list[int]]:
    found: dict[Row, list[int]] = {}
    for place, row in enumerate(rows):
        found.setdefault(row, []).append(place)
    return found


def _masks(row: Row, count: int, size: int) -> list[np.ndarray | Failed | None]:
    guide = row.answer.guide
    if guide is None:
        return [None] * count
    return [
        attempt([row], guide.allowed, size),
        *[guide.allowed_ahead(at, size) for at in range(count - 1)],
    ]


def _sampling_rows(rows: Sequence[Row]) -> list[SamplingRow]:
    """Return a sampling row per position. A drafting row's positions follow each other."""
    found: list[SamplingRow] = []
    ahead = 0
    for place, row in enumerate(rows):
        answer, history = row.answer, row.answer.history
        ahead = ahead + 1 if place and row is rows[place - 1] else 0
        if ahead and history is not None:
            history = mx.concatenate(
                [history, mx.array(answer.drafter.ahead[:ahead], dtype=history.dtype)]
            )
        step = answer.num_sampled + ahead
        found.append(
            SamplingRow(
                row.params, row.seed, step, history, row.facts.vocabulary, answer.rules
            )
        )
    return found
