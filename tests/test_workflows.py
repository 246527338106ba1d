"""Workflows, issue forms and the citation file: they parse, call scripts that exist, and agree with the package."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlm_batch import __version__

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(
    path
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")
    if path.name != "config.yml"
)


def read(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


#: Minutes that a workflow may take; a Mac's figures take the matrix, verify and benchmarks.
MOST_MINUTES = {"ci": 60, "mac": 180, "nightly": 60, "release": 60}


def test_the_workflows_are_there() -> None:
    assert [path.stem for path in WORKFLOWS] == list(MOST_MINUTES)
    assert len(FORMS) == 4


def test_a_macs_figures_are_made_by_hand_alone() -> None:
    assert list(read(ROOT / ".github/workflows/mac.yml")[True]) == ["workflow_dispatch"]


def test_what_is_slow_runs_every_night_and_is_not_skipped() -> None:
    nightly = read(ROOT / ".github/workflows/nightly.yml")
    assert nightly[True]["schedule"] == [{"cron": "17 3 * * *"}]
    script = (ROOT / "scripts" / "nightly").read_text()
    assert "pytest -m slow" in script
    needed = re.search(r'-c "import (.*)"', script)
    assert needed is not None
    imported = {name.partition(".")[0] for name in needed[1].split(", ")}
    asked = set()
    for test in (ROOT / "tests").glob("test_*.py"):
        text = test.read_text(encoding="utf-8")
        if "pytest.mark.slow" in text or test.name.startswith("test_mineru"):
            found = re.findall(r'importorskip\(\s*"(\w+)', text)
            asked |= set(found)
    assert asked == imported


def test_setup_names_what_it_takes() -> None:
    done = subprocess.run(
        ["scripts/setup", "everything"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "usage: scripts/setup [demo]\n")


def test_the_demo_brings_no_tools_of_development() -> None:
    assert "\nscripts/setup demo\n" in (ROOT / "scripts" / "demo").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_thin_over_scripts(path: Path) -> None:
    workflow = read(path)
    # YAML reads the key "on" as true
    assert {"name", True, "permissions", "jobs"} <= workflow.keys()
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= MOST_MINUTES[path.stem]
        assert {*([job["needs"]] if "needs" in job else [])} <= workflow[
            "jobs"
        ].keys() - {name}
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        if "run" in step:
            script = step["run"].split()[0]
            assert script.startswith("scripts/") and os.access(
                ROOT / script, os.X_OK
            ), step["run"]
        else:
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@(v\d+|release/v\d+)", step["uses"])


def test_ci_runs_every_python_that_is_promised() -> None:
    pythons = read(ROOT / ".github/workflows/ci.yml")["jobs"]["linux"]["strategy"][
        "matrix"
    ]["python"]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert pythons == re.findall(r"Python :: (3\.\d+)", text)
    assert f'requires-python = ">={pythons[0]}"' in text
    # 3.10 without quotes is 3.1
    assert all(isinstance(python, str) for python in pythons)


def test_only_the_job_that_publishes_may_publish() -> None:
    jobs = read(ROOT / ".github/workflows/release.yml")["jobs"]
    assert {name: job.get("permissions") for name, job in jobs.items()} == {
        "build": None,
        "smoke": None,
        "publish": {"id-token": "write"},
        "attach": {"contents": "write"},
    }
    needed = {name: job.get("needs") for name, job in jobs.items()}
    assert needed == {
        "build": None,
        "smoke": "build",
        "publish": "smoke",
        "attach": "publish",
    }
    for name in ("publish", "attach"):
        assert not any("run" in step for step in jobs[name]["steps"])


def test_a_release_is_tried_with_every_python_that_is_promised() -> None:
    release = read(ROOT / ".github/workflows/release.yml")["jobs"]["smoke"]
    ci = read(ROOT / ".github/workflows/ci.yml")["jobs"]["linux"]
    tried = release["strategy"]["matrix"]
    assert tried["python"] == ci["strategy"]["matrix"]["python"]
    assert tried["machine"] == ["ubuntu-latest", "macos-15"]
    assert release["steps"][-1] == {"run": "scripts/smoke"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_for_verify(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert all(
        part["type"] in ("textarea", "input", "dropdown", "checkboxes")
        for part in fields
    )
    assert len({part["id"] for part in fields}) == len(fields)
    assert all(part["attributes"]["label"] for part in fields)
    asked = [
        part
        for part in fields
        if "vlm-batch verify"
        in part["attributes"]["label"] + part["attributes"].get("description", "")
    ]
    assert any(part.get("validations", {}).get("required") for part in asked)


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    # what the format asks for
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == __version__
    assert citation["license"] == "MIT"
    assert all(
        "name" in author or {"family-names", "given-names"} <= author.keys()
        for author in citation["authors"]
    )
