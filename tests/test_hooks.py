"""What adapters put in the place of mlx-vlm's functions acts in adapters only: mlx-vlm's own models call mlx-vlm's own."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm import kernels as metal
from mlx_vlm.models import base as upstream
from mlx_vlm.models.activations import swiglu
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.models.muse_spark import language as muse_spark

from tests.harness import Ask, inputs_of, run
from tests.zoo import family
from vlm_batch.adapters import operations, rotary
from vlm_batch.adapters.attention import HOOKS
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.hooks import (
    check_attention,
    current,
    hook,
    install_hooks,
    running,
)
from vlm_batch.adapters.rotary import APPLY, shared, turn_step
from vlm_batch.arrays import arrays_of, as_mlx
from vlm_batch.caches import Placement
from vlm_batch.errors import UnsupportedModel
from vlm_batch.models import adapter_for, families
from vlm_batch.records import Call

IMAGE = "image:4:1"


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels were reached, in order: either function of them begins by asking what they are computed on."""
    seen: list[str] = []

    def spy(name: str) -> None:
        before: Callable[..., bool] = getattr(operations, name)

        def asked(*arrays: mx.array) -> bool:
            seen.append(name)
            return before(*arrays)

        monkeypatch.setattr(operations, name, asked)

    spy("counts_launches")  # attend
    spy("takes_powers")  # swiglu, and attend after it
    return seen


def logits_alone(model: Any, inputs: dict[str, Any]) -> np.ndarray:
    """Logits (1, V) after a prompt, by mlx-vlm's own calls."""
    given = dict(as_mlx(inputs))
    ids, pixels = given.pop("input_ids"), given.pop("pixel_values", None)
    given.pop("attention_mask", None)
    embedded = model.get_input_embeddings(ids, pixels, **given)
    cache = make_prompt_cache(model.language_model)
    return np.array(
        model.language_model(
            ids, inputs_embeds=embedded.inputs_embeds, cache=cache
        ).logits[:, -1]
    )


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "qwen3_5_moe"])
def test_kernels_are_an_adapters_alone(name: str, reached: list[str]) -> None:
    """The same process, the same files: an adapter's rows take our kernels, and mlx-vlm's own model never does."""
    own = family(name).build()
    before = logits_alone(own, inputs_of(name, IMAGE))
    adapter = adapter_for(family(name).registered)(own)
    for placement in Placement:
        run(
            adapter,
            lambda key: inputs_of(name, key),
            [Ask(IMAGE), Ask("text:3:9")],
            placement=placement,
        )
    assert {"counts_launches", "takes_powers"} == set(reached)
    reached.clear()
    after = logits_alone(own, inputs_of(name, IMAGE))
    assert reached == []
    assert np.array_equal(before, after)  # to the last bit


def test_a_hook_asks_its_own_thread() -> None:
    either = hook(lambda: "theirs", lambda: "ours").either
    answers: list[str] = []

    def within() -> str:
        other = threading.Thread(target=lambda: answers.append(either()))
        with running(Call()):
            other.start()
            other.join()
            return str(either())

    assert (either(), within(), either(), answers) == (
        "theirs",
        "ours",
        "theirs",
        ["theirs"],
    )


def test_a_call_within_a_call_leaves_the_mark_and_an_error_takes_it_away() -> None:
    either = hook(lambda: "theirs", lambda: "ours").either

    def outer() -> None:
        with running(Call(is_fixed=True)):
            with running(Call()):
                assert (either(), current().is_fixed) == ("ours", False)
            assert (either(), current().is_fixed) == ("ours", True)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        outer()
    assert (either(), current().is_fixed) == ("theirs", False)


def test_hooks_hold_mlx_vlms_functions() -> None:
    assert (
        HOOKS["scaled_dot_product_attention"].theirs
        is upstream.scaled_dot_product_attention
    )
    assert HOOKS["swiglu"].theirs is swiglu


@pytest.mark.skipif(
    mx.metal.is_available(), reason="with Metal, mlx-vlm's kernels are used"
)
def test_metal_functions_are_replaced_in_adapters_only() -> None:
    adapter_for("muse_spark")(family("muse_spark").build())
    for name in ("qk_norm", "expert_routing"):
        bound, own = vars(muse_spark)[name], getattr(metal, name)
        assert bound is not own
        assert inspect.unwrap(bound) is own


def test_no_family_has_its_own_of_the_calls_that_mark_the_thread() -> None:
    for spec in families():
        assert spec.adapter is not None
        for name in ("prefill", "decode"):
            assert getattr(spec.adapter, name) is getattr(Adapter, name), (
                f"{spec.family}.{name}"
            )


# The next mlx-vlm
# ----------------------------------------------------------------------------------------------------------------------


def theirs(x: int) -> str:
    return f"theirs {x}"


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of a model's, imported."""
    made = ModuleType("fake_vlm.language")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_a_name_that_is_gone_refuses_the_family(file: ModuleType) -> None:
    vars(file)["attend"] = theirs
    both = {"attend": hook(theirs, theirs), "swiglu": hook(theirs, theirs)}
    with pytest.raises(
        UnsupportedModel,
        match=r"fake: .* fake_vlm.language has no swiglu to be replaced",
    ):
        install_hooks(
            [file.__name__], both, family="fake", required=["attend", "swiglu"]
        )


def test_a_name_that_is_another_function_refuses_the_family(file: ModuleType) -> None:
    vars(file)["attend"] = lambda x: "new"
    hooks = {"attend": hook(theirs, theirs)}
    with pytest.raises(
        UnsupportedModel, match=r"fake: .* fake_vlm.language.attend is not the function"
    ):
        install_hooks([file.__name__], hooks, family="fake")
    before = vars(file)["attend"]
    install_hooks([file.__name__], hooks, family="fake", is_strict=False)
    assert vars(file)["attend"] is before


def test_hooks_of_an_earlier_adapter_count(file: ModuleType) -> None:
    vars(file)["attend"] = theirs
    first, second = ({"attend": hook(theirs, lambda x: f"ours {x}")} for _ in range(2))
    for hooks in (first, second, first):
        install_hooks([file.__name__], hooks, family="fake", required=["attend"])
    assert vars(file)["attend"] is first["attend"].either
    vars(file)["attend"] = wraps(theirs)(lambda x: "somebody else's around it")
    with pytest.raises(UnsupportedModel, match="is not the function"):
        install_hooks([file.__name__], first, family="fake")


LAYER = """
import mlx.nn as nn
import mlx_vlm.models.base as base
from mlx_vlm.models.base import scaled_dot_product_attention{other_name}

def helper(q, k, v, cache):
    return scaled_dot_product_attention(q, k, v, cache, scale=1.0, mask=None)

class Attention(nn.Module):
    def __call__(self, x, cache):
        k, v = cache.update_and_fetch(x, x)
        return {call}(x, k, v, cache)
"""
REFUSED_LAYER = r"fake: .* fake_vlm.language.Attention.__call__ writes to a cache and does not call scaled_dot_product_att"


@pytest.mark.parametrize(
    ("call", "other_name", "passes"),
    [
        ("scaled_dot_product_attention", "", True),
        ("helper", "", True),  # through another function of the file
        ("base.scaled_dot_product_attention", "", False),  # imported otherwise
        ("attend", " as attend", False),
        # attends by itself
        ("mx.fast.scaled_dot_product_attention", " as attend", False),
        ("self.fused", "", False),  # has moved
    ],
)
def test_attention_past_the_hook_refuses_the_family(
    file: ModuleType, call: str, other_name: str, passes: bool
) -> None:
    exec(LAYER.format(call=call, other_name=other_name), vars(file))
    layer = vars(file)["Attention"]()
    install_hooks([file.__name__], HOOKS, family="fake")
    hooked = HOOKS["scaled_dot_product_attention"]
    if passes:
        check_attention(layer, hooked, family="fake")
    else:
        with pytest.raises(UnsupportedModel, match=REFUSED_LAYER):
            check_attention(layer, hooked, family="fake")
        check_attention(layer, hooked, family="fake", exempt=frozenset({"Attention"}))


def test_what_an_adapter_replaces_whole_is_not_looked_at(file: ModuleType) -> None:
    exec(LAYER.format(call="self.fused", other_name=""), vars(file))
    upstream: Any = vars(file)["Attention"]

    class Whole(upstream):  # type: ignore[misc]
        def __call__(self, x: mx.array, cache: Any) -> mx.array:
            return x

    class Around(upstream):  # type: ignore[misc]
        def __call__(self, x: mx.array, cache: Any) -> mx.array:
            return super().__call__(x, cache)

    hooked = HOOKS["scaled_dot_product_attention"]
    check_attention(Whole(), hooked, family="fake")
    with pytest.raises(UnsupportedModel, match=REFUSED_LAYER):
        check_attention(Around(), hooked, family="fake")


def test_a_familys_refusal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A next mlx-vlm's LLaVA, whose attention lies behind another name of its file."""
    language = sys.modules["mlx_vlm.models.llava.language"]
    model = family("llava").build()
    moved = vars(language)["scaled_dot_product_attention"]
    monkeypatch.delitem(vars(language), "scaled_dot_product_attention")
    monkeypatch.setitem(vars(language), "attend", moved)
    with pytest.raises(
        UnsupportedModel,
        match=r"llava: .* mlx_vlm.models.llava.language.Attention.__call__",
    ):
        adapter_for("llava")(model)


def test_m_rope_that_is_applied_elsewhere_refuses_the_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    language = sys.modules["mlx_vlm.models.qwen2_vl.language"]
    model = family("qwen2_vl").build()
    monkeypatch.delitem(vars(language), APPLY)
    with pytest.raises(
        UnsupportedModel,
        match=r"qwen2_vl: the file of mlx_vlm.models.qwen2_vl.* has no apply_multimod",
    ):
        adapter_for("qwen2_vl")(model)


# axes in sections, and in turns over a part of the head
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5"])
def test_a_prompts_rotation_is_two_kernels_where_launches_count(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = as_mlx(inputs_of(name, IMAGE))

    def keys() -> list[np.ndarray]:
        adapter = adapter_for(name)(family(name).build())
        cache = adapter.make_cache()
        adapter.prefill(
            [adapter.encode(inputs)], cache, 0, inputs["input_ids"].shape[1]
        )
        return [
            np.array(array) for array in arrays_of([layer.state for layer in cache])
        ]

    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    with monkeypatch.context() as patched:
        patched.setattr(rotary, "PLAIN_STYLES", ())  # mlx-vlm's own operations
        right, turned = keys(), 0
    turn = operations.turn_pairs

    def counted(*pairs: mx.array) -> mx.array:
        nonlocal turned
        turned += len(pairs[0]) == 1  # a prompt's; a tower's queries and keys are two
        return turn(*pairs)

    monkeypatch.setattr(operations, "turn_pairs", counted)
    found = keys()
    assert turned >= 2 and len(found) == len(right)
    assert all(
        np.abs(one - other).max() < 1e-5
        for one, other in zip(found, right, strict=True)
    )


def test_a_decode_steps_rotation_is_an_adapters_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where launches count, and only while an adapter runs its model."""
    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    adapter_for("qwen2_vl")(family("qwen2_vl").build())
    apply = vars(sys.modules["mlx_vlm.models.qwen2_vl.language"])[APPLY]
    states = mx.ones((2, 1, 1, 4))
    turn = partial(
        turn_step,
        positions=mx.array([3, 5]),
        periods=mx.array([1.0, 2.0]),
        frequencies=shared(mx.array([1.0, 0.5])),
        is_traditional=False,
    )
    with running(Call()):
        queries, keys = apply(states, states, turn, None)
    assert mx.array_equal(queries, turn(states)) and mx.array_equal(keys, turn(states))
    # mlx-vlm's own function, which takes cosines alone
    with pytest.raises((TypeError, AttributeError)):
        apply(states, states, turn, None)
