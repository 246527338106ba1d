"""What is read and prepared ahead of the engine fits a number of bytes, whatever comes, and in whatever order."""

from __future__ import annotations

import base64
import random
import struct
import sys
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from tests.harness import settings_for, shared_adapter
from vlm_batch import InvalidImage, Limits, SamplingParams, Video, VLMBatcher, assets
from vlm_batch.engine.admission import Admission
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.memory import Sizes
from vlm_batch.engine.row import Prompt, Row, Stage, new_row
from vlm_batch.inputs import prepare
from vlm_batch.inputs import question as questions
from vlm_batch.inputs.fetch import Fetched
from vlm_batch.inputs.images import count_pixels, size_of_file
from vlm_batch.inputs.loaders import Loading
from vlm_batch.inputs.question import Prepared, Question
from vlm_batch.records import Terms

CHECKPOINT = assets.default_checkpoint()
DESCRIBE = "describe the picture"
BOUND = 1000


@dataclass(eq=False)
class FakeLoading:
    """A picture of some pixels that becomes some bytes."""

    num_pixels: int
    becomes: int
    nbytes: int = 0
    known_nbytes: int | None = None
    is_read: bool = True
    read_seconds: float = 0.0
    process_seconds: float = 0.0
    is_cancelled: bool = field(default=False, init=False)

    def result(self) -> Prepared:
        return Prepared(
            {
                "input_ids": np.zeros((1, 0), np.int32),
                "pixels": np.zeros(self.becomes, np.uint8),
            }
        )

    def when_done(self, call: Any) -> None: ...

    def cancel(self) -> None:
        self.is_cancelled = True


class Waiting:
    """An admission whose engine does nothing: what is prepared stays until it is ended."""

    def __init__(self, bound: int = BOUND, look_ahead: int = 64) -> None:
        config = {"max_rows": 1, "look_ahead": look_ahead, "look_ahead_bytes": bound}
        self.generator = BatchGenerator(
            shared_adapter("qwen2_vl"), policy=settings_for(**config)
        )
        self.admission = self.generator.admission
        self.rows: dict[str, Row] = {}
        self._loadings: dict[str, Any] = {}

    def add(
        self, name: str, loading: FakeLoading, priority: int = 0, lane: str = "memory"
    ) -> None:
        row = new_row(
            name, Prompt(question=name), SamplingParams(), terms=Terms(priority)
        )
        row.lane = lane
        self.rows[name], self._loadings[name] = row, loading
        self.generator.rows.add(row)

    def read(self, whole: Container[str] | None = None) -> list[str]:
        """Have everything read that may be, or begun to be, if it is not among ``whole``; its names."""
        names = []
        while (row := self.admission.next_to_read()) is not None:
            row.prompt.loading = self._loadings[row.request_id]
            if whole is None or row.request_id in whole:
                self.admission.note_read(row)
            names.append(row.request_id)
        return names

    def process(self) -> list[str]:
        """Have everything processed begun that may be; its names."""
        names = []
        while (row := self.admission.next_to_process()) is not None:
            names.append(row.request_id)
        return names

    def take_in(self, *names: str) -> None:
        for name in names:
            self.generator.take_in(self.rows[name], self._loadings[name])

    def end(self, *names: str) -> None:
        for name in names:
            self.generator.cancel(name)

    def held(self) -> int:
        """Bytes of what is prepared, counted by hand."""
        return sum(
            row.prompt.inputs["pixels"].nbytes
            for row in self.rows.values()
            if row.prompt.inputs
        )


def test_the_first_of_its_size_goes_alone_and_then_as_many_as_fit() -> None:
    engine = Waiting()
    for index in range(8):
        engine.add(str(index), FakeLoading(num_pixels=20, becomes=230))
    assert engine.read() == list("01234567")
    assert engine.process() == ["0"]  # nobody knows yet what will come of it
    engine.take_in("0")
    # 230 are held, and each takes 230 and 6 a pixel
    assert engine.process() == ["1", "2"]
    engine.take_in("1", "2")
    assert engine.process() == []
    assert engine.admission.nbytes == engine.held() == 690
    engine.end("0")
    assert engine.process() == ["3"]


def test_small_pictures_do_not_wait_for_large_ones_to_be_decoded() -> None:
    engine = Waiting()
    engine.add("known", FakeLoading(num_pixels=10, becomes=10))
    engine.read()
    assert engine.process() == ["known"]
    engine.take_in("known")
    engine.end("known")
    for index in range(3):
        # 900 bytes while it is decoded
        engine.add(f"large {index}", FakeLoading(num_pixels=150, becomes=10))
    engine.add("small", FakeLoading(num_pixels=10, becomes=10))
    engine.read()
    assert engine.process() == ["small", "large 0"]
    engine.add("another", FakeLoading(num_pixels=10, becomes=10))
    engine.read()
    assert engine.process() == ["another"]
    engine.take_in("large 0")
    engine.end("large 0")
    assert engine.process() == ["large 1"]  # though small ones are being decoded


def test_one_that_is_larger_goes_alone_and_is_not_overtaken() -> None:
    engine = Waiting()
    for name, becomes in (("a", 100), ("large", 5000), ("b", 100)):
        engine.add(name, FakeLoading(num_pixels=becomes, becomes=becomes))
    engine.read()
    assert engine.process() == ["a"]
    engine.take_in("a")
    # nor "b", which would fit: one that needs all the room would never have it
    assert engine.process() == []
    engine.end("a")
    assert engine.process() == ["large"]
    engine.take_in("large")
    assert engine.process() == []
    engine.end("large")
    assert engine.process() == ["b"]


def test_an_urgent_one_does_not_wait_for_those_that_come_after_it() -> None:
    engine = Waiting()
    for index in range(4):
        engine.add(str(index), FakeLoading(num_pixels=10, becomes=240))
    engine.read()
    engine.take_in(*engine.process())
    engine.take_in(*engine.process())
    assert engine.held() == 720
    for name in ("urgent", "as urgent"):
        engine.add(name, FakeLoading(num_pixels=10, becomes=300), priority=5)
    assert engine.read() == ["urgent", "as urgent"]
    assert engine.process() == ["urgent"]  # one beyond the bound, and no more
    engine.take_in("urgent")
    assert engine.process() == []
    engine.end("urgent")
    assert engine.process() == ["as urgent"]


def test_one_that_was_read_late_waits_for_one_that_nobody_knows_the_size_of() -> None:
    engine = Waiting()
    for name in "ab":
        engine.add(name, FakeLoading(num_pixels=9, becomes=900))
    engine.read(whole=("b",))
    assert engine.process() == ["b"]
    engine.admission.note_read(engine.rows["a"])
    assert engine.process() == []
    engine.take_in("b")
    engine.end("b")
    assert engine.process() == ["a"]


def test_texts_need_no_room_and_what_is_known_is_not_guessed() -> None:
    engine = Waiting()
    engine.add("large", FakeLoading(num_pixels=9, becomes=4000))
    engine.read()
    engine.take_in(*engine.process())
    engine.add("inputs", FakeLoading(num_pixels=0, becomes=700, known_nbytes=700))
    engine.add("picture", FakeLoading(num_pixels=9, becomes=1))
    engine.add("text", FakeLoading(num_pixels=0, becomes=0, known_nbytes=0))
    assert engine.read() == ["inputs", "picture", "text"]
    assert engine.process() == ["text"]
    engine.take_in("text")
    engine.end("large")
    # and not the picture: thousands are expected of its size
    assert engine.process() == ["inputs"]
    engine.take_in("inputs")
    assert engine.process() == []
    engine.end("inputs")
    assert engine.process() == ["picture"]


def test_no_more_files_are_read_while_what_is_read_waits_for_room() -> None:
    engine = Waiting()
    for name in "abc":
        engine.add(name, FakeLoading(num_pixels=9, becomes=10, nbytes=600), lane="disk")
    engine.add("here", FakeLoading(num_pixels=9, becomes=10))
    assert engine.read() == ["a", "b", "here"]
    engine.take_in(*engine.process())
    assert engine.read() == ["c"]


@pytest.mark.parametrize("stage", ["inbox", "read", "processing", "prepared"])
def test_cancelled_ones_give_their_bytes_back(stage: str) -> None:
    engine = Waiting()
    loading = FakeLoading(num_pixels=10, becomes=900, nbytes=40)
    engine.add("first", loading)
    if stage != "inbox":
        engine.read()
        assert engine.admission.nbytes == 40
    if stage in ("processing", "prepared"):
        assert engine.process() == ["first"]
    if stage == "prepared":
        engine.take_in("first")
        assert engine.admission.nbytes == 900
    engine.end("first")
    assert loading.is_cancelled is (stage in ("read", "processing"))
    assert engine.admission.nbytes == 0
    engine.add("second", FakeLoading(num_pixels=10, becomes=900))
    assert engine.read() == engine.process() == ["second"]


@pytest.mark.parametrize("seed", range(20))
def test_any_history_stays_within_the_bound_and_starves_nobody(seed: int) -> None:
    """At most the bound, and one request; which ever it is that ends."""
    chance = random.Random(seed)
    engine = Waiting(look_ahead=8)
    processing: list[str] = []
    names = [f"{index}" for index in range(120)]
    for name in names:
        size = chance.choice([1, 60, 200, 480, 990, 3000])
        loading = FakeLoading(
            num_pixels=size, becomes=size, nbytes=chance.choice([0, 5])
        )
        engine.add(
            name,
            loading,
            priority=chance.choice([0, 0, 0, 1, 9]),
            lane=chance.choice("ab"),
        )
        for _ in range(chance.randrange(3)):
            engine.read()
            processing += engine.process()
            if processing and chance.random() < 0.7:
                engine.take_in(processing.pop(0))
            alive = [
                row.request_id for row in engine.rows.values() if not row.has_ended
            ]
            if alive and chance.random() < 0.6:
                engine.end(chance.choice(alive))
        check(engine)
    for _ in range(1000):
        engine.read()
        processing += engine.process()
        engine.take_in(*processing)
        processing.clear()
        check(engine)
        prepared = [row for row in engine.rows.values() if row.prompt.inputs]
        if not prepared:
            break
        engine.end(prepared[0].request_id)
    assert all(row.has_ended for row in engine.rows.values())
    assert engine.admission.nbytes == 0


def check(engine: Waiting) -> None:
    sizes = sorted(
        row.prompt.nbytes for row in engine.rows.values() if row.prompt.inputs
    )
    assert sum(sizes[:-1]) <= BOUND
    assert engine.admission.nbytes >= sum(sizes)


def test_decoded_pixels_are_bounded_whoever_is_first() -> None:
    """A picture that becomes little is large while it is decoded: no two are so beyond the bound, and one alone always goes."""
    engine = Waiting()
    engine.add("first", FakeLoading(num_pixels=90, becomes=10))
    engine.read()
    engine.take_in(*engine.process())
    for name, priority in (("a", 0), ("b", 5), ("larger than the bound", 9)):
        engine.add(
            name,
            FakeLoading(num_pixels=1000 if "larger" in name else 100, becomes=10),
            priority=priority,
        )
    engine.read()
    assert engine.process() == ["larger than the bound"]
    engine.take_in("larger than the bound")
    engine.end("larger than the bound")
    # 600 of 1,000 bytes: "a" has its turn when those are let go
    assert engine.process() == ["b"]
    engine.take_in("b")
    assert engine.process() == ["a"]


def test_sizes_go_by_the_next_larger_picture() -> None:
    sizes = Sizes(max)
    assert sizes.expected(5) is None
    sizes.note(100, 800)
    sizes.note(110, 700)
    assert sizes.expected(100) == sizes.expected(3) == 800
    assert sizes.expected(1600) == 16 * 800
    sizes.note(100_000, 900)  # a processor that makes the same of any picture
    assert sizes.expected(1600) == 900


def test_pixels_are_counted_by_the_header(tmp_path: Path) -> None:
    picture = Image.new("RGB", (30, 20))
    picture.save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert [
        count_pixels(one) for one in (picture, data, np.zeros((20, 30, 3), np.uint8))
    ] == [600] * 3
    assert [count_pixels(one) for one in ("a.png", b"no picture", np.zeros(3))] == [
        0
    ] * 3
    assert Question(images=("a.png",)).with_media([data]).num_pixels == 600
    frames = Video([picture] * 10, max_frames=4)
    assert (
        Question(images=("a.png",), videos=(frames,))
        .with_media([data, frames])
        .num_pixels
        == 5 * 600
    )


def bomb(side: int) -> bytes:
    """A picture of so many pixels of which there is little more than the header: decoding it raises."""
    file = BytesIO()
    Image.effect_noise((side, side), 50).save(file, "PNG")
    return file.getvalue()[:1000]


@pytest.fixture(scope="module")
def model() -> Iterator[VLMBatcher]:
    with VLMBatcher(
        str(CHECKPOINT), limits=Limits(request_pixels=1_000_000)
    ) as batcher:
        yield batcher


def test_a_requests_pixels_are_bounded_before_any_is_decoded(
    model: VLMBatcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: decoded.append(1))
    data = bomb(600)
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    said = r"pictures and frames have 1,080,000 pixels together; at most 1,000,000 are read \(Limits.request_pixels\)"
    for pictures in ([data] * 3, [uri] * 3, [uri, data, BytesIO(data)]):
        with pytest.raises(InvalidImage, match=said):
            model.submit(pictures, DESCRIBE)
    (tmp_path / "a.png").write_bytes(data)
    result = model.submit([str(tmp_path / "a.png")] * 3, DESCRIBE).result()
    assert result.finish_reason == "error"
    assert isinstance(result.exception, InvalidImage)
    assert "1,080,000 pixels together" in str(result.error)
    assert not decoded


def test_an_icon_is_not_decoded_to_count_its_pixels(tmp_path: Path) -> None:
    within = bomb(3000)
    icon = (
        struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(within), 22)
        + within
    )
    (tmp_path / "a.ico").write_bytes(icon)
    # its picture is cut short: decoding it would raise
    assert count_pixels(icon) == 9_000_000
    assert size_of_file(str(tmp_path / "a.ico")) == (3000, 3000)


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the C library gives back by itself"
)
def test_what_was_decoded_is_given_back(
    model: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(questions, "MANY_PIXELS", 500_000)
    monkeypatch.setattr(prepare, "trim", lambda: trimmed.append(1))
    model.submit(
        Image.new("RGB", (100, 100)), DESCRIBE, params={"max_tokens": 1}
    ).result()
    assert not trimmed
    model.submit(
        Image.new("RGB", (800, 800)), DESCRIBE, params={"max_tokens": 1}
    ).result()
    assert trimmed


def test_what_was_read_counts_until_it_is_processed() -> None:
    read: list[int] = []
    loading = Loading(Question(images=("a.png", "b.png")), lambda: read.append(1))
    assert (loading.is_read, loading.nbytes) == (False, 0)
    assert not loading.put(1, Fetched("b.png", b"12345"))
    assert (loading.is_read, loading.nbytes) == (False, 5)
    assert loading.put(0, Fetched("a.png", b"123"))
    assert (loading.is_read, loading.nbytes) == (True, 8)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that are prepared whenever something was taken in; a few files that were read may be there besides."""
    found: list[int] = []
    take_in = Admission.take_in

    def taken(self: Admission, *given: Any) -> None:
        take_in(self, *given)
        rows = self._ledger.at(Stage.PREPARED, Stage.ENCODED)
        found.append(sum(row.prompt.nbytes for row in rows))

    monkeypatch.setattr(Admission, "take_in", taken)
    return found


@pytest.mark.parametrize("way", ["array", "bytes", "path"])
@pytest.mark.parametrize("room", [100, 3, 0])
def test_a_batcher_reads_ahead_within_its_bytes(
    way: str, room: int, held: list[int], tmp_path: Path
) -> None:
    """Room for so many pictures; for one there always is."""
    one = np.random.default_rng(3).integers(0, 255, (56, 56, 3)).astype(np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(one).save(path)
    picture: Any = {"array": one, "bytes": path.read_bytes(), "path": path}[way]
    with VLMBatcher(CHECKPOINT, caches=None) as other:
        assert other.submit(picture, f"{DESCRIBE} 0").result(timeout=60).ok
    size = held[-1]
    held.clear()
    most = room * size + 1
    with VLMBatcher(
        CHECKPOINT, max_rows=1, caches=None, policy={"look_ahead_bytes": most}
    ) as batcher:
        first = batcher.submit(
            None,
            "count to 9",
            params=SamplingParams(max_tokens=20_000, ignore_eos=True),
        )
        next(iter(first))  # it has the only place
        handles = [
            batcher.submit(picture, f"{DESCRIBE} {index}") for index in range(10)
        ]
        wait_for(lambda: batcher.stats().waiting >= (10 if room == 100 else 1))
        for handle in handles[3:5]:
            handle.cancel()
        first.cancel()
        results = [handle.result(timeout=60) for handle in handles]
        assert [result.finish_reason != "error" for result in results] == [True] * 10
        assert batcher.stats().ahead_bytes == 0
    if room == 100:
        assert max(held) >= 6 * size  # some are encoded ahead
    else:
        assert max(held) <= max(most, size)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.001)
