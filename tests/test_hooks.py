"""What adapters put in the place of mlx-vlm's functions acts in adapters only: mlx-vlm's own models call mlx-vlm's own."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
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
from vlm_batch.adapters import kernels
from vlm_batch.adapters.attention import HOOKS
from vlm_batch.adapters.base import RUNS_MODEL, Adapter
from vlm_batch.adapters.hooks import hook, runs_model
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import Placement
from vlm_batch.models import adapter_for, families

IMAGE = "image:4:1"


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels were reached, in order: either function of them begins by asking what they are computed on."""
    seen: list[str] = []

    def spy(name: str) -> None:
        before: Callable[[mx.array], bool] = getattr(kernels, name)

        def asked(array: mx.array) -> bool:
            seen.append(name)
            return before(array)

        monkeypatch.setattr(kernels, name, asked)

    spy("takes_plans")  # attend
    spy("takes_powers")  # swiglu, and attend after it
    return seen


def logits_alone(model: Any, inputs: dict[str, Any]) -> np.ndarray:
    """Logits (1, V) after a prompt, by mlx-vlm's own calls."""
    given = dict(as_mlx(inputs))
    ids, pixels = given.pop("input_ids"), given.pop("pixel_values", None)
    given.pop("attention_mask", None)
    embedded = model.get_input_embeddings(ids, pixels, **given)
    cache = make_prompt_cache(model.language_model)
    return np.array(model.language_model(ids, inputs_embeds=embedded.inputs_embeds, cache=cache).logits[:, -1])


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "qwen3_5_moe"])
def test_kernels_are_an_adapters_alone(name: str, reached: list[str]) -> None:
    """The same process, the same files: an adapter's rows take our kernels, and mlx-vlm's own model never does."""
    own = family(name).build()
    before = logits_alone(own, inputs_of(name, IMAGE))
    adapter = adapter_for(family(name).registered)(own)
    for placement in Placement:
        run(adapter, lambda key: inputs_of(name, key), [Ask(IMAGE), Ask("text:3:9")], placement=placement)
    assert {"takes_plans", "takes_powers"} == set(reached)
    reached.clear()
    after = logits_alone(own, inputs_of(name, IMAGE))
    assert reached == []
    assert np.array_equal(before, after)  # to the last bit


def test_a_hook_asks_its_own_thread() -> None:
    either = hook(lambda: "theirs", lambda: "ours").either
    answers: list[str] = []

    @runs_model
    def within() -> str:
        other = threading.Thread(target=lambda: answers.append(either()))
        other.start()
        other.join()
        return str(either())

    assert (either(), within(), either(), answers) == ("theirs", "ours", "theirs", ["theirs"])


def test_a_call_within_a_call_leaves_the_mark_and_an_error_takes_it_away() -> None:
    either = hook(lambda: "theirs", lambda: "ours").either

    @runs_model
    def outer(fails: bool) -> str:
        assert runs_model(either)() == "ours"
        if fails:
            raise ValueError("no")
        return str(either())

    assert outer(False) == "ours"
    with pytest.raises(ValueError, match="no"):
        outer(True)
    assert either() == "theirs"


def test_hooks_hold_mlx_vlms_functions() -> None:
    assert HOOKS["scaled_dot_product_attention"].theirs is upstream.scaled_dot_product_attention
    assert HOOKS["swiglu"].theirs is swiglu


@pytest.mark.skipif(mx.metal.is_available(), reason="with Metal, mlx-vlm's kernels are used")
def test_metal_functions_are_replaced_in_adapters_only() -> None:
    adapter_for("muse_spark")(family("muse_spark").build())
    for name in ("qk_norm", "expert_routing"):
        bound, own = vars(muse_spark)[name], getattr(metal, name)
        assert bound is not own
        assert inspect.unwrap(bound) is own


def test_every_familys_own_calls_are_marked() -> None:
    """What a family overrides of the calls that run the model is wrapped as the defaults are."""
    for spec in families():
        assert spec.adapter is not None
        for base in spec.adapter.__mro__:
            if issubclass(base, Adapter):
                for name in RUNS_MODEL & vars(base).keys():
                    assert inspect.unwrap(vars(base)[name]) is not vars(base)[name], f"{base.__name__}.{name}"
