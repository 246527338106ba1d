"""A model's products by shape, to test a device's arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from vlm_batch.adapters import operations
from vlm_batch.adapters.modules import clone_modules

#: Token embeddings, which can be tied heads.
TABLES = (nn.Embedding, nn.QuantizedEmbedding)
#: Columns per block; its second half repeats the first, also after quantisation.
BLOCK = 32
#: Output tile width: a shortened product keeps the remainder by it.
EDGE = 64
#: Outputs with different weights: one sum alone often rounds equally in two orders.
DIFFERENT = 16
#: The most rows of a decode step for which products are held to row counts.
MOST_ROWS = 64


@dataclass(frozen=True)
class Product:
    """A layer's shape and dtype, with weights that reveal the order of a sum.

    Columns ``BLOCK / 2`` and ``far`` apart are equal: large numbers cancel and leave rounding. Near columns reveal the
    order within a thread's part, far ones the order of parts.
    """

    width: int
    dtype: mx.Dtype
    outputs: int
    layer: Any
    layout: tuple[Any, ...]  # (group size, bits, mode), or empty if not quantised
    is_head: bool = False  # computed for a prompt's last position only

    def __str__(self) -> str:
        said = (
            f"products of {self.width} by {self.outputs} in {self.layout or self.dtype}"
        )
        if "bias" in self.layer:
            said += " with a bias"
        if self.is_head:
            said += " as a head"
        return said

    @property
    def far(self) -> int:
        """The columns between two equal halves; 0 without room."""
        unit = BLOCK
        if self.layout:
            group_size, *_ = self.layout
            unit = group_size if self.width >= 2 * group_size else BLOCK
        return self.width // 2 // unit * unit

    @property
    def call(self) -> Callable[[mx.array], mx.array]:
        """The layer with new weights."""
        columns = np.random.RandomState(self.width).standard_normal(
            (DIFFERENT, self.width)
        )
        blocks = _blocks(columns)
        blocks[:, :, 1] = blocks[:, :, 0]
        columns[:, : blocks[0].size] = blocks.reshape(DIFFERENT, -1)
        columns[:, self.far : 2 * self.far] = columns[:, : self.far]
        weight = mx.array(columns.astype(np.float32)).astype(self.dtype)
        which = mx.arange(self.outputs) % DIFFERENT
        twin: Any = clone_modules(self.layer, PLAIN)
        layout = self.layout
        parts = (
            mx.quantize(weight, group_size=layout[0], bits=layout[1], mode=layout[2])
            if layout
            else (weight,)
        )
        for name, part in zip(("weight", "scales", "biases"), parts, strict=False):
            # Materialised rows: CUDA has no quantised kernel for broadcast ones.
            twin[name] = part[which]
        if "bias" in twin:
            twin["bias"] = twin["bias"][: self.outputs]
        return twin.as_linear if isinstance(twin, TABLES) else twin

    def rows(self, count: int) -> mx.array:
        """Return rows (count, 1, width), equal at each call."""
        return mx.array(_rows(self.width, self.far, count)[:, None]).astype(self.dtype)


def products_of(model: nn.Module, most: int | None = None) -> list[Product]:
    """Return a product per shape and dtype of linear layers and tied heads.

    Args:
        most: The most weights of a product; an eighth for dtypes without BLAS. Larger ones lose outputs.
    """
    found: dict[tuple[Any, ...], Product] = {}
    for path, module in model.named_modules():
        if (product := _product_of(path, module, most)) is not None:
            key = (_plain_class(module), str(product), str(product.dtype))
            found.setdefault(key, product)
    return list(found.values())


#: (width, outputs, layout) of a product.
Shape: TypeAlias = tuple[int, int, tuple[Any, ...]]


def float32_products(shapes: Iterable[Shape], most: int | None = None) -> list[Product]:
    """Return products of ``recorded`` shapes; ``most`` as in ``products_of``."""
    return [
        Product(
            width, mx.float32, _cut(width, outputs, most), _plain_layer(layout), layout
        )
        for width, outputs, layout in dict.fromkeys(shapes)
    ]


def _plain_layer(layout: tuple[Any, ...]) -> nn.Module:
    if not layout:
        return nn.Linear(1, 1, bias=False)
    group_size, bits, mode = layout
    # as layers are in an adapter's copy
    kind: Any = operations.layers().get(nn.QuantizedLinear, nn.QuantizedLinear)
    layer: nn.Module = kind(
        group_size, 1, bias=False, group_size=group_size, bits=bits, mode=mode
    )
    return layer


_recording = threading.Lock()


@contextmanager
def recorded() -> Iterator[list[Shape]]:
    """Record this thread's products of float32 rows and a matrix (`@`, matmul, addmm, quantized_matmul), in layers or not.

    Models of half precision have such products, of their own weights' precision or not, and hide most of their bits by
    rounding. Weights do not tell.
    """
    found: list[Shape] = []
    thread = threading.get_ident()
    module: Any = mx

    def note(rows: mx.array, weight: mx.array, *layout: Any) -> None:
        if (
            threading.get_ident() == thread
            and weight.ndim == 2
            and mx.float32 in (rows.dtype, weight.dtype)
        ):
            width, outputs = weight.shape
            found.append(
                (outputs * 32 // layout[1], width, layout)
                if layout
                else (width, outputs, ())
            )

    def times(rows: mx.array, weight: mx.array, **how: Any) -> mx.array:
        note(rows, weight)
        return matmul(rows, weight, **how)

    def plus(
        bias: mx.array, rows: mx.array, weight: mx.array, *scales: Any, **how: Any
    ) -> mx.array:
        note(rows, weight)
        return addmm(bias, rows, weight, *scales, **how)

    def packed(rows: mx.array, weight: mx.array, *parts: Any, **how: Any) -> mx.array:
        # as layers do
        if how.get("transpose", True) and how.keys() >= {"group_size", "bits", "mode"}:
            note(rows, weight, how["group_size"], how["bits"], how["mode"])
        return quantized(rows, weight, *parts, **how)

    with _recording:
        operator, matmul = module.array.__matmul__, module.matmul
        addmm, quantized = module.addmm, module.quantized_matmul
        try:
            module.array.__matmul__ = module.matmul = times
            module.addmm, module.quantized_matmul = plus, packed
            yield found
        finally:
            module.array.__matmul__, module.matmul = operator, matmul
            module.addmm, module.quantized_matmul = addmm, quantized


def _product_of(path: str, module: Any, most: int | None) -> Product | None:
    if _plain_class(module) not in HELD:
        return None
    is_head = isinstance(module, TABLES) or path.endswith("lm_head")
    outputs, width = module.weight.shape
    dtype = module.weight.dtype
    layout: tuple[Any, ...] = ()
    if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        dtype = module.scales.dtype
        layout = (module.group_size, module.bits, module.mode)
        width = width * 32 // module.bits
    has_blas = dtype == mx.float32 and not layout
    limit = most if most is None or has_blas else most // 8
    return Product(width, dtype, _cut(width, outputs, limit), module, layout, is_head)


def _cut(width: int, outputs: int, most: int | None) -> int:
    """Return the outputs of a product of ``most`` weights."""
    if most is None or outputs * width <= most:
        return outputs
    return min(outputs, max(most // width // EDGE, 1) * EDGE + outputs % EDGE)


def _held(plain: Any) -> type:
    product = _method(plain)

    def held(layer: Any, rows: mx.array) -> mx.array:
        return in_numbers(partial(vars(plain)[product], layer), rows, layer.numbers)

    return type(f"Held{plain.__name__}", (plain,), {product: held, "numbers": ()})


def _method(kind: type) -> str:
    """Name the method of a class of layers that is its product."""
    return "as_linear" if issubclass(kind, TABLES) else "__call__"


#: Layer classes with a product -> the classes that hold it to row counts.
HELD: dict[type, type] = {kind: _held(kind) for kind in operations.PRODUCTS}
PLAIN = {held: plain for plain, held in HELD.items()}


def _plain_class(module: nn.Module) -> type:
    return PLAIN.get(type(module), type(module))


def hold_products(model: nn.Module, numbers: Mapping[str, Sequence[int]]) -> None:
    """Hold the named products of a private copy to row counts; free the others."""
    for path, module in model.named_modules():
        product = _product_of(path, module, None)
        if product is None:
            continue
        own = tuple(numbers.get(str(product), ()))
        plain = _plain_class(module)
        module.__class__ = HELD[plain] if own else plain
        module.__dict__.pop("numbers", None)
        if own:
            module.__dict__["numbers"] = own


class Turned(nn.Linear):
    """A linear layer over its transposed weight: graphs transpose nothing."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self.__dict__["turned"]
        return mx.addmm(self["bias"], x, weight) if "bias" in self else x @ weight


@contextmanager
def turned(model: nn.Module) -> Iterator[None]:
    """Let a private copy's linear layers be ``Turned`` meanwhile: the same bits."""
    layers: list[Any] = [
        module for module in model.modules() if type(module) is nn.Linear
    ]
    weights = [layer["weight"].T for layer in layers]
    mx.eval(weights)
    try:
        for layer, weight in zip(layers, weights, strict=True):
            layer.__class__, layer.__dict__["turned"] = Turned, weight
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear
            layer.__dict__.pop("turned", None)


@contextmanager
def watched(model: nn.Module) -> Iterator[list[mx.array]]:
    """Collect the rows that a private copy's products get meanwhile, in the order of the calls.

    Products round their rows in half precision and in TF32, and hide from the layers behind them what differs in the last
    bits.
    """
    found: list[mx.array] = []
    layers: list[Any] = []
    for module in model.modules():
        if _plain_class(module) in HELD:
            layers.append(module)
    before = list(map(type, layers))
    kinds = {kind: _watching(kind, found) for kind in set(before)}
    for layer in layers:
        layer.__class__ = kinds.get(type(layer), type(layer))
    try:
        yield found
    finally:
        for layer, kind in zip(layers, before, strict=True):
            layer.__class__ = kind


def _watching(kind: type, found: list[mx.array]) -> type:
    product = _method(kind)

    def watching(layer: Any, rows: mx.array) -> mx.array:
        found.append(rows)
        answer: mx.array = getattr(kind, product)(layer, rows)
        return answer

    return type(kind.__name__, (kind,), {product: watching})


def in_numbers(
    call: Callable[[mx.array], mx.array], rows: mx.array, numbers: Sequence[int]
) -> mx.array:
    """Compute a product of rows (R, ..., width) in one of the row counts ``numbers``, ascending.

    Rows are repeated up to a count or split. Prompts (over ``MOST_ROWS`` rows, or several per place) run unchanged.
    """
    count = rows.shape[0]
    has_one_each = rows.size == count * rows.shape[-1]
    if count in numbers or count > MOST_ROWS or not has_one_each:
        return call(rows)
    if count > numbers[-1]:
        parts = mx.split(rows, list(range(numbers[-1], count, numbers[-1])))
        return mx.concatenate([in_numbers(call, part, numbers) for part in parts])
    number = next(one for one in numbers if one > count)
    repeats = -(-number // count)
    filled = mx.broadcast_to(rows[None], (repeats, *rows.shape)).flatten(0, 1)
    return call(filled[:number])[:count]


@lru_cache(maxsize=8)
def _rows(width: int, far: int, count: int) -> np.ndarray:
    random = np.random.RandomState(width)
    rows = random.standard_normal((count, width)) / 64
    blocks = _blocks(rows)
    sizes = blocks[:, :, 0, ::2].shape
    large = np.exp2(random.uniform(8, 13, size=sizes)) * random.choice((-1, 1), sizes)
    blocks[:, :, 0, ::2], blocks[:, :, 1, ::2] = large, -large
    # in blocks: every second block has its opposite there instead of beside it
    far = far // BLOCK
    for block in range(1, far, 2):
        blocks[:, block, 1, ::2] = random.standard_normal((count, BLOCK // 4)) / 64
        blocks[:, block + far] = random.standard_normal((count, 2, BLOCK // 2)) / 64
        blocks[:, block + far, 0, ::2] = -blocks[:, block, 0, ::2]
    rows[:, : blocks[0].size] = blocks.reshape(count, -1)
    return rows.astype(np.float32)


def _blocks(rows: np.ndarray) -> np.ndarray:  # (R, width) -> (R, blocks, 2, BLOCK / 2)
    return rows[:, : rows.shape[1] // BLOCK * BLOCK].reshape(
        len(rows), -1, 2, BLOCK // 2
    )


def shapes_of(model: nn.Module) -> list[list[Any]]:
    flat: Any = tree_flatten(model.parameters())
    return sorted(
        [str(path), list(array.shape), str(array.dtype)] for path, array in flat
    )


def size_of(model: nn.Module) -> int:
    flat: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in flat)
