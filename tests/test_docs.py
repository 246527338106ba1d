"""What the documentation says is there: code, commands, links, families and the parity table."""

from __future__ import annotations

import ast
import os
import re
import shlex
from importlib.metadata import version
from pathlib import Path

import pytest
from mlx_vlm.models.cache import ArraysCache

from tests import models_page
from tests.harness import TOLERANCE, shared_adapter
from tests.house import CALLS, public_members
from tests.test_parity import SCENARIOS
from tests.zoo import FAMILIES
from vlm_batch import families
from vlm_batch.caches.cross import CrossCache
from vlm_batch.cli import facts
from vlm_batch.cli import main as cli
from vlm_batch.server.config import DEFAULT_PORT

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """(name, text) of every code block of a language in the documentation."""
    found = []
    for page in PAGES:
        texts = [
            text
            for kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))
            if kind == language
        ]
        found += [(f"{page.name}-{number}", text) for number, text in enumerate(texts)]
    return found


PYTHON = blocks("python")
COMMANDS = [line for _, text in blocks("sh") for line in text.splitlines() if line]


@pytest.mark.parametrize(
    "code", [text for _, text in PYTHON], ids=[name for name, _ in PYTHON]
)
def test_code_is_code(code: str) -> None:
    ast.parse(code)


RUNNABLE = [
    (name, text)
    for name, text in PYTHON
    if "default_checkpoint()" in text or "sample_model()" in text
]


@pytest.mark.parametrize(
    "code", [text for _, text in RUNNABLE], ids=[name for name, _ in RUNNABLE]
)
def test_code_on_the_embedded_checkpoint_runs(
    code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(code, "documentation", "exec"), {"__name__": "documentation"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("vlm-batch")])
def test_commands_parse(command: str) -> None:
    cli.parser().parse_args(shlex.split(command, comments=True)[1:])


@pytest.mark.parametrize(
    "script", sorted({c.split()[0] for c in COMMANDS if c.startswith("scripts/")})
)
def test_scripts_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


def test_programs_are_pointed_at_the_port_that_the_server_takes() -> None:
    """No page starts the server with another port, so that another one would be nobody's."""
    others = []
    num_urls = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for port in re.findall(r"(?:127\.0\.0\.1|localhost):(\d+)", text):
            num_urls += 1
            if int(port) != DEFAULT_PORT:
                others.append((page.name, port))
    assert num_urls > 20
    assert others == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(
        r"\]\(([^)#]*)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")
    ):
        assert "://" in link or (page.parent / link).exists(), link


def test_the_pages_of_models_are_up_to_date() -> None:
    table, details = (
        page.read_text(encoding="utf-8")
        for page in (models_page.PAGE, models_page.DETAILS_PAGE)
    )
    assert table == models_page.render(facts.all_facts(), facts.recorded()), (
        "run python -m tests.models_page"
    )
    assert details == models_page.render_details(facts.all_facts()), (
        "run python -m tests.models_page"
    )
    assert max(map(len, table.splitlines())) <= models_page.LONGEST_ROW


def test_the_record_of_the_matrix_does_not_lag() -> None:
    """Every tested model in every scenario of the matrix, with the mlx-vlm that is installed, within the tests' tolerance."""
    record = facts.recorded()
    assert record["mlx_vlm"] == version("mlx-vlm"), "run scripts/parity_table"
    assert record["tolerance"] == TOLERANCE
    known = {one.spec.family: one for one in facts.all_facts()}
    open_gaps = {
        (spec.family, scenario)
        for spec in families()
        for scenario, _ in spec.known_gaps
    }
    for name, tiny in FAMILIES.items():
        cells = record["models"].get(name, {})
        missing = {
            scenario
            for scenario in SCENARIOS
            if (tiny.registered, scenario) not in open_gaps
        } - cells.keys()
        assert not missing, (
            f"{name} has no record of {sorted(missing)}: run scripts/parity_table"
        )
        assert name in known[tiny.registered].models
        spec = known[tiny.registered].spec
        assert spec.images is any(
            not other.text_only
            for other in FAMILIES.values()
            if other.registered == spec.family
        )
        assert spec.video == any(
            "video" in scenario
            for one in known[tiny.registered].models.values()
            for scenario in one
        )
    assert record["models"].keys() <= FAMILIES.keys()


def test_what_mlx_vlm_did_is_of_models_and_scenarios_that_are_here() -> None:
    there = facts.upstream()
    assert there["models"].keys() <= FAMILIES.keys()
    assert {ours for names in there["scenarios"].values() for ours in names} <= {
        *SCENARIOS,
        "image_text_image",
    }
    assert all(
        cells.keys() <= there["scenarios"].keys() for cells in there["models"].values()
    )
    assert {cell for cells in there["models"].values() for cell in cells.values()} == {
        "right",
        "wrong",
        "NaN",
        "crash",
    }


def test_the_comparison_counts_what_mlx_vlm_gets_right() -> None:
    models = facts.upstream()["models"].values()
    clean = sum(set(cells.values()) == {"right"} for cells in models)
    page = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    assert f"{clean} of {len(models)} models" in " ".join(page.split())


def test_the_readme_begins_with_a_screen_of_150_words() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    screen = readme.split("\n## ")[0]
    prose = re.sub(r"```.*?```", "", screen, flags=re.DOTALL)
    shown = re.sub(r"\]\([^)]*\)|[^\w\s'-]", " ", prose)
    assert len(shown.split()) <= 150


def test_readme_and_comparison_count_the_families() -> None:
    assert f"holds **{len(families())} families** to it" in (
        ROOT / "README.md"
    ).read_text(encoding="utf-8")
    assert f"yes: {len(families())} families in float32" in (
        ROOT / "docs/comparison.md"
    ).read_text(encoding="utf-8")


def test_families_that_hear_and_see_videos_are_counted() -> None:
    page = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    for row, taken in (
        ("audio", [spec.audio for spec in families()]),
        ("video", [spec.video for spec in families()]),
    ):
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {row} |")]
        assert f"| {sum(taken)} families; the others refuse it" in line
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    words = {10: "Ten", 11: "Eleven", 12: "twelve", 13: "thirteen"}
    heard, seen = (
        sum(getattr(spec, kind) for spec in families()) for kind in ("audio", "video")
    )
    assert f"{words[heard]} families hear and {words[seen]} see videos" in readme


def test_the_readme_is_two_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


GUIDE = (ROOT / "docs/adding-a-family.md").read_text(encoding="utf-8")


def first_cells(heading: str) -> list[str]:
    """The first column of the guide's table with a heading."""
    rows = GUIDE.split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return [row.split("|")[1] for row in rows]


def test_the_adapter_guide_names_every_hook_and_no_other() -> None:
    from vlm_batch.adapters.base import Adapter
    from vlm_batch.adapters.grids import GridAdapter, MRoPEAdapter

    first = re.findall(r"`(\w+)`", "".join(first_cells("hook")))
    assert len(first_cells("hook")) - 4 == 15
    named = first + re.findall(r"`(\w+)`", "".join(first_cells("hook of few")))
    assert len(named) == len(set(named))
    public = public_members() - CALLS - {"spec"}
    grids = {
        name
        for kind in (GridAdapter, MRoPEAdapter)
        for name in vars(kind)
        if not name.startswith("_")
    }
    assert public <= set(named) <= public | grids
    adapters = {
        base
        for spec in families()
        for base in (spec.adapter.__mro__ if spec.adapter else ())
    }
    overridden = {
        name
        for kind in adapters - {Adapter, GridAdapter, MRoPEAdapter, object}
        for name in vars(kind)
    }
    assert not overridden & CALLS, "the engine's calls are every family's"
    assert overridden & (public | grids) <= set(named)
    assert all(
        len(row.strip("|").split("|")) == 3
        for heading in ("hook", "hook of few")
        for row in GUIDE.split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    )


#: The most lines that one reads to add a family with sliding windows.
MOST_LINES = 600


def test_a_family_with_sliding_windows_takes_few_lines_to_read() -> None:
    """The guide up to a plain family, its hooks, and the files that its table names, all whole."""
    rows = GUIDE.split("| read | for |")[1].split("\n\n")[0].splitlines()[2:]
    files = [file for row in rows for file in re.findall(r"^\| `(\S+)` \|", row)]
    assert len(files) == len(rows) - 1
    page = GUIDE.split("### A family with M-RoPE")[0]
    page += GUIDE.split("### The hooks")[1].split("\n## ")[0]
    texts = [page, *((ROOT / file).read_text(encoding="utf-8") for file in files)]
    assert sum(len(text.splitlines()) for text in texts) <= MOST_LINES


def test_the_adapter_guide_has_a_family_to_copy_for_every_kind() -> None:
    from vlm_batch.adapters.base import Adapter
    from vlm_batch.adapters.grids import MRoPEAdapter

    rows = re.findall(
        r"^\| ([\w-]+(?: \w+)?) \| `(\S+)` \| `(\S+)` \|",
        GUIDE.split("### A file to copy")[1],
        re.MULTILINE,
    )
    kinds = {kind: Path(adapter).stem for kind, adapter, _ in rows}
    assert kinds.keys() == {
        "plain",
        "M-RoPE",
        "two-way",
        "cross-attention",
        "recurrent",
        "own caches",
    }
    adapters = {spec.family: spec.adapter for spec in families()}
    for _, adapter, tiny in rows:
        assert (ROOT / adapter).is_file() and (ROOT / tiny).is_file()
        assert Path(adapter).stem in adapters and Path(tiny).stem in FAMILIES
    for kind, is_of_it in {
        "plain": lambda one: (
            not issubclass(one, MRoPEAdapter) and one.row_caches is Adapter.row_caches
        ),
        "M-RoPE": lambda one: issubclass(one, MRoPEAdapter),
        "two-way": lambda one: one.atomic_spans is not Adapter.atomic_spans,
        "cross-attention": lambda one: any(
            type(cache) is CrossCache
            for cache in shared_adapter(one.spec.family).make_cache()
        ),
        "recurrent": lambda one: any(
            isinstance(cache, ArraysCache)
            for cache in shared_adapter(one.spec.family).make_cache()
        ),
        "own caches": lambda one: one.row_caches is not Adapter.row_caches,
    }.items():
        assert is_of_it(adapters[kinds[kind]]), kind


def test_each_promise_of_reliability_names_tests_that_are_there() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = [
        line
        for line in page.partition("## Each promise")[2].splitlines()
        if line.startswith("| ")
    ][1:]
    assert rows
    for row in rows:
        held_by = re.findall(r"`(tests/\w+\.py)`: ((?:`\w+`(?:, )?)+)", row)
        assert held_by, row
        for file, names in held_by:
            source = (ROOT / file).read_text(encoding="utf-8")
            assert not [
                name
                for name in re.findall(r"\w+", names)
                if f"\ndef {name}(" not in source
            ], row
