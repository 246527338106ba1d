"""Threads that run one engine after another and never end.

MLX keeps what it compiled per thread, and lets go of it when the thread ends: with Python's lock, after Python has counted
the thread as joined. If the interpreter is ending too, that lock is not to be had, and the process aborts ("terminate called
without an active exception", about one exit in ten; mlx 0.32, thread-local compile cache). A thread that waits for the next
engine instead is simply there when the process goes. It also keeps its MLX stream, of which a new thread would make another.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TypeAlias

Work = Callable[[], None]
_Tasks: TypeAlias = "queue.SimpleQueue[tuple[Work, Running]]"

_idle: list[_Tasks] = []


class Running:
    """Work on a thread of this module. ``join`` waits for its end, and returns at once on the thread itself."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread: int | None = None

    def join(self) -> None:
        if threading.get_ident() != self._thread:
            self._ended.wait()


def start(work: Work, name: str) -> Running:
    """Run ``work`` on an idle thread, or on a new one of that name."""
    running = Running()
    try:
        tasks = _idle.pop()
    except IndexError:
        tasks = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(tasks,), name=name, daemon=True).start()
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
    running._thread = None
    _idle.append(tasks)
    running._ended.set()


os.register_at_fork(after_in_child=_idle.clear)  # a fork takes no threads along
