"""Facts of pyproject.toml, and the repository's address, which stands there and is derived elsewhere.

``python -m release.project https://host/owner/vlm_batch`` writes it there, and into the files that say it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from vlm_batch._version import __version__

try:
    import tomllib  # type: ignore[import-not-found]
except ImportError:  # Python 3.10; hatchling brings it
    import tomli as tomllib  # type: ignore[import-not-found, no-redef]

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = "pyproject.toml"
#: What stands where the address will.
NO_ADDRESS = "<this repository>"
_URLS = re.compile(r"\[project\.urls\]\n(?:\w.*\n)+\n")
_CODE = re.compile(r"^repository-code:.*\n", re.MULTILINE)


def facts(root: Path = ROOT) -> dict[str, Any]:
    """Return pyproject.toml's table ``project``."""
    text = (root / PYPROJECT).read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


def address(root: Path = ROOT) -> str | None:
    """Return the repository's address; None before it has one."""
    urls: dict[str, str] = facts(root).get("urls", {})
    return urls.get("Repository")


def pyproject_with(text: str, url: str) -> str:
    changelog = f"{url}/blob/main/CHANGELOG.md"
    urls = f'[project.urls]\nRepository = "{url}"\nChangelog = "{changelog}"\n\n'
    without = _URLS.sub("", text)
    return without.replace("[project.scripts]", f"{urls}[project.scripts]", 1)


def readme_with(text: str, url: str | None) -> str:
    """Return README.md with its line that clones the repository."""
    line = f"git clone {url or NO_ADDRESS} vlm_batch"
    return re.sub(r"git clone .*? vlm_batch\b", line, text, count=1)


def citation_with(text: str, url: str | None) -> str:
    text = _CODE.sub("", text)
    if url is None:
        return text
    return text.replace("license:", f'repository-code: "{url}"\nlicense:', 1)


#: Files that say the address -> how.
DERIVED = {"README.md": readme_with, "CITATION.cff": citation_with}


def set_address(url: str, root: Path = ROOT) -> None:
    pyproject = root / PYPROJECT
    text = pyproject.read_text(encoding="utf-8")
    pyproject.write_text(pyproject_with(text, url), encoding="utf-8")
    for name, derive in DERIVED.items():
        text = (root / name).read_text(encoding="utf-8")
        (root / name).write_text(derive(text, url), encoding="utf-8")


def not_ready(
    tag: str, environment: dict[str, str], url: str | None = None
) -> str | None:
    """Return why a tag cannot be released; None if it can.

    Args:
        environment: GitHub's, which says where a workflow runs.
        url: The repository's address (default: pyproject.toml's).
    """
    if tag != f"v{__version__}":
        return f"the tag is {tag}, and vlm_batch/_version.py says {__version__}"
    url = url or address()
    if url is None:
        return "pyproject.toml has no address: python -m release.project URL"
    server, name = (
        environment.get(f"GITHUB_{one}") for one in ("SERVER_URL", "REPOSITORY")
    )
    here = f"{server}/{name}"
    if server and name and url != here:
        return f"pyproject.toml says {url}, and this is {here}: python -m release.project {here}"
    return None


if __name__ == "__main__":
    given = sys.argv[1:]
    if len(given) != 1 or not re.fullmatch(r"https://\S+[^/\s]", given[0]):
        sys.exit("usage: python -m release.project https://host/owner/repository")
    set_address(given[0])
