"""What a terminal shows of a job: its bar, its totals, and each failure no more often than it must."""

from __future__ import annotations

import io
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from tests.test_job_runs import Echo
from vlm_batch.cli import main as cli
from vlm_batch.cli.watching import JobView, Remaining
from vlm_batch.jobs.questions import Item
from vlm_batch.jobs.rows import JobRow
from vlm_batch.jobs.summary import MAX_KEPT, Histogram, Summary
from vlm_batch.types import Result, Timings, Usage


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """20 names of pictures, two of which fail."""
    monkeypatch.chdir(tmp_path)
    names = [
        f"{'bad' if number in (3, 7) else 'p'}{number}.png" for number in range(20)
    ]
    rows = "".join(f'{{"id": "{name}", "image": "{name}"}}\n' for name in names)
    Path("rows.jsonl").write_text(rows)
    return tmp_path


def run(*options: str) -> None:
    command = ["run", "rows.jsonl", "--max-errors", "2", *options]
    assert cli.main(command, open_batcher=Echo()) == 0


# Figures ------------------------------------------------------------------------------------------------------------


def test_quantiles_are_seconds_and_no_edges_of_bins() -> None:
    """A run of 15.5 s has no row of 22."""
    seconds = [0.3 + 0.1 * number for number in range(153)]
    histogram = Histogram()
    for one in random.Random(1).sample(seconds, len(seconds)):
        histogram.add(one)
    assert histogram.quantile(0.5) == pytest.approx(seconds[76])
    assert histogram.quantile(0.95) == pytest.approx(seconds[145])
    buckets = histogram.filled()
    assert buckets[0][0] == seconds[0] and buckets[-1][1] == seconds[-1]
    assert sum(count for _, _, count in buckets) == len(seconds)
    assert all(low == high for (_, low, _), (high, _, _) in pairwise(buckets))


def test_quantiles_of_many_rows_are_a_samples() -> None:
    histogram = Histogram()
    for number in range(20 * MAX_KEPT):
        histogram.add(1.0 + number / (20 * MAX_KEPT))  # later rows take longer
    assert len(histogram.kept) == MAX_KEPT
    assert histogram.quantile(0.5) == pytest.approx(1.5, abs=0.05)
    assert histogram.quantile(0.95) == pytest.approx(1.95, abs=0.05)


def test_a_rows_seconds_leave_out_what_it_waited_for(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Waits(Echo):
        def answer(self, request):  # type: ignore[no-untyped-def]
            result = super().answer(request)
            object.__setattr__(result, "timings", Timings(queue=31.2, total=32.0))
            return result

    command = ["run", "rows.jsonl", "--max-errors", "2", "--out", "o.jsonl"]
    assert cli.main([*command, "--report", "r.html"], open_batcher=Waits()) == 0
    out = capsys.readouterr().out
    assert "half within 0.8, 95 % within 0.8" in out
    assert re.search(r"in [\d.]+ s: [\d.e-]+ s a request, [\d.]+ tokens/s", out)
    assert "0.8 s" in Path("r.html").read_text()
    assert cli.main(["report", "o.jsonl", "--out", "all.html"]) == 0
    assert "0.8 to 0.8 s: 18 rows" in Path("all.html").read_text()


# Failures and --quiet -----------------------------------------------------------------------------------------------


def test_a_failure_is_told_once_while_it_runs_and_once_at_the_end(
    pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--out", "o.jsonl")
    out, err = capsys.readouterr()
    for told in (out, err):
        assert len(re.findall(r"bad\S*3\.png.*InvalidImage", told)) == 1, told
    assert "failures, by" not in out  # the table has them


@pytest.mark.parametrize("kept", [["--out", "o.jsonl"], ["--out", "-"]])
def test_quiet_shows_totals_and_why_rows_failed(
    pictures: Path, kept: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run("--quiet", *kept)
    out, err = capsys.readouterr()
    shown = err if kept[1] == "-" else out
    assert "20 requests, 2 errors" in shown and "failures, by" in shown
    for part in ("status", "seconds of a row", "where a row's time goes", "p1.png"):
        assert part not in shown, part


def test_quiet_shows_answers_that_nothing_else_has(
    pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--quiet")
    out, err = capsys.readouterr()
    assert "p1.png" in out and "status" in out and "seconds of a row" not in out
    assert "p1.png" not in err


def test_a_sidecars_long_job_has_no_table_and_keeps_no_answers(tmp_path: Path) -> None:
    view = JobView(table_to=io.StringIO(), goes_on=True)
    for number in range(300):
        row = JobRow(id=str(number), images=())
        view.ended(Item(str(number), row, prompt="?"), Result(request_id="0"), 1)
    assert len(view._rows) <= 101


# The bar ------------------------------------------------------------------------------------------------------------


def summary_at(seconds: float, answered: int, total: int) -> Summary:
    return Summary(total=total, answered=answered, began=0.0, ended=seconds)


def test_the_estimate_does_not_jump() -> None:
    """Eight rows a burst, every four seconds, of 96: the time left goes down, as a clock does."""
    remaining, answered, said = Remaining(), 0, []
    summary = summary_at(0.0, 0, 96)
    for tick in range(1, 480):  # tenths of a second
        now = tick / 10
        if tick % 40 == 0:
            for _ in range(8):
                answered += 1
                summary = summary_at(now, answered, 96)
                remaining.update(summary, in_flight=8)
        left = remaining.seconds(summary, now)
        if left is None:
            assert answered < 8
            continue
        said.append((now, left))
        assert abs(left - (48 - now)) < 12
    steps = [after[1] - before[1] for before, after in pairwise(said)]
    assert max(steps) < 5 and min(steps) > -5


def test_there_is_no_estimate_by_the_first_short_answers() -> None:
    """Twenty rows at once: two that end first say nothing of the others."""
    remaining = Remaining()
    remaining.update(summary_at(0.5, 2, 20), in_flight=18)
    assert remaining.seconds(summary_at(0.5, 2, 20), 0.6) is None
    remaining.update(summary_at(8.0, 10, 20), in_flight=10)
    assert remaining.seconds(summary_at(8.0, 10, 20), 8.0) == pytest.approx(8.0)
    # nothing ends for long: the end is not now
    assert remaining.seconds(summary_at(8.0, 19, 20), 30.0) == pytest.approx(1.5)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_part_of_the_bar_is_cut(width: int) -> None:
    view = JobView(table_to=io.StringIO())
    summary = Summary(total=400, answered=100, failed=7, tokens=9000, pictures=107)
    summary.cached_tokens, summary.prompt_tokens, summary.busy = 5, 10, 1.0
    summary.ended = summary.began + 30
    view.began(Echo(), summary)  # type: ignore[arg-type]
    view._in_flight = 32
    view._remaining.update(summary, 32)
    console = Console(width=width, file=io.StringIO(), force_terminal=True)
    console.print(view._bar.get_renderable())
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    line = text.strip("\n")
    assert "\n" not in line and "…" not in line and "7 failed, " in line, text
    said = line[line.index("7 failed") :].rstrip().split(", ")
    assert said == view.parts()[: len(said)]
    assert len(said) >= {60: 1, 80: 2, 100: 4, 160: 7}[width]


# Words --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "paths", [["What is this?"], ["rows.jsonl", "What is the total?"], ["name it"]]
)
def test_a_question_in_the_place_of_a_path_is_told_where_it_goes(
    pictures: Path, paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *paths], open_batcher=Echo()) == 2
    question = paths[-1]
    assert f"--prompt '{question}'" in capsys.readouterr().err


def test_names_with_blanks_are_files(
    pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my rows.jsonl").write_text('{"id": "a", "image": "a.png"}\n')
    assert cli.main(["run", "my rows.jsonl"], open_batcher=Echo()) == 0
    assert cli.main(["run", "no rows"], open_batcher=Echo()) == 2


def test_usage_is_counted() -> None:
    """The figures above are of results as the engine makes them."""
    summary = Summary(total=1)
    summary.begin()
    item = Item("a", JobRow(id="a", images=()), prompt="?")
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    timings = Timings(queue=2.0, encode=0.1, prefill=0.2, decode=0.3, total=2.6)
    summary.add(item, Result(request_id="a", usage=usage, timings=timings))
    assert summary.in_batch.quantile(0.5) == pytest.approx(0.6)
