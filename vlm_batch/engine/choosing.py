"""Choice of the next tokens. A row whose own processor raises fails alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from vlm_batch.arrays import stack_logits
from vlm_batch.engine.constraints import apply_masks
from vlm_batch.engine.options import said_on_paths
from vlm_batch.engine.row import Row, Stage
from vlm_batch.engine.sampling import (
    Sampled,
    Sampler,
    SamplingRow,
    process,
)
from vlm_batch.engine.work import Failed, Part, attempt, attempt_each


@dataclass(frozen=True)
class Flight:
    """Launched tokens; a drafting row has one per position."""

    rows: tuple[Row, ...]
    # ``Row.losses`` at the launch: a row that was recomputed or ended since ignores its token
    losses: tuple[int, ...]
    sampled: Sampled
    is_repeated: bool = False  # told before, by rows that are recomputed

    def waiting(self) -> Iterator[tuple[int, Row]]:
        """Yield the indices and rows that the tokens are still for, each asked when it comes."""
        for index, row in enumerate(self.rows):
            if row.losses == self.losses[index]:
                yield index, row

    def advance(self) -> list[Row]:
        """Give rows their tokens, but for drafts. Returns those that need no further forward."""
        tokens = self.sampled.tokens.astype(mx.int32)
        complete: list[Row] = []
        for index, row in self.waiting():
            answer = row.answer
            if answer.drafter.ahead:
                continue
            answer.advance(tokens, index)
            if answer.num_sampled >= answer.max_tokens:
                complete.append(row)
        return complete


class Positions(NamedTuple):
    """Rows and their logits (R, V) of one position each. Those of a drafting row follow each other."""

    rows: list[Row]
    logits: mx.array

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Positions:
        rows: list[Row] = []
        given: list[mx.array] = []
        for part in parts:
            # a part with drafts has one row
            rows += [*part.rows] * (1 + len(part.ahead))
            given.append(part.logits)
        return cls(rows, given[0] if len(given) == 1 else stack_logits(given))

    def only(self, indices: Sequence[int]) -> Positions:
        """Return some of them, in order."""
        if len(indices) == len(self.rows):
            return self
        rows = [self.rows[index] for index in indices]
        return Positions(rows, self.logits[mx.array(list(indices), dtype=mx.int32)])

    def without(self, failed: Sequence[Failed]) -> Positions:
        """Return those of rows that did not fail."""
        wrong = [row for one in failed for row in one.rows]
        right = [at for at, row in enumerate(self.rows) if row not in wrong]
        return self.only(right)

    def by_row(self) -> dict[Row, list[int]]:
        """Return each row's indices."""
        found: dict[Row, list[int]] = {}
        for index, row in enumerate(self.rows):
            found.setdefault(row, []).append(index)
        return found


#: Chooses and launches the tokens of positions of one kind.
_Way: TypeAlias = "Callable[[Positions, Sampler], list[Flight | Failed]]"


def choose(parts: Sequence[Part], sampler: Sampler) -> Iterator[Flight | Failed]:
    """Choose and launch the next tokens, those of suspected rows apart."""
    calls: dict[Row | None, list[Part]] = {}  # by the suspected row, if it is one's
    for part in parts:
        first = part.rows[0]
        calls.setdefault(first if first.is_suspect else None, []).append(part)
    for those in calls.values():
        rows = [row for part in those for row in part.rows]
        yield from attempt_each(rows, _choose, those, sampler)


def _choose(parts: Sequence[Part], sampler: Sampler) -> list[Flight | Failed]:
    """Choose and launch tokens together. Recomputed rows repeat theirs."""
    positions = Positions.of(parts)
    ways: dict[_Way, list[int]] = {}
    for index, row in enumerate(positions.rows):
        if row.stage is Stage.DECODE:  # else it began again
            ways.setdefault(_way_of(row), []).append(index)
    found: list[Flight | Failed] = []
    for way, indices in ways.items():
        found += way(positions.only(indices), sampler)
    return found


def _way_of(row: Row) -> _Way:
    """Return how a row's next token is chosen."""
    if row.answer.known_token is not None:
        return _repeat
    return _new if row.answer.path is None else _score


def _new(positions: Positions, sampler: Sampler) -> list[Flight | Failed]:
    """Choose and launch tokens that nobody knows yet."""
    found: list[Flight | Failed] = []
    for apply in (_processed, _masked):
        positions, failed = apply(positions)
        found += failed
    if positions.rows:
        found += _sample(positions, sampler)
    return found


def _repeat(positions: Positions, sampler: Sampler) -> list[Flight | Failed]:
    """Launch the tokens that recomputed rows said before."""
    rows = positions.rows
    tokens = mx.array([row.answer.known_token for row in rows], dtype=mx.int32)
    logits = mx.take_along_axis(positions.logits, tokens[:, None], axis=-1)[:, 0]
    return [_launch(rows, Sampled(tokens, logits), is_repeated=True)]


def _score(positions: Positions, sampler: Sampler) -> list[Flight | Failed]:
    """Launch the tokens of paths, with the log-probabilities of options."""
    sampled = said_on_paths(positions.rows, positions.logits)
    return [_launch(positions.rows, sampled)]


def _sample(positions: Positions, sampler: Sampler) -> list[Flight | Failed]:
    """Sample and launch all tokens; if that raises, each row's apart, so that only the culprit fails."""
    rows = positions.rows
    try:
        sampled = sampler(positions.logits, _sampling_rows(rows))
    except Exception:
        return _sample_apart(positions, sampler)
    return [_launch(rows, sampled)]


def _sample_apart(positions: Positions, sampler: Sampler) -> list[Flight | Failed]:
    found: list[Flight | Failed] = []
    for row, indices in positions.by_row().items():
        own = positions.only(indices)
        rows = _sampling_rows(own.rows)
        sampled = attempt([row], sampler, own.logits, rows)
        if isinstance(sampled, Failed):
            found.append(sampled)
            continue
        found.append(_launch(own.rows, sampled))
    return found


def _launch(
    rows: Sequence[Row], sampled: Sampled, *, is_repeated: bool = False
) -> Flight | Failed:
    failed = attempt(rows, mx.async_eval, sampled.arrays(), is_shared=True)
    if failed is not None:
        return failed
    losses = tuple(row.losses for row in rows)
    return Flight(tuple(rows), losses, sampled, is_repeated)


# What a row asks for itself


def _processed(positions: Positions) -> tuple[Positions, list[Failed]]:
    """Apply the rows' own stages. Returns what is left, and failures."""
    if not any(row.answer.rules.changes_logits for row in positions.rows):
        return positions, []
    made: list[mx.array] = []
    failed: list[Failed] = []
    sampling_rows = _sampling_rows(positions.rows)
    for index, row in enumerate(positions.rows):
        logits = positions.logits[index : index + 1]
        if not row.answer.rules.changes_logits:
            made.append(logits)
            continue
        found = attempt([row], process, logits, sampling_rows[index])
        if isinstance(found, Failed):
            failed.append(found)
            found = logits
        made.append(found)
    changed = Positions(positions.rows, stack_logits(made))
    return changed.without(failed), failed


def _masked(positions: Positions) -> tuple[Positions, list[Failed]]:
    """Leave out tokens that forms and thinking do not allow. Returns what is left, and failures."""
    if not any(row.answer.guide.rules for row in positions.rows):
        return positions, []
    masks: list[np.ndarray | None] = []
    failed: list[Failed] = []
    for row, indices in positions.by_row().items():
        size = positions.logits.shape[-1]
        own = attempt([row], _masks, row, len(indices), size)
        if isinstance(own, Failed):
            failed.append(own)
        else:
            masks += own
    positions = positions.without(failed)
    if not positions.rows:
        return positions, failed
    masked = apply_masks(positions.logits, masks)
    return Positions(positions.rows, masked), failed


def _masks(row: Row, count: int, size: int) -> list[np.ndarray | None]:
    """Return what ``count`` positions of a row allow."""
    guide = row.answer.guide
    ahead = [guide.allowed_ahead(at, size) for at in range(count - 1)]
    return [guide.allowed(size), *ahead]


def _sampling_rows(rows: Sequence[Row]) -> list[SamplingRow]:
    """Return a sampling row per position. A drafting row's positions follow each other."""
    found: list[SamplingRow] = []
    seen: dict[Row, int] = {}  # positions of each
    for row in rows:
        ahead = seen.get(row, 0)
        seen[row] = ahead + 1
        answer, history = row.answer, row.answer.history
        if ahead and history is not None:
            drafted = mx.array(answer.drafter.ahead[:ahead], dtype=history.dtype)
            history = mx.concatenate([history, drafted])
        step = answer.num_sampled + ahead
        found.append(
            SamplingRow(
                row.params, row.seed, step, history, row.facts.vocabulary, answer.rules
            )
        )
    return found
