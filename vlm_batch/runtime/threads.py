"""Threads that run one engine after another, and the interpreter's end.

MLX 0.32 takes Python's lock when it frees an ending thread's compile cache, which aborts one exit in ten. So threads
never end: idle ones wait for an engine.

A thread inside MLX, C++ or Rust at the exit aborts the process, too. So the exit asks such work to stop, and waits;
a Ctrl-C then ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

Work = Callable[[], None]
_Tasks: TypeAlias = "queue.SimpleQueue[ThreadTask]"

Found = TypeVar("Found")

#: Seconds between two looks of a waiting thread: CPython can miss a signal that comes just before a wait.
LOOK_SECONDS = 1.0
#: Seconds that the end of the interpreter waits without a word.
SILENT_SECONDS = 10.0
#: Seconds from one request to stop to the next.
_ASK_SECONDS = 1.0

#: The parent process, in a child that was forked after threads of this module had begun.
_forked_from: int | None = None
#: Idle threads by (is_awaited, is_deep). The kinds stay apart: a thread that has been in MLX is only woken by work that
#: the exit stops first.
_idle: dict[tuple[bool, bool], list[_Tasks]] = {}
#: Bytes of a deep stack, for Rust and C++ that recurse as deep as their input; unused pages take no memory. An overflow
#: of the usual 8 MB would end the process.
DEEP_STACK = 2**29
_stack_lock = threading.Lock()
_running: set[ThreadTask] = set()


def num_cores() -> int:
    """Return the number of cores for this process."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def wait_until_found(
    look: Callable[[float], Found | None], seconds: float | None = None
) -> Found | None:
    """Call ``look(seconds)``, which may wait that long, until it finds something. None after ``seconds``.

    Waits without a limit go through this, so that they see a Ctrl-C.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        found = look(max(0.0, min(LOOK_SECONDS, left)))
        if found is not None or time.monotonic() >= end:
            return found


class ThreadTask:
    """Work on a thread of this module.

    Args:
        work: The function to run.
        is_awaited: At its end the interpreter calls ``stop`` and waits.
        is_deep: The work needs a deep stack.
        stop: Asks the work to end.
        after: Called at any end, also in a forked child.
    """

    def __init__(
        self,
        work: Work,
        *,
        is_awaited: bool,
        is_deep: bool,
        stop: Work | None,
        after: Work | None,
    ) -> None:
        self.is_awaited = is_awaited
        self.is_deep = is_deep
        self._work: list[Work] = [work]  # emptied when it ends
        self._stop, self._after = stop, after
        self._ended = threading.Event()
        self._thread: int | None = None

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds. True if the work has ended or this is its thread."""
        if self.is_here():
            return True
        ended = wait_until_found(
            lambda seconds: self._ended.wait(seconds) or None, timeout
        )
        return ended is not None

    def ask_to_stop(self) -> None:
        if self._stop is not None:
            with contextlib.suppress(Exception):
                self._stop()

    def is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def end(self) -> None:
        """Mark the work as ended, release it, and call ``after``."""
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
    work: Work,
    name: str,
    *,
    is_awaited: bool = False,
    is_deep: bool = False,
    stop: Work | None = None,
    after: Work | None = None,
) -> ThreadTask:
    """Run ``work`` on an idle or new thread. Work that may enter MLX must be ``is_awaited``."""
    running = ThreadTask(
        work, is_awaited=is_awaited, is_deep=is_deep, stop=stop, after=after
    )
    try:
        tasks = _idle.setdefault((is_awaited, is_deep), []).pop()
    except IndexError:
        tasks = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(tasks,), name=name, daemon=True)
        with _stack_lock:
            before = threading.stack_size(DEEP_STACK if is_deep else 0)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
    _running.add(running)
    tasks.put(running)
    return running


def _serve(tasks: _Tasks) -> None:
    while True:
        # a frame of its own: an idle thread holds nothing of an engine
        _run(tasks, tasks.get())


def _run(tasks: _Tasks, running: ThreadTask) -> None:
    running._thread = threading.get_ident()
    try:
        running._work.pop()()
    except BaseException:
        with contextlib.suppress(BaseException):  # a user's hook, or a closed stream
            threading.excepthook(
                threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
            )
    _idle.setdefault((running.is_awaited, running.is_deep), []).append(tasks)
    running.end()


def _stop_all() -> None:
    """Ask all work that the exit waits for to stop, until it has."""
    begin, has_said = time.monotonic(), False
    while awaited := _awaited():
        _end_at_interrupt()
        for running in awaited:
            running.ask_to_stop()
        awaited[0].join(_ASK_SECONDS)
        if not has_said and time.monotonic() - begin > SILENT_SECONDS:
            has_said = True
            _say_that_the_exit_waits()


def _awaited() -> list[ThreadTask]:
    return [one for one in tuple(_running) if one.is_awaited and not one.is_here()]


def _end_at_interrupt() -> None:
    """Have a Ctrl-C end the process, unless the program handles it."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _say_that_the_exit_waits() -> None:
    said = "the exit waits for a step or a load that is under way; Ctrl-C ends it now"
    with contextlib.suppress(Exception):
        print(f"vlm-batch: {said}", file=sys.stderr, flush=True)


def check_not_forked() -> None:
    """Refuse to run in a forked child, which lacks the threads.

    Raises:
        RuntimeError: This process was forked after threads had begun.
    """
    if _forked_from is not None:
        raise RuntimeError(
            f"this process was forked from {_forked_from} after a batcher was made there, and MLX does not outlive a fork: "
            "start it with multiprocessing.get_context('spawn'), or before the first batcher is made"
        )


def _keep_arrays() -> None:
    """Keep this child from freeing the parent's arrays."""
    # A lost thread may hold MLX's allocator lock for ever. mlx-vlm's exit hook frees random state.
    arrays = [
        one
        for one in gc.get_objects()
        if vars(type(one)).get("__module__") == "mlx.core"
    ]
    # a reference to itself, which freezing hides from the collector
    arrays.append(arrays)
    gc.freeze()
    with contextlib.suppress(KeyError, AttributeError):
        atexit.unregister(sys.modules["mlx_vlm"].clear_mlx_streams)


def _lose_all() -> None:
    """Forget the threads, which a fork does not copy."""
    global _forked_from, _stack_lock
    lost = tuple(_running)
    if lost or any(_idle.values()):
        _forked_from = os.getppid()
        _keep_arrays()
    _idle.clear()
    _running.clear()
    _stack_lock = threading.Lock()
    for running in lost:
        running._ended = threading.Event()
        running.end()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_lose_all)
