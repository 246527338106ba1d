"""What is asked of MLX's CUDA back end: each case in a process of its own, because MLX reads its settings once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vlm_batch.runtime.launches import SETTINGS

ASKED = f"import os, vlm_batch; print([os.environ.get(name) for name in {list(SETTINGS)}])"


def asked(**settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS} | settings
    done = subprocess.run(
        [sys.executable, "-c", ASKED], env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="on macOS there is no CUDA, and nothing is set")
def test_importing_the_package_asks_for_single_launches() -> None:
    assert asked() == str(list(SETTINGS.values()))


@pytest.mark.skipif(sys.platform.startswith("linux"), reason="on Linux the settings are made")
def test_elsewhere_nothing_is_asked() -> None:
    assert asked() == str([None] * len(SETTINGS))


def test_what_the_user_has_asked_for_stays() -> None:
    assert asked(MLX_USE_CUDA_GRAPHS="1") == "['1', None]"
    assert asked(MLX_USE_CUDA_GRAPHS="0", MLX_MAX_OPS_PER_BUFFER="7") == "['0', '7']"
