"""The drafts of one row: what it proposes, how long, and how many of its tokens held."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from vlm_batch.engine.constraints import NoGuide
from vlm_batch.engine.draft_costs import Expectation
from vlm_batch.engine.earlier import EarlierText, checked
from vlm_batch.records import DraftState, Hidden

#: Most proposed tokens: the largest draft, and one that may be launched already.
MOST_PROPOSED = 16
#: Draft lengths that are tried: with the next token, powers of two.
SIZES = (1, 3, 7, MOST_PROPOSED - 1)
#: Weight of one token in the acceptance rates of a row, and of all rows.
OWN_WEIGHT, COMMON_WEIGHT = 0.2, 0.02
#: Below an acceptance rate of LOW_RATE a row is searched every REST tokens only.
LOW_RATE, REST = 0.2, 8
#: Initial acceptance rates by source.
FIRST_RATES = {"form": 0.95, "text": 0.5, "model": 0.7}


class Acceptance:
    """Counts of drafted tokens and of those that held, of all rows."""

    def __init__(self) -> None:
        self.rates = dict(FIRST_RATES)
        self.num_drafted = 0
        self.num_held = 0

    def note(self, source: str, *, held: bool) -> None:
        self.rates[source] += COMMON_WEIGHT * (held - self.rates[source])

    def retry_model(self) -> None:
        """Expect of the model at least what was expected at first."""
        self.rates["model"] = max(self.rates["model"], FIRST_RATES["model"])


class NoDrafter:
    """Of a row without drafts."""

    #: Drafted tokens of its next forward, or of the launched one.
    ahead: tuple[int, ...] = ()
    #: Number of last hidden states that a model needs to draft for it.
    context = 0

    def add(self, token: int, guide: NoGuide) -> None:
        """Hear the answer's next token, which ``guide`` has seen."""

    def foreseen(self, guide: NoGuide) -> Expectation | None:
        """Return what it may propose once its launched token is known. Raises what the text raises."""
        return None

    def of_model(self, most: int, guide: NoGuide, position: int) -> Expectation | None:
        """Return what to expect of the model that drafts, if it knows the row up to ``position``."""
        return None

    def drop(self) -> None:
        """Let the next forward go without a draft."""

    def see(self, hidden: Hidden) -> None:
        """Take hidden states for the model that drafts."""

    def accept(self, count: int) -> None:
        """Keep the first ``count`` positions of the drafted forward: one more than tokens that held."""

    def retry_model(self) -> None:
        """Expect of the model that drafts at least what was expected at first."""

    def begin_again(self) -> None:
        """Forget what was computed."""

    def end(self) -> None:
        """Keep the answer for the client's later ones."""

    def copy(self) -> NoDrafter:
        """Return the drafter of another answer to the same prompt."""
        return self


#: Of rows that were never to have drafts.
NO_DRAFTER = NoDrafter()


class Drafter(NoDrafter):
    """One row's drafts.

    Args:
        text: what was said, a source of drafts.
        acceptance: of all rows, where the row begins.
        state: what a model that drafts sees of the row.
    """

    #: Tokens of earlier answers that are kept for a client.
    MOST_SPOKEN = 8192

    def __init__(
        self,
        text: EarlierText,
        acceptance: Acceptance,
        state: DraftState | None = None,
    ) -> None:
        self.text = text
        # without a model that drafts one that keeps nothing
        self.state = state or DraftState(deque(maxlen=0))
        self.context = self.state.hidden.maxlen or 0
        self.rates = dict(acceptance.rates)
        self._acceptance = acceptance
        # smoothed number of tokens that its form forces after a token
        self._forced = 1.0
        self._sources: tuple[str, ...] = ()  # of its last draft, by token
        # of its last proposal: first tokens that its form forces, and whether it has one
        self._num_sure, self._has_form = 0, False
        self._proposed: tuple[int, ...] = ()
        self._is_searched = True  # for what follows the last token
        self._rest = 0

    def copy(self) -> Drafter:
        made = Drafter(self.text.copy(), self._acceptance, self.state.copy())
        made.rates = dict(self.rates)
        return made

    # What it hears

    def add(self, token: int, guide: NoGuide) -> None:
        self._follow(token)
        self.text.add(token)
        self._forced += OWN_WEIGHT * (len(guide.ahead) - self._forced)

    def _follow(self, token: int) -> None:
        """Count whether a token was proposed, though it may not have been drafted."""
        first, rest = self._proposed[:1], self._proposed[1:]
        follows = first == (token,)
        if first:
            self._note("text", held=follows)
        self._proposed = rest if follows else ()
        self._is_searched = bool(self._proposed)
        if not self._proposed:
            self._rest -= 1

    def see(self, hidden: Hidden) -> None:
        self.state.hidden.append(hidden)

    def drop(self) -> None:
        self.ahead = ()

    def begin_again(self) -> None:
        self.drop()
        self.state.clear()

    def end(self) -> None:
        self.text.end(self.MOST_SPOKEN)

    # What it proposes

    @property
    def proposed(self) -> tuple[int, ...]:
        """Tokens that earlier text proposes; the first may be launched. Raises what the text raises."""
        if not self._is_searched and self._rest <= 0:
            found = self.text.propose(MOST_PROPOSED)
            self._proposed = checked(found, MOST_PROPOSED)
            self._is_searched = True
            self._rest = REST if self.rates["text"] < LOW_RATE else 0
        return self._proposed

    def propose(
        self, most: int, guide: NoGuide, form_seconds: float
    ) -> tuple[int, ...]:
        """Return what its form forces, and what followed that earlier. Raises what the sources raise.

        Args:
            form_seconds: how long the form may check the earlier text.
        """
        most = min(most, SIZES[-1])
        self._has_form = guide.rules
        if not guide.rules:
            self._num_sure = 0
            return self.proposed[:most]
        forced = guide.ahead[:most]
        self._num_sure = len(forced)
        if guide.checks_drafts and len(forced) < most:
            more = most - len(forced)
            text = checked(self.text.propose(more, forced), more)
            if text:
                guide.look_ahead((*forced, *text), form_seconds)
        tokens = guide.ahead[:most]
        self._forced += OWN_WEIGHT * (len(tokens) - len(forced))
        return tokens

    def foreseen(self, guide: NoGuide) -> Expectation | None:
        if guide.rules:
            most = max(1, round(self._forced))
            return Expectation("form", most, self.rates["form"], longest=self._forced)
        most = len(self.proposed) - 1
        if most <= 0:
            return None  # as mostly
        rate = self.rates["text"]
        # the first may be wrong already
        return Expectation("text", most, rate, of_all=rate)

    def expected(self, tokens: Sequence[int]) -> Expectation | None:
        """Return what to expect of its last proposal, ``tokens``."""
        if not tokens:
            return None
        return Expectation(
            "form" if self._num_sure else "text",
            len(tokens),
            self.rates["text"],
            num_sure=self._num_sure,
            sure_rate=self.rates["form"],
        )

    def of_model(self, most: int, guide: NoGuide, position: int) -> Expectation | None:
        is_known = self.state.end == position
        if not is_known or most <= 0 or not guide.checks_drafts:
            return None
        length = min(SIZES[-1], most)
        return Expectation("model", length, self.rates["model"])

    def read(self) -> DraftState:
        """Return what the model that drafts is to read: hidden states, and the tokens behind them."""
        tokens: list[int] = []
        for one in self.state.hidden:
            tokens += self.text.said(one.begin + 1, one.end + 1)
        self.state.tokens = tokens
        return self.state

    # What becomes of it

    def launch(self, tokens: tuple[int, ...], *, by_model: bool = False) -> None:
        """Draft these tokens in the next forward."""
        num_sure = 0 if by_model else min(self._num_sure, len(tokens))
        other = "model" if by_model else "text"
        self._sources = ("form",) * num_sure + (other,) * (len(tokens) - num_sure)
        self.ahead = tokens

    def accept(self, count: int) -> None:
        held = max(0, count - 1)
        self._acceptance.num_drafted += len(self.ahead)
        self._acceptance.num_held += held
        for at, source in enumerate(self._sources[: held + 1]):
            is_right = at < held
            # other text is counted by ``add``
            if source != "text" or self._has_form:
                self._note(source, held=is_right)
            self._acceptance.note(source, held=is_right)
        self.ahead = ()
        if self.state.hidden:
            self.state.keep(count)

    def retry_model(self) -> None:
        self.rates["model"] = max(self.rates["model"], FIRST_RATES["model"])

    def _note(self, source: str, *, held: bool) -> None:
        self.rates[source] += OWN_WEIGHT * (held - self.rates[source])
