"""Bytes from wherever they are."""

from __future__ import annotations

from threading import Event


class OperationCancelled(Exception):
    """Raised within a loader for a request that was cancelled; it never reaches a user."""


class Cancelled:
    """A mark that a request was cancelled, set by any thread and looked at by the one that works for it."""

    def __init__(self) -> None:
        self._event = Event()

    def set(self) -> None:
        """Ask the work for this request to stop."""
        self._event.set()

    def check(self) -> None:
        """Raise OperationCancelled if the request was cancelled."""
        if self._event.is_set():
            raise OperationCancelled
