"""Speculative decoding: rows also compute probable next tokens.

Tokens are chosen as without drafts, which count up to the first wrong one. Drafts come from forms, earlier text
(``EarlierText``) or a model (``Heads``). Each row has a ``Drafter``; ``Drafts`` says how many tokens pay
(``draft_costs``).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.constraints import NoGuide
from vlm_batch.engine.draft_costs import (
    LEAST_GAIN,
    LEAST_GAIN_READ,
    Expectation,
    StepClock,
    StepSeconds,
)
from vlm_batch.engine.drafter import (
    MOST_PROPOSED,
    NO_DRAFTER,
    SIZES,
    Acceptance,
    Drafter,
    NoDrafter,
)
from vlm_batch.engine.earlier import EarlierText, checked
from vlm_batch.engine.groups import DecodeGroups
from vlm_batch.engine.row import Row, Stage
from vlm_batch.engine.work import Failed, attempt
from vlm_batch.records import DraftState, Encoded

if TYPE_CHECKING:
    from vlm_batch.adapters.heads import Heads
    from vlm_batch.engine.telling import Patience

#: Clients whose earlier answers are kept.
MOST_CLIENTS = 64
#: Least probability of a row's last drafted token, in drafts that are tried: a position costs many rows more than one.
FLOORS = (0.1, 0.5)
#: Refused drafts after which forwards are timed anew. The number doubles each time, from the first to the most.
FIRST_PATIENCE, MOST_PATIENCE = 16, 1024
#: Steps after a refusal in which nobody asks again: one more for each refusal, from the first to the most.
PAUSE, MOST_PAUSE = 4, 16


logger = logging.getLogger("vlm_batch.drafts")


class NoDrafts:
    """Of an engine without drafts."""

    #: Drafts beside forms and earlier text.
    model: Heads | None = None
    #: Tokens that were drafted, and those of them that were accepted.
    num_drafted = 0
    num_held = 0

    def note_words(self, logits: mx.array) -> None:
        """Note how many tokens the model has, of logits (R, V)."""

    def give_drafter(self, row: Row, prompt: Encoded) -> None:
        """Let a row draft, unless it has a drafter, or logits processors, which may count calls."""

    def launched(self, positions: int) -> None:
        """Note a forward's positions; 0 if other work ran beside it."""

    def was_read(self) -> None:
        """Note that launched tokens were read."""

    def wants(self, groups: Sequence[DecodeBatch]) -> bool:
        """Return whether launched tokens must be read first: they are drafted, or drafts will follow them."""
        return False

    def propose(
        self, batch: DecodeGroups, patience: Patience
    ) -> Iterator[Failed | None]:
        """Give drafts to rows whose tokens have been read, within what a step may wait. Yields failures."""
        return iter(())


NO_DRAFTS = NoDrafts()


class Drafts(NoDrafts):
    """Chooses each step's drafts by measured acceptance rates and forward times.

    Args:
        model: drafts beside forms and earlier text.
    """

    def __init__(self, model: Heads | None = None) -> None:
        self.model = model
        self.acceptance = Acceptance()
        self.seconds = StepSeconds()
        self.model_seconds = StepSeconds()  # of one drafted token, by places
        self.clock = StepClock(self.seconds)
        self.num_words = 2**31  # tokens of the model
        self._is_told = False  # that a source has failed
        self._num_refused, self._patience = 0, FIRST_PATIENCE
        self._pause = 0  # steps in which nobody asks
        self._spoken: OrderedDict[int, bytearray] = OrderedDict()

    @property
    def num_drafted(self) -> int:  # type: ignore[override]
        return self.acceptance.num_drafted

    @property
    def num_held(self) -> int:  # type: ignore[override]
        return self.acceptance.num_held

    def note_words(self, logits: mx.array) -> None:
        self.num_words = logits.shape[-1]

    def give_drafter(self, row: Row, prompt: Encoded) -> None:
        if row.answer.drafter is not NO_DRAFTER:
            return
        if not row.terms.may_draft or row.params.logits_processors:
            return
        ids = np.array(prompt.input_ids, dtype=np.int32)[0]
        state = None
        # else tokens and hidden states do not fit
        if self.model is not None and len(ids) == prompt.length:
            state = DraftState(deque(maxlen=self.model.context))
        text = EarlierText(ids.tobytes(), self._spoken_by(row.client))
        row.answer.drafter = Drafter(text, self.acceptance, state)
        if row.answer.guide.rules:
            row.answer.guide.most_ahead = SIZES[-1]

    def _spoken_by(self, client: int) -> bytearray:
        """Return a client's earlier answers."""
        spoken = self._spoken.setdefault(client, bytearray())
        self._spoken.move_to_end(client)
        if len(self._spoken) > MOST_CLIENTS:
            self._spoken.popitem(last=False)
        return spoken

    def launched(self, positions: int) -> None:
        self.clock.launched(positions)

    def was_read(self) -> None:
        self.clock.was_read()

    # Before tokens are read

    def wants(self, groups: Sequence[DecodeBatch]) -> bool:
        for group in groups:
            for row in group.rows:
                if row.answer.drafter.ahead:
                    return True
        return self.is_due(groups)

    def is_due(self, groups: Sequence[DecodeBatch]) -> bool:
        """Return whether drafts will follow launched tokens."""
        self._pause -= 1
        if self._pause >= 0:
            return False
        shared = [group for group in groups if not group.is_apart]
        return any(map(self._is_due, shared))

    def _is_due(self, group: DecodeBatch) -> bool:
        found: dict[Row, Expectation] = {}
        has_forms = False
        for row in group.rows:
            foreseen = self._foreseen(row)
            if foreseen is not None:
                found[row] = foreseen
                has_forms |= row.answer.guide.rules
        if not found:
            return False
        is_due = bool(self._chosen(group, found, LEAST_GAIN))
        self._pause = 0
        if not is_due and not has_forms:
            self._pause = min(PAUSE + self._num_refused, MOST_PAUSE)
        return is_due

    def _foreseen(self, row: Row) -> Expectation | None:
        """Return a row's probable draft before its token is known."""
        answer = row.answer
        try:
            own = answer.drafter.foreseen(answer.guide)
        except Exception:
            self._give_up(row)
            return None
        if own is None and self.model is None:
            return None  # as mostly
        is_known = answer.known_token is not None
        if is_known or row.is_suspect:
            return None
        return self._better(row, own, _most(row) - 1)

    # Once they are read

    def propose(
        self, batch: DecodeGroups, patience: Patience
    ) -> Iterator[Failed | None]:
        for group in batch.groups:
            yield attempt(group.rows, group.lay_out, is_shared=True)
        begin = time.perf_counter()
        until = begin + patience.left
        self.clock.waits(sum(len(group.places) for group in batch.groups))
        for group in batch.groups:
            left = lambda: until - time.perf_counter()  # noqa: E731
            yield attempt(group.rows, self.plan, group, left, is_shared=True)
        patience.spend(time.perf_counter() - begin)

    def plan(self, group: DecodeBatch, form_seconds: Callable[[], float]) -> None:
        """Give drafts to rows whose tokens have been read."""
        if group.is_apart:
            return
        proposed = dict[Row, tuple[int, ...]]()
        found = dict[Row, Expectation]()
        for row in filter(_can, group.rows):
            try:
                tokens = self.draft(row, form_seconds)
                proposed[row] = checked(tokens, _most(row), self.num_words)
            except Exception:
                self._give_up(row)
                continue
            expected = self._expected(row, proposed[row])
            if expected is not None:
                found[row] = expected
        chosen = self._chosen(group, found, LEAST_GAIN_READ) if found else {}
        asked: dict[Row, int] = {}
        for row, count in chosen.items():
            self._num_refused = 0
            if found[row].source == "model":
                asked[row] = count
            else:
                _drafter(row).launch(proposed[row][:count])
        if asked:
            self._launch_model(group, asked, form_seconds)

    def _expected(self, row: Row, tokens: tuple[int, ...]) -> Expectation | None:
        """Return what to expect of a row's own draft, or of the model's. What a form forces goes first."""
        own = _drafter(row).expected(tokens)
        if own is not None and own.source == "form":
            return own
        return self._better(row, own, _most(row))

    def draft(self, row: Row, form_seconds: Callable[[], float]) -> tuple[int, ...]:
        """Return what a row's own sources propose. Raises what they raise."""
        return _drafter(row).propose(_most(row), row.answer.guide, form_seconds())

    def _better(
        self, row: Row, own: Expectation | None, most: int
    ) -> Expectation | None:
        """Return the better of a row's own draft and the model's, of up to ``most`` tokens."""
        if self.model is None:
            return own
        position = row.facts.length + row.answer.num_sampled - 1
        model = row.answer.drafter.of_model(most, row.answer.guide, position)
        if model is None or own is None:
            return model or own
        is_longer = model.tokens(most) > own.tokens(own.most)
        return model if is_longer else own

    def _chosen(
        self, group: DecodeBatch, found: Mapping[Row, Expectation], least: float
    ) -> dict[Row, int]:
        """Return each row's drafted tokens, if worth their forward."""
        best, chosen = least, dict[Row, int]()
        for size, floor in itertools.product(SIZES, FLOORS):
            lengths: dict[Row, int] = {}
            for row, one in found.items():
                length = one.within(size, floor)
                if length > 0:
                    lengths[row] = length
            gain = self._gain_of(group, found, lengths, least)
            if gain > best:
                best, chosen = gain, lengths
        if not chosen:
            self._refuse(len(group.places), group.rows)
        return chosen

    def _gain_of(
        self,
        group: DecodeBatch,
        found: Mapping[Row, Expectation],
        lengths: Mapping[Row, int],
        least: float,
    ) -> float:
        """Return the gain of drafts of these lengths; 0 if it is below ``least``, or they are impossible."""
        num_rows, places = len(group), len(group.places)
        expected, by_model = 0.0, 0
        for row, length in lengths.items():
            expected += found[row].tokens(length)
            if found[row].source == "model":
                by_model = max(by_model, length)
        if num_rows + expected < least * num_rows:
            return 0.0  # not even if the forward took no longer
        counts = group.counts(lengths)
        if counts is None:
            return 0.0
        # unknown seconds: it is tried
        drafting = by_model * (self.model_seconds.of(places) or 0.0)
        return self.gain(num_rows, expected, places, sum(counts), drafting)

    def gain(
        self,
        rows: int,
        expected: float,
        places: int,
        positions: int,
        drafting: float = 0.0,
    ) -> float:
        """Return the speed-up by ``expected`` more tokens, drafted in ``drafting`` seconds; 0 if unknown."""
        with_drafts = self.seconds.of(positions)
        without = self.seconds.of(places)
        if not with_drafts or not without:
            return 0.0
        more = (rows + expected) / rows
        return more * without / (with_drafts + drafting)

    def _refuse(self, places: int, rows: Sequence[Row] = ()) -> None:
        """Record a draft not worth its forward: measurements may be old."""
        self._num_refused += 1
        if self._num_refused < self._patience:
            return
        self._num_refused = 0
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        self.seconds.forget(places)
        self.model_seconds.forget(0)
        self.acceptance.retry_model()
        for row in rows:
            row.answer.drafter.retry_model()

    # The model that drafts

    def _launch_model(
        self,
        group: DecodeBatch,
        lengths: Mapping[Row, int],
        form_seconds: Callable[[], float],
    ) -> None:
        """Let the model draft, as far as forms allow it."""
        for row, tokens in self._ask(group, lengths).items():
            drafter = _drafter(row)
            guide = row.answer.guide
            if guide.rules:
                tokens = self._allowed(row, guide, tokens, form_seconds)
            drafter.launch(tokens, by_model=True)

    def _ask(
        self, group: DecodeBatch, lengths: Mapping[Row, int]
    ) -> dict[Row, tuple[int, ...]]:
        """Let the model draft. A model that raises is not asked again."""
        begin, count = time.perf_counter(), max(lengths.values())
        states: list[DraftState | None] = [None] * len(group.places)
        live: list[DraftState] = []
        for row in lengths:
            state = _drafter(row).read()
            states[group.places.index(row)] = state
            live.append(state)
        longest = max(len(state.tokens) for state in live)
        found: dict[Row, tuple[int, ...]] = {}
        try:
            assert self.model is not None
            told: Any = self.model.propose(states, group.layers, count).tolist()
            for row, length in lengths.items():
                tokens = told[group.places.index(row)]
                found[row] = checked(tokens, length, self.num_words)
        except Exception:
            logger.exception(
                "the model that drafts has failed; requests go on without its drafts"
            )
            self.model = None
            return dict.fromkeys(lengths, ())
        for state in live:
            state.hidden.clear()
        seconds = time.perf_counter() - begin
        self.clock.drafted(seconds)
        if longest <= 1 + MOST_PROPOSED:  # else it has read a prompt's end
            self.model_seconds.record(len(group.places), seconds / count)
        return found

    def _allowed(
        self,
        row: Row,
        guide: NoGuide,
        tokens: tuple[int, ...],
        form_seconds: Callable[[], float],
    ) -> tuple[int, ...]:
        """Return the first drafted tokens that a row's form allows."""
        try:
            guide.look_ahead(tokens, form_seconds())
            return guide.ahead[: len(tokens)]
        except Exception:
            self._give_up(row)
            return ()

    def _give_up(self, row: Row) -> None:
        """Let a row go on without drafts: a source raised."""
        if not self._is_told:
            logger.exception(
                "a source of drafts has failed; requests go on without its drafts"
            )
        self._is_told = True
        # not ``NO_DRAFTER``: it gets no other if it is computed again
        row.answer.drafter = NoDrafter()


def _drafter(row: Row) -> Drafter:
    drafter = row.answer.drafter
    assert isinstance(drafter, Drafter)
    return drafter


def _can(row: Row) -> bool:
    """Return whether a row may draft now: its tokens are read."""
    answer = row.answer
    if row.stage is not Stage.DECODE or row.is_suspect:
        return False
    if answer.num_sampled != len(answer.token_ids) or answer.known_token is not None:
        return False
    return isinstance(answer.drafter, Drafter)


def _most(row: Row) -> int:
    """Return the longest draft with room in the answer."""
    return row.answer.max_tokens - row.answer.num_sampled - 1
