"""A dry run's estimate beside the time that the whole job takes, on engines that are simulated: their clock is none of ours."""

from __future__ import annotations

import io
import json
import random
import re
import time
import types
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from vlm_batch.cli import dry_run
from vlm_batch.jobs import Questions, Sink, open_sources
from vlm_batch.jobs.plan import Job
from vlm_batch.jobs.questions import Item
from vlm_batch.types import Request, Result, Usage

AHEAD = 16


class Engine:
    """Decodes ``places`` rows together. A prompt takes ``prefill`` seconds, a step 20 ms and 1 ms for each row."""

    def __init__(
        self, places: int, prefill: float, lengths: str, fails: float = 0.0
    ) -> None:
        self.places = places
        self.prefill = prefill
        self.lengths = lengths
        self.fails = fails
        self.now, self.generated = 0.0, 0
        self._random = random.Random(7)

    def stats(self) -> object:
        return types.SimpleNamespace(generated_tokens=self.generated, cache_bytes=0)

    def _length(self) -> int:
        return (
            100
            if self.lengths == "alike"
            else 1 + min(399, int(self._random.expovariate(1 / 100)))
        )

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        self.now += 2.0  # its first steps
        source, waiting = iter(requests), list[Request]()
        alive: dict[str, list[int]] = {}
        while True:
            while (
                len(waiting) + len(alive) < self.places + AHEAD
                and (request := next(source, None)) is not None
            ):
                waiting.append(request)
            while waiting and len(alive) < self.places:
                name = str(waiting.pop(0).request_id)
                if self._random.random() < self.fails:
                    yield Result(
                        request_id=name,
                        finish_reason="error",
                        error="InvalidImage: bad",
                    )
                    continue
                length = self._length()
                alive[name] = [length, length]
                self.now += self.prefill
            if not alive and not waiting:
                return
            self.now += 0.02 + 0.001 * len(alive)
            self.generated += len(alive)
            for left in alive.values():
                left[0] -= 1
            for name in [name for name, left in alive.items() if left[0] == 0]:
                length = alive.pop(name)[1]
                yield Result(
                    request_id=name, text="x", usage=Usage(completion_tokens=length)
                )


@pytest.mark.parametrize("num_rows", [60, 1000])
@pytest.mark.parametrize("places", [1, 8, 64, 256])
@pytest.mark.parametrize("prefill", [0.001, 0.2])
@pytest.mark.parametrize(
    ("lengths", "fails"), [("alike", 0.0), ("unlike", 0.0), ("unlike", 0.4)]
)
def test_the_estimate_is_within_a_factor_of_two(
    tmp_path: Path,
    num_rows: int,
    places: int,
    prefill: float,
    lengths: str,
    fails: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Engine(places, prefill, lengths, fails)
    for _ in whole.as_completed(
        Request(prompt="x", request_id=str(number)) for number in range(num_rows)
    ):
        pass
    table = tmp_path / "rows.jsonl"
    table.write_text(
        "".join(
            json.dumps({"id": str(n), "image": "a.png"}) + "\n" for n in range(num_rows)
        )
    )
    sources, _ = open_sources([str(table)])
    engine, out = Engine(places, prefill, lengths, fails), io.StringIO()
    monkeypatch.setattr(
        dry_run,
        "time",
        types.SimpleNamespace(
            perf_counter=lambda: engine.now, monotonic=time.monotonic
        ),
    )
    monkeypatch.setattr(dry_run, "spell_seconds", lambda seconds: f"<{seconds:.3f}>")
    job = Job(sources, Questions(("x",)), Sink())
    dry_run.show_dry_run(job, lambda: nullcontext(engine), out, cache_bytes=0)  # type: ignore[arg-type,return-value]
    (said,) = re.findall(r"about <([\d.]+)>", out.getvalue())
    assert whole.now / 2 <= float(said) <= whole.now * 2, (
        whole.now,
        out.getvalue()[-300:],
    )


@pytest.mark.parametrize("num_wrong", [1, 300])
def test_rows_that_cannot_be_asked_are_named_and_counted(
    tmp_path: Path, num_wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One among the first rows had the whole job asked, and a job of them alone ended in an IndexError."""
    table = tmp_path / "rows.jsonl"
    table.write_text(
        "".join(json.dumps({"id": str(n), "image": "a.png"}) + "\n" for n in range(300))
    )
    make = dry_run.make_request

    def some(item: Item) -> tuple[Request | None, Item]:
        wrong = int(item.id) < num_wrong
        return (
            (None, replace(item, error="a page that cannot be read"))
            if wrong
            else make(item)
        )

    monkeypatch.setattr(dry_run, "make_request", some)
    sources, _ = open_sources([str(table)])
    engine, out = Engine(8, 0.001, "alike"), io.StringIO()
    job = Job(sources, Questions(("x",)), Sink())
    assert (
        dry_run.show_dry_run(job, lambda: nullcontext(engine), out, cache_bytes=0) == 1
    )  # type: ignore[arg-type,return-value]
    assert "0: a page that cannot be read" in out.getvalue()
    if num_wrong == 1:
        (ended,) = map(int, re.findall(r"measured on (\d+)", out.getvalue()))
        assert ended < 200
    else:
        assert "no row can be asked" in out.getvalue()
