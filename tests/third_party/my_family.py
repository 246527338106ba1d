"""A family in one file: the adapter of the models of ``my_vl_model``, which mlx-vlm does not know."""

from __future__ import annotations

from vlm_batch import ModelSpec, register
from vlm_batch.adapters.grids import GridAdapter


@register(ModelSpec(family="my_vl", model_types=("my_vl",), package="my_vl_model"))
class MyVL(GridAdapter):
    """A plain decoder; pictures come with grids of patches, and positions count tokens."""
