"""``vlm-batch serve --launchd``: a property list that macOS' launchd takes, of the command as it was typed."""

from __future__ import annotations

import plistlib
import sys
from pathlib import Path
from typing import Any

import pytest

from vlm_batch.cli import main as cli


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLM_BATCH_API_KEY", raising=False)
    monkeypatch.delenv("HF_HOME", raising=False)


def agent(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What is printed, read by Python's own reader of property lists."""
    assert cli.main(["serve", *words]) == 0
    found: dict[str, Any] = plistlib.loads(capsys.readouterr().out.encode())
    return found


def test_it_says_the_command_and_where_its_log_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With blanks, ampersands and brackets in its paths."""
    photos = tmp_path / 'Fish & <Chips> "2"'
    photos.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", "/Volumes/My Disk/hf & co")
    monkeypatch.setenv("HF_TOKEN", "secret")
    found = agent(capsys, "--launchd", "--port", "8081", "--allow-dir", str(photos))
    python = [sys.executable, "-m", "vlm_batch"]
    command = ["serve", "--port", "8081", "--allow-dir", str(photos)]
    assert found["ProgramArguments"] == [*python, *command]
    assert found["Label"] == "vlm-batch.8081"
    log = str(Path.home() / "Library/Logs/vlm-batch.8081.log")
    assert found["StandardOutPath"] == found["StandardErrorPath"] == log
    assert found["WorkingDirectory"] == str(tmp_path)
    assert found["RunAtLoad"] is True
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert found["EnvironmentVariables"]["HF_HOME"] == "/Volumes/My Disk/hf & co"
    assert "secret" not in str(found)


def test_the_program_is_the_script_that_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its link, which an upgrade leaves where it is."""
    script, link = tmp_path / "cellar 1.2" / "vlm-batch", tmp_path / "vlm-batch"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    link.symlink_to(script)
    monkeypatch.setenv("PATH", str(tmp_path))
    for typed in ("vlm-batch", str(link)):
        monkeypatch.setattr(sys, "argv", [typed])
        assert agent(capsys, "--launchd")["ProgramArguments"] == [str(link), "serve"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--api-key", "secret"], "--keys FILE"),
        (["--host", "0.0.0.0"], "can be reached from other machines"),
        (["--allow-dir", "nowhere"], "nowhere is no folder"),
        (["--launchd=yes"], "ignored explicit argument"),
    ],
)
def test_what_would_not_serve_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["serve", "--launchd", *words])
    except SystemExit as left:
        status = int(left.code or 0)
    out, err = capsys.readouterr()
    assert status == 2 and said in err and out == ""
    assert "secret" not in err


def test_a_key_of_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """launchd would start the server without it."""
    monkeypatch.setenv("VLM_BATCH_API_KEY", "secret")
    assert cli.main(["serve", "--launchd"]) == 2
    assert "--keys FILE" in capsys.readouterr().err
