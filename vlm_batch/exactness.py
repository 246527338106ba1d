"""Settings for reproducible answers of a model on a device: measured once, kept in a file, with a warning if they are slow."""

from __future__ import annotations

import platform
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from vlm_batch._version import __version__
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.joint import TowerCall
from vlm_batch.adapters.modules import RememberingGridTower
from vlm_batch.adapters.products import products_of, shapes_of, size_of
from vlm_batch.arrays import arrays_of
from vlm_batch.caches import Placement
from vlm_batch.caches.quantisation import KVQuantisation, settings_of
from vlm_batch.engine.exact import Exact, parts_of
from vlm_batch.engine.proof import (
    Classes,
    all_same,
    best_class,
    classes_of,
    counts_for,
    decode_bits,
    differing_product,
    joint_prefill_agrees,
    product_bits,
)
from vlm_batch.policy import policy_for
from vlm_batch.runtime import blas
from vlm_batch.runtime.device import device
from vlm_batch.store.digest import digest
from vlm_batch.store.proofs import read_proof, write_proof

#: Changes whenever what is tried does.
PROOF = 4
#: Where a row costs (CPUs), the whole step of larger models is not tried but their products alone, and these with so many
#: weights: OpenBLAS has other kernels for small products, of up to a million multiplications, and for large ones.
MAX_STEP_BYTES = 32 * 2**20
MAX_WEIGHTS = 2**21


@dataclass(frozen=True)
class Proof:
    """The outcome for a model on a device: ``classes`` of numbers of rows that agree, and ``how`` that was found out."""

    classes: Classes
    how: str

    def best(self, layout: Placement) -> tuple[int, ...]:
        """The numbers of rows that a batch is held to."""
        return best_class(self.classes, layout)


def exact_for(
    adapter: Adapter,
    kv: KVQuantisation | None = None,
    layout: Placement | None = None,
    *,
    max_rows: int = 1,
    grid: int | None = None,
    unpacks: bool | None = None,
    pad_to: int | None = None,
) -> Exact:
    """The settings that keep a model's answers functions of their requests here. Warns once if that is a row at a time.

    ``max_rows`` is how many may decode together: where they are many, larger numbers of rows are tried, too.
    ``grid`` is the positions between a prompt's cuts, ``pad_to`` what chunks are padded to, ``unpacks`` how slabs in few
    bits are read; by default the device's.
    """
    layout = layout or Placement.for_device()
    policy = policy_for(layout.value, device())
    grid, pad_to = grid or policy.grid, policy.pad_to if pad_to is None else pad_to
    stops = (kv.start,) if kv is not None and kv.start else ()
    counts: tuple[int, ...] = (1,)
    if adapter.max_rows != 1:
        proof = prove(adapter, kv, layout, max_rows=max_rows, unpacks=unpacks)
        counts = proof.best(layout)
        if counts == (1,):
            warnings.warn(
                f"reproducible: {adapter.spec.family} decodes a row at a time on this device: {proof.how}, and no two "
                "numbers of rows agree in every bit; reproducible=False decodes rows together",
                stacklevel=4,
            )
    is_joint = layout is Placement.SLAB and counts != (1,)
    return Exact(counts, layout, grid, stops, pad_to, Joint(adapter, kv) if is_joint else None)


class Joint:
    """The proof, for a model on this device, that prompts of one length which share a prefill get the bits they get alone,
    and pictures of one size which share a tower's call.

    Each kind of product is tried with made-up weights and as many rows as all have tokens or patches, then the model's own
    prefill of made-up prompts, and its own tower with the pictures that are there. Prompts attend in calls of their own
    (``kernels.attend_apart``). What was found for a number and a shape is kept in a file.
    """

    def __init__(self, adapter: Adapter, kv: KVQuantisation | None) -> None:
        self._adapter = weakref.proxy(adapter)
        self._kv = kv
        self._found: dict[tuple[Any, ...], str] = {}

    def agree(self, rows: int, length: int) -> bool:
        """Whether ``rows`` prompts of ``length`` tokens may share a prefill. Uses MLX where it is not known yet."""
        return self._known(("prompts", rows, length), lambda: self._against_prompts(rows, length))

    def parts(self, calls: Sequence[TowerCall]) -> tuple[int, ...]:
        """Calls of a tower, of one shape, in parts that may be made as one. Uses MLX where it is not known yet."""
        shape = calls[0].shape
        return parts_of(
            len(calls),
            lambda size: self._known(("pictures", size, *shape), lambda: self._against_pictures(calls[:size])),
        )

    @property
    def found(self) -> dict[str, str]:
        """The reasons against what has been asked so far, by it; empty texts where it is proven."""
        return {" ".join(map(str, what[:3])): against for what, against in self._found.items()}

    def _known(self, what: tuple[Any, ...], measure: Callable[[], str]) -> bool:
        if what not in self._found:
            key = _model_key(self._adapter, self._kv) | {"joint": list(what)}
            kept = read_proof(key)
            if kept is None:
                try:
                    kept = {"against": measure()}
                    write_proof(key, kept)
                except Exception as error:  # too much together for now, perhaps: another process tries again
                    kept = {"against": f"{type(error).__name__}: {error}"}
            self._found[what] = str(kept["against"])
        return not self._found[what]

    def _against_prompts(self, rows: int, length: int) -> str:
        products = [product for product in products_of(self._adapter.language) if not product.is_head]
        if differs := differing_product(products, rows, length):
            return differs
        agrees = joint_prefill_agrees(self._adapter, self._kv, rows, length)
        return "" if agrees else "the model's own prefill differs"

    def _against_pictures(self, calls: Sequence[TowerCall]) -> str:
        tower = calls[0].tower
        if not isinstance(tower, RememberingGridTower):
            return "the number of rows in its tower's products is not known here"
        if differs := differing_product(products_of(tower.tower), len(calls), tower.count_patches(calls[0], 0)):
            return differs
        alone = [tower.fresh(call.args, call.kwargs) for call in calls]
        return "" if all_same(arrays_of(tower.as_one(calls)), arrays_of(alone)) else "the tower's own answers differ"


def prove(
    adapter: Adapter,
    kv: KVQuantisation | None,
    layout: Placement,
    *,
    max_rows: int = 1,
    unpacks: bool | None = None,
) -> Proof:
    """The proof for a model on this device: from its file, or measured."""
    adapter.go_by_shapes()
    unpacks = kv is not None and (policy_for(layout.value, device()).unpacks if unpacks is None else unpacks)
    counts = counts_for(layout, max_rows)
    key = _model_key(adapter, kv) | {"layout": layout.value, "counts": counts, "unpacks": unpacks}
    if (kept := read_proof(key)) is not None:
        return Proof(tuple(tuple(one) for one in kept["classes"]), kept["how"])
    proof = _measured(adapter, kv, layout, counts, unpacks)
    write_proof(key, {"classes": proof.classes, "how": proof.how})
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
    adapter: Adapter, kv: KVQuantisation | None, layout: Placement, counts: tuple[int, ...], unpacks: bool
) -> Proof:
    products = products_of(adapter.language, MAX_WEIGHTS if layout is Placement.ROWS else None)
    said = f"{len(products)} kinds of products"
    try:
        single = product_bits(products, counts)
        if layout is Placement.ROWS and size_of(adapter.model) > MAX_STEP_BYTES:
            return Proof(classes_of(single), f"{said} were compared")
        steps = decode_bits(adapter, layout, kv, counts, unpacks=unpacks)
        return Proof(classes_of(single, steps), f"{said} and its decode step were compared")
    except Exception as error:  # what it raises for a request, the request is told
        return Proof((), f"its decode step could not be tried ({type(error).__name__}: {error})")


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
