"""Threads that read and prepare requests ahead of the engine.

Reading waits, processing works, and neither may hold up the other: URLs, local files, ordinary processing and very long
prompts have threads of their own. A read that does not answer in time is given up, with its thread, and another thread
takes its place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from vlm_batch.arrays import num_bytes
from vlm_batch.inputs.fetch import Cancelled, Fetched, OperationCancelled
from vlm_batch.inputs.images import fetch_image
from vlm_batch.inputs.pool import Pool
from vlm_batch.inputs.prepare import Lane, Prepared, Question, lane_of, late_error
from vlm_batch.inputs.videos import fetch_video
from vlm_batch.runtime import threads
from vlm_batch.types import Video

#: Threads that decode and process pictures and videos, each with a copy of the processor: one a core, eight at most.
#: Pillow, numpy, OpenCV and tokenizers let go of Python's lock.
NUM_LOADERS = max(2, min(8, threads.num_cores()))
#: Pictures and videos that are downloaded at a time, and that are read from disks at a time.
NUM_DOWNLOADS = 8
NUM_DISK_READS = 4
#: Seconds beyond its own time limit after which a read that does not answer is given up.
GRACE_SECONDS = 1.0
#: Seconds that ``Loaders.close`` waits for processing under way. The end of the interpreter waits for all of it.
CLOSE_SECONDS = 5.0


class Loading:
    """One question on its way to being ``Prepared``; every method is safe from any thread.

    Once it is done it refers to nothing that refers to it, so that pictures and arrays go with the last reference to it.
    """

    def __init__(self, question: Question, when_read: Callable[[], None] | None = None) -> None:
        self.question = question
        self.when_read = when_read
        self.cancelled = Cancelled()
        self.read_seconds = self.process_seconds = 0.0
        self._began = time.perf_counter()
        self._media = list(question.media)
        #: Places among its pictures and videos, with the lanes, of those that are still to be read.
        self.unread = {at: lane for at, medium in enumerate(self._media) if (lane := lane_of(medium)) is not None}
        self.is_read = not self.unread  # its pictures and videos are in memory, or at hand
        self.num_pixels = question.num_pixels  # of the pictures that are in memory
        #: Bytes that it will come to; None if nobody knows that yet.
        self.known_nbytes = num_bytes(question.inputs) if question.inputs is not None else None if question.media else 0
        self._future: Future[Prepared] = Future()
        self._calls: list[Callable[[], None]] | None = []  # to be told that it is done; None once they were
        self._lock = threading.Lock()
        self._has_ended = False

    @property
    def nbytes(self) -> int:
        """Bytes of the files that were read for it and are in memory."""
        media = self.question.media if self.is_read else tuple(self._media)
        return sum(len(medium.data) for medium in media if isinstance(medium, Fetched))

    def done(self) -> bool:
        """Whether ``result`` would return or raise at once."""
        return self._future.done()

    def result(self) -> Prepared:
        """The outcome, waited for; raises what reading or processing raised."""
        return self._future.result()

    def when_done(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once when it is done, by the thread that ended it, or now if that is past."""
        with self._lock:
            if self._calls is not None:
                self._calls.append(call)
                return
        call()

    def cancel(self) -> None:
        """End it now: downloads are interrupted, what waits does not begin, and processing stops where it next looks.

        ``result`` then raises OperationCancelled, unless it was done before.
        """
        self.end(OperationCancelled())

    # Called by Loaders
    # -----------------------------------------------------------------------------------------------------------------

    def put(self, at: int, medium: Any) -> bool:
        """Note what was read; whether that was the last."""
        with self._lock:
            if self._has_ended:
                return False
            self._media[at] = medium
            self.unread.pop(at, None)
            if self.unread:
                return False
            self.read_seconds = time.perf_counter() - self._began
            media = list(self._media)
        self.question = self.question.with_media(media)
        self.num_pixels = self.question.num_pixels
        self.is_read = True
        return True

    def end(self, outcome: Prepared | BaseException) -> None:
        """Put the outcome, unless there is one, tell those who wait for it, and stop what still works for an error's."""
        with self._lock:
            is_first, self._has_ended = not self._has_ended, True
            self._media.clear()
        if is_first:
            if isinstance(outcome, BaseException):
                self._future.set_exception(outcome)
            else:
                self._future.set_result(outcome)
            with self._lock:
                calls, self._calls = self._calls or [], None
            for call in calls:
                call()
        if isinstance(outcome, BaseException):
            self.cancelled.set()


class Loaders:
    """Read and prepare questions; each lane in the order in which its questions are started.

    ``prepare`` is ``Preparer.prepare``, called on up to ``num_threads`` threads (a core each by default). The engine's loop
    calls ``start``, calls ``process`` when there is room for what will come of it, is woken by ``Loading.when_done``, and
    calls ``Loading.cancel`` for a request that was cancelled before it was taken in. It decides how many are started, and
    counts those of each ``Question.lane`` apart: what waits for a network may not take the places of what does not.
    """

    def __init__(self, prepare: Callable[[Question, Cancelled], Prepared], *, num_threads: int | None = None) -> None:
        self._prepare = prepare
        num_loaders = NUM_LOADERS if num_threads is None else num_threads
        self._work = Pool(num_loaders, "vlm-batch-loader", is_awaited=True)
        self._long_work = Pool(1, "vlm-batch-long-prompt", is_awaited=True)
        self._reads = {
            Lane.DISK: Pool(NUM_DISK_READS, "vlm-batch-reader"),
            Lane.NETWORK: Pool(NUM_DOWNLOADS, "vlm-batch-download"),
        }
        self._open: set[Loading] = set()

    def start(self, question: Question, when_read: Callable[[], None] | None = None) -> Loading:
        """Begin to read and process a question; returns at once.

        With ``when_read`` it is read only: that is called once by the thread that has read the last of it, or not at all
        if there was nothing to read, and ``process`` goes on with it.
        """
        loading = Loading(question, when_read)
        self._open.add(loading)
        loading.when_done(partial(self._open.discard, loading))
        policy, unread = question.fetch, dict(loading.unread)
        try:
            for at, lane in unread.items():
                medium = question.media[at]
                fetch: Callable[..., Any] = fetch_video if isinstance(medium, Video) else fetch_image
                reading = self._reads[lane].submit(
                    partial(fetch, medium, policy, loading.cancelled),
                    loading.cancelled,
                    seconds=policy.seconds + GRACE_SECONDS,
                    late=partial(late_error, medium, policy),
                )
                reading.add_done_callback(partial(self._was_read, loading, at))
        except BaseException as error:
            loading.end(error)
        if not unread and when_read is None:
            self.process(loading)
        return loading

    def process(self, loading: Loading) -> None:
        """Have what was read processed; returns at once."""
        pool = self._long_work if loading.question.takes_long else self._work
        try:
            working = pool.submit(partial(self._prepared, loading), loading.cancelled)
            working.add_done_callback(lambda done: loading.end(done.exception() or done.result()))
        except BaseException as error:
            loading.end(error)

    def _prepared(self, loading: Loading) -> Prepared:
        # No function within another: an error's traceback would hold its closure, and with it the loading.
        begin = time.perf_counter()
        try:
            return self._prepare(loading.question, loading.cancelled)
        finally:
            loading.process_seconds = time.perf_counter() - begin

    def close(self) -> None:
        """End everything that is under way, and wait a little for what native code is doing."""
        for loading in tuple(self._open):
            loading.cancel()
        for pool in (*self._reads.values(), self._work, self._long_work):
            pool.close()
        end = time.monotonic() + CLOSE_SECONDS
        for pool in (self._work, self._long_work):
            pool.join(max(0.0, end - time.monotonic()))

    def _was_read(self, loading: Loading, at: int, reading: Future[Any]) -> None:
        try:
            if loading.put(at, reading.result()):
                (loading.when_read or partial(self.process, loading))()
        except BaseException as error:  # also of what comes next: a future's callback tells nobody
            loading.end(error)
