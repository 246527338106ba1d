"""mkdocs' hooks: pages that are made of other files, and links that leave the folder of the docs.

Notebooks become pages with what they show; CHANGELOG.md and CONTRIBUTING.md are pages as they are. In the repository a link
goes to a file where it lies (``../notebooks/01_quickstart.ipynb``, ``docs/models.md``); on the site it goes to that file's
page, or to a copy of the file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
#: Files of the repository that are pages, beside those of docs/.
OTHER_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the notebooks' pages with their pictures, the other pages, and copies of files that pages link to."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = notebook_page(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, data in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=data))
    for source, uri in OTHER_PAGES.items():
        files.append(
            File.generated(
                config, uri, content=(ROOT / source).read_text(encoding="utf-8")
            )
        )
    linking = [file for file in files if file.is_documentation_page()]
    while linking:
        page = linking.pop()
        for target in _links(page.content_string):
            copied = _lands_on(_place_in_repository(page.src_uri), target)
            source_file = ROOT / copied.removeprefix("files/")
            if (
                copied.startswith("files/")
                and files.get_file_from_path(copied) is None
                and source_file.is_file()
            ):
                copy = File.generated(
                    config,
                    copied,
                    content=source_file.read_bytes(),
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
                files.append(copy)
                linking += [copy] if copy.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Send links to where things are on the site."""
    here = _place_in_repository(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        opening, target, anchor, closing = link.groups()
        if _leaves(target):
            return link[0]
        landing = _lands_on(here, target)
        return f"{opening}{posixpath.relpath(landing, folder or '.')}{anchor or ''}{closing}"

    parts = _FENCE.split(markdown)
    return "".join(
        part if part.startswith("```") else _LINK.sub(moved, part) for part in parts
    )


def _links(markdown: str) -> list[str]:
    """The target of every link that stays in the repository, outside code."""
    prose = "".join(
        part for part in _FENCE.split(markdown) if not part.startswith("```")
    )
    return [target for _, target, _, _ in _LINK.findall(prose) if not _leaves(target)]


def _leaves(target: str) -> bool:
    """Whether a link leads out of the repository."""
    return "://" in target or target.startswith(("mailto:", "data:"))


def _place_in_repository(uri: str) -> str:
    """Where a page's source lies in the repository: links in it start from there."""
    if uri.startswith("notebooks/"):
        return uri
    if uri.startswith("files/"):
        return uri.removeprefix("files/")
    back = {page: name for name, page in OTHER_PAGES.items()}
    return back.get(uri, f"docs/{uri}")


def _lands_on(source: str, target: str) -> str:
    """Where a link of a file in the repository leads to on the site."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path in OTHER_PAGES:
        return OTHER_PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("notebooks/"):
        return str(Path(path).with_suffix(".md")) if path.endswith(".ipynb") else path
    return f"files/{path}"


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """(Markdown, pictures by name) of a notebook as it is kept."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/html" in data:
                data["text/html"] = _table(data["text/html"])
    text, resources = MarkdownExporter().from_notebook_node(
        notebook, resources={"unique_key": path.stem, "output_files_dir": path.stem}
    )
    pictures = resources.get("outputs", {})
    note = f"*A notebook: [{path.name}]({path.name}) in the folder `notebooks` of the repository.*"
    heading, _, rest = text.partition("\n\n")
    return f"{heading}\n\n{note}\n\n{rest}", {**pictures, path.name: path.read_bytes()}


def _table(html: str) -> str:
    """A table's HTML without its style sheet, in one block that Markdown leaves alone."""
    html = re.sub(r"<style.*?</style>", "", html, flags=re.DOTALL)
    return '<div class="nb-table">' + " ".join(html.split()) + "</div>"
