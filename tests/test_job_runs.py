"""Jobs from their first check to their last answer: resumed, killed, sharded, on full disks, by two processes."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
import pty
import random
import re
import select
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
from openai.types.chat import ChatCompletion
from PIL import Image

from tests import chromium
from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint, sample_images
from vlm_batch.cli import main as cli
from vlm_batch.cli.watching import JobView
from vlm_batch.handle import Handle
from vlm_batch.jobs import journal, map_table, order, report
from vlm_batch.jobs.formats import DelimitedFile
from vlm_batch.jobs.questions import Item, Questions
from vlm_batch.jobs.rows import InvalidJob, JobRow, Shard
from vlm_batch.jobs.summary import MAX_REASON, Summary, stages_of
from vlm_batch.many import as_completed
from vlm_batch.types import (
    Event,
    Request,
    Result,
    SamplingParams,
    Timings,
    TokenLogprobs,
    Usage,
)

ROOT = Path(__file__).parent.parent
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)


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
        handle.push(
            Event("some", result=self.answer(replace(request, request_id="some")))
        )
        return handle

    def answer(self, request: Request) -> Result:
        assert request.request_id is not None
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(request.request_id)
        names = [
            image if isinstance(image, str) else "picture" for image in request.images
        ]
        if any("bad" in name for name in names):
            return Result(
                request_id=request.request_id,
                finish_reason="error",
                error=f"InvalidImage: {names[0]} is bad",
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
        {
            "id": f"r{number}",
            "image": f"{'bad' if number in (3, 11) else 'p'}{number}.png",
            "kind": f"k{number % 2}",
        }
        for number in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return tmp_path


RUN = ["run", "rows.jsonl", "--prompt", "what {kind}?", "--quiet"]
OUTPUTS = ["out.jsonl", "out.csv", "out.parquet"]


def answers(out: str | Path) -> list[dict[str, Any]]:
    path = Path(out)
    if path.suffix == ".parquet":
        return list(pq.read_table(path).to_pylist())
    if path.suffix == ".csv":
        with open(path, newline="") as file:
            return [
                {name: value or None for name, value in row.items()}
                for row in csv.DictReader(file)
            ]
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
    assert (
        cli.main([*RUN, "--out", "whole" + Path(out).suffix], open_batcher=Echo()) == 1
    )
    first, second = Echo(stop_after=7), Echo()
    assert cli.main([*RUN, "--out", out], open_batcher=first) == 130
    assert len(answers(out)) == 7
    assert cli.main([*RUN, "--out", out, "--resume"], open_batcher=second) == 1
    assert not set(first.asked) & set(second.asked)
    assert len(first.asked) + len(second.asked) == 20
    assert told(out) == told("whole" + Path(out).suffix)
    third = Echo()
    assert (
        cli.main(
            [*RUN, "--out", out, "--resume", "--max-errors", "2"], open_batcher=third
        )
        == 0
    )
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
    assert (
        cli.main([*RUN, "--out", out, "--resume", "--overwrite"], open_batcher=refused)
        == 2
    )
    again = Echo()
    assert cli.main([*RUN, "--out", out, "--overwrite"], open_batcher=again) == 1
    assert len(again.asked) == 20 == len(told(out))


def test_rows_in_another_spelling(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert (
        cli.main(
            ["run", str(folder / "pics"), *command, "--force"], open_batcher=Echo()
        )
        == 0
    )
    assert said in capsys.readouterr().err and len(told("out.jsonl")) == 4


@pytest.mark.parametrize(
    "output",
    [["--out", out] for out in OUTPUTS] + [["--sidecar", ".txt"]],
    ids=" ".join,
)
def test_pictures_that_have_changed_are_noticed(
    folder: Path, output: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever their times say; what is touched, copied, gone or new since is not changed."""
    (folder / "pics").mkdir()
    for name in "abcd":
        Image.new("RGB", (4, 4)).save(folder / "pics" / f"{name}.png")
    command = ["run", "pics", "--quiet", *output]
    assert cli.main(command, open_batcher=Echo()) == 0
    (folder / "pics/d.png").unlink()
    Image.new("RGB", (4, 4)).save(folder / "pics/e.png")
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == 0
    shutil.copytree("pics", "copied")
    shutil.rmtree("pics")
    shutil.copytree("copied", "pics", copy_function=shutil.copyfile)
    os.utime(folder / "pics/a.png", (1, 1))
    unchanged = Echo()
    assert (
        cli.main([*command, "--resume"], open_batcher=unchanged) == 0
        and not unchanged.opened
    )
    data = bytearray((folder / "pics/b.png").read_bytes())
    data[-20] ^= 1  # of one size, and one bit other
    (folder / "pics/b.png").write_bytes(data)
    os.utime(folder / "pics/b.png", (1, 1))
    Image.new("RGB", (90, 50)).save(folder / "pics/e.png")
    capsys.readouterr()
    refused = Echo()
    assert (
        cli.main([*command, "--resume"], open_batcher=refused) == 2
        and not refused.opened
    )
    assert (
        "files of 2 answered rows have changed since: pics/b.png, pics/e.png."
        in capsys.readouterr().err
    )
    assert (
        cli.main([*command, "--resume", "--force"], open_batcher=refused) == 0
        and not refused.opened
    )
    again = Echo()
    assert (
        cli.main([*command, "--overwrite"], open_batcher=again) == 0
        and len(again.asked) == 4
    )
    assert (
        cli.main([*command, "--resume"], open_batcher=refused) == 0
        and not refused.opened
    )


def test_weights_that_have_changed_are_noticed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model").mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (folder / "model" / name).write_text("{}")
    command = [*RUN, "--model", "model", "--out", "out.jsonl", "--resume"]
    assert cli.main(command, open_batcher=Echo(stop_after=5)) == 130
    (folder / "model" / "README.md").write_text("other")
    assert cli.main(command, open_batcher=Echo(stop_after=5)) == 130
    os.utime(folder / "model" / "config.json", (1, 1))
    assert cli.main(command, open_batcher=Echo(stop_after=2)) == 130
    shutil.copytree("model", "elsewhere", copy_function=shutil.copyfile)
    assert (
        cli.main([*command, "--model", "elsewhere"], open_batcher=Echo(stop_after=2))
        == 130
    )
    assert journal.read_header(folder / "out.jsonl")["model"] == str(  # type: ignore[index]
        (folder / "elsewhere").resolve()
    )
    (folder / "elsewhere" / "added.json").write_text("{}")
    for model in ("elsewhere", "model"):
        Path(model, "added.json").write_text("{}")
        assert cli.main([*command, "--model", model], open_batcher=Echo()) == 2
        assert (
            "the model's files have changed: added.json (new). Give the same ones"
            in capsys.readouterr().err
        )
        Path(model, "added.json").unlink()
        (folder / "elsewhere" / "added.json").unlink(missing_ok=True)
    assert cli.main(command, open_batcher=Echo(stop_after=2)) == 130
    (folder / "elsewhere" / "config.json").write_text("[]")
    assert cli.main([*command, "--model", "elsewhere"], open_batcher=Echo()) == 2
    assert "model was" in capsys.readouterr().err
    (folder / "model" / "model.safetensors").write_text("[]")
    refused = Echo()
    assert cli.main(command, open_batcher=refused) == 2 and not refused.opened
    assert (
        "the model's files have changed: model.safetensors. Give the same ones"
        in capsys.readouterr().err
    )
    assert cli.main([*command, "--force"], open_batcher=Echo()) == 1
    # the header is that of the last run
    assert cli.main(command, open_batcher=Echo()) == 1


def test_a_bit_of_large_weights_is_seen_where_blocks_are_read(tmp_path: Path) -> None:
    """Of a large file so many blocks are read, its beginning and its end among them; of others all."""
    path, size = tmp_path / "model.safetensors", 3 * journal.BLOCK + 17
    found = {journal.fingerprint(path)}
    for place in (None, 0, size // 2, size - 1):
        data = bytearray(size)
        if place is not None:
            data[place] = 1
        path.write_bytes(data)
        found |= {journal.fingerprint(path), "small" + journal.fingerprint(path, 2)}
    assert len(found) == 1 + 4 + 3  # with two blocks the middle is not


@pytest.mark.parametrize("out", OUTPUTS)
def test_errors_are_asked_again_when_told(folder: Path, out: str) -> None:
    cli.main([*RUN, "--out", out], open_batcher=Echo())
    assert sum(error is not None for _, error in told(out).values()) == 2
    again = Echo()
    again.answer = lambda request: Result(  # type: ignore[method-assign]
        request_id=request.request_id or "", text="now"
    )
    assert (
        cli.main([*RUN, "--out", out, "--resume", "--retry-errors"], open_batcher=again)
        == 0
    )
    assert {row for row, (text, _) in told(out).items() if text == "now"} == {
        "r3",
        "r11",
    }
    assert len(told(out)) == 20


def test_other_settings_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Echo(stop_after=5))
    other = [
        "run",
        "rows.jsonl",
        "--prompt",
        "where {kind}?",
        "--max-tokens",
        "9",
        "--out",
        "out.jsonl",
        "--resume",
    ]
    refused = Echo()
    assert cli.main(other, open_batcher=refused) == 2
    said = capsys.readouterr().err
    assert "max_tokens was 256 and is 9" in said
    assert 'prompts was ["what {kind}?"] and is ["where {kind}?"]' in said
    assert not refused.opened
    assert cli.main([*other, "--force"], open_batcher=Echo()) == 1
    assert len(told("out.jsonl")) == 20
    (folder / "out.jsonl.job.json").unlink()
    assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Echo()) == 2
    assert (
        "out.jsonl is not empty, and nothing beside it says that a job wrote it"
        in capsys.readouterr().err
    )
    assert cli.main([*RUN, "--out", "out.jsonl", "--resume"], open_batcher=Echo()) == 2
    assert "no header beside it" in capsys.readouterr().err
    (folder / "out.jsonl.job.json").write_text("{")
    assert cli.main([*RUN, "--out", "out.jsonl", "--resume"], open_batcher=Echo()) == 2


def test_settings_are_compared_with_those_of_the_header(tmp_path: Path) -> None:
    """Those that another version lacks are others; long values are shown from where they differ."""
    schema = {
        "type": "object",
        "properties": {
            "kind": {"type": "string", "default": "x", "description": "d" * 90}
        },
    }
    output = tmp_path / "out.jsonl"
    now = Questions(params=SamplingParams(json_schema=schema)).settings()
    journal.write_header(output, now)
    journal.check_same(output, now)
    with pytest.raises(InvalidJob, match="thinking_budget was null and is 9"):
        journal.check_same(output, {**now, "thinking_budget": 9})
    other = json.loads(json.dumps(now["json_schema"]).replace('"d', '"other d'))
    # as far as it takes to see where they differ
    with pytest.raises(InvalidJob, match='"other d'):
        journal.check_same(output, {**now, "json_schema": other})
    lacks = {name: value for name, value in now.items() if name != "bad_words"}
    journal.write_header(output, lacks)
    with pytest.raises(InvalidJob, match=r"bad_words was null and is \[\]"):
        journal.check_same(output, now)


def test_a_table_whose_rows_have_moved_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.parametrize("first", [{"id": "a"}, {"custom_id": "a"}, {}], ids=str)
def test_a_file_of_lines_may_grow_where_each_has_an_id(
    folder: Path, first: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps({**first, "image": "a.png"})
    (folder / "t.jsonl").write_text(f"{line}\n")
    run = ["run", "t.jsonl", "--out", "out.jsonl", "--quiet"]
    cli.main(run, open_batcher=Echo())
    new = json.dumps({"id": "new", "image": "new.png"})
    (folder / "t.jsonl").write_text(f"{new}\nno JSON\n{line}\n")
    echo = Echo()
    status = cli.main([*run, "--resume"], open_batcher=echo)
    if first:
        assert (status, echo.asked) == (1, ["new"])  # 1, for the line that is none
    else:
        assert status == 2 and "tables was" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "batch.jsonl"])
@pytest.mark.parametrize("empty", ["", " ", None])
def test_rows_without_an_id_among_others_keep_their_answers(
    folder: Path, kind: str, empty: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their places stand for ids, so a table whose rows have moved is not gone on with."""
    table = f"t.{kind}"

    def write(*names: str) -> None:
        ids = [name if name == "a" else empty for name in names]
        rows = [
            {"id": one, "image": f"{name}.png"}
            for one, name in zip(ids, names, strict=True)
        ]
        if kind == "parquet":
            pq.write_table(
                pa.Table.from_pylist(
                    rows,
                    schema=pa.schema([("id", pa.string()), ("image", pa.string())]),
                ),
                table,
            )
        elif kind == "csv":
            Path(table).write_text(
                "id,image\n"
                + "".join(f"{row['id'] or ''},{row['image']}\n" for row in rows)
            )
        else:
            said = (
                [{"custom_id": row["id"], "body": {"messages": chat}} for row in rows]
                if "batch" in kind
                else rows
            )
            Path(table).write_text("".join(json.dumps(row) + "\n" for row in said))

    chat = [{"role": "user", "content": "x"}]
    run = ["run", table, "--out", "out.jsonl", "--quiet"]
    write("a", "b", "c")
    cli.main(run, open_batcher=Echo())
    assert len({row["id"] for row in answers("out.jsonl")}) == 3
    assert cli.main([*run, "--resume"], open_batcher=Echo()) in (0, 1)
    write("a", "new", "b", "c")
    assert cli.main([*run, "--resume"], open_batcher=Echo()) == 2
    assert "tables was" in capsys.readouterr().err


def test_lines_without_ids_of_another_stream_are_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lines, asked in (("a b", 2), ("a c", 1), ("a c", 0)):
        text = "".join(
            json.dumps({"image": f"{name}.png"}) + "\n" for name in lines.split()
        )
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        echo = Echo()
        cli.main(
            ["run", "-", "--out", "out.jsonl", "--quiet", "--resume"], open_batcher=echo
        )
        assert len(echo.asked) == asked


@pytest.mark.parametrize(
    "torn", [b'{"id": "r1", "te', b"\0" * 700, b'{"id": "x"', "né".encode()[:2]]
)
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


def test_a_file_that_is_no_output_is_not_gone_on_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out.jsonl").write_text('{"name": 1}\n{"name": 2}\n')
    assert (
        cli.main(
            [*RUN, "--out", "out.jsonl", "--resume", "--force"], open_batcher=Echo()
        )
        == 2
    )
    assert (
        "out.jsonl is no output of a job: line 1 has no id; name the file"
        in capsys.readouterr().err
    )
    assert cli.main(["report", "out.jsonl"]) == 2
    said = capsys.readouterr().err
    assert (
        "out.jsonl is no output of a job: line 1 has no id; name the file" in said
        and "--overwrite" not in said
    )
    (folder / "out.csv").write_text("name,kind\na,b\n")
    assert cli.main(["report", "out.csv"]) == 2
    assert (
        "out.csv is no output of a job: it has no column id" in capsys.readouterr().err
    )
    (folder / "out.jsonl").write_text('{"id": "a"}\nbroken\n{"id": "b"}\n')
    assert (
        cli.main(
            [*RUN, "--out", "out.jsonl", "--resume", "--force"], open_batcher=Echo()
        )
        == 2
    )
    assert "out.jsonl, line 2 is not JSON" in capsys.readouterr().err


@pytest.mark.skipif(
    not os.path.isdir("/proc/self"),
    reason="needs a folder in which not even root makes files: Linux's /proc",
)
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_folder_that_takes_no_files(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said for what it is: the lock's library takes it for another process."""
    echo = Echo()
    assert cli.main([*RUN, "--out", f"/proc/{name}"], open_batcher=echo) == 2
    assert f"cannot write /proc/{name}: " in capsys.readouterr().err
    assert not echo.opened


def test_two_processes_on_one_output(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import sys\nfrom pathlib import Path\nfrom vlm_batch.jobs import journal\n"
    code += "with journal.locked(Path('out.jsonl')):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=here(),
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == b"held\n"
        echo = Echo()
        assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=echo) == 2
        assert (
            "out.jsonl is being written by another process" in capsys.readouterr().err
        )
        assert not echo.opened
    finally:
        other.kill()
        other.communicate()
    # a killed process holds nothing
    assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Echo()) == 1


def test_a_process_that_comes_as_another_ends_keeps_the_output_to_itself(
    folder: Path,
) -> None:
    """It opened the lock's file while that was held, and has it once it is free: a third one must not."""
    with journal.locked(Path("out.jsonl")):
        second = os.open("out.jsonl.lock", os.O_RDWR)
    fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (
        pytest.raises(InvalidJob, match="being written by another process"),
        journal.locked(Path("out.jsonl")),
    ):
        pass
    os.close(second)


@pytest.mark.parametrize(
    ("lines", "options", "said"),
    [
        (
            ['{"id": "a", "image": "x.png"}'] * 2,
            [],
            "1 row has an id that another row has: 'a'",
        ),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--prompt", "{size}?"],
            "the prompt names {size}, which is no column of any row",
        ),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--columns", "size"],
            "'size' is neither a column of any row nor a field",
        ),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--columns", "finish_resaon"],
            "('finish_reason' is probably meant)",
        ),
        ([], [], "there are no rows in rows.jsonl"),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--out", "no/out.csv"],
            "cannot write no/out.csv: there is no folder no",
        ),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--out", "."],
            "cannot write .: it is a folder",
        ),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--shard", "3/2"],
            "shard 3/2 is not one of 1/2 to 2/2",
        ),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--sidecar", ".png"],
            "--sidecar .png is no suffix for text",
        ),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--out", "./rows.jsonl", "--overwrite"],
            "rows.jsonl is read by this job",
        ),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--report", "no/r.html"],
            "cannot write no/r.html: there is no folder no",
        ),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--report", "rows.jsonl"],
            "give it a name that ends in .html",
        ),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--prompt", "{size}?", "--shard", "1/9"],
            "names {size}, which is no column",
        ),
        (
            ['{"id": "a", "image": "x.png"}'],
            ["--resume"],
            "--resume needs a file to go on with",
        ),
        (['{"id": "a", "image": "x.png"}'], ["--regex", "(a"], "regex: "),
    ],
)
def test_what_is_wrong_with_a_job_is_said_before_it_begins(
    folder: Path,
    lines: list[str],
    options: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "rows.jsonl").write_text("\n".join(lines))
    echo = Echo()
    assert cli.main(["run", "rows.jsonl", *options], open_batcher=echo) == 2
    assert said in capsys.readouterr().err
    assert not echo.opened


def test_missing_columns_of_a_table_are_said_before_it_begins(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "t.csv").write_text("image,kind\na.png,x\n")
    echo = Echo()
    assert cli.main(["run", "t.csv", "--prompt", "{Kind}?"], open_batcher=echo) == 2
    assert (
        "{Kind}, which is no column of t.csv; columns: image, kind"
        in capsys.readouterr().err
    )
    assert not echo.opened


def test_rows_that_cannot_be_asked_are_errors_of_their_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rows.jsonl").write_text(
        '{"id": "a", "image": "x.png", "kind": 1}\nbroken\n{"id": "b", "image": "y.png"}\n'
    )
    assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Echo()) == 1
    rows = told("out.jsonl")
    assert rows["a"][1] is None
    assert "rows.jsonl:2: the line is not JSON" in rows["rows.jsonl:2"][1]
    assert "'kind' is not there" in rows["b"][1]
    assert (
        "1 row cannot be asked: rows.jsonl:2: the line is not JSON"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "columns", [("id", "image"), ("image",)], ids=["in a picture", "in an id"]
)
def test_a_table_that_is_damaged_in_the_middle(
    folder: Path, columns: tuple[str, ...]
) -> None:
    """What comes before the damage is answered, and so is the next source; the rest is one row's error."""
    table = pa.table(
        {
            "id": [f"t{n}" for n in range(400)],
            "image": [bytes([n % 251]) * 300 for n in range(400)],
        }
    )
    pq.write_table(
        table, "t.parquet", row_group_size=40, compression="none", use_dictionary=False
    )
    group = pq.ParquetFile("t.parquet").metadata.row_group(5)
    start = group.column(len(columns) - 1).data_page_offset
    data = bytearray(Path("t.parquet").read_bytes())
    data[start : start + 30] = b"\xff" * 30
    Path("t.parquet").write_bytes(data)
    run = [
        "run",
        "t.parquet",
        "rows.jsonl",
        "--prompt",
        "what?",
        "--quiet",
        "--out",
        "out.jsonl",
    ]
    assert cli.main(run, open_batcher=Through()) == 1
    answered = told("out.jsonl")
    assert {f"t{n}" for n in range(192)} | {
        f"r{n}" for n in range(20)
    } <= answered.keys()
    assert "cannot be read to its end" in str(answered["t.parquet:damaged"][1])
    again = Through()
    assert cli.main([*run, "--resume"], open_batcher=again) == 1 and not again.asked


class Through(Echo):
    """The same, with the batcher's own way of asking many requests."""

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        return (result for _, result in as_completed(self.ask, requests, lambda: 3))

    def ask(self, request: Request) -> Handle:
        handle = Handle(str(request.request_id), lambda request_id: False)
        handle.push(Event(str(request.request_id), result=self.answer(request)))
        return handle


def test_columns_of_answers_and_rows(folder: Path) -> None:
    for out in OUTPUTS:
        cli.main(
            [*RUN, "--out", out, "--columns", "kind,text,completion_tokens"],
            open_batcher=Echo(),
        )
        rows = answers(out)
        assert list(rows[0]) == ["id", "kind", "text", "completion_tokens", "error"]
        row = next(row for row in rows if row["id"] == "r5")
        assert (row["kind"], row["text"], str(row["completion_tokens"])) == (
            "k1",
            "what k1?: p5.png",
            "2",
        )


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
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    assert (
        cli.main(
            ["run", "rows.jsonl", "--out", "o.parquet", "--columns", ",".join(names)],
            open_batcher=Echo(),
        )
        == 0
    )
    table = pq.read_table("o.parquet")
    kinds = [
        "string",
        "string",
        "double",
        "string",
        "list<element: int64>",
        "bool",
        "string",
    ]
    assert [str(table.schema.field(name).type) for name in names] == kinds
    assert {row["id"]: row["large"] for row in table.to_pylist()} == {
        "0": str(2**70),
        "1": "1",
        "2": None,
    }
    assert {row["id"]: row["mixed"] for row in table.to_pylist()} == {
        "0": "a",
        "1": "1",
        "2": None,
    }


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
    row = {
        "image": os.fsdecode(b"bad\xe9.png"),
        os.fsdecode(b"no\xe9"): os.fsdecode(b"caf\xe9"),
        "half": "\ud83d",
    }
    lines = [{"id": os.fsdecode(b"r\xe9"), **row}, {"id": "r", **row}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    columns = f"image,half,{os.fsdecode(bytes([110, 111, 233]))},images"
    command = [
        "run",
        "rows.jsonl",
        "--quiet",
        "--out",
        out,
        "--columns",
        columns,
        "--report",
        "r.html",
    ]
    assert cli.main(command, open_batcher=Echo()) == 1
    read = {
        ".jsonl": (pd.read_json, pl.read_ndjson),
        ".csv": (pd.read_csv, pl.read_csv),
    }
    readers = read.get(Path(out).suffix, (pd.read_parquet, pl.read_parquet))
    with open(out, "rb") as file:
        tables = [
            readers[0](file, **({"lines": True} if out.endswith("jsonl") else {})),
            readers[1](out).to_pandas(),
        ]
    for table in tables:
        assert sorted(table["id"]) == ["r", r"r\xe9"]
        assert list(table["image"]) == [r"bad\xe9.png"] * 2
        assert list(table["error"]) == [r"InvalidImage: bad\xe9.png is bad"] * 2
        assert list(table["half"]) == [r"\ud83d"] * 2
        assert list(table[r"no\xe9"]) == [r"caf\xe9"] * 2
    assert r"bad\xe9.png" in Path("r.html").read_text()
    again = Echo()
    assert (
        cli.main([*command, "--resume"], open_batcher=again) == 1 and not again.opened
    )


def test_log_probabilities_of_a_row_are_written(folder: Path) -> None:
    class Likely(Echo):
        def answer(self, request: Request) -> Result:
            return replace(
                super().answer(request),
                logprobs=(TokenLogprobs(5, -0.5, ((5, -0.5), (6, -1.0))),),
            )

    cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Likely())
    assert answers("out.jsonl")[0]["logprobs"] == [
        {"token_id": 5, "logprob": -0.5, "top": [[5, -0.5], [6, -1.0]]}
    ]


def test_all_that_a_row_asked_for_is_written(folder: Path) -> None:
    """Further answers and the prompt's log-probabilities."""

    class Several(Echo):
        def answer(self, request: Request) -> Result:
            result = super().answer(request)
            likely = (None, TokenLogprobs(5, -0.5, ((5, -0.5),)))
            return replace(
                result, others=(replace(result, text="again"),), prompt_logprobs=likely
            )

    cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Several())
    row = next(row for row in answers("out.jsonl") if row["id"] == "r0")
    assert row["prompt_logprobs"] == [
        None,
        {"token_id": 5, "logprob": -0.5, "top": [[5, -0.5]]},
    ]
    usage = {
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "image_tokens": 0,
        "cached_tokens": 1,
    }
    assert row["others"] == [
        {"text": "again", "finish_reason": "stop", "error": None, "usage": usage}
    ]


def test_answers_by_a_schema_become_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command's schema and by a row's own; a name of no field is refused before the model is loaded."""
    shape = {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "blue"]},
            "sides": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["colour", "sides"],
        "additionalProperties": False,
    }
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    pictures = [str(path) for path in sample_images()[:2]]
    lines = [{"image": path, "params": {"json_schema": shape}} for path in pictures]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    schema = ["--json-schema", str(tmp_path / "shape.json")]
    options = ["--max-tokens", "40", "--quiet"]
    with VLMBatcher(default_checkpoint()) as batcher:
        for name, sources, form in (
            ("a", pictures, schema),
            ("b", [str(tmp_path / "rows.jsonl")], []),
        ):
            command = ["run", *sources, *options, *form]
            table = str(tmp_path / f"{name}.parquet")
            whole = str(tmp_path / f"{name}.jsonl")
            for out in (
                ["--out", table, "--columns", "colour,sides"],
                ["--out", whole],
            ):
                assert (
                    cli.main(
                        [*command, *out], open_batcher=lambda args: nullcontext(batcher)
                    )
                    == 0
                )
            parsed = {row["id"]: row["parsed"] for row in answers(whole)}
            assert {
                row["id"]: {"colour": row["colour"], "sides": row["sides"]}
                for row in answers(table)
            } == parsed
            assert all(set(one) == {"colour", "sides"} for one in parsed.values())
            assert (
                cli.main([*command, "--columns", "corners"], open_batcher=Echo()) == 2
            )
            assert "'corners' is neither a column of" in capsys.readouterr().err
    (tmp_path / "shape.json").write_text(json.dumps({**shape, "required": []}))
    again = [
        "run",
        *pictures,
        *options,
        *schema,
        "--out",
        str(tmp_path / "a.jsonl"),
        "--resume",
    ]
    assert cli.main(again, open_batcher=Echo()) == 2
    assert "json_schema was" in capsys.readouterr().err
    (tmp_path / "shape.json").write_text("{broken")
    assert cli.main(again, open_batcher=Echo()) == 2
    assert "json_schema is no JSON" in capsys.readouterr().err


class Fields(Echo):
    """Answers by a schema."""

    def answer(self, request: Request) -> Result:
        return replace(
            super().answer(request),
            text='{"id": "p-id"}',
            parsed={"id": "p-id", "text": "p", "name": "p-name"},
        )


@pytest.mark.parametrize("out", OUTPUTS)
def test_names_that_several_have_are_refused_and_can_be_told_apart(
    folder: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fields of answers, of a schema's object and columns of rows hide none of each other."""
    fields = {key: {"type": "string"} for key in ("id", "text", "name", "total")}
    (folder / "s.json").write_text(json.dumps({"type": "object", "properties": fields}))
    (folder / "t.csv").write_text(
        "id,image,name,text,error\n1,a.png,c-name,c,c-error\n"
    )
    command = [
        "run",
        "t.csv",
        "--quiet",
        "--out",
        out,
        "--json-schema",
        "s.json",
        "--columns",
    ]
    for name, said in (
        ("name", "'name' in --columns may be parsed.name or columns.name; write which"),
        ("text", "may be answer.text or parsed.text or columns.text"),
        ("id", "may be answer.id or parsed.id;"),
        ("error", "may be answer.error or columns.error;"),
        ("columns.total", "'columns.total' is neither"),
    ):
        echo = Fields()
        assert (
            cli.main([*command, f"total,{name}"], open_batcher=echo) == 2
            and not echo.opened
        )
        assert said in capsys.readouterr().err
    named = "answer.text,parsed.text,columns.text,parsed.id,parsed.name,columns.name,columns.error,completion_tokens"
    assert cli.main([*command, named], open_batcher=Fields()) == 0
    (row,) = answers(out)
    expected = ['{"id": "p-id"}', "p", "c", "p-id", "p-name", "c-name", "c-error"]
    assert [row["id"], *(row[name] for name in named.split(",")[:-1])] == [
        "1",
        *expected,
    ] and not row["error"]


def test_names_of_a_stream_are_told_apart_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "s.json").write_text(
        '{"type": "object", "properties": {"text": {"type": "string"}}}'
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("a.png\n"))
    assert (
        cli.main(
            ["run", "-", "--json-schema", "s.json", "--columns", "text"],
            open_batcher=Echo(),
        )
        == 2
    )
    assert (
        "'text' in --columns may be answer.text or parsed.text"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("stop_after", "options", "said"),
    [
        (
            5,
            ["--out", "out.jsonl"],
            ["the same command with --resume goes on from here"],
        ),
        (
            None,
            ["--out", "out.csv"],
            [
                "2 rows failed; --retry-errors asks them again",
                "18 answers of the longest length",
            ],
        ),
        (None, [], ["18 answers of the longest length"]),
    ],
)
def test_the_totals_say_what_may_be_done(
    folder: Path,
    stop_after: int | None,
    options: list[str],
    said: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Long(Echo):
        def answer(self, request: Request) -> Result:
            result = super().answer(request)
            return result if result.error else replace(result, finish_reason="length")

    cli.main([*RUN, *options], open_batcher=Long(stop_after))
    out = capsys.readouterr().out
    assert all(one in out for one in said)
    assert ("--resume" in out or "--retry-errors" in out) == bool(options)


def test_text_files_of_another_job_are_not_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(name)
    Path("a.txt").write_text("mine")
    command = [
        "run",
        "a.png",
        "b.png",
        "--sidecar",
        ".txt",
        "--out",
        "out.jsonl",
        "--quiet",
    ]
    for options in ([], ["--resume"]):
        assert cli.main([*command, *options], open_batcher=Echo()) == 2
    assert Path("a.txt").read_text() == "mine"
    Path("a.txt").unlink()
    assert cli.main(command, open_batcher=Echo(stop_after=1)) == 130
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == 0
    assert (
        Path("a.txt").exists()
        and Path("b.txt").exists()
        and len(told("out.jsonl")) == 2
    )


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
    assert [name for name, row in sorted(rows.items()) if row["error"] is None] == [
        "d",
        "e",
    ]
    assert rows["d"]["image_sizes"] == [[90, 40]]
    assert "does not exist" in rows["a"]["error"] and all(
        "InvalidImage" in rows[name]["error"] for name in "abc"
    )


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
    assert (
        cli.main(
            [*RUN, "--out", str(parts[0]), "--resume", "--shard", f"2/{count}"],
            open_batcher=Echo(),
        )
        == 2
    )


@pytest.mark.skipif(
    shutil.which("mlx.launch", path=str(Path(sys.executable).parent)) is None,
    reason="no mlx.launch",
)
def test_shards_by_rank(folder: Path) -> None:
    """Under mlx.launch each process takes its part, and none is ended because another had failures."""
    cli.main([*RUN, "--out", "whole.jsonl"], open_batcher=Echo())
    command = [*RUN, "--out", "part-{shard}.jsonl", "--shard", "auto"]
    slow = KILLED.format(root=str(ROOT), command=command).replace(
        "0.002", "0.2 * int(os.environ['MLX_RANK'])"
    )
    (folder / "work.py").write_text(f"import os\n{slow}")
    launch = [
        str(Path(sys.executable).parent / "mlx.launch"),
        "-n",
        "2",
        "--starting-port",
        # below those that the system gives to connections
        str(random.randrange(20000, 32000)),
    ]
    run = subprocess.run(
        [*launch, sys.executable, "work.py"],
        env=here(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    outs = [Path(f"part-{number}-of-2.jsonl") for number in (1, 2)]
    assert all(out.exists() for out in outs), run.stderr
    parts = [told(str(out)) for out in outs]
    assert all(parts), run.stderr
    assert (
        parts[0] | parts[1] == told("whole.jsonl")
        and not parts[0].keys() & parts[1].keys()
    )
    assert (
        cli.main([*RUN, "--out", "one.jsonl", "--shard", "auto"], open_batcher=Echo())
        == 2
    )


def test_a_terminated_job_makes_its_output(folder: Path) -> None:
    code = KILLED.format(
        root=str(ROOT), command=[*RUN, "--out", "out.parquet"]
    ).replace("0.002", "0.2")
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=here(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    kept = Path("out.parquet.journal.jsonl")
    while not (kept.exists() and kept.stat().st_size) and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == cli.TERMINATED, said
    assert 0 < len(told("out.parquet")) < 20
    assert (
        cli.main([*RUN, "--out", "out.parquet", "--resume"], open_batcher=Echo()) == 1
    )
    assert len(told("out.parquet")) == 20


def test_shards_are_the_same_on_every_machine() -> None:
    """The digest must never change: machines of one job may run other versions."""
    assert [Shard(number, 3).has("pictures/a.png") for number in (1, 2, 3)] == [
        False,
        True,
        False,
    ]
    many = [
        sum(Shard(number, 4).has(f"row {row}") for row in range(4000))
        for number in (1, 2, 3, 4)
    ]
    assert sum(many) == 4000 and min(many) > 900
    with pytest.raises(InvalidJob, match="of the form 2/4"):
        Shard.parse("2")
    with pytest.raises(InvalidJob, match="is not of the form 2/4"):
        Shard.parse("\N{SUPERSCRIPT TWO}/4")


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
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env=here(),
    )
    assert run.returncode == 1, run.stderr
    assert (
        "File too large" in run.stderr and "--resume goes on from there" in run.stderr
    )
    assert "Traceback" not in run.stderr
    echo = Echo()
    assert cli.main([*RUN, "--out", out, "--resume"], open_batcher=echo) == 1
    assert 0 < len(echo.asked) < 20
    assert len(told(out)) == 20


@pytest.mark.parametrize("out", OUTPUTS)
def test_killed_twice_and_resumed(folder: Path, out: str) -> None:
    """Every id once, with the answer of a run that nothing disturbed."""
    rows = [
        {
            "id": f"r{number}",
            "image": f"{'bad' if number % 100 == 7 else 'p'}{number}.png",
        }
        for number in range(600)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["run", "rows.jsonl", "--quiet", "--out", out]
    journal_file = Path(out if out.endswith(".jsonl") else f"{out}.journal.jsonl")
    for least in (100, 300):
        code = KILLED.format(root=str(ROOT), command=[*command, "--resume"])
        kill_when(
            code,
            lambda least=least: (
                journal_file.exists()
                and journal_file.read_bytes().count(b"\n") >= least
            ),
        )
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
def test_killed_between_the_file_and_the_end_of_its_journal(
    folder: Path, out: str
) -> None:
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


def test_a_made_file_keeps_every_row_that_it_has(folder: Path) -> None:
    """Also rows that somebody has added under an id that is there: no answer goes without being asked."""
    cli.main([*RUN, "--out", "out.csv"], open_batcher=Echo(stop_after=9))
    *_, last = Path("out.csv").read_text().splitlines(keepends=True)
    with open("out.csv", "a") as file:
        file.write(last)
    assert cli.main([*RUN, "--out", "out.csv", "--resume"], open_batcher=Echo()) == 1
    assert Path("out.csv").read_text().count(last) == 2


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
            "image": str(
                tmp_path / "damaged.png" if n % 100 == 7 else chosen.choice(pictures)
            ),
            "params": {"max_tokens": 6},
        }
        for n in range(count)
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    model = str(ROOT / "fixtures/checkpoints/qwen2_vl")
    code = "import sys\nfrom vlm_batch.cli import main as cli\nsys.exit(cli.main(sys.argv[1:]))"
    command = [
        "run",
        str(tmp_path / "rows.jsonl"),
        "--model",
        model,
        "--prompt",
        "describe the picture",
        "--quiet",
    ]
    written = tmp_path / (out if out.endswith(".jsonl") else f"{out}.journal.jsonl")
    for share in (0.2, 0.6):
        enough = int(share * count)
        arguments = [*command, "--out", str(tmp_path / out), "--resume"]
        kill_when(
            code,
            lambda enough=enough: (
                written.exists() and written.read_bytes().count(b"\n") >= enough
            ),
            *arguments,
        )
    for name, more in ((out, ["--resume"]), ("whole" + Path(out).suffix, [])):
        assert cli.main([*command, "--out", str(tmp_path / name), *more]) == 1
    assert told(tmp_path / out) == told(tmp_path / ("whole" + Path(out).suffix))
    assert (
        sum(error is not None for _, error in told(tmp_path / out).values())
        == (count + 92) // 100
    )


def kill_when(code: str, enough: Any, *arguments: str) -> None:
    """Run code in a process of its own, and kill it (SIGKILL) when there is enough."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=here(), stderr=subprocess.PIPE
    )
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


def test_pictures_of_one_size_are_asked_about_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a window: nothing waits for more than so many others. Files that are no pictures are asked about, too."""
    monkeypatch.setattr(order, "WINDOW", 10)
    monkeypatch.setattr(order, "LOOK_SECONDS", 60.0)
    (folder / "many").mkdir()
    for number in range(30):
        Image.new("RGB", ((8, 6), (6, 8), (7, 7))[number % 3]).save(
            folder / "many" / f"{number:02}.png"
        )
    (folder / "many" / "05.png").write_bytes(b"no picture")

    class InTurn(Echo):
        def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
            return map(self.answer, requests)

    echo = InTurn()
    assert (
        cli.main(["run", "many", "--out", "out.jsonl", "--quiet"], open_batcher=echo)
        == 0
    )
    asked = [int(Path(name).stem) for name in echo.asked]
    assert sorted(asked) == list(range(30))
    # unknown, 6x8, 7x7, 8x6, each in its order
    assert asked[:10] == [5, 1, 4, 7, 2, 8, 0, 3, 6, 9]
    assert all(
        set(asked[at : at + 10]) == set(range(at, at + 10)) for at in (0, 10, 20)
    )
    # a drive on which one look takes as long as a window may
    monkeypatch.setattr(order, "LOOK_SECONDS", -1.0)
    slow = InTurn()
    cli.main(["run", "many", "--out", "again.jsonl", "--quiet"], open_batcher=slow)
    assert [int(Path(name).stem) for name in slow.asked] == list(range(30))


def test_standard_input_is_answered_as_it_comes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of rows that can be read once only, one whose id has come before is skipped and counted."""
    import io

    monkeypatch.setattr(
        "sys.stdin",
        io.StringIO(
            '{"id": "a", "image": "x.png"}\n' * 2 + '{"id": "b", "image": "y.png"}\n'
        ),
    )
    echo = Echo()
    assert cli.main(["run", "-", "--out", "out.jsonl"], open_batcher=echo) == 0
    assert sorted(echo.asked) == ["a", "b"]
    assert "1 row skipped whose id had come before" in capsys.readouterr().out


def test_a_dry_run_keeps_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = Echo()
    assert (
        cli.main(
            [*RUN, "--out", "out.jsonl", "--dry-run", "--system", "Be brief."],
            open_batcher=echo,
        )
        == 1
    )  # r3 is bad
    out = capsys.readouterr().out
    assert "user: what k0?" in out and "system: Be brief." in out
    assert "20 rows, about 0 s" in out and "memory: " in out
    assert len(echo.asked) == 20 and not Path("out.jsonl").exists()


def test_a_dry_run_shows_what_the_model_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rendered prompts, sizes, tokens of each, and what all would take in time and memory."""
    pictures = [str(path) for path in sample_images()[:2]]
    options = [
        "--model",
        str(default_checkpoint()),
        "--prompt",
        "describe {stem}",
        "--max-tokens",
        "4",
    ]
    assert cli.main(["run", *pictures, *options, "--dry-run"]) == 0
    out = capsys.readouterr().out
    with VLMBatcher(default_checkpoint()) as batcher:
        for path in sample_images()[:2]:
            asked = Request(
                prompt=f"describe {path.stem}",
                images=path,
                params=SamplingParams(max_tokens=4),
            )
            rendered = batcher.rendered(asked)
            assert rendered is not None and all(
                f"  | {line}\n" in out for line in rendered.rstrip("\n").split("\n")
            )
            result = batcher.submit_request(asked).result(timeout=60)
            ((wide, high),), usage = result.image_sizes, result.usage
            assert f"{wide}x{high}; processed to " in out
            assert (
                f"{usage.prompt_tokens} prompt tokens, {usage.image_tokens} of them pictures; "
                in out
            )
    assert re.search(
        r"2 rows, about \d+ s and .* load the model: [\d.]+ s a row, measured on 2$",
        out,
        re.MULTILINE,
    )
    assert re.search(r"memory: [\d.]+ GB so far; .* [\d.]+ GB more", out)


def test_where_the_time_went_and_how_busy_the_engine_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of real answers: each row's stages are its whole life, and reading and processing are parts of the wait for a place."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(12):
        Image.new("RGB", (200, 160), (20 * number, 0, 0)).save(folder / f"{number}.png")
    page = tmp_path / "page.html"
    options = [
        "--max-tokens",
        "4",
        "--report",
        str(page),
        "--out",
        str(tmp_path / "out.jsonl"),
    ]
    assert (
        cli.main(["run", str(folder), "--model", str(default_checkpoint()), *options])
        == 0
    )
    out = capsys.readouterr().out
    for stage in (
        "reading",
        "processing",
        "waiting",
        "encoding",
        "prefill",
        "decode",
        "source",
    ):
        assert re.search(rf"^ *{stage} +[\d.]+ ", out, re.M), stage
        assert f"<td>{stage}</td>" in page.read_text()
    assert re.search(r"the engine had work for \d+% of the time", out)
    for row in answers(tmp_path / "out.jsonl"):
        timings = row["timings"]
        assert timings["read"] > 0 and timings["process"] > 0
        assert timings["read"] + timings["process"] <= timings["queue"] + 1e-3
        assert sum(stages_of(Timings(**timings)).values()) == pytest.approx(
            timings["total"], abs=1e-3
        )


def test_the_report_is_one_page_that_shows_markup_as_text(folder: Path) -> None:
    Image.new("RGB", (40, 30), "red").save("p<b>.png")
    (folder / "rows.jsonl").write_text(
        '{"id": "one", "image": "p<b>.png", "prompt": "<script>alert(1)</script>"}\n{"id": "two", "image": "bad.png"}\n'
    )
    assert (
        cli.main(
            ["run", "rows.jsonl", "--report", "r.html", "--quiet"], open_batcher=Echo()
        )
        == 1
    )
    page = Path("r.html").read_text()
    assert "data:image/jpeg;base64," in page and "<svg" in page
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "InvalidImage: bad.png is bad" in page
    assert "http://" not in page and "https://" not in page and "<link" not in page


def test_a_run_without_rows_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No totals of nothing, and an earlier run's report stays."""
    command = [*RUN, "--out", "out.jsonl", "--report", "r.html"]
    cli.main(command, open_batcher=Echo())
    before = Path("r.html").read_bytes()
    capsys.readouterr()
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == 1
    out, err = capsys.readouterr()
    assert (
        "nothing is left to ask: 18 rows answered before" in out
        and "0 requests" not in out
    )
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
    run = subprocess.run(
        [str(BROWSER), *options, str(folder / "r.html")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    heights = re.findall(r"<title>([\d,]+)</title>", run.stdout)[0].split(",")
    assert len(heights) > 2 and max(map(int, heights[:-1])) > 50 and heights[-1] == "30"


@pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here; scripts/setup says how to get one"
)
@pytest.mark.parametrize("width", [320, 390])
def test_the_report_on_a_phone(folder: Path, width: int) -> None:
    """Nothing is wider than the screen, and what is said has the screen's width."""
    for number in range(3):
        Image.new("RGB", (400, 300), "red").save(f"p{number}.png")
    long_name = f"bad_{'x' * 200}.png"
    Path("rows.jsonl").write_text(
        "".join(
            json.dumps({"id": name, "image": name}) + "\n"
            for name in ("p0.png", "p1.png", "p2.png", long_name)
        )
    )
    cli.main([*RUN[:2], "--prompt", "?", "--report", "r.html"], open_batcher=Echo())
    with chromium.browser(str(BROWSER)) as page:
        page.size(width, 800, mobile=True)
        page.open((folder / "r.html").as_uri())
        page.run("document.querySelector('details').open = true")
        assert page.run("document.documentElement.scrollWidth") <= width
        said = page.run(
            "[...document.querySelectorAll('td:last-child')].map((one) => one.getBoundingClientRect().width)"
        )
        assert len(said) > 6 and min(said) > 0.75 * (width - 32), said


def test_progress_in_plain_lines_and_figures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    class Slow(Echo):
        def __call__(self, args: object) -> AbstractContextManager[Echo]:
            wait_for_lines(1)
            return super().__call__(args)

        def answer(self, request: Request) -> Result:
            if len(self.asked) == 19:
                wait_for_lines(2)  # one of which begins after the row before was told
            return super().answer(request)

    def wait_for_lines(count: int) -> None:
        many = err.getvalue().count("\n[") + count
        while err.getvalue().count("\n[") < many:
            time.sleep(0.01)

    err = io.StringIO("\n")
    err.seek(0, io.SEEK_END)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr("vlm_batch.cli.watching.PLAIN_SECONDS", 0.05)
    cli.main(RUN[:-1], open_batcher=Slow())
    out = capsys.readouterr().out
    lines = [line for line in err.getvalue().splitlines() if line.startswith("[")]
    # also while one row takes long
    assert lines[0] == "[loading the model]" and len(lines) >= 3
    assert (
        lines[-1].startswith("[19 of 20] 2 failed, 0 s left, ")
        and "25% of prompts cached" in lines[-1]
    )
    assert "seconds of a row" in out and "where a row's time goes" in out
    assert "InvalidImage" in out


@pytest.mark.parametrize(
    ("options", "source", "num_lines"),
    [
        ([], "many.jsonl", 1),
        (["--verbose"], "many.jsonl", 150),
        (["--quiet"], "many.jsonl", 0),
        ([], "-", 100),
    ],
)
def test_a_long_job_has_no_line_a_row(
    folder: Path,
    options: list[str],
    source: str,
    num_lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """But for the first failure of each kind; of a stream nobody knows how long it is."""
    names = [
        f"{'bad' if number in (20, 120, 130) else 'p'}{number}.png"
        for number in range(150)
    ]
    text = "".join(
        json.dumps({"id": str(number), "image": name}) + "\n"
        for number, name in enumerate(names)
    )
    Path("many.jsonl").write_text(text)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert (
        cli.main(["run", source, "--out", "out.jsonl", *options], open_batcher=Echo())
        == 1
    )
    out, err = capsys.readouterr()
    assert (
        len([line for line in err.splitlines() if re.match(r"\d+: ", line)])
        == num_lines
    )
    assert err.count("--verbose shows them all") == (not options)
    assert "150 requests, 3 errors" in out and "status" not in out  # nor a table


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
            echo, out = Forgets(), open_sink(f"{count}.jsonl")
            run(sources, out, lambda: echo(None), questions=Questions(("?",)), carried=("columns.text",))
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=here(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not run.stderr
    small, large = map(int, run.stdout.split())
    assert large - small < 8_000_000  # the rows are 55 MB
    assert Path("12000.jsonl").read_bytes().count(b"\n") == 12_000


def test_rows_with_prompts_of_their_own_are_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rows.jsonl").write_text(
        '{"id": "a", "image": "x.png", "prompt": "mine"}\n{"id": "b", "image": "y.png"}'
    )
    assert (
        cli.main(
            ["run", "rows.jsonl", "--prompt", "theirs", "--out", "out.jsonl"],
            open_batcher=Echo(),
        )
        == 0
    )
    assert {row["id"]: row["prompt"] for row in answers("out.jsonl")} == {
        "a": "mine",
        "b": "theirs",
    }
    assert (
        "1 row with a prompt or messages of its own: asked that, not --prompt"
        in capsys.readouterr().err
    )


def test_params_of_rows_reach_their_requests(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(
        '{"id": "a", "image": "x.png", "params": {"max_tokens": 5}}\n{"id": "b", "image": "y.png"}'
    )
    seen: dict[str, SamplingParams] = {}

    class Keeps(Echo):
        def answer(self, request: Request) -> Result:
            seen[request.request_id or ""] = request.params
            return super().answer(request)

    cli.main(
        ["run", "rows.jsonl", "--max-tokens", "9", "--quiet"], open_batcher=Keeps()
    )
    assert {name: params.max_tokens for name, params in seen.items()} == {
        "a": 5,
        "b": 9,
    }


@pytest.mark.parametrize(
    ("options", "thinks"),
    [([], None), (["--thinking"], True), (["--no-thinking"], False)],
)
def test_models_are_told_to_think(
    folder: Path,
    options: list[str],
    thinks: bool | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[tuple[bool | None, int | None]] = []

    class Keeps(Echo):
        def answer(self, request: Request) -> Result:
            assert request.template is not None
            seen.append(
                (request.template.enable_thinking, request.params.thinking_budget)
            )
            return super().answer(request)

    cli.main(
        [*RUN, "--out", "out.jsonl", *options, "--thinking-budget", "50"],
        open_batcher=Keeps(),
    )
    assert set(seen) == {(thinks, 50)}
    other = "--no-thinking" if thinks else "--thinking"
    assert (
        cli.main(
            [*RUN, "--out", "out.jsonl", "--thinking-budget", "50", other, "--resume"],
            open_batcher=Echo(),
        )
        == 2
    )
    assert "thinking was" in capsys.readouterr().err


def test_a_header_of_another_form_is_refused(tmp_path: Path) -> None:
    journal.write_header(tmp_path / "out.jsonl", {"model": "m"})
    assert journal.read_header(tmp_path / "out.jsonl") == {"model": "m"}
    path = journal.header_path(tmp_path / "out.jsonl")
    path.write_text(path.read_text().replace('"form": 1', '"form": 2'))
    with pytest.raises(InvalidJob, match="another version"):
        journal.read_header(tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    "written",
    [
        "[]",
        "{}",
        '{"form": 2}',
        '{"form": 1}',
        '{"form": 1, "settings": [["model", "m"]]}',
        '{"form": 1, "settings": {"model_files": ["a"]}}',
        '{"form": 1, "settings": {"model_files": null}}',
        '{"form": 1, "settings": {"tables": 3}}',
        '{"form": 1, "settings": {"tables": null}}',
        '{"form": 1, "settings": {"prompts": 3}}',
        '{"form": 1, "settings": {"dpi": {}}}',
    ],
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, written: str) -> None:
    journal.header_path(tmp_path / "out.jsonl").write_text(written)
    with pytest.raises(InvalidJob, match="cannot be read"):
        journal.read_header(tmp_path / "out.jsonl")


@pytest.mark.parametrize("stamp", [3, "abc", [], [1], None, {}])
def test_any_stamp_of_a_models_file_is_compared(tmp_path: Path, stamp: object) -> None:
    files = {"config.json": [2, 3, "digest"]}
    settings = {"model": "m", journal.MODEL_FILES: {"config.json": stamp}}
    journal.write_header(tmp_path / "out.jsonl", settings)
    now = {"model": "m", journal.MODEL_FILES: files}
    with pytest.raises(InvalidJob, match="the model's files have changed"):
        journal.check_same(tmp_path / "out.jsonl", now)


def test_a_long_reason_is_marked_where_it_is_cut() -> None:
    figures = Summary()
    item = Item(id="a.png", row=JobRow(id="a.png"))
    figures.add(
        item,
        Result(
            request_id="a.png", finish_reason="error", error="a.png: " + "long " * 60
        ),
    )
    ((reason, count),) = figures.reasons.most_common()
    assert (len(reason), count, reason[:5], reason[-3:]) == (
        MAX_REASON,
        1,
        "a.png",
        "...",
    )


def test_failures_are_counted_by_kind_and_shown_whole(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the ids are: the id of a row is no part of another word."""

    class Fails(Echo):
        def answer(self, request: Request) -> Result:
            name = str(request.images[0])
            said = (
                "does not exist"
                if "missing" in name
                else f"has {len(self.asked)} x 9 pixels"
            )
            self.asked.append(name)
            return Result(
                request_id=request.request_id or "",
                finish_reason="error",
                error=f"InvalidImage: {name} {said}",
            )

    monkeypatch.setattr("vlm_batch.cli.watching.FIGURES_FROM", 1)
    names = [f"missing{number}000{number}.png" for number in range(3)] + [
        "my photos/a large one.png",
        "is.png",
    ]
    rows = [
        {"id": one, "image": name} for one, name in zip("0is1n", names, strict=True)
    ]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + "{1\n{2 3\n"
    )
    kept = ["--report", "r.html", "--out", "out.jsonl", "--quiet"]
    assert cli.main(["run", "rows.jsonl", *kept], open_batcher=Fails()) == 1
    out, err = capsys.readouterr()
    assert (
        "2 rows cannot be asked, the first: rows.jsonl:6: the line is not JSON" in err
    )
    table = out[out.index("failures, by the first of each kind") :]
    assert re.findall(r"^\s*(\d+)\s+(.+?)\s*$", table, re.MULTILINE)[:2] == [
        ("3", "InvalidImage: missing10001.png does not exist"),
        ("2", "InvalidImage: my photos/a large one.png has 2 x 9 pixels"),
    ]
    assert "InvalidImage: missing10001.png does not exist" in Path("r.html").read_text()


@pytest.mark.parametrize(
    ("line", "options", "said"),
    [
        (
            {"img": "a.png"},
            [],
            "the line has 'img', which no request has ('image' is probably meant)",
        ),
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
        (
            {
                "custom_id": "a",
                "file_name": "a.png",
                "prompt": "?",
                "params": {"seed": 1},
            },
            [],
            None,
        ),
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
    whole = {"id": "whole", "image": "b.png"} | {
        name: "?" for name in ("img",) if "--image-column" in options
    }
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
            assert (
                cli.main(["run", source, "--quiet", "--out", out], open_batcher=Echo())
                == 1
            )
            whole_row, row = sorted(
                answers(out), key=lambda row: row["error"] is not None
            )
            assert (whole_row["id"], row["images"]) == (
                "whole",
                line.get("image", []) and ["a.png"],
            )
            assert said in row["error"]


@pytest.mark.parametrize(
    ("header", "options", "said"),
    [
        (
            "img,kind",
            [],
            "t.csv has no column of images, but 'img': --image-column img takes it for that",
        ),
        ("Photo,kind", [], "--image-column Photo takes it for that"),
        (
            "image_pth,kind",
            ["--prompt", "what {kind}?"],
            "--image-column image_pth takes it",
        ),
        (
            "image,promt",
            [],
            "t.csv has no column of prompts, but 'promt': --prompt-column promt takes it",
        ),
        ("image,promt", ["--prompt", "what?"], None),
        ("img,kind", ["--image-column", "img"], None),
        (
            "img,kind",
            ["--columns", "img"],
            "--image-column img takes it for that (a.png looks like one), and",
        ),
        ("img,kind", ["--columns", "img", "--image-column", ""], None),
        ("file_name,image_id", [], None),
        ("image,scan_url", [], None),
        (
            "review,kind",
            ["--prompt", "what is {review}?"],
            "t.csv has no column of images, but 'review': --image-column",
        ),
        (
            "kind,image_id",
            [],
            "--image-column kind takes it for that (a.png looks like one)",
        ),
    ],
)
@pytest.mark.parametrize("table", ["t.csv", "t.parquet"])
def test_columns_that_are_probably_misspelt_are_refused(
    folder: Path,
    table: str,
    header: str,
    options: list[str],
    said: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where nothing else holds the pictures or the prompts; the columns of a table are its own otherwise. Naming a column of
    pictures, to take it along or in a prompt, shows them to no model."""
    (folder / "t.csv").write_text(f"{header}\na.png,b\n")
    pq.write_table(
        pa.table(dict(zip(header.split(","), [["a.png"], ["b"]], strict=True))),
        "t.parquet",
    )
    echo = Echo()
    assert cli.main(["run", table, "--quiet", *options], open_batcher=echo) == (
        0 if said is None else 2
    )
    assert (said or "").replace(
        "t.csv", table
    ) in capsys.readouterr().err and echo.opened == (said is None)


def test_chats_of_a_table_that_are_not_read_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where they would be what is asked; a table with pictures that a prompt asks about may have any column."""
    chats = [[{"role": "user", "content": "hello"}]]
    pq.write_table(pa.table({"messages": chats, "image": ["a.png"]}), "a.parquet")
    pq.write_table(pa.table({"messages": chats}), "b.parquet")
    for command, status in (
        (["a.parquet"], 2),
        (["b.parquet", "--prompt", "?"], 2),
        (["a.parquet", "--prompt", "?"], 0),
    ):
        assert cli.main(["run", *command, "--quiet"], open_batcher=Echo()) == status
        assert (
            not status
            or "has a column 'messages', and chats are read from JSON lines"
            in capsys.readouterr().err
        )


PNG = b"\x89PNG\r\n\x1a\n and more"


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"id": "1", "receipt": "scans/1.JPG"}, "receipt"),
        # words, unless there is such a file
        ({"id": "1", "receipt": "my scans/a.png"}, None),
        ({"id": "1", "receipt": "there is/a.png"}, "receipt"),
        ({"image_id": "17", "file_size": "100", "scan": "1.jpg"}, "scan"),
        ({"photo_url": "https://x/y"}, "photo_url"),
        ({"source": "https://x/y.webp?s=1"}, "source"),
        ({"kind": "bill", "imageId": "17"}, "imageId"),
        ({"kind": "bill", "thumbnail-size": "17", "Scan No": "17"}, "Scan No"),
        ({"kind": "bill", "clip": "a.mp4"}, "clip"),
        ({"kind": "bill", "data": "data:image/png;base64,iVBORw0"}, "data"),
        ({"kind": "bill", "data": "/9j/4" + 80 * "A"}, "data"),
        (
            {
                "kind": "bill",
                "file_size": "100",
                "page": "https://x/y",
                "mobile": "a.b",
            },
            None,
        ),
        ({"image": "a.png", "photo_url": "b.png", "picture_id": "1"}, None),
        ({"file_name": "a.png", "thumbnail": "b.png"}, None),
        ({"video": "a.mp4", "thumbnail": "b.png"}, None),
    ],
    ids=lambda one: ",".join(one) if isinstance(one, dict) else str(one),
)
@pytest.mark.parametrize("table", ["t.csv", "t.parquet", "t.jsonl"])
def test_a_table_whose_pictures_nobody_would_see_is_refused(
    folder: Path,
    table: str,
    columns: dict[str, str],
    said: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By what its cells hold, then by its columns' names; a line's keys must be named as columns anyway."""
    (folder / "there is").mkdir()
    (folder / "there is/a.png").write_bytes(PNG)
    if table == "t.csv":
        with open(table, "w", newline="") as file:
            csv.writer(file).writerows([columns.keys(), columns.values()])
    elif table == "t.parquet":
        pq.write_table(
            pa.table({name: [value] for name, value in columns.items()}), table
        )
    else:
        Path(table).write_text(json.dumps(columns) + "\n")
        said = None if said in ("imageId", "Scan No") else said
    command = [
        "run",
        table,
        "--quiet",
        "--prompt",
        "what?",
        *(["--columns", ",".join(columns)] * (table == "t.jsonl")),
    ]
    echo = Echo()
    assert cli.main(command, open_batcher=echo) == (
        0 if said is None else 2
    ) and echo.opened == (said is None)
    assert (
        said is None
        or f"--image-column {said} takes it for that" in capsys.readouterr().err
    )
    # said to be asked without
    assert cli.main([*command, "--image-column", ""], open_batcher=Echo()) == 0


@pytest.mark.parametrize(
    ("columns", "is_sure"),
    [
        ({"url": "https://x/page"}, False),
        ({"url": "https://x/page.html?from=a.png"}, False),
        ({"path": "/shop/shoes"}, False),
        ({"file": "notes.txt"}, False),
        ({"url": "https://x/a.png?s=1"}, True),
        ({"path": "scans/a.JPG"}, True),
        ({"file": "there is/a.png"}, True),
        ({"url": "data:image/png;base64,iVBORw0"}, True),
        ({"image_url": "https://x/page"}, True),
        ({"file_name": "a"}, True),
        ({"image": "a", "url": "https://x/page"}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("table", ["t.csv", "t.parquet", "t.jsonl"])
def test_columns_that_may_hold_anything_must_look_like_pictures(
    folder: Path,
    table: str,
    columns: dict[str, str],
    is_sure: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A page's address is not fetched, nor a part of a path looked for, unless the column is named."""
    (folder / "there is").mkdir()
    (folder / "there is/a.png").write_bytes(PNG)
    rows = {
        "id": ["1", "2"],
        **{name: [f"{table}.png", value] for name, value in columns.items()},
    }
    pq.write_table(pa.table(rows), "t.parquet")
    with open("t.csv", "w", newline="") as file:
        csv.writer(file).writerows([rows, *zip(*rows.values(), strict=True)])
    Path("t.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in pa.table(rows).to_pylist())
    )
    command = ["run", table, "--quiet", "--prompt", "what?"]
    command += ["--columns", "url"] if len(columns) == 2 else []
    echo = Echo()
    assert (
        cli.main(command, open_batcher=echo) == (0 if is_sure else 2)
        and bool(echo.opened) == is_sure
    )
    said, name = capsys.readouterr().err, next(iter(columns))
    assert (
        is_sure
        or f"{table} has no column that surely holds images, but {name!r}: --image-column {name}"
        in said
    )
    assert cli.main([*command, "--image-column", name], open_batcher=Echo()) == 0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"image": None, "prompt": "?"}, "column 'image' is empty"),
        (
            {"image": None, "images": None, "video": None, "prompt": "?"},
            "column 'image' is empty",
        ),
        ({"image_url": None}, "column 'image_url' is empty"),
        ({"images": ["a.png", None]}, "number 2 of the list is empty"),
        ({"images": ["a.png", ""]}, "number 2 of the list is empty"),
        (
            {"image": "a.png", "image_url": "b.png"},
            "image and image_url exclude each other",
        ),
        (
            {"video": "a.mp4", "video_url": "b.mp4"},
            "video and video_url exclude each other",
        ),
        ({"images": [], "prompt": "?"}, None),
        ({"image": None, "video": "a.mp4"}, None),
        ({"image": None, "messages": [{"role": "user", "content": "?"}]}, None),
    ],
    ids=str,
)
def test_a_row_without_its_picture_is_an_error(
    folder: Path, row: dict[str, Any], said: str | None
) -> None:
    """Null is what is missing, and an empty list says that there is none."""
    (folder / "rows.jsonl").write_text(
        json.dumps({"id": "0", "image": "b.png"}) + "\n" + json.dumps(row) + "\n"
    )
    assert cli.main(
        ["run", "rows.jsonl", "--quiet", "--out", "o.jsonl"], open_batcher=Echo()
    ) == (said is not None)
    whole, found = sorted(answers("o.jsonl"), key=lambda answer: answer["id"] != "0")
    assert whole["error"] is None and (
        found["error"] is None if said is None else said in found["error"]
    )


@pytest.mark.parametrize("table", ["t.csv", "t.parquet"])
@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            "image,image_path",
            "image and image_path exclude each other in t.csv: --image-column says which",
        ),
        ("file_name,url", "file_name and url exclude each other"),
        ("video,video_path", "video and video_path exclude each other"),
        ("image,url", None),
    ],
)
def test_two_columns_of_pictures_are_refused(
    folder: Path,
    table: str,
    header: str,
    said: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = header.split(",")
    (folder / "t.csv").write_text(f"{header}\na.png,b.png\n")
    pq.write_table(pa.table({name: [f"{name}.png"] for name in names}), "t.parquet")
    assert cli.main(["run", table, "--quiet"], open_batcher=Echo()) == (
        0 if said is None else 2
    )
    assert (said or "").replace("t.csv", table) in capsys.readouterr().err
    option = "--video-column" if "video" in header else "--image-column"
    assert (
        cli.main(["run", table, "--quiet", option, names[1]], open_batcher=Echo()) == 0
    )
    pq.write_table(pa.table({"before": [PNG], "after": [PNG]}), "t.parquet")
    assert cli.main(["run", "t.parquet", "--quiet"], open_batcher=Echo()) == 2
    assert "before and after exclude each other" in capsys.readouterr().err


def test_an_answer_that_is_cut_before_it_has_its_form_is_an_error(
    tmp_path: Path,
) -> None:
    """In every output, with the text that there is; its row is asked again when told."""
    shape = {
        "type": "object",
        "properties": {"colour": {"type": "string"}},
        "required": ["colour"],
    }
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    picture = str(sample_images()[0])
    said = (
        "CutAnswer: the answer was ended by its longest length (max_tokens is 2) before"
    )
    forms = {
        "json": ["--json-schema", str(tmp_path / "shape.json")],
        "choice": ["--choice", "a very long blue choice"],
    }
    with VLMBatcher(default_checkpoint()) as batcher:
        for name, form in forms.items():
            command = ["run", picture, "--quiet", "--max-tokens", "2", *form]
            for out in (
                str(tmp_path / f"{name}{suffix}") for suffix in (".csv", ".jsonl")
            ):
                columns = ["--columns", "colour"] if out.endswith("json.csv") else []
                assert (
                    cli.main(
                        [*command, "--out", out, *columns],
                        open_batcher=lambda args: nullcontext(batcher),
                    )
                    == 1
                )
                (row,) = answers(out)
                assert row["error"].startswith(said)
            assert row["text"] and row["finish_reason"] == "length"
        table = map_table(
            batcher,
            pa.table({"image": [picture]}),
            "?",
            params={"json_schema": shape, "max_tokens": 2},
        )
        assert table.column("answer_error").to_pylist()[0].startswith(said)
        for name, cut in (
            ("regex", "a very long blue thing, (still going on)+!"),
            ("grammar", 'start: "so many words"'),
        ):
            table = map_table(
                batcher,
                pa.table({"image": [picture]}),
                "?",
                params={name: cut, "max_tokens": 2},
            )
            assert (
                table.column("answer_error")
                .to_pylist()[0]
                .startswith(f"{said} it had the form of its {name}")
            )
        assert map_table(
            batcher, pa.table({"image": [picture]}), "?", params={name: cut}
        ).column("answer_error").to_pylist() == [None]
        table = map_table(
            batcher,
            pa.table({"image": [picture]}),
            "?",
            params={"regex": "[a-z ]*", "max_tokens": 2},
        )
        # it had its form wherever it ended
        assert table.column("answer_error").to_pylist() == [None]
        table = map_table(
            batcher,
            pa.table({"image": [picture]}),
            "?",
            params={"json_schema": {"enum": [None]}},
        )
        assert table.column("answer").to_pylist() == ["null"]


@pytest.mark.parametrize("out", ["x.xlsx", "x.json", "x.jsonl.gz", "x.txt"])
def test_an_output_of_an_unknown_form_is_refused(
    folder: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = Echo()
    assert cli.main([*RUN, "--out", out], open_batcher=echo) == 2
    suffix = Path(out).suffix
    assert (
        f"{suffix} is no form of output that is known here; .jsonl, .ndjson, .csv, .tsv, .parquet, .pq are"
        in capsys.readouterr().err
    )
    assert not echo.opened and not Path(out).exists()
    assert (
        cli.main([*RUN, "--out", out, "--format", "jsonl"], open_batcher=Echo()) == 1
        and Path(out).read_bytes().count(b"\n") == 20
    )


@pytest.mark.parametrize("target", ["out.jsonl", "-"])
def test_answers_in_the_form_of_openais_batches(
    folder: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its fields, each row once, and the output is gone on with as others are."""

    class Several(Echo):
        def answer(self, request: Request) -> Result:
            result = super().answer(request)
            steps = (TokenLogprobs(5, -0.5, ((5, -0.5), (7, -1.5))),)
            return (
                replace(
                    result, logprobs=steps, others=(replace(result, text="another"),)
                )
                if result.ok
                else result
            )

    batch = [
        *RUN,
        "--model",
        "org/some-model",
        "--out",
        target,
        "--format",
        "openai-batch",
    ]
    if target == "-":
        cli.main(batch, open_batcher=Several())
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    else:
        cli.main(batch, open_batcher=Several(stop_after=7))
        assert cli.main([*batch[:-2], "--resume"], open_batcher=Several()) == 2
        assert "format was" in capsys.readouterr().err
        again = Several()
        assert cli.main([*batch, "--retry-errors"], open_batcher=again) == 1
        assert 13 <= len(again.asked) <= 15
        lines = answers(target)
    assert sorted(line["custom_id"] for line in lines) == sorted(
        f"r{number}" for number in range(20)
    )
    assert len({line["id"] for line in lines}) == 20 and all(
        line["id"].startswith("batch_req_") for line in lines
    )
    for line in lines:
        assert set(line) == {"id", "custom_id", "response", "error"}
        if line["custom_id"] in ("r3", "r11"):
            assert line["response"] is None
            assert line["error"] == {
                "code": "InvalidImage",
                "message": f"bad{line['custom_id'][1:]}.png is bad",
            }
            continue
        assert (
            line["error"] is None
            and line["response"]["status_code"] == 200
            and line["response"]["request_id"]
        )
        # the client's own type
        body = ChatCompletion.model_validate(line["response"]["body"], strict=True)
        assert (body.object, body.model, len(body.choices)) == (
            "chat.completion",
            "some-model",
            2,
        )
        assert abs(body.created - time.time()) < 600
        assert [choice.message.content for choice in body.choices][1] == "another"
        assert (
            body.choices[0].finish_reason == "stop"
            and body.choices[0].message.role == "assistant"
        )
        assert (
            body.choices[0].logprobs is not None
            and body.choices[0].logprobs.content is not None
        )
        assert [
            one.token for one in body.choices[0].logprobs.content[0].top_logprobs
        ] == ["token_id:5", "token_id:7"]
        assert body.usage is not None and (
            body.usage.prompt_tokens,
            body.usage.completion_tokens,
        ) == (4, 4)
        assert body.usage.total_tokens == 8


def test_a_report_never_takes_the_place_of_its_answers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [*RUN, "--out", "answers.html", "--format", "jsonl"]
    assert cli.main([*run, "--report", "./answers.html"], open_batcher=Echo()) == 2
    assert "--out names the same file" in capsys.readouterr().err
    cli.main(run, open_batcher=Echo())
    answers = Path("answers.html").read_bytes()
    assert cli.main(["report", "answers.html"]) == 2
    assert "give the page another name" in capsys.readouterr().err
    assert Path("answers.html").read_bytes() == answers


@pytest.mark.parametrize("out", [*OUTPUTS, "batch.jsonl", "lines.txt"])
def test_the_report_of_all_runs(
    folder: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a job that was cut short, and after its second run: every row of both counts, and its picture is shown."""
    for number in range(20):
        Image.new("RGB", (20, 10), "red").save(f"p{number}.png")
    form = {
        "batch.jsonl": ["--format", "openai-batch"],
        "lines.txt": ["--format", "jsonl"],
    }.get(out, [])
    run = [*RUN, "--out", out, *form]
    assert cli.main(run, open_batcher=Echo(stop_after=7)) == 130
    assert cli.main(["report", out]) == 0
    assert cli.main([*run, "--resume"], open_batcher=Echo()) == 1
    assert cli.main(["report", out, "--out", "page.html"]) == 0
    assert "page.html: 18 answered, 2 failed" in capsys.readouterr().out
    first, page = (
        Path(name).read_text() for name in (Path(out).with_suffix(".html"), "page.html")
    )
    assert "<h1>6 rows answered" in first  # seven were asked, of which r3 fails
    assert (
        "<h1>18 rows answered" in page
        and "what {kind}?" in page
        and "bad3.png is bad" in page
    )
    assert page.count("<b>72</b>prompt tokens") == 1
    is_timed = out in ("out.jsonl", "lines.txt")
    assert ("rows a second" in page) == is_timed
    if out in ("out.jsonl", "lines.txt"):
        assert page.count("data:image/jpeg") == 18
    assert cli.main(["report", out, "--out", "page.pdf"]) == 2
    assert "a name that ends in .html" in capsys.readouterr().err


def test_the_time_between_two_runs_is_no_time_of_the_job() -> None:
    """Rows overlap, and one may span others; what counts is when any was under way."""
    ends = [
        (10.0, 4.0),
        (10.5, 4.0),
        (12.0, 8.0),
        (1000.0, 3.0),
        (1001.0, 1.0),
        (1001.5, 0.0),
    ]
    rows = [
        {
            "id": str(number),
            "text": "x",
            "created": end,
            "timings": {"total": seconds},
            "usage": {"completion_tokens": 5},
        }
        for number, (end, seconds) in enumerate(ends)
    ]
    summary = report.summary_of(lambda: rows)
    assert (summary.answered, summary.tokens) == (6, 30)
    assert summary.seconds == pytest.approx(8.0 + 4.0, abs=1e-6)
    assert report.summary_of(lambda: [{"id": "a", "error": "E: x"}]).failed == 1


def test_the_report_of_csv_counts_what_lists_hold(folder: Path) -> None:
    """CSV has lists and objects as JSON: each was read letter by letter, and further answers ended the command."""
    record = {
        "id": "a",
        "text": "x",
        "images": ["p.png", "q.png#\N{SUPERSCRIPT TWO}"],
        "others": [{"text": "y", "usage": {"completion_tokens": 2}}],
        "usage": {"completion_tokens": 3},
    }
    path = folder / "out.csv"
    DelimitedFile().write(path, lambda: iter([record]), tuple(record))
    summary = report.summary_of(lambda: DelimitedFile().read(path))
    assert (summary.answered, summary.pictures, summary.tokens) == (1, 2, 5)
    odd = {"id": "a", "text": "x", "images": ["page.pdf#\N{SUPERSCRIPT TWO}"]}
    (folder / "page.pdf").write_bytes(b"%PDF-")
    assert report.summary_of(lambda: [odd]).answered == 1


def test_a_number_that_json_has_not_is_null(folder: Path) -> None:
    """An infinite cell of a column that the output has ended the job."""
    Image.new("RGB", (8, 6)).save("a.png")
    cells = {"image": ["a.png"] * 3, "score": [math.inf, math.nan, 1.5]}
    pq.write_table(pa.table(cells), "in.parquet")
    run = ["run", "in.parquet", "--prompt", "?", "--quiet", "--out", "out.jsonl"]
    given = [*run, "--columns", "id,text,score"]
    assert cli.main(given, open_batcher=Echo()) == 0
    scores = {row["id"][-1]: row["score"] for row in answers("out.jsonl")}
    assert scores == {"0": None, "1": None, "2": 1.5}


HUNG_UP = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from vlm_batch.cli import watching
watching.PLAIN_SECONDS = 0.1
from tests.test_job_runs import Echo
from vlm_batch.cli import main as cli

class Slow(Echo):
    def answer(self, request):
        Path("asked").touch()
        while not Path("closed").exists():
            time.sleep(0.01)
        log = Path("{log}")
        while log.name and not (log.exists() and b" left, " in log.read_bytes()) and len(self.asked) == 9:
            time.sleep(0.01)  # one line of progress is written to it
        return super().answer(request)

sys.exit(cli.main({command!r}, open_batcher=Slow()))
"""


@pytest.mark.parametrize(
    "options",
    [
        ["--out", "out.jsonl"],
        ["--out", "out.csv", "--quiet"],
        ["--sidecar", ".txt"],
        [],
    ],
    ids=" ".join,
)
def test_a_job_outlives_its_terminal_if_its_answers_are_kept(
    folder: Path, options: list[str]
) -> None:
    """Its session's terminal is closed, as a window is, or an ssh connection that breaks."""
    for number in range(10):
        Image.new("RGB", (8, 8)).save(f"p{number}.png")
    command = ["run", *(f"p{number}.png" for number in range(10)), *options]
    code = HUNG_UP.format(
        root=str(ROOT),
        command=command,
        log=f"{options[1]}.log" if "--out" in options else "",
    )
    mine, its = pty.openpty()
    leads = (
        "import fcntl, os, signal, sys, termios; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.setsid(); "
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0); exec(sys.argv[1])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", leads, code],
        stdin=its,
        stdout=its,
        stderr=its,
        env=here(),
    )
    os.close(its)
    while not Path("asked").exists() and process.poll() is None:
        if select.select([mine], [], [], 0.01)[0]:  # the terminal shows what it says
            os.read(mine, 1 << 16)
    os.close(mine)
    if options:
        Path("closed").touch()
    else:
        assert process.wait(60) == -signal.SIGHUP
        return
    assert process.wait(60) == 0
    if "--sidecar" in options:
        assert len(list(folder.glob("*.txt"))) == 10
        return
    assert len(answers(options[1])) == 10
    log = Path(f"{options[1]}.log").read_text()
    assert (
        "10 requests, 0 errors" in log and "answers: out" in log and "\x1b" not in log
    )
    assert re.search(r"^\[\d of 10\] .* left, .*\d in flight", log, re.MULTILINE)
    assert ("p9.png: describe" in log) == ("--quiet" not in options)


def test_rows_that_failed_before_are_not_waited_for() -> None:
    """Of 10 rows, 6 answered and 2 failed before: this run asks 2, whether it ends or is interrupted."""
    summary = Summary(total=10, done_before=6, failed_before=2)
    view = JobView(table_to=io.StringIO())
    view._summary = summary
    summary.answered = 1
    assert summary.asked_rows == 2 and view._place() == "1 of 2"
    summary.interrupted = True
    assert view._totals(summary).plain.startswith("1 of 2 requests done")
    assert Summary().asked_rows is None
