"""Layers of one input as one product: found in every family, with the answers that each request gets alone."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.harness import Ask, check, every_family, inputs_of, run
from tests.zoo import family as tiny_family
from vlm_batch.adapters import shared
from vlm_batch.adapters.fingerprint import fingerprint
from vlm_batch.adapters.products import products_of
from vlm_batch.adapters.shared import JoinedPart, Wide, share_products, widened
from vlm_batch.caches import Placement
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.loading import adapt
from vlm_batch.models import adapter_for
from vlm_batch.policy import policy_of
from vlm_batch.proofs.played import Asked, played
from vlm_batch.proofs.proving import fixed_shapes
from vlm_batch.types import SamplingParams

#: Families whose layers have one projection for all, or no linear layers that share an input: nothing becomes one.
WITHOUT = frozenset(
    {
        "falcon_ocr",
        "falcon_perception",
        "glm5_next",
        "jina_vlm",
        "molmo",
        "molmo2",
        "molmo_point",
        "moondream2",
    }
)
WITHOUT |= {"moondream3", "muse_spark", "phi3_v", "phi4_siglip", "phi4mm", "plamo2vl"}
NARROW = policy_of({"wide_products": False})
ASKS = (
    Ask("image:3:2"),
    Ask("text:4:9", at=2),
    Ask("image:1:0", at=3),
    Ask("text:5:26", at=5),
)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How many products wide layers make, and how many parts are taken of them."""
    found: Counter[str] = Counter()
    split, part = mx.split, Wide.part

    def counting_part(self: Wide, at: int, rows: mx.array) -> mx.array:
        found["parts"] += 1
        return part(self, at, rows)

    def counting_split(*args: Any, **kwargs: Any) -> Any:
        made = split(*args, **kwargs)
        found["made"] += len(made)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Wide, "part", counting_part)
        patch.setattr(
            shared,
            "mx",
            type("mx", (), {**vars(mx), "split": staticmethod(counting_split)}),
        )
        yield found


@pytest.mark.parametrize("name", every_family())
def test_every_family_answers_as_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also: each part of a product that is made is taken, in prompts and in steps; none is computed twice."""
    tiny = tiny_family(name)
    model = tiny.build()
    adapter = adapter_for(tiny.registered)(model)
    assert (share_products(adapter, model) > 0) == (name not in WITHOUT)
    with counted(monkeypatch) as found:
        answers = run(
            adapter,
            lambda key: inputs_of(name, key),
            ASKS,
            placement=Placement.for_device(),
        )
    check(name, answers)
    assert found["made"] == found["parts"]
    assert all(
        vars(wide)["_rows"] is None
        for _, wide in adapter.language.named_modules()
        if isinstance(wide, Wide)
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_slabs_and_compiled_steps_answer_as_alone(compiled: bool) -> None:
    adapter = adapt(tiny_model(), policy=policy_of({"wide_products": True}))
    asks = [Ask(ask.key, at=ask.at, tokens=24 if ask.at == 0 else 8) for ask in ASKS]
    check(
        "qwen2_5_vl",
        run(
            adapter,
            lambda key: inputs_of("qwen2_5_vl", key),
            asks,
            placement=Placement.SLAB,
            compile_decode=compiled,
        ),
    )


def tiny_model(name: str = "qwen2_5_vl") -> Any:
    return tiny_family(name).build()


def test_the_caller_s_model_keeps_its_numbers_and_nothing_is_held_twice() -> None:
    model = tiny_model()
    before = dict(tree_flatten(model.parameters()))
    copies = {path: np.array(array) for path, array in before.items()}
    shapes = {path: array.shape for path, array in before.items()}
    adapter = adapt(model, policy=NARROW)
    del before
    gc.collect()
    mx.clear_cache()  # buffers that are used again may be larger than what is asked for
    held = mx.get_active_memory()
    assert share_products(adapter, model) == 5 * len(adapter.language.layers)
    gc.collect()
    assert mx.get_active_memory() - held < 20_000  # of 500,000 or so
    after = dict(tree_flatten(model.parameters()))
    assert {path: array.shape for path, array in after.items()} == shapes
    assert all(
        np.array_equal(copies[path], np.array(array)) for path, array in after.items()
    )
    assert not any(
        isinstance(child, (JoinedPart, Wide)) for _, child in model.named_modules()
    )


def test_a_policy_says_so_and_answers_stay_the_same() -> None:
    found = []
    for wide in (False, True):
        adapter = adapt(tiny_model(), policy=policy_of({"wide_products": wide}))
        assert (
            any(
                isinstance(child, Wide) for _, child in adapter.language.named_modules()
            )
            == wide
        )
        found.append(adapter)
    # what is kept of one is no beginning for the other
    assert fingerprint(found[0]) != fingerprint(found[1])
    narrow, wide_ones = (
        {str(product) for product in products_of(adapter.language)} for adapter in found
    )
    assert (
        "products of 64 by 128 in mlx.core.float32 with a bias" in wide_ones - narrow
    ), (narrow, wide_ones)


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v41", "qwen3_5"])
def test_what_the_trial_leaves_behind_can_be_used_on_another_thread(name: str) -> None:
    """The frequencies that DeepSeek V4 keeps, for one."""
    tiny = tiny_family(name)
    adapter = adapter_for(tiny.registered)(tiny.build())
    assert share_products(adapter) > 0
    asks = [Ask("text:5:26"), Ask("image:3:2")]
    with ThreadPoolExecutor(1) as other:
        answers = other.submit(
            run, adapter, lambda key: inputs_of(name, key), asks
        ).result()
    check(name, answers)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_shared_too(bits: int) -> None:
    model = tiny_model()
    nn.quantize(model.language_model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    plain, wide = (adapt(model, policy=NARROW) for _ in range(2))
    assert share_products(wide, model) > 0
    answers = [
        [
            answer.logprobs
            for answer in run(adapter, lambda key: inputs_of("qwen2_5_vl", key), ASKS)
        ]
        for adapter in (plain, wide)
    ]
    for one, other in zip(*answers, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_reproducible_answers_are_proven_with_wide_products() -> None:
    """The proof tries the wide products; a row's answer is the same bits alone and in company."""
    adapter = adapt(tiny_model(), policy=policy_of({"wide_products": True}))
    shapes = fixed_shapes(adapter, max_rows=4)
    engines = [
        BatchGenerator(adapter, policy=policy_of({"max_rows": 4}), shapes=shapes)
        for _ in ASKS
    ] + [BatchGenerator(adapter, policy=policy_of({"max_rows": 4}), shapes=shapes)]
    asked = [
        Asked(inputs_of("qwen2_5_vl", ask.key), SamplingParams(max_tokens=8), ask.at)
        for ask in ASKS
    ]
    together = played(engines[-1], asked)
    for one, engine, (_, logits) in zip(asked, engines, together, strict=False):
        ((_, alone),) = played(engine, [one])
        assert all(
            mx.array_equal(mine, theirs)
            for mine, theirs in zip(alone, logits, strict=True)
        )


def test_a_model_that_reads_more_of_its_layers_stays_as_it_is() -> None:
    model = tiny_model()
    attention = type(model.language_model.model.layers[0].self_attn)

    class Nosy(attention):  # type: ignore[misc,valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            assert self.q_proj.weight.ndim == 2
            return super().__call__(*args, **kwargs)

    adapter = adapt(model, policy=NARROW)
    for _, module in adapter.language.named_modules():
        if isinstance(module, attention):
            module.__class__ = type("Nosy", (Nosy, type(module)), {})
    before = fingerprint(adapter)
    assert share_products(adapter, model) == 0
    assert fingerprint(adapter) == before
    assert not any(
        isinstance(child, (JoinedPart, Wide))
        for _, child in adapter.language.named_modules()
    )


def test_without_memory_to_join_them_layers_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = adapt(tiny_model(), policy=NARROW)
    before, calls = fingerprint(adapter), 0

    def ends(*given: Any) -> Wide:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("[cudaMalloc] out of memory")
        return widened(*given)

    monkeypatch.setattr(shared, "widened", ends)
    assert share_products(adapter) == 0 and calls == 3
    assert fingerprint(adapter) == before
    assert not any(
        isinstance(child, (JoinedPart, Wide))
        for _, child in adapter.language.named_modules()
    )


def test_an_input_that_is_not_shared_after_all_is_right_all_the_same() -> None:
    wide = widened([nn.Linear(8, 3), nn.Linear(8, 5)])
    one, other = mx.random.normal((2, 8)), mx.random.normal((2, 8))
    first, second = (nn.Linear(8, 3), nn.Linear(8, 5))
    for at, (layer, part) in enumerate(
        ((first, wide.linear.weight[:3]), (second, wide.linear.weight[3:]))
    ):
        layer.weight, layer.bias = part, wide.linear.bias[3 * at : 3 + 5 * at]
    for at, layer, rows in (
        (0, first, one),
        (1, second, other),
        (1, second, one),
        (1, second, one),
        (0, first, one),
    ):
        np.testing.assert_allclose(wide.part(at, rows), layer(rows), atol=1e-6)
