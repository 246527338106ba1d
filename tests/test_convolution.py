"""Short convolutions as on CUDA: MLX's own, whatever the length."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.harness import Ask, check, run_family
from vlm_batch.adapters import operations
from vlm_batch.adapters.cuda.convolution import ShortConvolution
from vlm_batch.adapters.modules import clone_modules
from vlm_batch.runtime.device import Device


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Layers as on CUDA; the shapes that MLX convolves."""
    shapes: list[tuple[int, ...]] = []
    theirs = mx.conv1d

    def convolve(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        shapes.append(x.shape)
        return theirs(x, *args, **kwargs)

    monkeypatch.setattr(operations, "device", lambda: Device.CUDA)
    monkeypatch.setattr(mx, "conv1d", convolve)
    return shapes


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    ("taps", "dilation", "bias"),
    [(4, 1, True), (3, 1, False), (3, 3, False), (1, 1, True)],
)
def test_any_length_is_mlxs_convolution(
    taps: int,
    dilation: int,
    bias: bool,
    dtype: mx.Dtype,
    on_cuda: list[tuple[int, ...]],
) -> None:
    plain = nn.Conv1d(16, 16, taps, dilation=dilation, groups=16, bias=bias)
    plain.set_dtype(dtype)
    ours = clone_modules(plain, operations.layers())
    assert type(ours) is ShortConvolution
    for rows, length in ((1, 12), (3, 9), (2, 40)):
        x = mx.random.normal((rows, length, 16)).astype(dtype)
        found = ours(x)
        assert not on_cuda
        right = plain(x)
        on_cuda.clear()
        assert found.shape == right.shape and found.dtype == right.dtype
        far = np.abs(np.array((found - right).astype(mx.float32))).max()
        assert far <= (1e-6 if dtype == mx.float32 else 2**-6)


def test_what_is_none_along_a_prompt_is_mlxs(on_cuda: list[tuple[int, ...]]) -> None:
    """One position, channels that mix, strides, and filled-up ends."""
    kinds: list[dict[str, Any]] = [
        {"groups": 8},
        {"groups": 4},
        {"groups": 8, "stride": 2},
        {"groups": 8, "padding": 2},
    ]
    for how, length in zip(kinds, (3, 9, 9, 9), strict=True):
        plain, x = nn.Conv1d(8, 8, 3, **how), mx.random.normal((2, length, 8))
        assert mx.array_equal(clone_modules(plain, operations.layers())(x), plain(x))
    assert len(on_cuda) == 2 * len(kinds)


@pytest.mark.parametrize("name", ["lfm2_vl", "falcon_h1", "qwen3_5"])
def test_rows_are_the_rows_alone(name: str, on_cuda: list[tuple[int, ...]]) -> None:
    check(
        name,
        run_family(
            name,
            [Ask("image:1:0"), Ask("text:2:9", at=2, tokens=4), Ask("text:3:30", at=3)],
        ),
    )
