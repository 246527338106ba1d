"""The documentation as a site: it builds strictly, loads nothing from elsewhere, and can be searched."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests import chromium

pytest.importorskip(
    "mkdocs",
    reason="the site is made with the extra [docs]: pip install 'vlm-batch[docs]'",
)
pytest.importorskip(
    "nbconvert",
    reason="the site is made with the extra [docs]: pip install 'vlm-batch[docs]'",
)

from website import pages

ROOT = Path(__file__).parent.parent
BINARY = chromium.find()


def build(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run what scripts/docs runs."""
    script = (ROOT / "scripts/docs").read_text(encoding="utf-8")
    (arguments,) = re.findall(
        r"^build\) exec \.venv/bin/python (.*?) ;;", script, re.MULTILINE
    )
    command = [sys.executable, *arguments.split(), "--site-dir", str(folder), *more]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site: a broken link, a broken anchor or a page without a place in the nav is an error."""
    folder = tmp_path_factory.mktemp("site")
    built = build(folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_what_is_broken_is_an_error(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    links = "[page](gone.md) [anchor](index.md#gone) [absolute](/gone.md) ![picture](gone.png)"
    (docs / "index.md").write_text(f"# Home\n\n{links}\n", encoding="utf-8")
    (docs / "gone_from_the_nav.md").write_text("# Not in the nav\n", encoding="utf-8")
    config = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": str(docs),
        "hooks": [],
        "plugins": [],
        "watch": [],
    }
    (tmp_path / "mkdocs.yml").write_text(
        yaml.safe_dump({**config, "nav": ["index.md"]}), encoding="utf-8"
    )
    built = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert built.returncode == 1
    for broken in (
        "'gone.md'",
        "'index.md#gone'",
        "'/gone.md'",
        "'gone.png'",
        "gone_from_the_nav.md",
    ):
        assert broken in built.stderr, built.stderr
    assert built.stderr.count("WARNING") == 5


def html(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if "files" not in path.parts)


def test_every_page_of_the_docs_and_every_notebook_is_there(site: Path) -> None:
    made = {path.relative_to(site).with_suffix("").as_posix() for path in html(site)}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= made
    assert {
        f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb")
    } <= made
    assert {"changelog", "contributing"} <= made


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe|source|video)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\bhref=[\"']?(?:https?:)?//"
    )
    for page in html(site):
        assert not loads.search(page.read_text(encoding="utf-8")), page
    for sheet in (site / "assets").rglob("*.css"):
        assert not re.search(
            r"url\([\"']?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")
        ), sheet
    assert "http" not in re.sub(
        r"http://www\.w3\.org/\S+|<!--.*?-->",
        "",
        (ROOT / "docs/images/demo.svg").read_text(),
    )


def test_the_reference_has_every_public_name(site: Path) -> None:
    import vlm_batch

    page = (site / "reference.html").read_text(encoding="utf-8")
    shown = set(re.findall(r'id="vlm_batch\.(?:\w+\.)*(\w+)"', page))
    assert set(vlm_batch.__all__) - {"__version__"} <= shown


def test_a_notebook_is_shown_with_its_pictures(site: Path) -> None:
    page = (site / "notebooks/05_caption_a_folder.html").read_text(encoding="utf-8")
    pictures = [
        source
        for source in re.findall(r'<img[^>]* src="([^"]+)"', page)
        if not source.startswith("data:")
    ]
    assert pictures and all(
        (site / "notebooks" / source).stat().st_size > 1000 for source in pictures
    )
    # the table of pictures with their answers
    assert page.count('<img src="data:image/png;base64,') == 6


@pytest.mark.parametrize(
    ("source", "target", "landing"),
    [
        (
            "docs/index.md",
            "../notebooks/01_quickstart.ipynb",
            "notebooks/01_quickstart.md",
        ),
        ("notebooks/01_quickstart.md", "../docs/models.md", "models.md"),
        (
            "docs/adding-a-family.md",
            "../tests/third_party/my_family.py",
            "files/tests/third_party/my_family.py",
        ),
        ("CHANGELOG.md", "docs/caches.md", "caches.md"),
        ("docs/index.md", "../CONTRIBUTING.md", "contributing.md"),
        ("docs/upstream.md", "upstream/tiny.py", "upstream/tiny.py"),
    ],
)
def test_a_link_lands_on_the_page_of_its_file(
    source: str, target: str, landing: str
) -> None:
    assert pages._lands_on(source, target) == landing


@pytest.mark.parametrize(
    "uri",
    [
        "quickstart.md",
        "notebooks/01_quickstart.ipynb",
        "changelog.md",
        "files/SECURITY.md",
    ],
)
def test_a_page_knows_where_its_source_lies(uri: str) -> None:
    landing = str(Path(uri).with_suffix(".md"))
    assert pages._lands_on("README.md", pages._place_in_repository(uri)) == landing


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Nothing is written."""

    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(
    BINARY is None and "VLM_BATCH_BROWSER" not in os.environ,
    reason="no Chromium here; VLM_BATCH_BROWSER=1 scripts/setup installs one where it can",
)
def test_it_can_be_searched_and_asks_nobody_else(address: str) -> None:
    assert BINARY is not None, (
        "VLM_BATCH_BROWSER asks for this test, and there is no Chromium"
    )
    with chromium.browser(BINARY) as page:
        page.size(1200, 900)
        page.open(f"{address}/index.html")
        page.run("document.querySelector('.md-search__input').focus()")
        type_it = (
            "(i => { i.value = 'reproducible'; i.dispatchEvent(new Event('keyup')) })"
        )
        page.wait(
            f"{type_it}(document.querySelector('.md-search__input')),"
            " document.querySelectorAll('.md-search-result__item').length > 0",
            seconds=60,
        )
        asked = [
            one["params"]["request"]["url"]
            for one in page.events
            if one["method"] == "Network.requestWillBeSent"
        ]
        assert asked and all(
            url.startswith((address, "data:", "blob:")) for url in asked
        ), asked
        problems = [
            one["params"]
            for one in page.events
            if one["method"] == "Runtime.exceptionThrown"
        ]
        assert not problems
