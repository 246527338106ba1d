"""OpenAI's and Anthropic's packages for node against a running server: ``tests/node/clients.test.mjs`` has the cases.

They run where node is, once ``npm install --prefix tests/node`` has fetched the packages; ``NODE_CLIENTS`` names another
folder with them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serving import IMAGES, serving
from tests.test_server_tools import copy_with_tools
from vlm_batch import VLMBatcher

HERE = Path(__file__).parent / "node"
CASES = "clients.test.mjs"


def test_nodes_clients_are_answered(tmp_path: Path) -> None:
    node = shutil.which("node")
    packages = Path(os.environ.get("NODE_CLIENTS", HERE)) / "node_modules"
    if node is None:
        pytest.skip("node is not installed")
    if not packages.is_dir():
        pytest.skip("no packages: npm install --prefix tests/node fetches them")
    # imports are looked up beside the file that has them
    cases = tmp_path / "cases"
    cases.mkdir()
    shutil.copy(HERE / CASES, cases)
    (cases / "node_modules").symlink_to(packages.resolve())
    folder = copy_with_tools(tmp_path / "qwen2_vl")
    files = tmp_path / "files"
    with serving(lambda: VLMBatcher(str(folder), max_rows=8), files=files) as running:
        told = {"SERVER": running.url, "PICTURE": str(IMAGES / "red_circle.png")}
        ran = subprocess.run(
            [node, "--test", CASES],
            cwd=cases,
            env={**os.environ, **told},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
