"""What another mlx-vlm moves: ``scripts/upcoming FOLDER_OR_WHEEL`` runs this in an environment that has it.

    python -m release.upcoming BASE [pytest's arguments]

BASE is the folder ``mlx_vlm`` of the release that this library was made for. What moved is listed: files that differ,
with the families that they touch; functions that are replaced here, and differ; models that nobody here knows; and tests
that fail of the matrix, of transformers' recordings, of mlx-vlm's defects, and of the settings that it reads. The exit
status is 0 if nothing moved.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from release.project import ROOT

#: The matrix, transformers' recordings, mlx-vlm's defects (one that is corrected fails its test), the settings that it reads.
TESTS = (
    "test_parity.py",
    "test_kv_quant.py",
    "test_prefix_cache.py",
    "test_prompt_cache.py",
    "test_zoo.py",
    "test_upstream.py",
    "test_reads.py",
)


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file that Python or a reader reads, by its place in a package."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            name = path.relative_to(folder).as_posix()
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def moved_files(base: Path, now: Path) -> list[str]:
    """Return the files that differ, one line each."""
    before, after = digests(base), digests(now)
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            lines.append(f"{name} is gone")
        elif name not in before:
            lines.append(f"{name} is new")
        elif before[name] != after[name]:
            lines.append(f"{name} has changed")
    return [line + touched(line.partition(" ")[0]) for line in lines]


def touched(name: str) -> str:
    """Return which families a file of mlx-vlm's touches, in brackets; nothing for a file of no model."""
    from vlm_batch.models import families

    parts = name.split("/")
    if parts[0] != "models" or len(parts) < 3:
        return ""
    known = [one.family for one in families() if parts[1] in one.model_types]
    return f" ({', '.join(known)})" if known else " (no family here)"


def unknown_models(now: Path) -> list[str]:
    """Return folders of models that are neither batched nor refused, nor run one at a time."""
    from vlm_batch.cli.facts import ONE_AT_A_TIME, REFUSED
    from vlm_batch.models import families

    known = {*REFUSED, *ONE_AT_A_TIME}
    for one in families():
        known |= {one.family, *one.model_types}
    folders = [path.parent.name for path in sorted(now.glob("models/*/__init__.py"))]
    return [f"{name} is not known here" for name in folders if name not in known]


def moved_functions() -> list[str]:
    from tests.upstream_sources import RECORD, differences, found

    return differences(json.loads(RECORD.read_text(encoding="utf-8")), found())


def failures(report: Path) -> list[str]:
    """Return the tests of a JUnit report that failed, each with the first line of why."""
    lines = []
    for case in ElementTree.parse(report).iter("testcase"):
        failed = case.find("failure")
        if failed is None:
            failed = case.find("error")
        if failed is not None:
            why = (failed.get("message") or "").strip().partition("\n")[0]
            lines.append(f"{case.get('classname')}::{case.get('name')}: {why[:160]}")
    return lines


def run_tests(arguments: Sequence[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        files = [str(ROOT / "tests" / name) for name in TESTS]
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
        ran = subprocess.run([*command, *files, *arguments], cwd=ROOT, check=False)
        if report.is_file():
            return failures(report)
        return [f"the tests cannot be run: pytest ended with {ran.returncode}"]


def main(base: str, *arguments: str) -> int:
    spec = find_spec("mlx_vlm")
    assert spec is not None and spec.submodule_search_locations
    now = Path(spec.submodule_search_locations[0])
    print(f"mlx-vlm {version('mlx-vlm')} in {now}, beside {base}", flush=True)
    tested = run_tests(arguments)
    sections = {
        "Files that differ": moved_files(Path(base), now),
        "Functions that are replaced here, and differ": moved_functions(),
        "Models that nobody here knows": unknown_models(now),
        "Tests that fail": tested,
    }
    for title, lines in sections.items():
        print(f"\n{title}: {len(lines) or 'none'}", *lines, sep="\n  ")
    return int(any(sections.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
