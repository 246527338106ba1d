"""What is asked of MLX's CUDA back end: each case in a process of its own, because MLX reads its settings once."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence

import pytest

from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.runtime.launches import SETTINGS, TF32, UNCHECKED


def asked(names: Sequence[str] = tuple(SETTINGS), **settings: str) -> str:
    mine = {*SETTINGS, UNCHECKED, TF32}
    environment = {
        name: value for name, value in os.environ.items() if name not in mine
    } | settings
    code = (
        f"import os, vlm_batch; print([os.environ.get(name) for name in {list(names)}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip()


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="on macOS there is no CUDA, and nothing is set",
)
def test_importing_the_package_asks_for_single_launches() -> None:
    assert asked() == str(list(SETTINGS.values()))


@pytest.mark.skipif(
    sys.platform.startswith("linux"), reason="on Linux the settings are made"
)
def test_elsewhere_nothing_is_asked() -> None:
    assert asked() == str([None] * len(SETTINGS))


def test_what_the_user_has_asked_for_stays() -> None:
    assert asked(MLX_USE_CUDA_GRAPHS="1") == "['1', None]"
    assert asked(MLX_USE_CUDA_GRAPHS="0", MLX_MAX_OPS_PER_BUFFER="7") == "['0', '7']"


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="on macOS there is no CUDA, and nothing is set",
)
@pytest.mark.parametrize(
    ("graphs", "said", "found"), [("0", None, "0"), ("1", None, "0"), ("0", "1", "1")]
)
def test_no_number_of_shapes_is_an_error(
    graphs: str, said: str | None, found: str
) -> None:
    """MLX would raise one from a thread's 513th shape of attention on, graphs or not."""
    also = {} if said is None else {UNCHECKED: said}
    assert asked([UNCHECKED], MLX_USE_CUDA_GRAPHS=graphs, **also) == str([found])


@pytest.mark.parametrize(("said", "found"), [({}, "0"), ({TF32: "1"}, "1")])
def test_float32_is_float32_unless_asked_otherwise(
    said: dict[str, str], found: str
) -> None:
    assert asked([TF32], **said) == str([found])


@pytest.mark.parametrize(
    ("wish", "rounds", "warns"),
    [("0", True, True), ("0", False, False), ("1", True, False)],
)
def test_products_that_round_unasked_are_said(
    wish: str, rounds: bool, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX was at work before this package was imported, and reads the setting once."""
    monkeypatch.setenv(TF32, wish)
    monkeypatch.setattr("vlm_batch.loading.rounds_float32", lambda: rounds)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        VLMBatcher(default_checkpoint(), dtype="float32").close()
    assert any(TF32 in str(one.message) for one in said) is warns
