"""Signals and standard streams of the command, from its first moment until it has read its arguments.

Standard library only: this module runs before all others.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from types import FrameType

#: Names of the standard streams, by descriptor, and how they are opened.
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
_ENDED_BY = {
    signal.SIGINT: b"vlm-batch: interrupted\n",
    signal.SIGTERM: b"vlm-batch: terminated\n",
}


class Beginning:
    """Events before the command could attend to them."""

    def __init__(self) -> None:
        #: Standard streams that the caller had closed, by descriptor.
        self.closed: frozenset[int] = frozenset()
        #: Those that are terminals; after a hang-up nothing looks like one.
        self.terminals: list[int] = []
        #: The terminal has hung up.
        self.has_hung_up = False


BEGINNING = Beginning()


def is_command() -> bool:
    """Whether this process was started as ``vlm-batch`` or ``python -m vlm_batch``."""
    words = sys.orig_argv[1:]
    if "-m" in words:
        return words[words.index("-m") + 1 :][:1] == ["vlm_batch"]
    script = next((word for word in words if not word.startswith("-")), "")
    return os.path.basename(script) == "vlm-batch"


def begin() -> None:
    """Open closed streams; end at once by SIGINT and SIGTERM, without a traceback; note SIGHUP for the command.

    A fault in MLX or another library in C++ says where each thread was.

    Signals that the caller ignores (nohup) stay so.
    """
    open_closed_streams()
    faulthandler.enable()
    BEGINNING.terminals = terminals()
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _ENDED_BY:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _leave)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _note)


def hand_over() -> None:
    """Give SIGINT and SIGTERM back: from here on the command attends to them."""
    _give_back(signal.SIGINT, signal.default_int_handler)
    _give_back(signal.SIGTERM, signal.SIG_DFL)


def _give_back(number: signal.Signals, handler: object) -> None:
    if signal.getsignal(number) is _leave:
        signal.signal(number, handler)  # type: ignore[arg-type]


def end_with_terminal() -> None:
    """Give SIGHUP back; end by it if it has come."""
    if signal.getsignal(signal.SIGHUP) is _note:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if BEGINNING.has_hung_up:
            os.kill(os.getpid(), signal.SIGHUP)


def is_hangup_ignored() -> bool:
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def terminals() -> list[int]:
    """Return the descriptors of output that lead to a terminal."""
    return [number for number in (1, 2) if os.isatty(number)]


def open_closed_streams() -> None:
    """Lead closed standard streams nowhere: files that are opened later would take their numbers."""
    for number, (name, mode) in enumerate(_STREAMS):
        if vars(sys)[name] is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        vars(sys)[name] = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115  (until the end)
        BEGINNING.closed |= {number}


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, _ENDED_BY[signal.Signals(number)])
    os._exit(128 + number)


def _note(number: int, frame: FrameType | None) -> None:
    BEGINNING.has_hung_up = True
