"""Threads that prepare requests ahead of the engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from vlm_batch.inputs.fetch import Cancelled
from vlm_batch.inputs.prepare import Prepared, Question

#: Threads that decode and process pictures and videos (Pillow and OpenCV release the GIL).
NUM_LOADERS = 2


class Loading:
    """One question on its way to being ``Prepared``; every method is safe from any thread."""

    def __init__(self, future: Future[Prepared], cancelled: Cancelled) -> None:
        self._future = future
        self._cancelled = cancelled

    def done(self) -> bool:
        """Whether ``result`` would return or raise at once."""
        return self._future.done()

    def result(self) -> Prepared:
        """The outcome, waited for; raises what reading or processing raised."""
        return self._future.result()

    def when_done(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once when it is done, by the thread that ended it, or now if that is past."""
        self._future.add_done_callback(lambda _: call())

    def cancel(self) -> None:
        """Stop reading and processing soon. Nobody may ask for ``result`` afterwards."""
        self._cancelled.set()
        self._future.cancel()


class Loaders:
    """Prepare questions on a few threads of their own, in the order in which they are started.

    ``prepare`` is ``Preparer.prepare``. The engine's loop calls ``start`` and ``Loading.when_done`` to be woken, and
    ``Loading.cancel`` for a request that was cancelled before it was taken in.
    """

    def __init__(self, prepare: Callable[[Question, Cancelled], Prepared]) -> None:
        self._prepare = prepare
        self._threads = ThreadPoolExecutor(NUM_LOADERS, thread_name_prefix="vlm-batch-loader")

    def start(self, question: Question) -> Loading:
        """Begin to read and process a question; returns at once."""
        cancelled = Cancelled()
        return Loading(self._threads.submit(self._prepare, question, cancelled), cancelled)

    def close(self) -> None:
        """Begin nothing more and leave running threads to end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
