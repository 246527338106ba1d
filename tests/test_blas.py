"""The preloaded BLAS: each case in a process of its own, because a library is bound once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="Accelerate is fast, and nothing is preloaded",
)

PRODUCT = """
import time, mlx.core as mx
mx.set_default_device(mx.cpu)
a = mx.random.normal((384, 384))
mx.eval(a @ a)
began = time.perf_counter()
mx.eval(a @ a)
print(time.perf_counter() - began)
"""


def run(code: str, **settings: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name != "VLM_BATCH_NO_BLAS"
    } | settings
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_importing_the_package_makes_products_fast() -> None:
    fast = float(run("import vlm_batch" + PRODUCT))
    slow = float(run("import vlm_batch" + PRODUCT, VLM_BATCH_NO_BLAS="1"))
    assert slow > 3 * fast  # 20 and more, measured


def test_it_says_which_library_serves() -> None:
    code = "from vlm_batch.runtime.blas import preload_openblas as load; a = load(); b = load(); print(a if a == b else '')"
    assert Path(run(code)).is_file()


@pytest.mark.parametrize("case", ["after mlx", "opted out"])
def test_it_does_nothing_where_it_is_no_use(case: str) -> None:
    code = (
        "from vlm_batch.runtime.blas import preload_openblas; print(preload_openblas())"
    )
    if case == "opted out":
        assert run(code, VLM_BATCH_NO_BLAS="1") == "None"
    else:
        assert run("import mlx.core\n" + code) == "None"


def test_the_users_number_of_threads_stands() -> None:
    code = """
from vlm_batch.runtime import blas
blas.preload_openblas()
blas.limit_threads(1)
print(blas._loaded.openblas_get_num_threads())
"""
    plain = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": ""}
    assert run(code, **plain) == run("import os; print(min(2, os.cpu_count()))")


SLOWED = """
import sys, warnings
from vlm_batch.runtime import blas
blas.has_wide_vectors = lambda: True
from vlm_batch import assets
from vlm_batch.loading import load_model
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for dtype in sys.argv[1:]:
        load_model(assets.default_checkpoint(), dtype=dtype)
print([str(line.message) for line in said])
"""


@pytest.mark.parametrize(
    ("core", "dtype", "lines"),
    [("Haswell", "float32", 1), ("Haswell", "bfloat16", 0), ("SKYLAKEX", "float32", 0)],
)
def test_an_environment_that_halves_the_speed_is_named(
    core: str, dtype: str, lines: int
) -> None:
    said = run(SLOWED.replace("sys.argv[1:]", f"[{dtype!r}]"), OPENBLAS_CORETYPE=core)
    assert (
        said.count(
            f"OPENBLAS_CORETYPE={core} keeps float32 products from this processor's AVX-512"
        )
        == lines
    ), said


SAID = "put 'import vlm_batch' above the first import of mlx"


@pytest.mark.parametrize(
    ("code", "times"),
    [
        ("import mlx.core, vlm_batch", 1),
        ("import vlm_batch, mlx.core", 0),
    ],
)
def test_the_wrong_order_of_imports_is_named_once(code: str, times: int) -> None:
    said = run(NOTED.format(code=code))
    assert said.count(SAID) == times
    assert SAID not in run(NOTED.format(code=code), VLM_BATCH_NO_BLAS="1")


NOTED = """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    {code}
    import vlm_batch.batcher
print([str(line.message) for line in said])
"""
