"""Experts' products of a prompt on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from vlm_batch.adapters.hooks import current
from vlm_batch.adapters.packed import multiply
from vlm_batch.adapters.powers import takes_powers

#: Rows an expert, on average, from which its product is one of its own: gather_mm reads an expert's weights for each row.
ROWS_APART = 2


class ByExpert:
    """Mixin of experts' layers: a prompt's rows of one expert are one product."""

    def __call__(
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> Any:
        """Map (N, 1, D_in) with rising experts (N,) to (N, 1, D_out)."""
        layer: Any = self
        is_in_order = sorted_indices and x.shape[-2] == 1
        if is_in_order and multiplies_apart(x, indices, layer.num_experts):
            return by_expert(layer, x, indices)
        theirs: Any = super()
        return theirs.__call__(x, indices, sorted_indices=sorted_indices)


class ExpertsApart(ByExpert, SwitchLinear):
    """Multiplies an expert's prompt rows in one product; on a CPU, mlx-vlm multiplies row by row."""

    def product(self, rows: mx.array, expert: int) -> mx.array:
        return rows @ self["weight"][expert].T


class FewBitsApart(ByExpert, QuantizedSwitchLinear):
    """The same of weights in few bits, which are widened for ``packed.FEW_ROWS`` rows and more."""

    def product(self, rows: mx.array, expert: int) -> mx.array:
        found = multiply(rows, self, expert)
        if found is None:
            biases = None if self.biases is None else self.biases[expert]
            how = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
            found = mx.quantized_matmul(
                rows,
                self["weight"][expert],
                self["scales"][expert],
                biases,
                transpose=True,
                **how,
            )
        return found


def by_expert(layer: Any, x: mx.array, indices: mx.array) -> mx.array:
    rows = x.reshape(-1, x.shape[-1])
    ends = np.searchsorted(
        np.array(indices).reshape(-1), np.arange(layer.num_experts + 1)
    ).tolist()
    parts: list[mx.array] = []
    for expert, (first, end) in enumerate(pairwise(ends)):
        if first < end:
            # One after another: what a product needs beside its rows is made when these are there.
            (own,) = mx.depends([rows[first:end]], parts[-1:])
            parts.append(layer.product(own, expert))
    found = mx.concatenate(parts).reshape(*x.shape[:-1], -1)
    return (
        found + mx.expand_dims(layer["bias"][indices], -2) if "bias" in layer else found
    )


def multiplies_apart(x: mx.array, indices: mx.array, num_experts: int) -> bool:
    """Whether a prompt's experts may be read back, and have several rows on average."""
    call = current()
    # a decode step may be a graph
    is_prompt = call.positions is None and not call.is_fixed
    return is_prompt and indices.size >= ROWS_APART * num_experts and takes_powers(x)


#: Patches of every family.
EXPERTS: Mapping[type, type] = {
    SwitchLinear: ExpertsApart,
    QuantizedSwitchLinear: FewBitsApart,
}
