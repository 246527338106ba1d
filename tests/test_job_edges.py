"""Jobs at their edges: inputs that change under them, names that lead to one file, streams and signals of a shell."""

from __future__ import annotations

import csv
import html
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.test_job_runs import ROOT, RUN, Echo, answers, folder, here, told
from vlm_batch.assets import default_checkpoint
from vlm_batch.cli import dry_run
from vlm_batch.cli import main as cli
from vlm_batch.jobs import journal, tables
from vlm_batch.jobs.formats import neutralised, restored
from vlm_batch.jobs.plan import Job
from vlm_batch.jobs.questions import Questions
from vlm_batch.jobs.rows import Ids, JobRow
from vlm_batch.jobs.runner import Watch
from vlm_batch.jobs.sinks import Sink
from vlm_batch.jobs.sources import open_sources
from vlm_batch.jobs.summary import Kinds
from vlm_batch.runtime import beginning
from vlm_batch.types import Request, Result

__all__ = ["folder"]  # the fixture


class Growing(Echo):
    """Its input has ``lines`` appended once some rows are answered."""

    def __init__(
        self, path: Path, lines: str, after: int = 5, stop_after: int | None = None
    ) -> None:
        super().__init__(stop_after)
        self.path, self.lines, self.after = path, lines, after

    def answer(self, request: Request) -> Result:
        if len(self.asked) == self.after:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(self.lines)
        return super().answer(request)


def line(row_id: str, image: str = "new.png") -> str:
    return json.dumps({"id": row_id, "image": image, "kind": "k"}) + "\n"


@pytest.mark.parametrize(
    "again", ["r0", "r19"], ids=["answered", "in flight or waiting"]
)
def test_ids_that_are_appended_while_a_job_runs_are_skipped(
    folder: Path, again: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``r19`` is in flight, or to be asked, when a row with its id comes."""
    asked = Growing(folder / "rows.jsonl", line(again) * 3 + line("r20"))
    # two pictures are bad
    assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=asked) == cli.FAILED
    assert set(told("out.jsonl")) == {f"r{number}" for number in range(21)}
    # the first row's, and not the appended one's
    assert told("out.jsonl")[again][0].endswith(f"p{again[1:]}.png")
    said = capsys.readouterr().out
    assert (
        f"3 rows skipped whose id had come before: '{again}'" in said
        and "21 requests" in said
    )


def test_a_job_whose_input_was_given_ids_again_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that was stopped, after its input had grown by ids that it knew, is not refused for them."""
    stopped = Growing(
        folder / "rows.jsonl", line("r0") + line("r18") + line("r20"), stop_after=8
    )
    assert (
        cli.main([*RUN, "--out", "out.jsonl"], open_batcher=stopped) == cli.INTERRUPTED
    )
    assert len(answers("out.jsonl")) == 8
    on = Echo()
    assert (
        cli.main([*RUN, "--out", "out.jsonl", "--resume"], open_batcher=on)
        == cli.FAILED
    )
    assert (
        set(told("out.jsonl")) == {f"r{number}" for number in range(21)}
        and len(on.asked) == 13
    )
    assert "2 rows skipped" in capsys.readouterr().out
    # of a new job it is a mistake
    assert cli.main([*RUN, "--out", "new.jsonl"], open_batcher=Echo()) == cli.USAGE


def test_rows_that_cannot_be_read_on_end_a_job_with_what_was_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ended(Echo):
        def as_completed(self, requests: object) -> Iterator[Result]:
            yield Result(
                request_id="refused-0", finish_reason="error", error="OSError: gone"
            )

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
        [sys.executable, "-c", HELD.format(name=name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=here(),
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
def test_a_link_to_an_output_is_the_output(
    folder: Path, suffix: str, is_there: bool
) -> None:
    """Neither a link, a link's link nor another folder's name gets a second process to a file that one writes."""
    (folder / "there").mkdir()
    os.symlink(folder / "there" / f"out{suffix}", f"link{suffix}")
    os.symlink(f"link{suffix}", f"far{suffix}")
    os.symlink("there", "here")
    names = [f"there/out{suffix}", f"link{suffix}", f"far{suffix}", f"here/out{suffix}"]
    if is_there:
        assert (
            cli.main([*RUN, "--out", names[0]], open_batcher=Echo(stop_after=5))
            == cli.INTERRUPTED
        )
    for name in names[1:]:
        with held(name):
            for other in names:
                echo = Echo()
                assert (
                    cli.main([*RUN, "--out", other, "--resume"], open_batcher=echo)
                    == cli.USAGE
                    and not echo.opened
                )
    # begun by one name, gone on with by another, and still a link at the end
    for name in names:
        assert (
            cli.main([*RUN, "--out", name, "--resume"], open_batcher=Echo())
            == cli.FAILED
        )
        assert set(told(name)) == {f"r{number}" for number in range(20)}
    assert (
        os.path.islink(f"link{suffix}")
        and not list(folder.glob("*.lock"))
        and not list(folder.glob("*.job.json"))
    )


def test_a_second_name_of_an_output_is_refused_while_one_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Echo(stop_after=5))
        == cli.INTERRUPTED
    )
    os.link("out.jsonl", "other.jsonl")
    capsys.readouterr()
    with held("out.jsonl"):
        assert (
            cli.main([*RUN, "--out", "other.jsonl", "--overwrite"], open_batcher=Echo())
            == cli.USAGE
        )
    assert "other.jsonl is being written by another process" in capsys.readouterr().err
    assert len(answers("out.jsonl")) == 5


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_an_input_is_no_output_by_any_name(
    folder: Path, link: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    link("rows.jsonl", "out.jsonl")
    before = Path("rows.jsonl").read_bytes()
    assert (
        cli.main([*RUN, "--out", "out.jsonl", "--overwrite"], open_batcher=Echo())
        == cli.USAGE
    )
    assert (
        "out.jsonl is read by this job" in capsys.readouterr().err
        and Path("rows.jsonl").read_bytes() == before
    )


def test_two_jobs_do_not_write_one_folders_text_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert (
        cli.main(
            [*RUN, "--out", "out.jsonl", "--report", "report.html"], open_batcher=Echo()
        )
        == cli.FAILED
    )
    assert os.path.islink("report.html") and "<html" in Path("page.html").read_text()


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


OWN = [
    {"id": f"r{number}", "image": "p.png", "prompt": f"what is {number}?"}
    for number in range(4)
]
CHAT = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": "q.png"}},
            {"type": "text", "text": "a"},
        ],
    }
]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"prompt": "one"}, {"prompt": "other"}),
        ({}, {"prompt": "its own"}),
        (
            {"params": {"temperature": 0.5, "seed": 1}},
            {"params": {"temperature": 0.6, "seed": 1}},
        ),
        ({"params": {"max_tokens": 5}}, {}),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            {"messages": [{"role": "user", "content": "b"}]},
        ),
        (
            {"image": "https://example.com/a.png"},
            {"image": "https://example.com/b.png"},
        ),
        (
            {"image": "data:image/png;base64,AAAA"},
            {"image": "data:image/png;base64,AAAB"},
        ),
        (
            {"image": "iVBORw0KGgo" + "A" * 69},
            {"image": "iVBORw0KGgo" + "A" * 66 + "B" * 3},
        ),
        ({"images": ["p.png", "p.png"]}, {"images": ["p.png"]}),
        ({"image": "p.png"}, {"image": "gone.png"}),
        ({"image": "p.png", "prompt": "a"}, {"images": [], "prompt": "a"}),
        ({"kind": "cat"}, {"kind": "dog"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("out", ["out.jsonl", "out.csv"])
def test_rows_that_ask_something_else_are_noticed(
    folder: Path,
    out: str,
    before: dict[str, Any],
    now: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a row asks is its own prompt, params and pictures, and what a prompt takes of its columns."""
    Image.new("RGB", (8, 8)).save("p.png")
    rows = [{"id": f"r{number}", "image": "p.png", "kind": "k"} for number in range(4)]
    own = {"id": "own", "kind": "k"} | (
        {} if "images" in {**before, **now} else {"image": "p.png"}
    )
    write("t.jsonl", [*rows, own | before])
    command = ["run", "t.jsonl", "--prompt", "what {kind}?", "--quiet", "--out", out]
    assert cli.main(command, open_batcher=Echo()) == 0
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == 0
    write("t.jsonl", [*rows, own | now])
    capsys.readouterr()
    refused = Echo()
    assert (
        cli.main([*command, "--resume"], open_batcher=refused) == cli.USAGE
        and not refused.opened
    )
    said = capsys.readouterr().err
    assert "1 answered row" in said and ": own. --overwrite asks all rows again" in said
    assert (
        cli.main([*command, "--resume", "--force"], open_batcher=refused) == 0
        and not refused.opened
    )
    assert cli.main([*command, "--overwrite"], open_batcher=Echo()) == 0
    assert (
        cli.main([*command, "--resume"], open_batcher=refused) == 0
        and not refused.opened
    )


def test_rows_that_ask_the_same_in_another_form_are_the_same(folder: Path) -> None:
    Image.new("RGB", (8, 8)).save("p.png")
    row = {
        "id": "a",
        "image": "p.png",
        "prompt": "what?",
        "params": {"seed": 1, "max_tokens": 9},
    }
    write("t.jsonl", [row])
    command = ["run", "t.jsonl", "--quiet", "--out", "out.jsonl"]
    assert cli.main(command, open_batcher=Echo()) == 0
    moved = {
        "params": {"max_tokens": 9, "seed": 1},
        "image": str(folder / "p.png"),
        "prompt": "what?",
        "id": "a",
    }
    write("t.jsonl", [moved, {**row, "id": "new"}])
    on = Echo()
    assert cli.main([*command, "--resume"], open_batcher=on) == 0 and on.asked == [
        "new"
    ]


@pytest.mark.parametrize("kind", ["bytes", "struct", "path"])
def test_pictures_of_tables_are_no_other_question(folder: Path, kind: str) -> None:
    """A table's pictures are read when they are asked about, and not to count its rows."""
    Image.new("RGB", (8, 8)).save("p.png")
    data = Path("p.png").read_bytes()
    cell: dict[str, Any] = {
        "bytes": data,
        "struct": {"bytes": None, "path": "p.png"},
        "path": "p.png",
    }
    pq.write_table(
        pa.table({"id": ["a", "b"], "image": [cell[kind]] * 2, "kind": ["c", "d"]}),
        "t.parquet",
    )
    command = [
        "run",
        "t.parquet",
        "--prompt",
        "{kind}?",
        "--quiet",
        "--out",
        "out.jsonl",
    ]
    assert cli.main(command, open_batcher=Echo()) == 0
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == 0
    pq.write_table(
        pa.table({"id": ["a", "b"], "image": [cell[kind]] * 2, "kind": ["c", "other"]}),
        "t.parquet",
    )
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == cli.USAGE


def test_a_picture_that_a_chat_names_is_compared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    for prompt, options in (
        ("one", []),
        ("one", ["--resume"]),
        ("other", ["--resume"]),
    ):
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin", lines(prompt))
        assert cli.main([*command, *options], open_batcher=Echo()) == 0
        said = "1 row answered before asked something else then"
        assert (said in capsys.readouterr().out) == (prompt == "other")


def test_an_output_that_lost_what_its_rows_asked_is_gone_on_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (8, 8)).save("p.png")
    write("t.jsonl", OWN)
    command = ["run", "t.jsonl", "--quiet", "--out", "out.jsonl"]
    assert cli.main(command, open_batcher=Echo(stop_after=3)) == cli.INTERRUPTED
    Path("out.jsonl.files").unlink()
    write("t.jsonl", [{**row, "prompt": "other"} for row in OWN])
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == 0
    said = "of 3 answered rows it is not known what was asked"
    assert said in capsys.readouterr().err
    assert len(told("out.jsonl")) == 4


def test_lines_that_do_not_say_what_was_asked_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (8, 8)).save("p.png")
    write("t.jsonl", OWN)
    command = ["run", "t.jsonl", "--quiet", "--out", "out.jsonl"]
    assert cli.main(command, open_batcher=Echo()) == 0
    write("out.jsonl.files", [{"id": "r0", "times": [[1, 2]], "contents": ["a"]}])
    on = Echo()
    assert cli.main([*command, "--resume"], open_batcher=on) == cli.USAGE
    assert "out.jsonl.files does not say what 'r0' asked" in capsys.readouterr().err
    assert not on.opened and len(told("out.jsonl")) == 4
    assert cli.main([*command, "--overwrite"], open_batcher=on) == 0
    assert cli.main([*command, "--resume"], open_batcher=on) == 0


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.files", "out.jsonl.job.json"])
def test_files_that_are_nested_too_deeply_are_refused(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's parser has no stack for them."""
    Image.new("RGB", (8, 8)).save("p.png")
    write("t.jsonl", OWN)
    command = ["run", "t.jsonl", "--quiet", "--out", "out.jsonl"]
    assert cli.main(command, open_batcher=Echo()) == 0
    before = Path(name).read_text()
    Path(name).write_text("[" * 100_000 + "\n" + before)
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == cli.USAGE
    assert f"{name}" in capsys.readouterr().err
    if name == "out.jsonl":
        # as a last line that was cut
        Path(name).write_text(before + "[" * 100_000)
        assert cli.main([*command, "--resume"], open_batcher=Echo()) == 0
        assert len(told("out.jsonl")) == 4


class Meddled(Echo):
    """Something is done to its files once some rows are answered."""

    def __init__(self, meddle: Callable[[], object], after: int = 5) -> None:
        super().__init__()
        self.meddle, self.after = meddle, after

    def answer(self, request: Request) -> Result:
        if len(self.asked) == self.after:
            self.meddle()
        return super().answer(request)


def cut(name: str) -> None:
    os.truncate(name, 10)


def replaced(name: str) -> None:
    os.unlink(name)
    Path(name).write_text("something else\n")


MEDDLING: dict[str, tuple[Callable[[str], object], str]] = {
    "deleted": (
        os.unlink,
        "was deleted while it was written; the answers until then are in {0} again",
    ),
    "replaced": (
        replaced,
        "was replaced by another file while it was written; the answers until then are in {0}.replaced",
    ),
    "moved": (lambda name: os.rename(name, "moved"), "was moved while it was written"),
    "cut": (cut, "to 10 bytes while it was written"),
}


@pytest.mark.parametrize("what", MEDDLING)
@pytest.mark.parametrize("out", ["out.jsonl", "out.csv"])
@pytest.mark.parametrize("after", [5, 19], ids=["in the middle", "at the end"])
def test_an_output_that_goes_meanwhile_is_no_success(
    folder: Path, out: str, what: str, after: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name is not printed as if it had the answers, and no answer is lost that can be kept."""
    meddle, said = MEDDLING[what]
    written = out if out.endswith("jsonl") else f"{out}.journal.jsonl"
    held: list[str] = []

    def now() -> None:
        held.extend(one["id"] for one in answers(written))
        meddle(written)

    assert (
        cli.main([*RUN, "--out", out], open_batcher=Meddled(now, after)) == cli.FAILED
    )
    told_of = capsys.readouterr()
    assert (
        said.format(written) in told_of.err
        and "answers:" not in told_of.out
        and len(held) == after
    )
    left = {
        "deleted": written,
        "replaced": f"{written}.replaced",
        "moved": "moved",
    }.get(what)
    if left is not None:
        assert [one["id"] for one in answers(left)][:after] == held
    if what == "deleted":
        assert (
            cli.main([*RUN, "--out", out, "--resume"], open_batcher=Echo())
            == cli.FAILED
        )
        assert set(told(out)) == {f"r{number}" for number in range(20)}


def test_answers_of_earlier_runs_that_go_meanwhile_are_missed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main([*RUN, "--out", "out.csv"], open_batcher=Echo(stop_after=8))
        == cli.INTERRUPTED
    )
    assert len(answers("out.csv")) == 8
    gone = Meddled(lambda: os.unlink("out.csv"))
    assert (
        cli.main([*RUN, "--out", "out.csv", "--resume"], open_batcher=gone)
        == cli.FAILED
    )
    assert "out.csv was deleted or emptied while the job ran" in capsys.readouterr().err
    assert len(answers("out.csv.journal.jsonl")) == 12


def test_side_files_that_go_meanwhile_stop_no_job(folder: Path) -> None:
    assert (
        cli.main(
            [*RUN, "--out", "out.jsonl"],
            open_batcher=Meddled(lambda: os.unlink("out.jsonl.files")),
        )
        == cli.FAILED
    )
    assert len(told("out.jsonl")) == 20


PAUSE = """
import os, sys, time
from pathlib import Path

class Pause:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["PAUSE_AT"] and not Path("paused").exists():
            Path("paused").touch()
            while not Path("go").exists():
                time.sleep(0.01)

sys.meta_path.insert(0, Pause())
"""
FRESH = "import os, signal, sys\nfor one in (1, 2, 15): signal.signal(one, signal.SIG_DFL)\nos.execv(sys.argv[1], sys.argv[1:])"


def paused(
    folder: Path, where: str, *options: str, command: str = "run", **streams: Any
) -> subprocess.Popen[bytes]:
    """Start a job that stands still where it imports a module, until there is a file "go"."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(PAUSE)
    Image.new("RGB", (32, 32)).save("a.png")
    words = [
        sys.executable,
        "-m",
        "vlm_batch",
        command,
        "a.png",
        "--model",
        str(default_checkpoint()),
        "--max-tokens",
        "2",
    ]
    environment = here() | {"PAUSE_AT": where}
    environment["PYTHONPATH"] = (
        f"{folder / 'hook'}:{environment.get('PYTHONPATH', ROOT)}"
    )
    streams = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    } | streams
    process: Any = subprocess.Popen(
        [sys.executable, "-c", FRESH, *words, *options], env=environment, **streams
    )
    deadline = time.monotonic() + 60
    while (
        not Path("paused").exists()
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    return cast("subprocess.Popen[bytes]", process)


@pytest.mark.parametrize("where", ["numpy", "vlm_batch.jobs.runner"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_signal_while_the_program_starts_ends_it_in_one_line(
    folder: Path, where: str, number: signal.Signals
) -> None:
    process = paused(folder, where, "--out", "out.jsonl")
    process.send_signal(number)
    out, said = process.communicate(timeout=60)
    word = {signal.SIGINT: b"interrupted", signal.SIGTERM: b"terminated"}[number]
    assert (process.returncode, out, said) == (
        128 + number,
        b"",
        b"vlm-batch: " + word + b"\n",
    )


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("numpy", ["run", "--out", "out.jsonl"]),
        ("numpy", ["read", "--out", "."]),
        ("vlm_batch.jobs.runner", ["run"]),
    ],
)
def test_a_hangup_while_the_program_starts(
    folder: Path, where: str, options: list[str]
) -> None:
    """A job that keeps its answers goes on, and another ends by the signal."""
    command, *options = options
    process = paused(folder, where, *options, command=command)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.05)
    Path("go").touch()
    _, said = process.communicate(timeout=120)
    if options:
        assert process.returncode == 0, said
        kept = {"run": "out.jsonl", "read": "pages.jsonl"}[command]
        assert len(answers(kept)) == 1
    else:
        assert process.returncode == -signal.SIGHUP


def test_a_terminal_that_closes_while_the_program_starts(folder: Path) -> None:
    mine, its = pty.openpty()
    process = paused(
        folder,
        "vlm_batch.jobs.runner",
        "--out",
        "out.jsonl",
        stdin=its,
        stdout=its,
        stderr=its,
    )
    os.close(its)
    os.close(mine)
    process.send_signal(signal.SIGHUP)  # as the session's leader would be sent
    Path("go").touch()
    assert process.wait(120) == 0
    assert (
        len(answers("out.jsonl")) == 1
        and "answers: out.jsonl" in Path("out.jsonl.log").read_text()
    )


IN_PROCESS = """
import sys
sys.path.insert(0, {root!r})
from tests.test_job_runs import Echo
from vlm_batch.assets import default_checkpoint
from vlm_batch.cli import main as cli
sys.exit(cli.main({command!r}, open_batcher=Echo()))
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed(folder: Path, closed: str) -> None:
    """Nothing is shown there, and no file takes its number: the output has answers and nothing else."""
    code = IN_PROCESS.format(root=str(ROOT), command=[*RUN[:-1], "--out", "out.jsonl"])
    process = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code],
        capture_output=True,
        env=here(),
        timeout=120,
    )
    assert process.returncode == cli.FAILED, process.stderr  # two pictures are bad
    assert set(told("out.jsonl")) == {f"r{number}" for number in range(20)}


def test_a_command_whose_streams_are_closed_starts(folder: Path) -> None:
    for closed, status in (("<&- >&- 2>&-", 0), (">&-", 0)):
        command = f'exec "$0" -m vlm_batch families qwen2_vl {closed}'
        run = subprocess.run(
            ["sh", "-c", command, sys.executable],
            capture_output=True,
            env=here(),
            timeout=120,
        )
        assert (run.returncode, run.stderr) == (status, b"")
    command = f'exec "$0" -m vlm_batch run rows.jsonl --prompt "{{kind}}" --model {default_checkpoint()} --out - >&-'
    run = subprocess.run(
        ["sh", "-c", command, sys.executable],
        capture_output=True,
        env=here(),
        timeout=120,
    )
    assert run.returncode == cli.USAGE and b"standard output is closed" in run.stderr


def test_only_the_command_attends_to_signals_as_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {
        ("python", "-m", "vlm_batch", "run"): True,
        ("python", "-X", "dev", "-m", "vlm_batch"): True,
        ("python", "/usr/bin/vlm-batch", "run"): True,
        ("python", "-m", "pytest", "vlm_batch"): False,
        ("python", "own.py", "vlm-batch"): False,
        ("python", "-c", "import vlm_batch"): False,
        ("python",): False,
    }
    for words, is_it in known.items():
        monkeypatch.setattr(sys, "orig_argv", list(words))
        assert beginning.is_command() == is_it, words


@pytest.mark.parametrize("out", [["--out", "out.jsonl"], []], ids=["a file", "no file"])
def test_the_closing_table_shows_the_beginning_of_long_questions(
    folder: Path, out: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor do long names, errors or kinds of error fill the screen; the file has all of them whole."""
    long = "a long question " * 100_000
    rows = [
        {"id": f"r{number}", "image": "p.png", "prompt": f"{number} {long}"}
        for number in range(3)
    ]
    write(
        "t.jsonl",
        [
            *rows,
            {"id": "n" * 10**6, "image": "p.png"},
            {"id": "e", "image": "bad" + "x" * 10**6},
        ],
    )

    class Brief(Echo):
        def answer(self, request: Request) -> Result:
            return replace(super().answer(request), text="whole " * 2000)

    assert cli.main(["run", "t.jsonl", *out], open_batcher=Brief()) == cli.FAILED
    shown = capsys.readouterr()
    assert len(shown.out) + len(shown.err) < 400_000
    assert (
        "(1,600,002 characters)" in " ".join(shown.out.split())
        and "(1,000,000 characters)" in shown.err
    )
    if out:
        assert told("out.jsonl").keys() == {"r0", "r1", "r2", "n" * 10**6, "e"}
    else:
        assert shown.out.count("whole") >= 4 * 2000  # nothing else has the answers


def test_a_long_message_is_of_a_kind_at_once() -> None:
    """It took minutes: long words were searched from each of their letters, and for long names."""
    kinds = Kinds()
    for number in range(3):
        kinds.add(f"{number} " + "w" * 10**6, ["n" * 10**6])
    assert len(kinds.counts) == 1


class Counted(Watch):
    def __init__(self) -> None:
        self.rows: list[int] = []

    def counted(self, rows: int) -> None:
        self.rows.append(rows)


def test_rows_are_counted_in_sight_and_read_as_rows_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan of a long table shows how far it is; whether lines have ids of their own takes no row."""
    write("t.jsonl", [{"id": f"r{number}", "image": "p.png"} for number in range(3500)])
    made: list[str] = []
    row = tables.JsonLines._row

    def watched(self: tables.JsonLines, line: str, place: str) -> JobRow:
        made.append(place)
        return row(self, line, place)

    monkeypatch.setattr(tables.JsonLines, "_row", watched)
    (source,), _ = open_sources(["t.jsonl"])
    watch = Counted()
    assert Job([source], Questions(), Sink()).settings({})["tables"] == {} and not made
    assert (
        Job([source], Questions(), Sink()).plan(Ids(), Ids(), watch.counted).total
        == 3500
    )
    assert watch.rows == [1000, 2000, 3000] and len(made) == 3500


@pytest.mark.parametrize(
    ("line", "is_place"),
    [
        ({"id": "a"}, False),
        ({"id": 7}, False),
        ({"custom_id": "a", "body": {"messages": []}}, False),
        ({"custom_id": " ", "body": {"messages": []}}, True),
        ({"id": " "}, True),
        ({"id": None}, True),
        ({}, True),
        ({"id": "t.jsonl:1"}, True),
        ({"images": ["a"], "image": "b"}, False),  # a row that cannot be asked
    ],
    ids=str,
)
def test_whether_a_line_has_an_id(
    folder: Path, line: dict[str, Any], is_place: bool
) -> None:
    write(
        "t.jsonl",
        [({} if "body" in line or "images" in line else {"image": "p.png"}) | line],
    )
    (source,), _ = open_sources(["t.jsonl"])
    (row,) = source.rows()
    assert (
        source.numbered
        == is_place
        == (row.error is None and row.id.startswith("t.jsonl:"))
    )


class Stuck(Echo):
    """Answers two rows, and the next only when the test is over."""

    def __init__(self, answered: int = 2) -> None:
        super().__init__()
        self.answered, self.is_over = answered, threading.Event()

    def answer(self, request: Request) -> Result:
        if len(self.asked) == self.answered:
            self.is_over.wait(60)
        return super().answer(request)


@pytest.mark.parametrize("answered", [2, 0])
def test_a_dry_run_ends_and_says_how_far_it_is(
    folder: Path,
    answered: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dry_run, "LONGEST_SECONDS", 0.6)
    monkeypatch.setattr(dry_run, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(dry_run, "PLAIN_SECONDS", 0.1)
    stuck = Stuck(answered)
    try:
        status = cli.main([*RUN, "--dry-run"], open_batcher=stuck)
    finally:
        stuck.is_over.set()
    shown = capsys.readouterr()
    assert f"{8 - answered} of the first rows had not ended" in shown.out
    assert (
        f"[asking the first rows: {answered} of " in shown.err
        and "ended, 0 s of at most 1]" in shown.err
    )
    assert status == (cli.ANSWERED if answered else cli.FAILED)
    assert ("measured on 2" in shown.out) == bool(answered)


def test_an_interrupt_ends_a_dry_run(folder: Path) -> None:
    assert (
        cli.main([*RUN, "--dry-run"], open_batcher=Echo(stop_after=2))
        == cli.INTERRUPTED
    )


FORMULAS = [
    "=1+1",
    "@SUM(A1)",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "\t=1",
    "\r=1",
    "\n=1",
    "\uff1d1",
    "'=1",
    "''@a",
    "- a list",
]
PLAIN = ["-5", "+3.25", "-1e5", "-.5", "a=b", "'quoted'", "", "it's", "'", "[1]", "1-2"]


@pytest.mark.parametrize("text", FORMULAS + PLAIN)
def test_what_a_spreadsheet_would_run_is_neutralised_and_restored(text: str) -> None:
    assert neutralised(text) == (f"'{text}" if text in FORMULAS else text)
    assert restored(neutralised(text)) == text


class Formula(Echo):
    def answer(self, request: Request) -> Result:
        return replace(super().answer(request), text="=1+1")


@pytest.mark.parametrize(
    "options", [[], ["--spreadsheet-safe"], ["--no-spreadsheet-safe"]], ids=str
)
@pytest.mark.parametrize("out", ["out.csv", "out.tsv"])
def test_no_cell_of_a_csv_file_is_a_formula(
    folder: Path, out: str, options: list[str]
) -> None:
    """Ids, answers and names of columns; a job that goes on knows its rows, and the report its answers."""
    rows = [
        {"id": row_id, "image": "p.png", "=name": "@me"}
        for row_id in ("=a", "-b", "-7", "'=c", "d")
    ]
    write("t.jsonl", rows)
    command = [
        "run",
        "t.jsonl",
        "--columns",
        "=name,text",
        "--quiet",
        "--out",
        out,
        *options,
    ]
    assert cli.main(command, open_batcher=Formula(stop_after=2)) == cli.INTERRUPTED
    on = Formula()
    assert cli.main([*command, "--resume"], open_batcher=on) == 0 and len(on.asked) == 3
    again = Formula()
    assert (
        cli.main([*command, "--resume"], open_batcher=again) == 0 and not again.opened
    )
    with open(out, newline="") as file:
        cells = list(csv.reader(file, delimiter="\t" if out.endswith("tsv") else ","))
    mark = "" if options == ["--no-spreadsheet-safe"] else "'"
    assert cells[0] == ["id", f"{mark}=name", "text", "error"]
    assert {row[0] for row in cells[1:]} == {
        f"{mark}=a",
        f"{mark}-b",
        "-7",
        f"{mark}'=c",
        "d",
    }
    assert all(row[1:3] == [f"{mark}@me", f"{mark}=1+1"] for row in cells[1:])
    assert cli.main(["report", out]) == 0
    page = html.unescape(Path(out).with_suffix(".html").read_text())
    assert "=1+1" in page and "'=1+1" not in page


def test_forms_for_programs_keep_texts_as_they_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("t.jsonl", [{"id": "=a", "image": "p.png"}])
    for out in ("out.jsonl", "out.parquet"):
        assert cli.main(["run", "t.jsonl", "--out", out], open_batcher=Formula()) == 0
        assert [(row["id"], row["text"]) for row in answers(out)] == [("=a", "=1+1")]
        command = ["run", "t.jsonl", "--out", out, "--overwrite", "--spreadsheet-safe"]
        assert cli.main(command, open_batcher=Formula()) == cli.USAGE


@pytest.mark.parametrize(
    "line",
    [
        {"id": "a"},
        {"id": "a", "custom_id": "a"},
        {"id": "a", "custom_id": "a", "error": "gone"},
        {"id": "a", "custom_id": "a", "response": {"body": {"choices": []}}},
        {"id": "a", "custom_id": "a", "response": {"body": {"choices": [3]}}},
    ],
    ids=str,
)
def test_lines_that_are_no_answers_of_a_batch_are_refused(
    folder: Path, line: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (8, 8)).save("p.png")
    write("t.jsonl", OWN)
    command = ["run", "t.jsonl", "--out", "out.jsonl", "--format", "openai-batch"]
    assert cli.main(command, open_batcher=Echo()) == 0
    with open("out.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    assert cli.main([*command, "--resume"], open_batcher=Echo()) == cli.USAGE
    assert "is not in OpenAI's batch form" in capsys.readouterr().err


@pytest.mark.parametrize(
    "strange",
    [
        {"created": "yesterday"},
        {"created": 1e308, "timings": {"total": -1e308}},
        {"timings": {"total": -5, "decode": -1}},
        {"created": 10**400},
        {"created": 5, "timings": {"total": 1e308, "queue": -1e308, "decode": []}},
        {"usage": {"prompt_tokens": 0, "cached_tokens": 5, "completion_tokens": "x"}},
        {"prompt": {"a": 1}},
        {"prompt": ["a"], "text": 3, "finish_reason": 3},
        {"images": [f"p.png#{'9' * 5000}"]},
        {"images": 3, "image_sizes": {"a": 1}, "others": [3]},
        {"error": {"a": 1}},
    ],
    ids=lambda one: str(one)[:40],
)
def test_a_report_of_any_answers_ends(folder: Path, strange: dict[str, Any]) -> None:
    Image.new("RGB", (8, 8)).save("p.png")
    write("t.jsonl", OWN)
    run = ["run", "t.jsonl", "--out", "out.jsonl", "--quiet"]
    assert cli.main(run, open_batcher=Echo()) == 0
    rows = [{**row, **strange} for row in answers("out.jsonl")]
    write("out.jsonl", [*answers("out.jsonl"), *rows])
    assert cli.main(["report", "out.jsonl"], open_batcher=Echo()) == 0
    assert Path("out.html").stat().st_size
