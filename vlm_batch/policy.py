"""The settings that are right for one device and wrong for another, in one table, each with its source.

``POLICIES`` has the values, ``SETTINGS`` says what each is and where its value comes from: measured, and where the figures
stand, or assumed. A batcher begins with its device's row of the table, puts in what ``vlm-batch bench --tune`` found for
its model here, and then what its caller said (``VLMBatcher(policy=)``). Answers are the same up to rounding, whatever is in
the table; those of ``MOVES_BITS`` round differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from vlm_batch.checks import is_real, whole_option
from vlm_batch.errors import shown
from vlm_batch.runtime.device import Device

PLACEMENTS = ("rows", "slab")
#: How a decode step reads keys and values in few bits.
PACKED, UNPACKED, KERNEL = "packed", "unpacked", "kernel"
#: Settings on which the last bits of reproducible answers depend.
MOVES_BITS = frozenset({"placement", "few_bits", "grid", "pad_to", "call_tokens", "call_patches"})
#: What a caller may say in the place of settings: the table and what was found here, or the table alone.
TUNED, DEVICE = "tuned", "device"
_WORDS = {"placement": PLACEMENTS, "few_bits": (PACKED, UNPACKED, KERNEL)}
_MAY_BE_ZERO = ("encode_ahead", "slack", "pad_to", "call_tokens", "call_patches")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A device's settings; ``SETTINGS`` says what each means. Raises ValueError for one out of range."""

    placement: str
    few_bits: str
    first_rows: int
    most_rows: int
    max_chunk: int
    smallest_chunk: int
    idle_budget: int
    stretch: int
    slack: int
    encode_together: int
    beside_decode: int
    encode_seconds: float
    most_patches: int
    prefill_together: int
    together_tokens: int
    pad_to: int
    encode_ahead: int = 2
    grid: int
    call_tokens: int
    call_patches: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = vars(self)[field.name]
            if field.name in _WORDS:
                if value not in _WORDS[field.name]:
                    words = ", ".join(_WORDS[field.name])
                    raise ValueError(f"{field.name} is {shown(value)}; it must be one of {words}")
            elif field.name == "encode_seconds":
                if not (is_real(value) and value >= 0):
                    raise ValueError(f"encode_seconds is {shown(value)}; it must be a number of seconds of at least 0")
            else:
                least = 0 if field.name in _MAY_BE_ZERO else 1
                object.__setattr__(self, field.name, whole_option(field.name, value, least=least))
        if self.first_rows > self.most_rows:
            raise ValueError(f"first_rows is {self.first_rows}, above most_rows, which is {self.most_rows}")
        if self.grid % 256:
            raise ValueError(f"grid is {self.grid}; it must be a multiple of 256, in which single-row caches grow")

    def with_settings(self, settings: Mapping[str, Any]) -> Policy:
        """A policy with some settings in the place of its own. Raises ValueError for a name that is none."""
        return replace(self, **check_choice(settings))


@dataclass(frozen=True)
class Setting:
    """The meaning of a setting, and where its value comes from on each kind of device."""

    meaning: str
    cpu: str
    cuda: str
    metal: str = "assumed, as on CUDA"

    def source(self, kind: Device) -> str:
        return {Device.CPU: self.cpu, Device.CUDA: self.cuda, Device.METAL: self.metal}[kind]


_CPU = Policy(
    placement="rows",
    few_bits=PACKED,
    first_rows=16,
    most_rows=32,
    max_chunk=256,
    smallest_chunk=256,
    idle_budget=2048,
    stretch=2,
    slack=0,
    encode_together=1,
    beside_decode=4,
    encode_seconds=0.05,
    most_patches=8192,
    prefill_together=8,
    together_tokens=4096,
    pad_to=0,
    grid=256,
    call_tokens=0,
    call_patches=0,
)
_CUDA = Policy(
    placement="slab",
    few_bits=KERNEL,
    first_rows=64,
    most_rows=64,
    max_chunk=2048,
    smallest_chunk=1024,
    idle_budget=16384,
    stretch=1,
    slack=512,
    encode_together=16,
    beside_decode=4,
    encode_seconds=0.0,
    most_patches=8192,
    prefill_together=32,
    together_tokens=4096,
    pad_to=64,
    grid=1024,
    call_tokens=640,
    call_patches=2048,
)
#: Of every kind of device. Metal's is CUDA's where launches decide in both, with fewer rows at first, shorter idle steps, and
#: no idle prompts or pictures, which take as long there as others.
POLICIES: Mapping[Device, Policy] = {
    Device.CPU: _CPU,
    Device.CUDA: _CUDA,
    Device.METAL: replace(
        _CUDA, few_bits=PACKED, first_rows=8, most_rows=32, idle_budget=8192, call_tokens=0, call_patches=0
    ),
}

_STATE = "measured: docs/architecture.md, decode state"
_SET = "measured: docs/benchmarks.md, settings that were measured"
_LAUNCHES = "measured: docs/benchmarks.md, where the time went"

#: By name, in the order of the table.
SETTINGS: Mapping[str, Setting] = {
    "placement": Setting(
        "layout of the live rows' keys and values: a cache a row, or one array (slab)", _STATE, _STATE
    ),
    "few_bits": Setting(
        "decode steps over slabs in few bits (kv_bits): packed, by MLX's products, unpacked, by the kernels of exact "
        "keys, or by a kernel of their own, for CUDA; what that cannot take is unpacked",
        "measured: docs/benchmarks.md, caches",
        "measured: docs/benchmarks.md, caches",
        "assumed, as on a CPU",
    ),
    "first_rows": Setting(
        "rows that may live at first, where max_rows leaves it open",
        "measured: docs/benchmarks.md, rows by themselves",
        "measured: docs/benchmarks.md, rows by themselves",
        "assumed",
    ),
    "most_rows": Setting(
        "rows that may live at most, where max_rows leaves it open",
        "measured: docs/benchmarks.md, rows by themselves",
        "assumed: more were not measured",
        "assumed",
    ),
    "max_chunk": Setting("prompt tokens of one forward", _SET, _LAUNCHES),
    "smallest_chunk": Setting(
        "prompt tokens of a chunk beside decoding rows, at least",
        _SET,
        "measured: a forward of 64 tokens takes as long as one of 1,024 (docs/benchmarks.md)",
    ),
    "idle_budget": Setting(
        "prompt tokens of a step in which nothing decodes",
        "measured: docs/benchmarks.md, missed targets on a CPU",
        "measured: docs/benchmarks.md, captions on a GPU",
        "assumed",
    ),
    "stretch": Setting(
        "times token_gap that a step takes at most while a prompt has waited long",
        "measured: docs/benchmarks.md, missed targets on a CPU",
        "assumed: a longer step has fewer launches to save than a CPU has steps of few rows",
    ),
    "slack": Setting("tokens by which a chunk may be longer if that ends its prompt", "no gain there", "assumed"),
    "encode_together": Setting(
        "requests whose pictures go through the encoder in one call",
        "measured: no gain (docs/benchmarks.md)",
        _LAUNCHES,
    ),
    "beside_decode": Setting(
        "times fewer pictures in that call while rows decode", "takes no part: one picture a call", _SET
    ),
    "encode_seconds": Setting(
        "seconds of a step that go to encoding beside decoding rows, one picture at least",
        "measured: docs/benchmarks.md, missed targets on a CPU",
        "takes no part: launches return before the work is done",
    ),
    "most_patches": Setting("patches of pictures in one call", "assumed", _SET, "assumed"),
    "prefill_together": Setting(
        "whole prompts of one length, after padding, that are prefilled as one array",
        "measured: docs/log.md",
        _LAUNCHES,
    ),
    "together_tokens": Setting("prompt tokens of that array", "assumed, as on CUDA", _SET),
    "pad_to": Setting(
        "chunks of prompts are padded to multiples of so many tokens, long ones to coarser lengths; 0: never",
        "padding takes as long as tokens do",
        "measured: docs/benchmarks.md, settings that were measured",
    ),
    "encode_ahead": Setting("rows that are encoded before they have a place", "assumed", "assumed", "assumed"),
    "grid": Setting(
        "prompt tokens between two cuts of reproducible answers", "as max_chunk", "as smallest_chunk, measured once"
    ),
    "call_tokens": Setting(
        "prompt tokens up to which a short prompt of reproducible answers shares a call, beside others of its length or idle "
        "ones; 0: each alone",
        "idle prompts take as long as others do",
        "measured: a forward of 64 tokens takes as long as one of 1,024 (docs/benchmarks.md)",
        "assumed, as on a CPU",
    ),
    "call_patches": Setting(
        "patches up to which a small picture of reproducible answers shares a call, in the same way",
        "idle pictures take as long as others do",
        "assumed: about as many as keep the device busy while the next call is launched",
        "assumed, as on a CPU",
    ),
}


@dataclass(frozen=True)
class Chosen:
    """The policy of one batcher: its device's, with what was found by ``vlm-batch bench --tune``, and what its caller said."""

    kind: Device
    tuned: Mapping[str, Any]
    said: Mapping[str, Any]

    @property
    def policy(self) -> Policy:
        """Raises ValueError for a setting that is none, or out of range."""
        settings = {**self.tuned, **self.said}
        placement = settings.get("placement", POLICIES[self.kind].placement)
        if placement not in PLACEMENTS:
            raise ValueError(f"placement is {shown(placement)}; it must be one of {', '.join(PLACEMENTS)}")
        policy = policy_for(placement, self.kind)
        for first, most in (("first_rows", "most_rows"), ("most_rows", "first_rows")):
            if first in settings and most not in settings:  # one of them moves the other along
                other = (max if first == "first_rows" else min)(settings[first], vars(policy)[most])
                settings[most] = other
        return policy.with_settings(settings)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Every setting by name: its value, and where that comes from."""
        found = {}
        for name, value in vars(self.policy).items():
            source = f"the table for {self.kind.value}: {SETTINGS[name].source(self.kind)}"
            if name in self.said:
                source = "said: VLMBatcher(policy=)"
            elif name in self.tuned:
                source = "measured here: vlm-batch bench --tune"
            found[name] = {"value": value, "source": source}
        return found


def chosen_of(given: Mapping[str, Any] | str, kind: Device, tuned: Mapping[str, Any]) -> Chosen:
    """A batcher's policy from what its caller said: ``tuned``, ``device``, or settings by name. Raises ValueError."""
    said = check_choice(given)
    return Chosen(kind, tuned if given == TUNED else {}, said)


def check_policy(given: Any) -> Mapping[str, Any] | str:
    """A caller's choice of a policy, copied. Raises ValueError for anything else."""
    said = check_choice(given)
    return given if isinstance(given, str) else said


def check_choice(given: Any) -> Mapping[str, Any]:
    """The settings in what a caller said of a policy. Raises ValueError for what is none."""
    if isinstance(given, str) and given in (TUNED, DEVICE):
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"policy is {shown(given)}; it must be {TUNED!r}, {DEVICE!r} or a mapping of settings")
    unknown = [str(name) for name in given if name not in SETTINGS]
    if unknown:
        raise ValueError(f"policy has no {', '.join(sorted(unknown))}; it has {', '.join(SETTINGS)}")
    return dict(given)


def policy_for(placement: str, kind: Device) -> Policy:
    """A device's policy, or, for a placement that is another's, that of the kind of device which it is right for."""
    policy = POLICIES[kind]
    if policy.placement == placement:
        return policy
    other = POLICIES[Device.CPU if placement == "rows" else Device.CUDA]
    return replace(other, idle_budget=policy.idle_budget)  # as fast as the device is
