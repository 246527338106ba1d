"""Jobs on a Ray cluster of this machine: workers killed, the driver killed, models that cannot be loaded, Ray Data.

Every cluster is in a process group of its own, which is ended whole after a time, whatever became of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vlm_batch._version import __version__
from vlm_batch.assets import default_checkpoint
from vlm_batch.cli import main as cli
from vlm_batch.inputs.fetch import Fetched
from vlm_batch.jobs.ray import Cluster, Worker, to_send
from vlm_batch.jobs.ray_data import OUTPUT_COLUMNS, Predictor
from vlm_batch.jobs.rows import InvalidJob
from vlm_batch.types import Request, Result, Video

ROOT = Path(__file__).parent.parent
#: Seconds after which a cluster is ended, on a machine that is busy with other things.
LIMIT = 600
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="no Ray here: pip install 'vlm-batch[ray]'"
)


def limited(*command: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    """A process in a session of its own, so that it can be ended with all that it started."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env=env,
        cwd=cwd or ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes_of(session: int, named: str = "") -> list[int]:
    """The live processes of a session whose command line has a text."""
    columns = ["-o", "pid=", "-o", "sess=", "-o", "stat=", "-o", "args="]
    listed = subprocess.run(
        ["ps", "-A", *columns], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 3) for line in listed.splitlines()]
    return [
        int(pid)
        for pid, where, state, args in rows
        if where == str(session) and state[0] != "Z" and named in args
    ]


def end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a process's session."""
    for pid in processes_of(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.kill()
    process.communicate()


def ray_cases() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own imports
        return import_module("tests.ray_cases")


def run_cases(folder: Path, *names: str) -> None:
    process = limited("tests.ray_cases", str(folder), *names)
    try:
        said, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, said
        assert (folder / "passed").read_text().splitlines() == list(names)
    finally:
        end(process)


@needs_ray
def test_workers_that_are_killed_models_that_cannot_be_loaded_and_datasets(
    tmp_path: Path,
) -> None:
    """One cluster for all of tests/ray_cases.py: starting one takes longer than most cases."""
    names = [name for name in vars(ray_cases()) if name.startswith("a_")]
    assert len(names) == 5
    run_cases(tmp_path, *names)


@needs_ray
def test_a_driver_that_is_killed_leaves_no_worker_and_a_job_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed without Ray: the same job, the same file."""
    told = ray_cases().told
    ray_cases().write_rows(tmp_path, 300)
    run = [
        "run",
        "rows.jsonl",
        "--prompt",
        "describe the {what}",
        "--max-tokens",
        "6",
        "--quiet",
    ]
    run += ["--model", str(default_checkpoint()), "--out"]
    process = limited(
        "vlm_batch",
        *run,
        "out.jsonl",
        "--ray",
        "local",
        "--ray-workers",
        "1",
        cwd=tmp_path,
    )
    out = tmp_path / "out.jsonl"
    try:
        deadline = time.monotonic() + LIMIT
        while not (out.exists() and out.read_bytes().count(b"\n") >= 20):
            assert process.poll() is None and time.monotonic() < deadline, (
                process.stdout and process.stdout.read()
            )
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        while processes_of(process.pid, "ray::Worker") and time.monotonic() < deadline:
            time.sleep(0.1)
        # Ray's own agents take a minute to notice
        assert not processes_of(process.pid, "ray::Worker")
    finally:
        end(process)
    assert 20 <= out.read_bytes().count(b"\n") < 300
    monkeypatch.chdir(tmp_path)
    assert cli.main([*run, "out.jsonl", "--resume"]) == 1  # damaged pictures
    assert cli.main([*run, "whole.jsonl"]) == 1
    assert told(out) == told(tmp_path / "whole.jsonl") and len(told(out)) == 300


def test_no_cluster_at_an_address_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setitem(
        sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init)
    )
    out = tmp_path / "out.jsonl"
    assert (
        cli.main(
            [
                "run",
                str(ROOT / "fixtures/images/red_circle.png"),
                "--ray",
                "auto",
                "--out",
                str(out),
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert (
        "cannot join a Ray cluster at auto (does it run? local needs none): ConnectionError: Could not find any"
        in said
    )
    assert not out.exists()


def test_a_terminated_job_ends_as_elsewhere_whatever_ray_sets() -> None:
    """Ray's handler for SIGTERM would leave the process in the middle of a job."""
    before = signal.getsignal(signal.SIGTERM)
    fake = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda **options: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    )
    try:
        Cluster(None)._join(fake)
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_is_wrong_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in ({"workers": 0}, {"num_gpus": 2.0}, {"num_cpus": -1.0}):
        with pytest.raises(InvalidJob):
            Cluster("some/model", **wrong)  # type: ignore[arg-type]
    run = [
        "run",
        str(ROOT / "fixtures/images/red_circle.png"),
        "--ray",
        "auto",
        "--out",
        str(tmp_path / "{shard}.jsonl"),
    ]
    assert cli.main([*run, "--shard", "auto"]) == 2
    assert "--ray and --shard auto" in capsys.readouterr().err


def test_without_ray_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    out = tmp_path / "out.jsonl"
    assert (
        cli.main(
            [
                "run",
                str(ROOT / "fixtures/images/red_circle.png"),
                "--ray",
                "auto",
                "--out",
                str(out),
            ]
        )
        == 2
    )
    assert "pip install 'vlm-batch[ray]'" in capsys.readouterr().err
    assert not out.exists()


# ---- without a cluster ----


def test_files_are_read_here_and_sent(tmp_path: Path) -> None:
    """Pictures keep their names for messages; what cannot be read stays a path, of which its worker says why."""
    picture, clip = tmp_path / "a.png", tmp_path / "b.mp4"
    picture.write_bytes(b"picture")
    clip.write_bytes(b"clip")
    request = to_send(
        Request(
            prompt="x",
            images=[str(picture), "not/there.png", "https://x/y.png", b"z"],
            videos=[Video(str(clip), fps=2)],
        ),
        shared_files=False,
    )
    assert list(request.images) == [
        Fetched(str(picture), b"picture"),
        "not/there.png",
        "https://x/y.png",
        b"z",
    ]
    assert [(video.source, video.fps) for video in request.videos] == [(b"clip", 2)]
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": str(picture)}}
    chat = [{"role": "user", "content": [part, {"type": "text", "text": "x"}]}]
    sent = to_send(Request(messages=chat), shared_files=False)
    assert list(sent.images) == [Fetched(str(picture), b"picture")]
    assert sent.messages is not None and sent.messages[0]["content"][0] == {
        "type": "image"
    }
    wrong = Request(messages=[{"role": "nobody", "content": "x"}])
    assert to_send(wrong, shared_files=False) is wrong


def test_paths_that_all_machines_have_are_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert to_send(
        Request(prompt="x", images=["a/b.png"]), shared_files=True
    ).images == (str(tmp_path / "a/b.png"),)


def test_a_worker_answers_a_row_that_comes_again_while_it_has_it() -> None:
    """A connection was lost, and the worker was not."""

    async def ask() -> list[Result]:
        worker, row = Worker(), Request(prompt="count to 3", request_id="a")
        await worker.load(None, {}, __version__)
        await worker.load(None, {}, __version__)
        return [*await asyncio.gather(worker.ask(row), worker.ask(row))]

    assert [(result.request_id, result.text) for result in asyncio.run(ask())] == [
        ("a", "1 2 3")
    ] * 2
    with pytest.raises(InvalidJob, match="this machine 0"):
        asyncio.run(Worker().load(None, {}, "0"))


def test_an_actor_answers_several_batches_at_once() -> None:
    """A batch that is done comes back while another one is still being answered: the engine is not drained between."""
    actor = Predictor(str(default_checkpoint()), params={"ignore_eos": True})  # type: ignore[arg-type]
    picture = (ROOT / "fixtures/images/red_circle.png").read_bytes()
    order: list[int] = []

    async def one(max_tokens: int) -> dict[str, Any]:
        cells = {
            "image": [picture] * 3,
            "prompt": ["describe"] * 3,
            "sampling_params": [{"max_tokens": max_tokens}] * 3,
        }
        batch = {name: np.array(values, dtype=object) for name, values in cells.items()}
        made = [out async for out in actor(batch)]
        order.append(max_tokens)
        return made[0]

    async def both() -> list[dict[str, Any]]:
        return list(await asyncio.gather(one(200), one(2)))

    long, short = asyncio.run(both())
    assert order == [2, 200]
    assert set(OUTPUT_COLUMNS) <= set(long) and list(short["num_generated_tokens"]) == [
        2,
        2,
        2,
    ]
    assert (
        list(long["num_generated_tokens"]) == [200] * 3
        and list(long["__inference_error__"]) == [""] * 3
    )


def test_a_column_that_is_misspelt_is_its_rows_error() -> None:
    """As is a cell without its picture; a row of text says so by an empty list."""
    actor = Predictor(str(default_checkpoint()), params={"max_tokens": 2})

    async def errors(**cells: Any) -> list[str]:
        batch = {name: np.array([value], dtype=object) for name, value in cells.items()}
        return [
            error async for out in actor(batch) for error in out["__inference_error__"]
        ]

    assert asyncio.run(errors(image=[], prompt="count to 3")) == [""]
    assert asyncio.run(
        errors(image=None, messages=[{"role": "user", "content": "count to 3"}])
    ) == [""]
    assert (
        "column 'image' is empty"
        in asyncio.run(errors(image=None, prompt="count to 3"))[0]
    )
    assert (
        "'receipt': image='receipt'"
        in asyncio.run(errors(receipt="a.png", prompt="count to 3"))[0]
    )
    (said,) = asyncio.run(errors(img="a.png", prompt="describe"))
    assert "the dataset has no column of images, but 'img'" in said
