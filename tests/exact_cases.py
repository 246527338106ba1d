"""Requests in served precision through a reproducible engine, bit for bit: alone, in company, in any order, cached.

The measure of a request is its own answer alone: one row, an engine of its own, nothing kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.switch_layers import SwitchLinear

from tests.drafters import Scripted
from tests.harness import settings_for
from tests.zoo import family as tiny_family
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.towers import remember_features
from vlm_batch.caches import Placement
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.drafts import NO_DRAFTS, NoDrafts
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.shapes import FixedShapes, pads
from vlm_batch.models import adapter_for
from vlm_batch.policy import policy_of
from vlm_batch.proofs.played import Asked, played
from vlm_batch.proofs.proving import fixed_shapes, prove
from vlm_batch.proofs.shared import SharedCallProofs
from vlm_batch.runtime.device import Device, device
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.digest import array_bytes
from vlm_batch.store.features import FeatureStore
from vlm_batch.store.prefix import PrefixCache
from vlm_batch.types import SamplingParams

#: The types that weights are served in. The bits are of the language model's linear layers, in groups of 32, over bfloat16.
PRECISIONS = ("float32", "bfloat16", "float16", "8 bits", "4 bits")
NUM_TOKENS = 6
GROUP = 32
#: Positions between two cuts, so that tiny prompts have several chunks.
GRID = 8
#: Prompts that come in few lengths, and calls that hold several tiny prompts or pictures, as those of a GPU hold larger ones;
#: the longest texts still have two chunks.
JOINED: dict[str, Any] = {
    "pad_to": 16,
    "grid": 24,
    "call_tokens": 128,
    "call_patches": 96,
}
#: Two texts with one beginning, pictures of three sizes, one of them twice.
KEYS = ("image:1:0", "text:5:40", "image:2:1", "text:5:26", "image:3:2", "text:4:9")
#: Rows of scenarios in the shapes that users get, and the tokens of each answer and of the two long texts there.
ROWS_AS_SERVED = 9
TOKENS_AS_SERVED = 20
LONG = (300, 560)


class NotServed(Exception):
    """A model cannot be run in a precision on this device, alone and by nobody; the reason."""


class Failed(Exception):
    """A request of a scenario ended with an error; which."""


@dataclass(frozen=True)
class Answer:
    """What one request got: its tokens, and the bits of the logits that each was chosen from."""

    tokens: tuple[int, ...]
    bits: tuple[bytes, ...]
    cached: int = 0


@dataclass(frozen=True)
class Arrival:
    """A request of a scenario, and the step before which it comes."""

    key: str
    at: int = 0
    tokens: int = NUM_TOKENS


@dataclass(frozen=True)
class Way:
    """Circumstances that may not matter."""

    max_rows: int = 4
    budget: int | None = None
    layout: Placement | None = None  # the scenario's own
    keeps: bool = False
    # right, wrong and mixed ones, where the family's rows can have any
    drafts: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)
    # in the shapes that users get, not in those that cut tiny prompts
    as_served: bool = False


@cache
def adapter_of(name: str, precision: str) -> Adapter:
    """A family's tiny model in a precision. Raises NotServed."""
    tiny = tiny_family(name)
    model = tiny.build()
    if precision != "float32":
        model.set_dtype(mx.float16 if precision == "float16" else mx.bfloat16)
    if precision.endswith("bits"):
        language = model.language_model
        # mlx-vlm's own, for layers that are never quantised
        wants = getattr(language, "quant_predicate", None)

        def fits(path: str, module: Any) -> bool:
            return _fits(module) and (wants is None or wants(path, module) is not False)

        if not any(fits(path, module) for path, module in language.named_modules()):
            raise NotServed(f"no layer divides into groups of {GROUP}")
        nn.quantize(
            language, group_size=GROUP, bits=int(precision[0]), class_predicate=fits
        )
    mx.eval(model.parameters())
    return adapter_for(tiny.registered)(model)


def _fits(module: Any) -> bool:
    return (
        isinstance(module, (nn.Linear, SwitchLinear))
        and module.weight.shape[-1] % GROUP == 0
    )


def exact_of(
    name: str,
    precision: str,
    layout: Placement = Placement.ROWS,
    kv: KVQuantisation | None = None,
) -> FixedShapes:
    """What was proven of the model, with cuts close enough for tiny prompts; on a GPU in calls of several, too. Raises
    NotServed."""
    proof = prove(adapter_of(name, precision), kv, layout)
    stops = (kv.start,) if kv is not None and kv.start else ()
    exact = FixedShapes(
        proof.best(layout),
        layout,
        GRID,
        stops,
        products=proof.products,
        widths=proof.widths,
    )
    return exact if device() is Device.CPU else joined(exact, name, precision, kv)


@cache
def served(
    name: str, precision: str, layout: Placement, kv: KVQuantisation | None = None
) -> FixedShapes:
    """What a batcher of nine rows has. Raises NotServed."""
    policy = policy_of({"placement": layout.value})
    return fixed_shapes(
        adapter_of(name, precision), kv, policy, max_rows=ROWS_AS_SERVED
    )


def joined(
    exact: FixedShapes, name: str, precision: str, kv: KVQuantisation | None = None
) -> FixedShapes:
    """The same with calls that hold several prompts or pictures."""
    adapter = adapter_of(name, precision)
    exact = replace(
        exact,
        **JOINED,
        joint=SharedCallProofs(adapter.with_products(dict(exact.products)), kv),
    )
    return exact if pads(adapter, adapter.make_cache(kv)) else replace(exact, pad_to=0)


def engine_of(
    adapter: Adapter,
    exact: FixedShapes,
    way: Way,
    kv: KVQuantisation | None = None,
    drafts: NoDrafts = NO_DRAFTS,
) -> BatchGenerator:
    """A fresh reproducible engine."""
    config = {
        "max_rows": way.max_rows,
        "prefill_budget": way.budget,
        "idle_budget": way.budget,
    }
    budget = ByteBudget(2**28 if way.keeps else 0)
    remember_features(adapter, FeatureStore(budget))
    prefix = (
        PrefixCache(budget)
        if way.keeps and adapter.spec.no_prefix_reuse is None
        else None
    )
    reuse = Reuse(adapter, prefix, shapes=exact)
    policy = settings_for(exact.layout, **config)
    return BatchGenerator(
        adapter, policy=policy, reuse=reuse, shapes=exact, kv=kv, drafts=drafts
    )


def play(
    name: str,
    engine: BatchGenerator,
    arrivals: Sequence[Arrival],
    params: SamplingParams | None = None,
) -> list[Answer]:
    """Run a scenario to its end. Raises Failed for what the model raises for a request."""
    asked = [
        Asked(
            inputs_of(name, one.key),
            replace(params or SamplingParams(), max_tokens=one.tokens),
            one.at,
        )
        for one in arrivals
    ]
    answers = played(engine, asked)
    for result, _ in answers:
        if result.error is not None:
            raise Failed(result.error) from result.exception
    return [
        Answer(
            result.token_ids,
            tuple(array_bytes(row).tobytes() for row in logits),
            result.usage.cached_tokens,
        )
        for result, logits in answers
    ]


def inputs_of(name: str, key: str) -> dict[str, Any]:
    """The processor's output for ``image:SEED:SIZE``, ``text:SEED:LENGTH`` or ``two:SEED``."""
    tiny = tiny_family(name)
    kind, *numbers = key.split(":")
    values = [int(number) for number in numbers]
    if kind == "two":
        return (
            tiny.image(values[0], 1)
            if tiny.two_images is None
            else tiny.two_images(*values)
        )
    return tiny.image(*values) if kind == "image" else tiny.text(*values)


@cache
def alone(
    name: str,
    precision: str,
    key: str,
    exact: FixedShapes,
    tokens: int = NUM_TOKENS,
    kv: KVQuantisation | None = None,
) -> Answer:
    """A request's answer by an engine of one row that keeps nothing. Raises NotServed."""
    engine = engine_of(adapter_of(name, precision), exact, Way(max_rows=1), kv)
    try:
        (answer,) = play(name, engine, [Arrival(key, tokens=tokens)])
    except Failed as error:
        raise NotServed(str(error)) from error
    return answer


def company(name: str) -> list[Arrival]:
    """All requests at once."""
    return [Arrival(key) for key in (*KEYS, "two:7")]


def backwards(name: str) -> list[Arrival]:
    """The same from the last to the first, of different lengths, each joining later."""
    return [
        Arrival(key, at=2 * index, tokens=NUM_TOKENS - index % 3)
        for index, key in enumerate(reversed((*KEYS, "two:7")))
    ]


def again(name: str) -> list[Arrival]:
    """Requests that begin as earlier ones did, or are the same; the earlier ones are over."""
    early = [Arrival("text:5:40"), Arrival("image:2:1"), Arrival("two:7", at=1)]
    return [
        *early,
        *(
            Arrival(key, at=60 + index // 3)
            for index, key in enumerate((*KEYS, "two:7", "image:2:1"))
        ),
    ]


def growing(name: str) -> list[Arrival]:
    """Nine requests. Two long texts join while the others decode, and a slab grows with each, as far as the context allows."""
    context = adapter_of(name, "float32").max_context
    most = max(LONG) if context is None else context - TOKENS_AS_SERVED - 1
    short = [Arrival(key, tokens=TOKENS_AS_SERVED) for key in (*KEYS, "two:7")]
    lengths = [min(length, most) for length in LONG]
    long = [
        Arrival(f"text:{6 + n}:{length}", 4 * (n + 1), TOKENS_AS_SERVED)
        for n, length in enumerate(lengths)
    ]
    return [*short, *long]


#: Circumstances that the answers may not depend on: requests, and how they are served.
SCENARIOS = {
    "company": (company, Way(max_rows=8)),
    "backwards, joining late": (backwards, Way(max_rows=3)),
    "other chunk budgets": (company, Way(max_rows=4, budget=3)),
    "kept beginnings and features": (again, Way(max_rows=4, keeps=True)),
    "slab placement": (backwards, Way(max_rows=5, layout=Placement.SLAB)),
    "drafts": (backwards, Way(max_rows=4, drafts=True)),
}

#: As ``SCENARIOS``, for those who name them: each takes the time of several, and shows most on a GPU.
FURTHER = {
    "slabs that grow twice": (
        growing,
        Way(max_rows=ROWS_AS_SERVED, layout=Placement.SLAB, as_served=True),
    ),
}


def differences(
    name: str,
    precision: str,
    scenario: str,
    layout: Placement = Placement.ROWS,
    kv: KVQuantisation | None = None,
) -> list[str]:
    """The requests of a scenario that did not get the answer that they get alone, to the last bit.

    Raises NotServed where they get none alone, and Failed where they get none in company.
    """
    make, way = (SCENARIOS | FURTHER)[scenario]
    shapes_of = served if way.as_served else exact_of
    exact = shapes_of(name, precision, way.layout or layout, kv)
    arrivals = make(name)
    expected = [
        alone(name, precision, one.key, exact, max(NUM_TOKENS, one.tokens), kv)
        for one in arrivals
    ]
    drafts: NoDrafts = NO_DRAFTS
    if way.drafts:
        drafts = Scripted([answer.tokens for answer in expected])
    answers = play(
        name, engine_of(adapter_of(name, precision), exact, way, kv, drafts), arrivals
    )
    return [
        f"{arrival.key} (at {arrival.at}, {answer.cached} cached): {_first(answer, right)}"
        for arrival, answer, right in zip(arrivals, answers, expected, strict=True)
        if not is_same(answer, right)
    ]


def is_same(answer: Answer, right: Answer) -> bool:
    count = len(answer.tokens)
    return answer.tokens == right.tokens[:count] and all(
        one[: len(other)] == other[: len(one)]
        for one, other in zip(answer.bits, right.bits, strict=False)
    )


def _first(answer: Answer, right: Answer) -> str:
    pairs = list(zip(answer.bits, right.bits, strict=False))
    step = next(
        (
            i
            for i, (one, other) in enumerate(pairs)
            if one[: len(other)] != other[: len(one)]
        ),
        len(pairs),
    )
    one, other = (
        np.frombuffer(bits, np.uint8) for bits in pairs[min(step, len(pairs) - 1)]
    )
    wide = min(len(one), len(other))
    return f"from token {step + 1}, {int((one[:wide] != other[:wide]).sum())} bytes of {wide}"
