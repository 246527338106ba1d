"""Finds shapes with reproducible answers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.products import (
    Product,
    float32_products,
    products_of,
    recorded,
    size_of,
)
from vlm_batch.caches import Placement
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.compiled import CompiledDecode
from vlm_batch.engine.shapes import FixedShapes, pads
from vlm_batch.engine.trial import Trial
from vlm_batch.errors import OutOfMemory, describe, is_out_of_memory
from vlm_batch.policy import PACKED, POLICIES, Policy, policy_of
from vlm_batch.proofs.bits import (
    LENGTHS,
    WIDTHS,
    Bits,
    agreeing_widths,
    product_bits,
    step_bits,
)
from vlm_batch.proofs.classes import (
    BitsByCount,
    Classes,
    best_class,
    classes_of,
    counts_for,
    forwards,
    numbers_apart,
)
from vlm_batch.proofs.device import model_key
from vlm_batch.proofs.shared import SharedCallProofs
from vlm_batch.records import Graphs
from vlm_batch.runtime.device import device, rounds_float32
from vlm_batch.store.proofs import counts_of, read_proof, write_proof

#: With the layout ``rows`` (CPUs), models of more bytes have only their products tried, each with at most ``MAX_WEIGHTS``.
#: OpenBLAS has other kernels for products of up to a million multiplications.
MAX_STEP_BYTES = 32 * 2**20
MAX_WEIGHTS = 2**21


@dataclass(frozen=True)
class Proof:
    """A model's batch sizes that agree in every bit on a device."""

    #: Sets of batch sizes that agree with each other. The other fields are of the best one.
    classes: Classes
    #: Description of the measurement.
    how: str
    #: Compiled steps have the same bits.
    graphs: bool = False
    #: (kind of product, batch sizes that it is computed in) of products that would disagree otherwise.
    products: tuple[tuple[str, tuple[int, ...]], ...] = ()
    #: Numbers of attention's columns that agree.
    widths: tuple[int, ...] = ()

    @classmethod
    def kept(cls, kept: Mapping[str, Any], counts: Sequence[int]) -> Proof:
        """Read a proof of a file, in which ``counts`` were tried. Raises ValueError, KeyError or TypeError."""
        known = {1, *counts}
        classes = tuple(counts_of(one, known) for one in kept["classes"])
        products = tuple(
            (str(name), counts_of(one, known)) for name, one in kept["products"]
        )
        if not all(classes) or not all(one for _, one in products):
            raise ValueError("it has a class without numbers")
        if not isinstance(kept["graphs"], bool):
            raise TypeError(f"graphs is {kept['graphs']!r}")
        return cls(
            classes,
            str(kept["how"]),
            kept["graphs"],
            products,
            counts_of(kept["widths"], WIDTHS),
        )

    def best(self, layout: Placement) -> tuple[int, ...]:
        """Return the sizes that a batch may have."""
        return best_class(self.classes, layout)


def fixed_shapes(
    adapter: Adapter,
    kv: KVQuantisation | None = None,
    policy: Policy | None = None,
    *,
    max_rows: int = 1,
) -> FixedShapes:
    """Return shapes with reproducible answers on this device. Warns if rows must decode one at a time.

    Raises:
        OutOfMemory: Memory is too small to try them.
    """
    policy = policy or POLICIES[device()]
    layout = Placement(policy.placement)
    shapes = FixedShapes(
        layout=layout,
        grid=policy.grid,
        stops=(kv.start,) if kv is not None and kv.start else (),
        pad_to=policy.pad_to if pads(adapter, adapter.make_cache(kv)) else 0,
        call_tokens=policy.call_tokens,
        call_patches=policy.call_patches,
        few_bits=policy.few_bits,
    )
    if adapter.spec.max_rows == 1:
        return shapes
    proof = prove(adapter, kv, layout, max_rows=max_rows, few_bits=policy.few_bits)
    counts = proof.best(layout)
    if counts == (1,):
        warnings.warn(
            f"reproducible: {adapter.spec.family} decodes a row at a time on this device: {proof.how}, and no two "
            "numbers of rows agree in every bit; reproducible=False decodes rows together",
            stacklevel=4,
        )
    shapes = replace(
        shapes,
        counts=counts,
        widths=proof.widths,
        can_graph=proof.graphs,
        products=proof.products,
    )
    if not policy.call_tokens and not policy.call_patches:
        return shapes
    joint = SharedCallProofs(adapter.with_products(dict(shapes.products)), kv)
    return replace(shapes, joint=joint)


def prove(
    adapter: Adapter,
    kv: KVQuantisation | None,
    layout: Placement,
    *,
    max_rows: int = 1,
    few_bits: str | None = None,
) -> Proof:
    """Read a model's proof on this device, or measure it."""
    if kv is None:
        few_bits = PACKED
    elif few_bits is None:
        few_bits = policy_of({"placement": layout.value}).few_bits
    counts = counts_for(layout, max_rows)
    key = model_key(adapter, kv) | {
        "layout": layout.value,
        "counts": counts,
        "few_bits": few_bits,
    }
    if (kept := read_proof(key, partial(Proof.kept, counts=counts))) is not None:
        return kept
    try:
        proof = _measured(
            adapter, kv, FixedShapes(layout=layout, few_bits=few_bits), counts
        )
    except Exception as error:  # a request will raise it again
        if is_out_of_memory(error):  # not kept: more memory may allow other batch sizes
            raise OutOfMemory(
                f"reproducible: too little memory to try numbers of rows ({describe(error)})"
            ) from error
        proof = Proof(
            (), f"its decode step could not be tried ({type(error).__name__}: {error})"
        )
    write_proof(key, asdict(proof))
    return proof


def _measured(
    adapter: Adapter,
    kv: KVQuantisation | None,
    shapes: FixedShapes,
    counts: tuple[int, ...],
) -> Proof:
    layout = shapes.layout
    products = products_of(adapter.language, _most_weights(layout))
    single = _bits_by_name(products, counts)
    how = f"{len(products)} kinds of products"
    trial = Trial(adapter, kv, shapes)
    loose = _float32_products(trial, products)
    loose_bits = product_bits(loose, counts)
    by_products = classes_of(loose_bits, *single.values())
    if layout is Placement.ROWS and size_of(adapter.model) > MAX_STEP_BYTES:
        return Proof(by_products, f"{how} were compared")
    own, classes = numbers_apart(single, layout), by_products
    found: dict[int, BitsByCount] = {}
    if own:
        apart = Trial(adapter.with_products(own), kv, shapes)
        found = step_bits(apart, counts)
        others = [bits for name, bits in single.items() if name not in own]
        classes = classes_of(loose_bits, *others, *found.values())
        before = forwards(best_class(by_products, layout), layout)
        if forwards(best_class(classes, layout), layout) < before:
            trial = apart
            how += f", of which {' and '.join(own)} have numbers of rows of their own,"
        else:
            own = {}  # it saves nothing
    if not own:
        found = step_bits(trial, counts)
        classes = classes_of(loose_bits, *single.values(), *found.values())
    best, widths = best_class(classes, layout), tuple[int, ...]()
    if all(best[0] in bits for bits in found.values()):
        widths = agreeing_widths(found, best[0])
    # graphs' products cannot be watched
    has_float32 = any(one.dtype == mx.float32 for one in (*products, *loose))
    is_hidden = has_float32 and rounds_float32()
    may_graph = layout is Placement.SLAB and kv is None and not is_hidden
    graphs = may_graph and _graphs_agree(trial, found, best)
    how += " and its decode step were compared"
    return Proof(classes, how, graphs, tuple(own.items()), widths)


def _most_weights(layout: Placement) -> int | None:
    """Return the most weights of a product that is tried; None for all."""
    return MAX_WEIGHTS if layout is Placement.ROWS else None


def _bits_by_name(
    products: Sequence[Product], counts: Sequence[int]
) -> dict[str, BitsByCount]:
    """Return the bits of each kind of products."""
    kinds: dict[str, list[Product]] = {}
    for product in products:
        kinds.setdefault(str(product), []).append(product)
    return {name: product_bits(alike, counts) for name, alike in kinds.items()}


def _float32_products(trial: Trial, products: Sequence[Product]) -> list[Product]:
    """Return a decode step's products in float32, but for ``products``: layers' own."""
    known = {
        (one.width, one.outputs, one.layout)
        for one in products
        if one.dtype == mx.float32
    }
    row = trial.row(LENGTHS[Placement.ROWS][0])
    with recorded() as found:
        next(trial.steps([row], 1))
    every = float32_products(found, _most_weights(trial.shapes.layout))
    return [one for one in every if (one.width, one.outputs, one.layout) not in known]


def _graphs_agree(
    trial: Trial, found: Mapping[int, BitsByCount], counts: tuple[int, ...]
) -> bool:
    """Whether compiled steps have the bits of ``found``."""
    if trial.adapter.graphs is not Graphs.BY_DEFAULT or counts == (1,):
        return False
    try:
        decode = partial(trial.adapter.decode, call=trial.shapes.decode_call())
        compiled = step_bits(trial, counts, CompiledDecode(decode, uses_before_graph=0))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    for width, bits in found.items():
        for count in counts:
            graph = _logits_of(compiled[width].get(count))
            if graph != _logits_of(bits[count]):
                return False
    return True


def _logits_of(rows: Sequence[Bits] | None) -> list[bytes] | None:
    return None if rows is None else [bits.logits for bits in rows]
