"""TurboQuant: mlx-vlm's numbers, in rows and slabs, by every way of attention."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_vlm.models.base import scaled_dot_product_attention
from mlx_vlm.turboquant import TurboQuantKVCache

from tests.kernels import emulated
from vlm_batch.adapters import turning
from vlm_batch.adapters.attention import attention
from vlm_batch.adapters.cuda import turning as cuda
from vlm_batch.adapters.cuda.turning import TurnedBuild
from vlm_batch.caches import lookups
from vlm_batch.caches.turbo import TurboCache
from vlm_batch.runtime.device import Device

needs_compiler = pytest.mark.skipif(
    emulated.COMPILER is None, reason="there is no compiler for C++ here"
)

BITS = (2, 2.5, 3, 3.5, 4, 5, 6, 7.5, 8)


@pytest.fixture(params=["numpy", "operations"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How codes are looked up: a CPU's way, and a GPU's."""
    if request.param == "operations":
        monkeypatch.setattr(lookups, "device", lambda: Device.METAL)
        monkeypatch.setattr(turning, "BLOCK", 2**12)  # several blocks
    return str(request.param)


def filled(
    bits: float, depth: int, value_depth: int, lengths: tuple[int, ...], seed: int = 0
) -> tuple[TurboQuantKVCache, TurboCache]:
    """mlx-vlm's cache and ours, after the same chunks."""
    mx.random.seed(seed)
    theirs, ours = TurboQuantKVCache(bits), TurboCache(bits)
    for length in lengths:
        keys = mx.random.normal((1, 2, length, depth)) * 3
        values = mx.random.normal((1, 2, length, value_depth))
        theirs.update_and_fetch(keys, values)
        ours.update_and_fetch(keys, values)
    return theirs, ours


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("depth", "value_depth"), [(64, 64), (80, 80), (20, 20), (192, 128)]
)
def test_codes_norms_and_answers_are_mlx_vlms(
    bits: float, depth: int, value_depth: int, way: str
) -> None:
    """Bit for bit what is stored; attention within rounding of mlx-vlm's own for one row, of a step and of a prompt."""
    theirs, ours = filled(bits, depth, value_depth, (260, 150, 1))
    for upstream, own in zip(theirs.state, ours.state, strict=True):
        assert mx.array_equal(upstream.indices, own.codes).item()
        assert mx.array_equal(upstream.norms, own.norms[..., 0]).item()
    for length, mask in ((1, None), (7, "causal")):
        queries = mx.random.normal((1, 6, length, depth))
        right = scaled_dot_product_attention(
            queries, *theirs.state, theirs, scale=depth**-0.5, mask=mask
        )
        found = attention(queries, *ours.state, None, depth**-0.5, mask)
        assert mx.abs(found - right).max().item() < 2e-5


def kind(
    heads: int = 4,
    kv_heads: int = 2,
    depth: int = 64,
    bits: float = 4,
    *,
    values: int | None = None,
    mask: mx.Dtype | None = mx.bool_,
    is_by_row: bool = True,
) -> TurnedBuild:
    layouts = TurboCache(bits).layouts(depth, values or depth)
    return TurnedBuild(heads, kv_heads, *layouts, mask, is_by_row)


KINDS = {
    "3.5 bits, 8 heads on 1": kind(16, 2, 128, 3.5),
    "4 bits, 7 heads on 1": kind(14, 2, 64, 4, mask=mx.bfloat16),
    "2.5 bits, 9 heads on 1": kind(9, 1, 64, 2.5),
    "5 bits, 96 numbers": kind(8, 4, 96, 5, is_by_row=False),
    "6.5 bits, no mask": kind(2, 1, 64, 6.5, mask=None),
    "8 bits of 256": kind(2, 1, 256, 8, mask=mx.float16),
    "values of another depth": kind(4, 2, 64, 3, values=32),
}


@needs_compiler
@pytest.mark.parametrize("one", KINDS.values(), ids=KINDS)
def test_the_kernel_is_attention(one: TurnedBuild) -> None:
    """Over rows of one span and of several, with NaN behind each of them."""
    assert cuda.is_served(one)
    assert cuda.farthest(one, emulated.run, lengths=(300, 1, 128), columns=320) < 2e-5
