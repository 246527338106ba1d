"""Kernels of products in few bits are compiled before the first prompt, on CUDA."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from vlm_batch.adapters.cuda import compiling
from vlm_batch.runtime.device import Device


class Own(nn.QuantizedLinear):
    """A class of a model's own, whose products are MLX's."""


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(64, 64)
        self.four = Own(64, 256, group_size=64, bits=4)
        self.ours = nn.QuantizedLinear(128, 256, group_size=128, bits=8)
        self.deep = [{"eight": nn.QuantizedLinear(64, 64, group_size=32, bits=8)}]
        self.words = nn.QuantizedEmbedding(16, 64, group_size=64, bits=4)
        self.floats = nn.QuantizedLinear(64, 64, bias=False, mode="mxfp4")


def four_bits() -> nn.Module:
    return nn.Sequential(nn.QuantizedLinear(64, 64, group_size=64, bits=4))


@pytest.fixture
def model() -> Mixed:
    made = Mixed()
    made.four.set_dtype(mx.bfloat16)
    made.ours.set_dtype(mx.bfloat16)
    return made


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(compiling, "device", lambda: Device.CUDA)
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What processes would have been started for."""
    found: list[list[str]] = []
    monkeypatch.setattr(compiling, "_run", found.extend)
    return found


def test_each_way_of_packing_is_found_once(model: Mixed) -> None:
    """But for what our own kernel multiplies."""
    assert compiling.packings(model) == {
        ("bfloat16", "affine", 64, 4, 1536),
        ("float32", "affine", 32, 8, 1544),
        ("float32", "affine", 64, 4, 1544),
        ("bfloat16", "mxfp4", 32, 4, 1544),
    }


def test_what_is_missing_is_compiled(
    model: Mixed, on_cuda: Path, asked: list[list[str]]
) -> None:
    compiling.compile_products(model)
    assert len(asked) == 4 * len(compiling.ROWS)
    assert ["float32", "affine", "32", "8", "1544", "64"] in asked


def test_what_mlx_has_kept_is_not(
    model: Mixed, on_cuda: Path, asked: list[list[str]]
) -> None:
    for name in (
        "qmm_sm80_tn_bfloat16_m16_b4_g64_affine",
        "qmm_naive_tn_aligned_float32_m64_b8_g32_affine",
        "qmm_naive_tn_aligned_bfloat16_m32_b4_g64_affine",
    ):  # of other outputs
        (on_cuda / f"{name}.ptx").touch()
    compiling.compile_products(model)
    assert len(asked) == 4 * len(compiling.ROWS) - 2
    assert ["bfloat16", "affine", "64", "4", "1536", "16"] not in asked
    assert ["float32", "affine", "32", "8", "1544", "64"] not in asked


@pytest.mark.parametrize("kind", [Device.CPU, Device.METAL])
def test_other_devices_compile_nothing(
    kind: Device,
    model: Mixed,
    on_cuda: Path,
    asked: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "device", lambda: kind)
    compiling.compile_products(model)
    assert not asked


def test_a_model_in_16_bits_compiles_nothing(
    on_cuda: Path, asked: list[list[str]]
) -> None:
    compiling.compile_products(nn.Sequential(nn.Linear(64, 64)))
    assert not asked


@pytest.mark.parametrize(
    "packing",
    [
        ("float32", "affine", 64, 4),
        ("bfloat16", "affine", 64, 8),
        ("bfloat16", "mxfp4", 32, 4),
    ],
)
def test_a_process_computes_such_a_product(packing: tuple[Any, ...]) -> None:
    words = [str(word) for word in (*packing, 136, 16)]
    done = subprocess.run(
        [sys.executable, "-c", compiling.PRODUCT, *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_processes_that_fail_or_hang_are_told_and_cost_nothing(
    on_cuda: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = "import sys, time\nif sys.argv[6] == '16': raise SystemExit('no compiler')\ntime.sleep(60)"
    monkeypatch.setattr(compiling, "PRODUCT", hangs)
    monkeypatch.setattr(compiling, "MOST_SECONDS", 2.0)
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING, "vlm_batch"):
        compiling.compile_products(four_bits())
    said = [record.getMessage() for record in caplog.records]
    assert sum("no compiler" in one for one in said) == 1
    assert sum("within 2 s" in one for one in said) == 1
    assert time.monotonic() - begin < 50


def test_a_machine_without_processes_loads_all_the_same(
    on_cuda: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(on_cuda / "missing"))
    with caplog.at_level(logging.WARNING, "vlm_batch"):
        compiling.compile_products(four_bits())
    assert "could not be compiled" in caplog.records[-1].getMessage()


def test_an_interrupt_leaves_no_process(
    on_cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "PRODUCT", "import time; time.sleep(60)")
    started: list[subprocess.Popen[bytes]] = []
    plain = subprocess.Popen.communicate

    def interrupted(process: subprocess.Popen[bytes], *args: Any, **kwargs: Any) -> Any:
        if "timeout" in kwargs:
            raise KeyboardInterrupt
        started.append(process)
        return plain(process, *args, **kwargs)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiling.compile_products(four_bits())
    assert [process.returncode for process in started] == [-9] * len(compiling.ROWS)


@pytest.mark.parametrize("bits", [3, 6])
def test_other_bits_are_found_on_disk(
    bits: int, on_cuda: Path, asked: list[list[str]]
) -> None:
    for rows in compiling.ROWS:
        (
            on_cuda / f"qmm_naive_tn_aligned_bfloat16_m{rows}_b{bits}_g64_affine.ptx"
        ).touch()
    model = nn.Sequential(nn.QuantizedLinear(64, 256, group_size=64, bits=bits))
    model.set_dtype(mx.bfloat16)
    compiling.compile_products(model)
    assert not asked


def test_loading_compiles_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlm_batch import VLMBatcher, loading
    from vlm_batch.assets import default_checkpoint

    models: list[nn.Module] = []
    monkeypatch.setattr(loading, "compile_products", models.append)
    with VLMBatcher(default_checkpoint()):
        pass
    assert len(models) == 1
