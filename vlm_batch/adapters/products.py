"""The products of a model with its weights, one of each shape, by which a device's arithmetic is tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from vlm_batch.adapters.modules import clone_modules

#: Tables of tokens, which are heads, too, where they are tied.
TABLES = (nn.Embedding, nn.QuantizedEmbedding)
#: Columns of a block, of which the second half repeats the first: also in groups of few bits both get the same numbers.
BLOCK = 32
#: What is left of a number of outputs by whole tiles stays as it is.
EDGE = 64
#: Outputs whose weights differ, so that as many sums are compared: one alone is often rounded the same way in two orders.
DIFFERENT = 16
#: Rows that a decode step has at most on devices where products are held to numbers of rows: the largest that is tried.
MOST_ROWS = 64


@dataclass(frozen=True)
class Product:
    """A layer of the model's, of its shape and type: ``call`` takes rows (R, 1, width) of ``dtype``.

    Its weights are made up: kernels are chosen by shapes and types, and these weights let the order of a sum be seen. Columns
    ``BLOCK / 2`` apart are equal, and so are those ``far`` apart, so that large numbers of opposite signs in a row cancel, and
    what was rounded while they were there stays. Near ones show the order within the part of a sum that one thread adds up,
    far ones the order of the parts.
    """

    width: int
    dtype: mx.Dtype
    outputs: int
    layer: Any
    layout: tuple[Any, ...]  # of few bits: group size, bits, mode
    is_head: bool = False  # it answers for a prompt's last position alone

    def __str__(self) -> str:
        parts = [" with a bias"] * ("bias" in self.layer) + [" as a head"] * self.is_head
        return f"products of {self.width} by {self.outputs} in {self.layout or self.dtype}{''.join(parts)}"

    @property
    def far(self) -> int:
        """The columns between two equal halves: whole groups of few bits, or a part of one group; 0 where there is no room."""
        unit = self.layout[0] if self.layout and self.width >= 2 * self.layout[0] else BLOCK
        return self.width // 2 // unit * unit

    @property
    def call(self) -> Callable[[mx.array], mx.array]:
        """The layer with its weights, made anew: they are held by nobody else."""
        columns = np.random.RandomState(self.width).standard_normal((DIFFERENT, self.width))
        blocks = _blocks(columns)
        blocks[:, :, 1] = blocks[:, :, 0]
        columns[:, : blocks[0].size] = blocks.reshape(DIFFERENT, -1)
        columns[:, self.far : 2 * self.far] = columns[:, : self.far]
        weight = mx.array(columns.astype(np.float32)).astype(self.dtype)
        which = mx.arange(self.outputs) % DIFFERENT
        twin: Any = clone_modules(self.layer, PLAIN)
        layout = self.layout
        parts = mx.quantize(weight, group_size=layout[0], bits=layout[1], mode=layout[2]) if layout else (weight,)
        for name, part in zip(("weight", "scales", "biases"), parts, strict=False):
            # Whole in memory: a repeated row is one row there, for which CUDA has no kernel of few bits.
            twin[name] = part[which]
        if "bias" in twin:
            twin["bias"] = twin["bias"][: self.outputs]
        return twin.as_linear if isinstance(twin, TABLES) else twin

    def rows(self, count: int) -> mx.array:
        """Rows that tell one order of summation from another: (count, 1, width), the same ones at each call."""
        return mx.array(_rows(self.width, self.far, count)[:, None]).astype(self.dtype)


def products_of(model: nn.Module, most: int | None = None) -> list[Product]:
    """One product of each shape and type that the model's linear layers and tied heads have.

    ``most`` is how many weights each is tried with, where a kernel does not go by the number of outputs of a large product:
    those beyond are left out. Types that no BLAS multiplies, which MLX does in slow loops of one kind, get an eighth of it.
    """
    found: dict[tuple[Any, ...], Product] = {}
    for path, module in model.named_modules():
        if (product := _product_of(path, module, most)) is not None:
            key = (_plain_class(module), str(product), str(product.dtype))
            found.setdefault(key, product)
    return list(found.values())


def _product_of(path: str, module: Any, most: int | None) -> Product | None:
    if _plain_class(module) not in HELD:
        return None
    is_head = isinstance(module, TABLES) or path.endswith("lm_head")
    is_quantised = isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    layout = (module.group_size, module.bits, module.mode) if is_quantised else ()
    dtype = module.scales.dtype if is_quantised else module.weight.dtype
    outputs, width = module.weight.shape
    width = width * 32 // module.bits if is_quantised else width
    limit = most if most is None or (dtype == mx.float32 and not layout) else most // 8
    if limit is not None and outputs * width > limit:
        outputs = min(outputs, max(limit // width // EDGE, 1) * EDGE + outputs % EDGE)
    return Product(width, dtype, outputs, module, layout, is_head)


def _held(plain: Any, product: str) -> type:
    """A layer whose product, its method of that name, has numbers of rows of its own, where each row is of another place."""

    def held(layer: Any, rows: mx.array) -> mx.array:
        return in_numbers(partial(vars(plain)[product], layer), rows, layer.numbers)

    return type(f"Held{plain.__name__}", (plain,), {product: held, "numbers": ()})


#: The classes of layers that have a product, and those that take their places in layers with numbers of their own.
HELD: dict[type, type] = {
    nn.Linear: _held(nn.Linear, "__call__"),
    nn.QuantizedLinear: _held(nn.QuantizedLinear, "__call__"),
    nn.Embedding: _held(nn.Embedding, "as_linear"),
    nn.QuantizedEmbedding: _held(nn.QuantizedEmbedding, "as_linear"),
}
PLAIN = {held: plain for plain, held in HELD.items()}


def _plain_class(module: nn.Module) -> type:
    return PLAIN.get(type(module), type(module))


def hold_products(model: nn.Module, numbers: Mapping[str, Sequence[int]]) -> None:
    """Let the products of these kinds, by their names, be computed in these numbers of rows alone, and all others as they come.
    ``model`` is a copy that nobody else has."""
    for path, module in model.named_modules():
        if (product := _product_of(path, module, None)) is None:
            continue
        own = tuple(numbers.get(str(product), ()))
        plain = _plain_class(module)
        module.__class__ = HELD[plain] if own else plain
        module.__dict__.pop("numbers", None)
        if own:
            module.__dict__["numbers"] = own


def in_numbers(call: Callable[[mx.array], mx.array], rows: mx.array, numbers: Sequence[int]) -> mx.array:
    """A product (R, ..., outputs) of rows (R, ..., width), computed in ``numbers`` of rows, ascending: repeats of the rows fill
    one up, and more rows than the largest are several. What has more rows than a decode step (``MOST_ROWS``), or more than one
    a place, is a prompt's and is computed as it is."""
    count = rows.shape[0]
    if count in numbers or count > MOST_ROWS or rows.size != count * rows.shape[-1]:
        return call(rows)
    if count > numbers[-1]:
        parts = mx.split(rows, list(range(numbers[-1], count, numbers[-1])))
        return mx.concatenate([in_numbers(call, part, numbers) for part in parts])
    number = next(one for one in numbers if one > count)
    repeats = -(-number // count)
    return call(mx.broadcast_to(rows[None], (repeats, *rows.shape)).flatten(0, 1)[:number])[:count]


@lru_cache(maxsize=8)
def _rows(width: int, far: int, count: int) -> np.ndarray:
    """(count, width) in float32; not to be written to."""
    random = np.random.RandomState(width)
    rows = random.standard_normal((count, width)) / 64
    blocks = _blocks(rows)
    sizes = blocks[:, :, 0, ::2].shape
    large = np.exp2(random.uniform(8, 13, size=sizes)) * random.choice((-1, 1), sizes)
    blocks[:, :, 0, ::2], blocks[:, :, 1, ::2] = large, -large
    far = far // BLOCK  # in blocks: the second of each pair of blocks has its opposite there, not beside it
    for block in range(1, far, 2):
        blocks[:, block, 1, ::2] = random.standard_normal((count, BLOCK // 4)) / 64
        blocks[:, block + far] = random.standard_normal((count, 2, BLOCK // 2)) / 64
        blocks[:, block + far, 0, ::2] = -blocks[:, block, 0, ::2]
    rows[:, : blocks[0].size] = blocks.reshape(count, -1)
    return rows.astype(np.float32)


def _blocks(rows: np.ndarray) -> np.ndarray:
    """(R, blocks, 2, BLOCK / 2): the columns of rows (R, width) that fill whole blocks."""
    return rows[:, : rows.shape[1] // BLOCK * BLOCK].reshape(len(rows), -1, 2, BLOCK // 2)


def shapes_of(model: nn.Module) -> list[list[Any]]:
    """Every weight's path, shape and type."""
    flat: Any = tree_flatten(model.parameters())
    return sorted([str(path), list(array.shape), str(array.dtype)] for path, array in flat)


def size_of(model: nn.Module) -> int:
    """Bytes of all weights."""
    flat: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in flat)
