"""The command line, with a batcher that answers at once, and once with the real one."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import pytest
from PIL import Image
from rich.console import Console

from vlm_batch import families
from vlm_batch.cli import console
from vlm_batch.cli import main as cli
from vlm_batch.types import Request, Result, SamplingParams, Timings, Usage, Video


class ScriptedBatcher:
    """Answers with the picture's name; a missing picture is an error, and a name with "stop" an interrupt."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.args = argparse.Namespace()
        self.closed = False

    def __call__(self, args: argparse.Namespace) -> ScriptedBatcher:
        self.args = args
        return self

    def __enter__(self) -> ScriptedBatcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        for request in requests:
            self.requests.append(request)
            yield self.answer(request)

    def answer(self, request: Request) -> Result:
        assert request.request_id is not None
        names = [Path(image).name for image in request.images]
        if any("stop" in name for name in names):
            raise KeyboardInterrupt
        if not all(Path(image).exists() for image in request.images):
            return Result(
                request_id=request.request_id, finish_reason="error", error="InvalidImage: there is no such file"
            )
        return Result(
            request_id=request.request_id,
            text=f"this is [bold]{' and '.join(names)}",
            usage=Usage(prompt_tokens=9, completion_tokens=4, image_tokens=4),
            timings=Timings(total=0.5, queue=0.25),
            image_sizes=((24, 16),) * len(request.images),
        )


@pytest.fixture
def batcher() -> ScriptedBatcher:
    return ScriptedBatcher()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pictures in a folder and in a folder inside it, and things that are no pictures to look for."""
    for name in ("b.png", "a.JPG", "inside/c.webp", ".hidden/d.png", "._e.png"):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (24, 16)).save(path, format="PNG")
    (tmp_path / "pictures" / "notes.txt").write_text("no picture")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_asks_one_question_about_every_picture(
    folder: Path, batcher: ScriptedBatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "pictures", "--prompt", "what is it?"], open_batcher=batcher) == 0
    assert [request.images for request in batcher.requests] == [
        ("pictures/a.JPG",),
        ("pictures/b.png",),
        ("pictures/inside/c.webp",),
    ]
    assert {request.prompt for request in batcher.requests} == {"what is it?"}
    assert batcher.closed
    out, err = capsys.readouterr()
    for shown in (
        "a.JPG",
        "inside/c.webp",
        "24x16",
        "this is [bold]a.JPG",
        "0.25",
        "stop",
        "3 requests, 0 errors, 12 tokens",
    ):
        assert shown in out
    assert "a.JPG: this is [bold]a.JPG" in err.splitlines()
    assert "\x1b" not in out + err


def test_videos_among_pictures(folder: Path, batcher: ScriptedBatcher) -> None:
    """A file by its suffix; folders are searched for videos when told."""
    (folder / "pictures" / "film.MP4").touch()
    cli.main(["run", "pictures/film.MP4", "pictures/b.png", "http://x/y.mov?z=1"], open_batcher=batcher)
    assert [request.images for request in batcher.requests] == [(), ("pictures/b.png",), ()]
    assert [request.videos for request in batcher.requests] == [
        (Video("pictures/film.MP4"),),
        (),
        (Video("http://x/y.mov?z=1"),),
    ]
    for options, expected in ((["--videos", "--fps", "0.5", "--max-frames", "9"], 4), ([], 3)):
        found = ScriptedBatcher()
        cli.main(["run", "pictures", *options, "--json", "out.jsonl"], open_batcher=found)
        assert len(found.requests) == expected
        lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
        assert [line["videos"] for line in lines if line["videos"]] == [["pictures/film.MP4"]] * bool(options)
        for request in found.requests:
            assert all((video.fps, video.max_frames) == (0.5, 9) for video in request.videos)


def test_folders_inside_are_left_out_when_told(folder: Path, batcher: ScriptedBatcher) -> None:
    cli.main(["run", "pictures", "pictures/b.png", "--no-recursive"], open_batcher=batcher)
    assert [request.request_id for request in batcher.requests] == ["pictures/a.JPG", "pictures/b.png"]


def test_a_missing_picture_fails_alone(
    folder: Path, batcher: ScriptedBatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "nowhere.png", "pictures/b.png"]
    assert cli.main(command, open_batcher=batcher) == 1
    out = capsys.readouterr().out
    assert "there is no such file" in out
    assert "this is [bold]b.png" in out
    assert "1 error," in out
    assert cli.main([*command, "--max-errors", "1"], open_batcher=batcher) == 0


def test_json_lines_go_to_standard_output_alone(
    folder: Path, batcher: ScriptedBatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "nowhere.png", "pictures/b.png", "--json", "-"], open_batcher=batcher) == 1
    out, err = capsys.readouterr()
    failed, answered = [json.loads(line) for line in out.splitlines()]
    assert failed["error"] == "InvalidImage: there is no such file"
    assert failed["timings"]["ttft"] is None  # JSON has no NaN
    assert answered["request_id"] == "pictures/b.png"
    assert answered["text"] == "this is [bold]b.png"
    assert answered["image_sizes"] == [[24, 16]]
    assert answered["usage"]["completion_tokens"] == 4
    assert "2 requests, 1 error" in err


def test_an_interrupt_keeps_what_is_done(
    folder: Path, batcher: ScriptedBatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "pictures/b.png", "stop.png", "pictures/a.JPG", "--json", "out.jsonl"]
    assert cli.main(command, open_batcher=batcher) == 130
    assert batcher.closed
    assert [json.loads(line)["request_id"] for line in Path("out.jsonl").read_text().splitlines()] == ["pictures/b.png"]
    assert "1 of 3 requests done" in capsys.readouterr().out


def test_sampling_options_reach_every_request(folder: Path, batcher: ScriptedBatcher) -> None:
    options = [
        "--max-tokens=7",
        "--temperature=0.5",
        "--top-p=0.9",
        "--top-k=20",
        "--min-p=0.1",
        "--seed=3",
        "--batch=2",
    ]
    cli.main(["run", "pictures", *options], open_batcher=batcher)
    wanted = SamplingParams(max_tokens=7, temperature=0.5, top_p=0.9, top_k=20, min_p=0.1, seed=3)
    assert {request.params for request in batcher.requests} == {wanted}
    assert batcher.args.batch == 2


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["run", "."], "no picture in ."),
        (["run", "x.png", "--temperature", "-1"], "temperature is -1.0; it must be"),
        (["run", "x.png", "--json", "no/such/folder/out.jsonl"], "cannot write no/such/folder/out.jsonl"),
        (["run", "x.mp4", "--fps", "0"], "fps is 0.0; it must be"),
        (["run", "x.png", "--batch", "0"], "'0' is not a whole number of at least 1"),
        (["run"], "required: PATH"),
        ([], "required: COMMAND"),
    ],
    ids=lambda value: " ".join(value) or "(nothing)" if isinstance(value, list) else "",
)
def test_usage_errors(
    command: list[str],
    said: str,
    tmp_path: Path,
    batcher: ScriptedBatcher,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(command, open_batcher=batcher)
    except SystemExit as left:  # argparse's own way out
        status = int(left.code or 0)
    assert status == 2
    assert said in capsys.readouterr().err
    assert not batcher.requests


def test_a_model_that_is_not_there_is_a_usage_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "pictures", "--model", "./nowhere"]) == 2
    assert "there is no model at ./nowhere" in capsys.readouterr().err


def test_control_characters_cannot_steer_the_terminal(
    folder: Path, batcher: ScriptedBatcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        batcher, "answer", lambda request: Result(request_id=request.request_id, text="red\x1b[31m \x9b2J 東京　駅")
    )
    assert cli.main(["run", "pictures/b.png"], open_batcher=batcher) == 0
    assert "red\\x1b[31m \\x9b2J 東京　駅" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("vlm-batch 0.")


def test_families_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["families", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    qwen = next(one for one in listed["families"] if one["family"] == "qwen2_vl")
    assert qwen["verified"]["images_together"] <= 1e-4
    assert qwen["mlx_vlm"]["qwen2_vl"]["pictures together"] == "right"
    text_only = next(one for one in listed["families"] if one["family"] == "falcon_h1")
    assert not text_only["images"]
    assert "text" in text_only["unverified"]["two_images_in_a_row"]
    assert "diffusion" in listed["refused"]["flux2"]
    assert listed["one_at_a_time"]["llama"]


@pytest.mark.parametrize("columns", [80, 160])
def test_the_table_of_families_is_whole(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every family and what is known of it on one line, on a terminal of that width."""
    monkeypatch.setattr(console, "open_console", lambda out: Console(file=out, width=columns, highlight=False))
    assert cli.main(["families"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns
    for spec in families():
        line = next(line for line in shown.splitlines() if line.split()[:1] == [spec.family])
        assert ("several" if spec.multi_image else "one" if spec.images else "none") in line
        assert ("chunks" if spec.chunked_prefill else "whole") in line
        assert re.search(r"\d+/\d+", line)


def test_all_about_some_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["families", "jvlm", "glm4v"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "jina_vlm, jvlm" in shown
    assert "bicubically" in shown
    assert "qwen2_vl" not in shown


@pytest.mark.parametrize(("name", "why"), [("sam3", "boxes"), ("llama", "text only"), ("nothing", "no family")])
def test_a_family_that_is_not_batched_says_why(name: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["families", name]) == cli.USAGE
    assert why in capsys.readouterr().err
