"""Jobs at their edges: inputs that change under them, names that lead to one file, streams and signals of a shell."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
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


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


OWN = [{"id": f"r{number}", "image": "p.png", "prompt": f"what is {number}?"} for number in range(4)]
CHAT = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "q.png"}}, {"type": "text", "text": "a"}]}
]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"prompt": "one"}, {"prompt": "other"}),
        ({}, {"prompt": "its own"}),
        ({"params": {"temperature": 0.5, "seed": 1}}, {"params": {"temperature": 0.6, "seed": 1}}),
        ({"params": {"max_tokens": 5}}, {}),
        ({"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": "b"}]}),
        ({"image": "https://example.com/a.png"}, {"image": "https://example.com/b.png"}),
        ({"image": "data:image/png;base64,AAAA"}, {"image": "data:image/png;base64,AAAB"}),
        ({"image": "iVBORw0KGgo" + "A" * 69}, {"image": "iVBORw0KGgo" + "A" * 66 + "B" * 3}),
        ({"images": ["p.png", "p.png"]}, {"images": ["p.png"]}),
        ({"image": "p.png"}, {"image": "gone.png"}),
        ({"kind": "cat"}, {"kind": "dog"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("out", ["out.jsonl", "out.csv"])
def test_rows_that_ask_something_else_are_noticed(
    folder: Path, out: str, before: dict[str, Any], now: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """What a row asks is its own prompt, params and pictures, and what a prompt takes of its columns."""
    Image.new("RGB", (8, 8)).save("p.png")
    rows = [{"id": f"r{number}", "image": "p.png", "kind": "k"} for number in range(4)]
    own = {"id": "own", "kind": "k"} | ({} if "images" in before else {"image": "p.png"})
    write("t.jsonl", [*rows, own | before])
    command = ["run", "t.jsonl", "--prompt", "what {kind}?", "--quiet", "--out", out]
    assert cli.main(command, open_batcher=Echo()) == 0
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == 0
    write("t.jsonl", [*rows, own | now])
    capsys.readouterr()
    refused = Echo()
    assert cli.main([*command, "--resume"], open_batcher=refused) == cli.USAGE and not refused.opened
    said = capsys.readouterr().err
    assert "1 answered row" in said and ": own. --overwrite asks all rows again" in said
    assert cli.main([*command, "--resume", "--force"], open_batcher=refused) == 0 and not refused.opened
    assert cli.main([*command, "--overwrite"], open_batcher=Echo()) == 0
    assert cli.main([*command, "--resume"], open_batcher=refused) == 0 and not refused.opened


def test_rows_that_ask_the_same_in_another_form_are_the_same(folder: Path) -> None:
    Image.new("RGB", (8, 8)).save("p.png")
    row = {"id": "a", "image": "p.png", "prompt": "what?", "params": {"seed": 1, "max_tokens": 9}}
    write("t.jsonl", [row])
    command = ["run", "t.jsonl", "--quiet", "--out", "out.jsonl"]
    assert cli.main(command, open_batcher=Echo()) == 0
    moved = {"params": {"max_tokens": 9, "seed": 1}, "image": str(folder / "p.png"), "prompt": "what?", "id": "a"}
    write("t.jsonl", [moved, {**row, "id": "new"}])
    on = Echo()
    assert cli.main([*command, "--resume"], open_batcher=on) == 0 and on.asked == ["new"]


@pytest.mark.parametrize("kind", ["bytes", "struct", "path"])
def test_pictures_of_tables_are_no_other_question(folder: Path, kind: str) -> None:
    """A table's pictures are read when they are asked about, and not to count its rows."""
    Image.new("RGB", (8, 8)).save("p.png")
    data = Path("p.png").read_bytes()
    cell: dict[str, Any] = {"bytes": data, "struct": {"bytes": None, "path": "p.png"}, "path": "p.png"}
    pq.write_table(pa.table({"id": ["a", "b"], "image": [cell[kind]] * 2, "kind": ["c", "d"]}), "t.parquet")
    command = ["run", "t.parquet", "--prompt", "{kind}?", "--quiet", "--out", "out.jsonl"]
    assert cli.main(command, open_batcher=Echo()) == 0
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == 0
    pq.write_table(pa.table({"id": ["a", "b"], "image": [cell[kind]] * 2, "kind": ["c", "other"]}), "t.parquet")
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == cli.USAGE


def test_a_picture_that_a_chat_names_is_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (8, 8)).save("q.png")
    write("t.jsonl", [{"id": "a", "messages": CHAT}])
    command = ["run", "t.jsonl", "--quiet", "--out", "out.jsonl"]
    assert cli.main(command, open_batcher=Echo()) == 0
    Image.new("RGB", (8, 8), "red").save("q.png")
    os.utime("q.png", (1, 1))
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == cli.USAGE
    assert "files of 1 answered row have changed since: a." in capsys.readouterr().err


def test_what_standard_input_asks_is_compared_as_it_comes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(prompt: str) -> io.StringIO:
        rows = [*OWN[:3], {**OWN[3], "prompt": prompt}]
        return io.StringIO("".join(json.dumps(row) + "\n" for row in rows))

    command = ["run", "-", "--quiet", "--out", "out.jsonl"]
    for prompt, options in (("one", []), ("one", ["--resume"]), ("other", ["--resume"])):
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin", lines(prompt))
        assert cli.main([*command, *options], open_batcher=Echo()) == 0
        said = "1 row answered before asked something else then"
        assert (said in capsys.readouterr().out) == (prompt == "other")


def test_an_output_of_an_earlier_version_is_gone_on_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its lines have times and contents of files alone, and rows without files have none."""
    Image.new("RGB", (8, 8)).save("p.png")
    write("t.jsonl", OWN)
    command = ["run", "t.jsonl", "--quiet", "--out", "out.jsonl"]
    assert cli.main(command, open_batcher=Echo(stop_after=3)) == cli.INTERRUPTED
    stamps = answers("out.jsonl.files")
    assert len(stamps) == 3
    write("out.jsonl.files", [{name: one[name] for name in ("id", "times", "contents")} for one in stamps[1:]])
    write("t.jsonl", [{**row, "prompt": "other"} for row in OWN])
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == 0
    assert "of 3 answered rows it is not known what was asked" in capsys.readouterr().err
    assert len(told("out.jsonl")) == 4
    Image.new("RGB", (9, 9)).save("p.png")
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == cli.USAGE
    assert "files of 3 answered rows have changed" in capsys.readouterr().err
