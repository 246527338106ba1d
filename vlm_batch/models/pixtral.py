"""Pixtral: pictures of any size before Mistral's decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingSizedTower, patching, under
from vlm_batch.adapters.placing import Merge
from vlm_batch.adapters.windows import (
    RotationFactors,
    Run,
    attend_runs,
    rotate,
    turn_by,
)
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Graphs
from vlm_batch.registry import ModelSpec, register


class PictureAttention:
    """Attends within pictures."""

    num_heads: int
    scale: float
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        position_embeddings: RotationFactors,
        mask: Sequence[Run],
    ) -> mx.array:
        """(1, N, D) -> (1, N, D). ``mask``: runs of pictures."""
        patches = queries[0]
        q, k, v = (
            layer(patches).reshape(len(patches), self.num_heads, -1)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(mx.stack([q, k]), position_embeddings)
        found: mx.array = self.o_proj(attend_runs(q, k, v, mask, self.scale))
        return found[None]


class SizedVision:
    """Takes pictures of several sizes. mlx-vlm's masks all in one attention, and waits for its mask (pixtral/vision.py:34)."""

    config: Any
    patch_size: int
    patch_conv: Any
    ln_pre: Any
    transformer: Any
    patch_positional_embedding: Any

    def __call__(
        self,
        x: Any,
        output_hidden_states: bool | None = None,
        image_sizes: mx.array | None = None,
    ) -> tuple[mx.array, list[mx.array] | None]:
        """Encode pictures.

        Args:
            x: pictures (P, H, W, C), or a list of such arrays of different sizes.
            image_sizes: rows and columns (P, 2); the rest of a picture is padding.

        Returns:
            States (1, N, D) of all patches, and those of every layer if asked for.

        Raises:
            InvalidPrompt: A size is missing, or larger than its picture or than the model's rotations.
        """
        pictures = [
            picture
            for several in (x if isinstance(x, list) else [x])
            for picture in several
        ]
        given = (
            [] if image_sizes is None else np.array(image_sizes).astype(int).tolist()
        )
        if len(given) != len(pictures):
            raise InvalidPrompt(
                f"{len(pictures)} pictures have {len(given)} image_sizes"
            )
        for (high, wide), picture in zip(given, pictures, strict=True):
            if not (0 < high <= picture.shape[0] and 0 < wide <= picture.shape[1]):
                raise InvalidPrompt(
                    f"image_sizes say {high} x {wide} of a picture of {picture.shape[0]} x {picture.shape[1]}"
                )
        side, weight = self.patch_size, self.patch_conv.weight  # (D, side, side, C)
        sizes = [(high // side, wide // side) for high, wide in given]
        patches = mx.concatenate(
            [
                _patches(picture, *size, side)
                for picture, size in zip(pictures, sizes, strict=True)
            ]
        )
        longest = self.config.image_size // side
        positions = [
            np.add.outer(np.arange(high) * longest, np.arange(wide)).ravel()
            for high, wide in sizes
        ]
        # (N, D), the same half twice
        table = self.patch_positional_embedding.inv_freq
        for high, wide in sizes:
            # mlx-vlm reads what lies behind the table
            if (high - 1) * longest + wide > len(table):
                raise InvalidPrompt(
                    f"a picture of {high} x {wide} patches is larger than {longest} x {longest}"
                )
        turn = turn_by(
            table[mx.array(np.concatenate(positions)), : table.shape[1] // 2]
        )
        runs = tuple(
            (len(list(same)), length)
            for length, same in groupby(high * wide for high, wide in sizes)
        )
        states = [
            self.ln_pre((patches.astype(weight.dtype) @ weight.flatten(1).T)[None])
        ]
        for layer in self.transformer.layers:
            states.append(layer(states[-1], position_embeddings=turn, mask=runs))
        return states[-1], states if output_hidden_states else None


def _patches(picture: mx.array, high: int, wide: int, side: int) -> mx.array:
    """(H, W, C) -> (high * wide, side * side * C)."""
    grid = picture[: high * side, : wide * side].reshape(high, side, wide, side, -1)
    return grid.swapaxes(1, 2).reshape(high * wide, -1)


@register(ModelSpec(family="pixtral", model_types=("pixtral",)))
class Pixtral(Adapter):
    graphs = Graphs.IF_ASKED
    merge = Merge("merge_input_ids_with_image_features")
    tower_class = RememberingSizedTower
    #: The tower's classes, for ``patching``.
    sized: ClassVar[Any] = (
        ("pixtral.vision.Attention", under(PictureAttention)),
        ("pixtral.vision.PixtralVisionModel", under(SizedVision)),
    )
    patches = patching(*sized)
    input_keys = Adapter.input_keys | {"image_sizes"}

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        """Count merged patches; mlx-vlm drops pictures without placeholders."""
        if "image_sizes" not in extra:
            return None
        unit = self.config.vision_config.patch_size * getattr(
            self.config, "spatial_merge_size", 1
        )
        sizes = np.array(extra["image_sizes"]).tolist()
        return sum((high // unit) * (wide // unit) for high, wide in sizes)

    def model_image_sizes(
        self, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        return (
            tuple(
                (int(wide), int(high)) for high, wide in extra["image_sizes"].tolist()
            )
            if extra
            else ()
        )
