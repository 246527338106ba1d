"""Signals that end a job, or do not."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

from vlm_batch.cli.watching import JobView
from vlm_batch.runtime import beginning
from vlm_batch.runtime.beginning import BEGINNING


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a job as an interrupt does."""


class Signals:
    """While a job runs: SIGTERM ends it as an interrupt does, and one that keeps its answers outlives its terminal.

    A context manager. After a hang-up, messages go to the file ``log``; with None, the job ends with its terminal.
    """

    def __init__(self, log: str | None) -> None:
        self.view: JobView | None = None
        self._log = log
        self._is_terminated = False
        self._terminals = BEGINNING.terminals or beginning.terminals()
        self._before: list[tuple[signal.Signals, object]] = []

    @property
    def status(self) -> int:
        """Exit status of an interrupted job, as shells have it."""
        return 128 + (signal.SIGTERM if self._is_terminated else signal.SIGINT)

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._take(signal.SIGTERM, self._terminate)
        if self._log is None:
            beginning.end_with_terminal()
        elif not beginning.is_hangup_ignored():  # nohup
            self._take(signal.SIGHUP, self._leave_terminal)
            if BEGINNING.has_hung_up:
                self._leave_terminal(signal.SIGHUP, None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _take(self, number: signal.Signals, handler: object) -> None:
        self._before.append((number, signal.signal(number, handler)))  # type: ignore[arg-type]

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._is_terminated = True
        raise Terminated

    def _leave_terminal(self, number: int, frame: FrameType | None) -> None:
        try:
            file = os.open(
                str(self._log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
            )
        except OSError:
            file = os.open(os.devnull, os.O_WRONLY)
        for stream in self._terminals:
            os.dup2(file, stream)
        os.close(file)
        if self.view is not None:
            self.view.leave_terminal()
