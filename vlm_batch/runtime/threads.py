"""Threads that run one engine after another and never end.

MLX keeps what it compiled per thread, and lets go of it when the thread ends: with Python's lock, after Python has counted
the thread as joined. If the interpreter is ending too, that lock is not to be had, and the process aborts ("terminate called
without an active exception", about one exit in ten; mlx 0.32, thread-local compile cache). A thread that waits for the next
engine instead is simply there when the process goes. It also keeps its MLX stream, of which a new thread would make another.

A thread that is in MLX, or in another library's C++ or Rust, when the interpreter goes aborts the process in the same way:
Python ends it where it comes back. Letting go of arrays and compiled functions is such a call, too. So work that may be there
is stopped, and waited for, before that; whether or not anybody still holds it. Nothing can end a call within such a library:
however long it takes, it is waited for, and Ctrl-C, or a limit that only a hung device meets, leaves the process without its
interpreter's end, by a status that says so.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import queue
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
#: Seconds that the end of the interpreter waits for work that was told to stop: silently, and at most.
SILENT_SECONDS = 10.0
EXIT_SECONDS = 600.0
#: Seconds from one request to stop to the next.
_ASK_SECONDS = 1.0
#: Exit statuses of a process that could not wait for its interpreter's end: Ctrl-C, and work that hangs.
INTERRUPTED, HUNG = 130, 70

#: The parent process, in a child that was forked after threads of this module had begun.
_forked_from: int | None = None
#: Threads that wait for work, by whether the exit awaits what they do: one that has been in MLX does nothing else again, or it
#: could be woken while the interpreter ends.
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


class Interrupted(SystemExit):
    """Raised in work whose outcome nobody wants any more, between two of its instructions."""


class Running:
    """Work on a thread of this module. ``join`` waits for its end, and returns at once on the thread itself.

    Where it ``is_awaited``, the interpreter does not end before it.
    """

    def __init__(self, work: Work, *, is_awaited: bool = False) -> None:
        self.is_awaited = is_awaited
        self._work: list[Work] = [work]  # until it is done
        self._may_interrupt, self._is_interrupted, self._is_over = True, False, False
        self._ended = threading.Event()
        self._thread: int | None = None
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self._after: Callable[[], None] | None = None

    def join(self, timeout: float | None = None) -> bool:
        """Whether it has ended, after ``timeout`` seconds at most."""
        return self.is_here() or look_until(lambda seconds: self._ended.wait(seconds) or None, timeout) is not None

    def is_here(self) -> bool:
        """Whether the work is done on the thread that asks."""
        return threading.get_ident() == self._thread

    def watch(self, *, stop: Callable[[], None], after: Callable[[], None]) -> None:
        """Have ``stop`` called before the interpreter ends, and ``after`` when the work has ended for any reason: at once if
        it has, and in a forked child process, which has no such thread."""
        with self._lock:
            self._stop, self._after = stop, after
            is_over = self._is_over
        if is_over:
            after()

    def stop(self) -> None:
        """Ask the work to end, if it said how."""
        if self._stop is not None:
            self._stop()

    def interrupt(self) -> None:
        """Raise Interrupted in the work, once, as soon as it is in Python: a call within MLX ends first."""
        with self._lock:
            if self._may_interrupt and self._thread is not None:
                self._may_interrupt, self._is_interrupted = False, True
                _raise_in(self._thread, Interrupted)

    def run(self) -> None:
        """Do the work. What it raises is reported as threads do, but for SystemExit and what ``interrupt`` raised.

        What the work held is let go of here: that may take long, and be in MLX.
        """
        self._thread = threading.get_ident()
        try:
            try:
                self._work.pop()()
            finally:
                with self._lock:
                    self._may_interrupt = False
                if self._is_interrupted:
                    _take_late()
        except BaseException:
            with contextlib.suppress(BaseException):  # a hook of the user's, or a stream that is closed
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

    def end(self) -> None:
        """Mark the work as ended: no thread does it or holds anything of it, and whoever waited may leave the process."""
        self._work.clear()
        with self._lock:
            after, self._stop, self._after, self._is_over = self._after, None, None, True
        try:
            if after is not None:
                after()
        finally:
            del after
            self._thread = None
            self._ended.set()
            _running.discard(self)


def start(work: Work, name: str, *, is_awaited: bool = False) -> Running:
    """Run ``work`` on an idle thread, or on a new one of that name. What may be in MLX must be ``is_awaited``."""
    running = Running(work, is_awaited=is_awaited)
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
    running.run()
    _idle[running.is_awaited].append(tasks)
    running.end()


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Have an exception raised in a thread when it next runs an instruction of Python's.

    It cannot be taken back: CPython 3.11 then looks for it at each call and loop of the whole process, for good, and a thread
    that is profiled or traced never gets beyond the first of them.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _take_late() -> None:
    """Have Interrupted raised here if it has not been raised in this thread yet."""
    with contextlib.suppress(Interrupted):
        for _ in range(100):  # it is looked for at each round
            pass


def _stop_all() -> None:
    """Before the interpreter ends: stop what must not be running then, and wait for it."""
    begin, has_said = time.monotonic(), False
    try:
        while awaited := [running for running in tuple(_running) if running.is_awaited and not running.is_here()]:
            for running in awaited:
                with contextlib.suppress(Exception):
                    running.stop()
            awaited[0].join(_ASK_SECONDS)
            waited = time.monotonic() - begin
            if waited > EXIT_SECONDS:
                _leave(HUNG, f"a call that began before the exit has not come back in {EXIT_SECONDS:.0f} s")
            if waited > SILENT_SECONDS and not has_said:
                has_said = True
                _say("the exit waits for a step or a load that is under way; Ctrl-C ends it now")
    except KeyboardInterrupt:
        _leave(INTERRUPTED, "interrupted")


def _say(text: str) -> None:
    with contextlib.suppress(Exception):
        print(f"vlm-batch: {text}", file=sys.stderr, flush=True)


def _leave(status: int, text: str) -> None:
    """End the process at once, while a thread is where the interpreter's own end would abort it."""
    _say(text)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(status)


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
        running._lock, running._ended, running._thread = threading.Lock(), threading.Event(), threading.get_ident()
        running.end()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_lose_all)
