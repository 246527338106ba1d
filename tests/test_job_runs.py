"""Jobs from their first check to their last answer: resumed, killed, sharded, on full disks, by two processes."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint, sample_images
from vlm_batch.cli import main as cli
from vlm_batch.handle import Handle
from vlm_batch.jobs import journal, map_table, order
from vlm_batch.jobs.questions import Item
from vlm_batch.jobs.rows import InvalidJob, Row, Shard
from vlm_batch.jobs.summary import MAX_REASON, Summary, stages_of
from vlm_batch.many import in_turn
from vlm_batch.types import Event, Request, Result, SamplingParams, Timings, TokenLogprobs, Usage

ROOT = Path(__file__).parent.parent
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Echo:
    """Answers with prompt and picture; "bad" in a picture's name is a failure. Three requests are in flight, out of order."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.asked: list[str] = []
        self.stop_after = stop_after
        self.opened = 0

    def __call__(self, args: object) -> AbstractContextManager[Echo]:
        self.opened += 1
        return nullcontext(self)

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        alive: list[Request] = []
        source = iter(requests)
        while True:
            while len(alive) < 3 and (request := next(source, None)) is not None:
                alive.append(request)
            if not alive:
                return
            yield self.answer(alive.pop(len(alive) // 2))

    def submit_request(self, request: Request) -> Handle:
        handle = Handle("some", lambda request_id: False)
        handle.push(Event("some", result=self.answer(replace(request, request_id="some"))))
        return handle

    def answer(self, request: Request) -> Result:
        assert request.request_id is not None
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(request.request_id)
        names = [image if isinstance(image, str) else "picture" for image in request.images]
        if any("bad" in name for name in names):
            return Result(
                request_id=request.request_id, finish_reason="error", error=f"InvalidImage: {names[0]} is bad"
            )
        return Result(
            request_id=request.request_id,
            text=f"{request.prompt}: {' '.join(names)}",
            usage=Usage(prompt_tokens=4, completion_tokens=2, cached_tokens=1),
            timings=Timings(total=0.25, ttft=0.1, queue=0.05),
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twenty rows, two of them bad, in a table."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"id": f"r{number}", "image": f"{'bad' if number in (3, 11) else 'p'}{number}.png", "kind": f"k{number % 2}"}
        for number in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


RUN = ["run", "rows.jsonl", "--prompt", "what {kind}?", "--quiet"]
OUTPUTS = ["out.jsonl", "out.csv", "out.parquet"]


def answers(out: str | Path) -> list[dict[str, Any]]:
    path = Path(out)
    if path.suffix == ".parquet":
        return list(pq.read_table(path).to_pylist())
    if path.suffix == ".csv":
        with open(path, newline="") as file:
            return [{name: value or None for name, value in row.items()} for row in csv.DictReader(file)]
    return [json.loads(line) for line in path.read_text().splitlines()]


def told(out: str | Path) -> dict[str, tuple[Any, Any]]:
    """Answers by id; every id must be there once."""
    rows = answers(out)
    by_id = {row["id"]: (row["text"] or None, row["error"]) for row in rows}
    assert len(by_id) == len(rows)
    return by_id


KILLED = """
import sys, time
sys.path.insert(0, {root!r})
from tests.test_job_runs import Echo
from vlm_batch.cli import main as cli

class Slow(Echo):
    def answer(self, request):
        time.sleep(0.002)
        return super().answer(request)

sys.exit(cli.main({command!r}, open_batcher=Slow()))
"""


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_job_that_is_cut_short_goes_on(folder: Path, out: str) -> None:
    assert cli.main([*RUN, "--out", "whole" + Path(out).suffix], open_batcher=Echo()) == 1
    first, second = Echo(stop_after=7), Echo()
    assert cli.main([*RUN, "--out", out], open_batcher=first) == 130
    assert len(answers(out)) == 7
    assert cli.main([*RUN, "--out", out, "--resume"], open_batcher=second) == 1
    assert not set(first.asked) & set(second.asked)
    assert len(first.asked) + len(second.asked) == 20
    assert told(out) == told("whole" + Path(out).suffix)
    third = Echo()
    assert cli.main([*RUN, "--out", out, "--resume", "--max-errors", "2"], open_batcher=third) == 0
    assert third.opened == 0  # nothing is left: no model is loaded


@pytest.mark.parametrize("out", OUTPUTS)
def test_output_that_is_there_is_refused_resumed_or_replaced(
    folder: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main([*RUN, "--out", out], open_batcher=Echo())
    before = Path(out).read_bytes()
    refused = Echo()
    assert cli.main([*RUN, "--out", out], open_batcher=refused) == 2
    said = capsys.readouterr().err
    assert "--resume goes on with them, --overwrite replaces them" in said
    assert Path(out).read_bytes() == before and not refused.opened
    assert cli.main([*RUN, "--out", out, "--resume", "--overwrite"], open_batcher=refused) == 2
    again = Echo()
    assert cli.main([*RUN, "--out", out, "--overwrite"], open_batcher=again) == 1
    assert len(again.asked) == 20 == len(told(out))


def test_rows_in_another_spelling(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids of files are their paths: the same folder in other words goes on, and a whole path does when told."""
    (folder / "pics").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(folder / "pics" / name)
    command = ["--quiet", "--out", "out.jsonl", "--resume"]
    assert cli.main(["run", "pics/", *command], open_batcher=Echo()) == 0
    for spelled in ("pics", "./pics", ".//pics/", "./pics/*.png"):
        echo = Echo()
        assert cli.main(["run", spelled, *command], open_batcher=echo) == 0
        assert not echo.opened
    assert "in the output is to one of these rows" not in capsys.readouterr().err
    refused, before = Echo(), Path("out.jsonl").read_bytes()
    assert cli.main(["run", str(folder / "pics"), *command], open_batcher=refused) == 2
    said = "none of the 2 answers in the output is to one of these rows: are paths spelled as in its first run?"
    assert said in capsys.readouterr().err
    assert not refused.opened and Path("out.jsonl").read_bytes() == before
    assert cli.main(["run", str(folder / "pics"), *command, "--force"], open_batcher=Echo()) == 0
    assert said in capsys.readouterr().err and len(told("out.jsonl")) == 4


@pytest.mark.parametrize("output", [["--out", out] for out in OUTPUTS] + [["--sidecar", ".txt"]], ids=" ".join)
def test_pictures_that_have_changed_are_noticed(
    folder: Path, output: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By size and time, also those of an older file; what is gone or new since is not changed."""
    (folder / "pics").mkdir()
    for name in "abcd":
        Image.new("RGB", (4, 4)).save(folder / "pics" / f"{name}.png")
    command = ["run", "pics", "--quiet", *output]
    assert cli.main(command, open_batcher=Echo()) == 0
    (folder / "pics/d.png").unlink()
    Image.new("RGB", (4, 4)).save(folder / "pics/e.png")
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == 0
    os.utime(folder / "pics/b.png", (1, 1))
    Image.new("RGB", (90, 50)).save(folder / "pics/e.png")
    capsys.readouterr()
    refused = Echo()
    assert cli.main([*command, "--resume"], open_batcher=refused) == 2 and not refused.opened
    assert "files of 2 answered rows have changed since: pics/b.png, pics/e.png." in capsys.readouterr().err
    assert cli.main([*command, "--resume", "--force"], open_batcher=refused) == 0 and not refused.opened
    again = Echo()
    assert cli.main([*command, "--overwrite"], open_batcher=again) == 0 and len(again.asked) == 4
    assert cli.main([*command, "--resume"], open_batcher=refused) == 0 and not refused.opened


def test_weights_that_have_changed_are_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model").mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (folder / "model" / name).write_text("{}")
    command = [*RUN, "--model", "model", "--out", "out.jsonl", "--resume"]
    assert cli.main(command, open_batcher=Echo(stop_after=5)) == 130
    (folder / "model" / "README.md").write_text("other")
    assert cli.main(command, open_batcher=Echo(stop_after=5)) == 130
    (folder / "model" / "model.safetensors").write_text("other")
    refused = Echo()
    assert cli.main(command, open_batcher=refused) == 2 and not refused.opened
    assert "the model's files have changed: model.safetensors. --force goes on" in capsys.readouterr().err
    assert cli.main([*command, "--force"], open_batcher=Echo()) == 1
    assert cli.main(command, open_batcher=Echo()) == 1  # the header is that of the last run


@pytest.mark.parametrize("out", OUTPUTS)
def test_errors_are_asked_again_when_told(folder: Path, out: str) -> None:
    cli.main([*RUN, "--out", out], open_batcher=Echo())
    assert sum(error is not None for _, error in told(out).values()) == 2
    again = Echo()
    again.answer = lambda request: Result(request_id=request.request_id or "", text="now")  # type: ignore[method-assign]
    assert cli.main([*RUN, "--out", out, "--resume", "--retry-errors"], open_batcher=again) == 0
    assert {row for row, (text, _) in told(out).items() if text == "now"} == {"r3", "r11"}
    assert len(told(out)) == 20


def test_other_settings_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Echo(stop_after=5))
    other = ["run", "rows.jsonl", "--prompt", "where {kind}?", "--max-tokens", "9", "--out", "out.jsonl", "--resume"]
    refused = Echo()
    assert cli.main(other, open_batcher=refused) == 2
    said = capsys.readouterr().err
    assert "max_tokens was 256 and is 9" in said
    assert 'prompts was ["what {kind}?"] and is ["where {kind}?"]' in said
    assert not refused.opened
    assert cli.main([*other, "--force"], open_batcher=Echo()) == 1
    assert len(told("out.jsonl")) == 20
    (folder / "out.jsonl.job.json").unlink()
    assert cli.main([*RUN, "--out", "out.jsonl", "--resume"], open_batcher=Echo()) == 2
    assert "no header beside it" in capsys.readouterr().err
    (folder / "out.jsonl.job.json").write_text("{")
    assert cli.main([*RUN, "--out", "out.jsonl", "--resume"], open_batcher=Echo()) == 2


def test_a_table_whose_rows_have_moved_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where ids are places in the file; where rows have ids, rows may be added anywhere."""
    (folder / "t.csv").write_text("image\na.png\nb.png\n")
    run = ["run", "t.csv", "--out", "out.jsonl", "--quiet"]
    cli.main(run, open_batcher=Echo(stop_after=1))
    (folder / "t.csv").write_text("image\nnew.png\na.png\nb.png\n")
    assert cli.main([*run, "--resume"], open_batcher=Echo()) == 2
    assert "tables was" in capsys.readouterr().err
    (folder / "t.csv").write_text("id,image\na,a.png\n")
    run = ["run", "t.csv", "--out", "ids.jsonl", "--quiet"]
    cli.main(run, open_batcher=Echo())
    (folder / "t.csv").write_text("id,image\nnew,new.png\na,a.png\n")
    echo = Echo()
    assert cli.main([*run, "--resume"], open_batcher=echo) == 0
    assert echo.asked == ["new"]


@pytest.mark.parametrize("torn", [b'{"id": "r1", "te', b"\0" * 700, b'{"id": "x"', "né".encode()[:2]])
def test_a_torn_last_line_is_repaired(folder: Path, torn: bytes) -> None:
    cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Echo(stop_after=5))
    with open("out.jsonl", "ab") as file:
        file.write(torn)
    echo = Echo()
    assert cli.main([*RUN, "--out", "out.jsonl", "--resume"], open_batcher=echo) == 1
    assert len(echo.asked) == 15
    assert len(told("out.jsonl")) == 20


def test_a_line_that_only_lacks_its_end_is_kept(folder: Path) -> None:
    cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Echo(stop_after=5))
    text = Path("out.jsonl").read_text()
    Path("out.jsonl").write_text(text.rstrip("\n"))
    echo = Echo()
    cli.main([*RUN, "--out", "out.jsonl", "--resume"], open_batcher=echo)
    assert len(echo.asked) == 15 and len(told("out.jsonl")) == 20


def test_a_file_that_is_no_output_is_not_gone_on_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "out.jsonl").write_text('{"name": 1}\n{"name": 2}\n')
    assert cli.main([*RUN, "--out", "out.jsonl", "--resume", "--force"], open_batcher=Echo()) == 2
    assert "out.jsonl is no output of a job" in capsys.readouterr().err
    (folder / "out.jsonl").write_text('{"id": "a"}\nbroken\n{"id": "b"}\n')
    assert cli.main([*RUN, "--out", "out.jsonl", "--resume", "--force"], open_batcher=Echo()) == 2
    assert "out.jsonl, line 2 is not JSON" in capsys.readouterr().err


@pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="needs a folder in which not even root makes files: Linux's /proc"
)
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_folder_that_takes_no_files(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Said for what it is: the lock's library takes it for another process."""
    echo = Echo()
    assert cli.main([*RUN, "--out", f"/proc/{name}"], open_batcher=echo) == 2
    assert f"cannot write /proc/{name}: " in capsys.readouterr().err
    assert not echo.opened


def test_two_processes_on_one_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys\nfrom pathlib import Path\nfrom vlm_batch.jobs import journal\n"
    code += "with journal.locked(Path('out.jsonl')):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=here())
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == b"held\n"
        echo = Echo()
        assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=echo) == 2
        assert "out.jsonl is being written by another process" in capsys.readouterr().err
        assert not echo.opened
    finally:
        other.kill()
        other.communicate()
    assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Echo()) == 1  # a killed process holds nothing


def test_a_process_that_comes_as_another_ends_keeps_the_output_to_itself(folder: Path) -> None:
    """It opened the lock's file while that was held, and has it once it is free: a third one must not."""
    with journal.locked(Path("out.jsonl")):
        second = os.open("out.jsonl.lock", os.O_RDWR)
    fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(InvalidJob, match="being written by another process"), journal.locked(Path("out.jsonl")):
        pass
    os.close(second)


@pytest.mark.parametrize(
    ("lines", "options", "said"),
    [
        (['{"id": "a", "image": "x.png"}'] * 2, [], "1 row has an id that another row has: 'a'"),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--prompt", "{size}?"],
            "the prompt names {size}, which is no column of any row",
        ),
        (['{"id": "a", "image": "x.png"}'], ["--columns", "size"], "'size' is neither a column of any row nor a field"),
        ([], [], "there are no rows in rows.jsonl"),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--out", "no/out.csv"],
            "cannot write no/out.csv: there is no such folder",
        ),
        (['{"id": "a", "image": "x.png"}'], ["--out", "."], "cannot write .: it is a folder"),
        (['{"id": "a", "image": "x.png"}'], ["--shard", "3/2"], "shard 3/2 is not one of 1/2 to 2/2"),
        (['{"id": "a", "image": "x.png"}'], ["--sidecar", ".png"], "--sidecar .png is no suffix for text"),
        (['{"id": "a", "image": "x.png"}'], ["--out", "./rows.jsonl", "--overwrite"], "rows.jsonl is read by this job"),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--report", "no/r.html"],
            "cannot write no/r.html: there is no such folder",
        ),
        (['{"id": "a", "image": "x.png"}'], ["--report", "rows.jsonl"], "give it a name that ends in .html"),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--prompt", "{size}?", "--shard", "1/9"],
            "names {size}, which is no column",
        ),
        (['{"id": "a", "image": "x.png"}'], ["--resume"], "--resume needs a file to go on with"),
        (['{"id": "a", "image": "x.png"}'], ["--regex", "(a"], "regex: "),
    ],
)
def test_what_is_wrong_with_a_job_is_said_before_it_begins(
    folder: Path, lines: list[str], options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rows.jsonl").write_text("\n".join(lines))
    echo = Echo()
    assert cli.main(["run", "rows.jsonl", *options], open_batcher=echo) == 2
    assert said in capsys.readouterr().err
    assert not echo.opened


def test_missing_columns_of_a_table_are_said_before_it_begins(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "t.csv").write_text("image,kind\na.png,x\n")
    echo = Echo()
    assert cli.main(["run", "t.csv", "--prompt", "{Kind}?"], open_batcher=echo) == 2
    assert "{Kind}, which is no column of t.csv; columns: image, kind" in capsys.readouterr().err
    assert not echo.opened


def test_rows_that_cannot_be_asked_are_errors_of_their_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.jsonl").write_text(
        '{"id": "a", "image": "x.png", "kind": 1}\nbroken\n{"id": "b", "image": "y.png"}\n'
    )
    assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Echo()) == 1
    rows = told("out.jsonl")
    assert rows["a"][1] is None
    assert "rows.jsonl:2: the line is not JSON" in rows["rows.jsonl:2"][1]
    assert "'kind' is not there" in rows["b"][1]
    assert "1 row cannot be asked: rows.jsonl:2: the line is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [("id", "image"), ("image",)], ids=["in a picture", "in an id"])
def test_a_table_that_is_damaged_in_the_middle(folder: Path, columns: tuple[str, ...]) -> None:
    """What comes before the damage is answered, and so is the next source; the rest is one row's error."""
    table = pa.table({"id": [f"t{n}" for n in range(400)], "image": [bytes([n % 251]) * 300 for n in range(400)]})
    pq.write_table(table, "t.parquet", row_group_size=40, compression="none", use_dictionary=False)
    group = pq.ParquetFile("t.parquet").metadata.row_group(5)
    start = group.column(len(columns) - 1).data_page_offset
    data = bytearray(Path("t.parquet").read_bytes())
    data[start : start + 30] = b"\xff" * 30
    Path("t.parquet").write_bytes(data)
    run = ["run", "t.parquet", "rows.jsonl", "--prompt", "what?", "--quiet", "--out", "out.jsonl"]
    assert cli.main(run, open_batcher=Through()) == 1
    answered = told("out.jsonl")
    assert {f"t{n}" for n in range(192)} | {f"r{n}" for n in range(20)} <= answered.keys()
    assert "cannot be read to its end" in str(answered["t.parquet:damaged"][1])
    again = Through()
    assert cli.main([*run, "--resume"], open_batcher=again) == 1 and not again.asked


class Through(Echo):
    """The same, with the batcher's own way of asking many requests."""

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        return (result for _, result in in_turn(self.ask, requests, lambda: 3))

    def ask(self, request: Request) -> Handle:
        handle = Handle(str(request.request_id), lambda request_id: False)
        handle.push(Event(str(request.request_id), result=self.answer(request)))
        return handle


def test_columns_of_answers_and_rows(folder: Path) -> None:
    for out in OUTPUTS:
        cli.main([*RUN, "--out", out, "--columns", "kind,text,completion_tokens"], open_batcher=Echo())
        rows = answers(out)
        assert list(rows[0]) == ["id", "kind", "text", "completion_tokens", "error"]
        row = next(row for row in rows if row["id"] == "r5")
        assert (row["kind"], row["text"], str(row["completion_tokens"])) == ("k1", "what k1?: p5.png", "2")


def test_parquet_columns_keep_their_types(folder: Path) -> None:
    values: Any = (
        [2**70, 1, None],
        ["\udce9", ["\udce9"], None],
        [1, 2.5, None],
        ["a", 1, None],
        [[1], [2], []],
        [True, False, None],
        [None, None, None],
    )
    names = ("large", "bytes", "number", "mixed", "list", "flag", "nothing")
    lines = [
        {
            "id": str(index),
            "image": "a.png",
            **{name: column[index] for name, column in zip(names, values, strict=True)},
        }
        for index in range(3)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["run", "rows.jsonl", "--out", "o.parquet", "--columns", ",".join(names)], open_batcher=Echo()) == 0
    table = pq.read_table("o.parquet")
    kinds = ["string", "string", "double", "string", "list<element: int64>", "bool", "string"]
    assert [str(table.schema.field(name).type) for name in names] == kinds
    assert {row["id"]: row["large"] for row in table.to_pylist()} == {"0": str(2**70), "1": "1", "2": None}
    assert {row["id"]: row["mixed"] for row in table.to_pylist()} == {"0": "a", "1": "1", "2": None}


@pytest.mark.parametrize("out", OUTPUTS)
def test_names_that_are_no_utf8_are_gone_on_with(folder: Path, out: str) -> None:
    name = os.fsdecode(b"pics/caf\xe9.png")
    Path("pics").mkdir()
    try:
        Path(name).touch()
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    command = ["run", "pics", "--quiet", "--out", out, "--prompt", "what is {name}?"]
    assert cli.main(command, open_batcher=Echo()) == 0
    again = Echo()
    assert cli.main([*command, "--resume"], open_batcher=again) == 0
    assert not again.opened and len(told(out)) == 1


@pytest.mark.parametrize("out", OUTPUTS)
def test_every_reader_takes_names_that_are_no_utf8(folder: Path, out: str) -> None:
    """Ids, pictures, errors and columns with their names, in whatever form they are written, and in the report."""
    row = {"image": os.fsdecode(b"bad\xe9.png"), os.fsdecode(b"no\xe9"): os.fsdecode(b"caf\xe9"), "half": "\ud83d"}
    lines = [{"id": os.fsdecode(b"r\xe9"), **row}, {"id": "r", **row}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    columns = f"image,half,{os.fsdecode(bytes([110, 111, 233]))},images"
    command = ["run", "rows.jsonl", "--quiet", "--out", out, "--columns", columns, "--report", "r.html"]
    assert cli.main(command, open_batcher=Echo()) == 1
    read = {".jsonl": (pd.read_json, pl.read_ndjson), ".csv": (pd.read_csv, pl.read_csv)}
    readers = read.get(Path(out).suffix, (pd.read_parquet, pl.read_parquet))
    with open(out, "rb") as file:
        tables = [readers[0](file, **({"lines": True} if out.endswith("jsonl") else {})), readers[1](out).to_pandas()]
    for table in tables:
        assert sorted(table["id"]) == ["r", r"r\xe9"]
        assert list(table["image"]) == [r"bad\xe9.png"] * 2
        assert list(table["error"]) == [r"InvalidImage: bad\xe9.png is bad"] * 2
        assert list(table["half"]) == [r"\ud83d"] * 2
        assert list(table[r"no\xe9"]) == [r"caf\xe9"] * 2
    assert r"bad\xe9.png" in Path("r.html").read_text()
    again = Echo()
    assert cli.main([*command, "--resume"], open_batcher=again) == 1 and not again.opened


def test_log_probabilities_of_a_row_are_written(folder: Path) -> None:
    class Likely(Echo):
        def answer(self, request: Request) -> Result:
            return replace(super().answer(request), logprobs=(TokenLogprobs(5, -0.5, ((5, -0.5), (6, -1.0))),))

    cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Likely())
    assert answers("out.jsonl")[0]["logprobs"] == [{"token_id": 5, "logprob": -0.5, "top": [[5, -0.5], [6, -1.0]]}]


def test_all_that_a_row_asked_for_is_written(folder: Path) -> None:
    """Further answers and the prompt's log-probabilities."""

    class Several(Echo):
        def answer(self, request: Request) -> Result:
            result = super().answer(request)
            likely = (None, TokenLogprobs(5, -0.5, ((5, -0.5),)))
            return replace(result, others=(replace(result, text="again"),), prompt_logprobs=likely)

    cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Several())
    row = next(row for row in answers("out.jsonl") if row["id"] == "r0")
    assert row["prompt_logprobs"] == [None, {"token_id": 5, "logprob": -0.5, "top": [[5, -0.5]]}]
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "image_tokens": 0, "cached_tokens": 1}
    assert row["others"] == [{"text": "again", "finish_reason": "stop", "error": None, "usage": usage}]


def test_answers_by_a_schema_become_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command's schema and by a row's own; a name of no field is refused before the model is loaded."""
    shape = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "sides": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["colour", "sides"],
        "additionalProperties": False,
    }
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    pictures = [str(path) for path in sample_images()[:2]]
    lines = [{"image": path, "params": {"json_schema": shape}} for path in pictures]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    schema = ["--json-schema", str(tmp_path / "shape.json")]
    options = ["--max-tokens", "40", "--quiet"]
    with VLMBatcher(default_checkpoint()) as batcher:
        for name, sources, form in (("a", pictures, schema), ("b", [str(tmp_path / "rows.jsonl")], [])):
            command = ["run", *sources, *options, *form]
            table, whole = str(tmp_path / f"{name}.parquet"), str(tmp_path / f"{name}.jsonl")
            for out in (["--out", table, "--columns", "colour,sides"], ["--out", whole]):
                assert cli.main([*command, *out], open_batcher=lambda args: nullcontext(batcher)) == 0
            parsed = {row["id"]: row["parsed"] for row in answers(whole)}
            assert {row["id"]: {"colour": row["colour"], "sides": row["sides"]} for row in answers(table)} == parsed
            assert all(set(one) == {"colour", "sides"} for one in parsed.values())
            assert cli.main([*command, "--columns", "corners"], open_batcher=Echo()) == 2
            assert "'corners' is neither a column of" in capsys.readouterr().err
    (tmp_path / "shape.json").write_text(json.dumps({**shape, "required": []}))
    again = ["run", *pictures, *options, *schema, "--out", str(tmp_path / "a.jsonl"), "--resume"]
    assert cli.main(again, open_batcher=Echo()) == 2
    assert "json_schema was" in capsys.readouterr().err
    (tmp_path / "shape.json").write_text("{broken")
    assert cli.main(again, open_batcher=Echo()) == 2
    assert "json_schema is no JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stop_after", "options", "said"),
    [
        (5, ["--out", "out.jsonl"], ["the same command with --resume goes on from here"]),
        (
            None,
            ["--out", "out.csv"],
            ["2 rows failed; --retry-errors asks them again", "18 answers of the longest length"],
        ),
        (None, [], ["18 answers of the longest length"]),
    ],
)
def test_the_totals_say_what_may_be_done(
    folder: Path, stop_after: int | None, options: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    class Long(Echo):
        def answer(self, request: Request) -> Result:
            result = super().answer(request)
            return result if result.error else replace(result, finish_reason="length")

    cli.main([*RUN, *options], open_batcher=Long(stop_after))
    out = capsys.readouterr().out
    assert all(one in out for one in said)
    assert ("--resume" in out or "--retry-errors" in out) == bool(options)


def test_text_files_of_another_job_are_not_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(name)
    Path("a.txt").write_text("mine")
    command = ["run", "a.png", "b.png", "--sidecar", ".txt", "--out", "out.jsonl", "--quiet"]
    for options in ([], ["--resume"]):
        assert cli.main([*command, *options], open_batcher=Echo()) == 2
    assert Path("a.txt").read_text() == "mine"
    Path("a.txt").unlink()
    assert cli.main(command, open_batcher=Echo(stop_after=1)) == 130
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == 0
    assert Path("a.txt").exists() and Path("b.txt").exists() and len(told("out.jsonl")) == 2


def test_sidecars(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.png", "sub/b.jpg", "sub/bad.png"):
        (folder / "pics" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(folder / "pics" / name)
    run = ["run", "pics", "--sidecar", ".txt", "--prompt", "what?", "--quiet"]
    assert cli.main(run, open_batcher=Echo()) == 1
    assert (folder / "pics/a.txt").read_text() == "what?: pics/a.png\n"
    assert not (folder / "pics/sub/bad.txt").exists()
    assert cli.main(run, open_batcher=Echo()) == 2
    assert "2 pictures have .txt files already" in capsys.readouterr().err
    echo = Echo()
    (folder / "pics/a.txt").unlink()
    assert cli.main([*run, "--resume"], open_batcher=echo) == 1
    assert sorted(echo.asked) == ["pics/a.png", "pics/sub/bad.png"]
    assert cli.main([*run[:-2], "else?", "--resume"], open_batcher=Echo()) == 2
    assert "prompts was" in capsys.readouterr().err
    Image.new("RGB", (4, 4)).save(folder / "pics" / "a.jpg")
    assert cli.main([*run, "--overwrite"], open_batcher=Echo()) == 2
    assert "would hold the answers for" in capsys.readouterr().err
    (folder / "rows.jsonl").write_text('{"id": "a", "image": "https://x/y.png"}\n')
    assert cli.main(["run", "rows.jsonl", "--sidecar", "txt"], open_batcher=Echo()) == 2
    assert "--sidecar needs one picture on disk for each row" in capsys.readouterr().err


def test_pictures_that_change_before_they_are_read(tmp_path: Path) -> None:
    """Gone, cut off, a folder now, or another picture: their rows fail or say what is there, and the others are answered."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in ("a", "b", "c", "d", "e"):
        shutil.copy(sample_images()[0], folder / f"{name}.png")

    def change(args: object) -> AbstractContextManager[VLMBatcher]:
        (folder / "a.png").unlink()
        (folder / "b.png").write_bytes((folder / "b.png").read_bytes()[:200])
        (folder / "c.png").unlink()
        (folder / "c.png").mkdir()
        Image.new("RGB", (90, 40), "red").save(folder / "d.png")
        return VLMBatcher(default_checkpoint())

    out = tmp_path / "out.jsonl"
    command = ["run", str(folder), "--max-tokens", "4", "--quiet", "--out", str(out)]
    assert cli.main(command, open_batcher=change) == 1
    rows = {Path(row["id"]).stem: row for row in answers(out)}
    assert [name for name, row in sorted(rows.items()) if row["error"] is None] == ["d", "e"]
    assert rows["d"]["image_sizes"] == [[90, 40]]
    assert "does not exist" in rows["a"]["error"] and all("InvalidImage" in rows[name]["error"] for name in "abc")


@pytest.mark.parametrize("count", [2, 5])
def test_shards_joined_are_the_whole(folder: Path, count: int) -> None:
    cli.main([*RUN, "--out", "whole.jsonl"], open_batcher=Echo())
    parts = []
    for number in range(1, count + 1):
        run = [*RUN, "--out", "part-{shard}.jsonl", "--shard", f"{number}/{count}"]
        cli.main(run, open_batcher=Echo(stop_after=2))
        cli.main([*run, "--resume"], open_batcher=Echo())
        parts.append(Path(f"part-{number}-of-{count}.jsonl"))
    (folder / "joined.jsonl").write_bytes(b"".join(part.read_bytes() for part in parts))
    assert told("joined.jsonl") == told("whole.jsonl")
    assert cli.main([*RUN, "--out", str(parts[0]), "--resume", "--shard", f"2/{count}"], open_batcher=Echo()) == 2


@pytest.mark.skipif(shutil.which("mlx.launch", path=str(Path(sys.executable).parent)) is None, reason="no mlx.launch")
def test_shards_by_rank(folder: Path) -> None:
    """Under mlx.launch each process takes its part, and none is ended because another had failures."""
    cli.main([*RUN, "--out", "whole.jsonl"], open_batcher=Echo())
    command = [*RUN, "--out", "part-{shard}.jsonl", "--shard", "auto"]
    slow = KILLED.format(root=str(ROOT), command=command).replace("0.002", "0.2 * int(os.environ['MLX_RANK'])")
    (folder / "work.py").write_text(f"import os\n{slow}")
    launch = [
        str(Path(sys.executable).parent / "mlx.launch"),
        "-n",
        "2",
        "--starting-port",
        str(random.randrange(20000, 32000)),  # below those that the system gives to connections
    ]
    run = subprocess.run([*launch, sys.executable, "work.py"], env=here(), capture_output=True, text=True, timeout=120)
    outs = [Path(f"part-{number}-of-2.jsonl") for number in (1, 2)]
    assert all(out.exists() for out in outs), run.stderr
    parts = [told(str(out)) for out in outs]
    assert all(parts), run.stderr
    assert parts[0] | parts[1] == told("whole.jsonl") and not parts[0].keys() & parts[1].keys()
    assert cli.main([*RUN, "--out", "one.jsonl", "--shard", "auto"], open_batcher=Echo()) == 2


def test_a_terminated_job_makes_its_output(folder: Path) -> None:
    code = KILLED.format(root=str(ROOT), command=[*RUN, "--out", "out.parquet"]).replace("0.002", "0.2")
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=here(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    kept = Path("out.parquet.journal.jsonl")
    while not (kept.exists() and kept.stat().st_size) and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert 0 < len(told("out.parquet")) < 20
    assert cli.main([*RUN, "--out", "out.parquet", "--resume"], open_batcher=Echo()) == 1
    assert len(told("out.parquet")) == 20


def test_shards_are_the_same_on_every_machine() -> None:
    """The digest must never change: machines of one job may run other versions."""
    assert [Shard(number, 3).has("pictures/a.png") for number in (1, 2, 3)] == [False, True, False]
    many = [sum(Shard(number, 4).has(f"row {row}") for row in range(4000)) for number in (1, 2, 3, 4)]
    assert sum(many) == 4000 and min(many) > 900
    with pytest.raises(InvalidJob, match="of the form 2/4"):
        Shard.parse("2")


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_full_disk_leaves_a_job_that_goes_on(folder: Path, out: str) -> None:
    code = f"""
        import resource, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        from tests.test_job_runs import RUN, Echo
        from vlm_batch.cli import main as cli
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
        sys.exit(cli.main([*RUN, "--out", {out!r}], open_batcher=Echo()))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, env=here()
    )
    assert run.returncode == 1, run.stderr
    assert "File too large" in run.stderr and "--resume goes on from there" in run.stderr
    assert "Traceback" not in run.stderr
    echo = Echo()
    assert cli.main([*RUN, "--out", out, "--resume"], open_batcher=echo) == 1
    assert 0 < len(echo.asked) < 20
    assert len(told(out)) == 20


@pytest.mark.parametrize("out", OUTPUTS)
def test_killed_twice_and_resumed(folder: Path, out: str) -> None:
    """Every id once, with the answer of a run that nothing disturbed."""
    rows = [
        {"id": f"r{number}", "image": f"{'bad' if number % 100 == 7 else 'p'}{number}.png"} for number in range(600)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["run", "rows.jsonl", "--quiet", "--out", out]
    journal_file = Path(out if out.endswith(".jsonl") else f"{out}.journal.jsonl")
    for least in (100, 300):
        code = KILLED.format(root=str(ROOT), command=[*command, "--resume"])
        kill_when(code, lambda least=least: journal_file.exists() and journal_file.read_bytes().count(b"\n") >= least)
    seen = journal_file.read_bytes().count(b"\n")
    assert 300 <= seen < 600
    last = Echo()
    assert cli.main([*command, "--resume"], open_batcher=last) == 1
    assert seen - 1 <= 600 - len(last.asked) <= seen
    whole = "whole" + Path(out).suffix
    assert cli.main([*command[:-1], whole], open_batcher=Echo()) == 1
    assert told(out) == told(whole)
    assert not Path(f"{out}.journal.jsonl").exists()


@pytest.mark.parametrize("out", ["out.csv", "out.parquet"])
def test_killed_between_the_file_and_the_end_of_its_journal(folder: Path, out: str) -> None:
    """Both have the answers then, and the file must have each once."""
    cli.main([*RUN, "--out", out], open_batcher=Echo(stop_after=9))
    before = told(out)
    with open(f"{out}.journal.jsonl", "w") as file:
        for row in answers(out):
            file.write(json.dumps(row) + "\n")
    echo = Echo()
    assert cli.main([*RUN, "--out", out, "--resume"], open_batcher=echo) == 1
    assert len(echo.asked) == 11 and len(told(out)) == 20
    assert before.items() <= told(out).items()


@pytest.mark.parametrize("out", ["out.jsonl", "out.parquet"])
def test_killed_with_a_model_and_resumed(tmp_path: Path, out: str) -> None:
    """The same through the real engine; JOB_ROWS=2000 is the long form. One picture in a hundred is damaged."""
    count = int(os.environ.get("JOB_ROWS", "60"))
    chosen = random.Random(5)
    pictures = sorted((ROOT / "fixtures/images").glob("*_*.png"))[:8]
    (tmp_path / "damaged.png").write_bytes(pictures[0].read_bytes()[:60])
    lines = [
        {
            "id": f"r{n}",
            "image": str(tmp_path / "damaged.png" if n % 100 == 7 else chosen.choice(pictures)),
            "params": {"max_tokens": 6},
        }
        for n in range(count)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = str(ROOT / "fixtures/checkpoints/qwen2_vl")
    code = "import sys\nfrom vlm_batch.cli import main as cli\nsys.exit(cli.main(sys.argv[1:]))"
    command = ["run", str(tmp_path / "rows.jsonl"), "--model", model, "--prompt", "describe the picture", "--quiet"]
    written = tmp_path / (out if out.endswith(".jsonl") else f"{out}.journal.jsonl")
    for share in (0.2, 0.6):
        enough = int(share * count)
        arguments = [*command, "--out", str(tmp_path / out), "--resume"]
        kill_when(
            code, lambda enough=enough: written.exists() and written.read_bytes().count(b"\n") >= enough, *arguments
        )
    for name, more in ((out, ["--resume"]), ("whole" + Path(out).suffix, [])):
        run = [sys.executable, "-c", code, *command, "--out", str(tmp_path / name), *more]
        assert subprocess.run(run, env=here(), timeout=900, capture_output=True).returncode == 1
    assert told(tmp_path / out) == told(tmp_path / ("whole" + Path(out).suffix))
    assert sum(error is not None for _, error in told(tmp_path / out).values()) == (count + 92) // 100


def kill_when(code: str, enough: Any, *arguments: str) -> None:
    """Run code in a process of its own, and kill it (SIGKILL) when there is enough."""
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=here(), stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 600
        while not enough():
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(process.stderr and process.stderr.read().decode())
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL


def here() -> dict[str, str]:
    """An environment in which a process finds this tree."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_pictures_of_one_size_are_asked_about_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a window: nothing waits for more than so many others. Files that are no pictures are asked about, too."""
    monkeypatch.setattr(order, "WINDOW", 10)
    monkeypatch.setattr(order, "LOOK_SECONDS", 60.0)
    (folder / "many").mkdir()
    for number in range(30):
        Image.new("RGB", ((8, 6), (6, 8), (7, 7))[number % 3]).save(folder / "many" / f"{number:02}.png")
    (folder / "many" / "05.png").write_bytes(b"no picture")

    class InTurn(Echo):
        def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
            return map(self.answer, requests)

    echo = InTurn()
    assert cli.main(["run", "many", "--out", "out.jsonl", "--quiet"], open_batcher=echo) == 0
    asked = [int(Path(name).stem) for name in echo.asked]
    assert sorted(asked) == list(range(30))
    assert asked[:10] == [5, 1, 4, 7, 2, 8, 0, 3, 6, 9]  # unknown, 6x8, 7x7, 8x6, each in its order
    assert all(set(asked[at : at + 10]) == set(range(at, at + 10)) for at in (0, 10, 20))
    monkeypatch.setattr(order, "LOOK_SECONDS", -1.0)  # a drive on which one look takes as long as a window may
    slow = InTurn()
    cli.main(["run", "many", "--out", "again.jsonl", "--quiet"], open_batcher=slow)
    assert [int(Path(name).stem) for name in slow.asked] == list(range(30))


def test_standard_input_is_answered_as_it_comes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of rows that can be read once only, one whose id has come before is skipped and counted."""
    import io

    monkeypatch.setattr(
        "sys.stdin", io.StringIO('{"id": "a", "image": "x.png"}\n' * 2 + '{"id": "b", "image": "y.png"}\n')
    )
    echo = Echo()
    assert cli.main(["run", "-", "--out", "out.jsonl"], open_batcher=echo) == 0
    assert sorted(echo.asked) == ["a", "b"]
    assert "1 row skipped whose id had come before" in capsys.readouterr().out


def test_a_dry_run_keeps_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    assert (
        cli.main([*RUN, "--out", "out.jsonl", "--dry-run", "--system", "Be brief."], open_batcher=echo) == 1
    )  # r3 is bad
    out = capsys.readouterr().out
    assert "user: what k0?" in out and "system: Be brief." in out
    assert "20 rows, about 0 s" in out and "memory: " in out
    assert len(echo.asked) == 8 and not Path("out.jsonl").exists()


def test_a_dry_run_shows_what_the_model_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rendered prompts, sizes, tokens of each, and what all would take in time and memory."""
    pictures = [str(path) for path in sample_images()[:2]]
    assert cli.main(["run", *pictures, "--prompt", "describe {stem}", "--max-tokens", "4", "--dry-run"]) == 0
    out = capsys.readouterr().out
    with VLMBatcher(default_checkpoint()) as batcher:
        for path in sample_images()[:2]:
            asked = Request(prompt=f"describe {path.stem}", images=path, params=SamplingParams(max_tokens=4))
            rendered = batcher.rendered(asked)
            assert rendered is not None and all(f"  | {line}\n" in out for line in rendered.rstrip("\n").split("\n"))
            result = batcher.submit_request(asked).result(timeout=60)
            ((wide, high),), usage = result.image_sizes, result.usage
            assert f"{wide}x{high}; processed to " in out
            assert f"{usage.prompt_tokens} prompt tokens, {usage.image_tokens} of them pictures; " in out
    assert re.search(r"2 rows, about \d+ s at [\d.]+ s a row \(measured on 2,", out)
    assert re.search(r"memory: [\d.]+ GB so far; .* [\d.]+ GB more", out)


def test_where_the_time_went_and_how_busy_the_engine_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of real answers: each row's stages are its whole life, and reading and processing are parts of the wait for a place."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(12):
        Image.new("RGB", (200, 160), (20 * number, 0, 0)).save(folder / f"{number}.png")
    page = tmp_path / "page.html"
    options = ["--max-tokens", "4", "--report", str(page), "--quiet", "--out", str(tmp_path / "out.jsonl")]
    assert cli.main(["run", str(folder), "--model", str(default_checkpoint()), *options]) == 0
    out = capsys.readouterr().out
    for stage in ("reading", "processing", "waiting", "encoding", "prefill", "decode", "source"):
        assert re.search(rf"^ *{stage} +[\d.]+ ", out, re.M), stage
        assert f"<td>{stage}</td>" in page.read_text()
    assert re.search(r"the engine had work for \d+% of the time", out)
    for row in answers(tmp_path / "out.jsonl"):
        timings = row["timings"]
        assert timings["read"] > 0 and timings["process"] > 0
        assert timings["read"] + timings["process"] <= timings["queue"] + 1e-3
        assert sum(stages_of(Timings(**timings)).values()) == pytest.approx(timings["total"], abs=1e-3)


def test_the_report_is_one_page_that_shows_markup_as_text(folder: Path) -> None:
    Image.new("RGB", (40, 30), "red").save("p<b>.png")
    (folder / "rows.jsonl").write_text(
        '{"id": "one", "image": "p<b>.png", "prompt": "<script>alert(1)</script>"}\n{"id": "two", "image": "bad.png"}\n'
    )
    assert cli.main(["run", "rows.jsonl", "--report", "r.html", "--quiet"], open_batcher=Echo()) == 1
    page = Path("r.html").read_text()
    assert "data:image/jpeg;base64," in page and "<svg" in page
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "InvalidImage: bad.png is bad" in page
    assert "http://" not in page and "https://" not in page and "<link" not in page


def test_a_run_without_rows_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No totals of nothing, and an earlier run's report stays."""
    command = [*RUN, "--out", "out.jsonl", "--report", "r.html"]
    cli.main(command, open_batcher=Echo())
    before = Path("r.html").read_bytes()
    capsys.readouterr()
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == 1
    out, err = capsys.readouterr()
    assert "nothing is left to ask: 18 rows answered before" in out and "0 requests" not in out
    assert "r.html is not written" in err and Path("r.html").read_bytes() == before


@pytest.mark.skipif(not BROWSER, reason="no Chromium: apt-get install chromium")
def test_the_report_in_a_browser(folder: Path) -> None:
    """Laid out without a network: plots and pictures have sizes."""
    Image.new("RGB", (40, 30), "red").save("p0.png")
    cli.main([*RUN, "--report", "r.html"], open_batcher=Echo())
    page = Path("r.html").read_text()
    measure = "<script>document.title = [...document.querySelectorAll('rect, .sample img')].map(e => "
    measure += "Math.round(e.getBoundingClientRect().height)).join(',')</script></body>"
    Path("r.html").write_text(page.replace("</body>", measure))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=2000",
        f"--user-data-dir={folder}/browser",
    ]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom"]
    run = subprocess.run([str(BROWSER), *options, str(folder / "r.html")], capture_output=True, text=True, timeout=120)
    heights = re.findall(r"<title>([\d,]+)</title>", run.stdout)[0].split(",")
    assert len(heights) > 2 and max(map(int, heights[:-1])) > 50 and heights[-1] == "30"


def test_progress_in_plain_lines_and_figures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vlm_batch.cli.watching.PLAIN_SECONDS", 0.0)
    cli.main(RUN, open_batcher=Echo())
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("[")]
    assert len(lines) == 20
    assert lines[-1].startswith("[20 of 20] 2 failed, 0 s left, 0 in flight") and "25% of prompts cached" in lines[-1]
    assert "seconds a row" in out and "where a row's time goes" in out
    assert "InvalidImage" in out


def test_memory_does_not_grow_with_the_rows(folder: Path) -> None:
    """Nothing of a row is kept but its id's digest."""
    code = """
        import json, resource
        from tests.test_job_runs import Echo
        from vlm_batch.jobs import Questions, open_sink, open_sources, run

        class Forgets(Echo):
            def answer(self, request):
                self.asked.clear()
                return super().answer(request)

        for count in (1_000, 12_000):
            with open("many.jsonl", "w") as file:
                for number in range(count):
                    file.write(json.dumps({"id": f"row {number}", "image": "a.png", "text": "x" * 5000}) + "\\n")
            sources, _ = open_sources(["many.jsonl"])
            echo = Forgets()
            run(sources, open_sink(f"{count}.jsonl"), lambda: echo(None), questions=Questions(("?",)), carried=("text",))
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=here(), capture_output=True, text=True, timeout=300
    )
    assert not run.stderr
    small, large = map(int, run.stdout.split())
    assert large - small < 8_000_000  # the rows are 55 MB
    assert Path("12000.jsonl").read_bytes().count(b"\n") == 12_000


def test_rows_with_prompts_of_their_own_are_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.jsonl").write_text('{"id": "a", "image": "x.png", "prompt": "mine"}\n{"id": "b", "image": "y.png"}')
    assert cli.main(["run", "rows.jsonl", "--prompt", "theirs", "--out", "out.jsonl"], open_batcher=Echo()) == 0
    assert {row["id"]: row["prompt"] for row in answers("out.jsonl")} == {"a": "mine", "b": "theirs"}
    assert "1 row with a prompt or messages of its own: asked that, not --prompt" in capsys.readouterr().err


def test_params_of_rows_reach_their_requests(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(
        '{"id": "a", "image": "x.png", "params": {"max_tokens": 5}}\n{"id": "b", "image": "y.png"}'
    )
    seen: dict[str, SamplingParams] = {}

    class Keeps(Echo):
        def answer(self, request: Request) -> Result:
            seen[request.request_id or ""] = request.params
            return super().answer(request)

    cli.main(["run", "rows.jsonl", "--max-tokens", "9", "--quiet"], open_batcher=Keeps())
    assert {name: params.max_tokens for name, params in seen.items()} == {"a": 5, "b": 9}


@pytest.mark.parametrize(("options", "thinks"), [([], None), (["--thinking"], True), (["--no-thinking"], False)])
def test_models_are_told_to_think(
    folder: Path, options: list[str], thinks: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[bool | None, int | None]] = []

    class Keeps(Echo):
        def answer(self, request: Request) -> Result:
            assert request.template is not None
            seen.append((request.template.enable_thinking, request.params.thinking_budget))
            return super().answer(request)

    cli.main([*RUN, "--out", "out.jsonl", *options, "--thinking-budget", "50"], open_batcher=Keeps())
    assert set(seen) == {(thinks, 50)}
    other = "--no-thinking" if thinks else "--thinking"
    assert (
        cli.main([*RUN, "--out", "out.jsonl", "--thinking-budget", "50", other, "--resume"], open_batcher=Echo()) == 2
    )
    assert "thinking was" in capsys.readouterr().err


def test_a_header_of_another_form_is_refused(tmp_path: Path) -> None:
    journal.write_header(tmp_path / "out.jsonl", {"model": "m"})
    assert journal.read_header(tmp_path / "out.jsonl") == {"model": "m"}
    path = journal.header_path(tmp_path / "out.jsonl")
    path.write_text(path.read_text().replace('"form": 1', '"form": 2'))
    with pytest.raises(InvalidJob, match="another version"):
        journal.read_header(tmp_path / "out.jsonl")


def test_a_long_reason_is_marked_where_it_is_cut() -> None:
    figures = Summary()
    item = Item(id="a.png", row=Row(id="a.png"))
    figures.add(item, Result(request_id="a.png", finish_reason="error", error="a.png: " + "long " * 60))
    ((reason, count),) = figures.reasons.most_common()
    assert (len(reason), count, reason[:5], reason[-3:]) == (MAX_REASON, 1, "a.png", "...")


def test_failures_are_counted_by_kind_and_shown_whole(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the ids are: the id of a row is no part of another word."""

    class Fails(Echo):
        def answer(self, request: Request) -> Result:
            name = str(request.images[0])
            said = "does not exist" if "missing" in name else f"has {len(self.asked)} x 9 pixels"
            self.asked.append(name)
            return Result(
                request_id=request.request_id or "", finish_reason="error", error=f"InvalidImage: {name} {said}"
            )

    monkeypatch.setattr("vlm_batch.cli.watching.FIGURES_FROM", 1)
    names = [f"missing{number}000{number}.png" for number in range(3)] + ["my photos/a large one.png", "is.png"]
    rows = [{"id": one, "image": name} for one, name in zip("0is1n", names, strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{1\n{2 3\n")
    assert cli.main(["run", "rows.jsonl", "--report", "r.html", "--quiet"], open_batcher=Fails()) == 1
    out, err = capsys.readouterr()
    assert "2 rows cannot be asked, the first: rows.jsonl:6: the line is not JSON" in err
    table = out[out.index("failures, by the first of each kind") :]
    assert re.findall(r"^\s*(\d+)\s+(.+?)\s*$", table, re.MULTILINE)[:2] == [
        ("3", "InvalidImage: missing10001.png does not exist"),
        ("2", "InvalidImage: my photos/a large one.png has 2 x 9 pixels"),
    ]
    assert "InvalidImage: missing10001.png does not exist" in Path("r.html").read_text()


@pytest.mark.parametrize(
    ("line", "options", "said"),
    [
        ({"img": "a.png"}, [], "the line has 'img', which no request has ('image' is probably meant)"),
        (
            {"image": "a.png", "promt": "?"},
            [],
            "the line has 'promt', which no request has ('prompt' is probably meant)",
        ),
        (
            {"image": "a.png", "xyzzy": 1},
            [],
            "the line has 'xyzzy', which no request has; where it is a column, name it",
        ),
        ({"image": "a.png", "xyzzy": 1}, ["--columns", "xyzzy"], None),
        ({"image": "a.png", "xyzzy": 1}, ["--prompt", "what {xyzzy}?"], None),
        ({"img": "a.png"}, ["--image-column", "img"], None),
        ({"custom_id": "a", "file_name": "a.png", "prompt": "?", "params": {"seed": 1}}, [], None),
    ],
    ids=str,
)
def test_keys_that_no_request_has_are_refused(
    folder: Path,
    line: dict[str, Any],
    options: list[str],
    said: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the job begins where every line has them, else as that row's error; a stream's rows are known as they come."""
    whole = {"id": "whole", "image": "b.png"} | {name: "?" for name in ("img",) if "--image-column" in options}
    echo, text = Echo(), json.dumps(line) + "\n"
    (folder / "rows.jsonl").write_text(text)
    command = ["run", "rows.jsonl", "--quiet", "--out", "out.jsonl", *options]
    assert cli.main(command, open_batcher=echo) == (0 if said is None else 2)
    assert (said or "") in capsys.readouterr().err and echo.opened == (said is None)
    if said is not None:
        (folder / "rows.jsonl").write_text(json.dumps(whole) + "\n" + text)
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(whole) + "\n" + text))
        for source in ("rows.jsonl", "-"):
            out = f"{len(source)}.jsonl"
            assert cli.main(["run", source, "--quiet", "--out", out], open_batcher=Echo()) == 1
            whole_row, row = sorted(answers(out), key=lambda row: row["error"] is not None)
            assert (whole_row["id"], row["images"]) == ("whole", line.get("image", []) and ["a.png"])
            assert said in row["error"]


@pytest.mark.parametrize(
    ("header", "options", "said"),
    [
        ("img,kind", [], "t.csv has no column of images, but 'img': --image-column img takes it for that"),
        ("Photo,kind", [], "--image-column Photo takes it for that"),
        ("image_pth,kind", ["--prompt", "what {kind}?"], "--image-column image_pth takes it"),
        ("image,promt", [], "t.csv has no column of prompts, but 'promt': --prompt-column promt takes it"),
        ("image,promt", ["--prompt", "what?"], None),
        ("img,kind", ["--image-column", "img"], None),
        ("img,kind", ["--columns", "img"], None),
        ("file_name,image_id", [], None),
        ("review,kind", ["--prompt", "what is {review}?"], None),
    ],
)
@pytest.mark.parametrize("table", ["t.csv", "t.parquet"])
def test_columns_that_are_probably_misspelt_are_refused(
    folder: Path, table: str, header: str, options: list[str], said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing else holds the pictures or the prompts; the columns of a table are its own otherwise."""
    (folder / "t.csv").write_text(f"{header}\na.png,b\n")
    pq.write_table(pa.table(dict(zip(header.split(","), [["a.png"], ["b"]], strict=True))), "t.parquet")
    echo = Echo()
    assert cli.main(["run", table, "--quiet", *options], open_batcher=echo) == (0 if said is None else 2)
    assert (said or "").replace("t.csv", table) in capsys.readouterr().err and echo.opened == (said is None)


def test_an_answer_that_is_cut_before_it_has_its_form_is_an_error(tmp_path: Path) -> None:
    """In every output, with the text that there is; its row is asked again when told."""
    shape = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    picture, said = (
        str(sample_images()[0]),
        "CutAnswer: the answer was ended by its longest length (max_tokens is 2) before",
    )
    forms = {"json": ["--json-schema", str(tmp_path / "shape.json")], "choice": ["--choice", "a very long blue choice"]}
    with VLMBatcher(default_checkpoint()) as batcher:
        for name, form in forms.items():
            command = ["run", picture, "--quiet", "--max-tokens", "2", *form]
            for out in (str(tmp_path / f"{name}{suffix}") for suffix in (".csv", ".jsonl")):
                columns = ["--columns", "colour"] if out.endswith("json.csv") else []
                assert cli.main([*command, "--out", out, *columns], open_batcher=lambda args: nullcontext(batcher)) == 1
                (row,) = answers(out)
                assert row["error"].startswith(said)
            assert row["text"] and row["finish_reason"] == "length"
        table = map_table(batcher, pa.table({"image": [picture]}), "?", params={"json_schema": shape, "max_tokens": 2})
        assert table.column("answer_error").to_pylist()[0].startswith(said)
        table = map_table(batcher, pa.table({"image": [picture]}), "?", params={"json_schema": {"enum": [None]}})
        assert table.column("answer").to_pylist() == ["null"]


@pytest.mark.parametrize("out", ["x.xlsx", "x.json", "x.jsonl.gz", "x.txt"])
def test_an_output_of_an_unknown_form_is_refused(folder: Path, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    assert cli.main([*RUN, "--out", out], open_batcher=echo) == 2
    suffix = Path(out).suffix
    assert (
        f"{suffix} is no form of output that is known here; .jsonl, .ndjson, .csv, .tsv, .parquet, .pq are"
        in capsys.readouterr().err
    )
    assert not echo.opened and not Path(out).exists()
    assert cli.main([*RUN, "--json", out], open_batcher=Echo()) == 1 and Path(out).read_bytes().count(b"\n") == 20
