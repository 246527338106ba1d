"""The pages of the server: their commands run, their table of fields is what it does, and they are short."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import server_fields
from tests.serving import Running, serving
from vlm_batch.cli import main as cli

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
PAGES = sorted(
    set((ROOT / "docs").glob("server*.md")) - {ROOT / "docs/server-inside.md"}
)
#: Most words of a page.
MOST_WORDS = 700
CURL = [line for line in PAGE.splitlines() if re.match(r"(\(.*\| )?curl ", line)]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
@pytest.mark.parametrize("line", CURL, ids=range(len(CURL)))
def test_the_curl_lines_run(server: Running, line: str) -> None:
    here = line.replace("http://127.0.0.1:8080", server.url)
    assert here != line
    ran = subprocess.run(
        ["bash", "-c", here],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert '"error": {' not in ran.stdout
    assert '{"error":{' not in ran.stdout
    if '"stream"' in line:
        assert ran.stdout.rstrip().endswith("data: [DONE]")
    elif "metrics" in line:
        assert "vllm:num_requests_running" in ran.stdout
    else:
        found = json.loads(ran.stdout)
        said = {
            "red_circle": "a red circle",
            "count to 5": "1 2 3 4 5",
            "count to 3": "1 2 3",
        }
        for asked, answer in said.items():
            if asked in line:
                choice = found["choices"][0]
                assert answer == (
                    choice["message"]["content"]
                    if "message" in choice
                    else choice["text"]
                )


def test_there_are_curl_lines() -> None:
    assert len(CURL) >= 7


def test_the_table_of_fields_is_up_to_date() -> None:
    page = server_fields.PAGE.read_text(encoding="utf-8")
    assert server_fields.table() in page, "run python -m tests.server_fields"


def test_every_flag_that_is_named_is_one() -> None:
    parser = cli.parser()
    help_text = (
        parser._subparsers._group_actions[0].choices["serve"].format_everything()  # type: ignore[index,union-attr]
    )
    for name in ("access", "running", "responses", "batches"):
        page = ROOT / "docs" / f"server-{name}.md"
        about = page.read_text(encoding="utf-8").partition("## Measuring")[0]
        for flag in set(re.findall(r"`(--[a-z-]+)", about)):
            assert flag in help_text, (page, flag)


def test_every_flag_has_one_line_of_the_table() -> None:
    page = (ROOT / "docs" / "server-running.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--.*?) \|", page, re.MULTILINE)
    flags = re.findall(r"`(--[a-z-]+)", " ".join(rows))
    assert len(flags) > 20
    assert sorted(flags) == sorted(set(flags))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_of_the_server_is_short(page: Path) -> None:
    """One page for each door, and for each question about all of them; the table of fields is made from their types."""
    said = page.read_text(encoding="utf-8")
    if page == server_fields.PAGE:
        said = said.replace(server_fields.table(), "")
    assert len(said.split()) <= MOST_WORDS
