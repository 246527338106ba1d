"""Loading that waits for one thing never holds up another, ends when it is asked to, and never keeps the process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.test_fetch import Site
from tests.test_fetch import site as site  # a fixture
from vlm_batch import (
    FetchPolicy,
    InvalidImage,
    InvalidRequest,
    Request,
    VLMBatcher,
    assets,
)
from vlm_batch.arrays import as_numpy, num_bytes
from vlm_batch.errors import let_go
from vlm_batch.inputs import images as images_module
from vlm_batch.inputs import pool as pools
from vlm_batch.inputs.fetch import Cancelled, OperationCancelled
from vlm_batch.inputs.loaders import Loaders
from vlm_batch.inputs.pool import Pool
from vlm_batch.inputs.prepare import Preparer
from vlm_batch.inputs.processing import ProcessorPool
from vlm_batch.inputs.processors import ProcessorCopier
from vlm_batch.inputs.question import Lane, Prepared, Question
from vlm_batch.loading import EngineOptions, load_model, make_engine

FIXTURES = Path(__file__).parent.parent / "fixtures"
PICTURE = FIXTURES / "images" / "red_circle.png"


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    """Where calls that hang wait; they come back when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def prepared(question: Question, cancelled: Cancelled) -> Prepared:
    return Prepared({}, tuple((len(medium.data), 1) for medium in question.images))


def wait(condition: Any, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def test_large_pictures_hold_up_no_other(hung: threading.Event) -> None:
    """Whoever decodes 80 megapixels takes seconds, and clients may bring as many as there are threads."""

    def prepare(question: Question, cancelled: Cancelled) -> Prepared:
        if question.has_many_pixels:
            hung.wait(60)
        return prepared(question, cancelled)

    loaders = Loaders(prepare, num_threads=2)
    large = [
        loaders.start(Question(num_pixels=80_000_000, client=client))
        for client in range(4)
    ]
    small = [
        loaders.start(Question(num_pixels=pixels, client=9))
        for pixels in (0, 50_000, 12_000_000)
    ]
    assert wait(lambda: all(one.done() for one in small))
    assert not any(one.done() for one in large)
    assert (
        {one.question.lane for one in large}
        == {Lane.PIXELS}
        != {one.question.lane for one in small}
    )
    hung.set()
    assert wait(lambda: all(one.done() for one in large))
    loaders.close()


def test_a_busy_client_leaves_a_thread_to_others(hung: threading.Event) -> None:
    """A client alone has all threads that there are for one; who comes beside it does not wait for a picture of its."""
    working: list[int] = []

    def prepare(question: Question, cancelled: Cancelled) -> Prepared:
        working.append(question.client)
        if question.client == 1:
            hung.wait(60)
        return prepared(question, cancelled)

    loaders = Loaders(prepare, num_threads=2)
    busy = [loaders.start(Question(client=1)) for _ in range(6)]
    assert wait(lambda: len(working) == 2)
    assert wait(loaders.start(Question(client=2)).done)
    assert Counter(working) == {1: 2, 2: 1}
    assert not any(one.done() for one in busy)
    hung.set()
    assert wait(lambda: all(one.done() for one in busy))
    loaders.close()


def test_a_pool_gives_up_what_hangs_and_goes_on(hung: threading.Event) -> None:
    pool = Pool(2, "test")
    stuck = [pool.submit(hung.wait, Cancelled(), seconds=0.2) for _ in range(2)]
    behind = pool.submit(lambda: 7, Cancelled(), seconds=30)
    assert behind.result(timeout=60) == 7
    for future in stuck:
        with pytest.raises(TimeoutError):
            future.result(timeout=1)
    assert not pool.join(0)
    hung.set()
    assert pool.join(60)


def test_a_pool_holds_nothing_of_a_call_that_has_ended() -> None:
    """Its thread waits for the next: a picture and its arrays would stay for that long."""

    class Large:
        """Stands for a processor's output."""

    pool = Pool(1, "test")
    gone = threading.Event()
    future = pool.submit(Large, Cancelled(), seconds=30)
    weakref.finalize(future.result(timeout=60), gone.set)
    del future
    assert gone.wait(60)
    pool.close()


def test_a_pool_refuses_once_too_much_hangs(
    hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "MAX_LOST", 3)
    pool = Pool(1, "test")
    futures = [pool.submit(hung.wait, Cancelled(), seconds=0.05) for _ in range(3)]
    assert wait(lambda: all(future.done() for future in futures))
    with pytest.raises(InvalidRequest, match="3 reads before this one hang"):
        pool.submit(lambda: 7, Cancelled(), seconds=30).result(timeout=20)
    hung.set()
    assert pool.join(60)
    assert pool.submit(lambda: 7, Cancelled()).result(timeout=60) == 7


def test_a_cancelled_call_does_not_begin_and_a_limited_one_ends(
    hung: threading.Event,
) -> None:
    pool, first, second = Pool(1, "test"), Cancelled(), Cancelled()
    running = pool.submit(hung.wait, first, seconds=60)
    waiting = pool.submit(pytest.fail, second)
    second.set()
    with pytest.raises(OperationCancelled):
        waiting.result(timeout=1)
    first.set()
    with pytest.raises(OperationCancelled):
        running.result(timeout=1)
    assert pool.submit(lambda: 7, Cancelled()).result(timeout=60) == 7


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_ends_a_process_ends_one_call(error: BaseException) -> None:
    def leave() -> None:
        raise error

    pool = Pool(1, "test")
    with pytest.raises(InvalidRequest, match=f"{type(error).__name__} was raised"):
        pool.submit(leave, Cancelled()).result(timeout=60)
    assert pool.submit(lambda: 7, Cancelled()).result(timeout=60) == 7


def test_idle_threads_go() -> None:
    pool = Pool(2, "test")
    assert [
        pool.submit(partial(int, at), Cancelled()).result(timeout=60) for at in range(5)
    ] == [0, 1, 2, 3, 4]
    assert wait(lambda: pool._threads == 0)
    assert pool.submit(lambda: 7, Cancelled()).result(timeout=60) == 7


def test_each_lane_goes_its_own_way(
    site: str, hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every thread for downloads and every thread for disks waits; texts and bytes in memory go on."""
    read = images_module.fetch

    def slow_disk(source: Any, *args: Any) -> Any:
        if str(source).startswith("/dead/"):
            hung.wait()
        return read(source, *args)

    monkeypatch.setattr(images_module, "fetch", slow_disk)
    policy = FetchPolicy(allow_private=True, seconds=30)
    loaders = Loaders(prepared)
    dead = [
        loaders.start(Question("?", images=(f"/dead/{at}.png",), fetch=policy))
        for at in range(9)
    ]
    slow = [
        loaders.start(Question("?", images=(f"{site}/silent",), fetch=policy))
        for _ in range(17)
    ]
    assert {loading.question.lane for loading in dead} == {Lane.DISK}
    assert {loading.question.lane for loading in slow} == {Lane.NETWORK}
    text = loaders.start(Question("?"))
    assert text.question.lane is Lane.MEMORY
    assert wait(text.done)
    for loading in dead[:8]:
        loading.cancel()  # all places of disks are lost and replaced
    good = loaders.start(Question("?", images=(str(PICTURE),), fetch=policy))
    dead[8].cancel()
    assert wait(good.done)
    assert good.result().image_sizes == ((PICTURE.stat().st_size, 1),)
    assert not any(loading.done() for loading in slow)
    started = time.monotonic()
    loaders.close()
    assert time.monotonic() - started < 15  # a download has 30 s
    assert all(loading.done() for loading in slow)


def test_the_first_read_that_fails_ends_the_others(site: str) -> None:
    policy = FetchPolicy(allow_private=True, seconds=30)
    loaders = Loaders(prepared)
    loading = loaders.start(
        Question("?", images=(f"{site}/silent", f"{site}/missing"), fetch=policy)
    )
    assert wait(loading.done, 5)
    with pytest.raises(InvalidImage, match="HTTP 404"):
        loading.result()
    assert wait(lambda: not loaders._reads[Lane.NETWORK]._running)
    loaders.close()


def test_pictures_of_one_request_are_fetched_side_by_side_and_stay_in_order(
    site: str,
) -> None:
    policy = FetchPolicy(allow_private=True)
    loaders = Loaders(prepared)
    images = (f"{site}/good", str(PICTURE), f"{site}/unsized")
    loading = loaders.start(Question("?", images=images, fetch=policy))
    assert wait(loading.done)
    assert loading.result().image_sizes == (
        (10_000, 1),
        (PICTURE.stat().st_size, 1),
        (10_000, 1),
    )
    loaders.close()


@pytest.mark.parametrize("ending", ["done", "failed", "cancelled"])
def test_a_loading_that_has_ended_goes_with_its_last_reference(ending: str) -> None:
    """Without the garbage collector, which counts objects and knows nothing of a picture's megabytes."""
    begun, may_end = threading.Event(), threading.Event()

    def prepare(question: Question, cancelled: Cancelled) -> Prepared:
        begun.set()
        may_end.wait()
        if ending == "failed":
            raise InvalidImage("no picture")
        return prepared(question, cancelled)

    loaders, told = Loaders(prepare), threading.Event()
    gc.collect()
    gc.disable()
    try:
        loading = loaders.start(Question("?", images=(str(PICTURE),)))
        loading.when_done(told.set)
        assert begun.wait(60)
        if ending == "cancelled":
            loading.cancel()
        may_end.set()
        assert told.wait(60)
        held: list[weakref.ref[Any]] = [
            weakref.ref(loading),
            weakref.ref(loading.question),
        ]
        if ending == "done":
            held.append(weakref.ref(loading.result()))
        elif error := loading._future.exception():
            # as the engine does with an error that it keeps with a result
            let_go(error)
        del loading
        assert wait(lambda: not any(one() for one in held), 60)
    finally:
        gc.enable()
        loaders.close()


def test_bytes_of_processed_inputs_are_counted() -> None:
    """Admission counts them."""
    pixels = mx.zeros((10, 3))
    assert (
        num_bytes(
            {
                "pixel_values": [pixels, pixels],
                "input_ids": mx.zeros((1, 4), mx.int32),
                "name": "x",
            }
        )
        == 256
    )


# Processors for several threads
# ---------------------------------------------------------------------------------------------------------------------


def preparer_of(family: str) -> Preparer:
    path = FIXTURES / "checkpoints" / family
    model, processor = load_model(path)
    return make_engine(model, processor, EngineOptions()).preparer


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen3_5", "aya_vision", "mllama", "falcon_ocr"]
)
def test_threads_make_what_one_makes(family: str) -> None:
    """Each thread has a copy of the processor; sizes asked for by one request are no other's."""
    preparer = preparer_of(family)
    random = np.random.default_rng(0)
    bounds: list[dict[str, Any]] = (
        [{}, {}]
        if preparer.processing.pixels is None
        else [{}, {"max_pixels": 3136 * 2}]
    )
    requests = [
        Request(
            prompt="describe " + "the picture " * number,
            images=random.integers(0, 256, (60, 90, 3), np.uint8),
            **more,
        )
        for number in range(12)
        for more in bounds
    ]
    questions = [preparer.check(request) for request in requests]
    alone = [as_numpy(preparer.prepare(question).inputs) for question in questions]
    with ThreadPoolExecutor(4) as pool:
        together = list(
            pool.map(
                lambda question: as_numpy(preparer.prepare(question).inputs),
                questions * 3,
            )
        )
    for one, other in zip(alone * 3, together, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)

    kept = [one for _, one in preparer._processors._free]
    assert len(kept) <= 4 and len({id(one.processor) for one in kept}) == len(kept)
    assert all(one.processor is not preparer.processing.processor for one in kept)
    tokenizers = {id(one.tokenizer._tokenizer) for one in [*kept, preparer.processing]}
    assert len(tokenizers) == 1  # tens of megabytes, and shared


def test_what_a_processor_holds_is_any_threads() -> None:
    """An array that is not evaluated belongs to the stream of the thread that made it, and MLX refuses it to any other."""
    model, processor = load_model(FIXTURES / "checkpoints" / "qwen2_vl")
    processor.scale = mx.arange(4) * 2
    processor.image_processor.means = [mx.arange(2) + 1]
    late = mx.arange(3) + 1

    def used(number: int) -> tuple[Any, Any]:
        with pytest.raises(RuntimeError, match="no Stream"):
            late.tolist()
        with preparer._processors.acquire() as copy:
            return copy.processor.scale.tolist(), (
                copy.processor.image_processor.means[0] * number
            ).tolist()

    preparer = make_engine(model, processor, EngineOptions()).preparer
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(used, (2, 3))) == [
            ([0, 2, 4, 6], [2, 4]),
            ([0, 2, 4, 6], [3, 6]),
        ]


def test_calls_of_a_shared_tokenizer_go_one_at_a_time() -> None:
    inside, most = 0, 0

    class Watched(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _encode_plus(self, *args: Any, **options: Any) -> Any:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            try:
                time.sleep(0.001)  # lets go of Python's lock, as its library does
                return super()._encode_plus(*args, **options)
            finally:
                inside -= 1

    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    copier = ProcessorCopier(Watched(tokenizer_object=words, unk_token="a"))
    copies = [copier.copy() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda copy: [copy("b")["input_ids"] for _ in range(10)], copies)
        )
    assert found == [[[1]] * 10] * 4
    assert most == 1


def test_a_processor_that_cannot_be_copied_is_everybodys_in_turn() -> None:
    preparer = preparer_of("qwen2_vl")
    preparer.processing.processor.grip = threading.Lock()  # cannot be copied
    preparer._processors = ProcessorPool(preparer.processing)
    questions = [
        preparer.check(Request(prompt=f"count to {number}")) for number in range(8)
    ]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(preparer.prepare, questions))
    assert len({np.array(one.inputs["input_ids"]).tobytes() for one in found}) == 8
    assert not preparer._processors._free


# Through a batcher
# ---------------------------------------------------------------------------------------------------------------------


def test_slow_urls_hold_up_no_other_request(site: str) -> None:
    """As many as are read ahead, and their videos: texts, local pictures and bytes are answered meanwhile."""
    policy = FetchPolicy(allow_private=True, seconds=60)
    with VLMBatcher(
        assets.default_checkpoint(), policy={"look_ahead": 4}, fetch=policy
    ) as batcher:
        slow = [
            batcher.submit(f"{site}/silent", "describe the picture") for _ in range(20)
        ]
        slow += [
            batcher.submit(prompt="describe the video", videos=f"{site}/silent")
            for _ in range(4)
        ]
        others = [
            batcher.submit(prompt="count to 5"),
            batcher.submit(PICTURE, "describe the picture"),
            batcher.submit(PICTURE.read_bytes(), "describe the picture"),
        ]
        assert [handle.result(timeout=30).ok for handle in others] == [True] * 3
        assert not any(handle.done() for handle in slow)
        started, seen = time.monotonic(), len(Site.seen)
        for handle in slow:
            handle.cancel()
        assert {handle.result(timeout=60).finish_reason for handle in slow} == {
            "cancelled"
        }
        assert batcher.submit(prompt="count to 5").result(timeout=30).ok
        assert time.monotonic() - started < 30  # a download has 60 s
        assert len(Site.seen) <= seen + 8  # those that waited were never asked for


def test_a_download_that_takes_too_long_fails_alone(site: str) -> None:
    with VLMBatcher(
        assets.default_checkpoint(), fetch=FetchPolicy(allow_private=True, seconds=0.3)
    ) as batcher:
        late = batcher.submit(f"{site}/drip", "describe the picture").result(timeout=60)
        assert late.error is not None
        assert "longer than 0.3 s" in late.error
        assert isinstance(late.exception, InvalidImage)


@pytest.mark.parametrize("ending", ["", "batcher.close()", "raise KeyboardInterrupt"])
def test_the_process_ends_while_downloads_hang(site: str, ending: str) -> None:
    script = f"""
        from vlm_batch import FetchPolicy, VLMBatcher, assets
        batcher = VLMBatcher(assets.default_checkpoint(), fetch=FetchPolicy(allow_private=True))
        handles = [batcher.submit("{site}/silent", "describe the picture") for _ in range(3)]
        print(batcher.submit(prompt="count to 3").result(timeout=60).text, flush=True)
        {ending}
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "1 2 3", done.stderr
    # CPython exits with 1, and not by the signal, if another thread makes a dataclass (exec of a text) at that moment
    assert done.returncode in ((130, -2, 1) if "Interrupt" in ending else (0,)), (
        done.stderr
    )
    assert ("KeyboardInterrupt" in done.stderr) == ("Interrupt" in ending)
    assert time.monotonic() - started < 40


def test_clients_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that one client brings by the dozen wait behind each other, and not before another's."""
    now, order, go_on = [0.0], list[str](), threading.Event()
    pool = Pool(1, "test")
    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: now[0]))
    has_begun = threading.Event()

    def hold() -> bool:
        has_begun.set()
        return go_on.wait(30)

    first = pool.submit(hold, Cancelled(), client=1)
    calls = [(f"many {at}", 1) for at in range(6)] + [
        ("one", 2),
        ("two", 2),
        ("other", 3),
    ]
    done = [
        pool.submit(partial(order.append, name), Cancelled(), client=client)
        for name, client in calls
    ]
    assert has_begun.wait(30)
    now[0] = 1.0  # client 1 has had more than the others will have
    go_on.set()
    assert first.result(30)
    for call in done:
        call.result(30)
    assert order == ["one", "other", "two", *(f"many {at}" for at in range(6))]
    pool.close()


def test_turns_go_by_time_and_none_is_saved_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose calls take three times as long has a third of them; who was away gets no more than its part."""
    now, order, go_on = [0.0], list[int](), threading.Event()
    pool = Pool(1, "test")
    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def take(client: int, seconds: float) -> None:
        order.append(client)
        now[0] += seconds

    first = pool.submit(lambda: go_on.wait(30), Cancelled(), client=1)
    done = [pool.submit(partial(take, 1, 0.3), Cancelled(), client=1) for _ in range(8)]
    done += [
        pool.submit(partial(take, 2, 0.1), Cancelled(), client=2) for _ in range(12)
    ]
    go_on.set()
    for call in (first, *done):
        call.result(30)
    assert order[:16].count(1) == 4
    pool.close()


def test_one_client_leaves_threads_to_others(hung: threading.Event) -> None:
    pool = Pool(3, "test", most_of_client=2)
    stuck = [pool.submit(hung.wait, Cancelled(), client=1) for _ in range(5)]
    assert pool.submit(lambda: 7, Cancelled(), client=2).result(timeout=60) == 7
    assert not any(one.done() for one in stuck)
    hung.set()
    assert wait(lambda: all(one.done() for one in stuck))
    pool.close()
