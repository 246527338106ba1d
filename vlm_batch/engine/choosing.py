"""From a forward's logits to launched tokens: penalties, masks, processors, the sampler.

A row whose own processor or parameters raise ends alone. Rows whose last token decides what may be the next are held back
until it was read, and are chosen in a launch of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from vlm_batch.arrays import stack_logits
from vlm_batch.engine.constraints import apply_masks
from vlm_batch.engine.port import Sampler
from vlm_batch.engine.recovery import Recovery
from vlm_batch.engine.row import Row, Status
from vlm_batch.engine.sampling import Sampled, SamplingRow, changes_logits, process
from vlm_batch.types import TokenLogprobs


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

    @classmethod
    def of(cls, rows: Sequence[Row], sampled: Sampled, *, is_known: bool = False) -> Flight:
        return cls(tuple(rows), tuple(row.losses for row in rows), sampled, is_known)

    def is_for(self, index: int) -> bool:
        """Whether a token of its own still has a row that waits for it."""
        return self.rows[index].status is not Status.FINISHED and self.rows[index].losses == self.losses[index]

    @property
    def waiting(self) -> list[Row]:
        """The rows that its tokens are still for."""
        return [row for index, row in enumerate(self.rows) if self.is_for(index)]

    def values(self) -> tuple[list[int], list[bool], dict[int, TokenLogprobs]]:
        """Wait for it: (tokens, whether each row's logits were finite, log-probabilities by index)."""
        return self.sampled.read()


@dataclass
class Launched:
    """The work that a step launched, in the device's order; the next step reads it."""

    decode: Sequence[Flight] = ()
    guided: Sequence[Flight] = ()  # of the same forward: rows whose choice waited for their last token
    chunks: dict[Row, list[mx.array]] = field(default_factory=dict)  # what to wait for: what a row's last chunk left
    joined: Sequence[Flight] = ()  # first tokens of the rows whose prompts ended


class Chooser:
    """Chooses and launches the tokens of rows that decode. ``leave`` frees the place of a row whose last token this is."""

    def __init__(self, sampler: Sampler, recovery: Recovery, leave: Callable[[Row], None]) -> None:
        self.sampler = sampler
        self._recovery = recovery
        self._leave = leave
        self.held: tuple[tuple[Row, mx.array], ...] = ()  # guided rows, with their logits (1, V) of this step

    def choose(self, logits: mx.array, rows: Sequence[Row]) -> Sequence[Flight]:
        """Sample a forward's logits (R, V), but for rows whose last token has to be read first."""
        return self._recovery.together(rows, self._choose, logits, rows) or ()

    def _choose(self, logits: mx.array, rows: Sequence[Row]) -> Sequence[Flight]:
        free = [
            index for index, row in enumerate(rows) if row.answer.guide is None or row.answer.known_token is not None
        ]
        if len(free) == len(rows):
            return self._sample(logits, rows)
        _launch(logits)
        self.held += tuple((row, logits[index : index + 1]) for index, row in enumerate(rows) if index not in free)
        return self._sample(logits[mx.array(free)], [rows[index] for index in free]) if free else ()

    def choose_first(self, joined: Sequence[tuple[Row, mx.array]]) -> Sequence[Flight]:
        """First tokens of rows whose prompts ended, with those prompts' logits (1, V); suspects are each alone."""
        apart = [[pair] for pair in joined if pair[0].is_suspect]
        shared = [pair for pair in joined if not pair[0].is_suspect]
        flights: list[Flight] = []
        for pairs in ([shared] if shared else []) + apart:
            rows = [row for row, _ in pairs]
            flights += self._recovery.together(rows, self._sample_first, [logits for _, logits in pairs], rows) or ()
        return flights

    def _sample_first(self, logits: Sequence[mx.array], rows: Sequence[Row]) -> Sequence[Flight]:
        return self._sample(stack_logits(logits), rows)

    def choose_held(self) -> Sequence[Flight]:
        """Choose the tokens of rows that had to be read first; their forward is on its way, and the others' choice too."""
        held = [(row, logits) for row, logits in self.held if row.status is Status.DECODE]
        self.held = ()
        return self.choose_first(held)

    def _sample(self, logits: mx.array, rows: Sequence[Row]) -> Sequence[Flight]:
        """Processors, then sampling of (R, V). A row whose processor or parameters raise ends alone; the others go on."""
        rows, logits = _decoding(rows, logits)  # the others began again meanwhile, with what was sampled before these
        known = [index for index, row in enumerate(rows) if row.answer.known_token is not None]
        if known:
            new = [index for index in range(len(rows)) if index not in known]
            flights = self._say_again(logits[mx.array(known)], [rows[index] for index in known])
            return [*flights, *(self._sample(logits[mx.array(new)], [rows[index] for index in new]) if new else ())]
        rows, logits = self._masked(*self._processed(rows, logits))
        if not rows:
            return ()
        try:
            flights = [Flight.of(rows, self.sampler(logits, [_sampling_row(row) for row in rows]))]
        except Exception:  # each alone then, so that only the culprit ends
            one_by_one = [
                (row, self._recovery.guard(row, self.sampler, logits[index : index + 1], [_sampling_row(row)]))
                for index, row in enumerate(rows)
            ]
            flights = [Flight.of([row], sampled) for row, sampled in one_by_one if sampled is not None]
        return [flight for flight in flights if self._advance(flight)]

    def _processed(self, rows: Sequence[Row], logits: mx.array) -> tuple[Sequence[Row], mx.array]:
        """Rows with their logits (R, V), after the rows' own penalties and processors."""
        if not any(changes_logits(row.params) for row in rows):
            return rows, logits
        single = [logits[index : index + 1] for index in range(len(rows))]
        picked = [
            self._recovery.guard(row, process, one, _sampling_row(row)) if changes_logits(row.params) else one
            for row, one in zip(rows, single, strict=True)
        ]
        rows = [row for row, one in zip(rows, picked, strict=True) if one is not None]
        return rows, stack_logits([one for one in picked if one is not None]) if rows else logits

    def _masked(self, rows: Sequence[Row], logits: mx.array) -> tuple[Sequence[Row], mx.array]:
        """Rows with their logits (R, V), of which only those stay that the rows' forms allow."""
        guided = [row for row in rows if row.answer.guide is not None]
        if not guided:
            return rows, logits
        masks = {row: self._recovery.guard(row, _mask, row, logits.shape[-1]) for row in guided}
        rows, logits = _decoding(rows, logits)
        return rows, apply_masks(logits, [masks.get(row) for row in rows]) if rows else logits

    def _say_again(self, logits: mx.array, rows: Sequence[Row]) -> Sequence[Flight]:
        """The tokens that rows have said before, in place of sampled ones: the caches see them again, nobody else does."""
        tokens = mx.array([row.answer.known_token for row in rows], dtype=mx.int32)
        chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        flight = Flight.of(rows, Sampled(tokens, chosen), is_known=True)
        return [flight] if self._advance(flight) else []

    def _advance(self, flight: Flight) -> bool:
        """Launch what was chosen, as the rows' next tokens; False if that fails."""
        if len(flight.waiting) < len(flight.rows):
            return False
        if self._recovery.together(flight.rows, _launch_flight, flight) is None:
            return False
        tokens = flight.sampled.tokens.astype(mx.int32)
        for index, row in enumerate(flight.rows):
            row.answer.advance(tokens, index)
            if row.is_last:
                self._recovery.guard(row, self._leave, row)  # its last token needs no further step
        return True


def _decoding(rows: Sequence[Row], logits: mx.array) -> tuple[Sequence[Row], mx.array]:
    """Those of some rows that decode, with their logits (R, V)."""
    here = [index for index, row in enumerate(rows) if row.status is Status.DECODE]
    if len(here) == len(rows):
        return rows, logits
    return [rows[index] for index in here], logits[mx.array(here)] if here else logits


def _launch(*arrays: mx.array) -> bool:
    mx.async_eval(list(arrays))
    return True


def _launch_flight(flight: Flight) -> bool:
    return _launch(*flight.sampled.arrays())


def _mask(row: Row, size: int) -> np.ndarray | None:
    assert row.answer.guide is not None
    return row.answer.guide.allowed(size)


def _sampling_row(row: Row) -> SamplingRow:
    answer = row.answer
    return SamplingRow(row.params, row.seed, answer.num_sampled, answer.history, row.facts.vocabulary, answer.rules)
