"""Jobs at their edges: inputs that change under them, names that lead to one file, streams and signals of a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.test_job_runs import RUN, Echo, answers, folder, here, told
from vlm_batch.cli import main as cli
from vlm_batch.jobs import journal
from vlm_batch.types import Request, Result

__all__ = ["folder"]  # the fixture


class Growing(Echo):
    """Its input has ``lines`` appended once some rows are answered."""

    def __init__(self, path: Path, lines: str, after: int = 5, stop_after: int | None = None) -> None:
        super().__init__(stop_after)
        self.path, self.lines, self.after = path, lines, after

    def answer(self, request: Request) -> Result:
        if len(self.asked) == self.after:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(self.lines)
        return super().answer(request)


def line(row_id: str, image: str = "new.png") -> str:
    return json.dumps({"id": row_id, "image": image, "kind": "k"}) + "\n"


@pytest.mark.parametrize("again", ["r0", "r19"], ids=["answered", "in flight or waiting"])
def test_ids_that_are_appended_while_a_job_runs_are_skipped(
    folder: Path, again: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``r19`` is in flight, or to be asked, when a row with its id comes."""
    asked = Growing(folder / "rows.jsonl", line(again) * 3 + line("r20"))
    assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=asked) == cli.FAILED  # two pictures are bad
    assert set(told("out.jsonl")) == {f"r{number}" for number in range(21)}
    assert told("out.jsonl")[again][0].endswith(f"p{again[1:]}.png")  # the first row's, and not the appended one's
    said = capsys.readouterr().out
    assert f"3 rows skipped whose id had come before: '{again}'" in said and "21 requests" in said


def test_a_job_whose_input_was_given_ids_again_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that was stopped, after its input had grown by ids that it knew, is not refused for them."""
    stopped = Growing(folder / "rows.jsonl", line("r0") + line("r18") + line("r20"), stop_after=8)
    assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=stopped) == cli.INTERRUPTED
    assert len(answers("out.jsonl")) == 8
    on = Echo()
    assert cli.main([*RUN, "--out", "out.jsonl", "--resume"], open_batcher=on) == cli.FAILED
    assert set(told("out.jsonl")) == {f"r{number}" for number in range(21)} and len(on.asked) == 13
    assert "2 rows skipped" in capsys.readouterr().out
    assert cli.main([*RUN, "--out", "new.jsonl"], open_batcher=Echo()) == cli.USAGE  # of a new job it is a mistake


def test_rows_that_cannot_be_read_on_end_a_job_with_what_was_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ended(Echo):
        def as_completed(self, requests: object) -> Iterator[Result]:
            yield Result(request_id="refused-0", finish_reason="error", error="OSError: gone")

    assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Ended()) == cli.USAGE
    assert "OSError: gone" in capsys.readouterr().err


HELD = """
import sys
from pathlib import Path
from vlm_batch.jobs.sinks import open_sink
with open_sink({name!r}).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(name: str) -> Iterator[None]:
    """Another process has the output of this name."""
    other = subprocess.Popen(
        [sys.executable, "-c", HELD.format(name=name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=here()
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == b"held\n"
        yield
    finally:
        other.kill()
        other.communicate()


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("is_there", [True, False], ids=["there", "not there yet"])
def test_a_link_to_an_output_is_the_output(folder: Path, suffix: str, is_there: bool) -> None:
    """Neither a link, a link's link nor another folder's name gets a second process to a file that one writes."""
    (folder / "there").mkdir()
    os.symlink(folder / "there" / f"out{suffix}", f"link{suffix}")
    os.symlink(f"link{suffix}", f"far{suffix}")
    os.symlink("there", "here")
    names = [f"there/out{suffix}", f"link{suffix}", f"far{suffix}", f"here/out{suffix}"]
    if is_there:
        assert cli.main([*RUN, "--out", names[0]], open_batcher=Echo(stop_after=5)) == cli.INTERRUPTED
    for name in names[1:]:
        with held(name):
            for other in names:
                echo = Echo()
                assert cli.main([*RUN, "--out", other, "--resume"], open_batcher=echo) == cli.USAGE and not echo.opened
    for name in names:  # begun by one name, gone on with by another, and still a link at the end
        assert cli.main([*RUN, "--out", name, "--resume"], open_batcher=Echo()) == cli.FAILED
        assert set(told(name)) == {f"r{number}" for number in range(20)}
    assert os.path.islink(f"link{suffix}") and not list(folder.glob("*.lock")) and not list(folder.glob("*.job.json"))


def test_a_second_name_of_an_output_is_refused_while_one_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Echo(stop_after=5)) == cli.INTERRUPTED
    os.link("out.jsonl", "other.jsonl")
    capsys.readouterr()
    with held("out.jsonl"):
        assert cli.main([*RUN, "--out", "other.jsonl", "--overwrite"], open_batcher=Echo()) == cli.USAGE
    assert "other.jsonl is being written by another process" in capsys.readouterr().err
    assert len(answers("out.jsonl")) == 5


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_an_input_is_no_output_by_any_name(folder: Path, link: Any, capsys: pytest.CaptureFixture[str]) -> None:
    link("rows.jsonl", "out.jsonl")
    before = Path("rows.jsonl").read_bytes()
    assert cli.main([*RUN, "--out", "out.jsonl", "--overwrite"], open_batcher=Echo()) == cli.USAGE
    assert "out.jsonl is read by this job" in capsys.readouterr().err and Path("rows.jsonl").read_bytes() == before


def test_two_jobs_do_not_write_one_folders_text_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their outputs differ, and their text files are the same."""
    Image.new("RGB", (8, 8)).save("p0.png")
    command = ["run", "p0.png", "--sidecar", ".txt", "--out"]
    with journal.locked(Path(".vlm-batch.txt")):
        assert cli.main([*command, "out.jsonl"], open_batcher=Echo()) == cli.USAGE
        assert "is being written by another process" in capsys.readouterr().err
    assert cli.main([*command, "out.jsonl"], open_batcher=Echo()) == cli.ANSWERED


def test_a_report_to_a_link_stays_a_link(folder: Path) -> None:
    os.symlink("page.html", "report.html")
    Path("page.html").write_text("before")
    assert cli.main([*RUN, "--out", "out.jsonl", "--report", "report.html"], open_batcher=Echo()) == cli.FAILED
    assert os.path.islink("report.html") and "<html" in Path("page.html").read_text()
