"""Exponentials by numpy are MLX's to rounding, row by row the same bits, and an adapter's prompts' and towers' alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_vlm.models.gemma4.language import geglu

from tests.harness import Ask, check, inputs_of, run
from tests.zoo import family
from vlm_batch.adapters import by_numpy
from vlm_batch.adapters.hooks import running
from vlm_batch.caches import Placement
from vlm_batch.engine.logprobs import Logprobs
from vlm_batch.engine.logprobs import largest as largest_ids
from vlm_batch.models import adapter_for
from vlm_batch.proofs.device import device_facts
from vlm_batch.records import Call
from vlm_batch.runtime import blas, exponentials

pytestmark = pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu, reason="a CPU's way"
)

#: float32's and the half types' distance from MLX's, relative to 1 + what is right.
CLOSE = {mx.float32: 2e-6, mx.float16: 4e-3, mx.bfloat16: 3e-2}
#: Functions that files of mlx-vlm call, as they call them.
FUNCTIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "exp": lambda x: mx.exp(x),
    "sin": lambda x: mx.sin(x),
    "cos": lambda x: mx.cos(x),
    "tanh": lambda x: mx.tanh(x),
    "erf": lambda x: mx.erf(x),
    "sigmoid": lambda x: mx.sigmoid(x),
    "softmax": lambda x: mx.softmax(x, axis=-1),
    "softmax, precise": lambda x: mx.softmax(x, -1, precise=True),
    "softmax, another axis": lambda x: mx.softmax(x, axis=0),
    "logsumexp": lambda x: mx.logsumexp(x, axis=-1),
    "logsumexp, keepdims": lambda x: mx.logsumexp(x, axis=-1, keepdims=True),
    "nn.silu": lambda x: nn.silu(x),
    "nn.gelu": lambda x: nn.gelu(x),
    "nn.gelu_approx": lambda x: nn.gelu_approx(x),
    "nn.gelu_fast_approx": lambda x: nn.gelu_fast_approx(x),
    "nn.SiLU": lambda x: nn.SiLU()(x),
    "nn.Sigmoid": lambda x: nn.Sigmoid()(x),
    "nn.GELU": lambda x: nn.GELU()(x),
    "nn.GELU, tanh": lambda x: nn.GELU(approx="tanh")(x),
    "nn.GELU, fast": lambda x: nn.GELU(approx="fast")(x),
}
#: Another axis stays MLX's.
STAY = {"softmax, another axis"}


@pytest.fixture(autouse=True)
def numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the trial finds here, numpy is the faster one."""
    monkeypatch.setattr(exponentials, "_is_faster", lambda: True)
    by_numpy.hook_exponentials(nn.Module(), ())
    mx.random.seed(0)


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the arrays that numpy is given."""
    found: list[int] = []
    before = exponentials.evaluated

    def counted(*arrays: mx.array) -> bool:
        found.append(len(arrays))
        return before(*arrays)

    monkeypatch.setattr(exponentials, "evaluated", counted)
    return found


def numbers(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def largest(found: mx.array, right: mx.array) -> float:
    assert (found.shape, found.dtype) == (right.shape, right.dtype)
    one, other = numbers(found), numbers(right)
    return float(np.max(np.abs(one - other) / (1 + np.abs(other))))


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_mlxs(name: str, dtype: mx.Dtype, evaluations: list[int]) -> None:
    x = (mx.random.normal((130, 257)) * 2).astype(dtype)
    before = numbers(x)
    right = FUNCTIONS[name](x)
    assert not evaluations, "outside adapters MLX computes"
    with running(Call()):
        found = FUNCTIONS[name](x)
        turned = FUNCTIONS[name](x[:, ::-1][:, ::-1])  # other strides
    assert len(evaluations) == (0 if name in STAY else 2)
    assert largest(found, right) < CLOSE[dtype]
    assert np.array_equal(numbers(found), numbers(turned))
    assert np.array_equal(numbers(x), before), "what was given stays"


@pytest.mark.parametrize(
    "name",
    ["exp", "sigmoid", "nn.silu", "nn.gelu", "nn.gelu_approx", "softmax", "logsumexp"],
)
def test_extremes_are_mlxs(name: str) -> None:
    """Infinity, -infinity, nan and large numbers give what MLX gives."""
    row = [0.0, -0.0, 1e-30, 80.0, -80.0, 200.0, -200.0, 3e4, -3e4, *[1.0] * 55]
    rows = mx.array([row, [-np.inf, *row[1:]], [np.nan, *row[1:]], [-np.inf] * 64])
    rows = mx.concatenate([rows] * 32)
    right = numbers(FUNCTIONS[name](rows))
    with running(Call()):
        found = numbers(FUNCTIONS[name](rows))
    assert np.array_equal(np.isnan(found), np.isnan(right)) or name in (
        "nn.silu",
        "nn.gelu",
        "nn.gelu_approx",
    )
    finite = np.isfinite(found) & np.isfinite(right)
    assert np.allclose(found[finite], right[finite], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [name for name in FUNCTIONS if "softmax" not in name and "logsumexp" not in name],
)
def test_infinity_gives_what_mlx_gives(name: str) -> None:
    x = mx.full((exponentials.FEWEST,), mx.inf)
    right = numbers(FUNCTIONS[name](x))
    with running(Call()):
        assert np.array_equal(numbers(FUNCTIONS[name](x)), right, equal_nan=True)


@pytest.mark.parametrize(
    "name",
    ["exp", "sin", "tanh", "erf", "sigmoid", "nn.silu", "nn.gelu", "nn.gelu_approx"],
)
def test_a_numbers_bits_depend_on_that_number_alone(name: str) -> None:
    """Wherever it stands: in vectors or behind the last whole one, at an edge of a block, in company or not."""
    x = mx.random.normal((exponentials.BLOCK + 77,)) * 3
    with running(Call(is_fixed=True)):  # every size is numpy's
        whole = numbers(FUNCTIONS[name](x))
        for start in (0, 1, 3, 8, 17, exponentials.BLOCK - 5):
            for size in (1, 2, 7, 15, 31, 33, 70):
                part = numbers(FUNCTIONS[name](x[start : start + size]))
                assert np.array_equal(part, whole[start : start + size]), (start, size)


@pytest.mark.parametrize("columns", [1, 7, 64, 100, 1000, 5000])
@pytest.mark.parametrize("name", ["softmax", "logsumexp"])
def test_a_rows_bits_depend_on_that_row_alone(name: str, columns: int) -> None:
    x = mx.random.normal((67, columns)) * 3
    with running(Call(is_fixed=True)):
        whole = numbers(FUNCTIONS[name](x))
        for start, end in ((0, 1), (66, 67), (3, 8), (50, 67)):
            assert np.array_equal(
                numbers(FUNCTIONS[name](x[start:end])), whole[start:end]
            )


@pytest.mark.parametrize("name", ["nn.gelu", "softmax", "logsumexp"])
def test_bits_do_not_depend_on_threads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = mx.random.normal((300, 3000)) * 3
    q, k, v = (mx.random.normal((1, 4, 900, 16)) for _ in range(3))
    found = {}
    for threads in (1, 3):
        monkeypatch.setattr(blas, "threads", lambda threads=threads: threads)
        with running(Call()):
            found[threads] = (
                numbers(FUNCTIONS[name](x)),
                numbers(mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25)),
            )
    for one, several in zip(found[1], found[3], strict=True):
        assert np.array_equal(one, several)


def test_blocks_are_shared_by_as_many_threads_as_blas_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three threads work at once, each block is worked on once, and an error reaches the caller."""
    monkeypatch.setattr(blas, "threads", lambda: 3)
    together, done = threading.Barrier(3, timeout=30), []

    def work(block: int) -> None:
        if block < 3:
            together.wait()
        done.append(block)

    exponentials.each(work, list(range(50)))
    assert sorted(done) == list(range(50))

    def fail(block: int) -> None:
        raise ValueError(block)

    with pytest.raises(ValueError, match=r"\d"):
        exponentials.each(fail, [1, 2])
    monkeypatch.setattr(blas, "threads", lambda: 1)
    here: list[int] = []
    exponentials.each(lambda block: here.append(threading.get_ident()), list(range(9)))
    assert set(here) == {threading.get_ident()}


MASKS: dict[str, Callable[[int, int], Any]] = {
    "none": lambda length, columns: None,
    "causal": lambda length, columns: "causal",
    "truths": lambda length, columns: (
        mx.random.uniform(shape=(3, 1, length, columns)) > 0.4
    ),
    "truths of all": lambda length, columns: (
        mx.random.uniform(shape=(length, columns)) > 0.4
    ),
    "of keys": lambda length, columns: (
        mx.random.uniform(shape=(3, 1, 1, columns)) > 0.4
    ),
    "added": lambda length, columns: mx.random.normal((3, 8, length, columns)),
}


@pytest.mark.parametrize("scores", [2**19, 2**11], ids=["whole", "in parts"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("length", "columns"), [(64, 64), (33, 150)])
def test_attention_is_mlxs(
    kind: str,
    length: int,
    columns: int,
    scores: int,
    monkeypatch: pytest.MonkeyPatch,
    evaluations: list[int],
) -> None:
    monkeypatch.setattr(by_numpy, "BLOCK_SCORES", scores)
    monkeypatch.setattr(by_numpy, "FEWEST_QUERIES", 5)
    queries = mx.random.normal((3, length, 8, 16)).swapaxes(1, 2)  # as layers give it
    keys = mx.random.normal((3, 2, columns, 16))
    values = mx.random.normal((3, 2, columns, 24))
    mask = MASKS[kind](length, columns)

    def attend(rows: slice = slice(None), dtype: mx.Dtype = mx.float32) -> mx.array:
        own = mask[rows] if isinstance(mask, mx.array) and mask.ndim == 4 else mask
        own = (
            own.astype(dtype)
            if isinstance(own, mx.array) and own.dtype != mx.bool_
            else own
        )
        parts = [part[rows].astype(dtype) for part in (queries, keys, values)]
        return mx.fast.scaled_dot_product_attention(*parts, scale=0.25, mask=own)

    right, half = attend(), attend(dtype=mx.bfloat16)
    assert not evaluations
    with running(Call()):
        found, of_half = attend(), attend(dtype=mx.bfloat16)
        alone = attend(slice(1, 2))
    assert evaluations
    assert largest(found, right) < 2e-6
    assert largest(of_half, half) < 3e-2
    assert np.array_equal(numbers(alone)[0], numbers(found)[1])


def test_sinks_and_steps_stay_mlxs(evaluations: list[int]) -> None:
    queries, keys = mx.random.normal((1, 4, 64, 16)), mx.random.normal((1, 4, 64, 16))
    with running(Call()):
        mx.fast.scaled_dot_product_attention(
            queries, keys, keys, scale=0.25, sinks=mx.zeros(4)
        )
    with running(Call(positions=mx.zeros(4, mx.int32))):
        mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.25)
        nn.silu(mx.softmax(queries, axis=-1))
    assert not evaluations


def test_few_numbers_stay_mlxs_unless_shapes_are_fixed(evaluations: list[int]) -> None:
    few = mx.random.normal((8, 16))
    with running(Call()):
        mx.exp(few)
    assert not evaluations
    with running(Call(is_fixed=True)):
        mx.exp(few)
    assert evaluations == [1]


def test_functions_are_traced_as_mlxs() -> None:
    x = mx.random.normal((64, 128))
    compiled = mx.compile(
        lambda x: (
            mx.softmax(mx.exp(x), axis=-1) + mx.logsumexp(x, axis=-1, keepdims=True)
        )
    )
    right = compiled(x)
    with running(Call()):
        found = mx.compile(
            lambda x: (
                mx.softmax(mx.exp(x), axis=-1) + mx.logsumexp(x, axis=-1, keepdims=True)
            )
        )(x)
    assert np.array_equal(numbers(found), numbers(right))


def test_compiled_functions_of_files_run_uncompiled(evaluations: list[int]) -> None:
    gate, x = mx.random.normal((64, 128)), mx.random.normal((64, 128))
    space = {
        "geglu": geglu.__wrapped__ if hasattr(geglu, "__wrapped__") else geglu,
        "ACTIVATIONS": {"gelu": mx.tanh},
    }
    by_numpy._rebind(space)
    right = space["geglu"](gate, x)
    assert not evaluations
    with running(Call()):
        assert largest(space["geglu"](gate, x), right) < 2e-6
    assert evaluations


def test_scores_are_never_held_at_once() -> None:
    heads, length = 4, 2048
    queries, keys, values = (mx.random.normal((1, heads, length, 16)) for _ in range(3))
    mx.eval(queries, keys, values)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with running(Call()):
        mx.eval(mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25))
    assert mx.get_peak_memory() - before < heads * length * length * 4 / 4


def test_a_mended_mlx_wins(
    monkeypatch: pytest.MonkeyPatch, evaluations: list[int]
) -> None:
    """The trial compares: twice numpy's time is no reason, twenty times is, and what every operation takes does not count."""
    monkeypatch.undo()
    trial = exponentials._is_faster.__wrapped__
    times: Iterator[float]
    for launched, theirs, is_numpys in (
        (0, 2e-5, False),
        (1e-3, 1.02e-3, False),
        (1e-3, 1.2e-3, True),
    ):
        times = iter((launched, theirs, 1e-5))
        monkeypatch.setattr(
            exponentials, "_best_time", lambda call, times=times: next(times)
        )
        assert trial() is is_numpys
    monkeypatch.setattr(exponentials, "_is_faster", lambda: False)
    with running(Call()):
        assert not by_numpy.takes(mx.zeros((64, 128)))
    assert "exponentials" not in device_facts()


def test_records_say_what_computes_exponentials() -> None:
    assert device_facts()["exponentials"] == f"numpy {np.__version__}"


def test_threads_share_nothing() -> None:
    x = mx.random.normal((64, 4096))
    mx.eval(x)
    own = np.array(x)
    found: list[np.ndarray] = []

    def compute() -> None:
        with running(Call()):
            for _ in range(10):
                found.append(numbers(nn.gelu(mx.array(own))))

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 30
    assert all(np.array_equal(one, found[0]) for one in found)


def test_log_probabilities_and_noise_are_mlxs() -> None:
    logits = mx.random.normal((3, 9000)) * 5
    right = mx.logsumexp(logits, axis=-1, keepdims=True)
    assert largest(exponentials.log_of_sum(logits), right) < 1e-6
    chosen = Logprobs.of(logits, mx.array([1, 2, 3]), [0, 0, 0]).chosen
    assert largest(chosen, mx.diagonal((logits - right)[:, 1:4])) < 2e-6
    key = mx.random.key(3)
    noise = exponentials.gumbel(mx.random.uniform(shape=(9000,), key=key))
    assert largest(noise, mx.random.gumbel((9000,), key=key)) < 2e-6


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "internvl",
        "llava",
        "mllama",
        "phi3_v",
        "qwen2_5_vl",
        "qwen3_5",
        "smolvlm",
    ],
)
def test_families_answer_by_numpy_as_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, evaluations: list[int]
) -> None:
    """Prompts and towers of tiny models are too small for numpy: here every array is."""
    monkeypatch.setattr(by_numpy, "FEWEST", 1)
    adapter = adapter_for(family(name).registered)(family(name).build())
    asks = [Ask("image:4:1"), Ask("text:3:9"), Ask("text:5:14", at=2)]
    check(
        name,
        run(adapter, lambda key: inputs_of(name, key), asks, placement=Placement.SLAB),
    )
    assert len(evaluations) > 8


@pytest.mark.parametrize("size", [100, 8192, 151_936])
@pytest.mark.parametrize("count", [1, 5, 20, 64, 65, 1000])
def test_the_largest_values_are_found_by_parts(count: int, size: int) -> None:
    """Ties, -infinity and the columns behind the last whole part included."""
    count = min(count, size)
    random = np.random.RandomState(count)
    rows = random.standard_normal((3, size)).astype(np.float32)
    rows[0, -3:] = 10 + np.arange(3)
    rows[1] = np.round(rows[1] * 4)
    rows[2, random.permutation(size)[: size - count]] = -np.inf
    ids = np.array(largest_ids(mx.array(rows), count))
    assert all(len(set(one)) == count for one in ids.tolist())
    found = np.sort(np.take_along_axis(rows, ids, axis=1), axis=1)
    assert np.array_equal(found, np.sort(rows, axis=1)[:, size - count :])
