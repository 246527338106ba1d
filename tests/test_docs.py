"""What the documentation says is there: code, commands, links, families and the parity table."""

from __future__ import annotations

import ast
import os
import re
import shlex
from pathlib import Path

import pytest

from tests import parity_table
from vlm_batch import cli, families

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """(name, text) of every code block of a language in the documentation."""
    found = []
    for page in PAGES:
        texts = [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]
        found += [(f"{page.name}-{number}", text) for number, text in enumerate(texts)]
    return found


PYTHON = blocks("python")
COMMANDS = [line for _, text in blocks("sh") for line in text.splitlines() if line]


@pytest.mark.parametrize("code", [text for _, text in PYTHON], ids=[name for name, _ in PYTHON])
def test_code_is_code(code: str) -> None:
    ast.parse(code)


RUNNABLE = [(name, text) for name, text in PYTHON if "default_checkpoint()" in text]


@pytest.mark.parametrize("code", [text for _, text in RUNNABLE], ids=[name for name, _ in RUNNABLE])
def test_code_on_the_embedded_checkpoint_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "documentation", "exec"), {"__name__": "documentation"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("vlm-batch")])
def test_commands_parse(command: str) -> None:
    cli.parser().parse_args(shlex.split(command, comments=True)[1:])


@pytest.mark.parametrize("script", sorted({c.split()[0] for c in COMMANDS if c.startswith("scripts/")}))
def test_scripts_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert "://" in link or (page.parent / link).exists(), link


def test_the_readme_lists_the_families() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Families")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == {spec.family for spec in families()}


def test_the_parity_table_is_up_to_date() -> None:
    """The page shows what ``scripts/parity_table`` recorded last, with a cell for every family and scenario."""
    records = parity_table.read(ROOT / "docs/parity.json")
    page = (ROOT / "docs/parity.md").read_text(encoding="utf-8")
    assert parity_table.insert(page, parity_table.render(records, families())) == page
    assert parity_table.FAILED not in page


def test_the_adapter_guide_names_hooks_that_exist() -> None:
    from vlm_batch.models.base import Adapter

    table = (ROOT / "docs/adding-a-family.md").read_text(encoding="utf-8").split("| hook |")[1].split("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named
    assert named <= set(vars(Adapter))
