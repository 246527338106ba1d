"""Finds shapes with reproducible answers, and keeps the proofs in files."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_batch._version import __version__
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.joint import TowerCall
from vlm_batch.adapters.modules import RememberingGridTower
from vlm_batch.adapters.products import (
    Product,
    float32_products,
    products_of,
    recorded,
    shapes_of,
    size_of,
)
from vlm_batch.arrays import arrays_of
from vlm_batch.caches import Placement
from vlm_batch.caches.quantisation import KVQuantisation, settings_of
from vlm_batch.engine.compiled import CompiledDecode
from vlm_batch.engine.proof import (
    LENGTHS,
    WIDTHS,
    Bits,
    Classes,
    Found,
    agreeing_widths,
    best_class,
    by_turns,
    classes_of,
    counts_for,
    forwards,
    is_still,
    moving_product,
    numbers_apart,
    prefill_is_still,
    product_bits,
    step_bits,
)
from vlm_batch.engine.shapes import FixedShapes, pads, shares
from vlm_batch.engine.trial import Trial
from vlm_batch.errors import OutOfMemory, describe, is_out_of_memory
from vlm_batch.policy import PACKED, POLICIES, Policy, policy_of
from vlm_batch.records import Graphs
from vlm_batch.runtime import blas, exponentials
from vlm_batch.runtime.device import device, rounds_float32
from vlm_batch.store.digest import digest
from vlm_batch.store.proofs import counts_of, read_proof, write_proof

#: Version of the measurements; a new one discards kept proofs.
PROOF = 12
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
    is_joint = policy.call_tokens > 0 or policy.call_patches > 0
    return (
        replace(
            shapes,
            joint=SharedCallProofs(adapter.with_products(dict(shapes.products)), kv),
        )
        if is_joint
        else shapes
    )


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


class SharedCallProofs:
    """Proves that no result's bits depend on place or neighbours in calls of one shape (``JointProof``).

    It tries each kind of product with made-up weights, then the model's prefill or tower with two alternating inputs.
    Too little memory decides nothing: the request waits.
    """

    def __init__(self, adapter: Adapter, kv: KVQuantisation | None) -> None:
        self._language = adapter.language
        self._trial = Trial(adapter, kv, FixedShapes())
        self._key = _model_key(adapter, kv)
        fresh = adapter.make_cache(kv)
        # Padded prompts come in few lengths, so few shapes need a proof.
        self._shares = shares(adapter, fresh) and pads(adapter, fresh)
        self._found: dict[tuple[Any, ...], SharedCall] = {}

    def prompts(self, most: int, length: int) -> int:
        """As in ``JointProof``; ``length``: tokens."""
        if not self._shares:
            return 1
        return self._known(
            ("prompts", most, length), lambda: self._of_prompts(most, length)
        ).count

    def attends_apart(self, rows: int, length: int) -> bool:
        """As in ``JointProof``."""
        known = self._found.get(("prompts", rows, length))
        return known is not None and known.is_apart

    def pictures(self, most: int, call: TowerCall) -> int:
        """As in ``JointProof``, for pictures of the call's shape."""
        return self._known(
            ("pictures", most, *call.shape), lambda: self._of_pictures(most, call)
        ).count

    @property
    def found(self) -> dict[str, str]:
        """As in ``JointProof``."""
        return {
            " ".join(map(str, (*what[:2], what[-1]))): known.against
            for what, known in self._found.items()
        }

    def _known(
        self, what: tuple[Any, ...], measure: Callable[[], SharedCall]
    ) -> SharedCall:
        if what not in self._found:
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
        return self._found[what]

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
        if rounds_float32() and any(
            product.dtype == mx.float32 for product in products_of(tower.tower)
        ):
            return SharedCall(
                1, against="products in TF32 would hide what goes by the place"
            )
        patches = call.args[0]
        made = [
            mx.array(random.standard_normal(patches.shape).astype(np.float32))
            for _ in range(2)
        ]
        two = [
            replace(call, args=(one.astype(patches.dtype), *call.args[1:]))
            for one in made
        ]
        alone = arrays_of(tower.as_one(two[:1]))
        for height in sorted(
            {tower.count_patches(call, 0), *(array.shape[0] for array in alone)}
        ):
            if moves := moving_product(
                products_of(tower.tower), count, height, is_packed=True
            ):
                return SharedCall(1, against=moves)
        found = [_stacked(tower.as_one(by_turns(two, count, turn))) for turn in (0, 1)]
        return (
            SharedCall(count)
            if is_still(*found)
            else SharedCall(1, against="the tower's own answers go by the place")
        )


def _stacked(answers: Sequence[Any]) -> list[mx.array]:
    return [
        mx.stack(list(parts)) for parts in zip(*map(arrays_of, answers), strict=True)
    ]


def prove(
    adapter: Adapter,
    kv: KVQuantisation | None,
    layout: Placement,
    *,
    max_rows: int = 1,
    few_bits: str | None = None,
) -> Proof:
    """Read a model's proof on this device, or measure it."""
    few_bits = (
        PACKED
        if kv is None
        else few_bits or policy_of({"placement": layout.value}).few_bits
    )
    counts = counts_for(layout, max_rows)
    key = _model_key(adapter, kv) | {
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


def _model_key(adapter: Adapter, kv: KVQuantisation | None) -> dict[str, Any]:
    return {
        "versions": versions(),
        "sources": _sources(),
        "device": device_facts(),
        "model": digest([shapes_of(adapter.model), adapter.spec.family]).hex(),
        "kv": settings_of(kv),
        "proof": PROOF,
    }


def _measured(
    adapter: Adapter,
    kv: KVQuantisation | None,
    shapes: FixedShapes,
    counts: tuple[int, ...],
) -> Proof:
    layout = shapes.layout
    products = products_of(
        adapter.language, MAX_WEIGHTS if layout is Placement.ROWS else None
    )
    said = f"{len(products)} kinds of products"
    names = {
        str(product): [other for other in products if str(other) == str(product)]
        for product in products
    }
    single = {name: product_bits(alike, counts) for name, alike in names.items()}
    trial = Trial(adapter, kv, shapes)
    loose_products = _float32_products(trial, products)
    loose = product_bits(loose_products, counts)
    if layout is Placement.ROWS and size_of(adapter.model) > MAX_STEP_BYTES:
        return Proof(classes_of(loose, *single.values()), f"{said} were compared")
    own, found = numbers_apart(single, layout), dict[int, Found]()
    if own:
        trial = Trial(adapter.with_products(own), kv, shapes)
        found = step_bits(trial, counts)
        classes = classes_of(
            loose,
            *(one for name, one in single.items() if name not in own),
            *found.values(),
        )
        without = best_class(classes_of(loose, *single.values()), layout)
        # it saves nothing
        if forwards(best_class(classes, layout), layout) >= forwards(without, layout):
            trial, own, found = Trial(adapter, kv, shapes), {}, {}
        else:
            said += f", of which {' and '.join(own)} have numbers of rows of their own,"
    if not found:
        found = step_bits(trial, counts)
        classes = classes_of(loose, *single.values(), *found.values())
    best = best_class(classes, layout)
    widths = (
        agreeing_widths(found, best[0])
        if all(best[0] in one for one in found.values())
        else ()
    )
    is_hidden = rounds_float32() and any(
        product.dtype == mx.float32 for product in [*products, *loose_products]
    )
    # graphs' products cannot be watched
    can_graph = layout is Placement.SLAB and kv is None and not is_hidden
    graphs = can_graph and _graphs_agree(trial, found, best)
    return Proof(
        classes,
        f"{said} and its decode step were compared",
        graphs,
        tuple(own.items()),
        widths,
    )


def _float32_products(trial: Trial, products: Sequence[Product]) -> list[Product]:
    """Return a decode step's products in float32, but for ``products``: layers' own."""
    most = MAX_WEIGHTS if trial.shapes.layout is Placement.ROWS else None
    known = {
        (one.width, one.outputs, one.layout)
        for one in products
        if one.dtype == mx.float32
    }
    row = trial.row(LENGTHS[Placement.ROWS][0])
    with recorded() as found:
        next(trial.steps([row], 1))
    return [
        one
        for one in float32_products(found, most)
        if (one.width, one.outputs, one.layout) not in known
    ]


def _graphs_agree(
    trial: Trial, found: Mapping[int, Found], counts: tuple[int, ...]
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
    return all(
        _logits_of(compiled[width].get(count)) == _logits_of(found[width][count])
        for width in found
        for count in counts
    )


def _logits_of(rows: Sequence[Bits] | None) -> list[bytes] | None:
    return None if rows is None else [bits.logits for bits in rows]


@cache
def _sources() -> str:
    """Return the digest of what computes answers: a checkout's kernels change without its version."""
    package = Path(__file__).parents[1]
    try:
        paths = [
            path
            for room in ("adapters", "caches", "engine", "models", "runtime")
            for path in sorted((package / room).iterdir())
        ]
        return digest(
            [
                [path.name, path.read_text("utf-8")]
                for path in paths
                if path.suffix in (".cu", ".py")
            ]
        ).hex()
    except OSError:  # a package in an archive has no folders; its version says enough
        return ""


def versions() -> dict[str, str]:
    return {
        "vlm-batch": __version__,
        "mlx": version("mlx"),
        "mlx-vlm": version("mlx-vlm"),
    }


def device_facts() -> dict[str, Any]:
    """Return what decides the device's kernels."""
    if mx.default_device().type == mx.DeviceType.gpu:
        info: dict[str, Any] = dict(mx.device_info())
        names = (
            "device_name",
            "architecture",
            "compute_capability_major",
            "compute_capability_minor",
        )
        named = {name: str(info[name]) for name in names if name in info}
        return {
            "device": "gpu",
            **named,
            "float32 products": "TF32" if rounds_float32() else "float32",
        }
    system = {
        "device": "cpu",
        "machine": platform.machine(),
        "system": platform.system(),
    }
    return system | blas.facts() | exponentials.facts()
