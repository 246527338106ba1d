"""Verification of a model: the same requests alone by mlx-vlm, and alone and in company here.

A reproducible engine promises equal bits (docs/exactness.md); other ways show their distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.precision import precision_of
from vlm_batch.adapters.towers import remember_features
from vlm_batch.arrays import as_mlx, as_numpy
from vlm_batch.caches import Placement
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.shapes import FixedShapes, FreeShapes
from vlm_batch.inputs.checking import ModelFacts
from vlm_batch.inputs.prepare import Preparer
from vlm_batch.inputs.processing import Processing
from vlm_batch.loading import adapt
from vlm_batch.policy import policy_of
from vlm_batch.proofs.device import device_facts, versions
from vlm_batch.proofs.played import Asked, played
from vlm_batch.proofs.proving import Proof, fixed_shapes, prove
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.features import FeatureStore
from vlm_batch.store.prefix import PrefixCache
from vlm_batch.types import Request, SamplingParams

#: Largest distance of two tokens' log-probabilities between which rounding decides in half precision.
NEAR_TIE = 0.5
KEPT_BYTES = 2**28

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Trace:
    """One greedy answer: tokens and the logits (T, V) float32 of each."""

    tokens: tuple[int, ...] = ()
    logits: tuple[np.ndarray, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Two ways of asking the same requests.

    Attributes:
        promised: Every bit must be equal.
        equal: Requests with equal tokens.
        identical: Requests with bit-equal logits.
        first: The earliest differing token, from 1.
        gap: Largest distance of the two tokens there, in nats.
        apart: Largest log-probability difference up to there.
        error: Why comparison failed.
        corrected: The family's corrections of mlx-vlm, if one way is mlx-vlm's own: answers may differ.
    """

    name: str
    promised: bool
    requests: int
    equal: int = 0
    identical: int = 0
    first: int | None = None
    gap: float = 0.0
    apart: float = 0.0
    error: str | None = None
    corrected: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it is as promised, or differs only in near-ties or by corrections."""
        if self.promised:
            return self.error is None and self.identical == self.requests
        return self.gap <= NEAR_TIE or bool(self.corrected)

    @property
    def verdict(self) -> str:
        if self.error is not None:
            return self.error if not self.equal else f"{self.error} (others compared)"
        if self.identical == self.requests:
            return "bit for bit"
        if self.equal == self.requests:
            return "same tokens"
        return "near-ties" if self.gap <= NEAR_TIE else "other answers"


@dataclass(frozen=True)
class Verification:
    """The outcome for a model on a device; ``joint`` has the reasons against shared calls."""

    model: str
    family: str
    precision: str
    device: Mapping[str, Any]
    versions: Mapping[str, str]
    counts: tuple[int, ...]
    how: str
    joint: Mapping[str, str]
    tokens: int
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        return all(one.ok for one in self.comparisons)

    def as_json(self) -> dict[str, Any]:
        comparisons = [
            {**asdict(one), "ok": one.ok, "verdict": one.verdict}
            for one in self.comparisons
        ]
        return {**asdict(self), "ok": self.ok, "comparisons": comparisons}

    def _shared(self) -> str:
        against = [f"{what}: {reason}" for what, reason in self.joint.items() if reason]
        proven = sum(not reason for reason in self.joint.values())
        return f"calls of several prompts or pictures: {proven} of {len(self.joint)} as proven; {'; '.join(against)}".rstrip(
            "; "
        )

    def text(self) -> str:
        device = ", ".join(
            f"{name} {value}" for name, value in self.device.items() if value
        )
        library = ", ".join(f"{name} {value}" for name, value in self.versions.items())
        lines = [
            f"**{self.model}** ({self.family}, {self.precision}): {'as promised' if self.ok else 'NOT as promised'}",
            "",
            f"- {library}",
            f"- {device}",
            f"- rows decode in numbers of {', '.join(map(str, self.counts))}: {self.how}",
            *([f"- {self._shared()}"] if self.joint else []),
            f"- greedy, {self.tokens} tokens a request",
            "",
            "| | same tokens | same bits | first difference | gap there, nats | log-probabilities apart | |",
            "|---|---|---|---|---|---|---|",
        ]
        for one in self.comparisons:
            first = "-" if one.first is None else f"token {one.first}"
            gap = "-" if one.first is None else f"{one.gap:.2g}"
            lines.append(
                f"| {one.name} | {one.equal}/{one.requests} | {one.identical}/{one.requests} | {first} | {gap} "
                f"| {one.apart:.2g} | {one.verdict}{'' if one.ok else ' (!)'} |"
            )
        corrected = next(
            (
                one.corrected
                for one in self.comparisons
                if one.gap > NEAR_TIE and one.corrected
            ),
            (),
        )
        if corrected:
            lines += [
                "",
                f"mlx-vlm answers otherwise. What is corrected in {self.family}:",
                "",
            ]
            lines += [f"- {note}" for note in corrected]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Way:
    """A way to ask an engine, with ``apart`` steps between two requests."""

    max_rows: int = 1
    backwards: bool = False
    apart: int = 0
    keeps: bool = False
    budget: int | None = None
    twice: bool = False


ALONE, COMPANY = _Way(), _Way(max_rows=8)
LATE = _Way(max_rows=3, backwards=True, apart=2)
CHUNKS = _Way(max_rows=8, budget=7)
KEPT = _Way(max_rows=4, keeps=True, twice=True)


def verify(
    model: nn.Module,
    processor: Any,
    requests: Sequence[Request],
    *,
    name: str = "a model",
    max_tokens: int = 24,
    progress: Callable[[str], None] = lambda said: None,
) -> Verification:
    """Ask a loaded model the same requests in every way, greedily; compare."""
    plain, held = adapt(model), adapt(model)
    inputs = prepared(plain, model, processor, requests)
    layout = Placement.for_device()
    shapes = fixed_shapes(held)
    proof = (
        Proof(((1,),), "one row at a time")
        if held.spec.max_rows == 1
        else prove(held, None, layout)
    )
    found: list[Comparison] = []

    def ask(
        adapter: Adapter, way: _Way, shapes: FixedShapes | None, said: str
    ) -> list[Trace]:
        progress(said)
        return _asked(adapter, inputs, way, shapes, max_tokens)

    alone = ask(plain, ALONE, None, "alone")
    progress("alone, by mlx-vlm")
    upstream = [_upstream(model, one, max_tokens) for one in inputs]
    corrected = tuple(note for note in held.spec.notes if "mlx-vlm" in note)
    theirs = compare("mlx-vlm alone : alone", upstream, alone, promised=False)
    found.append(replace(theirs, corrected=corrected))
    found.append(
        compare(
            "alone : in company",
            alone,
            ask(plain, COMPANY, None, "in company"),
            promised=False,
        )
    )
    fixed = ask(held, ALONE, shapes, "reproducible, alone")
    theirs = compare(
        "mlx-vlm alone : reproducible alone", upstream, fixed, promised=False
    )
    found.append(replace(theirs, corrected=corrected))
    del upstream, alone
    ways = {
        "in company": COMPANY,
        "backwards, joining late": LATE,
        "small chunk budgets": CHUNKS,
        "from kept beginnings and features": KEPT,
    }
    for said, way in ways.items():
        other = ask(held, way, shapes, f"reproducible, {said}")
        found.append(
            compare(f"reproducible: alone : {said}", fixed, other, promised=True)
        )
    return Verification(
        name,
        held.spec.family,
        precision_of(model),
        device_facts(),
        versions(),
        shapes.counts,
        proof.how,
        dict(shapes.joint.found),
        max_tokens,
        tuple(found),
    )


def prepared(
    adapter: Adapter, model: nn.Module, processor: Any, requests: Sequence[Request]
) -> list[Inputs]:
    """Process each request to numpy arrays."""
    processing = Processing(
        adapter.processor(processor), model.config, adapter.video_sampling
    )
    preparer = Preparer(
        processing,
        ModelFacts(
            spec=adapter.spec,
            image_token_ids=adapter.image_token_ids,
            max_context=adapter.max_context,
        ),
    )
    return [
        as_numpy(preparer.prepare(preparer.check(request)).inputs)
        for request in requests
    ]


def compare(
    name: str, ones: Sequence[Trace], others: Sequence[Trace], *, promised: bool
) -> Comparison:
    """Compare answers to the same requests; ``ones`` are the reference."""
    result = Comparison(name, promised, len(ones))
    for one, other in zip(ones, others, strict=True):
        if one.error is not None or other.error is not None:
            result = replace(result, error=one.error or other.error)
            continue
        pairs = list(zip(one.tokens, other.tokens, strict=False))
        differs = next((step for step, (a, b) in enumerate(pairs) if a != b), None)
        upto = len(pairs) if differs is None else differs + 1
        rows = [
            (_logprobs(a), _logprobs(b))
            for a, b in zip(one.logits[:upto], other.logits[:upto], strict=True)
        ]
        apart = max((_apart(a, b) for a, b in rows), default=0.0)
        same = all(
            np.array_equal(a, b, equal_nan=True)
            for a, b in zip(one.logits, other.logits, strict=False)
        )
        result = replace(
            result,
            equal=result.equal + (differs is None),
            identical=result.identical + (differs is None and same),
            apart=max(result.apart, apart),
        )
        if differs is not None:
            measure, (mine, theirs) = rows[differs][0], pairs[differs]
            first = min(differs + 1, result.first or differs + 1)
            result = replace(
                result,
                first=first,
                gap=max(result.gap, float(abs(measure[mine] - measure[theirs]))),
            )
    return result


def _logprobs(logits: np.ndarray) -> np.ndarray:
    top = logits.max()
    return np.asarray(logits - top - np.log(np.exp(logits - top).sum()))


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    wide = min(one.shape[-1], other.shape[-1])
    known = np.isfinite(one[:wide]) & np.isfinite(other[:wide])
    return float(np.abs(one[:wide][known] - other[:wide][known]).max(initial=0.0))


def _asked(
    adapter: Adapter,
    inputs: Sequence[Inputs],
    way: _Way,
    shapes: FixedShapes | None,
    max_tokens: int,
) -> list[Trace]:
    if way.max_rows == 1:
        return [
            _play(_engine(adapter, way, shapes), [one], way, max_tokens)[0]
            for one in inputs
        ]
    engine = _engine(adapter, way, shapes)
    if way.twice:
        _play(engine, inputs, way, max_tokens)
    return _play(engine, inputs, way, max_tokens)


def _engine(adapter: Adapter, way: _Way, shapes: FixedShapes | None) -> BatchGenerator:
    rows = (
        way.max_rows
        if adapter.spec.max_rows is None
        else min(way.max_rows, adapter.spec.max_rows)
    )
    budgets = (
        {}
        if way.budget is None
        else {"prefill_budget": way.budget, "idle_budget": way.budget}
    )
    policy = policy_of({"max_rows": rows, **budgets})
    if adapter.spec.max_rows is not None:
        policy = replace(policy, encode_ahead=0)
    budget = ByteBudget(KEPT_BYTES if way.keeps else 0)
    remember_features(adapter, FeatureStore(budget))
    prefix = (
        PrefixCache(budget)
        if way.keeps and adapter.spec.no_prefix_reuse is None
        else None
    )
    reuse = Reuse(adapter, prefix, shapes=shapes or FreeShapes())
    return BatchGenerator(adapter, policy=policy, reuse=reuse, shapes=shapes)


def _play(
    engine: BatchGenerator, inputs: Sequence[Inputs], way: _Way, max_tokens: int
) -> list[Trace]:
    """Run requests to their ends, in their order."""
    turn = -1 if way.backwards else 1
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    asked = [
        Asked(one, params, at * way.apart) for at, one in enumerate(inputs[::turn])
    ]
    return [
        Trace(
            result.token_ids,
            tuple(np.array(row.astype(mx.float32)) for row in logits),
            result.error,
        )
        for result, logits in played(engine, asked)[::turn]
    ]


def _upstream(model: nn.Module, inputs: Inputs, max_tokens: int) -> Trace:
    from mlx_vlm.generate.ar import generate_step

    arrays = as_mlx(dict(inputs))
    ids, pixels, mask = (
        arrays.pop(name, None)
        for name in ("input_ids", "pixel_values", "attention_mask")
    )
    try:
        steps: Iterator[Any] = generate_step(
            ids, model, pixels, mask, max_tokens=max_tokens, temperature=0.0, **arrays
        )
        pairs = [
            (int(token), np.array(logprobs.astype(mx.float32)))
            for token, logprobs in steps
        ]
    except Exception as error:  # whatever upstream's path raises, it is the finding
        return Trace(
            error=f"mlx-vlm: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
        )
    return Trace(
        tuple(token for token, _ in pairs), tuple(logprobs for _, logprobs in pairs)
    )
