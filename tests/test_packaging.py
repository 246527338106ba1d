"""The wheel carries what the command line needs on a machine without the repository."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vlm_batch.assets import SAMPLES

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run(
        [*command, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=120
    )
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_carries_checkpoint_pictures_and_types(
    wheel: zipfile.ZipFile,
) -> None:
    names = set(wheel.namelist())
    assets = "vlm_batch/assets"
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert f"{assets}/checkpoints/qwen2_vl/{file}" in names
        assert f"{assets}/reader/{file}" in names
    assert {f"{assets}/images/{name}" for name in SAMPLES} == {
        n for n in names if n.startswith(f"{assets}/images/")
    }
    assert "vlm_batch/py.typed" in names
    assert {
        f"vlm_batch/server/page/{file}"
        for file in ("index.html", "app.js", "style.css", "icon.svg")
    } <= names


def test_the_wheel_is_small_and_carries_nothing_else(wheel: zipfile.ZipFile) -> None:
    sizes = {info.filename: info.compress_size for info in wheel.infolist()}
    sample = sum(
        size
        for name, size in sizes.items()
        if name.startswith("vlm_batch/assets/reader/")
    )
    assert sample < 13e6
    assert sum(sizes.values()) - sample < 3e6
    assert {name.split("/")[0].split("-")[0] for name in wheel.namelist()} == {
        "vlm_batch"
    }


def test_the_installed_wheel_finds_its_own_files(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path)
    code = "from vlm_batch import assets as a; print(a.default_checkpoint(), a.sample_model(), *a.sample_images(), sep='\\n')"
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = [Path(line) for line in run.stdout.splitlines()]
    assert all(path.is_relative_to(tmp_path) for path in found)
    assert [path.name for path in found[2:]] == list(SAMPLES)
