"""Settings of a test run, beside those of the package (``tests/__init__.py``): no hub, and a folder of the run's own for
measurements of the device, since the user's own may say otherwise."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have it from the process that started them
    os.environ["VLM_BATCH_CACHE"] = tempfile.mkdtemp(prefix="vlm-batch-tests-")
    atexit.register(shutil.rmtree, os.environ["VLM_BATCH_CACHE"], ignore_errors=True)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
