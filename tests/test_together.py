"""Pictures of several requests in one call of a family's tower are encoded as alone, and do not touch each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.harness import TOLERANCE, every_family, inputs_of, shared_adapter
from tests.zoo import family as tiny_family
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.joint import PrecomputedInputs
from vlm_batch.adapters.media import has_pictures
from vlm_batch.adapters.modules import RememberingTower
from vlm_batch.adapters.towers import remember_features, vision_towers
from vlm_batch.arrays import arrays_of, as_mlx
from vlm_batch.records import Call, Encoded
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.features import FeatureStore

#: Pictures of two sizes, twice each, and two pictures in one request.
KEYS = ("image:1:0", "image:2:1", "image:3:0", "two:4", "image:5:1")
#: Families whose tiny models are given features in the place of pictures: no tower is called.
NO_TOWER = frozenset({"fastvlm", "gemma3n", "llava_bunny"})

#: A family of each kind of tower.
SOME = ("qwen2_5_vl", "llava", "llava_next", "kimi_k25", "gemma4", "mllama", "phi4mm")


def given(name: str, keys: Sequence[str] = KEYS) -> list[dict[str, Any]]:
    has_two = tiny_family(name).two_images is not None
    return [
        as_mlx(inputs_of(name, key))
        for key in keys
        if has_two or not key.startswith("two")
    ]


@contextmanager
def counted(adapter: Adapter) -> Iterator[list[int]]:
    """A list that grows with every call of the tower itself."""
    calls: list[int] = []
    if any(
        not isinstance(owner[name], RememberingTower)
        for owner, name in vision_towers(adapter.model)
    ):
        remember_features(adapter, None)
    before = []
    for owner, name in vision_towers(adapter.model):
        tower = owner[name].tower
        kind = type(tower)

        def call(self: Any, *args: Any, kind: Any = kind, **kwargs: Any) -> Any:
            calls.append(1)
            return kind.__call__(self, *args, **kwargs)

        before.append((tower, kind))
        tower.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    try:
        yield calls
    finally:
        for tower, kind in before:
            tower.__class__ = kind


def farthest(one: Encoded, other: Encoded) -> float:
    """The largest difference of two rows' embeddings and features."""
    ours, theirs = (
        arrays_of([row.inputs_embeds, row.prefill, row.decode]) for row in (one, other)
    )
    assert [array.shape for array in ours] == [array.shape for array in theirs]
    pairs = zip(ours, theirs, strict=True)
    found = [
        float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max())
        for a, b in pairs
        if a.size
    ]
    assert np.isfinite(found).all()
    return max(found)


def with_nothing_finite(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same request with pictures of which no value is finite."""

    def spoilt(value: Any) -> Any:
        if isinstance(value, mx.array):
            return (
                mx.full(value.shape, mx.nan, value.dtype)
                if mx.issubdtype(value.dtype, mx.floating)
                else value
            )
        return (
            [spoilt(one) for one in value]
            if isinstance(value, (list, tuple))
            else value
        )

    return {
        name: spoilt(value) if name.startswith("pixel_values") else value
        for name, value in inputs.items()
    }


def towered() -> list[str]:
    """The families whose pictures go through a tower in the tests."""
    return [
        name
        for name in every_family()
        if name not in NO_TOWER and vision_towers(shared_adapter(name).model)
    ]


def joined() -> list[str]:
    """Those whose pictures share calls. A Hadamard pack's do not (``qwen3_5.PACKED``)."""
    return [
        name for name in towered() if shared_adapter(name).tower_class.why_apart is None
    ]


@pytest.mark.parametrize("name", every_family())
def test_a_family_joins_its_pictures_or_says_why_not(name: str) -> None:
    adapter = shared_adapter(name)
    has_said = adapter.tower_class.why_apart != RememberingTower.why_apart
    assert has_said or not vision_towers(adapter.model), (
        "tower_class says how, or why not"
    )


@pytest.mark.parametrize("name", every_family())
def test_pictures_together_are_those_apart(name: str) -> None:
    """Of two sizes, one and two a request, through the tower in fewer calls than there are requests."""
    adapter, requests = shared_adapter(name), given(name)
    with counted(adapter) as calls:
        apart = [adapter.encode(inputs) for inputs in requests]
        alone = len(calls)
        calls.clear()
        looked = adapter.encode_together(requests)
        together = [adapter.encode(inputs) for inputs in looked]
    assert (
        max(farthest(one, other) for one, other in zip(together, apart, strict=True))
        < TOLERANCE / 4
    )
    if name in joined():
        assert len(calls) < alone
        assert all(isinstance(inputs, PrecomputedInputs) for inputs in looked)
    else:
        assert len(calls) == alone
        assert all(
            (new is old) == has_pictures(old)
            for new, old in zip(looked, requests, strict=True)
        )


@pytest.mark.parametrize("name", joined())
def test_what_is_not_finite_stays_in_its_own_request(name: str) -> None:
    adapter = shared_adapter(name)
    right, *_ = requests = given(name, ("image:1:0", "image:3:0"))
    requests[1] = with_nothing_finite(requests[1])
    alone = adapter.encode(right)
    looked = adapter.encode_together(requests)
    assert isinstance(looked[0], PrecomputedInputs)
    assert farthest(adapter.encode(looked[0]), alone) < TOLERANCE / 4


@pytest.mark.parametrize("name", SOME)
def test_a_call_that_fails_leaves_its_requests_to_themselves(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, requests = shared_adapter(name), given(name, ("image:1:0", "image:3:0"))
    alone = [adapter.encode(inputs) for inputs in requests]

    def fail(self: Any, calls: Any) -> Any:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(adapter.tower_class, "run_joined", fail)
    looked = adapter.encode_together(requests)
    together = [adapter.encode(inputs) for inputs in looked]
    assert (
        max(farthest(one, other) for one, other in zip(together, alone, strict=True))
        < TOLERANCE / 4
    )


@pytest.mark.parametrize("name", SOME)
def test_a_picture_that_two_requests_have_is_remembered_once(name: str) -> None:
    adapter = type(shared_adapter(name))(tiny_family(name).build())
    store = FeatureStore(ByteBudget(2**28))
    remember_features(adapter, store)
    requests = given(name, ("image:1:0", "image:3:0", "image:1:0"))
    looked = adapter.encode_together(requests)
    mx.eval([adapter.encode(inputs).inputs_embeds for inputs in looked])
    assert (len(store), store.num_hits) == (2, 0)
    with counted(adapter) as calls:
        again = adapter.encode_together(requests)
        mx.eval([adapter.encode(inputs).inputs_embeds for inputs in again])
    assert not calls
    assert len(store) == 2


def test_reproducible_answers_encode_apart() -> None:
    requests = given("qwen2_vl")
    looked = shared_adapter("qwen2_vl").encode_together(requests, Call(is_fixed=True))
    assert all(new is old for new, old in zip(looked, requests, strict=True))
