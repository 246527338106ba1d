"""Settings of the engine.

Each is declared once, with meaning, check, and value by kind of device. Settings change speed; answers stay the same up
to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from vlm_batch.checks import demand, is_real, seconds_option, whole_option
from vlm_batch.errors import shown
from vlm_batch.records import Call
from vlm_batch.runtime.device import Device, device

PLACEMENTS = ("rows", "slab")
#: Ways in which a decode step reads quantised keys and values.
PACKED, UNPACKED, KERNEL = "packed", "unpacked", "kernel"

_STATE = "measured: docs/decode-state.md"
_SET = "measured: docs/log.md, settings that were measured"
_LAUNCHES = "measured: docs/log.md, where the time went"
_ROWS = "measured: docs/log.md, rows by themselves"
_TARGETS = "measured: docs/log.md, missed targets on a CPU"
_FORWARD = (
    "measured: a forward of 64 tokens takes as long as one of 1,024 (docs/log.md)"
)
_PROMISE = "the same everywhere"


@dataclass(frozen=True)
class Setting:
    """A setting's meaning, and its (value, source) by kind of device."""

    meaning: str
    values: Mapping[Device, tuple[Any, str]]


Check = Callable[[str, Any], Any]


def _word(name: str, value: Any, *, words: tuple[str, ...]) -> Any:
    demand(value in words, ValueError, name, value, f"one of {', '.join(words)}")
    return value


def _draft(name: str, value: Any) -> str:
    is_right = isinstance(value, str | Path) and bool(str(value).strip())
    right = "auto, off, or the folder or hub id of a model that drafts"
    demand(is_right, ValueError, name, value, right)
    return str(value)


def _seconds(name: str, value: Any) -> Any:
    is_right = is_real(value) and value >= 0
    demand(is_right, ValueError, name, value, "a number of seconds of at least 0")
    return value


def _share(name: str, value: Any) -> float:
    is_right = is_real(value) and 0 <= value < 1
    demand(is_right, ValueError, name, value, "a number of at least 0 and below 1")
    return float(value)


def _grid(name: str, value: Any) -> int:
    number = int(whole_option(name, value, least=1))
    right = "a multiple of 256, in which single-row caches grow"
    demand(number % 256 == 0, ValueError, name, number, right)
    return number


def _yes_or_no(name: str, value: Any) -> Any:
    demand(isinstance(value, bool), ValueError, name, value, "True or False")
    return value


_AT_LEAST_0 = partial(whole_option, least=0)
_AT_LEAST_1 = partial(whole_option, least=1)
_OR_NONE = partial(whole_option, least=1, or_none=True)


def _setting(
    meaning: str,
    cpu: tuple[Any, str],
    cuda: tuple[Any, str] | None = None,
    metal: tuple[Any, str] | None = None,
    *,
    check: Check = _AT_LEAST_1,
) -> Any:
    """Declare a field of ``Policy``. Default of ``cuda``: a CPU's value; of ``metal``: CUDA's."""
    if cuda is not None and metal is None:
        metal = (cuda[0], "assumed, as on CUDA")
    values = {Device.CPU: cpu, Device.CUDA: cuda or cpu, Device.METAL: metal or cpu}
    return field(
        default=cpu[0], metadata={"setting": Setting(meaning, values), "check": check}
    )


def _bound() -> Any:
    """Declare a field set by another option."""
    return field(default=None, metadata={"check": _OR_NONE})


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Settings of one engine; the defaults are a CPU's.

    Args:
        max_rows: most live rows; None adapts the number from ``first_rows`` up to ``most_rows``.
        max_bytes: bytes of keys and values of live rows.
        max_prompt_tokens: most positions of a prompt.

    Raises:
        ValueError: a setting is out of range.
    """

    placement: str = _setting(
        "layout of the live rows' keys and values: a cache a row, or one array (slab)",
        ("rows", _STATE),
        ("slab", _STATE),
        check=partial(_word, words=PLACEMENTS),
    )
    few_bits: str = _setting(
        "decode steps over slabs in few bits (kv_bits): packed, by MLX's products; unpacked; or by a kernel for CUDA",
        (PACKED, "measured: docs/benchmarks.md, caches"),
        (KERNEL, "measured: docs/benchmarks.md, caches"),
        (PACKED, "assumed, as on a CPU"),
        check=partial(_word, words=(PACKED, UNPACKED, KERNEL)),
    )
    first_rows: int = _setting(
        "rows that may live at first, where max_rows leaves it open",
        (16, _ROWS),
        (64, _ROWS),
        (8, "assumed"),
    )
    most_rows: int = _setting(
        "rows that may live at most, where max_rows leaves it open",
        (32, _ROWS),
        (64, "assumed: more were not measured"),
        (32, "assumed"),
    )
    max_chunk: int = _setting(
        "prompt tokens of one forward", (256, _SET), (2048, _LAUNCHES)
    )
    smallest_chunk: int = _setting(
        "prompt tokens of a chunk beside decoding rows, at least",
        (256, _SET),
        (1024, _FORWARD),
    )
    idle_budget: int = _setting(
        "prompt tokens of a step in which nothing decodes",
        (2048, _TARGETS),
        (16384, "measured: docs/log.md, captions on a GPU"),
        (8192, "assumed"),
    )
    prefill_budget: int | None = _setting(
        "prompt tokens of a step beside decoding rows; None: as many as fit into token_gap",
        (None, _PROMISE),
        check=_OR_NONE,
    )
    token_gap: float = _setting(
        "seconds between two tokens of a decoding row, about",
        (0.1, _PROMISE),
        check=seconds_option,
    )
    stretch: int = _setting(
        "the longest step, in times of token_gap, while a prompt has waited long",
        (2, _TARGETS),
        (
            1,
            "assumed: a longer step has fewer launches to save than a CPU has steps of few rows",
        ),
    )
    slack: int = _setting(
        "tokens by which a chunk may be longer if that ends its prompt; 0 beside a prefill_budget",
        (0, "no gain there"),
        (512, "assumed"),
        check=_AT_LEAST_0,
    )
    encode_together: int = _setting(
        "requests whose pictures go through the encoder in one call",
        (1, "measured: no gain"),
        (16, _LAUNCHES),
    )
    beside_decode: int = _setting(
        "times fewer pictures in that call while rows decode",
        (4, "takes no part: one picture a call"),
        (4, _SET),
    )
    encode_seconds: float = _setting(
        "seconds of a step that go to encoding beside decoding rows, one picture at least",
        (0.05, _TARGETS),
        (0.0, "takes no part: launches return before the work is done"),
        check=_seconds,
    )
    most_patches: int = _setting(
        "patches of pictures in one call",
        *((Call.most_patches, source) for source in ("assumed", _SET, "assumed")),
    )
    prefill_together: int = _setting(
        "whole prompts of one length, after padding, that are prefilled as one array",
        (8, "measured: docs/log.md"),
        (32, _LAUNCHES),
    )
    together_tokens: int = _setting(
        "prompt tokens of that array", (4096, "assumed, as on CUDA"), (4096, _SET)
    )
    pad_to: int = _setting(
        "chunks of prompts are padded to multiples of so many tokens, long ones to coarser lengths; 0: never",
        (0, "padding takes as long as tokens do"),
        (64, _SET),
        check=_AT_LEAST_0,
    )
    short_rows: int = _setting(
        "in the layout rows: tokens up to which rows of like length share one array; 0: never",
        (1024, "assumed; up to 240 measured: docs/log.md, settings that were measured"),
        (0, "takes no part: all rows do"),
        check=_AT_LEAST_0,
    )
    encode_ahead: int = _setting(
        "rows that are encoded before they have a place",
        (2, "assumed"),
        check=_AT_LEAST_0,
    )
    look_ahead: int = _setting(
        "requests whose pictures are read while they wait, beside a batch's worth",
        (16, _PROMISE),
    )
    look_ahead_bytes: int = _setting(
        "bytes of pictures that are prepared ahead; one that is larger by itself goes alone",
        (2**30, _PROMISE),
    )
    least_free: float = _setting(
        "share of memory that is to stay free, 4 GB at most: where less is left, fewer rows live; 0 does not look",
        (0.05, "assumed"),
        check=_share,
    )
    ageing_seconds: float = _setting(
        "seconds of waiting that lift a row by one priority",
        (5.0, _PROMISE),
        check=seconds_option,
    )
    draft: str = _setting(
        "drafted tokens: auto (where measured to be faster), off, or a folder or hub id of a model that drafts, too",
        ("auto", "decided while it runs: docs/speculation.md"),
        ("off", "exact there, not shown to be faster: docs/speculation.md"),
        ("auto", "assumed, as on a CPU"),
        check=_draft,
    )
    grid: int = _setting(
        "prompt tokens between two cuts of reproducible answers",
        (256, "as max_chunk"),
        (1024, "as smallest_chunk, measured once"),
        check=_grid,
    )
    call_tokens: int = _setting(
        "prompt tokens up to which prompts of reproducible answers share a call; 0: each alone",
        (0, "idle prompts take as long as others do"),
        (640, _FORWARD),
        (0, "assumed, as on a CPU"),
        check=_AT_LEAST_0,
    )
    call_patches: int = _setting(
        "patches up to which pictures of reproducible answers share a call",
        (0, "idle pictures take as long as others do"),
        (
            2048,
            "assumed: about as many as keep the device busy while the next call is launched",
        ),
        (0, "assumed, as on a CPU"),
        check=_AT_LEAST_0,
    )
    wide_products: bool = _setting(
        "whether layers of one input are one product",
        (False, "measured: 0.97 to 1.07 of a step's time (docs/log.md)"),
        (
            True,
            "measured: 0.82 to 0.93 of a compiled step's time, and no more memory (docs/benchmarks.md)",
        ),
        (False, "not measured"),
        check=_yes_or_no,
    )
    max_rows: int | None = _bound()
    max_bytes: int | None = _bound()
    max_prompt_tokens: int | None = _bound()

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(
                self, one.name, one.metadata["check"](one.name, vars(self)[one.name])
            )
        if self.first_rows > self.most_rows:
            raise ValueError(
                f"first_rows is {self.first_rows}, above most_rows, which is {self.most_rows}"
            )

    @property
    def least_cut(self) -> int:
        """Tokens of a chunk that does not end its prompt, behind others: with padding, a small one costs a whole forward."""
        return self.smallest_chunk if self.pad_to else 0


#: Settings with a value for each device, by name.
SETTINGS: Mapping[str, Setting] = {
    one.name: one.metadata["setting"]
    for one in fields(Policy)
    if "setting" in one.metadata
}
_CHECKS: Mapping[str, Check] = {
    one.name: one.metadata["check"] for one in fields(Policy)
}
POLICIES: Mapping[Device, Policy] = {
    kind: Policy(
        **{name: setting.values[kind][0] for name, setting in SETTINGS.items()}
    )
    for kind in Device
}


def policy_of(said: Mapping[str, Any], kind: Device | None = None) -> Policy:
    """Return a device's settings, some replaced by ``said``. Raises ValueError.

    Another device's placement brings its other settings, except ``idle_budget``, ``draft`` and ``wide_products``.
    """
    policy = _placed(POLICIES[kind or device()], said.get("placement"))
    checked = {name: _CHECKS[name](name, value) for name, value in said.items()}
    moved: dict[str, Any] = {}
    if "most_rows" in said:
        moved["first_rows"] = min(policy.first_rows, checked["most_rows"])
    elif "first_rows" in said:
        moved["most_rows"] = max(policy.most_rows, checked["first_rows"])
    if checked.get("prefill_budget") is not None:
        moved["slack"] = 0  # a budget in tokens is exact
    return replace(policy, **{**moved, **checked})


def _placed(own: Policy, placement: str | None) -> Policy:
    """Return a device's settings with another placement."""
    if placement is None or placement == own.placement:
        return own
    other = POLICIES[Device.CPU if placement == "rows" else Device.CUDA]
    return replace(
        other,
        idle_budget=own.idle_budget,
        draft=own.draft,
        wide_products=own.wide_products,
    )


def check_policy(given: Any) -> dict[str, Any]:
    """Return a copy of a caller's settings. Raises ValueError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"policy is {shown(given)}; it must be a mapping of settings, or None"
        )
    unknown = [str(name) for name in given if name not in SETTINGS]
    if unknown:
        raise ValueError(
            f"policy has no {', '.join(sorted(unknown))}; it has {', '.join(SETTINGS)}"
        )
    return dict(given)


def describe_policy(
    policy: Policy, said: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return each setting's value and source."""
    kind = device()
    described: dict[str, dict[str, Any]] = {}
    for name, setting in SETTINGS.items():
        source = f"the table for {kind.value}: {setting.values[kind][1]}"
        if name in said:
            source = "said: VLMBatcher(policy=)"
        described[name] = {"value": getattr(policy, name), "source": source}
    return described
