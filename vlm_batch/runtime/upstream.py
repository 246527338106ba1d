"""Facts of mlx-vlm's and transformers' code, from a table: nothing here reads code, which need not be there.

``python -m tests.reads_table`` makes the table of the installed versions; tests/test_reads.py holds it to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any


@cache
def code_facts() -> Mapping[str, Any]:
    """Return data/reads.json.

    Returns:
        "marks": marks of media by the module of a processor. "mlx_vlm" and "transformers": the "version" that was read, and
        what the "models" of each type or folder read of a configuration.
    """
    path = resources.files("vlm_batch") / "data" / "reads.json"
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@cache
def marks_of(module: str) -> frozenset[str]:
    """Return the marks of media in a module's code and in that of its folder's processors; some are patterns."""
    folder = module.rpartition(".")[0]
    marks = code_facts()["marks"]
    return frozenset((*marks.get(module, ()), *marks.get(folder, ())))
