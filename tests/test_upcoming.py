"""``scripts/upcoming``: what an mlx-vlm that is not released yet moves is named. The matrix itself runs there, not here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from release import upcoming

ROOT = Path(__file__).parent.parent
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_parity" name="test_alone[qwen2_vl]"><failure message="0.3 apart&#10;more"/></testcase>
<testcase classname="tests.test_parity" name="test_alone[gemma3]"/>
<testcase classname="tests.test_zoo" name="test_zoo[new]"><error message="ImportError: gone"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def packages(tmp_path: Path) -> tuple[Path, Path]:
    """A package as it was, and as it will be: one file changed, one gone, one new."""
    files = ("models/qwen2_vl/language.py", "models/cache.py", "utils.py")
    base, now = tmp_path / "base", tmp_path / "now"
    for package in (base, now):
        for name in files:
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text("x = 1\n")
    (now / "models/qwen2_vl/language.py").write_text("x = 2\n")
    (now / "utils.py").unlink()
    (now / "models/cache.pyc").write_bytes(b"of another Python")
    (now / "models/brand_new_vl").mkdir()
    (now / "models/brand_new_vl/__init__.py").touch()
    return base, now


def test_files_that_differ_are_named_with_their_families(
    packages: tuple[Path, Path],
) -> None:
    base, now = packages
    assert upcoming.moved_files(base, base) == []
    assert upcoming.moved_files(base, now) == [
        "models/brand_new_vl/__init__.py is new (no family here)",
        "models/qwen2_vl/language.py has changed (qwen2_vl)",
        "utils.py is gone",
    ]


def test_models_that_nobody_knows_are_named(packages: tuple[Path, Path]) -> None:
    base, now = packages
    assert upcoming.unknown_models(base) == []
    assert upcoming.unknown_models(now) == ["brand_new_vl is not known here"]


def test_tests_that_fail_are_named_with_why(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(JUNIT)
    assert upcoming.failures(report) == [
        "tests.test_parity::test_alone[qwen2_vl]: 0.3 apart",
        "tests.test_zoo::test_zoo[new]: ImportError: gone",
    ]


def test_what_it_runs_exists() -> None:
    for name in upcoming.TESTS:
        assert (ROOT / "tests" / name).is_file(), name


def test_it_says_what_it_takes() -> None:
    script = ROOT / "scripts/upcoming"
    for words in ([], ["/nowhere.whl"]):
        ran = subprocess.run(
            [script, *words], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 2 and "FOLDER_OR_WHEEL" in ran.stderr
