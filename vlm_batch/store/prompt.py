"""Prompt caches for users."""

from __future__ import annotations

import threading
from pathlib import Path

from vlm_batch.errors import InvalidCache
from vlm_batch.store.files import Identity, read_row, write_row
from vlm_batch.store.saved import SavedRow


class PromptCache:
    """The keys and values of a prompt and its answer (``Result.cache``), thread-safe.

    A request that continues it prefills only the rest of its prompt. It can be continued once; a ``copy`` shares its
    arrays.
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
        """Whether a request has claimed it."""
        with self._lock:
            return self._is_claimed

    @property
    def nbytes(self) -> int:
        """Bytes held; 0 once continued."""
        row = self._row
        return 0 if row is None else row.nbytes

    def copy(self) -> PromptCache:
        """Return another cache of this conversation.

        Raises:
            InvalidCache: It was continued.
        """
        return PromptCache(self._held(), self.identity)

    def save(self, path: str | Path) -> None:
        """Write the cache to a safetensors file, atomically.

        Raises:
            InvalidCache: It was continued.
        """
        write_row(path, self._held(), self.identity)

    @classmethod
    def load(cls, path: str | Path) -> PromptCache:
        """Read a cache; its model is checked when it is continued.

        Raises:
            InvalidCache: The file is damaged or foreign.
        """
        return cls(*read_row(path))

    # Called by the batcher
    # ----------------------------------------------------------------------------------------------

    def claim(self, here: Identity) -> None:
        """Reserve it for one request. Raises InvalidCache if it cannot continue here."""
        here.check(self.identity)
        with self._lock:
            if self._is_claimed:
                raise InvalidCache(
                    "the cache is continued by another request already; continue a copy() of it"
                )
            self._is_claimed = True

    def release(self) -> None:
        """Undo ``claim`` if the row was not taken."""
        with self._lock:
            self._is_claimed = self._row is None

    def peek(self) -> SavedRow:
        """Return the row. Raises InvalidCache if it was taken."""
        if (row := self._row) is None:
            raise InvalidCache("the cache was continued already")
        return row

    def take(self) -> SavedRow:
        """Hand the row over."""
        row = self.peek()
        with self._lock:
            self._row, self._is_claimed = None, True
        return row

    def _held(self) -> SavedRow:
        if self.is_continued:
            raise InvalidCache("the cache is continued by another request already")
        return self.peek()
