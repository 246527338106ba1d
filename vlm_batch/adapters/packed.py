"""Attention of towers that take the patches of several pictures as one sequence: each picture within itself.

mlx-vlm cuts the sequence at boundaries that it reads back from the device three times in every block, or masks pictures apart
in one attention over all of them; it also takes cosines and sines anew for queries and keys of every block. Here boundaries
are read and the rotation is made once for all blocks, and pictures of one size that follow each other share a call.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.windows import Run, attend_runs, rotate

#: What was made of an array last, by what for; an array is known by itself, for as long as it is there.
_last: dict[Callable[[mx.array], Any], tuple[weakref.ref[mx.array], Any]] = {}


def attend_pictures(parent: type[nn.Module], project: str = "qkv", output: str = "proj") -> type[nn.Module]:
    """The same attention of patches (N, D) of several pictures, whose boundaries are 0, ..., N, turned by angles (N, D / 2).

    ``project`` and ``output`` name the module's projections.
    """

    class PictureAttention(parent):  # type: ignore[misc,valid-type]
        def __call__(self, x: mx.array, cu_seqlens: mx.array, rotary_pos_emb: mx.array) -> mx.array:
            """(N, D) -> (N, D)"""
            split = self[project](x).reshape(x.shape[0], 3, self.num_heads, -1)
            cos, sin = once(rotary_pos_emb, _turned)
            queries, keys = rotate(split[:, :2].swapaxes(0, 1), cos, sin)
            return self[output](attend_runs(queries, keys, split[:, 2], once(cu_seqlens, runs_between), self.scale))

    return PictureAttention


def moon_attention(parent: type[nn.Module]) -> type[nn.Module]:
    """MoonViT's, whose files turn queries and keys by ``apply_rope``; it goes without the mask that the encoder makes."""
    turn = vars(sys.modules[parent.__module__])["apply_rope"]

    class MoonAttention(parent):  # type: ignore[misc,valid-type]
        def __call__(
            self, x: mx.array, cu_seqlens: mx.array, rotary_pos_emb: mx.array, attention_mask: mx.array | None = None
        ) -> mx.array:
            """(N, D) -> (N, D)"""
            split = self.wqkv(x).reshape(x.shape[0], 3, self.num_heads, -1)
            queries, keys = turn(split[:, 0], split[:, 1], rotary_pos_emb)
            return self.wo(attend_runs(queries, keys, split[:, 2], once(cu_seqlens, runs_between), self.scale))

    return MoonAttention


def once(array: mx.array, make: Callable[[mx.array], Any]) -> Any:
    """What ``make`` makes of an array, made once while one array is asked for again and again."""
    last = _last.get(make)
    if last is not None and last[0]() is array:
        return last[1]
    made = make(array)
    _last[make] = (weakref.ref(array), made)
    return made


def runs_between(boundaries: mx.array) -> tuple[Run, ...]:
    """Runs of pictures of one size, of boundaries 0, ..., N; those without a patch are left out."""
    lengths = np.diff(np.array(boundaries)).tolist()
    return tuple((len(list(group)), size) for size, group in groupby(lengths) if size)


def _turned(angles: mx.array) -> tuple[mx.array, mx.array]:
    """Cosines and sines (N, 1, D) of angles (N, D / 2), for both halves."""
    both = mx.concatenate([angles, angles], axis=-1)[:, None].astype(mx.float32)
    return mx.cos(both), mx.sin(both)
