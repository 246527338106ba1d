"""A cache class of mlx-vlm's that no batch has been verified with is refused, by its name."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_vlm.models import cache as upstream

from tests.harness import shared_adapter
from tests.zoo import FAMILIES, family
from vlm_batch.caches.verified import VERIFIED, check_caches
from vlm_batch.errors import UnsupportedModel
from vlm_batch.loading import adapt


class Renamed(upstream.KVCache):
    """As mlx-vlm's next one might be: a subclass of a known class, in its own file."""


Renamed.__module__ = upstream.__name__


@pytest.mark.parametrize(
    "caches",
    [
        [Renamed()],
        [upstream.KVCache(), upstream.CacheList(upstream.KVCache(), Renamed())],
    ],
)
def test_a_class_that_is_not_known_is_refused(caches: list[Any]) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"my_vl: .* in a mlx_vlm.models.cache.Renamed, which"
    ):
        check_caches(caches, family="my_vl")


def test_a_model_with_such_a_layer_is_refused_when_it_is_adapted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = family("llava").build()
    monkeypatch.setattr(
        type(model.language_model),
        "make_cache",
        lambda self: [Renamed() for _ in self.layers],
        raising=False,
    )
    with pytest.raises(
        UnsupportedModel, match=r"llava: .* mlx_vlm.models.cache.Renamed"
    ):
        adapt(model, "llava")


def test_every_family_has_known_caches_and_every_known_class_is_used() -> None:
    used: set[str] = set()
    for name in FAMILIES:
        adapter = shared_adapter(name)
        caches = adapter.make_cache()
        check_caches(caches, family=adapter.spec.family)
        inner = [
            part
            for one in caches
            if type(one) is upstream.CacheList
            for part in one.caches
        ]
        used |= {
            f"{type(one).__module__}.{type(one).__qualname__}"
            for one in [*caches, *inner]
        }
    assert used >= VERIFIED


def test_an_adapters_own_classes_are_its_own_business() -> None:
    class Mine(upstream.KVCache):
        pass

    check_caches([Mine()], family="my_vl")
