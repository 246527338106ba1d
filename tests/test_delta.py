"""The gated delta rule by a kernel of our own: its source, run as C++, is mlx-vlm's operations."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import mlx.core as mx
import pytest
from mlx_vlm.models import gated_delta
from mlx_vlm.models.qwen3_5 import gated_delta as of_qwen

from tests.harness import shared_adapter
from tests.kernels import emulated
from vlm_batch.adapters.cuda import delta
from vlm_batch.adapters.cuda.launches import Launch
from vlm_batch.adapters.hooks import is_hook, running
from vlm_batch.records import Call
from vlm_batch.runtime.device import Device

needs_compiler = pytest.mark.skipif(
    emulated.COMPILER is None, reason="there is no compiler for C++ here"
)
#: Rounding of an answer to its type, or of sums.
ROUNDING = {mx.float32: 1e-5, mx.bfloat16: 2**-7, mx.float16: 2**-10}


@needs_compiler
@pytest.mark.parametrize("by_number", [False, True], ids=["by head", "by number"])
@pytest.mark.parametrize("is_masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(
    ("depth", "wide", "dtype"),
    [
        (16, 8, mx.float32),
        (8, 16, mx.float16),
        (128, 32, mx.bfloat16),
        (12, 20, mx.float32),
    ],
)
def test_the_kernel_is_the_rule(
    depth: int, wide: int, dtype: mx.Dtype, by_number: bool, is_masked: bool
) -> None:
    rule = delta.example(
        depth, wide, dtype, by_number, positions=9, is_masked=is_masked
    )
    assert delta.served(rule)
    for kept in (0, 3, 9):
        assert delta.farthest(rule, emulated.run, kept) <= ROUNDING[dtype]


@needs_compiler
def test_numbers_that_are_none_are_not_right() -> None:
    """Answers, the last state or kept ones that the kernel does not write."""
    rule = delta.example(16, 8, mx.float32, False, positions=9)
    for output in range(3):
        assert math.isnan(delta.farthest(rule, emulated.leaving(output), 3))


@needs_compiler
def test_a_row_and_a_prompt_in_parts_have_the_same_bits() -> None:
    rule = delta.example(16, 16, mx.float32, False, positions=9)
    answers, last, kept = delta.run_rule(rule, 9, emulated.run)
    alone = delta.Rule._make([*(one[1:] for one in rule[:6]), None])
    first = delta.Rule._make([*(one[:, :4] for one in alone[:5]), alone.states, None])
    begun, state = delta.run_rule(first, 0, emulated.run)
    ended, end = delta.run_rule(
        delta.Rule._make([*(one[:, 4:] for one in alone[:5]), state, None]),
        0,
        emulated.run,
    )
    assert mx.array_equal(mx.concatenate([begun, ended], axis=1), answers[1:]).item()
    assert (
        mx.array_equal(state, kept[1:, 3]).item()
        and mx.array_equal(end, last[1:]).item()
    )
    assert mx.array_equal(kept[:, -1], last).item()


@pytest.mark.parametrize(
    "change",
    [
        {"states": mx.zeros((2, 4, 8, 16), mx.bfloat16)},
        {"keys": mx.zeros((2, 5, 2, 16), mx.bfloat16)},
        {"mask": mx.zeros((2, 5))},
        {"mask": mx.zeros((2, 1, 5), mx.bool_)},
    ],
)
def test_other_arrays_are_mlx_vlms(change: dict[str, mx.array]) -> None:
    assert not delta.served(delta.example(16, 8, mx.float32, False)._replace(**change))
    assert not delta.served(delta.example(256, 8, mx.float32, False))


@needs_compiler
@pytest.mark.parametrize("broken", ["", "raises", "wrong"])
def test_mlx_vlms_layers_use_it_within_adapters(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On CUDA, unless it does not build or is wrong there; mlx-vlm's own calls are left alone."""
    calls = []

    def on_device(launch: Launch, arrays: Sequence[mx.array]) -> list[mx.array]:
        calls.append(launch)
        if broken == "raises":
            raise RuntimeError("no compiler")
        return [one + (broken == "wrong") for one in emulated.run(launch, arrays)]

    monkeypatch.setattr(delta, "on_device", on_device)
    monkeypatch.setattr(delta, "device", lambda: Device.CUDA)
    delta._is_right.cache_clear()
    rule = delta.example(16, 8, mx.float32, False, positions=70)
    for file in (gated_delta.__name__, of_qwen.__name__):
        for name, hooked in delta.hooks_of(file).items():
            with_states = (
                (3,)
                if file == gated_delta.__name__
                or name == "_gated_delta_with_states_ops"
                else ()
            )
            right = hooked.theirs(*rule, *with_states)
            count = len(calls)
            with running(Call()):
                found = hooked.either(*rule, *with_states)
            assert len(calls) > count or broken
            assert len(found) == len(right)
            for one, other in zip(found, right, strict=True):
                assert mx.allclose(one, other, atol=1e-4).item(), name
            count = len(calls)
            hooked.either(*rule, *with_states)
            assert len(calls) == count, name
    delta._is_right.cache_clear()
    assert bool(
        [one for one in caplog.records if one.levelno == logging.WARNING]
    ) == bool(broken)


def test_layers_of_the_rule_are_hooked() -> None:
    """In the file that each family's layers take it from; the names are mlx-vlm's."""
    assert set(delta.hooks_of(of_qwen.__name__)) == set(delta.NAMES)
    for name, file in {
        "qwen3_5": of_qwen,
        "qwen3_next": gated_delta,
        "kimi_k3": gated_delta,
        "glm5_next": gated_delta,
    }.items():
        shared_adapter(name)
        assert all(is_hook(vars(file)[one]) for one in delta.hooks_of(file.__name__)), (
            name
        )
