"""The Homebrew formula of a release: ``python -m release.formula DIST CONSTRAINTS OUT`` fills ``vlm-batch.rb.in`` in.

A tap's formula: Homebrew's own repository asks for source archives of all that a formula depends on, and MLX has none.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

from release.project import address, facts
from vlm_batch._version import __version__

TEMPLATE = Path(__file__).parent / "vlm-batch.rb.in"
#: The interpreter of Homebrew's that the formula takes.
PYTHON = "3.12"
EXTRAS = ("serve", "heic", "pdf", "sound")


class NotFilled(Exception):
    """A fact of the formula is missing."""


def formula(sdist: Path, constraints: Path, url: str) -> str:
    """Return the formula's text.

    Args:
        sdist: The source archive, as PyPI will have it.
        constraints: The versions of its dependencies, as the release's page will have them.
        url: The repository's address.
    """
    name, version = sdist.name.removesuffix(".tar.gz").rsplit("-", 1)
    if (name, version) != ("vlm_batch", __version__):
        raise NotFilled(f"{sdist.name} is no source archive of {__version__}")
    project = facts()
    values = {
        "description": project["description"],
        "homepage": url,
        "url": f"https://files.pythonhosted.org/packages/source/v/vlm-batch/{sdist.name}",
        "sha256": _digest(sdist),
        "license": project["license"],
        "constraints_url": f"{url}/releases/download/v{version}/{constraints.name}",
        "constraints_sha256": _digest(constraints),
        "python": PYTHON,
        "extras": ",".join(EXTRAS),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for key, value in values.items():
        if '"' in value or "#{" in value:
            raise NotFilled(f"{key} is {value!r}, which Ruby would read otherwise")
        text = text.replace(f"@{key}@", value)
    if left := re.findall(r"@\w+@", text):
        raise NotFilled(f"nothing says {', '.join(left)}")
    return text


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(dist: str, constraints: str, out: str) -> None:
    url = address()
    if url is None:
        sys.exit(
            "formula: pyproject.toml has no address: python -m release.project URL"
        )
    (sdist,) = Path(dist).glob("*.tar.gz")
    text = formula(sdist, Path(constraints), url)
    Path(out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
