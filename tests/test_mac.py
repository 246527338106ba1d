"""``scripts/mac``: the page of a Mac's figures, rehearsed where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import mac
from tests.serving import wait_until
from vlm_batch.policy import SETTINGS
from vlm_batch.runtime.device import Device

JUNIT = """<testsuites><testsuite tests="4" failures="1" errors="0" skipped="1">
<testcase classname="tests.test_parity" name="test_alone[one]"/>
<testcase classname="tests.test_parity" name="test_alone[two]"><failure/></testcase>
<testcase classname="tests.test_parity" name="test_alone[three]"><skipped/></testcase>
<testcase classname="tests.test_parity" name="test_alone[four]"/>
</testsuite></testsuites>"""


def test_cases_of_the_matrix_are_counted_and_failures_named(tmp_path: Path) -> None:
    (tmp_path / "matrix.xml").write_text(JUNIT)
    assert mac.tell_matrix(tmp_path, "") == [
        "2 passed, 1 failed, 1 skipped.",
        "- `tests.test_parity::test_alone[two]`",
    ]


def test_a_broken_promise_is_marked(tmp_path: Path) -> None:
    comparisons = [
        {"name": "alone : in company", "verdict": "bit for bit", "ok": True},
        {"name": "alone : backwards", "verdict": "other tokens", "ok": False},
    ]
    found = {"models": [{"model": "m", "precision": "p", "comparisons": comparisons}]}
    (tmp_path / "verify.json").write_text(json.dumps(found))
    assert mac.tell_verify(tmp_path, "")[2:] == [
        "| m | p | alone : in company | bit for bit |",
        "| m | p | alone : backwards | other tokens **(promised otherwise)** |",
    ]


def step(module: list[str], limit: float = 60) -> mac.Step:
    return mac.Step("one", "One", module, limit, mac.tell_output)


def test_a_step_that_fails_or_takes_too_long_is_a_line(tmp_path: Path) -> None:
    said = mac.run(step(["platform"]), tmp_path, stands_in=False)
    assert (said.state, said.command) == ("passed", "python -m platform")
    wrong = mac.run(step(["no_such_module"]), tmp_path, stands_in=False)
    assert wrong.state == "failed"
    assert "no_such_module" in "".join(wrong.lines)
    late = mac.run(step(["http.server", "0"], 1), tmp_path, stands_in=False)
    assert late.state == "too long"


def test_every_step_can_be_started() -> None:
    """Each module exists, and each file of tests."""
    for one in mac.steps(Path("/nowhere"), "org/model", is_quick=False):
        name, *arguments = one.module
        path = mac.ROOT / Path(*name.split("."))
        assert name == "pytest" or path.is_dir() or path.with_suffix(".py").is_file()
        for argument in arguments:
            if argument.startswith("tests/"):
                assert (mac.ROOT / argument).is_file(), argument


def test_what_is_assumed_of_metal_is_listed() -> None:
    rows = [line.split("`")[1] for line in mac.assumed()[2:]]
    sources = {
        name: setting.values[Device.METAL][1] for name, setting in SETTINGS.items()
    }
    assert rows == [
        name for name, said in sources.items() if not said.startswith("measured")
    ]
    assert set(mac.MEASURED_BY) <= sources.keys()


def test_the_page_has_machine_outcomes_and_commands(tmp_path: Path) -> None:
    one = step(["platform"])
    made = [(one, mac.Outcome("one", "python -m platform", "passed", 2.0, ["said"]))]
    text = mac.page({"chip": "Apple M9"}, made, stands_in=False)
    assert text.startswith("# Apple M9\n")
    for part in ("| One | passed | 2 |", "`python -m platform`", "said", "`placement`"):
        assert part in text


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac is one")
def test_elsewhere_it_says_how_to_rehearse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mac.main([])
    assert "--stand-in rehearses it" in capsys.readouterr().err


def test_the_stand_in_has_metals_settings() -> None:
    """The whole policy is Metal's, and requests are answered by it."""
    code = (
        "import benchmarks.stand_in\n"
        "from vlm_batch import VLMBatcher, assets\n"
        "from vlm_batch.policy import POLICIES\n"
        "from vlm_batch.runtime.device import Device\n"
        "with VLMBatcher(assets.default_checkpoint()) as batcher:\n"
        "    found = {name: one['value'] for name, one in batcher.policy.items()}\n"
        "    metal = POLICIES[Device.METAL]\n"
        "    assert all(found[name] == getattr(metal, name) for name in found), found\n"
        "    result = batcher.submit(assets.sample_images()[0], 'describe the picture').result()\n"
        "print(result.ok and found['placement'])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "slab"


def test_the_stand_in_reaches_what_a_step_starts_itself() -> None:
    """A process, and one that it starts; what asks no device is left alone."""
    child = "from vlm_batch.policy import device; print(device().value)"
    grandchild = (
        "import subprocess, sys; from vlm_batch.runtime.device import device; print(device().value, flush=True); "
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    code = (
        "import benchmarks.stand_in, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {grandchild!r}], check=True)\n"
        "subprocess.run([sys.executable, '-c', 'import sys; print(\"mlx\" in sys.modules)'], check=True)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=mac.ROOT,
    )
    assert ran.stdout.split() == ["metal", "metal", "False"], ran.stderr


def test_what_a_late_step_started_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); "
        "time.sleep(60)"
    )
    module = ["timeit", "-n", "1", "-r", "1", code]
    late = mac.run(step(module, 3), tmp_path, stands_in=False)
    assert late.state == "too long"
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: is_gone(child), "the child to end")


def is_gone(pid: int) -> bool:
    """Whether a process has ended, collected or not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except FileNotFoundError:  # a Mac collects what nobody waits for
        return sys.platform.startswith("linux")
    return state == "Z"
