"""Threads that prepare requests ahead of the engine.

Downloads, files, ordinary work, large pictures and very long prompts have separate threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from vlm_batch.arrays import num_bytes
from vlm_batch.inputs.fetch import Cancelled, Fetched, OperationCancelled, RecalledUri
from vlm_batch.inputs.grammar import Form
from vlm_batch.inputs.media import Kind
from vlm_batch.inputs.pool import Pool
from vlm_batch.inputs.question import Lane, Prepared, Question, late_error
from vlm_batch.runtime import threads
from vlm_batch.types import Audio

#: Threads that decode and process media, each with a copy of the processor: one a core, two to eight. Pillow, numpy, OpenCV
#: and tokenizers release the GIL.
NUM_LOADERS = max(2, min(8, threads.num_cores()))
#: Downloads at a time, and disk reads at a time.
NUM_DOWNLOADS = 8
NUM_DISK_READS = 4
#: Assumed samples per second of sound, to estimate its memory.
SAMPLES_A_SECOND = 16_000
#: Seconds after its own time limit at which a hanging read is given up.
GRACE_SECONDS = 1.0
#: Seconds that ``Loaders.close`` waits for processing under way. The end of the interpreter waits for all of it.
CLOSE_SECONDS = 5.0


class Loading:
    """One question on its way to ``Prepared``. All methods are thread-safe."""

    def __init__(
        self, question: Question, when_read: Callable[[], None] | None = None
    ) -> None:
        self.question = question
        self.when_read = when_read
        self.cancelled = Cancelled()
        self.read_seconds = self.process_seconds = 0.0
        self._began = time.perf_counter()
        self._media = list(question.media)
        self.unread = question.unread
        # its pictures and videos are in memory, or at hand
        self.is_read = not self.unread
        #: Bytes of the prepared inputs; None while unknown.
        self.known_nbytes: int | None = None if question.media else 0
        if question.inputs is not None:
            self.known_nbytes = num_bytes(question.inputs)
        self._future: Future[Prepared] = Future()
        # to be told that it is done; its future would keep them
        self._calls: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def num_pixels(self) -> int:
        """Pixels and samples of the media that are in memory."""
        return self.question.num_pixels + int(self.question.seconds * SAMPLES_A_SECOND)

    @property
    def nbytes(self) -> int:
        media = self.question.media if self.is_read else tuple(self._media)
        return sum(map(_bytes_held, media))

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> Prepared:
        return self._future.result()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call`` at the end, or now if done."""
        with self._lock:
            if not self._future.done():
                self._calls.append(call)
                return
        call()

    def cancel(self) -> None:
        """Interrupt downloads; stop processing at its next check."""
        self.end(OperationCancelled())

    @contextmanager
    def ending_with_error(self) -> Iterator[None]:
        """End with what the block raises."""
        try:
            yield
        except BaseException as error:
            self.end(error)

    # Called by Loaders
    # -----------------------------------------------------------------------------------------------------------------

    def put(self, at: int, medium: Any) -> bool:
        """Store a medium; return whether it was the last."""
        with self._lock:
            if self._future.done():
                return False
            self._media[at] = medium
            self.unread.pop(at, None)
            if self.unread:
                return False
            self.read_seconds = time.perf_counter() - self._began
            media = list(self._media)
        self.question = self.question.with_media(media)
        self.is_read = True
        return True

    def end(self, outcome: Prepared | BaseException) -> None:
        """Set the first outcome and call the callbacks."""
        with self._lock:
            self._media.clear()
            if not self._future.done():
                if isinstance(outcome, BaseException):
                    self._future.set_exception(outcome)
                else:
                    self._future.set_result(outcome)
            calls, self._calls = self._calls, []
        for call in calls:
            call()
        if isinstance(outcome, BaseException):
            self.cancelled.set()


def _bytes_held(medium: Any) -> int:
    """Return the bytes of a medium that was read."""
    file = medium.source if isinstance(medium, Audio) else medium
    if isinstance(file, Fetched):
        return len(file.data)
    if isinstance(file, RecalledUri):
        return len(file.uri)
    return 0


class Loaders:
    """Thread pools for reading and processing, in order within each lane.

    The engine calls ``start``, then, with room, ``process``. ``num_threads`` defaults to one a core, two to eight.
    """

    def __init__(
        self,
        prepare: Callable[[Question, Cancelled], Prepared],
        compiled: Callable[[Question, Cancelled], Future[Form]] | None = None,
        *,
        num_threads: int = NUM_LOADERS,
    ) -> None:
        self._prepare = prepare
        self._compiled = compiled
        # who comes beside a busy client finds a thread
        pool = partial(
            Pool, num_threads + 1, is_awaited=True, most_of_client=num_threads
        )
        self._work = pool("vlm-batch-loader")
        self._large_work = pool("vlm-batch-large-picture")
        self._long_work = Pool(1, "vlm-batch-long-prompt", is_awaited=True)
        self._reads = {
            Lane.DISK: Pool(NUM_DISK_READS, "vlm-batch-reader"),
            Lane.NETWORK: Pool(NUM_DOWNLOADS, "vlm-batch-download"),
        }
        self._open: set[Loading] = set()

    def start(
        self, question: Question, when_read: Callable[[], None] | None = None
    ) -> Loading:
        """Start to read a question. Once that is done, ``when_read`` is called; without it, the question is processed.

        A question with nothing to read is read at once (``Loading.is_read``), and ``when_read`` is not called.
        """
        loading = Loading(question, when_read)
        self._open.add(loading)
        loading.when_done(partial(self._open.discard, loading))
        policy, unread = question.fetch, dict(loading.unread)
        with loading.ending_with_error():
            for at, lane in unread.items():
                medium = question.media[at]
                reading = self._reads[lane].submit(
                    partial(Kind.of(medium).fetch, medium, policy, loading.cancelled),
                    loading.cancelled,
                    seconds=policy.seconds + GRACE_SECONDS,
                    late=partial(late_error, medium, policy),
                    client=question.client,
                )
                reading.add_done_callback(partial(self._was_read, loading, at))
        if not unread and when_read is None:
            self.process(loading)
        return loading

    def _was_read(self, loading: Loading, at: int, reading: Future[Any]) -> None:
        """Store a medium. After the last one the question is processed, or ``when_read`` called."""
        # also of what comes next: a future's callback tells nobody
        with loading.ending_with_error():
            if not loading.put(at, reading.result()):
                return
            if loading.when_read is None:
                self.process(loading)
            else:
                loading.when_read()

    def process(self, loading: Loading) -> None:
        """Start to process a question that was read, once its form is compiled."""
        question = loading.question
        with loading.ending_with_error():
            is_compiled = question.params.form is None or question.form is not None
            if not is_compiled and self._compiled is not None:
                compiling = self._compiled(question, loading.cancelled)
                compiling.add_done_callback(partial(self._was_compiled, loading))
                return
            working = self._pool_for(question).submit(
                partial(self._prepared, loading),
                loading.cancelled,
                client=question.client,
            )
            working.add_done_callback(
                lambda done: loading.end(done.exception() or done.result())
            )

    def _pool_for(self, question: Question) -> Pool:
        if question.takes_long:
            return self._long_work
        if question.has_many_pixels:
            return self._large_work
        return self._work

    def _was_compiled(self, loading: Loading, compiling: Future[Form]) -> None:
        with loading.ending_with_error():
            # else another's request for the same form was cancelled: this one asks again
            with suppress(OperationCancelled):
                form = compiling.result()
                loading.question = replace(loading.question, form=form)
            if not loading.done():
                self.process(loading)

    def _prepared(self, loading: Loading) -> Prepared:
        # No function within another: an error's traceback would hold its closure, and with it the loading.
        begin = time.perf_counter()
        try:
            return self._prepare(loading.question, loading.cancelled)
        finally:
            loading.process_seconds = time.perf_counter() - begin

    def close(self) -> None:
        """Cancel everything; wait briefly for native code."""
        for loading in tuple(self._open):
            loading.cancel()
        works = (self._work, self._large_work, self._long_work)
        for pool in (*self._reads.values(), *works):
            pool.close()
        end = time.monotonic() + CLOSE_SECONDS
        for pool in works:
            pool.join(max(0.0, end - time.monotonic()))
