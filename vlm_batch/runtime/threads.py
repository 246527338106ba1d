"""Threads that run one engine after another and never end, and what the end of the interpreter waits for.

MLX keeps what it compiled per thread, and lets go of it when the thread ends: with Python's lock, after Python has counted
the thread as joined. If the interpreter is ending too, that lock is not to be had, and the process aborts ("terminate called
without an active exception", about one exit in ten; mlx 0.32, thread-local compile cache). A thread that waits for the next
engine instead is simply there when the process goes. It also keeps its MLX stream, of which a new thread would make another.

A thread that is in MLX, or in another library's C++ or Rust, when the interpreter goes aborts the process in the same way:
Python ends it where it comes back. Letting go of arrays and compiled functions is such a call, too. So the exit asks work that
may be there to stop, and waits until it has, whether or not anybody still holds it: an engine ends after the step that is under
way, the load of a model after the stage that is, a loader after its picture. Nothing can end a call within such a library:
however long it takes, it is waited for. Ctrl-C then ends the process as it ends a program that is not Python's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

Work = Callable[[], None]
_Tasks: TypeAlias = "queue.SimpleQueue[Running]"

Found = TypeVar("Found")

#: Seconds between two looks of whoever waits: CPython loses a signal for a wait that it comes just before.
LOOK_SECONDS = 1.0
#: Seconds that the end of the interpreter waits without a word.
SILENT_SECONDS = 10.0
#: Seconds from one request to stop to the next.
_ASK_SECONDS = 1.0

#: The parent process, in a child that was forked after threads of this module had begun.
_forked_from: int | None = None
#: Threads that wait for work, by whether the exit awaits what they do. The kinds stay apart: one that has been in MLX is never
#: woken by work that the exit does not stop first.
_idle: dict[bool, list[_Tasks]] = {True: [], False: []}
_running: set[Running] = set()


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def look_until(look: Callable[[float], Found | None], seconds: float | None = None) -> Found | None:
    """Call ``look``, which waits so many seconds at most, until it finds something; None after ``seconds``.

    All waits without an end go through it: a Ctrl-C that comes just before one is seen at the next look.
    """
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        left = LOOK_SECONDS if end is None else max(0.0, min(LOOK_SECONDS, end - time.monotonic()))
        found = look(left)
        if found is not None or (end is not None and time.monotonic() >= end):
            return found


class Running:
    """Work on a thread of this module. ``join`` waits for its end, and returns at once on the thread itself.

    Where it ``is_awaited``, the interpreter calls ``stop`` before it ends, and waits. ``after`` is called when the work
    has ended for any reason, also in a forked child process, which has no such thread.
    """

    def __init__(self, work: Work, *, is_awaited: bool, stop: Work | None, after: Work | None) -> None:
        self.is_awaited = is_awaited
        self._work: list[Work] = [work]  # until it is done, as the other two
        self._stop, self._after = stop, after
        self._ended = threading.Event()
        self._thread: int | None = None

    def join(self, timeout: float | None = None) -> bool:
        """Whether it has ended, after ``timeout`` seconds at most."""
        return self.is_here() or look_until(lambda seconds: self._ended.wait(seconds) or None, timeout) is not None

    def is_here(self) -> bool:
        """Whether the work is done on the thread that asks."""
        return threading.get_ident() == self._thread

    def end(self) -> None:
        """Mark the work as ended: no thread does it or holds anything of it, and whoever waited may leave the process."""
        self._work.clear()
        after, self._stop, self._after = self._after, None, None
        try:
            if after is not None:
                after()
        finally:
            del after
            self._thread = None
            self._ended.set()
            _running.discard(self)


def start(
    work: Work, name: str, *, is_awaited: bool = False, stop: Work | None = None, after: Work | None = None
) -> Running:
    """Run ``work`` on an idle thread, or on a new one of that name. What may be in MLX must be ``is_awaited``."""
    running = Running(work, is_awaited=is_awaited, stop=stop, after=after)
    try:
        tasks = _idle[is_awaited].pop()
    except IndexError:
        tasks = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(tasks,), name=name, daemon=True).start()
    _running.add(running)
    tasks.put(running)
    return running


def _serve(tasks: _Tasks) -> None:
    while True:
        _run(tasks, tasks.get())  # a frame of its own: nothing of an engine is held while waiting for the next


def _run(tasks: _Tasks, running: Running) -> None:
    """Do the work, and report what it raises as threads do. What it held is let go of here: that may be in MLX."""
    running._thread = threading.get_ident()
    try:
        running._work.pop()()
    except BaseException:
        with contextlib.suppress(BaseException):  # a hook of the user's, or a stream that is closed
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
    _idle[running.is_awaited].append(tasks)
    running.end()


def _stop_all() -> None:
    """Before the interpreter ends: stop what must not be running then, and wait for it."""
    begin, has_said = time.monotonic(), False
    while awaited := [running for running in tuple(_running) if running.is_awaited and not running.is_here()]:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        for running in awaited:
            if running._stop is not None:
                with contextlib.suppress(Exception):
                    running._stop()
        awaited[0].join(_ASK_SECONDS)
        if not has_said and time.monotonic() - begin > SILENT_SECONDS:
            has_said = True
            with contextlib.suppress(Exception):
                said = "the exit waits for a step or a load that is under way; Ctrl-C ends it now"
                print(f"vlm-batch: {said}", file=sys.stderr, flush=True)


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
    if lost or any(_idle.values()):
        _forked_from = os.getppid()
    for idle in _idle.values():
        idle.clear()
    _running.clear()
    for running in lost:
        running._ended = threading.Event()
        running.end()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_lose_all)
