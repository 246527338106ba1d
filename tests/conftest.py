"""Settings of a test run, beside those of the package (``tests/__init__.py``): no hub, and a folder of the run's own for
measurements of the device, since the user's own may say otherwise."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# workers have it from the process that started them
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["VLM_BATCH_CACHE"] = tempfile.mkdtemp(prefix="vlm-batch-tests-")
    atexit.register(shutil.rmtree, os.environ["VLM_BATCH_CACHE"], ignore_errors=True)
    compiler = shutil.which("g++") if sys.platform == "linux" else None
    if compiler is not None and "VLM_BATCH_GXX" not in os.environ:
        own = Path(__file__).parent / "compiler"  # its g++ says why
        os.environ["PATH"] = os.pathsep.join((str(own), os.environ["PATH"]))
        os.environ["VLM_BATCH_GXX"] = compiler
        os.environ["VLM_BATCH_GXX_READ"] = os.environ["VLM_BATCH_CACHE"]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Another processor's products round otherwise, and the library warns in notebooks.
os.environ.pop("OPENBLAS_CORETYPE", None)


_modules: list[object] = []  # whose tests run


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before a module's first test: what there is by now stays. Each batcher that is closed looks for garbage, and would look
    through all that was ever imported."""
    if isinstance(item, pytest.Function) and item.module not in _modules:
        _modules[:] = [item.module]
        gc.collect()
        gc.freeze()


class Swallowed(logging.Handler):
    """What the engine says of steps that failed and are computed again: answers are right, and nobody gets the error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


swallowed = Swallowed()
logging.getLogger("vlm_batch.engine.work").addHandler(swallowed)


@pytest.fixture(autouse=True)
def no_step_fails_unasked(request: pytest.FixtureRequest) -> Iterator[None]:
    """A step that fails is a defect, unless the test makes it fail and says so: ``@pytest.mark.fails_steps``."""
    swallowed.said.clear()
    yield
    if swallowed.said and request.node.get_closest_marker("fails_steps") is None:
        pytest.fail("; ".join(swallowed.said), pytrace=False)


#: A model whose features become float16: what differs in a float32's last bit is half a thousandth apart afterwards.
ROUNDS_FEATURES = "qwen3_5_hadamard"


@pytest.fixture(autouse=True)
def towers_in_the_oracles_bits(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its oracle's tower is MLX's, so its adapter's takes no exponentials from numpy, which round otherwise."""
    if ROUNDS_FEATURES in request.node.name:
        from vlm_batch.runtime import exponentials

        monkeypatch.setattr(exponentials, "is_numpys", lambda: False)
