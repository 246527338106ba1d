"""What an adapter replaces of mlx-vlm was read before it was replaced: a change there has to be read, too."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest

from tests import upstream_sources
from tests.upstream_sources import (
    RECORD,
    differences,
    digest,
    found,
    overridden,
    record,
)

ADVICE = """
Read what each of them does now (pip download mlx-vlm=={recorded} has it as it was), change the adapters that replace it where
they no longer say the same, run their rows of the matrix, and then: python -m tests.upstream_sources"""


@pytest.fixture(scope="module")
def sources() -> upstream_sources.Sources:
    return found()


def test_mlx_vlms_replaced_functions_are_those_that_were_read(
    sources: upstream_sources.Sources,
) -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    changed = differences(recorded, sources)
    said = (
        f"mlx-vlm {version('mlx-vlm')}, recorded with {recorded['mlx_vlm']}:\n"
        + "\n".join(changed)
    )
    assert not changed, said + ADVICE.format(recorded=recorded["mlx_vlm"])
    assert recorded["mlx_vlm"] == version("mlx-vlm"), (
        "nothing replaced has changed: python -m tests.upstream_sources"
    )


def test_what_is_found(sources: upstream_sources.Sources) -> None:
    """One of each kind: a patch, a patch by a helper, a cache, a hook, M-RoPE's, and a call made by an adapter itself."""
    who = {
        name.removeprefix("mlx_vlm.models."): families
        for name, (_, families) in sources.items()
    }
    assert "muse_spark" in who["muse_spark.language.MuseSparkTextModel.__call__"]
    assert {"kimi_vl", "youtu_vl"} & who["youtu_vl.language.MoEGate.__call__"]
    assert "every family" in who["base.scaled_dot_product_attention"]
    assert "kimi_k3" in who["kimi_k3.language._attn_res_combine"]
    assert "qwen2_vl" in who["qwen2_vl.language.apply_multimodal_rotary_pos_emb"]
    assert "qwen4_exp" in who["qwen4_exp.language.LanguageModel.__call__"]
    assert any(name.startswith("cache.") for name in who)
    assert sum(name.endswith(".__call__") for name in who) > 30


def test_a_change_is_named(sources: upstream_sources.Sources) -> None:
    recorded: dict[str, Any] = record(sources)
    assert differences(recorded, sources) == []
    changed, gone, new = sorted(sources)[:3]
    now = {name: source for name, source in sources.items() if name != gone}
    now[changed] = ("another", {"my_vl"})
    del recorded["functions"][new]
    lines = differences(recorded, now)
    assert len(lines) == 3
    assert lines[0] == f"{changed} has changed, and my_vl replaces it"
    assert lines[1].startswith(f"{gone} is no longer there")
    assert lines[2].startswith(f"{new} is replaced by ") and lines[2].endswith(
        "and not recorded"
    )


def test_overriding_is_found_along_the_bases() -> None:
    class Theirs:
        def __call__(self) -> int:
            return 1

        @property
        def size(self) -> int:
            return 2

        def other(self) -> int:
            return 3

    class Between(Theirs):
        def __call__(self) -> int:
            return 4

    class Ours(Between):
        @property
        def size(self) -> int:
            return 5

    names = {
        function.__qualname__.split(".<locals>.")[-1]
        for function in overridden(Ours, Theirs)
    }
    assert names == {"Ours.size", "Theirs.size", "Between.__call__", "Theirs.__call__"}
    assert digest(Theirs.__call__) != digest(Between.__call__)
