"""TurboQuant's codes lose more than they must.

With `kv_quant_scheme="turboquant"`, whatever the family. The adapters keep mlx-vlm's codebooks, so that rows have the same
numbers as there, and mend the norms.
"""

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import scaled_dot_product_attention
from mlx_vlm.turboquant import TurboQuantKVCache, _codebook
from tiny import case, report

DEPTH = 128
#: Middles of parts of [-1, 1], and how likely a number of a random direction is to lie there.
GRID = (np.arange(2**20) + 0.5) / 2**19 - 1
WEIGHTS = np.exp((DEPTH - 3) / 2 * np.log1p(-(GRID**2)))
WEIGHTS /= WEIGHTS.sum()
#: Sums up to each part, of weights and of weighted numbers.
MASS, MOMENT = (
    np.concatenate([[0], np.cumsum(one)]) for one in (WEIGHTS, WEIGHTS * GRID)
)


def loss(book):
    """The mean squared error of a number that is coded by a book."""
    nearest = np.searchsorted((book[1:] + book[:-1]) / 2, GRID)
    return (WEIGHTS * (GRID - book[nearest]) ** 2).sum()


def best(bits):
    """The codebook of Lloyd and Max: each number is the mean of what it stands for, and nothing moves any more."""
    share = np.cumsum(WEIGHTS ** (1 / 3))
    book = np.interp(
        (np.arange(1 << bits) + 0.5) / (1 << bits), share / share[-1], GRID
    )
    moved = 1.0
    while moved > 1e-9:
        inner = np.searchsorted(GRID, (book[1:] + book[:-1]) / 2)
        ends = np.concatenate([[0], inner, [len(GRID)]])
        means = np.diff(MOMENT[ends]) / np.diff(MASS[ends])
        moved, book = np.abs(means - book).max(), means
    return book


@case(at="turboquant.py:3662")
def codebooks():
    """The search for a codebook ends after 100 rounds, which is too early from 5 bits on.

    At 5, 6, 7 and 8 bits and heads of 128 numbers the mean squared error is 1.11, 1.57, 2.42 and 3.91 times that of the
    codebook at which the search comes to rest. Right: once, as up to 4 bits.
    """
    found = [
        loss(np.array(_codebook(DEPTH, bits), np.float64)) / loss(best(bits))
        for bits in range(2, 9)
    ]
    return np.round(found, 2), np.ones(7)


@case(at="turboquant.py:4308")
def norms():
    """A vector's norm is stored in float16. One above 65,504 is infinite there, and the answer is no number. Right: finite."""
    cache = TurboQuantKVCache(4)
    large = mx.ones((1, 2, 3, 64)) * 1e5
    cache.update_and_fetch(large, large)
    queries = mx.ones((1, 2, 1, 64)) * 1e-6
    found = scaled_dot_product_attention(
        queries, *cache.state, cache, scale=1.0, mask=None
    )
    return mx.isfinite(found).all().item(), True


if __name__ == "__main__":
    report()
