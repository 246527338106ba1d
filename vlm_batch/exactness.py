"""Settings for reproducible answers of a model on a device: measured once, kept in a file, with a warning if they are slow."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch._version import __version__
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.joint import TowerCall
from vlm_batch.adapters.modules import RememberingGridTower
from vlm_batch.adapters.products import Product, products_of, shapes_of, size_of
from vlm_batch.arrays import arrays_of
from vlm_batch.caches import Placement
from vlm_batch.caches.quantisation import KVQuantisation, settings_of
from vlm_batch.engine.exact import Exact
from vlm_batch.engine.prefill import pads, shares
from vlm_batch.engine.proof import (
    Classes,
    Found,
    best_class,
    by_turns,
    classes_of,
    counts_for,
    decode_bits,
    forwards,
    is_still,
    moving_product,
    numbers_apart,
    prefill_is_still,
    product_bits,
)
from vlm_batch.errors import OutOfMemory, describe, is_out_of_memory
from vlm_batch.policy import PACKED, POLICIES, Policy, policy_of
from vlm_batch.runtime import blas
from vlm_batch.runtime.device import device
from vlm_batch.store.digest import digest
from vlm_batch.store.proofs import read_proof, write_proof

#: Changes whenever what is tried does.
PROOF = 9
#: Where a row costs (CPUs), the whole step of larger models is not tried but their products alone, and these with so many
#: weights: OpenBLAS has other kernels for small products, of up to a million multiplications, and for large ones.
MAX_STEP_BYTES = 32 * 2**20
MAX_WEIGHTS = 2**21


@dataclass(frozen=True)
class Proof:
    """The outcome for a model on a device: ``classes`` of numbers of rows that agree, and ``how`` that was found out.

    ``graphs``: compiled steps of the best class have the same bits. ``products``: kinds of products that are computed in
    numbers of rows of their own for that, and those.
    """

    classes: Classes
    how: str
    graphs: bool = False
    products: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def best(self, layout: Placement) -> tuple[int, ...]:
        """The numbers of rows that a batch is held to."""
        return best_class(self.classes, layout)


def exact_for(
    adapter: Adapter, kv: KVQuantisation | None = None, policy: Policy | None = None, *, max_rows: int = 1
) -> Exact:
    """The settings that keep a model's answers functions of their requests here. Warns once if that is a row at a time.

    ``max_rows`` is how many may decode together: where they are many, larger numbers of rows are tried, too. ``policy`` says
    how the rest is set, by default the device's. Raises OutOfMemory where there is too little to try it.
    """
    policy = policy or POLICIES[device()]
    layout = Placement(policy.placement)
    stops = (kv.start,) if kv is not None and kv.start else ()
    counts: tuple[int, ...] = (1,)
    graphs = False
    products: tuple[tuple[str, tuple[int, ...]], ...] = ()
    if adapter.max_rows != 1:
        proof = prove(adapter, kv, layout, max_rows=max_rows, few_bits=policy.few_bits)
        counts, graphs, products = proof.best(layout), proof.graphs, proof.products
        if counts == (1,):
            warnings.warn(
                f"reproducible: {adapter.spec.family} decodes a row at a time on this device: {proof.how}, and no two "
                "numbers of rows agree in every bit; reproducible=False decodes rows together",
                stacklevel=4,
            )
    is_joint = adapter.max_rows != 1 and (policy.call_tokens > 0 or policy.call_patches > 0)
    return Exact(
        counts,
        layout,
        policy.grid,
        stops,
        policy.pad_to,
        policy.call_tokens,
        policy.call_patches,
        Joint(adapter.with_products(dict(products)), kv) if is_joint else None,
        graphs,
        products,
    )


@dataclass(frozen=True)
class Together:
    """The outcome for one shape of a call: how many prompts or pictures it holds, and what speaks against more, if anything.

    ``is_apart``: prompts attend in calls of their own.
    """

    count: int
    is_apart: bool = False
    against: str = ""


class Joint:
    """The proof, for a model on this device, that in a call of one shape neither a place nor who is beside it changes a bit.

    Each kind of product is tried with made-up weights and as many rows as a call has tokens or patches, then the model's own
    prefill or tower, each with two made-up prompts or pictures by turns. Prompts attend together, or, where that is what moves
    their bits, in calls of their own (``kernels.attend_apart``). What was found for a shape is kept in a file, and holds for
    as long as the engine lives: where it could not be tried for want of memory, nothing is decided, and the request waits.
    """

    def __init__(self, adapter: Adapter, kv: KVQuantisation | None) -> None:
        self._adapter = adapter
        self._kv = kv
        self._key = _model_key(adapter, kv)
        fresh = adapter.make_cache(kv)
        # Where prompts are padded, they come in few lengths.
        self._shares = shares(adapter, fresh) and pads(adapter, fresh)
        self._found: dict[tuple[Any, ...], Together] = {}

    def prompts(self, most: int, length: int) -> int:
        """``most`` whole prompts of ``length`` tokens to a call, or one. Raises for want of memory."""
        if not self._shares:
            return 1
        return self._known(("prompts", most, length), lambda: self._of_prompts(most, length)).count

    def attends_apart(self, rows: int, length: int) -> bool:
        """Whether such prompts attend in calls of their own."""
        known = self._found.get(("prompts", rows, length))
        return known is not None and known.is_apart

    def pictures(self, most: int, call: TowerCall) -> int:
        """``most`` pictures of the shape of a tower's call to a call, or one. Raises for want of memory."""
        return self._known(("pictures", most, *call.shape), lambda: self._of_pictures(most, call)).count

    @property
    def found(self) -> dict[str, str]:
        """The reasons against what has been asked so far, by it; empty texts where it is proven."""
        return {" ".join(map(str, (*what[:2], what[-1]))): known.against for what, known in self._found.items()}

    def _known(self, what: tuple[Any, ...], measure: Callable[[], Together]) -> Together:
        if what not in self._found:
            key = self._key | {"joint": list(what)}
            kept = read_proof(key)
            if kept is None:
                try:
                    kept = asdict(measure())
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    kept = asdict(Together(1, against=f"{type(error).__name__}: {error}"))
                write_proof(key, kept)
            self._found[what] = Together(**kept)
        return self._found[what]

    def _of_prompts(self, count: int, length: int) -> Together:
        if moves := moving_product(products_of(self._adapter.language), count, length):
            return Together(1, against=moves)
        if prefill_is_still(self._adapter, self._kv, count, length):
            return Together(count)
        if prefill_is_still(self._adapter, self._kv, count, length, attends_apart=True):
            return Together(count, is_apart=True, against="attention together goes by the place: apart")
        return Together(1, against="the model's own prefill goes by the place")

    def _of_pictures(self, count: int, call: TowerCall) -> Together:
        tower, random = call.tower, np.random.RandomState(count)
        assert isinstance(tower, RememberingGridTower)
        patches = call.args[0]
        made = [mx.array(random.standard_normal(patches.shape).astype(np.float32)) for _ in range(2)]
        two = [replace(call, args=(one.astype(patches.dtype), *call.args[1:])) for one in made]
        alone = arrays_of(tower.as_one(two[:1]))
        for height in sorted({tower.count_patches(call, 0), *(array.shape[0] for array in alone)}):
            if moves := moving_product(products_of(tower.tower), count, height, is_packed=True):
                return Together(1, against=moves)
        found = [_stacked(tower.as_one(by_turns(two, count, turn))) for turn in (0, 1)]
        return Together(count) if is_still(*found) else Together(1, against="the tower's own answers go by the place")


def _stacked(answers: Sequence[Any]) -> list[mx.array]:
    """Answers of one kind as arrays (answers, ...)."""
    return [mx.stack(list(parts)) for parts in zip(*map(arrays_of, answers), strict=True)]


def prove(
    adapter: Adapter,
    kv: KVQuantisation | None,
    layout: Placement,
    *,
    max_rows: int = 1,
    few_bits: str | None = None,
) -> Proof:
    """The proof for a model on this device: from its file, or measured."""
    few_bits = PACKED if kv is None else few_bits or policy_of({"placement": layout.value}).few_bits
    counts = counts_for(layout, max_rows)
    key = _model_key(adapter, kv) | {"layout": layout.value, "counts": counts, "few_bits": few_bits}
    if (kept := read_proof(key)) is not None:
        products = tuple((name, tuple(counts)) for name, counts in kept["products"])
        return Proof(tuple(tuple(one) for one in kept["classes"]), kept["how"], kept["graphs"], products)
    proof = _measured(adapter, kv, layout, counts, few_bits)
    write_proof(key, asdict(proof))
    return proof


def _model_key(adapter: Adapter, kv: KVQuantisation | None) -> dict[str, Any]:
    return {
        "versions": versions(),
        "device": device_facts(),
        "model": digest([shapes_of(adapter.model), adapter.spec.family]).hex(),
        "kv": settings_of(kv),
        "proof": PROOF,
    }


def _measured(
    adapter: Adapter, kv: KVQuantisation | None, layout: Placement, counts: tuple[int, ...], few_bits: str
) -> Proof:
    products = products_of(adapter.language, MAX_WEIGHTS if layout is Placement.ROWS else None)
    said = f"{len(products)} kinds of products"
    try:
        single = _bits_by_name(products, counts)
        if layout is Placement.ROWS and size_of(adapter.model) > MAX_STEP_BYTES:
            return Proof(classes_of(*single.values()), f"{said} were compared")
        found = None
        if own := numbers_apart(single, layout):
            found = _with_products_apart(adapter, layout, kv, counts, few_bits, single, own)
        if found is None:
            own, steps = {}, decode_bits(adapter, layout, kv, counts, few_bits=few_bits)
            classes = classes_of(*single.values(), steps)
        else:
            classes, steps = found
            said += f", of which {' and '.join(own)} have numbers of rows of their own,"
        held = adapter.with_products(own)
        graphs = layout is Placement.SLAB and kv is None and _graphs_agree(held, steps, best_class(classes, layout))
        return Proof(classes, f"{said} and its decode step were compared", graphs, tuple(own.items()))
    except Exception as error:  # what it raises for a request, the request is told
        if is_out_of_memory(error):  # not to be kept: with more of it, other numbers of rows might do
            raise OutOfMemory(f"reproducible: too little memory to try numbers of rows ({describe(error)})") from error
        return Proof((), f"its decode step could not be tried ({type(error).__name__}: {error})")


def _bits_by_name(products: Sequence[Product], counts: tuple[int, ...]) -> dict[str, Found]:
    names = {str(product): [other for other in products if str(other) == str(product)] for product in products}
    return {name: product_bits(alike, counts) for name, alike in names.items()}


def _with_products_apart(
    adapter: Adapter,
    layout: Placement,
    kv: KVQuantisation | None,
    counts: tuple[int, ...],
    few_bits: str,
    single: Mapping[str, Found],
    own: Mapping[str, tuple[int, ...]],
) -> tuple[Classes, Found] | None:
    """The classes, and the bits of decode steps, of a model some of whose products have numbers of rows of their own. None
    where a step would need no fewer forwards."""
    steps = decode_bits(adapter.with_products(own), layout, kv, counts, few_bits=few_bits)
    classes = classes_of(*(found for name, found in single.items() if name not in own), steps)
    without = best_class(classes_of(*single.values()), layout)
    if forwards(best_class(classes, layout), layout) < forwards(without, layout):
        return classes, steps
    return None


def _graphs_agree(adapter: Adapter, steps: Found, counts: tuple[int, ...]) -> bool:
    """Whether compiled steps of all numbers of rows have the bits of ``steps``; not where they are not made, or cannot be."""
    if not adapter.graphs_pay or counts == (1,):
        return False
    try:
        compiled = decode_bits(adapter, Placement.SLAB, None, counts, is_compiled=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    return all(compiled.get(count) == steps[count] for count in counts)


def versions() -> dict[str, str]:
    """The versions that an answer's bits go by."""
    return {"vlm-batch": __version__, "mlx": version("mlx"), "mlx-vlm": version("mlx-vlm")}


def device_facts() -> dict[str, Any]:
    """The device, and the facts by which its kernels are chosen."""
    if mx.default_device().type == mx.DeviceType.gpu:
        info: dict[str, Any] = dict(mx.device_info())
        names = ("device_name", "architecture", "compute_capability_major", "compute_capability_minor")
        return {"device": "gpu"} | {name: str(info[name]) for name in names if name in info}
    return {"device": "cpu", "machine": platform.machine(), "system": platform.system(), **blas.facts()}
