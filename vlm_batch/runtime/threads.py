"""Threads that run one engine after another and never end.

MLX keeps what it compiled per thread, and lets go of it when the thread ends: with Python's lock, after Python has counted
the thread as joined. If the interpreter is ending too, that lock is not to be had, and the process aborts ("terminate called
without an active exception", about one exit in ten; mlx 0.32, thread-local compile cache). A thread that waits for the next
engine instead is simply there when the process goes. It also keeps its MLX stream, of which a new thread would make another.

A thread that is in MLX when the interpreter goes aborts the process in the same way. So work that says how it is stopped is
stopped, and waited for, before that; whether or not anybody still holds it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

Work = Callable[[], None]
_Tasks: TypeAlias = "queue.SimpleQueue[tuple[Work, Running]]"

#: Seconds that the end of the interpreter waits at most for work that was told to stop.
EXIT_SECONDS = 10.0

#: The parent process, in a child that was forked after threads of this module had begun.
_forked_from: int | None = None
_idle: list[_Tasks] = []
_running: set[Running] = set()


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class Running:
    """Work on a thread of this module. ``join`` waits for its end, and returns at once on the thread itself."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread: int | None = None
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self._after: Callable[[], None] | None = None

    def join(self, timeout: float | None = None) -> None:
        if not self.is_here():
            self._ended.wait(timeout)

    def is_here(self) -> bool:
        """Whether the work is done on the thread that asks."""
        return threading.get_ident() == self._thread

    def watch(self, *, stop: Callable[[], None], after: Callable[[], None]) -> None:
        """Have ``stop`` called before the interpreter ends, and ``after`` when the work has ended for any reason: at once if
        it has, and in a forked child process, which has no such thread."""
        with self._lock:
            self._stop, self._after = stop, after
            has_ended = self._ended.is_set()
        if has_ended:
            after()

    def stop(self) -> None:
        """Ask the work to end, if it said how."""
        if self._stop is not None:
            self._stop()

    def end(self) -> None:
        """Mark the work as ended: no thread does it any more."""
        self._thread = None
        with self._lock:
            after, self._stop, self._after = self._after, None, None
            self._ended.set()
        _running.discard(self)
        if after is not None:
            after()


def start(work: Work, name: str) -> Running:
    """Run ``work`` on an idle thread, or on a new one of that name."""
    running = Running()
    try:
        tasks = _idle.pop()
    except IndexError:
        tasks = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(tasks,), name=name, daemon=True).start()
    _running.add(running)
    tasks.put((work, running))
    return running


def _serve(tasks: _Tasks) -> None:
    while True:
        _run(tasks, *tasks.get())  # a frame of its own: nothing of an engine is held while waiting for the next


def _run(tasks: _Tasks, work: Work, running: Running) -> None:
    running._thread = threading.get_ident()
    try:
        work()
    except BaseException:
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
    _idle.append(tasks)
    running.end()


def _stop_all() -> None:
    """Before the interpreter ends: stop what can be stopped, and wait for it."""
    stopped = [running for running in tuple(_running) if running._stop is not None]
    for running in stopped:
        with contextlib.suppress(Exception):
            running.stop()
    deadline = time.monotonic() + EXIT_SECONDS
    for running in stopped:
        running.join(max(0.0, deadline - time.monotonic()))


def check_not_forked() -> None:
    """Raise RuntimeError in a child of a process that had threads of this module: MLX's own did not come along either, and
    whoever waits for them waits for ever."""
    if _forked_from is not None:
        raise RuntimeError(
            f"this process was forked from {_forked_from} after a batcher was made there, and MLX does not outlive a fork: "
            "start it with multiprocessing.get_context('spawn'), or before the first batcher is made"
        )


def _lose_all() -> None:
    """In a child process: a fork takes no threads along, and locks may be held for ever."""
    global _forked_from
    lost = tuple(_running)
    if lost or _idle:
        _forked_from = os.getppid()
    _idle.clear()
    _running.clear()
    for running in lost:
        running._lock, running._ended = threading.Lock(), threading.Event()
        running.end()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_lose_all)
