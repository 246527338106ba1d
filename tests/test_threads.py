"""Engine threads: they wait for the next engine when theirs is done, hold nothing of it, and survive an exception."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from vlm_batch import VLMBatcher, assets, many
from vlm_batch.runtime import threads

NAME = "engine-of-test-threads"


@pytest.fixture(autouse=True)
def no_idle_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_idle", {})


def on_thread(work: Callable[[], None]) -> None:
    threads.start(work, NAME).join()


def test_one_thread_serves_one_after_another() -> None:
    seen: list[int] = []
    for _ in range(4):
        on_thread(lambda: seen.append(threading.get_ident()))
    assert len(seen) == 4
    assert len(set(seen)) == 1


def test_a_thread_that_has_been_in_mlx_does_nothing_that_the_exit_does_not_await() -> (
    None
):
    """It would be woken while the interpreter ends, by a wait for more to read, and abort the process as it goes."""
    seen: list[int] = []
    for is_awaited in (True, False, True, False):
        threads.start(
            lambda: seen.append(threading.get_ident()), NAME, is_awaited=is_awaited
        ).join()
    assert seen[0] == seen[2] != seen[1] == seen[3]


def python(script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120
    )


#: Work that wakes all the time, also while the interpreter ends, which the last object here makes long.
WAKING = """
import time
from vlm_batch.runtime import threads
import mlx.core as mx

double = mx.compile(lambda x: x * 2)

def wake():
    while True:
        time.sleep(0.0005)

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.1)

threads.start(lambda: mx.eval(double(mx.ones(4))), "engine", is_awaited=True).join()
while not any(threads._idle.values()):
    time.sleep(0.001)
threads.start(wake, "reader")
slow = Slow()
"""


def test_a_process_ends_while_its_readers_wake() -> None:
    """A thread with a compiled graph of MLX's aborts the process if it goes then."""
    done = python(WAKING)
    assert done.returncode == 0, done.stderr


def test_two_at_a_time_have_two_threads() -> None:
    both = threading.Barrier(2, timeout=10)

    def meet() -> None:
        both.wait()

    for running in [threads.start(meet, NAME), threads.start(meet, NAME)]:
        running.join()
    assert not both.broken


def test_nothing_is_held_afterwards() -> None:
    class Engine:
        def run(self) -> None:
            pass

    engine = Engine()
    gone = weakref.ref(engine)
    on_thread(engine.run)
    del engine
    on_thread(lambda: None)  # the thread is waiting again once this has run
    assert gone() is None


@pytest.mark.parametrize("holder", ["work", "after"])
def test_the_exit_waits_until_nothing_of_the_work_is_held(holder: str) -> None:
    """Its last reference may free what a compiled function holds: Python within C++, where the interpreter's end aborts."""
    script = f"""
        import time
        import mlx.core as mx
        from vlm_batch.runtime import threads

        class Held:
            def __del__(self):
                end = time.monotonic() + 0.5
                while time.monotonic() < end:
                    pass
                print("let go of", flush=True)

        class Engine:
            def __init__(self):
                held = Held()
                self.compiled = mx.compile(lambda x: (held, x)[1])
            def run(self):
                pass

        if {holder!r} == "work":
            running = threads.start(Engine().run, "engine", is_awaited=True)
        else:
            running = threads.start(lambda: None, "engine", is_awaited=True, after=Engine().run)
        del running
    """
    done = python(script)
    assert (done.returncode, done.stdout) == (0, "let go of\n"), done.stderr


def test_a_hook_that_raises_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("the log is closed")

    monkeypatch.setattr(threading, "excepthook", fails)
    ended = threading.Event()
    running = threads.start(fails, NAME, after=ended.set)
    assert running.join(60) and ended.wait(60)
    on_thread(lambda: None)  # its thread serves the next


def test_join_on_the_thread_itself_returns() -> None:
    held: list[threads.ThreadTask] = []
    began = threading.Event()

    def work() -> None:
        began.wait(10)
        held[0].join()

    held.append(threads.start(work, NAME))
    began.set()
    held[0].join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_ends_the_work_and_not_the_thread() -> None:
    seen: list[int] = []

    def fail() -> None:
        seen.append(threading.get_ident())
        raise RuntimeError("of the test")

    threads.start(fail, NAME).join()
    on_thread(lambda: seen.append(threading.get_ident()))
    assert seen[0] == seen[1]


def test_waits_without_an_end_look_up_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Ctrl-C that comes just before a wait is lost for as long as the wait lasts: of this library's none lasts long."""
    main, waits = threading.get_ident(), list[float | None]()

    def noted(seconds: float | None) -> None:
        if threading.get_ident() == main:
            waits.append(seconds)

    class Noting(queue.SimpleQueue):  # type: ignore[type-arg]
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            noted(timeout)
            return super().get(block, timeout)

    real = threading.Condition.wait

    def wait(self: threading.Condition, timeout: float | None = None) -> bool:
        noted(timeout)
        return real(self, timeout)

    batcher = VLMBatcher(assets.default_checkpoint())
    batcher.submit(None, "count to 3").result(timeout=60)
    monkeypatch.setattr(threading.Condition, "wait", wait)
    monkeypatch.setattr(many.queue, "SimpleQueue", Noting)
    ways: dict[str, Callable[[], object]] = {
        "result": lambda: batcher.submit(None, "count to 9").result(),
        "events": lambda: list(batcher.submit(None, "count to 9").events()),
        "pieces": lambda: list(batcher.submit(None, "count to 9")),
        "generate": lambda: batcher.generate([{"prompt": "count to 9"}]),
        "close": batcher.close,
    }
    for name, way in ways.items():
        waits.clear()
        way()
        assert waits, name
        assert all(
            seconds is not None and seconds <= threads.LOOK_SECONDS for seconds in waits
        ), (name, waits)


def test_a_look_is_repeated_until_it_finds_something_or_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "LOOK_SECONDS", 0.01)
    found = iter((None, None, "it"))
    assert threads.wait_until_found(lambda seconds: next(found)) == "it"
    looks: list[float] = []
    assert threads.wait_until_found(looks.append, 0.03) is None
    assert looks and all(0 <= seconds <= 0.01 for seconds in looks)
    # it is looked for once, whatever the time
    assert threads.wait_until_found(lambda seconds: seconds, 0) == 0.0
