"""Messages of other threads to the engine's."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vlm_batch.engine.loop import EngineLoop

#: The client of messages for which nobody hurries.
NO_CLIENT = -1
#: Most messages between two steps, so that a flooded inbox stops no request.
MESSAGES_A_TURN = 256


class Message(NamedTuple):
    """Something to do on the engine's thread."""

    call: Callable[[EngineLoop], None]
    client: int


class Inbox:
    """Messages in order of arrival; None is the last one. It knows nothing of the engine, which may be forgotten."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        # taken out of the queue by a step that looked whose they are
        self._seen: deque[Message | None] = deque()

    def put(self, message: Message | None) -> None:
        self._queue.put(message)

    def qsize(self) -> int:
        return len(self._seen) + self._queue.qsize()

    def get(self, *, block: bool, timeout: float | None = None) -> Message | None:
        """Return the next message. Raises queue.Empty if there is none, or none in ``timeout`` seconds."""
        if self._seen:
            return self._seen.popleft()
        return self._queue.get(block, timeout)

    def callers(self) -> list[int]:
        """Return the clients whose messages wait."""
        with contextlib.suppress(queue.Empty):
            while len(self._seen) < MESSAGES_A_TURN:
                self._seen.append(self._queue.get_nowait())
        return [message.client for message in self._seen if message is not None]
