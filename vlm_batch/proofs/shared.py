"""Proves that prompts, or pictures, may share a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.joint import TowerCall
from vlm_batch.adapters.modules import RememberingGridTower
from vlm_batch.adapters.products import products_of
from vlm_batch.arrays import arrays_of
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.shapes import FixedShapes, JointProof, pads, shares
from vlm_batch.engine.trial import Trial
from vlm_batch.errors import is_out_of_memory
from vlm_batch.proofs.bits import by_turns, is_still, moving_product, prefill_is_still
from vlm_batch.proofs.device import model_key
from vlm_batch.runtime.device import rounds_float32
from vlm_batch.store.proofs import counts_of, read_proof, write_proof


@dataclass(frozen=True)
class SharedCall:
    """Prompts or pictures that may share a call of one shape."""

    count: int
    #: Prompts attend in calls of their own.
    is_apart: bool = False
    #: Reason against a larger count.
    against: str = ""

    @classmethod
    def kept(cls, kept: Mapping[str, Any], most: int) -> SharedCall:
        """Read what a file says of a call of ``most``. Raises ValueError, KeyError or TypeError."""
        (count,) = counts_of([kept["count"]], {1, most})
        if not isinstance(kept["is_apart"], bool):
            raise TypeError(f"is_apart is {kept['is_apart']!r}")
        return cls(count, kept["is_apart"], str(kept["against"]))


class SharedCallProofs(JointProof):
    """Proves that no result's bits depend on place or neighbours in calls of one shape (``JointProof``).

    It tries each kind of product with made-up weights, then the model's prefill or tower with two alternating inputs.
    Too little memory decides nothing: the request waits.
    """

    tries = True

    def __init__(self, adapter: Adapter, kv: KVQuantisation | None) -> None:
        self._language = adapter.language
        self._trial = Trial(adapter, kv, FixedShapes())
        self._key = model_key(adapter, kv)
        fresh = adapter.make_cache(kv)
        # Padded prompts come in few lengths, so few shapes need a proof.
        self._shares = shares(adapter, fresh) and pads(adapter, fresh)
        self._found: dict[tuple[Any, ...], SharedCall] = {}

    def prompts(self, most: int, length: int) -> int:
        """As in ``JointProof``; ``length``: tokens."""
        if not self._shares:
            return 1
        return self._proven(
            ("prompts", most, length), lambda: self._of_prompts(most, length)
        ).count

    def attends_apart(self, rows: int, length: int) -> bool:
        """As in ``JointProof``."""
        known = self._found.get(("prompts", rows, length))
        return known is not None and known.is_apart

    def pictures(self, most: int, call: TowerCall) -> int:
        """As in ``JointProof``, for pictures of the call's shape."""
        return self._proven(
            ("pictures", most, *call.shape), lambda: self._of_pictures(most, call)
        ).count

    @property
    def found(self) -> dict[str, str]:  # type: ignore[override]
        """As in ``JointProof``."""
        return {
            " ".join(map(str, (*what[:2], what[-1]))): known.against
            for what, known in self._found.items()
        }

    def _proven(
        self, what: tuple[Any, ...], measure: Callable[[], SharedCall]
    ) -> SharedCall:
        """Return what is known of a call, from a file or measured now."""
        if what in self._found:
            return self._found[what]
        key = self._key | {"joint": list(what)}
        found = read_proof(key, partial(SharedCall.kept, most=what[1]))
        if found is None:
            try:
                found = measure()
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                found = SharedCall(1, against=f"{type(error).__name__}: {error}")
            write_proof(key, asdict(found))
        self._found[what] = found
        return found

    def _of_prompts(self, count: int, length: int) -> SharedCall:
        if moves := moving_product(products_of(self._language), count, length):
            return SharedCall(1, against=moves)
        if prefill_is_still(self._trial, count, length):
            return SharedCall(count)
        if prefill_is_still(self._trial, count, length, attends_apart=True):
            return SharedCall(
                count,
                is_apart=True,
                against="attention together goes by the place: apart",
            )
        return SharedCall(1, against="the model's own prefill goes by the place")

    def _of_pictures(self, count: int, call: TowerCall) -> SharedCall:
        tower, random = call.tower, np.random.RandomState(count)
        assert isinstance(tower, RememberingGridTower)
        products = products_of(tower.tower)
        has_float32 = any(product.dtype == mx.float32 for product in products)
        if has_float32 and rounds_float32():
            return SharedCall(
                1, against="products in TF32 would hide what goes by the place"
            )
        patches = call.args[0]
        two: list[TowerCall] = []
        for _ in range(2):
            made = random.standard_normal(patches.shape).astype(np.float32)
            given = mx.array(made).astype(patches.dtype)
            two.append(replace(call, args=(given, *call.args[1:])))
        answers = arrays_of(tower.as_one(two[:1]))
        heights = {array.shape[0] for array in answers}
        heights.add(tower.count_patches(call, 0))
        for height in sorted(heights):
            moves = moving_product(products, count, height, is_packed=True)
            if moves:
                return SharedCall(1, against=moves)
        found = [_stacked(tower.as_one(by_turns(two, count, turn))) for turn in (0, 1)]
        if is_still(*found):
            return SharedCall(count)
        return SharedCall(1, against="the tower's own answers go by the place")


def _stacked(answers: Sequence[Any]) -> list[mx.array]:
    """Return the pictures' answers as arrays (pictures, ...)."""
    by_array = zip(*map(arrays_of, answers), strict=True)
    return [mx.stack(list(parts)) for parts in by_array]
