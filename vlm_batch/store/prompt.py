"""A prompt cache that is returned to its user: a finished row's state, to be continued once, copied or saved."""

from __future__ import annotations

import threading
from pathlib import Path

from vlm_batch.errors import InvalidCache
from vlm_batch.store.files import Identity, read_row, write_row
from vlm_batch.store.saved import SavedRow


class PromptCache:
    """The keys and values of a prompt and its answer, as a request left them (``Result.cache``).

    A request submitted with it prefills only what its prompt has more; that request's own result has the cache of the
    longer conversation. A cache is continued once: its memory then belongs to the request. ``copy`` makes another one
    that shares its (immutable) arrays, to branch a conversation. Safe from any thread.
    """

    def __init__(self, row: SavedRow, identity: Identity) -> None:
        self._row: SavedRow | None = row
        self._is_claimed = False
        self._lock = threading.Lock()
        self.identity = identity
        self.num_tokens = row.length
        self.token_ids: tuple[int, ...] = tuple(row.keys[:, 0].tolist())

    def __repr__(self) -> str:
        state = "continued" if self.is_continued else f"{self.nbytes} bytes"
        return f"<PromptCache: {self.num_tokens} tokens, {state}>"

    @property
    def is_continued(self) -> bool:
        """Whether a request has it already."""
        with self._lock:
            return self._is_claimed

    @property
    def nbytes(self) -> int:
        """Bytes that it holds; 0 once it is continued."""
        row = self._row
        return 0 if row is None else row.nbytes

    def copy(self) -> PromptCache:
        """Another cache of the same conversation. Raises InvalidCache if this one is continued already."""
        return PromptCache(self._held(), self.identity)

    def save(self, path: str | Path) -> None:
        """Write it to a file (safetensors), all or nothing. Raises InvalidCache if it is continued already."""
        write_row(path, self._held(), self.identity)

    @classmethod
    def load(cls, path: str | Path) -> PromptCache:
        """Read one back. Raises InvalidCache for a damaged or other file; whose it is shows when it is continued."""
        return cls(*read_row(path))

    # Called by the batcher
    # ----------------------------------------------------------------------------------------------

    def claim(self, here: Identity) -> None:
        """Reserve it for one request. Raises InvalidCache, with the reason, if it cannot be continued here."""
        here.check(self.identity)
        with self._lock:
            if self._is_claimed:
                raise InvalidCache("the cache is continued by another request already; continue a copy() of it")
            self._is_claimed = True

    def release(self) -> None:
        """Give up the reservation of a request that ended before it took the cache."""
        with self._lock:
            self._is_claimed = self._row is None

    def peek(self) -> SavedRow:
        """The row, still the cache's own. Raises InvalidCache if it was taken."""
        if (row := self._row) is None:
            raise InvalidCache("the cache was continued already")
        return row

    def take(self) -> SavedRow:
        """The row, from now on the caller's own."""
        row = self.peek()
        with self._lock:
            self._row, self._is_claimed = None, True
        return row

    def _held(self) -> SavedRow:
        if self.is_continued:
            raise InvalidCache("the cache is continued by another request already")
        return self.peek()
