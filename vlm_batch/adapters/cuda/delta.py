"""The gated delta rule on CUDA (``delta.cu``), for mlx-vlm's layers.

mlx-vlm has kernels for Metal alone: on CUDA a prompt takes dozens of launches for each 64 positions of a layer
(``gated_delta_chunked``) or for each one (``gated_delta_ops``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.cuda.launches import Launch, Run, is_right, kernel, on_device
from vlm_batch.adapters.hooks import Hook, hook, install_hooks, is_hook
from vlm_batch.runtime.device import Device, device

#: A thread holds a row of the state in registers, and a block all rows.
MOST_KEY, MOST_VALUE = 128, 256
#: The largest allowed error of the first call, in the values' unit.
TOLERANCE = 0.02
#: mlx-vlm's functions of the rule, beside the ``gated_delta_update`` that its layers call; the last returns states, too.
NAMES = ("gated_delta_ops", "gated_delta_chunked", "_gated_delta_with_states_ops")
_INPUTS = ("queries", "keys", "values", "decays", "rates", "states", "mask", "most")


def _view(name: str, kind: str, *axes: int | None) -> str:
    strides = ", ".join(
        "0" if axis is None else f"{name}_strides[{axis}]" for axis in axes
    )
    return f"const delta::View<{kind}> of_{name} = {{{name}, {strides}}};"


_BODY = f"""
  {_view("queries", "T", 0, 1, 2, 3)}
  {_view("keys", "T", 0, 1, 2, 3)}
  {_view("values", "T", 0, 1, 2, 3)}
  const delta::View<float> of_decays = {{
      decays, decays_strides[0], decays_strides[1], decays_strides[2], BY_NUMBER ? decays_strides[3] : 0}};
  {_view("rates", "float", 0, 1, 2, None)}
  {_view("states", "float", 0, 1, 2, 3)}
  {_view("mask", "bool", 0, 1, None, None)}
  delta::run<T, DK, DV, BY_NUMBER>(
      of_queries, of_keys, of_values, of_decays, of_rates, of_states, of_mask, queries_shape[1], values_shape[2],
      values_shape[2] / keys_shape[2], most[0], out, last, kept);
"""


class Rule(NamedTuple):
    """The arrays of a call.

    Attributes:
        queries: (B, T, Hk, Dk), as are ``keys``.
        values: (B, T, Hv, Dv).
        decays: (B, T, Hv) or (B, T, Hv, Dk).
        rates: (B, T, Hv).
        states: (B, Hv, Dv, Dk), float32.
        mask: (B, T), bool; None hides nothing.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    decays: mx.array
    rates: mx.array
    states: mx.array
    mask: mx.array | None


def served(rule: Rule) -> bool:
    """Whether the kernel is written for a call's arrays."""
    *_, heads, depth = rule.keys.shape
    *_, value_heads, wide = rule.values.shape
    mask = rule.mask
    if mask is not None and mask.shape != rule.keys.shape[:2]:
        return False
    needs = (
        depth <= MOST_KEY,
        wide <= MOST_VALUE,
        value_heads % heads == 0,
        rule.queries.dtype == rule.keys.dtype == rule.values.dtype,
        rule.states.dtype == mx.float32,
        mask is None or mask.dtype == mx.bool_,
    )
    return all(needs)


def run_rule(rule: Rule, kept: int, run: Run) -> list[mx.array]:
    """Return answers (B, T, Hv, Dv), last states, and those after ``kept`` positions (B, kept, Hv, Dv, Dk) if any."""
    rows, _, heads, wide = rule.values.shape
    depth, dtype = rule.keys.shape[-1], rule.queries.dtype
    template = {"T": dtype, "DK": depth, "DV": wide, "BY_NUMBER": rule.decays.ndim == 4}
    launch = Launch(
        kernel("delta", "rule", _INPUTS, ("out", "last", "kept"), _BODY),
        tuple(template.items()),
        (wide, heads, rows),
        (wide, 1, 1),
        (
            rule.values.shape,
            rule.states.shape,
            (rows, kept, heads, wide, depth) if kept else (1,),
        ),
        (dtype, mx.float32, mx.float32),
    )
    decays, rates = rule.decays.astype(mx.float32), rule.rates.astype(mx.float32)
    mask = (
        mx.broadcast_to(mx.array(True), rule.keys.shape[:2])
        if rule.mask is None
        else rule.mask
    )
    found = run(
        launch,
        [*rule[:3], decays, rates, rule.states, mask, mx.array([kept], mx.int32)],
    )
    return found if kept else found[:2]


def hook_rule(files: Iterable[str], family: str) -> None:
    """Hook mlx-vlm's functions of the rule for the layers in imported files."""
    for home in {
        one.__module__
        for file in files
        if (one := vars(sys.modules[file]).get("gated_delta_update"))
    }:
        install_hooks([home], hooks_of(home), family=family)


def hooks_of(home: str) -> dict[str, Hook]:
    bound = {
        name: vars(sys.modules[home])[name]
        for name in NAMES
        if name in vars(sys.modules[home])
    }
    return {
        name: _hook_of(one.__wrapped__ if is_hook(one) else one)
        for name, one in bound.items()
    }


@lru_cache(maxsize=16)
def _hook_of(theirs: Callable[..., Any]) -> Hook:
    has_states = theirs.__name__ == NAMES[-1]

    def ours(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        state_steps: int | None = None,
    ) -> Any:
        kept = k.shape[1] if has_states and state_steps is None else state_steps
        if device() is Device.CUDA and state is not None and kept != 0:
            rule = Rule(q, k, v, g, beta, state, mask)
            if served(rule) and _is_right(
                k.shape[-1], v.shape[-1], q.dtype, g.ndim == 4
            ):
                return tuple(run_rule(rule, kept or 0, on_device))
        given = (q, k, v, g, beta, state, mask)
        return theirs(*given) if state_steps is None else theirs(*given, state_steps)

    return hook(theirs, ours)


@lru_cache(maxsize=16)
def _is_right(depth: int, wide: int, dtype: mx.Dtype, by_number: bool) -> bool:
    rule = example(depth, wide, dtype, by_number)
    return is_right(
        lambda: farthest(rule, on_device),
        TOLERANCE,
        "recurrent layers take mlx-vlm's operations: their kernel",
    )


def example(
    depth: int,
    wide: int,
    dtype: mx.Dtype,
    by_number: bool,
    positions: int = 5,
    is_masked: bool = False,
) -> Rule:
    """Return random arrays of two rows, and of two heads of values for one of keys."""
    draw = [mx.random.key(number) for number in range(6)]
    shape = (2, positions)
    queries, keys = (
        mx.random.normal((*shape, 2, depth), key=draw[i]).astype(dtype) for i in (0, 1)
    )
    values = mx.random.normal((*shape, 4, wide), key=draw[2]).astype(dtype)
    decays = mx.random.uniform(
        0.8, 1, (*shape, 4, depth) if by_number else (*shape, 4), key=draw[3]
    )
    rates = mx.random.uniform(0, 1, (*shape, 4), key=draw[4])
    states = mx.random.normal((2, 4, wide, depth), key=draw[5])
    mask = (
        mx.arange(positions)[None] < mx.array([[positions], [positions - 2]])
        if is_masked
        else None
    )
    return Rule(
        queries / depth, keys * depth**-0.5, values, decays, rates, states, mask
    )


def farthest(rule: Rule, run: Run, kept: int = 0) -> float:
    """Return the largest difference to ``plain``, where the mask hides nothing; NaN if any is."""
    found = [np.array(one.astype(mx.float32)) for one in run_rule(rule, kept, run)]
    if rule.mask is not None:
        found[0][~np.array(rule.mask)] = 0
    errors = [
        np.abs(one - other).max()
        for one, other in zip(found, plain(rule, kept), strict=True)
    ]
    return float(np.max(errors))


def plain(rule: Rule, kept: int = 0) -> list[np.ndarray]:
    """Return what ``run_rule`` returns; mlx-vlm's operations take MLX ten seconds to build."""
    queries, keys, values, decays, rates, state = (
        np.array(one.astype(mx.float32)) for one in rule[:6]
    )
    share, answers, states = values.shape[2] // keys.shape[2], np.zeros_like(values), []
    for t in range(values.shape[1]):
        # (B, Hv, Dk)
        query, key = (np.repeat(one[:, t], share, axis=1) for one in (queries, keys))
        decay = decays[:, t].reshape(*decays.shape[:1], decays.shape[2], 1, -1)
        new = state * decay
        change = (values[:, t] - (new @ key[..., None])[..., 0]) * rates[:, t, :, None]
        new = new + change[..., None] * key[..., None, :]
        seen = (
            np.ones(len(new), bool) if rule.mask is None else np.array(rule.mask)[:, t]
        )
        state = np.where(seen[:, None, None, None], new, state)
        answers[:, t] = np.where(
            seen[:, None, None], (new @ query[..., None])[..., 0], 0
        )
        states.append(state)
    return [answers, state, *([np.stack(states[:kept], axis=1)] if kept else [])]
