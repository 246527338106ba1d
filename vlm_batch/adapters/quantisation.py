"""A test run with a quantised KV cache."""

from __future__ import annotations

import warnings
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.errors import UnsupportedModel
from vlm_batch.records import Call

#: Two tokens of the smallest request, prefilled one after the other.
PROBE = (1, 2)


def check_quantisation(adapter: Adapter, kv: KVQuantisation) -> None:
    """Warn of layers that stay exact; refuse models without support.

    Raises:
        ValueError: Groups do not divide head widths.
        UnsupportedModel: Attention takes no quantised cache, or no layer attends fully.
    """
    family = adapter.spec.family
    if adapter.spec.max_rows is not None:
        raise UnsupportedModel(
            f"{family}: a model without a verified adapter is not run with kv_bits"
        )
    fresh = adapter.make_cache()
    count, total = kv.counts(fresh)
    if not count:
        raise UnsupportedModel(
            f"{family} has no layer of full attention, so there is nothing for kv_bits={kv.bits:g} to quantise: its "
            "sliding windows and recurrent states stay exact"
        )
    _run(adapter, fresh)
    kv.check_shapes(fresh)
    try:
        _run(
            adapter,
            adapter.make_cache(KVQuantisation(kv.bits, kv.group_size, kv.scheme)),
        )
    except Exception as error:
        raise UnsupportedModel(
            f"{family} cannot be run with kv_bits={kv.bits:g} ({kv.scheme}): its attention does not take quantised keys "
            f"and values ({type(error).__name__}: {error})"
        ) from error
    if count < total:
        last = f", with {kv.scheme} the last" if kv.leaves_last else ""
        warnings.warn(
            f"kv_bits={kv.bits:g}: {count} of {total} layers of {family} are quantised; the others (sliding windows, "
            f"recurrent states, cross-attention{last}) stay exact",
            stacklevel=4,
        )


def _run(adapter: Adapter, caches: list[Any]) -> None:
    encoded = adapter.encode(
        {"input_ids": mx.array([PROBE], dtype=mx.int32)}, Call(is_made_up=True)
    )
    logits = [adapter.prefill([encoded], caches, at, at + 1) for at in (0, 1)]
    mx.eval(logits, [cache.state for cache in caches])
