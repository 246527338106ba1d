"""A release beside its wheel: the repository's address in one place, the formula, and what is tried before it."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from pathlib import Path

import pytest

from release import formula, project, smoke
from vlm_batch import __version__

ROOT = Path(__file__).parent.parent
URL = "https://example.org/somebody/vlm_batch"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in (project.PYPROJECT, *project.DERIVED):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_files_that_say_the_address_say_pyprojects() -> None:
    for name, derive in project.DERIVED.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert derive(text, project.address()) == text, (
            f"{name}: python -m release.project URL"
        )


def test_the_address_is_set_in_one_place_and_derived_elsewhere(copy: Path) -> None:
    project.set_address("https://example.org/before/another", copy)
    before = {path.name: path.read_text() for path in copy.iterdir()}
    assert all("before/another" in text for text in before.values())
    project.set_address(URL, copy)
    assert project.address(copy) == URL
    for path in copy.iterdir():
        text = path.read_text()
        assert URL in text and "before/another" not in text, path
        assert (
            text.replace(URL, "https://example.org/before/another") == before[path.name]
        )
    assert (
        f"git clone {URL} vlm_batch && cd vlm_batch" in (copy / "README.md").read_text()
    )
    # all else stays
    assert project.facts(copy)["scripts"] == project.facts()["scripts"]


def test_nothing_else_says_where_the_repository_is() -> None:
    """But where it is derived, and in the tests."""
    url = project.address()
    if url is None:
        assert project.NO_ADDRESS in (ROOT / "README.md").read_text()
        return
    for path in (ROOT / "docs").rglob("*.md"):
        assert url not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize(
    ("tag", "environment", "url", "said"),
    [
        (f"v{__version__}", {}, URL, None),
        ("v9.9.9", {}, URL, "the tag is v9.9.9"),
        (
            f"v{__version__}",
            {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "a/fork"},
            URL,
            "this is https://example.org/a/fork",
        ),
        (
            f"v{__version__}",
            {
                "GITHUB_SERVER_URL": "https://example.org",
                "GITHUB_REPOSITORY": "somebody/vlm_batch",
            },
            URL,
            None,
        ),
    ],
)
def test_a_tag_is_released_where_its_facts_agree(
    tag: str, environment: dict[str, str], url: str, said: str | None
) -> None:
    found = project.not_ready(tag, environment, url)
    assert found is None if said is None else found is not None and said in found


def test_the_formula_is_of_the_source_archive(tmp_path: Path) -> None:
    sdist = tmp_path / f"vlm_batch-{__version__}.tar.gz"
    sdist.write_bytes(b"an archive")
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("mlx==1\n")
    text = formula.formula(sdist, constraints, URL)
    digest = hashlib.sha256(b"an archive").hexdigest()
    assert f'/v/vlm-batch/{sdist.name}"\n  sha256 "{digest}"' in text
    assert f'homepage "{URL}"' in text and 'license "MIT"' in text
    assert f"/releases/download/v{__version__}/constraints.txt" in text
    assert 'depends_on "python@3.12"' in text and '"python3.12", "-m", "pip"' in text
    assert not re.search(r"@[a-z_]+@", text)
    # as many blocks as ends
    opened = re.findall(r"^ *(?:class|def) |\bdo$", text, re.MULTILINE)
    assert len(opened) == len(re.findall(r"^ *end$", text, re.MULTILINE))
    # what it installs exists, with an interpreter that is promised
    facts = project.facts()
    assert set(formula.EXTRAS) <= facts["optional-dependencies"].keys()
    assert f"Programming Language :: Python :: {formula.PYTHON}" in facts["classifiers"]


def test_a_formula_of_another_version_is_refused(tmp_path: Path) -> None:
    sdist = tmp_path / "vlm_batch-9.9.tar.gz"
    sdist.touch()
    with pytest.raises(formula.NotFilled, match="no source archive of"):
        formula.formula(sdist, sdist, URL)


def test_the_try_out_needs_an_installed_package() -> None:
    """Or the repository's would be tried in the wheel's place; this environment's is editable."""
    with pytest.raises(SystemExit, match="is not installed"):
        smoke.main(__version__)


def test_the_try_out_needs_nothing_but_the_standard_library() -> None:
    text = (ROOT / "release/smoke.py").read_text()
    names = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert names - {"__future__"} <= set(sys.stdlib_module_names)
