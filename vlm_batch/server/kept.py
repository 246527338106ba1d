"""Responses that are kept in memory for those who made them, within a bound."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlm_batch.server.errors import json_bytes

#: Bytes of all kept responses. What is shared among a conversation's responses counts in each.
MAX_KEPT = 512 << 20


@dataclass(eq=False)
class Kept:
    """One response, and what its conversation goes on from.

    Attributes:
        client: Whose it is.
        body: The response as its maker sees it; its status is the latest.
        items: What came in, as items.
        turns: The conversation up to the answer, with it, as ``Talk`` has it.
        events: The stream's events in order, of one that runs in the background.
        running: What makes it, as long as it is made.
    """

    client: int
    body: dict[str, Any]
    items: Sequence[Mapping[str, Any]] = ()
    turns: Sequence[Mapping[str, Any]] = ()
    events: list[bytes] = field(default_factory=list)
    running: asyncio.Task[None] | None = None
    size: int = 0
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        return self.running is None

    def tell(self, event: bytes) -> None:
        self.events.append(event)
        self.wake()

    def wake(self) -> None:
        """Wake those who follow."""
        self._told.set()
        self._told = asyncio.Event()

    async def follow(self, begin: int) -> AsyncGenerator[bytes]:
        """Yield events from one on, until there will be no more."""
        while True:
            told = self._told
            while begin < len(self.events):
                yield self.events[begin]
                begin += 1
            if self.is_over:
                return
            await told.wait()


class KeptResponses:
    """Responses by id; the one that was used longest ago, of the client that has the most bytes, goes first."""

    def __init__(self, most: int = MAX_KEPT) -> None:
        self._most = most
        self._by_id: dict[str, Kept] = {}
        self._sizes: Counter[int] = Counter()

    def find(self, response_id: str, client: int) -> Kept | None:
        """Return a client's own response; another's is not there for it."""
        kept = self._by_id.get(response_id)
        if kept is None or kept.client != client:
            return None
        self._by_id[response_id] = self._by_id.pop(response_id)
        return kept

    def item(self, item_id: str, client: int) -> Mapping[str, Any] | None:
        """Return an item of a client's own responses."""
        for kept in reversed(self._by_id.values()):
            if kept.client != client:
                continue
            for item in (*kept.body["output"], *kept.items):
                if item.get("id") == item_id:
                    found: Mapping[str, Any] = item
                    return found
        return None

    def keep(self, kept: Kept) -> None:
        """Keep a response, or count it anew. One that alone is more than the bound is not kept."""
        self.forget(kept)
        kept.size = sum(map(len, kept.events)) + sum(
            len(json_bytes(one)) for one in (kept.body, *kept.items, *kept.turns)
        )
        if kept.size > self._most:
            return
        self._by_id[kept.body["id"]] = kept
        self._sizes[kept.client] += kept.size
        while self._sizes.total() > self._most:
            self.forget(self._least_needed())

    def forget(self, kept: Kept) -> None:
        """Let go of a response, if it is there."""
        if self._by_id.pop(kept.body["id"], None) is not None:
            self._sizes[kept.client] -= kept.size

    def close(self) -> None:
        """End what runs in the background."""
        for kept in self._by_id.values():
            if kept.running is not None:
                kept.running.cancel()

    def _least_needed(self) -> Kept:
        busiest = max(self._sizes, key=lambda client: self._sizes[client])
        return next(kept for kept in self._by_id.values() if kept.client == busiest)


def new_id(kind: str) -> str:
    """Return an id that cannot be guessed."""
    return f"{kind}_{secrets.token_hex(24)}"
