"""Speculative decoding: rows also compute probable next tokens.

Tokens are chosen as without drafts, which count up to the first wrong one. Drafts come from forms, earlier text
(``Drafter.propose``) or a model (``DraftModel``).
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.drafter import (
    MOST_PROPOSED,
    OWN_WEIGHT,
    WIDTH,
    Drafter,
    checked,
    expected,
)
from vlm_batch.engine.port import DraftModel
from vlm_batch.engine.row import Row, Stage
from vlm_batch.records import DraftState

#: Tokens of earlier answers that are kept for each client, and number of clients.
MOST_SPOKEN, MOST_CLIENTS = 8192, 64
#: Draft lengths that are tried: with the next token, powers of two.
SIZES = (1, 3, 7, MOST_PROPOSED - 1)
#: Least probability of a row's last drafted token, in drafts that are tried: a position costs many rows more than one.
FLOORS = (0.1, 0.5)
#: Initial acceptance rates by source.
FIRST_RATES = {"form": 0.95, "text": 0.5, "model": 0.7}
#: Weight of one token in the acceptance rates of all rows.
COMMON_WEIGHT = 0.02
#: Least speed-up for which rows draft: less is within the error of the estimates.
LEAST_GAIN = 1.2
#: The same once tokens have been read: what is left to lose is the forward's time.
LEAST_GAIN_READ = 1.05
#: Refused drafts after which forwards are timed anew. The number doubles each time, from the first to the most.
FIRST_PATIENCE, MOST_PATIENCE = 16, 1024
#: Steps after a refusal in which nobody asks again: one more for each refusal, from the first to the most.
PAUSE, MOST_PAUSE = 4, 16


logger = logging.getLogger("vlm_batch.drafts")


class StepSeconds:
    """Median seconds of forwards by rows, to three binary digits. Unmeasured ones get low estimates."""

    #: Forwards of a size that are kept: by their median one slow forward decides nothing.
    KEPT = 5
    #: Assumed cost of a further row, relative to a row of the largest measured forward.
    SLOPE = 0.3
    #: Largest forward that is tried, as a multiple of the largest measured one.
    REACH = 4

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._known: dict[int, float] = {}

    def record(self, rows: int, seconds: float) -> None:
        """Record a forward. One of a size is no measure: it may build kernels."""
        size = _rounded(rows)
        samples = self._samples.setdefault(size, deque(maxlen=self.KEPT))
        samples.append(seconds)
        if len(samples) > 1:
            self._known[size] = sorted(samples)[(len(samples) - 1) // 2]

    def forget(self, rows: int) -> None:
        """Forget larger forwards, so that the next draft tries them."""
        for size in [size for size in self._known if size > rows]:
            del self._known[size]
            while len(samples := self._samples[size]) > 1:
                samples.popleft()

    def of(self, rows: int) -> float | None:
        """Return estimated seconds, or None."""
        rows = _rounded(rows)
        if rows > self.REACH * max(self._known, default=0):
            return None
        if rows in self._known or not self._known:
            return min(
                (seconds for size, seconds in self._known.items() if size >= rows),
                default=None,
            )
        below = [known for known in self._known if known < rows]
        above = [known for known in self._known if known > rows]
        if not below:
            return self._known[min(above)]
        if not above:
            most = max(below)
            return self._known[most] * (1 + self.SLOPE * (rows / most - 1))
        low, high = max(below), min(above)
        share = (rows - low) / (high - low)
        return self._known[low] + share * (self._known[high] - self._known[low])


def _rounded(rows: int) -> int:
    """Round up to three binary digits."""
    step = 1 << max(0, rows.bit_length() - 3)
    return -(-rows // step) * step


@dataclass(frozen=True)
class Hope:
    """A draft of up to ``most`` tokens; each is accepted at ``rate`` after the one before, the first at ``sure_rate``."""

    source: str
    most: int
    rate: float
    longest: float = math.inf  # as far as is known
    of_all: float = 1.0  # the rate of the draft as a whole
    num_sure: int = 0  # its first tokens, which a form forces
    sure_rate: float = 1.0

    def within(self, size: int, floor: float) -> int:
        """Return the draft's length, at most ``size``: tokens accepted at ``floor`` or more."""
        likely = self.of_all * self.sure_rate**self.num_sure / floor
        more = (
            math.log(likely) / -math.log(min(self.rate, 0.99))
            if likely > 1 and self.rate > 0
            else 0.0
        )
        return min(size, self.most, self.num_sure + int(more))

    def tokens(self, count: int) -> float:
        """Return the expected number of accepted tokens."""
        most = max(0.0, min(count, self.longest))
        sure = min(most, self.num_sure)
        rest = float(self.sure_rate**sure) * expected(self.rate, most - sure)
        return self.of_all * (expected(self.sure_rate, sure) + rest)


class Drafts:
    """Chooses each step's drafts by measured acceptance rates and forward times.

    Args:
        model: drafts beside forms and earlier text.
    """

    def __init__(self, model: DraftModel | None = None) -> None:
        self.model = model
        self.seconds = StepSeconds()
        self.model_seconds = StepSeconds()  # of one drafted token, by places
        self.rates = dict(FIRST_RATES)
        self.num_drafted = 0
        self.num_held = 0  # accepted tokens
        self.num_words = 2**31  # tokens of the model
        self._is_told = False  # that a source has failed
        self._positions = 0  # of the last forward, if it can be timed
        self._read = 0.0  # time at which the one before was read
        self._drafting = 0.0  # seconds since then in which the model drafted
        # positions of the next forward if nobody drafts, though it had to wait for what they said
        self._awaited = 0
        self._is_usual = True  # the last forward did not wait, or has drafts
        self._refused, self._patience, self._rest = 0, FIRST_PATIENCE, 0
        self._spoken: OrderedDict[int, bytearray] = OrderedDict()

    def drafter(self, client: int, prompt: bytes) -> Drafter:
        spoken = self._spoken.setdefault(client, bytearray())
        self._spoken.move_to_end(client)
        if len(self._spoken) > MOST_CLIENTS:
            self._spoken.popitem(last=False)
        return Drafter(prompt, spoken, self.rates)

    def end(self, row: Row) -> None:
        """Keep an answer for the client's later ones."""
        drafter = row.answer.drafter
        if drafter is not None and (spoken := self._spoken.get(row.client)) is not None:
            spoken += drafter.answer
            del spoken[: max(0, len(spoken) - MOST_SPOKEN * WIDTH)]

    def is_due(self, groups: Sequence[DecodeBatch]) -> bool:
        """Return whether drafts need launched tokens read first."""
        self._rest -= 1
        return self._rest < 0 and any(
            self._is_due(group) for group in groups if not group.is_apart
        )

    def _is_due(self, group: DecodeBatch) -> bool:
        found = {row: hope for row in group.rows if (hope := self._foreseen(row))}
        if not found:
            return False
        is_due = bool(self._chosen(group, found, LEAST_GAIN))
        self._rest = (
            0
            if is_due or any(row.answer.guide for row in found)
            else min(PAUSE + self._refused, MOST_PAUSE)
        )
        return is_due

    def _chosen(
        self, group: DecodeBatch, found: Mapping[Row, Hope], least: float
    ) -> dict[Row, int]:
        """Return each row's drafted tokens, if worth their forward."""
        num_rows, places = len(group), len(group.places)
        best, chosen = least, dict[Row, int]()
        for size, floor in itertools.product(SIZES, FLOORS) if found else ():
            sizes = {
                row: count
                for row, hope in found.items()
                if (count := hope.within(size, floor)) > 0
            }
            hoped = sum(found[row].tokens(count) for row, count in sizes.items())
            if num_rows + hoped < least * num_rows:
                continue  # not even if the forward took no longer
            counts = group.counts(sizes)
            if counts is not None:
                asked = max(
                    (
                        count
                        for row, count in sizes.items()
                        if found[row].source == "model"
                    ),
                    default=0,
                )
                # unknown: it is tried
                drafting = asked * (self.model_seconds.of(places) or 0.0)
                gain = self.gain(num_rows, hoped, places, sum(counts), drafting)
                if gain > best:
                    best, chosen = gain, sizes
        if found and not chosen:
            self._refuse(places, group.rows)
        return chosen

    def _foreseen(self, row: Row) -> Hope | None:
        """Return a row's probable draft before its token is known."""
        answer, drafter = row.answer, row.answer.drafter
        if drafter is None or (
            answer.guide is None and self.model is None and not self._proposed(row)
        ):
            return None  # as mostly
        if answer.known_token is not None or row.is_suspect:
            return None
        if answer.guide is not None:
            own = Hope(
                "form",
                max(1, round(drafter.forced)),
                drafter.rates["form"],
                longest=drafter.forced,
            )
        else:
            rate, proposed = drafter.rates["text"], self._proposed(row)
            if answer.drafter is None:
                return None
            # the first may be wrong already
            own = Hope("text", len(proposed) - 1, rate, of_all=rate)
        return self._better(row, own, _most(row) - 1)

    def _better(self, row: Row, own: Hope, most: int) -> Hope | None:
        """Return the better of a row's own draft and the model's, up to ``most`` tokens, or None."""
        state, guide = row.answer.draft_state, row.answer.guide
        if (
            self.model is not None
            and state is not None
            and state.hidden
            and (guide is None or guide.looks_ahead)
        ):
            model = Hope("model", min(SIZES[-1], most), _drafter(row).rates["model"])
            is_known = (
                state.hidden[-1].end == row.facts.length + row.answer.num_sampled - 1
            )
            if is_known and most > 0 and model.tokens(most) > own.tokens(own.most):
                return model
        return own if own.most > 0 else None

    def launched(self, positions: int) -> None:
        """Record a forward's positions; 0 if other work ran beside it."""
        self._positions = positions
        self._is_usual = positions != self._awaited
        self._awaited = 0

    def was_read(self) -> None:
        # the last forward took the time since the one before was read
        now = time.perf_counter()
        if self._positions and self._read and self._is_usual:
            self.seconds.record(self._positions, now - self._read - self._drafting)
        self._read = now if self._positions else 0.0
        self._positions, self._drafting = 0, 0.0

    def begin(self, groups: Sequence[DecodeBatch]) -> None:
        """Begin a step that waits for its rows' tokens."""
        self._awaited = sum(len(group.places) for group in groups)

    def plan(self, group: DecodeBatch, form_seconds: Callable[[], float]) -> None:
        """Give drafts to rows whose tokens have been read."""
        if group.is_apart:
            return
        drafts, found = dict[Row, tuple[int, ...]](), dict[Row, Hope]()
        for row in filter(_can, group.rows):
            drafter = _drafter(row)
            try:
                source, tokens = self.draft(row, form_seconds)
                drafts[row] = checked(tokens, _most(row), self.num_words)
            except Exception:
                self._give_up(row)
                continue
            rates = drafter.rates
            own = Hope(
                source,
                len(drafts[row]),
                rates["text"],
                num_sure=drafter.num_sure,
                sure_rate=rates["form"],
            )
            is_forced = source == "form" and own.most > 0
            if hope := own if is_forced else self._better(row, own, _most(row)):
                found[row] = hope
        chosen = self._chosen(group, found, LEAST_GAIN_READ)
        asked = {
            row: count for row, count in chosen.items() if found[row].source == "model"
        }
        drafts |= self._ask(group, asked) if asked else {}
        for row, count in chosen.items():
            self._refused = 0
            tokens = drafts[row][:count]
            drafter = _drafter(row)
            guide = row.answer.guide
            drafter.source = "model" if row in asked else "text"
            if row in asked:
                drafter.num_sure = 0
                tokens = (
                    self._allowed(row, tokens, form_seconds)
                    if guide is not None
                    else tokens
                )
            row.answer.ahead = tokens

    def _ask(
        self, group: DecodeBatch, sizes: Mapping[Row, int]
    ) -> dict[Row, tuple[int, ...]]:
        """Let the model draft. A model that raises is not asked again."""
        begin, count = time.perf_counter(), max(sizes.values())
        states: list[DraftState | None] = []
        for row in group.places:
            state = None if row is None or row not in sizes else row.answer.draft_state
            if row is not None and state is not None:
                state.tokens = [
                    token
                    for one in state.hidden
                    for token in _drafter(row).said(one.begin + 1, one.end + 1)
                ]
            states.append(state)
        # a prompt's end
        is_long = any(
            state is not None and len(state.tokens) > 1 + MOST_PROPOSED
            for state in states
        )
        try:
            assert self.model is not None
            told: Any = self.model.propose(states, group.layers, count).tolist()
            found = {
                row: checked(told[group.places.index(row)], size, self.num_words)
                for row, size in sizes.items()
            }
        except Exception:
            logger.exception(
                "the model that drafts has failed; requests go on without its drafts"
            )
            self.model = None
            return dict.fromkeys(sizes, ())
        for state in states:
            if state is not None:
                state.hidden.clear()
        seconds = time.perf_counter() - begin
        self._drafting += seconds
        if not is_long:
            self.model_seconds.record(len(group.places), seconds / count)
        return found

    def _give_up(self, row: Row) -> None:
        """Let a row go on without drafts: a source raised."""
        if not self._is_told:
            logger.exception(
                "a source of drafts has failed; requests go on without its drafts"
            )
        self._is_told, row.answer.drafter, row.answer.ahead = True, None, ()

    def _proposed(self, row: Row) -> tuple[int, ...]:
        """Return what earlier text proposes."""
        try:
            return _drafter(row).proposed
        except Exception:
            self._give_up(row)
            return ()

    def _allowed(
        self, row: Row, tokens: tuple[int, ...], form_seconds: Callable[[], float]
    ) -> tuple[int, ...]:
        """Return the first drafted tokens that a row's form allows."""
        assert row.answer.guide is not None
        try:
            row.answer.guide.look_ahead(tokens, form_seconds())
            return row.answer.guide.ahead[: len(tokens)]
        except Exception:
            self._give_up(row)
            return ()

    def _refuse(self, places: int, rows: Sequence[Row] = ()) -> None:
        """Record a draft not worth its forward: measurements may be old."""
        self._refused += 1
        if self._refused >= self._patience:
            self.seconds.forget(places)
            self.model_seconds.forget(0)
            for rates in (
                self.rates,
                *(
                    row.answer.drafter.rates
                    for row in rows
                    if row.answer.drafter is not None
                ),
            ):
                rates["model"] = max(rates["model"], FIRST_RATES["model"])
            self._refused, self._patience = 0, min(2 * self._patience, MOST_PATIENCE)

    def gain(
        self,
        rows: int,
        hoped: float,
        places: int,
        positions: int,
        drafting: float = 0.0,
    ) -> float:
        """Return the speed-up by ``hoped`` tokens drafted in ``drafting`` seconds; 0 if unknown."""
        with_drafts, without = self.seconds.of(positions), self.seconds.of(places)
        return (
            (rows + hoped) / rows * without / (with_drafts + drafting)
            if with_drafts and without
            else 0.0
        )

    def draft(
        self, row: Row, form_seconds: Callable[[], float]
    ) -> tuple[str, tuple[int, ...]]:
        """Return the source and tokens of a draft. What a form forces goes on with what followed it earlier."""
        answer, drafter, most = row.answer, _drafter(row), min(_most(row), SIZES[-1])
        if answer.guide is None:
            drafter.num_sure = 0
            return "text", drafter.proposed[:most]
        forced = answer.guide.ahead[:most]
        drafter.num_sure, more = len(forced), most - len(forced)
        if (
            answer.guide.looks_ahead
            and more > 0
            and (text := checked(drafter.propose(more, forced), more))
        ):
            answer.guide.look_ahead((*forced, *text), form_seconds())
        tokens = answer.guide.ahead[:most]
        drafter.forced += OWN_WEIGHT * (len(tokens) - len(forced))
        return "form" if forced else "text", tokens

    def note(self, row: Row, count: int, held: int) -> None:
        """Record that ``held`` of ``count`` tokens were accepted."""
        drafter = _drafter(row)
        self.num_drafted += count
        self.num_held += held
        for at, one in enumerate((True,) * held + (False,) * (held < count)):
            source = "form" if at < drafter.num_sure else drafter.source
            # other text is counted by ``Drafter.add``
            if source != "text" or row.answer.guide is not None:
                drafter.note(source, held=one)
            self.rates[source] += COMMON_WEIGHT * (one - self.rates[source])


def _drafter(row: Row) -> Drafter:
    assert row.answer.drafter is not None
    return row.answer.drafter


def _can(row: Row) -> bool:
    answer = row.answer
    is_read = answer.known_token is None and answer.num_sampled == len(answer.token_ids)
    return (
        row.stage is Stage.DECODE
        and answer.drafter is not None
        and is_read
        and not row.is_suspect
    )


def _most(row: Row) -> int:
    """Return the longest draft with room in the answer."""
    return row.answer.max_tokens - row.answer.num_sampled - 1
