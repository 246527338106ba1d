"""Plans of places, encoding and chunks of prompts: pure functions of numbers.

Every decoding row gets a token in each step. The rules for the rest:

- The next place goes to the client with the fewest places; of those to a client that is due, then to the most urgent row.
- Urgency is age and priority: ``ageing_seconds`` of waiting count as one priority. Once its client has had a place, a row
  counts from then on, one priority lower.
- Clients with negative numbers get the places that no other wants, and give way to all others.
- A client is due if it has no place, has waited ``ageing_seconds``, and another asks for two answers more.
- A client parks its last row for one with two places less. For a due client a row of one that asks for two answers more
  is parked, once.
- While a row waits for its first token, clients with two places more rest: they neither encode nor prefill, and decode
  after ``longest_rest`` seconds, those with negative numbers not at all. Beyond ``MOST_RESTED`` seconds they rest half of
  the time. While a processor makes the row's inputs, they go on decoding. Nobody rests for a row that waits for a place
  or for memory, nor for one behind it.
- No row overtakes one that memory has no room for, but those that are ready: they hold their memory already.
- Rows in prefill go by client, then by priority, which age raises, then by waiting time per token left (highest response
  ratio next).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from vlm_batch.engine.lengths import chunk_end, first_enough, padded_length
from vlm_batch.engine.work import Work
from vlm_batch.policy import Policy

T = TypeVar("T")


class OfClient(Protocol):
    @property
    def client(self) -> int: ...


Asked = TypeVar("Asked", bound=OfClient)

#: More places than any client has.
LAST = 1 << 32
#: Seconds that clients may have rested more than not.
MOST_RESTED = 1.0


class WaitingRow(NamedTuple):
    """A row that waits for a place."""

    request_id: str
    client: int
    priority: int
    submitted: float  # seconds
    tokens: int  # 0 until it is encoded
    needs_encoding: bool = False
    is_ready: bool = False  # prefilled, or parked
    waits: bool = False  # for the prefix that a row before it will leave
    pending: int = 0  # prompt tokens to prefill, once it is encoded


class NewRow(NamedTuple):
    """A row that waits for its first token."""

    request_id: str
    client: int
    places: int  # its client's, without its own
    is_coming: bool = False  # its processor runs
    waits: bool = False  # for a place, and for memory
    wanted: int = 0  # tokens that are to fit into memory then; 0 until it is encoded
    may_encode: bool = True  # beside other rows, by the room for its pictures


class LiveRow(NamedTuple):
    """A row with a place."""

    request_id: str
    client: int
    priority: int
    submitted: float
    tokens: int
    may_yield: bool = False
    gave_way: bool = False  # for a due client


@dataclass(frozen=True)
class Clients:
    """The clients of rows that have not ended."""

    now: float
    ageing_seconds: float
    placed: Counter[int]  # rows with places
    asked: Mapping[int, int]  # answers
    served: Mapping[int, float]  # when each had its last place

    def urgency(self, priority: int, submitted: float) -> float:
        """Return a row's sort key among its client's, smallest first."""
        return submitted - priority * self.ageing_seconds

    def since(self, row: WaitingRow) -> float:
        return max(row.submitted, self.served.get(row.client, 0.0))

    def is_due(self, row: WaitingRow) -> bool:
        has_waited = self.now - self.since(row) > self.ageing_seconds
        if not has_waited or self.placed.get(row.client):
            return False
        most = max(self.asked.values(), default=0)
        return most >= self.asked.get(row.client, 0) + 2

    def turn(self, row: WaitingRow) -> tuple[bool, float]:
        """Return a row's sort key among clients with as many places, smallest first."""
        since = self.since(row)
        was_served = since > row.submitted
        return not self.is_due(row), self.urgency(row.priority - was_served, since)

    def giver(self, client: int) -> int | None:
        """Return the client with the most places, if it keeps as many as ``client`` has with one more."""
        placed = self.placed
        claims = {one: _claim(one, placed[one]) for one in +placed}
        most = max(claims, key=lambda one: (claims[one], one), default=client)
        gap = claims.get(most, 0) - _claim(client, placed.get(client, 0))
        return most if gap >= 2 else None

    def resting(self, client: int, places: int) -> frozenset[int]:
        """Return who rests while a row waits for its first token.

        Args:
            client: the row's.
            places: its client's, without its own.
        """
        if client < 0:
            return NOBODY
        found: list[int] = []
        for one in self.asked:
            if _claim(one, self.placed.get(one, 0)) >= places + 2:
                found.append(one)
        return frozenset(found) - {client}


def by_client(rows: Iterable[Asked]) -> dict[int, list[Asked]]:
    """Return each client's rows, in their order."""
    lines: dict[int, list[Asked]] = {}
    for row in rows:
        lines.setdefault(row.client, []).append(row)
    return lines


def in_turn(
    lines: Mapping[int, Sequence[T]],
    turn: Callable[[T], Any],
    placed: Mapping[int, int],
) -> Iterator[T]:
    """Yield rows in the order in which they get places: of the client with the fewest, then of the smallest turn.

    Args:
        lines: each client's rows, in their order.
        placed: each client's places.
    """
    if len(lines) == 1:
        yield from next(iter(lines.values()))
        return
    rests = {client: iter(line) for client, line in lines.items()}
    heap: list[tuple[int, Any, int, T]] = []

    def take(client: int, places: int) -> None:
        row = next(rests[client], None)
        if row is not None:
            heapq.heappush(heap, (_claim(client, places), turn(row), client, row))

    places = {client: placed.get(client, 0) for client in rests}
    for client in rests:
        take(client, places[client])
    while heap:
        _, _, client, row = heapq.heappop(heap)
        yield row
        places[client] += 1
        take(client, places[client])


def _claim(client: int, places: int) -> int:
    """Return where a client stands in line: those with negative numbers behind all others."""
    return places + LAST if client < 0 else places


#: No client.
NOBODY: frozenset[int] = frozenset()


# Before the decode forward -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeView:
    """Numbers from which ``decode`` decides.

    Attributes:
        lines: each client's first rows in line.
        live: rows with places, the last in line at the end.
        held: tokens of each parked row and further answer, by id.
        ahead: rows at the head of the line that may be given a place of another's.
        has_grown: whether memory is to be looked at.
        fits: whether rows with these tokens fit into memory.
        new: rows that wait for their first tokens, while others may rest for them.
        decoding: clients of rows that wait for further ones.
        may_be_still: whether their last tokens came a short time ago.
    """

    clients: Clients
    lines: Mapping[int, Sequence[WaitingRow]]
    live: Sequence[LiveRow]
    held: Mapping[str, int]
    free: int
    ahead: int
    has_grown: bool
    fits: Callable[[Sequence[int]], bool]
    new: Sequence[NewRow] = ()
    decoding: frozenset[int] = NOBODY
    may_be_still: bool = True


class Yield(NamedTuple):
    """A row that yields its place."""

    request_id: str
    is_for_due: bool


@dataclass(frozen=True)
class DecodePlan:
    """The work before a forward.

    Attributes:
        outgrown: rows that lose their places and what they have.
        refused: a row that does not even fit alone.
        yields: rows that lose their places and keep what they have.
        resting: clients whose prompts wait.
        is_still: whether no row decodes in this step.
    """

    outgrown: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    yields: tuple[Yield, ...] = ()
    resting: frozenset[int] = NOBODY
    is_still: bool = False


#: Nobody loses a place.
ALL_GO_ON = DecodePlan()


def decode(view: DecodeView) -> DecodePlan:
    """Plan who of the live rows goes on."""
    count = _fitting(view)
    outgrown = tuple(row.request_id for row in view.live[count:])
    if outgrown:
        # the first would not fit alone
        num_refused = int(count == 0)
        return DecodePlan(outgrown[num_refused:], refused=outgrown[:num_refused])
    yields = () if view.free else _yields(view)
    resting, is_still = _rest(view, view.free + len(yields))
    return DecodePlan(yields=yields, resting=resting, is_still=is_still)


def _fitting(view: DecodeView) -> int:
    """Return how many live rows fit, from the first in line."""
    tokens = [row.tokens for row in view.live]
    count = len(tokens)
    while view.has_grown and count and not view.fits(tokens[:count]):
        count -= 1
    return count


def _yields(view: DecodeView) -> tuple[Yield, ...]:
    clients = replace(view.clients, placed=Counter(view.clients.placed))
    tokens = [row.tokens for row in view.live]
    rest = [row for row in view.live if row.may_yield]
    found: list[Yield] = []
    line = in_turn(view.lines, clients.turn, view.clients.placed)
    coming = [row for row in line if not row.waits]
    for row in coming[: view.ahead]:
        if row.needs_encoding:
            break
        held = _held(view, row.request_id)
        if not view.fits([*tokens, *held, row.tokens]):
            break
        giver = clients.giver(row.client)
        givers = _givers(row, rest, giver, clients)
        if not givers:
            break
        last = sorted(givers, key=lambda one: _rank(one, clients))[-1]
        rest.remove(last)
        found.append(Yield(last.request_id, is_for_due=giver is None))
        clients.placed[last.client] -= 1
        clients.placed[row.client] += 1
    return tuple(found)


def _rest(view: DecodeView, free: int) -> tuple[frozenset[int], bool]:
    """Return the clients that rest, and whether no row decodes in this step."""
    # for those that are here, and for those that are coming
    rests = {False: NOBODY, True: NOBODY}
    without = [row.places for row in view.new if not _has_room(row, view, free)]
    # no row overtakes one that waits for a place or for memory
    fewest = min(without, default=LAST)
    for row in view.new:
        if row.waits and row.places >= fewest:
            continue
        rests[row.is_coming] |= view.clients.resting(row.client, row.places)
    for_here = resting = rests[False]
    # others fill the time until a row has come: they decode, or, where none does, their prompts go on
    if view.decoding:
        resting |= rests[True]
    does_any_go_on = bool(view.decoding - for_here)
    if not for_here or does_any_go_on:
        return resting, False
    has_readers = max(view.decoding, default=-1) >= 0
    return resting, view.may_be_still or not has_readers


def _has_room(row: NewRow, view: DecodeView, free: int) -> bool:
    """Return whether there is a place for a new row, and memory, as far as that is known."""
    if not row.wanted:
        return row.may_encode
    live = [one.tokens for one in view.live]
    held = _held(view, row.request_id)
    return free > 0 and view.fits([*live, *held, row.wanted])


def _held(view: DecodeView | PromptsView, *joining: str) -> list[int]:
    """Return the tokens of the ready rows that stay without a place."""
    return [size for name, size in view.held.items() if name not in joining]


def _givers(
    row: WaitingRow, rest: Sequence[LiveRow], giver: int | None, clients: Clients
) -> list[LiveRow]:
    """Return the live rows of which one may yield to ``row``."""
    if giver is not None:
        return [one for one in rest if one.client == giver]
    if not clients.is_due(row):
        return []
    least = clients.asked[row.client] + 2
    return [
        one for one in rest if clients.asked[one.client] >= least and not one.gave_way
    ]


def _rank(row: LiveRow, clients: Clients) -> tuple[int, float]:
    urgency = clients.urgency(row.priority, row.submitted)
    return clients.asked.get(row.client, 0), urgency


# Places, encoding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptsView:
    """Numbers from which ``prompts`` decides.

    Attributes:
        lines: each client's first rows in line.
        live: tokens of each row with a place.
        held: tokens of each parked row and further answer, by id.
        ahead: rows that are encoded before they have a place.
        most_encoded: requests of the encoder's next call, if so many prompt tokens are pending; 0: none in this step.
        pending: prompt tokens left of rows with places.
        has_encoded: whether this step has encoded a row.
        may_encode: whether the encoder has room for a row's pictures beside other rows.
    """

    clients: Clients
    lines: Mapping[int, Sequence[WaitingRow]]
    live: Sequence[int]
    held: Mapping[str, int]
    free: int
    ahead: int
    most_encoded: Callable[[int], int]
    pending: int
    has_encoded: bool
    may_encode: Callable[[str], bool]
    fits: Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class Prompts:
    """Ids of the rows that begin their prefill, that decode at once, that are encoded next, and that never fit."""

    placed: tuple[str, ...] = ()
    joining: tuple[str, ...] = ()
    encoded: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


#: Nobody gets a place, and nobody is encoded.
NO_PROMPTS = Prompts()


def prompts(view: PromptsView) -> Prompts:
    """Plan who gets the free places, and who is encoded: for them, then ahead of the next ones.

    Lengths are known once a row is encoded. So the engine encodes and asks again, until nobody is left to encode.
    """
    placed: list[str] = []
    joining: list[str] = []
    refused: list[str] = []
    encoded: tuple[str, ...] = ()
    free, live, pending = view.free, list(view.live), view.pending
    line = in_turn(view.lines, view.clients.turn, view.clients.placed)
    first = _first(line, view.free, view.ahead)
    is_full = False  # whether memory has no room for the next in line
    for at, row in enumerate(first):
        if row.needs_encoding:
            is_beside_others = bool(live) or bool(view.held)
            if view.may_encode(row.request_id) or not is_beside_others:
                most = view.most_encoded(pending)
                if at >= free and view.has_encoded:
                    most = 0
                encoded = _unencoded(first[at:], most)
            else:
                is_full = True
            break
        if at >= free:
            continue
        held = [] if row.is_ready else _held(view, *joining)
        if view.fits([*live, *held, row.tokens]):
            live.append(row.tokens)
            pending += row.pending
            (joining if row.is_ready else placed).append(row.request_id)
        elif live or held:
            free, is_full = 0, True
        else:
            refused.append(row.request_id)
    if is_full:
        num_left = view.free - len(placed) - len(joining)
        joining += _ready_behind(view, joining, live, num_left)
    return Prompts(tuple(placed), tuple(joining), encoded, tuple(refused))


def _ready_behind(
    view: PromptsView, joining: Sequence[str], live: Sequence[int], num_left: int
) -> list[str]:
    """Return ready rows for the places that are left beside a row without room.

    They hold their memory already, and only free it by going on: else the row would wait for them, and they for it.
    """
    taken = list(live)
    found: list[str] = []
    for row in in_turn(view.lines, view.clients.turn, view.clients.placed):
        if not row.is_ready or row.request_id in joining:
            continue
        if len(found) >= num_left or (taken and not view.fits([*taken, row.tokens])):
            break
        taken.append(row.tokens)
        found.append(row.request_id)
    return found


def _first(line: Iterator[WaitingRow], free: int, ahead: int) -> list[WaitingRow]:
    """Return the rows for the free places and those to encode ahead. Ready ones need no encoding."""
    first: list[WaitingRow] = []
    for row in line:
        if row.waits or (len(first) >= free and row.is_ready):
            continue
        if len(first) >= free + ahead:
            break
        first.append(row)
    return first


def _unencoded(rows: Sequence[WaitingRow], most: int) -> tuple[str, ...]:
    """Return the ids of the first rows to encode."""
    return tuple([row.request_id for row in rows if row.needs_encoding][:most])


def most_encoded(
    policy: Policy,
    pending: int,
    *,
    is_decoding: bool,
    seconds: float,
    has_encoded: bool,
) -> int:
    """Return the most requests of the encoder's next call.

    Args:
        seconds: what this step has spent on encoding. Beside decoding rows ``encode_seconds`` are enough.
        pending: prompt tokens left of rows with places. Without decoding rows a whole budget of them is enough.
    """
    is_enough = pending >= policy.idle_budget
    most = policy.encode_together
    if is_decoding:
        is_enough = seconds >= policy.encode_seconds
        most = -(-most // policy.beside_decode)
    return 0 if has_encoded and is_enough else most


# Chunks of prompts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrefillRow:
    """A row in prefill, ``done`` of ``length`` positions in its cache."""

    request_id: str
    length: int
    done: int
    atomic: tuple[tuple[int, int], ...] = ()  # spans that no chunk cuts
    # a chunk ends at each, or before the span that holds it
    stops: tuple[int, ...] = ()
    priority: int = 0
    waited: float = 0.0  # seconds since submission
    ends: tuple[int, ...] = ()  # if any, the only ends of chunks, whatever the budget
    client: int = 0


def chunks(rows: Sequence[PrefillRow], budget: int, policy: Policy) -> tuple[Work, ...]:
    """Return the chunks to prefill within the budget, most urgent row first.

    A chunk may exceed the budget for an atomic span, and by ``slack`` to end its prompt. With padding, a rest too
    small for a forward waits.
    """
    found: list[Work] = []
    least = 0  # tokens of a chunk that is cut, once one has begun
    for row in _in_prefill_order(rows, policy):
        if row.done == row.length:  # all of it was cached
            found.append(Work((row.request_id,), row.done, row.done))
        done = row.done
        while budget > 0 and done < row.length:
            is_cut = row.length - done > budget + policy.slack
            if is_cut and budget < least:
                break
            end = _end_of_chunk(row, done, budget, policy)
            found.append(Work((row.request_id,), done, end))
            budget -= end - done
            done = end
            least = policy.least_cut
    return tuple(found)


def _end_of_chunk(row: PrefillRow, done: int, budget: int, policy: Policy) -> int:
    given = first_enough(row.ends, done + 1)
    if given:
        return given
    room = row.length - done
    if room > budget + policy.slack:
        room = budget
        if budget >= policy.pad_to:  # padding is filled with tokens
            room = padded_length(budget, policy.pad_to)
    room = min(room, policy.max_chunk)
    return chunk_end(done, row.length, room, row.atomic, row.stops)


def _in_prefill_order(rows: Sequence[PrefillRow], policy: Policy) -> list[PrefillRow]:
    if len(rows) < 2:
        return list(rows)

    def urgency(row: PrefillRow) -> tuple[float, float]:
        level = row.priority + row.waited // policy.ageing_seconds
        return -level, -row.waited / max(row.length - row.done, 1)

    lines = by_client(sorted(rows, key=urgency))
    placed = {client: len(line) for client, line in lines.items()}
    return list(in_turn(lines, urgency, placed))
