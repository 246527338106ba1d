"""Want of memory on a GPU: rows begin again and come to the same tokens, and only what never fits fails.

    python -m tests.out_of_memory
    python -m tests.out_of_memory --pretend

Another process takes the device's memory, but for the room of some rows: before requests come, and in the middle of them.
Answers are reproducible ones, so that the same tokens are those of the same bits. ``--pretend`` is for devices that have no
such process: a tiny model, and forwards that say that there is no memory where more is held than was left.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import mlx.core as mx
import numpy as np

from benchmarks.compare.shapes import SHAPES, Shape, _text, _vision, build
from tests.harness import settings_for
from vlm_batch.engine import retry
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.errors import OutOfMemory
from vlm_batch.loading import adapt
from vlm_batch.proofs.proving import fixed_shapes
from vlm_batch.runtime.memory import release_memory
from vlm_batch.types import Result, SamplingParams

MB = 1 << 20


@dataclass(frozen=True)
class Load:
    """The requests: ``rows`` prompts of random ids, the first of ``prompt`` tokens and each ``more`` longer than the last."""

    shape: Shape
    rows: int
    prompt: int
    more: int
    answer: int

    @property
    def position_bytes(self) -> int:
        """Bytes of a position's keys and values."""
        text = self.shape.text
        width = (
            text["hidden_size"]
            // text["num_attention_heads"]
            * text["num_key_value_heads"]
        )
        return (
            2
            * int(text["num_hidden_layers"])
            * width
            * getattr(mx, self.shape.dtype).size
        )


#: 0.4 G parameters, whose rows have 100 kB a token.
_MIDDLE = Shape(
    "middle",
    _text(1024, 24, 2816, 16, 16, 32000, False),
    _vision(2, 256, 768, 4, 1024, [1]),
    "bfloat16",
    None,
    SHAPES["3b"].scale,
)
REAL = Load(_MIDDLE, rows=12, prompt=1000, more=37, answer=96)
TINY = Load(SHAPES["tiny"], rows=8, prompt=200, more=15, answer=12)


# Who takes the memory ---------------------------------------------------------------------------------------------------


class Ballast(Protocol):
    """What leaves little memory."""

    def leave(self, nbytes: int) -> None:
        """Take all of the device's memory but so many bytes, beside what this process holds now."""

    def release(self) -> None:
        """Give everything back."""


class Cuda:
    """The memory of the first GPU by CUDA's driver, which takes and gives back at once what it is told to."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._blocks: list[ctypes.c_uint64] = []

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name}: error {status} of CUDA's driver")

    @property
    def free(self) -> int:
        """Bytes of the device that no process has."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def leave(self, nbytes: int) -> None:
        """Take all but so many bytes, in blocks as large as there are, down to 2 MB."""
        size = 1 << 36
        while size >= 2 * MB:
            block = ctypes.c_uint64()
            wanted = min(size, (self.free - nbytes) // (2 * MB) * 2 * MB)
            if wanted <= 0:
                return
            try:
                self._call(
                    "cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(wanted)
                )
            except RuntimeError:
                size //= 2
            else:
                self._blocks.append(block)

    def release(self) -> None:
        for block in self._blocks:
            self._call("cuMemFree_v2", block)
        self._blocks.clear()


class BallastProcess:
    """A process that holds the device's memory."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.out_of_memory", "--hold"]
        root = Path(__file__).parent.parent
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
        )

    def _ask(self, text: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        if not (said := self._process.stdout.readline().strip()):
            raise RuntimeError("the process that was to hold the memory has ended")
        say(f"  the other process: {said}")

    def leave(self, nbytes: int) -> None:
        release_memory()
        self._ask(f"leave {nbytes}")

    def release(self) -> None:
        self._ask("release")

    def close(self) -> None:
        """It gives everything back with its end."""
        self._process.communicate()


def hold() -> None:
    """The other process: do what the lines of the standard input say, and say what is free then."""
    device = Cuda()
    for line in sys.stdin:
        match line.split():
            case ["leave", number]:
                device.leave(int(number))
            case _:
                device.release()
        print(f"{device.free / 1e6:,.0f} MB of the device are free", flush=True)
    device.release()


class PretendedBallast:
    """Forwards of an adapter that say that there is no memory. What MLX keeps of freed arrays is taken, too: of another size
    than is wanted it is of no use on a real device."""

    def __init__(self, adapter: Any) -> None:
        self.limit: int | None = None
        self.most = 0
        for name in ("decode", "prefill"):
            setattr(adapter, name, self._watched(getattr(adapter, name)))

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any, **named: Any) -> Any:
            held = _held()
            self.most = max(self.most, held)
            if self.limit is not None and held > self.limit:
                raise RuntimeError(
                    f"[malloc] Unable to allocate {held - self.limit} bytes."
                )
            return forward(*given, **named)

        return watched

    def leave(self, nbytes: int) -> None:
        release_memory()
        self.limit = _held() + nbytes

    def release(self) -> None:
        self.limit = None

    def close(self) -> None:
        self.limit = None


def _held() -> int:
    return mx.get_active_memory() + mx.get_cache_memory()


# What is asked ----------------------------------------------------------------------------------------------------------

_begin = time.monotonic()


def say(*words: object) -> None:
    print(f"{time.monotonic() - _begin:6.1f} s", *words, flush=True)


@dataclass
class Engine:
    """An engine, and what its requests are answered without want."""

    load: Load
    generator: BatchGenerator
    right: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def ask(self, name: str, length: int, seed: int, answer: int | None = None) -> None:
        ids = np.random.default_rng(seed).integers(
            5, self.load.shape.vocabulary - 10, (1, length)
        )
        params = SamplingParams(max_tokens=answer or self.load.answer, ignore_eos=True)
        self.generator.insert(
            name, {"input_ids": mx.array(ids, dtype=mx.int32)}, params
        )

    def ask_rows(self, count: int | None = None) -> None:
        for number in range(self.load.rows if count is None else count):
            self.ask(f"r{number}", self.load.prompt + self.load.more * number, number)

    def finish(
        self,
        *,
        when: Callable[[], bool] = lambda: False,
        then: Callable[[], None] = lambda: None,
    ) -> dict[str, Result]:
        """The results of all that was asked; ``then`` is called once ``when`` is so. Raises TimeoutError after 300 s."""
        ends: dict[str, Result] = {}
        is_over, until = False, time.monotonic() + 300
        while self.generator.has_work:
            if time.monotonic() > until:
                raise TimeoutError(f"only {sorted(ends)} have ended")
            for event in self.generator.step():
                if event.result is not None:
                    ends[event.request_id] = event.result
            if not is_over and when():
                is_over = True
                then()
        return ends

    def wrong(self, results: dict[str, Result], names: Iterator[str]) -> list[str]:
        """What is said of requests that were not answered as they are without want."""
        found = []
        for name in names:
            result = results.get(name)
            if result is None or result.token_ids != self.right[name]:
                found.append(
                    f"{name}: {'no end' if result is None else result.error or 'other tokens'}"
                )
        return found


@dataclass
class Raised:
    """What raised in the engine, counted: want of memory, and what was not taken for it."""

    wants: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)

    @property
    def wrong(self) -> list[str]:
        """What is said of errors that should not be: rows began again for another reason."""
        return [
            f"not taken for want of memory: {count} x {what}"
            for what, count in self.others.items()
        ]


@contextmanager
def judged() -> Iterator[Raised]:
    """What raises in the engine, where it is decided if that is want of memory."""
    seen = Raised()
    judge = retry.is_out_of_memory

    def watched(error: BaseException) -> bool:
        is_want = judge(error)
        (seen.wants if is_want else seen.others)[
            f"{type(error).__name__}: {str(error)[:110]}"
        ] += 1
        return is_want

    with mock.patch.object(retry, "is_out_of_memory", watched):
        yield seen
    for what, count in seen.wants.items():
        say(f"  {count} x {what}")


def engine(load: Load) -> Engine:
    """An engine that answers reproducibly, so that a row begun again has every bit of what it had."""
    adapter = adapt(build(load.shape))
    exact = fixed_shapes(adapter, max_rows=load.rows)
    config = {"max_rows": load.rows, "prefill_together": 1}
    return Engine(
        load, BatchGenerator(adapter, policy=settings_for(**config), shapes=exact)
    )


def measure(own: Engine, most: Callable[[], int]) -> tuple[int, int]:
    """Answer all without want: (bytes that the longest takes alone, and that all take together), beside the weights."""
    release_memory()
    weights, found = mx.get_active_memory(), []
    last = own.load.rows - 1
    for ask in (
        lambda: own.ask(f"r{last}", own.load.prompt + own.load.more * last, last),
        own.ask_rows,
    ):
        release_memory()
        mx.reset_peak_memory()
        ask()
        own.right = {name: result.token_ids for name, result in own.finish().items()}
        found.append(most() - weights)
    say(
        f"{len(own.right)} rows without want take {found[1] / 1e6:,.1f} MB beside the weights, one alone {found[0] / 1e6:,.1f}"
    )
    return found[0], found[1]


def try_all(own: Engine, ballast: Ballast, one: int, together: int) -> list[str]:
    """Everything under want of memory; what was not as it is to be."""
    rows, wrong = list(own.right), []
    room = one + (together - one) * 2 // 5

    say(f"{room / 1e6:,.1f} MB are left, and {len(rows)} rows come")
    ballast.leave(room)
    wrong += _under_want(own, rows, own.ask_rows)

    say("one comes that never fits, and two beside it")
    with judged() as seen:
        own.ask("never", 2 * room // own.load.position_bytes, 99, answer=8)
        own.ask_rows(2)
        results = own.finish()
    never = results.pop("never")
    say(f"  never: {never.finish_reason}, {never.error}")
    if not isinstance(
        never.exception, OutOfMemory
    ) or "even alone: a prompt of" not in str(never.error):
        wrong.append(f"what never fits ended with {never.error}")
    wrong += [*own.wrong(results, iter(["r0", "r1"])), *seen.wrong]
    ballast.release()

    say("the memory is taken when three rows decode")
    begins = lambda: len(own.generator.rows.batch.rows) >= 3  # noqa: E731
    wrong += _under_want(
        own, rows, own.ask_rows, when=begins, then=lambda: ballast.leave(one)
    )
    ballast.release()

    say("there is room again")
    own.ask_rows(3)
    wrong += own.wrong(own.finish(), iter(rows[:3]))
    if own.generator.rows.batch.rows or own.generator.rows.batch.nbytes:
        wrong.append("places are held that nobody has")
    return wrong


def _under_want(
    own: Engine, rows: list[str], ask: Callable[[], None], **when: Any
) -> list[str]:
    begun = own.generator.retry.num_recomputed
    with judged() as seen:
        ask()
        results = own.finish(**when)
    begun = own.generator.retry.num_recomputed - begun
    wrong = own.wrong(results, iter(rows))
    say(
        f"  {len(rows) - len(wrong)} of {len(rows)} have the tokens that they have without want; {begun} began again"
    )
    wrong += seen.wrong
    return (
        wrong
        if seen.wants
        else [*wrong, "there was no want of memory: nothing was shown"]
    )


def run(is_pretended: bool) -> int:
    """The exit status: 0 where everything was as it is to be."""
    say(mx.device_info().get("device_name"), f"MLX {version('mlx')}")
    load = TINY if is_pretended else REAL
    ballast: Any = None if is_pretended else BallastProcess()
    own = engine(load)
    if is_pretended:
        ballast = PretendedBallast(own.generator.adapter)
        one, together = measure(own, lambda: _most(ballast))
    else:
        one, together = measure(own, mx.get_peak_memory)
    try:
        wrong = try_all(own, ballast, one, together)
    finally:
        ballast.close()
    for what in wrong:
        say("WRONG:", what)
    say(
        "failed"
        if wrong
        else "all as without want, and only what never fits has failed"
    )
    return 1 if wrong else 0


def _most(ballast: PretendedBallast) -> int:
    most, ballast.most = ballast.most, 0
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--pretend", action="store_true", help="on any device, without another process"
    )
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        hold()
    else:
        sys.exit(run(options.pretend))


if __name__ == "__main__":
    main()
