"""The command line, with a batcher that answers at once, and once with the real one."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import pytest
from PIL import Image
from rich.console import Console

from vlm_batch import Caches, KVQuantisation, Limits, families
from vlm_batch.assets import default_checkpoint, sample_images
from vlm_batch.cli import facts, serve
from vlm_batch.cli import main as cli
from vlm_batch.inputs.images import load_image
from vlm_batch.jobs.files import common_folder
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
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
                request_id=request.request_id,
                finish_reason="error",
                error="InvalidImage: there is no such file",
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


def test_the_help_says_what_run_does_without_a_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    (said,) = re.findall(
        r"--model PATH\|HUB_ID\s+(a folder.+?)--", capsys.readouterr().out, re.DOTALL
    )
    assert "(needed to keep answers;" in " ".join(said.split())
    assert cli.main(["run", "pictures", "--sidecar", ".txt"]) == 2
    assert "name a model with --model PATH|HUB_ID" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "serve"])
def test_all_options_are_shown_where_a_pager_reads(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help-all"])
    said = capsys.readouterr()
    assert "--policy" in said.out and not said.err


def test_run_asks_one_question_about_every_picture(
    folder: Path, batcher: ScriptedBatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(["run", "pictures", "--prompt", "what is it?"], open_batcher=batcher)
        == 0
    )
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
    cli.main(
        ["run", "pictures/film.MP4", "pictures/b.png", "http://x/y.mov?z=1"],
        open_batcher=batcher,
    )
    assert [request.images for request in batcher.requests] == [
        (),
        ("pictures/b.png",),
        (),
    ]
    assert [request.videos for request in batcher.requests] == [
        (Video("pictures/film.MP4"),),
        (),
        (Video("http://x/y.mov?z=1"),),
    ]
    for options, expected in (
        (["--videos", "--fps", "0.5", "--max-frames", "9"], 4),
        ([], 3),
    ):
        found = ScriptedBatcher()
        cli.main(
            ["run", "pictures", *options, "--out", "out.jsonl", "--overwrite"],
            open_batcher=found,
        )
        assert len(found.requests) == expected
        lines = [
            json.loads(line) for line in Path("out.jsonl").read_text().splitlines()
        ]
        assert [line["videos"] for line in lines if line["videos"]] == [
            ["pictures/film.MP4"]
        ] * bool(options)
        for request in found.requests:
            assert all(
                (video.fps, video.max_frames) == (0.5, 9) for video in request.videos
            )


def test_folders_inside_are_left_out_when_told(
    folder: Path, batcher: ScriptedBatcher
) -> None:
    cli.main(
        ["run", "pictures", "pictures/b.png", "--no-recursive"], open_batcher=batcher
    )
    assert [request.request_id for request in batcher.requests] == [
        "pictures/a.JPG",
        "pictures/b.png",
    ]


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


def test_named_files_that_are_no_pictures_are_skipped(
    folder: Path, batcher: ScriptedBatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell's pattern names the text files of an earlier run, and an archive is no picture."""
    for name in ("b.txt", "all.zip", "rows.json"):
        (folder / "pictures" / name).write_bytes(b"?")
    command = ["run", *map(str, sorted(Path("pictures").glob("[a-z]*.*")))]
    assert (
        cli.main(
            [*command, "--sidecar", ".txt", "--resume", "--force"], open_batcher=batcher
        )
        == 0
    )
    assert [request.request_id for request in batcher.requests] == ["pictures/a.JPG"]
    said = capsys.readouterr().err
    for kind in (
        "2 .txt",
        "1 .zip (to be unpacked first)",
        "1 .json (tables are read as JSON lines: .jsonl)",
    ):
        assert kind in said
    assert cli.main(["run", "pictures/all.zip"], open_batcher=batcher) == 2
    assert "no picture in pictures/all.zip" in capsys.readouterr().err


def test_json_lines_go_to_standard_output_alone(
    folder: Path, batcher: ScriptedBatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(
            ["run", "nowhere.png", "pictures/b.png", "--out", "-"], open_batcher=batcher
        )
        == 1
    )
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
    command = [
        "run",
        "pictures/b.png",
        "stop.png",
        "pictures/a.JPG",
        "--out",
        "out.jsonl",
    ]
    assert cli.main(command, open_batcher=batcher) == 130
    assert batcher.closed
    assert [
        json.loads(line)["request_id"]
        for line in Path("out.jsonl").read_text().splitlines()
    ] == ["pictures/b.png"]
    assert "1 of 3 requests done" in capsys.readouterr().out


def test_sampling_options_reach_every_request(
    folder: Path, batcher: ScriptedBatcher
) -> None:
    options = [
        "--max-tokens=7",
        "--temperature=0.5",
        "--top-p=0.9",
        "--top-k=20",
        "--min-p=0.1",
        "--seed=3",
        "--repetition-penalty=1.1",
        "--stop=a",
        "--stop=b",
        "--batch=2",
    ]
    cli.main(["run", "pictures", *options], open_batcher=batcher)
    wanted = SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=20,
        min_p=0.1,
        seed=3,
        repetition_penalty=1.1,
        stop=("a", "b"),
    )
    assert {request.params for request in batcher.requests} == {wanted}
    assert batcher.args.batch == 2


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["run", "."], "no picture in ."),
        (["run", "phtos"], "phtos does not exist"),
        (["run", "phtos/"], "phtos/ does not exist"),
        (["run", ".", "scans/*.pdf"], "nothing matches scans/*.pdf"),
        (["run", "x.png", "y.png"], "x.png does not exist"),
        (["run", "x.png", "--temperature", "-1"], "temperature is -1.0; it must be"),
        (
            ["run", "http://x/x.png", "--out", "no/such/folder/out.jsonl"],
            "cannot write no/such/folder/out.jsonl",
        ),
        (["run", "x.png", "--json-schema", "no.json"], "cannot read no.json"),
        (
            ["run", "x.png", "--regex", "a", "--choice", "b"],
            "exclude each other: an answer has one form",
        ),
        (["run", "x.png", "--prompt", ""], "--prompt is empty"),
        (["run", "x.png", "--prompt", " \n"], "--prompt is empty"),
        (["run", "x.mp4", "--fps", "0"], "fps is 0.0; it must be"),
        (["run", "x.png", "--batch", "0"], "'0' is not a whole number of at least 1"),
        (
            ["run", "x.png", "--promt", "x"],
            "there is no --promt; --prompt is probably meant",
        ),
        (
            ["run", "http://x/x.png", "--out", "-", "--format", "csv"],
            "--format csv needs a file",
        ),
        (["run", "http://x/x.png", "--format", "csv"], "name it with --out FILE"),
        (
            [
                "run",
                "http://x/x.png",
                "--out",
                "o",
                "--format",
                "openai-batch",
                "--columns",
                "text",
            ],
            "leave --columns out",
        ),
        (["report", "nothing.jsonl"], "there are no answers in nothing.jsonl"),
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


def test_a_model_that_is_not_there_is_a_usage_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "pictures", "--model", "./nowhere"]) == 2
    assert "there is no model at ./nowhere" in capsys.readouterr().err


def test_answers_are_never_replaced_unasked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither by a second run, nor by one whose model does not load."""
    kept = '{"request_id": "x"}\n' * 3000
    out = folder / "out.jsonl"
    out.write_text(kept)
    again = ["run", "pictures", "--out", "out.jsonl"]
    assert cli.main(again, open_batcher=ScriptedBatcher()) == 2
    assert "out.jsonl" in capsys.readouterr().err
    assert cli.main([*again, "--overwrite", "--model", "./typo"]) == 2
    assert out.read_text() == kept
    assert cli.main([*again, "--overwrite"], open_batcher=ScriptedBatcher()) == 0
    assert len(out.read_text().splitlines()) == 3


def test_names_that_are_no_utf8(
    folder: Path, batcher: ScriptedBatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are asked, shown, and written as shells and Python take them."""
    name = os.fsdecode(b"pictures/caf\xe9.png")
    try:
        (folder / "pictures" / "b.png").rename(name)
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    assert (
        cli.main(["run", "pictures", "--out", "out.jsonl"], open_batcher=batcher) == 0
    )
    lines = [
        json.loads(line)
        for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert r"pictures/caf\xe9.png" in [line["request_id"] for line in lines]
    out, err = capsys.readouterr()
    assert "caf\\xe9.png" in out and "caf\\xe9.png" in err
    assert cli.main(["run", name, "--out", "-"], open_batcher=ScriptedBatcher()) == 0
    assert json.loads(capsys.readouterr().out)["images"] == [r"pictures/caf\xe9.png"]


@pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="this system has no /dev/full"
)
def test_a_full_disk_stops_cleanly(
    folder: Path, batcher: ScriptedBatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(["run", "pictures", "--out", "/dev/full"], open_batcher=batcher) == 1
    )
    assert "cannot write /dev/full: No space left on device" in capsys.readouterr().err
    assert batcher.closed
    command = [sys.executable, "-m", "vlm_batch", "families"]
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert run.returncode == 1
    assert run.stderr == "vlm-batch: cannot write: No space left on device\n"


def test_a_full_disk_tears_no_line(tmp_path: Path) -> None:
    """A limit on the file's size takes half of a line, and refuses the rest."""
    code = textwrap.dedent(
        """
        import resource, signal
        from vlm_batch.jobs.lines import CannotWrite, LineFile
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (250, 250))
        file = LineFile("out.jsonl")
        try:
            for number in range(9):
                file.append({"number": number, "text": "x" * 60})
        except CannotWrite as error:
            print(error)
        file.close()
        """
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "cannot write out.jsonl: File too large" in run.stdout, run.stderr
    lines = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(line)["number"] for line in lines] == [0, 1]
    assert lines[-1].endswith("\n")


@pytest.mark.parametrize(
    ("paths", "folder"),
    [
        (["/receipt.png"], "/"),
        (["/a.png", "/pictures/b.png"], "/"),
        (["/p/a.png", "/p/b.png"], "/p/"),
        (["/pa/a.png", "/pb/b.png"], "/"),
        (["p/a.png", "b.png"], ""),
    ],
)
def test_the_folder_that_is_left_out(paths: list[str], folder: str) -> None:
    """Of a picture at the root of the file system the name stays whole."""
    assert common_folder(paths) == folder


def test_a_file_in_two_spellings_is_asked_once(
    folder: Path, batcher: ScriptedBatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link to it is a spelling; a link to a file elsewhere is a picture like others."""
    Image.new("RGB", (24, 16)).save(folder / "elsewhere.png")
    (folder / "link").symlink_to("pictures")
    (folder / "pictures" / "a link.png").symlink_to("b.png")
    (folder / "pictures" / "second.png").symlink_to(folder / "pictures" / "a link.png")
    (folder / "pictures" / "far.png").symlink_to("../elsewhere.png")
    spellings = [
        "pictures/b.png",
        "./pictures/b.png",
        str(folder / "pictures/b.png"),
        "link/b.png",
        "pictures",
    ]
    assert cli.main(["run", *spellings, "--no-recursive"], open_batcher=batcher) == 0
    assert [request.request_id for request in batcher.requests] == [
        "pictures/b.png",
        "pictures/a.JPG",
        "pictures/far.png",
    ]
    assert "2 links to files that are there already" in capsys.readouterr().err


def test_folders_have_what_pillow_reads(
    folder: Path, batcher: ScriptedBatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing else; of pictures of other kinds it is said why not."""
    kinds = (
        "jp2",
        "ico",
        "tga",
        "ppm",
        "pgm",
        "pcx",
        "qoi",
        "apng",
        "dib",
        "JPG",
        "webp",
        "tif",
    )
    others = {"eps": "EPS", "sgi": "SGI", "dds": "DDS"}
    for kind in (*kinds, *others):
        Image.new("RGB", (24, 16), "red").save(
            folder / "pictures" / "inside" / f"a.{kind}"
        )
    (folder / "pictures" / "inside" / "scan.pdf").touch()
    assert cli.main(["run", "pictures/inside"], open_batcher=batcher) == 0
    found = {str(request.request_id) for request in batcher.requests}
    assert found == {f"pictures/inside/a.{kind}" for kind in kinds} | {
        "pictures/inside/c.webp"
    }
    assert all(
        load_image(name).getpixel((1, 1))[0] > 200  # type: ignore[index]
        for name in found - {"pictures/inside/c.webp"}
    )
    said = capsys.readouterr().err
    assert all(
        f"1 .{end} ({name} is not read here: to be saved as PNG first)" in said
        for end, name in others.items()
    )
    assert "1 .pdf (--pdf takes them)" in said


def test_linked_folders_and_what_is_skipped(
    folder: Path,
    batcher: ScriptedBatcher,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Links are followed, none twice, and nothing is left out without a word."""
    monkeypatch.setattr("vlm_batch.inputs.heif.INSTALLED", False)
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("scan.jfif", "photo.heic", "clip.mp4", "more.heic"):
        (elsewhere / name).write_bytes(b"x")
    (folder / "pictures" / "linked").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(folder / "pictures")
    assert cli.main(["run", "pictures"], open_batcher=batcher) == 0
    assert "pictures/linked/scan.jfif" in [
        request.request_id for request in batcher.requests
    ]
    assert len(batcher.requests) == 4
    said = capsys.readouterr().err
    assert "skipped: 2 .heic (pip install 'vlm-batch[heic]' reads them)" in said
    assert "1 .mp4 (--videos takes them)" in said
    assert "1 folder that links lead to again" in said


def test_pictures_of_phones(folder: Path, batcher: ScriptedBatcher) -> None:
    """By what they hold, not by their names, and whatever was read before."""
    for name in ("phone.HEIC", "renamed.jpg"):
        shutil.copy(
            Path(__file__).parent / "data" / "phone.heic", folder / "pictures" / name
        )
    for names in (["pictures/renamed.jpg"], ["pictures"]):
        assert cli.main(["run", *names], open_batcher=batcher) == 0
    found = {str(request.request_id) for request in batcher.requests}
    assert {"pictures/phone.HEIC", "pictures/renamed.jpg"} <= found
    assert {
        load_image(str(folder / name)).size
        for name in found
        if name.endswith(("HEIC", "renamed.jpg"))
    } == {(48, 64)}


def test_patterns_are_filled_in(folder: Path, batcher: ScriptedBatcher) -> None:
    assert cli.main(["run", "pictures/**/*.[pw]*"], open_batcher=batcher) == 0
    assert [request.request_id for request in batcher.requests] == [
        "pictures/b.png",
        "pictures/inside/c.webp",
    ]


def test_without_a_model_the_sample_answers_and_nothing_is_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "pictures", "--out", "answers.jsonl"]) == 2
    assert "name a model with --model" in capsys.readouterr().err
    assert cli.main(["run", str(sample_images()[0]), "--max-tokens", "3"]) == 0
    said = [
        line for line in capsys.readouterr().err.splitlines() if "no --model" in line
    ]
    assert len(said) == 1 and "no model for work" in said[0]


def test_options_of_the_batcher_reach_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {}

    class Taken(Exception):
        pass

    def take(model: str, **options: object) -> None:
        given.update(options)
        raise Taken

    monkeypatch.setattr("vlm_batch.batcher.VLMBatcher", take)
    options = [
        "--max-rows=3",
        "--cache-bytes=1.5G",
        "--cache-dir=kept",
        "--cache-dir-bytes=20M",
        "--look-ahead=5",
        "--look-ahead-bytes=2G",
    ]
    options += [
        "--max-bytes=4GB",
        "--max-image-pixels=none",
        "--max-video-pixels=4M",
        "--max-prompt-tokens=900",
    ]
    options += [
        "--kv-bits=4",
        "--kv-group-size=32",
        "--min-pixels=4k",
        "--max-pixels=1.5M",
        "--reproducible",
    ]
    assert (
        cli.main(["run", "pictures", "--model", str(default_checkpoint()), *options])
        == 2
    )
    assert given == {
        "max_rows": 3,
        "caches": Caches(1_500_000_000, "kept", 20_000_000),
        "limits": Limits(
            prompt_tokens=900,
            image_pixels=None,
            video_pixels=4_000_000,
            min_pixels=4_000,
            max_pixels=1_500_000,
        ),
        "kv": KVQuantisation(4.0, group_size=32),
        "reproducible": True,
        "policy": {"look_ahead": 5, "look_ahead_bytes": 2_000_000_000},
        "max_bytes": 4_000_000_000,
        "trust_remote_code": False,
    }


def test_the_server_has_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of keys and values are declared once; what is not said is the library's own."""
    args = cli.parser().parse_args(
        [
            "serve",
            "--kv-bits=4",
            "--kv-group-size=32",
            "--reproducible",
            "--max-pixels=9",
        ]
    )
    given: dict[str, object] = {}
    monkeypatch.setattr(
        "vlm_batch.batcher.VLMBatcher", lambda model, **options: given.update(options)
    )
    serve.load_batcher(args)
    assert (
        given["kv"] == KVQuantisation(4.0, group_size=32)
        and given["reproducible"] is True
    )
    assert given["limits"] == Limits(max_pixels=9) and "policy" not in given


def test_control_characters_cannot_steer_the_terminal(
    folder: Path,
    batcher: ScriptedBatcher,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        batcher,
        "answer",
        lambda request: Result(
            request_id=request.request_id, text="red\x1b[31m \x9b2J 東京　駅"
        ),
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
    monkeypatch.setattr(
        facts,
        "open_console",
        lambda out: Console(file=out, width=columns, highlight=False),
    )
    assert cli.main(["families"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns
    for spec in families():
        line = next(
            line for line in shown.splitlines() if line.split()[:1] == [spec.family]
        )
        assert (
            "several" if spec.multi_image else "one" if spec.images else "none"
        ) in line
        assert ("chunks" if spec.chunked_prefill else "whole") in line
        assert re.search(r"\d+/\d+", line)


def test_all_about_some_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["families", "jvlm", "glm4v"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "jina_vlm, jvlm" in shown
    assert "bicubically" in shown
    assert "qwen2_vl" not in shown


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sam3", "boxes"),
        ("llama", "text only"),
        ("nothing", "is not known"),
        ("florence", "the nearest are florence2"),
    ],
)
def test_a_family_that_is_not_batched_says_why(
    name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["families", name]) == cli.USAGE
    assert why in capsys.readouterr().err


def test_a_fault_in_a_library_says_where_the_threads_were() -> None:
    code = """
        import os, signal, sys
        sys.orig_argv = ["python", "-m", "vlm_batch"]
        import vlm_batch
        os.kill(os.getpid(), signal.SIGSEGV)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=120)
    assert run.returncode < 0
    assert "Segmentation fault" in run.stderr and "line 5 in <module>" in run.stderr
