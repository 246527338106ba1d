"""Logs a step that does not end, and its thread's place."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator

_log = logging.getLogger(__name__)

#: Seconds after which a step counts as stalled. A process's first steps build kernels, for up to half a minute.
STALL_SECONDS = 60.0
#: Looks per ``STALL_SECONDS``.
LOOKS = 4
#: Most frames of a stalled thread that are logged, innermost last.
FRAMES = 8


class Watchdog:
    """Times the steps of one thread; any thread may read ``stalled``."""

    def __init__(self) -> None:
        self._since = 0.0  # start of the running step; 0 between steps
        self._thread = 0
        self._is_said = False
        _watch(self)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Time one step."""
        self._thread, self._is_said, self._since = (
            threading.get_ident(),
            False,
            time.monotonic(),
        )
        try:
            yield
        finally:
            self._since = 0.0

    @property
    def stalled(self) -> float:
        """Seconds of the running step if it stalls, else 0."""
        since = self._since
        taken = time.monotonic() - since if since else 0.0
        return taken if taken > STALL_SECONDS else 0.0

    def look(self) -> None:
        """Log once where the thread is, if its step stalls."""
        taken = self.stalled
        if not taken or self._is_said:
            return
        self._is_said = True
        frame = sys._current_frames().get(self._thread)
        where = "(its thread is gone)"
        if frame is not None:
            where = "".join(traceback.format_stack(frame)[-FRAMES:])
        _log.warning(
            "a step of the engine has not ended for %.0f s; requests wait for it. It is at\n%s",
            taken,
            where,
        )


_watched: weakref.WeakSet[Watchdog] = weakref.WeakSet()
_lock = threading.Lock()
_has_watcher = False


def _watch(watchdog: Watchdog) -> None:
    global _has_watcher
    with _lock, contextlib.suppress(RuntimeError):
        _watched.add(watchdog)
        if not _has_watcher:
            threading.Thread(target=_look, name="vlm-batch-watch", daemon=True).start()
            _has_watcher = True


def _look() -> None:
    global _has_watcher
    while True:
        time.sleep(STALL_SECONDS / LOOKS)
        with _lock:
            alive = list(_watched)
            if not alive:
                _has_watcher = False
                return
        for watchdog in alive:
            watchdog.look()
        del alive
